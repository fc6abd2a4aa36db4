"""07's task: the prefix tree of some rows of tokens."""

from functools import partial

import numpy as np

from course.plane import title
from course.verdict import Mistake, call, verdict
from figures.canvas import styled
from figures.style import GREEN, ORANGE, PALE, RED, Figure, new_figure

MARS = tuple(
    tuple(x.split()) for x in ("Mars is a red", "Mars is reddish when", "Mars is dark red")
)
BEAMS = (
    MARS,
    (("a", "b", "a"), ("a", "a", "b")),  # sets of tokens do not tell these prefixes apart
    (("Mars", "is", "red"), ("Mars", "is", "reddish")),  # nor do joined texts tell these
    (("a", "bc", "d"), ("ab", "c", "d")),
    ((3, 1, 4), (3, 1, 4), (31, 4, 1)),  # token ids, and a row twice
)


def sees(nodes, seen=lambda i, j: i[: len(j)] == j) -> np.ndarray:
    """The mask in which node i sees node j if seen(i, j)."""
    return np.array([[seen(i, j) for j in nodes] for i in nodes])


def mask_name(mask, nodes) -> str:
    """The mistake of a mask of the right shape, "right" if there is none."""
    right, itself = sees(nodes), np.eye(len(nodes), dtype=bool)
    texts, words = [" ".join(map(str, node)) for node in nodes], [set(node) for node in nodes]
    known = {
        "right": right,
        "joined texts are compared: reddish begins with red, but is another token": sees(
            texts, str.startswith
        ),
        "sets of tokens are compared: order and number count, too": sees(words, set.issuperset),
        "causal mask: a node also sees the branches before it": np.tri(len(nodes)),
        "transposed mask: row i says what node i sees": right.T,
        "a node sees itself, too": right & ~itself,
        "inverted mask: True means that a node sees another, not that it is blocked": ~right,
        "a node sees its parent only: let it see all its ancestors": sees(
            nodes, lambda i, j: j in (i, i[:-1])
        ),
        "a node sees its descendants, too: they come after it": right | right.T,
        "a node sees itself only: its ancestors are missing": itself,
        "everything is seen: a node sees its ancestors and itself": right | ~right,
        "a node sees all nodes that are less deep, whatever the branch": sees(
            nodes, lambda i, j: len(i) >= len(j)
        ),
        "a node sees all nodes above its depth, whatever the branch": sees(
            nodes, lambda i, j: len(i) > len(j) or i == j
        ),
        "a node sees an equal token of another branch: compare whole prefixes": sees(
            nodes, lambda i, j: i[len(j) - 1 : len(j)] == j[-1:]
        ),
        "a node sees the siblings of its ancestors, too": sees(
            nodes, lambda i, j: len(i) >= len(j) and i[: len(j) - 1] == j[:-1]
        ),
        "a node sees its siblings, too": right | sees(nodes, lambda i, j: i[:-1] == j[:-1]),
    }
    return next(
        (name for name, value in known.items() if np.array_equal(mask, value)), "another mask"
    )


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


def check_mask(mask, nodes, tokens):
    """Raises Mistake for a wrong mask, with its name, in letters and drawn."""
    right = sees(nodes)
    mask = np.asarray(mask)
    if mask.shape != right.shape:
        raise Mistake(f"the mask is {mask.shape}, expected {right.shape}")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise Mistake("a mask holds True and False, not 0 and -inf")
    drawn = partial(picture, mask=mask == 1, right=right, tokens=tokens)
    name = mask_name(mask, nodes)
    if name == "right":
        return drawn
    marks = np.where(right, np.where(mask, "#", "o"), np.where(mask, "x", "."))
    lines = [f"{token!s:8} {''.join(row)}" for token, row in zip(tokens, marks, strict=True)]
    raise Mistake("\n".join([name, *lines]), drawn)


def check_nodes(nodes, beam) -> list:
    """The prefixes in the order of their numbers; Mistake if they are not the beam's."""
    prefixes = {row[: c + 1] for row in beam for c in range(len(row))}
    if not isinstance(nodes, dict):
        raise Mistake(f"nodes is a {type(nodes).__name__}: return a dict, {{prefix: number}}")
    if prefixes == set(nodes.values()):
        raise Mistake("nodes is turned round: return {prefix: number}")
    if () in nodes:
        raise Mistake("the empty prefix is no node: a node has a token")
    if set(nodes) == set(beam):
        raise Mistake("only whole candidates are nodes: so is every prefix of theirs")
    if len(nodes) < len(prefixes):
        raise Mistake(
            f"one node for two prefixes: {len(nodes)} nodes, {len(prefixes)} prefixes{red(beam)}"
        )
    if len(nodes) == sum(map(len, beam)) > len(prefixes):
        raise Mistake(
            "a node for every token of every candidate: prefixes that are shared are one node"
        )
    if not all(isinstance(prefix, tuple) for prefix in nodes):
        raise Mistake("a key of nodes is a prefix, as a tuple of tokens")
    if sorted(nodes.values()) == list(range(1, len(nodes) + 1)):
        raise Mistake("nodes are numbered from 0, as the rows of the mask")
    if set(nodes) != prefixes or sorted(nodes.values()) != list(range(len(nodes))):
        raise Mistake("nodes numbers each prefix once: {prefix: number}")
    return sorted(nodes, key=nodes.get)


def red(beam) -> str:
    return ": red comes after a, and after dark" if beam is MARS else f", of {beam}"


def check_offsets(offsets, nodes):
    offsets = np.asarray(offsets)
    if offsets.ndim == 2:
        raise Mistake("return nodes, tokens, offsets, mask, in this order")
    lengths = np.array([len(prefix) for prefix in nodes])
    if offsets.shape != lengths.shape:
        raise Mistake(f"there are {offsets.size} positions for {lengths.size} nodes")
    if np.array_equal(offsets, lengths):
        raise Mistake("positions count from 0: the length of the prefix minus one")
    if np.array_equal(offsets, np.arange(len(nodes))):
        raise Mistake("a position is a place in the candidate, not in the row")
    if not np.array_equal(offsets, lengths - 1):
        raise Mistake("a node's position is the length of its prefix minus one")


@verdict
def check_prefix_tree(mine):
    """The first mistake of a prefix tree, by name; that of a mask is drawn, too."""
    shown = None
    for beam in BEAMS:
        given = f"rows = {list(beam)}"
        found = call(mine, list(beam), given=given)
        if not isinstance(found, (tuple, list)) or len(found) != 4:
            raise Mistake("return nodes, tokens, offsets, mask")
        nodes, tokens, offsets, mask = found
        nodes = check_nodes(nodes, beam)
        last = [prefix[-1] for prefix in nodes]
        tokens = [token.item() if hasattr(token, "item") else token for token in tokens]
        if tokens == nodes:
            raise Mistake("a node's token is one token, not its whole prefix")
        if tokens == [prefix[0] for prefix in nodes]:
            raise Mistake("a node's token is the last one of its prefix, not the first")
        if tokens != last:
            raise Mistake("a node's token is the last one of its prefix")
        check_offsets(offsets, nodes)
        drawn = check_mask(mask, nodes, last)
        shown = shown or drawn
    return shown
