"""How figures are drawn and stored: in the shared style throughout, as small PNGs."""

import functools
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from figures.style import RC


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
    path: str | Path, figures: Iterable[Figure], milliseconds: list[int], *, colours=48, dpi=110
) -> None:
    """The figures as an animation that repeats, each shown for its `milliseconds`."""
    frames = []
    for figure in figures:
        figure.set_dpi(dpi)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    # One palette for all frames: what does not change between two of them is stored once.
    # What is nearly white there becomes white: the background is not to be one of those.
    table = frames[len(frames) // 2].quantize(colours).getpalette()[: 3 * colours]
    for i in range(0, len(table), 3):
        if min(table[i : i + 3]) > 244:
            table[i : i + 3] = 255, 255, 255
    palette = Image.new("P", (1, 1))
    palette.putpalette(table)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=milliseconds,
        loop=0,
        optimize=True,
    )
