"""Notebook 07: beams, their prefix trees, and what packing them saves."""

from collections.abc import Sequence

import jax
import numpy as np
from matplotlib.patches import Rectangle

from treeattn.figures.llama import packaged_model
from treeattn.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    new_figure,
)
from treeattn.trees.beam import pack, prefix_encoding, unpack
from treeattn.trees.draft import beam_search, choice_tree, expand_tree
from treeattn.trees.token_tree import depths, leaf_paths, tree_from_beam

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
    """What the picture shows, above it."""
    axes.set_title(text, loc="left", fontsize=11)


def bare(axes, xlim, ylim):
    """Axes for a drawing: no ticks, no frame, y downwards."""
    axes.set(xlim=xlim, ylim=ylim[::-1], xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def tree_layout(parents) -> np.ndarray:
    """(L, 2): depth, and a height that puts leaves in rows and parents amid their children."""
    parents = np.asarray(parents)
    paths, lengths = (x[0] for x in leaf_paths(parents[None], np.array([len(parents)])))
    first = [tuple(row[:n]) for row, n in zip(paths.tolist(), lengths, strict=True)]
    place = np.stack([depths(parents), np.zeros(len(parents))], axis=1).astype(float)
    for height, path in enumerate(sorted(first)):
        place[path[-1], 1] = height
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
            (x0, y0), (x1, y1) = place[parent], place[node]
            middle = (x0 + x1) / 2
            axes.plot(
                [x0 + width / 2, middle, middle, x1 - width / 2], [y0, y0, y1, y1], color=GREY, lw=1
            )
    for (x, y), label, color in zip(place, labels, colors, strict=True):
        draw_cell(axes, x, y, label, color, width=width, fontsize=fontsize)
    deepest, lowest = place.max(axis=0)
    bare(axes, (-0.5, deepest + 0.5), (-0.6, lowest + 0.6))


def owners(rows) -> np.ndarray:
    """(L,) the candidate that adds each node."""
    beam, _ = ids_of(rows)
    encoding, packed = prefix_encoding(beam)[0], pack(beam)
    owner = np.zeros(packed.packed_beam.shape[1], int)
    owner[packed.unpack_map[0].ravel()] = encoding.ravel()
    return owner


def beam_as_tree(rows=MARS):
    """The beam as a table, and the tree of its prefixes."""
    beam, words = ids_of(rows)
    tree = tree_from_beam(beam)
    labels = words_of(tree.tokens[0], words)
    colors = [ROWS[m % len(ROWS)] for m in owners(rows)]
    figure, (left, right) = new_figure(9, 2.2, ncols=2)
    for m, row in enumerate(rows):
        for c, word in enumerate(row):
            draw_cell(left, c, m, word)
        left.text(-0.65, m, f"candidate {m}", ha="right", va="center", color=GREY, fontsize=9)
    bare(left, (-1.8, len(rows[0]) - 0.5), (-0.6, len(rows) - 0.4))
    headline(left, f"The beam: {beam[0].size} tokens")
    draw_tree(right, tree.parents[0], labels, colors)
    headline(right, f"Its prefix tree: {len(labels)} nodes, one a prefix")
    return figure


def encoding_borders(rows=MARS):
    """The encoding: each position names the smallest row with the same prefix."""
    beam, _ = ids_of(rows)
    encoding = prefix_encoding(beam)[0]
    figure, axes = new_figure(1.5 + 1.15 * len(rows[0]), 0.75 + 0.48 * len(rows))
    for m, row in enumerate(rows):
        for c, word in enumerate(row):
            owner = encoding[m, c]
            color = ROWS[owner % len(ROWS)]
            draw_cell(axes, c, m, word, color, strength=0.3 if owner == m else 0.1)
            axes.text(c + 0.43, m - 0.2, owner, ha="right", va="center", color=color, fontsize=8)
        border = np.flatnonzero(np.append(encoding[m] == m, True))[0] - 0.5
        axes.plot([border] * 2, [m - 0.45, m + 0.45], color=INK, lw=3, solid_capstyle="butt")
        axes.text(-0.65, m, f"row {m}", ha="right", va="center", color=GREY, fontsize=9)
    bare(axes, (-1.3, len(rows[0]) - 0.45), (-0.6, len(rows) - 0.4))
    headline(axes, "Left of the bar: an earlier row has this prefix")
    return figure


def packed_sequence(rows=MARS):
    """The nodes in a row, candidate by candidate, with their numbers and position offsets."""
    beam, words = ids_of(rows)
    packed, owner = pack(beam), owners(rows)
    labels = words_of(packed.packed_beam[0], words)
    figure, axes = new_figure(9, 1.7)
    for i, (label, m) in enumerate(zip(labels, owner, strict=True)):
        color = ROWS[m % len(ROWS)]
        draw_cell(axes, i, 0, label, color)
        axes.text(i, -0.62, i, ha="center", va="center", color=color, fontsize=9)
        offset = packed.position_offsets[0, i]
        axes.text(i, 0.64, f"+{offset}", ha="center", va="center", color=INK, fontsize=9)
    for y, text in ((-0.62, "node"), (0, "token"), (0.64, "position offset")):
        axes.text(-0.65, y, text, ha="right", va="center", color=GREY, fontsize=9)
    bare(axes, (-2, len(labels) - 0.5), (-0.9, 0.9))
    headline(axes, "What each row adds, one row after another; offsets start again at each branch")
    return figure


def tree_mask(rows=MARS):
    """The attention mask as a picture, coloured by the candidate that adds the column's node."""
    beam, words = ids_of(rows)
    packed, owner = pack(beam), owners(rows)
    labels = words_of(packed.packed_beam[0], words)
    n = len(labels)
    figure, axes = new_figure(4.9, 4.3)
    for i, j in np.ndindex(n, n):
        seen = packed.attention_mask[0, i, j]
        color = ROWS[owner[j] % len(ROWS)]
        face = tint(color, 0.9 if i == j else 0.45) if seen else PALE if j < i else "white"
        axes.add_patch(Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fc=face, lw=0))
    axes.set(xlim=(-0.6, n - 0.4), ylim=(n - 0.4, -0.6), aspect="equal")
    axes.set_xticks(range(n), labels, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(n), labels)
    axes.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set(ylabel="this token …")
    axes.set_xlabel("… attends to the coloured ones")
    headline(axes, "Each token sees its prefix, no other branch")
    return figure


def unpacker_segments(rows=None, wrong=None):
    """A beam whose last row has three segments, unpacked; `wrong` beside it, crosses where so.

    rows: a beam of words; wrong: (M, C) the numbers that another unpacker gives.
    """
    rows = ("abc", "ade", "adf") if rows is None else rows
    wrong = np.array([[0, 1, 2], [0, 3, 4], [0, 1, 5]]) if wrong is None else np.asarray(wrong)
    beam, words = ids_of(rows)
    packed, encoding = pack(beam), prefix_encoding(beam)[0]
    tokens = words_of(packed.packed_beam[0], words)
    figure, panels = new_figure(8.6, 0.95 + 0.5 * len(rows), ncols=2)
    titles = "Two segments: the shared one is read from node 0 on", "Each position asks its own row"
    for axes, numbers, title in zip(panels, (wrong, packed.unpack_map[0]), titles, strict=True):
        for m, c in np.ndindex(*numbers.shape):
            found, meant = tokens[numbers[m, c]], rows[m][c]
            if found == meant:
                color = ROWS[encoding[m, c] % len(ROWS)]
                draw_cell(axes, c, m, f"{numbers[m, c]} → {found}", color)
            else:
                text = f"{numbers[m, c]} → {found}, not {meant}"
                draw_cell(axes, c, m, text, RED, strength=0.6, fontweight="bold")
        for m, row in enumerate(rows):
            text = " ".join(row)
            axes.text(-0.65, m, text, ha="right", va="center", color=GREY, fontsize=9)
        bare(axes, (-1.6, numbers.shape[1] - 0.45), (-0.6, len(rows) - 0.4))
        headline(axes, title)
    return figure


def shared_share(beam: np.ndarray) -> float:
    """How much of a candidate (M, C) another one begins with, on average over pairs: 0 to 1."""
    differ = beam[:, None] != beam
    common = np.where(differ.any(axis=-1), differ.argmax(axis=-1), beam.shape[1])
    pairs = ~np.eye(len(beam), dtype=bool)
    return common[pairs].mean() / beam.shape[1]


def packing_saves(beams):
    """Tokens left after packing, and how full the mask is, for beams that share more and more.

    beams: name -> (M, C) candidates of a search. Their first c tokens, for c from C down to 1, are
           beams too, and share more and more.
    """
    figure, (left, right) = new_figure(9, 3.6, ncols=2)
    for (name, beam), color in zip(beams.items(), ROWS, strict=False):
        rows, length = beam.shape
        steps = np.arange(1, length + 1)
        cuts = [beam[:, :c] for c in steps]
        share = [shared_share(cut) for cut in cuts]
        trees = [pack(cut[None]) for cut in cuts]
        nodes = np.array([tree.packed_beam.shape[1] for tree in trees])
        density = [tree.attention_mask.mean() for tree in trees]
        alone = (steps + 1) / 2 / (rows * steps)
        left.plot(share, nodes / (rows * steps), "o-", color=color, ms=4, label=name)
        right.plot(share, density, "o-", color=color, ms=4)
        right.plot(share, alone, "--", color=color, lw=1)
        place = share[-1], nodes[-1] / (rows * length)
        left.annotate(f"C = {length}", place, (0, 6), textcoords="offset points", color=color)
    left.axhline(1, color=GREY, ls="--", lw=1)
    left.text(1, 1.02, "every candidate on its own", color=GREY, ha="right", fontsize=9)
    right.text(0.99, 0.09, "every candidate on its own", color=GREY, ha="right", fontsize=9)
    label = "share of a candidate that another begins with"
    left.set(xlabel=label, ylabel="nodes / (M·C)", ylim=(0, 1.12), xlim=(None, 1.02))
    right.set(xlabel=label, ylabel="True share of the mask", ylim=(0, 1.04), xlim=(None, 1.02))
    headline(left, "The more is shared, the fewer tokens …")
    headline(right, "… and the more of the mask is used")
    left.legend(fontsize=8, loc="center right", frameon=False)
    return figure


# A small fixed tree in the style of Medusa's: which ranks of which heads are worth a try.
CHOICES = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 1), (0, 2), (0, 1, 0))


def fixed_choices(choices=CHOICES):
    """A tree of fixed shape: its nodes are ranks, which each step's top tokens fill."""
    heads = max(map(len, choices))
    tree = choice_tree(choices, np.tile(np.arange(1 + max(map(max, choices))), (1, heads, 1)))
    parents = np.concatenate([[-1], tree.parents[0] + 1])
    labels = ["root", *(f"rank {r}" for r in tree.tokens[0])]
    colors = [INK, *(ROWS[d % len(ROWS)] for d in depths(tree.parents[0]))]
    figure, axes = new_figure(7.5, 3.2)
    draw_tree(axes, parents, labels, colors)
    for d in range(heads):
        axes.text(d + 1, -0.85, f"head {d}", ha="center", color=ROWS[d % len(ROWS)], fontsize=9)
    axes.set_ylim(axes.get_ylim()[0], -1.2)
    headline(axes, "A list of choices is a tree whose shape never changes")
    return figure


def expanded_tree(parents, labels, probabilities):
    """A tree grown from a draft's probabilities: shade and number say how probable a path is."""
    place = tree_layout(parents)
    figure, axes = new_figure(9, 0.8 + 0.42 * (1 + place[:, 1].max()))
    texts = [f"{w}  {p:.2f}" for w, p in zip(labels, probabilities, strict=True)]
    draw_tree(axes, parents, texts, [BLUE] * len(texts), width=0.86, fontsize=8)
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
    for box, p in zip(boxes, probabilities, strict=True):
        box.set_facecolor(tint(BLUE, 0.05 + 0.55 * float(p) ** 0.5))
    headline(axes, f"The {len(texts)} most probable paths: deep where the draft is sure")
    return figure


PROMPTS = ("The capital of France is", "Once upon a time, there was a little", "1, 2, 3, 4, 5, 6,")


class PromptDraft:
    """The packaged model after some prompts, as what `beam_search` and `expand_tree` ask."""

    def __init__(self, prompts=PROMPTS):
        self.model = packaged_model()
        ids = [self.model.tokenizer.encode(prompt) for prompt in prompts]
        self.first, self.cache = self.model.prefill(ids, self.model.new_cache(len(ids), 32))

    def __call__(self, paths):
        depth = paths.shape[2]
        if depth == 0:
            return jax.nn.log_softmax(self.first)[:, None]
        tree = pack(paths)
        logits, _ = self.model.extend(
            tree.packed_beam,
            self.cache,
            positions=self.cache.lengths[:, None] + tree.position_offsets,
            mask=tree.attention_mask,
        )
        return jax.nn.log_softmax(unpack(logits, tree.unpack_map)[:, :, -1])

    def token(self, t: int) -> str:
        """A token as it may be written into a box; those that end a text have no letters."""
        return repr(self.model.tokenizer.decode([t]))[1:-1] or "(end)"


def searched_packing():
    """`packing_saves` for the beams that the packaged model's search finds."""
    beams, _ = beam_search(PromptDraft(), width=12, length=6, batch=len(PROMPTS))
    return packing_saves(dict(zip(PROMPTS, beams, strict=True)))


def grown_tree():
    """`expanded_tree` for the packaged model as the draft."""
    draft = PromptDraft(PROMPTS[:1])
    tree, scores = expand_tree(draft, depth=4, width=4, budget=14)
    labels = [draft.token(t) for t in tree.tokens[0].tolist()]
    return expanded_tree(tree.parents[0], labels, np.exp(scores[0]))


FIGURES = {
    "prefix_tree_beam": beam_as_tree,
    "prefix_tree_encoding": encoding_borders,
    "prefix_tree_packed": packed_sequence,
    "prefix_tree_mask": tree_mask,
    "prefix_tree_segments": unpacker_segments,
    "prefix_tree_choices": fixed_choices,
    "prefix_tree_saving": searched_packing,
    "prefix_tree_grown": grown_tree,
}
