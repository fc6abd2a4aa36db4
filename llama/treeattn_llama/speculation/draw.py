"""Trees of candidates that are drawn without replacement: stochastic beam search.

Of the paths that a draft may write, one after the other is drawn by its probability, each at most
once; of each depth the first few are kept (https://arxiv.org/abs/1903.06059). There it is done with
Gumbel noise that is handed down from a path to its continuations. Here each draw asks dice, a depth
at a time, so that every way that they can fall may be followed.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Key

from treeattn.idea.arrays import Array
from treeattn_llama.speculation.candidates import Drawn
from treeattn_llama.speculation.reject import KeyDice

Node = tuple[int, int]
"""(the path that it continues, by its number among those of its depth; its token)"""


def continuations(
    q: Float[np.ndarray, "n vocabulary"],
    chances: Float[np.ndarray, " n"],
    width: int,
    dice: KeyDice,
) -> list[Node]:
    """The first `width` of these paths' continuations, as they are drawn; fewer if there are none.

    q:       what each path goes on with
    chances: how probable each path was; the paths in the order in which they were drawn

    A path is drawn by one of its continuations being drawn. So the next one to be drawn either goes
    on from a path that is known to have come (`begun`), with what earlier draws have left of its
    continuations, or it is the first of the next path, and then it goes on from there as q says.
    """
    left = np.array(q, np.float64)
    shares = np.zeros(len(q))  # of all paths' probability: what is left of each that has begun
    begun = 0
    found: list[Node] = []
    while len(found) < width:
        others = max(1 - chances[:begun].sum(), 0.0) if begun < len(q) else 0.0
        choices = np.append(shares[:begun], others)
        if not choices.sum() > 0:
            break
        path = dice.pick(choices / choices.sum())
        if path == begun:
            begun += 1
        token = dice.pick(left[path] / left[path].sum())
        left[path, token] = 0
        shares[path] = chances[path] * left[path].sum()
        found.append((path, token))
    return found


def dice_of(key: Key[Array, ""], text: int, length: int) -> KeyDice:
    """What text number `text` draws its candidates with, once it has so many tokens."""
    return KeyDice(jax.random.fold_in(jax.random.fold_in(key, text), length))


class DrawnTree:
    """One text's tree, a depth at a time."""

    def __init__(self, dice: KeyDice):
        self.dice = dice
        self.depths: list[list[Node]] = []
        self.drawn_from: list[Float[np.ndarray, "n vocabulary"]] = []
        self._chances = np.ones(1)

    def grow(self, q: Float[np.ndarray, "n vocabulary"], width: int) -> None:
        """Draw a depth: q is what follows each path, at least as many rows as there are paths."""
        q = q[: len(self._chances)]
        nodes = continuations(q, self._chances, width, self.dice)
        self.depths.append(nodes)
        self.drawn_from.append(q)
        self._chances = np.array([self._chances[path] * q[path, token] for path, token in nodes])

    def candidates(self) -> list[list[int]]:
        """Each leaf's path: of each depth, its node's number. A node's children stand in the order
        in which they were drawn, which is what acceptance goes by."""
        found = []

        def visit(path: list[int]) -> None:
            depth = len(path)
            nodes = self.depths[depth] if depth < len(self.depths) else []
            here = path[-1] if path else 0
            children = [i for i, (parent, _) in enumerate(nodes) if parent == here]
            for i in children:
                visit([*path, i])
            if path and not children:
                found.append(path)

        visit([])
        return found


def drawn_candidates(trees: Sequence[DrawnTree], tokens=None) -> Drawn:
    """The candidates of each text's tree, as `Drawn` has them.

    tokens: (n,) the tokens of the vocabulary that the trees are of; None: all
    """
    paths = [tree.candidates() for tree in trees]
    rows = max(map(len, paths))
    length = max((len(path) for of_text in paths for path in of_text), default=0)
    size = trees[0].drawn_from[0].shape[1] if length else 0
    beam = np.zeros((len(trees), rows, length), np.int32)
    scores = np.full(beam.shape, -np.inf)
    drawn_from = np.zeros((*beam.shape, size))
    for b, tree in enumerate(trees):
        for m, path in enumerate(paths[b]):
            for c, node in enumerate(path):
                parent, token = tree.depths[c][node]
                q = tree.drawn_from[c][parent]
                beam[b, m, c] = token if tokens is None else tokens[token]
                scores[b, m, c] = np.log(q[token])
                drawn_from[b, m, c] = q
    return Drawn(beam, scores, drawn_from, tokens=tokens)
