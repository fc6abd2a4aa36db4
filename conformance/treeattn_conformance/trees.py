"""check_tree: a token tree's mask, positions, links between nodes, and accepted path."""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from . import token_trees as trees
from .judge import Mistake, Question, Subject, judge
from .report import Report, Result, expected

TREE_CURES = {
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


def check_tree(
    build: Callable[[np.ndarray, np.ndarray], Mapping] | None = None,
    commit: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple] | None = None,
    *,
    only=None,
    expect=(),
) -> Report:
    """Check a builder of token trees, and a commit of an accepted path, on 49 batches of trees.

    build:  build(parents, lengths) -> a mapping with any of the entries below. parents (b, n) int:
            each node's parent, whose index is lower, or −1 at a root. lengths (b,) int: the lengths
            of the texts before the trees.
            mask (b, n, n): True where a node, the row, sees a node, the column. The mask leaves out
            the text before the tree, which every node sees
            positions (b, n): each node's position in its text, from 0
            next_token and next_sibling (b, n), the part "walk": a node's first child and its next
            sibling, or −1. Roots are siblings of each other, and node 0 comes first. Other children
            may come in any order
    commit: commit(cache, lengths, accepted) -> (cache, lengths) after a path is accepted. cache
            (b, room, 2) float32: each row's text, then node i's entry at lengths[b] + i, then free
            room. commit may write into the cache. accepted (b, most) int: nodes from a root down,
            then −1. The returned cache is compared up to the returned lengths (b,).
    only, expect: as in `check_merge`, of "mask", "positions", "walk" and "commit"

    The report has a line for each part, with the first wrong batch. A batch is skipped if the
    function raises NotImplementedError, for "several roots" for example. Raises TypeError without a
    function.
    """
    if build is None and commit is None:
        raise TypeError("check_tree: expected a function build or commit, got None")
    results = []
    for part in PARTS:
        f = commit if part == "commit" else build
        if only is not None and part not in only:
            continue
        if f is None:
            results.append(Result(part, "skipped"))
        else:
            results.append(_joined(part, judge(f, tree_questions(part), _subject(part))))
    return Report(expected(results, expect, TREE_CURES), TREE_CURES)


def _joined(part: str, report: Report) -> Result:
    """One line for all batches: the first that failed, else the first that passed, else skipped."""
    results = [x for x in report.results if part != "commit" or x.case != "arguments"]
    for status in ("failed", "passed", "skipped"):
        for x in results:
            if x.status == status:
                detail = f"{x.case}: {x.detail}" if status == "failed" else x.detail
                return Result(part, status, tuple(sorted(report.fingerprints)), detail)
    raise AssertionError("there are questions")


# Reading and comparing the parts of an answer


def mask_of(question: Question, answer) -> np.ndarray:
    return np.asarray(_entry(answer, "mask")).astype(bool)


def positions_of(question: Question, answer) -> np.ndarray:
    return np.asarray(_entry(answer, "positions"))


def walk_of(question: Question, answer) -> np.ndarray:
    return np.stack([np.asarray(_entry(answer, x)) for x in ("next_token", "next_sibling")])


def kept_of(question: Question, answer) -> list[np.ndarray]:
    """Each row, up to its new length."""
    return [x[:n] for x, n in zip(*map(np.asarray, answer), strict=True)]


def _entry(answer: Mapping, name: str):
    if name not in answer:
        raise NotImplementedError(f"the answer has no {name!r}")
    return answer[name]


def same_arrays(question: Question, x, y) -> np.ndarray:
    """(1,)"""
    return np.array([len(x) == len(y) and all(map(np.array_equal, x, y))])


def same_walk(question: Question, x, y) -> np.ndarray:
    """(1,): against the right answer children may come in any order, else links must be equal."""
    same = not lost_children(question, x) if y is question.right else np.array_equal(x, y)
    return np.array([same])


def lost_children(question: Question, walk: np.ndarray) -> str:
    """The first node whose children the walk does not visit once each, in words, or ""."""
    for r, parent in enumerate(question.arguments["parents"]):
        for p in range(-1, len(parent)):
            children = set(np.flatnonzero(parent == p).tolist())
            child = 0 if p < 0 else int(walk[0, r, p])
            found = []
            while 0 <= child < len(parent) and len(found) <= len(children):
                found.append(child)
                child = int(walk[1, r, child])
            if child != -1 or sorted(found) != sorted(children):
                return f"row {r}: node {p} has the children {found}, expected {sorted(children)}"
    return ""


def first_entry(question: Question, x: np.ndarray, right: np.ndarray) -> str:
    expected = question.right
    if x.shape != expected.shape:
        return f"shape {x.shape}, expected {expected.shape}"
    place = tuple(np.argwhere(x != expected)[0].tolist())
    return f"{list(place)} is {x[place]}, expected {expected[place]}"


def first_row(question: Question, rows: list[np.ndarray], right: np.ndarray) -> str:
    for r, (row, wanted) in enumerate(zip(rows, question.right, strict=True)):
        if row.shape != wanted.shape:
            return f"row {r} holds {len(row)} entries, expected {len(wanted)}"
        if not np.array_equal(row, wanted):
            at = int(np.argwhere((row != wanted).any(-1))[0, 0])
            return f"row {r}, entry {at} is not that of the accepted path"
    raise AssertionError("one of them is wrong")


PARTS = {  # {part: (read, same, describe, the right answer)}
    "mask": (mask_of, same_arrays, first_entry, trees.tree_mask),
    "positions": (positions_of, same_arrays, first_entry, trees.tree_positions),
    "walk": (walk_of, same_walk, lambda x, walk, _: lost_children(x, walk), trees.tree_walk),
    "commit": (kept_of, same_arrays, first_row, trees.kept_path),
}


@functools.cache
def _subject(part: str) -> Subject:
    mistakes = [Mistake(name, wrong) for name, wrong in trees.wrong_parts()[part]]
    return Subject(*PARTS[part][:3], mistakes, TREE_CURES)


@functools.cache
def tree_questions(part: str) -> list[Question]:
    """The questions to a builder, or to a commit: one for each batch of trees."""
    questions = []
    for name, parents, lengths in trees.tree_batches():
        arguments = {"parents": parents, "lengths": lengths}
        if part == "commit":
            arguments = {
                "cache": trees.cache_with_tree(parents, lengths),
                "lengths": lengths,
                "accepted": trees.accepted_paths(parents),
            }
        questions.append(Question(name, arguments, {}, PARTS[part][3](*arguments.values())))
    return questions
