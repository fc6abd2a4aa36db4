"""The parts of benchmarks/gpu.py, which starts this script once for each of them.

A part yields lines, dicts that are printed as JSON when they are there. Times are those of the
fastest of a few rounds of many calls, the host waiting at the end only.
"""

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext as no_context
from pathlib import Path

import stand_ins

MISSING = stand_ins.install()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from gpu_correct import METHODS, correct, one_line, why_not  # noqa: E402
from gpu_llama import large, packaged, room, verify  # noqa: E402

import treeattn  # noqa: E402

BATCH, HEADS, DIM = 1, 32, 128
IN_CACHE = 1 << 28  # bytes: no GPU's L2 holds a quarter of them


def seconds(f, *arguments, calls: int = 10, rounds: int = 5) -> float:
    """Of one call: the fastest round of `calls`, which the device runs one after another."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            done = f(*arguments)  # one result at a time is alive
        jax.block_until_ready(done)
        times.append((time.perf_counter() - began) / calls)
        if sum(times) * calls > 2:
            break
    return min(times)


def repeated(f, times: int):
    """A program that calls f(q, k, v) with each pair of `pairs`, so often, one after another.

    Each call has a query that waits for the last. What it takes to start a program, longer than
    many a kernel, is shared by all; and a pair has left the GPU's L2 when its turn comes again.
    """

    def run(q, pairs):
        def once(_, q):
            for k, v in pairs:
                q = q + 0 * f(q, k, v)
            return q

        return jax.lax.fori_loop(0, times, once, q)

    return jax.jit(run)


def call_seconds(f, q, pairs, *, calls: int, smoke: bool) -> float:
    """Of one of about so many calls in a program."""
    times = 1 if smoke else -(-calls // len(pairs))
    run = repeated(f, times)
    few = {"calls": 1, "rounds": 1} if smoke else {"calls": 2}
    return seconds(run, q, pairs, **few) / (times * len(pairs))


def random_pairs(shape, dtype, most: int) -> list[tuple]:
    """Keys and values, each array its own; so many pairs, at most, as the L2 cannot hold."""
    size = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
    count = int(max(1, min(most, -(-IN_CACHE // size), 0.6 * room() // size)))
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(jax.random.key(0), 2 * count)
    return [(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(count)]


def bandwidths(smoke: bool) -> dict[str, float]:
    """Bytes per second: of a program that writes an array over (what it reads counts, too), and of
    one that only reads, as a kernel over a cache does nearly."""
    n = 1 << 18 if smoke else min(1 << 28, int(room() / 40))
    x = jax.random.normal(jax.random.key(0), (n,), jnp.float32)
    calls = 10
    read = x.nbytes / seconds(jax.jit(jnp.max), x, calls=calls)
    add, times = jax.jit(lambda x: x + 1, donate_argnums=0), []
    for _ in range(5):
        x = jax.block_until_ready(add(x))
        began = time.perf_counter()
        for _ in range(calls):
            x = add(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - began) / calls)
    return {"copy": 2 * x.nbytes / min(times), "read": read}


def device(smoke: bool) -> Iterator[dict]:
    first = jax.devices()[0]
    yield {
        "device": first.device_kind if first.platform != "cpu" else "cpu",
        "compute capability": str(getattr(first, "compute_capability", "none")),
        "platform": first.platform,
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "memory GB": room() / 1e9,
        "cannot run": cannot_run(),
        "stood in for": MISSING,
    }
    for what, speed in bandwidths(smoke).items():
        yield {"what": what, "GB/s": speed / 1e9}


def cannot_run() -> dict[str, str]:
    """What this device, this JAX, or what is installed rules out, and why."""
    example = cluster_example()
    hopper = None if example.on_hopper() else "it needs a Hopper GPU, of compute capability 9.0"
    q, k = np.zeros((1, 1, HEADS, DIM), jnp.bfloat16), np.zeros((1, 64, 8, DIM), jnp.bfloat16)
    found = {name: why_not(name, (q, k, k)) for name in ("flash", "pallas")}
    found["cluster"] = example.missing() or hopper
    return {name: why for name, why in found.items() if why is not None}


# One query over a long cache.


def cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def jax_gqa(q, k, v):
    """JAX's own split-K kernel in Pallas, of the same releases."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    splits = min(64, max(1, k.shape[1] // 256))
    out = decode_attention.gqa(q[:, 0], k, v, sm_scale=DIM**-0.5, k_splits=splits, block_k=64)
    return out[:, None]


KERNELS = {
    name: functools.partial(treeattn.attention, implementation=name)
    for name in ("pallas", "flash", "blockwise")
} | {"cuDNN": cudnn, "JAX's gqa": jax_gqa}
# dtype, key heads, kernels: what decides first, and what takes long to compile last
LOCAL = (
    ("bfloat16", 8, ("pallas",)),
    ("float32", 8, ("pallas",)),
    ("bfloat16", 8, ("cuDNN", "JAX's gqa", "flash")),
    ("bfloat16", 32, ("pallas", "cuDNN", "flash")),
    ("bfloat16", 8, ("blockwise",)),
    ("float32", 8, ("blockwise",)),
)


def local(smoke: bool) -> Iterator[dict]:
    ceiling = bandwidths(smoke)["read"]
    sizes = [256] if smoke else [2**i for i in range(12, 21, 2)]
    stopped: dict[tuple, str] = {}
    for dtype, kv_heads, names in LOCAL:
        if smoke and kv_heads > 8:
            continue
        q = jnp.ones((BATCH, 1, HEADS, DIM), dtype)
        for n in sizes:
            shape = BATCH, n, kv_heads, DIM
            size = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
            about = {"what": "local", "dtype": dtype, "keys": n, "heads": f"{HEADS}/{kv_heads}"}
            if size > 0.6 * room():
                yield about | {"why not": "the cache does not fit"}
                continue
            pairs = random_pairs(shape, dtype, 2 if smoke or names == ("blockwise",) else 16)
            for name in names:
                case = about | {"implementation": name}
                if (name, dtype) not in stopped:
                    try:
                        calls = 2 if name == "blockwise" else 16
                        t = call_seconds(KERNELS[name], q, pairs, calls=calls, smoke=smoke)
                        case |= {"pairs": len(pairs), "µs": 1e6 * t, "share": size / t / ceiling}
                    except Exception as error:  # whatever a kernel says, the rest goes on
                        stopped[name, dtype] = one_line(error)
                why = stopped.get((name, dtype))
                yield case | ({"why not": why} if why else {})
            del pairs


# The same in one kernel, which merges within clusters of thread blocks.


def cluster(smoke: bool) -> Iterator[dict]:
    """The example's kernel, the two of split-K, and a tree of merges that XLA compiles."""
    example = cluster_example()
    why = example.missing()
    if not why and not smoke and not example.on_hopper():
        why = f"only Hopper GPUs run it, and this is {jax.devices()[0].device_kind}"
    if why:
        yield {"what": "cluster", "why not": why}
        return
    pallas = functools.partial(treeattn.attend, implementation="pallas")
    fs = {
        "pallas": pallas,
        "cluster": functools.partial(example.cluster_attend, cluster=2 if smoke else 8),
        "two clusters a head": functools.partial(example.cluster_attend, clusters=2),
    }
    fs, first = dict(list(fs.items())[: 2 if smoke else 3]), None
    for n in (256,) if smoke else (2**12, 2**16, 2**18):
        q, k, v = example.draw(4, n, 1, 64) if smoke else example.draw(HEADS, n, 8, DIM)
        first = pallas(q, k, v) if n <= 2**12 else first
        for name, f in fs.items():
            case = {"what": "cluster", "kernel": name, "keys": n}
            if n <= 2**12:  # how far apart their outputs are
                with example.interpreted() if smoke and f is not pallas else no_context():
                    state = jax.block_until_ready(jax.jit(f)(q, k, v))
                out, expected = (treeattn.finalize(x)[0] for x in (state, first))
                case["off"] = float(jnp.abs(out - expected).max())
            yield case | ({} if smoke else {"µs": 1e6 * example.seconds(f, q, k, v)})
    splits = 4 if smoke else 512 // 8  # what the first split-K kernel leaves to the second
    states = jax.tree.map(lambda x: jnp.stack([x] * splits), first)
    merge = functools.partial(treeattn.reduce_tree, arity=8)  # as XLA compiles one
    t = seconds(jax.jit(chained(merge, 1 if smoke else 100)), states)
    yield {"what": "merge alone", "states": splits, "µs": 1e6 * t / (1 if smoke else 100)}


def cluster_example():
    """The module examples/cluster_merge.py."""
    path = Path(__file__).parent.parent / "examples" / "cluster_merge.py"
    spec = importlib.util.spec_from_file_location("cluster_merge", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def chained(merge, times: int):
    """A program of so many merges of `states`, each after the last."""

    def run(states):
        def again(_, states):
            d = merge(states).denominator
            return states._replace(denominator=states.denominator + 0 * d)

        return jax.lax.fori_loop(0, times, again, states)

    return run


# The same over all devices.


def tree(smoke: bool) -> Iterator[dict]:
    """tree_decode on a mesh of all devices, and the kernel alone on as many keys as one has."""
    p = len(jax.devices())
    mesh = treeattn.kv_mesh()
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "kv"))
    name = "blockwise" if smoke else default_implementation()
    q = jnp.ones((BATCH, 1, HEADS, DIM), jnp.bfloat16)
    for n in (512,) if smoke else (2**14, 2**16, 2**18):
        pairs = random_pairs((BATCH, n, 8, DIM), q.dtype, 2 if smoke else 4)
        alone = functools.partial(treeattn.attention, implementation=name)
        t = call_seconds(alone, q, pairs, calls=8, smoke=smoke)
        yield {"what": "alone", "keys a device": n, "implementation": name, "µs": 1e6 * t}
        spread = jax.jit(lambda x: jnp.tile(x, (1, p, 1, 1)), out_shardings=along)
        pairs = [tuple(map(spread, pair)) for pair in pairs]
        for method in METHODS if p > 1 and not smoke else METHODS[:1]:
            decode = functools.partial(
                treeattn.tree_decode, mesh=mesh, axis="kv", method=method, implementation=name
            )
            merged = call_seconds(decode, q, pairs, calls=8, smoke=smoke)
            yield {
                "what": "tree",
                "keys a device": n,
                "devices": p,
                "method": method,
                "µs": 1e6 * merged,
                "overhead": merged / t - 1,
            }
        del pairs


def default_implementation() -> str:
    q, k = np.zeros((1, 1, HEADS, DIM), jnp.bfloat16), np.zeros((1, 64, 8, DIM), jnp.bfloat16)
    return treeattn.which_implementation(q, k, k)


PARTS = {
    "device": device,
    "correct": correct,
    "local": local,
    "cluster": cluster,
    "tree": tree,
    "packaged": packaged,
    "large": large,
    "verify": verify,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    if args.smoke:  # blocks that are interpreted hold a thread each, of as many as devices
        treeattn.simulate_devices(8 if args.part == "cluster" else 2)
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
