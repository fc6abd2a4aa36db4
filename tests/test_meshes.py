"""Meshes as users have them: axes in any order, of a context, of an enclosing `shard_map`; rows
and heads along other axes than the keys: right, and nothing crosses those."""

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn.across import METHODS
from treeattn.program import collectives, count_collectives, total_bytes

CAUSAL = {"ring_attention": treeattn.ring_attention, "ulysses": treeattn.ulysses_attention}
DECODERS = {
    method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS
} | {"ring": treeattn.ring_decode}


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
    if name == "allreduce":
        return 2 * len(sizes), state(h) * len(sizes)
    if name == "butterfly":
        rounds = sum(n.bit_length() - 1 + (2 if n & (n - 1) else 0) for n in sizes)
        return rounds, state(h) * rounds
    if name == "gather":
        return len(sizes), state(h) * len(sizes)
    if name == "all_to_all":
        return 1, state(everybodys)
    if name == "ring":
        return (p - 1) * len(shard), (p - 1) * sum(shard)
    raise AssertionError(f"how many collectives and bytes does {name!r} put in?")


def sends_by_nodes(sizes, *, b, l, h, d, item, **_):
    *nodes, g = sizes
    padded, nodes = -(-h // g) * g, [n for n in nodes if n > 1]
    whole = item * b * l * padded * (d + 2)
    within = (2, whole + whole // g) if g > 1 else (0, 0)
    return within[0] + len(nodes), within[1] + len(nodes) * whole // g


SIZES = [
    (1,),
    (2,),
    (3,),
    (5,),
    (8,),
    (2, 2),
    (2, 3),
    (3, 2),
    (1, 4),
    (4, 2),
    (3, 3),
    (2, 2, 2),
    (2, 1, 3),
    (2, 2, 1),
]
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


def crossed(collective, mesh):
    """The axes along which those who take part together differ."""
    axes = set()
    for group in collective.groups or [range(mesh.size)]:
        places = np.unravel_index(list(group), tuple(mesh.shape.values()))
        axes |= {name for name, at in zip(mesh.axis_names, places, strict=True) if np.ptp(at)}
    return axes


def among_several(program, mesh, keys):
    """The collectives, without those of a device with itself: they cross the keys' axes alone."""
    found = collectives(program)
    p = along(mesh, keys)
    assert {name for c in found for name in crossed(c, mesh)} <= set(keys)
    assert p > 1 or not any("permute" in c.kind for c in found)
    return [c for c in found if c.devices > 1 or "permute" in c.kind]


def lying(mesh, rows, keys, heads):
    return NamedSharding(mesh, P(rows or None, keys or None, heads or None))


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
    f = functools.partial(DECODERS[name], sharding=lying(mesh, rows, keys, heads), return_lse=True)
    program = jax.jit(f).lower(q, k, v, **options).compile()
    out, lse = program(q, k, v, **options)
    h = 2 * wide_kv
    if name == "all_to_all":  # each group of heads has those that make its shares whole at its end
        groups = along(mesh, heads)
        split = (np.reshape(x, (wide_b, l, groups, -1, *x.shape[3:])) for x in (out, lse))
        out, lse = (x[:, :, :, : h // groups].reshape(wide_b, l, h, *x.shape[4:]) for x in split)
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
    sharding = lying(mesh, rows, keys, heads)
    f = functools.partial(CAUSAL[name], causal=causal, sharding=sharding)
    program = jax.jit(f).lower(q, k, v).compile()
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


@pytest.mark.parametrize("name", ["hierarchical", "butterfly"])
def test_gradients_with_rows_and_heads_elsewhere(name):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("heads", "kv", "batch"))
    q, k, v = arrays(0, 2, 2, 5, 4, 2)
    w, u = np.random.default_rng(1).normal(size=(2, *q.shape))
    sharding = NamedSharding(mesh, P("batch", "kv", "heads"))
    decode = functools.partial(DECODERS[name], sharding=sharding, return_lse=True)

    def loss(q, k, v):
        out, lse = decode(q, k, v)
        return jnp.sum(w * out) + jnp.sum(u[..., 0] * lse)

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for x, y in zip(got, dense_gradients(q, k, v, w, u[..., 0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)


def test_shares_are_of_a_devices_own_heads():
    """3 heads on each of two devices, in shares of 2, 2: the fourth saw no keys."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("heads", "kv"))
    q, k, v = arrays(0, 1, 2, 4, 6, 2)
    sharding = NamedSharding(mesh, P(None, "kv", "heads"))
    out = treeattn.tree_decode(q, k, v, sharding=sharding, method="all_to_all")
    assert out.sharding.spec[2] == ("heads", "kv") and out.shape == (1, 2, 8, 4)
    expected = dense_attention(q, k, v).reshape(1, 2, 2, 3, 4)
    np.testing.assert_allclose(out.reshape(1, 2, 2, 4, 4)[..., :3, :], expected, atol=1e-12)


# How a cache lies: as it shows itself, or as the call says, never both.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["allreduce", "ring", "ring_attention"])
def test_a_placed_cache_says_how_it_lies(name, kind):
    mesh = jax.make_mesh((2, 2), ("batch", "kv"), axis_types=(kind,) * 2)
    f = (DECODERS | CAUSAL)[name]
    q, k, v = arrays(0, 2, 4, 4, 4, 2)
    expected = dense_attention(q, k, v)
    if name in CAUSAL:
        expected = dense_attention(q, k, v, mask=np.tri(4, dtype=bool)[None, None])
    k, v = (place(mesh, x, "batch", "kv") for x in (k, v))
    out = f(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    assert out.sharding.spec[0] == "batch"
    if kind == AxisType.Explicit:  # the axes are in the type, which a trace sees
        np.testing.assert_allclose(jax.jit(f)(jnp.asarray(q), k, v), expected, atol=1e-12)
    else:
        with pytest.raises(ValueError, match="k's sharding is unknown here"):
            jax.jit(f)(q, k, v)


@pytest.mark.parametrize("spec", [P(None, None, "kv"), P("kv"), P(None, None, None, "kv")], ids=str)
def test_a_cache_that_lies_otherwise_is_not_moved_in_silence(spec, unchecked):
    """16.8 MB a step were, where a state is 33 kB: an error that names both."""
    mesh = treeattn.kv_mesh(jax.devices()[:2])
    q, k, v = arrays(0, 2, 1, 4, 2, 2)
    cache = jax.device_put((k, v), NamedSharding(mesh, spec))
    along_keys = NamedSharding(mesh, P(None, "kv"))
    for f in (treeattn.tree_decode, treeattn.ring_decode):
        with pytest.raises(ValueError) as error:
            f(q, *cache, sharding=along_keys)
        assert f"got {spec}" in str(error.value)
        assert f"expected k sharded as {along_keys.spec}" in str(error.value)
    with pytest.raises(ValueError, match="expected v sharded as"):
        treeattn.tree_decode(q, k, cache[1], sharding=along_keys)
    copies = jax.device_put((k, v), NamedSharding(mesh, P()))  # of which nothing has to be sent
    out = treeattn.tree_decode(q, *copies, sharding=along_keys)
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, ("kv", "x"))], ids=str)
def test_another_meshs_axes_are_refused_by_name(spec, unchecked):
    devices = np.array(jax.devices()[:2])
    mesh = Mesh(devices, ("kv",), axis_types=(AxisType.Explicit,))
    q, k, v = arrays(0, 1, 1, 4, 2, 2)
    k, v = (place(mesh, x, None, "kv") for x in (k, v))
    sharding = NamedSharding(Mesh(devices[:, None], ("x", "kv")), spec)
    for f in (treeattn.tree_decode, treeattn.ring_attention):
        with pytest.raises(ValueError, match="sharding: expected k sharded as"):
            jax.jit(functools.partial(f, sharding=sharding))(jnp.asarray(q), k, v)


@pytest.mark.parametrize(
    ("error", "message", "sharding"),
    [
        (TypeError, "expected a NamedSharding", P(None, "kv")),
        (ValueError, r"expected P\(batch, keys, heads\)", P(None, "kv", None, "batch")),
        (ValueError, "the 2 devices .* cannot share 3 rows", P("batch", "kv")),
        (ValueError, "the 2 devices .* cannot share 3 key heads", P(None, "kv", "batch")),
        (ValueError, "expected names of axes or None", P(P.UNCONSTRAINED, "kv")),
    ],
)
def test_what_does_not_fit_a_mesh_is_refused(error, message, sharding, unchecked):
    mesh, x = treeattn.kv_mesh(jax.devices()[:4], batch=2), jnp.ones((3, 2, 3, 4))
    if error is not TypeError:
        sharding = NamedSharding(mesh, sharding)
    with pytest.raises(error, match=message):
        treeattn.tree_decode(x, x, x, sharding=sharding)


def test_a_ring_of_one_device_sends_itself_nothing():
    """The other axis, along which rows lie, has two."""
    mesh = treeattn.kv_mesh(jax.devices()[:2], batch=2)
    q, k, v = arrays(0, 2, 2, 3, 2, 1)
    f = functools.partial(treeattn.ring_decode, sharding=NamedSharding(mesh, P("batch", "kv")))
    program = jax.jit(f).lower(*(place(mesh, x, "batch") for x in (q, k, v))).compile()
    assert [c for c in collectives(program) if "permute" in c.kind or c.devices > 1] == []


@pytest.mark.parametrize("name", ["allreduce", "all_to_all", "hierarchical", "ring"])
def test_no_rows_and_no_heads(name):
    sharding = NamedSharding(treeattn.kv_mesh(jax.devices()[:2]), P(None, "kv"))
    for b, h in [(0, 2), (1, 0)]:
        q, k, v = np.ones((b, 1, h, 4)), np.ones((b, 5, 1, 4)), np.ones((b, 5, 1, 4))
        out, lse = DECODERS[name](q, k, v, sharding=sharding, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:3]


@pytest.mark.parametrize("name", ["butterfly", "hierarchical", "all_to_all", "ring", *CAUSAL])
def test_axes_in_another_order_than_the_meshs(name):
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("node", "device"))
    sharding = NamedSharding(mesh, P(None, ("device", "node")))
    if name in CAUSAL:
        q, k, v = arrays(0, 1, 13, 13, 6, 2)
        out = CAUSAL[name](q, k, v, sharding=sharding)
        expected = dense_attention(q, k, v, mask=np.tri(13, dtype=bool)[None, None])
    else:
        q, k, v = arrays(0, 1, 4, 13, 6, 2)
        out = DECODERS[name](q, k, v, sharding=sharding)
        expected = dense_attention(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_another_mesh_than_the_contexts_is_refused():
    x = jnp.ones((1, 2, 2, 4))
    meshes = (jax.make_mesh((n,), ("kv",), axis_types=(AxisType.Auto,)) for n in (2, 3))
    sharding, other = (NamedSharding(mesh, P(None, "kv")) for mesh in meshes)
    with jax.set_mesh(other.mesh), pytest.raises(ValueError, match="expected the context's mesh"):
        treeattn.tree_decode(x, x, x, sharding=sharding)

    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    turned = NamedSharding(Mesh(devices, ("b", "a")), P(None, ("b", "a")))
    with (
        jax.set_mesh(Mesh(devices, ("a", "b"))),
        pytest.raises(ValueError, match="expected the context's mesh"),
    ):
        treeattn.tree_decode(x, x, x, sharding=turned)

    def inside(x):
        return treeattn.tree_decode(x, x, x, sharding=sharding)

    specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    with pytest.raises(ValueError, match=r"shard_map has split \['kv'\]"):
        jax.shard_map(inside, mesh=sharding.mesh, **specs)(x)


ALL_IN_BFLOAT16 = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import treeattn
treeattn.simulate_devices(4)
mesh = treeattn.kv_mesh(batch=2)
sharding = NamedSharding(mesh, P(None, "kv"))  # nobody names "batch"
for dtype in (jnp.bfloat16, jnp.float16):
    q, kv = jnp.ones((2, 1, 2, 8), dtype), jnp.ones((2, 8, 2, 8), dtype)
    for method in ("allreduce", "butterfly", "gather", "hierarchical", "all_to_all", "ring"):
        def loss(q, k, v):
            if method == "ring":
                out = treeattn.ring_decode(q, k, v, sharding=sharding)
            else:
                out = treeattn.tree_decode(q, k, v, sharding=sharding, method=method)
            return out.astype(jnp.float32).sum()
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, kv, kv)
        assert value == 32 and all(jnp.isfinite(x).all() for x in gradients), method
print("done")
"""


@pytest.mark.slow
def test_half_precision_on_a_mesh_with_an_axis_that_nobody_names():
    """It ended the process: XLA:CPU cannot add in 16 bits along axes that are left to it."""
    command = [sys.executable, "-c", ALL_IN_BFLOAT16]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
