"""Memory for the gradient of `log_probs`, by the number of nodes that are computed at a time.

    python benchmarks/partition_memory.py       # some minutes: nothing is run, but XLA compiles

The temporary memory that XLA plans for the packaged model's program of a whole tree of so many
nodes. A larger tree in parts of that size has such a program for each part, one after the other,
and beside it all nodes' keys and values, with their gradients.
"""

import json
from pathlib import Path

import jax
import numpy as np

from treeattn import Llama, log_probs

RESULTS = Path(__file__).parent / "results" / "partition_memory.json"
NODES = (256, 1024, 4096)


def temporary_bytes(model: Llama, nodes: int) -> int:
    """Of the gradient of a tree: half of its nodes a prompt, the rest those of eight answers."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocabulary, nodes // 2).tolist()
    answers = rng.integers(0, model.config.vocabulary, (8, nodes // 16)).tolist()
    rows = [[*prompt, i, *answer[1:]] for i, answer in enumerate(answers)]

    def total(weights):
        return log_probs(model, rows, weights=weights).sum()

    compiled = jax.jit(jax.grad(total)).lower(model.weights).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    model = Llama.load()
    table = []
    for nodes in NODES:
        table.append({"nodes": nodes, "temporary_bytes": temporary_bytes(model, nodes)})
        print(f"{nodes:5} nodes: {table[-1]['temporary_bytes'] / 2**20:6.0f} MiB", flush=True)
    found = {"jax": jax.__version__, "table": table}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
