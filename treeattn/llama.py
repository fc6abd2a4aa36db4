"""A Llama whose attention is a parameter, over a cache that is sharded along the text.

A step attends to the cache and to its own new tokens separately, and merges the two states:
nothing is written before everything is read, and the new tokens may see each other in any way
that a mask says, a tree of candidates included.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from treeattn.arrays import Array
from treeattn.cache import (
    Cache,
    NewKeys,
    ShardAttention,
    append,
    attend_cache,
    grow,
    new_cache,
)
from treeattn.checkpoint import Config, open_checkpoint
from treeattn.parallel import among_new, to_cache
from treeattn.state import finalize, merge
from treeattn.tokenizer import Tokenizer
from treeattn.weights import Layer, Weights, load_weights, place


@dataclasses.dataclass(frozen=True)
class How:
    """What a compiled step depends on besides its arrays."""

    config: Config
    mesh: Mesh | None
    attention: ShardAttention
    among: Callable


def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], epsilon: float):
    """x / √mean(x²), times weight; computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * weight


def rotate(x: Float[Array, "b l h d"], angles: Float[Array, "b l half"]) -> Float[Array, "b l h d"]:
    """Rotary embedding: the pair (x_i, x_{i + d/2}) turned by angle i of its token."""
    cos, sin = (f(angles)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def queries_keys_values(x, w: Layer, angles, config: Config):
    """q (b, l, heads, head_dim) and k, v (b, l, kv_heads, head_dim) of a layer's input x."""
    b, l, _ = x.shape
    h, h_kv, d = config.heads, config.kv_heads, config.head_dim
    qkv = rms_norm(x, w.attention_norm, config.norm_epsilon) @ w.qkv
    qkv = qkv if w.qkv_bias is None else qkv + w.qkv_bias
    qkv = qkv.reshape(b, l, h + 2 * h_kv, d)
    q, k, v = jnp.split(qkv, [h, h + h_kv], axis=2)
    return rotate(q, angles), rotate(k, angles), v


def after_attention(x, w: Layer, out, config: Config):
    """A layer's output, from its input x and its attention's out (b, l, heads, head_dim)."""
    h = out.reshape(*x.shape[:2], -1) @ w.output
    x = x + (h if w.output_bias is None else h + w.output_bias)
    h = rms_norm(x, w.mlp_norm, config.norm_epsilon) @ w.gate_up
    gate, up = jnp.split(h if w.gate_up_bias is None else h + w.gate_up_bias, 2, axis=-1)
    h = (jax.nn.silu(gate) * up) @ w.down
    return x + (h if w.down_bias is None else h + w.down_bias)


def run_layer(x, w: Layer, angles, mask, k_old, v_old, lengths, how: How):
    """One layer: (its output, the keys and the values of its tokens).

    k_old, v_old, lengths: the layer's cache; None without one.
    """
    q, k, v = queries_keys_values(x, w, angles, how.config)
    state = how.among(q, k, v, mask)
    if k_old is not None:
        cached = attend_cache(q, k_old, v_old, lengths, how.mesh, how.attention)
        state = merge(cached, state)
    out = finalize(state)[0].astype(x.dtype)
    return after_attention(x, w, out, how.config), k, v


# A step is one compiled program for its layers, run once for each: compiling takes a second
# instead of half a minute, and what a layer's cache needs of memory is free again for the next.


@jax.jit
def _embed(embedding, frequencies, tokens, positions):
    """The first layer's input (b, l, d), and the rotary angles (b, l, head_dim / 2)."""
    return embedding[tokens], positions[..., None].astype(jnp.float32) * frequencies


@functools.partial(jax.jit, static_argnames="how")
def _extend_layer(x, w, angles, mask, k_old, v_old, lengths, *, how):
    return run_layer(x, w, angles, mask, k_old, v_old, lengths, how)


@functools.partial(jax.jit, static_argnames="how", donate_argnames=("x", "k_old", "v_old"))
def _step_layer(x, w, angles, mask, k_old, v_old, lengths, counts, *, how):
    x, k, v = run_layer(x, w, angles, mask, k_old, v_old, lengths, how)
    return x, *append((k_old, v_old), (k, v), lengths, counts, how.mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="old")
def _commit_layer(old, new, lengths, counts, select, *, mesh):
    return append(old, new, lengths, counts, mesh, select)


@functools.partial(jax.jit, static_argnames="epsilon")
def _head(x, norm, head, last, *, epsilon):
    """Logits (b, l, vocabulary) of all tokens, or (b, vocabulary) of each row's token `last`."""
    if last is not None:
        x = jnp.take_along_axis(x, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    x = rms_norm(x, norm, epsilon)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=wide)


@dataclasses.dataclass(frozen=True)
class Llama:
    """A model, on the devices of `mesh` (None: one device), and the attention it runs with.

    attention: towards the cache: a name in `treeattn.parallel.TO_CACHE`, or a function
               (`treeattn.cache.ShardAttention`).
    """

    config: Config
    weights: Weights
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    attention: str | ShardAttention = "tree"
    implementation: str | None = None

    @staticmethod
    def load(
        path: str | Path | None = None,
        *,
        mesh: Mesh | None = None,
        dtype=None,
        attention: str | ShardAttention = "tree",
        implementation: str | None = None,
    ) -> "Llama":
        """A GGUF file, a Hugging Face directory, or (None) the packaged SmolLM2-135M-Instruct.

        dtype: of the weights and of what is computed with them; None keeps the checkpoint's
        (float32 where it is quantized). The weights are copied to every device of the mesh;
        simulated devices share one copy.

        Raises FileNotFoundError when there is no such file or the packaged model is not
        installed, ValueError for whatever is not a readable Llama checkpoint.
        """
        to_cache(attention, implementation)  # a wrong name is found before the work
        checkpoint = open_checkpoint(path)
        return Llama(
            config=checkpoint.config,
            weights=load_weights(checkpoint, mesh, dtype),
            tokenizer=checkpoint.tokenizer,
            mesh=mesh,
            attention=attention,
            implementation=implementation,
        )

    def on(self, mesh: Mesh | None, **changes) -> "Llama":
        """The same model on another mesh, perhaps with another `attention`.

        On a CPU the weights stay where they are, shared.
        """
        weights = jax.tree.map(lambda x: place(np.asarray(x), mesh), self.weights)
        if self.config.tied:
            weights = weights._replace(head=weights.embedding)
        return dataclasses.replace(self, mesh=mesh, weights=weights, **changes)

    def using(self, attention: str | ShardAttention) -> "Llama":
        """The same model with another attention towards the cache."""
        return dataclasses.replace(self, attention=attention)

    @property
    def how(self) -> How:
        attention = to_cache(self.attention, self.implementation)
        return How(self.config, self.mesh, attention, among_new)

    def logits(self, token_ids: Int[Array, "b l"]) -> Float[Array, "b l vocabulary"]:
        """One full causal pass without a cache; float32, or float64 for a model of float64."""
        x, angles = self._embed(self._tokens(token_ids))
        for w in self.weights.layers:
            x, _, _ = _extend_layer(x, w, angles, None, None, None, None, how=self.how)
        return self._head(x)

    def layer_qkv(self, token_ids: Int[Array, "b l"], layer: int):
        """What one layer's attention gets in a full causal pass, rotary embedding included:
        q (b, l, heads, head_dim) and k, v (b, l, kv_heads, head_dim)."""
        if not 0 <= layer < self.config.layers:
            raise ValueError(f"layer: expected 0 … {self.config.layers - 1}, got {layer}")
        x, angles = self._embed(self._tokens(token_ids))
        for w in self.weights.layers[:layer]:
            x, _, _ = _extend_layer(x, w, angles, None, None, None, None, how=self.how)
        return queries_keys_values(x, self.weights.layers[layer], angles, self.config)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` texts of up to `capacity` tokens (rounded up), sharded."""
        c, dtype = self.config, self.weights.embedding.dtype
        return new_cache(c.layers, batch, capacity, c.kv_heads, c.head_dim, dtype, self.mesh)

    def grow(self, cache: Cache, capacity: int) -> Cache:
        """The same texts in a larger cache. Every new capacity compiles a step anew."""
        return grow(cache, capacity, self.mesh)

    def extend(
        self,
        tokens: Int[Array, "b l"],
        cache: Cache,
        *,
        positions: Int[Array, "b l"] | None = None,
        mask: Bool[Array, "#b l l"] | None = None,
    ) -> tuple[Float[Array, "b l vocabulary"], NewKeys]:
        """Run tokens after the cached ones, without writing them: (logits, their keys).

        Every token sees the whole cache. mask[b, i, j] says whether token i sees token j of
        the same call; None is causal. positions defaults to those after the cached text.
        """
        x, angles = self._embed(self._tokens(tokens), cache, positions)
        keys, values = [], []
        for w, k, v in zip(self.weights.layers, cache.k, cache.v, strict=True):
            x, k, v = _extend_layer(x, w, angles, mask, k, v, cache.lengths, how=self.how)
            keys.append(k)
            values.append(v)
        return self._head(x), NewKeys(tuple(keys), tuple(values))

    def commit(
        self,
        cache: Cache,
        new: NewKeys,
        *,
        counts: Int[Array, " b"] | None = None,
        select: Int[Array, "b m"] | None = None,
    ) -> Cache:
        """Write what `extend` returned, and give up `cache`.

        select: (b, m) which of the new tokens, in order; all when None. counts: (b,) how many
        of those each text gets; all when None.
        """
        m = (select if select is not None else new.k[0]).shape[1]
        counts = self._counts(counts, len(cache.lengths), m, cache)
        layers = zip(cache.k, cache.v, new.k, new.v, strict=True)
        written = [
            _commit_layer((k, v), (k_new, v_new), cache.lengths, counts, select, mesh=self.mesh)
            for k, v, k_new, v_new in layers
        ]
        k, v = zip(*written, strict=True)
        return Cache(k, v, cache.lengths + counts)

    def step(
        self,
        tokens: Int[Array, "b l"],
        cache: Cache,
        *,
        counts: Int[Array, " b"] | None = None,
        positions: Int[Array, "b l"] | None = None,
        mask: Bool[Array, "#b l l"] | None = None,
        last: bool = False,
    ) -> tuple[Float[Array, "b *l vocabulary"], Cache]:
        """`extend` and `commit` at once: (logits, new cache). It gives up `cache`.

        counts: (b,) how many of the tokens are real, the rest of a row being padding.
        last:   only the logits after each row's last real token, (b, vocabulary).
        """
        tokens = self._tokens(tokens)
        counts = self._counts(counts, *tokens.shape, cache)
        x, angles = self._embed(tokens, cache, positions)
        keys, values = [], []
        for w, k, v in zip(self.weights.layers, cache.k, cache.v, strict=True):
            x, k, v = _step_layer(x, w, angles, mask, k, v, cache.lengths, counts, how=self.how)
            keys.append(k)
            values.append(v)
        cache = Cache(tuple(keys), tuple(values), cache.lengths + counts)
        return self._head(x, counts - 1 if last else None), cache

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: Cache,
        *,
        chunk: int = 256,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> tuple[Float[Array, "b vocabulary"], Cache]:
        """Run prompts of any lengths, `chunk` tokens at a time: (logits after each, cache).

        progress is called with the number of tokens done. Raises ValueError, before any work,
        for an empty prompt, ids outside the vocabulary, and more than the cache has room for.
        """
        lengths = np.array([len(p) for p in prompts])
        if len(prompts) != len(cache.lengths) or not lengths.all():
            raise ValueError(
                f"prompts: expected {len(cache.lengths)}, none of them empty, got lengths "
                f"{lengths.tolist()}"
            )
        self._check_room(cache, lengths, "prompts")
        longest = int(lengths.max())
        chunk = min(chunk, max(16, 1 << (longest - 1).bit_length()))
        padded = np.zeros((len(prompts), chunk * -(-longest // chunk)), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        self._tokens(padded)
        result = None
        for start in range(0, padded.shape[1], chunk):
            counts = np.clip(lengths - start, 0, chunk)
            logits, cache = self.step(
                padded[:, start : start + chunk], cache, counts=counts, last=True
            )
            ends = jnp.asarray(counts > 0)[:, None]
            result = logits if result is None else jnp.where(ends, logits, result)
            progress(int(counts.sum()))
        return result, cache

    def _embed(self, tokens, cache: Cache | None = None, positions=None):
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = positions if cache is None else cache.lengths[:, None] + positions
        return _embed(self.weights.embedding, self.weights.frequencies, tokens, positions)

    def _head(self, x, last=None):
        norm, head = self.weights.norm, self.weights.head
        return _head(x, norm, head, last, epsilon=self.config.norm_epsilon)

    def _counts(self, counts, batch: int, m: int, cache: Cache) -> Array:
        counts = np.full(batch, m) if counts is None else counts
        self._check_room(cache, counts)
        return jnp.asarray(counts, jnp.int32)

    def _tokens(self, tokens) -> Array:
        """`tokens` as an array, after checking them (unless they are being traced)."""
        if not isinstance(tokens, jax.Array):
            tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens: expected integers (batch, length), got {tokens.dtype} {tokens.shape}"
            )
        if not isinstance(tokens, jax.core.Tracer) and tokens.size:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocabulary:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"tokens: expected ids from 0 to {self.config.vocabulary - 1}, got {wrong}"
                )
        return tokens

    def _check_room(self, cache: Cache, counts, name: str = "tokens") -> None:
        """Raise a ValueError unless `counts` more tokens fit (unless they are being traced)."""
        if isinstance(cache.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
            return
        needed = int(np.max(np.asarray(cache.lengths) + np.asarray(counts)))
        if needed > cache.capacity:
            raise ValueError(f"{name}: {needed} tokens do not fit into a cache of {cache.capacity}")
