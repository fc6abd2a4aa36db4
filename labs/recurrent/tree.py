"""All tokens of a tree at once, by one triangular solve under the ancestors' mask.

A text is a tree with one branch and the causal mask. For a text, the solve is the WY form of a
chunk (Yang et al. 2024, "Parallelizing linear transformers with the delta rule").
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from labs.recurrent.maps import Map
from labs.recurrent.rule import Updates


class Solved(NamedTuple):
    """A solved tree, which gives every node as a function of the state S before the tree.

    Node i adds k uᵀ to the state, where u is row i of written − erased @ S.
    """

    k: jax.Array  # (l, dk)
    decay: jax.Array  # (l, l): the factor of node j's addition in node i's state; 0 off i's path
    decay_before: jax.Array  # (l,): the factor of S in node i's state
    written: jax.Array  # (l, dv)
    erased: jax.Array  # (l, dk)


def solve(updates: Updates, mask) -> Solved:
    """Solve the tree for any state before it.

    mask: (l, l), True where node j is node i or an ancestor of it, as in `treeattn.pack` and
          `treeattn.ancestor_mask`. Ancestors come first. A row of False is padding.

    The product of the gates between two nodes is computed from the sum of their logarithms. A
    quotient of two products from the root would be 0/0 on a long path.
    """
    k, v, gate, erase, write = updates
    log_gate = jnp.where(mask, jnp.log(gate), 0)
    decay = jnp.where(mask, jnp.exp(log_gate @ ~mask.T), 0)
    decay_before = jnp.exp(log_gate.sum(axis=1))
    system = erase[:, None] * jnp.tril(decay, -1) * (k @ k.T)  # the diagonal of ones is implied
    known = jnp.hstack([write[:, None] * v, (erase * decay_before)[:, None] * k])
    solution = solve_triangular(system, known, lower=True, unit_diagonal=True)
    written, erased = jnp.split(solution, [v.shape[1]], axis=1)
    return Solved(k, decay, decay_before, written, erased)


def outputs(solved: Solved, q, state):
    """(l, dv): each node's output, if `state` is the state before the tree."""
    added = solved.written - solved.erased @ state
    scores = solved.decay * (q @ solved.k.T)
    return solved.decay_before[:, None] * (q @ state) + scores @ added


def map_to(solved: Solved, node) -> Map:
    """The map from the state before the tree to the state after a node. Nothing is run again."""
    k = solved.decay[node][:, None] * solved.k
    kept = solved.decay_before[node] * jnp.eye(k.shape[1], dtype=k.dtype)
    return Map(kept - k.T @ solved.erased, k.T @ solved.written)
