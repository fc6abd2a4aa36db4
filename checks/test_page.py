"""The site's first page in headless Chromium: its numbers are the package's, and hands move it."""

import json
from functools import partial
from html import escape

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken_merges import FAULTS
from browser import Browser, chromium
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import SITE, text

from treeattn import collectives, energy, kv_mesh, pack, ring_decode, tree_decode

pytestmark = [pytest.mark.slow, pytest.mark.house]

PAGE = SITE / "one_page.html"
STILL = {"prefers_reduced_motion": "reduce"}
MOVING = {"prefers_reduced_motion": "no-preference"}
FRAME = "new Promise(requestAnimationFrame)"  # until it is redrawn
close = partial(np.testing.assert_allclose, atol=1e-8)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"), seconds=120)
    yield browser
    browser.close()
    assert browser.errors == []  # nothing was thrown, logged as an error, or asked of the network


@pytest.fixture
def browser(chrome):
    """With the page as it opens, standing still."""
    chrome.open(PAGE.as_uri(), **STILL)
    return chrome


def said(browser, name: str) -> str:
    return browser.run(f"document.querySelector('[data-say=\"{name}\"]').textContent")


def opened_again(browser) -> None:
    """By the address that it has now."""
    browser.open(browser.run("redraw(); location.href"), **STILL)


def test_a_page_that_goes_on_talking_and_never_answers_is_not_waited_for(tmp_path):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path)
    browser.run("setInterval(() => console.error('still here'), 100)")
    browser.seconds = 2
    with pytest.raises(TimeoutError, match=r"Runtime\.evaluate: no answer in 2 seconds"):
        browser.run("new Promise(() => {})")
    browser.seconds = 60
    assert browser.run("1 + 1") == 2  # the next question has an answer of its own
    browser.close()


def test_it_opens_at_its_head_and_plays_on_while_a_knob_is_turned(chrome):
    """Between the turn and the next frame the clock ticks, with more devices or with fewer."""
    chrome.open(PAGE.as_uri(), **MOVING)
    state = "new Promise((done) => setTimeout(() => done([scrollY, location.hash]), 2500))"
    assert chrome.run(state) == [0, ""]  # by itself it goes nowhere
    turned = chrome.run("""new Promise((done) => {
      const places = [14, 0, 9, 1, 13, 3, 0, 14, 6];
      const step = () => {
        const place = places.shift();
        if (place === undefined) return done([scrollY, location.hash.split("?")[0], clock.at]);
        turn("devices", place);
        setClock(clock.at); // as a frame of the clock does
        setTimeout(step, 120);
      };
      step();
    })""")
    assert turned[:2] == [0, "#wire"]
    wait = "new Promise((done) => setTimeout(() => done(clock.at), 400))"
    assert 0 < turned[2] < chrome.run(wait)


# ---- numbers ----

STATES = """(settings, deal) => {
  Object.assign(now, settings); owner = deal;
  const out = (state) => { const {out, lse} = finalize(state); return [...out, lse]; };
  const first = nodesAfter(0).map(({state: {m, d, n}}) => [m === -Infinity ? null : m, d, ...n]);
  const along = statesAlong(butterfly(now.devices), nodesAfter(0).map(({state}) => state));
  const ends = along.at(-1).map(({state}) => out(state));
  for (const name of ["a tree", "a chain", "no plan at all"]) {
    plan = ORDERS[name](now.devices); ends.push(out(nodesAfter(99).at(-1).state)); }
  return {first, ends, has: along.at(-1).map(({has}) => has.length)};
}"""


def test_states_and_every_order_of_merges_are_attention(browser):
    rng = np.random.default_rng(0)
    heads = browser.run("data.heads")
    for p in range(2, 17):
        head, owner = p % len(heads), rng.integers(0, p, 27)
        s, v = (np.array(heads[head][name]) for name in ("scores", "values"))
        settings = json.dumps({"devices": p, "head": head})
        page = browser.run(f"({STATES})({settings}, {owner.tolist()})")
        for device, (m, *sums) in enumerate(page["first"]):
            mine = owner == device
            assert m == (s[mine].max() if mine.any() else None)
            terms = np.exp(s[mine] - (m or 0))
            close(sums, [terms.sum(), *(terms @ v[mine])])
        dense = [*(np.exp(s) @ v / np.exp(s).sum()), np.log(np.exp(s).sum())]
        close(page["ends"], [dense] * (p + 3))
        assert page["has"] == [p] * p


def test_bytes_are_those_of_the_compiled_programs(browser):
    methods = {"tree": partial(tree_decode, method="butterfly"), "ring": ring_decode}
    for p in (3, 8):
        sharding = NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))
        q, k = (jax.ShapeDtypeStruct((1, n, 1, 64), "float32") for n in (1, 64 * p))
        for name, decode in methods.items():
            program = jax.jit(partial(decode, sharding=sharding)).lower(q, k, k).compile()
            page = browser.run(f"race({{...now, devices: {p}, context: {64 * p}}}).{name}")
            sent = page["bytes"] * sum(len(x["messages"]) for x in page["rounds"])
            assert sum(x.total_bytes * x.devices for x in collectives(program)) == sent, (name, p)


def test_the_energy_and_its_slope(browser):
    five = browser.run("data.sentence")
    k, v = jnp.array(five["scores"])[:, None], jnp.array(five["values"], float)
    value = jax.jit(jax.value_and_grad(lambda zeta: energy(zeta, jnp.ones(1), k, v, scale=1.0)))
    for zeta in np.random.default_rng(1).uniform(-2, 2, (6, 2)):
        page = browser.run(f"energyAt({zeta.tolist()})")
        wanted, z = value(zeta)
        close([page["energy"], *page["z"]], [wanted, *z])
        close(browser.run(f"bestSource({page['z']})"), zeta)
    assert browser.run("[[1, 3], [0, 3], [4, 1]].every((z) => depthOf(z) < 1e-9)")


def test_faults_are_those_that_the_suite_was_asked_about(browser):
    browser.run("now.devices = 16")
    pairs, tree = browser.run("""[nodesAfter(0).map(({state}) => finalize(state)).map(
        ({out, lse}) => [out, lse === -Infinity ? null : lse]), treePairs(16)]""")
    for name, fault in FAULTS.items():
        with np.errstate(all="ignore"):
            nodes = [
                fault.sent(np.full(64, fault.empty[0]), np.array(fault.empty[1]))
                if lse is None
                else fault.sent(np.array(out), np.array(lse))
                for out, lse in pairs
            ]
            for a, b in tree:
                nodes.append(fault.merge(nodes[a], nodes[b]))
        page = browser.run(f"mergedBy(FAULTS.{name}).out.map((x) => Number.isNaN(x) ? null : x)")
        np.testing.assert_allclose(np.array(page, float), nodes[-1][0], atol=1e-6, err_msg=name)


PACKED = """(({nodes, map}) => [nodes.map(({word}) => Number(word)), nodes.map(({depth}) => depth),
    nodes.map(({path}) => nodes.map((_, j) => path.includes(j))), map])"""


def test_pack(browser):
    rng = np.random.default_rng(2)
    for _ in range(20):
        beam, lengths = rng.integers(0, 3, (1, 5, 4)), rng.integers(1, 5, (1, 5))
        rows = [row[:n].astype(str).tolist() for row, n in zip(beam[0], lengths[0], strict=True)]
        wanted = pack(beam, lengths)
        arrays = wanted.packed_beam, wanted.position_offsets, wanted.attention_mask
        places = zip(wanted.unpack_map[0], lengths[0], strict=True)
        right = [*(x[0].tolist() for x in arrays), [row[:n].tolist() for row, n in places]]
        assert browser.run(f"{PACKED}(pack({json.dumps(rows)}))") == right


def test_verify_accepts_what_the_model_says(browser):
    """The model's word, and on along the kept node that drafted it."""
    trees, rng = browser.run("data.trees"), np.random.default_rng(3)
    counts = set()
    for k in range(30):
        nodes = trees[k % len(trees)]["nodes"]
        settings = f"{rng.integers(0, 25)}, {rng.uniform(0, 4)}, {k}"
        kept, found = browser.run(f"""(({{nodes}}) => {{
            const kept = drafted(nodes, {settings});
            return [[...kept], accepted(nodes, kept).text];
        }})(data.trees[{k % len(trees)}])""")
        assert all(nodes[i]["parent"] in kept for i in kept if i)
        place, wanted = 0, []
        while place is not None:
            said = nodes[place]["said"]
            wanted.append(said)
            after = [i for i in kept if i and nodes[i]["parent"] == place]
            place = next((i for i in after if nodes[i]["word"] == said), None)
        assert found == wanted
        counts.add(len(found))
    assert counts >= {1, 2, 3}


# ---- hands ----


def test_what_is_shown_at_first(browser):
    for name, shown in {
        "ring-time": "592 µs",
        "tree-time": "6.21 µs",
        "packed": "12 words, 8 nodes",
        "push": "(1.25, 2.25)",
        "wins": "131,072",
    }.items():
        assert shown in said(browser, name)
    label = browser.run("byId('wire-view').ariaLabel")
    assert "3 rounds, states of 264 bytes" in label and "shards of 4,194,304 bytes" in label


def test_the_mouse_the_keys_and_the_address(browser):
    browser.drag('[data-knob="context"]', (-45, 0))
    fewer = browser.run("now.context")
    assert fewer < 65536 and "states of 264 bytes" in browser.run("byId('wire-view').ariaLabel")
    for selector, key, setting in (
        ('#wire [data-knob="devices"]', "ArrowLeft", "now.devices"),
        ('#order [data-knob="merged"]', "End", "now.merged"),
        ('[data-knob="prompt"]', "ArrowRight", "now.prompt"),
        ('[data-knob="cut"]', "Home", "now.cut"),
        ("#race", "PageUp", "now.queries"),
        ("#clock", "End", "clock.at"),
    ):
        before = browser.run(f"document.querySelector('{selector}').focus(); {setting}")
        browser.press(key)
        assert browser.run(f"{FRAME}.then(() => {setting})") != before
    assert said(browser, "merged").startswith("All 7 states are merged. The result is one softmax")
    opened_again(browser)
    assert browser.run("[now.context, now.devices]") == [fewer, 7]


def test_a_disc_is_dragged_onto_another_and_the_cross_stays(browser):
    browser.open(f"{PAGE.as_uri()}#wire?devices=3", **STILL)
    cross = "document.querySelector('#masses .cross').getAttribute('transform')"
    before = browser.run(cross)
    x, y = browser.middle('[data-mass="0"]')
    by = browser.run(f"""[document.querySelector('[data-mass="1"]').getBoundingClientRect()].map(
        (box) => [box.x + box.width / 2 - {x}, box.y + box.height / 2 - {y}])[0]""")
    browser.drag('[data-mass="0"]', by)
    assert browser.run("[now.way, now.merged]") == ["your own order", 1]
    for mass in (2, 3):  # which are chosen by hand
        browser.run(FRAME)
        browser.run(f"document.querySelector('[data-mass=\"{mass}\"]').focus()")
        browser.press("Enter")
    browser.run(FRAME)
    assert said(browser, "merged").startswith("All 3 states") and browser.run(cross) == before


def test_a_word_goes_to_the_next_device_and_the_cross_to_a_corner(browser):
    browser.drag('[data-word="0"]')
    browser.drag("#plane .handle", (0, 40))
    z = browser.run("PLANE.z")
    assert z[1] < 2
    opened_again(browser)
    close(browser.run("PLANE.z"), z)
    assert browser.run("owner[0]") == 1  # the address has kept both
    browser.drag("#plane .handle", (-200, 0))
    assert said(browser, "push").startswith("No push puts the cross at")


def test_a_finger_turns_a_knob_and_does_not_scroll(browser):
    browser.open(PAGE.as_uri(), width=390, **STILL)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = browser.middle('[data-knob="context"]')
    scrolled = browser.run("scrollY")
    for kind, points in (("Start", [0]), ("Move", [-20]), ("Move", [-60]), ("End", [])):
        touches = [{"x": x + by, "y": y + by / 2} for by in points]
        browser.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=touches)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    assert browser.run("now.context") < 65536 and browser.run("scrollY") == scrolled


def test_typed_guesses_make_a_tree(browser):
    browser.run("byId('lines').select()")
    browser.type("a b c\na b d\n<i>")
    browser.run(FRAME)
    assert said(browser, "packed") == "7 words, 5 nodes"
    assert "a mask of 5 rows" in browser.run("byId('mask').ariaLabel")
    browser.run("byId('lines').select()")
    browser.type(" ")
    empty = "[KNOBS.guesses.text(9), byId('chosen').hidden]"
    assert browser.run(f"{FRAME}.then(() => {empty})") == ["in no way yet", True]


# ---- wherever it is shown ----


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (820, "light"), (1400, "dark")])
def test_it_fits_the_window_and_plays_but_for_who_wants_no_motion(chrome, width, scheme):
    for motion, playing in ((STILL, False), (MOVING, True)):
        chrome.open(PAGE.as_uri(), width=width, prefers_color_scheme=scheme, **motion)
        assert chrome.run("document.documentElement.scrollWidth") == width
        assert (chrome.run("clock.playing") > 0) == playing
        sections = "[...document.querySelectorAll('section:not(#install)')]"
        heights = chrome.run(f"{sections}.map((x) => x.offsetHeight)")
        assert len(heights) == 8 and min(heights) > 300
        cut = chrome.run("[...document.querySelectorAll('.cut > svg')].map((x) => x.id)")
        assert cut == (["drafted"] if width == 390 else [])  # it says that it scrolls


def test_no_printed_page_is_empty(browser):
    browser.open(PAGE.as_uri(), prefers_color_scheme="dark", **STILL)
    sizes = []
    for page in range(1, 20):
        try:
            printed = browser.call("Page.printToPDF", pageRanges=str(page), printBackground=True)
        except RuntimeError:  # there are no more pages
            break
        sizes.append(len(printed["data"]))
    assert 3 <= len(sizes) <= 9 and min(sizes) > 20_000, sizes


def test_without_scripts_a_still_picture_and_in_a_frame_all_of_it(browser, tmp_path):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(PAGE.as_uri())
    still = "document.querySelector('noscript svg')?.getBoundingClientRect().height"
    assert browser.run(still) > 150
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    frame = tmp_path / "cell.html"  # as a notebook's output cell has it
    page = f'<!doctype html><iframe srcdoc="{escape(text(PAGE))}" width=800 height=900></iframe>'
    frame.write_text(page, "utf-8")
    browser.open(frame.as_uri())
    shown = "frames[0].document.querySelector('[data-say=\"tree-time\"]')?.textContent"
    browser.wait(f"{shown} === '6.21 µs'")
