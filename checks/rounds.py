"""What a butterfly and circular windows send over any number of devices, read off the compiled
programs. For each number a line: rounds, states sent by all devices, different outputs."""

import functools
import itertools

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn

treeattn.simulate_devices(12)
STATE = 4 * 16 * (128 + 2)  # bytes


def shift(state, axis, distance):
    """The state of the device that stands so many places before this one, sent as one array."""
    p = lax.axis_size(axis)
    m, d, n = state
    joined = jax.numpy.concatenate([n, d[..., None], m[..., None]], axis=-1)
    arrived = lax.ppermute(joined, axis, [(i, (i + distance) % p) for i in range(p)])
    return treeattn.AttentionState(arrived[..., -1], arrived[..., -2], arrived[..., :-2])


def windows(state, axes):
    """⌈log₂ p⌉ rounds for every p, as in notebooks/deeper/shares_trees_and_late_devices.ipynb."""
    lengths = [lax.axis_size(axes[0])]
    while lengths[0] > 1:
        lengths.insert(0, (lengths[0] + 1) // 2)
    shape, dv = state.max.shape, state.numerator.shape[-1]
    whole = state
    without_own = treeattn.AttentionState.identity(shape, dv, state.max.dtype)
    for w, wider in itertools.pairwise(lengths):
        sent, distance = (whole, w) if wider == 2 * w else (without_own, w - 1)
        received = shift(sent, axes[0], distance)
        whole = treeattn.merge(received, whole)
        without_own = treeattn.merge(received, without_own)
    return whole


def counts(p, method):
    rng = np.random.default_rng(p)
    mesh = jax.make_mesh((p,), "k", devices=jax.devices()[:p], axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "k"))
    q, k, v = (rng.normal(size=(1, n, 16, 128)).astype(np.float32) for n in (1, 4 * p, 4 * p))
    k, v = (jax.device_put(x, sharding) for x in (k, v))
    decode = functools.partial(treeattn.tree_decode, sharding=sharding, method=method)
    program = jax.jit(decode).lower(q, k, v).compile()
    found = treeattn.collectives(program)
    assert {(c.kind, c.count, c.operand_bytes) for c in found} == {("collective-permute", 1, STATE)}
    out = program(q, k, v)
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-6)
    outputs = {np.asarray(shard.data).tobytes() for shard in out.addressable_shards}
    return len(found), sum(len(c.groups) for c in found), len(outputs)


if __name__ == "__main__":
    for p in (3, 5, 6, 7, 8, 12):
        print(p, *counts(p, "butterfly"), *counts(p, windows))
