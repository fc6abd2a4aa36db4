"""A Llama whose attention is a parameter, over a cache that is sharded along the text."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from treeattn.idea.arrays import Array
from treeattn.kernel.attend import CAUSAL_BLOCK
from treeattn.llama import cache as caches
from treeattn.llama import steps
from treeattn.llama.cache import Cache, NewKeys, ShardAttention
from treeattn.llama.config import Config
from treeattn.llama.files import open_checkpoint
from treeattn.llama.parallel import to_cache, whole
from treeattn.llama.steps import How
from treeattn.llama.tokenizer import Tokenizer
from treeattn.llama.weights import Weights, load_weights, place


@dataclasses.dataclass(frozen=True)
class Llama:
    """A model, on the devices of `mesh` (None: one device), and the attention it runs with.

    attention:      towards the cache: "tree", "butterfly", "gather", "ring", "pass_q", or a
                    function (`treeattn.llama.cache.ShardAttention`)
    prefill_with:   for prompts: "ring" or "ulysses" (a whole prompt at once, sharded along the
                    text), "chunks" (pieces that attend to the cache like any step), or a
                    function like `ring_attention`. None: "ring" on a mesh, else "chunks"
    implementation: as in `attend`: "blockwise", "flash", or None
    """

    config: Config
    weights: Weights
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    attention: str | ShardAttention = "tree"
    prefill_with: str | Callable | None = None
    implementation: str | None = None

    def __post_init__(self):
        whole(self.prefill_with, self.mesh)
        to_cache(self.attention, self.implementation)

    @staticmethod
    def load(
        path: str | Path | None = None, *, mesh: Mesh | None = None, dtype=None, **options
    ) -> "Llama":
        """A GGUF file, a Hugging Face directory, or (None) the packaged SmolLM2-135M-Instruct.

        mesh:    the weights are copied to each of its devices; simulated ones share one copy
        dtype:   of the weights and of what is computed with them; None keeps the checkpoint's
                 (float32 where it is quantized)
        options: attention, prefill_with, implementation

        Raises FileNotFoundError when there is no such file or the packaged model is not
        installed, ValueError for whatever is not a readable Llama checkpoint.
        """
        checkpoint = open_checkpoint(path)
        weights = load_weights(checkpoint, mesh, dtype)
        return Llama(checkpoint.config, weights, checkpoint.tokenizer, mesh, **options)

    def on(self, mesh: Mesh | None, **options) -> "Llama":
        """The same model on another mesh, perhaps with other options.

        On a CPU the weights stay where they are, shared.
        """
        weights = jax.tree.map(lambda x: place(np.asarray(x), mesh), self.weights)
        if self.config.tied:
            weights = weights._replace(head=weights.embedding)
        return dataclasses.replace(self, mesh=mesh, weights=weights, **options)

    def using(self, attention: str | ShardAttention, **options) -> "Llama":
        """The same model with another attention towards the cache, perhaps with other options."""
        return dataclasses.replace(self, attention=attention, **options)

    def logits(self, token_ids: Int[Array, "b l"]) -> Float[Array, "b l vocabulary"]:
        """One full causal pass without a cache; float32, or float64 for a model of float64."""
        x, turn = self._embed(self._tokens(token_ids))
        how = dataclasses.replace(self._how, attention=None)
        for w in self.weights.layers:
            x, _ = steps.extend_layer(x, w, turn, None, None, None, how=how)
        return self._logits(x)

    def layer_qkv(
        self, token_ids: Int[Array, "b l"], layer: int
    ) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
        """What one layer's attention gets in a full causal pass, rotary embedding included:
        q (b, l, heads, head_dim) and k, v (b, l, kv_heads, head_dim)."""
        if not 0 <= layer < self.config.layers:
            raise ValueError(f"layer: expected 0 … {self.config.layers - 1}, got {layer}")
        return next(itertools.islice(self.layers_qkv(token_ids), layer, None))

    def layers_qkv(self, token_ids: Int[Array, "b l"]) -> Iterator[tuple[Array, Array, Array]]:
        """`layer_qkv` of one layer after the other, in a single pass."""
        x, turn = self._embed(self._tokens(token_ids))
        how = dataclasses.replace(self._how, attention=None)
        for w in self.weights.layers:
            yield steps.layer_qkv(x, w, turn, config=self.config)
            x, _ = steps.extend_layer(x, w, turn, None, None, None, how=how)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` texts of up to `capacity` tokens (rounded up), sharded."""
        c, dtype = self.config, self.weights.embedding.dtype
        return caches.new_cache(c.layers, batch, capacity, c.kv_heads, c.head_dim, dtype, self.mesh)

    def grow(self, cache: Cache, capacity: int) -> Cache:
        """The same texts in a larger cache. Every new capacity compiles a step anew."""
        return caches.grow(cache, capacity, self.mesh)

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
        x, new = self._run_layers(self._tokens(tokens), cache, positions, mask)
        return self._logits(x), new

    def commit(
        self,
        cache: Cache,
        new: NewKeys,
        *,
        counts: Int[Array, " b"] | None = None,
        select: Int[Array, "b m"] | None = None,
    ) -> Cache:
        """Write what `extend` returned. It gives up `cache`.

        select: (b, m) which of the new tokens, in order; all when None
        counts: (b,) how many of those each text gets; all when None
        """
        m = (select if select is not None else new.k[0]).shape[1]
        counts = self._counts(counts, m, cache)
        steps.wait_on_cpus(new, self.mesh)
        layers = [
            steps.commit_layer(old, new, cache.lengths, counts, select, mesh=self.mesh)
            for old, new in zip(cache.layers, new.layers, strict=True)
        ]
        return Cache(*zip(*layers, strict=True), steps.advance(cache.lengths, counts))

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
        """`extend` and `commit` at once: (logits, cache). It gives up `cache`.

        counts: (b,) how many of the tokens are real, the rest of a row being padding
        last:   only the logits after each row's last real token, (b, vocabulary)
        """
        tokens = self._tokens(tokens)
        counts = self._counts(counts, tokens.shape[1], cache)
        x, new = self._run_layers(tokens, cache, positions, mask)
        cache = self.commit(cache, new, counts=counts)
        return self._logits(x, counts - 1 if last else None), cache

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: Cache,
        *,
        chunk: int = 1024,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> tuple[Float[Array, "b vocabulary"], Cache]:
        """Run prompts of any lengths: (logits after each, cache). It gives up `cache`.

        An empty cache takes them as `prefill_with` says; after a text they go in chunks of
        `chunk` tokens. progress is called with the number of tokens done.

        Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary, and
        prompts that the cache has no room for.
        """
        lengths = np.array([len(p) for p in prompts], np.int32)
        if len(prompts) != len(cache.lengths) or not lengths.all():
            raise ValueError(
                f"prompts: expected {len(cache.lengths)}, none of them empty, got lengths "
                f"{lengths.tolist()}"
            )
        self._check_room(cache, lengths, "prompts")
        for prompt in prompts:
            self._tokens(np.asarray(prompt)[None])
        attention, longest = whole(self.prefill_with, self.mesh), int(lengths.max())
        empty = not np.asarray(cache.lengths).any()
        if attention is not None and empty:
            result = self._prefill_whole(prompts, lengths, cache, attention)
            progress(int(lengths.sum()))
            return result
        tokens, logits = _padded(prompts, longest, max(chunk, 16)), None
        for start in range(0, longest, chunk):
            # The last piece is padded to a power of two: few lengths, each of which compiles.
            size = min(chunk, max(16, 1 << (longest - start - 1).bit_length()))
            counts = np.clip(lengths - start, 0, size)
            piece = tokens[:, start : start + size]
            # In a long piece the last layer computes only what is read of it. In a short one
            # that would save less than it takes to compile.
            last = counts - 1 if size > CAUSAL_BLOCK else None
            x, keys = self._run_layers(piece, cache, read=start > 0 or not empty, last=last)
            cache = self.commit(cache, keys, counts=counts)
            new = self._logits(x, counts - 1)
            logits = new if logits is None else steps.choose(counts > 0, new, logits)
            progress(int(counts.sum()))
        return logits, cache

    def _prefill_whole(self, prompts, lengths, cache: Cache, attention):
        longest, p = int(lengths.max()), caches.shards_of(self.mesh)
        # Padded to a few lengths only, each of which compiles; p² is what `fill` deals out.
        coarse = 1 << max(longest.bit_length() - 3, 0)
        tokens = _padded(prompts, longest, p * p * -(-coarse // (p * p)))
        along = NamedSharding(self.mesh, P(None, caches.axes_of(self.mesh)))
        tokens = jax.make_array_from_callback(tokens.shape, along, lambda index: tokens[index])
        x, turn = self._embed(tokens)
        how = dataclasses.replace(self._how, attention=None)  # the same program for all
        layers = []
        for w, old in zip(self.weights.layers, cache.layers, strict=True):
            x, old = steps.prefill_layer(x, w, turn, old, how=how, attention=attention)
            layers.append(old)
        cache = Cache(*zip(*layers, strict=True), steps.advance(cache.lengths, lengths))
        return self._logits(x, lengths - 1), cache

    @property
    def _how(self) -> How:
        attention = to_cache(self.attention, self.implementation)
        return How(self.config, self.mesh, attention, self.implementation)

    def _run_layers(
        self, tokens, cache: Cache, positions=None, mask=None, read: bool = True, last=None
    ) -> tuple[Array, NewKeys]:
        """The last layer's output, and all layers' new keys.

        read: whether they see the cache; last: (b,) as in `steps.run_layer`, for the last layer
        """
        _check_new(tokens, cache, positions, mask)
        x, turn = self._embed(tokens, cache, positions)
        how, lengths, layers = self._how, cache.lengths, []
        if not read:
            how, lengths = dataclasses.replace(how, attention=None), None
        for i, (w, old) in enumerate(zip(self.weights.layers, cache.layers, strict=True)):
            old = old if read else None
            wanted = last if i == self.config.layers - 1 else None
            x, new = steps.extend_layer(x, w, turn, mask, old, lengths, wanted, how=how)
            layers.append(new)
        return x, NewKeys(*zip(*layers, strict=True))

    def _embed(self, tokens, cache: Cache | None = None, positions=None):
        w, lengths = self.weights, None if cache is None else cache.lengths
        return steps.embed(w.embedding, w.frequencies, tokens, positions, lengths)

    def _logits(self, x, last=None):
        w, epsilon = self.weights, self.config.norm_epsilon
        return steps.logits(x, w.norm, w.head, last, epsilon=epsilon)

    def _counts(self, counts, m: int, cache: Cache) -> Array:
        """`counts` as int32, all m when None, after checking that they fit."""
        batch = len(cache.lengths)
        counts = np.full(batch, m) if counts is None else counts
        if not isinstance(counts, jax.Array):
            counts = np.asarray(counts, np.int32)
        if counts.shape != (batch,):
            raise ValueError(f"counts: expected shape ({batch},), one a text, got {counts.shape}")
        self._check_room(cache, counts)
        return counts

    def _check_room(self, cache: Cache, counts, name: str = "tokens") -> None:
        """Raise a ValueError unless `counts` more tokens fit (or are being traced)."""
        if isinstance(cache.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
            return
        needed = int(np.max(np.asarray(cache.lengths) + np.asarray(counts)))
        if needed > cache.capacity:
            raise ValueError(f"{name}: {needed} tokens do not fit into a cache of {cache.capacity}")

    def _tokens(self, tokens) -> Array:
        """`tokens` as an array, after checking them (unless they are being traced)."""
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens: expected integers (batch, length), got {tokens.dtype} {tokens.shape}"
            )
        if not isinstance(tokens, jax.core.Tracer) and tokens.size:
            low, high = int(np.min(tokens)), int(np.max(tokens))
            if low < 0 or high >= self.config.vocabulary:
                raise ValueError(
                    f"tokens: expected ids from 0 to {self.config.vocabulary - 1}, got "
                    f"{low if low < 0 else high}"
                )
        return tokens


def _check_new(tokens, cache: Cache, positions, mask) -> None:
    """Raise a ValueError for a step's arguments that do not fit each other."""
    b, l = tokens.shape
    if b != len(cache.lengths):
        raise ValueError(f"tokens: the cache has {len(cache.lengths)} texts, got {b} rows")
    if positions is not None and positions.shape != (b, l):
        raise ValueError(f"positions: expected shape {(b, l)}, got {positions.shape}")
    if mask is not None and (mask.shape not in ((b, l, l), (1, l, l)) or mask.dtype != bool):
        raise ValueError(f"mask: expected booleans {(b, l, l)}, got {mask.dtype} {mask.shape}")


def _padded(prompts, longest: int, multiple: int) -> np.ndarray:
    """The prompts as rows, filled up with zeros to a multiple."""
    tokens = np.zeros((len(prompts), multiple * -(-longest // multiple)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens
