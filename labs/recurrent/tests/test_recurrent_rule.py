"""All implementations of the gated delta rule equal the loop over tokens, with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from labs.recurrent.devices import in_chunks, over_devices
from labs.recurrent.rule import (
    Updates,
    gated_delta,
    linear_attention,
    scalar_decay,
    step_by_step,
)
from labs.recurrent.tree import map_to, outputs, solve
from treeattn import ancestor_mask, collectives, kv_mesh, pack

TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


def inputs(length, dk=4, dv=3, seed=0, dtype=np.float64, gates=(0.02, 1.0), batch=()):
    """(q, updates, state) with keys of length 1; `batch` axes first."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, *batch, length, dk)) / dk**0.5
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(*batch, length, dv))
    gate = np.exp(rng.uniform(*np.log(gates), (*batch, length)))
    beta = rng.uniform(0, 1.5, (*batch, length))
    state = rng.normal(size=(*batch, dk, dv))
    given = q, Updates(k, v, gate, beta, beta), state
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), given)


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def by_hand(q, updates, state):
    """Gated DeltaNet's formula in its authors' form, on Sᵀ: S (α (I − β k kᵀ)) + β v kᵀ."""
    q, updates, state = doubles((q, updates, state))
    transposed, out = state.T, []
    for i in range(len(q)):
        k, v, gate, erase, write = (x[i] for x in updates)
        kept = np.eye(len(k)) - erase * k[:, None] * k[None]
        transposed = transposed @ (gate * kept) + write * v[:, None] * k[None]
        out.append(transposed @ q[i])
    return np.reshape(out, (len(q), len(transposed))), transposed.T


def assert_near(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        scale = max(1, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@functools.cache
def meshed(p, size):
    return functools.partial(over_devices, mesh=kv_mesh(jax.devices()[:p]), size=size)


WAYS = {
    "steps": step_by_step,
    "chunks": in_chunks,
    "chunks of 4": functools.partial(in_chunks, size=4),
    "1 device": meshed(1, 3),
    "6 devices": meshed(6, 2),
    "8 devices": meshed(8, 64),
}
LENGTHS = 0, 1, 7, 24, 33


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=12)
@given(
    length=st.sampled_from(LENGTHS),
    seed=st.integers(0, 2**32 - 1),
    gates=st.sampled_from([(0.02, 1.0), (1e-30, 1e-3), (1.0, 1.0)]),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_any_way_is_the_formula(name, length, seed, gates, dtype):
    given = inputs(length, seed=seed, gates=gates, dtype=dtype)
    found = jax.jit(WAYS[name])(*given)
    assert all(x.dtype == dtype for x in found)
    assert_near(found, by_hand(*given), TOLERANCE[dtype])


def loss(way, q, updates, state):
    out, after = way(q, updates, state)
    return jnp.sum(jnp.sin(out)) + jnp.sum(after**2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, np.float64) for name in WAYS if name != "steps"] + [("8 devices", np.float32)],
)
def test_gradients(name, dtype):
    ours, expected = (
        jax.jit(jax.grad(functools.partial(loss, way), argnums=(0, 1, 2)))
        for way in (WAYS[name], step_by_step)
    )
    for seed in range(3):
        given = inputs(13, seed=seed, dtype=dtype)
        assert_near(ours(*given), expected(*given), TOLERANCE[dtype])


def test_gradients_of_the_steps():
    check_grads(functools.partial(loss, step_by_step), inputs(5), order=1, modes=["fwd", "rev"])


def test_batches_and_heads():
    given = inputs(9, batch=(2, 3))
    for way in (in_chunks, meshed(8, 64)):
        found = jax.jit(jax.vmap(jax.vmap(way)))(*given)
        for i, j in np.ndindex(2, 3):
            alone = by_hand(*jax.tree.map(lambda x, i=i, j=j: x[i, j], given))
            assert_near([x[i, j] for x in found], alone, 1e-12)


def test_special_cases():
    """Without erasing, an output is a decayed sum over earlier tokens, without a softmax."""
    q, (k, v, gate, *_), state = inputs(11)
    scores = np.tril(q @ k.T)
    between = np.array([[np.prod(gate[j + 1 : i + 1]) for j in range(11)] for i in range(11)])
    before = np.cumprod(gate)[:, None] * (q @ state)
    for updates, weights, old in (
        (linear_attention(k, v), scores, q @ state),
        (scalar_decay(k, v, gate), scores * between, before),
    ):
        for way in (step_by_step, in_chunks):
            assert_near(way(q, updates, state)[0], weights @ v + old, 1e-12)
    found = gated_delta(k, v, gate, gate / 2)
    assert (found.erase == gate / 2).all() and (found.write == gate / 2).all()


def test_a_long_text_whose_gates_multiply_to_zero():
    given = inputs(400, gates=(0.02, 0.2))
    assert np.prod(given[1].gate) == 0
    assert_near(in_chunks(*given, size=400), by_hand(*given), 1e-12)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda q, u, s: (q[:, :-1], u, s)),
        ("v", lambda q, u, s: (q, u._replace(v=u.v[:, :1]), s)),
        ("gate", lambda q, u, s: (q, u._replace(gate=u.gate[:1]), s)),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, change):
    for way in WAYS.values():
        with pytest.raises(ValueError, match=rf"^{name}: expected shape .*, got "):
            way(*change(*inputs(6)))


# ---------------------------------------------------------------- messages


def program(length, p, dk=16, dv=8):
    mesh = kv_mesh(jax.devices()[:p])

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P("kv")))

    text = array(length, dk), Updates(array(length, dk), array(length, dv), *[array(length)] * 3)
    state = jax.ShapeDtypeStruct((dk, dv), np.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(functools.partial(over_devices, mesh=mesh)).lower(*text, state).compile()


@pytest.mark.parametrize(("p", "rounds"), [(2, 1), (5, 3)])
def test_one_message_a_round_of_a_size_that_no_text_changes(p, rounds):
    """The notebook has eight devices, and twice the text."""
    found = collectives(program(p * 64, p))
    dk, dv = 16, 8
    sent = [(c.kind, c.count, c.operand_bytes) for c in found]
    a_map = ("collective-permute", 1, 4 * dk * (dk + dv))
    assert sent == [a_map] * rounds + [("all-reduce", 1, 4 * dk * dv)]


# ---------------------------------------------------------------- trees


@jax.jit
def in_one_solve(q, updates, state, mask):
    solved = solve(updates, mask)
    nodes = jnp.arange(len(q))
    return outputs(solved, q, state), jax.vmap(map_to, (None, 0))(solved, nodes)(state)


trees = st.lists(st.integers(-1, 10), min_size=12, max_size=12).map(
    lambda drawn: np.minimum(drawn, np.arange(12) - 1)
)


@settings(max_examples=40)
@given(parents=trees, seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(list(TOLERANCE)))
def test_a_tree_is_its_nodes_one_after_another(parents, seed, dtype):
    q, updates, state = inputs(12, seed=seed, dtype=dtype)
    mask = ancestor_mask(parents)
    found = in_one_solve(q, updates, state, mask)
    q, updates, state = doubles((q, updates, state))
    for node in range(12):
        path = np.flatnonzero(mask[node])
        out, after = by_hand(q[path], Updates(*(x[path] for x in updates)), state)
        assert_near([found[0][node], found[1][node]], [out[-1], after], TOLERANCE[dtype])


def test_a_batch_of_packed_beams_with_pads():
    beam = np.array([[[1, 2, 3], [1, 2, 4], [1, 5, 6]], [[7, 7, 7], [7, 7, 7], [7, 7, 8]]])
    packed = pack(beam)
    nodes = packed.packed_beam.shape[1]
    given = inputs(nodes, batch=(2,))
    out, states = jax.vmap(in_one_solve)(*given, packed.attention_mask)
    for row in range(2):
        q, updates, state = jax.tree.map(lambda x, row=row: x[row], given)
        for path in packed.unpack_map[row]:
            expected = by_hand(q[path], Updates(*(x[path] for x in updates)), state)
            assert_near([out[row, path], states[row, path[-1]]], expected, 1e-12)
    assert np.isfinite(out).all() and np.isfinite(states).all()
