"""Is that a token tree? What each node sees, where it stands, how it is walked, what is kept."""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from .judge import Mistake, Question, Subject, judge
from .report import Report, Result, expected
from .token_trees import (
    accepted_paths,
    cache_with_tree,
    kept_path,
    tree_batches,
    tree_depths,
    tree_mask,
    tree_walk,
)

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
    for part, subject in PARTS.items():
        f = commit if part == "commit" else build
        if only is not None and part not in only:
            continue
        if f is None:
            results.append(Result(part, "skipped"))
        else:
            results.append(_joined(part, judge(f, tree_questions(part), subject)))
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


# What known mistakes give, of parents (b, n) and lengths (b,)


def masks() -> dict[str, list[Callable]]:
    def of_levels(compare):
        def mask(parents, lengths):
            depths = tree_depths(parents)
            return compare(depths[:, None, :], depths[..., None]) | np.eye(
                parents.shape[1], dtype=bool
            )

        return mask

    def first_sees(parents, lengths):
        mask = tree_mask(parents)
        mask[:, 0] = True
        return mask

    def parent_alone(parents, lengths):
        n = parents.shape[1]
        return (np.arange(n) == parents[..., None]) | np.eye(n, dtype=bool)

    def causal(parents, lengths):
        n = parents.shape[1]
        return np.broadcast_to(np.tri(n, dtype=bool), (len(parents), n, n))

    return {
        "one row's tree for all": [
            lambda parents, _: tree_mask(np.repeat(parents[:1], len(parents), 0))
        ],
        "causal mask": [causal],
        "whole levels seen": [of_levels(np.less), of_levels(np.less_equal)],
        "only the parent seen": [parent_alone],
        "a node does not see itself": [
            lambda parents, _: tree_mask(parents) & ~np.eye(parents.shape[1], dtype=bool)
        ],
        "mask transposed": [lambda parents, _: tree_mask(parents).swapaxes(1, 2)],
        "True means hidden": [lambda parents, _: ~tree_mask(parents)],
        "root sees drafts": [first_sees],
    }


def positions() -> dict[str, list[Callable]]:
    def after(prefix):
        return lambda parents, lengths: prefix(lengths[:, None]) + tree_depths(parents)

    def by_index(parents, lengths):
        return lengths[:, None] + np.broadcast_to(np.arange(parents.shape[1]), parents.shape)

    def of_first(parents, lengths):
        return lengths[:, None] + tree_depths(parents[:1])

    return {
        "one row's tree for all": [of_first],
        "positions by index": [by_index],
        "positions without the prefix": [after(lambda lengths: 0)],
        "one prefix length for all": [after(lambda lengths: lengths[0]), after(np.max)],
        "positions off by one": [after(lambda x: x + 1), after(lambda x: x - 1)],
    }


def walks() -> dict[str, list[Callable]]:
    def levels(parents, lengths):
        """The next node of the same depth."""
        depths, (first, _) = tree_depths(parents), tree_walk(parents)
        links = np.full_like(parents, -1)
        for r, i in np.ndindex(parents.shape):
            later = np.flatnonzero(depths[r, i + 1 :] == depths[r, i])
            links[r, i] = i + 1 + later[0] if len(later) else -1
        return np.stack([first, links])

    def last_first(parents, lengths):
        last = np.full_like(parents, -1)
        for r, i in np.ndindex(parents.shape):
            if parents[r, i] >= 0:
                last[r, parents[r, i]] = i
        return np.stack([last, tree_walk(parents)[1]])

    def by_index(parents, lengths):
        links = np.append(np.arange(1, parents.shape[1]), -1)
        return np.stack([np.broadcast_to(links, parents.shape), tree_walk(parents)[1]])

    def changed(change):
        return lambda parents, lengths: np.stack(change(*tree_walk(parents)))

    return {
        "one row's tree for all": [
            lambda parents, _: np.stack(tree_walk(np.repeat(parents[:1], len(parents), 0)))
        ],
        "next sibling by level": [levels],
        "only first children": [changed(lambda child, sibling: (child, np.full_like(sibling, -1)))],
        "next token by index": [by_index],
        "last child first": [last_first],
        "0 for none": [changed(lambda *links: np.maximum(links, 0))],
    }


def commits() -> dict[str, list[Callable]]:
    """Of a cache, lengths and accepted paths."""

    def dense(cache, lengths, paths):
        return kept_path(cache, lengths, np.where(paths >= 0, np.arange(paths.shape[1]), -1))

    def of_row(r):
        return lambda cache, lengths, paths: kept_path(cache, lengths, paths[[r] * len(paths)])

    def count(of_all):
        """Behind a path that is shorter lies what the cache held there."""

        def commit(cache, lengths, paths):
            rows = zip(cache, kept_path(cache, lengths, paths), lengths, strict=True)
            n = of_all((paths >= 0).sum(1))
            return [np.concatenate([x[: m + n], row[len(x) : m + n]]) for row, x, m in rows]

        return commit

    def without_root(cache, lengths, paths):
        return kept_path(cache, lengths, paths[:, 1:])

    return {
        "path kept as a dense prefix": [dense],
        "one row's path for all": [of_row(0), of_row(-1)],
        "one row's count for all": [count(np.max), count(lambda counts: counts[0]), count(np.min)],
        "root not kept": [without_root],
    }


def part(read, same, describe, known: dict[str, list[Callable]]) -> Subject:
    mistakes = [Mistake(name, wrong) for name, forms in known.items() for wrong in forms]
    return Subject(read, same, describe, mistakes, TREE_CURES)


PARTS = {
    "mask": part(mask_of, same_arrays, first_entry, masks()),
    "positions": part(positions_of, same_arrays, first_entry, positions()),
    "walk": part(
        walk_of, same_walk, lambda question, walk, _: lost_children(question, walk), walks()
    ),
    "commit": part(kept_of, same_arrays, first_row, commits()),
}


@functools.cache
def tree_questions(part: str) -> list[Question]:
    """What a builder, or a commit, is asked about each batch of trees."""
    questions = []
    for name, parents, lengths in tree_batches():
        arguments = {"parents": parents, "lengths": lengths}
        if part == "commit":
            arguments = {
                "cache": cache_with_tree(parents, lengths),
                "lengths": lengths,
                "accepted": accepted_paths(parents),
            }
        right = {
            "mask": lambda parents, _: tree_mask(parents),
            "positions": lambda parents, lengths: lengths[:, None] + tree_depths(parents),
            "walk": lambda parents, _: np.stack(tree_walk(parents)),
            "commit": kept_path,
        }[part]
        questions.append(Question(name, arguments, {}, right(*arguments.values())))
    return questions
