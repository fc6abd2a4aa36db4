"""Log-probabilities and gradients by transformers and torch: test_torch_gradients.py's reference.

    pip install torch transformers          # the file in place: 2.13.0 and 5.23.0
    python labs/training/tests/make_torch_gradients.py

writes torch_gradients.npz beside this file: rows, weights of their log-probabilities in a loss, the
log-probabilities, and the loss's gradients, in float64 where transformers computes in float64. It
computes norms and rotary angles in float32 for every dtype.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

HERE = Path(__file__).parent
MODEL = HERE.parents[2] / "llama" / "tests" / "data" / "llamas" / "llama32"
FIELDS = {  # of a layer here: of a layer in transformers
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def random_rows(rng, vocabulary: int) -> list[list[int]]:
    """A prompt, answers that part late, two equal rows, and one that begins another."""
    prompt = rng.integers(0, vocabulary, 9).tolist()
    rows = [prompt + rng.integers(0, vocabulary, n).tolist() for n in (7, 4, 7)]
    return [*rows, rows[0][:12] + rng.integers(0, vocabulary, 5).tolist(), rows[1], rows[2][:11]]


def main() -> None:
    model = LlamaForCausalLM.from_pretrained(
        MODEL, dtype=torch.float64, attn_implementation="eager"
    )
    rng = np.random.default_rng(0)
    rows = random_rows(rng, model.config.vocab_size)
    longest = max(map(len, rows))
    weights = rng.normal(size=(len(rows), longest - 1))
    found = np.zeros_like(weights)
    for i, row in enumerate(rows):  # each by itself, without padding
        logits = model(torch.tensor([row])).logits[0, :-1]
        each = torch.log_softmax(logits, dim=-1)[range(len(row) - 1), row[1:]]
        (each * torch.from_numpy(weights[i, : len(each)])).sum().backward()
        found[i, : len(each)] = each.detach().numpy()
    gradients = {name: x.grad.numpy() for name, x in model.named_parameters()}
    stored = {"embedding": gradients["model.embed_tokens.weight"]}
    stored["norm"] = gradients["model.norm.weight"]
    for i in range(model.config.num_hidden_layers):
        for field, parts in FIELDS.items():
            names = [f"model.layers.{i}.{part}.weight" for part in parts]
            stored[f"{field} {i}"] = np.concatenate([gradients[name] for name in names])
    stored = {name: x.astype(np.float32) for name, x in stored.items()}
    tokens = np.array([row + [-1] * (longest - len(row)) for row in rows], np.int8)
    about = {"rows": tokens, "weights": weights, "log_probs": found}
    np.savez_compressed(HERE / "torch_gradients.npz", **about, **stored)


if __name__ == "__main__":
    main()
