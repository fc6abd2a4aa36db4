"""Decoding from shards against dense attention in float64, and what the programs send."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn.program import collectives, count_collectives, memory, sent_bytes, total_bytes
from treeattn.devices.merge import METHODS, merge_across
from treeattn.kernel.inputs import check_inputs

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
DECODERS = {
    method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS
} | {"ring": treeattn.ring_decode, "pass_q": treeattn.pass_q_decode}


def make_mesh(shape):
    devices = jax.devices()[: np.prod(shape)]
    return treeattn.kv_mesh(devices, nodes=shape[0] if len(shape) == 2 else None)


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
def decoder(shape, name):
    """(q, k, v, options) -> (out, lse), compiled once."""
    mesh = make_mesh(shape)
    decode = functools.partial(DECODERS[name], mesh=mesh, axis=mesh.axis_names, return_lse=True)
    return jax.jit(lambda q, k, v, options: decode(q, k, v, **options))


@functools.cache
def gradients(shape, name):
    """The gradients of Σ w·out + Σ u·lse over the rows with keys, compiled once."""

    def loss(q, k, v, options, w, u):
        out, lse = decoder(shape, name)(q, k, v, options)
        return jnp.sum(w * out) + jnp.sum(u * jnp.where(jnp.isneginf(lse), 0, lse))

    return jax.jit(jax.grad(loss, (0, 1, 2)))


# 5 keys: fewer than devices on some meshes; 37 divides by none of them.
VALUES = [
    ("allreduce", (8,), 37), ("allreduce", (2, 3), 37), ("allreduce", (6,), 5),
    *(("butterfly", (p,), 37) for p in (1, 2, 4, 7, 8)), ("butterfly", (4, 2), 5),
    ("gather", (3,), 37), ("gather", (2, 3), 5),
    ("reduce_scatter", (2,), 37), ("all_to_all", (6,), 5), ("hierarchical", (4, 2), 37),
    ("hierarchical", (8,), 5),
    ("ring", (2,), 37), ("ring", (8,), 5), ("pass_q", (2,), 5), ("pass_q", (8,), 37),
]  # fmt: skip
GRADIENTS = [
    *((name, (2, 3), 5) for name in DECODERS), ("allreduce", (3,), 37), ("all_to_all", (3,), 37),
    ("butterfly", (5,), 37), ("ring", (1,), 37), ("pass_q", (1,), 37),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "kv_len"), VALUES + GRADIENTS, ids=str)
def test_values_and_gradients(name, shape, kv_len):
    @settings(max_examples=8, deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed):
        (q, k, v), options, w, u = draw_inputs(seed, kv_len)
        out, lse = decoder(shape, name)(q, k, v, options)
        np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
        np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
        if name in ("butterfly", "gather", "all_to_all"):
            copies = [np.asarray(s.data).tobytes() for s in out.addressable_shards]
            assert len(set(copies)) == 1
        if (name, shape, kv_len) in GRADIENTS:
            grads = gradients(shape, name)(q, k, v, options, w, u)
            for got, expected in zip(grads, dense_gradients(q, k, v, w, u, **options), strict=True):
                np.testing.assert_allclose(got, expected, atol=1e-11)

    check()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["allreduce", "butterfly", "ring"])
def test_a_mesh_with_explicit_axes(name, sharded):
    """As `jax.make_mesh` makes them from JAX 0.9 on."""
    mesh = jax.make_mesh((4,), ("kv",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    q, (k, v) = rng.normal(size=(1, 1, 4, 8)), rng.normal(size=(2, 1, 40, 2, 8))
    cache = jax.device_put((k, v), NamedSharding(mesh, P(None, "kv") if sharded else P()))
    out = DECODERS[name](q, *cache, mesh=mesh, axis="kv")
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reduce_scatter", "all_to_all", "hierarchical"])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (3, 2)], ids=str)
def test_scattered_heads(shape, method):
    """Each device has its own ⌈h/p⌉ heads; those beyond the last one saw no keys."""
    mesh, heads, p = make_mesh(shape), 5, int(np.prod(shape))
    rng = np.random.default_rng(0)
    q, (k, v) = rng.normal(size=(2, 3, heads, 8)), rng.normal(size=(2, 2, 37, heads, 8))
    out, lse = treeattn.tree_decode(
        q, k, v, mesh=mesh, axis=mesh.axis_names, method=method, scatter=True, return_lse=True
    )
    share = -(-heads // p)
    assert out.shape == (2, 3, share * p, 8) and lse.shape == out.shape[:3]
    assert {s.data.shape for s in out.addressable_shards} == {(2, 3, share, 8)}
    np.testing.assert_allclose(out[:, :, :heads], dense_attention(q, k, v), atol=1e-12)
    np.testing.assert_allclose(lse[:, :, :heads], dense_weights(q, k)[1], atol=1e-12)
    assert not np.any(out[:, :, heads:]) and np.all(np.isneginf(lse[:, :, heads:]))


WIRES = [(method, jnp.bfloat16, 2**-8) for method in METHODS] + [
    ("all_to_all", jnp.float16, 2**-11)
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "wire", "unit"), WIRES)
def test_numerators_on_the_wire_in_16_bits(method, wire, unit):
    """One rounding of the output for each time it travels; lse stays exact; gradients flow."""
    mesh = make_mesh((2, 2))
    rng = np.random.default_rng(0)
    q, (k, v) = rng.normal(size=(1, 2, 4, 8)), 40 * rng.normal(size=(2, 1, 64, 4, 8))

    def body(q, k, v):
        state = merge_across(treeattn.attend(q, k, v), ("node", "device"), method=method, wire=wire)
        return treeattn.finalize(state)

    heads = P(None, None, mesh.axis_names) if method in ("reduce_scatter", "all_to_all") else P()
    keys = P(None, mesh.axis_names)
    f = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(), keys, keys), out_specs=heads, check_vma=False)
    )
    out, lse = f(q, k, v)
    error = np.abs(out - dense_attention(q, k, v)).max() / np.abs(v).max()
    assert 0 < error < 4 * unit
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-12)
    grads = jax.grad(lambda v: jnp.sum(f(q, k, v)[0]))(v)
    expected = dense_gradients(q, k, v, np.ones((1, 2, 4, 8)))[2]
    np.testing.assert_allclose(grads, expected, atol=8 * unit)


WIDENED = [("allreduce", x) for x in (np.uint8, np.int16, np.uint32, np.int64)] + [
    (name, np.int8) for name in DECODERS
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), WIDENED)
def test_narrow_lengths_are_widened(name, dtype):
    """300 keys: more than fit into the narrowest of these."""
    (q, k, v), _, _, _ = draw_inputs(0, 300)
    lengths = np.array([100, 127], dtype)
    out = decoder((3,), name)(q, k, v, {"kv_lengths": lengths})[0]
    np.testing.assert_allclose(out, dense_attention(q, k, v, kv_lengths=lengths), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["allreduce", "ring"])
def test_a_traced_scale_is_compiled_once_and_has_a_gradient(name):
    (q, k, v), _, w, _ = draw_inputs(0, 37)
    run = decoder((3,), name)

    def loss(scale):
        return jnp.sum(w * run(q, k, v, {"scale": scale})[0])

    slope = jax.jit(jax.value_and_grad(loss))
    for scale in (0.2, 0.9):
        value, gradient = slope(scale)
        dense = [np.sum(w * dense_attention(q, k, v, scale=scale + e)) for e in (-1e-5, 0, 1e-5)]
        np.testing.assert_allclose(value, dense[1], rtol=1e-11)
        np.testing.assert_allclose(gradient, (dense[2] - dense[0]) / 2e-5, rtol=1e-6)
    assert slope._cache_size() == 1


@pytest.mark.parametrize("kv_len", [1, 8, 40])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 4, 4), (3, 4, 4), (3, 6, 2)])
def test_float32_without_options(kv_len, batch, heads, kv_heads):
    rng = np.random.default_rng(kv_len)
    q = rng.normal(size=(batch, 1, heads, 16)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_len, kv_heads, 16)).astype(np.float32)
    mesh = make_mesh((8,))
    out, lse = treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv", return_lse=True)
    assert out.dtype == jnp.float32 and lse.dtype == jnp.float32
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-5)


def bits(p, method, block, arrays, lengths, mask):
    """(out, lse) of as many devices, as NumPy arrays."""
    q, k, v = (jnp.asarray(x) for x in arrays)
    decoded = treeattn.tree_decode(
        q,
        k,
        v,
        mesh=make_mesh((p,)),
        axis="kv",
        kv_lengths=lengths,
        mask=mask,
        method=method,
        block=block,
        return_lse=True,
    )
    return [np.asarray(x) for x in decoded]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 4, 64, 512, 64), jnp.float32), ((6, 2, 40, 256, 16), jnp.bfloat16)]
)
def test_blocks_give_the_same_bits_from_every_number_of_devices(shape, dtype, optimized):
    h, kv_heads, d, n, block = shape
    rng = np.random.default_rng(0)
    sizes = (2, 2, h, d), (2, n, kv_heads, d), (2, n, kv_heads, d)
    arrays = [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]
    lengths, mask = np.array([n, n // 3]), rng.random((2, 1, 2, n)) < 0.9
    want = bits(1, "gather", block, arrays, lengths, mask)
    np.testing.assert_allclose(
        want[1], dense_weights(*arrays[:2], mask=mask, kv_lengths=lengths)[1], atol=1e-5
    )
    for p, method in [(2, "gather"), (4, "butterfly"), (4, "all_to_all"), (8, "gather")]:
        for x, y in zip(bits(p, method, block, arrays, lengths, mask), want, strict=True):
            np.testing.assert_array_equal(x, y)
    # The same order over nodes of two devices; and without blocks, other bits from 8 devices.
    nodes = make_mesh((2, 2))
    out = treeattn.tree_decode(
        *arrays,
        mesh=nodes,
        axis=nodes.axis_names,
        kv_lengths=lengths,
        mask=mask,
        method="gather",
        block=block,
    )
    np.testing.assert_array_equal(out, want[0])
    if dtype == jnp.float32:
        one, eight = (bits(p, "gather", None, arrays, lengths, mask) for p in (1, 8))
        assert any((x != y).any() for x, y in zip(one, eight, strict=True))


def test_blocks_that_make_no_tree_are_refused(unchecked):
    q, kv = jnp.ones((1, 1, 2, 8)), jnp.ones((1, 48, 2, 8))
    for p, method, block in [
        (2, "gather", 8),
        (3, "gather", 16),
        (2, "butterfly", 7),
        (2, "gather", 0),
    ]:
        with pytest.raises(ValueError, match="block: expected shards of 1, 2, 4, … blocks"):
            treeattn.tree_decode(
                q, kv, kv, mesh=make_mesh((p,)), axis="kv", method=method, block=block
            )
    with pytest.raises(ValueError, match="block: method 'allreduce' has no order"):
        treeattn.tree_decode(q, kv, kv, mesh=make_mesh((2,)), axis="kv", block=8)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (5,), (8,), (2, 3)], ids=str)
@pytest.mark.parametrize("method", ["allreduce", "butterfly", "gather", "hierarchical"])
def test_every_device_has_the_same_bits(method, shape, optimized):
    """Also where p is no power of two, and by nodes."""
    rng, mesh, p = np.random.default_rng(0), make_mesh(shape), int(np.prod(shape))
    m, d = (jnp.asarray(rng.uniform(1, 9, (p, 6)), jnp.float32) for _ in range(2))
    n = jnp.asarray(rng.normal(size=(p, 6, 16)), jnp.float32)

    def body(*state):
        own = treeattn.AttentionState(*(x[0] for x in state))
        return tuple(x[None] for x in merge_across(own, mesh.axis_names, method=method))

    spec = P(mesh.axis_names)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for x in jax.jit(f)(m, d, n):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


def test_no_keys_at_all():
    q, k, v = np.ones((1, 1, 2, 4)), np.zeros((1, 0, 2, 4)), np.zeros((1, 0, 2, 4))
    for method in METHODS:
        out, lse = treeattn.tree_decode(
            q, k, v, mesh=make_mesh((3,)), axis="kv", method=method, return_lse=True
        )
        assert not np.any(out) and np.all(np.isneginf(lse))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_sums_in_float32(dtype):
    rng = np.random.default_rng(0)
    # Scores to ±500: exp of any of them overflows half precision, and most float32.
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, n, 4, 64)) * s, dtype)
        for n, s in [(1, 8), (4096, 8), (4096, 1)]
    )
    out, lse = treeattn.tree_decode(q, k, v, mesh=make_mesh((8,)), axis="kv", return_lse=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(out, np.float64), dense_attention(q, k, v), atol=0.02, rtol=0.02
    )
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-4)


# What the compiled program sends.


@functools.cache
def compiled(p: int, kv_len: int, method: str = "allreduce", batch: int = 1, sharded: bool = True):
    mesh = make_mesh((p,))
    spec = NamedSharding(mesh, P(None, "kv") if sharded else P())
    cache = jax.ShapeDtypeStruct((batch, kv_len, 16, 128), jnp.float32, sharding=spec)
    q = jax.ShapeDtypeStruct((batch, 1, 16, 128), jnp.float32, sharding=NamedSharding(mesh, P()))
    f = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", method=method)
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


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("energy", [energy_of_algorithm_1, energy_of_energies])
def test_the_gradient_of_an_energy_over_the_mesh(energy, p):
    """By `jax.grad` inside `shard_map`: attention, for Algorithm 2's one further reduction, of dv
    numbers. With the energy's own two, that is eq. 34 (2025: 13) for a head."""
    rng = np.random.default_rng(p)
    q, k, v = (jnp.asarray(rng.normal(size=shape)) for shape in ((8,), (64, 8), (64, 6)))
    inputs = jnp.zeros(6), q, k, v
    s = np.asarray(k @ q) * 8**-0.5
    dense, lse = np.exp(s) @ v / np.exp(s).sum(), np.log(np.exp(s).sum())
    on_devices = functools.partial(
        jax.shard_map, mesh=make_mesh((p,)), in_specs=(P(), P(), P("kv"), P("kv")), out_specs=P()
    )
    alone, both = (jax.jit(on_devices(f)) for f in (energy, jax.value_and_grad(energy)))
    tolerance = {"rtol": 0, "atol": 1e-12 if q.dtype == jnp.float64 else 1e-5}
    value, gradient = both(*inputs)
    np.testing.assert_allclose(gradient, dense, **tolerance)
    np.testing.assert_allclose(value, lse, **tolerance)
    before, after = (collectives(f.lower(*inputs).compile()) for f in (alone, both))
    size = q.dtype.itemsize
    assert [c.operand_bytes for c in before] == [size, size]
    assert sorted(c.operand_bytes for c in after) == [size, size, 6 * size]
    assert {c.kind for c in after} == {"all-reduce"} and count_collectives(after) == 3


def test_an_energy_over_the_mesh_needs_its_constant_and_its_sum():
    """Two ways to get it wrong: pmax has no derivative; local energies have local gradients."""
    q, k, v = jnp.ones(4), jnp.arange(32.0).reshape(8, 4) / 32, jnp.arange(16.0).reshape(8, 2)
    on_devices = functools.partial(
        jax.shard_map, mesh=make_mesh((2,)), in_specs=(P(), P(), P("kv"), P("kv")), out_specs=P()
    )

    def without_constant(zeta, q, k, v):
        return jax.lax.pmax((k @ q + v @ zeta).max(), "kv")

    with pytest.raises(NotImplementedError, match="pmax"):
        on_devices(jax.grad(without_constant))(jnp.zeros(2), q, k, v)
    found = on_devices(jax.grad(treeattn.energy))(jnp.zeros(2), q, k, v)
    parts = [treeattn.attention_from_energy(q, k[i : i + 4], v[i : i + 4]) for i in (0, 4)]
    np.testing.assert_allclose(found, parts[0] + parts[1], rtol=1e-6)


STATE, PIVOT = 4 * 16 * (128 + 2), 4 * 16  # bytes of a state of 16 heads of 128, and of its pivot


def sent_within(p: int, operand: int) -> int:
    """By an Allreduce of p devices, at least (2024 eq. 33, 2025 eq. 12)."""
    return 2 * operand * (p - 1) // p


FORMULAS = {  # p -> (collectives, bytes put in, bytes sent), scattered where a method can
    "allreduce": lambda p: (2, STATE, sent_within(p, PIVOT) + sent_within(p, STATE - PIVOT)),
    "butterfly": lambda p: (p.bit_length() - 1, *[STATE * (p.bit_length() - 1)] * 2),
    "gather": lambda p: (1, STATE, STATE * (p - 1)),
    "reduce_scatter": lambda p: (
        2, STATE, sent_within(p, PIVOT) + (STATE - PIVOT) * (p - 1) // p
    ),
    "all_to_all": lambda p: (1, STATE, STATE * (p - 1) // p),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("method", FORMULAS)
def test_every_method_sends_what_its_formula_says(method, p):
    """Of the compiled program, and of the one that is lowered for CUDA, whatever the context."""
    scatter = {"scatter": True} if method in ("reduce_scatter", "all_to_all") else {}

    def program(mesh, kv_len, array):
        cache = array((1, kv_len, 16, 128), P(None, "kv"))
        options = {"method": method, "implementation": "blockwise", **scatter}
        f = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", **options)
        return jax.jit(f).trace(array((1, 1, 16, 128), P()), cache, cache)

    mesh = make_mesh((p,))
    for kv_len in (1024, 8192):
        traced = program(
            mesh,
            kv_len,
            lambda shape, spec: jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(mesh, spec)
            ),
        )
        found = collectives(traced.lower().compile())
        counted = count_collectives(found), total_bytes(found), sent_bytes(found)
        assert counted == FORMULAS[method](p)
    traced = program(
        AbstractMesh((p,), ("kv",)), 1024, lambda shape, _: jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    written = collectives(traced.lower(lowering_platforms=("cuda",)))
    joined = 1 if method == "allreduce" else 0  # XLA:CPU joins Algorithm 3's two sums
    assert count_collectives(written) == FORMULAS[method](p)[0] + joined
    assert (total_bytes(written), sent_bytes(written)) == FORMULAS[method](p)[1:]


@pytest.mark.parametrize(("nodes", "g"), [(2, 2), (2, 4), (4, 2)])
def test_by_nodes_a_share_of_the_state_leaves_each_device(nodes, g):
    """In three collectives: in the node, across, in the node; two where shares stay apart."""
    mesh = make_mesh((nodes, g))

    def sent(method, **options):
        spec = NamedSharding(mesh, P(None, mesh.axis_names))
        cache = jax.ShapeDtypeStruct((1, 1024, 16, 128), jnp.float32, sharding=spec)
        q = jax.ShapeDtypeStruct((1, 1, 16, 128), jnp.float32)
        f = functools.partial(
            treeattn.tree_decode, mesh=mesh, axis=mesh.axis_names, method=method, **options
        )
        found = collectives(jax.jit(f).lower(q, cache, cache).compile())
        # A node's groups have g devices that are neighbours; with as many nodes, kinds tell.
        across = [c for c in found if c.devices == nodes]
        within = [c for c in found if c.devices == g]
        return sent_bytes(across), sent_bytes(within), found

    across, within, found = sent("hierarchical")
    share = STATE // g
    sent_across = (nodes - 1) * share
    sent_inside = (g - 1) * share * 2
    assert [c.kind for c in found] == ["all-to-all", "all-gather", "all-gather"]
    assert sent_bytes(found) == sent_across + sent_inside
    if nodes != g:
        assert (across, within) == (sent_across, sent_inside)
    *_, scattered = sent("hierarchical", scatter=True)
    assert [c.kind for c in scattered] == ["all-to-all", "all-to-all"]
    assert sent_bytes(scattered) == (g - 1) * share + (nodes - 1) * share // nodes


@pytest.mark.slow
@pytest.mark.parametrize("p", [3, 5, 6, 7, 9])
def test_butterfly_needs_two_more_rounds_for_other_numbers(p):
    found = collectives(compiled(p, 4096 * p, "butterfly"))
    assert count_collectives(found) == p.bit_length() - 1 + 2


def test_a_sharded_cache_stays_where_it_is(optimized):
    """Nothing as large as a shard is sent or copied: argument and temporary memory together
    stay within a tenth of what 2024 eq. 30 says must be held."""
    kv_len, p, width = 32768, 8, 16 * 128
    t = kv_len // p
    eq_30 = 4 * (2 * t * width + 2 * width + 2 * 16)
    held = memory(compiled(p, kv_len))
    assert eq_30 * 0.9 < held.held_bytes <= 1.1 * eq_30


def test_the_output_is_allocated_too():
    """2024 §6.2 counts none for the tree: b·d elements, as many as the numerator's."""
    assert memory(compiled(8, 32768)).output_bytes == 4 * 16 * 128


def shapes(mesh, kv_len, heads, kv_heads, dim, q_len=1):
    spec = NamedSharding(mesh, P(None, "kv"))
    q_spec = NamedSharding(mesh, P(None, "kv") if q_len == kv_len else P())
    kv = jax.ShapeDtypeStruct((2, kv_len, kv_heads, dim), jnp.float32, sharding=spec)
    return jax.ShapeDtypeStruct((2, q_len, heads, dim), jnp.float32, sharding=q_spec), kv, kv


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_ring_sends_every_shard_round_but_home(p, kv_heads):
    """2·b·t·d_kv·(p − 1) elements from each device, of the key heads as they are."""
    mesh, kv_len, dim = make_mesh((p,)), 1024, 32
    f = jax.jit(functools.partial(treeattn.ring_decode, mesh=mesh, axis="kv"))
    found = collectives(f.lower(*shapes(mesh, kv_len, 8, kv_heads, dim)).compile())
    assert {c.kind for c in found} == {"collective-permute"}
    assert total_bytes(found) == 4 * 2 * 2 * (kv_len // p) * (kv_heads * dim) * (p - 1)
    assert count_collectives(found) == 2 * (p - 1)


def test_pass_q_sends_the_same_for_every_context():
    mesh, sent = make_mesh((4,)), set()
    for kv_len in (256, 4096):
        f = jax.jit(functools.partial(treeattn.pass_q_decode, mesh=mesh, axis="kv"))
        found = collectives(f.lower(*shapes(mesh, kv_len, 8, 2, 32)).compile())
        sent.add(tuple((c.kind, c.count, c.operand_bytes) for c in found))
    # b queries of one share visit three others; four shares' states go home at once.
    query, state = 4 * 2 * 8 * 32, 4 * 2 * 8 * (32 + 2)
    assert sent == {
        (
            ("collective-permute", 3, query),
            ("all-to-all", 1, 4 * state),
            ("all-gather", 1, state),
        )
    }


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [False, True])
def test_a_batch_that_is_sharded_too_stays_where_it_is(lengths, optimized):
    """Over the axes ("data", "kv") nothing of the size of the keys crosses the axis "data"."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "kv"))

    def array(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    q, kv = array((4, 1, 8, 32), "data"), array((4, 4096, 8, 32), "data", "kv")
    options = {"kv_lengths": array((4,), "data", dtype=jnp.int32)} if lengths else {}
    f = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv")
    named = functools.partial(f, batch_axis="data")
    for decode in (f, named):
        program = jax.jit(decode).lower(q, kv, kv, **options).compile()
        assert total_bytes(collectives(program)) < 4 * 4 * 8 * 34 * 4
        # Where nobody names the axis, the sums have to be such as XLA can deal out by itself:
        # from JAX 0.10 on they are not computed block by block.
        if decode is named or jax.__version_info__ < (0, 10):
            assert memory(program).temporary_bytes < 4 * 4096 * 8 * 32 // 4

    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=x.shape).astype(np.float32) for x in (q, kv, kv))
    options = {"kv_lengths": np.array([4096, 0, 17, 3000])} if lengths else {}
    arrays = (jax.device_put(x, NamedSharding(mesh, P("data", "kv"))) for x in (k, v))
    out = f(jax.device_put(q, NamedSharding(mesh, P("data"))), *arrays, **options)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-5)


# The flash kernel, lowered for CUDA without a GPU.


def lower_for_cuda(kv_len, kv_lengths=None, gradient=False, **options):
    mesh = AbstractMesh((8,), ("kv",))

    def f(q, k, v, lengths):
        return treeattn.tree_decode(
            q, k, v, mesh=mesh, axis="kv", kv_lengths=lengths, implementation="flash", **options
        )

    def loss(*arguments, decode=f):
        return jnp.sum(decode(*arguments).astype(jnp.float32))

    q = jax.ShapeDtypeStruct((2, 1, 16, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, kv_len, 4, 128), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, (0, 1, 2)) if gradient else f).trace(
        q, cache, cache, kv_lengths
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.parametrize(
    ("kv_len", "lengths", "kernel", "shapes"),
    [
        (4096, None, "flash_mha_fwd", ["2x1x16x128", "2x512x4x128"]),
        (4096, LENGTHS, "flash_mha_varlen_fwd", ["2x16x128", "1024x4x128"]),
        (4001, None, "flash_mha_varlen_fwd", ["2x16x128", "1002x4x128"]),  # padded shards
        (3, None, "flash_mha_varlen_fwd", ["2x16x128", "2x4x128"]),  # fewer keys than devices
    ],
)
def test_flash_is_lowered_once_with_grouped_heads(flash, kv_len, lengths, kernel, shapes):
    text = lower_for_cuda(kv_len, lengths)
    (call,) = [line for line in text.splitlines() if "custom_call @flash" in line]
    assert f"@{kernel}(" in call
    assert all(f"tensor<{shape}xbf16>" in call for shape in shapes)  # k and v not repeated
    assert text.count("stablehlo.all_reduce") == 3
    assert "all_gather" not in text and "collective_permute" not in text


def test_flash_takes_a_traced_scale(flash):
    mesh = AbstractMesh((8,), ("kv",))
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", implementation="flash")
    q = jax.ShapeDtypeStruct((2, 1, 16, 128), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((), jnp.float32)

    def loss(scale, q):
        k = jnp.zeros((2, 512, 4, 128), jnp.bfloat16)
        return jnp.sum(decode(q, k, k, scale=scale).astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).trace(scale, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @flash_mha_fwd" in text


def test_a_cpu_mesh_on_a_host_with_gpus_does_without_flash(flash, monkeypatch):
    """Nobody says "flash": inside a mesh the compiler knows for which devices it compiles."""
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(treeattn.kernel.choice, "host_device", lambda: gpu)
    mesh, q = make_mesh((2,)), jnp.ones((1, 200, 4, 64), jnp.bfloat16)
    k = jnp.ones((1, 32, 2, 64), jnp.bfloat16)
    assert treeattn.tree_decode(q, k, k, mesh=mesh, axis="kv").shape == q.shape

    def own(q, k):
        state = treeattn.attend(q, k, k)
        return treeattn.finalize(merge_across(state, "kv"))[0]

    specs = {"in_specs": (P(), P(None, "kv")), "out_specs": P()}
    f = jax.jit(jax.shard_map(own, mesh=mesh, **specs))
    np.testing.assert_allclose(f(q, k), 1)
    abstract = AbstractMesh((2,), ("kv",), axis_types=(AxisType.Auto,))
    traced = jax.jit(jax.shard_map(own, mesh=abstract, **specs)).trace(q, k)
    assert "custom_call @flash_mha_fwd" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_variable_lengths_as_flash_packs_them(flash, monkeypatch):
    """The packing, with a kernel in NumPy's place that reads it as FlashAttention documents it."""

    def kernel(q, k, v, starts_q, starts_k, *, max_seqlen_q, max_seqlen_k, softmax_scale, **_):
        outs, lses = np.zeros(q.shape, np.float32), []
        for i in range(len(starts_q) - 1):
            rows, keys = (slice(s[i], s[i + 1]) for s in (starts_q, starts_k))
            assert rows.stop - rows.start <= max_seqlen_q
            assert keys.stop - keys.start <= max_seqlen_k
            lse = np.full((q.shape[1], max_seqlen_q), np.inf, np.float32)
            if rows.stop > rows.start and keys.stop > keys.start:
                own = np.asarray(q[rows][None], float), np.asarray(k[keys][None], float)
                outs[rows] = dense_attention(*own, np.asarray(v[keys][None]), scale=softmax_scale)[
                    0
                ]
                lse[:, : rows.stop - rows.start] = dense_weights(*own, scale=softmax_scale)[1][0].T
            lses.append(lse)
        return jnp.asarray(outs, q.dtype), jnp.asarray(np.stack(lses))

    _, varlen_fwd = flash.load()
    monkeypatch.setattr(varlen_fwd, "flash_mha_varlen_fwd", kernel)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, n, 4, 16)), jnp.float16) for n in (2, 40, 40))
    lengths = jnp.array([40, 0, 7])
    inputs = check_inputs(q, k[:, :, :2], v[:, :, :2], kv_lengths=lengths)
    with jax.disable_jit():
        out, lse = treeattn.finalize(flash.flash_attend(inputs))
    expected = {"kv_lengths": lengths}
    np.testing.assert_allclose(
        out, dense_attention(q, k[:, :, :2], v[:, :, :2], **expected), atol=2e-3
    )
    np.testing.assert_allclose(lse, dense_weights(q, k[:, :, :2], **expected)[1], rtol=1e-5)


def test_flash_by_butterfly(flash):
    text = lower_for_cuda(4096, method="butterfly")
    assert text.count("custom_call @flash_mha_fwd") == 1
    assert text.count("stablehlo.collective_permute") == 3
    assert "all_reduce" not in text


def test_the_gradient_of_flash_is_the_blockwise_one(flash):
    text = lower_for_cuda(4096, gradient=True)
    assert "flash_mha_bwd" not in text and text.count("stablehlo.while") >= 1


# What is refused.


def inputs(**changes):
    shapes = {"q": (1, 1, 4, 8), "k": (1, 6, 2, 8), "v": (1, 6, 2, 8)} | changes
    return [jnp.ones(shape, jnp.float32) for shape in shapes.values()]


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, "axis: the mesh has axes", inputs(), {"axis": "heads"}),
        (ValueError, "axis: expected one or more", inputs(), {"axis": ()}),
        (ValueError, "axis: expected one or more", inputs(), {"axis": ("kv", "kv")}),
        (ValueError, "method: expected one of", inputs(), {"method": "ring"}),
        (ValueError, "implementation: 'flash' needs CUDA", inputs(), {"implementation": "flash"}),
        (ValueError, "scatter: expected one of", inputs(), {"method": "gather", "scatter": True}),
        (ValueError, "implementation: expected", inputs(), {"implementation": "cudnn"}),
        (ValueError, "q: expected a number of heads", inputs(q=(1, 1, 3, 8)), {}),
        (ValueError, "k: expected", inputs(k=(2, 6, 2, 8)), {}),
        (ValueError, "v: expected", inputs(v=(1, 5, 2, 8)), {}),
        (ValueError, "k: expected 4 axes", inputs(k=(6, 2, 8)), {}),
        (TypeError, "q: expected a floating-point", [x.astype(int) for x in inputs()], {}),
        (TypeError, "one dtype", [inputs()[0].astype(jnp.bfloat16), *inputs()[1:]], {}),
        (ValueError, "mask: expected", inputs(), {"mask": jnp.ones((1, 1, 1, 5), bool)}),
        (ValueError, "kv_lengths: expected", inputs(), {"kv_lengths": jnp.ones(2, int)}),
        (TypeError, "mesh: expected", inputs(), {"mesh": "kv"}),
    ],
)
def test_what_does_not_fit_is_refused(error, message, arguments, options, unchecked):
    for decode in (treeattn.tree_decode, treeattn.ring_decode, treeattn.pass_q_decode):
        if "method" in options and decode is not treeattn.tree_decode:
            continue  # the rings have none
        with pytest.raises(error, match=message):
            decode(*arguments, **{"mesh": make_mesh((2,)), "axis": "kv"} | options)


def test_merge_across_refuses_another_method():
    with pytest.raises(ValueError, match="method"):
        merge_across(treeattn.AttentionState.identity((1,), 1), "kv", method="sum")
