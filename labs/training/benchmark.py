"""A training step on rows that share prefixes: as a tree, packed, padded, and in PyTorch.

python -m labs.training.benchmark                  all kinds of rows, about ten minutes
python -m labs.training.benchmark group8 chat      these kinds only
python -m labs.training.benchmark --write          also labs/training/results/training.json and .md
python -m labs.training.benchmark sample           new answers into labs/training/training_rows.json

A step is a loss of the rows' log-probabilities (each row's, times an advantage of its own) and the
gradient of all weights of the packaged model, 135 million in float32. The rows are that model's
own, at temperature 0.8: 8 and 16 answers to one prompt (`group8`, `group16`), a chat that branches
twice (`chat`), and an agent that is told the results of its tools and branches at each turn
(`tools`). They are stored, with how they were made, so that everybody times the same.

In turn, in one process: `log_probs` by the rows' tree; the same code on rows that share nothing
(the same rows with first tokens that differ), at their own lengths (`packed`) and all at that of
the longest (`padded`); and, where torch and transformers are installed, the same weights in
transformers, on the padded rows four at a time (`torch padded`), and on the tree that `pack_rows`
makes, under a mask (`torch tree`). The loss and the embedding's gradient of all that have the same
rows are compared. Of each the median time; of JAX's programs the temporary memory besides. `least`
times a step on 16 tokens: what it takes, however few they are.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from labs.training import log_probs, pack_rows
from treeattn_llama import Llama, generate

HERE = Path(__file__).parent
ROWS = HERE / "training_rows.json"
RESULTS = HERE / "results" / "training.json"
KINDS = {
    "group8": "8 answers to a prompt",
    "group16": "16 answers to a prompt",
    "chat": "a chat, 3 × 3 answers",
    "tools": "an agent, 2 × 2 × 2 turns",
}
MICROBATCH = 4  # rows that transformers takes at a time
ANSWER = 64  # tokens of an answer, at most
SAMPLED = {"max_new_tokens": ANSWER, "temperature": 0.8, "top_p": 0.95}


# the rows


def answers(model: Llama, texts: list[list[int]], each: int, seed: int) -> list[list[int]]:
    """Every text with `each` answers of the model behind it."""
    texts = [text for text in texts for _ in range(each)]
    found = generate(model, texts, key=jax.random.key(seed), **SAMPLED).tokens
    return [text + answer for text, answer in zip(texts, found, strict=True)]


def said(model: Llama, row: list[int], message: str) -> list[int]:
    """The row, an end of the answer if it has none, and what the user says next.

    What is there is kept token by token: text that is decoded and encoded again may come back in
    other tokens, and then shares less.
    """
    encode = model.tokenizer.encode
    (end,) = encode("<|im_end|>")
    row = row if row[-1] == end else [*row, end]
    turn = f"\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
    return row + encode(turn)


def sample() -> dict[str, list[list[int]]]:
    """The rows of every kind, from the packaged model."""
    import pydoc_data.topics

    model = Llama.load()
    manual = pydoc_data.topics.topics["truth"].strip()
    asked = f"Read this part of a manual, and explain it in two sentences.\n\n{manual}"
    prompt = model.tokenizer.chat(asked)
    found = {"group16": answers(model, [prompt], 16, seed=0)}
    found["group8"] = found["group16"][:8]

    rows = answers(model, [prompt], 3, seed=1)
    rows = [said(model, row, "Give an example, and say what it prints.") for row in rows]
    found["chat"] = answers(model, rows, 3, seed=2)

    system = (HERE / "training_agent.txt").read_text(encoding="utf-8")
    question = "How long does it take to walk from the station to the museum, and is it open now?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    rows = answers(model, [model.tokenizer.chat(messages)], 2, seed=3)
    for seed, result in enumerate(("map: 1,450 m, flat, 3 crossings", "clock: Sunday, 10:40")):
        rows = [said(model, row, f"Result of {result}. Go on.") for row in rows]
        rows = answers(model, rows, 2, seed=4 + seed)
    found["tools"] = rows
    return found


def write_rows() -> None:
    """New rows, a line each, after a line that says how they were made."""
    how = {"by": "benchmarks/training.py sample", "on": str(datetime.date.today()), **SAMPLED}
    how["versions"] = f"SmolLM2-135M-Instruct as packaged, jax {version('jax')}"
    parts = [f' "made": {json.dumps(how)}']
    for kind, rows in sample().items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        parts.append(f' "{kind}": [\n{lines}\n ]')
    ROWS.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


# the steps


def loss_of(found, advantages):
    """Of log-probabilities (rows, longest − 1), 0 where a row is over: what a step minimizes."""
    return -(found * advantages[:, None]).sum() / 1000


def jax_step(model: Llama, rows, advantages, **options):
    """(a function without arguments that returns (loss, gradient), bytes of its temporaries)."""

    @jax.jit
    def step(weights):
        def loss(weights):
            return loss_of(log_probs(model, rows, weights=weights, **options), advantages)

        return jax.value_and_grad(loss)(weights)

    program = step.lower(model.weights).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    return functools.partial(program, model.weights), memory


def with_nothing_shared(rows, longest: int = 0):
    """The rows with other first tokens, each at least `longest` long."""
    fill = [1] * longest
    return [[100 + i, *row[1:], *fill[len(row) :]] for i, row in enumerate(rows)]


def torch_tree_step(other, rows, advantages):
    """transformers on the tree of `pack_rows`: positions, a mask from the intervals, a gather."""
    import torch

    (tree,) = pack_rows(rows)
    node = np.arange(len(tree.tokens))
    visible = (node <= node[:, None]) & (node[:, None] < tree.ends)
    mask = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min)[None, None]
    tokens = torch.from_numpy(tree.tokens.astype(np.int64))
    positions = torch.from_numpy(tree.positions.astype(np.int64))
    parents = torch.from_numpy(np.maximum(tree.parents, 0).astype(np.int64))
    there = torch.from_numpy(tree.row_map[:, 1:] >= 0)
    numbers = torch.from_numpy(np.maximum(tree.row_map[:, 1:], 0).astype(np.int64))
    scale = torch.tensor(np.asarray(advantages))

    def step():
        other.zero_grad(set_to_none=True)
        how = {"attention_mask": mask, "position_ids": positions[None], "use_cache": False}
        logits = other(tokens[None], **how).logits[0]
        each = torch.log_softmax(logits, dim=-1)[parents, tokens]
        loss = loss_of(torch.where(there, each[numbers], 0), scale)
        loss.backward()
        return loss.item(), other.model.embed_tokens.weight.grad

    return step


def torch_padded_step(other, rows, advantages):
    """transformers on the rows, a few at a time, filled up to the longest of all."""
    import torch

    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    there = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    scale = torch.tensor(np.asarray(advantages))

    def step():
        other.zero_grad(set_to_none=True)
        total = 0.0
        parts = (x.split(MICROBATCH) for x in (tokens, there, scale))
        for of_part, real, advantage in zip(*parts, strict=True):
            mask = real.to(torch.int64)
            logits = other(of_part, attention_mask=mask, use_cache=False).logits[:, :-1]
            each = torch.log_softmax(logits, dim=-1)
            each = each.gather(2, of_part[:, 1:, None])[..., 0]
            loss = loss_of(torch.where(real[:, 1:], each, 0), advantage)
            loss.backward()
            total += loss.item()
        return total, other.model.embed_tokens.weight.grad

    return step


def timed(f):
    """(seconds that f takes, its result included; the result)."""
    began = time.perf_counter()
    result = jax.block_until_ready(f())
    return time.perf_counter() - began, result


def measure(model: Llama, rows, rounds: int, torch_model) -> dict:
    """Tokens, seconds and bytes of each way, timed in turn; how far loss and gradient differ."""
    rng = np.random.default_rng(0)
    advantages = jnp.asarray(rng.choice([-1.0, 1.0], len(rows)), jnp.float32)
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    (tree,) = pack_rows(rows)
    tokens = {"tree": len(tree.tokens), "packed": sum(lengths), "padded": longest * len(rows)}
    given = rows, with_nothing_shared(rows), with_nothing_shared(rows, longest)
    made = {name: jax_step(model, x, advantages) for name, x in zip(tokens, given, strict=True)}
    steps = {name: step for name, (step, _) in made.items()}
    bytes_of = {name: memory for name, (_, memory) in made.items()}
    if torch_model is not None:
        steps["torch padded"] = torch_padded_step(torch_model, rows, advantages)
        steps["torch tree"] = torch_tree_step(torch_model, rows, advantages)
    seconds = {name: [] for name in steps}
    apart = {}
    for _ in range(rounds):
        for name, step in steps.items():
            took, (loss, gradient) = timed(step)
            seconds[name].append(took)
            if name == "tree":
                reference = float(loss), np.asarray(gradient.embedding)
            elif name.startswith("torch"):
                apart[name] = differences(reference, (loss, gradient.numpy()))
            del gradient
    return {
        "rows": len(rows),
        "rounds": rounds,
        "tokens": tokens,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "fastest": {name: min(times) for name, times in seconds.items()},
        "temporary_bytes": bytes_of,
        "loss": reference[0],
        "apart": apart,
    }


def differences(expected, found) -> dict[str, float]:
    """How far two (loss, gradient of the embedding) are apart, relative to the first."""
    loss = abs(found[0] / expected[0] - 1)
    gradient = np.linalg.norm(found[1] - expected[1]) / np.linalg.norm(expected[1])
    return {"loss": float(loss), "gradient": float(gradient)}


def least(model: Llama, row, rounds: int) -> float:
    """Seconds of a step on the first tokens of a row."""
    step, _ = jax_step(model, [row[:16]], jnp.ones(1))
    return statistics.median(timed(step)[0] for _ in range(1 + rounds))


# the table


def machine(torch_model) -> str:
    packages = ["jax", "numpy"] + (["torch", "transformers"] if torch_model is not None else [])
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}"
    )


def _cells(result: dict) -> list[str]:
    """Of one kind of rows: tokens, seconds and memory, with the ratios of padded to tree."""
    ways = "tree", "packed", "padded"
    tokens = result["tokens"]
    cells = [
        ", ".join(f"{tokens[way]:,}" for way in ways),
        f"{tokens['padded'] / tokens['tree']:.2f}",
        *["–"] * 5,
    ]
    if "seconds" not in result:
        return cells
    s = result["seconds"]
    gib = [result["temporary_bytes"][way] / 2**30 for way in ("tree", "packed")]
    cells[2] = ", ".join(f"{s[way]:.1f}" for way in ways)
    cells[3] = f"{s['padded'] / s['tree']:.2f}"
    cells[6] = ", ".join(f"{x:.2f}" for x in gib)
    if "torch tree" in s:
        cells[4] = f"{s['torch tree']:.1f}, {s['torch padded']:.1f}"
        cells[5] = f"{s['torch padded'] / s['torch tree']:.2f}"
    return cells


def table(results: dict) -> str:
    """What was measured, as Markdown."""
    lines = [
        "A training step (loss and all gradients) of the packaged 135M Llama in float32, on rows",
        "that share prefixes (`benchmarks/training.py`): as a tree, packed (the same lengths, and",
        "nothing shared), and padded. Seconds are medians, in turn in one run; GiB are the",
        "temporaries of the compiled program, beside weights and gradients; –: not measured.",
        "",
        "| rows | tokens: tree, packed, padded | tree has × fewer than padded "
        "| seconds: tree, packed, padded | × | transformers: tree, padded | × "
        "| GiB: tree, packed |",
        "|---" * 8 + "|",
    ]
    for kind, name in KINDS.items():
        if kind in results:
            lines.append("| " + " | ".join([name, *_cells(results[kind])]) + " |")
    if "least" in results:
        lines += ["", f"A step on 16 tokens takes {results['least']:.1f} seconds."]
    measured = [results[kind] for kind in KINDS if "seconds" in results.get(kind, ())]
    found = [x for r in measured for x in r["apart"].values()]
    if found:
        loss = max(x["loss"] for x in found)
        gradient = max(x["gradient"] for x in found)
        lines += [
            "",
            f"The loss of ours and of transformers differs by at most {loss:.0e} of itself, the",
            f"gradient of the embedding by {gradient:.0e} of its norm.",
        ]
    for text in sorted({f"{r['machine']}, {r['rounds']} rounds" for r in measured}):
        lines += ["", f"{text}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[*KINDS, "least"])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, in turn")
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    if unknown := set(args.kinds) - {*KINDS, "least", "sample"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if "sample" in args.kinds:
        write_rows()
        return
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    model = Llama.load()
    torch_model = None
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        from llama import transformers_model

        torch_model = transformers_model()
    results = {}
    for kind in tqdm(args.kinds, unit="kind"):
        if kind == "least":
            results[kind] = least(model, rows["group8"][0], args.rounds)
            continue
        results[kind] = measure(model, rows[kind], args.rounds, torch_model)
        results[kind] |= {"name": KINDS[kind], "machine": machine(torch_model)}
        jax.clear_caches()
    if args.write:
        old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        results = old | results
        results = {kind: results[kind] for kind in (*KINDS, "least") if kind in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
