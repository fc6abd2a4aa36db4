"""What further tokens of a step cost, by context and batch.

    python benchmarks/ridge.py          about 2 minutes on two quiet cores

The packaged model verifies a random tree of n tokens of each of some texts, after caches of some
lengths that are filled with random numbers (a step's time does not depend on them). Milliseconds,
the fastest of all rounds, which take all sizes in turn. Writes results/ridge.json.
"""

import argparse
import datetime
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from treeattn import Llama, ancestor_mask, depths
from treeattn_llama import Cache

RESULTS = Path(__file__).parent / "results" / "ridge.json"
SIZES = (1, 2, 4, 8, 16)
BATCHES = (1, 8)
CONTEXTS = (256, 2048, 4096, 16384)
MOST = 8 * 4096  # tokens of all caches together


def fastest(runs: dict, rounds: int) -> dict[str, float]:
    """Milliseconds of each run, the fastest of the rounds; a first one compiles."""
    for run in runs.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], time.perf_counter() - began)
    return {str(name): round(1000 * seconds, 2) for name, seconds in best.items()}


def full_cache(model: Llama, batch: int, context: int) -> Cache:
    """A cache of `batch` texts of `context` tokens, of random numbers, with room for the largest
    tree."""
    empty = model.new_cache(batch, context + SIZES[-1])
    content = np.random.default_rng(0).normal(size=empty.k[0].shape).astype(np.float32)
    fill = jax.jit(lambda x: x + content, donate_argnums=0)
    k, v = (tuple(fill(x) for x in layers) for layers in (empty.k, empty.v))
    return Cache(k, v, empty.lengths + np.int32(context))


def steps(model: Llama, batch: int, context: int, rounds: int) -> dict[str, float]:
    """Tokens of each text -> milliseconds of a step that verifies a random tree of so many."""
    rng = np.random.default_rng(0)
    cache = full_cache(model, batch, context)
    runs = {}
    for n in SIZES:
        parents = np.array([-1, *(rng.integers(i) for i in range(1, n))])
        tokens = rng.integers(model.config.vocabulary, size=(batch, n))
        positions = np.tile(context + depths(parents), (batch, 1))
        mask = np.tile(ancestor_mask(parents), (batch, 1, 1))

        def run(tokens=tokens, positions=positions, mask=mask):
            return model.extend(tokens, cache, positions=positions, mask=mask)[0]

        runs[n] = run
    return fastest(runs, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timings of each, in turn (5)")
    parser.add_argument("--dry", action="store_true", help="run everything once, store nothing")
    options = parser.parse_args()
    rounds = 1 if options.dry else options.rounds
    model = Llama.load(None)
    rows = []
    for batch in BATCHES:
        for context in tqdm(CONTEXTS, unit="context", desc=f"batch {batch}"):
            if batch * context <= MOST:
                ms = steps(model, batch, context, rounds)
                rows.append({"batch": batch, "context": context, "ms": ms})
                tqdm.write(str(rows[-1]))
    if options.dry:
        return
    results = {
        "machine": f"{datetime.date.today()}, {os.cpu_count()} {platform.machine()} cores, "
        f"Python {platform.python_version()}, jax {version('jax')}, float32",
        "steps": rows,
    }
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
