"""Acceptance rules, which decide the drafted tokens that are kept.

    rule(tree, rng) -> the kept tokens of a drafted tree, and one more token

rng is a `numpy.random.Generator`, or the source that `treeattn_conformance.law` passes. The
`ACCEPTANCE_RULES` are lossless; they differ in how many tokens they keep. Probabilities may be
floats or Fractions, for k_sequential only floats.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from treeattn_conformance import law

Path = tuple[int, ...]


class DrawnTree(NamedTuple):
    """Drawn tokens, and the two models' probabilities.

    children:    {path: the tokens drawn after it, in this order}
    target:      path -> (V,) the target's probabilities
    draft:       path -> (V,) the probabilities from which the first token after it was drawn
    replacement: whether its siblings were drawn with replacement
    """

    children: dict[Path, tuple[int, ...]]
    target: Callable[[Path], np.ndarray]
    draft: Callable[[Path], np.ndarray]
    replacement: bool = False

    def after(self, path: Path) -> tuple[int, ...]:
        return self.children.get(path, ())

    def q_without(self, q: np.ndarray, x: int) -> np.ndarray:
        """The distribution from which x's next sibling was drawn."""
        if self.replacement:
            return q
        rest = np.array([0 * q[i] if i == x else q[i] for i in range(len(q))])
        return rest / rest.sum() if rest.sum() > 0 else rest


def draw_tree(target, draft, rng, widths: tuple[int, ...], replacement: bool = False) -> DrawnTree:
    """A tree drawn from the draft: widths[d] tokens after each path of d tokens.

    target, draft: path -> (V,) probabilities. widths of (1, 1, 1) give a chain of three tokens. If
    fewer than widths[d] tokens have positive probability, a draw without replacement takes all.
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
    """(max(share · p − q, 0), normalized; its sum). If the sum is 0, p takes its place."""
    rest = np.maximum(share * p - q, 0 * p)
    total = rest.sum()
    return (rest / total if total > 0 else p), total


def pick(p: np.ndarray, rng) -> int:
    return int(rng.choice(len(p), p=p))


def matching(tree: DrawnTree, rng) -> Path:
    """Draw tokens from the target, as long as they are among the drafted ones."""
    path: Path = ()
    while True:
        token = pick(tree.target(path), rng)
        if token not in tree.after(path):
            return (*path, token)
        path = (*path, token)


def recursive_rejection(tree: DrawnTree, rng) -> Path:
    """Token by token, sibling by sibling, from the root (https://arxiv.org/abs/2402.14160).

    A sibling x is accepted with min(1, p(x) / q(x)). If it is rejected, p becomes the normalized
    max(p − q, 0). On a chain this is the rule of https://arxiv.org/abs/2211.17192.
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

    share is the part of the drafted path's probability that the target covers. Each length of the
    path is tested independently, and the longest that passes is accepted.
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

    A node is tested only after all nodes below it were rejected. Each rejected child is subtracted
    from its parent's p. The remaining p decides about its next siblings, and then about the parent.
    """
    found = _ask_below(tree, (), 1, rng)
    assert found is not None  # the root's share stays 1
    return found


def _ask_below(tree: DrawnTree, path: Path, share, rng) -> Path | None:
    """The tokens if the node, or a node below it, is accepted, else None.

    share: the node's chance before the nodes below it are tested
    """
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

    Each of k siblings is accepted with min(1, p(x) / (ρ q(x))). With ρ above 1, the first siblings
    leave some probability for the others. ρ is the smallest for which no token exceeds p.
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
    """{tokens: probability} of a whole step, which draws a tree and applies the rule."""

    def step(rng):
        return rule(draw_tree(target, draft, rng, widths, replacement), rng)

    return law(step)


def mean_length(found: dict):
    """The mean number of tokens of {tokens: probability}: exact in Fractions."""
    return sum(len(tokens) * chance for tokens, chance in found.items())


def largest_fault(found: dict, target: Callable):
    """How far a step, {tokens: probability}, is from lossless; exactly 0 for lossless Fractions.

    Of the steps that go on after a text w, the share p(x | w) has to go on with x.
    """
    begun: dict[Path, object] = {}  # {path: the probability that a step's tokens begin with it}
    for tokens, chance in found.items():
        for n in range(len(tokens) + 1):
            begun[tokens[:n]] = begun.get(tokens[:n], 0) + chance
    faults = []
    for w in begun:
        p = target(w)
        after = [begun.get((*w, x), 0) for x in range(len(p))]
        faults += [abs(after[x] - sum(after) * p[x]) for x in range(len(p))]
    return max(faults)
