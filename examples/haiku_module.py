"""A Haiku module writes text from a cache that is sharded over eight devices.

    pip install dm-haiku && python examples/haiku_module.py

The cache is Haiku's state: striped, and donated at each step. JAX's own attention on one device
writes the same tokens.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from treeattn import kv_mesh, simulate_devices, striped_slot, tree_decode

try:
    import haiku as hk
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}: pip install dm-haiku") from None

TOKENS, ROOM, ROWS, WIDTH, HEADS, VOCABULARY = 50, 64, 2, 64, 8, 101
CACHE = ROWS, ROOM, HEADS, WIDTH // HEADS


def over_devices(q, k, v, lengths):
    sharding = NamedSharding(kv_mesh(), PartitionSpec(None, "kv"))
    return tree_decode(q, k, v, sharding=sharding, striped=True, kv_lengths=lengths)


def on_one_device(q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def logits(attend, devices, tokens):  # (batch,) -> (batch, vocabulary)
    embed = hk.get_parameter("embed", (VOCABULARY, WIDTH), init=hk.initializers.RandomNormal())
    x = embed[tokens]
    q, k, v = (hk.Linear(WIDTH, name=name)(x).reshape(ROWS, HEADS, -1) for name in "qkv")
    length = hk.get_state("length", (), jnp.int32, init=jnp.zeros)
    slot = striped_slot(length, ROOM, devices)  # on one device: slot `length`
    keys, values = (
        hk.get_state(name, CACHE, init=jnp.zeros).at[:, slot].set(new)
        for name, new in (("keys", k), ("values", v))
    )
    for name, array in ("length", length + 1), ("keys", keys), ("values", values):
        hk.set_state(name, array)
    out = attend(q[:, None], keys, values, jnp.full(ROWS, length + 1))
    return out.reshape(x.shape) @ embed.T


def text(attend, mesh):
    """50 tokens of each row, and the cache's sharding afterwards."""
    f = functools.partial(logits, attend, mesh.size)
    model = hk.without_apply_rng(hk.transform_with_state(f))
    tokens = [jnp.array([3, 5])]
    weights, _ = model.init(jax.random.key(0), tokens[0])
    sharding = NamedSharding(mesh, PartitionSpec(None, "kv"))
    cache = {name: jnp.zeros(CACHE, device=sharding) for name in ("keys", "values")}
    state = {"~": {"length": jnp.int32(0), **cache}}
    step = jax.jit(model.apply, donate_argnums=1)
    for _ in range(TOKENS):
        scores, state = step(weights, state, tokens[-1])
        tokens.append(scores.argmax(-1))
    return jax.device_get(jnp.stack(tokens)), state["~"]["keys"].sharding


def main() -> None:
    simulate_devices(8)  # leave out where there are real devices
    over, sharding = text(over_devices, kv_mesh())
    one, _ = text(on_one_device, kv_mesh(jax.devices()[:1]))
    print(f"same {over.size} tokens: {(over == one).all()}; cache {tuple(sharding.spec)}")
    print(len(set(over.flat)), "different ones")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
