"""Small random Llamas in Hugging Face's format, with the logits that transformers computes.

    pip install torch transformers
    python tests/data/make_llamas.py

writes tests/data/llamas/NAME/ (config.json, safetensors, expected.npz). The weights are random
but not small, so that every feature moves the logits.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "llamas"

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (what differs from SMALL, the weights' dtype, the largest size of a file)
MODELS = {
    "llama2": ({"num_key_value_heads": 4}, torch.float32, "1GB"),
    "llama3": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        torch.float32,
        "1GB",
    ),
    "llama31": ({"rope_parameters": LLAMA_3}, torch.bfloat16, "20KB"),
    "llama32": (
        {"rope_parameters": LLAMA_3, "tie_word_embeddings": True, "head_dim": 16},
        torch.float16,
        "1GB",
    ),
    "biased": ({"attention_bias": True, "mlp_bias": True}, torch.float32, "30KB"),
    "linear": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        torch.float32,
        "1GB",
    ),
}


def make(name: str) -> None:
    changes, dtype, shard = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    model = LlamaForCausalLM(LlamaConfig(**SMALL | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            one = parameter.mean().round() if parameter.ndim == 1 else 0.0  # norms start at 1
            parameter.copy_(one + 0.2 * torch.randn_like(parameter))
    model = model.to(dtype)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)

    tokens = torch.randint(
        0, SMALL["vocab_size"], (2, 96), generator=torch.Generator().manual_seed(1)
    )
    # Read back, rather than cast: that keeps the rotary frequencies in float32.
    as_stored, in_float32 = (
        LlamaForCausalLM.from_pretrained(folder, dtype=d)(tokens).logits.detach().float().numpy()
        for d in (dtype, torch.float32)
    )
    kept = slice(0, None, 5)  # every fifth position is enough to tell
    expected = {"tokens": tokens.numpy().astype(np.int8), "logits": in_float32[:, kept]}
    if dtype != torch.float32:
        expected["logits_as_stored"] = as_stored[:, kept].astype(np.float16)
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    for name in MODELS:
        make(name)
