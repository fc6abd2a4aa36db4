"""How many tokens can a step give at most? A linear program over all lossless rules, and a proof.

A rule is a table of probabilities: for each drafted tree, and for each text that the step may give,
which is a path of the tree and one more token. The rule is lossless if, after each text, the steps
that go on do so with tokens in the shares of p. This is a linear equation for each text.
"""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog  # JAX installs SciPy

from labs.acceptance.rules import DrawnTree, Path, draw_tree
from treeattn_conformance import law

Nodes = frozenset[Path]


class Program(NamedTuple):
    """max lengths · x over x ≥ 0 with equations @ x = totals. x: (n,) a number for each outcome.

    outcomes:  (drafted paths, text given), whose joint probability is the number in x
    lengths:   (n,) the number of tokens of each text
    equations: (m, n) a row for each drafted tree, then a row for each text
    totals:    (m,) the probability of each tree, then zeros
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
    """The drafted paths, with (), as a set: siblings' order and repetitions do not count."""
    found = {()}
    for path, tokens in tree.children.items():
        found |= {(*path, x) for x in tokens}
    return frozenset(found)


def drafted_trees(draft: Callable, widths: tuple[int, ...], replacement: bool = False) -> dict:
    """{drafted paths: probability} of all trees that `draw_tree` may draw."""
    return law(lambda rng: paths_of(draw_tree(draft, draft, rng, widths, replacement)))


def texts_given(nodes: Nodes, target: Callable) -> Iterator[Path]:
    """All texts: a path of the tree, and one more token of positive probability."""
    for path in sorted(nodes):
        for token in np.flatnonzero(target(path)):
            yield (*path, int(token))


def best_rule_program(
    target: Callable, draft: Callable, widths: tuple[int, ...], replacement: bool = False
) -> Program:
    """The linear program for the best lossless rule, for `scipy.optimize.linprog`.

    target, draft: path -> (V,) probabilities; widths, replacement: as in `draw_tree`. The solver
    minimizes, so pass −lengths. Its duals of the texts' rows are prices for `proved_bound`.
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
    """An upper bound of a lossless rule's mean tokens, for any prices of texts; exact in Fractions.

    A step with token x after a text pays the price of x, minus the mean price of the target's token
    there. On average this costs a lossless rule nothing, so E[tokens] = E[tokens − payments], which
    is at most the mean over trees of the largest tokens − payments in the tree.
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
    """Write the payments for each beginning of the text into `paid`, summed up."""
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
    """(the program's maximum by a solver, the bound that its prices prove), in tokens of a step."""
    program = best_rule_program(target, draft, widths, replacement)
    found = linprog(-program.lengths, A_eq=program.equations, b_eq=program.totals)
    duals = -found.eqlin.marginals[len(program.trees) :]
    prices = [Fraction(x).limit_denominator(10**9) for x in duals]
    return -found.fun, proved_bound(program, target, dict(zip(program.texts, prices, strict=True)))


def best_single_node(p: np.ndarray, draws: Mapping[Nodes, object]):
    """The best chance that a node's drafted token is accepted: 1 + min over H of P(H) − Q(H).

    p: (V,); draws: {drafted paths: probability} of trees of depth 1. H is a set of tokens, and Q(H)
    is the probability that all drafted tokens are in H (https://arxiv.org/abs/2502.18779).
    """
    tokens = range(len(p))
    least = 0 * p[0]
    for code in range(2 ** len(p)):
        chosen = {x for x in tokens if code >> x & 1}
        inside = sum(c for nodes, c in draws.items() if {x[0] for x in nodes if x} <= chosen)
        least = min(least, sum((p[x] for x in chosen), 0 * p[0]) - inside)
    return 1 + least
