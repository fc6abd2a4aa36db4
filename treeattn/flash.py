"""flash-attn-jax's CUDA kernel (FlashAttention-2) behind the interface of `attend`.

The kernel returns (out, lse), which is a state (`from_output`). It takes no mask, no bias and no
lengths. The derivative is that of blocks.py, because the kernel's own ignores the gradient of lse,
which a merge needs.

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
    """flash-attn-jax's module flash_fwd.

    Raises ImportError, with what to install, if it or the CUDA runtime is missing.
    """
    try:
        # The kernel's library looks for the CUDA runtime by name, and finds it if it is loaded.
        spec = importlib.util.find_spec("nvidia.cuda_runtime")
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in Path(folder).glob("lib/libcudart.so.12*"):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        from flash_attn_jax import flash_fwd  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:
        raise ImportError(
            f"flash-attn-jax cannot be imported ({error}): pip install 'treeattn[flash]', on "
            "Linux x86-64 with Python 3.11 to 3.13"
        ) from error
    return flash_fwd


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
    options = {"mask": inputs.mask, "bias": inputs.bias, "kv_lengths": inputs.lengths}
    for name, x in options.items():
        if x is not None:
            return f"{name}: the flash kernel takes none; use implementation='blockwise'"
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
    q = inputs.q
    q = q if inputs.traced_scale is None else (q * inputs.traced_scale).astype(q.dtype)
    out, lse = load().flash_mha_fwd(
        q,
        inputs.k,
        inputs.v,
        softmax_scale=inputs.scale,
        is_causal=inputs.causal,
        window_size_left=-1,  # no window
        window_size_right=-1,
    )
    return from_output(out, lse.transpose(0, 2, 1))  # lse comes as (b, h, l)


def _backward(inputs: Inputs, cotangent):
    """The inputs' cotangents, by the blockwise form of the same function."""

    def blockwise(inputs):
        return from_output(*finalize(attend_blockwise(inputs)))

    return jax.vjp(blockwise, inputs)[1](cotangent)


flash_attend.defvjp(lambda inputs: (flash_attend(inputs), inputs), _backward)
