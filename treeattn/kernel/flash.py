"""flash-attn-jax's CUDA kernel (FlashAttention-2) behind the interface of `attend`.

The kernel returns (out, lse), which is a state (`from_output`). It knows neither masks nor
lengths; its variable-length form gives each row its number of keys. The derivative is that of
the blockwise form: the kernel's own knows no gradient of lse, which a merge needs.
"""

import ctypes
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp

from treeattn.idea.state import AttentionState, finalize, from_output
from treeattn.kernel.attend import attend_blockwise, varying_like

MAX_HEAD_DIM = 256


@functools.cache
def load():
    """The modules (flash_fwd, varlen_fwd) of flash-attn-jax.

    Raises ImportError, saying what to install, when it or the CUDA runtime is missing.
    """
    try:
        _load_cuda_runtime()
        from flash_attn_jax import flash_fwd, varlen_fwd
    except (ImportError, OSError) as error:
        raise ImportError(
            f"flash-attn-jax cannot be imported ({error}): pip install 'treeattn[flash]', on "
            "Linux x86-64 with Python 3.11 to 3.13"
        ) from error
    return flash_fwd, varlen_fwd


def _load_cuda_runtime() -> None:
    """Make libcudart.so.12 known before the kernel's library asks for it by name."""
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    for folder in spec.submodule_search_locations if spec else ():
        for path in Path(folder).glob("lib/libcudart.so.12*"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return


def obstacle(q, k, v, mask=None, bias=None) -> str | None:
    """Why the kernel cannot take these arguments, naming the argument; None if it can."""
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return f"q: the flash kernel takes float16 or bfloat16, got {q.dtype}"
    if v.shape[-1] != q.shape[-1]:
        return (
            f"v: the flash kernel expects the queries' head_dim, {q.shape[-1]}, got {v.shape[-1]}"
        )
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"q: the flash kernel takes a head_dim up to {MAX_HEAD_DIM}, got {q.shape[-1]}"
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            return f"{name}: the flash kernel takes none; use implementation='blockwise'"
    return None


def platform_of(x) -> str | None:
    """Where `x` is or will be computed on; None inside a mesh, which its owner has checked."""
    if isinstance(x, jax.core.Tracer):
        return None if not jax.sharding.get_abstract_mesh().empty else jax.default_backend()
    if isinstance(x, jax.Array):
        return next(iter(x.devices())).platform
    return jax.default_backend()


def resolve(implementation: str | None, q, k, v, mask=None, bias=None) -> str:
    """ "flash" or "blockwise": what `attend` will run for these arguments.

    Raises ValueError for another name, and for "flash" where the kernel cannot run.
    """
    if implementation not in (None, "blockwise", "flash"):
        raise ValueError(
            f"implementation: expected 'blockwise', 'flash' or None, got {implementation!r}"
        )
    if implementation == "blockwise":
        return implementation
    problem, platform = obstacle(q, k, v, mask, bias), platform_of(q)
    if implementation is None:
        on_cuda = (platform or jax.default_backend()) == "gpu"
        installed = on_cuda and importlib.util.find_spec("flash_attn_jax") is not None
        return "flash" if installed and problem is None else "blockwise"
    if problem is None and platform not in (None, "gpu"):
        problem = f"implementation: 'flash' needs CUDA devices, and q is on a {platform} device"
    if problem is not None:
        raise ValueError(problem)
    return implementation


def flash_attend(q, k, v, kv_lengths, scale: float, *, causal: bool = False) -> AttentionState:
    """`attend` by the CUDA kernel; with `causal`, query i sees keys 0 … i.

    Raises ValueError where `obstacle` finds one, or when a causal q is not as long as k.
    """
    if (problem := obstacle(q, k, v)) is not None:
        raise ValueError(problem)
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"q: expected as many queries as keys, {k.shape[1]}, got {q.shape[1]}")
    q, k, v = varying_like((q, k, v), q, k, v, kv_lengths)
    return _flash(q, k, v, kv_lengths, scale, causal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _flash(q, k, v, kv_lengths, scale, causal) -> AttentionState:
    b, l, h, _ = q.shape
    n = k.shape[1]
    if n == 0:
        state = AttentionState.identity((b, l, h), v.shape[-1], jnp.float32)
        return varying_like(state, q, k, v, kv_lengths)
    flash_fwd, varlen_fwd = load()
    options = {"softmax_scale": float(scale), "is_causal": causal}
    if kv_lengths is None:
        out, lse = flash_fwd.flash_mha_fwd(
            q, k, v, window_size_left=-1, window_size_right=-1, **options
        )
        lse = lse.transpose(0, 2, 1)  # (b, h, l) -> (b, l, h)
    else:
        # One packed sequence, two segments a row: its keys, and its padding, which no query sees.
        rows = jnp.arange(b, dtype=jnp.int32)
        lengths = jnp.clip(kv_lengths, 0, n).astype(jnp.int32)
        last = jnp.array([b], jnp.int32)
        starts_q = jnp.stack([rows * l, (rows + 1) * l], 1).ravel()
        starts_k = jnp.stack([rows * n, rows * n + lengths], 1).ravel()
        out, lse = varlen_fwd.flash_mha_varlen_fwd(
            *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
            jnp.concatenate([starts_q, last * l]),
            jnp.concatenate([starts_k, last * n]),
            max_seqlen_q=l,
            max_seqlen_k=n,
            **options,
        )
        out = out.reshape(q.shape)
        lse = lse[::2, :, :l].transpose(0, 2, 1)  # (2b, h, l) -> (b, l, h)
    out, lse = varying_like((out, lse), q, k, v, kv_lengths)
    return from_output(out, lse)


def _flash_forward(q, k, v, kv_lengths, scale, causal):
    return _flash(q, k, v, kv_lengths, scale, causal), (q, k, v, kv_lengths)


def _flash_backward(scale, causal, saved, cotangent):
    q, k, v, kv_lengths = saved
    mask = jnp.tri(q.shape[1], dtype=bool)[None, None] if causal else None

    def blockwise(q, k, v):
        state = attend_blockwise(q, k, v, mask, None, kv_lengths, scale)
        return from_output(*finalize(state))

    return *jax.vjp(blockwise, q, k, v)[1](cotangent), None


_flash.defvjp(_flash_forward, _flash_backward)
