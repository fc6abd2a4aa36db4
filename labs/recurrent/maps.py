"""Any number of tokens change a state by one map, S → factor S + term, and maps compose."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Map(NamedTuple):
    """S → factor @ S + term. Leading axes hold several maps."""

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
