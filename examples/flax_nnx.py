"""Flax NNX's attention decodes from a cache that is sharded over eight devices.

    pip install flax && python examples/flax_nnx.py

`tree_decode` as its attention_fn writes 50 tokens, the cache donated at each step; `attention`
trains. Flax fills its cache from the left, so this one is not striped.
"""

import argparse

import jax
import jax.numpy as jnp

from treeattn import attention, kv_mesh, simulate_devices, tree_decode

try:
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}: pip install flax") from None

TOKENS, ROOM, ROWS, WIDTH, HEADS, VOCABULARY = 50, 64, 2, 64, 8, 101


def as_flax_calls(f, **options):
    """f as Flax's attention_fn. Flax's masks have the dtype of the scores."""

    def attention_fn(query, key, value, bias=None, mask=None, **_):
        mask = None if mask is None else mask.astype(bool)
        return f(query, key, value, mask=mask, bias=bias, **options)

    return attention_fn


class Model(nnx.Module):
    def __init__(self, attention_fn, rngs: nnx.Rngs, *, decode: bool):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        options = {"attention_fn": attention_fn, "decode": decode, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, **options)

    def __call__(self, tokens, mask=None):  # (batch, length)
        return self.embed.attend(self.attention(self.embed(tokens), mask=mask))


@nnx.jit(donate_argnums=0)
def step(model, tokens):
    return model(tokens).argmax(-1)


def text(attention_fn, cache):
    """50 tokens of each row, and the cache's sharding afterwards."""
    model = Model(attention_fn, nnx.Rngs(0), decode=True)
    layer = model.attention
    layer.init_cache((ROWS, ROOM, WIDTH))
    for array in layer.cached_key, layer.cached_value:
        array[...] = jax.device_put(array[...], cache)
    tokens = [jnp.array([[3], [5]])]
    for _ in range(TOKENS):
        tokens.append(step(model, tokens[-1]))
    return jax.device_get(jnp.concatenate(tokens, axis=1)), layer.cached_key[...].sharding


def gradients(attention_fn, tokens):
    """Of the logits' variance, with a causal mask."""
    model = Model(attention_fn, nnx.Rngs(0), decode=False)
    mask = nnx.make_causal_mask(tokens)
    return nnx.grad(lambda model: model(tokens, mask).var())(model)


def main() -> None:
    simulate_devices(8)  # leave out where there are real devices
    cache = jax.NamedSharding(kv_mesh(), jax.P(None, "kv"))
    over, sharding = text(as_flax_calls(tree_decode, sharding=cache), cache)
    one, _ = text(nnx.dot_product_attention, jax.devices()[0])
    print(f"same {over.size} tokens: {(over == one).all()}; cache {tuple(sharding.spec)}")
    print(len(set(over.flat)), "different ones")
    both = as_flax_calls(attention), nnx.dot_product_attention
    ours, theirs = (gradients(f, one) for f in both)
    close = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-6)), ours, theirs)
    print("gradients, allclose:", jax.tree.all(close))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
