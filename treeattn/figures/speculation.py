"""Figures of notebook 09: the loop of speculative decoding, its tree, its costs, what it saves."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from treeattn.figures.canvas import styled
from treeattn.figures.llama import packaged_model
from treeattn.figures.measured import measured
from treeattn.figures.prefix_tree import (
    MARS,
    bare,
    draw_cell,
    headline,
    ids_of,
    tree_layout,
)
from treeattn.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    new_figure,
)
from treeattn.llama.speculation import SuffixDraft, accept_candidate_tokens, likeliest
from treeattn.trees.beam import pack, unpack
from treeattn.trees.token_tree import beam_from_tree, pack_tree

STYLES = ((BLUE, "o"), (SKY, "s"), (ORANGE, "^"), (GREEN, "D"), (PURPLE, "v"), (RED, "P"),
          (GREY, "X"), (INK, "*"))  # fmt: skip
KINDS = ("chat", "code", "editing", "structured")


def _tree(axes, parents, labels, accepted=(), own=None, width=0.86, fontsize=8.5) -> None:
    """A token tree; accepted nodes have a tick and a thick frame, their edges are thick.

    own: the node that is the model's own token, which was no candidate.
    """
    place = tree_layout(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            (x0, y0), (x1, y1) = place[parent], place[node]
            middle, right = (x0 + x1) / 2, x1 - width / 2
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
    parents, labels, accepted = list(parents), list(labels), list(accepted)
    if own:
        parents, labels = [*parents, accepted[-1]], [*labels, own]
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
    return figure


PROMPT = """{"name": "Alice", "city": "Paris", "age": 34}
{"name": "Bob", "city": "Rome", "age": 27}
{"name": "Carol", "city": "Paris", "age": 45}
{"name": "Dave","""


def one_step() -> Figure:
    """`accepted_tree` for a step of the packaged model after `PROMPT`, the suffix draft's tree."""
    model, draft = packaged_model(), SuffixDraft()
    ids = model.tokenizer.encode(PROMPT)
    first, cache = model.prefill([ids], model.new_cache(1, 128))
    certain = int(np.asarray(first).argmax())
    draft.observe([[*ids, certain]])
    tree, _ = draft.propose(14)
    tokens = np.concatenate([[[certain]], tree.tokens], axis=1).astype(np.int32)
    parents = np.concatenate([[[-1]], tree.parents + 1], axis=1).astype(np.int32)
    packed = pack_tree(tree._replace(tokens=tokens, parents=parents, sizes=tree.sizes + 1))
    positions = len(ids) + packed.position_offsets
    logits, _ = model.extend(
        packed.packed_beam, cache, positions=positions, mask=packed.attention_mask
    )
    beam, lengths = beam_from_tree(
        tree._replace(tokens=tokens, parents=parents, sizes=tree.sizes + 1)
    )
    scores = np.where(np.arange(beam.shape[2]) < lengths[..., None], 0.0, -np.inf)
    verified = [unpack(np.asarray(x), packed.unpack_map) for x in likeliest(logits)]
    new = accept_candidate_tokens(beam, scores, *verified)[0]
    path = [0]
    for token in new[:-1]:
        path.append(next(i for i, (t, up) in enumerate(zip(tokens[0], parents[0], strict=True))
                         if up == path[-1] and t == token))  # fmt: skip
    words = [repr(model.tokenizer.decode([t]))[1:-1] for t in [*tokens[0].tolist(), new[-1]]]
    words = [word if word.strip() else "␣" for word in words]
    return accepted_tree(parents[0].tolist(), words[:-1], path, words[-1])


# What the model says after each of the eight nodes of the Mars tree: it goes on "is dark red .".
SAID = ("is", "dark", "planet", "planet", "in", "the", "red", ".")


@styled
def loop(rows=MARS, said=SAID) -> Figure:
    """The whole loop on one beam: draft, pack, verify, unpack, accept, and round again."""
    beam, words = ids_of(rows)
    packed = pack(beam)
    tokens = [words[t] for t in packed.packed_beam[0]]
    parents = [int(np.flatnonzero(row[:i])[-1]) if row[:i].any() else -1
               for i, row in enumerate(packed.attention_mask[0])]  # fmt: skip
    figure, axes = new_figure(10.0, 5.4, nrows=2, ncols=3, width_ratios=[1, 1.2, 1])
    figure.get_layout_engine().set(wspace=0.07, hspace=0.08)
    draft, tree, verify, accept, back, after = axes.ravel()
    _grid(draft, rows)
    headline(draft, "1  Draft: a beam of candidates")
    _tree(tree, parents, tokens, width=0.9, fontsize=8)
    headline(tree, "2  Pack: each prefix once, a tree")
    _verify(verify, tokens)
    headline(verify, "3  Verify: one call, two states")
    verified = np.array(said)[packed.unpack_map[0]]
    _grid(after, verified)
    headline(after, "4  Unpack: what follows each prefix")
    path, new = _walk(parents, tokens, said)
    _tree(back, parents, tokens, path, width=0.9, fontsize=8)
    headline(back, "5  Accept: the path the model goes")
    _context(accept, [tokens[0], *new])
    headline(accept, f"The text: {len(new)} tokens longer")
    for a, b, start, end in (
        (draft, tree, 1, 0), (tree, verify, 1, 0), (after, back, 0, 1), (back, accept, 0, 1)
    ):  # fmt: skip
        _arrow(figure, a, (start, 0.5), b, (end, 0.5))
    _arrow(figure, verify, (0.97, 0.06), after, (0.97, 1.0))
    _arrow(figure, accept, (0.9, 0.75), draft, (0.9, 0.0))
    return figure


def _grid(axes, rows) -> None:
    for m, row in enumerate(rows):
        for c, word in enumerate(row):
            draw_cell(axes, c, m, word, BLUE if m == 0 else None, fontsize=8.5)
            axes.patches[-1].set(edgecolor=GREY, facecolor="white")
    bare(axes, (-0.6, len(rows[0]) - 0.4), (-0.8, len(rows) - 0.2))


def _verify(axes, tokens) -> None:
    for device in range(8):
        draw_cell(axes, device * 0.5, 0, str(device), SKY, width=0.46, fontsize=8)
    axes.text(1.75, -0.62, "context: keys on eight devices", ha="center", fontsize=8.5, color=INK)
    for i in range(len(tokens)):
        draw_cell(axes, i * 0.5, 2.3, str(i), GREEN, width=0.46, fontsize=8)
    axes.text(1.75, 2.95, "tree: its own keys, masked", ha="center", fontsize=8.5, color=INK)
    axes.text(1.75, 1.15, "state  ⊕  state  →  8 distributions", ha="center", va="center",
              fontsize=9.5, fontweight="bold", color=INK)  # fmt: skip
    for y in (0.62, 1.68):
        axes.plot([1.75, 1.75], [y - 0.2, y + 0.2], color=INK, lw=1.2)
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


# What a step costs: a roofline, (weights' and cache's bytes / bandwidth) against (flops / peak).
# Peak and bandwidth of an H100 SXM as its data sheet has them (dense bfloat16); of the CPU, two
# cores at 3 GHz with two 8-wide fused multiply-adds a cycle, and a stream of 31 GB/s.
MACHINES = {"H100": (989e12, 3.35e12), "CPU": (192e9, 31e9)}


def step_seconds(tokens, batch: int, *, parameters: float, weight_bytes: float,
                 cache_bytes: float, peak: float, bandwidth: float):  # fmt: skip
    """The least time of a step that verifies `tokens` of each of `batch` texts.

    cache_bytes: of one text. Every weight is read once, each text's cache once; every weight takes
    two operations a token.
    """
    reading = (weight_bytes + batch * cache_bytes) / bandwidth
    return np.maximum(reading, 2 * parameters * batch * np.asarray(tokens, float) / peak)


@styled
def roofline(steps: Mapping[int, float] | None = None, context: int = 2048) -> Figure:
    """How much longer a step of n tokens takes than one of 1: on two CPU cores and on an H100.

    steps: {tokens: milliseconds} as benchmarks/speculative.py measured them, drawn beside the CPU's
    """
    n = np.arange(1, 65)
    figure, (left, right) = new_figure(10.0, 3.7, ncols=2, sharey=True)
    small = {"parameters": 134.5e6, "weight_bytes": 4 * 134.5e6, "cache_bytes": context * 46080}
    peak, bandwidth = MACHINES["CPU"]
    line = step_seconds(n, 1, **small, peak=peak, bandwidth=bandwidth)
    left.plot(n, line / line[0], color=BLUE, lw=2)
    left.text(24, line[23] / line[0] * 0.8, "roofline", color=BLUE, ha="left", va="top")
    if steps:
        x = sorted(int(key) for key in steps)
        y = [steps[str(key)] if str(key) in steps else steps[key] for key in x]
        left.plot(x, np.array(y) / y[0], "o--", color=RED, ms=6)
        left.text(x[2], y[2] / y[0] * 1.15, "measured", color=RED, ha="right", va="bottom")
    left.set_title("Two CPU cores, SmolLM2-135M, float32, batch 1", fontsize=10)
    large = {"parameters": 8.03e9, "weight_bytes": 16.06e9, "cache_bytes": context * 131072}
    peak, bandwidth = MACHINES["H100"]
    for batch, (color, marker) in zip((1, 8, 32, 128), STYLES[::2], strict=False):
        line = step_seconds(n, batch, **large, peak=peak, bandwidth=bandwidth)
        right.plot(n, line / line[0], color=color, marker=marker, markevery=[0, 15, 31, 63], ms=6)
        right.annotate(f"batch {batch}", (64, line[-1] / line[0]), (6, 0), va="center",
                       textcoords="offset points", color=color, fontsize=9)  # fmt: skip
    right.set_title(f"H100, Llama-3.1-8B, bfloat16, {context:,} tokens of context", fontsize=10)
    for ax in (left, right):
        ax.axvline(16, color=GREY, lw=0.8, ls=":")
        ax.set(xscale="log", yscale="log", xlabel="tokens a text in one step", xlim=(1, 64))
        ax.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
        ax.set_yticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
        ax.minorticks_off()
    left.set_ylabel("time over that of one token\n= tokens a step to break even")
    figure.suptitle("Verifying is nearly free while reading the weights takes longer than the "
                    "products", x=0.01, ha="left", fontsize=11)  # fmt: skip
    return figure


def _kinds(rows) -> list[str]:
    return [kind for kind in KINDS if any(r["kind"] == kind for r in rows)]


def _results(results: Mapping | None) -> Mapping:
    return measured("speculative") if results is None else results


def measured_roofline() -> Figure:
    """`roofline` with the steps that benchmarks/speculative.py measured."""
    return roofline(_results(None).get("steps"))


@styled
def tokens_a_step(results: Mapping | None = None) -> Figure:
    """New tokens for each call of the model over all steps, by kind of text and draft.

    results: what benchmarks/speculative.py wrote; a checkout's when None, ValueError if none.
    """
    rows = _results(results)["counts"]
    drafts, kinds = list(dict.fromkeys(r["draft"] for r in rows)), _kinds(rows)
    figure, axes = new_figure(10.0, 0.9 + 0.33 * len(drafts), ncols=len(kinds), sharey=True)
    for ax, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        for i, draft in enumerate(drafts):
            mine = [r["tokens_a_step"] for r in rows if (r["kind"], r["draft"]) == (kind, draft)]
            mean = float(np.mean(mine))
            ax.barh(i, mean, color=BLUE if "chain" not in draft and draft != "ngram" else ORANGE,
                    height=0.62, hatch=None if "chain" not in draft and draft != "ngram" else "//",
                    edgecolor="white")  # fmt: skip
            ax.plot(mine, [i] * len(mine), "o", color=INK, ms=2.5)
            ax.text(max(mine) * 1.03 + 0.1, i, f"{mean:.2f}", va="center", fontsize=8.5)
        ax.axvline(1, color=GREY, lw=1)
        most = max(r["tokens_a_step"] for r in rows if r["kind"] == kind)
        ax.set(xlim=(0, 1.3 * most + 0.3), title=kind)
        ax.invert_yaxis() if ax is np.atleast_1d(axes)[0] else None
    np.atleast_1d(axes)[0].set_yticks(range(len(drafts)), drafts, fontsize=9)
    figure.supxlabel("tokens a step, over all steps: mean (bar) and prompts (dots); chains hatched",
                     fontsize=9.5)  # fmt: skip
    return figure


@styled
def acceptance_by_depth(results: Mapping | None = None, least: int = 20) -> Figure:
    """Of the steps with a candidate of d tokens, the share in which d were accepted.

    results: as for `tokens_a_step`; least: depths that fewer steps reached are left out.
    """
    rows = _results(results)["counts"]
    figure, ax = new_figure(7.6, 3.9)
    for draft, (color, marker) in zip(
        dict.fromkeys(r["draft"] for r in rows), STYLES, strict=False
    ):
        counts = [r["by_depth"] for r in rows if r["draft"] == draft]
        deepest = max(map(len, counts))
        reached, taken = np.array(
            [[sum(c[d][j] for c in counts if len(c) > d) for d in range(deepest)] for j in (0, 1)]
        )
        kept = reached >= least
        ax.plot(np.arange(1, deepest + 1)[kept], (taken / np.maximum(reached, 1))[kept],
                marker=marker, color=color, ms=5, lw=1.4, label=draft)  # fmt: skip
    ax.set(xlabel="depth d of a candidate", ylabel="accepted to that depth", ylim=(0, 1))
    ax.set_title("How far candidates carry")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


@styled
def speedups(results: Mapping | None = None) -> Figure:
    """Plain decoding's time over the default draft's, prompt by prompt, least to most.

    results: as for `tokens_a_step`.
    """
    rows = sorted(_results(results)["times"], key=lambda r: (r["kind"], -r["speedup"]))
    figure, ax = new_figure(7.6, 0.9 + 0.25 * len(rows))
    ends = {}
    for i, row in enumerate(rows):
        color, marker = STYLES[2 * KINDS.index(row["kind"])]
        ax.plot(row["spread"], [i, i], color=color, lw=2)
        ax.plot(row["speedup"], i, marker, color=color, ms=7)
        ax.text(row["spread"][1] * 1.03, i, f"{row['tokens_a_step']:.1f} a step", va="center",
                fontsize=8, color=INK)  # fmt: skip
        ends[row["kind"]] = i
    ax.axvline(1, color=INK, lw=1)
    for end in list(ends.values())[:-1]:
        ax.axhline(end + 0.5, color=GREY, lw=0.6, ls=":")
    ax.set_yticks(range(len(rows)), [f"{r['kind']}: {r['name']}" for r in rows], fontsize=8.5)
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="times plain decoding's speed, after prefill")
    ticks = [
        t for t in (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8) if t < 1.4 * max(r["speedup"] for r in rows)
    ]
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.set_xlim(min(0.7, *(r["spread"][0] for r in rows)) * 0.95,
                1.35 * max(r["spread"][1] for r in rows))  # fmt: skip
    ax.set_title("Guessing pays where texts repeat themselves")
    return figure


FIGURES = {
    "speculation_loop": loop,
    "speculation_tree": one_step,
    "speculation_roofline": measured_roofline,
    "speculation_tokens": tokens_a_step,
    "speculation_depth": acceptance_by_depth,
    "speculation_times": speedups,
}
