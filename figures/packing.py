"""Figures of notebook 07: what packing saves, and trees that are no beams."""

from collections.abc import Mapping

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.boxes import ROWS, draw_tree, headline, tint, tree_layout
from figures.canvas import styled
from figures.llama import packaged_model
from figures.measured import measured
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, new_figure
from labs.cost.roofline import MACHINES, step_seconds
from treeattn import beam_search, choice_tree, depths, expand_tree, pack, unpack

MARKERS = "os^Dv"


@styled
def packing_saves(beams) -> Figure:
    """Nodes left after packing, and how full the mask is, by the length of the candidates.

    beams: name -> (M, C) candidates of a search. Their first c tokens, for c from 1 to C, are
           beams too.
    """
    figure, (left, right) = new_figure(7.4, 3.5, ncols=2)
    sizes = []  # of the whole candidates' trees
    for i, (name, beam) in enumerate(beams.items()):
        rows, length = beam.shape
        steps = np.arange(1, length + 1)
        trees = [pack(beam[None, :, :c]) for c in steps]
        nodes = np.array([tree.packed_beam.shape[1] for tree in trees])
        sizes.append(nodes[-1])
        density = [tree.attention_mask.mean() for tree in trees]
        style = {"color": ROWS[i], "marker": MARKERS[i], "ms": 5, "label": f"“{name}”"}
        left.plot(steps, nodes, **style)
        right.plot(steps, density, **style)
    left.plot(steps, rows * steps, "--", color=GREY)
    left.text(3.1, rows * 3.5, "every candidate\non its own", ha="right", fontsize=9)
    right.plot(steps, (steps + 1) / 2 / (rows * steps), "--", color=GREY)
    right.text(length, 0.075, "every candidate on its own", ha="right", fontsize=9)
    left.set(xlabel="tokens a candidate, C", ylabel="nodes of the tree", ylim=(0, None))
    right.set(
        xlabel="tokens a candidate, C", ylabel="share of the mask that is True", ylim=(0, 1.04)
    )
    headline(left, f"{rows} candidates: tokens to run …")
    headline(right, "… and scores that are used")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    return figure.describe(
        f"Two panels over the number of tokens of each of {rows} candidates, 1 to {length}, for "
        f"{len(beams)} prompts. Left, the nodes after packing, at last {min(sizes)} to "
        f"{max(sizes)}, far below the dashed line of {rows} C tokens without packing. Right, the "
        "share of the mask that is True falls with the length, but stays above that of candidates "
        "on their own."
    )


@styled
def packing_time(results: Mapping | None = None, tokens: int = 72, nodes: int = 33) -> Figure:
    """The time of a step with candidates packed and not: measured on a CPU, an H100's roofline.

    results: what benchmarks/speculative.py wrote; a checkout's when None, ValueError if none.
    tokens, nodes: of each text, for the roofline
    """
    results = measured("speculative") if results is None else results
    figure, (left, right) = new_figure(7.4, 3.4, ncols=2)
    for i, row in enumerate(results["packed"]):
        x = (row["nodes"], row["tokens"])
        y = (row["packed_ms"], row["unpacked_ms"])
        label = f"{row['kind']}: ×{row['speedup']:.1f}"
        left.plot(x, y, color=ROWS[i], marker=MARKERS[i], ms=6, lw=1.2, label=label)
    left.set(xlabel="tokens in the call", ylabel="milliseconds", xlim=(0, None), ylim=(0, None))
    left.legend(fontsize=8.5, loc="lower right", title="times as fast", title_fontsize=8.5)
    headline(left, "Measured: two CPU cores")
    batch = np.arange(1, 65)
    large = {"parameters": 8.03e9, "weight_bytes": 16.06e9, "cache_bytes": 2048 * 131072.0}
    peak, bandwidth = MACHINES["H100"]
    for n, name, color, style in (
        (tokens, "unpacked", ORANGE, "--"),
        (nodes, "packed", GREEN, "-"),
    ):
        ms = [1e3 * step_seconds(n, int(b), **large, peak=peak, bandwidth=bandwidth) for b in batch]
        right.plot(batch, ms, style, color=color, lw=2)
        at = 24 if name == "packed" else 12
        right.annotate(
            f"{name}: {n} a text ",
            (at, ms[at - 1]),
            (-3 if at == 12 else 6, 0),
            textcoords="offset points",
            ha="right" if at == 12 else "left",
            va="center",
            fontsize=9,
            color=INK,
        )
    right.set(xscale="log", yscale="log", xlabel="texts in the batch", xlim=(0.9, 250))
    right.set_xticks([1, 4, 16, 64], [1, 4, 16, 64])
    right.set_yticks([5, 10, 20, 50, 100], [5, 10, 20, 50, 100])
    right.minorticks_off()
    headline(right, "Roofline: Llama-3.1-8B on an H100")
    return figure.describe(
        "Left, measured milliseconds of one call against the tokens in it: four pairs of points, "
        f"packed and unpacked, with {results['packed'][0]['tokens']} tokens unpacked; packing is "
        f"{min(r['speedup'] for r in results['packed']):.1f} to "
        f"{max(r['speedup'] for r in results['packed']):.1f} times as fast. Right, an H100's "
        f"roofline by the number of texts: {tokens} and {nodes} tokens a text take the same time "
        "up to four texts; from about sixteen on, unpacked takes twice as long."
    )


# A small fixed tree in the style of Medusa's: which ranks of which heads are worth a try.
CHOICES = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 1), (0, 2), (0, 1, 0))


@styled
def fixed_choices(choices=CHOICES) -> Figure:
    """A tree of fixed shape: its nodes are ranks, which each step's top tokens fill."""
    heads = max(map(len, choices))
    tree = choice_tree(choices, np.tile(np.arange(1 + max(map(max, choices))), (1, heads, 1)))
    parents = np.concatenate([[-1], tree.parents[0] + 1])
    labels = ["root", *(f"rank {r}" for r in tree.tokens[0])]
    colors = [INK, *(ROWS[d % len(ROWS)] for d in depths(tree.parents[0]))]
    figure, axes = new_figure(7.2, 3.2)
    draw_tree(axes, parents, labels, colors)
    for d in range(heads):
        axes.text(d + 1, -0.85, f"head {d}", ha="center", color=INK, fontsize=9)
    axes.set_ylim(axes.get_ylim()[0], -1.2)
    headline(axes, "A list of choices is a tree whose shape never changes")
    return figure.describe(
        f"A tree from left to right: a root, then one column of boxes for each of {heads} heads. "
        "Each box names a rank, such as rank 0 for a head's best token; better ranks have more "
        "boxes below them."
    )


@styled
def expanded_tree(parents, labels, probabilities) -> Figure:
    """A tree grown from a draft's probabilities: shade and number say how probable a path is."""
    place = tree_layout(parents)
    figure, axes = new_figure(7.4, 0.8 + 0.4 * (1 + place[:, 1].max()))
    labels = [w if w.strip() else "␣" for w in labels]
    texts = [f"{w}  {p:.2f}" for w, p in zip(labels, probabilities, strict=True)]
    draw_tree(axes, parents, texts, [BLUE] * len(texts), width=0.86, fontsize=8.5)
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
    for box, p in zip(boxes, probabilities, strict=True):
        box.set_facecolor(tint(BLUE, 0.05 + 0.55 * float(p) ** 0.5))
    headline(axes, f"The {len(texts)} most probable paths: deep where the draft is sure")
    return figure.describe(
        f"A tree of {len(texts)} boxes, each a token with the probability of the path up to it, "
        f"from {max(probabilities):.2f} down to {min(probabilities):.2f}; it is deepest below the "
        f"most probable first token, “{labels[0].strip()}”."
    )


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


def searched_packing() -> Figure:
    """`packing_saves` for the beams that the packaged model's search finds."""
    beams, _ = beam_search(PromptDraft(), width=12, length=6, batch=len(PROMPTS))
    return packing_saves(dict(zip(PROMPTS, beams, strict=True)))


def grown_tree() -> Figure:
    """`expanded_tree` for the packaged model as the draft."""
    draft = PromptDraft(PROMPTS[:1])
    tree, scores = expand_tree(draft, depth=4, width=4, budget=14)
    labels = [draft.token(t) for t in tree.tokens[0].tolist()]
    return expanded_tree(tree.parents[0], labels, np.exp(scores[0]))


FIGURES = {
    "prefix_tree_saving": searched_packing,
    "prefix_tree_time": packing_time,
    "prefix_tree_choices": fixed_choices,
    "prefix_tree_grown": grown_tree,
}
