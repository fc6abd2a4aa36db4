"""One of two processes that decode together, for test_llama.py: llama_rank.py ADDRESS ID FILE.

FILE gets this process's tokens and logits; each process has two devices.
"""

import sys
from pathlib import Path

import numpy as np

import treeattn
from treeattn_llama.text import stream

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


def main() -> None:
    address, process_id, file = sys.argv[1:]
    treeattn.simulate_devices(2)
    treeattn.initialize(address, 2, int(process_id), initialization_timeout=120)
    mesh, prompt = treeattn.kv_mesh(nodes=2), list(range(1, 38))
    model = treeattn.Llama.load(SMALL, mesh=mesh)
    ids, seen = decode(model, prompt)
    streamed = [new[0] for (new,) in stream(model, [prompt], max_new_tokens=3, capacity=64)]
    options = {"max_new_tokens": 3, "capacity": 64, "budget": 4}
    drafted = treeattn.generate(model, prompt, draft="suffix", **options).tokens
    sharded = treeattn.Llama.load(
        SMALL, mesh=mesh, shard_weights=True, attention="reduce_scatter", dtype=np.float32
    )
    np.savez(
        file,
        ids=ids,
        logits=seen,
        streamed=streamed,
        drafted=drafted,
        sharded=decode(sharded, prompt)[1],
    )


def decode(model, prompt):
    """Three tokens, and the logits before each."""
    logits, cache = model.prefill([prompt], model.new_cache(1, 64))
    ids, seen = [], []
    for _ in range(3):
        seen.append(np.asarray(logits[0]))
        ids.append(int(seen[-1].argmax()))
        logits, cache = model.step(np.array([ids[-1:]]), cache, last=True)
    return ids, np.array(seen)


main()
