"""Whether each implementation is right on the device at hand: dense attention in float64, on the
host, is what each is compared with."""

import concurrent.futures
import functools
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import treeattn

# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "decode": (2, 1, 32, 8, 5000, 128, 128),
    "few queries": (1, 8, 9, 3, 3000, 64, 64),
    "odd sizes": (2, 3, 6, 2, 1000, 96, 40),
    "a text": (1, 300, 8, 2, 300, 128, 128),
    "wide": (1, 2, 4, 1, 700, 256, 256),
}
SMALL = {
    "decode": (2, 1, 4, 2, 70, 16, 16),
    "odd sizes": (1, 2, 2, 2, 40, 20, 7),
}
OWN = "mosaic", "pallas"  # the package's kernels, the one that stays first
METHODS = ("allreduce", "butterfly", "gather", "reduce_scatter", "all_to_all")
# flash-attn-jax rounds its outputs to the inputs' dtype; the others do not
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-4, "float16": 2e-5, "float64": 1e-12}
ROUNDED = {"bfloat16": 1e-2, "float16": 2e-3}


def dense(q, k, v, mask=None, bias=None, kv_lengths=None, scale=None, causal=False):
    """(out, lse) in float64 NumPy; layouts as in `treeattn.attend`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, l, n = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = np.einsum("blhd,bnhd->bhln", q, k, optimize=True) * scale
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
    out = np.einsum("bhln,bnhd->blhd", p / np.where(d == 0, 1, d), v, optimize=True)
    return out, lse


def draw(shape, dtype):
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(0)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    arrays = tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    mask = rng.random((1, 1, l, n)) < 0.6
    lengths = np.array([0, n // 3 + 1][-b:] if b > 1 else [n // 3 + 1], np.int32)
    return arrays, {"": {}, "mask": {"mask": mask}, "lengths": {"kv_lengths": lengths}}


def difference(found, expected) -> float:
    """The largest, where both are finite; ∞ if one is −∞ or NaN where the other is not."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    for where in (np.isneginf, np.isnan):
        if not np.array_equal(where(found), where(expected)):
            return float("inf")
    finite = np.isfinite(expected)
    return float(np.abs(found[finite] - expected[finite]).max(initial=0))


def verdict(what: str, error: float, allowed: float, **about) -> dict:
    return {
        "what": what,
        **about,
        "error": f"{error:.1e}",
        "allowed": allowed,
        "ok": bool(error <= allowed),
    }


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def why_not(name: str, arrays, **options) -> str | None:
    """Why an implementation cannot take these arguments here; None if it can."""
    try:
        treeattn.which_implementation(*arrays, implementation=name, **options)
    except (ImportError, ValueError) as error:
        return one_line(error)
    return None


def correct(smoke: bool) -> Iterator[dict]:
    """What decides comes first: the kernels in bfloat16, what is hard, all devices."""
    from gpu_hard import hard  # it stands on this module

    jax.config.update("jax_default_matmul_precision", "highest")
    for name in OWN:
        yield from implementation(name, ("bfloat16",), smoke)
    arrays, _ = draw(SMALL["decode"], "bfloat16")
    able = [name for name in OWN if why_not(name, arrays) is None]
    for name in able:
        yield from hard(name, smoke)
    yield from devices(smoke)
    for name in able:
        if not smoke:
            yield from implementation(name, ("float32", "float16"), smoke)
        elif name == "pallas":  # Mosaic's interpreter takes seconds for each program
            yield from implementation(name, ("float32",), smoke)
    for name in ("flash", "blockwise"):
        halves = ("bfloat16",) if smoke else ("bfloat16", "float16")
        yield from implementation(name, ("float32", *halves), smoke)


def implementation(name: str, dtypes, smoke: bool) -> Iterator[dict]:
    """All shapes in those dtypes; programs are compiled side by side."""
    (q, k, v), _ = draw(SMALL["decode"], "bfloat16")
    if why := why_not(name, (q, k, v)):
        yield {"what": "not run", "implementation": name, "why not": why}
        return
    skipped = ("float16", "bfloat16") if smoke or name == "blockwise" else ("float16",)
    cases = []
    for dtype in dtypes:
        for what, shape in (SMALL if smoke else SHAPES).items():
            if smoke and (name, what) == ("blockwise", "odd sizes"):
                continue
            arrays, variants = draw(shape, dtype)
            for variant, options in variants.items():
                if variant and dtype in skipped:  # compiling each takes seconds
                    continue
                about = {"implementation": name, "dtype": dtype, "with": variant}
                if why_not(name, arrays, **options) is None:
                    cases.append((what, arrays, options, about))
    interpreted = jax.default_backend() == "cpu"  # Mosaic's interpreter has one memory for all
    workers = 1 if name == "mosaic" and interpreted else os.cpu_count()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for rows in pool.map(lambda case: list(compare(*case)), cases):
            yield from rows


def compare(what: str, arrays, options, about: dict) -> Iterator[dict]:
    name, dtype = about["implementation"], about["dtype"]
    f = jax.jit(functools.partial(treeattn.attend, implementation=name))
    try:
        found = treeattn.finalize(f(*arrays, **options))
        error = max(map(difference, found, dense(*arrays, **options)))
        yield verdict(what, error, (ROUNDED if name == "flash" else ALLOWED)[dtype], **about)
        if dtype == "float32" and not options and what in SMALL:
            yield verdict(what, slope_error(arrays, name), 1e-3, **about | {"with": "gradient"})
    except Exception as error:  # a kernel that does not compile here: the others go on
        yield {"what": what, **about, "error": one_line(error), "ok": False}


def slope_error(arrays, name: str) -> float:
    """The relative error of the gradient of Σ out² + Σ lse, along one direction; the slope there
    is a difference of order four, in float64."""
    loss = lambda out, lse: (out**2).sum() + lse.sum()  # noqa: E731

    def of_arrays(*arrays):
        return loss(*treeattn.finalize(treeattn.attend(*arrays, implementation=name)))

    found = jax.jit(jax.grad(of_arrays, (0, 1, 2)))(*arrays)
    rng, step = np.random.default_rng(1), 1e-3
    wide = [np.asarray(x, np.float64) for x in arrays]
    towards = [rng.normal(size=x.shape) for x in wide]
    f = [
        loss(*dense(*(x + i * step * t for x, t in zip(wide, towards, strict=True))))
        for i in (-2, -1, 1, 2)
    ]
    slope = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * step)
    found = sum(np.sum(np.asarray(g, np.float64) * t) for g, t in zip(found, towards, strict=True))
    return abs(found / slope - 1)


def devices(smoke: bool) -> Iterator[dict]:
    """tree_decode over all devices, by each method, with fewer keys than devices as well."""
    p, mesh = len(jax.devices()), treeattn.kv_mesh()
    dtype = "float32"
    for n in (1, 130 if smoke else 4001):
        (q, k, v), _ = draw((2, 1, 8, 2, n, 64, 64), dtype)
        expected, _ = dense(q, k, v)
        for method in METHODS[:2] if smoke else METHODS:
            out = treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv", method=method)
            about = {"devices": p, "keys": n, "method": method}
            yield verdict("tree_decode", difference(out, expected), ALLOWED[dtype], **about)
