"""One page to keep beside the code: the state, its merge, and what merging over devices sends."""

from matplotlib.patches import Rectangle

from figures.canvas import styled
from figures.style import BLUE, GREY, INK, ORANGE, PALE, Figure, new_figure

CARDS = {  # title -> lines
    "A state: all that is kept of a set of keys": (
        r"scores $s_i = q\cdot k_i\,/\sqrt{d_k}$ and values $v_i$ become",
        r"$m = \mathrm{max}_i\ s_i$",
        r"$d = \Sigma_i\ e^{\,s_i - m}$",
        r"$n = \Sigma_i\ e^{\,s_i - m}\,v_i$",
        r"it stands for $(d\,e^m,\ n\,e^m)$, whatever $m$ is",
    ),
    "merge(a, b): the state of both sets": (
        r"$m = \max(m_a, m_b)$",
        r"$d = d_a\,e^{m_a - m} + d_b\,e^{m_b - m}$",
        r"$n = n_a\,e^{m_a - m} + n_b\,e^{m_b - m}$",
        "associative, commutative: any order, any split",
        "of disjoint sets",
    ),
    "identity: no keys": (
        r"$(m, d, n) = (-\infty,\ 0,\ 0)$",
        "merges with anything and changes nothing:",
        r"$m = -\infty$ weighs 0, with itself too; never NaN",
    ),
    "finalize(state): attention": (
        r"out $= n / d$,   lse $= m + \ln d$",
        r"no keys: out 0, lse $-\infty$, gradients 0",
        r"back: from_output(out, lse) $= ($lse$,\ 1,\ $out$)$",
    ),
}
LOGARITHM = (
    r"lse is a natural logarithm in float32. Of a kernel that returns it to base 2, merge "
    r"lse $= \ln 2 \cdot$ lse$_2$."
)

TREE = (
    "In a prefix tree of tokens a node is its prefix: it sees the nodes whose prefixes its own "
    "begins with."
)


def sent_by_method(p: int, heads: int, head_dim: int, cache: int) -> dict[str, tuple[str, float]]:
    """Method -> (formula, bytes) that each of p devices sends for one query; float32.

    cache: bytes of a device's keys and values.
    """
    state = 4 * heads * (head_dim + 2)
    log = (p - 1).bit_length()
    share = (p - 1) / p
    return {
        "allreduce": (r"$2\,\frac{p-1}{p}\,S$", 2 * share * state),
        "butterfly": (r"$\lceil\log_2 p\rceil\,S$", log * state),
        "gather": (r"$(p-1)\,S$", (p - 1) * state),
        "all_to_all": (r"$\frac{p-1}{p}\,S$", share * state),
        "ring": (r"$(p-1)$ shards of the cache", (p - 1) * cache),
    }


ENDS = {"all_to_all": "its share of the heads"}


def _sent_table(ax) -> dict[str, tuple[str, float]]:
    """Draw the lower half: what each of eight devices sends, by method. Returns those rows."""
    ax.add_patch(Rectangle((0, 42), 86, 29.7, fc="white", ec=GREY, lw=0.8))
    ax.add_patch(Rectangle((0, 42), 86, 3.8, fc=PALE, ec=GREY, lw=0.8))
    ax.text(
        1.2,
        43.9,
        "Over p devices: what each of them sends, for one query",
        va="center",
        fontweight="bold",
        fontsize=10.5,
        color=INK,
    )
    ax.text(
        1.2,
        47.9,
        r"$S = 4\,h\,(d_v + 2)$ bytes, the state of $h$ heads in float32: its size "
        "does not depend on the number of keys.",
        va="center",
        fontsize=10,
        color=INK,
    )
    columns = (1.2, 19, 44, 62)
    header = ("method", "sent by a device", "8 devices*", "a device ends with")
    for x, text in zip(columns, header, strict=True):
        ax.text(x, 51.4, text, va="center", fontsize=9.5, color=INK, fontweight="bold")
    ax.plot([1.2, 84.8], [53, 53], color=GREY, lw=0.8)
    rows = sent_by_method(8, 16, 128, cache=(1 << 19) // 8 * 4 * 128 * 2 * 4)
    for i, (method, (formula, count)) in enumerate(rows.items()):
        color = ORANGE if method == "ring" else BLUE
        y = 55 + 2.85 * i
        ax.add_patch(
            Rectangle(
                (1.2, y - 0.8),
                1.4,
                1.6,
                fc=color,
                ec="none",
                hatch="//" if method == "ring" else None,
            )
        )
        cells = method, formula, f"{count:,.0f} B", ENDS.get(method, "all heads")
        for x, text in zip((3.6, *columns[1:]), cells, strict=True):
            ax.text(x, y, text, va="center", fontsize=10, color=INK)
    ax.text(
        1.2,
        70,
        "* 16 heads of 128 over 4 key heads, float32, 512k keys. A ring hands on "
        "keys and values, all others states.",
        va="center",
        fontsize=9,
        color=INK,
    )
    return rows


@styled
def cheat_sheet() -> Figure:
    """State, identity, merge, finalize, the logarithm's base, and bytes by method, on a page."""
    figure, ax = new_figure(8.6, 7.6)
    ax.set(xlim=(-0.3, 86.3), ylim=(75.2, -0.4), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    places = ((0, 0, 42, 20.5), (44, 0, 42, 20.5), (0, 22.5, 42, 14), (44, 22.5, 42, 14))
    for (title, lines), (x, y, width, height) in zip(CARDS.items(), places, strict=True):
        ax.add_patch(Rectangle((x, y), width, height, fc="white", ec=GREY, lw=0.8))
        ax.add_patch(Rectangle((x, y), width, 3.8, fc=PALE, ec=GREY, lw=0.8))
        ax.text(x + 1.2, y + 1.9, title, va="center", fontweight="bold", fontsize=10.5, color=INK)
        for i, line in enumerate(lines):
            ax.text(x + 1.2, y + 6 + 3.2 * i, line, va="center", fontsize=10.5, color=INK)
    ax.text(0, 39.2, LOGARITHM, va="center", fontsize=9.5, color=INK)
    ax.text(0, 73.8, TREE, va="center", fontsize=9.5, color=INK)

    rows = _sent_table(ax)
    table = "; ".join(f"{method} {count:,.0f}" for method, (_, count) in rows.items())
    return figure.describe(
        f"""A cheat sheet. The state of a set of keys is (m, d, n): the largest score, the sum of
        exp(s − m), and that sum weighted by the values. The identity, of no keys, is (−∞, 0, 0).
        Merging takes the larger m and adds both sums, each times exp(its m − m). Finalizing gives
        out = n / d and lse = m + ln d, a natural logarithm. In a prefix tree of tokens a
        node sees the nodes whose prefixes its own begins with. Bytes that each of eight
        devices sends for one query of 16 heads of 128: {table}."""
    )


FIGURES = {"cheat_sheet": cheat_sheet}
