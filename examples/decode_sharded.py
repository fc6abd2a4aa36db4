"""Decode from a cache that is sharded over the processes of a cluster.

    mpirun -n 4 python examples/decode_sharded.py        Open MPI finds the processes
    sbatch examples/decode.sbatch                        so does SLURM
    kubectl apply -f examples/decode-job.yaml            Kubernetes: told by the job
    python examples/decode_sharded.py --alone --devices 4

Every process makes its own part of a cache of random keys and values; a real program would have
filled it in a prefill. Then each step attends to all of the cache, by a tree over the devices.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096, help="keys in the cache")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="tokens to decode")
    parser.add_argument("--method", default="allreduce", help="how the devices' states merge")
    parser.add_argument("--devices", type=int, help="simulate so many CPU devices in each process")
    parser.add_argument("--check", action="store_true", help="compare with the whole cache's")
    parser.add_argument("--alone", action="store_true", help="one process, and no launcher")
    # Where no launcher is found by itself. The first process listens at the address.
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    return parser.parse_args(words)


def rows(kind: int, first: int, last: int, heads: int, head_dim: int) -> np.ndarray:
    """Keys (kind 0) or values (kind 1) first … last − 1, the same from every process."""
    made = [
        np.random.default_rng((kind, i)).normal(size=(heads, head_dim)) for i in range(first, last)
    ]
    return np.asarray(made, np.float32)[None]


def join_the_others(args) -> None:
    try:
        treeattn.initialize(args.coordinator, args.processes, args.process_id)
    except ValueError as error:  # JAX found no launcher, and was told no address
        raise SystemExit(
            f"no other processes: {str(error).rstrip('.')}. Start it by mpirun, srun or "
            "Kubernetes, give --coordinator, --processes and --process-id, or say --alone"
        ) from None


def sharded_cache(sharding: NamedSharding, args) -> tuple[jax.Array, jax.Array]:
    """Keys and values (1, context, kv_heads, head_dim), each device's part made by its process."""
    shape = 1, args.context, args.kv_heads, args.head_dim

    def part(kind, index):
        first, last, _ = index[1].indices(args.context)
        return rows(kind, first, last, *shape[2:])

    return tuple(
        jax.make_array_from_callback(shape, sharding, lambda index, kind=kind: part(kind, index))
        for kind in (0, 1)
    )


def main() -> None:
    args = arguments()
    if args.devices:
        treeattn.simulate_devices(args.devices)
    if not args.alone:
        join_the_others(args)
    # Neighbours in a node merge first; then the nodes do.
    mesh = treeattn.kv_mesh(nodes=jax.process_count())
    devices = mesh.size
    if args.context % devices:
        raise SystemExit(f"--context {args.context}: does not divide by {devices} devices")
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    k, v = sharded_cache(sharding, args)

    @jax.jit
    def decode(q, k, v):
        return treeattn.tree_decode(q, k, v, sharding=sharding, method=args.method)

    q = np.random.default_rng(7).normal(size=(1, 1, args.heads, args.head_dim)).astype(np.float32)
    for step in range(args.steps):
        began = time.perf_counter()
        out = np.asarray(decode(q, k, v).addressable_shards[0].data)
        seconds = time.perf_counter() - began
        if jax.process_index() == 0:
            where = f"{devices} devices of {jax.process_count()} processes"
            print(
                f"step {step}: {args.context} keys on {where}, {seconds * 1e3:.1f} ms", flush=True
            )
        if args.check:
            whole = (rows(i, 0, args.context, args.kv_heads, args.head_dim) for i in (0, 1))
            expected = treeattn.attention(jnp.asarray(q), *map(jnp.asarray, whole))
            close = np.allclose(out, expected, atol=1e-5)
            print(f"process {jax.process_index()}: allclose {close}", flush=True)
        q = out  # a model would make the next token's query, key and value of it


if __name__ == "__main__":
    main()
