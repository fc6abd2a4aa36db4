"""Checks of each kernel on the present device, against dense attention in float64."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn_conformance
from labs.kernels.mosaic_decode import mosaic_attend
from labs.kernels.split_k import split_k_attend
from treeattn import attend, finalize, kv_mesh, tree_decode

KERNELS = {
    "split-K": split_k_attend,
    "Mosaic": mosaic_attend,
    "flash": "flash",
    "blockwise": "blockwise",
}
# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "decode": (2, 1, 32, 8, 5000, 128, 128),
    "few queries": (1, 8, 9, 3, 3000, 64, 64),
    "odd sizes": (2, 3, 6, 2, 1000, 96, 40),
    "a text": (1, 300, 8, 2, 300, 128, 128),
}
SMALL = {"decode": (2, 1, 4, 2, 72, 64, 64)}
METHODS = "allreduce", "butterfly", "gather", "all_to_all"
# flash-attn-jax rounds its outputs to the inputs' dtype; the others do not
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-4, "float16": 2e-5}
ROUNDED = {"bfloat16": 1e-2, "float16": 2e-3}


def right(q, k, v, *, bias=None, causal=False, **options):
    """(out, lse) in float64, by the suite. A bias (1, h, 1, n) becomes one more column of k."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = q.shape[3] ** -0.5
    if bias is not None:
        k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        column = np.broadcast_to(bias[:, :, 0].swapaxes(1, 2), k.shape[:3])[..., None]
        q = np.concatenate([q, np.full((*q.shape[:3], 1), 1 / scale)], axis=3)
        k = np.concatenate([k, column], axis=3)
    if causal:
        n = k.shape[1]
        options |= {"query_positions": np.arange(n)[: q.shape[1]], "key_positions": np.arange(n)}
    return treeattn_conformance.attend(q, k, v, scale=scale, **options)


def draw(shape, dtype, seed: int = 0):
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def difference(found, expected) -> float:
    """The largest difference of finite numbers; ∞ if only one of two numbers is −∞ or NaN."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    for where in (np.isneginf, np.isnan):
        if not np.array_equal(where(found), where(expected)):
            return float("inf")
    finite = np.isfinite(expected)
    return float(np.abs(found[finite] - expected[finite]).max(initial=0))


def verdict(error: float, allowed: float) -> dict:
    return {"error": f"{error:.1e}", "allowed": allowed, "ok": error <= allowed}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def correct(smoke: bool) -> Iterator[dict]:
    """All checks, the most important first: bfloat16, hard inputs, all devices, other dtypes."""
    jax.config.update("jax_default_matmul_precision", "highest")
    shapes = SMALL if smoke else SHAPES
    for name in KERNELS:
        yield from compare(name, "bfloat16", shapes)
    for name in KERNELS:
        yield from hard(name, smoke)
    yield from over_devices(smoke)
    for dtype in ("float32",) if smoke else ("float32", "float16"):
        for name in ("split-K",) if smoke else KERNELS:
            yield from compare(name, dtype, shapes)


def compare(name: str, dtype: str, shapes) -> Iterator[dict]:
    """Rows for each shape: plain, and for split-K also with a mask, a bias and lengths together."""
    for what, shape in shapes.items():
        arrays = draw(shape, dtype)
        yield checked(what, name, arrays)
        if name == "split-K":
            yield checked(what, name, arrays, **everything(arrays))


def everything(arrays) -> dict:
    """A mask, a bias that hides a third of the keys by −∞, and lengths."""
    q, k, _ = arrays
    (b, l, h, _), n = q.shape, k.shape[1]
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(1, h, 1, n)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    lengths = np.array([0, n // 3 + 1][-b:] if b > 1 else [n // 3 + 1], np.int32)
    return {"mask": rng.random((1, 1, l, n)) < 0.6, "bias": bias, "kv_lengths": lengths}


@functools.cache
def compiled(kernel):
    """`attend` by this kernel, compiled once for arguments of the same shapes."""
    return jax.jit(functools.partial(attend, implementation=kernel), static_argnames="causal")


def checked(what: str, name: str, arrays, **options) -> dict:
    """A row: right, wrong, or why the kernel was not run."""
    dtype = str(arrays[0].dtype)
    row = {"what": what, "kernel": name, "dtype": dtype, "with": ", ".join(options)}
    try:
        found = finalize(compiled(KERNELS[name])(*arrays, **options))
    except (ImportError, NotImplementedError, ValueError) as error:  # with the reason
        return row | {"why not": one_line(error)}
    except Exception as error:  # this kernel does not compile here; the others go on
        return row | {"error": one_line(error), "ok": False}
    allowed = ALLOWED | (ROUNDED if name == "flash" else {})
    error = max(map(difference, found, right(*arrays, **options)))
    return row | verdict(error, allowed[dtype])


def hard(name: str, smoke: bool) -> Iterator[dict]:
    """Inputs on which kernels fail first: NaN, NaN past the lengths, causality."""
    n = 72 if smoke else 1000
    arrays = draw((2, 2, 8, 2, n, 64, 64), "bfloat16")
    for i, what in enumerate(("query", "key", "value")):
        spoiled = [x.at[1, 1, 1, 5].set(jnp.nan) if i == j else x for j, x in enumerate(arrays)]
        yield checked(f"NaN in a {what}", name, spoiled)
    lengths = np.array([n // 3, 0], np.int32)
    past = (np.arange(n) >= lengths[:, None])[..., None, None]
    q, k, v = arrays
    poisoned = [q, *(jnp.where(past, jnp.nan, x) for x in (k, v))]
    yield checked("NaN past the lengths", name, poisoned, kv_lengths=lengths)
    if not smoke:
        yield checked("causal", name, draw((1, 40, 8, 2, 40, 64, 64), "bfloat16"), causal=True)


def over_devices(smoke: bool) -> Iterator[dict]:
    """tree_decode over all devices, by each method, also with fewer keys than devices."""
    sharding = NamedSharding(kv_mesh(), P(None, "kv"))
    for n in (1, 130 if smoke else 4001):
        arrays = draw((2, 1, 8, 2, n, 64, 64), "float32")
        expected, _ = right(*arrays)
        for method in METHODS[:2] if smoke else METHODS:
            out = tree_decode(
                *arrays, sharding=sharding, method=method, implementation=split_k_attend
            )
            row = {"what": "tree_decode", "devices": len(jax.devices()), "keys": n}
            found = verdict(difference(out, expected), ALLOWED["float32"])
            yield row | {"method": method} | found
