"""How figures are drawn and stored: in the shared style throughout, as small PNGs."""

import functools

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from treeattn.figures.style import RC


class PaletteCanvas(FigureCanvasAgg):
    """Writes PNGs of at most 256 colours, a third as large: notebooks store many."""

    def print_png(self, file, **_):
        """As Agg's own, with a palette."""
        self.draw()
        picture = Image.fromarray(np.asarray(self.buffer_rgba())).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(file, format="png", optimize=True)


def styled(draw):
    """`draw` in the shared style throughout (titles and legends take it when they are made)."""

    @functools.wraps(draw)
    def wrapper(*args, **kwargs):
        with matplotlib.rc_context(RC):
            figure = draw(*args, **kwargs)
        PaletteCanvas(figure)
        return figure

    return wrapper
