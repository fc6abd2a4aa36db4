"""A cache that grows: room for many tokens on the devices, and the number of tokens that count.

    python examples/growing_cache.py

The arrays never change their shape, so one program serves every step. They are donated, so a step
writes one row in its place and copies nothing. Keys beyond the length do not
count, and blocks wholly beyond the length are not even read.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn

ROOM = 64
KV_HEADS = 2
HEADS = 4
HEAD_DIM = 16


def append(mesh, keys, values, key, value, length):
    """The cache with one token's key and value, (1, 1, kv_heads, head_dim), as row `length`.

    Every device writes to its own rows, or writes its old row back, so nothing is sent.
    """

    def write(rows, row, length):
        own = length - jax.lax.axis_index("kv") * rows.shape[1]
        at = jnp.clip(own, 0, rows.shape[1] - 1)
        old = jax.lax.dynamic_slice_in_dim(rows, at, 1, axis=1)
        row = jnp.where(own == at, row, old)
        return jax.lax.dynamic_update_slice_in_dim(rows, row, at, axis=1)

    cache = P(None, "kv")
    on_a_device = jax.shard_map(write, mesh=mesh, in_specs=(cache, P(), P()), out_specs=cache)
    return on_a_device(keys, key, length), on_a_device(values, value, length)


def main() -> None:
    treeattn.simulate_devices(4)  # leave out where there are real devices
    mesh = treeattn.kv_mesh()
    sharding = NamedSharding(mesh, P(None, "kv"))  # device r has rows 16 r … 16 r + 15
    empty = jnp.zeros((1, ROOM, KV_HEADS, HEAD_DIM))
    keys, values = (jax.device_put(empty, sharding) for _ in "kv")
    add = jax.jit(functools.partial(append, mesh), donate_argnums=(0, 1))
    decode = jax.jit(
        lambda q, k, v, length: treeattn.tree_decode(
            q, k, v, sharding=sharding, kv_lengths=length[None]
        )
    )

    rng = np.random.default_rng(0)
    seen = []
    for length in range(40):  # tokens one by one: first on device 0, then on the next
        q = rng.normal(size=(1, 1, HEADS, HEAD_DIM)).astype(np.float32)
        key, value = rng.normal(size=(2, 1, 1, KV_HEADS, HEAD_DIM)).astype(np.float32)
        keys, values = add(keys, values, key, value, jnp.int32(length))
        out = decode(q, keys, values, jnp.int32(length + 1))

        seen.append((key, value))
        if length % 13 == 0:  # against all appended keys, on one device
            k, v = (jnp.concatenate(x, axis=1) for x in zip(*seen, strict=True))
            close = np.allclose(out, treeattn.attention(jnp.asarray(q), k, v), atol=1e-5)
            print(f"{length + 1} tokens, allclose: {close}")
    print("still sharded:", keys.sharding == sharding)


if __name__ == "__main__":
    as_written = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()
    main()
