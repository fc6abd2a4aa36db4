"""Figures: what they show is so, and they say what they need."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from figures import (
    autodiff,
    bayes,
    energy,
    llama,
    mass,
    merge,
    prefix_tree,
    sent,
    speculation,
    tree,
)
from figures.__main__ import collect
from figures.measured import measured
from treeattn import finalize, reduce_tree


def test_golden_values_of_the_six_leaves():
    """Five words of weights 1, 2, 4, 1 and 8, and one leaf without keys."""
    out, lse = finalize(reduce_tree(merge.six_leaves()))
    np.testing.assert_allclose(out, [20 / 16, 36 / 16], rtol=1e-5)
    np.testing.assert_allclose(lse, math.log(16), rtol=1e-6)


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_the_five_words_and_their_shards():
    """Sums of 1, 2, 4, 1 and 8, and of the weighted values, by hand."""
    shown = texts(merge.merge_words())
    assert {"3\n(8, 0)", "4\n(0, 8)", "9\n(12, 28)", "16\n(20, 36)"} <= set(shown)
    assert "attention = (20, 36) / 16 = (1.25, 2.25)" in shown


def test_any_order_of_masses_ends_at_one_centre():
    for order in mass.ORDERS.values():
        total, place = mass.centre(order)
        assert total == 16 and len(mass.inner(order)) == 4
        np.testing.assert_allclose(place, [1.25, 2.25], rtol=1e-12)
    merged = [mass.centre(pair) for pair in mass.inner(mass.ORDERS["the three shards"])]
    assert [m for m, _ in merged] == [3, 7, 9, 16]


def test_levers_balance_at_the_notebooks_numbers():
    shown = [[text.get_text() for text in ax.texts] for ax in mass.levers().axes]
    pivots = ["5", "5.41", "2.67", "3.33", "4.57", "5"]
    assert all(pivot in found for pivot, found in zip(pivots, shown, strict=True))
    beams = [ax.lines[0].get_ydata() for ax in mass.levers().axes]
    tilted = [bool(abs(beam[0] - beam[1]) > 0.1) for beam in beams]
    assert tilted == [False, False, True, False, False, False]


def test_the_pivot_trap_takes_the_winner_away():
    """Attention (1.25, 2.25), less the value of milk, (1, 3)."""
    shown = texts(autodiff.pivot_trap())
    assert {"attention (1.25, 2.25)", "as printed (0.25, −0.75)", "milk, the winner"} <= set(shown)


def test_figures_of_03_and_04_are_described():
    drawn = [merge.merge_words, merge.merge_tree, autodiff.pivot_trap]
    drawn += [mass.merge_mass, mass.levers]
    assert all(len(draw().alt) > 40 for draw in drawn)


def test_the_animation_has_a_frame_for_each_half_round(tmp_path):
    from PIL import Image

    merge.ANIMATIONS["merge_tree"](tmp_path / "tree.gif")
    with Image.open(tmp_path / "tree.gif") as image:
        assert image.n_frames == 7
    assert (tmp_path / "tree.gif").stat().st_size < 400_000
    assert {"m −∞\nd 0\nn (0, 0)", "m log 8\nd 2\nn (2.5, 4.5)"} <= {
        text.get_text() for text in merge.merge_tree_frame().axes[0].texts
    }


def test_every_animation_has_a_figure_and_the_stored_nudge_all_its_frames():
    from PIL import Image

    assert {"merge_tree", "nudge"} <= set(collect("ANIMATIONS")) <= set(collect("FIGURES"))
    path = energy.nudge_path()
    assert not np.any(path[0]) and not np.any(path[-1])  # it begins and ends without a nudge
    stored = Path(__file__).parent.parent / "figures" / "nudge.gif"
    with Image.open(stored) as image:
        assert image.n_frames == len(path)
    assert stored.stat().st_size < 200_000


def test_the_nudge_draws_the_weights_of_the_five_words():
    figure = energy.nudge()
    bars = [[bar.get_width() for bar in axes.patches] for axes in figure.axes[:3]]
    np.testing.assert_allclose(bars[0], np.array([1, 2, 4, 1, 8]) / 16, rtol=1e-6)
    np.testing.assert_allclose(bars[1], np.array([1, 8, 2, 1, 4]) / 16, rtol=1e-6)
    np.testing.assert_allclose(bars[2], np.array([1, 32, 1, 1, 2]) / 37, rtol=1e-6)
    assert "(2.50, 1.25)" in figure.alt


def test_figures_of_measurements_take_them_as_an_argument():
    rows = [
        {"name": name, "p": p, "keys": 1024, "ms": p * 1.0, "sent": 8320, "held": 10**6}
        for name in ("tree, allreduce", "ring")
        for p in (2, 8)
    ]
    panels = sent.decode_ratios(rows).axes
    assert [text.get_text() for text in panels[1].texts] == ["8.32 kB"] * 4


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
    path = Path(__file__).parent.parent / "notebooks" / "00_tree_attention_in_one_sitting.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    printed = next("".join(c["outputs"][0]["text"]) for c in cells if c["id"] == "00-why-code")
    ring, nodes = (
        re.search(r"[\d.]+ .B", ax.get_title(loc="left"))[0] for ax in tree.ring_and_tree().axes
    )
    assert f"ring  {ring} from each device" in printed and f"tree  {nodes}" in printed


def test_the_first_token_and_its_shard_weigh_what_the_figure_says():
    """Against a plain softmax over the keys, for a random model's shapes."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 20, h, 4)).astype(np.float32) for h in (4, 2, 2))
    weights = llama.weights_of_last(q, k)
    for head in range(4):
        s = k[0, :, head // 2] @ q[0, -1, head] / 2
        np.testing.assert_allclose(weights[head], np.exp(s) / np.exp(s).sum(), rtol=1e-4)
    lse, total = llama.shard_lses(q, k, v, 8)
    np.testing.assert_allclose(np.exp(lse - total)[0], weights[:, ::8].sum(1), rtol=1e-4)


def test_the_loop_that_is_drawn_accepts_what_the_model_says():
    texts = [text.get_text() for ax in speculation.loop().axes for text in ax.texts]
    assert [text for text in texts if text.startswith("✓ ")] == [
        "✓ Mars",
        "✓ is",
        "✓ dark",
        "✓ red",
    ]


def test_the_five_lines_are_drawn_with_what_they_hand_on():
    figure = prefix_tree.flow()
    shown = texts(figure)
    functions = ["draft_candidate_tokens", "pack", "LLM", "unpack", "accept_candidate_tokens"]
    assert [text for text in shown if text in functions] == functions
    for tensor in ("beam", "scores", "packed_beam", "attention_mask", "position_offsets"):
        assert any(tensor in text for text in shown), tensor
    assert any("unpack_map" in x for x in shown) and any("verified_scores" in x for x in shown)


def test_gamma_curves_by_two_up_and_down():
    """Along both lines Γ is −log 16 at the middle; its second derivative there is 2 and −2."""
    up, down, _ = bayes.gamma_saddle().axes[0].lines
    for line, sign in ((up, 1), (down, -1)):
        t, heights = line.get_data()
        middle = len(t) // 2
        np.testing.assert_allclose(heights[middle], -np.log(16), rtol=1e-6)
        step = t[1] - t[0]
        second = (heights[middle + 1] - 2 * heights[middle] + heights[middle - 1]) / step**2
        np.testing.assert_allclose(second, sign * 2, atol=0.02)


def test_without_measurements_the_error_says_where_they_are_from(tmp_path, monkeypatch):
    monkeypatch.setattr("figures.measured.RESULTS", tmp_path)
    message = r"results: expected a folder with {0}\.json, as benchmarks/{0}\.py writes it"
    with pytest.raises(ValueError, match=message.format("decode")):
        sent.decode_ratios()
    (tmp_path / "other.json").write_text("[1]")
    assert measured("other", tmp_path) == [1]
