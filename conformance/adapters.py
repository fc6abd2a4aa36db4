"""Other libraries' kernels and merges, with the signatures that treeattn_conformance expects.

    python conformance/adapters.py                     checks all whose libraries are installed
    python conformance/adapters.py flex flash_attn     checks these two

Each adapter converts axes and base, and adds options that the library lacks. An adapted kernel is
kernel(q, k, v, *, mask, kv_lengths, …) -> (out, lse), and an adapted merge is merge(parts) ->
(out, lse). Both take and return NumPy arrays, out (b, l, h, d) and a natural lse (b, l, h). The
other differences are the library's own, and `check_attention` and `check_merge` name them.
site/out_and_lse.md has the table.

torch_sdpa and flex were run on a CPU. The others were not run. In tests/test_adapters.py a stand-in
replaces each library, with the signature, axes and base that the library's source states.
"""

import importlib.util
import sys
import warnings

import numpy as np

from treeattn_conformance import check_attention, check_merge

LN2 = np.log(2)
DEVICE = "cuda"


def visible(
    q, k, *, mask=None, kv_lengths=None, query_positions=None, key_positions=None, window=None
):
    """(b, 1, l, n) bool: which keys a query sees, from any of the options."""
    l, n = q.shape[1], k.shape[1]
    seen = np.ones((q.shape[0], 1, q.shape[1], n), bool) if mask is None else mask
    if kv_lengths is not None:
        seen = seen & (np.arange(n) < kv_lengths[:, None])[:, None, None]
    if query_positions is not None:
        seen = seen & (key_positions <= query_positions[:, None])
    if window is not None:
        queries = np.arange(n - l, n) if query_positions is None else query_positions
        keys = np.arange(n) if key_positions is None else key_positions
        before = queries[:, None] - keys
        seen = seen & (before >= 0) & (before < window)
    return seen


def without(options, *names):
    """Skip a question about options that the library does not have."""
    for name in names or options:
        if name in options:
            raise NotImplementedError(name)


def same_dimension(k, v):
    """Skip a question whose values have another dimension than its keys, as in MLA."""
    if v.shape[-1] != k.shape[-1]:
        raise NotImplementedError("values of another dimension than the keys'")


# PyTorch


def torch_sdpa(q, k, v, *, scale=None, **options):
    """PyTorch's private operator for scaled_dot_product_attention on a CPU."""
    import torch

    without(options, "sinks")
    same_dimension(k, v)
    seen = torch.from_numpy(visible(q, k, **options))
    heads = q.shape[2] // k.shape[2]
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -float("inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias, scale=scale
    )
    return out.transpose(1, 2).numpy(), lse.transpose(1, 2).numpy()


def flex(q, k, v, *, scale=None, **options):
    """PyTorch's flex_attention, eager. Before 2.9, return_aux was return_lse=True."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    without(options, "sinks")
    seen = torch.from_numpy(visible(q, k, **options))

    def hide(score, b, h, i, j):
        return torch.where(seen[b, 0, i, j], score, -float("inf"))

    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    aux = AuxRequest(lse=True)
    out, aux = flex_attention(q, k, v, score_mod=hide, scale=scale, enable_gqa=True, return_aux=aux)
    return out.transpose(1, 2).numpy(), aux.lse.transpose(1, 2).numpy()


# FlashAttention: in bfloat16, on a GPU


def flash_attn(q, k, v, *, scale=None, kv_lengths=None, **options):
    """flash-attn 2, its kernel for caches. Not run. lse comes as (b, h, l).

    https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py
    """
    import torch
    from flash_attn import flash_attn_with_kvcache

    without(options)
    lengths = None if kv_lengths is None else torch.from_numpy(kv_lengths).int().to(DEVICE)
    q, k, v = (torch.from_numpy(x).bfloat16().to(DEVICE) for x in (q, k, v))
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, softmax_scale=scale, return_softmax_lse=True
    )
    return out.float().cpu().numpy(), lse.transpose(1, 2).cpu().numpy()


def flash_attn_jax(q, k, v, *, scale=None, **options):
    """flash-attn-jax 0.6.2. Not run: a CPU can only lower it. lse comes as (b, h, l).

    https://github.com/nshepperd/flash_attn_jax/blob/main/src/flash_attn_jax/flash_fwd.py
    """
    import jax.numpy as jnp
    from flash_attn_jax.flash_fwd import flash_mha_fwd

    without(options)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = flash_mha_fwd(
        q, k, v, softmax_scale=scale, window_size_left=-1, window_size_right=-1
    )
    return np.asarray(out, np.float32), np.asarray(lse).swapaxes(1, 2)


# Merges: of a list, or of two and folded over a list


def folded(merge_two):
    """merge(parts) of a merge of (out, lse) and (out, lse), from left to right."""

    def merge(parts):
        out, lse = parts[0]
        for other in parts[1:]:
            out, lse = merge_two(out, lse, *other)
        return out, lse

    return merge


def packed(out, lse):
    """(n, h, d) and (n, h) on the device: serving systems have no batch, only tokens."""
    import torch

    out, lse = (torch.from_numpy(np.ascontiguousarray(x)) for x in (out, lse))
    return out.flatten(0, 1).to(DEVICE), lse.flatten(0, 1).to(DEVICE)


def unpacked(out, lse, shape):
    """Back to (b, l, h, d) and (b, l, h)."""
    return out.float().cpu().numpy().reshape(*shape, -1), lse.cpu().numpy().reshape(shape)


def flashinfer_merge(parts):
    """FlashInfer's merge_states. Not run. lse in base 2, out in 16 bits, d of at least 64.

    https://github.com/flashinfer-ai/flashinfer/blob/main/flashinfer/cascade.py
    """
    import torch
    from flashinfer import merge_states

    d = parts[0][0].shape[-1]
    wide = [(0, 0)] * 3 + [(0, max(64 - d, 0))]
    pairs = [packed(np.pad(out, wide), lse / LN2) for out, lse in parts]
    outs, lses = (torch.stack(x, dim=1) for x in zip(*pairs, strict=True))
    out, lse = unpacked(*merge_states(outs.bfloat16(), lses.float()), parts[0][1].shape)
    return out[..., :d], lse * np.float32(LN2)


@folded
def vllm_merge(out, lse, other_out, other_lse):
    """vLLM's merge_attn_states. Not run. lse is (h, n). It writes its results into arguments.

    https://github.com/vllm-project/vllm/blob/main/vllm/v1/attention/ops/merge_attn_states.py
    """
    import torch
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    (a, a_lse), (b, b_lse) = packed(out, lse), packed(other_out, other_lse)
    a_lse, b_lse = a_lse.T.contiguous(), b_lse.T.contiguous()
    merged, merged_lse = torch.empty_like(a), torch.empty_like(a_lse)
    merge_attn_states(merged, a, a_lse, b, b_lse, merged_lse)
    return unpacked(merged, merged_lse.T, lse.shape)


@folded
def sglang_merge(out, lse, other_out, other_lse):
    """SGLang's merge_state in Triton. Not run. lse is (n, h), with tokens first.

    https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/layers/attention/triton_ops
    """
    from sglang.srt.layers.attention.triton_ops.merge_state import merge_state

    merged = merge_state(*packed(out, lse), *packed(other_out, other_lse))
    return unpacked(*merged, lse.shape)


@folded
def gym_merge(out, lse, other_out, other_lse):
    """attention-gym's merge_attention. Not run. out is (b, h, l, d), and lse (b, h, l).

    https://github.com/meta-pytorch/attention-gym/pull/205
    """
    import torch
    from attn_gym.utils import merge_attention

    arguments = (torch.from_numpy(x.swapaxes(1, 2)) for x in (out, lse, other_out, other_lse))
    merged, merged_lse = merge_attention(*arguments)
    return merged.transpose(1, 2).numpy(), merged_lse.transpose(1, 2).numpy()


# {adapter: (the module that it needs, its check)}
ADAPTERS = {
    "torch_sdpa": ("torch", lambda: check_attention(torch_sdpa)),
    "flex": ("torch", lambda: check_attention(flex)),
    "flash_attn": ("flash_attn", lambda: check_attention(flash_attn, dtype="bfloat16")),
    "flash_attn_jax": ("flash_attn_jax", lambda: check_attention(flash_attn_jax, dtype="bfloat16")),
    "flashinfer_merge": ("flashinfer", lambda: check_merge(flashinfer_merge, dtype="bfloat16")),
    "vllm_merge": ("vllm", lambda: check_merge(vllm_merge)),
    "sglang_merge": ("sglang", lambda: check_merge(sglang_merge)),
    "gym_merge": ("attn_gym", lambda: check_merge(gym_merge)),
}


def main(names) -> None:
    for name in names or ADAPTERS:
        module, check = ADAPTERS[name]
        if importlib.util.find_spec(module) is None:
            print(f"{name}: {module} is not installed\n")
        else:
            print(f"{name}\n{check()}\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    main(sys.argv[1:])
