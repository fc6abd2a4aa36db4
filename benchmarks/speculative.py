"""Speculative decoding of the packaged Llama: tokens a step, and time, against plain decoding.

    python benchmarks/speculative.py                  all of it; about 11 minutes on two quiet cores
    python benchmarks/speculative.py counts packed    parts of it; the others' results stay
    python benchmarks/speculative.py --quick          four prompts, 32 tokens; about 2 minutes
    python benchmarks/speculative.py readme           print the README's table from the results
    python benchmarks/speculative.py int8             with weights of 8 bits; about 6 minutes

Sixteen prompts of four kinds (speculative_prompts.toml), each continued greedily by 96 tokens or up
to where the model ends its text. `counts`: tokens a step over all steps, tokens verified before and
after packing, acceptance by depth; every draft with the same budget, 16 tokens a call, so that no
clock decides anything. The drafts that read nothing but the text are replayed along the text that
plain decoding wrote, which is the text that they would have led to; token recycling runs the model.
`times`: the default (the suffix draft, with its adaptive budget) in turn with plain decoding, after
prefill. `packed`: one call on beams of 8 candidates of 8 tokens, packed and not. `devices`: the
default over 8 simulated devices. `int8`, which is not part of all: two prompts of each kind, plain
and with the default draft, with weights of float32 and of 8 bits, and with these the recurrent
draft of `training` as well, in turn; kept for each version of JAX that it was run with. Writes
results/speculative.json and results/speculative.md.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from treeattn import Llama, TokenTree, beam_search, kv_mesh, pack, simulate_devices, unpack
from treeattn_llama import generate, stream
from treeattn_llama.speculation import (
    DRAFTS,
    NGramDraft,
    RecyclingDraft,
    SuffixDraft,
    candidate_lengths,
    draft_candidate_tokens,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "speculative.json"
PARTS = {
    "counts": 4.5,
    "times": 4.5,
    "steps": 0.5,
    "packed": 0.5,
    "devices": 2.0,
}  # minutes on two quiet cores
KINDS = ("chat", "code", "editing", "structured")
BUDGET = 16
CAPACITY = 320  # one for all prompts: nothing is compiled twice
DEPTHS = (1, 2, 4, 8, 12)


def prompts(model: Llama, quick: bool) -> list[dict]:
    """The prompts with their token ids; of each kind one, or all."""
    found = tomllib.loads((HERE / "speculative_prompts.toml").read_text(encoding="utf-8"))["prompt"]
    for p in found:
        text = p["text"].removeprefix("\n")
        p["ids"] = (model.tokenizer.chat if p["chat"] else model.tokenizer.encode)(text)
    return [next(p for p in found if p["kind"] == kind) for kind in KINDS] if quick else found


# Counts: the drafts, all with the same budget


class Chain:
    """A draft's most probable path alone: its best first token, the best after that, and so on."""

    def __init__(self, draft):
        self.draft = draft
        self.observe = draft.observe

    def propose(self, budget: int):
        (tokens, parents, _), scores = self.draft.propose(8 * budget)  # best first: siblings too
        path = []
        parents = parents[0].tolist()
        while len(path) < budget and (path[-1] if path else -1) in parents:
            path.append(parents.index(path[-1] if path else -1))
        up = np.arange(len(path), dtype=np.int32)[None] - 1
        return TokenTree(tokens[:1, path], up, np.array([len(path)], np.int32)), scores[:1, path]


REPLAYED = {
    "suffix": lambda model: SuffixDraft(),
    "suffix, chain": lambda model: Chain(SuffixDraft()),
    "longest suffix, 4 of 8": lambda model: NGramDraft(longest=64, length=8, rows=4),
    "ngram": lambda model: NGramDraft(length=BUDGET - 1),
    "ngram, tree": lambda model: NGramDraft(length=BUDGET - 1, rows=4),
    "layers": DRAFTS["layers"],
}
RUN = {
    "recycling": lambda model: RecyclingDraft(),
    "recycling, chain": lambda model: RecyclingDraft(likely=1, depth=BUDGET - 1),
}
SLOW = "layers", "recycling, chain"  # on every other prompt
BUDGETS = {"longest suffix, 4 of 8": 33}  # its four continuations whole, and the certain token


def replay(draft, prompt: list[int], text: list[int], budget: int) -> list[tuple]:
    """(nodes, unpacked, depth, accepted, new) of each step that ends in this greedy text."""
    steps = []
    at = 1
    while at < len(text):
        draft.observe([prompt + text[:at]])
        beam, scores = draft_candidate_tokens(
            draft, budget=budget - 1, certain=np.array([text[at - 1]])
        )
        lengths = np.minimum(candidate_lengths(scores), len(text) - at)
        nodes = pack(beam, lengths).packed_beam.shape[1]
        accepted = max(
            next((i for i in range(n - 1) if row[1 + i] != text[at + i]), n - 1)
            for row, n in zip(beam[0].tolist(), lengths[0].tolist(), strict=True)
        )
        new = min(accepted + 1, len(text) - at)
        steps.append((nodes, int(lengths.sum()), int(lengths.max()) - 1, accepted, new))
        at += new
    return steps


def run(draft, model: Llama, prompt: list[int], tokens: int, budget: int) -> list[tuple]:
    """The same of a draft that has to see what the model says."""
    found = generate(
        model, prompt, draft=draft, budget=budget, max_new_tokens=tokens, capacity=CAPACITY
    )
    return [(*s.nodes, *s.unpacked, *s.depth, *s.accepted, *s.new) for s in found.trace]


def counted(steps: list[tuple]) -> dict:
    """A row of results from what each step did."""
    nodes, unpacked, depth, accepted, new = (list(x) for x in zip(*steps, strict=True))
    by_depth = []  # [steps with a candidate so long, steps in which so many were accepted]
    for d in range(1, max(depth, default=0) + 1):
        by_depth.append([sum(x >= d for x in depth), sum(x >= d for x in accepted)])
    return {
        "tokens": sum(new),
        "steps": len(steps),
        "tokens_a_step": round(sum(new) / len(steps), 3),
        "verified": sum(nodes),
        "unpacked": sum(unpacked),
        "by_depth": by_depth,
    }


def counts(model: Llama, options) -> list[dict]:
    chosen = prompts(model, options.quick)
    rows = []
    slow = chosen if options.quick else chosen[::2]
    drafts = REPLAYED | RUN
    total = sum(len(slow if name in SLOW else chosen) for name in drafts)
    with tqdm(total=len(chosen) + total, unit="text", desc="counts") as bar:
        for p in chosen:
            bar.set_postfix_str(f"{p['name']}: plain")
            plain = {"max_new_tokens": options.tokens, "capacity": CAPACITY}
            text = generate(model, p["ids"], **plain).tokens
            bar.update()
            for name, make in drafts.items():
                if name in SLOW and p not in slow:
                    continue
                bar.set_postfix_str(f"{p['name']}: {name}")
                budget = BUDGETS.get(name, BUDGET)
                draft = make(model)
                if name in RUN:
                    steps = run(draft, model, p["ids"], options.tokens, budget)
                else:
                    steps = replay(draft, p["ids"], text, budget)
                rows.append({"kind": p["kind"], "name": p["name"], "draft": name} | counted(steps))
                bar.update()
            yield rows


# Times


def decode(
    model: Llama, prompt: list[int], tokens: int, draft, **sampling
) -> tuple[float, int, list[int]]:
    """(seconds after prefill, steps, the text)."""
    options = {"max_new_tokens": tokens, "capacity": CAPACITY} | sampling
    steps = stream(model, [prompt], draft=draft, **options)
    text = list(next(steps)[0])
    count = 0
    began = time.perf_counter()
    for (new,) in steps:
        text += new
        count += 1
    return time.perf_counter() - began, count, text


def in_turn(model: Llama, p: dict, tokens: int, rounds: int, expected=None) -> dict:
    """Plain decoding and the default draft, one after the other, `rounds` times.

    expected: the text that all should write; that of plain decoding when None
    """
    plain, drafted = zip(
        *(
            (decode(model, p["ids"], tokens, None), decode(model, p["ids"], tokens, "suffix"))
            for _ in range(rounds)
        ),
        strict=True,
    )
    ratios = [a[0] / b[0] for a, b in zip(plain, drafted, strict=True)]
    after = len(plain[0][2]) - 1
    return {
        "kind": p["kind"],
        "name": p["name"],
        "tokens": after,
        "plain_seconds": [round(x[0], 3) for x in plain],
        "seconds": [round(x[0], 3) for x in drafted],
        "speedup": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_a_step": round(statistics.median(after / x[1] for x in drafted), 3),
        "same_text": all(x[2] == (expected or plain[0][2]) for x in (*plain, *drafted)),
    }


def warm_up(model: Llama) -> None:
    """Compile the steps of every size."""
    for n in (1, 4, 8, 16):
        cache = model.new_cache(1, CAPACITY)
        _, cache = model.prefill([[1, 2, 3]], cache)
        if n == 1:
            model.step(np.array([[1]]), cache, counts=np.array([1]), last=True)
            continue
        tokens = np.ones((1, n), np.int32)
        mask = np.tri(n, dtype=bool)[None]
        positions = 3 + np.arange(n, dtype=np.int32)[None]
        _, new = model.extend(tokens, cache, positions=positions, mask=mask)
        model.commit(cache, new, select=np.arange(n)[None], counts=np.array([1]))


def times(model: Llama, options) -> list[dict]:
    warm_up(model)
    rows = []
    chosen = prompts(model, options.quick)
    decode(model, chosen[-1]["ids"], 16, "suffix")
    for p in tqdm(chosen, unit="text", desc="times"):
        rows.append(in_turn(model, p, options.tokens, options.rounds))
        tqdm.write(
            f"{p['name']}: {rows[-1]['speedup']:.2f} times plain decoding's speed, "
            f"{rows[-1]['tokens_a_step']:.2f} tokens a step, same text: {rows[-1]['same_text']}"
        )
        yield rows


# Steps by size, and packed beams against unpacked ones


def steps(model: Llama, options) -> dict[str, float]:
    """Milliseconds of a call on 1, 4, … tokens after 256, the keys written; medians, in turn."""
    after = (np.arange(256) % 1000 + 100).tolist()
    _, cache = model.prefill([after], model.new_cache(1, CAPACITY))
    length = cache.lengths
    milliseconds = {n: [] for n in (1, 4, 6, 8, 12, 16, 32, 64)}
    for i in tqdm(range(5 * options.rounds + 1), unit="round", desc="steps"):
        for n, times in milliseconds.items():
            tokens = np.arange(1, n + 1)[None]
            began = time.perf_counter()
            logits, cache = model.step(tokens, cache)
            jax.block_until_ready(logits)
            times += [1000 * (time.perf_counter() - began)] if i else []  # the first compiles
            cache = cache._replace(lengths=length)
    yield {str(n): round(statistics.median(times), 1) for n, times in milliseconds.items()}


def searched_beam(model: Llama, prompt: list[int], rows: int, width: int):
    """(beam (1, M, C), the cache after the prompt): the packaged model's own beam search."""
    first, cache = model.prefill([prompt], model.new_cache(1, CAPACITY))

    def log_probs(paths):
        if paths.shape[2] == 0:
            return jax.nn.log_softmax(first)[:, None]
        full = np.zeros((1, rows, width), np.int32)
        full[:, : paths.shape[1], : paths.shape[2]] = paths
        logits = block_diagonal(model, full, cache)
        return jax.nn.log_softmax(logits[:, : paths.shape[1], paths.shape[2] - 1])

    return np.asarray(beam_search(log_probs, width=rows, length=width)[0], np.int32), cache


def block_diagonal(model: Llama, beam, cache):
    """Logits (1, M, C, V): every candidate's tokens in one call, each seeing its own only."""
    _, rows, width = beam.shape
    mask = np.kron(np.eye(rows, dtype=bool), np.tri(width, dtype=bool))[None]
    at = np.asarray(cache.lengths)[:, None] + np.tile(np.arange(width), rows)
    flat = beam.reshape(1, -1)
    logits, _ = model.extend(flat, cache, positions=at.astype(np.int32), mask=mask)
    return logits.reshape(1, rows, width, -1)


def as_tree(model: Llama, beam, cache):
    """The same logits by way of the packed tree; packing and unpacking included."""
    tree = pack(beam)
    at = np.asarray(cache.lengths)[:, None] + tree.position_offsets
    logits, _ = model.extend(
        tree.packed_beam, cache, positions=at.astype(np.int32), mask=tree.attention_mask
    )
    return unpack(logits, tree.unpack_map)


def packed(model: Llama, options) -> list[dict]:
    rows = []
    quick = prompts(model, quick=True)  # one of each kind
    for p in tqdm(quick, unit="beam", desc="packed"):
        beam, cache = searched_beam(model, p["ids"], 8, 8)
        runs = {"unpacked": block_diagonal, "packed": as_tree}
        out = [np.asarray(f(model, beam, cache)) for f in runs.values()]  # compiles
        seconds = {name: [] for name in runs}
        for _ in range(5 * options.rounds):
            for name, f in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(f(model, beam, cache))
                seconds[name].append(time.perf_counter() - began)
        ratios = [a / b for a, b in zip(seconds["unpacked"], seconds["packed"], strict=True)]
        rows.append(
            {
                "kind": p["kind"],
                "name": p["name"],
                "tokens": beam[0].size,
                "nodes": pack(beam).packed_beam.shape[1],
                "allclose": bool(np.allclose(*out, atol=1e-2)),
                "unpacked_ms": round(1000 * statistics.median(seconds["unpacked"]), 1),
                "packed_ms": round(1000 * statistics.median(seconds["packed"]), 1),
                "speedup": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
        tqdm.write(
            f"{p['name']}: {rows[-1]['nodes']} nodes for 64 tokens, "
            f"{rows[-1]['speedup']:.2f} times as fast"
        )
        yield rows


def int8(model: Llama, options) -> list[dict]:
    """Rows of each way's tokens a second after prefill, and what becomes of its text."""
    small = Llama.load(None, weights="int8")
    ways = {
        "float32": (model, None),
        "float32, suffix": (model, "suffix"),
        "int8": (small, None),
        "int8, suffix": (small, "suffix"),
        "int8, recurrent": (small, "recurrent"),
    }
    for one in (model, small):
        warm_up(one)
    every = prompts(model, False)
    chosen = [p for kind in KINDS for p in [p for p in every if p["kind"] == kind][:2]]
    for one, draft in ways.values():
        decode(one, chosen[-1]["ids"], 24, draft)  # compiles
    rows = []
    for p in tqdm(chosen, unit="text", desc="int8"):
        times = {name: [] for name in ways}
        texts, calls = {}, {}
        for _ in range(options.rounds):
            for name, (one, draft) in ways.items():
                seconds, calls[name], texts[name] = decode(one, p["ids"], options.tokens, draft)
                times[name].append((len(texts[name]) - 1) / seconds)
        row = {"kind": p["kind"], "name": p["name"]}
        for name in ways:
            plain, *_ = name.split(", ")
            row[name] = {
                "tokens_a_second": round(max(times[name]), 2),
                "tokens_a_step": round((len(texts[name]) - 1) / calls[name], 3),
                "same_text": texts[name] == texts[plain],
            }
        rows.append(row)
        yield rows


def devices(model: Llama, options) -> list[dict]:
    placed = model.on(kv_mesh())
    tokens = min(options.tokens, 32)
    rows = []
    warm_up(placed)
    for p in tqdm(prompts(model, quick=True), unit="text", desc="8 devices"):
        alone = decode(model, p["ids"], tokens, None)[2]  # on one device
        rows.append(in_turn(placed, p, tokens, 1, alone))
        tqdm.write(
            f"{p['name']}: {rows[-1]['speedup']:.2f} times plain decoding's speed, "
            f"same text: {rows[-1]['same_text']}"
        )
        yield rows


# What is written


def pooled(rows: list[dict], kind: str, draft: str | None = None) -> float | None:
    """New tokens over steps, of all rows of a kind together ("all": of all kinds); None without
    any."""
    rows = [r for r in rows if kind in (r["kind"], "all") and draft in (None, r.get("draft"))]
    steps = sum(r.get("steps") or r["tokens"] / r["tokens_a_step"] for r in rows)
    return sum(r["tokens"] for r in rows) / steps if rows else None


def in_all(rows: list[dict], kind: str) -> tuple[float, float]:
    """(plain decoding's seconds, the draft's) of all prompts of a kind; the fastest of each."""
    rows = [r for r in rows if kind in (r["kind"], "all")]
    return tuple(sum(min(r[key]) for r in rows) for key in ("plain_seconds", "seconds"))


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def spread_text(row: dict) -> str:
    low, high = row["spread"]
    return f"{row['speedup']:.2f} ({low:.2f}–{high:.2f})"


def counts_text(rows: list[dict]) -> str:
    drafts = list(dict.fromkeys(r["draft"] for r in rows))
    names = list(dict.fromkeys((r["kind"], r["name"]) for r in rows))
    of = {(r["name"], r["draft"]): r for r in rows}
    lines = [
        [
            kind,
            name,
            *(f"{of[name, d]['tokens_a_step']:.2f}" if (name, d) in of else "–" for d in drafts),
        ]
        for kind, name in names
    ]
    for kind in KINDS:
        found = [pooled(rows, kind, d) for d in drafts]
        lines.append(
            [f"**{kind}**", "in all", *("–" if m is None else f"**{m:.2f}**" for m in found)]
        )
    saved = []
    for d in drafts:
        mine = [r for r in rows if r["draft"] == d]
        calls, nodes, before = (sum(r[x] for r in mine) for x in ("steps", "verified", "unpacked"))
        rates = []
        for depth in DEPTHS:
            deep = [r["by_depth"][depth - 1] for r in mine if len(r["by_depth"]) >= depth]
            reached, taken = (sum(x) for x in zip(*deep, strict=True)) if deep else (0, 0)
            rates.append(f"{taken / reached:.2f}" if reached else "–")
        saved.append([d, f"{before / calls:.1f}", f"{nodes / calls:.1f}", *rates])
    head = ["draft", "tokens before packing", "after", *(f"depth {d}" for d in DEPTHS)]
    return (
        f"## Tokens a step\n\nOver all steps, {BUDGET} tokens a call at most (“longest suffix, 4 "
        "of 8”: 33). A dash: not run. In all: new tokens over steps of the prompts that ran.\n\n"
        + table(["kind", "prompt", *drafts], lines)
        + "\n\n## Tokens verified in a step, and acceptance by depth\n\nOf the steps with a "
        "candidate so long, the share in which so many of its tokens were accepted.\n\n"
        + table(head, saved)
    )


def times_text(rows: list[dict], title: str) -> str:
    lines = [
        [
            r["kind"],
            r["name"],
            r["tokens"],
            f"{statistics.median(r['plain_seconds']):.2f}",
            f"{statistics.median(r['seconds']):.2f}",
            spread_text(r),
            f"{r['tokens_a_step']:.2f}",
            "yes" if r["same_text"] else "no",
        ]
        for r in rows
    ]
    for kind in (*[k for k in KINDS if any(r["kind"] == k for r in rows)], "all"):
        plain, drafted = in_all(rows, kind)
        mine = [r for r in rows if kind in (r["kind"], "all")]
        told = [sum(r["tokens"] for r in mine), f"{plain:.2f}", f"{drafted:.2f}"]
        told += [f"{plain / drafted:.2f}", f"{pooled(rows, kind):.2f}"]
        lines.append([f"**{kind}**", "in all", *(f"**{x}**" for x in told), ""])
    head = [
        "kind",
        "prompt",
        "tokens",
        "plain, s",
        "suffix, s",
        "times as fast (least–most)",
        "tokens a step",
        "same text",
    ]
    about = "Of each prompt the median of its rounds; in all, their fastest, added up."
    return f"## {title}\n\n{about}\n\n" + table(head, lines)


def paying_text(groups: dict[str, dict]) -> str:
    """In total time, by kind: of plain decoding and each draft the fastest of the rounds."""
    greedy = {name: group for name, group in groups.items() if name != "sampled"}
    lines = []
    for name, group in greedy.items():
        kinds = dict.fromkeys(r["kind"] for r in group["rows"])
        for kind in kinds:
            rows = [r for r in group["rows"] if r["kind"] == kind]
            title = f"new: {kind}" if name == "new" else kind
            lines.append([title, len(rows), *paying_cells(rows, ("suffix", "surer"))])
    head = ["kind", "prompts", "tokens", "plain, s"]
    for draft in ("suffix", "surer"):
        head += [f"{draft}, s", "times as fast (by prompt)", "tokens a step"]
    told = {f"{g['date']}, jax {g['jax']}, rounds: {g['rounds']}" for g in groups.values()}
    about = (
        "After prefill, compiling excluded, the fastest round of each, all prompts of a kind "
        "together. `new`: prompts written after all of the code. *: another text, at a near tie"
    )
    text = "## Whether drafts pay, in total time\n\n"
    text += f"{'; '.join(sorted(told))}; `speculative_times.py`. {about}.\n\n"
    text += table(head, lines)
    if "sampled" not in groups:
        return text
    lines = []
    for top_p in (1.0, 0.95):
        rows = [r for r in groups["sampled"]["rows"] if r["top_p"] == top_p]
        lines.append([f"top-p {top_p}", len(rows), *paying_cells(rows, ("suffix",))])
    head = ["temperature 0.7", *head[1:7]]
    return f"{text}\n\nSampled, a prompt of each kind, other texts for each top-p:\n\n" + table(
        head, lines
    )


def paying_cells(rows: list[dict], drafts: tuple[str, ...]) -> list[str]:
    plain = sum(min(r["plain"]["seconds"]) for r in rows)
    cells = [sum(r["tokens"] for r in rows), f"{plain:.2f}"]
    for draft in drafts:
        best = [min(r[draft]["seconds"]) for r in rows]
        ratios = [min(r["plain"]["seconds"]) / x for r, x in zip(rows, best, strict=True)]
        steps = sum(sum(r[draft]["steps"]) / len(r[draft]["steps"]) for r in rows)
        cells += [
            f"{sum(best):.2f}",
            f"{plain / sum(best):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            + ("" if all(r[draft]["same_text"] for r in rows) else " *"),
            f"{cells[0] / steps:.2f}",
        ]
    return cells


def steps_text(steps: dict[str, float]) -> str:
    lines = [[n, ms, f"{ms / steps['1']:.2f}"] for n, ms in steps.items()]
    return "## A call of the model, after 256 tokens\n\n" + table(["tokens", "ms", "of one"], lines)


def int8_text(by_version: dict[str, list[dict]]) -> str:
    parts = []
    for version_, rows in by_version.items():
        ways = [name for name in rows[0] if name not in ("kind", "name")]
        lines = []
        for r in rows:
            found = (r[way] for way in ways)
            cells = (
                f"{x['tokens_a_second']:.1f} ({x['tokens_a_step']:.2f})"
                + ("" if x["same_text"] else " *")
                for x in found
            )
            lines.append([r["kind"], r["name"], *cells])
        means = (statistics.geometric_mean(r[way]["tokens_a_second"] for r in rows) for way in ways)
        lines.append(["**all**", "geometric mean", *(f"**{m:.1f}**" for m in means)])
        parts.append(f"With {version_}:\n\n" + table(["kind", "prompt", *ways], lines))
    return (
        "## Weights of 8 bits: tokens a second after prefill (and tokens a step)\n\n"
        "The fastest of the rounds. *: another text than plain decoding's with the same weights, "
        "after a near tie.\n\n" + "\n\n".join(parts)
    )


def packed_text(rows: list[dict]) -> str:
    lines = [
        [r["kind"], r["name"], r["nodes"], r["unpacked_ms"], r["packed_ms"], spread_text(r)]
        for r in rows
    ]
    head = ["kind", "prompt", "nodes", "64 tokens, ms", "packed, ms", "times as fast"]
    return "## Beams of 8 candidates of 8 tokens, packed and not\n\n" + table(head, lines)


def write(results: dict) -> None:
    texts = {
        "counts": counts_text,
        "times": lambda rows: times_text(rows, "Time after prefill, against plain decoding"),
        "paying": paying_text,
        "steps": steps_text,
        "packed": packed_text,
        "int8": int8_text,
        "devices": lambda rows: times_text(rows, "The same over 8 simulated devices"),
    }
    parts = [f"# Speculative decoding\n\n{results['machine']}; `benchmarks/speculative.py`."]
    parts += [text(results[name]) for name, text in texts.items() if results.get(name)]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def readme(results: dict) -> str:
    """The README's table."""
    rows = []
    for kind in (*KINDS, "all"):
        mine = [r for r in results["times"] if kind in (r["kind"], "all")]
        low = min(r["speedup"] for r in mine)
        high = max(r["speedup"] for r in mine)
        plain, drafted = in_all(mine, kind)
        rows.append(
            [
                kind,
                f"{pooled(results['counts'], kind, 'ngram'):.2f}",
                f"{pooled(results['counts'], kind, 'suffix'):.2f}",
                f"{plain:.1f} and {drafted:.1f}",
                f"{plain / drafted:.2f} ({low:.2f}–{high:.2f})",
            ]
        )
    head = [
        "four prompts each",
        "tokens a step, n-gram chain",
        "suffix tree (the default)",
        "seconds, plain and with it",
        "times plain decoding's speed (by prompt)",
    ]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="four prompts, 32 tokens, one round")
    parser.add_argument("--tokens", type=int, help="new tokens of each text (96)")
    parser.add_argument("--rounds", type=int, help="timings of each, in turn (3)")
    options = parser.parse_args()
    options.tokens = options.tokens or (32 if options.quick else 96)
    options.rounds = options.rounds or (1 if options.quick else 3)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if options.parts == ["readme"]:
        return print(readme(results))
    known = (*PARTS, "int8", "readme")
    if unknown := set(options.parts) - set(known[:-1]):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    wanted = options.parts or list(PARTS)
    if len(wanted) > 1 and "devices" in wanted:  # simulated devices slow a single one down
        for parts in ([p for p in wanted if p != "devices"], ["devices"]):
            flags = ["--tokens", str(options.tokens), "--rounds", str(options.rounds)]
            flags += ["--quick"] if options.quick else []
            subprocess.run([sys.executable, __file__, *parts, *flags], check=True)
        return None
    minutes = sum(PARTS.get(p, 6) for p in wanted) / (8 if options.quick else 1)
    print(f"{', '.join(wanted)}: about {minutes + 0.5:.0f} min on two quiet cores", flush=True)
    if wanted == ["devices"]:
        simulate_devices(8)
    model = Llama.load(None)
    here = (
        f"{datetime.date.today()}, {os.cpu_count()} {os.uname().machine} cores, "
        f"{jax.default_backend()}, jax {version('jax')}, {options.tokens} new tokens"
    )
    if wanted != ["int8"] or "machine" not in results:  # whose rows name their JAX
        results["machine"] = here
    for part in wanted:
        for rows in globals()[part](model, options):
            by_version = results.get(part, {}) | {f"jax {version('jax')}": rows}
            results[part] = by_version if part == "int8" else rows
            write(results)
    return None


if __name__ == "__main__":
    main()
