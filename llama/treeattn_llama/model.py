"""A Llama whose attention is a parameter, over a cache that is sharded along the text."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from treeattn.checks import Array, integer
from treeattn_llama import calls, layers, prefill
from treeattn_llama.arguments import Hidden, Keys, Lengths, Logits, Queries, Tokens
from treeattn_llama.attention import ShardAttention, check_attention
from treeattn_llama.cache import Cache, advance, append, wait_on_cpus
from treeattn_llama.calls import NewEntries
from treeattn_llama.config import Config
from treeattn_llama.files import open_checkpoint
from treeattn_llama.text_shards import TextShards, text_shards_of
from treeattn_llama.tokenizer import Tokenizer
from treeattn_llama.weights import Weights, load_weights, move_weights


@dataclasses.dataclass(frozen=True, eq=False)
class Llama:
    """A model on the devices of a mesh, and the attention that it runs with.

    mesh:      None for one device. An axis called "batch" shards the texts of a batch. All other
               axes shard the keys of each text: token i is on device i mod p. The weights are
               replicated; simulated devices share one copy. All axes count as Auto axes, so JAX
               refuses the model's programs inside `jax.set_mesh` of a mesh with Explicit axes.
    attention: "tree", "ring", "butterfly", or a function (`ShardAttention`), for the cached keys
    """

    config: Config
    weights: Weights = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(default=None, repr=False)
    mesh: Mesh | None = None
    attention: str | ShardAttention = "tree"

    def __post_init__(self):
        check_attention(self.attention)
        text_shards_of(self.mesh)

    @staticmethod
    def load(
        path: str | Path | None = None,
        *,
        mesh: Mesh | None = None,
        attention: str | ShardAttention = "tree",
        dtype=None,
    ) -> "Llama":
        """The model of a GGUF file, of a Hugging Face directory, or (None) the packaged
        SmolLM2-135M-Instruct.

        mesh, attention: the fields of `Llama`
        dtype: the dtype of weights, activations and cache. If it is None, each weight keeps the
               dtype that it is stored in (quantized weights become float32), and activations and
               cache have the embedding's.

        Nothing in a checkpoint runs as Python, and its chat template runs in a sandbox. But neither
        a tokenizer.json nor a template is bounded in time and memory, so load a stranger's files in
        a process with limits of both (`ulimit -t -v`, or a container's).

        Raises FileNotFoundError if the path does not exist, ValueError if it is not a Llama, or the
        file is damaged, and TypeError for another attention, mesh or dtype.
        """
        shards = text_shards_of(mesh)
        check_attention(attention)
        dtype = calls.floating_dtype(dtype)
        checkpoint = open_checkpoint(path)
        weights = load_weights(checkpoint, shards.put, dtype)
        return Llama(checkpoint.config, weights, checkpoint.tokenizer, mesh, attention)

    def on(self, mesh: Mesh | None) -> "Llama":
        """The same model on another mesh. On a CPU both models share the weights' memory."""
        weights = move_weights(self.weights, text_shards_of(mesh).put)
        return dataclasses.replace(self, weights=weights, mesh=mesh)

    def using(self, attention: str | ShardAttention) -> "Llama":
        """The same model with another attention for the cached keys."""
        return dataclasses.replace(self, attention=attention)

    def logits(self, token_ids: Tokens) -> Logits:
        """One full causal pass without a cache, in float32, or float64 if the weights are."""
        return self.read_out(self.run_layers(*self._tokens_and_positions(token_ids))[0])

    def layers_qkv(self, token_ids: Tokens) -> Iterator[tuple[Queries, Keys, Keys]]:
        """The queries, keys and values of each layer in a full causal pass, after the rotary
        embedding."""
        x, rotation = self.embed(*self._tokens_and_positions(token_ids))
        for w in self.weights.layers:
            yield layers.queries_keys_values(x, w, rotation, self.config)
            x, _ = layers.extend_layer(x, w, rotation, static=self.static)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `capacity` tokens of each text, rounded up to a multiple of the
        devices that share them.

        Warns if the capacity is more than the model was trained on.
        """
        capacity = calls.check_capacity(capacity, self.config.context)
        calls.check_batch("batch", self.shards, integer("batch", batch, 1))
        c = self.config
        shards = self.shards
        shape = batch, shards.devices * -(-capacity // shards.devices), c.kv_heads, c.head_dim
        dtype = self.weights.embedding.dtype
        device = shards.sharding(shards.of_keys)
        k, v = (
            tuple(jnp.zeros(shape, dtype, device=device) for _ in range(c.layers)) for _ in "kv"
        )
        return Cache(k, v, shards.put(np.zeros(batch, np.int32)))

    def prefill(
        self, prompts: calls.Prompts, cache: Cache
    ) -> tuple[Float[Array, "b vocabulary"], Cache]:
        """Run prompts of any lengths: (logits after each, cache). `cache` is donated: do not use it
        afterwards.

        If the cache is empty, p > 1 devices share its keys, and the longest prompt has p²/2 tokens
        or more, the prompts run all at once, by Ring Attention. Otherwise they run in chunks.

        Raises ValueError, before any work, for an empty prompt, for ids outside the vocabulary, and
        if the cache has no room for a prompt.
        """
        calls.check_cache(cache, self)
        prompts = calls.check_prompts(prompts, self.config.vocabulary)
        lengths = [len(prompt) for prompt in prompts]
        if len(prompts) != len(cache.lengths):
            raise ValueError(f"prompts: expected {len(cache.lengths)}, got those of {lengths}")
        calls.check_room(cache, lengths, "prompts")
        return prefill.run(self, prompts, cache)

    def extend(
        self,
        tokens: Tokens,
        cache: Cache,
        *,
        positions: Tokens | None = None,
        mask: Bool[Array, "b l l"] | None = None,
    ) -> tuple[Logits, NewEntries]:
        """Run tokens after the cached ones, without writing them: (logits, their keys and values,
        for `commit`).

        positions: the tokens' places in their texts; None for those after the cached tokens
        mask:      mask[b, i, j] says whether token i sees token j of the same call; None is causal.
                   Every token sees the whole cache. A token that does not see itself is padding.

        Raises ValueError if arguments do not fit, or the cache has no room for all tokens. With a
        mask, room for one token of each text is enough, because only some tokens of a tree are
        committed.
        """
        tokens = calls.check_tokens(tokens, self.config.vocabulary, self.shards)
        calls.check_cache(cache, self)
        positions, mask = calls.check_new(tokens, cache, positions, mask)
        x, new = self.run_layers(tokens, positions, mask, cache)
        return self.read_out(x), new

    def commit(
        self,
        cache: Cache,
        new: NewEntries,
        *,
        counts: Lengths | None = None,
        select: Int[Array, "b m"] | None = None,
    ) -> Cache:
        """Write keys and values from `extend` into the cache. `cache` is donated: do not use it
        afterwards.

        select: (b, m) indices of the new tokens to write, in order; None for all
        counts: (b,) the number of those for each text; None for all

        Raises ValueError if counts, indices or the number of texts do not fit, and TypeError for
        `new` that `extend` cannot have returned.
        """
        calls.check_cache(cache, self)
        counts, select = calls.check_commit(cache, new, counts, select)
        wait_on_cpus(new, self.shards)
        written = [
            append(cached, pair, cache.lengths, counts, select, shards=self.shards)
            for cached, pair in zip(cache.layers, new, strict=True)
        ]
        return Cache(*zip(*written, strict=True), advance(cache.lengths, counts))

    def step(self, tokens: Tokens, cache: Cache) -> tuple[Logits, Cache]:
        """`extend` and `commit` at once: (logits, cache). `cache` is donated: do not use it
        afterwards.

        Raises ValueError, before any work, if arguments do not fit, or the cache has no room.
        """
        logits, new = self.extend(tokens, cache)
        return logits, self.commit(cache, new)

    def read_out(self, x: Hidden, last: Lengths | None = None) -> Float[Array, "b *l vocabulary"]:
        """The logits after each token, from the last layer's output x; or (b, vocabulary), those
        after token `last` of each text."""
        w = self.weights
        return layers.read_out(x, w.norm, w.head, last, epsilon=self.config.norm_epsilon)

    def run_layers(
        self, tokens, positions, mask=None, cache: Cache | None = None
    ) -> tuple[Hidden, NewEntries]:
        """`extend` up to the last layer's output, without checks.

        cache: None if it is empty, because the program without it is faster
        """
        x, rotation = self.embed(tokens, positions)
        new = []
        for i, w in enumerate(self.weights.layers):
            seen = {"cached": (cache.k[i], cache.v[i]), "lengths": cache.lengths} if cache else {}
            x, pair = layers.extend_layer(x, w, rotation, mask=mask, static=self.static, **seen)
            new.append(pair)
        return x, tuple(new)

    @functools.cached_property
    def shards(self) -> TextShards:
        """How texts and their keys are sharded over the mesh."""
        return text_shards_of(self.mesh)

    @functools.cached_property
    def static(self) -> layers.Static:
        """The static argument of the layers' programs."""
        return layers.Static(self.config, self.shards, self.attention)

    def _tokens_and_positions(self, token_ids) -> tuple[Tokens, Tokens]:
        tokens = calls.check_tokens(token_ids, self.config.vocabulary, self.shards)
        return tokens, jnp.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    def embed(self, tokens, positions) -> tuple[Hidden, layers.Rotation]:
        """The first layer's input, and the rotation of the tokens."""
        w = self.weights
        return layers.embed(tokens, positions, w.embedding, w.frequencies)
