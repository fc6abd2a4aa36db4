"""Attention over shards of the cache in a model of Hugging Face transformers, in PyTorch.

    python examples/with_transformers.py [folder or name of a model]

transformers takes an attention function by name. This one cuts the cache into shards, as devices
would hold them, attends to each by itself, and merges the pairs (out, lse). If you have
devices, replace `attend` by a kernel that returns lse, and the loop by a collective.
The greedy text and the logits are compared with those of the model's own attention. Without a
model's name, a small Llama with random weights is made.
"""

import argparse

import numpy as np

try:
    import torch
    from transformers import (
        AttentionInterface,
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}: pip install torch transformers") from None

from treeattn_conformance import check_attention, check_merge

SHARDS = 4


def attend(q, k, v, seen, scale):
    """Stands for your kernel: (out, lse) of all queries over one shard's keys.

    q (b, h, l, d), k and v (b, h, n, d), seen (b, 1, l, n) of bool or None. lse (b, h, l), float32.
    """
    s = (q @ k.transpose(-1, -2)).float() * scale
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    pivot = torch.where(lse.isinf(), 0, lse)  # no keys: weights of 0, not NaN
    return (s - pivot[..., None]).exp() @ v.float(), lse


def merge(parts):
    """(out, lse) of the keys of all shards; a pair with an lse of ±∞ has no keys."""
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    lses = torch.where(lses.isinf(), -torch.inf, lses)
    outs = torch.where(lses.isinf()[..., None], 0, outs)  # and not an unwritten number
    lse = lses.logsumexp(0)
    weights = (lses - torch.where(lse.isinf(), 0, lse)).exp()
    return (outs * weights[..., None]).sum(0), lse


def over_shards(module, query, key, value, attention_mask, scaling=None, **_):
    """The function that transformers calls: query (b, h, l, d), key and value (b, h_kv, n, d).

    The mask is of bool, True where a query sees a key, or None if each query sees all keys up to
    its own. Returns out (b, l, h, d), and None in place of the weights, which are never computed.
    """
    l, n = query.shape[2], key.shape[2]
    if attention_mask is None and l > 1:
        attention_mask = torch.ones(l, n, dtype=torch.bool).tril(n - l)[None, None]
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for at in torch.arange(n).tensor_split(SHARDS):  # some have no keys while n is small
        seen = None if attention_mask is None else attention_mask[..., at]
        parts.append(attend(query, key[:, :, at], value[:, :, at], seen, scale))
    out, _ = merge(parts)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("over_shards", over_shards)
AttentionMaskInterface.register("over_shards", sdpa_mask)  # a mask of bool


def conforms() -> bool:
    """Do the kernel and the merge, as they stand above, pass the suite?"""

    def kernel(q, k, v, *, mask=None, scale=None, **options):
        if options or q.shape[2] != k.shape[2]:
            raise NotImplementedError("masks only")
        q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
        seen = None if mask is None else torch.from_numpy(mask)
        out, lse = attend(q, k, v, seen, q.shape[-1] ** -0.5 if scale is None else scale)
        return out.transpose(1, 2).numpy(), lse.transpose(1, 2).numpy()

    def merge_arrays(parts):
        out, lse = merge([[torch.from_numpy(np.array(x)) for x in part] for part in parts])
        return out.numpy(), lse.numpy()

    reports = check_attention(kernel), check_merge(merge_arrays)
    return not any(report.names("failed") for report in reports)


def model_of(name: str | None):
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@torch.no_grad()
def main(name: str | None = None) -> None:
    model = model_of(name)
    prompts = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 0, 12, 13, 14]])
    mask = torch.ones_like(prompts)
    mask[1, :4] = 0  # the second text is shorter, and begins later
    found = {}
    for attention in ("eager", "over_shards"):
        model.set_attn_implementation(attention)
        texts = model.generate(
            prompts, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        seen = torch.cat([mask, torch.ones(2, texts.shape[1] - 7, dtype=mask.dtype)], dim=1)
        logits = model(texts, attention_mask=seen).logits
        found[attention] = texts, logits[seen.bool()]
    (texts, logits), (our_texts, our_logits) = found.values()
    same = texts.equal(our_texts)
    close = same and torch.allclose(logits, our_logits, rtol=1e-4, atol=1e-4)
    print(f"conforms: {conforms()}")
    print(f"{texts.shape[1] - 7} tokens of 2 texts, {SHARDS} shards, the same: {same}")
    print(f"logits, allclose: {close}")


if __name__ == "__main__":
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("model", nargs="?", help="a folder, or a name on the hub")
    main(parser.parse_args().model)
