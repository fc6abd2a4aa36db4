"""A recurrent drafter: a small network that goes on from the model's own last state.

As ReDrafter (https://arxiv.org/abs/2403.09919): the model's state at its last token, which holds
more of the text than any token does, and the embeddings of the tokens drafted so far make the next
state; the model's own head reads the next token off it. Beam search over it gives candidates that
share their beginnings, since it is surest at first. As EAGLE's (https://arxiv.org/abs/2401.15077),
its states stand for the model's own, and are trained towards them (`train.py`).
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Float, Int, Integer

from treeattn_llama import Llama

Array = jax.Array | np.ndarray

PACKAGED = Path(__file__).parent / "recurrent.safetensors"
FORMAT = "treeattn recurrent drafter, version 1"
FEW = 16  # rows up to which a product is computed no slower as W xᵀ, on a CPU
ROUNDING = 0.05  # what a dtype may change a number by, in standard deviations of all of them


class Drafter(NamedTuple):
    """The trained parameters, a pytree: d is the model's width, f the residual layers' own."""

    mix: Float[Array, "d 2*d"]  # of state and embedding
    gate_up: Float[Array, "depth 2*f d"]
    down: Float[Array, "depth d f"]


class Shared(NamedTuple):
    """What a drafter borrows from its model (`borrow`), the head cut to `tokens`."""

    embedding: Float[Array, "vocabulary d"]
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


@functools.partial(jax.jit, static_argnames=("width", "length"))
def draft_beam(
    drafter: Drafter,
    shared: Shared,
    state: Float[Array, "b d"],
    certain: Int[Array, " b"],
    *,
    width: int,
    length: int,
) -> tuple[Int[Array, "b m c"], Float[Array, "b m c"]]:
    """(beam, scores) after each text's last token, as one program: `width` candidates of `length`
    tokens, most probable first, and the log-probability of each token after those before it.

    state: the model's state at the token before the last, which is `certain`: no model has read it
    There are fewer candidates where the head's tokens make fewer.
    """
    batch = len(certain)
    n = len(shared.tokens)
    beam = jnp.zeros((batch, 1, 0), jnp.int32)
    scores = jnp.zeros((batch, 1, 0), jnp.float32)
    path = jnp.zeros((batch, 1), jnp.float32)
    state = unit(state)[:, None]
    token = certain[:, None]
    for _ in range(length):
        state = next_state(drafter, state, shared.embedding[token])
        logits = product(state, shared.head)
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
    return beam, scores


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
    """The embedding of a model on one device, and its head's rows of `tokens` times its last norm's
    weight."""
    w = model.weights
    at = np.asarray(tokens, np.int32)
    head = w.head[at].astype(jnp.float32) * w.norm.astype(jnp.float32)
    return Shared(w.embedding, head, jnp.asarray(at))


def fingerprint(shared: Shared) -> Float[np.ndarray, " k"]:
    """A few hundred of a model's numbers, by which to know it, whatever dtype they are kept in."""
    few = [x[::97] for x in (shared.head, shared.embedding)]
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
