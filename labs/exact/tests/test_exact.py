"""The exact state and its merges: every bit the same, and as near to float64 as float32 gets."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn import (
    AttentionState,
    ExactState,
    attend,
    attend_exact,
    finalize,
    from_output,
    kv_mesh,
    merge_across,
    tree_decode,
)
from labs.cost import collectives, memory
from treeattn.kernel import exactly
from treeattn.kernel.digits import log, weight_of
from treeattn.kernel.exact import MAX_KEYS, from_state, limbs, value_of

KEYS = 24
PARTS = 5
LARGEST = np.finfo(np.float32).max

attend_to = functools.partial(attend, implementation="exact")


@functools.partial(jax.jit, static_argnames=("scale", "causal"))
def exact(q, k, v, **options):
    """(out, lse) on one device."""
    return finalize(attend_to(q, k, v, **options))


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


# One device: any order of the keys, any partition, any tree of merges.


@jax.jit
def merged_in_parts(q, k, v, order, part_of, parts):
    """(out, lse) of the keys in that order, each in the part that it belongs to, the parts merged
    one after another as `parts` says."""
    k, v, part_of = k[:, order], v[:, order], part_of[order]

    def merge_part(state, part):
        mask = (part_of == part)[None, None, None]
        return state.merge(attend_exact(q, k, v, mask=mask)), None

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
    assert min(values) * (1 + 1e-6) - 1e-37 <= out <= max(values) * (1 + 1e-6) + 1e-37 or (
        min(values) * (1 - 1e-6) - 1e-37 <= out <= max(values) * (1 - 1e-6) + 1e-37
    )
    arrays = (np.array(x) for x in (order, part_of, range(PARTS)))
    assert_same_bits(merged_in_parts(q, k, v, *arrays), together)


def test_the_merge_is_a_monoid():
    """Of all fields, not of the rounded result only."""
    rng = np.random.default_rng(1)
    q = random_values(rng, (1, 64, 1, 4))
    run = jax.jit(attend_exact)
    shapes = (1, 6, 1, 4), (1, 6, 1, 3)
    a, b, c = (run(q, *(random_values(rng, shape) for shape in shapes)) for _ in range(3))
    nothing = ExactState.identity((1, 64, 1), 3)
    assert_same_bits(a.merge(b), b.merge(a))
    assert_same_bits(a.merge(b).merge(c).rounded(), a.merge(b.merge(c)).rounded())
    assert_same_bits(a.merge(nothing), a)
    assert_same_bits(nothing.merge(a), a)


def test_floats_are_no_monoid():
    """The same states in floating point: most sums of three depend on the order."""
    q, k, v = inputs(l=64, n=6, seed=2)
    a, b, c = (attend(q, k[:, i : i + 2], v[:, i : i + 2]) for i in (0, 2, 4))
    left = finalize(treeattn.merge(treeattn.merge(a, b), c))[0]
    right = finalize(treeattn.merge(a, treeattn.merge(b, c)))[0]
    assert (np.asarray(left) != np.asarray(right)).mean() > 0.1


# A score's own surroundings.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_queries_and_neighbours_change_nothing(dtype):
    q, k, v = inputs(b=2, l=3, h=4, h_kv=2, n=70, dtype=dtype)
    lengths = jnp.array([70, 41])
    together = exact(q, k, v, kv_lengths=lengths)
    row, n = 1, 41
    alone = exact(q[row:], k[row:, :n], v[row:, :n])
    assert_same_bits(alone, [x[row:] for x in together])
    for i in range(3):
        one = exact(q[row:, i : i + 1], k[row:, :n], v[row:, :n])
        assert_same_bits(one, [x[row:, i : i + 1] for x in together])
    some = exact(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], kv_lengths=lengths)
    assert_same_bits(some, [x[:, :, 2:] for x in together])


def test_more_keys_that_nobody_sees_change_nothing():
    """From 1 to 70 keys, which end in every remainder of a vector's width."""
    q, k, v = inputs(n=70, d=12, dv=5)
    for n in (1, 2, 5, 15, 17, 63, 69):
        fewer = exact(q, k[:, :n], v[:, :n])
        assert_same_bits(fewer, exact(q, k, v, mask=jnp.arange(70)[None, None, None] < n))
        assert_same_bits(fewer, exact(q, k, v, kv_lengths=jnp.array([n])))


@pytest.mark.parametrize("block", [1, 64])
def test_blocks_change_nothing(block, monkeypatch):
    q, k, v = inputs(h=4, h_kv=2, n=150)
    expected = exact(q, k, v)
    monkeypatch.setattr(exactly, "BLOCK", block)
    monkeypatch.setattr(exactly, "SCORES", 1)
    monkeypatch.setattr(exactly, "LEAST", block)
    assert_same_bits(finalize(attend_to(q, k, v)), expected)


@pytest.mark.parametrize("f", [weight_of, log])
def test_a_function_does_not_know_its_neighbours(f, optimized):
    """At every position of arrays of 1 to 70, alone, and fused with what stands around it."""
    x = np.abs(np.random.default_rng(0).normal(size=70).astype(np.float32) * 30) + 0.01
    expected = f(jnp.asarray(x))
    for n in (*range(1, 10), 15, 17, 33, 65):
        for start in (0, 70 - n):
            part = slice(start, start + n)
            assert_same_bits(jax.jit(f)(x[part]), jax.tree.map(operator.itemgetter(part), expected))
    fused = jax.jit(lambda x, y: jax.tree.map(lambda z: z + y, f(x * y)))(
        x, np.ones(70, np.float32)
    )
    assert_same_bits(fused, jax.tree.map(lambda z: z + np.float32(1), expected))


def test_functions_are_right():
    x = np.linspace(-30, 30, 100_001, dtype=np.float32)
    index, weight = (np.asarray(y, np.float64) for y in weight_of(jnp.asarray(x)))
    assert np.abs(256**index * weight / 256 ** x.astype(np.float64) - 1).max() < 4e-7
    assert weight.min() > 0.7 and weight.max() < 182
    x = np.exp(np.linspace(-80, 80, 100_001)).astype(np.float32)
    error = np.abs(np.asarray(log(jnp.asarray(x))) - np.log(x.astype(np.float64)))
    assert (error / np.maximum(np.abs(np.log(x)), 1)).max() < 1.5e-7


# Near to float64.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 6, 2, 64, 3000), (1, 9, 2, 1, 128, 600)])
def test_errors_are_no_larger_than_those_of_float_sums(shape, dtype):
    b, l, h, h_kv, d, n = shape
    q, k, v = inputs(b, l, h, h_kv, d, d, n, dtype=dtype)
    dense, lse = dense_attention(q, k, v), dense_weights(q, k)[1]

    def error(implementation):
        state = finalize(attend(q, k, v, implementation=implementation))
        return [
            np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2))
            for x, y in zip(state, (dense, lse), strict=True)
        ]

    ours, theirs = error("exact"), error("blockwise")
    assert ours[0] <= 1.1 * theirs[0]
    assert ours[1] <= 1.1 * theirs[1] + 1e-7


@pytest.mark.slow
def test_masks_biases_lengths_and_causality():
    rng = np.random.default_rng(3)
    q, k, v = inputs(b=2, l=6, h=4, h_kv=2, n=30)
    mask = rng.random((2, 1, 6, 30)) < 0.4
    bias = rng.normal(size=(1, 4, 1, 30)).astype(np.float32)
    bias[..., 3] = -np.inf
    for options in (
        {"mask": mask},
        {"bias": bias},
        {"mask": mask, "bias": bias, "kv_lengths": np.array([30, 7]), "scale": 0.7},
    ):
        out, lse = exact(q, k, v, **options)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=0, atol=2e-6)
    scaled = finalize(attend_to(q, k, v, scale=jnp.float32(0.7)))[0]
    np.testing.assert_allclose(scaled, exact(q, k, v, scale=0.7)[0], rtol=0, atol=2e-6)
    below = np.tri(6, dtype=bool)[None, None]
    k, v = k[:, :6], v[:, :6]
    assert_same_bits(exact(q, k, v, causal=True), exact(q, k, v, mask=below))
    chain = jnp.full((2, 6), 6)
    assert_same_bits(exact(q, k, v, ends=chain), exact(q, k, v, mask=below))


def test_no_keys():
    q, k, v = inputs(b=2, n=5)
    for state in (
        attend_to(q, k[:, :0], v[:, :0]),
        attend_to(q, k, v, kv_lengths=jnp.array([0, 0])),
        attend_to(q, k * jnp.nan, v * jnp.nan, mask=jnp.zeros((1, 1, 1, 5), bool)),
    ):
        out, lse = finalize(state)
        assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


def test_the_ends_of_the_range():
    one = jnp.ones((1, 1, 1, 1), jnp.float32)

    def of(scores, values, bias=0.0):
        k, v = (jnp.array(x, jnp.float32)[None, :, None, None] for x in (scores, values))
        bias = jnp.full((1, 1, 1, 1), bias, jnp.float32)
        out, lse = exact(one, k, v, bias=bias, scale=1.0)
        return float(out[0, 0, 0, 0]), float(lse[0, 0, 0])

    assert of([LARGEST, LARGEST], [1, 3])[0] == 2
    np.testing.assert_allclose(of([LARGEST, 0], [1, 3])[1], LARGEST, rtol=1e-6)
    assert of([LARGEST, 0], [1, 3], LARGEST)[0] == of([LARGEST, 0], [1, 3], np.inf)[0] == 2
    assert of([-LARGEST, -LARGEST], [1, 3])[0] == 2
    assert of([1e9, 1e9 + 64], [1, 3])[0] == 3
    np.testing.assert_allclose(of([0, 0], [LARGEST, LARGEST])[0], LARGEST, rtol=1e-6)
    np.testing.assert_allclose(of([0, -60], [1, 1e30])[0], 1 + 1e30 * np.exp(-60), rtol=1e-5)
    np.testing.assert_allclose(of([0, 0], [1e-30, 3e-30])[0], 2e-30, rtol=1e-6)
    np.testing.assert_allclose(of([0, -10], [0, 1e-20])[0], 1e-20 * np.exp(-10), rtol=1e-3)
    assert of([5, 5], [1, np.inf])[0] > 1e38
    for what in (of([0, np.nan], [1, 1]), of([0, 1], [np.nan, 1]), of([0, np.inf], [1, 1])):
        assert np.isnan(what).all()


def test_a_nan_that_nobody_sees_and_one_that_somebody_does():
    q, k, v = inputs(l=2, n=6)
    k, v = k.at[:, 4].set(jnp.nan), v.at[:, 5].set(jnp.nan)
    mask = jnp.arange(6)[None, None, None] < jnp.array([4, 6])[None, None, :, None]
    out, lse = exact(q, k, v, mask=mask)
    assert_same_bits([x[:, :1] for x in (out, lse)], exact(q[:, :1], k[:, :4], v[:, :4]))
    assert np.isnan(out[:, 1]).all() and np.isnan(lse[:, 1]).all()


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


# Gradients.


@pytest.mark.slow
def test_gradients_are_the_ordinary_ones():
    q, k, v = inputs(b=2, l=2, h=4, h_kv=2, n=20)
    lengths = jnp.array([20, 0])
    w, u = draw([(2, 2, 4, 8), (2, 2, 4)])

    def loss(f, q, k, v):
        out, lse = f(q, k, v, kv_lengths=lengths)
        return jnp.sum(w * out) + jnp.sum(jnp.where(lse == -jnp.inf, 0, u * lse))

    mesh = kv_mesh(jax.devices()[:3])
    over = functools.partial(
        tree_decode, mesh=mesh, axis="kv", method="exact", return_lse=True, batch_axis=()
    )
    expected = dense_gradients(q, k, v, w, u, kv_lengths=lengths)
    for f in (exact, over):
        found = jax.jit(jax.grad(functools.partial(loss, f), argnums=(0, 1, 2)))(q, k, v)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
    vmapped = jax.vmap(lambda q: exact(q[None], k[:1], v[:1]))(q[:1])
    assert_same_bits([x[0] for x in vmapped], exact(q[:1], k[:1], v[:1]))


# Many devices.


@pytest.mark.slow
def test_any_number_of_devices_has_the_bits_of_one():
    q, k, v = inputs(b=2, l=2, h=6, h_kv=2, n=70)
    options = {"kv_lengths": jnp.array([61, 0])}
    expected = exact(q, k, v, **options)
    for p in range(1, 10):
        mesh = kv_mesh(jax.devices()[:p])
        found = tree_decode(
            q, k, v, mesh=mesh, axis="kv", method="exact", return_lse=True, **options
        )
        assert_same_bits(found, expected)


AXES = [
    {"axis": ("a", "b", "c")},
    {"axis": ("c", "a")},
    {"axis": "b", "batch_axis": "a", "head_axis": "c"},
    {"axis": ("b", "a"), "head_axis": "c"},
]


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES)
def test_any_mesh_has_the_bits_of_one_device(axes):
    q, k, v = inputs(b=2, l=2, h=4, h_kv=2, n=21)
    mask = np.random.default_rng(4).random((2, 1, 2, 21)) < 0.7
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
    decode = functools.partial(tree_decode, mesh=mesh, method="exact", return_lse=True, **axes)
    expected = exact(q, k, v, mask=mask)
    assert_same_bits(decode(q, k, v, mask=mask), expected)
    order = np.random.default_rng(5).permutation(21)
    shuffled = decode(q, k[:, order], v[:, order], mask=mask[..., order])
    assert_same_bits(shuffled, expected)


@functools.cache
def over_devices(p):
    mesh = kv_mesh(jax.devices()[:p])

    def merge(states):
        own = jax.tree.map(lambda x: x[0], states)
        return merge_across(own, "kv", method="exact")

    return jax.jit(jax.shard_map(merge, mesh=mesh, in_specs=P("kv"), out_specs=P()))


def test_states_of_every_device_merge_in_any_order():
    """Rounded states are keys: the same ones give the same bits, on any devices."""
    q, k, v = inputs(l=3, n=8 * 6)
    states = [attend(q, k[:, i::8], v[:, i::8]) for i in range(8)]
    states[2] = AttentionState.identity((1, 3, 2), 8)
    merged = functools.reduce(ExactState.merge, map(from_state, states)).rounded()
    plain = functools.reduce(treeattn.merge, states)
    for x, y in zip(finalize(merged), finalize(plain), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(8)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(states[i] for i in order))
        assert_same_bits(over_devices(8)(stacked), merged)


def test_exact_states_merge_across_devices_and_with_new_keys():
    """What a model does: the cache in shards, new keys on one device, one rounding at the end."""
    q, k, v = inputs(l=3, n=43)
    expected = exact(q, k, v)
    mesh = kv_mesh(jax.devices()[:5])

    def on_device(q, k, v, new_k, new_v):
        cached = attend_exact(q, k, v)
        mine = cached.merge(attend_exact(q, new_k, new_v))
        first = jax.lax.axis_index("kv") == 0
        state = jax.tree.map(lambda x, y: jnp.where(first, x, y), mine, cached)
        return finalize(merge_across(state, "kv", method="exact"))

    shard = P(None, "kv")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), shard, shard, P(), P()), out_specs=P())
    assert_same_bits(jax.jit(run)(q, k[:, :40], v[:, :40], k[:, 40:], v[:, 40:]), expected)


@pytest.mark.parametrize("p", [2, 8])
def test_what_it_sends(p):
    """Four integers for each number of a state, and two float32 a head: whatever the context."""
    b, h, dv = 2, 16, 128
    for n in (1024, 4096):
        shapes = (b, 1, h, 128), (b, n, h, 128), (b, n, h, dv)
        q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        mesh = kv_mesh(jax.devices()[:p])
        decode = functools.partial(tree_decode, mesh=mesh, axis="kv", method="exact")
        found = collectives(jax.jit(decode).lower(q, k, v).compile())
        assert [c.kind for c in found] == 3 * ["all-reduce"]
        assert sorted(c.operand_bytes for c in found) == [4 * b * h] * 2 + [16 * b * h * (dv + 2)]


def test_more_than_127_devices_have_smaller_limbs():
    """The same number from limbs of 16 bits, whose sums over 32,767 devices stay in range."""
    rng = np.random.default_rng(6)
    high = rng.integers(-(2**30), 2**30, (6, 50))
    low = rng.integers(0, 2**16, (6, 50))
    whole = sum((high[a].astype(object) * 2**16 + low[a]) * 256 ** (5 - a) for a in range(6))
    levels = jnp.asarray(np.stack([high, low], axis=1), jnp.int32)
    for devices, bits in ((127, 24), (32_767, 16)):
        value = np.asarray(value_of(limbs(levels, bits), bits), np.float64)
        np.testing.assert_allclose(value, (whole / 2**40).astype(float), rtol=2e-7)
        assert devices * (2**bits - 1) < 2**31


@pytest.mark.slow
def test_memory_does_not_grow_with_the_keys(optimized):
    def temporary(n):
        q = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16)
        lengths = jax.ShapeDtypeStruct((1,), "int32")
        run = jax.jit(lambda q, k, v, lengths: attend_to(q, k, v, kv_lengths=lengths))
        return memory(run.lower(q, k, k, lengths).compile()).temporary_bytes

    assert temporary(16 * 1024) <= temporary(2 * 1024) + 1024


# What is refused.


def test_what_has_no_exact_form(unchecked):
    q, k, v = inputs()
    decode = functools.partial(
        tree_decode, mesh=kv_mesh(jax.devices()[:2]), axis="kv", method="exact"
    )
    wide = [x.astype(jnp.float64) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"q: implementation 'exact' takes .* got float64"):
        attend_to(*wide)
    with pytest.raises(ValueError, match=r"q: implementation 'exact' takes .* got float64"):
        decode(*wide)
    with pytest.raises(ValueError, match=r"^implementation: method 'exact' takes None or 'exact'"):
        decode(q, k, v, implementation="blockwise")
    with pytest.raises(ValueError, match=r"^wire: method 'exact' sends integers"):
        decode(q, k, v, wire=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"^scatter: expected one of"):
        decode(q, k, v, scatter=True)
    with pytest.raises(ValueError, match=r"^block: method 'exact'"):
        decode(q, k, v, block=4)
    many = jax.ShapeDtypeStruct((1, MAX_KEYS + 1, 1, 1), jnp.float32)
    one = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    with pytest.raises(ValueError, match=rf"k: .* at most {MAX_KEYS} keys, got {MAX_KEYS + 1}"):
        jax.eval_shape(attend_to, one, many, many)
    state = from_output(jnp.zeros((1, 1, 1, 2), jnp.float64), jnp.zeros((1, 1, 1)))
    with pytest.raises(ValueError, match=r"^state: method 'exact' takes float32"):
        merge_across(state, "kv", method="exact")
    with pytest.raises(TypeError, match=r"^state: expected an AttentionState, got ExactState"):
        merge_across(ExactState.identity((1,), 2), "kv", method="gather")


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(tree_decode, method="allreduce"),
        functools.partial(tree_decode, method="gather", block=4),
        treeattn.ring_decode,
        treeattn.pass_q_decode,
        treeattn.ring_attention,
    ],
)
def test_rounded_states_are_not_called_exact(f, unchecked):
    """Where devices merge states that are rounded, their number would decide the bits."""
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(ValueError, match=r"^implementation: 'exact' .* states are rounded"):
        f(x, x, x, mesh=kv_mesh(jax.devices()[:2]), axis="kv", implementation="exact")


def test_ulysses_is_exact_since_no_states_merge():
    q, k, v = draw([(2, 13, 4, 16), (2, 13, 2, 16), (2, 13, 2, 8)])
    expected = exact(q, k, v, causal=True)[0]
    mesh = kv_mesh(jax.devices()[:4])
    options = {"mesh": mesh, "axis": "kv", "implementation": "exact"}
    assert_same_bits(treeattn.ulysses_attention(q, k, v, **options), expected)
    everything = treeattn.ulysses_attention(q, k, v, causal=False, **options)
    assert_same_bits(everything, exact(q, k, v)[0])
