"""Layers whose memory is a matrix, not keys: the gated delta rule, one token after another.

All functions are about one head; `jax.vmap` adds heads and batches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Updates(NamedTuple):
    """The changes of a state S, (dk, dv), by l tokens. Each token in turn maps

        S → gate (S − erase k kᵀS) + write k vᵀ

    A token then reads out = Sᵀq. Gates are above 0 and at most 1. A token with gate 1, erase 0 and
    write 0 changes nothing.
    """

    k: jax.Array  # (l, dk)
    v: jax.Array  # (l, dv)
    gate: jax.Array  # (l,), like erase and write
    erase: jax.Array
    write: jax.Array


def gated_delta(k, v, gate, beta) -> Updates:
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): a write first erases the old value."""
    return Updates(k, v, gate, erase=beta, write=beta)


def scalar_decay(k, v, gate) -> Updates:
    """Mamba-2 (Dao and Gu 2024): the state fades, and nothing is erased."""
    return Updates(k, v, gate, erase=jnp.zeros_like(gate), write=jnp.ones_like(gate))


def linear_attention(k, v) -> Updates:
    """Linear attention (Katharopoulos et al. 2020): the state is the sum of k vᵀ."""
    return scalar_decay(k, v, jnp.ones_like(k[:, 0]))


def step_by_step(q, updates: Updates, state):
    """(each token's output, (l, dv); the state after the last token), by the definition.

    q: (l, dk). state: (dk, dv), before the first token.
    """
    check(q, updates, state)

    def step(state, token):
        q, (k, v, gate, erase, write) = token
        state = gate * (state - erase * jnp.outer(k, k @ state)) + write * jnp.outer(k, v)
        return state, q @ state

    state, out = lax.scan(step, state, (q, updates))
    return out, state


def check(q, updates: Updates, state) -> None:
    """Raises ValueError, with the first argument whose shape does not fit the state's."""
    length, (dk, dv) = len(q), state.shape
    widths = {"q": (dk,), "k": (dk,), "v": (dv,)}
    for name, array in {"q": q, **updates._asdict()}.items():
        expected = (length, *widths.get(name, ()))
        if array.shape != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
