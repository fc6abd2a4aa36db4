"""figures/ holds what the code draws, and nothing else; `make figures` draws all of it anew."""

import functools
import re

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import REPOSITORY, text
from PIL import Image

from figures import cheat_sheet
from figures.__main__ import collect
from treeattn import collectives, kv_mesh, ring_decode, tree_decode

pytestmark = [pytest.mark.slow, pytest.mark.house]

FOLDER = REPOSITORY / "figures"
FIGURES, ANIMATIONS = collect("FIGURES"), collect("ANIMATIONS")
# Of these `make figures` alone tells. They take seconds each, or read the packaged model, or (the
# hull) join points whose last bits decide which are neighbours.
LONG = {
    "dual_over_the_hull",
    "energy_landscape",
    "llama_head_over_shards",
    "llama_score_ranges",
    "llama_shard_shares",
}
BLOCK, TOLERANCE = 10, 0.025  # pixels; 256 colours to store in cost less than half of that
PINNED = f"matplotlib=={matplotlib.__version__}\n" in text(REPOSITORY / "requirements.txt")


def blocks(pixels: np.ndarray) -> np.ndarray:
    """The mean colour of each square of BLOCK pixels, 0 to 1: blurred letters, whole areas."""
    rows, columns = (n // BLOCK for n in pixels.shape[:2])
    cut = pixels[: rows * BLOCK, : columns * BLOCK, :3] / 255
    return cut.reshape(rows, BLOCK, columns, BLOCK, 3).mean(axis=(1, 3))


def drawn(figure) -> np.ndarray:
    figure.canvas.draw()
    return blocks(np.array(figure.canvas.buffer_rgba()))


def test_the_folder_holds_every_figure_and_nothing_else():
    wanted = {f"{name}.png" for name in FIGURES} | {f"{name}.gif" for name in ANIMATIONS}
    drawn = {file.name for file in FOLDER.iterdir() if file.suffix in (".png", ".gif")}
    assert drawn == wanted
    assert not [name for name in wanted if not re.fullmatch(r"[a-z0-9_]+\.(png|gif)", name)]
    assert LONG < set(FIGURES)


@pytest.mark.skipif(not PINNED, reason="another matplotlib sets letters elsewhere")
@pytest.mark.parametrize("name", sorted(set(FIGURES) - LONG))
def test_the_stored_figure_is_what_is_drawn(name):
    """But for what storing in 256 colours rounds."""
    figure = FIGURES[name]()
    with Image.open(FOLDER / f"{name}.png") as image:
        assert image.size == figure.canvas.get_width_height()
        stored = blocks(np.asarray(image.convert("RGB")))
    assert np.abs(stored - drawn(figure)).max() < TOLERANCE
    assert len(figure.alt) > 40  # it is described


def test_another_picture_is_told_from_it():
    """One digit is another."""
    figure = FIGURES["cheat_sheet"]()
    right = drawn(figure)
    next(t for t in figure.axes[0].texts if t.get_text() == "14,560 B").set_text("14,660 B")
    assert np.abs(drawn(figure) - right).max() > TOLERANCE


def test_the_cheat_sheets_bytes_are_those_of_the_compiled_programs():
    sharding = NamedSharding(kv_mesh(jax.devices()[:8]), P(None, "kv"))
    q = jax.ShapeDtypeStruct((1, 1, 16, 128), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 64, 4, 128), jnp.float32)
    shard = 2 * 8 * 4 * 128 * 4
    for method, (_, sent) in cheat_sheet.sent_by_method(8, 16, 128, cache=shard).items():
        decode = functools.partial(tree_decode, method=method)
        decode = ring_decode if method == "ring" else decode
        program = jax.jit(functools.partial(decode, sharding=sharding)).lower(q, k, k).compile()
        assert sum(c.sent_bytes for c in collectives(program)) == sent, method
