"""flash-attn-jax's CUDA kernel (FlashAttention-2) behind the interface of `attend`.

The kernel returns (out, lse), which is a state (`from_output`). It takes no mask and no bias. With
lengths, the kernel's variable-length form is used instead. The derivative is that of blocks.py,
because the kernel's own ignores the gradient of lse, which a merge needs.

This file was never run on a GPU; the tests lower the kernel for CUDA.
"""

import ctypes
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp

from treeattn.blocks import attend_blockwise
from treeattn.inputs import Inputs
from treeattn.products import compiled_for
from treeattn.state import AttentionState, finalize, from_output

MAX_HEAD_DIM = 256
LONG_TEXT = 128  # more queries than this use the kernel by default; a guess, never measured


@functools.cache
def load():
    """The modules (flash_fwd, varlen_fwd) of flash-attn-jax.

    Raises ImportError, with what to install, if it or the CUDA runtime is missing.
    """
    try:
        # The kernel's library looks for the CUDA runtime by name, and finds it if it is loaded.
        spec = importlib.util.find_spec("nvidia.cuda_runtime")
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in Path(folder).glob("lib/libcudart.so.12*"):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        from flash_attn_jax import flash_fwd, varlen_fwd  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:
        raise ImportError(
            f"flash-attn-jax cannot be imported ({error}): pip install 'treeattn[flash]', on "
            "Linux x86-64 with Python 3.11 to 3.13"
        ) from error
    return flash_fwd, varlen_fwd


def check_device(q) -> None:
    """Raise ValueError if `q` is on a device that is not CUDA's; a traced q is on none yet."""
    if isinstance(q, jax.core.Tracer):
        return
    device, *_ = jnp.asarray(q).devices()
    if device.platform not in ("gpu", "cuda"):
        raise ValueError(
            f"implementation: 'flash' needs a CUDA device, got a {device.platform} device"
        )


def why_not(inputs: Inputs) -> str | None:
    """Why the kernel cannot compute this, naming the argument; None if it can."""
    q, v = inputs.q, inputs.v
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return f"q: the flash kernel takes float16 or bfloat16, got {q.dtype}"
    if inputs.k.dtype != q.dtype:
        return f"k: the flash kernel takes the queries' dtype, {q.dtype}, got {inputs.k.dtype}"
    if v.shape[-1] != q.shape[-1]:
        return (
            f"v: the flash kernel expects the queries' head_dim, {q.shape[-1]}, got {v.shape[-1]}"
        )
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"q: the flash kernel takes a head_dim up to {MAX_HEAD_DIM}, got {q.shape[-1]}"
    for name, x in (("mask", inputs.mask), ("bias", inputs.bias)):
        if x is not None:
            return f"{name}: the flash kernel takes none; use implementation='blockwise'"
    if inputs.causal and inputs.lengths is not None:
        return "kv_lengths: the flash kernel takes none with causal=True"
    return None


def is_best(inputs: Inputs) -> bool:
    """Whether to use the kernel by default: for a long text on a GPU, if it can run."""
    if compiled_for() != "gpu" or inputs.q.shape[1] <= LONG_TEXT:
        return False
    return importlib.util.find_spec("flash_attn_jax") is not None and why_not(inputs) is None


@jax.custom_vjp
def flash_attend(inputs: Inputs) -> AttentionState:
    """The state by the CUDA kernel, for inputs that it can compute (`why_not` gives None).

    The kernel's scale is compiled into the program. `inputs.traced_scale` cannot be. It multiplies
    the queries, and the products are rounded to the queries' dtype.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    q = q if inputs.traced_scale is None else (q * inputs.traced_scale).astype(q.dtype)
    options = {"softmax_scale": inputs.scale, "is_causal": inputs.causal}
    if inputs.lengths is not None:
        return from_output(*_variable_lengths(q, k, v, inputs.lengths, options))
    flash_fwd, _ = load()
    out, lse = flash_fwd.flash_mha_fwd(
        q, k, v, window_size_left=-1, window_size_right=-1, **options
    )
    return from_output(out, lse.transpose(0, 2, 1))  # lse comes as (b, h, l)


def _variable_lengths(q, k, v, lengths, options):
    """(out, lse) of texts of different lengths, as one packed sequence.

    Each text is two segments: its keys with its queries, and its padding without queries. The
    cumulative queries are 0, l, l, 2l, 2l, …, the cumulative keys 0, len₀, n, n + len₁, 2n, …
    """
    b, l = q.shape[:2]
    n = k.shape[1]
    text = jnp.arange(b, dtype=jnp.int32)
    end = jnp.array([b], jnp.int32)
    starts_q = jnp.stack([text * l, (text + 1) * l], axis=1).ravel()
    starts_k = jnp.stack([text * n, text * n + lengths], axis=1).ravel()
    _, varlen_fwd = load()
    out, lse = varlen_fwd.flash_mha_varlen_fwd(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
        jnp.concatenate([starts_q, end * l]),
        jnp.concatenate([starts_k, end * n]),
        max_seqlen_q=l,
        max_seqlen_k=n,
        **options,
    )
    lse = lse[::2, :, :l]  # (2b, h, l): every other segment has the queries
    return out.reshape(q.shape), lse.transpose(0, 2, 1)


def _backward(inputs: Inputs, cotangent):
    """The inputs' cotangents, by the blockwise form of the same function."""

    def blockwise(inputs):
        return from_output(*finalize(attend_blockwise(inputs)))

    return jax.vjp(blockwise, inputs)[1](cotangent)


flash_attend.defvjp(lambda inputs: (flash_attend(inputs), inputs), _backward)
