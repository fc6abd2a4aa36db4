"""How figures are drawn and stored: in the shared style throughout, as small PNGs."""

import functools
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from figures.style import RC

WHITE = 255, 255, 255
CARD = 235  # the opacity of the ground: nine tenths
CORNER = 14  # pixels


def on_a_card(picture: Image.Image) -> tuple[Image.Image, bytes]:
    """`picture` with a palette whose first two colours are white, and each colour's opacity.

    On a white page its ground cannot be seen. On a dark page it is a soft card with round corners,
    on which dark letters and grey ones stay legible.
    """
    ink = np.asarray(picture).min(axis=2) < 255
    ground = Image.new("L", picture.size)
    right, bottom = picture.width - 1, picture.height - 1
    ImageDraw.Draw(ground).rounded_rectangle((0, 0, right, bottom), CORNER, fill=1)
    small = picture.quantize(254, dither=Image.Dither.NONE)
    number = np.where(ink, np.asarray(small) + 2, np.asarray(ground))
    found = Image.fromarray(number.astype(np.uint8))
    found.putpalette([*WHITE] * 2 + small.getpalette())
    return found, bytes([0, CARD])  # and opaque from there on


class PaletteCanvas(FigureCanvasAgg):
    """Writes PNGs of at most 256 colours, a third as large: notebooks store many."""

    def print_png(self, file, **_):
        """As Agg's own, with a palette, on a card."""
        self.draw()
        picture = Image.fromarray(np.asarray(self.buffer_rgba())).convert("RGB")
        small, opacity = on_a_card(picture)
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
