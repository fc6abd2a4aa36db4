"""The functions as strangers call them: on sharded arrays under jit, beside other devices' arrays,
with NumPy's broadcasting, with infinite states."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients

import treeattn as ta

DEVICES = 4


def sent_bytes(f, arguments, shardings) -> int:
    """Bytes that each device sends in f(*arguments), compiled for arguments sharded so."""
    program = jax.jit(f, in_shardings=shardings).lower(*arguments).compile()
    return sum(c.sent_bytes for c in ta.collectives(program))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def size(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ---------------------------------------------------------------- what XLA sends by itself


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("dtype", "batch"), [("float32", 1), pytest.param("bfloat16", 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("causal", [None, False, True], ids=["decode", "text", "causal text"])
def test_attention_sends_no_more_than_jaxs_own(dtype, batch, causal, gradients, optimized):
    """By XLA's partitioner, which nobody tells how the arrays are sharded before it compiles."""
    n = 256 if causal is not None else 4096
    l = 1 if causal is None else n
    q, k = array(batch, l, 8, 32, dtype=dtype), array(batch, n, 4, 32, dtype=dtype)
    mesh = ta.kv_mesh(jax.devices()[:DEVICES])
    keys, whole = (NamedSharding(mesh, spec) for spec in (P(None, "kv"), P()))
    queries = [whole] if causal is None else [whole, keys]

    def program(f):
        if not gradients:
            return f
        return jax.grad(lambda *x: jnp.sum(f(*x).astype("float32") ** 2), (0, 1, 2))

    ours = functools.partial(ta.attention, causal=bool(causal))
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=bool(causal))
    for sharding in queries:
        shardings = sharding, keys, keys
        sent, most = (sent_bytes(program(f), (q, k, k), shardings) for f in (ours, theirs))
        assert 0 < sent <= most


STATE = ta.AttentionState(array(8, 4, 16), array(8, 4, 16), array(8, 4, 16, 32))
BEAM = array(4, 8, 4, dtype="int32")
ONE_HEAD = array(32), array(64, 32), array(64, 16)
FUNCTIONS = {
    "attention": (ta.attention, (array(4, 4, 8, 16), *[array(4, 64, 4, 16)] * 2)),
    "attend": (ta.attend, (array(4, 4, 8, 16), *[array(4, 64, 4, 16)] * 2)),
    "merge": (ta.merge, (STATE, STATE)),
    "finalize": (ta.finalize, (STATE,)),
    "from_output": (ta.from_output, (array(8, 16, 64), array(8, 16))),
    "reduce_chain": (ta.reduce_chain, (STATE,)),
    "reduce_tree": (ta.reduce_tree, (STATE,)),
    "scan_states": (ta.scan_states, (STATE,)),
    "energy": (ta.energy, (array(16), *ONE_HEAD)),
    "causal_energy": (ta.causal_energy, (array(64, 16), *[array(64, 32)] * 2, array(64, 16))),
    "attention_from_energy": (ta.attention_from_energy, ONE_HEAD),
    "cumulant": (functools.partial(ta.cumulant, 2), ONE_HEAD),
    "log_likelihood": (ta.log_likelihood, (array(16), array(16), *ONE_HEAD)),
    "pack": (ta.pack, (BEAM,)),
    "prefix_encoding": (ta.prefix_encoding, (BEAM,)),
    "packed_token_indices": (ta.packed_token_indices, (BEAM,)),
    "unpack": (ta.unpack, (array(4, 32, 16), BEAM)),
    "ancestor_mask": (ta.ancestor_mask, (array(8, 16, dtype="int32"),)),
    "depths": (ta.depths, (array(8, 16, dtype="int32"),)),
}
QUICK = "attention", "merge", "reduce_tree"
CASES = [
    pytest.param(name, axis, marks=() if name in QUICK else pytest.mark.slow)
    for name, (_, arguments) in FUNCTIONS.items()
    for axis in range(max(len(x.shape) for x in jax.tree.leaves(arguments)))
]


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_no_function_sends_an_array_more_than_once(name, axis):
    """Sharded along any axis: each device needs at most all that the others have, once."""
    f, arguments = FUNCTIONS[name]
    mesh = ta.kv_mesh(jax.devices()[:DEVICES])

    def sharding(x):
        divides = axis < len(x.shape) and x.shape[axis] % DEVICES == 0
        return NamedSharding(mesh, P(*[None] * axis, "kv") if divides else P())

    sent = sent_bytes(f, arguments, jax.tree.map(sharding, arguments))
    assert sent <= (DEVICES - 1) * (size(arguments) + size(jax.eval_shape(f, *arguments)))


def test_every_function_of_arrays_is_asked_what_it_sends():
    others = {"collectives", "collectives_table", "memory"}  # of programs
    others |= {"initialize", "kv_mesh", "simulate_devices"}  # of devices
    others |= {"merge_across", "visit_shards"}  # inside shard_map
    others |= {"tree_decode", "ring_decode", "ring_attention", "ulysses_attention"}  # test_meshes
    others |= {"shard_lengths", "striped_slot", "striped_position"}  # elementwise
    assert set(FUNCTIONS) | others | {"AttentionState", "PackedBeam"} == set(ta.__all__)


def test_keys_sharded_along_an_explicit_axis_are_refused():
    mesh = jax.make_mesh((4,), ("kv",), (AxisType.Explicit,), devices=jax.devices()[:4])
    q, k = jnp.ones((4, 1, 4, 8)), jnp.ones((4, 8, 4, 8))
    for f in ta.attention, jax.jit(ta.attention):
        with pytest.raises(ValueError, match=r"k: its keys are sharded along 'kv'.*tree_decode"):
            f(q, *jax.device_put((k, k), NamedSharding(mesh, P(None, "kv"))))
        for spec in P("kv"), P(None, None, "kv"):  # rows and heads are attended to where they are
            placed = jax.device_put((q, k, k), NamedSharding(mesh, spec))
            np.testing.assert_allclose(f(*placed), jnp.ones(q.shape), rtol=1e-6)


# ---------------------------------------------------------------- states that are not finite


METHODS = "allreduce", "butterfly", "gather", "hierarchical"


@pytest.mark.parametrize("p", [3, 4])
@pytest.mark.parametrize("others", ["keys", "no keys"])
def test_every_method_has_its_nan_where_a_merge_has(p, others):
    """Any of six numbers in any field, on one device after the other; the others are ordinary."""
    top = np.finfo(np.float32).max
    rows = np.float32([*itertools.product([-np.inf, np.inf, np.nan, top, 0, 1], repeat=3)])
    ordinary = [-np.inf, 0, 0] if others == "no keys" else [0, 1, 2]
    fields = np.tile(np.float32(ordinary), (p, p, len(rows), 1))
    for device in range(p):
        fields[device, device] = rows  # case, device, row, field
    m, d, n = np.moveaxis(fields, -1, 0)
    states = ta.AttentionState(*(jnp.asarray(x) for x in (m, d, n[..., None])))
    expected = ta.finalize(ta.reduce_chain(states, axis=1))
    mesh = ta.kv_mesh(jax.devices()[:p], nodes=1)
    for method in METHODS:

        def body(states, method=method):
            own = jax.tree.map(lambda x: x[:, 0], states)
            return ta.finalize(ta.merge_across(own, ("node", "device"), method=method))

        program = jax.shard_map(
            body, mesh=mesh, in_specs=P(None, "device"), out_specs=P(), check_vma=False
        )
        found = jax.jit(program)(states)
        for ours, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.isnan(ours), np.isnan(wanted), method)


def test_an_infinite_pivot_survives_every_method():
    state = ta.AttentionState(jnp.array([jnp.inf, 0.0]), jnp.ones(2), jnp.array([[5.0], [1.0]]))
    for method in METHODS[:3]:
        body = functools.partial(ta.merge_across, axis_name="kv", method=method)
        mesh = ta.kv_mesh(jax.devices()[:2])
        f = jax.shard_map(body, mesh=mesh, in_specs=P("kv"), out_specs=P("kv"), check_vma=False)
        np.testing.assert_array_equal(ta.finalize(f(state))[0], [[5.0], [5.0]])


# ---------------------------------------------------------------- meshes and devices


def draw(b=2, l=1, n=8, h=2, d=4):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(b, m, h, d)) for m in (l, n, n)]


KINDS = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(kinds, marks=pytest.mark.slow if kinds[0] == kinds[1] else ())
        for kinds in itertools.product(KINDS, repeat=2)
    ],
)
def test_meshes_of_both_kinds_of_axes(kinds):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    sharding = NamedSharding(Mesh(devices, ("data", "kv"), axis_types=kinds), P("data", "kv"))
    q, k, v = draw()
    placed = jax.device_put((k, v), sharding)
    expected = dense_attention(q, k, v)
    gradients = dense_gradients(q, k, v, np.ones(q.shape), np.zeros(q.shape[:3]))
    rows = NamedSharding(sharding.mesh, P("data"))
    for f in ta.tree_decode, ta.ring_decode:
        named = functools.partial(f, sharding=sharding)
        for call in f, jax.jit(named):
            np.testing.assert_allclose(call(q, *placed), expected, atol=1e-12)
        derivative = jax.jit(jax.grad(lambda *x, f=named: f(*x).sum(), (0, 1, 2)))
        for ours, wanted in zip(
            derivative(jax.device_put(q, rows), *placed), gradients, strict=True
        ):
            np.testing.assert_allclose(ours, wanted, atol=1e-12)
    with pytest.raises(ValueError, match="sharding: expected k sharded as"):
        wrong = NamedSharding(sharding.mesh, P(None, ("data", "kv")))
        ta.tree_decode(q, *placed, sharding=wrong)


def test_vmap_along_an_explicit_axis_is_refused():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "kv"), (AxisType.Explicit,) * 2)
    q, k, _ = (np.stack([x, x]) for x in draw())
    q = jax.device_put(q, NamedSharding(mesh, P("data")))
    k = jax.device_put(k, NamedSharding(mesh, P("data", None, "kv")))
    for f in ta.tree_decode, ta.ring_decode:
        decode = functools.partial(f, sharding=NamedSharding(mesh, P(None, "kv")))
        with pytest.raises(ValueError, match=r"mesh\.axis_names"):  # JAX says so
            jax.vmap(lambda q, k, decode=decode: decode(q, k, k))(q, k)


@pytest.mark.parametrize("n", [8, 7])
def test_arrays_that_one_device_holds_are_dealt_out(n):
    """Committed to a device, of the mesh or not; 7 keys, which two devices cannot share evenly."""
    sharding = NamedSharding(ta.kv_mesh(jax.devices()[:2]), P(None, "kv"))
    q, k, v = draw(n=n)
    expected = dense_attention(q, k, v, kv_lengths=[5, 3])
    for device in jax.devices()[1], jax.devices()[3]:
        here = jax.device_put((q, k, v, np.int32([5, 3])), device)
        for f in ta.tree_decode, ta.ring_decode:
            out = f(*here[:3], kv_lengths=here[3], sharding=sharding)
            np.testing.assert_allclose(out, expected, atol=1e-12)
        if n == 8:  # the queries come from weights on one device, the cache is sharded
            placed = jax.device_put((k, v), sharding)
            out = ta.tree_decode(here[0], *placed, kv_lengths=here[3])
            np.testing.assert_allclose(out, expected, atol=1e-12)
        x = jax.device_put(k, device)
        for f in ta.ring_attention, ta.ulysses_attention:
            wanted = dense_attention(k, k, k, mask=np.tri(n, dtype=bool)[None, None])
            np.testing.assert_allclose(f(x, x, x, sharding=sharding), wanted, atol=1e-12)


def test_shardings_over_other_devices_are_told_apart():
    meshes = [ta.kv_mesh(jax.devices()[i : i + 2]) for i in (0, 2)]
    shardings = [NamedSharding(mesh, P(None, "kv")) for mesh in meshes]
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"on devices \[2, 3\], got .* on devices \[0, 1\]"):
        ta.tree_decode(q, *jax.device_put((k, v), shardings[0]), sharding=shardings[1])


def test_ring_attention_returns_lse():
    q, k, v = draw(l=8)
    sharding = NamedSharding(ta.kv_mesh(jax.devices()[:4]), P(None, "kv"))
    out, lse = ta.ring_attention(q, k, v, sharding=sharding, return_lse=True)
    wanted, wanted_lse = ta.finalize(ta.attend(q, k, v, causal=True))
    np.testing.assert_allclose(out, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-12)


# ---------------------------------------------------------------- masks, lengths, kernels


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (4, 3, 5), (1, 1, 5), (2, 1, 1, 5)], ids=str)
def test_masks_and_biases_broadcast_as_numpys(shape):
    q, k, v = draw(l=3, n=5, h=4)
    rng = np.random.default_rng(1)
    options = {"mask": rng.random(shape) < 0.7, "bias": rng.normal(size=shape)}
    options["mask"] = np.asarray(options["mask"])
    options["bias"] = np.asarray(options["bias"])
    full = {name: np.broadcast_to(x, (2, 4, 3, 5)) for name, x in options.items()}
    expected = dense_attention(q, k, v, **full)
    sharding = NamedSharding(ta.kv_mesh(jax.devices()[:2]), P(None, "kv"))
    for f in ta.attention, functools.partial(ta.tree_decode, sharding=sharding):
        np.testing.assert_allclose(f(q, k, v, **options), expected, atol=1e-12)


def test_one_length_counts_for_every_row():
    q, k, v = draw()
    expected = dense_attention(q, k, v, kv_lengths=[3, 3])
    sharding = NamedSharding(ta.kv_mesh(jax.devices()[:2]), P(None, "kv"))
    for f in ta.attention, functools.partial(ta.tree_decode, sharding=sharding):
        for length in 3, np.int8(3), jnp.array(3):
            np.testing.assert_allclose(f(q, k, v, kv_lengths=length), expected, atol=1e-12)
        traced = jax.jit(lambda n, f=f: f(q, k, v, kv_lengths=n))
        np.testing.assert_allclose(traced(3), expected, atol=1e-12)
    with pytest.raises(ValueError, match="kv_lengths: expected 0 to kv_len = 8 keys, got 9"):
        ta.attention(q, k, v, kv_lengths=9)


@pytest.mark.usefixtures("unchecked")
def test_errors_say_what_to_pass():
    q, k, v = draw(l=3)
    with pytest.raises(ValueError, match=r"pass mask=jnp.tri\(3, 8, 5, dtype=bool\)"):
        ta.attention(q, k, v, causal=True)
    last = ta.attention(q, k, v, mask=jnp.tri(3, 8, 5, dtype=bool))
    whole = ta.attention(np.concatenate([k[:, :5], q], axis=1), k, v, causal=True)
    np.testing.assert_allclose(last, whole[:, 5:], atol=1e-12)
    with pytest.raises(TypeError, match=r"mask: .*float32: use .astype\(bool\), or .* bias="):
        ta.attention(q, k, v, mask=np.ones((3, 8), np.float32))
    with pytest.raises(TypeError, match="q: expected at most 64 bits, got dtype"):
        ta.attention(np.longdouble(q), k, v)
    small = [jnp.asarray(x, jnp.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(TypeError, match="q: expected 16 bits or more"):
        ta.attention(*small, scale=0.5)
    with pytest.raises(ValueError, match="implementation: expected one of"):
        ta.attention(q, k, v, implementation=np.ones(3))
    assert ta.attention(*np.float32([q, q, q]), scale=2**70).shape == q.shape


def test_a_function_without_a_hash_is_named():
    class Kernel:
        __hash__ = None

        def __call__(self, *arrays, **options):
            raise AssertionError("never called")

    q, k, v = draw()
    sharding = NamedSharding(ta.kv_mesh(jax.devices()[:2]), P(None, "kv"))
    with pytest.raises(TypeError, match="implementation: expected a function that can be hashed"):
        ta.attention(q, k, v, implementation=Kernel())
    with pytest.raises(TypeError, match="method: expected a function that can be hashed"):
        ta.tree_decode(q, k, v, sharding=sharding, method=Kernel())


# ---------------------------------------------------------------- stripes, and a ring


@pytest.mark.parametrize(("p", "t"), [(1, 5), (4, 3), (5, 1), (3, 0)])
def test_stripes_are_a_permutation_that_fills_devices_evenly(p, t):
    positions = np.arange(p * t)
    slots = ta.striped_slot(positions, p * t, p)
    assert sorted(slots.tolist()) == positions.tolist()
    np.testing.assert_array_equal(ta.striped_position(slots, p * t, p), positions)
    lengths = np.arange(p * t + 1)
    for striped, places in (True, slots), (False, positions):
        counts = [ta.shard_lengths(lengths, r, p * t, p, striped=striped) for r in range(p)]
        for length in lengths:
            first = [c[length] for c in counts]
            held = [int(np.sum(places[:length] // max(t, 1) == r)) for r in range(p)]
            assert first == held
            assert not striped or max(held) - min(held) <= 1


def test_stripes_that_do_not_divide_are_refused():
    for f in ta.striped_slot, ta.striped_position:
        with pytest.raises(ValueError, match="kv_len: expected a multiple of 4 devices, got 10"):
            f(3, 10, 4)
        with pytest.raises(TypeError, match="expected an array of integers"):
            f(3.0, 8, 4)


@pytest.mark.parametrize("axes", ["kv", ("node", "device"), ("device", "node")], ids=str)
def test_visit_shards_sees_every_shard_once_with_its_owner(axes):
    nodes = None if axes == "kv" else 2
    mesh = ta.kv_mesh(jax.devices()[:6], nodes=nodes)

    def body(x):
        def visit(total, shard, owner):
            return total + shard * (1 + owner)  # x is one-hot, so this notes the owner

        own = jax.lax.axis_index(axes)
        return ta.visit_shards(visit, x * (1 + own), x, axes)

    spec = P(axes)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(f(jnp.eye(6)), np.tile(np.arange(1, 7), (6, 1)))
