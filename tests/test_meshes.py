"""Meshes as users have them: axes in any order, of a context, of an enclosing `shard_map`; rows
and heads along other axes than the keys: right, and nothing crosses those."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn.program import collectives, count_collectives, total_bytes
from treeattn.devices.layout import lay_out
from treeattn.devices.merge import METHODS, merge_across
from treeattn.kernel.inputs import check_inputs

CAUSAL = {"ring_attention": treeattn.ring_attention, "ulysses": treeattn.ulysses_attention}
DECODERS = {
    method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS
} | {"ring": treeattn.ring_decode, "pass_q": treeattn.pass_q_decode}


def arrays(seed, b, l, n, h, h_kv, d=4):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(b, l, h, d))
    k, v = rng.normal(size=(2, b, n, h_kv, d))
    return q, k, v


# What each device puts into its collectives, of its own b rows and h heads, for the devices along
# the keys' axes alone: (how many, bytes).


def sends(name, sizes, *, b, l, h, d, item, shard=()):
    """sizes: devices along each of the keys' axes; shard: bytes of each array that a ring moves."""
    p, sizes = math.prod(sizes), [n for n in sizes if n > 1]
    if p == 1:
        return 0, 0

    def state(h, l=l):
        return item * b * l * h * (d + 2)

    everybodys = -(-h // p) * p
    share = item * b * l * (everybodys // p) * (d + 1)  # an output and its lse
    if name == "allreduce":
        return 2 * len(sizes), state(h) * len(sizes)
    if name == "butterfly":
        rounds = sum(n.bit_length() - 1 + (2 if n & (n - 1) else 0) for n in sizes)
        return rounds, state(h) * rounds
    if name == "gather":
        return len(sizes), state(h) * len(sizes)
    if name == "reduce_scatter":
        return 3, state(everybodys) + share
    if name == "all_to_all":
        return 2, state(everybodys) + share
    if name == "ring":
        return (p - 1) * len(shard), (p - 1) * sum(shard)
    if name == "pass_q":
        few = -(-l // p)
        return p + 1, (p - 1) * item * b * few * h * d + (p + 1) * state(h, few)
    raise AssertionError(name)


def sends_by_nodes(sizes, *, b, l, h, d, item, **_):
    *nodes, g = sizes
    padded, nodes = -(-h // g) * g, [n for n in nodes if n > 1]
    whole = item * b * l * padded * (d + 2)
    within = (2, whole + whole // g) if g > 1 else (0, 0)
    return within[0] + len(nodes), within[1] + len(nodes) * whole // g


SIZES = [
    (1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (3, 3), (2, 2, 2),
    (2, 1, 3), (2, 2, 1),
]  # fmt: skip
ROLES = "batch", "heads", "nothing"


@st.composite
def meshes(draw):
    """(the mesh, the keys' axes, the rows', the heads'): axes of any number, size and order."""
    sizes = draw(st.sampled_from(SIZES))
    mesh = Mesh(
        np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple("xyz"[: len(sizes)])
    )
    order = draw(st.permutations(mesh.axis_names))
    keys = tuple(order[: draw(st.integers(1, len(order)))])
    roles = {name: draw(st.sampled_from(ROLES)) for name in order[len(keys) :]}
    rows, heads = (
        tuple(name for name, role in roles.items() if role == which) for which in ROLES[:2]
    )
    return mesh, keys, rows, heads


def along(mesh, axes):
    return math.prod(mesh.shape[name] for name in axes)


def among_several(program, mesh, keys):
    """The collectives, without those of a device with itself: they cross the keys' axes alone."""
    found = collectives(program, mesh)
    p = along(mesh, keys)
    assert {name for c in found for name in c.axes} <= set(keys)
    assert p > 1 or not any("permute" in c.kind for c in found)
    return [c for c in found if c.devices > 1 or "permute" in c.kind]


def place(mesh, x, *entries):
    return jax.device_put(x, NamedSharding(mesh, P(*(entry or None for entry in entries))))


ONCE = Phase.explicit, Phase.reuse, Phase.generate  # a smaller example would compile for minutes


@settings(max_examples=12, phases=ONCE)
@given(
    meshes(),
    st.sampled_from([*DECODERS]),
    st.sampled_from(["plain", "ragged", "few", "mask", "bias", "lengths"]),
    st.integers(0, 2**32 - 1),
)
def test_decoding_on_any_mesh(where, name, kind, seed):
    """The numbers, and what the compiled program sends: along the keys' axes only."""
    mesh, keys, rows, heads = where
    p, rng = along(mesh, keys), np.random.default_rng(seed)
    b, h_kv, l, d = 2, 1, 2, 4  # on each device
    n = {"ragged": 3 * p + 1, "few": 2}.get(kind, 3 * p)
    wide_b, wide_kv = b * along(mesh, rows), h_kv * along(mesh, heads)
    q, k, v = arrays(seed, wide_b, l, n, 2 * wide_kv, wide_kv, d)
    even = keys if n % p == 0 else ()
    q = place(mesh, q, rows, None, heads)
    k, v = (place(mesh, x, rows, even, heads) for x in (k, v))
    shard = [8 * b * -(-n // p) * h_kv * d] * 2
    options = {}
    if kind == "mask":
        options["mask"] = place(mesh, rng.random((wide_b, 1, l, n)) < 0.5, rows, None, None, keys)
        shard.append(b * l * n // p)
    if kind == "bias":
        bias = rng.normal(size=(1, 2 * wide_kv, 1, n))
        options["bias"] = place(mesh, bias, None, heads, None, keys)
        shard.append(8 * 2 * h_kv * n // p)
    if kind == "lengths":
        options["kv_lengths"] = place(mesh, rng.integers(0, n + 1, wide_b).astype(np.int32), rows)
    f = functools.partial(
        DECODERS[name], mesh=mesh, axis=keys, batch_axis=rows, head_axis=heads, return_lse=True
    )
    program = jax.jit(f).lower(q, k, v, **options).compile()
    out, lse = program(q, k, v, **options)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
    found = among_several(program, mesh, keys)
    sizes = [mesh.shape[name] for name in keys]
    own = {"b": b, "l": l, "h": 2 * h_kv, "d": d, "item": 8, "shard": shard}
    if name == "hierarchical":
        expected = sends_by_nodes(sizes, **own)
    else:
        expected = sends(name, sizes, **own)
    assert (count_collectives(found), total_bytes(found)) == expected


@settings(max_examples=4, phases=ONCE)
@given(meshes(), st.sampled_from([*CAUSAL]), st.booleans(), st.integers(0, 2**32 - 1))
def test_prefill_on_any_mesh(where, name, causal, seed):
    mesh, keys, rows, heads = where
    p, b, h_kv, t, d = along(mesh, keys), 1, 2, 3, 4
    wide_b, wide_kv = b * along(mesh, rows), h_kv * along(mesh, heads)
    q, k, v = arrays(seed, wide_b, p * t, p * t, wide_kv * p, wide_kv, d)
    mask = np.tri(p * t, dtype=bool)[None, None] if causal else None
    q, k, v = (place(mesh, x, rows, keys, heads) for x in (q, k, v))
    options = {"mesh": mesh, "axis": keys, "batch_axis": rows, "head_axis": heads}
    program = (
        jax.jit(functools.partial(CAUSAL[name], causal=causal, **options)).lower(q, k, v).compile()
    )
    np.testing.assert_allclose(program(q, k, v), dense_attention(q, k, v, mask=mask), atol=1e-12)
    found = among_several(program, mesh, keys)
    if p == 1:
        expected = 0, 0
    elif name == "ulysses":
        repeated = h_kv * (p // math.gcd(p, h_kv))
        expected = 4, 8 * b * t * d * (2 * h_kv * p + 2 * repeated)
    else:
        expected = 2 * (p - 1), 2 * (p - 1) * 8 * b * t * h_kv * d
    assert (count_collectives(found), total_bytes(found)) == expected


@pytest.mark.parametrize("name", ["reduce_scatter", "butterfly", "pass_q"])
def test_gradients_with_rows_and_heads_elsewhere(name):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("heads", "kv", "batch"))
    q, k, v = arrays(0, 2, 2, 5, 4, 2)
    w, u = np.random.default_rng(1).normal(size=(2, *q.shape))
    decode = functools.partial(
        DECODERS[name], mesh=mesh, axis="kv", batch_axis="batch", head_axis="heads", return_lse=True
    )

    def loss(q, k, v):
        out, lse = decode(q, k, v)
        return jnp.sum(w * out) + jnp.sum(u[..., 0] * lse)

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for x, y in zip(got, dense_gradients(q, k, v, w, u[..., 0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)


@pytest.mark.parametrize("method", ["all_to_all", "hierarchical"])
def test_scattered_shares_are_of_a_devices_own_heads(method):
    """3 heads on each of two devices, in shares of 2, 2: the fourth saw no keys."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("heads", "kv"))
    q, k, v = arrays(0, 1, 2, 4, 6, 2)
    out = treeattn.tree_decode(
        q, k, v, mesh=mesh, axis="kv", head_axis="heads", method=method, scatter=True
    )
    assert out.sharding.spec[2] == ("heads", "kv") and out.shape == (1, 2, 8, 4)
    expected = dense_attention(q, k, v).reshape(1, 2, 2, 3, 4)
    np.testing.assert_allclose(out.reshape(1, 2, 2, 4, 4)[..., :3, :], expected, atol=1e-12)


def test_where_rows_and_heads_lie_is_seen():
    """Of arrays, and of Explicit axes in their types; not of what JAX traces."""
    mesh = treeattn.kv_mesh(jax.devices()[:8], heads=2, batch=2)
    x = jnp.ones((2, 2, 2, 4))

    def layout(k, **options):
        found = lay_out(check_inputs(x, k, k), mesh, "kv", **options)
        return found.batch, found.heads, found.left

    k = place(mesh, x, "batch", "kv", "heads")
    assert layout(k) == (("batch",), ("heads",), ())
    assert layout(x) == layout(np.asarray(x)) == ((), (), ())
    assert layout(k, batch_axis=()) == ((), ("heads",), ())
    seen = []
    jax.jit(lambda k: seen.append(layout(k))).trace(k)
    jax.jit(lambda k: seen.append(layout(k, head_axis="heads"))).trace(k)
    assert seen == [((), (), ("batch", "heads")), ((), ("heads",), ())]
    mesh = jax.make_mesh((2, 2), ("batch", "kv"), axis_types=(AxisType.Explicit,) * 2)
    k = place(mesh, x, "batch", "kv")
    jax.jit(lambda k: seen.append(layout(k))).trace(k)
    assert layout(k) == seen[-1] == (("batch",), (), ())


def test_a_gpus_kernel_is_not_given_a_gathered_cache_in_silence():
    mesh = treeattn.kv_mesh(jax.devices()[:4], batch=2)
    x = jnp.ones((2, 2, 2, 4), jnp.float32)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", implementation="pallas")
    with pytest.warns(UserWarning, match="batch_axis"):
        jax.jit(decode).trace(x, x, x)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "axis: expected the name of an axis", {"axis": 0}),
        (TypeError, "axis: expected the name of an axis", {"axis": None}),
        (ValueError, "batch_axis: the mesh has axes", {"batch_axis": "rows"}),
        (ValueError, "expected axes besides", {"batch_axis": "kv"}),
        (ValueError, "expected axes besides", {"batch_axis": "batch", "head_axis": "batch"}),
        (ValueError, "batch_axis: the 2 devices .* cannot share 3 rows", {"batch_axis": "batch"}),
        (ValueError, "head_axis: the 2 devices .* cannot share 3 key", {"head_axis": "batch"}),
        (TypeError, "block: expected an integer", {"block": 8.0, "method": "gather"}),
        (TypeError, "block: expected an integer", {"block": "8", "method": "gather"}),
        (
            ValueError,
            "wire: what bfloat16 rounds",
            {"block": 1, "method": "gather", "wire": "bfloat16"},
        ),
        (ValueError, "wire: expected a floating", {"wire": jnp.int16}),
        (ValueError, "wire: expected a floating", {"wire": "half a byte"}),
        (ValueError, "wire: expected a floating", {"wire": jnp.float8_e4m3fn}),
    ],
)
def test_what_does_not_fit_a_mesh_is_refused(error, message, options, unchecked):
    mesh, x = treeattn.kv_mesh(jax.devices()[:4], batch=2), jnp.ones((3, 2, 3, 4))
    with pytest.raises(error, match=message):
        treeattn.tree_decode(x, x, x, **{"mesh": mesh, "axis": "kv"} | options)


def test_what_is_no_state_is_refused(unchecked):
    with pytest.raises(TypeError, match="state: expected an AttentionState"):
        merge_across((1, 2, 3), "kv")


@pytest.mark.parametrize("name", ["ring", "pass_q"])
def test_a_ring_of_one_device_sends_itself_nothing(name):
    """The other axis, along which rows lie, has two."""
    mesh = treeattn.kv_mesh(jax.devices()[:2], batch=2)
    q, k, v = arrays(0, 2, 2, 3, 2, 1)
    f = functools.partial(DECODERS[name], mesh=mesh, axis="kv", batch_axis="batch")
    program = jax.jit(f).lower(*(place(mesh, x, "batch") for x in (q, k, v))).compile()
    assert [c for c in collectives(program) if "permute" in c.kind or c.devices > 1] == []


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "ring"])
def test_no_rows_and_no_heads(name):
    mesh = treeattn.kv_mesh(jax.devices()[:2])
    for b, h in [(0, 2), (1, 0)]:
        q, k, v = arrays(0, b, 1, 5, h, 2)
        out = DECODERS[name](q, k, v, mesh=mesh, axis="kv", kv_lengths=np.ones(b, np.int32))
        assert out.shape == q.shape and out.dtype == q.dtype


WIRED = {  # collectives, and numbers of 16 bits: a head's d, and an lse's two
    "allreduce": (2, lambda d: d + 2),
    "butterfly": (2, lambda d: 2 * (d + 2)),
    "gather": (1, lambda d: d + 2),
    "reduce_scatter": (2, lambda d: d + 2),
    "all_to_all": (1, lambda d: d + 2),
}


@pytest.mark.parametrize("method", WIRED)
def test_a_wire_of_16_bits_costs_no_more_messages(method):
    """As compiled for a GPU in place of XLA:CPU, which widens what it adds up."""
    mesh = AbstractMesh((4,), ("kv",), axis_types=(AxisType.Auto,))
    heads = P(None, None, "kv") if method in ("reduce_scatter", "all_to_all") else P()

    def body(m, d, n):
        return merge_across(
            treeattn.AttentionState(m, d, n), "kv", method=method, wire=jnp.bfloat16
        )

    f = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=heads, check_vma=False)
    x = [jax.ShapeDtypeStruct((1, 1, 8, *y), jnp.float32) for y in ((), (), (16,))]
    found = collectives(jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)))
    number, lanes = WIRED[method]
    assert (count_collectives(found), total_bytes(found)) == (number, 2 * 8 * lanes(16))


@pytest.mark.parametrize("name", [*DECODERS, *CAUSAL])
def test_axes_in_another_order_than_the_meshs(name):
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("node", "device"))
    axis = "device", "node"
    if name in CAUSAL:
        q, k, v = arrays(0, 1, 13, 13, 6, 2)
        out = CAUSAL[name](q, k, v, mesh=mesh, axis=axis)
        expected = dense_attention(q, k, v, mask=np.tri(13, dtype=bool)[None, None])
    else:
        q, k, v = arrays(0, 1, 4, 13, 4, 2)
        out = DECODERS[name](q, k, v, mesh=mesh, axis=axis)
        expected = dense_attention(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-12)


KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_of_the_context(kind, placed):
    """`jax.set_mesh(jax.make_mesh(…))`, whose axes are Explicit from JAX 0.9 on."""
    mesh = jax.make_mesh((2, 2), ("data", "kv"), axis_types=(KINDS[kind],) * 2)
    q, k, v = arrays(0, 2, 4, 4, 4, 2)
    with jax.set_mesh(mesh):
        if placed:
            k, v = jax.device_put((k, v), NamedSharding(mesh, P("data", "kv")))
        out = treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv")
        np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)
        jitted = jax.jit(functools.partial(treeattn.ring_attention, mesh=mesh, axis="kv"))
        expected = dense_attention(q, k, v, mask=np.tri(4, dtype=bool)[None, None])
        np.testing.assert_allclose(jitted(q, k, v), expected, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_shard_map_over_another_axis(kind):
    mesh = jax.make_mesh((2, 2), ("data", "kv"), axis_types=(KINDS[kind],) * 2)
    q, k, v = arrays(0, 2, 2, 7, 4, 2)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", batch_axis="data")
    rows = jax.shard_map(
        decode, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    q, k, v = jax.device_put((q, k, v), NamedSharding(mesh, P("data")))
    np.testing.assert_allclose(jax.jit(rows)(q, k, v), dense_attention(q, k, v), atol=1e-12)


def test_another_mesh_than_the_contexts_is_refused():
    x = jnp.ones((1, 2, 2, 4))
    mesh, other = (jax.make_mesh((n,), ("kv",), axis_types=(AxisType.Auto,)) for n in (2, 3))
    with jax.set_mesh(other), pytest.raises(ValueError, match="mesh: expected the context's"):
        treeattn.tree_decode(x, x, x, mesh=mesh, axis="kv")

    def inside(x):
        return treeattn.tree_decode(x, x, x, mesh=mesh, axis="kv")

    with pytest.raises(ValueError, match="are manual here already"):
        jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)


@pytest.mark.parametrize("method", METHODS)
def test_vmap_and_the_gradient_under_it(method):
    mesh, arguments = treeattn.kv_mesh(jax.devices()[:2]), arrays(0, 3, 2, 5, 2, 2)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", method=method)

    def row(q, k, v):
        return jnp.sum(decode(q[None], k[None], v[None]) ** 2)

    def whole(*x):
        return jnp.sum(treeattn.attention(*x) ** 2)

    value, got = jax.jit(jax.vmap(jax.value_and_grad(row, (0, 1, 2))))(*arguments)
    total, expected = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(*arguments)
    np.testing.assert_allclose(value.sum(), total, rtol=1e-12)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_a_tree_of_trees_travels_in_16_bits_too():
    """Its parts: the node's all-to-all, the nodes' gather and the node's."""
    mesh = AbstractMesh((2, 2), ("node", "device"), axis_types=(AxisType.Auto,) * 2)
    q = jax.ShapeDtypeStruct((1, 1, 8, 16), jnp.float32)
    f = functools.partial(
        treeattn.tree_decode,
        mesh=mesh,
        axis=mesh.axis_names,
        method="hierarchical",
        implementation="blockwise",
        wire=jnp.bfloat16,
    )
    found = collectives(jax.jit(f).trace(q, q, q).lower(lowering_platforms=("cuda",)))
    head = 2 * (16 + 2)  # bytes of a head: its output and its lse
    assert (count_collectives(found), total_bytes(found)) == (3, head * (8 + 4 + 4))


# How often a number is rounded on its way over (2, 2) devices, sums of up to four included.
ROUNDINGS = {
    "allreduce": 4,
    "butterfly": 2,
    "gather": 2,
    "reduce_scatter": 4,
    "all_to_all": 1,
    "hierarchical": 3,
    "pass_q": 2,
}


@functools.cache
def wired(name):
    """The jitted output and lse, and the gradient by v of their weighted sum."""
    axis = "node", "device"
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), axis)
    decode = functools.partial(
        DECODERS[name], mesh=mesh, axis=axis, wire=jnp.bfloat16, return_lse=True
    )

    def loss(v, q, k, w):
        out, lse = decode(q, k, v)
        return jnp.sum(w * out), (out, lse)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@settings(max_examples=20, phases=ONCE)
@given(
    st.sampled_from([*ROUNDINGS]),
    st.sampled_from([0, 1, 30]),
    st.sampled_from([1e-3, 1, 1e3]),
    st.integers(0, 2**32 - 1),
)
def test_what_16_bits_on_the_wire_lose(name, scores, size, seed):
    """Half a unit of bfloat16 a rounding, of the largest value; lse and its gradient nothing."""
    q, k, v = arrays(seed, 1, 2, 9, 4, 2)
    q, v = scores * q, size * v
    w = np.random.default_rng(seed).normal(size=q.shape)
    (_, (out, lse)), grads = wired(name)(v, q, k, w)
    half = 2.0**-8 * 1.01  # of what is being rounded, which is a little off itself
    bound = ROUNDINGS[name] * half
    assert np.abs(out - dense_attention(q, k, v)).max() <= bound * np.abs(v).max()
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-12, atol=1e-12)
    exact = dense_gradients(q, k, v, w)[2]
    # Two heads of two queries read a key: four terms, each rounded as often on its way back.
    assert np.abs(grads - exact).max() <= 2 * 4 * bound * np.abs(w).max()
