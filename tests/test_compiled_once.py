"""Public functions called eagerly: the second call compiles nothing; "strict" promotion holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import over
from calls import python_calls
from jax.sharding import PartitionSpec as P

import treeattn as ta

DTYPES = (jnp.bfloat16, jnp.float64)  # strong float32 beside them is an error
# Not functions of arrays: they look at programs and devices.
OTHERS = {
    "METHODS",
    "AttentionState",
    "PackedBeam",
    "collectives",
    "collectives_table",
    "initialize",
    "kv_mesh",
    "memory",
    "simulate_devices",
}


def add(total, shard, owner):
    assert owner.dtype == jnp.int32  # in 64 bits, too
    return jax.tree.map(jnp.add, total, shard)


@functools.cache
def on_devices(name, *arguments):
    """A function of the states of two devices, as one program."""
    body = functools.partial(getattr(ta, name), *arguments, axis_name="keys")
    return jax.jit(
        jax.shard_map(body, mesh=over(keys=2).mesh, in_specs=P("keys"), out_specs=P("keys"))
    )


@functools.cache
def calls(dtype=jnp.float32, seed=0) -> dict:
    """(function, arguments) of every public function of arrays, by name; other seeds give other
    values. Four devices can share every axis of all that is not a query head's own."""
    draw = np.random.default_rng(seed).standard_normal

    def array(*shape):
        return jnp.asarray(draw(shape), dtype)

    q, k, v = array(4, 4, 8, 16), array(4, 64, 4, 16), array(4, 64, 4, 16)
    lengths = jnp.array([3, 8, 0, 64], jnp.int32)
    options = {"kv_lengths": lengths, "bias": array(1, 8, 1, 64), "scale": array()}
    over_two = {"sharding": over(keys=2)}
    one = array(32), array(64, 32), array(64, 16)  # one query head: q, k, v
    states = ta.AttentionState(array(8, 4, 16), 1 + array(8, 4, 16) ** 2, array(8, 4, 16, 32))
    two = jax.tree.map(lambda x: x[:2], states)
    beam = jnp.asarray(np.random.default_rng(seed).permutation(128).reshape(4, 8, 4))
    parents = jnp.broadcast_to(jnp.arange(16) - 1, (8, 16))
    return {
        "ancestor_mask": (ta.ancestor_mask, parents),
        "attend": (functools.partial(ta.attend, **options), q, k, v),
        "attention": (ta.attention, q, k, v),
        "attention_from_energy": (ta.attention_from_energy, *one),
        "causal_energy": (ta.causal_energy, array(64, 16), one[1], *one[1:]),
        "cumulant": (functools.partial(ta.cumulant, 2), *one),
        "depths": (ta.depths, parents),
        "energy": (ta.energy, array(16), *one),
        "finalize": (ta.finalize, states),
        "from_output": (ta.from_output, v, v[..., 0].astype(jnp.promote_types(dtype, jnp.float32))),
        "log_likelihood": (ta.log_likelihood, array(16), array(16), *one),
        "merge": (ta.merge, states, jax.tree.map(lambda x: x.astype("float32"), states)),
        "merge_across": (on_devices("merge_across"), two),
        "pack": (ta.pack, beam),
        "packed_token_indices": (ta.packed_token_indices, beam),
        "prefix_encoding": (ta.prefix_encoding, beam),
        "reduce_chain": (ta.reduce_chain, states),
        "reduce_tree": (functools.partial(ta.reduce_tree, arity=3), states),
        "ring_attention": (functools.partial(ta.ring_attention, **over_two), k, k, v),
        "ring_decode": (functools.partial(ta.ring_decode, **over_two, **options), q, k, v),
        "scan_states": (ta.scan_states, states),
        "shard_lengths": (ta.shard_lengths, lengths, lengths[0], 64, 2),
        "striped_position": (ta.striped_position, lengths, 128, 2),
        "striped_slot": (ta.striped_slot, lengths, 128, 2),
        "tree_decode": (functools.partial(ta.tree_decode, **over_two, **options), q, k, v),
        "ulysses_attention": (functools.partial(ta.ulysses_attention, **over_two), k, k, v),
        "unpack": (ta.unpack, array(4, 32, 16), beam % 32),
        "visit_shards": (on_devices("visit_shards", add), two, two),
    }


NAMES = sorted(calls())


def test_every_public_function_is_called():
    missing = set(ta.__all__) ^ (set(NAMES) | OTHERS)
    assert not missing, f"a call of calls(), or a name of OTHERS, for {missing}"


@pytest.fixture
def compilations():
    """How often XLA compiled something, in a list of one number."""
    count = [0]

    def hear(event, _seconds, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(hear)
    jax.jit(lambda: 0)()
    assert count[0] > 0, "a function that is made at each call is not heard"
    yield count
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.mark.parametrize("name", NAMES)
def test_the_second_call_compiles_nothing(name, compilations):
    (f, *first), (g, *second) = (calls(seed=seed)[name] for seed in (0, 1))  # g: other options
    jax.block_until_ready(f(*first))
    compilations[0] = 0
    jax.block_until_ready(g(*second))
    assert compilations[0] == 0


# The most calls of the package's functions that a warm call takes: shapes and dtypes are checked
# while tracing, once a shape, and only values are looked at. A newer JAX takes fewer: it makes an
# array of a number without coming back to us.
STEPS = [
    ("merge", {}, 1),
    ("finalize", {}, 1),
    ("from_output", {}, 3),
    ("attention", {}, 10),
    ("attention", {"scale": 0.5}, 19),
    ("attend", {}, 24),
    ("tree_decode", {}, 35),
]


@pytest.mark.parametrize(("name", "options", "most"), STEPS)
def test_a_warm_call_takes_few_steps_in_python(name, options, most, unchecked):
    f, *arguments = calls()[name]
    assert python_calls(f, *arguments, **options) <= most


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_strict_promotion(dtype):
    """`jax_numpy_dtype_promotion` is asked where a function is traced."""
    with jax.enable_x64(dtype == jnp.float64):
        for name, (f, *arguments) in calls(dtype).items():
            call = functools.partial(f, *arguments)
            expected = jax.eval_shape(call)
            with jax.numpy_dtype_promotion("strict"):
                assert jax.eval_shape(call) == expected, name
