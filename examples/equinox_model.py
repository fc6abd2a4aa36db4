"""An Equinox model writes text from a cache that is sharded over eight devices.

    pip install equinox && python examples/equinox_model.py

One compiled step a token; the cache is striped, and donated. JAX's own attention on one device
writes the same tokens.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from treeattn import kv_mesh, simulate_devices, striped_slot, tree_decode

try:
    import equinox as eqx
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}: pip install equinox") from None

TOKENS, ROOM, ROWS, WIDTH, HEADS, VOCABULARY = 50, 64, 2, 64, 8, 101


class Model(eqx.Module):
    embed: jax.Array
    qkv: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.embed = jax.random.normal(first, (VOCABULARY, WIDTH))
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=second)

    def __call__(self, tokens, cache, length, attend):
        x = self.embed[tokens]  # (batch, width)
        q, k, v = jnp.split(jax.vmap(self.qkv)(x).reshape(ROWS, 3 * HEADS, -1), 3, axis=1)
        cache, out = attend(q[:, None], k, v, cache, length)
        return out.reshape(x.shape) @ self.embed.T, cache


def over_devices(q, key, value, cache, length):
    sharding = NamedSharding(kv_mesh(), PartitionSpec(None, "kv"))
    slot = striped_slot(length, ROOM, sharding.mesh.size)
    k, v = cache[0].at[:, slot].set(key), cache[1].at[:, slot].set(value)
    return (k, v), tree_decode(q, k, v, sharding=sharding, striped=True, kv_lengths=length + 1)


def on_one_device(q, key, value, cache, length):
    k, v = cache[0].at[:, length].set(key), cache[1].at[:, length].set(value)
    lengths = jnp.full(ROWS, length + 1)
    return (k, v), jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


@eqx.filter_jit(donate="all-except-first")
def step(kept, cache):
    model, tokens, length, attend = kept
    logits, cache = model(tokens, cache, length, attend)
    return logits.argmax(-1), cache


def text(model, attend, place):
    """50 tokens of each row, and the cache's sharding afterwards."""
    shape = ROWS, ROOM, HEADS, WIDTH // HEADS
    cache = tuple(jnp.zeros(shape, device=place) for _ in "kv")
    tokens = [jnp.array([3, 5])]
    for i in range(TOKENS):
        token, cache = step((model, tokens[-1], jnp.int32(i), attend), cache)
        tokens.append(token)
    return jax.device_get(jnp.stack(tokens)), cache[0].sharding


def main() -> None:
    simulate_devices(8)  # leave out where there are real devices
    model = Model(jax.random.key(0))
    sharding = NamedSharding(kv_mesh(), PartitionSpec(None, "kv"))
    over, sharding = text(model, over_devices, sharding)
    one, _ = text(model, on_one_device, jax.devices()[0])
    print(f"same {over.size} tokens: {(over == one).all()}; cache {tuple(sharding.spec)}")
    print(len(set(over.flat)), "different ones")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
