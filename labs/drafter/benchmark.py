"""The recurrent drafter: tokens a step by width and length of its beam, and packed nodes.

    python benchmarks/recurrent.py            about 6 minutes on two quiet cores
    python benchmarks/recurrent.py --quick    a prompt of each kind, 32 tokens
    python benchmarks/recurrent.py readme     print the README's table from the results

The prompts of speculative.py, and twelve chats about topics that the drafter's training was kept
from (`training/prompts.py`). The model writes each text once, greedily and at temperature 0.7; one
pass over the texts gives its state at every token, and the drafts are replayed along them: what
they would have led to. `grid`: beams of M candidates of C tokens, all of whose nodes are verified,
of the likeliest tokens. `drafts`: 16 tokens a call, as in speculative.py. At temperatures above 0,
`first`: how often one of the first k children is the next token, by what is drafted; and the drawn
tree, for which the model writes anew, since acceptance by rejection needs what it says at nodes
that no text has. `times`: in turn with plain decoding.
Writes results/recurrent.json and results/recurrent.md.
"""

import argparse
import datetime
import functools
import itertools
import json
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import speculative
from speculative import BUDGET, decode, table, warm_up

from training.prompts import prompts
from training.recurrent import RecurrentDraft, draft_beam, load_drafter, one_more, unit
from treeattn import Llama, pack
from treeattn_llama import generate
from treeattn_llama.speculation import (
    Chance,
    Sampling,
    SuffixDraft,
    UnitedDraft,
    candidate_lengths,
    draft_candidate_tokens,
    rejection,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recurrent.json"
KINDS = ("chat", "code", "editing", "structured", "held-out chat")
GRID = ("held-out chat",)
GRID_MODES = ("greedy",)
CHILDREN = (1, 2, 4, 8)
REPEATS = 4  # of the draws at each token, for `first`
SHAPES = {
    "beam": "beams of M candidates of C tokens",
    "tree": "and what beam search kept at lesser depths",
}
TEXTS = HERE.parent / "build" / "recurrent"  # kept for the next drafter
WIDTHS = (1, 2, 4, 8)
LENGTHS = (1, 2, 4, 5, 8)
MODES = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7, "key": jax.random.key(0)},
    "temperature 1": {"temperature": 1.0, "key": jax.random.key(0)},
}


def chosen(model: Llama, quick: bool) -> list[dict]:
    """Prompts with their ids: speculative.py's, and the first held-out chats."""
    text = (HERE / "speculative_prompts.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)["prompt"]
    held = [p for p in prompts() if p.held_out and p.chat and p.kind == "chat"][:12]
    found += [
        {"kind": KINDS[-1], "name": f"held out {i}", "chat": True, "text": p.text}
        for i, p in enumerate(held)
    ]
    for p in found:
        encode = model.tokenizer.chat if p["chat"] else model.tokenizer.encode
        p["ids"] = encode(p["text"].removeprefix("\n"))
    return [next(p for p in found if p["kind"] == kind) for kind in KINDS] if quick else found


def written(model: Llama, found: list[dict], tokens: int, mode: dict) -> list[list[int]]:
    """The model's text after each prompt."""
    ids = [p["ids"] for p in found]
    return generate(model, ids, max_new_tokens=tokens, **mode).tokens


def states_of(model: Llama, prompt: list[int], text: list[int]) -> np.ndarray:
    """(len(text), d): the state that each of the text's tokens was read off."""
    whole = [*prompt, *text[:-1]]
    size = max(64, 1 << (len(whole) - 1).bit_length())
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(whole)] = whole
    states, _ = model.states(padded, model.new_cache(1, size))
    return np.asarray(states)[0, len(prompt) - 1 : len(whole)]


def texts_and_states(model: Llama, found: list[dict], mode: str, tokens: int) -> list[tuple]:
    """(text, states) of each prompt, written now, or what an earlier call has left."""
    path = TEXTS / f"{mode.replace(' ', '-')}-{len(found)}-{tokens}.npz"
    if not path.exists():
        texts = written(model, found, tokens, MODES[mode])
        pairs = zip(tqdm(found, unit="text", desc=f"{mode}: states"), texts, strict=True)
        states = [states_of(model, p["ids"], text) for p, text in pairs]
        TEXTS.mkdir(parents=True, exist_ok=True)
        arrays = {f"text{i}": np.array(text) for i, text in enumerate(texts)}
        np.savez(path, **arrays, **{f"states{i}": x for i, x in enumerate(states)})
    with np.load(path) as file:
        return [(file[f"text{i}"].tolist(), file[f"states{i}"]) for i in range(len(found))]


def steps_of(beams, text: list[int]) -> list[tuple]:
    """(nodes, unpacked, depth, accepted, new) of each step along a text, as speculative.py has
    them; beams(at): candidates after the token `at`, which is certain, as (beam, scores)."""
    steps = []
    at = 0
    while at + 1 < len(text):
        beam, scores = beams(at)
        lengths = np.minimum(candidate_lengths(scores), len(text) - at - 1)
        nodes = 1 + (pack(beam, lengths).packed_beam.shape[1] if lengths.size else 0)
        accepted = max(
            (
                next((i for i in range(n) if row[i] != text[at + 1 + i]), n)
                for row, n in zip(beam[0].tolist(), lengths[0].tolist(), strict=True)
            ),
            default=0,
        )
        new = min(accepted + 1, len(text) - at - 1)
        steps.append((nodes, 1 + int(lengths.sum()), int(lengths.max(initial=0)), accepted, new))
        at += new
    return steps


class Known(NamedTuple):
    """What one text, of those that were written together, was drawn with.

    noise: (tokens, n) of each of its tokens, for those that the drafter knows
    """

    temperature: float
    noise: np.ndarray

    def after(self, at: int, count: int, length: int) -> np.ndarray:
        """(count, length, n) of the tokens after token `at`, after the next one, …"""
        index = np.arange(at, at + count)[:, None] + 1 + np.arange(length)
        return self.noise[np.minimum(index, len(self.noise) - 1)]


def chances(model: Llama, found: list[dict], mode: str, most: int) -> list[Known | None]:
    """What each text of this mode was drawn with."""
    options = MODES[mode]
    if not options:
        return [None] * len(found)
    begin = np.array([len(p["ids"]) for p in found])
    logits = jax.ShapeDtypeStruct((model.config.vocabulary,), np.float32)
    chance = Chance(Sampling(options["temperature"], 1.0, options["key"]), begin, logits)
    tokens = np.asarray(load_drafter(model)[1].tokens)
    noise = [np.asarray(chance.noise(begin + i, 1))[..., tokens] for i in range(most)]
    noise = np.concatenate(noise, axis=1)
    return [Known(options["temperature"], of_text) for of_text in noise]


class Replayed:
    """What the trained drafter proposes along a text, computed for all of its tokens at once.

    tree, known: the drafter's, and what the text was drawn with (None: the likeliest tokens)
    """

    def __init__(self, pair, text, states, known: Known | None, *, width, length, tree="foreseen"):
        drafter, shared = pair
        size = -len(text) % 32
        rows = np.pad(states, [(0, size), (0, 0)])
        certain = np.pad(np.array(text, np.int32), (0, size))
        self.width = width
        found = []
        for i in range(0, len(certain), 32):
            how = {"width": width, "length": length, "with_pruned": True}
            if known is not None and tree == "foreseen":
                how["temperature"] = known.temperature
                how["noise"] = known.after(i, 32, length)
            beams = draft_beam(drafter, shared, rows[i : i + 32], certain[i : i + 32], **how)
            found.append([np.asarray(x) for x in beams])
        self.found = [np.concatenate(x) for x in zip(*found, strict=True)]

    def observe(self, texts, seen=None):
        self.at = seen

    def propose(self, budget):
        return tuple(x[self.at : self.at + 1] for x in self.found)

    def beam(self, at, shorter=0):
        """The last candidates of the search, or of one that is some tokens shorter."""
        first = self.width * shorter
        return tuple(x[at : at + 1, first : first + self.width] for x in self.found)

    def tree(self, at, shorter=0):
        """Those, and what the search kept at lesser depths."""
        return tuple(x[at : at + 1, self.width * shorter :] for x in self.found)


def along(draft, prompt, text):
    """beams(at) for `steps_of`, of the draft, within the budget."""

    def beams(at):
        draft.observe([prompt + text[: at + 1]], at)
        return draft_candidate_tokens(draft, budget=BUDGET - 1)

    return beams


class Shorter:
    """Without what the search kept at lesser depths."""

    def __init__(self, draft: Replayed):
        self.draft = draft

    def observe(self, texts, seen=None):
        self.at = seen

    def propose(self, budget):
        return self.draft.beam(self.at)


LIKELIEST = "recurrent, the likeliest"
DRAWN = "recurrent, drawn"
DRAFTS = ("suffix", "recurrent, chain of 4", "recurrent, beam of 8 × 5", "recurrent", "surer")


def drafts_along(pair, text, states, known: Known | None) -> dict:
    """By name. Where tokens are drawn, the trained drafter foresees them, one aside."""
    its = pair, text, states, known
    found = {
        "suffix": SuffixDraft(),
        "recurrent, chain of 4": Shorter(Replayed(*its, width=1, length=4)),
        "recurrent": Replayed(*its, width=8, length=5),
    }
    found["recurrent, beam of 8 × 5"] = Shorter(found["recurrent"])
    found["surer"] = UnitedDraft(SuffixDraft(), found["recurrent"])
    if known is not None:
        found[LIKELIEST] = Replayed(*its, width=8, length=5, tree="likeliest")
    return found


def counted(steps: list[tuple]) -> dict:
    row = speculative.counted(steps)
    del row["by_depth"]
    return row


def first_nodes(model: Llama, pair, text, states, known: Known) -> dict[str, list[float]]:
    """How likely one of the first k children of a node is the token that the model puts there, by
    how the children are found, for k in CHILDREN; the mean over every sixth token of a text.

    "at best": one draw, of which min(p, q) of each token is accepted at most
    """
    rng = np.random.default_rng(len(text))
    temperature = known.temperature
    at = np.arange(1, len(text) - 1, 6)
    drafter, shared = pair
    token = np.array(text, np.int32)[at, None]
    _, guessed = one_more(drafter, shared, unit(states[at])[:, None], token)
    says = np.asarray(model.read_out(states[None, at + 1]))[0].astype(np.float64)
    tokens = np.asarray(shared.tokens)
    most = max(CHILDREN)
    sums = {name: np.zeros(most) for name in ("likeliest", "foreseen", "drawn")}
    best = 0.0
    for p, its in zip(says, np.asarray(guessed)[:, 0].astype(np.float64), strict=True):
        log_q = np.full(len(p), -np.inf)
        log_q[tokens] = its / temperature
        log_p = p / temperature
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (log_p, log_q))
        best += np.minimum(p, q).sum()
        sums["likeliest"] += np.cumsum(p[np.argsort(-q)[:most]])
        for _ in range(REPEATS):
            noise = rng.gumbel(size=len(p))
            order = np.argpartition(-(log_q + noise), most)[:most]
            order = order[np.argsort(-(log_q + noise)[order])]
            drawn = order == np.argmax(log_p + noise)
            sums["foreseen"] += np.cumsum(drawn) / REPEATS
            accepted, _ = rejection(p, q, order)
            sums["drawn"] += (1 - np.cumprod(1 - accepted)) / REPEATS
    found = {name: [round(x[k - 1] / len(at), 4) for k in CHILDREN] for name, x in sums.items()}
    return found | {"at best": [round(best / len(at), 4)], "nodes": len(at)}


def written_with_drawn(model: Llama, pair, found: list[dict], mode: str, tokens: int) -> list[dict]:
    """What the drawn tree gives, text by text, while the model writes with it."""
    found = [p for p in found if p["kind"] in GRID]
    draft = RecurrentDraft(model, pair, tree="drawn")
    how = MODES[mode] | {"max_new_tokens": tokens, "budget": BUDGET}
    made = generate(model, [p["ids"] for p in found], draft=draft, **how)
    rows = []
    for b, p in enumerate(found):
        by_text = ([getattr(s, name)[b] for name in STEP] for s in made.trace if s.new[b])
        about = {"kind": p["kind"], "name": p["name"], "mode": mode, "draft": DRAWN}
        rows.append(about | counted([tuple(step) for step in by_text]))
    return rows


STEP = ("nodes", "unpacked", "depth", "accepted", "new")


def each(model: Llama, options, modes):
    """(about, text, states, known) of each text of these modes."""
    found = chosen(model, options.quick)
    for mode in modes:
        pairs = texts_and_states(model, found, mode, options.tokens)
        known = chances(model, found, mode, options.tokens)
        texts = zip(tqdm(found, unit="text", desc=mode), pairs, known, strict=True)
        for p, (text, states), chance in texts:
            about = {"kind": p["kind"], "name": p["name"], "mode": mode}
            if len(text) > 2:
                yield about, p, text, states, chance


def grid(model: Llama, options) -> list[dict]:
    pair = load_drafter(model)
    rows = []
    for about, p, text, states, _ in each(model, options, GRID_MODES):
        for width in WIDTHS if p["kind"] in GRID else ():
            draft = Replayed(pair, text, states, None, width=width, length=max(LENGTHS))
            for length, shape in itertools.product(LENGTHS, SHAPES):
                beams = functools.partial(getattr(draft, shape), shorter=max(LENGTHS) - length)
                size = {"width": width, "length": length, "shape": shape}
                rows.append(about | size | counted(steps_of(beams, text)))
    return rows


def drafts(model: Llama, options) -> list[dict]:
    pair = load_drafter(model)
    rows = []
    for about, p, text, states, known in each(model, options, MODES):
        for name, draft in drafts_along(pair, text, states, known).items():
            steps = steps_of(along(draft, p["ids"], text), text)
            rows.append(about | {"draft": name} | counted(steps))
    return rows


def first(model: Llama, options) -> list[dict]:
    pair = load_drafter(model)
    texts = each(model, options, [mode for mode in MODES if MODES[mode]])
    return [about | first_nodes(model, pair, *its) for about, _, *its in texts]


def drawn(model: Llama, options) -> list[dict]:
    pair = load_drafter(model)
    found = chosen(model, options.quick)
    modes = [mode for mode in MODES if MODES[mode]]
    rows = (written_with_drawn(model, pair, found, mode, options.tokens) for mode in modes)
    return list(itertools.chain(*rows))


def times(model: Llama, options) -> list[dict]:
    """Plain decoding and the drafts, in turn, with the adaptive budget: one prompt of each kind."""
    warm_up(model)
    rows = []
    for p in tqdm(chosen(model, quick=True), unit="text", desc="times"):
        seconds = {}
        for _ in range(2):  # the first compiles
            for draft in (None, "recurrent", "surer"):
                seconds[draft] = decode(model, p["ids"], options.tokens, draft)
        plain = seconds.pop(None)
        for draft, (took, steps, text) in seconds.items():
            rows.append(
                {
                    "kind": p["kind"],
                    "name": p["name"],
                    "draft": draft,
                    "tokens": options.tokens,
                    "speedup": round(plain[0] / took, 3),
                    "same_text": text == plain[2],
                    "tokens_a_step": round((len(text) - 1) / max(steps, 1), 3),
                }
            )
    return rows


# What is written


def pooled(rows: list[dict], **which) -> float | None:
    """Tokens over steps of all rows that fit."""
    rows = [r for r in rows if all(r[k] == v for k, v in which.items())]
    steps = sum(r["steps"] for r in rows)
    return sum(r["tokens"] for r in rows) / steps if steps else None


def grid_table(rows: list[dict], mode: str, kind: str, shape: str) -> str:
    lines = []
    for width in WIDTHS:
        line = [f"M = {width}"]
        for length in LENGTHS:
            which = {"mode": mode, "kind": kind, "shape": shape, "width": width, "length": length}
            here = [r for r in rows if all(r[k] == v for k, v in which.items())]
            packed = sum(r["verified"] for r in here)
            steps = sum(r["steps"] for r in here)
            line.append(
                f"{pooled(rows, **which):.2f} ({packed / steps - 1:.1f} of {width * length})"
            )
        lines.append(line)
    return table(["", *(f"C = {length}" for length in LENGTHS)], lines)


def drafts_table(rows: list[dict], mode: str) -> str:
    lines = []
    there = {r["draft"] for r in rows if r["mode"] == mode}
    names = [name for name in (*DRAFTS, LIKELIEST, DRAWN) if name in there]
    for kind in KINDS:
        values = (pooled(rows, mode=mode, kind=kind, draft=name) for name in names)
        lines.append([kind, *("–" if x is None else f"{x:.2f}" for x in values)])
    return table(["", *names], lines)


def first_table(rows: list[dict], mode: str) -> str:
    """The first of a step's guesses: of all tokens of a kind together."""
    lines = []
    for kinds in (KINDS[:-1], KINDS[-1:]):
        these = [r for r in rows if r["mode"] == mode and r["kind"] in kinds]
        nodes = sum(r["nodes"] for r in these)
        for name in ("likeliest", "foreseen", "drawn", "at best"):
            sums = np.sum([np.array(r[name]) * r["nodes"] for r in these], axis=0) / max(nodes, 1)
            values = [f"{x:.3f}" for x in np.atleast_1d(sums)]
            about = "held-out chat" if kinds == KINDS[-1:] else "the sixteen prompts"
            lines.append([about, name, *values, *["–"] * (len(CHILDREN) - len(values))])
    return table(["", "", *(f"k = {k}" for k in CHILDREN)], lines)


def report(results: dict) -> str:
    about = results["about"]
    parts = [
        "# The recurrent drafter along the model's texts",
        f"`benchmarks/recurrent.py`, {about['date']}, jax {about['jax']}, up to {about['tokens']} "
        "tokens a text. Tokens a step: new tokens over steps, all texts of a kind together.",
    ]
    rows = results["drafts"] + results.get("drawn", [])
    for mode in MODES:
        parts += [f"## Drafts, 16 tokens a call, {mode}", drafts_table(rows, mode)]
        if MODES[mode]:
            parts += [
                "The recurrent drafter foresees: it knows the noise that tokens are drawn with. It "
                f"does not as '{LIKELIEST}', nor as '{DRAWN}' (where there are results), whose "
                "acceptance is by rejection.",
                f"## The first guess, {mode}",
                "How likely one of the first k children of a node is the model's token.",
                first_table(results["first"], mode),
            ]
        grids = GRID if mode in GRID_MODES else ()
        for kind, shape in itertools.product(grids, ("beam", "tree")):
            parts += [
                f"## {kind}, {mode}: {SHAPES[shape]}",
                "In brackets: nodes of a step after packing, of M·C before.",
                grid_table(results["grid"], mode, kind, shape),
            ]
    if "times" in results:
        lines = [
            [r["kind"], r["name"], r["draft"], r["tokens_a_step"], r["speedup"], r["same_text"]]
            for r in results["times"]
        ]
        head = ["kind", "prompt", "draft", "tokens a step", "times plain decoding", "same text"]
        few = (
            f"{results['timed']['date']}, jax {results['timed']['jax']}, up to "
            f"{results['times'][0]['tokens']} tokens, one run after one to warm up."
        )
        parts += ["## Time, adaptive budget, two CPU cores", few, table(head, lines)]
    return "\n\n".join(parts) + "\n"


PARTS = {"drafts": drafts, "first": first, "drawn": drawn, "grid": grid, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if options.parts == ["readme"]:
        print(drafts_table(results["drafts"], "greedy"))
        return
    if options.quick:
        options.tokens = min(options.tokens, 32)
    model = Llama.load()
    for part in options.parts:
        results[part] = PARTS[part](model, options)
        results["timed" if part == "times" else "about"] = {
            "date": datetime.date.today().isoformat(),
            "jax": version("jax"),
            "python": sys.version.split()[0],
            "tokens": options.tokens,
            "quick": options.quick,
        }
        RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(report(results), encoding="utf-8")
    print(report(results))


if __name__ == "__main__":
    main()
