"""Layers whose memory is a matrix, not keys: the gated delta rule, one token after another.

Everything here is about one head; `jax.vmap` adds heads and batches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Updates(NamedTuple):
    """What l tokens do to a state S, (dk, dv), one after another:

        S → gate (S − erase k kᵀS) + write k vᵀ

    A token then reads out = Sᵀq. Gates are above 0 and at most 1. A token with gate 1, erase 0 and
    write 0 changes nothing.
    """

    k: jax.Array  # (l, dk)
    v: jax.Array  # (l, dv)
    gate: jax.Array  # (l,), as the other two
    erase: jax.Array
    write: jax.Array


def gated_delta(k, v, gate, beta) -> Updates:
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): what is written is erased first."""
    return Updates(k, v, gate, erase=beta, write=beta)


def scalar_decay(k, v, gate) -> Updates:
    """Mamba-2 (Dao and Gu 2024): the state fades, and nothing is erased."""
    return Updates(k, v, gate, erase=jnp.zeros_like(gate), write=jnp.ones_like(gate))


def linear_attention(k, v) -> Updates:
    """Linear attention (Katharopoulos et al. 2020): the state is the sum of k vᵀ."""
    return scalar_decay(k, v, jnp.ones_like(k[:, 0]))


def step_by_step(q, updates: Updates, state):
    """(what each token reads, (l, dv); the state after the last one), by the definition.

    q: (l, dk). state: (dk, dv), the one before the first token.
    """
    check(q, updates, state)

    def step(state, token):
        q, (k, v, gate, erase, write) = token
        state = gate * (state - erase * jnp.outer(k, k @ state)) + write * jnp.outer(k, v)
        return state, q @ state

    state, out = lax.scan(step, state, (q, updates))
    return out, state


def check(q, updates: Updates, state) -> None:
    """Raise a ValueError that names the first argument whose shape does not fit the state's."""
    length, (dk, dv) = len(q), state.shape
    widths = {"q": (dk,), "k": (dk,), "v": (dv,)}
    for name, array in {"q": q, **updates._asdict()}.items():
        expected = (length, *widths.get(name, ()))
        if array.shape != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
