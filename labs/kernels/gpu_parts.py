"""The parts of benchmarks/gpu.py, which starts this script once for each of them.

A part yields lines, dicts that are printed as JSON when they are there.
"""

import argparse
import functools
import importlib.util
import itertools
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
from gpu_correct import METHODS, OWN, correct, one_line, why_not  # noqa: E402
from gpu_llama import large, packaged, room, verify  # noqa: E402
from gpu_timing import bandwidths, call_seconds, random_pairs, repeated, seconds  # noqa: E402

import treeattn  # noqa: E402

BATCH, HEADS, DIM = 1, 32, 128


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
    found = {name: why_not(name, (q, k, k)) for name in ("flash", *OWN)}
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
    for name in (*OWN, "flash", "blockwise")
} | {"cuDNN": cudnn, "JAX's gqa": jax_gqa}
# dtype, key heads, kernels: what decides first, and what takes long to compile last
LOCAL = (
    ("bfloat16", 8, OWN),
    ("float32", 8, OWN),
    ("bfloat16", 8, ("cuDNN", "JAX's gqa", "flash")),
    ("bfloat16", 32, (*OWN, "cuDNN", "flash")),
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


def kernels(smoke: bool) -> Iterator[dict]:
    """The same calls by the GPU's clock, each of their kernels by itself."""
    for name, n in itertools.product(
        ("blockwise",) if smoke else OWN, (64,) if smoke else (2**12, 2**16)
    ):
        yield from kernels_of(name, n, smoke)


def kernels_of(name: str, n: int, smoke: bool) -> Iterator[dict]:
    """Of calls over n keys by one implementation."""
    import gpu_kernels

    about = {"what": "kernels", "implementation": name, "keys": n}
    shape = BATCH, n, 8, DIM
    size = 2 * np.prod(shape) * jnp.dtype(jnp.bfloat16).itemsize
    pairs = random_pairs(shape, jnp.bfloat16, 1 if smoke else 16)
    q = jnp.ones((BATCH, 1, HEADS, DIM), jnp.bfloat16)
    try:
        times = gpu_kernels.kernel_times(repeated(KERNELS[name], 1), q, pairs)
    except Exception as error:  # whatever a kernel says, the rest goes on
        yield about | {"why not": one_line(error)}
        return
    if not times:
        yield about | {"why not": gpu_kernels.NONE}
    for row in gpu_kernels.rows(times, len(pairs), size):
        yield about | row


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
    splits = 4 if smoke else 512 // 8  # what the first split-K kernel leaves to the second
    merge = functools.partial(treeattn.reduce_tree, arity=8)  # as XLA compiles one
    for n in (256,) if smoke else (2**12, 2**16, 2**18):
        q, k, v = example.draw(4, n, 1, 64) if smoke else example.draw(HEADS, n, 8, DIM)
        if n <= 2**12:
            first = pallas(q, k, v)
            states = jax.tree.map(lambda x: jnp.stack([x] * splits), first)
            t = seconds(jax.jit(chained(merge, 1 if smoke else 100)), states)
            yield {"what": "merge alone", "states": splits, "µs": 1e6 * t / (1 if smoke else 100)}
        for name, f in fs.items():
            case = {"what": "cluster", "kernel": name, "keys": n}
            if n <= 2**12:  # how far apart their outputs are, and whether a race moves a bit
                program = jax.jit(f)
                with example.interpreted() if smoke and f is not pallas else no_context():
                    state = jax.block_until_ready(program(q, k, v))
                    runs = 1 if smoke else 300
                    case["ok"] = all(same_bits(state, program(q, k, v)) for _ in range(runs))
                out, expected = (treeattn.finalize(x)[0] for x in (state, first))
                case |= {"runs": runs, "off": float(jnp.abs(out - expected).max())}
            yield case | ({} if smoke else {"µs": 1e6 * example.seconds(f, q, k, v)})


def same_bits(a, b) -> bool:
    """Whether two states have the same numbers; NaN is another than NaN."""
    return all(bool(jnp.array_equal(x, y)) for x, y in zip(a, b, strict=True))


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
    "kernels": kernels,
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
