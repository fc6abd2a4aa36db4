"""Drafts by a model: any smaller Llama, or the first layers of the one that is to be helped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from treeattn.llama.model import Llama
from treeattn.llama.speculation.candidates import Drawn, Seen, Texts
from treeattn.trees.token_tree import TokenTree, ancestor_mask, depths


def first_layers(model: Llama, layers: int | None = None) -> Llama:
    """The model with its first layers only (a quarter of them when None), sharing its weights."""
    layers = max(model.config.layers // 4, 1) if layers is None else layers
    if not 1 <= layers <= model.config.layers:
        raise ValueError(f"layers: expected 1 to {model.config.layers}, got {layers}")
    config = dataclasses.replace(model.config, layers=layers)
    weights = model.weights._replace(layers=model.weights.layers[:layers])
    return dataclasses.replace(model, config=config, weights=weights)


@functools.partial(jax.jit, static_argnames="k")
def _log_likeliest(logits, k):
    return jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), k)


class _Reader:
    """A model that reads along: its own cache of the texts, and trees of candidates after them."""

    def __init__(self, model: Llama):
        self.model, self.vocabulary = model, model.config.vocabulary
        self._texts, self._read, self._cache = [], None, None

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        self._texts = texts

    def _after_texts(self):
        """(b, vocabulary) the logits after each text. Reads what has been added since."""
        texts = [[int(t) for t in text] for text in self._texts]
        old, self._read = self._read, texts
        room = max(len(text) for text in texts)
        known = old is not None and len(old) == len(texts)
        if not known or any(t[: len(o)] != o for t, o in zip(texts, old, strict=True)):
            # Capacities are powers of two, so that few of them are compiled.
            capacity = max(256, 1 << (2 * room - 1).bit_length())
            self._cache = self.model.new_cache(len(texts), capacity)
            self._logits, self._cache = self.model.prefill(texts, self._cache)
            return self._logits
        if room > self._cache.capacity:
            self._cache = self.model.grow(self._cache, 2 * self._cache.capacity)
        new = [text[len(o) :] for text, o in zip(texts, old, strict=True)]
        counts = np.array([len(n) for n in new], np.int32)
        if counts.any():
            tokens = np.zeros((len(new), _few(int(counts.max()))), np.int32)
            for row, n in zip(tokens, new, strict=True):
                row[: len(n)] = n
            logits, self._cache = self.model.step(tokens, self._cache, counts=counts, last=True)
            self._logits = jnp.where((counts > 0)[:, None], logits, self._logits)
        return self._logits

    def _after_nodes(self, tokens, parents, first):
        """(b, n, vocabulary) the logits after the tree's nodes from `first` on; arrays (b, l)."""
        l = tokens.shape[1]
        pad = [(0, 0), (0, _few(l) - l)]
        tokens, parents = np.pad(tokens, pad), np.pad(parents, pad, constant_values=-1)
        lengths = np.array([len(text) for text in self._read], np.int32)
        positions = (lengths[:, None] + depths(parents)).astype(np.int32)
        mask = ancestor_mask(parents)
        logits, _ = self.model.extend(tokens, self._cache, positions=positions, mask=mask)
        return logits[:, first:l]


def _few(n: int) -> int:
    """The next power of two: few sizes, each of which compiles."""
    return 1 << max(n - 1, 0).bit_length()


class LlamaDraft(_Reader):
    """Beam search by a model: at each depth its `width` most probable paths are read on.

    model: with the vocabulary of the one that it drafts for; depth: the longest path
    All their `width` likeliest continuations are candidates (as in EAGLE-2).
    """

    def __init__(self, model: Llama, *, depth: int = 4, width: int = 4):
        super().__init__(model)
        self.depth, self.width = depth, min(width, self.vocabulary)

    def propose(self, budget: int):
        logits = np.asarray(self._after_texts())[:, None]
        batch = len(logits)
        row = np.arange(batch)[:, None]
        read = np.zeros((3, batch, 0), int)  # the nodes read on: tokens, parents there, numbers
        tokens, parents, scores = (np.zeros((batch, 0)) for _ in range(3))
        above, path = (
            np.full((batch, 1), -1),
            np.zeros((batch, 1)),
        )  # the nodes whose logits these are
        for level in range(self.depth):
            values, ids = (np.asarray(x) for x in _log_likeliest(logits, self.width))
            total = (path[..., None] + values).reshape(batch, -1)
            count, size = tokens.shape[1], read.shape[2]
            number = above if size == 0 else read[2][row, above]
            tokens = np.concatenate([tokens, ids.reshape(batch, -1)], axis=1)
            scores = np.concatenate([scores, values.reshape(batch, -1)], axis=1)
            parents = np.concatenate([parents, np.repeat(number, self.width, axis=1)], axis=1)
            if level == self.depth - 1:
                break
            kept = np.argsort(-total, axis=1, kind="stable")[:, : self.width]
            token = ids.reshape(batch, -1)[row, kept]
            parent = np.repeat(above, self.width, axis=1)[row, kept]
            read = np.concatenate([read, np.stack([token, parent, count + kept])], axis=2)
            path, above = (
                total[row, kept],
                np.broadcast_to(np.arange(size, read.shape[2]), kept.shape),
            )
            logits = self._after_nodes(read[0].astype(np.int32), read[1].astype(np.int32), size)
        sizes = np.full(batch, tokens.shape[1], np.int32)
        tree = TokenTree(tokens.astype(np.int32), parents.astype(np.int32), sizes)
        return tree, np.minimum(scores.astype(np.float64), 0)


class DrawnDraft(_Reader):
    """Candidates drawn at random from a model, for acceptance by rejection.

    widths:      how many tokens are drawn after each path, depth by depth
    temperature: of the draft's distributions
    replacement: draw whole candidates independently; widths is then (M, 1, 1, …)

    Which tree is drawn depends on the budget only, never on what is drawn.
    """

    def __init__(
        self, model: Llama, *, widths: tuple[int, ...] = (3, 1, 1), temperature: float = 1.0,
        replacement: bool = False, seed: int = 0,
    ):  # fmt: skip
        super().__init__(model)
        if not widths or min(widths) < 1 or (replacement and any(w > 1 for w in widths[1:])):
            raise ValueError(
                f"widths: expected positive numbers, with replacement (M, 1, 1, …), got {widths}"
            )
        if not temperature > 0:
            raise ValueError(f"temperature: expected more than 0, got {temperature}")
        self.widths, self.temperature, self.replacement = tuple(widths), temperature, replacement
        self._random = np.random.default_rng(seed)

    def propose(self, budget: int) -> Drawn:
        widths = self._widths(budget)
        logits = np.asarray(self._after_texts())[:, None]
        batch = len(logits)
        beam = np.zeros((batch, 1, 0), np.int32)
        scores, distributions = np.zeros((batch, 1, 0)), np.zeros((batch, 1, 0, self.vocabulary))
        for depth, width in enumerate(widths):
            if depth:
                logits = self._after_candidates(beam)
            q = np.asarray(jax.nn.softmax(np.asarray(logits, np.float64) / self.temperature, -1))
            q = q.astype(np.float64)
            token = self._draw(q, width)  # (b, n, width), −1 where q has no more tokens
            chance = np.where(token < 0, 0, np.take_along_axis(q, np.maximum(token, 0), axis=2))
            with np.errstate(divide="ignore"):
                log = np.log(chance).reshape(batch, -1, 1)
            beam, scores, distributions = (
                np.repeat(x, width, axis=1) for x in (beam, scores, distributions)
            )
            beam = np.concatenate([beam, np.maximum(token, 0).reshape(log.shape)], axis=2)
            if depth:
                log = np.where(scores[..., -1:] > -np.inf, log, -np.inf)
            scores = np.concatenate([scores, log], axis=2)
            q = np.repeat(q, width, axis=1)[:, :, None]
            distributions = np.concatenate([distributions, q], axis=2)
        return Drawn(beam.astype(np.int32), np.minimum(scores, 0), distributions, self.replacement)

    def _widths(self, budget: int) -> tuple[int, ...]:
        """The beginning of `widths` whose tree has at most `budget` nodes."""
        nodes = np.cumsum(np.cumprod(self.widths))
        return self.widths[: int((nodes <= budget).sum())]

    def _after_candidates(self, beam):
        """(b, n, vocabulary): the logits after each candidate, every one a chain of its own."""
        batch, rows, width = beam.shape
        node = np.arange(rows * width).reshape(rows, width)
        parents = np.where(np.arange(width) > 0, node - 1, -1).reshape(-1).astype(np.int32)
        parents = np.broadcast_to(parents, (batch, len(parents)))
        logits = self._after_nodes(beam.reshape(batch, -1), parents, 0)
        return logits[:, width - 1 :: width]

    def _draw(self, q, width):
        """(b, n, width) tokens: draws from q, or the first of a random order of its tokens."""
        if self.replacement:
            noise = self._random.gumbel(size=(*q.shape[:2], width, q.shape[2]))
            with np.errstate(divide="ignore"):
                return np.argmax(np.log(q)[:, :, None] + noise, axis=-1)
        with np.errstate(divide="ignore"):
            order = np.log(q) + self._random.gumbel(size=q.shape)
        token = np.argsort(-order, axis=-1, kind="stable")[..., :width]
        found = np.take_along_axis(order, token, axis=-1) > -np.inf
        token = np.where(found, token, -1)
        return np.pad(token, [(0, 0), (0, 0), (0, width - token.shape[2])], constant_values=-1)
