"""How many tokens can a step give at most? A linear program over all lossless rules, and a proof.

A rule is a table: for each drafted tree, how likely each text is that the step may give, a path of
the tree and one token more. It is lossless if, of the steps that go on after a text, p says how
many go on with each token: as many equations as there are texts, all of them linear.
"""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog  # JAX brings it along

from labs.acceptance.rules import DrawnTree, Path, draw_tree
from treeattn_conformance import law

Nodes = frozenset[Path]


class Program(NamedTuple):
    """max lengths · x over x ≥ 0 with equations @ x = totals. x: (n,) a number for each outcome.

    outcomes:  (drafted paths, text given) of each number of x, which says how likely both are
    lengths:   (n,) how many tokens the text has
    equations: (m, n) a row for each drafted tree, then one for each text
    totals:    (m,) how likely each tree is, then zeros
    trees:     {drafted paths: probability}, in the rows' order
    texts:     the texts, in the rows' order
    """

    outcomes: list[tuple[Nodes, Path]]
    lengths: np.ndarray
    equations: np.ndarray
    totals: np.ndarray
    trees: dict[Nodes, object]
    texts: list[Path]


def paths_of(tree: DrawnTree) -> Nodes:
    """The drafted paths, () among them: the order and the repetitions of siblings do not count."""
    found = {()}
    for path, tokens in tree.children.items():
        found |= {(*path, x) for x in tokens}
    return frozenset(found)


def drafted_trees(draft: Callable, widths: tuple[int, ...], replacement: bool = False) -> dict:
    """{drafted paths: probability} of all trees that `draw_tree` may draw."""
    return law(lambda rng: paths_of(draw_tree(draft, draft, rng, widths, replacement)))


def texts_given(nodes: Nodes, target: Callable) -> Iterator[Path]:
    """A path of the tree and one token more that the target may say there."""
    for path in sorted(nodes):
        for token in np.flatnonzero(target(path)):
            yield (*path, int(token))


def best_rule_program(
    target: Callable, draft: Callable, widths: tuple[int, ...], replacement: bool = False
) -> Program:
    """The linear program whose maximum no lossless rule passes: for `scipy.optimize.linprog`.

    target, draft: path -> (V,) probabilities; widths, replacement: as of `draw_tree`. The solver
    minimizes: give it −lengths. Its duals of the texts' rows are prices for `proved_bound`.
    """
    trees = drafted_trees(draft, widths, replacement)
    outcomes = [(nodes, text) for nodes in trees for text in texts_given(nodes, target)]
    texts = sorted({text[:n] for _, text in outcomes for n in range(1, len(text) + 1)})
    tree_row = {nodes: i for i, nodes in enumerate(trees)}
    text_row = {text: len(trees) + i for i, text in enumerate(texts)}
    equations = np.zeros((len(trees) + len(texts), len(outcomes)))
    for column, (nodes, text) in enumerate(outcomes):
        equations[tree_row[nodes], column] = 1
        for n in range(len(text)):
            p = target(text[:n])
            for token in np.flatnonzero(p):
                row = text_row[(*text[:n], int(token))]
                equations[row, column] = float((token == text[n]) - p[token])
    lengths = np.array([len(text) for _, text in outcomes], float)
    totals = np.array([*map(float, trees.values()), *[0.0] * len(texts)])
    return Program(outcomes, lengths, equations, totals, trees, texts)


def proved_bound(program: Program, target: Callable, prices: Mapping[Path, object]):
    """A number of tokens that no lossless rule passes, by any prices of texts: exact in Fractions.

    Who holds token x after a text pays its price, less what the target's token would pay there on
    average. That is a fair game, so it takes nothing from a lossless rule on average, and
    E[tokens] = E[tokens − payments] ≤ the mean over trees of the largest difference in the tree.
    """
    best: dict[Nodes, object] = {}
    paid: dict[Path, object] = {(): 0}
    for nodes, text in program.outcomes:
        if text not in paid:
            _pay(paid, text, target, prices)
        kept = len(text) - paid[text]
        best[nodes] = max(best.get(nodes, kept), kept)
    return sum(chance * best[nodes] for nodes, chance in program.trees.items())


def _pay(paid: dict, text: Path, target: Callable, prices: Mapping) -> None:
    """What is paid for each beginning of the text, summed up, into `paid`."""
    for n in range(1, len(text) + 1):
        if text[:n] in paid:
            continue
        before = text[: n - 1]
        p = target(before)
        fair = sum(p[x] * prices.get((*before, x), 0) for x in range(len(p)))
        paid[text[:n]] = paid[before] + prices.get(text[:n], 0) - fair


def most_tokens(
    target: Callable, draft: Callable, widths: tuple[int, ...], replacement: bool = False
) -> tuple[float, object]:
    """(the program's maximum as a solver finds it, what its prices prove) in tokens of a step."""
    program = best_rule_program(target, draft, widths, replacement)
    found = linprog(-program.lengths, A_eq=program.equations, b_eq=program.totals)
    duals = -found.eqlin.marginals[len(program.trees) :]
    prices = [Fraction(x).limit_denominator(10**9) for x in duals]
    return -found.fun, proved_bound(program, target, dict(zip(program.texts, prices, strict=True)))


def best_single_node(p: np.ndarray, draws: Mapping[Nodes, object]):
    """How likely a drafted token can be accepted at a node at best: 1 + min over H of P(H) − Q(H).

    p: (V,); draws: {drafted paths: probability} of trees of depth 1. Q(H) is how likely all drafted
    tokens lie in the set H of tokens (https://arxiv.org/abs/2502.18779).
    """
    tokens = range(len(p))
    least = 0 * p[0]
    for code in range(2 ** len(p)):
        chosen = {x for x in tokens if code >> x & 1}
        inside = sum(c for nodes, c in draws.items() if {x[0] for x in nodes if x} <= chosen)
        least = min(least, sum((p[x] for x in chosen), 0 * p[0]) - inside)
    return 1 + least
