"""A model in Hugging Face's layout, (batch, heads, length, head_dim), over eight devices.

    python examples/hugging_face_layout.py

Its cache is sharded along the length, striped, and donated. One compiled program writes 50 tokens.
Another program writes the same tokens on one device, with JAX's own attention.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import kv_mesh, simulate_devices, striped_slot, tree_decode

TOKENS, ROOM = 50, 64  # written, and slots of the cache
ROWS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 2, 8, 2, 16, 64, 101

swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)  # (batch, length, heads, …), and back


def over_devices(q, k, v, length, mesh):
    cache = NamedSharding(mesh, P(None, "kv"))  # of the swapped arrays
    q, k, v = map(swap, (q, k, v))
    return swap(tree_decode(q, k, v, sharding=cache, striped=True, kv_lengths=length))


def on_one_device(q, k, v, length, _):
    lengths = jnp.full(len(q), length)
    q, k, v = map(swap, (q, k, v))
    return swap(jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths))


def weights(seed: int) -> dict:
    of_heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "o": HEADS}
    shapes = {name: (WIDTH, heads, HEAD_DIM) for name, heads in of_heads.items()}
    shapes["embed"] = shapes["unembed"] = VOCABULARY, WIDTH
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {x: jax.random.normal(key, shapes[x]) / 8 for x, key in zip(shapes, keys, strict=True)}


@functools.partial(jax.jit, static_argnames=("attend", "mesh"), donate_argnames="past")
def write(weights, past, token, attend, mesh):
    """(tokens, past): each step appends its key and value to the cache, and attends."""

    def step(carry, _):
        token, length, past = carry
        x = weights["embed"][token]
        q, k, v = (jnp.einsum("bd,dhe->bhe", x, weights[name]) for name in "qkv")
        slot = striped_slot(length, ROOM, mesh.size)  # on one device: slot `length`
        past = past[0].at[:, :, slot].set(k), past[1].at[:, :, slot].set(v)
        out = attend(q[:, :, None], *past, length + 1, mesh)[:, :, 0]
        logits = (x + jnp.einsum("bhe,dhe->bd", out, weights["o"])) @ weights["unembed"].T
        return (logits.argmax(-1), length + 1, past), logits.argmax(-1)

    (_, _, past), tokens = jax.lax.scan(step, (token, jnp.int32(0), past), length=TOKENS)
    return tokens, past


def main() -> None:
    simulate_devices(8)  # leave out where there are real devices
    model, first, texts = weights(0), jnp.array([3, 5]), {}
    for attend, devices in (over_devices, jax.devices()), (on_one_device, jax.devices()[:1]):
        mesh = kv_mesh(devices)
        sharding = NamedSharding(mesh, P(None, None, "kv"))
        past = tuple(jnp.zeros((ROWS, KV_HEADS, ROOM, HEAD_DIM), device=sharding) for _ in "kv")
        texts[attend], grown = write(model, past, first, attend, mesh)
        print(
            f"{mesh.size} devices, donated: {past[0].is_deleted()}, {tuple(grown[0].sharding.spec)}"
        )
    over, one = map(jax.device_get, texts.values())
    print(f"same {over.size} tokens: {(over == one).all()}; {len(set(over.flat))} different ones")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
