"""The site's first page in headless Chromium: its numbers are the package's, and hands move it."""

import importlib
import json
import time
from functools import partial
from html import escape
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import Browser, chromium
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import (
    AttentionState,
    attend,
    collectives,
    energy,
    finalize,
    kv_mesh,
    merge_across,
    pack,
    ring_decode,
)
from treeattn_llama import accept_candidate_tokens

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "site" / "one_page.html"
SECTIONS = ("wire", "words", "order", "break", "prefix", "verify", "both", "loses")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"), seconds=120)
    yield browser
    browser.close()
    assert browser.errors == []  # nothing was thrown, logged as an error, or asked of the network


@pytest.fixture
def show(browser):
    """Opens the page with some settings, standing still."""

    def show(settings: str = "", width: int = 1280, scheme: str = "light"):
        media = {"prefers_reduced_motion": "reduce", "prefers_color_scheme": scheme}
        browser.open(f"{PAGE.as_uri()}#wire?{settings}", width=width, **media)
        return browser

    return show


def said(browser, name: str) -> str:
    return browser.run(f"document.querySelector('[data-say=\"{name}\"]').textContent")


# ---- the page as it opens: it moves ----


def test_it_opens_at_its_head_and_plays_on_while_a_knob_is_turned(browser):
    """Between the turn and the next frame the clock ticks, with more devices or with fewer."""
    browser.open(PAGE.as_uri(), prefers_reduced_motion="no-preference", width=1280)
    turned = browser.run("""new Promise((done) => {
      const begin = performance.now(), places = [14, 0, 9, 1, 13, 3, 0, 14, 6];
      const step = () => {
        const place = places.shift();
        if (place === undefined) return done([scrollY, location.hash.split("?")[0], clock.at]);
        turn("devices", place);
        setClock(clock.at); // as a frame of the clock does
        setTimeout(step, 120);
      };
      setTimeout(step, 300);
    })""")
    assert turned[:2] == [0, "#wire"]
    wait = "new Promise((done) => setTimeout(() => done(clock.at), 400))"
    assert 0 < turned[2] < browser.run(wait)


def test_opening_it_changes_no_address_and_scrolls_nowhere(browser):
    browser.open(PAGE.as_uri(), prefers_reduced_motion="no-preference", width=1280)
    state = "new Promise((done) => setTimeout(() => done([scrollY, location.hash]), 2500))"
    assert browser.run(state) == [0, ""]


# ---- numbers ----


def leaves(head: dict, owner: np.ndarray, p: int) -> AttentionState:
    """Each device's state, by `attend` with a mask: each key is its score."""
    words = len(owner)
    k, v = (
        jnp.broadcast_to(jnp.array(x).reshape(1, words, 1, -1), (16, words, 1, size))
        for x, size in ((head["scores"], 1), (head["values"], 64))
    )
    mask = jnp.array(owner[None] == np.arange(16)[:, None])[:, None, None]
    state = attend(jnp.ones((16, 1, 1, 1)), k, v, mask=mask, scale=1.0)
    return jax.tree.map(lambda x: np.asarray(x[:p, 0, 0]), state)


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


def test_states_and_every_order_of_merges_are_attention(show):
    rng = np.random.default_rng(0)
    browser = show()
    heads = browser.run("data.heads")
    for p in range(2, 17):
        head, owner = p % len(heads), rng.integers(0, p, 27)
        settings = json.dumps({"devices": p, "head": head})
        page = browser.run(f"({STATES})({settings}, {owner.tolist()})")
        state = leaves(heads[head], owner, p)
        first = np.array(
            [[-np.inf if row[0] is None else row[0], *row[1:]] for row in page["first"]]
        )
        wanted = np.concatenate(
            [state.max[:, None], state.denominator[:, None], state.numerator], 1
        )
        np.testing.assert_allclose(first, wanted, atol=1e-12)
        dense = finalize(jax.tree.map(lambda x: x[0], leaves(heads[head], 0 * owner, 1)))
        np.testing.assert_allclose(page["ends"], [[*dense[0], dense[1]]] * (p + 3), atol=1e-12)
        assert page["has"] == [p] * p


def test_bytes_are_those_of_the_compiled_programs(show):
    browser = show()
    for p in (2, 3, 5, 8):
        mesh = kv_mesh(jax.devices()[:p])
        merged = partial(merge_across, axis_name="kv", method="butterfly")
        merged = jax.shard_map(merged, mesh=mesh, in_specs=P("kv"), out_specs=P("kv"))
        state = AttentionState(*(jnp.zeros((p, *n), "float32") for n in ((), (), (64,))))
        dealt = NamedSharding(mesh, P(None, "kv"))
        q, k = (jnp.zeros((1, n, 1, 64), "float32") for n in (1, 64 * p))
        ring = jax.jit(partial(ring_decode, sharding=dealt)).lower(q, k, k)
        for name, program in (("tree", jax.jit(merged).lower(state)), ("ring", ring)):
            found = collectives(program.compile())
            settings = json.dumps({"devices": p, "context": 64 * p})
            page = browser.run(f"race({{...now, ...{settings}}}).{name}")
            sent = page["bytes"] * sum(len(x["messages"]) for x in page["rounds"])
            assert sum(x.total_bytes * x.devices for x in found) == sent, (name, p)


def test_the_energy_and_its_slope(show):
    browser = show()
    five = browser.run("data.sentence")
    fixed = {
        "q": jnp.ones(1),
        "k": jnp.array(five["scores"])[:, None],
        "v": jnp.array(five["values"], float),
    }
    value = jax.jit(jax.value_and_grad(partial(energy, **fixed, scale=1.0)))
    for zeta in np.random.default_rng(1).uniform(-2, 2, (6, 2)):
        page = browser.run(f"energyAt({zeta.tolist()})")
        wanted, z = value(zeta)
        np.testing.assert_allclose([page["energy"], *page["z"]], [wanted, *z], atol=1e-12)
        back = browser.run(f"bestSource({page['z']})")
        np.testing.assert_allclose(back, zeta, atol=1e-8)
    assert browser.run("[[1, 3], [0, 3], [4, 1]].every((z) => depthOf(z) < 1e-9)")


def test_faults_are_those_that_the_suite_was_asked_about(show, monkeypatch):
    monkeypatch.syspath_prepend(str(PAGE.parent))
    faults = importlib.import_module("broken_merges").FAULTS
    browser = show("devices=16")
    pairs, tree = browser.run("""[nodesAfter(0).map(({state}) => finalize(state)).map(
        ({out, lse}) => [out, lse === -Infinity ? null : lse]), treePairs(16)]""")
    for name, fault in faults.items():
        nodes = [
            (np.full(64, fault.empty[0]), np.array(fault.empty[1]))
            if lse is None
            else (np.array(out), np.array(lse))
            for out, lse in pairs
        ]
        with np.errstate(all="ignore"):
            nodes = [fault.sent(*node) for node in nodes]
            for a, b in tree:
                nodes.append(fault.merge(nodes[a], nodes[b]))
        page = browser.run(f"mergedBy(FAULTS.{name}).out.map((x) => Number.isNaN(x) ? null : x)")
        np.testing.assert_allclose(np.array(page, float), nodes[-1][0], atol=1e-6, err_msg=name)


def test_pack(show):
    rng = np.random.default_rng(2)
    browser = show()
    for _ in range(20):
        beam, lengths = rng.integers(0, 3, (1, 5, 4)), rng.integers(1, 5, (1, 5))
        rows = [[str(x) for x in row[:n]] for row, n in zip(beam[0], lengths[0], strict=True)]
        page, wanted = browser.run(f"pack({json.dumps(rows)})"), pack(beam, lengths)
        nodes = page["nodes"]
        assert [int(x["word"]) for x in nodes] == wanted.packed_beam[0].tolist()
        assert [x["depth"] for x in nodes] == wanted.position_offsets[0].tolist()
        mask = [[j in x["path"] for j in range(len(nodes))] for x in nodes]
        assert mask == wanted.attention_mask[0].tolist()
        for found, row, n in zip(page["map"], wanted.unpack_map[0], lengths[0], strict=True):
            assert found == row[:n].tolist()


def test_verify_accepts_what_the_llamas_own_code_accepts(show):
    browser = show()
    trees, rng = browser.run("data.trees"), np.random.default_rng(3)
    counts = set()
    for k in range(30):
        nodes = trees[k % len(trees)]["nodes"]
        settings = f"{rng.integers(0, 25)}, {rng.uniform(0, 4)}, {k}"
        kept, found = browser.run(f"""(({{nodes}}) => {{
            const kept = drafted(nodes, {settings});
            return [[...kept], accepted(nodes, kept).text];
        }})(data.trees[{k % len(trees)}])""")
        ids = {
            word: i
            for i, word in enumerate(sorted({x[key] for x in nodes for key in ("word", "said")}))
        }
        paths = {0: [0]}
        for i in sorted(kept)[1:]:
            assert nodes[i]["parent"] in paths  # whoever is kept has its parent kept
            paths[i] = [*paths[nodes[i]["parent"]], i]
        ends = [path for i, path in paths.items() if not any(nodes[j]["parent"] == i for j in kept)]
        beam, said = np.zeros((2, 1, len(ends), 5), int)
        scores = np.full(beam.shape, -np.inf)
        for row, path in enumerate(ends):
            beam[0, row, : len(path)] = [ids[nodes[i]["word"]] for i in path]
            said[0, row, : len(path)] = [ids[nodes[i]["said"]] for i in path]
            scores[0, row, : len(path)] = 0
        assert accept_candidate_tokens(beam, scores, said, 0.0 * beam)[0] == [ids[x] for x in found]
        counts.add(len(found))
    assert counts >= {1, 2, 3}


# ---- hands ----


def test_what_is_shown_at_first(show):
    browser = show()
    assert said(browser, "ring-time") == "592 µs" and said(browser, "tree-time") == "6.21 µs"
    assert said(browser, "packed") == "12 words, 8 nodes"
    assert "(1.25, 2.25)" in said(browser, "push") and "131,072" in said(browser, "wins")
    label = browser.run("document.querySelector('#wire-view').getAttribute('aria-label')")
    assert "3 rounds, states of 264 bytes" in label and "shards of 4,194,304 bytes" in label


def test_the_mouse_the_keys_and_the_address(show):
    browser = show()
    browser.drag('[data-knob="context"]', (-45, 0))
    fewer = browser.run("now.context")
    assert fewer < 65536 and "states of 264 bytes" in browser.run("byId('wire-view').ariaLabel")
    for selector, keys, setting in (
        ('#wire [data-knob="devices"]', ["ArrowLeft"], "now.devices"),
        ('#order [data-knob="merged"]', ["End"], "now.merged"),
        ('[data-knob="prompt"]', ["ArrowRight"], "now.prompt"),
        ('[data-knob="cut"]', ["Home"], "now.cut"),
        ("#race", ["PageUp"], "now.queries"),
        ("#clock", ["End"], "clock.at"),
    ):
        before = browser.run(f"document.querySelector('{selector}').focus(); {setting}")
        for key in keys:
            browser.press(key)
        assert browser.run(f"new Promise(requestAnimationFrame).then(() => {setting})") != before
    assert said(browser, "merged").startswith("All 7 states are merged. The result is one softmax")
    address = browser.run("redraw(); location.href")
    browser.open(address, prefers_reduced_motion="reduce")
    assert browser.run("[now.context, now.devices]") == [fewer, 7]


def test_a_disc_is_dragged_onto_another_and_the_cross_stays(show):
    browser = show("devices=3")
    cross = "document.querySelector('#masses .cross').getAttribute('transform')"
    before, start = browser.run(cross), browser.middle('[data-mass="0"]')
    end = browser.run("""[document.querySelector('[data-mass="1"]').getBoundingClientRect()].map(
        (box) => [box.x + box.width / 2, box.y + box.height / 2])[0]""")
    browser.drag('[data-mass="0"]', (end[0] - start[0], end[1] - start[1]))
    assert browser.run("[now.way, now.merged]") == ["your own order", 1]
    browser.run("new Promise(requestAnimationFrame)")  # redrawn, and nothing is chosen
    for mass in (2, 3):
        browser.run(f"document.querySelector('[data-mass=\"{mass}\"]').focus()")
        browser.press("Enter")
        browser.run("new Promise(requestAnimationFrame)")
    assert said(browser, "merged").startswith("All 3 states") and browser.run(cross) == before


def test_a_word_goes_to_the_next_device_and_the_cross_to_a_corner(show):
    browser = show()
    browser.click('[data-word="0"]')
    assert browser.run("owner[0]") == 1
    browser.drag("#plane .handle", (0, 40))
    z = browser.run("PLANE.z")
    assert z[1] < 2
    browser.open(browser.run("redraw(); location.href"), prefers_reduced_motion="reduce")
    np.testing.assert_allclose(browser.run("PLANE.z"), z, atol=1e-9)
    assert browser.run("owner[0]") == 1  # the address has kept both
    browser.drag("#plane .handle", (-200, 0))
    assert said(browser, "push").startswith("No push puts the cross at")


def test_a_finger_turns_a_knob_and_does_not_scroll(show):
    browser = show(width=390)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = browser.middle('[data-knob="context"]')
    scrolled = browser.run("scrollY")
    for kind, points in (("Start", [0]), ("Move", [-20]), ("Move", [-60]), ("End", [])):
        touches = [{"x": x + by, "y": y + by / 2} for by in points]
        browser.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=touches)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
    assert browser.run("now.context") < 65536 and browser.run("scrollY") == scrolled


def test_typed_guesses_make_a_tree(show):
    browser = show()
    browser.run("byId('lines').select()")
    browser.type("a b c\na b d\n<i>")
    browser.run("new Promise(requestAnimationFrame)")
    assert said(browser, "packed") == "7 words, 5 nodes"
    assert "a mask of 5 rows" in browser.run("byId('mask').ariaLabel")


# ---- wherever it is shown ----


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (820, "light"), (1400, "dark")])
def test_it_fits_the_window_and_plays_but_for_who_wants_no_motion(browser, show, width, scheme):
    show(width=width, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("clock.playing") == 0
    heights = [f"document.querySelector('#{name}').offsetHeight" for name in SECTIONS]
    assert min(browser.run(f"[{','.join(heights)}]")) > 300
    browser.open(PAGE.as_uri(), width=width, prefers_color_scheme=scheme)
    assert browser.run("clock.playing") > 0


def test_no_printed_page_is_empty(show):
    browser = show(scheme="dark")
    small = len(browser.call("Page.printToPDF", pageRanges="1")["data"])
    sizes = []
    for page in range(1, 20):
        try:
            printed = browser.call("Page.printToPDF", pageRanges=str(page), printBackground=True)
        except RuntimeError:  # there are no more pages
            break
        sizes.append(len(printed["data"]))
    assert 3 <= len(sizes) <= 9 and small > 20_000 and min(sizes) > 20_000, sizes


def test_without_scripts_a_still_picture_and_in_a_frame_all_of_it(browser, tmp_path):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(PAGE.as_uri())
    still = "document.querySelector('noscript svg')?.getBoundingClientRect().height"
    assert browser.run(still) > 150
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    frame = tmp_path / "cell.html"  # as a notebook's output cell has it
    page = escape(PAGE.read_text("utf-8"))
    frame.write_text(
        f'<!doctype html><iframe srcdoc="{page}" width=800 height=900></iframe>', "utf-8"
    )
    browser.open(frame.as_uri())
    shown = "frames[0].document.querySelector('[data-say=\"tree-time\"]').textContent"
    deadline = time.monotonic() + 30
    while browser.run(shown) != "6.21 µs" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert browser.run(shown) == "6.21 µs"
