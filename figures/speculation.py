"""Figures of notebook 09: the loop of speculative decoding, and a verified tree."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from figures.boxes import (
    MARS,
    bare,
    draw_cell,
    headline,
    ids_of,
    tree_layout,
)
from figures.canvas import styled
from figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    SKY,
    new_figure,
)
from treeattn import PackedBeam, pack


def _tree(axes, parents, labels, accepted=(), own=None, width=0.86, fontsize=8.5) -> None:
    """A token tree; accepted nodes have a tick and a thick frame, their edges are thick.

    own: the node that is the model's own token, which was no candidate.
    """
    place = tree_layout(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            x0, y0 = place[parent]
            x1, y1 = place[node]
            middle = (x0 + x1) / 2
            right = x1 - width / 2
            line = {"color": INK, "lw": 2.6} if node in accepted else {"color": GREY, "lw": 0.9}
            axes.plot([x0 + width / 2, middle, middle, right], [y0, y0, y1, y1], **line)
    for node, ((x, y), label) in enumerate(zip(place, labels, strict=True)):
        if node in accepted:
            text = label if node == own else f"✓ {label}"
            draw_cell(axes, x, y, text, GREEN, width=width, fontsize=fontsize, fontweight="bold")
            axes.patches[-1].set(
                linewidth=2.4, edgecolor=INK, linestyle=":" if node == own else "-"
            )
        else:
            draw_cell(axes, x, y, label, width=width, fontsize=fontsize)
            axes.patches[-1].set(linestyle="--" if len(accepted) else "-")
    deepest, lowest = place.max(axis=0)
    bare(axes, (-0.6, deepest + 0.6), (-0.6, lowest + 0.6))


@styled
def accepted_tree(
    parents: Sequence[int], labels: Sequence[str], accepted: Sequence[int], own: str = ""
) -> Figure:
    """One step's tree with the path that was accepted: ticks, thick frames and thick edges.

    accepted: the nodes of the path, the certain token first; own: the model's own token after it,
    drawn as a further node.
    """
    parents = list(parents)
    labels = list(labels)
    accepted = list(accepted)
    if own:
        parents = [*parents, accepted[-1]]
        labels = [*labels, own]
        accepted = [*accepted, len(labels) - 1]
    place = tree_layout(parents)
    figure, axes = new_figure(
        min(1.2 + 1.12 * (1 + place[:, 0].max()), 10.0), 0.75 + 0.36 * (1 + place[:, 1].max())
    )
    _tree(axes, parents, labels, accepted, len(labels) - 1 if own else None)
    if own:
        x, y = place[-1]
        axes.text(x + 0.5, y, "the model's own", va="center", fontsize=8, color=INK)
    new = len(accepted) - 1
    headline(axes, f"One call of the model, {new} new token{'s' * (new > 1)}")
    path = " ".join(labels[i] for i in accepted)
    return figure.describe(
        f"A tree of {len(labels)} tokens from left to right. Ticks and thick frames mark the "
        f"accepted path, {path}; its last box, with a dotted frame, is the model's own token. The "
        "boxes with dashed frames were guessed in vain."
    )


def verified_tree(
    packed: PackedBeam, words: Sequence[str], accepted: Sequence[int], own: str
) -> Figure:
    """`accepted_tree` of a packed beam: a word for each node, and the accepted path's nodes."""
    mask = np.asarray(packed.attention_mask[0])
    depth = np.asarray(packed.position_offsets[0])
    real = range(int(mask.diagonal().sum()))
    above = [np.flatnonzero(mask[i] & (depth == depth[i] - 1)) for i in real]
    parents = [int(found[0]) if len(found) else -1 for found in above]
    shown = [word if word.strip() else "␣" for word in (repr(w)[1:-1] for w in [*words, own])]
    return accepted_tree(parents, shown[:-1], accepted, shown[-1])


# The model's token after each of the Mars tree's eight nodes: the model writes "is dark red .".
SAID = ("is", "dark", "planet", "planet", "in", "the", "red", ".")


@styled
def loop(rows=MARS, said=SAID) -> Figure:
    """The whole loop on one beam: draft, pack, verify, unpack, accept, commit, and round again."""
    beam, words = ids_of(rows)
    packed = pack(beam)
    tokens = [words[t] for t in packed.packed_beam[0]]
    parents = [
        int(np.flatnonzero(row[:i])[-1]) if row[:i].any() else -1
        for i, row in enumerate(packed.attention_mask[0])
    ]
    figure, axes = new_figure(9.2, 5.2, nrows=2, ncols=3, width_ratios=[1, 1.2, 1])
    figure.get_layout_engine().set(wspace=0.07, hspace=0.08)
    draft, tree, verify, commit, accept, after = axes.ravel()
    _grid(draft, rows)
    headline(draft, "1  Draft: a beam of candidates")
    _tree(tree, parents, tokens, width=0.9, fontsize=8)
    headline(tree, "2  Pack: each prefix once, a tree")
    _verify(verify, tokens)
    headline(verify, "3  Verify: one call, two states")
    verified = np.array(said)[packed.unpack_map[0]]
    _grid(after, verified)
    headline(after, "4  Unpack: what comes next")
    path, new = _walk(parents, tokens, said)
    _tree(accept, parents, tokens, path, width=0.9, fontsize=8)
    headline(accept, "5  Accept: the path the model goes")
    _context(commit, [tokens[0], *new])
    headline(commit, f"6  Commit: {len(new)} tokens more")
    for a, b, start, end in (
        (draft, tree, 1, 0),
        (tree, verify, 1, 0),
        (after, accept, 0, 1),
        (accept, commit, 0, 1),
    ):
        _arrow(figure, a, (start, 0.5), b, (end, 0.5))
    _arrow(figure, verify, (0.97, 0.06), after, (0.97, 1.0))
    _arrow(figure, commit, (0.9, 0.75), draft, (0.9, 0.0))
    return figure.describe(
        "Six panels in a circle. 1 Draft: three candidates of four words. 2 Pack: their tree of "
        "eight nodes. 3 Verify: the context's keys on eight devices and the tree's own give two "
        "states, which merge. 4 Unpack: a table of what the model says after each prefix. 5 "
        "Accept: the path that the model goes. 6 Commit: its keys go into the cache, and the text "
        f"is {len(new)} tokens longer."
    )


def _grid(axes, rows) -> None:
    for m, row in enumerate(rows):
        for c, word in enumerate(row):
            draw_cell(axes, c, m, word, BLUE if m == 0 else None, fontsize=8.5)
            axes.patches[-1].set(edgecolor=GREY, facecolor="white")
    bare(axes, (-0.6, len(rows[0]) - 0.4), (-0.8, len(rows) - 0.2))


def _verify(axes, tokens) -> None:
    for device in range(8):
        draw_cell(axes, device * 0.5, 0, str(device), SKY, width=0.46, fontsize=8)
    text = "the context's keys, on devices 0 to 7"
    axes.text(1.75, -0.62, text, ha="center", fontsize=8.5, color=INK)
    for i in range(len(tokens)):
        draw_cell(axes, i * 0.5, 2.3, "", GREEN, width=0.46)
    text = f"the keys of the tree's {len(tokens)} nodes"
    axes.text(1.75, 2.95, text, ha="center", fontsize=8.5, color=INK)
    axes.text(
        1.75,
        1.15,
        "merge  →  8 distributions",
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold",
        color=INK,
    )
    for y in (0.62, 1.68):
        axes.plot([1.75, 1.75], [y - 0.2, y + 0.2], color=INK, lw=1.2)
        axes.text(1.85, y, "a state", va="center", fontsize=8.5, color=INK)
    bare(axes, (-0.4, 3.9), (-0.9, 3.2))


def _walk(parents, tokens, said) -> tuple[list[int], list[str]]:
    """The nodes on the accepted path, and the new tokens: the model's own comes last."""
    path = [0]
    while True:
        follow = [
            i for i, up in enumerate(parents) if up == path[-1] and tokens[i] == said[path[-1]]
        ]
        if not follow:
            return path, [said[node] for node in path]
        path.append(follow[0])


def _context(axes, words) -> None:
    axes.text(0, 0, "…", ha="right", va="center", fontsize=12)
    for i, word in enumerate(words):
        draw_cell(axes, 0.65 + i, 0, word, GREEN if i else None, fontsize=8.5)
        if 0 < i < len(words) - 1:
            axes.text(0.65 + i, 0.62, "✓", ha="center", va="center", fontsize=9)
    axes.text(0.65, 0.62, "certain", ha="center", va="center", fontsize=7.5)
    axes.text(len(words) - 0.35, 0.62, "its own", ha="center", va="center", fontsize=7.5)
    kept = len(words) - 1
    axes.plot([0.2, 0.2, kept + 0.1, kept + 0.1], [0.85, 1.0, 1.0, 0.85], color=INK, lw=1.2)
    text = "their keys go into the cache"
    axes.text(0.15 + kept / 2, 1.22, text, ha="center", va="center", fontsize=8.5, color=INK)
    bare(axes, (-0.4, len(words) + 0.3), (-1.3, 1.5))


def _arrow(figure, a, start, b, end) -> None:
    figure.add_artist(
        ConnectionPatch(
            start,
            end,
            "axes fraction",
            "axes fraction",
            axesA=a,
            axesB=b,
            arrowstyle="-|>",
            mutation_scale=16,
            lw=1.6,
            color=INK,
            shrinkA=2,
            shrinkB=2,
        )
    )


FIGURES = {"speculation_loop": loop}
