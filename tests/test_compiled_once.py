"""Public functions called eagerly: the second call compiles nothing; "strict" promotion holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn as ta

DTYPES = (jnp.bfloat16, jnp.float64)  # strong float32 beside them is an error
# Not functions of arrays: they look at programs and devices.
OTHERS = {
    "AttentionState",
    "PackedBeam",
    "collectives",
    "collectives_table",
    "initialize",
    "kv_mesh",
    "memory",
    "simulate_devices",
}


@functools.cache
def on_devices(mesh, name, *arguments):
    """A function of the states of a mesh's devices, as one program."""
    body = functools.partial(getattr(ta, name), *arguments, axis_name="kv")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("kv"), out_specs=P("kv")))


def add(total, shard, _):
    return jax.tree.map(jnp.add, total, shard)


@functools.cache
def calls(dtype, seed=0) -> dict:
    """A call of every public function of arrays, by name; other seeds give other values."""
    draw = np.random.default_rng(seed).standard_normal
    mesh = ta.kv_mesh(jax.devices()[:2])

    def array(*shape):
        return jnp.asarray(draw(shape), dtype)

    q, k, v = array(2, 1, 4, 8), array(2, 8, 2, 8), array(2, 8, 2, 8)
    lengths = jnp.array([3, 8], jnp.int32)
    options = {"kv_lengths": lengths, "bias": array(1, 4, 1, 8)}
    over = {"sharding": NamedSharding(mesh, P(None, "kv"))}
    one = array(8), array(5, 8), array(5, 3)  # one query head: q, k, v
    source, sources = array(3), array(5, 3)
    states = ta.AttentionState(array(5, 4), 1 + array(5, 4) ** 2, array(5, 4, 3))
    a, b = (jax.tree.map(lambda x, i=i: x[i], states) for i in range(2))
    two = jax.tree.map(lambda x: x[:2], states)
    beam = jnp.asarray(np.random.default_rng(seed).permutation(12).reshape(1, 3, 4))
    packed = ta.pack(beam)
    parents = jnp.array([-1, 0, 0, 2])
    return {
        "ancestor_mask": lambda: ta.ancestor_mask(parents),
        "attend": lambda: ta.attend(q, k, v, **options),
        "attention": lambda: ta.attention(q, k, v, **options),
        "attention_from_energy": lambda: ta.attention_from_energy(*one),
        "causal_energy": lambda: ta.causal_energy(sources, one[1], *one[1:]),
        "cumulant": lambda: ta.cumulant(2, *one),
        "depths": lambda: ta.depths(parents),
        "energy": lambda: ta.energy(source, *one),
        "finalize": lambda: ta.finalize(a),
        "from_output": lambda: ta.from_output(v[0], v[0, ..., 0]),
        "log_likelihood": lambda: ta.log_likelihood(source, source, *one),
        "merge": lambda: ta.merge(a, b),
        "merge_across": lambda: on_devices(mesh, "merge_across")(two),
        "pack": lambda: ta.pack(beam),
        "packed_token_indices": lambda: ta.packed_token_indices(beam),
        "prefix_encoding": lambda: ta.prefix_encoding(beam),
        "reduce_chain": lambda: ta.reduce_chain(states),
        "reduce_tree": lambda: ta.reduce_tree(states, arity=3),
        "ring_attention": lambda: ta.ring_attention(k, k, v, **over),
        "ring_decode": lambda: ta.ring_decode(q, k, v, kv_lengths=lengths, **over),
        "scan_states": lambda: ta.scan_states(states),
        "shard_lengths": lambda: ta.shard_lengths(lengths, lengths[0], 8, 2, striped=True),
        "striped_position": lambda: ta.striped_position(lengths, 16, 2),
        "striped_slot": lambda: ta.striped_slot(lengths, 16, 2),
        "tree_decode": lambda: ta.tree_decode(q, k, v, **options, **over),
        "ulysses_attention": lambda: ta.ulysses_attention(k, k, v, **over),
        "unpack": lambda: ta.unpack(packed.packed_beam, packed.unpack_map),
        "visit_shards": lambda: on_devices(mesh, "visit_shards", add)(two, two),
    }


NAMES = sorted(calls(jnp.float32))


def test_every_public_function_is_called():
    assert set(NAMES) | OTHERS == set(ta.__all__)


@pytest.fixture
def compilations():
    """How often XLA compiled something, in a list of one number."""
    count = [0]

    def hear(event, _seconds, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield count
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.mark.parametrize("name", NAMES)
def test_the_second_call_compiles_nothing(name, compilations):
    first, second = (calls(jnp.float32, seed)[name] for seed in (0, 1))
    jax.block_until_ready(first())
    compilations[0] = 0
    jax.block_until_ready(second())
    assert compilations[0] == 0


def test_a_function_made_at_each_call_is_seen(compilations):
    def chain(x):
        return jax.lax.scan(lambda a, b: (a + b, None), x[0], x)[0]

    for _ in range(2):
        compilations[0] = 0
        chain(jnp.ones(3))
    assert compilations[0] > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_strict_promotion(dtype):
    """`jax_numpy_dtype_promotion` is asked where a function is traced."""
    with jax.enable_x64(dtype == jnp.float64):
        for name, call in calls(dtype).items():
            expected = jax.eval_shape(call)
            with jax.numpy_dtype_promotion("strict"):
                assert jax.eval_shape(call) == expected, name


def test_strict_promotion_of_two_dtypes():
    a, b = (ta.from_output(jnp.ones((1, 2), "float32"), jnp.zeros(1, "float32")) for _ in "ab")
    for dtype in DTYPES:
        other = ta.AttentionState(*(x.astype(dtype) for x in b))
        with jax.numpy_dtype_promotion("strict"):
            merged = ta.merge(a, other)
        assert merged.max.dtype == jnp.promote_types(dtype, jnp.float32)
