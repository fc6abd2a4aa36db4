"""Figures: what they show is so, where a stored picture alone would not say, and what they need.

checks/test_drawn_figures.py compares each stored figure with what the code draws.
"""

import io
import re

import numpy as np
import pytest
from pages import MAIN_ROAD, REPOSITORY, cells
from PIL import Image

from figures import canvas, dual, energy, llama, merge, prefix_tree, rulers, sent, style, tree
from figures.__main__ import collect
from figures.measured import measured
from figures.sentence import running_example


def test_animations_have_figures_and_all_their_frames(tmp_path):
    assert {"merge_tree", "nudge"} == set(collect("ANIMATIONS")) <= set(collect("FIGURES"))
    path = energy.nudge_path()
    assert not np.any(path[0]) and not np.any(path[-1])  # it begins and ends without a nudge
    drawn, stored = tmp_path / "tree.gif", REPOSITORY / "figures" / "nudge.gif"
    merge.ANIMATIONS["merge_tree"](drawn)
    for file, frames, size in ((drawn, 7, 400_000), (stored, len(path), 200_000)):
        with Image.open(file) as image:
            assert image.n_frames == frames
        assert file.stat().st_size < size


def test_a_picture_lies_on_a_card_with_round_corners():
    """A dark page has no glaring sheet, and dark letters have something light behind them."""
    with Image.open(REPOSITORY / "figures" / "merge_tree.png") as image:
        opacity = np.asarray(image.convert("RGBA"))[..., 3]
    assert opacity[0, 0] == opacity[0, -1] == opacity[-1, 0] == opacity[-1, -1] == 0
    assert (opacity == canvas.CARD).mean() > 0.4 and (opacity == 0).sum() < 400
    figure, ax = style.new_figure(2, 1)
    ax.set_axis_off()
    ax.text(0.5, 0.5, "box", bbox={"fc": "white"})
    drawn = io.BytesIO()
    canvas.PaletteCanvas(figure).print_png(drawn)
    pixels = np.asarray(Image.open(drawn).convert("RGBA")).reshape(-1, 4)
    assert {*pixels[pixels[:, :3].max(axis=1) < 128, 3]} == {255}  # what is dark is opaque


def test_the_nudge_draws_the_weights_of_the_five_words():
    bars = [[bar.get_width() for bar in axes.patches] for axes in energy.nudge().axes[:3]]
    for found, weights in zip(
        bars, ([1, 2, 4, 1, 8], [1, 8, 2, 1, 4], [1, 32, 1, 1, 2]), strict=True
    ):
        np.testing.assert_allclose(found, np.divide(weights, sum(weights)), rtol=1e-6)


def test_figures_of_measurements_take_them_as_an_argument():
    rows = [
        {"name": name, "p": p, "keys": 1024, "ms": p * 1.0, "sent": 8320, "held": 10**6}
        for name in ("tree, allreduce", "ring")
        for p in (2, 8)
    ]
    panels = sent.decode_ratios(rows).axes
    assert [text.get_text() for text in panels[1].texts] == ["8.32 kB"] * 4


def test_rulers_and_dual_numbers_end_with_attention():
    q, k, v = running_example()
    weights = np.exp(k @ q)
    numerator, out = (f"({x[0]:g}, {x[1]:g})" for x in (weights @ v, weights @ v / weights.sum()))
    *_, stack = rulers.algorithm_3().axes
    assert any(text.get_text() == f"n / d = {out}" for text in stack.texts)
    for ax in dual.dual_on_its_way().axes:
        shown = [text.get_text() for text in ax.texts]
        assert f"16\n{numerator} ε" in shown and f"log 16\n{out} ε" in shown


def test_a_ring_hands_on_shards_and_a_tree_states():
    ring, nodes = tree.ring_and_tree(4).axes
    arrows = [text for text in ring.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 4 + 1  # one from a note to the dot
    square, dot = (patch.get_width() * patch.get_height() for patch in ring.patches)
    by_ring, by_tree = tree.llama_sends(4)
    assert dot / square == pytest.approx(by_tree / by_ring)
    assert f"{by_tree / 1e6:.1f} MB" in nodes.get_title(loc="left")
    assert f"{by_ring / 1e9:.0f} GB" in ring.get_title(loc="left")


def test_the_first_picture_says_what_00_prints():
    (printed,) = (c.outputs[0].text for c in cells(MAIN_ROAD[0]) if c.id == "00-why-code")
    titles = [ax.get_title(loc="left") for ax in tree.ring_and_tree().axes]
    ring, nodes = (re.search(r"[\d.]+ .B", title)[0] for title in titles)
    assert f"ring  {ring} from each device" in printed and f"tree  {nodes}" in printed


def test_the_first_token_and_its_shard_weigh_what_the_figure_says():
    """Against a plain softmax over the keys, for a random model's shapes."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 20, h, 4)).astype(np.float32) for h in (4, 2, 2))
    terms = np.exp(np.einsum("nhd,hd->hn", k[0].repeat(2, axis=1), q[0, -1]) / 2)
    weights = terms / terms.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(llama.weights_of_last(q, k), weights, rtol=1e-4)
    lse, total = llama.shard_lses(q, k, v, 8)
    np.testing.assert_allclose(np.exp(lse - total)[0], weights[:, ::8].sum(1), rtol=1e-4)


def test_the_five_lines_are_drawn_with_what_they_hand_on():
    shown = " ".join(text.get_text() for text in prefix_tree.flow().axes[0].texts)
    lines = r"draft_candidate_tokens.*pack.*LLM.*unpack.*accept_candidate_tokens"
    assert re.search(lines, shown, re.DOTALL)
    for tensor in ("beam", "packed_beam", "attention_mask", "position_offsets", "verified_scores"):
        assert tensor in shown, tensor


def test_without_measurements_the_error_says_where_they_are_from(tmp_path, monkeypatch):
    monkeypatch.setattr("figures.measured.RESULTS", tmp_path)
    message = r"results: expected a folder with decode\.json, as benchmarks/decode\.py writes it"
    with pytest.raises(ValueError, match=message):
        sent.decode_ratios()
    (tmp_path / "other.json").write_text("[1]")
    assert measured("other", tmp_path) == [1]
