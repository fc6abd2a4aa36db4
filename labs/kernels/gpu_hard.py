"""What a kernel gets wrong first, on the device at hand: NaN, poison, −∞, extremes, far offsets.

A case is given `run`, which is `treeattn.attend` by that kernel, compiled."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from gpu_correct import dense, difference, one_line, verdict
from gpu_llama import room

import treeattn
from treeattn import reduce_tree

SHAPE = 2, 3, 8, 2, 1000, 128  # batch, queries, heads, key heads, keys, head_dim
LARGEST = float(jnp.finfo(jnp.float32).max)


def draw(smoke: bool, *, l: int = 3, n: int | None = None, dtype: str = "float32"):
    """(q, k, v) of SHAPE, or with another number of queries and keys; smaller in a rehearsal."""
    b, _, h, h_kv, keys, d = SHAPE
    n = n or (60 if smoke else keys)
    d = 16 if smoke else d
    rng = np.random.default_rng(0)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, d)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def compared(arrays, state, allowed: float = 1e-5, **options) -> dict:
    """The fields of a row: a state against dense attention, NaN where that has NaN."""
    found = treeattn.finalize(state)
    return verdict("", max(map(difference, found, dense(*arrays, **options))), allowed)


def nan_in(what: str, run: Callable, smoke: bool) -> dict:
    """One NaN: in a query, a key, a value or a bias of a key that is seen; or as the scale."""
    q, k, v = draw(smoke)
    arrays, options = {"query": q, "key": k, "value": v}, {}
    if what in arrays:
        arrays[what] = arrays[what].at[1, 2, 1, 5].set(jnp.nan)
    elif what == "bias":
        bias = np.zeros((1, 8, 1, k.shape[1]), np.float32)
        bias[0, 3, 0, 7] = np.nan
        options["bias"] = bias
    else:
        options["scale"] = jnp.float32(jnp.nan)
    arrays = tuple(arrays.values())
    return compared(arrays, run(*arrays, **options), **options)


def poison_past_the_lengths(run: Callable, smoke: bool) -> dict:
    q, k, v = draw(smoke)
    lengths = np.array([k.shape[1] // 3, 0], np.int32)
    past = (np.arange(k.shape[1]) >= lengths[:, None])[..., None, None]
    poisoned = (jnp.where(past, jnp.nan, x) for x in (k, v))
    options = {"kv_lengths": lengths}
    state = run(q, *poisoned, **options)
    clean = (q, *(jnp.where(past, 0, x) for x in (k, v)))
    return compared(clean, state, **options)


def bias_and_mask(run: Callable, smoke: bool) -> dict:
    """A bias that hides half of the keys by −∞, a mask, and lengths."""
    q, k, v = draw(smoke)
    rng, n = np.random.default_rng(1), k.shape[1]
    bias = rng.normal(size=(1, 8, 1, n)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.5] = -np.inf
    options = {"bias": bias, "mask": rng.random((2, 1, 3, n)) < 0.3}
    options["kv_lengths"] = np.array([n // 2, n], np.int32)
    return compared((q, k, v), run(q, k, v, **options), **options)


def causal(run: Callable, smoke: bool) -> dict:
    arrays = draw(smoke, l=40, n=40)
    return compared(arrays, run(*arrays, causal=True), causal=True)


def traced_scale(run: Callable, smoke: bool) -> dict:
    arrays = draw(smoke)
    return compared(arrays, run(*arrays, scale=jnp.float32(-0.7)), 5e-5, scale=-0.7)


def vmap(run: Callable, smoke: bool) -> dict:
    def one(q, k, v):
        return jax.tree.map(lambda x: x[0], run(q[None], k[None], v[None]))

    arrays = draw(smoke)
    return compared(arrays, jax.jit(jax.vmap(one))(*arrays))


def extremes(run: Callable, smoke: bool, dtype: str = "float32") -> dict:
    """Queries, keys and values up to the largest numbers of a dtype give finite outputs."""
    rng, top = np.random.default_rng(2), float(jnp.finfo(dtype).max)
    found = []
    for size in (1, 1e4, 1e19, LARGEST):
        q, k, v = (
            jnp.asarray(np.clip(most * rng.choice([-1, 0, 1e-3, 1], shape), -top, top), dtype)
            for most, shape in (
                (size, (1, 1, 1, 16)),
                (size, (1, 600, 1, 16)),
                (LARGEST, (1, 600, 1, 16)),
            )
        )
        found += [bool(jnp.isfinite(x).all()) for x in treeattn.finalize(run(q, k, v))]
    return {"ok": all(found)}


def large_offsets(run: Callable, smoke: bool) -> dict:
    """A cache of more than 4 GiB, whose offsets take 64 bits, against the same in four parts."""
    n, heads = (512, 2) if smoke else (1 << 20, 32)
    shape = 1, n, heads, 128
    if not smoke and 10 * np.prod(shape) > room():
        return {"why not": "two arrays of 8 GiB, and what it takes to draw them, do not fit"}
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(
        lambda key, n: jax.random.normal(key, (1, n, heads, 128), jnp.bfloat16), static_argnums=1
    )
    q, k, v = draw(keys[0], 1), draw(keys[1], n), draw(keys[2], n)
    whole = treeattn.finalize(run(q, k, v))
    part = jax.jit(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i * (n // 4), n // 4, 1))
    states = [run(q, part(k, i), part(v, i)) for i in range(4)]
    merged = treeattn.finalize(reduce_tree(jax.tree.map(lambda *x: jnp.stack(x), *states)))
    return verdict("", max(map(difference, whole, merged)), 1e-5)


CASES: dict[str, Callable[[Callable, bool], dict]] = {
    f"NaN in a {what}": functools.partial(nan_in, what)
    for what in ("query", "key", "value", "bias", "scale")
} | {
    "NaN beyond the lengths": poison_past_the_lengths,
    "−∞ in a bias, a mask, lengths": bias_and_mask,
    "causal": causal,
    "a traced scale": traced_scale,
    "vmap": vmap,
    "the largest float32": extremes,
    "the largest bfloat16": functools.partial(extremes, dtype="bfloat16"),
    "the largest float16": functools.partial(extremes, dtype="float16"),
    "offsets of 64 bits": large_offsets,
}
REHEARSED = "NaN in a query", "NaN in a value", "NaN beyond the lengths"  # of two programs


def hard(implementation: str, smoke: bool) -> Iterator[dict]:
    """A row for each case: right, wrong, or why it was not run."""
    attend = functools.partial(treeattn.attend, implementation=implementation)
    run = jax.jit(attend, static_argnames="causal")
    for name in REHEARSED if smoke else CASES:
        try:
            row = CASES[name](run, smoke)
        except Exception as error:  # the other cases go on
            row = {"error": one_line(error), "ok": False}
        yield {**row, "what": "hard", "implementation": implementation, "with": name}
