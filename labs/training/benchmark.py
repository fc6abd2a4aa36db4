"""A training step on rows that share prefixes, timed: as a tree, packed, and padded.

    python -m labs.training.benchmark                  # all kinds of rows, about ten minutes
    python -m labs.training.benchmark group8 chat      # these kinds only

A step is `gradients_by_tree` of train_on_a_tree.py: a loss of the rows' log-probabilities and the
gradient of all weights of the packaged model, 135 million in float32. The rows are stored
samples of this model (training_rows.json says how they were drawn), so every run times the same.

One process runs in turn the rows as a tree, the rows with first tokens that differ, so that they
share nothing (`packed`), and these padded to the longest row (`padded`). It prints the median
seconds of each, and the temporary memory of the compiled program.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from labs.training.rows import pack_rows
from labs.training.train_on_a_tree import Batch, gradients_by_tree, learned, store
from treeattn_llama import Llama

ROWS = Path(__file__).parent / "training_rows.json"
KINDS = {
    "group8": "8 answers to a prompt",
    "group16": "16 answers to a prompt",
    "chat": "a chat, 3 × 3 answers",
    "tools": "an agent, 2 × 2 × 2 turns",
}
ROUNDS = 3  # steps of each, in turn


def measure(model: Llama, rows: list[list[int]]) -> dict:
    """The number of rows, and each way's tokens, median seconds and temporary bytes."""
    longest = max(map(len, rows))
    apart = [[3 + i, *row[1:]] for i, row in enumerate(rows)]
    padded = [row + [1] * (longest - len(row)) for row in apart]
    ways = {"tree": rows, "packed": apart, "padded": padded}
    advantages = np.random.default_rng(0).choice([-1e-3, 1e-3], (len(rows), 1))
    weights = learned(model)
    programs = {}
    for way, given in ways.items():
        batch = Batch(given, np.tile(advantages, longest - 1), advantages)
        step = jax.jit(lambda weights, batch=batch: gradients_by_tree(model, weights, batch))
        programs[way] = step.lower(weights).compile()
    seconds = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(weights))
            seconds[way].append(time.perf_counter() - began)
    memory = {way: x.memory_analysis().temp_size_in_bytes for way, x in programs.items()}
    return {
        "rows": len(rows),
        "tokens": {way: len(pack_rows(given).tokens) for way, given in ways.items()},
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "temporary_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[*KINDS], help=", ".join(KINDS))
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    model = Llama.load()
    results = {}
    for kind in parser.parse_args().kinds:
        results[kind] = {"name": KINDS[kind], **measure(model, rows[kind])}
        print(json.dumps(results[kind]), flush=True)
    store(Path("build/training.json"), results)


if __name__ == "__main__":
    main()
