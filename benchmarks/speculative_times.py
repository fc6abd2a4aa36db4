"""Whether drafts pay: seconds of plain decoding and of two drafts, in turn, by kind of prompt.

    python benchmarks/speculative_times.py             all groups; 9 minutes on two quiet cores
    python benchmarks/speculative_times.py chat new    some groups; the others' results stay

Groups: the four kinds of speculative.py's prompts; `held-out`, chats about topics that the trained
drafter's training was kept from; `new`, prompts that were written after all of the code
(speculative_new_prompts.toml); `sampled`, a prompt of each kind at temperature 0.7, with and
without top-p 0.95. Each text is 96 tokens, or up to where the model ends it, after prefill. Not
counted: loading, and what compiles or is measured for the first time (`warm_up`). Of plain decoding
and of each draft, the fastest of the rounds; then all prompts of a kind are added up. Writes the
part `paying` of results/speculative.json, and results/speculative.md.
"""

import argparse
import datetime
import json
import os
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

import jax
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import speculative
from speculative import CAPACITY, HERE, KINDS, RESULTS, decode

from training.prompts import prompts as training_prompts
from treeattn import Llama
from treeattn_llama import generate, stream
from treeattn_llama.speculation import Budget

DRAFTS = ("suffix", "surer")
GROUPS = (*KINDS, "held-out", "new", "sampled")
HELD_OUT = 4


def prompts_of(model: Llama, group: str) -> list[dict]:
    """The prompts of a group, with their token ids."""
    every = speculative.prompts(model, quick=False)
    if group in KINDS:
        return [p for p in every if p["kind"] == group]
    if group == "sampled":
        return [next(p for p in every if p["kind"] == kind) for kind in KINDS]
    if group == "new":
        text = (HERE / "speculative_new_prompts.toml").read_text(encoding="utf-8")
        found = tomllib.loads(text)["prompt"]
    else:
        chats = [p for p in training_prompts() if p.held_out and p.chat and p.kind == "chat"]
        found = [
            {"kind": "held-out chat", "name": f"held out {i}", "chat": True, "text": p.text}
            for i, p in enumerate(chats[:HELD_OUT])
        ]
    for p in found:
        encode = model.tokenizer.chat if p["chat"] else model.tokenizer.encode
        p["ids"] = encode(p["text"].removeprefix("\n"))
    return found


def warm_up(model: Llama, found: list[dict]) -> None:
    """Compile prefill for these prompts, and steps of all sizes; let the budget measure them."""
    for p in found:
        next(stream(model, [p["ids"]], max_new_tokens=2, capacity=CAPACITY))
    some = {"capacity": CAPACITY, "stop": []}
    for draft in DRAFTS:
        for most in (4, 6, 8, 12, 16):
            options = some | {"draft": draft, "budget": Budget(most)}
            generate(model, [7, 8, 9] * 9, max_new_tokens=6, **options)
        for p in (found[0], found[-1]):
            generate(model, p["ids"], max_new_tokens=24, draft=draft, **some)
    generate(model, found[0]["ids"], max_new_tokens=8, **some)


def in_turn(model: Llama, p: dict, options, sampling: dict | None = None) -> dict:
    """Plain decoding and the drafts, one after the other, `rounds` times."""
    row = {"kind": p["kind"], "name": p["name"]}
    ways = ("plain", *(DRAFTS if sampling is None else DRAFTS[:1]))
    texts = {}
    for _ in range(options.rounds):
        for way in ways:
            draft = None if way == "plain" else way
            seconds, steps, text = decode(model, p["ids"], options.tokens, draft, **sampling or {})
            one = row.setdefault(way, {"seconds": [], "steps": []})
            one["seconds"].append(round(seconds, 3))
            one["steps"].append(steps)
            texts[way] = text
    row["tokens"] = len(texts["plain"]) - 1
    for way in ways[1:]:
        row[way]["same_text"] = texts[way] == texts["plain"]
    return row


def measure(model: Llama, group: str, options) -> list[dict]:
    found = prompts_of(model, group)
    warm_up(model, found)
    rows = []
    for p in tqdm(found, unit="text", desc=group):
        if time.perf_counter() - options.began > options.seconds:
            sys.exit(f"{group}: out of time; nothing of it is written")
        if group == "sampled":
            for top_p in (1.0, 0.95):
                sampling = {"temperature": 0.7, "top_p": top_p, "key": jax.random.key(1)}
                rows.append(in_turn(model, p, options, sampling) | {"top_p": top_p})
        else:
            rows.append(in_turn(model, p, options))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all when left out")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each text")
    parser.add_argument("--rounds", type=int, default=2, help="timings of each, in turn")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no prompt after these")
    options = parser.parse_args()
    options.began = time.perf_counter()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(GROUPS)}")
    model = Llama.load(None)
    for group in options.groups or GROUPS:
        rows = measure(model, group, options)
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        about = {
            "date": datetime.date.today().isoformat(),
            "jax": version("jax"),
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "tokens": options.tokens,
            "rounds": options.rounds,
        }
        results.setdefault("paying", {})[group] = about | {"rows": rows}
        speculative.write(results)


if __name__ == "__main__":
    main()
