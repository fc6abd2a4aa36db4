"""Whether each kernel is right on the device at hand, against dense attention in float64."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labs.kernels import cluster_merge
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


def dense(q, k, v, mask=None, bias=None, kv_lengths=None, causal=False):
    """(out, lse) in float64 NumPy; layouts as in `treeattn.attend`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, l, n = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    s = np.einsum("blhd,bnhd->bhln", q, k, optimize=True) * q.shape[-1] ** -0.5
    s = s if bias is None else s + np.asarray(bias, np.float64)
    seen = np.tri(l, n, dtype=bool) if causal else np.ones((l, n), bool)
    seen = seen[None, None] if mask is None else seen & np.asarray(mask)
    if kv_lengths is not None:
        seen = seen & (np.arange(n) < np.asarray(kv_lengths)[:, None])[:, None, None]
    s = np.where(seen, s, -np.inf)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(m), 0, m))
    d = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(d))[..., 0].transpose(0, 2, 1)
    return np.einsum("bhln,bnhd->blhd", p / np.where(d == 0, 1, d), v, optimize=True), lse


def draw(shape, dtype):
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(0)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def difference(found, expected) -> float:
    """The largest, where both are finite; ∞ if one is −∞ or NaN where the other is not."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    for where in (np.isneginf, np.isnan):
        if not np.array_equal(where(found), where(expected)):
            return float("inf")
    finite = np.isfinite(expected)
    return float(np.abs(found[finite] - expected[finite]).max(initial=0))


def verdict(what: str, error: float, allowed: float, **about) -> dict:
    numbers = {"error": f"{error:.1e}", "allowed": allowed, "ok": bool(error <= allowed)}
    return {"what": what, **about, **numbers}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def correct(smoke: bool) -> Iterator[dict]:
    """What decides comes first: bfloat16, what is hard, all devices; then other dtypes."""
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
    """A row for each shape: plain, and for split-K with a mask, a bias and lengths together."""
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


def checked(what: str, name: str, arrays, allowed=None, clean=None, **options) -> dict:
    """A row: right, wrong, or why the kernel was not run. clean: arrays without what is hidden."""
    dtype = str(arrays[0].dtype)
    about = {"kernel": name, "dtype": dtype, "with": ", ".join(options)}
    run = jax.jit(functools.partial(attend, implementation=KERNELS[name]), static_argnames="causal")
    try:
        found = finalize(run(*arrays, **options))
    except (ImportError, NotImplementedError, ValueError) as error:  # it says what it lacks
        return {"what": what, **about, "why not": one_line(error)}
    except Exception as error:  # a kernel that does not compile here: the others go on
        return {"what": what, **about, "error": one_line(error), "ok": False}
    error = max(map(difference, found, dense(*(clean or arrays), **options)))
    rounded = ROUNDED if name == "flash" else {}
    return verdict(
        what, error, allowed or (rounded | {"float32": 1e-5}).get(dtype, ALLOWED[dtype]), **about
    )


def hard(name: str, smoke: bool) -> Iterator[dict]:
    """What a kernel gets wrong first: NaN, in every kernel; poison past the lengths; causality."""
    n = 72 if smoke else 1000
    arrays = draw((2, 2, 8, 2, n, 64, 64), "bfloat16")
    for i, what in enumerate(("query", "key", "value")):
        spoiled = [x.at[1, 1, 1, 5].set(jnp.nan) if i == j else x for j, x in enumerate(arrays)]
        yield checked(f"NaN in a {what}", name, spoiled)
    lengths = np.array([n // 3, 0], np.int32)
    past = (np.arange(n) >= lengths[:, None])[..., None, None]
    q, k, v = arrays
    poisoned = [q, *(jnp.where(past, jnp.nan, x) for x in (k, v))]
    clean = [q, *(jnp.where(past, 0, x) for x in (k, v))]
    yield checked("NaN past the lengths", name, poisoned, clean=clean, kv_lengths=lengths)
    if not smoke:
        yield checked("causal", name, draw((1, 40, 8, 2, 40, 64, 64), "bfloat16"), causal=True)


def over_devices(smoke: bool) -> Iterator[dict]:
    """tree_decode over all devices, by each method, with fewer keys than devices as well."""
    sharding = NamedSharding(kv_mesh(), P(None, "kv"))
    for n in (1, 130 if smoke else 4001):
        arrays = draw((2, 1, 8, 2, n, 64, 64), "float32")
        expected, _ = dense(*arrays)
        for method in METHODS[:2] if smoke else METHODS:
            out = tree_decode(
                *arrays, sharding=sharding, method=method, implementation=split_k_attend
            )
            about = {"devices": len(jax.devices()), "keys": n, "method": method}
            yield verdict("tree_decode", difference(out, expected), ALLOWED["float32"], **about)


def cannot_run() -> dict[str, str]:
    """The kernels that this device, this JAX, or what is installed rules out, and why."""
    arrays = draw(SMALL["decode"], "bfloat16")
    rows = {name: checked("", name, arrays) for name in KERNELS}
    found = {name: row["why not"] for name, row in rows.items() if "why not" in row}
    hopper = None if cluster_merge.on_hopper() else "it needs a GPU of compute capability 9.0"
    why = cluster_merge.missing() or hopper
    return found | ({"cluster": why} if why else {})
