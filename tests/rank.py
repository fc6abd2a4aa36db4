"""One process of a small cluster, for test_cluster.py: rank.py ADDRESS PROCESSES ID WHAT [VICTIM].

WHAT: "decode", and compare with dense attention; or, after a first collective, "raise" in the
process VICTIM, or "wait" there, to be killed by the test, while the others go on to a second.
"""

import sys
import time

import jax
import numpy as np
from attentions import draw
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

import treeattn
from treeattn.across import METHODS


def decode(mesh, kv_len: int) -> float:
    """The largest error of `tree_decode` over the mesh, against dense attention."""
    q, k, v = draw(kv_len, l=1, n=kv_len, d=16, dtype=np.float32)
    expected = dense_attention(q, k, v)
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    k, v = (jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in (k, v))
    errors = []
    for method, way in METHODS.items():
        if not way.shards_heads:
            out = treeattn.tree_decode(q, k, v, method=method)
            errors.append(np.abs(np.asarray(out.addressable_shards[0].data) - expected).max())
    return max(errors)


def main() -> None:
    address, processes, process_id, what, *victim = sys.argv[1:]
    treeattn.simulate_devices(2)
    treeattn.initialize(address, int(processes), int(process_id))
    mesh = treeattn.kv_mesh(nodes=int(processes))
    print(f"devices {len(jax.devices())} close {decode(mesh, 64) < 1e-5}", flush=True)
    if what == "raise" and process_id in victim:
        sys.stdout.close()  # cannot be flushed any more
        raise ArithmeticError("planted")
    if what == "wait" and process_id in victim:
        print("waiting", flush=True)
        time.sleep(600)
    if what != "decode":
        decode(mesh, 128)
    print("done", flush=True)


main()
