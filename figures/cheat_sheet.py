"""One page to keep beside the code: the state, its merge, and what merging over devices sends."""

from matplotlib.patches import Rectangle

from figures.canvas import styled
from figures.rulers import draw_rulers
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
    log = (p - 1).bit_length()  # p is a power of two
    share = (p - 1) / p
    return {
        "allreduce": (r"$2\,\frac{p-1}{p}\,S$", 2 * share * state),
        "butterfly": (r"$\log_2 p\;S$, if $p = 2^k$", log * state),
        "gather": (r"$(p-1)\,S$", (p - 1) * state),
        "all_to_all": (r"$\frac{p-1}{p}\,S$", share * state),
        "ring": (r"$(p-1)$ shards of the cache", (p - 1) * cache),
    }


ENDS = {"all_to_all": "its share of the heads"}


def _card(ax, x: float, y: float, width: float, height: float, title: str) -> None:
    ax.add_patch(Rectangle((x, y), width, height, fc="white", ec=GREY, lw=0.8))
    ax.add_patch(Rectangle((x, y), width, 3.8, fc=PALE, ec=GREY, lw=0.8))
    ax.text(x + 1.2, y + 1.9, title, va="center", fontweight="bold", fontsize=10.5, color=INK)


def _sent_table(ax) -> dict[str, tuple[str, float]]:
    """Draw what each of eight devices sends on average, by method. Returns those rows."""
    title = "Over p devices: what each of them sends for one query, on average"
    _card(ax, 0, 82.5, 86, 29.7, title)
    ax.text(
        1.2,
        88.4,
        r"$S = 4\,h\,(d_v + 2)$ bytes, the state of $h$ heads in float32: its size "
        "does not depend on the number of keys.",
        va="center",
        fontsize=10,
        color=INK,
    )
    columns = (1.2, 19, 44, 62)
    header = ("method", "sent by a device", "8 devices*", "a device ends with")
    for x, text in zip(columns, header, strict=True):
        ax.text(x, 91.9, text, va="center", fontsize=9.5, color=INK, fontweight="bold")
    ax.plot([1.2, 84.8], [93.5, 93.5], color=GREY, lw=0.8)
    rows = sent_by_method(8, 16, 128, cache=(1 << 19) // 8 * 4 * 128 * 2 * 4)
    for i, (method, (formula, count)) in enumerate(rows.items()):
        color = ORANGE if method == "ring" else BLUE
        y = 95.5 + 2.85 * i
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
        110.5,
        "* 16 heads of 128 over 4 key heads, float32, 512k keys. A ring hands on "
        "keys and values, all others states.",
        va="center",
        fontsize=9,
        color=INK,
    )
    return rows


@styled
def cheat_sheet() -> Figure:
    """State, merge, identity, finalize, Algorithm 3 and bytes by method, on a page."""
    figure, ax = new_figure(8.6, 11.65)
    ax.set(xlim=(-0.3, 86.3), ylim=(115.7, -0.4), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    places = ((0, 0, 42, 20.5), (44, 0, 42, 20.5), (0, 22.5, 42, 14), (44, 22.5, 42, 14))
    for (title, lines), (x, y, width, height) in zip(CARDS.items(), places, strict=True):
        _card(ax, x, y, width, height, title)
        for i, line in enumerate(lines):
            ax.text(x + 1.2, y + 6 + 3.2 * i, line, va="center", fontsize=10.5, color=INK)
    ax.text(0, 39.2, LOGARITHM, va="center", fontsize=9.5, color=INK)
    ax.text(0, 114.3, TREE, va="center", fontsize=9.5, color=INK)

    _card(ax, 0, 41.5, 86, 39, "Algorithm 3, on three devices: one ruler, then one stack")
    places = ((0.015, 0.36), (0.385, 0.36), (0.755, 0.23))  # fractions of the page
    panels = [ax.inset_axes([x, 0.312, width, 0.247]) for x, width in places]
    draw_rulers(panels)
    rows = _sent_table(ax)
    table = "; ".join(f"{method} {count:,.0f}" for method, (_, count) in rows.items())
    return figure.describe(
        f"""A cheat sheet. The state of a set of keys is (m, d, n): the largest score, the sum of
        exp(s − m), and that sum weighted by the values. The identity, of no keys, is (−∞, 0, 0).
        Merging takes the larger m and adds both sums, each times exp(its m − m). Finalizing gives
        out = n / d and lse = m + ln d, a natural logarithm. Algorithm 3: each device
        attends with its own m, pmax makes m one for all, psum adds d and n. In a prefix tree of
        tokens a node sees the nodes whose prefixes its own begins with. Bytes that each of eight
        devices sends on average for one query of 16 heads of 128: {table}."""
    )


FIGURES = {"cheat_sheet": cheat_sheet}
