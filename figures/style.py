"""The look that the figures share."""

import base64
import io

import matplotlib
import matplotlib.figure

# In the order in which figures use them. Every two of these, greys included, differ in lightness by
# 8 of L*, for a print without colours, and by 20 in CIE Lab for protan, deutan, tritan and usual
# eyes (checks/test_palette.py): hues like Okabe and Ito's, whose lightness is spread out.
BLUE = "#0847A3"
ORANGE = "#E19941"
GREEN = "#1C8B4D"
RED = "#C70101"
PURPLE = "#571A60"
SKY = "#41D4F6"
INK = "#222222"
GREY = "#909090"
PALE = "#E6E6E6"
NOTE = "#555555"  # of small letters, because GREY, the lines' colour, is hard to read

RC = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE, SKY]),
    "axes.edgecolor": GREY,
    "legend.frameon": False,
    "savefig.dpi": 110,
    "figure.dpi": 110,
    "svg.hashsalt": "treeattn",  # the same SVG at every run
}


class Figure(matplotlib.figure.Figure):
    """A figure that a notebook shows as a PNG when it ends a cell, with any backend.

    `describe` gives the image its alternative text, for readers who do not see the figure.
    """

    alt = ""

    def describe(self, alt: str) -> "Figure":
        """This figure, with its alternative text."""
        self.alt = " ".join(alt.split())
        return self

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        png = io.BytesIO()
        self.savefig(png, format="png", metadata={"Software": None, "Description": self.alt})
        image = base64.b64encode(png.getvalue()).decode()
        return {"image/png": image, "text/plain": repr(self)}, {"image/png": {"alt": self.alt}}


def new_figure(width: float = 7.0, height: float = 3.2, **subplots) -> tuple[Figure, object]:
    """(figure, axes) in the shared style, laid out tightly; `subplots` as in `Figure.subplots`.

    Not registered with pyplot: a notebook shows it by returning it, once.
    """
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(**subplots)
