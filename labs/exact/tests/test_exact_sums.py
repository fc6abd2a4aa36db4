"""Exact sums: every bit the same in any order, split and surroundings, and near to float64."""

import functools
import hashlib
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_attention, dense_weights

from labs.exact import ExactState, attend, exact_attend, exact_state
from labs.exact.digits import log, weight_of
from treeattn import attend as plain_attend
from treeattn import finalize, merge

KEYS = 24
PARTS = 5
LARGEST = np.finfo(np.float32).max


@functools.partial(jax.jit, static_argnames="causal")
def exact(q, k, v, scale=None, **options):
    """(out, lse) on one device."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return finalize(exact_attend(q, k, v, scale=scale, **options))


state_of = jax.jit(functools.partial(exact_state, scale=0.25))


def draw(shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def inputs(b=1, l=1, h=2, h_kv=1, d=16, dv=8, n=KEYS, seed=0, dtype=np.float32):
    return draw([(b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)], seed, dtype)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


# Any order of the keys, any partition, any tree of merges.


@jax.jit
def merged_in_parts(q, k, v, order, part_of, parts):
    """(out, lse) of the keys in that order, each in the part that it belongs to, the parts merged
    one after another as `parts` says."""
    k, v, part_of = k[:, order], v[:, order], part_of[order]

    def merge_part(state, part):
        mask = (part_of == part)[None, None, None]
        return state.merge(exact_state(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)), None

    start = ExactState.identity(q.shape[:3], v.shape[-1])
    state, _ = jax.lax.scan(merge_part, start, parts)
    return finalize(state.rounded())


def random_values(rng, shape):
    """Numbers of every size that float32 has, zeros among them, or ordinary ones."""
    x = rng.normal(size=shape)
    if rng.random() < 0.5:
        x = x * 2.0 ** rng.integers(-60, 60, size=shape) * (rng.random(size=shape) < 0.8)
    return x.astype(np.float32)


def test_two_thousand_partitions_and_orders():
    rng = np.random.default_rng(0)
    for case in range(200):
        q, k = random_values(rng, (1, 1, 2, 16)), random_values(rng, (1, KEYS, 1, 16))
        v = random_values(rng, (1, KEYS, 1, 8))
        if case % 2:
            q, k = q / np.abs(q).max(), k * 40 / np.abs(k).max()  # many weights that count
        together = exact(q, k, v)
        for _ in range(10):
            order, parts = rng.permutation(KEYS), rng.permutation(PARTS)
            part_of = rng.integers(PARTS, size=KEYS)
            assert_same_bits(merged_in_parts(q, k, v, order, part_of, parts), together)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100)
@given(
    st.lists(numbers, min_size=KEYS, max_size=KEYS),
    st.lists(numbers, min_size=KEYS, max_size=KEYS),
    st.permutations(range(KEYS)),
    st.lists(st.integers(0, PARTS - 1), min_size=KEYS, max_size=KEYS),
)
def test_any_scores_and_values_in_any_order(scores, values, order, part_of):
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array(scores, np.float32).reshape(1, KEYS, 1, 1)
    v = np.array(values, np.float32).reshape(1, KEYS, 1, 1)
    together = out, lse = exact(q, k, v)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    room = 1e-6 * np.abs(values).max() + 1e-37
    assert min(values) - room <= out.item() <= max(values) + room
    arrays = (np.array(x) for x in (order, part_of, range(PARTS)))
    assert_same_bits(merged_in_parts(q, k, v, *arrays), together)


def test_the_merge_is_a_monoid():
    """Of all fields, not of the rounded result only."""
    rng = np.random.default_rng(1)
    merge_states = jax.jit(ExactState.merge)
    nothing = ExactState.identity((1, 64, 1), 3)
    for _ in range(20):
        q = random_values(rng, (1, 64, 1, 4))
        k, v = (random_values(rng, (3, 6, 1, size)) for size in (4, 3))
        k[0, 0], v[1, 0] = rng.choice([0, np.nan], size=2)
        a, b, c = (state_of(q, k[i : i + 1], v[i : i + 1]) for i in range(3))
        assert_same_bits(merge_states(a, b), merge_states(b, a))
        left, right = merge_states(merge_states(a, b), c), merge_states(a, merge_states(b, c))
        assert_same_bits(left, right)
        assert_same_bits(merge_states(a, nothing), a)
        assert_same_bits(merge_states(nothing, a), a)


def test_floats_are_no_monoid():
    """The same states in floating point: most sums of three depend on the order."""
    q, k, v = inputs(l=64, n=6, seed=2)
    a, b, c = (plain_attend(q, k[:, i : i + 2], v[:, i : i + 2]) for i in (0, 2, 4))
    left, right = (finalize(x)[0] for x in (merge(merge(a, b), c), merge(a, merge(b, c))))
    assert (np.asarray(left) != np.asarray(right)).mean() > 0.1


# Its surroundings.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_queries_and_neighbours_change_nothing(dtype):
    q, k, v = inputs(b=2, l=3, h=4, h_kv=2, n=70, dtype=dtype)
    lengths = jnp.array([70, 41])
    together = exact(q, k, v, kv_lengths=lengths)
    row, n = 1, 41
    alone = exact(q[row:, 1:2, 2:], k[row:, :n, 1:], v[row:, :n, 1:])
    assert_same_bits(alone, [x[row:, 1:2, 2:] for x in together])
    wide = [jnp.pad(x, [(0, 0)] * 3 + [(0, 3)]) for x in (q, k)]
    assert_same_bits(exact(*wide, v, scale=0.25, kv_lengths=lengths), together)


def test_each_channel_by_itself():
    """A compiler may take another division for one channel than for eight. Values alike in size."""
    q, k, v = inputs(n=70)
    v = v.at[..., 0].set(4)  # the largest of each row, so that all are cut at the same bit
    together = exact(q, k, v)[0]
    for i in range(1, 8):
        two = jnp.stack([v[..., 0], v[..., i]], axis=-1)
        assert_same_bits(exact(q, k, two)[0][..., 1], together[..., i])


def test_more_keys_that_nobody_sees_change_nothing():
    """Lengths that end in several remainders of a vector's width."""
    q, k, v = inputs(n=70, d=12, dv=5)
    for n in (1, 15, 63):
        fewer = exact(q, k[:, :n], v[:, :n])
        assert_same_bits(fewer, exact(q, k, v, mask=jnp.arange(70)[None, None, None] < n))
        assert_same_bits(fewer, exact(q, k, v, kv_lengths=jnp.array([n])))


@pytest.mark.parametrize("block", [1, 64])
def test_blocks_change_nothing(block, monkeypatch):
    q, k, v = inputs(h=4, h_kv=2, n=150)
    expected = exact(q, k, v)
    monkeypatch.setattr(attend, "BLOCK", block)
    jax.clear_caches()
    assert_same_bits(exact(q, k, v), expected)
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("f", [weight_of, log])
def test_a_function_does_not_know_its_neighbours(f, optimized):
    """At every position of arrays of 1 to 70, alone, and fused with what stands around it."""
    x = np.abs(np.random.default_rng(0).normal(size=70).astype(np.float32) * 30) + 0.01
    expected = f(jnp.asarray(x))
    for n in (*range(1, 10), 15, 17, 33, 65):
        for start in (0, 70 - n):
            part = slice(start, start + n)
            assert_same_bits(jax.jit(f)(x[part]), jax.tree.map(operator.itemgetter(part), expected))
    fused = jax.jit(lambda x, y: jax.tree.map(lambda z: z + 1, f(x * y)))(x, np.ones_like(x))
    assert_same_bits(fused, jax.tree.map(lambda z: z + 1, expected))


def test_every_jax_has_the_same_bits(optimized):
    """A digest: that of JAX 0.8.3, 0.11.2 and 0.12.0.1, on SSE 4.2, AVX2 and AVX-512 alike."""
    q, k, v = inputs(b=2, l=3, h=4, h_kv=2, d=40, n=700, seed=5)
    found = exact(q, 3 * k, v, kv_lengths=jnp.array([700, 411]))
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in found)).hexdigest()
    assert digest[:16] == "ce4b6671d69447c9"


# Near to float64.


def test_functions_are_right():
    x = np.linspace(-80, 80, 100_001, dtype=np.float32)
    power, mantissa = (np.asarray(y, np.float64) for y in weight_of(jnp.asarray(x)))
    assert np.abs(mantissa * 2 ** (power - 24) / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert 0.69 < mantissa.min() / 2**24 and mantissa.max() / 2**24 < 1.42
    x = np.exp(np.linspace(-80, 80, 100_001)).astype(np.float32)
    error = np.abs(np.asarray(log(jnp.asarray(x))) - np.log(x.astype(np.float64)))
    assert (error / np.maximum(np.abs(np.log(x)), 1)).max() < 1.5e-7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 6, 2, 64, 3000), (1, 9, 2, 1, 128, 600)])
def test_errors_of_values_of_one_size_are_those_of_float_sums(shape, dtype):
    """Root mean squares, for normal values: they are all near to the largest of their row."""
    b, l, h, h_kv, d, n = shape
    q, k, v = inputs(b, l, h, h_kv, d, d, n, dtype=dtype)
    dense, lse = dense_attention(q, k, v), dense_weights(q, k)[1]

    def errors(found):
        pairs = zip(found, (dense, lse), strict=True)
        return [np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2)) for x, y in pairs]

    ours = errors(exact(q, k, v))
    theirs = errors(finalize(plain_attend(q, k, v, implementation="blockwise")))
    assert ours[0] <= 1.1 * theirs[0]
    assert ours[1] <= 1.1 * theirs[1] + 1e-7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_entries_beside_a_large_one_are_lost(dtype):
    """One key has to give back its value, and does so relative to the largest entry only."""
    one = jnp.ones((1, 1, 1, 2), dtype)
    values = jnp.array([1e10, 1, 3, 1e-3], dtype).reshape(1, 1, 1, 4)
    out = np.asarray(exact(one, one, values)[0]).ravel()
    assert out[0] == pytest.approx(1e10, rel=2**-8 if dtype == "bfloat16" else 2e-7)
    assert out[1:].tolist() == [0, 0, 0]
    plain = np.asarray(finalize(plain_attend(one, one, values))[0], np.float32).ravel()
    np.testing.assert_allclose(plain, np.asarray(values, np.float32).ravel(), rtol=1e-6)


def test_a_large_channel_costs_the_others_digits():
    q, k, v = inputs(h=1, n=600)
    v = v.at[..., 0].multiply(1e6)
    error = np.abs(np.asarray(exact(q, k, v)[0]) - dense_attention(q, k, v)).ravel()
    largest = np.abs(v).max()
    assert error.max() < 1e-6 * largest
    assert 1e-5 < error[1:].max() < 2.0**-30 * largest


def test_scores_are_near_as_float_sums_are():
    """A large entry of a query beside a zero of the keys costs the score nothing."""
    q = np.ones((1, 1, 1, 128), np.float32)
    q[..., 0] = 1e8
    k = np.full((1, 2, 1, 128), 5 / 127, np.float32)
    k[..., 0], k[:, 1] = 0, 0
    v = np.array([1.0, 0.0], np.float32).reshape(1, 2, 1, 1)
    np.testing.assert_allclose(exact(q, k, v, scale=1.0)[0], 1 / (1 + np.exp(-5)), rtol=1e-6)


def test_masks_biases_lengths_and_causality():
    rng = np.random.default_rng(3)
    q, k, v = inputs(b=2, l=6, h=4, h_kv=2, n=30)
    mask = rng.random((2, 1, 6, 30)) < 0.4
    bias = rng.normal(size=(1, 4, 1, 30)).astype(np.float32)
    bias[..., 3] = -np.inf
    for options in (
        {"mask": mask[:, :, :1, :]},
        {"mask": mask, "bias": bias, "kv_lengths": np.array([30, 7]), "scale": 0.7},
    ):
        out, lse = exact(q, k, v, **options)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=0, atol=2e-6)
    below = np.tri(6, dtype=bool)[None, None]
    k, v = k[:, :6], v[:, :6]
    assert_same_bits(exact(q, k, v, causal=True), exact(q, k, v, mask=below))


def test_no_keys():
    q, k, v = inputs(b=2, n=5)
    for out, lse in (
        exact(q, k[:, :0], v[:, :0]),
        exact(q, k, v, kv_lengths=jnp.array([0, 0])),
        exact(q, k * jnp.nan, v * jnp.nan, mask=jnp.zeros((1, 1, 1, 5), bool)),
    ):
        assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


def test_the_ends_of_the_range():
    one = jnp.ones((1, 1, 1, 1), jnp.float32)

    def of(scores, values, bias=0.0):
        k, v = (jnp.array(x, jnp.float32)[None, :, None, None] for x in (scores, values))
        bias = jnp.full((1, 1, 1, 1), bias, jnp.float32)
        out, lse = exact(one, k, v, bias=bias, scale=1.0)
        return float(out[0, 0, 0, 0]), float(lse[0, 0, 0])

    assert of([LARGEST, LARGEST], [1, 3])[0] == 2
    assert of([-LARGEST, -LARGEST], [1, 3])[0] == 2
    np.testing.assert_allclose(of([1e7, 1e7 + 64], [1, 3])[0], 3, rtol=2e-7)
    assert of([1e9, 2e9], [1, 3])[0] == 2  # both count as 2^26
    np.testing.assert_allclose(of([1e9, 0], [1, 3])[1], 2.0**26, rtol=1e-6)
    assert of([0, -LARGEST], [1, 3], np.inf)[0] == 2
    np.testing.assert_allclose(of([0, 0], [LARGEST, LARGEST])[0], LARGEST, rtol=1e-6)
    np.testing.assert_allclose(of([0, -60], [1, 1e30])[0], 1 + 1e30 * np.exp(-60), rtol=1e-5)
    np.testing.assert_allclose(of([0, 0], [1e-30, 3e-30])[0], 2e-30, rtol=1e-6)
    np.testing.assert_allclose(of([0, -10], [0, 1e-20])[0], 1e-20 * np.exp(-10), rtol=1e-3)
    assert of([5, 5], [1, np.inf])[0] > 1e38


def test_a_nan_that_nobody_sees_and_one_that_somebody_does():
    q, k, v = inputs(l=2, n=6)
    k, v = k.at[:, 4].set(jnp.nan), v.at[:, 5].set(jnp.nan)
    mask = jnp.arange(6)[None, None, None] < jnp.array([4, 6])[None, None, :, None]
    out, lse = exact(q, k, v, mask=mask)
    assert_same_bits([x[:, :1] for x in (out, lse)], exact(q[:, :1], k[:, :4], v[:, :4]))
    assert np.isnan(out[:, 1]).all() and np.isnan(lse[:, 1]).all()
    out, lse = exact(q, k[:, :4], v[:, 2:])  # the NaN is a value: its weight is known
    assert np.isnan(out).all() and np.isfinite(lse).all()


def test_tails_count():
    """A million keys, each a billionth of the one that leads, are a thousandth of the sum."""
    n = 1 << 20
    scores = np.full(n, np.log(1e-9), np.float32)
    scores[7] = 0
    k = scores[None, :, None, None]
    v = np.where(scores == 0, 0, 1).astype(np.float32)[None, :, None, None]
    out, _ = exact(np.ones((1, 1, 1, 1), np.float32), k, v, scale=1.0)
    weight = np.exp(scores.astype(np.float64))
    np.testing.assert_allclose(out[0, 0, 0, 0], 1 - 1 / weight.sum(), rtol=1e-3)


# What is refused.


def test_what_has_no_exact_form(unchecked):
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"^q: exact sums take .* got float64"):
        exact_state(*(x.astype(jnp.float64) for x in (q, k, v)), scale=1.0)
    many, one = (jax.ShapeDtypeStruct((1, n, 1, 1), jnp.float32) for n in (2**28 + 1, 1))
    with pytest.raises(ValueError, match=r"^k: exact sums take at most 268435456 keys"):
        jax.eval_shape(functools.partial(exact_state, scale=1.0), one, many, many)
    with pytest.raises(TypeError, match="exact sums have no gradient"):
        jax.grad(lambda q: exact(q, k, v)[0].sum())(q)
