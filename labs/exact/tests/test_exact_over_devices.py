"""Exact sums over devices: `tree_decode` with the two functions has the bits of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_inputs import assert_same_bits, exact, inputs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from labs.exact import exact_state, merge_exact
from treeattn import finalize, kv_mesh, memory, tree_decode

decode = jax.jit(
    functools.partial(tree_decode, implementation=exact_state, method=merge_exact, return_lse=True),
    static_argnames="sharding",
)


def over(p):
    return NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))


@pytest.mark.parametrize("p", [1, 3, 9])
def test_any_number_of_devices_has_the_bits_of_one(p):
    q, k, v = inputs(b=2, l=2, h=6, h_kv=2, n=70)
    lengths = np.array([61, 0])
    expected = exact(q, k, v, kv_lengths=lengths)
    order = np.append(np.random.default_rng(p).permutation(61), range(61, 70))
    for places in (np.arange(70), order):
        found = decode(q, k[:, places], v[:, places], kv_lengths=lengths, sharding=over(p))
        assert_same_bits(found, expected)


@pytest.mark.parametrize("n", [0, 5])
def test_fewer_keys_than_devices(n):
    q, k, v = inputs(n=n)
    assert_same_bits(decode(q, k, v, sharding=over(8)), exact(q, k, v))


@pytest.mark.parametrize("spec", [P("a", "b", "c"), P(None, ("c", "a"))])
def test_any_mesh_has_the_bits_of_one_device(spec):
    q, k, v = inputs(b=2, l=2, h=4, h_kv=2)
    mask = np.random.default_rng(4).random((2, 1, 2, 24)) < 0.7
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
    found = decode(q, k, v, mask=mask, sharding=NamedSharding(mesh, spec))
    assert_same_bits(found, exact(q, k, v, mask=mask))


def test_a_mesh_of_ones_own_and_new_keys():
    """As in a model: the cache in shards, new keys on one device, one rounding at the end."""
    q, k, v = inputs(l=3, n=43)

    def on_device(q, k, v, new_k, new_v):
        cached = exact_state(q, k, v, scale=0.25)
        mine = cached.merge(exact_state(q, new_k, new_v, scale=0.25))
        first = jax.lax.axis_index("kv") == 0
        state = jax.tree.map(lambda x, y: jnp.where(first, x, y), mine, cached)
        return finalize(merge_exact(state, "kv"))

    shard = P(None, "kv")
    mesh = kv_mesh(jax.devices()[:5])
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), shard, shard, P(), P()), out_specs=P())
    found = jax.jit(run)(q, k[:, :40], v[:, :40], k[:, 40:], v[:, 40:])
    several = jax.jit(jax.vmap(exact, in_axes=(0, None, None)))(jnp.stack([q, 2 * q]), k, v)
    assert_same_bits(found, exact(q, k, v))
    assert_same_bits(found, [x[0] for x in several])


def test_memory_does_not_grow_with_the_keys(optimized):
    def temporary(n):
        q = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16)
        return memory(exact.lower(q, k, k).compile()).temporary_bytes

    assert temporary(16 * 1024) <= temporary(2 * 1024) + 1024
