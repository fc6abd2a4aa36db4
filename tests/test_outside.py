"""The functions as strangers call them: on sharded arrays under jit, with NumPy's broadcasting,
with infinite states."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import check, draw, over, put
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_compiled_once import calls

import treeattn as ta
from treeattn.across import METHODS

DEVICES = 4

# ---------------------------------------------------------------- what XLA sends by itself


def sent_bytes(f, arguments, shardings) -> int:
    """Bytes that each device sends in f(*arguments), compiled for arguments sharded so."""
    program = jax.jit(f, in_shardings=shardings).lower(*arguments).compile()
    return sum(c.sent_bytes for c in ta.collectives(program))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def size(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


LOSSES = {"squares": lambda out: jnp.sum(out.astype("float32") ** 2), "sum": jnp.sum}
SENDS = [("float32", 1, None, loss) for loss in (None, "squares", "sum")]
SENDS += [("float32", 1, False, None), ("float32", 1, True, "squares")]
SENDS += [
    pytest.param("bfloat16", 2, *case, marks=pytest.mark.slow)
    for case in itertools.product([None, False, True], [None, "squares"])
]


@pytest.mark.parametrize(("dtype", "batch", "causal", "loss"), SENDS)
def test_attention_sends_no_more_than_jaxs_own(dtype, batch, causal, loss, optimized):
    """By XLA's partitioner, which nobody tells how the arrays are sharded before it compiles.

    Of a loss that is linear in the output JAX's own gradient needs three sums for each query; that
    of a state needs two, and the output.

    causal: None for one query, a bool for a text
    """
    n = 256 if causal is not None else 4096
    l = 1 if causal is None else n
    q, k = array(batch, l, 8, 32, dtype=dtype), array(batch, n, 4, 32, dtype=dtype)
    keys = over(keys=DEVICES)
    whole = NamedSharding(keys.mesh, P())

    def program(f):
        return jax.grad(lambda *x: LOSSES[loss](f(*x)), (0, 1, 2)) if loss else f

    ours = functools.partial(ta.attention, causal=bool(causal))
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=bool(causal))
    sums, output = (2 * (DEVICES - 1) * 8 * size * 4 // DEVICES for size in (1, 32))
    for queries in [whole] if causal is None else [whole, keys]:
        shardings = queries, keys, keys
        sent, most = (sent_bytes(program(f), (q, k, k), shardings) for f in (ours, theirs))
        assert 0 < sent <= most + (output - sums if loss == "sum" else 0)


# What says itself how its arrays lie, tests/test_meshes.py asks; these three are elementwise.
OTHERS = "merge_across visit_shards tree_decode ring_decode ring_attention ulysses_attention "
OTHERS += "shard_lengths striped_slot striped_position"
QUICK = "attention", "merge", "reduce_tree"
CASES = [
    pytest.param(name, axis, marks=() if name in QUICK else pytest.mark.slow)
    for name, (_, *arguments) in calls().items()
    if name not in OTHERS.split()
    for axis in range(max(x.ndim for x in jax.tree.leaves(arguments)))
]


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_no_function_sends_an_array_more_than_once(name, axis):
    """Sharded along any axis: each device needs at most all that the others have, once."""
    f, *arguments = calls()[name]
    mesh = over(keys=DEVICES).mesh

    def sharding(x):
        divides = axis < x.ndim and x.shape[axis] % DEVICES == 0
        return NamedSharding(mesh, P(*[None] * axis, "keys") if divides else P())

    sent = sent_bytes(f, arguments, tuple(jax.tree.map(sharding, arguments)))
    assert sent <= (DEVICES - 1) * (size(arguments) + size(jax.eval_shape(f, *arguments)))


def test_keys_sharded_along_an_explicit_axis_are_refused():
    sharding = over(AxisType.Explicit, keys=DEVICES)
    q, k = jnp.ones((4, 1, 4, 8)), jnp.ones((4, 8, 4, 8))
    for f in ta.attention, jax.jit(ta.attention):
        with pytest.raises(ValueError, match=r"k: its keys are sharded along 'keys'.*tree_decode"):
            f(q, *put(sharding, k, k))
        for spec in P("keys"), P(None, None, "keys"):  # attended to where rows and heads are
            placed = put(sharding, q, k, k, spec=spec)
            np.testing.assert_allclose(f(*placed), jnp.ones(q.shape), rtol=1e-6)


# ---------------------------------------------------------------- states that are not finite


@pytest.mark.parametrize("p", [4, 7, 8])
@pytest.mark.parametrize("others", ["keys", "no keys"])
def test_every_method_has_its_nan_where_a_merge_has(p, others):
    """And its values. Any of six numbers in any field, on one device after the other; the others
    are ordinary."""
    top = np.finfo(np.float32).max
    rows = np.float32([*itertools.product([-np.inf, np.inf, np.nan, top, 0, 1], repeat=3)])
    ordinary = [-np.inf, 0, 0] if others == "no keys" else [0, 1, 2]
    fields = np.tile(np.float32(ordinary), (p, p, len(rows), 1))
    for device in range(p):
        fields[device, device] = rows  # case, device, row, field
    m, d, n = np.moveaxis(fields, -1, 0)
    states = ta.AttentionState(*(jnp.asarray(x) for x in (m, d, n[..., None])))
    expected = ta.finalize(ta.reduce_chain(states, axis=1))
    mesh = ta.kv_mesh(jax.devices()[:p], nodes=2 if p == 4 else 1)
    for method, way in METHODS.items():

        def body(states, method=method):
            own = jax.tree.map(lambda x: x[:, 0], states)
            return ta.finalize(ta.merge_across(own, ("node", "device"), method=method))

        result = P(None, ("node", "device")) if way.shards_heads else P()
        shards = P(None, ("node", "device"))
        specs = {"in_specs": shards, "out_specs": result, "check_vma": False}
        found = jax.jit(jax.shard_map(body, mesh=mesh, **specs))(states)
        found = [part[:, : len(rows)] for part in found]  # without heads that "all_to_all" adds
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, err_msg=method)
        np.testing.assert_array_equal(np.isnan(found[1]), np.isnan(expected[1]), method)


# ---------------------------------------------------------------- masks and biases


@pytest.mark.parametrize("shape", [(), (5,), (4, 3, 5), (2, 1, 1, 5)], ids=str)
def test_masks_and_biases_broadcast_as_numpys(shape, unchecked):
    """Given as lists, of which arrays are made."""
    arrays, rng = draw(l=3), np.random.default_rng(1)
    drawn = {"mask": rng.random(shape) < 0.7, "bias": rng.normal(size=shape)}
    options = {name: np.asarray(x) for name, x in drawn.items()}
    full = {name: np.broadcast_to(x, (2, 4, 3, 5)) for name, x in options.items()}
    lists = {name: x.tolist() for name, x in options.items()}
    for f in ta.attention, functools.partial(ta.tree_decode, sharding=over(keys=2)):
        check(f(*arrays, **lists), *arrays, **full)


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
            held = [int(np.sum(places[:length] // max(t, 1) == r)) for r in range(p)]
            assert [c[length] for c in counts] == held
            assert not striped or max(held) - min(held) <= 1


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_places_do_not_overflow_the_dtype_of_what_was_asked(dtype):
    """100 fits int8, and its slot, 12 + 4 · 128, does not."""

    def last(lengths, kv_len, p):
        return ta.shard_lengths(lengths, p - 1, kv_len, p)

    cases = (ta.striped_slot, 100, 4 * 128 + 12), (ta.striped_position, 4, 4 * 8), (last, 100, 0)
    for f, x, want in cases:
        for given in (np.asarray(x, dtype), jnp.asarray(np.asarray(x, dtype))):
            for found in (f(given, 1024, 8), jax.jit(lambda x, f=f: f(x, 1024, 8))(given)):
                np.testing.assert_array_equal(found, want)


def test_a_full_cache_keeps_what_it_holds():
    """A traced position that no slot holds has a slot that `.at[…].set` does not write."""
    places = jnp.array([-1, 0, 5, 15, 16, 17, 2**32 + 15])
    for f in (ta.striped_slot, ta.striped_position):
        found = jax.jit(lambda x, f=f: f(x, 16, 8))(places)
        np.testing.assert_array_equal(found, [16, 0, int(f(5, 16, 8)), 15, 16, 16, 16])
        assert (jnp.zeros(16).at[found].set(1).sum(), found.dtype) == (3, jnp.int32)


@pytest.mark.parametrize("axes", ["keys", ("a", "b"), ("b", "a")], ids=str)
def test_visit_shards_sees_every_shard_once_with_its_owner(axes):
    def body(x):
        def visit(total, shard, owner):
            assert owner.dtype == jnp.int32
            return total + shard * (1 + owner)  # x is one-hot, so this notes the owner

        own = jax.lax.axis_index(axes)
        return ta.visit_shards(visit, x * (1 + own), x, axes)

    mesh = (over(keys=6) if axes == "keys" else over(a=2, b=3)).mesh
    f = jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    np.testing.assert_array_equal(f(jnp.eye(6)), np.tile(np.arange(1, 7), (6, 1)))
