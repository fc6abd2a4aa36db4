"""What any number of tokens do to a state is one map, S → factor S + term, and maps compose."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from labs.recurrent.rule import Updates, check


class Map(NamedTuple):
    """S → factor @ S + term. Leading axes are those of several maps."""

    factor: jax.Array  # (..., dk, dk)
    term: jax.Array  # (..., dk, dv)

    def __call__(self, state):
        """The state after the tokens, (..., dk, dv)."""
        return self.factor @ state + self.term


def identity(like: Map) -> Map:
    """The map of no tokens, in the shape of another map."""
    return Map(jnp.eye(len(like.term), dtype=like.term.dtype), jnp.zeros_like(like.term))


def compose(first: Map, second: Map) -> Map:
    """The map of `first`'s tokens and then `second`'s. The order counts."""
    return Map(second.factor @ first.factor, second(first.term))


def map_of_token(k, v, gate, erase, write) -> Map:
    """The map of one token."""
    kept = jnp.eye(len(k), dtype=k.dtype) - erase * jnp.outer(k, k)
    return Map(gate * kept, write * jnp.outer(k, v))


def by_scan(q, updates: Updates, state):
    """`step_by_step`, as a scan of maps in ⌈log₂ l⌉ rounds."""
    check(q, updates, state)
    maps = lax.associative_scan(compose, jax.vmap(map_of_token)(*updates))
    states = jnp.concatenate([state[None], maps(state)])
    return jnp.einsum("lk,lkv->lv", q, states[1:]), states[-1]
