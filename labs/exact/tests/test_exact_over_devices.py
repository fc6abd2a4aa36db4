"""Exact sums over devices: `tree_decode` with the two functions has the bits of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from labs.exact import exact_attend, exact_state, merge_exact
from treeattn import attend, collectives, finalize, kv_mesh, memory, tree_decode


@jax.jit
def exact(q, k, v, **options):
    return finalize(attend(q, k, v, implementation=exact_attend, **options))


decode = jax.jit(
    functools.partial(tree_decode, implementation=exact_state, method=merge_exact, return_lse=True),
    static_argnames=("sharding", "striped"),
)


def over(p):
    return NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))


def inputs(b=1, l=1, h=2, h_kv=1, d=16, dv=8, n=24, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("p", [1, 3, 8, 9])
def test_any_number_of_devices_has_the_bits_of_one(p):
    q, k, v = inputs(b=2, l=2, h=6, h_kv=2, n=70)
    lengths = np.array([61, 0])
    expected = exact(q, k, v, kv_lengths=lengths)
    found = decode(q, k, v, kv_lengths=lengths, sharding=over(p))
    assert_same_bits(found, expected)
    order = np.random.default_rng(p).permutation(61)
    k[:, :61], v[:, :61] = k[:, order], v[:, order]
    assert_same_bits(decode(q, k, v, kv_lengths=lengths, sharding=over(p)), expected)


def test_fewer_keys_than_devices():
    q, k, v = inputs(n=5)
    assert_same_bits(decode(q, k, v, sharding=over(8)), exact(q, k, v))


def test_no_keys_at_all():
    out, lse = decode(*inputs(n=0), sharding=over(8))
    assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize(
    "spec", [P(None, ("a", "b", "c")), P("a", "b", "c"), P(None, ("c", "a")), P("b", None, "a")]
)
def test_any_mesh_has_the_bits_of_one_device(spec):
    q, k, v = inputs(b=2, l=2, h=4, h_kv=2, n=24)
    mask = np.random.default_rng(4).random((2, 1, 2, 24)) < 0.7
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
    found = decode(q, k, v, mask=mask, sharding=NamedSharding(mesh, spec))
    assert_same_bits(found, exact(q, k, v, mask=mask))


def test_striped_caches():
    q, k, v = inputs(n=24)
    expected = exact(q, k[:, :13], v[:, :13])
    slots = np.arange(24).reshape(3, 8).T.ravel()  # key i in slot (i mod 8) · 3 + i div 8
    striped = {"sharding": over(8), "striped": True, "kv_lengths": np.array([13])}
    assert_same_bits(decode(q, k[:, slots], v[:, slots], **striped), expected)


def test_a_mesh_of_ones_own_and_new_keys():
    """What a model does: the cache in shards, new keys on one device, one rounding at the end."""
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
    assert_same_bits(found, exact(q, k, v))


def test_under_vmap():
    q, k, v = inputs(l=3)
    queries = np.stack([q, 2 * q])
    found = jax.jit(jax.vmap(lambda q: exact(q, k, v)))(queries)
    for i in range(2):
        assert_same_bits([x[i] for x in found], exact(queries[i], k, v))


def test_what_it_sends():
    """Eight integers for each number of a state and two for its tops, whatever the context."""
    b, h, dv = 2, 16, 128
    for n in (1024, 4096):
        shapes = (b, 1, h, 128), (b, n, h, 128), (b, n, h, dv)
        q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        found = collectives(decode.lower(q, k, v, sharding=over(8)).compile())
        assert [c.kind for c in found] == 2 * ["all-reduce"]
        assert sorted(c.operand_bytes for c in found) == [2 * 4 * b * h, 8 * 4 * b * h * (dv + 1)]


def test_memory_does_not_grow_with_the_keys(optimized):
    def temporary(n):
        q = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16)
        return memory(exact.lower(q, k, k).compile()).temporary_bytes

    assert temporary(16 * 1024) <= temporary(2 * 1024) + 1024
