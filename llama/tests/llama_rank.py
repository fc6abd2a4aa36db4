"""One of two processes that decode together, for test_llama.py: llama_rank.py ADDRESS ID FILE.

FILE gets this process's tokens; each process has two devices.
"""

import sys
from pathlib import Path

import numpy as np

import treeattn
from treeattn_llama import Llama, generate

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


def main() -> None:
    address, process_id, file = sys.argv[1:]
    treeattn.simulate_devices(2)
    treeattn.initialize(address, 2, int(process_id), initialization_timeout=120)
    model = Llama.load(SMALL, mesh=treeattn.kv_mesh(nodes=2))
    options = {"max_new_tokens": 3, "capacity": 64}
    prompt = list(range(1, 38))
    plain = generate(model, prompt, **options).tokens
    np.savez(file, plain=plain, drafted=generate(model, prompt, draft="lookup", **options).tokens)


main()
