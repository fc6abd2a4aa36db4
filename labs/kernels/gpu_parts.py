"""The parts of gpu.py, which starts this module once for each of them.

A part yields rows, dicts that are printed as lines of JSON at once.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np

from labs.kernels import cluster_merge
from labs.kernels.gpu_checks import KERNELS, correct, one_line
from labs.kernels.split_k import split_k_attend
from treeattn import attend, attention, finalize, simulate_devices

HEADS, DIM = 32, 128
IN_CACHE = 1 << 28  # bytes, more than four times the L2 of any GPU


def room() -> float:
    """The device's memory, in bytes."""
    stats = jax.devices()[0].memory_stats()
    return (stats or {}).get("bytes_limit", 4e9)


def device(smoke: bool) -> Iterator[dict]:
    first = jax.devices()[0]
    yield {
        "device": first.device_kind if first.platform != "cpu" else "cpu",
        "compute capability": str(getattr(first, "compute_capability", "none")),
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "memory GB": room() / 1e9,
    }
    yield {"what": "read", "GB/s": read_bandwidth(smoke) / 1e9}


# Times. The host waits only at the end of a round of many calls, and the fastest round counts.


def seconds(f, *arguments, calls: int = 10, rounds: int = 5) -> float:
    """Seconds of one call."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            done = f(*arguments)  # keeps one result alive at a time
        jax.block_until_ready(done)
        times.append((time.perf_counter() - began) / calls)
    return min(times)


def read_bandwidth(smoke: bool) -> float:
    """Bytes per second of a program that only reads, an upper bound for a kernel over a cache."""
    n = 1 << 18 if smoke else min(1 << 28, int(room() / 40))
    x = jax.random.normal(jax.random.key(0), (n,), jnp.float32)
    return x.nbytes / seconds(jax.jit(jnp.max), x)


def random_pairs(shape, dtype, most: int) -> list[tuple]:
    """At most `most` pairs of keys and values, enough of them to overflow the L2."""
    size = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
    count = int(max(1, min(most, -(-IN_CACHE // size), 0.6 * room() // size)))
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(jax.random.key(0), 2 * count)
    return [(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(count)]


def call_seconds(f, q, pairs, *, calls: int, smoke: bool) -> float:
    """Seconds of one call, among about `calls` calls in a program. Each waits for the one before.

    All calls share the start of the program, which takes longer than some kernels. A pair has left
    the GPU's L2 before it is read again.
    """
    times = 1 if smoke else -(-calls // len(pairs))

    @jax.jit
    def run(q, pairs):
        def once(_, q):
            for k, v in pairs:
                q = q + 0 * f(q, k, v).astype(q.dtype)
            return q

        return jax.lax.fori_loop(0, times, once, q)

    few = {"calls": 1, "rounds": 1} if smoke else {"calls": 2}
    return seconds(run, q, pairs, **few) / (times * len(pairs))


# (dtype, kernels), the most important first, and those that compile slowly last
LOCAL = (
    ("bfloat16", ("split-K", "Mosaic")),
    ("float32", ("split-K",)),
    ("bfloat16", ("flash", "cuDNN", "blockwise")),
)


def cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def local(smoke: bool) -> Iterator[dict]:
    """One query of 32 heads on 8 key heads over a long cache."""
    ceiling = read_bandwidth(smoke)
    fs = {name: functools.partial(attention, implementation=f) for name, f in KERNELS.items()}
    fs["cuDNN"] = cudnn
    for dtype, names in LOCAL:
        q = jnp.ones((1, 1, HEADS, DIM), dtype)
        for n in [256] if smoke else [2**i for i in range(12, 21, 2)]:
            shape = 1, n, 8, DIM
            size = int(2 * np.prod(shape)) * jnp.dtype(dtype).itemsize
            pairs = random_pairs(shape, dtype, 2 if smoke else 16)
            for name in names:
                row = {"what": "local", "kernel": name, "dtype": dtype, "keys": n, "bytes": size}
                try:
                    t = call_seconds(fs[name], q, pairs, calls=16, smoke=smoke)
                    row |= {"µs": 1e6 * t, "share of read": size / t / ceiling}
                except Exception as error:  # an error of one kernel does not stop the rest
                    row["why not"] = one_line(error)
                yield row
            del pairs


def cluster(smoke: bool) -> Iterator[dict]:
    """One kernel that merges within clusters of thread blocks against split-K's two or more."""
    if why := cluster_merge.missing() if smoke else cluster_merge.obstacle():
        yield {"what": "cluster", "why not": why}
        return
    in_cluster = functools.partial(cluster_merge.cluster_attend, cluster=2 if smoke else 8)
    ways = {"split-K": split_k_attend, "cluster": in_cluster}
    split_k, program = (jax.jit(functools.partial(attend, implementation=f)) for f in ways.values())
    for n in (256,) if smoke else (2**12, 2**16, 2**18):
        heads, h_kv, d = (4, 1, 64) if smoke else (HEADS, 8, DIM)
        q = jax.random.normal(jax.random.key(1), (1, 1, heads, d), jnp.bfloat16)
        pairs = random_pairs((1, n, h_kv, d), q.dtype, 1 if smoke else 16)
        k, v = pairs[0]
        expected = finalize(split_k(q, k, v))[0]
        runs = 1 if smoke else 300  # all must have the same bits, or threads race
        with cluster_merge.interpreted() if smoke else nullcontext():
            states = [jax.block_until_ready(program(q, k, v)) for _ in range(1 + runs)]
        same = all(
            bool(jnp.array_equal(x, y))
            for state in states[1:]
            for x, y in zip(states[0], state, strict=True)
        )
        off = float(jnp.abs(finalize(states[0])[0] - expected).max())
        yield {"what": "cluster", "keys": n, "runs": runs, "off": off, "ok": same and off < 1e-3}
        for name, way in () if smoke else ways.items():
            f = functools.partial(attention, implementation=way)
            t = call_seconds(f, q, pairs, calls=16, smoke=smoke)
            yield {"what": "cluster", "kernel": name, "keys": n, "µs": 1e6 * t}


PARTS = {"device": device, "correct": correct, "local": local, "cluster": cluster}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    if args.smoke:  # each interpreted block holds one thread, and there are as many as devices
        simulate_devices(8 if args.part == "cluster" else 2)
    elif jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX finds no GPU here, its devices are {jax.devices()}")
    for row in PARTS[args.part](args.smoke):
        print(json.dumps({k: _plain(x) for k, x in row.items()}), flush=True)
        if time.monotonic() - began > args.seconds:
            sys.exit(f"stopped: the rest would take more than {args.seconds:.0f} s")


def _plain(x):
    return float(f"{x:.4g}") if isinstance(x, float | np.floating) else x


if __name__ == "__main__":
    main()
