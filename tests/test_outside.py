"""The functions as strangers call them: on sharded arrays under jit, with NumPy's broadcasting."""

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


# ---------------------------------------------------------------- stripes


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
