"""One process of a small cluster, for test_cluster.py: ADDRESS PROCESSES ID FILE.

It calibrates twice. First process 0 names a folder that is not there; then all the others do, which
need none. What it prints is to be the same on all.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

import treeattn
from treeattn.cost import calibrate, collectives, read_measured


def decode(mesh, file) -> tuple[list[str], bool]:
    """What `tree_decode` by the file sends, and whether its result is dense attention's."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 1, 4, 16)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 32, 2, 16)).astype(np.float32)
    cache = NamedSharding(mesh, P(None, "kv"))
    arrays = [jax.make_array_from_callback(x.shape, cache, x.__getitem__) for x in (k, v)]

    def run(q, k, v):
        return treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv", method="auto", measured=file)

    program = jax.jit(run).lower(q, *arrays).compile()
    out = np.asarray(program(q, *arrays).addressable_shards[0].data)
    kinds = [x.kind for x in collectives(program) for _ in range(x.count)]
    return kinds, bool(np.allclose(out, dense_attention(q, k, v), atol=1e-5))


def main() -> None:
    address, processes, process_id, file = sys.argv[1:]
    treeattn.simulate_devices(1)
    treeattn.initialize(address, int(processes), int(process_id))
    nowhere = Path(file).parent / "no" / "times.json"
    first = process_id == "0"
    few = {"groups": [(int(processes), 1)], "sizes": (256, 4096), "ends": (), "repeats": 1}
    told = []
    try:
        calibrate(nowhere if first else file, tell=told.append, **few)
    except ValueError as error:
        print(f"refused {error} measured {len(told)}", flush=True)
    times = calibrate(file if first else nowhere, **few)
    print("same", times == read_measured(file), "times", sorted(times.fits.items()))
    print("decodes", *decode(treeattn.kv_mesh(), file), flush=True)


main()
