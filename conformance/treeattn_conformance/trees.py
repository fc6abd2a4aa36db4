"""check_tree: a token tree's mask, positions, links between nodes, and accepted path.

A tree holds the index of each node's parent, which is lower than the node's, and −1 at a root. The
right answers are plain loops over nodes; builders in any framework are compared with them.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np

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
    "drafts off by one": "a root's child stands one behind the root, at the prefix's length + 1",
    "path kept as a dense prefix": "gather the accepted nodes: they are not the first in memory",
}


def check_tree(
    build: Callable[[np.ndarray, np.ndarray], Mapping] | None = None,
    commit: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple] | None = None,
    *,
    only=None,
    expect=(),
) -> Report:
    """Check a builder of token trees, and a commit of an accepted path, on 42 batches of trees,
    most of up to four trees of up to 16 nodes, one of nine trees of 70.

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
    for part, (read, same, describe, _, mistakes) in PARTS.items():
        f = commit if part == "commit" else build
        if only is not None and part not in only:
            continue
        if f is None:
            results.append(Result(part, "skipped"))
        else:
            subject = Subject(read, same, describe, mistakes, TREE_CURES)
            results.append(_joined(part, judge(f, tree_questions(part), subject)))
    return Report(expected(results, expect, TREE_CURES), TREE_CURES)


def _joined(part: str, report: Report) -> Result:
    """One line for all batches: the first that failed, else the first that passed, else skipped."""
    results = [x for x in report.results if part != "commit" or x.case != "arguments"]
    x = min(results, key=lambda x: ("failed", "passed", "skipped").index(x.status))
    detail = f"{x.case}: {x.detail}" if x.status == "failed" else x.detail
    return Result(part, x.status, tuple(sorted(report.fingerprints)), detail)


# The questions


@functools.cache
def tree_questions(part: str) -> list[Question]:
    """The questions to a builder, or to a commit: one for each batch of trees."""
    questions = []
    for name, parents, lengths in tree_batches():
        arguments = {"parents": parents, "lengths": lengths}
        if part == "commit":
            room = lengths.max() + parents.shape[1] + 3
            cache = np.random.default_rng(1).normal(size=(len(lengths), room, 2))
            arguments = {
                "cache": cache.astype(np.float32),
                "lengths": lengths,
                "accepted": accepted_paths(parents),
            }
        questions.append(Question(name, arguments, {}, PARTS[part][3](*arguments.values())))
    return questions


def tree_batches() -> list[tuple[str, np.ndarray, np.ndarray]]:
    """[(name, parents (b, n), lengths (b,))], the same batches of trees at every call."""
    rng = np.random.default_rng(0)

    def random_trees(b: int, n: int) -> np.ndarray:
        parents = [[-1, *(rng.integers(0, i) for i in range(1, n))] for _ in range(b)]
        return np.array(parents)

    roots = np.array([[-1, 0, -1, 2, 0, 2], [-1, -1, -1, 0, 1, 0]])
    cases = {"several roots": (roots, [4, 1])}
    for number in range(40):
        b = rng.integers(1, 5)
        n = rng.integers(1, 17)
        cases[f"random trees {number}"] = (random_trees(b, n), rng.integers(0, 20, b))
    comb = np.maximum(np.arange(-1, 69) // 2 * 2, -1)  # its last path skips every other node
    long = np.stack([comb, np.arange(-1, 69) // 12, *random_trees(7, 70)])
    cases["70 nodes, long texts"] = (long, [300, 40_000, *range(7)])
    return [(name, x, np.array(lengths)) for name, (x, lengths) in cases.items()]


def accepted_paths(parents: np.ndarray) -> np.ndarray:
    """(b, most) int: a path of each row, from a root down, and −1 after its last node.

    The path of row r ends at node n − 1 − r, counted around.
    """
    b, n = parents.shape
    paths = [np.flatnonzero(mask[n - 1 - r % n]) for r, mask in enumerate(tree_mask(parents))]
    found = np.full((b, max(map(len, paths))), -1)
    for row, path in zip(found, paths, strict=True):
        row[: len(path)] = path
    return found


# The right answers


def tree_mask(parents: np.ndarray, lengths=None) -> np.ndarray:
    """(b, n, n): whether node i of row r sees node j, which is i itself or an ancestor of i."""
    b, n = parents.shape
    mask = np.zeros((b, n, n), bool)
    for row, parent in zip(mask, parents, strict=True):
        for i, p in enumerate(parent):
            if p >= 0:
                row[i] = row[p]
            row[i, i] = True
    return mask


def tree_depths(parents: np.ndarray) -> np.ndarray:
    """(b, n): the number of ancestors of each node."""
    return tree_mask(parents).sum(axis=-1) - 1


def tree_positions(parents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return lengths[:, None] + tree_depths(parents)


def tree_walk(parents: np.ndarray, lengths=None) -> np.ndarray:
    """(2, b, n): each node's first child (next_token) and next sibling, or −1 for none.

    Roots are siblings of each other.
    """
    walk = np.full((2, *parents.shape), -1)
    for r, parent in enumerate(parents):
        for p in range(-1, len(parent)):
            children = np.flatnonzero(parent == p)
            if p >= 0 and len(children):
                walk[0, r, p] = children[0]
            walk[1, r, children[:-1]] = children[1:]
    return walk


def kept_path(cache, lengths, accepted) -> np.ndarray:
    """The cache after a path is accepted: each row's text, then the path's nodes, then NaN."""
    cache = cache.copy()
    counts = (accepted >= 0).sum(axis=1)
    for row, length, path, count in zip(cache, lengths, accepted, counts, strict=True):
        row[length : length + count] = row[length + path[:count]]
    return up_to(cache, lengths + counts)


def up_to(cache, lengths) -> np.ndarray:
    """The cache with NaN beyond the lengths."""
    at = np.arange(cache.shape[1])[:, None]
    return np.where(at < np.asarray(lengths)[:, None, None], cache, np.nan)


# Reading, comparing and describing the parts of an answer


def mask_of(question: Question, answer) -> np.ndarray:
    return _entry(answer, "mask").astype(bool)


def positions_of(question: Question, answer) -> np.ndarray:
    return _entry(answer, "positions")


def walk_of(question: Question, answer) -> np.ndarray:
    return np.stack([_entry(answer, x) for x in ("next_token", "next_sibling")])


def kept_of(question: Question, answer) -> np.ndarray:
    return up_to(*map(np.asarray, answer))


def _entry(answer: Mapping, name: str) -> np.ndarray:
    if name not in answer:
        raise NotImplementedError(f"the answer has no {name!r}")
    return np.asarray(answer[name])


def same_arrays(question: Question, x, y) -> np.ndarray:
    """(1,)"""
    return np.array([np.array_equal(x, y, equal_nan=x.dtype.kind == "f")])


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
    off = (x != expected) & ~((x != x) & (expected != expected))  # NaN is NaN
    place = tuple(np.argwhere(off)[0].tolist())
    return f"{list(place)} is {x[place]}, expected {expected[place]}"


# Known mistakes, as functions of parents (b, n) and lengths (b,)


def of_mask(change: Callable) -> Callable:
    """change(mask, gap): gap (b, n, n) is the number of levels from node j down to node i."""

    def mask(parents, lengths):
        depths = tree_depths(parents)
        return change(tree_mask(parents), depths[:, :, None] - depths[:, None])

    return mask


def of_positions(change: Callable) -> Callable:
    """change(depths (b, n), lengths (b, 1))"""
    return lambda parents, lengths: change(tree_depths(parents), lengths[:, None])


def of_first_tree(right: Callable) -> Mistake:
    def wrong(parents, lengths):
        return right(np.repeat(parents[:1], len(parents), 0), lengths)

    return Mistake("one row's tree for all", wrong)


def dense(cache, lengths, accepted):
    return up_to(cache, lengths + (accepted >= 0).sum(axis=1))


MASKS = {
    "causal mask": lambda m, gap: np.broadcast_to(np.tri(m.shape[1], dtype=bool), m.shape),
    "whole levels seen": lambda m, gap: m | (gap > 0),
    "only the parent seen": lambda m, gap: m & (gap <= 1),
    "a node does not see itself": lambda m, gap: m & (gap > 0),
    "mask transposed": lambda m, gap: m.swapaxes(1, 2),
    "True means hidden": lambda m, gap: ~m,
    "root sees drafts": lambda m, gap: m | (np.arange(m.shape[1]) == 0)[:, None],
}
POSITIONS = (
    ("positions by index", lambda depths, n: n + np.arange(depths.shape[1])),
    ("positions without the prefix", lambda depths, n: depths),
    ("one prefix length for all", lambda depths, n: n[0] + depths),
    ("one prefix length for all", lambda depths, n: n.max() + depths),
    ("positions off by one", lambda depths, n: n + depths + 1),
    ("positions off by one", lambda depths, n: n + depths - 1),
    ("drafts off by one", lambda depths, n: n + depths + (depths > 0)),
    ("drafts off by one", lambda depths, n: n + depths - (depths > 0)),
)
PARTS = {  # {part: (read, same, describe, the right answer, mistakes)}
    "mask": (
        mask_of,
        same_arrays,
        first_entry,
        tree_mask,
        [of_first_tree(tree_mask), *(Mistake(x, of_mask(f)) for x, f in MASKS.items())],
    ),
    "positions": (
        positions_of,
        same_arrays,
        first_entry,
        tree_positions,
        [of_first_tree(tree_positions), *(Mistake(x, of_positions(f)) for x, f in POSITIONS)],
    ),
    "walk": (
        walk_of,
        same_walk,
        lambda question, walk, right: lost_children(question, walk),
        tree_walk,
        [of_first_tree(tree_walk)],
    ),
    "commit": (
        kept_of,
        same_arrays,
        first_entry,
        kept_path,
        [Mistake("path kept as a dense prefix", dense)],
    ),
}
