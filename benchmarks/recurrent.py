"""The recurrent drafter: tokens a step by width and length of its beam, and packed nodes.

    python benchmarks/recurrent.py            about 6 minutes on two quiet cores
    python benchmarks/recurrent.py --quick    a prompt of each kind, 32 tokens
    python benchmarks/recurrent.py readme     print the README's table from the results

The prompts of speculative.py, and twelve chats about topics that the drafter's training was kept
from (`training/prompts.py`). The model writes each text once, greedily and at temperature 0.7; one
pass over the texts gives its state at every token, and the drafts are replayed along them: what
they would have led to. `grid`: beams of M candidates of C tokens, all of whose nodes are verified.
`drafts`: 16 tokens a call, as in speculative.py. `times`: in turn with plain decoding.
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

import jax
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import speculative
from speculative import BUDGET, decode, table, warm_up

from training.prompts import prompts
from training.recurrent import RecurrentDraft, draft_beam
from treeattn import Llama, pack
from treeattn.llama import generate
from treeattn.llama.speculation import (
    Seen,
    SuffixDraft,
    UnitedDraft,
    candidate_lengths,
    draft_candidate_tokens,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recurrent.json"
KINDS = ("chat", "code", "editing", "structured", "held-out chat")
GRID = ("held-out chat",)
SHAPES = {
    "beam": "beams of M candidates of C tokens",
    "tree": "and what beam search kept at lesser depths",
}
TEXTS = HERE.parent / "build" / "recurrent"  # kept for the next drafter
WIDTHS = (1, 2, 4, 8)
LENGTHS = (1, 2, 4, 5, 8)
MODES = {"greedy": {}, "temperature 0.7": {"temperature": 0.7, "key": jax.random.key(0)}}


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


def along(draft, prompt, text, states):
    """beams(at) for `steps_of`, of the draft, within the budget."""

    def beams(at):
        seen = Seen(*[np.zeros((1, 0, 0))] * 3, states[at][None])
        draft.observe([prompt + text[: at + 1]], seen if at else None)  # after prefill: no state
        return draft_candidate_tokens(draft, budget=BUDGET - 1)

    return beams


def grid_beams(draft: RecurrentDraft, text, states, width: int, length: int) -> dict:
    """beams(at) for `steps_of`, computed for all tokens at once: "beam", its `width` candidates;
    "tree", also those that the search kept at lesser depths."""
    size = -len(text) % 32
    rows = np.pad(states, [(0, size), (0, 0)])
    certain = np.pad(np.array(text, np.int32), (0, size))
    found = [
        draft_beam(
            draft.drafter,
            draft.shared,
            rows[i : i + 32],
            certain[i : i + 32],
            width=width,
            length=length,
            with_pruned=True,
        )
        for i in range(0, len(certain), 32)
    ]
    both = [np.concatenate([np.asarray(x) for x in part]) for part in zip(*found, strict=True)]

    def beams(most, at):
        """After prefill, which hands over no state, there are none."""
        return tuple(x[at : at + 1, : most if at else 0] for x in both)

    return {
        "beam": functools.partial(beams, width),
        "tree": functools.partial(beams, width * length),
    }


def counted(steps: list[tuple]) -> dict:
    row = speculative.counted(steps)
    del row["by_depth"]
    return row


DRAFTS = {
    "suffix": lambda model: SuffixDraft(),
    "recurrent, chain of 4": lambda model: RecurrentDraft(model, width=1, length=4),
    "recurrent, beam of 8 × 5": lambda model: RecurrentDraft(model, with_pruned=False),
    "recurrent": RecurrentDraft,
    "surer": lambda model: UnitedDraft(SuffixDraft(), RecurrentDraft(model)),
}


def measured(model: Llama, options) -> dict[str, list[dict]]:
    found = chosen(model, options.quick)
    rows = {"grid": [], "drafts": []}
    recurrent = RecurrentDraft(model)
    for mode in MODES:
        pairs = texts_and_states(model, found, mode, options.tokens)
        for p, (text, states) in zip(tqdm(found, unit="text", desc=mode), pairs, strict=True):
            about = {"kind": p["kind"], "name": p["name"], "mode": mode}
            if len(text) < 3:
                continue
            for width in WIDTHS if p["kind"] in GRID else ():
                for length in LENGTHS:
                    size = {"width": width, "length": length}
                    for shape, beams in grid_beams(recurrent, text, states, width, length).items():
                        row = counted(steps_of(beams, text))
                        rows["grid"].append(about | size | {"shape": shape} | row)
            for name, make in DRAFTS.items():
                row = counted(steps_of(along(make(model), p["ids"], text, states), text))
                rows["drafts"].append(about | {"draft": name} | row)
    return rows


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
    for kind in KINDS:
        values = (pooled(rows, mode=mode, kind=kind, draft=name) for name in DRAFTS)
        lines.append([kind, *("–" if x is None else f"{x:.2f}" for x in values)])
    return table(["", *DRAFTS], lines)


def report(results: dict) -> str:
    about = results["about"]
    parts = [
        "# The recurrent drafter along the model's texts",
        f"`benchmarks/recurrent.py`, {about['date']}, jax {about['jax']}, up to {about['tokens']} "
        "tokens a text. Tokens a step: new tokens over steps, all texts of a kind together.",
    ]
    for mode in MODES:
        parts += [f"## Drafts, 16 tokens a call, {mode}", drafts_table(results["drafts"], mode)]
        for kind, shape in itertools.product(GRID, ("beam", "tree")):
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
        few = f"Up to {results['times'][0]['tokens']} tokens, one run after one to warm up."
        parts += ["## Time, adaptive budget, two CPU cores", few, table(head, lines)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["counts", "times"])
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
    if "texts" in options.parts:
        for mode in MODES:
            texts_and_states(model, chosen(model, options.quick), mode, options.tokens)
        return
    if "counts" in options.parts:
        results |= measured(model, options)
        results["about"] = {
            "date": datetime.date.today().isoformat(),
            "jax": version("jax"),
            "python": sys.version.split()[0],
            "tokens": options.tokens,
            "quick": options.quick,
        }
        RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    if "times" in options.parts:
        results["times"] = times(model, options)
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(report(results), encoding="utf-8")
    print(report(results))


if __name__ == "__main__":
    main()
