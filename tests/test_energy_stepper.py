"""The page on the energy, dragged and keyed through in headless Chromium, against the package."""

import functools
import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from browser import Browser, chromium

from figures.sentence import running_example
from treeattn import energy, finalize, from_output, merge

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "site" / "energy_stepper.html"
WORDS = ["the", "cat", "drank", "warm", "milk"]
ATTENTION = [1.25, 2.25]
_q, _k, _v = (np.asarray(x, np.float64) for x in running_example())
SCORES = np.log(np.exp(_k[:, 0]).round())  # of float64, from those in float32
FIXED = {"q": _q, "k": SCORES[:, None], "v": _v, "scale": 1.0}
ORDERS = {
    "chain": ["0-1", "5-2", "6-3", "7-4"],
    "tree": ["0-1", "2-3", "5-6", "7-4"],
    "odd": ["1-4", "0-3", "5-2", "6-7"],
}

# All that the page shows, as text; and what it computed, in full.
READ = """(() => {
  const text = (id) => document.getElementById(id).textContent;
  const rows = (id) => [...document.querySelectorAll(`#${id} tr`)].map(
    (row) => [...row.children].map((cell) => cell.textContent));
  const places = [...document.querySelectorAll("#tree g[data-node]")].map((node) =>
    [node.dataset.node, node.getAttribute("transform")]);
  return {
    now: {...now, height: now.height === Infinity ? "none" : now.height},
    title: text("push-title"), text: text("push-text"),
    numbers: rows("numbers"), weights: rows("weights").slice(1), states: rows("states").slice(1),
    merged: text("merge-title"), told: text("merge-text"), places: Object.fromEntries(places),
    segments: [...document.querySelectorAll(".segment")].map((x) => x.getAttribute("d")),
    discs: [...document.querySelectorAll("#plane .mass")].map((x) => x.getAttribute("r")),
    handles: [SOURCES, PLANE].map(({handle}) => handle.getAttribute("transform")),
    values: [SOURCES, PLANE].map(({handle}) => handle.getAttribute("aria-valuetext")),
  };
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
    assert browser.errors == []  # no script has thrown, and nobody asked the network


@functools.cache
def oracle():
    """ζ -> (F, ∇F, weights), in float64."""

    def all_of(zeta):
        value, slope = jax.value_and_grad(energy)(zeta, **FIXED)
        return value, slope, jax.nn.softmax(SCORES + _v @ zeta)

    return jax.jit(all_of)


def shown(text: str) -> list[float]:
    """The numbers of a text, rounded as they are."""
    return [float(x.replace("−", "-")) for x in re.findall(r"[−-]?\d+(?:\.\d+)?", text)]


def in_pane(point, low, high, unit) -> np.ndarray:
    return np.array([point[0] - low[0], high[1] - point[1]]) * unit


SOURCES = ([-2, -2], [2, 2], 110)
PLANE = ([-1.1, -0.9], [5, 4.9], 72)


def check_source(page: dict, zeta):
    """Everything that stands for a source, against the package."""
    zeta = np.asarray(zeta, float)
    value, z, weights = (np.asarray(x) for x in oracle()(zeta))
    np.testing.assert_allclose(page["now"]["z"], z, atol=1e-9)
    np.testing.assert_allclose(page["now"]["weights"], weights, atol=1e-9)
    height = zeta @ z - value
    np.testing.assert_allclose(page["now"]["height"], height, atol=1e-9)
    numbers = {name: shown(text) for name, text in page["numbers"]}
    wanted = [[*zeta], [*z], [value], [height], [zeta @ z] * 2]
    for (name, found), number in zip(numbers.items(), wanted, strict=True):
        np.testing.assert_allclose(found, number, atol=5.1e-5, err_msg=name)
    for (word, product, _, share), a in zip(page["weights"], range(5), strict=True):
        assert word == WORDS[a]
        np.testing.assert_allclose(shown(product), zeta @ _v[a], atol=5.1e-4)
        np.testing.assert_allclose(shown(share), 100 * weights[a], atol=0.0501)
    areas = np.array(page["discs"], float) ** 2
    np.testing.assert_allclose(areas / areas.sum(), weights, atol=1e-6)
    np.testing.assert_allclose(shown(page["handles"][1]), in_pane(z, *PLANE), atol=0.0051)
    if np.abs(zeta).max() < 1.9:
        np.testing.assert_allclose(shown(page["handles"][0]), in_pane(zeta, *SOURCES), atol=0.0051)


@pytest.mark.parametrize("zeta", [(0, 0), (0.34657359, -0.34657359), (-1.5, 0.7), (6, -8)])
def test_a_source_moves_the_cross(browser, zeta):
    browser.open(f"{PAGE.as_uri()}#zeta={zeta[0]},{zeta[1]}")
    page = browser.run(READ)
    assert page["now"]["zeta"] == list(zeta)
    check_source(page, zeta)


def test_a_cross_inside_has_one_source(browser):
    """Newton's source: F's slope there is the cross, so that no other source does better."""
    rng = np.random.default_rng(0)
    points = rng.dirichlet(np.ones(5), size=8) @ _v
    for z in [*points, (0.01, 1), (0.99, 2.97), (3.99, 0.01)]:
        found = browser.run(f"dualAt({json.dumps(list(z))})")
        assert found["kind"] == "inside"
        value, slope, _ = oracle()(np.array(found["zeta"]))
        np.testing.assert_allclose(slope, z, atol=1e-9)
        np.testing.assert_allclose(found["height"], np.dot(found["zeta"], z) - value, atol=1e-9)
    browser.open(f"{PAGE.as_uri()}#z=2,2")
    page = browser.run(READ)
    check_source(page, page["now"]["zeta"])
    assert page["title"].startswith("The cross at (2.00, 2.00) needs the source")


def gain(z, zeta) -> float:
    """What a source achieves, z·ζ − F(ζ); F* is the supremum."""
    return float(np.dot(z, zeta) - oracle()(np.asarray(zeta, float))[0])


@pytest.mark.parametrize(
    ("z", "kind", "height"),
    [
        ((1, 3), "corner", -np.log(8)),
        ((0, 0), "corner", 0.0),
        ((0.5, 2.5), "edge", (np.log(1 / 8) + np.log(1 / 16)) / 2),  # half drank, half milk
        ((3, 0), "edge", 0.25 * np.log(0.25) + 0.75 * np.log(0.75 / 2)),
        ((4, 1), "edge", 0.75 * np.log(0.75 / 2) + 0.25 * np.log(0.25)),
    ],
)
def test_on_the_hull_the_height_is_a_limit(browser, z, kind, height):
    browser.open(f"{PAGE.as_uri()}#z={z[0]},{z[1]}")
    page = browser.run(READ)
    now = page["now"]
    assert now["kind"] == kind and "zeta" not in now
    np.testing.assert_allclose(now["height"], height, atol=1e-12)
    np.testing.assert_allclose(shown(page["numbers"][3][1]), height, atol=5.1e-5)
    assert page["values"][0] == "no finite source" and "no finite source" in page["title"]
    np.testing.assert_allclose(now["weights"] @ _v, z, atol=1e-12)
    near, far = (gain(z, np.add(now["from"], t * np.array(now["out"]))) for t in (3.0, 60.0))
    assert near < far <= height + 1e-12
    np.testing.assert_allclose(far, height, atol=1e-6)


@pytest.mark.parametrize("z", [(0, 3), (-0.5, -0.5), (4.5, 2)])
def test_outside_the_hull_there_is_none(browser, z):
    browser.open(f"{PAGE.as_uri()}#z={z[0]},{z[1]}")
    page = browser.run(READ)
    now = page["now"]
    assert now["kind"] == "outside" and now["height"] == "none" and now["weights"] is None
    assert page["numbers"][3][1] == "∞" and page["text"].endswith("F* = ∞.")
    at = [gain(z, t * np.array(now["out"])) for t in (100.0, 101.0)]
    np.testing.assert_allclose(at[1] - at[0], now["gap"], atol=1e-9)  # a step, for ever
    np.testing.assert_allclose(shown(page["text"])[2], now["gap"], atol=5.1e-4)


def test_the_grid_is_bent_by_the_gradient(browser):
    browser.open(PAGE.as_uri())
    get = "[...document.querySelectorAll('#plane .grid')].map((x) => x.getAttribute('d'))"
    sources = np.array(browser.run("GRID.map(({sources}) => sources)"))
    assert sources.shape == (26, 161, 2) and np.abs(sources).max() == 8
    crosses = jax.vmap(jax.vmap(lambda zeta: oracle()(zeta)[1]))(sources)
    straight = sources + ATTENTION
    for part in (1.0, 0.0, 0.4):
        browser.run(f"""(() => {{
            byId("bend").value = {100 * part};
            byId("bend").dispatchEvent(new Event("input"));
        }})()""")
        drawn = np.array([shown(re.sub("[ML]", " ", d)) for d in browser.run(get)])
        wanted = straight + part * (np.asarray(crosses) - straight)
        wanted = np.moveaxis(in_pane(np.moveaxis(wanted, -1, 0), *PLANE), 0, -1)
        np.testing.assert_allclose(drawn, wanted.reshape(26, -1), atol=0.0501)


# ---- merges ----


def check_merges(page: dict, zeta, pairs: list[str]):
    """Every state of the table, every point and every segment, by the package's merge."""
    tilted = SCORES + _v @ np.asarray(zeta, float)
    nodes = [from_output(_v[a], np.array(tilted[a])) for a in range(5)]
    keys = [[word] for word in WORDS]
    ends = []
    for a, b in (map(int, pair.split("-")) for pair in pairs):
        nodes.append(merge(nodes[a], nodes[b]))
        keys.append(keys[a] + keys[b])
        ends.append((a, b))
    outs = [np.asarray(finalize(node)[0]) for node in nodes]
    assert len(page["states"]) == len(nodes)
    for (name, *cells), node, out, held in zip(page["states"], nodes, outs, keys, strict=True):
        lse = float(finalize(node)[1])
        assert name.endswith(f"{{{', '.join(held)}}}")
        found = [x for cell in cells for x in shown(cell)]
        np.testing.assert_allclose(found, [np.exp(lse), lse, *out], atol=5.1e-5)
    for i, out in enumerate(outs):
        place = shown(page["places"][str(i)])
        np.testing.assert_allclose(place, in_pane(out, *PLANE), atol=0.0051)
    drawn = [shown(re.sub("[ML]", " ", d)) for d in page["segments"]]
    wanted = [np.ravel([in_pane(outs[i], *PLANE) for i in pair]) for pair in ends]
    np.testing.assert_allclose(np.ravel(drawn), np.ravel(wanted), atol=0.0501)
    if len(ends) == 4:
        np.testing.assert_allclose(outs[-1], oracle()(np.asarray(zeta, float))[1], atol=1e-12)
        assert page["told"].endswith("to 1e−12: true.")


@pytest.mark.parametrize(
    ("order", "zeta"), [("chain", (0, 0)), ("tree", (0.4, -0.3)), ("odd", (-1, 1))]
)
def test_any_order_ends_at_the_cross(browser, order, zeta):
    browser.open(f"{PAGE.as_uri()}#zeta={zeta[0]},{zeta[1]}&order={order}")
    check_merges(browser.run(READ), zeta, [])
    for step in range(1, 5):
        browser.click("#next")
        page = browser.run(READ)
        check_merges(page, zeta, ORDERS[order][:step])
        assert page["merged"].startswith(f"Merge {step} of 4")
    assert browser.run("byId('next').disabled")


def test_an_order_of_ones_own(browser):
    """Two by the mouse, two by the keyboard; the address keeps it."""
    browser.open(PAGE.as_uri(), width=390)
    for node in (4, 1):
        browser.click(f'[data-node="{node}"]')
    check_merges(browser.run(READ), (0, 0), ["4-1"])
    for node in (2, 5, 0, 6):
        browser.run(f"document.querySelector('[data-node=\"{node}\"]').focus()")
        browser.press("Enter")
    check_merges(browser.run(READ), (0, 0), ["4-1", "2-5", "0-6"])
    assert browser.run("document.activeElement.dataset.node") == "7"  # where the focus goes
    browser.press("Enter")
    assert "is chosen" in browser.run(READ)["told"]
    browser.press("Enter")  # not that one, then
    browser.press("ArrowLeft")
    check_merges(browser.run(READ), (0, 0), ["4-1", "2-5"])
    address = browser.run("location.href")
    browser.open(address)
    check_merges(browser.run(READ), (0, 0), ["4-1", "2-5"])
    browser.press("End")
    check_merges(browser.run(READ), (0, 0), ["4-1", "2-5", "0-6"])


def test_an_address_that_says_nothing_is_a_fresh_page(browser):
    for address in (
        "zeta=x,1",
        "z=1",
        "zeta=&z=",
        "order=own&own=0-0.1-2&step=9",
        "order=no&own=9-1",
    ):
        browser.open(f"{PAGE.as_uri()}#{address}")
        page = browser.run(READ)
        check_source(page, (0, 0))
        check_merges(page, (0, 0), [])
    browser.open(f"{PAGE.as_uri()}#order=own&own=0-1.0-2&step=2")
    check_merges(browser.run(READ), (0, 0), ["0-1"])


# ---- hands ----


def test_the_dot_and_the_cross_follow_the_mouse(browser):
    browser.open(PAGE.as_uri())
    browser.drag("#sources .handle", (50, 80))
    page = browser.run(READ)
    unit = browser.run("document.querySelector('#sources svg').clientWidth") / 4
    np.testing.assert_allclose(page["now"]["zeta"], [50 / unit, -80 / unit], atol=0.02)
    check_source(page, page["now"]["zeta"])
    browser.drag("#plane .handle", (-30, -20))
    page = browser.run(READ)
    assert page["now"]["held"]
    check_source(page, page["now"]["zeta"])
    unit = browser.run("document.querySelector('#plane svg').clientWidth") / 6.1
    milk = (np.array([1.03, 3.03]) - page["now"]["z"]) * [unit, -unit]  # and a bit beside
    browser.drag("#plane .handle", tuple(milk))
    page = browser.run(READ)
    assert page["now"]["kind"] == "corner" and page["now"]["z"] == [1, 3]
    browser.drag("#plane .handle", (-unit, -unit / 2))
    assert browser.run(READ)["now"]["kind"] == "outside"


def test_a_finger_drags_and_does_not_scroll(browser):
    browser.open(PAGE.as_uri(), width=390)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = browser.middle("#plane .handle")
    scrolled = browser.run("scrollY")
    for kind, down in ("Start", 0), ("Move", 20), ("Move", 40):
        touch = {"type": f"touch{kind}", "touchPoints": [{"x": x, "y": y + down}]}
        browser.call("Input.dispatchTouchEvent", **touch)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    unit = browser.run("document.querySelector('#plane svg').clientWidth") / 6.1
    moved = browser.run("now.z")
    np.testing.assert_allclose(moved, [1.25, 2.25 - 40 / unit], atol=0.02)
    assert browser.run("scrollY") == scrolled


def test_the_keyboard_does_all(browser):
    browser.open(PAGE.as_uri(), prefers_color_scheme="dark")
    focus = "document.activeElement.getAttribute('aria-label')"
    for handle, wanted in ("#sources", "the source ζ"), ("#plane", "the cross"):
        browser.run(f"document.querySelector('{handle} .handle').focus()")
        assert browser.run(focus) == wanted
        ring = "getComputedStyle(document.activeElement.querySelector('.reach')).strokeWidth"
        assert browser.run(ring) == "3px"
        for key, shift in itertools.product(["ArrowLeft", "ArrowUp"], [False, True]):
            browser.press(key, shift)
        page = browser.run(READ)
        if handle == "#sources":
            np.testing.assert_allclose(page["now"]["zeta"], [-0.6, 0.6], atol=1e-12)
            browser.press("Home")
            assert browser.run(READ)["title"].startswith("Nobody pushes: the cross rests at (1.25")
        else:
            np.testing.assert_allclose(page["now"]["z"], [0.7, 2.9], atol=1e-12)
            assert page["values"] == ["no finite source", "z = (0.70, 2.90)"]
    browser.run("document.activeElement.blur()")
    browser.press("ArrowRight")
    assert browser.run(READ)["merged"].startswith("Merge 1 of 4")
    assert "nobody pushes" in browser.run("byId('pushed').textContent")
    kinds = []
    for i in range(1, 7):
        browser.click(f".controls button:nth-child({i})")
        kinds.append(browser.run(READ)["now"]["kind"])
    assert kinds == ["inside", "inside", "inside", "edge", "corner", "outside"]


def test_the_sentence_is_that_of_the_notebooks():
    found = json.loads(re.search(r'(?s)id="data">(.*?)</script>', PAGE.read_text("utf-8"))[1])
    assert found["words"] == WORDS
    np.testing.assert_allclose(found["scores"], SCORES, rtol=1e-15)
    np.testing.assert_array_equal(found["values"], _v)
