"""A Llama on a GPU: tokens per second by context, and what verifying candidates costs."""

import dataclasses
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from treeattn import ancestor_mask, depths, pack
from treeattn_llama import (
    Cache,
    Config,
    Layer,
    Llama,
    Weights,
    packaged_model,
    rotary_frequencies,
)

PACKAGED = Config(
    vocabulary=49152,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    context=8192,
    norm_epsilon=1e-5,
    rotary_base=100000.0,
    tied=True,
)
LARGE = dataclasses.replace(
    PACKAGED,
    vocabulary=128256,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_width=14336,
    context=131072,
    rotary_base=500000.0,
    tied=False,
)
# Of so few layers that its programs compile soon; what each does is what the large model's does.
FEW_LAYERS = dataclasses.replace(LARGE, layers=8)
SMALL = dataclasses.replace(
    PACKAGED,
    vocabulary=96,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=48,
    context=1 << 20,
    rotary_base=10000.0,
)
ROOM = 64  # tokens that a cache has room for besides its context


def random_llama(config: Config, dtype) -> Llama:
    """A model of that shape whose weights are noise: what a step takes does not depend on them."""
    shapes = config.tensors()
    normal = jax.jit(
        lambda key, shape: (shape[-1] ** -0.5 * jax.random.normal(key, shape, jnp.float32)).astype(
            dtype
        ),
        static_argnums=1,
    )
    keys = iter(jax.random.split(jax.random.key(0), 8 * config.layers + 8))

    def random(*shape):
        return normal(next(keys), shape)

    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    d, f, ones = config.width, config.mlp_width, jnp.ones(config.width, dtype)

    def layer():
        return Layer(
            attention_norm=ones,
            qkv=random(q + 2 * kv, d),
            output=random(d, q),
            mlp_norm=ones,
            gate_up=random(2 * f, d),
            down=random(d, f),
        )

    embedding = random(*shapes["model.embed_tokens.weight"])
    head = embedding if config.tied else random(*shapes["lm_head.weight"])
    layers = tuple(layer() for _ in range(config.layers))
    frequencies = jnp.asarray(rotary_frequencies(config))
    return Llama(config, Weights(embedding, layers, ones, head, frequencies))


def full_cache(model: Llama, context: int) -> Cache:
    """A cache that holds `context` random tokens, with ROOM for more."""
    empty = model.new_cache(1, context + ROOM)
    noise = jax.random.normal(jax.random.key(1), empty.k[0].shape, empty.k[0].dtype)
    fill = jax.jit(lambda x, noise: x + noise, donate_argnums=0)
    k, v = (tuple(fill(x, noise) for x in layers) for layers in (empty.k, empty.v))
    return Cache(k, v, empty.lengths + np.int32(context))


def cache_bytes(config: Config, context: int, itemsize: int) -> int:
    return 2 * config.layers * context * config.kv_heads * config.head_dim * itemsize


def room() -> float:
    """Bytes that are free on the device; on a CPU, which does not say, 2 GB."""
    about = jax.devices()[0].memory_stats() or {}
    return about.get("bytes_limit", 2e9) - about.get("bytes_in_use", 0)


def decode(model: Llama, name: str, contexts, tokens: int) -> Iterator[dict]:
    """Tokens per second, greedily, one text: each is known to the host before the next begins.

    One cache, which holds the longest context that fits, serves all: nothing compiles twice.
    """
    itemsize, about = model.weights.embedding.dtype.itemsize, {"what": "decode", "model": name}
    fits = [c for c in contexts if cache_bytes(model.config, c, itemsize) < 0.8 * room()]
    for context in contexts[len(fits) :]:
        yield about | {"context": context, "why not": "the cache does not fit"}
    cache = full_cache(model, fits[-1])
    for context in fits:
        token, times = np.array([[1]]), []
        for _ in range(3):  # the first one compiles
            cache = cache._replace(lengths=jnp.full(1, context, jnp.int32))
            began = time.perf_counter()
            for _ in range(tokens):
                logits, cache = model.step(token, cache, last=True)
                token = np.asarray(jnp.argmax(logits, axis=-1))[:, None]
            times.append(time.perf_counter() - began)
        yield about | {"context": context, "tokens/s": tokens / min(times[1:])}


def packaged_llama(smoke: bool) -> tuple[str, Llama]:
    """The packaged model where it can be read, else a random one of its shape; in bfloat16."""
    if smoke:
        return "random, small", random_llama(SMALL, jnp.float32)
    try:
        packaged_model()
        return "SmolLM2-135M", Llama.load(None, dtype=jnp.bfloat16)
    except (ImportError, FileNotFoundError):
        return "random, shape of SmolLM2-135M", random_llama(PACKAGED, jnp.bfloat16)


def packaged(smoke: bool) -> Iterator[dict]:
    name, model = packaged_llama(smoke)
    contexts = (32, 64) if smoke else (1024, 8192, 32768, 131072)
    yield from decode(model, name, contexts, 4 if smoke else 32)


def large(smoke: bool) -> Iterator[dict]:
    config, dtype = (SMALL, jnp.float32) if smoke else (LARGE, jnp.bfloat16)
    needed = 2 * sum(np.prod(shape) for shape in config.tensors().values())
    if needed > 0.8 * room():
        yield {"what": "decode", "model": "random 8B", "why not": "the weights do not fit"}
        return
    model = random_llama(config, dtype)
    contexts = (32,) if smoke else (1024, 8192, 32768, 131072)
    yield from decode(model, "random 8B", contexts, 4 if smoke else 16)


def extend_seconds(model: Llama, cache: Cache, tokens, mask, positions, rounds: int) -> float:
    """Of one step over candidates, which is not written to the cache."""
    run = lambda: model.extend(tokens, cache, mask=mask, positions=positions)[0]  # noqa: E731
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return min(times)


def verify(smoke: bool) -> Iterator[dict]:
    """A beam in one packed row against a row a candidate; and steps over trees of candidates.

    The cache is what a step reads most of: only then does it matter that a packed beam reads it
    once, and eight rows eight times.
    """
    config, dtype = (SMALL, jnp.float32) if smoke else (FEW_LAYERS, jnp.bfloat16)
    name = "random, small" if smoke else "random, 8 layers of an 8B's shape"
    context, rounds = (32, 2) if smoke else (32768, 10)
    about = {"model": name, "context": context}
    bytes_needed = 10 * cache_bytes(config, context, 2) + 6 * config.vocabulary * config.width
    if bytes_needed > 0.8 * room():
        yield {"what": "packed", **about, "why not": "the caches do not fit"}
        return
    model = random_llama(config, dtype)
    cache, rng = full_cache(model, context), np.random.default_rng(0)
    # Eight candidates of eight tokens, the first half of which they share.
    beam = rng.integers(config.vocabulary, size=(1, 8, 8))
    beam[:, :, :4] = beam[:, :1, :4]
    packed = pack(beam)
    at = context + np.asarray(packed.position_offsets)
    tokens, n = np.asarray(packed.packed_beam), packed.packed_beam.shape[1]
    t = extend_seconds(model, cache, tokens, packed.attention_mask, at, rounds)
    yield {"what": "packed", **about, "tokens": n, "ms": 1e3 * t}
    rows = jax.tree.map(lambda x: jnp.repeat(x, 8, axis=0), cache)
    mask, at = np.tri(8, dtype=bool)[None], np.broadcast_to(context + np.arange(8), (8, 8))
    unpacked = extend_seconds(model, rows, beam[0], mask, at, rounds)
    del rows
    yield {
        "what": "unpacked",
        **about,
        "tokens": 64,
        "ms": 1e3 * unpacked,
        "× packed": unpacked / t,
    }
    one = None
    for n in (1, 4) if smoke else (1, 8, 64, 4, 16, 32, 2):
        parents = np.array([-1, *(rng.integers(i) for i in range(1, n))])
        tokens = rng.integers(config.vocabulary, size=(1, n))
        mask, at = ancestor_mask(parents)[None], context + depths(parents)[None]
        t = extend_seconds(model, cache, tokens, mask, at, rounds)
        one = one or t
        yield {"what": "verify", **about, "tokens": n, "ms": 1e3 * t, "× one token": t / one}
