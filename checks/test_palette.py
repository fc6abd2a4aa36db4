"""The figures' palette: its colours differ for every eye, and in a print without colours."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from figures import style

pytestmark = pytest.mark.house

NAMES = ("BLUE", "ORANGE", "GREEN", "RED", "PURPLE", "SKY", "INK", "GREY", "PALE")

# Of linear RGB, at full severity: Machado, Oliveira and Fernandes (2009).
EYES = {
    "usual": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Linear sRGB to XYZ, under D65.
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def lab(colour: str, eye: str = "usual") -> np.ndarray:
    """(L*, a*, b*) of a colour "#rrggbb", as that eye sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(distance) -> tuple[float, tuple[str, str]]:
    """The two names whose colours are nearest to each other, and how near."""
    pairs = itertools.combinations(NAMES, 2)
    return min((distance(*(getattr(style, name) for name in pair)), pair) for pair in pairs)


@pytest.mark.parametrize("eye", EYES)
def test_every_two_colours_differ_for_every_eye(eye):
    found = nearest(lambda a, b: np.linalg.norm(lab(a, eye) - lab(b, eye)))
    assert found[0] >= 20, found


def test_every_two_colours_differ_without_colour():
    found = nearest(lambda a, b: abs(lab(a)[0] - lab(b)[0]))
    assert found[0] >= 8, found


def test_the_check_knows_red_and_finds_what_looks_alike():
    """Okabe and Ito's green and a grey of its lightness, to a deuteranope and in print."""
    np.testing.assert_allclose(lab("#FF0000"), [53.24, 80.09, 67.20], atol=0.02)
    green, grey = "#009E73", "#8A8A8A"
    assert np.linalg.norm(lab(green) - lab(grey)) > 40
    assert np.linalg.norm(lab(green, "deutan") - lab(grey, "deutan")) < 10


def test_figures_take_their_colours_from_the_palette():
    cycle = [entry["color"] for entry in style.RC["axes.prop_cycle"]]
    assert cycle == [getattr(style, name) for name in NAMES[:6]]
