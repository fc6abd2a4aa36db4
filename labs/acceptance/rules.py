"""Rules that say which drafted tokens are kept, each a function of a drafted tree.

    rule(tree, rng) -> the drafted tokens kept, and one more

rng is a `numpy.random.Generator`, or what `treeattn_conformance.law` passes. The `ACCEPTANCE_RULES`
are lossless; they differ in how many tokens they keep. Probabilities may be floats or Fractions
(for k_sequential, floats).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from treeattn_conformance import law

Path = tuple[int, ...]


class DrawnTree(NamedTuple):
    """Tokens that were drawn, and what the two models say at their places.

    children:    {path: the tokens drawn after it, in this order}
    target:      path -> (V,) the probabilities of the model whose text it is to be
    draft:       path -> (V,) those that the first token after the path was drawn from
    replacement: whether the others were drawn from the same, or from what those before had left
    """

    children: dict[Path, tuple[int, ...]]
    target: Callable[[Path], np.ndarray]
    draft: Callable[[Path], np.ndarray]
    replacement: bool = False

    def after(self, path: Path) -> tuple[int, ...]:
        return self.children.get(path, ())

    def q_without(self, q: np.ndarray, x: int) -> np.ndarray:
        """What the next sibling was drawn from, after x."""
        if self.replacement:
            return q
        rest = np.array([0 * q[i] if i == x else q[i] for i in range(len(q))])
        return rest / rest.sum() if rest.sum() > 0 else rest


def draw_tree(target, draft, rng, widths: tuple[int, ...], replacement: bool = False) -> DrawnTree:
    """A tree drawn from the draft: widths[d] tokens after each path of d tokens.

    target, draft: path -> (V,) probabilities. (1, 1, 1) is a chain of three tokens. Where the draft
    has fewer tokens of positive probability, all of them are drawn.
    """
    tree = DrawnTree({}, target, draft, replacement)
    level: list[Path] = [()]
    for width in widths:
        for path in level:
            tree.children[path] = _drawn(tree, path, width, rng)
        level = [(*path, x) for path in level for x in dict.fromkeys(tree.children[path])]
    return tree


def _drawn(tree: DrawnTree, path: Path, width: int, rng) -> tuple[int, ...]:
    q = tree.draft(path)
    found: list[int] = []
    while len(found) < width and q.sum() > 0:
        found.append(int(rng.choice(len(q), p=q)))
        q = tree.q_without(q, found[-1])
    return tuple(found)


def residual(p: np.ndarray, q: np.ndarray, share=1) -> tuple[np.ndarray, object]:
    """(what share · p has more than q, normalized; how much that is). p itself where it is none."""
    rest = np.maximum(share * p - q, 0 * p)
    total = rest.sum()
    return (rest / total if total > 0 else p), total


def pick(p: np.ndarray, rng) -> int:
    return int(rng.choice(len(p), p=p))


def matching(tree: DrawnTree, rng) -> Path:
    """Draw from the target, and go on while the token is among the drafted ones."""
    path: Path = ()
    while True:
        token = pick(tree.target(path), rng)
        if token not in tree.after(path):
            return (*path, token)
        path = (*path, token)


def recursive_rejection(tree: DrawnTree, rng) -> Path:
    """Token by token, sibling by sibling, from the root (https://arxiv.org/abs/2402.14160).

    A sibling x is accepted with min(1, p(x) / q(x)); where it is not, p becomes what p still lacks.
    On a chain this is the rule of https://arxiv.org/abs/2211.17192.
    """
    path: Path = ()
    while True:
        p = tree.target(path)
        q = tree.draft(path)
        for x in tree.after(path):
            if q[x] > 0 and rng.random() < p[x] / q[x]:
                path = (*path, x)
                break
            p, _ = residual(p, q)
            q = tree.q_without(q, x)
        else:
            return (*path, pick(p, rng))


def block_verification(tree: DrawnTree, rng) -> Path:
    """A chain as a whole (https://arxiv.org/abs/2403.10444).

    share is how much of the target's probability of the path the draft's covers. Each length is
    tested for itself, and the longest that passes is accepted.
    """
    path: Path = ()
    share = 1
    accepted: Path = ()
    p_left = tree.target(())
    while tree.after(path):
        (x,) = tree.after(path)
        share = min(1, share * tree.target(path)[x] / tree.draft(path)[x])
        path = (*path, x)
        p = tree.target(path)
        chance = share
        if tree.after(path):
            p, lacking = residual(p, tree.draft(path), share)
            chance = lacking / (lacking + 1 - share) if lacking > 0 else 0 * share
        if rng.random() < chance:
            accepted, p_left = path, p
    if not accepted and tree.after(()):
        p_left, _ = residual(p_left, tree.draft(()))
    return (*accepted, pick(p_left, rng))


def traversal_verification(tree: DrawnTree, rng) -> Path:
    """A tree from its leaves up (https://arxiv.org/abs/2505.12398).

    A node is asked only after all below it were rejected. Each rejected child takes from its
    parent's p what it stood for; what is left decides the siblings, and then the parent itself.
    """
    found = _ask_below(tree, (), 1, rng)
    assert found is not None  # the root's share stays 1
    return found


def _ask_below(tree: DrawnTree, path: Path, share, rng) -> Path | None:
    """The tokens, if the node is accepted, or one below it; share: its chance, before those below
    are asked."""
    p = tree.target(path)
    q = tree.draft(path) if tree.after(path) else None
    for x in tree.after(path):
        chance = min(1, share * p[x] / q[x]) if q[x] > 0 else 0
        found = _ask_below(tree, (*path, x), chance, rng)
        if found is not None:
            return found
        p, lacking = residual(p, q, share)
        share = lacking / (lacking + 1 - share) if lacking > 0 else (share if share == 1 else 0)
        q = tree.q_without(q, x)
    if rng.random() < share:
        return (*path, pick(p, rng))
    return None


def k_sequential(tree: DrawnTree, rng) -> Path:
    """SpecTr's rule for siblings drawn with replacement (https://arxiv.org/abs/2310.15141).

    All k of them are accepted with min(1, p(x) / (ρ q(x))): with ρ above 1 the first ones leave
    something for the others. ρ is the smallest for which p is not exceeded.
    """
    path: Path = ()
    while True:
        p = tree.target(path)
        tokens = tree.after(path)
        if not tokens:
            return (*path, pick(p, rng))
        q = tree.draft(path)
        rho = smallest_rho(p, q, len(tokens))
        for x in tokens:
            if rng.random() < p[x] / (rho * q[x]):
                path = (*path, x)
                break
        else:
            taken = np.minimum(p / rho, q)
            some = 1 - (1 - taken.sum()) ** len(tokens)
            rest = np.maximum(p - taken * (some / taken.sum() if some > 0 else 0), 0)
            return (*path, pick(rest / rest.sum() if rest.sum() > 0 else p, rng))


def smallest_rho(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The ρ in [1, k] at which 1 − (1 − β)^k = ρβ, with β = Σ min(p / ρ, q)."""
    low, high = 1.0, float(k)
    for _ in range(100):
        rho = (low + high) / 2
        beta = np.minimum(p / rho, q).sum()
        low, high = (rho, high) if 1 - (1 - beta) ** k > rho * beta else (low, rho)
    return high


ACCEPTANCE_RULES = {
    "matching": matching,
    "token by token": recursive_rejection,
    "block": block_verification,
    "traversal": traversal_verification,
    "k-sequential": k_sequential,
}


def step_law(rule: Callable, target, draft, widths, replacement: bool = False) -> dict:
    """{tokens: probability} of a whole step: a tree is drawn, then the rule is asked."""

    def step(rng):
        return rule(draw_tree(target, draft, rng, widths, replacement), rng)

    return law(step)


def mean_length(found: dict):
    """The mean number of tokens of {tokens: probability}: exact in Fractions."""
    return sum(len(tokens) * chance for tokens, chance in found.items())


def largest_fault(found: dict, target: Callable):
    """How far a step, {tokens: probability}, is from lossless: exactly 0 where it is, in Fractions.

    Of the steps that go on after a text w, the share p(x | w) has to go on with x.
    """
    begun: dict[Path, object] = {}  # how likely a step's tokens begin so
    for tokens, chance in found.items():
        for n in range(len(tokens) + 1):
            begun[tokens[:n]] = begun.get(tokens[:n], 0) + chance
    faults = []
    for w in begun:
        p = target(w)
        after = [begun.get((*w, x), 0) for x in range(len(p))]
        faults += [abs(after[x] - sum(after) * p[x]) for x in range(len(p))]
    return max(faults)
