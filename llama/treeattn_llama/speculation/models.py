"""Drafts by a model: any smaller Llama, or the first layers of the one that is to be helped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key

from treeattn.idea.arrays import Array
from treeattn_llama import inputs
from treeattn_llama.model import Llama
from treeattn_llama.speculation.candidates import Drawn, Seen, Texts, pad_packed
from treeattn_llama.speculation.reject import generator
from treeattn.trees.beam import pack, unpack
from treeattn.trees.draft import search
from treeattn.trees.token_tree import TokenTree


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


def _probabilities(logits, temperature: float) -> np.ndarray:
    """softmax(logits / temperature), in float64."""
    x = np.asarray(logits, np.float64) / temperature
    q = np.exp(x - x.max(axis=-1, keepdims=True))
    return q / q.sum(axis=-1, keepdims=True)


class _ReadsAlong:
    """A model that reads along: its own cache of the texts, and trees of candidates after them."""

    def __init__(self, model: Llama):
        self.model = model
        self.vocabulary = model.config.vocabulary
        self._texts = []
        self._read = None
        self._cache = None

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        self._texts = texts

    def _after_texts(self):
        """(b, vocabulary) the logits after each text. Reads what has been added since."""
        texts = [[int(t) for t in text] for text in self._texts]
        old = self._read
        self._read = texts
        room = max(len(text) for text in texts)
        known = old is not None and len(old) == len(texts)
        if not known or any(t[: len(o)] != o for t, o in zip(texts, old, strict=True)):
            self._cache = self.model.new_cache(len(texts), _capacity_for(room))
            self._logits, self._cache = self.model.prefill(texts, self._cache)
            return self._logits
        if room + 1 > self._cache.capacity:  # for the texts, and a candidate after the longest
            self._cache = self.model.grow(self._cache, _capacity_for(room))
        new = [text[len(o) :] for text, o in zip(texts, old, strict=True)]
        counts = np.array([len(n) for n in new], np.int32)
        if counts.any():
            tokens = inputs.pad_prompts(new, _power_of_two(int(counts.max())))
            logits, self._cache = self.model.step(tokens, self._cache, counts=counts, last=True)
            self._logits = jnp.where((counts > 0)[:, None], logits, self._logits)
        return self._logits

    def _after(self, beam):
        """(b, n, vocabulary) the logits after each text and candidate (b, n, d)."""
        if beam.shape[2] == 0:
            return self._after_texts()[:, None]
        packed = pack(beam)
        nodes = packed.packed_beam.shape[1]
        tokens, mask, offsets, unpack_map = pad_packed(packed, _power_of_two(nodes))
        positions = np.array([len(text) for text in self._read], np.int32)[:, None] + offsets
        logits, _ = self.model.extend(tokens, self._cache, positions=positions, mask=mask)
        return unpack(logits, unpack_map[:, :, -1:])[:, :, 0]


def _capacity_for(tokens: int) -> int:
    """A capacity for texts so long that are to grow: powers of two, so that few are compiled."""
    return max(256, 1 << (2 * tokens - 1).bit_length())


def _power_of_two(n: int) -> int:
    """The next power of two: few sizes, each of which compiles."""
    return 1 << max(n - 1, 0).bit_length()


class LlamaDraft(_ReadsAlong):
    """Beam search by a model: at each depth its `width` most probable paths are read on.

    model: with the vocabulary of the one that it drafts for; depth: the longest path
    All their `width` likeliest continuations are candidates (as in EAGLE-2).
    """

    def __init__(self, model: Llama, *, depth: int = 4, width: int = 4):
        super().__init__(model)
        self.depth = depth
        self.width = min(width, self.vocabulary)

    def propose(self, budget: int):
        batch = len(self._texts)

        def likeliest(paths):
            values, ids = _log_likeliest(self._after(paths), self.width)
            return np.asarray(ids), np.minimum(np.asarray(values, np.float64), 0)

        (tokens, parents, scores, _), *_ = search(likeliest, self.depth, self.width, batch)
        sizes = np.full(batch, tokens.shape[1], np.int32)
        return TokenTree(tokens.astype(np.int32), parents.astype(np.int32), sizes), scores


class DrawnDraft(_ReadsAlong):
    """Candidates drawn at random from a model, for acceptance by rejection.

    widths:      how many tokens are drawn after each path, depth by depth: (3, 1, 1) are three
                 candidates of three tokens
    temperature: of the draft's distributions
    replacement: draw whole candidates independently; widths is then (M, 1, 1, …)

    Which tree is drawn depends on the budget only, never on what is drawn. All chance comes from
    the key of `begin`, which `generate` calls with one made of its own.
    """

    def __init__(
        self,
        model: Llama,
        *,
        widths: tuple[int, ...] = (3, 1, 1),
        temperature: float = 1.0,
        replacement: bool = False,
    ):
        super().__init__(model)
        if not widths or min(widths) < 1 or (replacement and any(w > 1 for w in widths[1:])):
            expected = "positive numbers, with replacement (M, 1, 1, …)"
            raise ValueError(f"widths: expected {expected}, got {widths}")
        if not temperature > 0:
            raise ValueError(f"temperature: expected more than 0, got {temperature}")
        self.widths = tuple(widths)
        self.temperature = temperature
        self.replacement = replacement
        self._random = None

    def begin(self, key: Key[Array, ""]) -> None:
        """From now on, draw what this key draws."""
        self._random = generator(key)

    def propose(self, budget: int) -> Drawn:
        if self._random is None:
            raise ValueError("draft: call begin(key) before propose: it draws at random")
        beam = np.zeros((len(self._texts), 1, 0), np.int32)
        scores = np.zeros(beam.shape)
        distributions = np.zeros((*beam.shape, self.vocabulary))
        for width in self._widths(budget):
            q = _probabilities(self._after(beam), self.temperature)
            token, log = self._draw_children(q, width)  # (b, n, width)
            if beam.shape[2]:  # nothing follows a candidate that has ended
                log = np.where(scores[..., -1:] > -np.inf, log, -np.inf)
            beam = _longer(beam, token)
            scores = _longer(scores, log)
            drawn_from = np.repeat(q[:, :, None], width, axis=2)  # (b, n, width, vocabulary)
            distributions = _longer(distributions, drawn_from)
        return Drawn(beam.astype(np.int32), scores, distributions, self.replacement)

    def _widths(self, budget: int) -> tuple[int, ...]:
        """The beginning of `widths` whose tree has at most `budget` nodes."""
        nodes = np.cumsum(np.cumprod(self.widths))
        return self.widths[: int((nodes <= budget).sum())]

    def _draw_children(self, q, width):
        """(tokens, their log-probabilities), both (b, n, width): −∞ where q has no more tokens."""
        with np.errstate(divide="ignore"):
            log = np.log(q)
        if self.replacement:
            noise = self._random.gumbel(size=(*q.shape[:2], width, q.shape[2]))
            token = np.argmax(log[:, :, None] + noise, axis=-1)
            return token, np.take_along_axis(log, token, axis=-1)
        # The first of a random order of q's tokens; beyond them, none is left.
        order = log + self._random.gumbel(size=q.shape)
        token = np.argsort(-order, axis=-1, kind="stable")[..., :width]
        more = [(0, 0), (0, 0), (0, width - token.shape[2])]
        found = np.take_along_axis(log, token, axis=-1)
        return np.pad(token, more), np.pad(found, more, constant_values=-np.inf)


def _longer(paths: np.ndarray, following: np.ndarray) -> np.ndarray:
    """(b, n * width, d + 1, …): each of n paths (b, n, d, …), as often as it has followers, and its
    follower (b, n, width, …) at the end."""
    width = following.shape[2]
    repeated = np.repeat(paths, width, axis=1)
    last = following.reshape(len(paths), -1, 1, *following.shape[3:])
    return np.concatenate([repeated, last], axis=2)
