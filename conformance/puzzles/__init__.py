"""Puzzles: an attempt is marked by the conformance suite, and drawn beside what was asked for.

Each function takes the reader's own function, asks the suite about it, and returns a `Marked`: a
picture of the answer, with the name of the mistake. A notebook shows it by ending a cell with it.
"""

import functools
from collections.abc import Callable

import numpy as np

from figures.mass import draw_lever
from figures.style import BLUE, GREY, INK, ORANGE, PALE, RED
from treeattn_conformance import (
    Report,
    check_merge,
    check_packed_loss,
    check_tree,
    check_verifier,
    law,
    separate_rows,
)
from treeattn_conformance import merge as reference_merge

from .marking import marked
from .parts import bars, depth_first, draw_tree, ends, grid, square
from .scans import Joined, check_scan, join


def _shards(*lses) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs (out, lse) of one query and head: outs lie at 0 and 8, and at 4."""
    places = (0.0, 8.0, 4.0)
    return [
        (np.full((1, 1, 1, 1), place), np.full((1, 1, 1), float(lse)))
        for place, lse in zip(places, lses, strict=False)
    ]


def _levers(merge: Callable, parts, masses: dict, hung=None) -> dict[str, Callable]:
    """The two panels of a merge: what was asked for, and what came."""

    def lever(of, masses, wrong):
        def draw(ax):
            out, lse = (float(np.asarray(x).ravel()[0]) for x in of(parts))
            note = f"{np.exp(lse):.3g} keys in all"
            weights = {place: mass for place, mass in masses().items() if mass > 0}
            draw_lever(ax, weights, out, "", note, wrong(out))

        return draw

    right = float(reference_merge(parts)[0].ravel()[0])
    return {
        "asked for": lever(reference_merge, lambda: masses, lambda out: False),
        "your answer": lever(
            merge, hung or (lambda: masses), lambda out: not abs(out - right) < 1e-6
        ),
    }


@marked
def merge(attempt):
    """Puzzle 1: attempt(a, b) -> (out, lse) of the keys of both; a and b are pairs (out, lse)."""

    def all_of(parts):
        return functools.reduce(attempt, parts)

    parts = _shards(np.log(3), np.log(5))
    caption = "Three keys at 0 and five at 8 on a lever, balanced at 5, and your answer."
    return check_merge(all_of), 8.4, _levers(all_of, parts, {0: 3, 8: 5}), caption


@marked
def identity(attempt):
    """Puzzle 2: attempt(shape) -> (out, lse) of no keys; out is of this shape."""

    def with_yours(parts):
        """Whatever has no keys is replaced by the reader's."""
        replaced = []
        for out, lse in parts:
            none = np.isinf(lse)
            empty_out, empty_lse = attempt(out.shape)
            out = np.where(none[..., None], empty_out, out)
            replaced.append((out, np.where(none, empty_lse, lse)))
        return reference_merge(replaced)

    parts = _shards(np.log(3), np.log(5), -np.inf)
    masses = {0: 3, 8: 5}

    def with_mass_of_nothing():
        return masses | {4: np.exp(np.asarray(attempt((1, 1, 1, 1))[1]).item())}

    panels = _levers(with_yours, parts, masses, with_mass_of_nothing)
    caption = "Three keys at 0, five at 8 and a shard without keys, on a lever."
    return check_merge(with_yours), 8.4, panels, caption


@marked
def scan(attempt):
    """Puzzle 3: attempt(merge, states) -> all prefixes, in ⌈log₂ n⌉ rounds."""
    n = 8

    def draw(ax, prefixes):
        for row, prefix in enumerate(prefixes):
            for key in range(n):
                times = prefix.keys.count(key)
                wanted = key <= row
                color = (BLUE if times else PALE) if (times == wanted) else RED
                ax.add_patch(square(key, row, color, filled=bool(times)))
                if times > 1:
                    ax.text(key, row, times, ha="center", va="center", color="white", fontsize=8)
            in_order = list(prefix.keys) == sorted(prefix.keys)
            rounds = f"{prefix.rounds}" + ("" if in_order else ", backwards")
            right = in_order and prefix.rounds <= 3
            ax.text(n - 0.3, row, rounds, va="center", fontsize=8, color=INK if right else RED)
        ax.text(n - 0.3, -1.0, "rounds", va="center", fontsize=8, color=GREY)
        grid(ax, n, n, "element", "prefix", right=1.8)

    def asked(ax):
        draw(ax, [Joined(tuple(range(i + 1)), int(np.ceil(np.log2(i + 1)))) for i in range(n)])

    def yours(ax):
        draw(ax, attempt(join, [Joined((i,)) for i in range(n)]))

    caption = "Eight prefixes as rows of squares: which elements each has, after how many rounds."
    return check_scan(attempt), 8.4, {"asked for": asked, "your answer": yours}, caption


BEAM = ["the cat sat", "the cat ran", "the dog sat", "a cat sat"]


@marked
def pack(attempt):
    """Puzzle 4: attempt(rows) -> (tokens, parents, paths), each distinct prefix a node."""

    def loss(parameters, rows, weights):
        """Each token's log-probability after what its node has above it, text by text."""
        tokens, parents, paths = attempt(rows)
        if len(paths) != len(rows):
            raise ValueError(f"{len(paths)} paths, expected one for each of {len(rows)} rows")
        texts, of_last = [], []
        for path, w in zip(paths, weights, strict=True):
            for node, weight in list(zip(path, w, strict=True))[1:]:
                texts.append(_text(tokens, parents, node))
                of_last.append(np.append(np.zeros(len(texts[-1]) - 1), weight))
        return separate_rows(parameters, texts, of_last)

    report = check_packed_loss(loss, dtype="float64")
    if not report.names("failed"):
        report = _as_small_as_possible(attempt, report)
    words = [line.split() for line in BEAM]

    def asked(ax):
        prefixes = sorted({tuple(row[:i]) for row in words for i in range(1, len(row) + 1)})
        at = {prefix: i for i, prefix in enumerate(prefixes)}
        draw_tree(ax, [p[-1] for p in prefixes], [at.get(p[:-1], -1) for p in prefixes])

    def yours(ax):
        ids = {word: i for i, word in enumerate(dict.fromkeys(w for row in words for w in row))}
        names = list(ids)
        tokens, parents, paths = attempt([[ids[w] for w in row] for row in words])
        wrong = set()
        for path, row in zip(paths, words, strict=False):
            for depth, node in enumerate(path):
                above = path[depth - 1] if depth else -1
                if parents[node] != above or names[tokens[node]] != row[depth]:
                    wrong.add(node)
        draw_tree(ax, [names[t] for t in tokens], list(parents), wrong)

    caption = "Four rows of three words as a tree with one node for each distinct prefix."
    return report, 9.6, {"asked for": asked, "your answer": yours}, caption


def _text(tokens, parents, node) -> list[int]:
    """The tokens from a root down to this node."""
    text = []
    while node >= 0:
        text.append(tokens[node])
        node = parents[node]
    return text[::-1]


def _as_small_as_possible(attempt, report: Report) -> Report:
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [2, 2, 3]]
    nodes = len(attempt(rows)[0])
    prefixes = len({tuple(row[:i]) for row in rows for i in range(1, len(row) + 1)})
    if nodes == prefixes:
        return report
    detail = f"{nodes} nodes, where the rows have {prefixes} distinct prefixes"
    too_large = report.results[0]._replace(case="size", status="failed", detail=detail)
    return report._replace(results=(*report.results, too_large))


@marked
def mask(attempt):
    """Puzzle 5: attempt(end) -> (n, n) bool, node i sees node j; end[j] of depth-first nodes."""

    def in_order(parents, lengths):
        if any(depth_first(parent) != list(range(len(parent))) for parent in parents):
            raise NotImplementedError("nodes in another order")
        return {"mask": np.array([attempt(ends(parent)) for parent in parents])}

    def in_any_order(parents, lengths):
        """The same, of trees that are brought in order first."""
        masks = []
        for parent in parents:
            order = depth_first(parent)
            new = np.empty_like(parent)
            new[order] = np.arange(len(parent))
            above = [new[parent[i]] if parent[i] >= 0 else -1 for i in order]
            masks.append(np.asarray(attempt(ends(above)))[np.ix_(new, new)])
        return {"mask": np.array(masks)}

    report = check_tree(in_order)
    if not report.names("failed"):
        report = check_tree(in_any_order)
    parent = np.array([-1, 0, 1, 1, 0, 4, 5, 4])
    right = np.eye(len(parent), dtype=bool)
    for node in range(1, len(parent)):
        right[node] |= right[parent[node]]

    def draw(ax, visible):
        visible = np.asarray(visible, bool)
        for i, j in np.ndindex(right.shape):
            color = (BLUE if right[i, j] else PALE) if visible[i, j] == right[i, j] else RED
            ax.add_patch(square(j, i, color, filled=visible[i, j] or not right[i, j]))
        grid(ax, len(parent), len(parent), "key j", "query i")

    panels = {
        "the tree, with end[j]": lambda ax: draw_tree(ax, ends(parent), parent),
        "asked for": lambda ax: draw(ax, right),
        "your answer": lambda ax: draw(ax, attempt(ends(parent))),
    }
    caption = "A tree of eight nodes with the ends of their subtrees, and who sees whom."
    return report, 9.6, panels, caption


@marked
def acceptance(attempt):
    """Puzzle 6: attempt(p, q, token, u, rng) -> a token with the target's distribution p.

    `token` was drawn from q, u is uniform in 0 … 1; a token of your own comes from rng.
    """

    def step(target, draft, rng):
        p, q = _softmax(target(())), _softmax(draft(()))
        token = int(rng.choice(len(q), p=q))
        kept = int(attempt(p, q, token, rng.random(), rng))
        return [kept]

    def asked(ax):
        bars(ax, P, P)

    def yours(ax):
        def run(rng):
            token = int(rng.choice(3, p=Q))
            return int(attempt(P.copy(), Q.copy(), token, rng.random(), rng))

        chances = law(run)
        bars(ax, np.array([float(chances.get(i, 0)) for i in range(3)]), P)

    report = check_verifier(step, widths=(1,))
    caption = "How often each of three tokens comes, exactly, beside the target's probabilities."
    return report, 8.4, {"asked for": asked, "your answer": yours}, caption


P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.3, 0.5])


@marked
def wire(encode, decode):
    """Puzzle 7: encode(out, lse) -> one array of d + 2 numbers of 16 bits, and decode of it."""

    def sent(parts):
        received = []
        for out, lse in parts:
            message = np.asarray(encode(out, lse))
            room = out.shape[-1] + 2
            if message.dtype.itemsize != 2 or message.shape != (*lse.shape, room):
                raise ValueError(
                    f"a message of {message.dtype} {message.shape}, "
                    f"expected 16 bits a number and {(*lse.shape, room)}"
                )
            received.append(decode(message))
        return reference_merge(received)

    lses = np.float32(np.linspace(8.9, 9.1, 8))

    def masses(ax):
        pairs = [(np.zeros(1, np.float32), x.reshape(())) for x in lses]
        seen = [float(np.asarray(decode(encode(out, lse))[1])) for out, lse in pairs]
        ax.bar(range(8), np.exp(np.array(seen) - lses) - 1, color=RED)
        ax.axhline(0, color=BLUE)
        ax.set(ylim=(-0.06, 0.06), xlabel="shard", ylabel="error of its mass")
        ax.set_yticks([-0.05, 0, 0.05], ["−5 %", "0", "5 %"])

    def asked(ax):
        cells = ["out"] * 4 + ["lse"] * 2
        for i, name in enumerate(cells):
            ax.add_patch(square(i, 0, ORANGE if name == "out" else BLUE))
            ax.text(i, 0, name, ha="center", va="center", fontsize=8, color="white")
        ax.set(xlim=(-0.7, 5.7), ylim=(-1.2, 1.2), aspect="equal")
        ax.axis("off")

    caption = "A message of d + 2 numbers of 16 bits, and how wrong the received masses are."
    panels = {"asked for: 16 bits each, d = 4": asked, "your answer": masses}
    return check_merge(sent, dtype="bfloat16"), 8.4, panels, caption


@marked
def batch(attempt):
    """Puzzle 8: attempt(out, lse) -> (out, lse), of shards along the first axis, that have keys."""

    def of_lists(parts):
        out, lse = (np.stack(x) for x in zip(*parts, strict=True))
        if np.isinf(lse).any():
            raise NotImplementedError("no keys: that was puzzle 1")
        return attempt(out, lse)

    # Three requests of a batch: each has shards of 3 and 5 keys, whose scores lie elsewhere.
    level = np.float32([-300, 0, 300])
    lses = np.stack([level + np.log(3), level + np.log(5)])[:, :, None, None].astype(np.float32)
    outs = np.broadcast_to(np.float32([0, 8])[:, None, None, None, None], (2, 3, 1, 1, 1))

    def asked(ax):
        draw(ax, np.full(3, 5.0))

    def draw(ax, found):
        for request, x in enumerate(found):
            right = abs(x - 5) < 1e-3
            ax.bar(request, x if np.isfinite(x) else 0, color=BLUE if right else RED, width=0.6)
            ax.plot([request - 0.4, request + 0.4], [5, 5], color=INK, lw=2)
            if not np.isfinite(x):
                ax.text(request, 0.3, f"{x}", ha="center", color=RED)
        ax.set(ylim=(0, 8), ylabel="out", xlabel="lse of the request")
        ax.set_xticks(range(3), ["near −300", "near 0", "near 300"])

    def yours(ax):
        draw(ax, np.asarray(attempt(outs, lses)[0], np.float64).ravel())

    caption = "The outputs of three requests of a batch, each with 3 keys at 0 and 5 at 8."
    return check_merge(of_lists), 8.4, {"asked for": asked, "your answer": yours}, caption


def _softmax(logits):
    p = np.exp(logits - np.max(logits))
    return p / p.sum()
