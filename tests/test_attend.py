"""attend against dense attention in float64: values, gradients, memory; numbers of other dtypes and
at the ends of their range are in tests/test_numbers.py.

One program for each shape and set of options is fed many cases: masks, biases, lengths and stale
memory are its arguments.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    DECODERS,
    FOR_PROMPTS,
    IMPLEMENTATIONS,
    OPTIONS,
    OTHERS,
    PREFILLS,
    STATIC,
    check,
    check_gradients,
    draw,
    over,
    results,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from treeattn import (
    attend,
    attention,
    blocks,
    finalize,
    memory,
    ring_decode,
    tree_decode,
)
from treeattn.blocks import CAUSAL_BLOCK
from treeattn.products import BLOCK

SHAPES = {
    # few queries: sums, in blocks that rows may not need
    "lanes": {"b": 3, "l": 1, "n": 640, "h": 4, "h_kv": 2, "d": 32, "dv": 16},
    # many queries: matrix products, in two blocks
    "products": {"b": 2, "l": 5, "n": 1100, "h": 4, "h_kv": 2, "d": 8, "dv": 6},
    "few keys": {"b": 3, "l": 2, "n": 3, "h": 2, "h_kv": 1, "d": 5, "dv": 7},
}
OURS = ["plain", "blockwise"]


def function(implementation, **options):
    """(q, k, v, **options) -> (out, lse)."""

    def f(q, k, v, **more):
        return finalize(attend(q, k, v, implementation=implementation, **options, **more))

    return f


FUNCTIONS = {name: function(how, **OTHERS) for name, how in IMPLEMENTATIONS.items()}
BLOCKWISE = jax.jit(function("blockwise"))


def all_seen(shape):
    """Options that hide nothing."""
    b, l, n, h = (shape[name] for name in ("b", "l", "n", "h"))
    mask, bias = np.ones((b, 1, l, n), bool), np.zeros((1, h, 1, n))
    return {"mask": mask, "bias": bias, "kv_lengths": np.full(b, n, np.int32)}


def ones(q, v):
    """Weights of the output and of lse."""
    return np.ones((*q.shape[:3], v.shape[-1])), np.ones(q.shape[:3])


def draw_options(rng, shape):
    sizes = {name: shape[name] for name in ("b", "l", "n", "h")}
    return {name: draw_one(rng, **sizes) for name, draw_one in OPTIONS.items()}


def test_every_option_is_drawn():
    parameters = set(inspect.signature(attend).parameters) - {"q", "k", "v"}
    missing = parameters ^ {*OPTIONS, *STATIC, "implementation"}
    assert not missing, f"tests/attentions.py: a row of OPTIONS, or of STATIC, for {missing}"
    for f in (attention, tree_decode, ring_decode):
        missing = parameters - FOR_PROMPTS - set(inspect.signature(f).parameters)
        assert not missing, f"{f.__name__} ({f.__module__}) has no {missing}, which attend has"
    for name, f in PREFILLS.items():
        missing = parameters - {"mask", "bias", "kv_lengths"} - set(inspect.signature(f).parameters)
        assert not missing, f"{name} has no {missing}, which attend has"


@pytest.mark.parametrize("option", STATIC)
def test_a_static_option_is_obeyed_everywhere(option):
    """Beside all others, over two axes, and in the gradients."""
    shape, rng = {"b": 2, "l": 6, "n": 6, "h": 4, "h_kv": 4}, np.random.default_rng(10)
    arrays, drawn = draw(**shape), draw_options(rng, shape)
    weights, sharding = rng.normal(size=arrays[0].shape), over(keys_a=2, keys_b=2)
    ways = {
        x: (functools.partial(attention, implementation=y), drawn)
        for x, y in IMPLEMENTATIONS.items()
    }
    ways |= {x: (functools.partial(f, sharding=sharding), {}) for x, f in PREFILLS.items()}
    if option not in FOR_PROMPTS:
        ways |= {x: (functools.partial(f, sharding=sharding), drawn) for x, f in DECODERS.items()}
    for name, (f, others) in ways.items():
        outs = []
        for value in STATIC[option]:
            options = {"causal": name in PREFILLS} | others | {option: value}
            with_it = functools.partial(f, **{option: value})
            out, gradients = results(with_it, *arrays, weights, 0.0, others)
            check(out, *arrays, **options)
            check_gradients(gradients, *arrays, weights, np.zeros(out.shape[:3]), **options)
            outs.append(out)
        assert np.abs(outs[0] - outs[1]).max() > 1e-3, name


def unseen(shape, options):
    """(b, n, h_kv, 1): the keys that no query of their row and head sees."""
    b, l, n, h, h_kv = (shape[name] for name in ("b", "l", "n", "h", "h_kv"))
    seen = options["mask"] & (options["bias"] != -np.inf)
    seen = seen & (np.arange(n) < options["kv_lengths"][:, None, None, None])
    seen = np.broadcast_to(seen, (b, h, l, n)).reshape(b, h_kv, -1, n)
    return ~seen.any(axis=2).transpose(0, 2, 1)[..., None]


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(list(SHAPES)),
    stale=st.sampled_from([0.0, np.nan, np.inf]),
    how=st.sampled_from(list(FUNCTIONS)),
)
def test_values_and_gradients(seed, name, stale, how):
    """With memory that was never written, which may hold anything, wherever nobody looks."""
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    q, k, v = draw(seed, **shape)
    q, options = q * rng.choice([0.1, 1.0, 5.0]), draw_options(rng, shape)
    if how == "a kernel":
        stale = 0.0  # keeping NaN out is the kernel's own business
    hidden = unseen(shape, options)
    k, v = np.where(hidden, 0, k), np.where(hidden, 0, v)
    w, u = rng.normal(size=(*q.shape[:3], shape["dv"])), rng.normal(size=q.shape[:3])
    cache = np.where(hidden, stale, k), np.where(hidden, stale, v)
    found, gradients = results(FUNCTIONS[how], q, *cache, w, u, options)
    options |= OTHERS
    check(found, q, k, v, **options)
    check_gradients(gradients, q, k, v, w, u, **options)


EMPTY = {"no rows": SHAPES["lanes"] | {"b": 0}, "no keys": SHAPES["few keys"] | {"n": 0}}


@pytest.mark.parametrize("how", FUNCTIONS)
@pytest.mark.parametrize("shape", (SHAPES | EMPTY).values(), ids=SHAPES | EMPTY)
def test_no_keys_no_nan(shape, how):
    """A bias that is below the range of the scores hides, too."""
    q, k, v = draw(**shape, dtype=np.float32)
    w, u = ones(q, v)
    for hiding, value in ("mask", False), ("bias", -np.inf), ("bias", -1e300), ("kv_lengths", 0):
        options = all_seen(shape)
        options[hiding][:] = value
        (out, lse), gradients = results(FUNCTIONS[how], q, k, v, w, u, options)
        assert out.shape == w.shape and np.all(lse == -np.inf)
        assert not any(np.any(x) for x in (out, *gradients))


blockwise = functools.partial(attention, implementation="blockwise")


def up_to(q, k, v, lengths):
    return blockwise(q, k, v, kv_lengths=lengths)


def temporary(f, queries, n, *, dtype="float32", of_keys=None, batch=1):
    """Temporary bytes of f(q, k, v), or of `up_to`, which takes lengths, too."""
    q = jax.ShapeDtypeStruct((batch, queries, 4, 64), dtype)
    k = jax.ShapeDtypeStruct((batch, n, 4, 64), of_keys or dtype)
    more = [jax.ShapeDtypeStruct((batch,), "int32")] if f is up_to else []
    return memory(jax.jit(f).lower(q, k, k, *more).compile()).temporary_bytes


decoded = functools.partial(tree_decode, sharding=over(keys=4))
CACHES = [(up_to, "bfloat16", 3, 1, 8), (up_to, "float32", 1, 32, 8), (up_to, "bfloat16", 1, 32, 8)]
CACHES += [(up_to, "float8_e4m3fn", 1, 1, 8), (decoded, "bfloat16", 1, 1, 8)]
CACHES += [(up_to, "float32", 1, 16, 0.5)]  # of a cache that is half full half is read


@pytest.mark.parametrize(("f", "of_keys", "batch", "queries", "blocks"), CACHES)
def test_memory_does_not_grow_with_the_keys(f, of_keys, batch, queries, blocks, optimized):
    """Keys that are narrower than the queries are widened a block at a time."""
    n = int(blocks * BLOCK)
    few, many = (temporary(f, queries, m, of_keys=of_keys, batch=batch) for m in (n, 2 * n))
    assert many <= few + 1024  # a few bytes for the loop's indices


@pytest.mark.slow
def test_memory_of_all_queries_is_linear_and_plainly_quadratic(optimized):
    """2024 §3, 2025 §2 and §3: with a query for every key the plain form holds all scores."""
    n, plain = 4 * BLOCK, functools.partial(attention, implementation="plain")
    held = {f: [temporary(f, m, m) for m in (n, 2 * n)] for f in (blockwise, plain)}
    for f, times in ((blockwise, 2), (plain, 4)):
        assert held[f][1] / held[f][0] == pytest.approx(times, rel=0.1)
    assert held[plain][0] >= 4 * 4 * n * n > 2 * held[blockwise][0]


@pytest.mark.slow
def test_memory_of_the_gradient(optimized):
    f = jax.grad(lambda *x: blockwise(*x).sum(), (0, 1, 2))
    small, large = (temporary(f, 1, n) for n in (2 * BLOCK, 8 * BLOCK))
    gradients = 2 * 8 * BLOCK * 4 * 64 * 4
    assert large <= small + 2 * gradients  # the blocks' gradients, before they are put together


@pytest.mark.parametrize("how", OURS)
def test_every_order_and_mode_of_differentiation(how):
    arrays = draw(4, b=1, n=20, h=2, h_kv=1, d=3)
    bias = np.random.default_rng(5).normal(size=(1, 2, 1, 20))
    f = jax.jit(functools.partial(FUNCTIONS[how], bias=bias))
    check_grads(f, arrays, 1, modes=["fwd"])
    check_grads(f, arrays, 2, modes=["rev"])


LENGTHS = [[127, 3], np.int8([127, 3]), np.uint64([127, 3]), jnp.array([127, 3])]
LENGTHS += [3, np.int8(3), jnp.array(3)]  # for every row


@pytest.mark.usefixtures("unchecked")
def test_lengths_of_any_integers():
    """Clipped where nobody can look at them; elsewhere, tests/test_arguments.py."""
    n = 200
    arrays = draw(n=n, h=2, h_kv=1, d=8)
    for f in attention, functools.partial(tree_decode, sharding=over(keys=2)):
        for lengths in LENGTHS:
            found = f(*arrays, kv_lengths=lengths)
            check(found, *arrays, kv_lengths=np.broadcast_to(lengths, 2))
    for wrong in (np.array([-5, 2**33]), np.array([-128, 127], np.int8), np.array(2**33)):
        found = BLOCKWISE(*arrays, kv_lengths=wrong)
        clipped = np.clip(np.broadcast_to(wrong, 2).astype(np.int64), 0, n)
        check(found, *arrays, kv_lengths=clipped)


# A whole text on one device: halved until its parts are short.


@pytest.mark.parametrize("how", OURS)
def test_causal_values_and_gradients(how):
    length = 3 * CAUSAL_BLOCK + 5
    options = {"causal": True, "scale": 0.3} | OTHERS
    f = function(how, **options)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        q, k, v = draw(seed, l=length, n=length, d=8, dv=5)
        w, u = rng.normal(size=(2, length, 4, 5)), rng.normal(size=(2, length, 4))
        found, gradients = results(f, q, k, v, w, u, {})
        check(found, q, k, v, **options)
        check_gradients(gradients, q, k, v, w, u, **options)


def test_causal_halves_compute_few_hidden_scores(monkeypatch):
    seen = []
    attend_parts = blocks._attend

    def counting(inputs):  # queries (b, h_kv, group, l, d)
        seen.append(inputs.q.shape[0] * inputs.q.shape[3] * inputs.k.shape[1])
        return attend_parts(inputs)

    monkeypatch.setattr(blocks, "_attend", counting)
    n = 8 * CAUSAL_BLOCK
    q = jnp.ones((1, n, 2, 8))
    jax.make_jaxpr(functools.partial(blockwise, causal=True))(q, q, q)
    # Half of n², and half of each diagonal.
    assert sum(seen) == n * (n - CAUSAL_BLOCK) // 2 + n * CAUSAL_BLOCK


def test_a_program_of_symbolic_sizes_is_exported():
    b, n = jax.export.symbolic_shape("b, n")
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, 1, 4, 8), (b, n, 2, 8)))
    lengths = jax.ShapeDtypeStruct((b,), jnp.int32)
    arrays = draw(b=3, l=1, n=7, d=8, dtype=np.float32)
    for described, options in (
        ({}, {}),
        ({"kv_lengths": lengths}, {"kv_lengths": np.int32([7, 3, 0])}),
    ):
        exported = jax.export.export(jax.jit(attention))(q, k, k, **described)
        check(exported.call(*arrays, **options), *arrays, atol=1e-6, **options)
