"""Decoding from shards against dense attention in float64, and what the programs send."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn import ring_decode, tree_decode
from treeattn.across import METHODS, merge_across
from treeattn.inputs import gather_inputs
from treeattn.program import collectives, count_collectives, memory, sent_bytes, total_bytes

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
DECODERS = {method: functools.partial(tree_decode, method=method) for method in METHODS}
DECODERS |= {"ring": ring_decode}


def cache_over(shape, kind=AxisType.Auto):
    """How a cache lies whose keys are dealt along all axes of a mesh of that shape."""
    names = ("kv",) if len(shape) == 1 else ("node", "device")
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)
    return NamedSharding(mesh, P(None, names))


def draw_inputs(seed: int, kv_len: int, batch: int = 2, q_len: int = 2):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, q_len, HEADS, DIM)) * 3
    k = rng.normal(size=(batch, kv_len, KV_HEADS, DIM))
    v = rng.normal(size=(batch, kv_len, KV_HEADS, VALUE_DIM))
    options = {
        "mask": rng.random((batch, 1, q_len, kv_len)) < rng.choice([0.05, 0.5, 1.0]),
        "bias": rng.normal(size=(1, HEADS, 1, kv_len)),
        "kv_lengths": rng.integers(0, kv_len + 1, batch).astype(np.int32),
    }
    w = rng.normal(size=(batch, q_len, HEADS, VALUE_DIM))
    u = rng.normal(size=(batch, q_len, HEADS))
    return (q, k, v), options, w, u


@functools.cache
def program(name, shape, striped):
    """(q, k, v, options, w, u) -> (out, lse) and the gradients of Σ w·out + Σ u·lse, compiled once.

    Over the rows with keys; heads that "all_to_all" adds have no weight.
    """

    def loss(q, k, v, options, w, u):
        sharding = cache_over(shape)
        decode = functools.partial(DECODERS[name], striped=striped, return_lse=True)
        out, lse = decode(q, k, v, sharding=sharding, **options)
        more = ((0, 0), (0, 0), (0, out.shape[2] - HEADS))
        w, u = jnp.pad(w, (*more, (0, 0))), jnp.pad(u, more)
        total = jnp.sum(w * out) + jnp.sum(u * jnp.where(jnp.isneginf(lse), 0, lse))
        return total, (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


# 5 keys: fewer than devices on some meshes; 37 divides by none of them.
SLOW = (("butterfly", (7,), 37), ("hierarchical", (8,), 5), ("ring", (2, 3), 37))
CASES = [
    ("allreduce", (8,), 37),
    ("allreduce", (2, 3), 5),
    ("butterfly", (1,), 37),
    ("butterfly", (4, 2), 5),
    ("gather", (3,), 37),
    ("hierarchical", (4, 2), 37),
    ("all_to_all", (6,), 5),
    ("ring", (8,), 5),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("name", "shape", "kv_len"), CASES, ids=str)
def test_values_and_gradients(name, shape, kv_len):
    @settings(max_examples=12)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        (q, k, v), options, w, u = draw_inputs(seed, kv_len)
        (_, (out, lse)), grads = program(name, shape, False)(q, k, v, options, w, u)
        expected, expected_lse = dense_attention(q, k, v, **options), dense_weights(q, k, **options)
        np.testing.assert_allclose(out[:, :, :HEADS], expected, atol=1e-12)
        np.testing.assert_allclose(lse[:, :, :HEADS], expected_lse[1], atol=1e-12)
        assert not np.any(out[:, :, HEADS:]) and np.all(np.isneginf(lse[:, :, HEADS:]))
        dense = dense_gradients(q, k, v, w, u, **options)
        for got, expected in zip(grads, dense, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-11)

    check()


def in_stripes(x, p, axis):
    """Keys in order as the slots of a striped cache: key i in slot (i mod p)·t + i div p."""
    if x.shape[axis] == 1:
        return x
    t = x.shape[axis] // p
    slots = [j * p + r for r in range(p) for j in range(t)]  # the key in each slot
    return np.take(x, slots, axis)


@pytest.mark.parametrize("name", ["allreduce", "ring"])
def test_a_striped_cache(name):
    p, n = 4, 24

    @settings(max_examples=12)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        (q, k, v), options, w, u = draw_inputs(seed, n)
        placed = [in_stripes(x, p, 1) for x in (k, v)]
        own = options | {x: in_stripes(options[x], p, 3) for x in ("mask", "bias")}
        (_, (out, lse)), grads = program(name, (p,), True)(q, *placed, own, w, u)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
        np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
        d_q, d_k, d_v = dense_gradients(q, k, v, w, u, **options)
        for got, dense in zip(
            grads, (d_q, in_stripes(d_k, p, 1), in_stripes(d_v, p, 1)), strict=True
        ):
            np.testing.assert_allclose(got, dense, atol=1e-11)

    check()


def test_stripes_keep_all_devices_of_a_half_empty_cache_busy():
    """How many keys each of four devices attends to, of the first 6 in 16 slots."""
    from treeattn.layout import layout_of, local_lengths

    x = np.ones((1, 4, 1, 2))
    for striped, counts in {False: [4, 2, 0, 0], True: [2, 2, 1, 1]}.items():
        inputs = gather_inputs(x, x, x, None, None, None, None).replace(lengths=np.array([6]))
        layout = layout_of(inputs, cache_over((4,)), striped)
        assert [int(local_lengths(inputs, layout, r)[0]) for r in range(4)] == counts


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_float32_as_called_by_default(seed):
    """No options, NumPy's arrays, every length up to twice the devices and a bit."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 4, 9]))
    q, k, v = (rng.normal(size=(1, m, 2, 4)).astype(np.float32) for m in (1, n, n))
    out = tree_decode(q, k, v, sharding=cache_over((4,)))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (8,), (2, 3)], ids=str)
@pytest.mark.parametrize("method", ["allreduce", "butterfly", "gather", "hierarchical"])
def test_every_device_has_the_same_bits(method, shape, optimized):
    """Also where p is no power of two, and by nodes."""
    rng, p = np.random.default_rng(0), int(np.prod(shape))
    mesh = cache_over(shape).mesh
    m, d = (jnp.asarray(rng.uniform(1, 9, (p, 6)), jnp.float32) for _ in range(2))
    n = jnp.asarray(rng.normal(size=(p, 6, 16)), jnp.float32)

    def body(*state):
        own = treeattn.AttentionState(*(x[0] for x in state))
        return tuple(x[None] for x in merge_across(own, mesh.axis_names, method=method))

    spec = P(mesh.axis_names)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for x in jax.jit(f)(m, d, n):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


@pytest.mark.parametrize("name", DECODERS)
def test_no_keys_at_all(name):
    q, k, v = np.ones((1, 1, 2, 4)), np.zeros((1, 0, 2, 4)), np.zeros((1, 0, 2, 4))
    out, lse = DECODERS[name](q, k, v, sharding=cache_over((3,)), return_lse=True)
    assert not np.any(out) and np.all(np.isneginf(lse))


@pytest.mark.parametrize("name", DECODERS)
def test_a_nan_on_the_only_device_with_keys_is_not_lost(name):
    q, v = np.ones((1, 1, 4, 4)), np.ones((1, 4, 4, 4))
    for i in range(4):
        k = np.full((1, 4, 4, 4), 1.0)
        k[:, i] = np.nan
        options = {"mask": (np.arange(4) == i)[None, None, None], "return_lse": True}
        out, lse = DECODERS[name](q, k, v, sharding=cache_over((4,)), **options)
        assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_sums_in_float32(dtype):
    rng = np.random.default_rng(0)
    # Scores to ±500: exp of any of them overflows half precision, and most float32.
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, n, 4, 64)) * s, dtype)
        for n, s in [(1, 8), (4096, 8), (4096, 1)]
    )
    out, lse = tree_decode(q, k, v, sharding=cache_over((8,)), return_lse=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    dense = dense_attention(q, k, v)
    np.testing.assert_allclose(np.asarray(out, np.float64), dense, atol=0.02, rtol=0.02)
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-4)


def test_a_traced_scale_is_compiled_once_and_has_a_gradient():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 2, 4)) for n in (1, 9, 9))

    @jax.jit
    @jax.value_and_grad
    def f(scale):
        return jnp.sum(tree_decode(q, k, v, sharding=cache_over((3,)), scale=scale))

    for scale in (0.3, 1.7):
        value, slope = f(scale)
        near = [dense_attention(q, k, v, scale=scale + e).sum() for e in (-1e-5, 1e-5)]
        np.testing.assert_allclose(value, np.mean(near), atol=1e-8)
        np.testing.assert_allclose(slope, (near[1] - near[0]) / 2e-5, atol=1e-6)
    assert f._cache_size() == 1


# A user's own functions.


class LogSums(tuple):
    """A state of somebody's own: log Σ exp(s) beside log Σ exp(s) |v|, of values above 0."""


jax.tree_util.register_pytree_node(LogSums, lambda x: (tuple(x), None), lambda _, x: LogSums(x))


def log_sums(q, k, v, *, scale):
    s = jnp.einsum("blhd,bnhd->blhn", q, k) * scale
    weighted = s[..., None] + jnp.log(v).transpose(0, 2, 1, 3)[:, None]
    return LogSums((jax.nn.logsumexp(s, -1), jax.nn.logsumexp(weighted, -2)))


def merge_log_sums(state, axes):
    def everybodys(x):
        return jax.nn.logsumexp(jax.lax.all_gather(x, axes), axis=0)

    lse, weighted = map(everybodys, state)
    return treeattn.from_output(jnp.exp(weighted - lse[..., None]), lse)


def test_a_state_and_a_merge_of_ones_own():
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, n, 3, 4)) for n in (2, 8))
    v = rng.uniform(0.1, 1, size=(2, 8, 3, 5))
    plug = {"implementation": log_sums, "method": merge_log_sums}
    out = tree_decode(q, k, v, sharding=cache_over((2, 2)), **plug)
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)


def test_what_functions_may_not_return(unchecked):
    q = np.ones((1, 2, 3, 4))
    decode = functools.partial(tree_decode, q, q, q, sharding=cache_over((2,)))
    with pytest.raises(TypeError, match="method: expected it to return an AttentionState"):
        decode(method=lambda state, axes: state.max)
    with pytest.raises(TypeError, match="state: expected an AttentionState, got LogSums"):
        decode(implementation=log_sums)
    with pytest.raises(TypeError, match=r"implementation: expected .* to return"):
        decode(implementation=lambda q, k, v, *, scale: q)
    with pytest.raises(TypeError, match=r"log_sums\(\) got an unexpected .* 'kv_lengths'"):
        tree_decode(q, q[:, :1], q[:, :1], sharding=cache_over((2,)), implementation=log_sums)


# What the compiled program sends.


def placed(sharding, shape, spec):
    own = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=own)


@functools.cache
def compiled(p: int, kv_len: int, name: str = "allreduce", batch: int = 1, kv_heads: int = 16):
    sharding = cache_over((p,))
    cache = placed(sharding, (batch, kv_len, kv_heads, 128), sharding.spec)
    q = placed(sharding, (batch, 1, 16, 128), P())
    f = functools.partial(DECODERS[name], sharding=sharding, implementation="blockwise")
    return jax.jit(f).lower(q, cache, cache).compile()


@pytest.mark.parametrize("batch", [1, 3])
def test_allreduce_sends_equation_34(batch):
    """b·d + 2·b·n_h elements, in at most two collectives, whatever the context."""
    elements = batch * 16 * 128 + 2 * batch * 16
    for kv_len in (2048, 32768):
        found = collectives(compiled(8, kv_len, batch=batch))
        assert {c.kind for c in found} == {"all-reduce"}
        assert count_collectives(found) <= 2
        assert total_bytes(found) == 4 * elements


STATE, PIVOT = 4 * 16 * (128 + 2), 4 * 16  # bytes of a state of 16 heads of 128, and of its pivot


def sent_within(p: int, operand: int) -> int:
    """By an Allreduce of p devices, at least (2024 eq. 33, 2025 eq. 12)."""
    return 2 * operand * (p - 1) // p


FORMULAS = {  # p -> (collectives, bytes put in, bytes sent)
    "allreduce": lambda p: (2, STATE, sent_within(p, PIVOT) + sent_within(p, STATE - PIVOT)),
    "butterfly": lambda p: (p.bit_length() - 1, *[STATE * (p.bit_length() - 1)] * 2),
    "gather": lambda p: (1, STATE, STATE * (p - 1)),
    "all_to_all": lambda p: (1, STATE, STATE * (p - 1) // p),
}


def test_every_method_has_its_formula_and_its_words():
    """The test after the next has that of "hierarchical"."""
    assert {*FORMULAS, "hierarchical"} == set(METHODS)
    for method in METHODS:
        assert f'"{method}"' in merge_across.__doc__ + tree_decode.__doc__


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("method", FORMULAS)
def test_every_method_sends_what_its_formula_says(method, p):
    """Of the compiled program, and of the one that is lowered for CUDA, whatever the context."""
    for kv_len in (1024, 8192):
        found = collectives(compiled(p, kv_len, method))
        counted = count_collectives(found), total_bytes(found), sent_bytes(found)
        assert counted == FORMULAS[method](p)
    sharding = NamedSharding(
        AbstractMesh((p,), ("kv",), axis_types=(AxisType.Auto,)), P(None, "kv")
    )
    f = functools.partial(tree_decode, sharding=sharding, method=method, implementation="blockwise")
    q, cache = (jax.ShapeDtypeStruct((1, n, 16, 128), jnp.float32) for n in (1, 1024))
    written = collectives(jax.jit(f).trace(q, cache, cache).lower(lowering_platforms=("cuda",)))
    joined = 1 if method == "allreduce" else 0  # XLA:CPU joins Algorithm 3's two sums
    assert count_collectives(written) == FORMULAS[method](p)[0] + joined
    assert (total_bytes(written), sent_bytes(written)) == FORMULAS[method](p)[1:]


@pytest.mark.parametrize(("nodes", "g"), [(2, 4), (4, 2)])
def test_by_nodes_a_share_of_the_state_leaves_each_device(nodes, g):
    """In three collectives: in the node, across, in the node."""
    sharding = cache_over((nodes, g))
    cache = placed(sharding, (1, 1024, 16, 128), sharding.spec)
    f = functools.partial(tree_decode, sharding=sharding, method="hierarchical")
    lowered = jax.jit(f).lower(placed(sharding, (1, 1, 16, 128), P()), cache, cache)
    found = collectives(lowered.compile())
    in_order = np.arange(nodes * g).reshape(nodes, g)
    within, across = (tuple(map(tuple, x.tolist())) for x in (in_order, in_order.T))
    among = [(c.groups, c.operand_bytes) for c in found]
    assert among == [(within, STATE), (across, STATE // g), (within, STATE // g)]


@pytest.mark.parametrize("p", [3, 6])
def test_butterfly_needs_two_more_rounds_for_other_numbers(p):
    found = collectives(compiled(p, 512 * p, "butterfly"))
    assert count_collectives(found) == p.bit_length() - 1 + 2


@pytest.mark.parametrize("kv_heads", [16, 2])
@pytest.mark.parametrize("p", [2, 8])
def test_ring_sends_every_shard_round_but_home(p, kv_heads):
    """2·b·t·d_kv·(p − 1) elements from each device, of the key heads as they are."""
    found = collectives(compiled(p, 1024, "ring", kv_heads=kv_heads))
    assert {c.kind for c in found} == {"collective-permute"}
    assert total_bytes(found) == 4 * 2 * (1024 // p) * (kv_heads * 128) * (p - 1)
    assert count_collectives(found) == 2 * (p - 1)


def test_a_sharded_cache_stays_where_it_is(optimized):
    """Nothing as large as a shard is sent or copied: argument and temporary memory together
    stay within a tenth of what 2024 eq. 30 says must be held."""
    kv_len, p, width = 32768, 8, 16 * 128
    t = kv_len // p
    eq_30 = 4 * (2 * t * width + 2 * width + 2 * 16)
    sharding = cache_over((p,))
    q = placed(sharding, (1, 1, 16, 128), P())
    cache = placed(sharding, (1, kv_len, 16, 128), sharding.spec)
    f = jax.jit(functools.partial(tree_decode, sharding=sharding))
    held = memory(f.lower(q, cache, cache).compile())
    assert eq_30 * 0.9 < held.held_bytes <= 1.1 * eq_30
    assert held.output_bytes == 4 * 16 * 128  # 2024 §6.2 counts none for the tree


# The gradient of an energy over the mesh: the papers' Algorithms 1 and 2.


def energy_of_algorithm_1(zeta, q, k, v):
    """F(ζ) over the mesh, with this device's k (t, d) and v (t, dv): 2024 Algorithm 1."""
    r = k @ q * q.size**-0.5 + v @ zeta
    m = jax.lax.pmax(jax.lax.stop_gradient(r.max()), "kv")
    return m + jnp.log(jax.lax.psum(jnp.exp(r - m).sum(), "kv"))


def energy_of_energies(zeta, q, k, v):
    """The same as a log-sum-exp of each device's own energy."""
    mine = treeattn.energy(zeta, q, k, v)
    m = jax.lax.pmax(jax.lax.stop_gradient(mine), "kv")
    return m + jnp.log(jax.lax.psum(jnp.exp(mine - m), "kv"))


@pytest.mark.parametrize("p", [2, 8])
@pytest.mark.parametrize("energy", [energy_of_algorithm_1, energy_of_energies])
def test_the_gradient_of_an_energy_over_the_mesh(energy, p):
    """By `jax.grad` inside `shard_map`: attention, for Algorithm 2's one further reduction, of dv
    numbers. With the energy's own two, that is eq. 34 (2025: 13) for a head."""
    rng = np.random.default_rng(p)
    q, k, v = (jnp.asarray(rng.normal(size=shape)) for shape in ((8,), (64, 8), (64, 6)))
    inputs = jnp.zeros(6), q, k, v
    s = np.asarray(k @ q) * 8**-0.5
    dense, lse = np.exp(s) @ v / np.exp(s).sum(), np.log(np.exp(s).sum())
    specs = {"in_specs": (P(), P(), P("kv"), P("kv")), "out_specs": P()}
    on_devices = functools.partial(jax.shard_map, mesh=cache_over((p,)).mesh, **specs)
    alone, both = (jax.jit(on_devices(f)) for f in (energy, jax.value_and_grad(energy)))
    value, gradient = both(*inputs)
    np.testing.assert_allclose(gradient, dense, atol=1e-12)
    np.testing.assert_allclose(value, lse, atol=1e-12)
    before, after = (collectives(f.lower(*inputs).compile()) for f in (alone, both))
    size = q.dtype.itemsize
    assert [c.operand_bytes for c in before] == [size, size]
    assert sorted(c.operand_bytes for c in after) == [size, size, 6 * size]
    assert {c.kind for c in after} == {"all-reduce"} and count_collectives(after) == 3


def test_an_energy_over_the_mesh_needs_its_constant_and_its_sum():
    """Two ways to get it wrong: pmax has no derivative; local energies have local gradients."""
    q, k, v = jnp.ones(4), jnp.arange(32.0).reshape(8, 4) / 32, jnp.arange(16.0).reshape(8, 2)
    specs = {"in_specs": (P(), P(), P("kv"), P("kv")), "out_specs": P()}
    on_devices = functools.partial(jax.shard_map, mesh=cache_over((2,)).mesh, **specs)

    def without_constant(zeta, q, k, v):
        return jax.lax.pmax((k @ q + v @ zeta).max(), "kv")

    with pytest.raises(NotImplementedError, match="pmax"):
        on_devices(jax.grad(without_constant))(jnp.zeros(2), q, k, v)
    found = on_devices(jax.grad(treeattn.energy))(jnp.zeros(2), q, k, v)
    parts = [treeattn.attention_from_energy(q, k[i : i + 4], v[i : i + 4]) for i in (0, 4)]
    np.testing.assert_allclose(found, parts[0] + parts[1], rtol=1e-6)


# The cost of a call, and what is refused.


def test_a_warm_call_asks_little(unchecked):
    """Shapes and dtypes are checked where a program is traced, once a shape."""
    q, kv = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 8, 2, 4))
    assert python_calls(tree_decode, q, kv, kv, sharding=cache_over((2,))) <= 21


def test_a_walk_through_it_passes_eight_files(unchecked):
    files = []

    def note(frame, event, _):
        name = frame.f_code.co_filename
        compute = "/treeattn/" in name and not name.endswith("checks.py")  # which only raises
        if event == "call" and compute and name not in files:
            files.append(name)

    q, kv = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 40, 2, 4))
    sys.setprofile(note)
    try:
        tree_decode(q, kv, kv, sharding=cache_over((3,)))
    finally:
        sys.setprofile(None)
    assert len(files) <= 8, files


def inputs(**changes):
    shapes = {"q": (1, 1, 4, 8), "k": (1, 6, 2, 8), "v": (1, 6, 2, 8)} | changes
    return [jnp.ones(shape, jnp.float32) for shape in shapes.values()]


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "method: expected one of", inputs(), {"method": "ring"}),
        (ValueError, "implementation: 'flash' needs a CUDA", inputs(), {"implementation": "flash"}),
        (ValueError, "implementation: expected", inputs(), {"implementation": "cudnn"}),
        (ValueError, "q: expected .*, its heads a multiple of k", inputs(q=(1, 1, 3, 8)), {}),
        (ValueError, "k: expected", inputs(k=(2, 6, 2, 8)), {}),
        (ValueError, "v: expected", inputs(v=(1, 5, 2, 8)), {}),
        (ValueError, "k: expected 4 axes", inputs(k=(6, 2, 8)), {}),
        (TypeError, "q: expected a floating-point", [x.astype(int) for x in inputs()], {}),
        (TypeError, "one dtype", [inputs()[0].astype(jnp.bfloat16), *inputs()[1:]], {}),
        (ValueError, "mask: expected", inputs(), {"mask": jnp.ones((1, 1, 1, 5), bool)}),
        (ValueError, "kv_lengths: expected", inputs(), {"kv_lengths": jnp.ones(2, int)}),
        (ValueError, "kv_lengths: expected 0 to kv_len", inputs(), {"kv_lengths": np.array([7])}),
        (TypeError, "sharding: expected a NamedSharding", inputs(), {"sharding": "kv"}),
        (ValueError, "sharding: k's sharding is unknown", inputs(), {"sharding": None}),
        (ValueError, "cannot share 6 slots", inputs(), {"striped": True}),
    ],
)
def test_what_does_not_fit_is_refused(error, message, arguments, options, unchecked):
    for decode in (tree_decode, ring_decode):
        if "method" in options and decode is ring_decode:
            continue  # it has none
        with pytest.raises(error, match=message):
            decode(*arguments, **{"sharding": cache_over((4,))} | options)


def test_merge_across_refuses_what_it_cannot_merge(unchecked):
    with pytest.raises(ValueError, match="method"):
        merge_across(treeattn.AttentionState.identity((1,), 1), "kv", method="sum")
    with pytest.raises(TypeError, match="state: expected an AttentionState"):
        merge_across((1, 2, 3), "kv")
    with pytest.raises(ValueError, match="axis_name: expected each axis once"):
        merge_across(treeattn.AttentionState.identity((1,), 1), ("kv", "kv"), method="gather")
