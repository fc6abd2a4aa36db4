"""Is that a token tree? What each node sees, where it stands, how it is walked, what is kept."""

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
    """Ask a builder of token trees, and what keeps an accepted path, about 48 batches of trees.

    build:  build(parents, lengths) -> a mapping with any of these. parents (b, n) int: each node's
            parent, before it, −1 at a root; lengths (b,) int: of the texts before the trees.
            mask (b, n, n): True where a node, the row, sees a node, the column; the text before
            all nodes, which every node sees, is no part of it
            positions (b, n): where in its text each node stands, from 0
            next_token and next_sibling (b, n), "walk": a node's first child and its parent's next
            one, or −1. Roots are each other's siblings, from node 0 on; other children may come in
            any order
    commit: commit(cache, lengths, accepted) -> (cache, lengths), what is in a cache once a path is
            accepted. cache (b, room, 2) float32, which it may write into: each row's text, at
            lengths[b] + i the entry of node i, and free room; accepted (b, most) int: nodes from a
            root down, then −1. It is compared as far as the new lengths (b,) say.
    only, expect: as in `check_merge`, of "mask", "positions", "walk" and "commit"

    A line for each part, with the first batch that is wrong. Raises TypeError without a function.
    What raises NotImplementedError is not asked ("several roots" is such a batch).
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
    """One line for all batches: the first that is wrong, or what was passed or skipped."""
    results = [x for x in report.results if part != "commit" or x.case != "arguments"]
    for status in ("failed", "passed", "skipped"):
        for x in results:
            if x.status == status:
                detail = f"{x.case}: {x.detail}" if status == "failed" else x.detail
                return Result(part, status, tuple(sorted(report.fingerprints)), detail)
    raise AssertionError("there are questions")


# How the parts of an answer are read, and compared


def mask_of(question: Question, answer) -> np.ndarray:
    return np.asarray(_entry(answer, "mask")).astype(bool)


def positions_of(question: Question, answer) -> np.ndarray:
    return np.asarray(_entry(answer, "positions"))


def walk_of(question: Question, answer) -> np.ndarray:
    return np.stack([np.asarray(_entry(answer, x)) for x in ("next_token", "next_sibling")])


def kept_of(question: Question, answer) -> list[np.ndarray]:
    """Each row as far as its new length says."""
    return [x[:n] for x, n in zip(*map(np.asarray, answer), strict=True)]


def _entry(answer: Mapping, name: str):
    if name not in answer:
        raise NotImplementedError(f"the answer has no {name!r}")
    return answer[name]


def same_arrays(question: Question, x, y) -> np.ndarray:
    """(1,)"""
    return np.array([len(x) == len(y) and all(map(np.array_equal, x, y))])


def same_walk(question: Question, x, y) -> np.ndarray:
    """(1,): by its links, if it is not compared with what is right, in whatever order."""
    same = not lost_children(question, x) if y is question.right else np.array_equal(x, y)
    return np.array([same])


def lost_children(question: Question, walk: np.ndarray) -> str:
    """Where the walk misses children, or finds others; "" if it visits each once, in any order."""
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


PARTS = {  # how each is read, compared and described, and what is right
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
    """What a builder, or a commit, is asked about each batch of trees."""
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
