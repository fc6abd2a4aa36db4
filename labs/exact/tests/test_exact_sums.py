"""Exact sums: every bit the same in any order, split and surroundings, and near to float64."""

import functools
import hashlib
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_inputs import assert_same_bits, exact, inputs
from oracles import dense_attention, dense_weights

from labs.exact import ExactState, attend, check_invariance, exact_state
from labs.exact.digits import log, weight_of
from treeattn import attend as plain_attend
from treeattn import finalize

KEYS = 24
PARTS = 5
LARGEST = np.finfo(np.float32).max


# Any order of the keys, any partition, any tree of merges.


@jax.jit
def merged_in_parts(q, k, v, order, part_of, parts):
    """(out, lse) of the keys in this order, each key in its part, the parts merged one after
    another in the order of `parts`."""
    k, v, part_of = k[:, order], v[:, order], part_of[order]

    def merge_part(state, part):
        mask = (part_of == part)[None, None, None]
        return state.merge(exact_state(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)), None

    start = ExactState.identity(q.shape[:3], v.shape[-1])
    state, _ = jax.lax.scan(merge_part, start, parts)
    return finalize(state.rounded())


def random_values(rng, shape):
    """Ordinary numbers, or numbers of very different sizes, with zeros."""
    x = rng.normal(size=shape)
    if rng.random() < 0.5:
        x = x * 2.0 ** rng.integers(-60, 60, size=shape) * (rng.random(size=shape) < 0.8)
    return x.astype(np.float32)


def test_partitions_and_orders():
    rng = np.random.default_rng(0)
    for case in range(100):
        q, k = random_values(rng, (1, 1, 2, 16)), random_values(rng, (1, KEYS, 1, 16))
        v = random_values(rng, (1, KEYS, 1, 8))
        if case % 2:
            q, k = q / np.abs(q).max(), k / np.abs(k).max() * 40  # many weights that count
        together = exact(q, k, v)
        assert np.isfinite(together[0]).all() and np.isfinite(together[1]).all()
        for _ in range(10):
            order, parts = rng.permutation(KEYS), rng.permutation(PARTS)
            part_of = rng.integers(PARTS, size=KEYS)
            assert_same_bits(merged_in_parts(q, k, v, order, part_of, parts), together)


def test_the_merge_is_a_monoid():
    """The laws hold for all fields, not only for the rounded result."""
    rng = np.random.default_rng(1)
    merge_states = jax.jit(ExactState.merge)
    state_of = jax.jit(functools.partial(exact_state, scale=0.25))
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


# Its surroundings.


def test_rows_queries_and_neighbours_change_nothing():
    """Nor do the order of the keys or the memory behind the cache."""

    def f(q, k, v, kv_lengths=None):
        return exact(q, k, v, **({} if kv_lengths is None else {"kv_lengths": kv_lengths}))

    sizes = {"heads": (4, 2), "head_dim": 12, "keys": (70,), "batches": (2,), "queries": (3,)}
    report = check_invariance(f, **sizes)
    assert report and report.names("skipped") == ["ways"], str(report)


def test_each_head_and_channel_by_itself():
    """A compiler may divide one channel otherwise than eight. The values are alike in size."""
    q, k, v = inputs(h=4, h_kv=2, n=70)
    v = v.at[..., 0].set(4)  # the largest of each row, so that all are cut at the same bit
    together = exact(q, k, v)
    assert_same_bits(exact(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:]), [x[:, :, 2:] for x in together])
    for i in range(1, 8):
        two = jnp.stack([v[..., 0], v[..., i]], axis=-1)
        assert_same_bits(exact(q, k, two)[0][..., 1], together[0][..., i])
    wide = [jnp.pad(x, [(0, 0)] * 3 + [(0, 3)]) for x in (q, k)]
    assert_same_bits(exact(*wide, v, scale=0.25), together)


def test_blocks_change_nothing(monkeypatch):
    q, k, v = inputs(h=4, h_kv=2, n=150)
    expected = exact(q, k, v)
    for block in (1, 64):
        monkeypatch.setattr(attend, "BLOCK", block)
        jax.clear_caches()
        assert_same_bits(exact(q, k, v), expected)
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("f", [weight_of, log])
def test_a_function_does_not_know_its_neighbours(f, optimized):
    """At every position of arrays of 1 to 70, alone, and fused with other operations."""
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


@pytest.mark.parametrize(
    ("l", "h", "h_kv", "d", "n", "dtype"),
    [
        (1, 6, 2, 64, 3000, "float32"),
        (9, 2, 1, 128, 600, "bfloat16"),
        (1, 6, 2, 64, 3000, "float16"),
    ],
)
def test_errors_of_values_of_one_size_are_those_of_float_sums(l, h, h_kv, d, n, dtype):
    """Root mean squares, for normal values: they are all near to the largest of their row."""
    q, k, v = inputs(1, l, h, h_kv, d, d, n, dtype=dtype)
    dense, lse = dense_attention(q, k, v), dense_weights(q, k)[1]

    def errors(found):
        pairs = zip(found, (dense, lse), strict=True)
        return [np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2)) for x, y in pairs]

    ours = errors(exact(q, k, v))
    theirs = errors(finalize(plain_attend(q, k, v, implementation="blockwise")))
    assert ours[0] <= 1.1 * theirs[0]
    assert ours[1] <= 1.1 * theirs[1] + 1e-7


def test_masks_biases_lengths_and_causality():
    rng = np.random.default_rng(3)
    q, k, v = inputs(b=2, l=6, h=4, h_kv=2, n=30)
    mask = rng.random((2, 1, 6, 30)) < 0.4
    bias = rng.normal(size=(1, 4, 1, 30)).astype(np.float32)
    bias[..., 3] = -np.inf
    options = {"mask": mask, "bias": bias, "kv_lengths": np.array([30, 7]), "scale": 0.7}
    out, lse = exact(q, k, v, **options)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=0, atol=2e-6)
    first = jnp.arange(30)[None, None, None] < 13
    assert_same_bits(exact(q, k, v, mask=first), exact(q, k[:, :13], v[:, :13]))
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


@pytest.mark.parametrize(
    ("scores", "values", "out", "rtol"),
    [
        ([LARGEST, LARGEST], [1, 3], 2, 0),
        ([-LARGEST, -LARGEST], [1, 3], 2, 0),
        ([1e7, 1e7 + 64], [1, 3], 3, 2e-7),
        ([1e9, 2e9], [1, 3], 2, 0),  # both count as 2^26
        ([0, 0], [LARGEST, LARGEST], LARGEST, 1e-6),
        ([0, -60], [1, 1e30], 1 + 1e30 * np.exp(-60), 1e-5),
        ([0, 0], [1e-30, 3e-30], 2e-30, 1e-6),
        ([0, -10], [0, 1e-20], 1e-20 * np.exp(-10), 1e-3),
        ([5, 5], [1, np.inf], LARGEST / 2, 1e-6),
    ],
)
def test_the_ends_of_the_range(scores, values, out, rtol):
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    k, v = (jnp.array(x, jnp.float32)[None, :, None, None] for x in (scores, values))
    np.testing.assert_allclose(exact(one, k, v)[0].item(), out, rtol=rtol)


def test_a_nan_that_nobody_sees_and_one_that_somebody_does():
    q, k, v = inputs(l=2, n=6)
    k, v = k.at[:, 4].set(jnp.nan), v.at[:, 5].set(jnp.nan)
    mask = jnp.arange(6)[None, None, None] < jnp.array([4, 6])[None, None, :, None]
    out, lse = exact(q, k, v, mask=mask)
    assert_same_bits([x[:, :1] for x in (out, lse)], exact(q[:, :1], k[:, :4], v[:, :4]))
    assert np.isnan(out[:, 1]).all() and np.isnan(lse[:, 1]).all()
    out, lse = exact(q, k[:, :4], v[:, 2:])  # the NaN is a value: its weight is known
    assert np.isnan(out).all() and np.isfinite(lse).all()


# Refused inputs.


def test_what_has_no_exact_form(unchecked):
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"^q: exact sums take .* got float64"):
        exact_state(*(x.astype(jnp.float64) for x in (q, k, v)), scale=1.0)
    many, one = (jax.ShapeDtypeStruct((1, n, 1, 1), jnp.float32) for n in (2**28 + 1, 1))
    with pytest.raises(ValueError, match=r"^k: exact sums take at most 268435456 keys"):
        jax.eval_shape(functools.partial(exact_state, scale=1.0), one, many, many)
    with pytest.raises(TypeError, match="exact sums have no gradient"):
        jax.grad(lambda q: exact(q, k, v)[0].sum())(q)
