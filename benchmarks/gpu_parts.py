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
from gpu_correct import METHODS, correct  # noqa: E402
from gpu_llama import large, packaged, room, verify  # noqa: E402

import treeattn  # noqa: E402
from treeattn.idea.state import reduce_tree  # noqa: E402
from treeattn.kernel import attend as kernel  # noqa: E402
from treeattn.kernel import pallas as pallas_kernel  # noqa: E402
from treeattn.kernel.inputs import check_inputs  # noqa: E402

BATCH, HEADS, DIM = 1, 32, 128


def seconds(f, *arguments, calls: int = 10, rounds: int = 5) -> float:
    """Of one call: the fastest round of `calls`, which the device runs one after another."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        done = [f(*arguments) for _ in range(calls)]
        jax.block_until_ready(done)
        times.append((time.perf_counter() - began) / calls)
        if sum(times) * calls > 2:
            break
    return min(times)


def repeated(f, times: int):
    """A program that calls f(q, …) so often, each call with a query that waits for the last.

    What it takes to start a program, longer than many a kernel, is then shared by all.
    """

    def run(q, *rest):
        return jax.lax.fori_loop(0, times, lambda _, q: q + 0 * f(q, *rest), q)

    return jax.jit(run)


def copy_bandwidth(smoke: bool) -> float:
    """Bytes per second of a program that reads an array and writes one: both count."""
    n = 1 << (22 if smoke else 29)
    x = jnp.ones(n, jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def device(smoke: bool) -> Iterator[dict]:
    first = jax.devices()[0]
    flash = kernel.importlib.util.find_spec("flash_attn_jax") is not None
    yield {
        "device": first.device_kind if first.platform != "cpu" else "cpu",
        "platform": first.platform,
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "memory GB": room() / 1e9,
        "flash-attn-jax": flash,
        "stood in for": MISSING,
    }
    yield {"what": "copy", "GB/s": copy_bandwidth(smoke) / 1e9}


# One query over a long cache.


def cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def local(smoke: bool) -> Iterator[dict]:
    limit = copy_bandwidth(smoke)
    sizes = [256, 512] if smoke else [2**i for i in range(12, 21, 2)]
    names = {
        name: functools.partial(treeattn.attention, implementation=name)
        for name in ("pallas", "flash", "blockwise")
    } | {"cuDNN": cudnn}
    stopped: dict[tuple, str] = {}
    for dtype in ("bfloat16", "float32"):
        for kv_heads in (8,) if smoke or dtype == "float32" else (8, 32):
            for n in sizes:
                shape = BATCH, n, kv_heads, DIM
                size = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
                if size > 0.6 * room():
                    yield {"what": "local", "keys": n, "why not": "the cache does not fit"}
                    continue
                q = jnp.ones((BATCH, 1, HEADS, DIM), dtype)
                k = jax.random.normal(jax.random.key(0), shape, dtype)
                for name, f in names.items():
                    case = {"what": "local", "implementation": name, "dtype": dtype, "keys": n}
                    case |= {"heads": f"{HEADS}/{kv_heads}"}
                    if (name, dtype) not in stopped:
                        try:
                            times = 1 if name == "blockwise" or smoke else 8
                            run = repeated(f, times)
                            t = seconds(run, q, k, k, calls=1 if smoke else 2) / times
                            case |= {"µs": 1e6 * t, "share": size / t / limit}
                        except Exception as error:  # whatever a kernel says, the rest goes on
                            stopped[name, dtype] = one_line(error)
                    why = stopped.get((name, dtype))
                    yield case | ({"why not": why} if why else {})


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


# The same in one kernel, which merges within clusters of thread blocks.


def cluster(smoke: bool) -> Iterator[dict]:
    """The example's kernel, the split-K kernel with its merge, and that merge alone."""
    path = Path(__file__).parent.parent / "examples" / "cluster_merge.py"
    spec = importlib.util.spec_from_file_location("cluster_merge", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
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
    splits = 4 if smoke else 512 // 8  # what the split-K kernel leaves to its merge
    states = jax.tree.map(lambda x: jnp.stack([x] * splits), first)
    merge = functools.partial(reduce_tree, arity=pallas_kernel.CHILDREN)
    t = seconds(jax.jit(chained(merge, 1 if smoke else 100)), states)
    yield {"what": "merge alone", "states": splits, "µs": 1e6 * t / (1 if smoke else 100)}


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
    name = "blockwise" if smoke else kernel.resolve(None, *_example()).implementation
    for n in (512,) if smoke else (2**14, 2**16, 2**18):
        q = jnp.ones((BATCH, 1, HEADS, DIM), jnp.bfloat16)
        k = jax.random.normal(jax.random.key(0), (BATCH, n, 8, DIM), q.dtype)
        alone = jax.jit(functools.partial(treeattn.attention, implementation=name))
        t = seconds(alone, q, k, k)
        yield {"what": "alone", "keys a device": n, "implementation": name, "µs": 1e6 * t}
        whole = jax.device_put(jnp.tile(k, (1, p, 1, 1)), along)
        for method in METHODS if p > 1 and not smoke else METHODS[:1]:
            decode = jax.jit(
                functools.partial(
                    treeattn.tree_decode, mesh=mesh, axis="kv", method=method, implementation=name
                )
            )
            merged = seconds(decode, q, whole, whole)
            yield {
                "what": "tree", "keys a device": n, "devices": p, "method": method,
                "µs": 1e6 * merged, "overhead": merged / t - 1,
            }  # fmt: skip


def _example():
    q, k = np.zeros((1, 1, HEADS, DIM), jnp.bfloat16), np.zeros((1, 64, 8, DIM), jnp.bfloat16)
    return check_inputs(q, k, k), kernel.device_platform(jax.devices()[0])


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
