"""Drawing tokens in boxes, and trees of them: what the figures of 07 and 09 share."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle

from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY
from treeattn import depths

ROWS = (BLUE, ORANGE, GREEN, PURPLE, SKY)  # a candidate's colour, in turn
MARS = ("Mars is a red", "Mars is reddish when", "Mars is dark red")
MARS = tuple(tuple(row.split()) for row in MARS)


def ids_of(rows: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[str]]:
    """(beam (1, M, C), vocabulary): equal words get equal ids, in order of appearance."""
    words = list(dict.fromkeys(word for row in rows for word in row))
    return np.array([[[words.index(word) for word in row] for row in rows]]), words


def words_of(tokens, words: list[str]) -> list[str]:
    """The words of token ids."""
    return [words[t] for t in tokens]


def tint(color: str, strength: float = 0.25):
    """A colour mixed with white."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return tuple(1 - strength * (1 - rgb))


def draw_cell(axes, x, y, text, color=None, *, width=0.94, strength=0.25, **font):
    """A rounded-looking box of one token, centred at (x, y)."""
    face = "white" if color is None else tint(color, strength)
    box = Rectangle((x - width / 2, y - 0.36), width, 0.72, fc=face, ec=color or GREY, lw=1)
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center", **{"color": INK, "fontsize": 9, **font})


def headline(axes, text):
    """A headline above the picture."""
    axes.set_title(text, loc="left", fontsize=11)


def bare(axes, xlim, ylim):
    """Axes for a drawing: no ticks, no frame, y downwards."""
    axes.set(xlim=xlim, ylim=ylim[::-1], xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def tree_layout(parents) -> np.ndarray:
    """(L, 2): depth, and a height that puts leaves in rows and parents amid their children."""
    parents = np.asarray(parents)

    def path(node: int) -> tuple[int, ...]:
        return (*path(parents[node]), node) if node >= 0 else ()

    place = np.stack([depths(parents), np.zeros(len(parents))], axis=1).astype(float)
    leaves = set(range(len(parents))) - set(parents.tolist())
    for height, row in enumerate(sorted(map(path, leaves))):
        place[row[-1], 1] = height
    for node in reversed(range(len(parents))):
        below = place[parents == node, 1]
        if len(below):
            place[node, 1] = below.mean()
    return place


def draw_tree(axes, parents, labels, colors, *, width=0.78, fontsize=9):
    """A token tree from left to right; an edge says: may attend to, as to all before it."""
    place = tree_layout(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            x0, y0 = place[parent]
            x1, y1 = place[node]
            middle = (x0 + x1) / 2
            axes.plot(
                [x0 + width / 2, middle, middle, x1 - width / 2], [y0, y0, y1, y1], color=GREY, lw=1
            )
    for (x, y), label, color in zip(place, labels, colors, strict=True):
        draw_cell(axes, x, y, label, color, width=width, fontsize=fontsize)
    deepest, lowest = place.max(axis=0)
    bare(axes, (-0.5, deepest + 0.5), (-0.6, lowest + 0.6))
