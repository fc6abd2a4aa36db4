"""The notebook's figures: time lines of devices, with arrows from signals to waits."""

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, RED, Figure, new_figure


@styled
def time_lines(lanes, events, arrows, pair, ordered, *, without=None) -> Figure:
    """A line for each lane, with its events; the pair touches the same memory.

    lanes:   names, from top to bottom
    events:  name -> (lane, time); a lane's events happen one after the other
    arrows:  (event, later event) across lanes
    pair:    two events, green if `ordered(events, arrows, *pair)`, or red
    without: an arrow that a second panel leaves out, with the wait at its end
    """
    columns = 2 if without else 1
    size = {"width": 4.6 * columns if without else 7.0, "height": 0.75 * len(lanes) + 0.7}
    figure, axes = new_figure(**size, ncols=columns, squeeze=False)
    said = []
    for ax, left_out in zip(axes[0], (None, without), strict=False):
        shown, drawn, title = events, arrows, "as written: " if without else ""
        if left_out:
            shown = {name: at for name, at in events.items() if name != left_out[1]}
            drawn, title = [x for x in arrows if x != left_out], "without the line: "
        safe = ordered(shown, drawn, *pair)
        verdict = "ordered" if safe else "a race"
        ax.set_title(f"{title}{verdict}", color=GREEN if safe else RED)
        _panel(ax, lanes, shown, drawn, pair, GREEN if safe else RED)
        listed = "; ".join(f"{a} before {b}" for a, b in drawn)
        said.append(f"{title}{listed}. The accesses {pair[0]} and {pair[1]} are {verdict}.")
    return figure.describe(
        f"""Time lines of {", ".join(lanes)}, with an arrow from each signal to the event that
        waits for it. {" ".join(said)}"""
    )


def _panel(ax, lanes, events, arrows, pair, colour: str) -> None:
    height = {lane: len(lanes) - 1 - i for i, lane in enumerate(lanes)}
    at = {name: (time, height[lane]) for name, (lane, time) in events.items()}
    last = max(time for time, _ in at.values())
    for lane, y in height.items():
        ax.plot([-0.4, last + 0.6], [y, y], color=GREY, lw=1, zorder=0)
        ax.text(-0.6, y, lane, ha="right", va="center", color=INK)
    for start, end in arrows:
        ax.annotate(
            "", at[end], at[start], arrowprops={"arrowstyle": "->", "color": BLUE, "shrinkB": 5}
        )
    for name, (time, y) in at.items():
        shade, marker = (colour, "s") if name in pair else (INK, "o")
        ax.plot(time, y, marker, color=shade, ms=7)
        # An arrow that comes from above, or goes there, would cross a name above the event.
        under = any(at[a][1] + at[b][1] > 2 * y for a, b in arrows if name in (a, b))
        ax.text(time, y - 0.33 if under else y + 0.17, name, ha="center", color=shade, fontsize=8)
    ax.set(xlim=(-2.2, last + 0.9), ylim=(-0.6, len(lanes) - 0.5))
    ax.axis("off")
