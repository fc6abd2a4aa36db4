"""Other libraries' kernels as `implementation=` of attend, tree_decode and a Llama.

    python examples/kernels.py                     those whose libraries are installed
    python examples/kernels.py jax_nn of_numpy     these

A kernel is kernel(q, k, v, *, scale, …) -> (out, lse), or an AttentionState. It has parameters for
what its library can do, out of mask, bias, kv_lengths and causal; a call that asks for more is
refused by its name. `treeattn.attend` says what is promised, site/out_and_lse.md who returns what.

of_numpy, jax_nn and jax_decode are run by tests/test_hook.py, on a CPU, over eight devices too. The
others were not run: they say what their sources say, at the versions that are named.
"""

import functools
import importlib.util
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from treeattn import AttentionState, attend, finalize
from treeattn_conformance import attend as numpy_attention
from treeattn_conformance import check_attention

# What runs anywhere


def of_numpy(q, k, v, *, scale, mask=None, kv_lengths=None):
    """A function of NumPy arrays, called from within the program: here the suite's own reference.

    In the same way: a kernel of PyTorch's. All that it takes goes through the host's memory.
    """

    def on_host(q, k, v, scale, options):
        arrays = (np.asarray(x, np.float64) for x in (q, k, v))
        out, lse = numpy_attention(*arrays, scale=float(scale), **jax.tree.map(np.asarray, options))
        return out.astype(np.float32), lse.astype(np.float32)

    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), jnp.float32)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    options = {"mask": mask, "kv_lengths": kv_lengths}
    options = {name: x for name, x in options.items() if x is not None}
    return jax.pure_callback(on_host, (out, lse), q, k, v, scale, options)


def jax_nn(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False):
    """jax.nn.dot_product_attention. In float32: it rounds lse to the keys' dtype.

    A query without keys gets the mean of v and a very low lse, which is put right here. Its lse has
    no gradient, so that a merge has a wrong one.
    """
    out, lse = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=kv_lengths,
        implementation="xla",
        return_residual=True,
    )
    return out, jnp.where(lse < -1e37, -jnp.inf, lse)


def jax_decode(q, k, v, *, scale, kv_lengths=None):
    """JAX's split-K kernel in Pallas's Triton, deprecated; interpreted on a CPU.

    It takes one query, of any number of heads: several queries are as many heads more. Numbers of
    keys have to be multiples of its blocks. It can return sums and not their quotient, which are a
    state; without keys its pivot is a very low number.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.decode_attention import gqa

    b, l, h, d = q.shape
    n, h_kv = k.shape[1:3]
    lengths = jnp.full(b, n, jnp.int32) if kv_lengths is None else kv_lengths
    k, v = (jnp.pad(x, ((0, 0), (0, -n % 64), (0, 0), (0, 0))) for x in (k, v))
    run = functools.partial(gqa, k_splits=1, block_k=64, sm_scale=scale, num_warps=4)
    numerator, (denominator, m) = run(
        q.reshape(b, l, h_kv, -1, d).swapaxes(1, 2).reshape(b, -1, d),
        k,
        v,
        kv_seq_len=lengths,
        interpret=jax.default_backend() == "cpu",
        return_residuals=True,
        normalize_output=False,
    )
    m = jnp.where(denominator == 0, -jnp.inf, m)
    state = AttentionState(m, denominator, numerator.astype(jnp.float32))

    def by_query(x):
        rest = x.shape[2:]
        return x.reshape(b, h_kv, l, -1, *rest).swapaxes(1, 2).reshape(b, l, h, *rest)

    return jax.tree.map(by_query, state)


# In half precision, on a GPU: not run


def cudnn(q, k, v, *, scale, bias=None, mask=None, kv_lengths=None):
    """cuDNN's, as JAX calls it. Not run. lse comes as (b, h, l), natural, in float32.

    What is public, jax.nn.dot_product_attention, rounds this lse to q's dtype; so this asks JAX's
    own parts, which may move. jax/_src/cudnn/fused_attention_stablehlo.py, jax 0.11.2
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    kind = MaskType.NO_MASK if kv_lengths is None else MaskType.PADDING
    queries = None if kv_lengths is None else jnp.full(len(q), q.shape[1], jnp.int32)
    out, lse = dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        queries,
        kv_lengths,
        scale=scale,
        mask_type=kind,
        return_residual=True,
    )
    return out, lse.swapaxes(1, 2)


def flash_attn3(q, k, v, *, scale, causal=False):
    """FlashAttention-3 by flash-attn3-jax. Not run. lse comes as (b, h, l), natural, in float32.

    https://github.com/rhaps0dy/flash-attn3-jax/blob/e05f9ed54e93/src/flash_attn3_jax/flash_hlo.py
    """
    from flash_attn3_jax.flash_hlo import _flash_mha_fwd_hlo

    out, lse = _flash_mha_fwd_hlo(q, k, v, scale, causal, (-1, -1))
    return out, lse.swapaxes(1, 2)


def flashinfer(q, k, v, *, scale, kv_lengths=None, causal=False):
    """FlashInfer's, which takes PyTorch's arrays, row by row. Not run. Not within `jax.jit`.

    lse is to base 2, (l, h). https://github.com/flashinfer-ai/flashinfer/pull/5257
    """
    import torch
    from flashinfer import single_prefill_with_kv_cache

    lengths = [k.shape[1]] * len(q) if kv_lengths is None else np.asarray(kv_lengths).tolist()
    rows = []
    for row, n in zip(zip(q, k, v, strict=True), lengths, strict=True):
        query, keys, values = (torch.from_dlpack(x) for x in row)
        out, lse = single_prefill_with_kv_cache(
            query, keys[:n], values[:n], causal=causal, sm_scale=scale, return_lse=True
        )
        rows.append((jnp.from_dlpack(out), jnp.from_dlpack(lse) * np.log(2)))
    out, lse = (jnp.stack(x) for x in zip(*rows, strict=True))
    return out, lse


def tokamax(q, k, v, *, scale, mask=None, bias=None, causal=False):
    """tokamax's. Not run. Beside out, m and the denominator, each (b, h, l), natural.

    What is public returns no residuals; the operations behind it do, and may move.
    https://github.com/openxla/tokamax/blob/3e3d5cd5a160/tokamax/_src/ops/attention/base.py
    """
    from tokamax._src.ops.attention.api import IMPLEMENTATIONS

    run = IMPLEMENTATIONS["triton" if jax.default_backend() == "gpu" else "xla"]
    options = {"mask": mask, "bias": bias, "is_causal": causal, "logits_scale": scale}
    out, (m, denominator) = run(q, k, v, return_residuals=True, **options)
    lse = jnp.where(denominator == 0, -jnp.inf, m + jnp.log(denominator))
    return out, lse.astype(jnp.float32).swapaxes(1, 2)


# A kernel, the module that it needs, where it runs, and the dtype to ask it in.
KERNELS = {
    "of_numpy": (of_numpy, "numpy", "cpu", "float32"),
    "jax_nn": (jax_nn, "jax", "cpu", "float32"),
    "jax_decode": (jax_decode, "jax", "cpu", "float32"),
    "cudnn": (cudnn, "jax", "gpu", "bfloat16"),
    "flash_attn3": (flash_attn3, "flash_attn3_jax", "gpu", "bfloat16"),
    "flashinfer": (flashinfer, "flashinfer", "gpu", "bfloat16"),
    "tokamax": (tokamax, "tokamax", "cpu", "float32"),
}


def why_not(name: str) -> str | None:
    """What the kernel of that name lacks here; None where it can be tried."""
    _, module, backend, _ = KERNELS[name]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if backend == "gpu" and jax.default_backend() != "gpu":
        return "needs a GPU"
    return None


def asked(kernel, dtype: str):
    """The kernel as `check_attention` asks for it, by way of `attend`."""

    def ask(q, k, v, **options):
        if unknown := set(options) - {"mask", "kv_lengths", "scale"}:
            raise NotImplementedError(", ".join(sorted(unknown)))
        arrays = (jnp.asarray(x, dtype) for x in (q, k, v))
        try:
            return finalize(attend(*arrays, **options, implementation=kernel))
        except ValueError as refused:  # an option that it does not take
            raise NotImplementedError(refused) from None

    return ask


def main(names) -> None:
    for name in names or KERNELS:
        if (why := why_not(name)) is not None:
            print(f"{name}: {why}\n")
            continue
        kernel, _, _, dtype = KERNELS[name]
        print(f"{name}\n{check_attention(asked(kernel, dtype), dtype=dtype)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
