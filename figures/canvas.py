"""How figures are drawn and stored: in the shared style throughout, as small PNGs."""

import functools
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageFilter
from scipy.ndimage import binary_fill_holes

from figures.style import RC

WHITE = 255, 255, 255
LEVELS = 16  # of white, from transparent to opaque


def without_ground(picture: Image.Image) -> tuple[Image.Image, bytes]:
    """`picture` with a palette whose first colours are white, and each colour's opacity.

    The white ground is transparent, but for a glow around all that is drawn, which keeps dark
    letters legible on a dark page.
    """
    ink = np.asarray(picture).min(axis=2) < 255
    glow = Image.fromarray(255 * binary_fill_holes(ink).astype(np.uint8))  # boxes stay white
    glow = glow.filter(ImageFilter.MaxFilter(7)).filter(ImageFilter.GaussianBlur(2))
    small = picture.quantize(256 - LEVELS, dither=Image.Dither.NONE)
    number = np.where(ink, np.asarray(small) + LEVELS, np.asarray(glow) // (256 // LEVELS))
    found = Image.fromarray(number.astype(np.uint8))
    found.putpalette([*WHITE] * LEVELS + small.getpalette())
    return found, bytes(range(0, 256, 17))  # and opaque from there on


class PaletteCanvas(FigureCanvasAgg):
    """Writes PNGs of at most 256 colours, a third as large: notebooks store many."""

    def print_png(self, file, **_):
        """As Agg's own, with a palette and a transparent ground."""
        self.draw()
        picture = Image.fromarray(np.asarray(self.buffer_rgba())).convert("RGB")
        small, opacity = without_ground(picture)
        small.save(file, format="png", optimize=True, transparency=opacity)


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
