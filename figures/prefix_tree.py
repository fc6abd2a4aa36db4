"""Figures of notebook 07: a beam, its prefix tree, its packed row, and the way back."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.boxes import (
    MARS,
    ROWS,
    bare,
    draw_cell,
    draw_tree,
    headline,
    ids_of,
    tint,
    words_of,
)
from figures.canvas import styled
from figures.style import BLUE, INK, NOTE, ORANGE, PALE, RED, new_figure
from treeattn import pack, prefix_encoding


def owners(rows) -> np.ndarray:
    """(L,) the candidate that adds each node."""
    beam, _ = ids_of(rows)
    encoding = prefix_encoding(beam)[0]
    packed = pack(beam)
    owner = np.zeros(packed.packed_beam.shape[1], int)
    owner[packed.unpack_map[0].ravel()] = encoding.ravel()
    return owner


STEPS = (  # a function of the document, what it passes on to the next one
    ("draft_candidate_tokens", "beam  (B, M, C)"),
    ("pack", "packed_beam (B, L), attention_mask (B, L, L),\nposition_offsets (B, L)"),
    ("LLM", "out  (B, L, vocabulary)"),
    ("unpack", "verified_beam, verified_scores  (B, M, C)"),
    ("accept_candidate_tokens", "tokens: at least one for each text"),
)


@styled
def flow() -> Figure:
    """The five lines of the document as a picture: the functions, and the tensors between them."""
    figure, axes = new_figure(7.2, 5.2)
    gap = 1.3  # from one box to the next
    for i, (name, passed) in enumerate(STEPS):
        y = gap * i
        draw_cell(axes, 0, y, name, BLUE if name == "LLM" else None, width=2.6, family="monospace")
        _arrow(axes, (0, y + 0.38), (0, y + gap - 0.38))
        axes.text(0.12, y + gap / 2, passed, va="center", fontsize=8.5)
    _around(axes, 1.3, 3.6, gap, 3 * gap, "unpack_map\n(B, M, C)")
    _around(axes, -1.3, -2.2, 0.22, 4 * gap, "beam,\nscores\n(B, M, C)")
    axes.plot([0, -3.3, -3.3], [4.71 * gap, 4.71 * gap, 0], color=ORANGE, lw=1.5, ls="--")
    _arrow(axes, (-3.3, 0), (-1.3, 0), ORANGE)
    axes.text(-3.2, 2 * gap, "the text,\nlonger", fontsize=8.5, va="center")
    axes.text(1.75, 2 * gap, "the context's keys", fontsize=8.5, va="center")
    _arrow(axes, (1.7, 2 * gap), (1.3, 2 * gap))
    bare(axes, (-3.4, 4.8), (-0.5, 4.8 * gap))
    headline(axes, "Draft, pack, run once, unpack, accept")
    return figure.describe(
        "Five boxes from top to bottom: draft_candidate_tokens, pack, LLM, unpack, "
        "accept_candidate_tokens. The beam goes from the draft to pack; the packed beam, mask and "
        "position offsets from pack to the LLM; its output to unpack; the verified beam and "
        "scores to accept. Beside them unpack_map goes from pack straight to unpack, beam and "
        "scores from the draft straight to accept, and the accepted tokens back to the draft."
    )


def _arrow(axes, start, end, color=INK) -> None:
    arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=arrow)


def _around(axes, edge, x, start, end, text) -> None:
    """A line from one box to another, past those in between."""
    axes.plot([edge, x, x], [start, start, end], color=INK, lw=1.5)
    _arrow(axes, (x, end), (edge, end))
    axes.text(x + 0.1, (start + end) / 2, text, fontsize=8.5, va="center")


def tree_of(rows) -> tuple:
    """(beam, labels, parents, colours) of the rows' prefix tree."""
    beam, words = ids_of(rows)
    packed = pack(beam)
    labels = words_of(packed.packed_beam[0], words)
    parents = np.full(len(labels), -1)
    parents[packed.unpack_map[0, :, 1:]] = packed.unpack_map[0, :, :-1]
    return beam, labels, parents, [ROWS[m % len(ROWS)] for m in owners(rows)]


@styled
def beam_as_tree(rows=MARS) -> Figure:
    """The beam as a table, and the tree of its prefixes."""
    beam, labels, parents, colors = tree_of(rows)
    figure, (left, right) = new_figure(7.4, 1.9, ncols=2)
    for m, row in enumerate(rows):
        for c, word in enumerate(row):
            draw_cell(left, c, m, word)
        left.text(-0.65, m, str(m), ha="right", va="center", color=NOTE, fontsize=9)
    bare(left, (-1.0, len(rows[0]) - 0.5), (-0.6, len(rows) - 0.4))
    headline(left, f"The beam: {beam[0].size} tokens")
    draw_tree(right, parents, labels, colors, width=0.86)
    headline(right, f"Its prefix tree: {len(labels)} nodes")
    return figure.describe(
        f"Left, a table of {len(rows)} candidates of {len(rows[0])} words: "
        f"{'; '.join(' '.join(row) for row in rows)}. Right, the tree of their prefixes, with "
        f"{len(labels)} nodes: what the candidates begin with alike stands there once, and "
        "branches where they part."
    )


GUESSES = (36, 47, 7, 9), (36, 9, 9, 7), (36, 47, 41, 42)  # of 00; the last one is right


@styled
def guesses(rows=GUESSES) -> Figure:
    """The tree of 00's guesses: the number of each node in the row, and its token."""
    _, labels, parents, colors = tree_of(rows)
    figure, axes = new_figure(6.2, 1.9)
    draw_tree(axes, parents, [f"{i}:  {x}" for i, x in enumerate(labels)], colors)
    return figure.describe(
        """A tree with nine nodes, each with its number in the row and its token. Node 0, token 36,
        is the root. Nodes 1 (47), 2 (7) and 3 (9) are the first guess. Nodes 4 (9), 5 (9) and 6 (7)
        branch off at the root. Nodes 7 (41) and 8 (42) branch off at node 1."""
    )


@styled
def spoiled(rows=GUESSES) -> Figure:
    """What a causal mask and places in the row do to 00's guesses."""
    packed = pack(np.array([rows]))
    right = packed.attention_mask[0]
    n = len(right)
    figure, (left, low) = new_figure(8.4, 3.4, ncols=2, width_ratios=[1, 1.3])
    for i, j in zip(*np.tril_indices(n), strict=True):
        draw_cell(left, j, i, "" if right[i, j] else "x", BLUE if right[i, j] else RED)
    bare(left, (-1.2, n - 0.4), (-0.6, n - 0.4))
    headline(left, "Causal mask: x sees another branch")
    names = "depth", "place in the row"
    for y, (name, places) in enumerate(
        zip(names, (packed.position_offsets[0], range(n)), strict=True)
    ):
        low.text(-0.7, y, name, ha="right", va="center")
        for i, place in enumerate(places):
            wrong = place != packed.position_offsets[0, i]
            draw_cell(low, i, y, place, RED if wrong else BLUE)
    bare(low, (-4, n - 0.4), (-2, 4))
    headline(low, "Positions: wrong in the last five")
    return figure.describe(
        """Left, a causal mask of nine nodes: in rows 0 to 3 every cell is right, in rows 4 to 8
        crosses mark cells of other branches. Right, two rows of positions: the depths 0 1 2 3 1 2 3
        2 3, and the places 0 to 8, of which the last five are wrong."""
    )


@styled
def encoding_borders(rows=MARS) -> Figure:
    """The encoding: each position names the smallest row with the same prefix."""
    beam, _ = ids_of(rows)
    encoding = prefix_encoding(beam)[0]
    figure, axes = new_figure(1.5 + 1.15 * len(rows[0]), 0.75 + 0.48 * len(rows))
    for m, row in enumerate(rows):
        for c, word in enumerate(row):
            owner = encoding[m, c]
            color = ROWS[owner % len(ROWS)]
            draw_cell(axes, c, m, word, color, strength=0.3 if owner == m else 0.1)
            axes.text(c + 0.43, m - 0.2, owner, ha="right", va="center", color=INK, fontsize=8)
        border = np.flatnonzero(np.append(encoding[m] == m, True))[0] - 0.5
        axes.plot([border] * 2, [m - 0.45, m + 0.45], color=INK, lw=3, solid_capstyle="butt")
        axes.text(-0.65, m, f"row {m}", ha="right", va="center", color=NOTE, fontsize=9)
    bare(axes, (-1.3, len(rows[0]) - 0.45), (-0.6, len(rows) - 0.4))
    headline(axes, "Left of the bar: an earlier row has this prefix")
    return figure.describe(
        "The beam as a table, each word with the number of the row that owns its prefix: "
        f"{'; '.join(' '.join(map(str, row)) for row in encoding)}. A thick bar in each row "
        "separates what an earlier row owns from what the row itself adds."
    )


@styled
def tree_mask(rows=MARS) -> Figure:
    """The attention mask as a picture, coloured by the candidate that adds the column's node."""
    beam, words = ids_of(rows)
    packed = pack(beam)
    owner = owners(rows)
    labels = words_of(packed.packed_beam[0], words)
    n = len(labels)
    figure, axes = new_figure(4.9, 4.3)
    for i, j in np.ndindex(n, n):
        seen = packed.attention_mask[0, i, j]
        color = ROWS[owner[j] % len(ROWS)]
        face = tint(color, 0.45) if seen else PALE if j < i else "white"
        axes.add_patch(Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fc=face, lw=0))
        if seen:
            axes.plot(j, i, "o", ms=5, color=INK)
    axes.set(xlim=(-0.6, n - 0.4), ylim=(n - 0.4, -0.6), aspect="equal")
    axes.set_xticks(range(n), labels, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(n), labels)
    axes.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("this token …", labelpad=10)
    axes.set_xlabel("… attends to those with a dot")
    headline(axes, "Each token sees its prefix, no other branch")
    return figure.describe(
        f"A square of {n} by {n} cells, rows and columns labelled {' '.join(labels)}. A dot says "
        "that the row's token attends to the column's: below the diagonal, but not in the grey "
        "cells, which belong to other branches."
    )


FIGURES = {
    "prefix_tree_flow": flow,
    "prefix_tree_beam": beam_as_tree,
    "prefix_tree_encoding": encoding_borders,
    "prefix_tree_mask": tree_mask,
    "guesses": guesses,
    "guesses_spoiled": spoiled,
}
