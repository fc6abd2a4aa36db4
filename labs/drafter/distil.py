"""How a recurrent drafter learns: the examples, the loss, an update, and what it is judged by.

An example begins at a token that the model has read: its state there and the token after it, which
at decoding time is the certain one. At each of `LENGTH` tokens from there on, fed from the text,
the drafter's state should read out what the model's own does (the cross entropy with the model's
likeliest tokens; what is left at its best is their entropy), and lie near it.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from labs.drafter.recurrent import Drafter, Shared, draft_beam, next_state, unit
from treeattn_llama import Llama

LENGTH = 5


class Texts(NamedTuple):
    """Tokens that the model read, text after text, and what it thought there.

    state (n, d): unit; after (n,): the token that came next; end (n,): where its text's tokens end;
    top, log (n, k): the likeliest next tokens, as rows of the head cut to some tokens (−1: none of
    them), and their log-probabilities; kind, temperature (n,): of the text
    """

    state: np.ndarray
    after: np.ndarray
    end: np.ndarray
    top: np.ndarray
    log: np.ndarray
    kind: np.ndarray
    temperature: np.ndarray


def read_shards(files: list[Path]) -> tuple[Texts, Texts]:
    """(to learn from, held out), top as the model's tokens."""
    parts = {True: [], False: []}
    for file in files:
        with np.load(file) as shard:
            x = dict(shard)
        at = token_at = 0
        for i, n in enumerate(x["sizes"].tolist()):
            here = slice(at, at + n)
            begin = sum(len(p.after) for p in parts[bool(x["held_out"][i])])
            parts[bool(x["held_out"][i])].append(
                Texts(
                    x["states"][here],
                    x["tokens"][token_at + 1 : token_at + n + 1],
                    np.full(n, begin + n),
                    x["top"][here].astype(np.int32),
                    x["log"][here],
                    np.full(n, x["kind"][i]),
                    np.full(n, x["temperature"][i]),
                )
            )
            at = at + n
            token_at = token_at + n + 1
    return tuple(
        Texts(*map(np.concatenate, zip(*parts[kept], strict=True))) for kept in (False, True)
    )


def read(model: Llama, rows: np.ndarray, new: int, top: int = 32) -> Texts:
    """Texts from rows of tokens (b, l), of which the last `new` are the model's: a pass over them.

    For a few short ones; `sample.py` keeps what the model says as it writes.
    """
    states, _ = model.hidden_states(rows[:, :-1], model.new_cache(len(rows), rows.shape[1]))
    states = states[:, -new:]
    log = jax.nn.log_softmax(model.read_out(states), axis=-1)
    log, tokens = (np.asarray(x).reshape(-1, top) for x in jax.lax.top_k(log, top))
    count = len(rows) * new
    return Texts(
        np.asarray(unit(states)).reshape(count, -1),
        rows[:, -new:].reshape(-1),
        np.repeat(new * np.arange(1, len(rows) + 1), new),
        tokens,
        log,
        np.full(count, "chat"),
        np.zeros(count),
    )


def frequent_tokens(texts: Texts, n: int) -> np.ndarray:
    """The n tokens that the model gave the most probability to, in their own order."""
    mass = np.zeros(int(max(texts.top.max(), texts.after.max())) + 1)
    np.add.at(mass, texts.top.reshape(-1), np.exp(texts.log.astype(np.float32)).reshape(-1))
    return np.sort(np.argsort(-mass, kind="stable")[:n]).astype(np.int32)


def prepared(texts: Texts, tokens: np.ndarray, norm: np.ndarray) -> Texts:
    """`top` as rows of the cut head, and states without the norm's weight."""
    row = np.full(1 << 16, -1, np.int32)
    row[tokens] = np.arange(len(tokens))
    return texts._replace(top=row[texts.top], state=(texts.state / norm).astype(np.float16))


def initial(key, width: int, depth: int, inner: int) -> Drafter:
    """Small random parameters: the first states are hardly other than the model's last one."""
    a, b = jax.random.split(key)
    small = 0.3 / width**0.5
    return Drafter(
        mix=small * jax.random.normal(a, (width, 2 * width)),
        gate_up=width**-0.5 * jax.random.normal(b, (depth, 2 * inner, width)),
        down=jnp.zeros((depth, width, inner)),
    )


class Examples(NamedTuple):
    """state (b, d); tokens (b, c); targets: states (b, c, d), rows and chances (b, c, k), the
    token that came (b, c) as a row of the head, and which are real (b, c)."""

    state: np.ndarray
    tokens: np.ndarray
    states: np.ndarray
    rows: np.ndarray
    chances: np.ndarray
    came: np.ndarray
    real: np.ndarray


def examples(texts: Texts, at: np.ndarray, row: np.ndarray, length: int = LENGTH) -> Examples:
    """Those that begin at these tokens; row: of each of the model's tokens in the cut head."""
    steps = at[:, None] + np.arange(length)
    real = steps + 1 < texts.end[at][:, None]
    then = np.minimum(steps + 1, len(texts.after) - 1)
    rows = texts.top[then]
    chances = np.exp(texts.log[then].astype(np.float32)) * (rows >= 0)
    return Examples(
        texts.state[at].astype(np.float32),
        texts.after[np.minimum(steps, len(texts.after) - 1)],
        texts.state[then],
        np.maximum(rows, 0),
        chances,
        row[texts.after[then]],
        real,
    )


def loss(drafter: Drafter, shared: Shared, batch: Examples, soft: float, near: float):
    """The mean over an example's tokens, later ones counting less, of
    soft · cross entropy with the model + (1 − soft) · with the text + near · squared distance."""
    state = unit(batch.state)
    total = 0.0
    weights = 0.0
    for c in range(batch.tokens.shape[1]):
        state = next_state(drafter, state, shared.embedding[batch.tokens[:, c]])
        log = jax.nn.log_softmax(state @ shared.head.T, axis=-1)
        model = -jnp.sum(batch.chances[:, c] * jnp.take_along_axis(log, batch.rows[:, c], 1), 1)
        came = batch.came[:, c]
        text = -jnp.take_along_axis(log, jnp.maximum(came, 0)[:, None], 1)[:, 0] * (came >= 0)
        far = jnp.mean((state - unit(batch.states[:, c])) ** 2, axis=1)
        weight = 0.8**c * batch.real[:, c]
        total += jnp.sum(weight * (soft * model + (1 - soft) * text + near * far))
        weights += jnp.sum(weight)
    return total / weights


def optimizer(updates: int, rate: float) -> optax.GradientTransformation:
    """AdamW, its rate rising for a twentieth of the updates and then falling to a twentieth."""
    warm = max(updates // 20, 1)
    rates = optax.warmup_cosine_decay_schedule(0.0, rate, warm, max(updates, warm + 1), rate / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.01))


@functools.partial(jax.jit, static_argnames="adam", donate_argnames=("drafter", "moments"))
def update(drafter, moments, shared, batch, soft, near, *, adam):
    """(drafter, moments, loss) after one step against the gradient."""
    value, slope = jax.value_and_grad(loss)(drafter, shared, batch, soft, near)
    change, moments = adam.update(slope, moments, drafter)
    return optax.apply_updates(drafter, change), moments, value


def accepted(drafter, shared, texts: Texts, at: np.ndarray, width: int, length: int):
    """(n,) of the drafts at these tokens, how many of their tokens the text goes on with."""
    found = []
    for begin in range(0, len(at), 256):
        part = at[begin : begin + 256]
        part = np.concatenate([part, np.repeat(part[-1:], 256 - len(part))])
        beam, _ = draft_beam(
            drafter,
            shared,
            texts.state[part].astype(np.float32),
            texts.after[part],
            width=width,
            length=length,
        )
        beam = np.asarray(beam)
        steps = part[:, None] + 1 + np.arange(length)
        real = steps < texts.end[part][:, None]
        truth = np.where(real, texts.after[np.minimum(steps, len(texts.after) - 1)], -1)
        right = beam == truth[:, None]
        found.append(np.cumprod(right, axis=2).sum(axis=2).max(axis=1))
    return np.concatenate(found)[: len(at)]


def tokens_a_step(texts: Texts, begins: list[int], counts: np.ndarray) -> float:
    """New tokens a step along whole texts, `counts` being what is accepted at each token."""
    tokens = steps = 0
    for begin in begins:
        at = begin
        end = texts.end[begin]
        while at + 1 < end:  # the token after `at` is certain
            new = min(int(counts[at]) + 1, end - 1 - at)
            tokens = tokens + new
            steps = steps + 1
            at = at + new
    return tokens / max(steps, 1)
