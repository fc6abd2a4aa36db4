"""A Llama whose attention is a parameter, over a cache that is sharded along the text."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from treeattn_llama import cache as caches
from treeattn_llama import inputs, layers, prefill
from treeattn_llama.arguments import Array, integer
from treeattn_llama.attention import ShardAttention, check_attention
from treeattn_llama.cache import Cache
from treeattn_llama.config import Config
from treeattn_llama.files import open_checkpoint
from treeattn_llama.inputs import NewEntries
from treeattn_llama.layout import Layout, layout_of
from treeattn_llama.tokenizer import Tokenizer
from treeattn_llama.weights import Weights, load_weights, move_weights


@dataclasses.dataclass(frozen=True, eq=False)
class Llama:
    """A model, on the devices of `mesh` (None: one device), and the attention it runs with.

    mesh:      its axis called "batch", if it has one, shares out a batch's texts; all others share
               out the keys of each text: token i lies on device i mod p. The weights are copied to
               every device; simulated ones share one copy. Its axes count as Auto ones: within
               `jax.set_mesh` of Explicit ones JAX refuses the model's programs
    attention: towards the cache, "tree", "ring", "butterfly", or a function (`ShardAttention`)
    """

    config: Config
    weights: Weights
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    attention: str | ShardAttention = "tree"

    def __post_init__(self):
        check_attention(self.attention)
        layout_of(self.mesh)

    def __repr__(self) -> str:
        """Everything but the weights, of which it says the dtype."""
        dtype = self.weights.embedding.dtype
        shown = f"{self.config}, mesh={self.mesh}, attention={self.attention!r}, dtype={dtype}"
        return f"Llama({shown})"

    @staticmethod
    def load(
        path: str | Path | None = None,
        *,
        mesh: Mesh | None = None,
        attention: str | ShardAttention = "tree",
        dtype=None,
    ) -> "Llama":
        """A GGUF file, a Hugging Face directory, or (None) the packaged SmolLM2-135M-Instruct.

        mesh, attention: as `Llama` says
        dtype: of the weights and of what is computed with them; None keeps the checkpoint's
               (float32 where it is quantized; the embedding's for what is computed)

        Raises FileNotFoundError where nothing is there, ValueError for what is no readable Llama
        and for an unknown attention, TypeError for another mesh or dtype.
        """
        layout = layout_of(mesh)
        check_attention(attention)
        dtype = inputs.floating_dtype(dtype)
        checkpoint = open_checkpoint(path)
        weights = load_weights(checkpoint, layout.put, dtype)
        return Llama(checkpoint.config, weights, checkpoint.tokenizer, mesh, attention)

    def on(self, mesh: Mesh | None) -> "Llama":
        """The same model on another mesh. On a CPU the weights stay where they are, shared."""
        weights = move_weights(self.weights, layout_of(mesh).put)
        return dataclasses.replace(self, weights=weights, mesh=mesh)

    def using(self, attention: str | ShardAttention) -> "Llama":
        """The same model with another attention towards the cache."""
        return dataclasses.replace(self, attention=attention)

    def logits(self, token_ids: Int[Array, "b l"]) -> Float[Array, "b l vocabulary"]:
        """One full causal pass without a cache; float32, or float64 for a model of float64."""
        x, rotation = self._start(token_ids)
        for w in self.weights.layers:
            x, _ = layers.extend_layer(x, w, rotation, static=self.static)
        return self.read_out(x)

    def layers_qkv(
        self, token_ids: Int[Array, "b l"]
    ) -> Iterator[
        tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]
    ]:
        """What each layer's attention gets in a full causal pass, rotary embedding included:
        queries, keys and values, layer by layer."""
        x, rotation = self._start(token_ids)
        for w in self.weights.layers:
            yield layers.queries_keys_values(x, w, rotation, self.static.config)
            x, _ = layers.extend_layer(x, w, rotation, static=self.static)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `capacity` tokens of each text, rounded up to a multiple of the
        devices that share them. Warns of more than the model was trained on."""
        capacity = inputs.check_capacity(capacity, self.config.context)
        inputs.check_rows("batch", self.layout, integer("batch", batch, 1))
        return self.empty_cache(batch, capacity)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """`new_cache`, of checked arguments."""
        c = self.config
        shape = batch, capacity, c.kv_heads, c.head_dim
        return caches.empty_cache(c.layers, shape, self.weights.embedding.dtype, self.layout)

    def prefill(
        self, prompts: inputs.Prompts, cache: Cache
    ) -> tuple[Float[Array, "b vocabulary"], Cache]:
        """Run prompts of any lengths: (logits after each, cache). `cache` is donated: do not use it
        afterwards.

        An empty cache whose keys p devices share takes them by Ring Attention, all at once, where
        the longest has p²/2 tokens or more; otherwise they go in chunks.

        Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary, and
        prompts that the cache has no room for.
        """
        inputs.check_cache(cache, self)
        prompts = inputs.check_prompts(prompts, self.config.vocabulary)
        lengths = [len(prompt) for prompt in prompts]
        if len(prompts) != len(cache.lengths):
            raise ValueError(f"prompts: expected {len(cache.lengths)}, got those of {lengths}")
        inputs.check_room(cache, lengths, "prompts")
        return prefill.run(self, prompts, cache)

    def extend(
        self,
        tokens: Int[Array, "b l"],
        cache: Cache,
        *,
        positions: Int[Array, "b l"] | None = None,
        mask: Bool[Array, "#b l l"] | None = None,
    ) -> tuple[Float[Array, "b l vocabulary"], NewEntries]:
        """Run tokens after the cached ones, without writing them: (logits, what to write).

        Every token sees the whole cache. mask[b, i, j] says whether token i sees token j of
        the same call; None is causal. positions defaults to those after the cached text.

        Raises ValueError for arguments that do not fit, and unless the cache has room for all
        the tokens. With a mask only some of them may be committed, so that room for one token of
        each text is enough. A token that does not see itself is padding.
        """
        x, new = self.hidden_states(tokens, cache, positions=positions, mask=mask)
        return self.read_out(x), new

    def hidden_states(
        self, tokens: Int[Array, "b l"], cache: Cache, *, positions=None, mask=None
    ) -> tuple[Float[Array, "b l width"], NewEntries]:
        """`extend` up to the last layer's output; `read_out` makes logits of it."""
        tokens = inputs.check_tokens(tokens, self.config.vocabulary, self.layout)
        inputs.check_cache(cache, self)
        positions, mask = inputs.check_new(tokens, cache, positions, mask)
        return self.run_layers(tokens, cache, positions, mask)

    def commit(
        self,
        cache: Cache,
        new: NewEntries,
        *,
        counts: Int[Array, " b"] | None = None,
        select: Int[Array, "b m"] | None = None,
    ) -> Cache:
        """Write what `extend` returned. `cache` is donated: do not use it afterwards.

        select: (b, m) which of the new tokens, in order, as indices; all when None
        counts: (b,) how many of those each text gets; all when None

        Raises ValueError for counts, indices or a number of texts that do not fit.
        """
        inputs.check_cache(cache, self)
        counts, select = inputs.check_commit(cache, new, counts, select)
        caches.wait_on_cpus(new, self.layout)
        written = [
            caches.append(cached, pair, cache.lengths, counts, select, layout=self.layout)
            for cached, pair in zip(cache.layers, new, strict=True)
        ]
        return Cache(*zip(*written, strict=True), caches.advance(cache.lengths, counts))

    def step(
        self, tokens: Int[Array, "b l"], cache: Cache
    ) -> tuple[Float[Array, "b l vocabulary"], Cache]:
        """`extend` and `commit` at once: (logits, cache). `cache` is donated: do not use it
        afterwards.

        Raises ValueError, before any work, for arguments that do not fit, or no room.
        """
        logits, new = self.extend(tokens, cache)
        return logits, self.commit(cache, new)

    def read_out(
        self, x: Float[Array, "b l width"], last: Int[Array, " b"] | None = None
    ) -> Float[Array, "b *l vocabulary"]:
        """The logits after each token's state, or (b, vocabulary) after each row's token `last`."""
        w = self.weights
        return layers.read_out(x, w.norm, w.head, last, epsilon=self.config.norm_epsilon)

    def run_layers(
        self, tokens, cache: Cache, positions, mask=None, *, see_cache: bool = True
    ) -> tuple[Float[Array, "b l width"], NewEntries]:
        """`hidden_states`, of checked arguments. see_cache: whether there is something in it."""
        w = self.weights
        x, rotation = layers.embed(tokens, positions, w.embedding, w.frequencies)
        new = []
        for layer, cached in zip(w.layers, cache.layers, strict=True):
            seen = {"cached": cached, "lengths": cache.lengths} if see_cache else {}
            x, pair = layers.extend_layer(x, layer, rotation, mask=mask, static=self.static, **seen)
            new.append(pair)
        return x, tuple(new)

    @functools.cached_property
    def layout(self) -> Layout:
        """How texts and their keys lie on the mesh."""
        return layout_of(self.mesh)

    @functools.cached_property
    def static(self) -> layers.Static:
        """What the layers' programs are compiled for: the same ones for any depth."""
        config = dataclasses.replace(self.config, layers=1)
        return layers.Static(config, self.layout, self.attention)

    def _start(self, token_ids) -> tuple[Float[Array, "b l width"], layers.Rotation]:
        tokens = inputs.check_tokens(token_ids, self.config.vocabulary, self.layout)
        positions = jnp.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return layers.embed(tokens, positions, self.weights.embedding, self.weights.frequencies)
