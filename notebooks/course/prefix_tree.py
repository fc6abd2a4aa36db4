"""07's task: the positions and the mask of a tree, from its nodes' parents."""

from functools import partial

import numpy as np

from course.plane import title
from course.verdict import Mistake, call, verdict
from figures.canvas import styled
from figures.style import GREEN, ORANGE, PALE, RED, Figure, new_figure

MARS = "Mars is a red reddish when dark red".split()
TREES = (  # of each node its parent, which comes before it; −1 at a root
    (-1, 0, 1, 2, 1, 4, 1, 6),  # of MARS
    (-1, -1, 0, 1, 2, 3, 0, 4),  # two roots, level by level
    (-1, 0, 1, 2, 3, 4),
    (-1, -1, -1, 0, 2, 1),
    (-1,),
)


def paths_of(parents) -> list[tuple[int, ...]]:
    """Each node's numbers from the root to itself."""
    found = []
    for node, parent in enumerate(parents):
        found.append((*(found[parent] if parent >= 0 else ()), node))
    return found


def sees(paths, seen=lambda i, j: i[: len(j)] == j) -> np.ndarray:
    """The mask in which a node with path i sees the one with path j if seen(i, j)."""
    return np.array([[seen(i, j) for j in paths] for i in paths])


def mask_name(mask, paths) -> str:
    """The mistake of a mask of the right shape, "right" if there is none."""
    right, itself = sees(paths), np.eye(len(paths), dtype=bool)
    known = {
        "right": right,
        "causal mask: a node also sees the branches before it": np.tri(len(paths)),
        "transposed mask: row i says what node i sees": right.T,
        "a node sees itself, too": right & ~itself,
        "inverted mask: True means that a node sees another, not that it is blocked": ~right,
        "a node sees its parent only: let it see all its ancestors": sees(
            paths, lambda i, j: j in (i, i[:-1])
        ),
        "a node sees its parent and grandparent only: go on to the root": sees(
            paths, lambda i, j: j in (i, i[:-1], i[:-2])
        ),
        "a node sees its descendants, too: they come after it": right | right.T,
        "a node sees itself only: its ancestors are missing": itself,
        "everything is seen: a node sees its ancestors and itself": right | ~right,
        "a node sees all nodes that are less deep, whatever the branch": sees(
            paths, lambda i, j: len(i) >= len(j)
        ),
        "a node sees all nodes above its depth, whatever the branch": sees(
            paths, lambda i, j: len(i) > len(j) or i == j
        ),
        "a node sees the siblings of its ancestors, too": sees(
            paths, lambda i, j: len(i) >= len(j) and i[: len(j) - 1] == j[:-1]
        ),
        "a node sees its siblings, too": right | sees(paths, lambda i, j: i[:-1] == j[:-1]),
    }
    for name, value in known.items():
        if np.array_equal(mask, value):
            return name
    if np.array_equal(mask[:, 1:], right[:, 1:]) and (mask <= right).all():
        return "node 0 is left out: it is a parent, too, and only −1 means none"
    roots = [path for path in paths if len(path) == 1]
    if any(mask[path].sum() > 1 for path in roots):
        last = all(mask[path][-1] for path in roots)
        return "a root sees another node" + ": −1 as an index is the last node" * last
    return "another mask"


@styled
def picture(sentence: str, mask, right, tokens) -> Figure:
    """The reader's mask: right dots, those too many and those that are missing."""
    n = len(tokens)
    figure, ax = new_figure(4.6 + 0.2 * n, 1.6 + 0.3 * n)
    rows, columns = np.indices((n, n))
    for name, cells, marker, color in (
        ("seen, rightly", right & mask, "o", GREEN),
        ("x  sees too much", ~right & mask, "X", RED),
        ("o  does not see", right & ~mask, "s", ORANGE),
    ):
        hollow = {"fc": "none", "ec": color, "lw": 1.8} if marker == "s" else {"color": color}
        ax.scatter(columns[cells], rows[cells], marker=marker, s=70, label=name, **hollow)
    ax.set(xticks=range(n), yticks=range(n), xlim=(-0.6, n - 0.4), ylim=(n - 0.4, -0.6), aspect=1)
    ax.set_xticklabels(tokens, rotation=60, ha="right")
    ax.set_yticklabels(tokens)
    ax.set(xlabel="is seen", ylabel="sees")
    ax.set_axisbelow(True)
    ax.grid(color=PALE, lw=0.5)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    headline = sentence.splitlines()[0]
    title(figure, headline)
    many, few = (~right & mask).sum(), (right & ~mask).sum()
    return figure.describe(
        f"{headline}. Your mask of {n} nodes: {many} cells too many, {few} missing."
    )


def check_mask(mask, paths, tokens):
    """Raises Mistake for a wrong mask, with its name, in letters and drawn."""
    right = sees(paths)
    if mask.shape != right.shape:
        raise Mistake(f"the mask is {mask.shape}, expected {right.shape}")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise Mistake("a mask holds True and False, or 1 and 0")
    drawn = partial(picture, mask=mask == 1, right=right, tokens=tokens)
    name = mask_name(mask == 1, paths)
    if name == "right":
        return drawn
    marks = np.where(right, np.where(mask, "#", "o"), np.where(mask, "x", "."))
    lines = [f"{token!s:8} {''.join(row)}" for token, row in zip(tokens, marks, strict=True)]
    raise Mistake("\n".join([name, *lines]), drawn)


def check_positions(positions, parents, paths):
    depths = np.array([len(path) - 1 for path in paths])
    if positions.shape != depths.shape:
        raise Mistake(f"there are {positions.size} positions for {depths.size} nodes")
    known = {
        "positions count from 0: a root's is 0": depths + 1,
        "a position is a place in the candidate, not in the row": np.arange(len(depths)),
        "a position is a depth, not the parent's number": parents,
        "descendants were counted, not ancestors: sum the mask along the other axis": (
            sees(paths).sum(axis=0) - 1
        ),
    }
    if not np.array_equal(positions, depths):
        found = (name for name, x in known.items() if np.array_equal(positions, x))
        raise Mistake(next(found, "a node's position is the number of its ancestors"))


@verdict
def check_prefix_tree(mine):
    """The first mistake of a tree's mask or positions, by name; that of a mask is drawn, too."""
    shown = None
    for parents in map(np.array, TREES):
        found = call(mine, parents, given=f"parents = {parents}")
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise Mistake("return positions, mask")
        positions, mask = map(np.asarray, found)
        if positions.ndim == 2:
            raise Mistake("return positions, mask, in this order")
        paths = paths_of(parents)
        drawn = check_mask(mask, paths, range(len(paths)) if shown else MARS)
        check_positions(positions, parents, paths)
        shown = shown or drawn
    return shown
