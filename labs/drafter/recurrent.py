"""A recurrent drafter: a small network that goes on from the model's own last state.

As ReDrafter (https://arxiv.org/abs/2403.09919): the model's state at its last token, which holds
more of the text than any token does, and the embeddings of the tokens drafted so far make the next
state; the model's own head reads the next token off it. Beam search over it gives candidates that
share their beginnings, since it is surest at first. As EAGLE's (https://arxiv.org/abs/2401.15077),
its states stand for the model's own, and are trained towards them (`drafter.py`).

Where the model's tokens are drawn at a temperature, the likeliest tokens are no longer the best
guesses. Each token is the one where logits plus noise are largest, and the noise is made of a key,
so it is known before: the search adds it to the drafter's own logits, and finds what the model will
draw as far as the drafter knows the model (https://arxiv.org/abs/2408.07978). That is the first of
many draws without replacement (Gumbel top-k, https://arxiv.org/abs/1903.06059), of the model's own
dice. `tree="drawn"` throws dice of its own instead.

`RecurrentDraft` is an object that proposes and observes, made of the package's public parts: an
example of a draft of your own. In a checkout, `generate(model, ids, draft="recurrent")` finds it.
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int, Int8, Integer

from treeattn import Llama
from treeattn_llama.speculation import (
    Chance,
    Drawn,
    DrawnTree,
    Seen,
    Shape,
    Texts,
    dice_of,
    drawn_candidates,
)

Array = jax.Array | np.ndarray

PACKAGED = Path(__file__).parent / "recurrent.safetensors"
FORMAT = "treeattn recurrent drafter, version 1"
FEW = 16  # rows up to which a product is computed no slower as W xᵀ, on a CPU
DOUBT = 2.0  # logits with known noise count for so much less: the model's are some others
ROUNDING = 0.05  # what 8 bits may change a weight by, in standard deviations of all of them


class Drafter(NamedTuple):
    """The trained parameters, a pytree: d is the model's width, f the residual layers' own."""

    mix: Float[Array, "d 2*d"]  # of state and embedding
    gate_up: Float[Array, "depth 2*f d"]
    down: Float[Array, "depth d f"]


class Shared(NamedTuple):
    """What a drafter borrows from its model (`borrow`), the head cut to `tokens`.

    embedding: of a model in 8 bits as that keeps it, rows with a scale for each
    """

    embedding: Float[Array, "vocabulary d"] | tuple[Int8[Array, "vocabulary d"], Array]
    head: Float[Array, "n d"]
    tokens: Int[Array, " n"]


def unit(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """x over its root mean square, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def product(x: Float[Array, "*n d"], matrix: Float[Array, "out d"]) -> Float[Array, "*n out"]:
    """x Wᵀ. XLA:CPU rearranges the second factor: of few rows, let that be x."""
    if math.prod(x.shape[:-1]) > FEW:
        return x @ matrix.T
    return jnp.moveaxis(jnp.einsum("od,...d->o...", matrix, x), 0, -1)


def next_state(
    drafter: Drafter, state: Float[Array, "... d"], embedded: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """The state after a token: it stands for the model's last layer's output there, `unit`."""
    x = state + product(jnp.concatenate([state, unit(embedded)], axis=-1), drafter.mix)
    for gate_up, down in zip(drafter.gate_up, drafter.down, strict=True):
        gate, up = jnp.split(product(unit(x), gate_up), 2, axis=-1)
        x = x + product(jax.nn.silu(gate) * up, down)
    return unit(x)


@functools.partial(jax.jit, static_argnames=("width", "length", "with_pruned"))
def draft_beam(
    drafter: Drafter,
    shared: Shared,
    state: Float[Array, "b d"],
    certain: Int[Array, " b"],
    *,
    width: int,
    length: int,
    with_pruned: bool = False,
    noise: Float[Array, "b length n"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
) -> tuple[Int[Array, "b m c"], Float[Array, "b m c"]]:
    """(beam, scores) after each text's last token, as one program: `width` candidates of `length`
    tokens, most probable first, and the log-probability of each token after those before it.

    state: the model's state at the token before the last, which is `certain`: no model has read it
    There are fewer candidates where the head's tokens make fewer.
    with_pruned: after them the shorter paths that the search had kept at lesser depths and has
    pruned since, as candidates of their own (score −∞ beyond their end)
    noise: what each depth's tokens are drawn with, by the model at this temperature: then a score
    is of the token being the one that it will draw
    """
    batch = len(certain)
    n = len(shared.tokens)
    beam = jnp.zeros((batch, 1, 0), jnp.int32)
    scores = jnp.zeros((batch, 1, 0), jnp.float32)
    path = jnp.zeros((batch, 1), jnp.float32)
    state = unit(state)[:, None]
    token = certain[:, None]
    depths = []
    for _ in range(length):
        state = next_state(drafter, state, take_rows(shared.embedding, token))
        logits = product(state, shared.head)
        if noise is not None:
            logits = (tempered(logits, temperature) + noise[:, len(depths), None]) / DOUBT
        best, log = likeliest(logits, min(width, n))
        children = best.shape[2]
        kept = min(width, log.shape[1] * children)
        path, at = jax.lax.top_k((path[..., None] + log).reshape(batch, -1), kept)
        parent = at // children
        token = shared.tokens[jnp.take_along_axis(best.reshape(batch, -1), at, axis=1)]
        score = jnp.take_along_axis(log.reshape(batch, -1), at, axis=1)
        beam, scores, state = (
            jnp.take_along_axis(x, parent[..., None], axis=1) for x in (beam, scores, state)
        )
        beam = jnp.concatenate([beam, token[..., None]], axis=-1)
        scores = jnp.concatenate([scores, score[..., None]], axis=-1)
        more = [(0, 0), (0, 0), (0, length - beam.shape[2])]
        depths.append((jnp.pad(beam, more), jnp.pad(scores, more, constant_values=-jnp.inf)))
    kept = depths[::-1] if with_pruned else depths[-1:]
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*kept, strict=True))


def tempered(logits: Float[Array, "*n k"], temperature) -> Float[Array, "*n k"]:
    """logits / temperature, less their largest, which is what overflows at a small one."""
    less = logits - jnp.max(logits, axis=-1, keepdims=True)
    return less / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)


@jax.jit
def one_more(
    drafter: Drafter, shared: Shared, state: Float[Array, "b n d"], token: Int[Array, "b n"]
) -> tuple[Float[Array, "b n d"], Float[Array, "b n k"]]:
    """The states after these tokens, and the logits of what follows them."""
    state = next_state(drafter, state, take_rows(shared.embedding, token))
    return state, product(state, shared.head)


def likeliest(
    logits: Float[Array, "b m n"], k: int
) -> tuple[Int[Array, "b m k"], Float[Array, "b m k"]]:
    """(indices, log-probabilities) of each row's k likeliest, best first: no more of a row can be
    among the k best of all rows."""
    rows = logits.reshape(-1, logits.shape[2])
    values, best = jax.lax.top_k(rows, k)
    log = values - jax.nn.logsumexp(rows, axis=-1, keepdims=True)
    return tuple(x.reshape(*logits.shape[:2], k) for x in (best, log))


def borrow(model: Llama, tokens: Integer[np.ndarray, " n"]) -> Shared:
    """The model's embedding, and its head's rows of `tokens` times its last norm's weight, on one
    device: drafting is too little work for more."""

    def here(x):
        if model.mesh is None:
            return x
        if not x.is_fully_replicated:
            out = NamedSharding(model.mesh, PartitionSpec())
            x = jax.jit(lambda y: y, out_shardings=out)(x)
        return x.addressable_data(0)

    w = model.weights
    head, norm, embedding = jax.tree.map(here, (w.head, w.norm, w.embedding))
    at = np.asarray(tokens, np.int32)
    head = take_rows(head, at).astype(jnp.float32) * norm.astype(jnp.float32)
    return Shared(embedding, head, jnp.asarray(at))


def take_rows(matrix, at: Int[Array, "*n"] | slice) -> Float[Array, "*n d"]:
    """Those rows of an embedding, or a head, of floats or of 8 bits."""
    if isinstance(matrix, tuple):
        rows, scale = matrix
        return rows[at].astype(scale.dtype) * scale[at][..., None]
    return matrix[at]


def fingerprint(shared: Shared) -> Float[np.ndarray, " k"]:
    """A few hundred of a model's numbers, by which to know it, whatever dtype they are kept in."""
    few = [take_rows(x, slice(None, None, 97)) for x in (shared.head, shared.embedding)]
    few = [x[:, :16].astype(jnp.float32).reshape(-1) for x in few]
    return np.concatenate([np.asarray(x)[:256] for x in few])


def save_drafter(path: str | Path, drafter: Drafter, shared: Shared, model: str) -> None:
    """Write parameters trained with the model of that name, in float16."""
    arrays = {f: np.asarray(x, np.float16) for f, x in drafter._asdict().items()}
    tokens = np.asarray(shared.tokens)
    arrays["tokens"] = tokens.astype(np.min_scalar_type(tokens.max()))
    arrays["fingerprint"] = fingerprint(shared).astype(np.float16)
    metadata = {"format": FORMAT, "model": model}
    safetensors.numpy.save_file(arrays, path, metadata)


def load_drafter(model: Llama, path: str | Path | None = None) -> tuple[Drafter, Shared]:
    """The drafter in a file (None: the packaged one, for the packaged model), and what it borrows.

    Raises FileNotFoundError where there is no file, ValueError for one that is damaged or
    something else, for another width than the model's, and for a model it was not trained on.
    """
    path = PACKAGED if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"draft: no file {path}")
    try:
        with safetensors.safe_open(path, "np") as file:
            about = file.metadata() or {}
            names = file.keys()
            found = {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"draft: {path} is no readable safetensors file: {error}") from None
    if about.get("format") != FORMAT or not {*Drafter._fields, "tokens", "fingerprint"} <= {*found}:
        raise ValueError(f"draft: {path} holds no recurrent drafter ({FORMAT})")
    drafter = Drafter(*(found[name] for name in Drafter._fields))
    trained = f"it was trained on {about.get('model')}"
    d = model.config.width
    _check(drafter, path)
    if drafter.mix.shape[0] != d:
        raise ValueError(
            f"draft: {path} is for models of width {len(drafter.mix)}, {trained}; this one's is {d}"
        )
    tokens = found["tokens"]
    known = tokens.ndim == 1 and tokens.size and tokens.dtype.kind in "iu"
    if not known or tokens.min() < 0 or tokens.max() >= model.config.vocabulary:
        raise ValueError(f"draft: {path} has tokens outside the model's vocabulary; {trained}")
    shared = borrow(model, tokens)
    own = fingerprint(shared)
    if own.shape != found["fingerprint"].shape or not np.allclose(
        own, found["fingerprint"], rtol=0.01, atol=ROUNDING * own.std()
    ):
        raise ValueError(f"draft: {path} does not fit this model; {trained}")
    return Drafter(*(jnp.asarray(x, jnp.float32) for x in drafter)), shared


def _check(drafter: Drafter, path: Path) -> None:
    """Raise a ValueError unless the arrays fit each other, and are numbers."""
    mix, gate_up, down = (x.shape for x in drafter)
    fits = len(mix) == 2 and mix[1] == 2 * mix[0] and len(gate_up) == len(down) == 3
    if not fits or down[1] != mix[0] or gate_up != (down[0], 2 * down[2], down[1]):
        raise ValueError(f"draft: {path} has arrays of shapes {mix}, {gate_up}, {down}")
    if not all(x.dtype.kind == "f" and np.isfinite(x).all() for x in drafter):
        raise ValueError(f"draft: {path} has parameters that are no finite numbers")


class BeamShape(NamedTuple):
    """Of a beam: and what `generate` is told of it."""

    width: int
    length: int
    told: Shape


# Work: a step of the search is some three rows' time, and a row more for each candidate. Gains are
# those of the held-out chats (benchmarks/results/recurrent.md), of at most 15 nodes.
SHAPES = (
    BeamShape(1, 3, Shape(work=12, nodes=3, gain=0.50)),
    BeamShape(4, 2, Shape(work=14, nodes=7, gain=0.75)),
    BeamShape(8, 5, Shape(work=55, nodes=15, gain=0.98)),
)


TREES = ("foreseen", "drawn", "likeliest")
WIDTHS = ((6, 5, 3, 1), (3, 3, 1), (2, 1), (1,))  # of drawn trees: those of 15, 7, 3 nodes, and 1


class RecurrentDraft:
    """Beam search by a recurrent drafter, from the state that the model's last call has left.

    path: of the parameters; None: the packaged ones, for the packaged model. Or (Drafter, Shared)
    width, length: of the beam; with_pruned: also propose what the search kept at lesser depths.
    Without a width and a length, one of SHAPES: `generate` asks for the one that pays, and others
    get the largest
    tree: what is searched for where the model's tokens are drawn (elsewhere the likeliest):
        "foreseen": what the model will draw, with the noise that it draws with
        "drawn": draws of the drafter's own, without replacement, accepted by rejection (`Drawn`);
        as many of each depth as `widths` says, None: one of WIDTHS, by the budget
        "likeliest": as if nothing were drawn

    Raises as `load_drafter`, and ValueError for a width or length below 1, or another tree.
    """

    states = True

    def __init__(
        self,
        model: Llama,
        path=None,
        *,
        width: int | None = None,
        length: int | None = None,
        with_pruned: bool = True,
        tree: str = "foreseen",
        widths: tuple[int, ...] | None = None,
    ):
        if tree not in TREES:
            raise ValueError(f"tree: expected one of {TREES}, got {tree!r}")
        largest = SHAPES[-1]
        self.shapes = () if width or length else [shape.told for shape in SHAPES]
        width = largest.width if width is None else width
        length = largest.length if length is None else length
        if width < 1 or length < 1:
            raise ValueError(f"width, length: expected at least 1, got {width}, {length}")
        pair = isinstance(path, tuple)
        self.drafter, self.shared = path if pair else load_drafter(model, path)
        self.vocabulary = model.config.vocabulary
        self.shape = {"width": width, "length": length, "with_pruned": with_pruned}
        self.tree = tree
        self.widths = WIDTHS if widths is None else (widths,)
        self._key = None
        self._chance: Chance | None = None
        self._lengths = np.zeros(0, np.int32)
        self._certain = np.zeros(0, np.int32)
        self._state = None
        self._compiled_for = 0  # so many texts

    def begin(self, key) -> None:
        """New texts: a drawn tree is drawn with this key."""
        self._key = key
        self._chance = None

    def foresee(self, chance: Chance | None) -> None:
        """How the model will draw; None where it takes the likeliest."""
        self._chance = None if self.tree == "likeliest" else chance

    def observe(self, texts: Texts, seen: Seen | None = None) -> None:
        self._lengths = np.array([len(text) for text in texts], np.int32)
        self._certain = np.array([text[-1] for text in texts], np.int32)
        self._state = None if seen is None else seen.state
        if self._state is not None and len(texts) != self._compiled_for:
            for i in range(len(self.shapes)):  # so that no step waits for a program
                self.propose(1, i)
            self._compiled_for = len(texts)

    def propose(self, budget: int, shape: int | None = None):
        if self._state is None or budget < 1:
            none = len(self._certain), 0, 0
            return np.zeros(none, np.int32), np.zeros(none)
        if self._chance is not None and self.tree == "drawn":
            return self._drawn(budget)
        how = self.shape
        if shape is not None:
            how = how | {"width": SHAPES[shape].width, "length": SHAPES[shape].length}
        if self._chance is not None:
            noise = self._chance.noise(self._lengths, how["length"])[..., self.shared.tokens]
            temperature = self._chance.sampling.temperature
            how = how | {"noise": noise.astype(jnp.float32), "temperature": temperature}
        found = draft_beam(self.drafter, self.shared, self._state, self._certain, **how)
        return tuple(np.asarray(x) for x in found)

    def _drawn(self, budget: int) -> Drawn:
        """A tree of at most `budget` draws for each text. Each has dice of its own, made of the
        text's number and length, so that no text depends on its neighbours."""
        if self._key is None:
            raise ValueError("draft: call begin(key) before propose: it draws at random")
        widths = next((found for found in self.widths if sum(found) <= budget), ())
        places = enumerate(self._lengths.tolist())
        trees = [DrawnTree(dice_of(self._key, b, length)) for b, length in places]
        texts = np.arange(len(trees))[:, None]
        state = unit(self._state)[:, None]
        token = self._certain[:, None]
        tokens = np.asarray(self.shared.tokens)
        for width in widths:
            state, logits = one_more(self.drafter, self.shared, state, token)
            logits = tempered(logits, self._chance.sampling.temperature)
            q = np.asarray(jax.nn.softmax(logits), np.float64)
            ends = np.zeros((len(trees), width, 2), int)  # each draw's parent, and its token
            for b, tree in enumerate(trees):
                tree.grow(q[b] / q[b].sum(axis=-1, keepdims=True), width)
                ends[b, : len(tree.depths[-1])] = tree.depths[-1]
            state = state[texts, ends[..., 0]]
            token = tokens[ends[..., 1]]
        return drawn_candidates(trees, tokens)
