"""Does looking up pay? Processor time of plain decoding and of `draft="lookup"`, in turn.

    python benchmarks/speculative.py            both sets of prompts; 15 minutes on two cores
    python benchmarks/speculative.py --rounds 1 --set chosen

Each text is 96 tokens, or up to where the model ends it. Counted is the processor's time, which
other programs disturb less than the time of day, after the prompt has been read: of plain decoding
and of the draft the least of the rounds, after one that compiles; then all prompts of a kind are
added up. `chosen` are the prompts by which the draft's numbers (how
many tokens have to match, how long a guess is) were chosen; `others` were written after all of the
code, and nothing was chosen by them. Writes results/speculative.json and results/speculative.md.
"""

import argparse
import json
import time
import tomllib
from pathlib import Path

import numpy as np
from machine import machine

from treeattn_llama import Llama, LookupDraft, stream

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "speculative.json"
SETS = {"chosen": "speculative_prompts.toml", "others": "speculative_new_prompts.toml"}
TOKENS = 96
CAPACITY = 1024


def prompts(model: Llama, name: str) -> list[dict]:
    """The prompts of a set, with their token ids."""
    found = tomllib.loads((HERE / SETS[name]).read_text(encoding="utf-8"))["prompt"]
    for prompt in found:
        encode = model.tokenizer.chat if prompt["chat"] else model.tokenizer.encode
        prompt["ids"] = encode(prompt["text"].removeprefix("\n"))
    return found


def decode(model: Llama, ids: list[int], draft=None, budget: int = 8) -> dict:
    """Seconds after the prompt, tokens, and the number of calls, of a text."""
    options = {"max_new_tokens": TOKENS, "capacity": CAPACITY, "budget": budget}
    calls = stream(model, ids, draft=draft, **options)
    tokens = list(next(calls)[0])
    began = time.process_time()
    for (new,) in calls:
        tokens += new
    seconds = time.process_time() - began
    return {"seconds": seconds, "tokens": tokens, "calls": calls.steps}


def measure(model: Llama, name: str, rounds: int) -> list[dict]:
    """A row for each prompt: the fastest times of both, and whether the texts are the same."""
    rows = []
    for prompt in prompts(model, name):
        best = {}
        for _ in range(rounds):
            for way, draft in (("plain", None), ("lookup", "lookup")):
                found = decode(model, prompt["ids"], draft)
                if way not in best or found["seconds"] < best[way]["seconds"]:
                    best[way] = found
        plain, lookup = best["plain"], best["lookup"]
        row = {"kind": prompt["kind"], "name": prompt["name"], "tokens": len(plain["tokens"])}
        row |= {"plain": plain["seconds"], "lookup": lookup["seconds"], "calls": lookup["calls"]}
        row["same"] = plain["tokens"] == lookup["tokens"]
        rows.append(row)
        ratio = row["plain"] / row["lookup"]
        print(name, row["kind"], row["name"], f"{ratio:.2f}", row["same"], flush=True)
    return rows


def step_times(model: Llama, rounds: int = 9) -> dict[int, float]:
    """Milliseconds of a call for so many tokens after 512 of a text, the fastest."""
    cache = model.new_cache(1, CAPACITY)
    _, cache = model.prefill([list(range(100, 612))], cache)
    times = {}
    for _ in range(rounds):
        for n in (1, 4, 8, 16):
            began = time.process_time()
            logits, _ = model.extend(np.arange(n)[None], cache, mask=np.tri(n, dtype=bool)[None])
            np.asarray(logits)
            times[n] = min(times.get(n, np.inf), 1e3 * (time.process_time() - began))
    return times


def table(found: dict) -> str:
    """The ratios by set and kind, as Markdown."""
    lines = [
        f"# Looking up, against plain decoding\n\n{found['machine']}; `benchmarks/speculative.py` "
        "says how it was measured. Times as fast: all of a kind's plain time over all of its time "
        "with the draft, on the processor.\n",
        "| prompts | kind | tokens | tokens a call | times as fast |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rows in found["sets"].items():
        for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
            some = [row for row in rows if kind in (row["kind"], "all")]
            tokens, calls, plain, lookup = (
                sum(row[x] for row in some) for x in ("tokens", "calls", "plain", "lookup")
            )
            a_call = (tokens - len(some)) / calls
            lines.append(f"| {name} | {kind} | {tokens} | {a_call:.2f} | {plain / lookup:.2f} |")
    steps = ", ".join(f"{n}: {ms:.0f}" for n, ms in found["steps"].items())
    return "\n".join(lines) + f"\n\nMilliseconds of a call, by its number of tokens: {steps}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", choices=SETS, action="append", help="one of them (default: both)")
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    model = Llama.load()
    warm = model.tokenizer.encode("one two three four, one two three four, one two")
    for budget in (1, 4, 8):  # compiles calls of every size
        decode(model, warm, LookupDraft(matched=1), budget)
    found = {"steps": step_times(model), "sets": found.get("sets", {})}
    for name in args.set or SETS:
        found["sets"][name] = measure(model, name, args.rounds)
    found["machine"] = machine("jax")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
