"""How figures are drawn and stored: in the shared style throughout, as small PNGs."""

import functools
import io
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
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


def write_gif(
    path: str | Path, figures: Iterable[Figure], milliseconds: list[int], *, colours=48, dpi=100
) -> None:
    """The figures as an animation that repeats, each shown for its `milliseconds`."""
    frames = []
    for figure in figures:
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=dpi)
        frames.append(Image.open(png).convert("RGB"))
    # One palette for all frames: what does not change between two of them is stored once.
    palette = frames[len(frames) // 2].quantize(colours)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=milliseconds,
        loop=0,
        optimize=True,
    )
