"""The monoid of attention states against float64 dense attention, in any order; work and depth."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import count_merges, scalar_states
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from oracles import attention_of_scores

import treeattn
from treeattn import (
    AttentionState,
    finalize,
    from_output,
    kv_mesh,
    merge,
    merge_across,
    reduce_chain,
    reduce_tree,
    scan_states,
)
from treeattn.state import tree_round

N, DV, PARTS = 12, 2, 5  # keys, their values' width, parts they are split into
INF = np.inf


def close(found, wanted, rtol=1e-12, atol=1e-14):
    """The leaves of both are close."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def states_of(s, v):
    """One state for each part, (parts, ...), of scores s (parts, ..., n) and values v (n, dv)."""
    m = jnp.max(s, axis=-1)
    w = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m)[..., None])
    return AttentionState(m, w.sum(-1), w @ v)


def random_states(seed, shape, dv=3, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return AttentionState(
        jnp.asarray(rng.normal(size=shape) * 5, dtype),
        jnp.asarray(rng.uniform(0.5, 20, size=shape), dtype),
        jnp.asarray(rng.normal(size=(*shape, dv)), dtype),
    )


# ---------------------------------------------------------------- any order of any split


def last_of_scan(states):
    return jax.tree.map(lambda x: x[-1], scan_states(states))


def right_to_left(states):
    """Not one of ours: a bracketing that no public reduction uses."""
    states = [AttentionState(*(x[i] for x in states)) for i in range(PARTS)]
    return functools.reduce(lambda right, left: merge(left, right), reversed(states))


ORDERS = {
    "chain": reduce_chain,
    "scan": last_of_scan,
    "right to left": right_to_left,
    "tree of 3": functools.partial(reduce_tree, arity=3),
}


def run_of(order):
    """Jitted: scores, values, part of each key, and the parts' order -> value and gradients."""

    def loss(s, v, parts, permutation, c, e):
        shards = jnp.where(parts == jnp.arange(PARTS)[permutation, None], s, -jnp.inf)
        out, lse = finalize(ORDERS[order](states_of(shards, v)))
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
NO_KEYS = {"s": [-INF] * N, "parts": [0] * N, "permutation": range(PARTS), "e": 1.0, "seed": 0}


@settings(max_examples=200)
@given(
    s=st.lists(SCORES, min_size=N, max_size=N),
    parts=st.lists(st.integers(0, PARTS - 1), min_size=N, max_size=N),
    permutation=st.permutations(range(PARTS)),
    program=st.sampled_from(PROGRAMS),
    e=st.sampled_from([0.0, 1.0, -0.5]),
    seed=st.integers(0, 2**32 - 1),
)
@example(program=PROGRAMS[0], **NO_KEYS)
@example(program=PROGRAMS[1], **NO_KEYS)
@example(program=PROGRAMS[3], **NO_KEYS)
def test_any_order_of_any_split_is_dense_attention(s, parts, permutation, program, e, seed):
    """Each case is one split of 12 keys into 5 parts (empty ones too), merged in one order."""
    (order, dtype), rng = program, np.random.default_rng(seed)
    s = np.array(s, dtype)
    v, c = rng.normal(size=(N, DV)).astype(dtype), rng.normal(size=DV).astype(dtype)
    got = RUNS[order](s, v, np.array(parts), np.array(permutation), c, np.array(e, dtype))
    # exp's relative error is its argument's absolute one: ε·88 where it has not vanished.
    rtol = 3e-5 if dtype == "float32" else 1e-11
    close(got, attention_of_scores(s, v, c, e), rtol=rtol, atol=rtol)


# ---------------------------------------------------------------- every function of states


def nth(states, i):
    return jax.tree.map(lambda x: x[i], states)


def across(states):
    """Each of two devices has one of the two states."""
    # In JAX 0.8 vmap needs check_vma=False.
    specs = {"in_specs": P("kv"), "out_specs": P(), "check_vma": False}
    mesh = kv_mesh(jax.devices()[:2])
    return jax.shard_map(lambda x: merge_across(nth(x, 0), "kv"), mesh=mesh, **specs)(states)


# Every public function of states, called with two states along the first axis, and what makes the
# (out, lse) of both from its result. A new one needs its row here.
OF_STATES = {
    "finalize": (finalize, lambda pair: finalize(reduce_tree(from_output(*pair)))),
    "from_output": (lambda x: from_output(*finalize(x)), lambda x: finalize(reduce_chain(x))),
    "merge": (lambda x: merge(nth(x, 0), nth(x, 1)), finalize),
    "merge_across": (across, finalize),
    "reduce_chain": (reduce_chain, finalize),
    "reduce_tree": (reduce_tree, finalize),
    "scan_states": (last_of_scan, finalize),
}
NOT_OF_STATES = {"attend"}  # makes one from queries, keys and values
ONE, OTHER, EMPTY = (0.5, 1, 2), (1, 1, 4), (-INF, 0, 0)
# Sums whose products are in range, except of float16; the largest of all pivots, and the lowest.
LARGE, OPPOSITE, TOP, LOW = (0.5, 1e18, 1e18), (0.5, 1, -1e18), (1e39, 1, 2), (-1e39, 1, 2)
NANS = [tuple(np.where(np.arange(3) == i, np.nan, ONE)) for i in range(3)]
OVERFLOWN = [(0.5, INF, 2), (0.5, 1, INF), (0.5, 1, -INF), (-INF, 1, 5)]
PAIRS = [(EMPTY, EMPTY), (EMPTY, ONE), (ONE, EMPTY), (ONE, OTHER), (TOP, LOW), (EMPTY, LOW)]
PAIRS += [(LARGE, OTHER), (OTHER, LARGE), (LARGE, OPPOSITE)]
IN_RANGE = {"float16": 6, "bfloat16": 9, "float32": 9}  # of the pairs so far
PAIRS += [pair for x in (*NANS, *OVERFLOWN) for pair in ((x, OTHER), (OTHER, x))]
PAIRS += [OVERFLOWN[1:3]]


def of_both(pair, largest):
    """(out, lse) in float64, where ±∞ counts as the largest number, and a pivot of −∞ as no key."""
    m, d, n = np.clip([x for x in np.array(pair, float) if x[0] != -INF], -largest, largest).T
    weights = np.exp(m - m.max())
    total, weighted = (np.clip(np.sum(weights * x), -largest, largest) for x in (d, n))
    return weighted / total, m.max() + np.log(total)


def test_every_function_of_states_has_its_row():
    names = {name for name in treeattn.__all__ if callable(getattr(treeattn, name))}
    names -= {"AttentionState", *NOT_OF_STATES}
    found = {x for x in names if "AttentionState" in str(inspect.signature(getattr(treeattn, x)))}
    missing = found ^ set(OF_STATES)
    assert not missing, f"tests/test_state.py: a row of OF_STATES, or NOT_OF_STATES, for {missing}"


@pytest.mark.parametrize("name", OF_STATES)
def test_no_keys_nan_infinities_and_16_bits(name):
    """Of each pair by itself, under vmap."""
    call, whole = OF_STATES[name]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=1)
    def run(states):
        def loss(states):
            out, lse = whole(call(states))
            return jnp.sum(out.astype("float32")), (out, lse)

        return jax.grad(loss, has_aux=True)(states)

    for dtype, rtol in ("float16", 1e-2), ("bfloat16", 3e-2), ("float32", 1e-4):
        largest = float(jnp.finfo(dtype).max)
        m, d, n = np.moveaxis(PAIRS, 0, 1).transpose(2, 0, 1)
        m = np.where(np.isinf(m), m, np.clip(m, -largest, largest))
        m, d, n = (jnp.asarray(x).astype(dtype) for x in (m, d, n))
        gradients, (out, lse) = run(AttentionState(m, d, n[..., None]))
        wanted = [(0, -INF), *(of_both(pair, largest) for pair in PAIRS[1:])]
        close((out[:, 0].astype(float), lse), tuple(np.transpose(wanted)), rtol=rtol, atol=1e-3)
        assert (lse.dtype, out.dtype) == (
            "float32",
            "float32" if name in ("finalize", "from_output") else dtype,
        )
        assert all(np.isfinite(x[: IN_RANGE[dtype]].astype(float)).all() for x in gradients)
        assert not any(x[0].any() for x in gradients)  # of no keys at all


@pytest.mark.parametrize("name", OF_STATES)
def test_what_is_no_state_is_refused(unchecked, name):
    call, _ = OF_STATES[name]
    state = random_states(0, (2, 3))
    integers = jax.tree.map(lambda x: x.astype(int), state)
    narrow, wide = state._replace(max=state.max[:, :2]), state._replace(max=state.max[..., None])
    for wrong in (None, tuple(state), integers, narrow, wide):
        with pytest.raises((TypeError, ValueError), match=r"^(state|a|b)s?(\.max)?: expected"):
            call(wrong)


# ---------------------------------------------------------------- grad, jit, vmap, shard_map


def test_scan_is_causal_attention():
    """One state for each query and key, scanned along the keys: its diagonal is causal."""
    rng = np.random.default_rng(8)
    s, v = rng.normal(size=(7, 7)) * 3, rng.normal(size=(7, 2))
    one_key = AttentionState(s, np.ones((7, 7)), np.broadcast_to(v, (7, 7, 2)))
    outs, lses = jax.jit(lambda states: finalize(scan_states(states, axis=-1)))(one_key)
    for i, j in np.ndindex(7, 7):
        wanted = attention_of_scores(s[i, : j + 1], v[: j + 1], np.zeros(2), 0)[:2]
        close((outs[i, j], lses[i, j]), wanted)


def squares(state):
    out, lse = finalize(state)
    return jnp.sum(out**2) + jnp.sum(lse**2)


def test_derivatives_by_every_field_against_finite_differences():
    """max included: what is differentiated is d·eᵐ and n·eᵐ, wherever the pivots are stopped.

    The first derivatives, and the second ones.
    """
    run = jax.jit(lambda states: squares(reduce_tree(states)))
    check_grads(run, [random_states(10, (3, 2))], 2, modes=["rev"], rtol=1e-6)


@pytest.mark.parametrize(
    ("reduce", "differing"), [(reduce_chain, "max"), (reduce_tree, "numerator")]
)
def test_inside_shard_map_whichever_fields_differ_between_devices(reduce, differing):
    """The types of a loop's states, which say what differs, fit; and those of gradients."""
    specs = AttentionState(*(P("kv") if x == differing else P() for x in AttentionState._fields))
    mesh = kv_mesh(jax.devices()[:4])

    def shard(states):
        return jax.lax.psum(squares(reduce(states)), "kv")

    run = jax.grad(jax.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=P()))
    states = random_states(14, (8, 3))
    states = AttentionState(*(x if spec else x[:2] for x, spec in zip(states, specs, strict=True)))
    assert jax.tree.map(jnp.shape, jax.eval_shape(run, states)) == jax.tree.map(jnp.shape, states)


# ---------------------------------------------------------------- work and depth


@pytest.mark.parametrize("k", [2, 3, 8])
def test_rounds_and_merges_of_trees(k):
    """⌈log_k p⌉ rounds and p − 1 merges, with ⌈p / kʳ⌉ states left after r rounds; k − 1 a round on
    the longest path of a full tree."""
    for p in (1, 2, 3, 5, 7, 9, 12, 27, 28):
        rounds, states = 0, scalar_states(p)
        while states.max.size > 1:
            rounds += 1
            states = jax.eval_shape(functools.partial(tree_round, arity=k), states)
            assert states.max.size == -(-p // k**rounds)
        work, depth = count_merges(functools.partial(reduce_tree, arity=k), scalar_states(p))
        assert work == p - 1 and rounds <= depth <= (k - 1) * rounds, p
        assert depth == (k - 1) * rounds or (k > 2 and p < k**rounds), p


def test_chain_and_scan_counts():
    for p in (1, 2, 3, 33):
        assert count_merges(reduce_chain, scalar_states(p)) == (p - 1, p - 1)
        work, depth = count_merges(scan_states, scalar_states(p))
        assert work < 2 * p and depth <= 2 * math.ceil(math.log2(p))
