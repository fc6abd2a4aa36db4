"""Guessed tokens as a prefix tree, verified in one pass of a model of Hugging Face transformers.

    python examples/tree_with_transformers.py [folder or name of a model]

`pack` makes the tree of all guesses. transformers takes its mask with four axes, True where a token
sees a key, and its positions. Afterwards the cache is cut to the accepted path. The text is the
model's own greedy text. Without a name a small random Llama is made. Run with transformers 5.24.
"""

import argparse

import numpy as np

try:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}: pip install torch transformers") from None

from treeattn import pack, unpack


def guesses(text, candidates=3, width=6):
    """(1, candidates, width): the last token, and what followed it at earlier places; −1 pads."""
    beam = np.full((1, candidates, width), -1)
    beam[..., 0] = text[-1]
    places = [i for i in range(len(text) - 1, 0, -1) if text[i - 1] == text[-1]]
    for row, i in zip(beam[0], places, strict=False):
        guess = text[i : i + width - 1]
        row[1 : 1 + len(guess)] = guess
    return beam


def verify(model, cache, beam):
    """The tokens that the model writes after beam[..., 0], one or more."""
    context = cache.get_seq_length()
    tokens, mask, offsets, places = (np.asarray(x) for x in pack(beam, (beam >= 0).sum(axis=2)))
    sees = np.concatenate([np.ones((*mask.shape[:2], context), bool), mask], axis=2)[:, None]
    logits = model(
        torch.tensor(tokens),
        attention_mask=torch.tensor(sees),
        position_ids=torch.tensor(context + offsets),
        past_key_values=cache,
    ).logits
    written = np.asarray(unpack(logits.argmax(-1).numpy(), places))[0]
    right = np.cumprod(beam[0, :, 1:] == written[:, :-1], axis=1).sum(axis=1)
    best, n = right.argmax(), right.max() + 1  # n: right guesses, and the model's own token
    path = places[0, best, :n]
    keep = torch.tensor([*range(context), *(context + path)])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
    return written[best, :n].tolist()


@torch.no_grad()
def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="of Hugging Face, or its folder")
    name = parser.parse_args(argv).model
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    config = LlamaConfig(**small, **heads, initializer_range=0.2)
    model = AutoModelForCausalLM.from_pretrained(name) if name else LlamaForCausalLM(config)
    model.eval().set_attn_implementation("sdpa")

    prompt, new = [5, 6, 7, 8, 5, 6, 9], 60
    cache, calls = DynamicCache(), 0
    logits = model(torch.tensor([prompt]), past_key_values=cache).logits
    text = [*prompt, int(logits[0, -1].argmax())]
    while len(text) < len(prompt) + new:
        text += verify(model, cache, guesses(text))
        calls += 1
    own = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    same = own[0].tolist() == text[: own.shape[1]]
    print(f"{new} tokens, the same: {same}; {calls} calls instead of {new - 1}")


if __name__ == "__main__":
    main()
