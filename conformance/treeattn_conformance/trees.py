"""Is that a token tree? What each node sees, where it stands, how it is walked, what is kept."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .report import Report, Result, first_line
from .token_trees import (
    TreeCase,
    accepted_paths,
    cache_with_tree,
    kept_path,
    tree_cases,
    tree_depths,
    tree_mask,
    wrong_commits,
    wrong_masks,
    wrong_positions,
    wrong_walks,
)

TREE_FINGERPRINTS = {
    "one row's tree for all": "every row of a batch has a tree of its own: build one for each",
    "causal mask": "a lower index is no ancestor: follow the parents",
    "whole levels seen": "a node sees its ancestors, and none of their siblings",
    "only the parent seen": "a node sees all its ancestors, up to the root",
    "a node does not see itself": "a token attends to itself: set the mask's diagonal",
    "mask transposed": "rows are queries, columns are keys: a node does not see its descendants",
    "True means hidden": "True is where a node sees: invert the mask",
    "root sees drafts": "the root is verified already, and sees itself alone",
    "positions by index": "siblings stand at one position: the prefix's length + the depth",
    "positions without the prefix": "add the length of the text before the tree",
    "one prefix length for all": "add each row's own length",
    "positions off by one": "a root's depth is 0: it stands at the prefix's length",
    "next sibling by level": "a sibling has the same parent, not only the same depth",
    "only first children": "link each child to the next one: next_sibling",
    "next token by index": "the next index may be a sibling: link to a child, or −1",
    "last child first": "next_sibling goes on from the first child, not from the last",
    "0 for none": "node 0 is a node: write −1 where there is no other",
    "path kept as a dense prefix": "gather the accepted nodes: they are not the first in memory",
    "one row's path for all": "every row keeps a path of its own",
    "one row's count for all": "every row grows by its own number of accepted nodes",
    "root not kept": "the first accepted node is kept as well",
}


def _same_walk(walk, parents: np.ndarray) -> str:
    """Where the walk misses children, or finds others; "" if it visits each once, in any order."""
    next_token, next_sibling = walk
    for r, parent in enumerate(parents):
        for p in range(-1, len(parent)):
            expected = set(np.flatnonzero(parent == p).tolist())
            child = 0 if p < 0 else int(next_token[r, p])
            found = []
            while 0 <= child < len(parent) and len(found) <= len(expected):
                found.append(child)
                child = int(next_sibling[r, child])
            if child != -1 or sorted(found) != sorted(expected):
                return f"row {r}: node {p} has the children {found}, expected {sorted(expected)}"
    return ""


def _same_array(x: np.ndarray, expected: np.ndarray) -> str:
    if x.shape != expected.shape:
        return f"shape {x.shape}, expected {expected.shape}"
    wrong = np.argwhere(x != expected)
    if not len(wrong):
        return ""
    place = tuple(wrong[0].tolist())
    return f"{list(place)} is {x[place]}, expected {expected[place]}"


def _same_rows(rows: list[np.ndarray], expected: list[np.ndarray]) -> str:
    for r, (row, right) in enumerate(zip(rows, expected, strict=True)):
        if row.shape != right.shape:
            return f"row {r} holds {len(row)} entries, expected {len(right)}"
        if not np.array_equal(row, right):
            at = int(np.argwhere((row != right).any(-1))[0, 0])
            return f"row {r}, entry {at} is not that of the accepted path"
    return ""


class _Field(NamedTuple):
    """How one part of an answer is read, judged, and recognized."""

    read: Callable  # (answer of build or commit) -> what is compared; KeyError where it has none
    wrong: Callable  # (case) -> (fingerprint, what would have come) of each
    fault: Callable  # (what came, case) -> where it is wrong, or ""
    same: Callable  # (what came, what would have come) -> "" if they are the same


FIELDS = {
    "mask": _Field(
        lambda answer: np.asarray(answer["mask"]).astype(bool),
        wrong_masks,
        lambda x, case: _same_array(x, tree_mask(case.parents)),
        _same_array,
    ),
    "positions": _Field(
        lambda answer: np.asarray(answer["positions"]),
        wrong_positions,
        lambda x, case: _same_array(x, case.lengths[:, None] + tree_depths(case.parents)),
        _same_array,
    ),
    "walk": _Field(
        lambda answer: tuple(np.asarray(answer[x]) for x in ("next_token", "next_sibling")),
        wrong_walks,
        lambda x, case: _same_walk(x, case.parents),
        lambda x, y: _same_array(np.stack(x), np.stack(y)),
    ),
    "commit": _Field(
        lambda answer: [x[:n] for x, n in zip(*map(np.asarray, answer), strict=True)],
        wrong_commits,
        lambda x, case: _same_rows(
            x, kept_path(cache_with_tree(case), case.lengths, accepted_paths(case))
        ),
        _same_rows,
    ),
}


def check_tree(
    build: Callable[[np.ndarray, np.ndarray], Mapping] | None = None,
    commit: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple] | None = None,
) -> Report:
    """Ask a builder of token trees, and what keeps an accepted path, all `tree_cases`.

    build:  build(parents, lengths) -> a mapping with any of these. parents (b, n) int: each node's
            parent, before it, −1 at a root; lengths (b,) int: of the texts before the trees.
            mask (b, n, n): True where a node, the row, sees a node, the column; the text before
            all nodes, which every node sees, is no part of it
            positions (b, n): where in its text each node stands, from 0
            next_token and next_sibling (b, n): a node's first child and its parent's next one, or
            −1, in any order that reaches every child once; roots are each other's siblings
    commit: commit(cache, lengths, accepted) -> (cache, lengths), what is in a cache once a path is
            accepted. cache (b, room, 2) float32: each row's text, at lengths[b] + i the entry of
            node i, and free room; accepted (b, most) int: nodes from a root down, then −1. It is
            compared as far as the new lengths (b,) say.

    A line for each part. A mistake is named if it explains every answer, right ones and wrong ones.
    Raises TypeError without a function.

    A function that raises NotImplementedError is not asked that case ("several roots" is one).
    """
    if build is None and commit is None:
        raise TypeError("check_tree: expected a function build or commit, got None")

    def built(case: TreeCase) -> Mapping:
        return build(case.parents.copy(), case.lengths.copy())

    def committed(case: TreeCase) -> tuple:
        return commit(cache_with_tree(case), case.lengths.copy(), accepted_paths(case))

    results = []
    for name, field in FIELDS.items():
        ask = committed if name == "commit" else built
        missing = (commit if name == "commit" else build) is None
        results.append(Result(name, "skipped") if missing else _judge(name, field, ask))
    return Report(tuple(results), TREE_FINGERPRINTS)


def _judge(name: str, field: _Field, ask: Callable) -> Result:
    """What came of one field in all cases; a mistake is named if it explains every answer."""
    explaining: set[tuple[str, int]] | None = None
    first = ""
    asked = False
    for case in tree_cases():
        try:
            answer = field.read(ask(case))
            fault = field.fault(answer, case)
        except NotImplementedError:
            continue
        except KeyError as error:
            return Result(name, "skipped", (), f"the answer has no {error}")
        except Exception as error:
            detail = f"{case.name}: {type(error).__name__}: {first_line(error)}"
            return Result(name, "failed", (), detail)
        asked = True
        likely = {
            (mistake, form)
            for form, (mistake, wrong) in enumerate(field.wrong(case))
            if not field.same(answer, wrong)
        }
        explaining = likely if explaining is None else explaining & likely
        first = first or (fault and f"{case.name}: {fault}")
    if not asked:
        return Result(name, "skipped")
    if not first:
        return Result(name, "passed")
    return Result(name, "failed", tuple(sorted({x for x, _ in explaining})), first)
