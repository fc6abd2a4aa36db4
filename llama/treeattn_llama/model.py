"""A Llama whose attention is a parameter, over a cache that is sharded along the text."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from treeattn.devices.mesh import AxisNames
from treeattn.idea.arrays import Array, integer
from treeattn.kernel.choice import Implementation, platform_of
from treeattn_llama import cache as caches
from treeattn_llama import dealing, dealt, exact, inputs, layers, prefill
from treeattn_llama.attentions import ShardAttention
from treeattn_llama.cache import Cache, NewEntries
from treeattn_llama.placement import Placement, check_texts, place_model
from treeattn_llama.reading.config import Config
from treeattn_llama.reading.files import open_checkpoint
from treeattn_llama.reading.tokenizer import Tokenizer
from treeattn_llama.static import check_attentions, static_of
from treeattn_llama.weights import Weights, load_weights
from treeattn.measured import CollectiveTimes


@dataclasses.dataclass(frozen=True, eq=False)
class Llama:
    """A model, on the devices of `mesh` (None: one device), and the attention it runs with.

    attention:      towards the cache: "tree", "ring", "pass_q", another method of `tree_decode`
                    by its name, or a function (`treeattn_llama.attentions.ShardAttention`); "auto":
                    for each step's number of new tokens the method that is fastest by `measured`
    prefill_with:   for prompts: "ring" or "ulysses" (a whole prompt at once, sharded along the
                    text), "chunks" (pieces that attend to the cache like any step), or a
                    function like `ring_attention`. None: "ring" on a mesh, else "chunks"
    implementation: as in `attend`; "exact" makes sums within a device exact, `exact` the model
    shard_weights:  each device holds a p-th of the weights as well ("Helix"): queries, keys and
                    values come together before the attention; by "reduce_scatter" and
                    "all_to_all" its merge leaves each device the heads that its part of the output
                    projection multiplies; the projection and the MLP end in a sum over the devices
    batch_axis:     the mesh's axes that share out a batch's texts: nothing crosses them. None: the
                    one called "batch", if there is one, as `kv_mesh` calls it; () for none
    head_axis:      those that share out the heads, and the weights with them (tensor parallelism):
                    two sums over them in a layer. None: "heads". The text has all other axes
    exact:          nothing but a text moves the bits of its logits (`treeattn_llama.exact`)
    wire:           the dtype in which the attention's merge sends outputs, float32's lse beside
                    them in the same message: "bfloat16", as serving systems do. None: as they are
    cache_dtype:    "int8" or "float8_e4m3fn" keep the cache in 8 bits, with a scale for each token
                    and key head (`treeattn.quantize`), by the plain implementation. All tokens see
                    keys and values so rounded, those of the same call and of `logits`, too
    measured:       for "auto": times of collectives or their file, as in `tree_decode`, read once;
                    "tree" where there is neither that nor a file that TREEATTN_MEASURED names
    """

    config: Config
    weights: Weights
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    attention: str | ShardAttention = "tree"
    prefill_with: str | Callable | None = None
    implementation: Implementation = None
    shard_weights: bool = False
    batch_axis: AxisNames | None = None
    head_axis: AxisNames | None = None
    exact: bool = False
    wire: DTypeLike | None = None
    measured: CollectiveTimes | str | Path | None = None
    cache_dtype: DTypeLike | None = None

    def __post_init__(self):
        inputs.check_exact(self)
        inputs.check_cache_dtype(self)
        inputs.check_mesh(self.mesh, self.shard_weights)
        check_attentions(self)

    def __repr__(self) -> str:
        """Everything but the weights, of which it says the dtype."""
        return f"Llama({', '.join(inputs.options_of(self))})"

    @staticmethod
    def load(
        path: str | Path | None = None,
        *,
        mesh: Mesh | None = None,
        dtype=None,
        weights: str = "float32",
        shard_weights: bool = False,
        meanwhile: Callable[["Llama"], None] = lambda first: None,
        **options,
    ) -> "Llama":
        """A GGUF file, a Hugging Face directory, or (None) the packaged SmolLM2-135M-Instruct.

        mesh:    the weights are copied to each of its devices; simulated ones share one copy.
                 Along the axis "heads" of `kv_mesh(heads=…)`, or head_axis, each device has those
                 of its own heads, and of its part of the MLP's width, instead
        shard_weights: they are dealt over all devices but those along the batch's axis
        dtype:   of the weights and of what is computed with them; None keeps the checkpoint's
                 (float32 where it is quantized; the embedding's for what is computed)
        weights: "int8" keeps matrices in 8 bits (`treeattn_llama.int8`): a quarter of float32's
                 bytes, less time for a step on a CPU, float32 activations, no gradients
        meanwhile: called, in a thread, with a model of the first layer, while the others are read
        options: attention, prefill_with, implementation, batch_axis, head_axis, exact, wire,
                 measured, cache_dtype

        Raises FileNotFoundError where nothing is there, ValueError for what is no readable Llama,
        for axes that the mesh lacks or that cannot share the key heads, and for measured times that
        `tree_decode` would refuse; TypeError for another mesh or dtype.
        """
        inputs.check_mesh(mesh, shard_weights)
        dtype = inputs.check_weights(weights, inputs.floating_dtype(dtype))
        checkpoint = open_checkpoint(path)
        options = options | {"mesh": mesh, "shard_weights": shard_weights}

        def with_weights(read: Weights) -> Llama:
            config = dataclasses.replace(checkpoint.config, layers=len(read.layers))
            return Llama(config, read, checkpoint.tokenizer, **options)

        axes = (options.get(name) for name in ("batch_axis", "head_axis"))
        place = place_model(checkpoint.config, mesh, shard_weights, *axes)
        put = dealing.placing(checkpoint.config, place)
        read = load_weights(
            checkpoint, put, dtype, lambda first: meanwhile(with_weights(first)), weights == "int8"
        )
        return with_weights(read)

    def on(self, mesh: Mesh | None, **options) -> "Llama":
        """The same model on another mesh, perhaps with other options. On a CPU whole weights stay
        where they are, shared. batch_axis and head_axis are None unless given."""
        where = {"mesh": mesh, "shard_weights": self.shard_weights and mesh is not None}
        where |= {"batch_axis": None, "head_axis": None}
        model = dataclasses.replace(self, **where | options)
        weights = dealing.move(self.weights, self.config, self.place, model.place)
        return dataclasses.replace(model, weights=weights)

    def using(self, attention: str | ShardAttention, **options) -> "Llama":
        """The same model with another attention towards the cache, perhaps with other options: a
        ValueError for those that `on` takes, since weights lie otherwise then."""
        model = dataclasses.replace(self, attention=attention, **options)
        if model.place != self.place:
            raise ValueError(f"using: call on(mesh, …) for {sorted(options)}: weights would move")
        return model

    def logits(self, token_ids: Int[Array, "b l"]) -> Float[Array, "b l vocabulary"]:
        """One full causal pass without a cache; float32, or float64 for a model of float64."""
        x, rotation = self._embed(self._tokens(token_ids))
        for w in self.weights.layers:
            x, _ = layers.extend_layer(x, w, rotation, static=static_of(self))
        return self.read_out(x)

    def layer_qkv(
        self, token_ids: Int[Array, "b l"], layer: int
    ) -> tuple[Float[Array, "b l h d"], Float[Array, "b l h_kv d"], Float[Array, "b l h_kv d"]]:
        """What one layer's attention gets in a full causal pass, rotary embedding included:
        q (b, l, heads, head_dim) and k, v (b, l, kv_heads, head_dim)."""
        layer = integer("layer", layer, 0, self.config.layers - 1)
        return next(itertools.islice(self.layers_qkv(token_ids), layer, None))

    def layers_qkv(self, token_ids: Int[Array, "b l"]) -> Iterator[tuple[Array, Array, Array]]:
        """`layer_qkv` of one layer after the other, in a single pass."""
        x, rotation = self._embed(self._tokens(token_ids))
        static = static_of(self)
        for w in self.weights.layers:
            yield self._kind.queries_keys_values(x, w, rotation, static.config, self.place)
            x, _ = layers.extend_layer(x, w, rotation, static=static)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` texts of up to `capacity` tokens (rounded up), sharded.

        Warns of more tokens than the model was trained on: nothing fails, but texts get worse.
        """
        c = self.config
        dtype = self.cache_dtype or self.weights.embedding.dtype
        batch = integer("batch", batch, 1)
        check_texts("batch", self.place, batch)
        capacity = inputs.warn_of_capacity(capacity, c.context)
        shape = batch, capacity, c.kv_heads, c.head_dim, dtype
        return caches.new_cache(c.layers, *shape, self.place.layout)

    def grow(self, cache: Cache, capacity: int) -> Cache:
        """The same texts in a larger cache. Every new capacity compiles a step anew."""
        inputs.check_cache(cache, self)
        return caches.grow(cache, capacity, self.place.layout)

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
        the tokens; with a mask, of which they may be candidates, for one of each text that has
        any (that sees itself).
        """
        x, new = self.states(tokens, cache, positions=positions, mask=mask)
        return self.read_out(x), new

    def states(self, tokens, cache: Cache, *, positions=None, mask=None):
        """`extend` up to the last layer's output (b, l, width); `read_out` makes logits of it."""
        tokens = self._tokens(tokens)
        inputs.check_cache(cache, self)
        positions, mask = inputs.check_new(tokens, cache, positions, mask)
        if mask is None:
            inputs.check_room(cache, tokens.shape[1])
        else:
            inputs.check_room_for_one(cache, mask)
        return self._run_layers(tokens, cache, positions, mask)

    def commit(
        self,
        cache: Cache,
        new: NewEntries,
        *,
        counts: Int[Array, " b"] | None = None,
        select: Int[Array, "b m"] | None = None,
    ) -> Cache:
        """Write what `extend` returned. It gives up `cache`.

        select: (b, m) which of the new tokens, in order, as indices; all when None
        counts: (b,) how many of those each text gets; all when None

        Raises ValueError for counts, indices or a number of texts that do not fit.
        """
        inputs.check_cache(cache, self)
        counts, select = inputs.check_commit(cache, new, counts, select)
        return self._write(cache, new, counts, select)

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

        Raises ValueError, before any work, for arguments that do not fit, or no room.
        """
        tokens = self._tokens(tokens)
        inputs.check_cache(cache, self)
        if last and not tokens.shape[1]:
            raise ValueError(f"last: expected at least one token, got tokens {tokens.shape}")
        counts = inputs.check_counts(counts, tokens.shape[1], cache)
        x, new = self._run_layers(tokens, cache, positions, mask)
        cache = self._write(cache, new, counts)
        return self.read_out(x, counts - 1 if last else None), cache

    def prefill(
        self,
        prompts: inputs.Prompts,
        cache: Cache,
        *,
        chunk: int = 1024,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> tuple[Float[Array, "b vocabulary"], Cache]:
        """Run prompts of any lengths: (logits after each, cache). It gives up `cache`.

        An empty cache takes them as `prefill_with` says; after a text they go in chunks of
        `chunk` tokens. progress is called with the number of tokens done.

        Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary,
        prompts that the cache has no room for, and a chunk of less than 1.
        """
        return prefill.run(self, prompts, cache, integer("chunk", chunk, 1), progress)[:2]

    def _run_layers(self, tokens, cache, positions=None, mask=None, see_cache=True, last=None):
        """(the last layer's output, what all layers have to write), as by `layers.run_layers`."""
        positions, mask = inputs.check_new(tokens, cache, positions, mask)
        static = static_of(self, tokens.shape if see_cache else None)
        run = self._programs(tokens.shape[1]).run
        how = {"static": static, "see_cache": see_cache, "exact": self.exact}
        return run(self.weights, tokens, cache, positions, mask, last, **how)

    def _write(self, cache: Cache, new: NewEntries, counts, select=None) -> Cache:
        caches.wait_on_cpus(new, self.mesh)
        write = self._programs(new[0][0].shape[1]).write
        given = new, cache.lengths, counts, select
        return Cache(*write((cache.k, cache.v), *given, self.place.layout))

    def _programs(self, tokens: int) -> layers.Programs:
        return layers.programs(platform_of(jax.tree.leaves(self.weights.embedding)[0]), tokens)

    @property
    def _kind(self) -> layers.Kind:
        if self.exact:
            return exact.EXACT
        return layers.PLAIN if self.place.text_alone else dealt.DEALT

    @functools.cached_property
    def place(self) -> Placement:
        """How the model lies on its devices."""
        axes = self.batch_axis, self.head_axis
        return place_model(self.config, self.mesh, self.shard_weights, *axes)

    @functools.cached_property
    def _one_layer(self) -> Config:
        """The same programs for any depth."""
        return dataclasses.replace(self.config, layers=1)

    def _embed(self, tokens, lengths=None, along=()):
        how = {"place": self.place, "along": along, "exact": self.exact}
        w = self.weights
        return layers.embed(tokens, w.embedding, w.frequencies, lengths, **how)

    def read_out(self, x, last=None, along=()) -> Float[Array, "b *l vocabulary"]:
        """The logits after each token's state, or (b, vocabulary) after each row's token `last`."""
        w = self.weights
        how = {"config": self._one_layer, "place": self.place, "along": along}
        return layers.to_logits(x, w.norm, w.head, last, **how, exact=self.exact)

    def _tokens(self, tokens) -> Array:
        return inputs.check_tokens(tokens, self.config.vocabulary, self.place)
