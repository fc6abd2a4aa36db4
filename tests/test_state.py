"""The monoid of attention states against float64 dense attention, and what breaks elsewhere."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp
from calls import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_weights

import treeattn.state
from treeattn import (
    AttentionState,
    attend,
    finalize,
    from_output,
    kv_mesh,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
)
from treeattn.state import rescale, tree_round
from treeattn_conformance import check_merge

N, DV, PARTS = 12, 2, 5  # keys, their values' width, parts they are split into


# ---------------------------------------------------------------- oracles


def dense(s, v, c, e):
    """(out, lse, dL/ds, dL/dv) in float64 numpy, by formula, for L = c·out + e·lse.

    No keys: out 0, lse −∞, and both gradients 0.
    """
    s, v, c = (np.asarray(x, np.float64) for x in (s, v, c))
    m = s.max(initial=-np.inf)
    if m == -np.inf:
        return np.zeros(v.shape[-1]), -np.inf, np.zeros_like(s), np.zeros_like(v)
    p = np.exp(s - m)
    lse = m + np.log(p.sum())
    p /= p.sum()
    out = p @ v
    return out, lse, p * ((v - out) @ c + e), p[:, None] * c


def states_of(s, v, parts):
    """One state a part, (PARTS,), of the keys with scores s (N,) that `parts` gives to it."""
    s = jnp.where(parts == jnp.arange(PARTS)[:, None], s, -jnp.inf)
    m = jnp.max(s, axis=1)
    w = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m)[:, None])
    return AttentionState(m, w.sum(1), w @ v)


def last_of_scan(states):
    return jax.tree.map(lambda x: x[-1], scan_states(states))


def right_to_left(states):
    """Not one of ours: a bracketing that no public reduction uses."""
    states = [AttentionState(*(x[i] for x in states)) for i in range(PARTS)]
    return functools.reduce(lambda right, left: merge(left, right), reversed(states))


REDUCTIONS = [reduce_chain, reduce_tree, last_of_scan]
ORDERS = {
    "chain": reduce_chain,
    "scan": last_of_scan,
    "right to left": right_to_left,
    "tree of 3": functools.partial(reduce_tree, arity=3),
}


def run_of(order):
    """Jitted: scores, values, part of each key, and the parts' order -> as `dense`."""

    def loss(s, v, parts, permutation, c, e):
        states = jax.tree.map(lambda x: x[permutation], states_of(s, v, parts))
        out, lse = finalize(ORDERS[order](states))
        return jnp.sum(c * out) + e * jnp.where(lse == -jnp.inf, 0, lse), (out, lse)

    @jax.jit
    def run(*arguments):
        gradients, results = jax.grad(loss, (0, 1), has_aux=True)(*arguments)
        return *results, *gradients

    return run


RUNS = {order: run_of(order) for order in ORDERS}
SCORES = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([-math.inf, 0.0, 1e4, -1e4, 65504.0, -65504.0, 88.7, -103.0]),
)
# Each is a program to compile.
PROGRAMS = list(zip(ORDERS, ("float32", "float64", "float64", "float32"), strict=True))


@settings(max_examples=200)
@given(
    s=st.lists(SCORES, min_size=N, max_size=N),
    parts=st.lists(st.integers(0, PARTS - 1), min_size=N, max_size=N),
    permutation=st.permutations(range(PARTS)),
    program=st.sampled_from(PROGRAMS),
    e=st.sampled_from([0.0, 1.0, -0.5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_order_of_any_split_is_dense_attention(s, parts, permutation, program, e, seed):
    """Each case is one split of 12 keys into 5 parts (empty ones too), merged in one order."""
    (order, dtype), rng = program, np.random.default_rng(seed)
    s = np.array(s, dtype)
    v, c = rng.normal(size=(N, DV)).astype(dtype), rng.normal(size=DV).astype(dtype)
    got = RUNS[order](s, v, np.array(parts), np.array(permutation), c, np.array(e, dtype))
    # exp's relative error is its argument's absolute one: ε·88 where it has not vanished.
    rtol = 3e-5 if dtype == "float32" else 1e-11
    for x, wanted in zip(got, dense(s, v, c, e), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=rtol, atol=rtol)


# ---------------------------------------------------------------- the laws


def test_the_suite_finds_nothing_wrong():
    @jax.jit
    def merged(outs, lses):
        return finalize(reduce_tree(from_output(outs, lses)))

    report = check_merge(lambda parts: merged(*map(np.stack, zip(*parts, strict=True))))
    assert len(report.names("passed")) == len(report.results) >= 12, str(report)


def random_states(rng, shape, dv=3, dtype=np.float32):
    return AttentionState(
        jnp.asarray(rng.normal(size=shape) * 5, dtype),
        jnp.asarray(rng.uniform(0.5, 20, size=shape), dtype),
        jnp.asarray(rng.normal(size=(*shape, dv)), dtype),
    )


def sums(state):
    """What a state stands for, relative to one pivot for all: (d, n) in float64."""
    m, d, n = (np.asarray(x, np.float64) for x in state)
    return d * np.exp(m), n * np.exp(m)[..., None]


DTYPES = ["bfloat16", "float32", "float64"]


def check_merge_adds(dtype):
    """What the merge stands for is the sum, and its order and its operands' pivots are nothing."""
    rng = np.random.default_rng(0)
    a, b, c = (random_states(rng, (64,), dtype=dtype) for _ in range(3))

    @jax.jit  # anew at every call, so that what was patched is traced
    def run(a, b, c):
        higher = rescale(b, b.max + 2)
        left, right = merge(merge(a, b), c), merge(a, merge(b, c))
        return merge(a, b), merge(b, a), merge(a, higher), left, right

    *pairs, left, right = run(a, b, c)
    rtol = 16 * float(jnp.finfo(dtype).eps)
    (da, na), (db, nb), (dc, nc) = map(sums, (a, b, c))
    wanted = [(da + db, na + nb)] * 3 + [(da + db + dc, na + nb + nc)] * 2
    for state, total in zip((*pairs, left, right), wanted, strict=True):
        for got, x in zip(sums(state), total, strict=True):
            np.testing.assert_allclose(got, x, rtol=rtol, atol=rtol * np.max(abs(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_adds_what_states_stand_for(dtype):
    check_merge_adds(dtype)


@pytest.fixture
def changeable(monkeypatch):
    """`merge` without the programs that it keeps: a part of it may be replaced."""
    monkeypatch.setattr(treeattn.state, "_merge", treeattn.state._merge.__wrapped__)


@pytest.mark.usefixtures("changeable")
def test_without_rescaling_the_sums_are_wrong(monkeypatch):
    monkeypatch.setattr(treeattn.state, "rescale", lambda x, m: x._replace(max=m))
    with pytest.raises(AssertionError):
        check_merge_adds("float64")


def test_no_keys_in_another_dtype_are_no_keys():
    """Whichever dtype is wider: what stands for −∞ in one is a number in the other."""
    run = jax.jit(merge)
    for half, other in ("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64"):
        none = AttentionState.identity((1,), 1, half)
        for pivot in (-np.inf, -1e6, -1e38, 0.0):
            d = np.full(1, pivot > -np.inf, other)
            state = AttentionState(np.full(1, pivot, other), d, 5 * d[:, None])
            for merged in run(none, state), run(state, none):
                for x, y in zip(merged, state, strict=True):
                    np.testing.assert_array_equal(np.asarray(x, "float64"), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity_changes_no_bit(dtype):
    """And finalize keeps the dtype, but never a half-precision lse."""
    state, none = (
        random_states(np.random.default_rng(1), (16,), dtype=dtype),
        AttentionState.identity((16,), 3, dtype),
    )
    pairs = [(merge(none, state), state), (merge(state, none), state), (merge(none, none), none)]
    for merged, wanted in pairs:
        for x, y in zip(merged, wanted, strict=True):
            assert x.dtype == dtype
            np.testing.assert_array_equal(x, y)
    out, lse = finalize(state)
    assert out.dtype == dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")


def test_the_wider_dtype_wins():
    rng = np.random.default_rng(3)
    merged = merge(random_states(rng, (2,)), random_states(rng, (2,), dtype=np.float64))
    assert {x.dtype for x in merged} == {np.dtype("float64")}
    half = from_output(jnp.ones((2, 3), "bfloat16"), jnp.ones(2, "float16"))
    assert {x.dtype for x in half} == {np.dtype("float32")}


def test_an_infinite_lse_means_no_keys():
    """Whatever stands beside it, in every second row; but a NaN beside +∞ is one."""
    rng = np.random.default_rng(4)
    good, lse = rng.normal(size=(4, 3)), rng.normal(size=4)

    @jax.jit
    def run(out, lse):
        def loss(out, lse):
            out, lse = finalize(merge(from_output(out, lse), from_output(out, lse)))
            return out.sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

        state = from_output(out, lse)
        return state, finalize(state), jax.grad(loss, (0, 1))(out, lse)

    beside = itertools.product([-np.inf, np.inf], [np.inf, 7.0])
    for infinity, value in [*beside, (-np.inf, np.nan)]:
        out = good.copy()
        lse[::2], out[::2] = infinity, value
        state, (again, lse_again), gradients = jax.tree.map(np.asarray, run(out, lse))
        assert (state.max[::2] == -np.inf).all() and not state.numerator[::2].any()
        np.testing.assert_allclose(again[1::2], out[1::2])
        np.testing.assert_allclose(lse_again[1::2], lse[1::2])
        assert not again[::2].any() and (lse_again[::2] == -np.inf).all()
        for gradient in gradients:
            assert not gradient[::2].any() and np.isfinite(gradient).all()
            np.testing.assert_allclose(gradient[1::2], 1, rtol=1e-12)


def test_a_nan_with_an_infinite_lse_is_not_lost():
    """FlashAttention-2 writes lse = +∞ for a sum that is NaN, as it does for no keys."""
    out = np.array([[1.0, 2.0], [np.nan, 2.0], [np.nan, np.nan]])
    state = from_output(out, np.full(3, np.inf))
    more = merge(state, from_output(np.ones((3, 2)), np.zeros(3)))
    for of_nan, seen in (state, 0.0), (more, 1.0):
        out, lse = finalize(of_nan)
        np.testing.assert_array_equal(np.isnan(lse), [False, True, True])
        np.testing.assert_array_equal(out[0], [seen, seen])
        assert np.isnan(out[1:]).any(axis=-1).all()


@pytest.mark.parametrize("dv", [1, 2, 24])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_output_has_the_bits_of_a_product_with_the_reciprocal(dtype, dv, optimized):
    """n / d has them in some releases of JAX, unless dv is 1, and in others it has its own."""
    state = random_states(np.random.default_rng(6), (2, 64), dv, dtype)
    _, d, n = map(np.asarray, state)
    for run in finalize, jax.jit(lambda x: finalize(x)):
        np.testing.assert_array_equal(run(state)[0], n * (1 / d)[..., None])
    assert dv == 1 or (n / d[..., None] != n * (1 / d)[..., None]).any()


def test_a_pivot_of_minus_infinity_hides_whatever_stands_beside_it():
    state = AttentionState(jnp.full(1, -jnp.inf), jnp.ones(1), jnp.ones((1, 2)))
    out, lse = finalize(state)
    assert not out.any() and lse[0] == -jnp.inf


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_empty_states_anywhere(reduce):
    states = random_states(np.random.default_rng(5), (4, 2), dtype=np.float64)
    run = jax.jit(lambda states: finalize(reduce(states)))
    for pattern in itertools.product([False, True], repeat=4):
        hide = np.array(pattern)[:, None]
        holed = AttentionState(
            np.where(hide, -np.inf, states.max),
            np.where(hide, 0, states.denominator),
            np.where(hide[..., None], 0, states.numerator),
        )
        d, n = (x.sum(0) for x in sums(holed))
        out, lse = run(holed)
        np.testing.assert_allclose(out, n / np.where(d, d, 1)[:, None], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(np.exp(lse), d, rtol=1e-12)


@pytest.mark.parametrize("reduce", [reduce_chain, reduce_tree])
def test_no_states_at_all_are_no_keys(reduce):
    out, lse = finalize(reduce(AttentionState.identity((2, 0), 3), axis=1))
    assert out.shape == (2, 3) and not out.any() and (lse == -np.inf).all()
    assert scan_states(AttentionState.identity((0, 2), 3)).max.shape == (0, 2)


# ---------------------------------------------------------------- the laws, in symbols


def symbolic_merge(a, b, pivot, rescaled="ab"):
    """Of one component, to a pivot that need not be a maximum."""
    wa = sp.exp(a[0] - pivot) if "a" in rescaled else 1
    wb = sp.exp(b[0] - pivot) if "b" in rescaled else 1
    return sp.Matrix([pivot, a[1] * wa + b[1] * wb, a[2] * wa + b[2] * wb])


@pytest.mark.parametrize("rescaled", ["ab", "b", ""])
def test_the_proof_that_merging_is_addition(rescaled):
    """With all pivots free; and the proof fails for merges that do not rescale both states."""
    a, b, c = (sp.symbols(f"m_{x} d_{x} n_{x}", real=True) for x in "abc")
    m, m1, m2 = sp.symbols("M M_1 M_2", real=True)

    def stands_for(x):
        return sp.Matrix([x[1], x[2]]) * sp.exp(x[0])

    def add(x, y, pivot):
        return symbolic_merge(x, y, pivot, rescaled)

    right = rescaled == "ab"
    left_over = stands_for(add(a, b, m)) - stands_for(a) - stands_for(b)
    assert (sp.simplify(left_over) == sp.zeros(2, 1)) is right
    two_ways = add(add(a, b, m1), c, m) - add(a, add(b, c, m2), m)
    assert (sp.simplify(two_ways) == sp.zeros(3, 1)) is (rescaled != "b")
    assert (sp.simplify(stands_for(add(a, b, m)).diff(m)) == sp.zeros(2, 1)) is right


# ---------------------------------------------------------------- range


def awkward_states(large):
    """Empty ones, pivots at the ends of float32, and sums of ±`large`."""
    largest = float(jnp.finfo("float32").max)
    pivots = [-np.inf, -np.inf, largest, -largest, 1e4, -1e4, 0, 0, 0, 0]
    sums = [0, 0, 1, 1, 1, 1, large, large, large, large]
    values = [0, 0, 1, 1, 1, 1, large, large, -large, -large]
    return AttentionState(*(np.float32(x) for x in (pivots, sums, np.array(values)[:, None])))


def check_no_nan(reduce=reduce_tree):
    """No field or output of a reduction of awkward but finite states is NaN; no gradient
    either, as long as a product with a sum stays in range."""

    @jax.jit  # anew at every call, so that what was patched is traced
    def run(states):
        reduced = reduce(states)
        return *reduced, *finalize(reduced)

    gradients = jax.jit(jax.grad(lambda x: finalize(reduce(x))[0].sum()))
    largest = float(jnp.finfo("float32").max)
    for order in (np.arange(10), np.arange(10)[::-1], np.arange(10) % 2, [0, 6, 8, 7, 9] * 2):
        states = AttentionState(*(x[np.array(order)] for x in awkward_states(largest)))
        assert not any(np.isnan(x).any() for x in run(states))
        states = AttentionState(*(x[np.array(order)] for x in awkward_states(1e18)))
        assert all(np.isfinite(x).all() for x in gradients(states))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_no_nan_from_finite_states(reduce):
    check_no_nan(reduce)


def test_an_infinite_score_takes_all_the_weight():
    one = AttentionState(jnp.full(1, jnp.inf), jnp.ones(1), jnp.full((1, 1), 5.0))
    rest = AttentionState(jnp.zeros(1), jnp.ones(1), jnp.ones((1, 1)))
    assert finalize(merge(one, rest))[0] == finalize(merge(rest, one))[0] == 5


def test_a_nan_is_not_hidden():
    state = AttentionState(jnp.zeros(1), jnp.ones(1), jnp.full((1, 1), jnp.nan))
    assert jnp.isnan(finalize(merge(state, AttentionState.identity((1,), 1)))[0]).all()


# ---------------------------------------------------------------- other forms of the merge


def test_output_and_lse_and_sigmoid_forms():
    rng = np.random.default_rng(6)
    out, lse = rng.normal(size=(2, 9, 3)), rng.normal(size=(2, 9)) * 10
    a, b = (from_output(o, l) for o, l in zip(out, lse, strict=True))
    merged_out, merged_lse = finalize(merge(a, b))
    total = np.logaddexp(*lse)
    weighted = (out * np.exp(lse - total)[..., None]).sum(0)
    np.testing.assert_allclose(merged_out, weighted, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(merged_lse, total, rtol=1e-12)
    gate = jax.nn.sigmoid(lse[1] - lse[0])[:, None]
    np.testing.assert_allclose(merged_out, out[0] + gate * (out[1] - out[0]), rtol=1e-12)
    np.testing.assert_allclose(merged_lse, lse[0] - jax.nn.log_sigmoid(lse[0] - lse[1]), rtol=1e-12)


def test_the_reduction_notes_formulas_along_a_tree():
    """(m, z, y) by the note's three equations in plain Python, four shards, two levels."""
    rng = np.random.default_rng(7)
    s, v = rng.normal(size=(4, 3)) * 4, rng.normal(size=(4, 3))
    level = []
    for scores, values in zip(s, v, strict=True):
        m = max(scores)
        e = [math.exp(x - m) for x in scores]
        level.append((m, math.fsum(e), math.fsum(x * y for x, y in zip(e, values, strict=True))))
    leaves = AttentionState(*(np.array(x) for x in zip(*level, strict=True)))
    leaves = leaves._replace(numerator=leaves.numerator[:, None])
    while len(level) > 1:
        pairs, level = zip(level[::2], level[1::2], strict=True), []
        for (ma, za, ya), (mb, zb, yb) in pairs:
            m = max(ma, mb)
            wa, wb = math.exp(ma - m), math.exp(mb - m)
            level.append((m, za * wa + zb * wb, ya * wa + yb * wb))
    root = jax.jit(reduce_tree)(leaves)
    np.testing.assert_allclose([float(x.squeeze()) for x in root], level[0], rtol=1e-14)
    p = np.exp(s - s.max())
    np.testing.assert_allclose(level[0][2] / level[0][1], (p * v).sum() / p.sum(), rtol=1e-13)


def test_the_reduction_notes_scores_have_a_row_for_each_query():
    """Its S in R^(L_u × L) is transposed: the sums over j, with V_j, need one of (L, L_u)."""
    rng = np.random.default_rng(12)
    s = [rng.normal(size=(5, n)) * 4 for n in (3, 4, 1, 6)]  # L = 5 queries
    v = [rng.normal(size=(x.shape[1], 2)) for x in s]

    def local(s, v):
        m = s.max(axis=1)
        e = np.exp(s - m[:, None])
        return AttentionState(m, e.sum(axis=1), np.einsum("ij,jd->id", e, v))

    states = AttentionState(*map(np.stack, zip(*map(local, s, v), strict=True)))
    out, _ = jax.jit(lambda x: finalize(reduce_tree(x)))(states)
    whole = np.exp(np.concatenate(s, axis=1))
    wanted = whole @ np.concatenate(v) / whole.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, wanted, rtol=1e-12)
    with pytest.raises(ValueError, match="could not be broadcast"):
        local(s[0].T, v[0])


# ---------------------------------------------------------------- causal attention as a scan


def test_scan_is_causal_attention():
    """One state for each query and key, scanned along the keys: its diagonal is causal."""
    rng = np.random.default_rng(8)
    s, v = rng.normal(size=(7, 7)) * 3, rng.normal(size=(7, 2))
    one_key = AttentionState(s, np.ones((7, 7)), np.broadcast_to(v, (7, 7, 2)))
    run = jax.jit(lambda states: finalize(scan_states(states, axis=-1)))
    outs, lses = map(np.asarray, run(one_key))
    for i in range(7):
        for j in range(7):
            out, lse, *_ = dense(s[i, : j + 1], v[: j + 1], np.zeros(2), 0)
            np.testing.assert_allclose(outs[i, j], out, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lses[i, j], lse, rtol=1e-12)


def test_shards_of_a_cache_merge_to_attention_over_it():
    rng = np.random.default_rng(9)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, h, 8))) for n, h in ((3, 4), (20, 2), (20, 2)))
    whole = dense_attention(q, k, v), dense_weights(q, k)[1]
    cuts = [0, 1, 1, 8, 20]  # an empty shard too

    @jax.jit
    def sharded(q, k, v):
        shards = [attend(q, k[:, i:j], v[:, i:j]) for i, j in itertools.pairwise(cuts)]
        return finalize(reduce_tree(jax.tree.map(lambda *x: jnp.stack(x, 1), *shards), axis=1))

    for got, wanted in zip(sharded(q, k, v), whole, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- gradients


def squares(state):
    out, lse = finalize(state)
    return jnp.sum(out**2) + jnp.sum(lse**2)


def test_derivatives_by_every_field_against_finite_differences():
    """max included: what is differentiated is d·eᵐ and n·eᵐ, wherever the pivots are stopped.

    The first derivative along one direction, and the second.
    """
    x = random_states(np.random.default_rng(10), (3, 2), dtype=np.float64)
    rng = np.random.default_rng(10)
    u = jax.tree.map(lambda y: rng.normal(size=y.shape), x)

    @jax.jit
    @jax.vmap
    def along(h):  # value, slope and curvature
        def f(h):
            return squares(reduce_tree(jax.tree.map(lambda y, z: y + h * z, x, u)))

        return f(h), jax.grad(f)(h), jax.grad(jax.grad(f))(h)

    h = 1e-4
    value, slope, curvature = along(np.array([-h, 0, h]))
    np.testing.assert_allclose(slope[1], (value[2] - value[0]) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(curvature[1], (slope[2] - slope[0]) / (2 * h), rtol=1e-6)


def test_a_tie_between_pivots_has_the_same_gradient_as_none():
    """maximum's own gradient splits at a tie; a stopped pivot has none to split."""

    def lse(m):
        return finalize(reduce_tree(AttentionState(m, jnp.ones(2), jnp.ones((2, 1)))))[1]

    np.testing.assert_allclose(jax.jit(jax.grad(lse))(np.zeros(2)), [0.5, 0.5], rtol=1e-12)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_are_zero_where_there_are_no_keys(reduce):
    states = jax.tree.map(
        lambda x, y: jnp.concatenate([x, y]),
        AttentionState.identity((2, 3), 2, jnp.float64),
        random_states(np.random.default_rng(12), (2, 3), dtype=np.float64, dv=2),
    )

    @jax.jit
    @jax.grad
    def gradients(states):
        out, lse = finalize(reduce(states))
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse))

    for gradient in gradients(states):
        assert np.isfinite(gradient).all() and gradient[2:].any() and not gradient[:2].any()
    for gradient in gradients(AttentionState.identity((4, 3), 2, jnp.float64)):
        assert not gradient.any()


# ---------------------------------------------------------------- jit, vmap, shard_map


def test_axis_vmap_and_jit():
    states = random_states(np.random.default_rng(13), (3, 4, 5), dtype=np.float64)

    def mapped(states, axis):
        moved = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), states)
        return jax.vmap(jax.vmap(lambda x: finalize(reduce_tree(x)), 1), 1)(moved)

    @jax.jit
    def run(states):
        """By axis, reduced in two ways."""
        scanned = jax.tree.map(lambda x: x[-1], scan_states(states, axis=-3))
        return {
            2: (finalize(reduce_chain(states, axis=-1)), mapped(states, 2)),
            1: (finalize(reduce_tree(states, axis=1)), finalize(reduce_tree(states, axis=-2))),
            0: (finalize(scanned), finalize(reduce_tree(states))),
        }

    for axis, results in run(states).items():
        d, n = (x.sum(axis) for x in sums(states))
        for out, lse in results:
            np.testing.assert_allclose(out, n / d[..., None], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lse, np.log(d), rtol=1e-12)


@pytest.mark.parametrize(
    ("reduce", "differing"),
    [
        (reduce_chain, "max"),
        (reduce_tree, "numerator"),
    ],
)
def test_inside_shard_map_whichever_fields_differ_between_devices(reduce, differing):
    states = random_states(np.random.default_rng(14), (8, 3), dtype=np.float64)
    mesh = kv_mesh(jax.devices()[:4])
    specs = AttentionState(*(P("kv") if name == differing else P() for name in states._fields))
    local = AttentionState(*(x if spec else x[:2] for x, spec in zip(states, specs, strict=True)))

    def shard(states):
        return jax.tree.map(lambda x: x[None], finalize(reduce(states)))

    @jax.jit
    @jax.value_and_grad
    def run(states):
        out, lse = jax.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=P("kv"))(states)
        return jnp.sum(out**2) + jnp.sum(lse**2)

    @jax.jit
    @jax.value_and_grad
    def wanted(states):
        fields = zip(states, specs, strict=True)
        states = AttentionState(
            *(x.reshape(4, 2, *x.shape[1:]) if spec else x for x, spec in fields)
        )
        axes = AttentionState(*(0 if spec else None for spec in specs))
        return jnp.sum(jax.vmap(lambda x: squares(reduce(x)), in_axes=(axes,))(states))

    for x, y in zip(jax.tree.leaves(run(local)), jax.tree.leaves(wanted(local)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_merging_commutes_bit_for_bit(dtype, optimized):
    """Also where the result is used at once, and the compiler may fuse products and sums."""
    rng = np.random.default_rng(0)
    m, d = rng.normal(size=(2, 2, 64)) * 3, rng.uniform(1, 9, (2, 2, 64))
    m[:, :, ::9] = m[:1, :, ::9]  # equal pivots, too
    a, b = (
        AttentionState(*(jnp.asarray(x, dtype) for x in (m[i], d[i], rng.normal(size=(2, 64, 24)))))
        for i in range(2)
    )
    for f in (merge, lambda a, b: finalize(merge(a, b))):
        for g, swapped in (
            (f, f),
            (jax.jit(f), jax.jit(f)),
            (jax.jit(f), jax.jit(lambda a, b, f=f: f(a, b))),
        ):
            for x, y in zip(g(a, b), swapped(b, a), strict=True):
                np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- work and depth


def count_merges(program, *arguments):
    """(work, depth): the merges of a traced program, and those on its longest path.

    Each merge takes one maximum of two pivots, and the program must take no other.
    """
    with jax.disable_jit():  # loops are unrolled, and functions inlined
        jaxpr = jax.make_jaxpr(program)(*arguments).jaxpr
    work, depth = 0, {}

    def deepest(inputs):
        return max((depth.get(x, 0) for x in inputs if not isinstance(x, Literal)), default=0)

    for eqn in jaxpr.eqns:
        merges = eqn.primitive.name == "max"
        work += eqn.outvars[0].aval.size if merges else 0
        depth |= dict.fromkeys(eqn.outvars, deepest(eqn.invars) + merges)
    return work, deepest(jaxpr.outvars)


def scalar_states(p):
    """The shapes of p states of one query and one value, for tracing."""
    return jax.eval_shape(lambda: AttentionState.identity((p,), 1))


def check_tree_counts(ps, k):
    """⌈log_k p⌉ rounds and p − 1 merges; of a binary tree the longest path is the rounds."""
    for p in ps:
        rounds = 0  # the smallest r with kʳ ≥ p, in integers
        while k**rounds < p:
            rounds += 1
        tree = functools.partial(reduce_tree, arity=k)
        work, depth = count_merges(tree, scalar_states(p))
        assert work == p - 1 and rounds <= depth <= (k - 1) * rounds, p
        assert depth == rounds or k > 2, p
        left = p
        for _ in range(rounds):
            one = functools.partial(tree_round, arity=k)
            left = jax.eval_shape(one, scalar_states(left)).max.shape[0]
        assert left == 1, p


@pytest.mark.parametrize("k", [2, 3, 8])
def test_rounds_and_merges_of_trees(k):
    check_tree_counts((1, 2, 3, 5, 9, 27, 28), k)


@functools.cache
def left_after_a_round(p, k):
    one = functools.partial(tree_round, arity=k)
    return jax.eval_shape(one, scalar_states(p)).max.shape[0]


def check_states_left(p, k):
    """⌈p / kʳ⌉ after r rounds, until one is left."""
    left = p
    for r in range(p + 1):
        assert left == -(-p // k**r)
        if left == 1:
            return
        left = left_after_a_round(left, k)
    raise AssertionError("more rounds than states")


def test_states_left_after_each_round_for_any_arity():
    for p in (1, 2, 7, 12):
        for k in range(2, p + 2):
            check_states_left(p, k)


def test_chain_and_scan_counts():
    for p in (1, 2, 3, 65):
        assert count_merges(reduce_chain, scalar_states(p)) == (p - 1, p - 1)
        work, depth = count_merges(scan_states, scalar_states(p))
        assert work < 2 * p and depth <= 2 * math.ceil(math.log2(p))


@pytest.mark.parametrize(("n", "p"), [(16, 1), (128, 8), (64, 64), (120, 5)])
def test_theorem_1(n, p):
    """n keys on p processors: n/p − 1 merges in a chain, then ⌈log₂ p⌉ rounds of the tree."""

    def reduce(states):
        shards = jax.tree.map(lambda x: x.reshape(p, n // p, *x.shape[1:]), states)
        return reduce_tree(reduce_chain(shards, axis=1))

    assert count_merges(reduce, scalar_states(n)) == (n - 1, n // p - 1 + math.ceil(math.log2(p)))


@pytest.mark.parametrize(("n", "p", "steps"), [(4, 3, 2), (10, 3, 5), (7, 4, 3), (12, 5, 4)])
def test_theorem_1_where_p_does_not_divide(n, p, steps):
    """Never more than ⌈n/p⌉ − 1 + ⌈log₂ p⌉; fewer where chunks of ⌈n/p⌉ leave a processor idle."""
    size = -(-n // p)

    def reduce(states):
        parts = []
        for first in range(0, n, size):
            chunk = [x[first : first + size] for x in states]
            parts.append(reduce_chain(AttentionState(*chunk)))
        return reduce_tree(jax.tree.map(lambda *x: jnp.stack(x), *parts))

    merges, depth = count_merges(reduce, scalar_states(n))
    assert (merges, depth) == (n - 1, steps)
    assert depth <= size - 1 + math.ceil(math.log2(p))


@functools.cache
def fewest_steps(n, p):
    """Of all schedules of merges of two neighbours, 1 to p of them a step."""
    merges = range(1, min(p, n // 2) + 1)
    return 0 if n == 1 else 1 + min(fewest_steps(n - k, p) for k in merges)


def test_no_schedule_is_faster_than_theorem_1():
    """⌊n/p⌋ + ⌈log₂ p⌉ − 1 ≤ fewest ≤ ⌈n/p⌉ + ⌈log₂ p⌉ − 1, for n ≥ p ≥ 2."""
    above, below = set(), set()
    for p in range(2, 34):
        rounds = math.ceil(math.log2(p))
        for n in range(p, 100):
            fewest = fewest_steps(n, p)
            above.add(fewest - (n // p + rounds - 1))
            below.add(-(-n // p) + rounds - 1 - fewest)
    assert above == below == {0, 1}  # each bound holds, and is reached


def every_result(parts, p, op):
    """What comes out of every schedule of steps, each of 1 to p merges of two neighbours."""
    if len(parts) == 1:
        return {parts[0]}
    found = set()
    places = range(len(parts) - 1)
    for k in range(1, min(p, len(parts) // 2) + 1):
        for firsts in itertools.combinations(places, k):
            if any(j - i < 2 for i, j in itertools.pairwise(firsts)):
                continue
            left, i = [], 0
            while i < len(parts):
                merges = i in firsts
                left.append(op(parts[i], parts[i + 1]) if merges else parts[i])
                i += 1 + merges
            found |= every_result(tuple(left), p, op)
    return found


def test_theorem_1_needs_associativity_and_no_commutativity():
    letters = tuple("abcdef")
    assert every_result(letters, 3, lambda x, y: x + y) == {"abcdef"}  # letters do not commute
    mean = every_result((0.0, 0.0, 0.0, 1.0), 2, lambda x, y: (x + y) / 2)
    assert len(mean) > 1  # a mean of two is not associative


# ---------------------------------------------------------------- rounding


def chain_of_outputs(states):
    """A chain that hands on (out, lse) in the states' dtype, as flash kernels return them."""

    def add(carry, state):
        out, lse = finalize(merge(from_output(*carry), state))
        return (out.astype(state.max.dtype), lse.astype(state.max.dtype)), None

    first = jax.tree.map(lambda x: x[0], states)
    out, lse = finalize(first)
    start = out.astype(first.max.dtype), lse.astype(first.max.dtype)
    return from_output(*jax.lax.scan(add, start, jax.tree.map(lambda x: x[1:], states))[0])


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_rounding_by_order_and_dtype(dtype):
    """64 states in a dtype: a tree and a scan stay within 3 ε; a chain does not do so well."""
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((64, 8, 64)), rng.standard_normal((64, 8, 64, 8))
    weights = np.exp(s)
    exact = np.cumsum((weights[..., None] * v).sum(1), 0) / np.cumsum(weights.sum(1), 0)[..., None]
    m = s.max(1)
    weights = np.exp(s - m[:, None])
    states = AttentionState(m, weights.sum(1), (weights[..., None] * v).sum(1))
    states = jax.tree.map(lambda x: jnp.asarray(x, dtype), states)

    def error(reduce, wanted):
        # Every operation rounds to its own dtype, and compiling 64 leaves stays quick.
        options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
        out = jax.jit(lambda x: finalize(reduce(x))[0], compiler_options=options)(states)
        miss = np.linalg.norm(np.float64(out) - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        return np.median(miss, axis=-1).max()

    eps = float(jnp.finfo(dtype).eps)
    tree, chain = error(reduce_tree, exact[-1]), error(reduce_chain, exact[-1])
    assert tree < 3 * eps and error(scan_states, exact) < 3 * eps
    assert tree < chain < error(chain_of_outputs, exact[-1])


# ---------------------------------------------------------------- checks that can fail


@pytest.mark.usefixtures("changeable")
def test_without_the_guard_the_checks_fail(monkeypatch):
    monkeypatch.setattr(treeattn.state, "finite", lambda x: x)
    none = AttentionState.identity((1,), 1)
    assert jnp.isnan(merge(none, none).denominator).all()
    with pytest.raises(AssertionError):
        check_no_nan()


# ---------------------------------------------------------------- bad input


STATE = AttentionState(jnp.zeros(3), jnp.ones(3), jnp.ones((3, 2)))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: reduce_tree(jax.tree.map(lambda x: x[0], STATE)),
            ValueError,
            r"axis: .*0 axes of states\.max",
        ),
        (lambda: merge(STATE, tuple(STATE)), TypeError, r"b: .*AttentionState, got tuple"),
        (
            lambda: merge(STATE, AttentionState.identity((1,), 2)),
            ValueError,
            r"b: .*\(3, 2\), got \(1, 2\)",
        ),
        (
            lambda: merge(STATE._replace(denominator=jnp.ones(1)), STATE),
            ValueError,
            r"a: expected shapes.*\(3,\), \(1,\) and \(3, 2\)",
        ),
        (
            lambda: finalize(STATE._replace(numerator=jnp.ones(3))),
            ValueError,
            r"state: expected shapes",
        ),
        (
            lambda: finalize(STATE._replace(max=jnp.zeros(3, int))),
            TypeError,
            r"state\.max: expected a floating-point array, got dtype int",
        ),
        (
            lambda: scan_states(STATE._replace(max=jnp.zeros(3, "float16"))),
            TypeError,
            r"expected one dtype, got states\.max float16",
        ),
        (
            lambda: from_output(jnp.ones((1, 2, 4, 8)), jnp.ones((1, 4, 2))),
            ValueError,
            r"lse: .*\(1, 2, 4\), got \(1, 4, 2\)",
        ),
        (
            lambda: from_output(jnp.ones((3, 2), int), jnp.ones(3)),
            TypeError,
            r"out: expected a floating-point",
        ),
        (
            lambda: AttentionState.identity((3,), 2, jnp.float8_e4m3fn),
            TypeError,
            "dtype: .*16 bits or more",
        ),
        (lambda: AttentionState.identity(3, 2), TypeError, "shape: expected a tuple, .* got 3"),
    ],
)
def test_bad_input(unchecked, call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("function", [merge, finalize], ids=lambda f: f.__name__)
def test_called_by_itself_it_is_one_program(function):
    """And nested in another, none of its own: its operations are in the outer one's."""
    state = AttentionState(np.ones(3), np.ones(3), np.ones((3, 2)))  # NumPy's arrays will do
    states = (state, state)[: 2 if function is merge else 1]
    result = function(*states)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(result))
    program = getattr(treeattn.state, f"_{function.__name__}")
    assert program._cache_size() > 0
    inside = jax.jit(function).lower(*states).as_text()
    assert f"@_{function.__name__}" not in inside


def test_a_warm_call_takes_few_steps_in_python(unchecked):
    """Checks are made while a function is traced: once a shape."""
    state = random_states(np.random.default_rng(0), (3,))
    for calls, function, arguments in (
        (1, merge, (state, state)),
        (1, finalize, (state,)),
        (3, from_output, (jnp.ones((3, 2)), jnp.ones(3))),
    ):
        assert python_calls(function, *arguments) == calls, function
