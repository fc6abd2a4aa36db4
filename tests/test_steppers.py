"""The steppers, clicked through in headless Chromium: every number is the package's own."""

import functools
import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import Browser, chromium
from jax.sharding import PartitionSpec as P

from treeattn import (
    AttentionState,
    attend,
    collectives,
    finalize,
    kv_mesh,
    merge,
    merge_across,
    pack,
    packed_token_indices,
    prefix_encoding,
    reduce_chain,
    reduce_tree,
)
from treeattn.state import tree_round
from treeattn_conformance import CURES, check_merge

pytestmark = pytest.mark.slow

SITE = Path(__file__).parent.parent / "site"
NAMES = ("energy", "merge", "prefix_tree")
ENERGY, MERGE, PREFIX_TREE = PAGES = [SITE / f"{name}_stepper.html" for name in NAMES]
NUMBER = r"−?(?:∞|\d[\d,]*(?:\.\d+)?)"


def split(page: str) -> tuple[str, dict]:
    """(the page without its data, the data)"""
    begin, found, end = re.split(r'(?s)(?<=id="data">)(.*?)(?=</script>)', page, maxsplit=1)
    return begin + end, json.loads(found)


def parsed(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf").replace(",", ""))


@functools.cache
def heads() -> list[dict]:
    return split(MERGE.read_text("utf-8"))[1]["heads"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
    assert browser.errors == []  # no script has thrown, and nobody asked the network


# ---- the pages as files ----


@functools.cache
def generator():
    """site/make_steppers.py, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        return importlib.import_module("make_steppers")


def test_the_pages_are_what_the_generator_writes():
    with jax.enable_x64(False):  # as the generator runs
        fresh = generator().make()
    assert set(fresh) == {page.name for page in PAGES}
    for name, text in fresh.items():
        (page, data), (fresh_page, fresh_data) = (
            split((SITE / name).read_text("utf-8")),
            split(text),
        )
        assert page == fresh_page
        kept, made = jax.tree.flatten(data), jax.tree.flatten(fresh_data)
        assert kept[1] == made[1]
        for x, y in zip(kept[0], made[0], strict=True):  # machines round differently
            assert x == y if isinstance(x, str) else abs(x - y) < 0.0021


def test_the_scores_give_attention_of_the_model():
    """The page's rounded scores and values, against the model's attention to its own keys."""
    model = generator().packaged_model()
    for head in heads()[:-1]:
        ids = model.tokenizer.encode("".join(head["words"]))
        layers = model.layers_qkv(np.array([ids]))
        q, k, v = next(itertools.islice(layers, head["layer"], None))
        out, lse = finalize(attend(q[:, -1:], k, v))
        state = leaves(head, len(ids), 1, "contiguous")
        ours = finalize(jax.tree.map(lambda x: x[0], state))
        np.testing.assert_allclose(ours[0], out[0, 0, head["head"]], atol=0.01)
        np.testing.assert_allclose(ours[1], lse[0, 0, head["head"]], atol=0.002)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_nothing_outside_the_page_is_named(page):
    text = split(page.read_text("utf-8"))[0].replace(
        "http://www.w3.org/", ""
    )  # two names, no links
    assert not re.search(r"https?:|src=|@import|url\(|<link", text)


# ---- the merge ----


def shards(words: int, tokens: int, devices: int, layout: str) -> list[np.ndarray]:
    """The keys of each device, of a cache with room for all words."""
    place = np.arange(tokens)
    rows = -(-words // devices)
    owner = place % devices if layout == "striped" else place // rows
    return [place[owner == r] for r in range(devices)]


def leaves(head: dict, tokens: int, devices: int, layout: str) -> AttentionState:
    """Each device's state (devices,), by `attend` with a mask: each key is its score."""
    words, values = len(head["words"]), np.array(head["values"])
    scores = np.pad(head["scores"][tokens - 1], (0, words - tokens))  # one shape for all texts
    mask = np.zeros((devices, 1, 1, words), bool)
    for r, keys in enumerate(shards(words, tokens, devices, layout)):
        mask[r, 0, 0, keys] = True
    k, v = (
        jnp.broadcast_to(x[None, :, None], (devices, words, 1, x.shape[-1]))
        for x in (scores[:, None], values)
    )
    state = attend(jnp.ones((devices, 1, 1, 1)), k, v, mask=jnp.array(mask), scale=1.0)
    return jax.tree.map(lambda x: x[:, 0, 0], state)


# All that the page shows, as text.
READ = """(() => {
  const text = (node) => node.textContent;
  const rows = (selector) => [...document.querySelectorAll(selector)].map(
    (row) => [...row.children].map(text));
  const boxes = [...document.querySelectorAll("#diagram g[data-node]")].map(
    (box) => [box.dataset.node, [...box.querySelectorAll("text")].map(text)]);
  return {
    boxes: Object.fromEntries(boxes),
    fresh: [...document.querySelectorAll("g:has(.fresh)")].map((box) => box.dataset.node),
    title: text(document.querySelector("#step-title")),
    sent: text(document.querySelector("#sent")),
    step: rows("#step-table tr"),
    vector: text(document.querySelector("#vector div")),
    table: rows("#states tbody tr"),
    result: document.querySelector("#result").hidden ? null : rows("#result tbody tr"),
    agrees: text(document.querySelector("#agrees")),
    over: document.querySelector("#next").disabled,
  };
})()"""


def same(texts, numbers, digits: int):
    """Texts of numbers show these, rounded to so many digits."""
    wanted = np.asarray(numbers, np.float64).ravel()
    assert len(texts) == len(wanted)
    for text, number in zip(texts, wanted, strict=True):
        assert len(text.partition(".")[2]) == digits or "∞" in text, text
        if np.isinf(number):
            assert parsed(text) == number
        else:
            assert abs(parsed(text) - number) <= 0.5 * 10**-digits + 1e-9, (text, number)


def check_states(page: dict, states: dict[str, AttentionState], digits: int):
    """Every box of the diagram and every row of the table, and no more of either."""
    shown = {node: texts for node, texts in page["boxes"].items() if texts}
    assert set(shown) == set(states)
    for node, texts in shown.items():
        m, d, _ = states[node]
        assert [text[:2] for text in texts] == ["m ", "d "]
        same([text[2:] for text in texts], [m, d], digits)
    assert {f"{row[0]},{row[1]}" for row in page["table"]} == set(states)
    for column, device, _, *numbers, n in page["table"]:
        state = states[f"{column},{device}"]
        same(numbers, [state.max, state.denominator, finalize(state)[1]], 4)
        same(n.split(), state.numerator, 3)


def check_step(page: dict, a: AttentionState, b: AttentionState, merged: AttentionState):
    """The table of one merge: fields of both sides and of the result, and the weights."""
    rows = {name: cells for name, *cells in page["step"][1:]}
    all_three = (a, b, merged)
    weights = [0 if s.max == -np.inf else np.exp(s.max - merged.max) for s in (a, b)]
    same(rows["m"], [s.max for s in all_three], 3)
    same(rows["weight e^(mᵢ − m)"], weights, 4)
    same(rows["d"], [s.denominator for s in all_three], 4)
    weighted = [s.denominator * w for s, w in zip((a, b), weights, strict=True)]
    same(rows["weight · d"], [*weighted, merged.denominator], 4)
    for j in range(2):
        same(rows[f"n, component {j}"], [s.numerator[j] for s in all_three], 4)
    same(page["vector"].split(), merged.numerator, 3)


def numbers_of(text: str) -> list[float]:
    return [parsed(found) for found in re.findall(NUMBER, text)]


def click_through(
    browser, head: int, tokens: int, devices: int, layout: str, way: str, arity: int, **view
) -> tuple[list[AttentionState], list[int]]:
    """Click "Merge" to the end, checking all numbers: (the last round's states, bytes by step)."""
    size = 4 * (len(heads()[head]["values"][0]) + 2)
    settings = (
        f"head={head}&tokens={tokens}&devices={devices}&layout={layout}&way={way}&arity={arity}"
    )
    browser.open(f"{MERGE.as_uri()}#{settings}", **view)
    digits = 1 if view.get("width", 1280) < 600 else 2
    browser.run("document.querySelector('#states').open = true")
    browser.run("new Promise((done) => setTimeout(done, 50))")  # "toggle" comes later
    parts = leaves(heads()[head], tokens, devices, layout)
    states = {f"0,{r}": jax.tree.map(lambda x, r=r: x[r], parts) for r in range(devices)}
    known, sent = {}, []
    while True:
        page = browser.run(READ)
        for node in page["boxes"]:  # what is handed on unmerged is what it was
            if page["boxes"][node] and node not in states:
                column, device = node.split(",")
                states[node] = states[f"{int(column) - 1},{device}"]
        check_states(page, states, digits)
        m_and_d = [] if not sent else [known[x] for x in "md"]
        total, messages, each, busiest = numbers_of(page["sent"].partition("Sent")[2])
        if m_and_d:
            same(re.findall(NUMBER, page["sent"])[:1], m_and_d[:1], 3)
            same(re.findall(NUMBER, page["sent"])[1:2], m_and_d[1:], 4)
        assert each == size and total == messages * size and busiest <= total
        sent.append(int(total))
        if page["over"]:
            break
        before = {**states}
        browser.click("#next")
        page = browser.run(READ)
        assert page["fresh"], "no pulse"
        column, device = page["fresh"][0].split(",")
        ends = [int(x) for x in numbers_of(page["title"])[-2:]]
        if "→" in page["title"]:  # a butterfly hands the result back
            new = before[f"{int(column) - 1},{ends[0]}"]
            assert ends[1] == int(device)
        else:
            previous = int(column) - 1
            running = f"{column},{ends[0]}"  # a further child of a node, or the next of a chain
            left = running if way != "butterfly" and running in before else f"{previous},{ends[0]}"
            a, b = before[left], before[f"{0 if way == 'chain' else previous},{ends[1]}"]
            new = merge(a, b)
            check_step(page, a, b, new)
        for node in page["fresh"]:
            states[node] = new
        known = {"m": new.max, "d": new.denominator}
    dense = finalize(jax.tree.map(lambda x: x[0], leaves(heads()[head], tokens, 1, "contiguous")))
    for row, number in zip(page["result"], [dense[1], *dense[0]], strict=False):
        same(row[1:], [number, number], 4)
    assert (
        page["agrees"].endswith("below 1e−12: true.")
        and f"all {size // 4 - 1} num" in page["agrees"]
    )
    last = max(int(node.split(",")[0]) for node in states)
    return [state for node, state in states.items() if node.startswith(f"{last},")], sent


def agree(state: AttentionState, wanted: AttentionState):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14), state, wanted
    )


TREES = [
    (0, 27, 8, "contiguous", 2),  # the last device has no keys
    (1, 27, 16, "contiguous", 4),
    (2, 9, 13, "striped", 3),
    (3, 1, 2, "contiguous", 2),
    (4, 5, 16, "striped", 16),
    (4, 3, 5, "contiguous", 8),
]


@pytest.mark.parametrize(("head", "tokens", "devices", "layout", "arity"), TREES)
def test_a_tree_is_reduce_tree(browser, head, tokens, devices, layout, arity):
    (last,), sent = click_through(browser, head, tokens, devices, layout, "tree", arity)
    parts = leaves(heads()[head], tokens, devices, layout)
    agree(last, reduce_tree(parts, arity=arity))
    size = 4 * (parts.numerator.shape[-1] + 2)
    assert sent == [i * size for i in range(devices)]  # one message a merge, p − 1 merges


@pytest.mark.parametrize(
    ("head", "tokens", "devices", "layout"),
    [(0, 20, 6, "contiguous"), (4, 5, 8, "striped"), (1, 5, 16, "contiguous")],
)
def test_a_chain_is_reduce_chain(browser, head, tokens, devices, layout):
    last, sent = click_through(browser, head, tokens, devices, layout, "chain", 2)
    parts = leaves(heads()[head], tokens, devices, layout)
    agree(last[-1], reduce_chain(parts))
    size = 4 * (parts.numerator.shape[-1] + 2)
    assert sent == [i * size for i in range(devices)]


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_a_butterfly_is_that_of_merge_across(browser, devices):
    """Its result, on every device, and its bytes, from the compiled program."""
    mesh = kv_mesh(jax.devices()[:devices])
    last, sent = click_through(browser, 0, 23, devices, "contiguous", "butterfly", 2)
    parts = leaves(heads()[0], 23, devices, "contiguous")
    butterfly = functools.partial(merge_across, axis_name="kv", method="butterfly")
    run = jax.jit(jax.shard_map(butterfly, mesh=mesh, in_specs=P("kv"), out_specs=P("kv")))
    wanted = run(parts)
    assert len(last) == devices
    for r, state in enumerate(last):
        agree(state, jax.tree.map(lambda x, r=r: x[r], wanted))
    program = run.lower(jax.tree.map(lambda x: x.astype("f4"), parts)).compile()
    assert sent[-1] == sum(c.total_bytes * c.devices for c in collectives(program))


def test_a_round_of_the_tree_is_tree_round(browser):
    """And its button; at a phone's width, in the dark."""
    view = {"width": 390, "prefers_color_scheme": "dark"}
    click_through(browser, 3, 14, 11, "striped", "tree", 3, **view)
    browser.click("#start")
    parts, column = leaves(heads()[3], 14, 11, "striped"), 0
    while len(parts.max) > 1:
        browser.click("#round")
        parts, column = tree_round(parts, 3), column + 1
        page = browser.run(READ)
        rows = [row for row in page["table"] if row[0] == str(column)]
        assert len(rows) == len(parts.max)
        for i, row in enumerate(sorted(rows, key=lambda row: int(row[1]))):
            same(row[3:5], [parts.max[i], parts.denominator[i]], 4)
    assert page["over"]


def test_keys_and_form(browser):
    browser.open(MERGE.as_uri(), width=390)
    step = "Number(new URLSearchParams(location.hash.slice(1)).get('step'))"
    for key, shift, wanted in [
        ("ArrowRight", False, 1),
        ("ArrowRight", True, 4),
        ("ArrowLeft", False, 3),
        ("ArrowLeft", True, 0),
        ("End", False, 7),
        ("ArrowRight", False, 7),
        ("Home", False, 0),
    ]:
        browser.press(key, shift)
        assert browser.run(step) == wanted, key
    browser.press("End")
    browser.run("document.querySelector('#devices').focus()")
    browser.press("ArrowRight")  # a field's own key: one device more, and the start again
    assert browser.run("document.querySelector('#devices-out').textContent") == "9"
    assert browser.run(step) == 0
    assert browser.run("document.querySelectorAll('#diagram g[data-node^=\"0,\"]').length") == 9
    browser.run("document.activeElement.blur()")
    browser.press("End")
    assert browser.run(step) == 8
    browser.click('g[data-node="1,0"]')  # a box leads to the step that made it
    assert browser.run(step) == 1


# ---- the merge, broken ----


def broken_merges():
    return sys.modules[generator().faults.__module__]


@functools.cache
def judged() -> dict[str, dict]:
    """What the suite says of each fault."""
    return {fault["id"]: fault for fault in broken_merges().faults()}


def test_without_a_fault_the_suite_has_nothing_to_say():
    module = broken_merges()
    report = check_merge(functools.partial(module.merged, module.Fault("none", "")))
    assert not report.names("failed")
    assert all(report["failed"] for report in judged().values())


def along(merge, parts: list, way: str):
    """A tree as deep as it must be, or a chain, of pairs that these merge to one."""
    if way == "chain":
        return functools.reduce(merge, parts)
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [merge(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


READ_FAULT = """(() => {
  const text = (id) => document.getElementById(id).textContent;
  const rows = [...document.querySelectorAll("#shares tbody tr")];
  const {out, shares, lse} = mergedBy(FAULTS[byId("fault").value]);
  return {
    out: out.map(String), shares: shares.map(String), lse: String(lse),
    moved: text("moved"), about: text("fault-text"), fingerprints: text("fingerprints"),
    names: [...document.querySelectorAll("#fingerprints strong")].map((x) => x.textContent),
    rows: rows.map((row) => [...row.children].map((cell) => cell.textContent)),
    bars: [...document.querySelectorAll("#outputs .off")].map((x) => x.getAttribute("height")),
  };
})()"""


@pytest.mark.parametrize(("devices", "way"), [(8, "chain"), (16, "tree")])
def test_broken_merges_are_those_that_the_suite_has_judged(browser, devices, way):
    """Every fault on a real head: the output, and what the page says, from `broken_merges`."""
    module = broken_merges()
    settings = f"head=0&tokens=27&devices={devices}&way={way}&arity=2"
    browser.open(f"{MERGE.as_uri()}#{settings}&fault=base")
    parts = leaves(heads()[0], 27, devices, "contiguous")
    outs, lses = (np.asarray(x, np.float64) for x in finalize(parts))
    size = outs.shape[1]
    right = finalize(reduce_tree(parts))
    for id, fault in module.FAULTS.items():
        browser.run(f"""(() => {{
            byId("fault").value = {id!r};
            byId("fault").dispatchEvent(new Event("input"));
        }})()""")
        page = browser.run(READ_FAULT)
        empty = np.isneginf(lses)
        out = np.where(empty[:, None], fault.empty[0], np.hstack([outs, np.eye(devices)]))
        lse = np.where(empty, fault.empty[1], lses)
        with np.errstate(all="ignore"):
            sent = [fault.sent(out[r, None], lse[r, None]) for r in range(devices)]
            (wanted_out,), (wanted_lse,) = along(fault.merge, sent, way)
        # Where these round to 8 bits or to 24, a last bit may fall the other way there.
        near = {"rtol": 0.008, "atol": 1e-4} if id == "out16" else {"rtol": 2e-7, "atol": 1e-12}
        shown = np.array([*page["out"], *page["shares"]], float)
        np.testing.assert_allclose(shown, wanted_out, err_msg=id, **near)
        np.testing.assert_allclose(float(page["lse"]), wanted_lse, err_msg=id, **near)
        assert page["about"] == fault.about
        report = judged()[id]
        assert numbers_of(page["fingerprints"])[:2] == [report["asked"], report["failed"]]
        assert page["names"] == [name for name, _ in report["fingerprints"]]
        for name, cure in report["fingerprints"]:
            assert f"{name}: {cure}." in page["fingerprints"] and cure == CURES["merge"][name]
        gap = np.abs(shown[:size] - right[0]).max()
        if np.isnan(gap):
            assert page["moved"] == "Every number of the output is NaN."
        elif gap < 1e-5:
            assert page["moved"] == "Here, nothing moves."
        else:
            said = [gap, np.abs(right[0]).max(), wanted_lse, right[1]]
            np.testing.assert_allclose(numbers_of(page["moved"]), said, atol=5.1e-4)
        weights = np.exp(lses - right[1])
        for row, share, weight in zip(page["rows"], shown[size:], weights, strict=True):
            np.testing.assert_allclose(parsed(row[2][:-2]), 100 * weight, atol=0.051)
            is_nan = np.isnan(share)
            assert row[3] == "NaN" if is_nan else abs(parsed(row[3][:-2]) - 100 * share) < 0.051
        assert len(page["bars"]) == size


def test_nothing_is_broken_before_one_asks(browser):
    browser.open(MERGE.as_uri())
    assert not browser.run("document.querySelector('#broken').open")
    assert "fault" not in browser.run("location.hash")
    browser.click("#broken summary")
    assert browser.run("document.querySelector('#broken').open")
    assert browser.run("document.querySelector('#fault-panel').hidden")


# ---- the prefix tree ----

READ_TREE = """(() => {
  const cells = (row) => [...row.children].slice(1).map((cell) => cell.textContent);
  const rows = (id) => [...document.querySelectorAll(`#${id} tbody tr`)].map(cells);
  const texts = (box) => [...box.querySelectorAll("text")].map((text) => text.textContent);
  return {
    packed: rows("packed"), mask: rows("mask"), unpack: rows("unpack"), encoding: rows("encoding"),
    boxes: [...document.querySelectorAll("#tree g[data-node]")].map(texts),
    edges: document.querySelectorAll("#tree path").length,
    title: document.querySelector("#step-title").textContent,
    text: document.querySelector("#step-text").textContent,
    note: document.querySelector("#note").textContent,
    marked: Object.fromEntries(["path", "current"].map((kind) => [kind, [...new Set([
      ...document.querySelectorAll(`#tree g.${kind}, #packed td.${kind}`)].map(
      (element) => Number(element.dataset.node)))]])),
  };
})()"""


def check_tree(page: dict, lines: list[str]):
    """All that is shown of these candidates, against `pack`."""
    rows = [line.split() for line in lines if line.split()]
    words = list(dict.fromkeys(word for row in rows for word in row))
    width = max(map(len, rows), default=0)
    lengths = np.array([[len(row) for row in rows]])
    beam = np.zeros((1, len(rows), width), int)
    for m, row in enumerate(rows):
        beam[0, m, : len(row)] = [words.index(word) for word in row]
    tree = pack(beam, lengths)
    numbers = np.arange(tree.packed_beam.shape[1])
    nodes, tokens, positions, taken = page["packed"]
    assert nodes == [str(i) for i in numbers]
    assert tokens == [words[i] for i in tree.packed_beam[0]]
    assert positions == [str(i) for i in tree.position_offsets[0]]
    assert taken == [str(i) for i in packed_token_indices(beam, lengths)[0]]
    mask = [["●" if sees else "" for sees in row] for row in tree.attention_mask[0]]
    assert page["mask"] == mask
    encoding = prefix_encoding(beam, lengths)[0]
    for name, values in ("unpack", tree.unpack_map[0]), ("encoding", encoding):
        shown = [
            [str(x) if c < len(row) else "·" for c, x in enumerate(line)]
            for row, line in zip(rows, values, strict=True)
        ]
        assert page[name] == shown, name
    assert [box[0] for box in page["boxes"]] == nodes
    assert page["edges"] == (tree.position_offsets[0] > 0).sum()
    return tree


def test_examples_and_every_step_of_them(browser):
    browser.open(PREFIX_TREE.as_uri(), width=390)
    for i, example in enumerate(split(PREFIX_TREE.read_text("utf-8"))[1]["examples"]):
        browser.run(f"""(() => {{
            const list = document.querySelector("#example");
            list.value = {i};
            list.dispatchEvent(new Event("input"));
        }})()""")
        tree = check_tree(browser.run(READ_TREE), example["lines"])
        for node in range(tree.packed_beam.shape[1]):
            browser.click("#next")
            page = browser.run(READ_TREE)
            path = np.flatnonzero(tree.attention_mask[0, node])
            assert page["marked"] == {"path": list(path[:-1]), "current": [node]}
            assert page["title"].startswith(f"Node {node} of {tree.packed_beam.shape[1]}: ")
            row, seen, position, token, *candidates = re.findall(
                r"\d+", re.sub("“.*”", "", page["text"])
            )
            places = np.argwhere(tree.unpack_map[0] == node)
            places = [(m, c) for m, c in places if c < len(example["lines"][m].split())]
            assert int(row) == places[0][0] and int(seen) == len(path)
            assert int(position) == int(token) == tree.position_offsets[0, node]
            assert [int(m) for m in candidates] == [m for m, _ in places]


def test_typing(browser):
    browser.open(PREFIX_TREE.as_uri(), prefers_color_scheme="dark")
    browser.run("document.querySelector('#lines').select()")
    lines = []
    for text in ("a b c", "\n", "a b d", "\n\n", "b", "\na  b   c e", "\na b", "\n<b>&amp;"):
        browser.type(text)
        lines.append(text)
        check_tree(browser.run(READ_TREE), "".join(lines).split("\n"))
    browser.press("ArrowLeft")  # moves the caret, not the step
    assert "candidate" in browser.run(READ_TREE)["title"]
    browser.run("document.activeElement.blur()")
    browser.press("End")
    assert browser.run(READ_TREE)["marked"]["current"] == [6]
    browser.run("document.querySelector('#lines').select()")
    browser.type(" ")
    assert browser.run(READ_TREE)["title"] == "No candidates, no nodes"


def test_random_beams(browser):
    rng = np.random.default_rng(3)
    for _ in range(12):
        lines = [
            " ".join(rng.choice(["x", "y", "zz"], size=rng.integers(1, 8)))
            for _ in range(rng.integers(1, 11))
        ]
        browser.open(f"{PREFIX_TREE.as_uri()}#lines={quote(chr(10).join(lines))}")
        check_tree(browser.run(READ_TREE), lines)


def test_what_is_too_much_is_said(browser):
    lines = [" ".join("abcdefghijkl"), *("q" * n for n in range(1, 14))]
    browser.open(f"{PREFIX_TREE.as_uri()}#lines={quote(chr(10).join(lines))}")
    page = browser.run(READ_TREE)
    assert "first 12 candidates" in page["note"] and "first 10 words" in page["note"]
    check_tree(page, [" ".join(line.split()[:10]) for line in lines[:12]])


# ---- all of them ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_fits_a_phone_and_can_be_read(browser, page, scheme):
    """No sideways scrolling; text at 4.5 to 1 against its ground; motion only where wanted."""
    view = {"prefers_color_scheme": scheme, "width": 390}
    browser.open(page.as_uri(), prefers_reduced_motion="reduce", **view)
    browser.click("#next")
    assert browser.run("document.documentElement.scrollWidth") == 390
    moving = "document.getAnimations().length"
    assert browser.run(moving) == 0
    colors = browser.run("""(() => {
      const paint = document.createElement("canvas").getContext("2d");
      const style = getComputedStyle(document.documentElement);
      const names = "page panel ink soft accent on-accent wash warm warm-wash".split(" ");
      return Object.fromEntries(names.map((name) => {
        paint.fillStyle = style.getPropertyValue(`--${name}`);
        paint.fillRect(0, 0, 1, 1);
        return [name, [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3)];
      }));
    })()""")

    def light(name):
        c = np.array(colors[name]) / 255
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [
            0.2126,
            0.7152,
            0.0722,
        ]

    for text, ground in [
        ("ink", "page"),
        ("ink", "panel"),
        ("ink", "wash"),
        ("ink", "warm-wash"),
        ("soft", "page"),
        ("soft", "panel"),
        ("accent", "page"),
        ("on-accent", "accent"),
        ("warm", "page"),
        ("soft", "wash"),
        ("soft", "warm-wash"),
    ]:
        low, high = sorted([light(text), light(ground)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)
    if page == MERGE:
        browser.open(page.as_uri(), prefers_reduced_motion="no-preference", **view)
        browser.click("#next")
        assert browser.run(moving) > 0
    named = "x.textContent.trim() || x.labels?.length || x.getAttribute('aria-label')"
    what = "button, select, input, textarea, [tabindex], svg"
    nameless = f"[...document.querySelectorAll({what!r})].filter((x) => !({named})).length"
    assert browser.run(nameless) == 0
