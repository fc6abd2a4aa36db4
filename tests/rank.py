"""One process of a small cluster, for test_cluster.py: rank.py ADDRESS PROCESSES ID WHAT [VICTIM].

WHAT: "decode", and compare with dense attention; or, after a first collective, "raise" in the
process VICTIM, or "wait" there, to be killed by the test, while the others go on to a second.
"""

import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

import treeattn


def decode(mesh, kv_len: int) -> tuple[float, bool]:
    """The largest error of `tree_decode` over the mesh, against dense attention; and whether its
    exact sums have the bits of one device.
    """
    rng = np.random.default_rng(kv_len)
    q = rng.normal(size=(2, 1, 4, 16)).astype(np.float32)
    k, v = (rng.normal(size=(2, kv_len, 2, 16)).astype(np.float32) for _ in "kv")
    expected = dense_attention(q, k, v)
    alone = treeattn.attention(q, k, v, implementation="exact")
    cache = NamedSharding(mesh, P(None, mesh.axis_names))
    k, v = (jax.make_array_from_callback(x.shape, cache, x.__getitem__) for x in (k, v))
    errors = []
    for method in ("allreduce", "butterfly", "gather"):
        out = treeattn.tree_decode(q, k, v, mesh=mesh, axis=mesh.axis_names, method=method)
        errors.append(np.abs(np.asarray(out.addressable_shards[0].data) - expected).max())
    axes = mesh.axis_names
    exact = treeattn.tree_decode(q, k, v, mesh=mesh, axis=axes, method="exact")
    same = np.array_equal(np.asarray(exact.addressable_shards[0].data), np.asarray(alone))
    return max(errors), same


def main() -> None:
    address, processes, process_id, what, *victim = sys.argv[1:]
    treeattn.simulate_devices(2)
    treeattn.initialize(address, int(processes), int(process_id))
    mesh = treeattn.kv_mesh(nodes=int(processes))
    error, same = decode(mesh, 64)
    print(f"devices {len(jax.devices())} close {error < 1e-5} same bits {same}", flush=True)
    if what == "raise" and process_id in victim:
        raise ArithmeticError("planted")
    if what == "wait" and process_id in victim:
        print("waiting", flush=True)
        time.sleep(600)
    if what != "decode":
        decode(mesh, 128)
    print("done", flush=True)


main()
