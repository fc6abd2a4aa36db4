"""Is the split-K kernel right on a GPU, and how fast is it? One command, `make gpu`.

    python -m labs.kernels.gpu            a few minutes
    python -m labs.kernels.gpu --smoke    the same, small, interpreted on a CPU

It needs a JAX for CUDA, NumPy and jaxtyping. Every line is printed and written when it is found,
to labs/kernels/results/gpu-<device>.md. The exit status is 1 if a result is wrong.
"""

import argparse
import functools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labs.kernels.cases import draw, right
from labs.kernels.split_k import split_k_attend
from treeattn import attend, attention, finalize, kv_mesh, tree_decode

KERNELS = {"split-K": split_k_attend, "flash": "flash", "blockwise": "blockwise"}
# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "decode": (2, 1, 32, 8, 5000, 128, 128),
    "few queries": (1, 8, 9, 3, 3000, 64, 64),
    "odd sizes": (2, 3, 6, 2, 1000, 96, 40),
}
SMALL = {"decode": (2, 1, 4, 2, 72, 64, 64)}
# flash-attn-jax rounds its outputs to the inputs' dtype
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-4, "float16": 2e-5}
ROUNDED = {"bfloat16": 1e-2, "float16": 2e-3}


def difference(found, expected) -> float:
    """The largest difference of finite numbers; ∞ if only one of two numbers is −∞ or NaN."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    for where in (np.isneginf, np.isnan):
        if not np.array_equal(where(found), where(expected)):
            return float("inf")
    finite = np.isfinite(expected)
    return float(np.abs(found[finite] - expected[finite]).max(initial=0))


def checked(what: str, name: str, arrays, **options) -> dict:
    """A row: right, wrong, or why the kernel was not run."""
    dtype = str(arrays[0].dtype)
    row = {"what": what, "kernel": name, "dtype": dtype}
    f = jax.jit(functools.partial(attend, implementation=KERNELS[name]))
    try:
        found = finalize(f(*arrays, **options))
    except (ImportError, NotImplementedError, ValueError) as error:
        return row | {"not run": f"{error!r:.160}"}
    error = max(map(difference, found, right(*arrays, **options)))
    allowed = (ALLOWED | (ROUNDED if name == "flash" else {}))[dtype]
    return row | {"error": f"{error:.1e}", "ok": error <= allowed}


def correct(smoke: bool) -> Iterator[dict]:
    """Every kernel against float64: shapes, NaN in each input, NaN past the lengths, devices."""
    jax.config.update("jax_default_matmul_precision", "highest")
    n = 72 if smoke else 1000
    hard = draw((2, 2, 8, 2, n, 64, 64), "bfloat16")
    lengths = np.array([n // 3, 0], np.int32)
    past = (np.arange(n) >= lengths[:, None])[..., None, None]
    for name in KERNELS:
        for dtype in ("bfloat16",) if smoke else ("bfloat16", "float16", "float32"):
            for what, shape in (SMALL if smoke else SHAPES).items():
                yield checked(what, name, draw(shape, dtype))
        for i, what in enumerate(("query", "key", "value")):
            spoiled = [x.at[1, 1, 1, 5].set(jnp.nan) if i == j else x for j, x in enumerate(hard)]
            yield checked(f"NaN in a {what}", name, spoiled)
        poisoned = [hard[0], *(jnp.where(past, jnp.nan, x) for x in hard[1:])]
        yield checked("NaN past the lengths", name, poisoned, kv_lengths=lengths)
    sharding = NamedSharding(kv_mesh(), P(None, "kv"))
    arrays = draw((2, 1, 8, 2, 130, 64, 64), "float32")
    out = tree_decode(*arrays, sharding=sharding, implementation=split_k_attend)
    error = difference(out, right(*arrays)[0])
    what = f"tree_decode on {len(jax.devices())}"
    yield {"what": what, "kernel": "split-K", "error": f"{error:.1e}", "ok": error < 1e-5}


def times(smoke: bool) -> Iterator[dict]:
    """One query of 32 heads on 8 key heads of 128 over caches that no GPU's L2 holds."""
    for n in (256,) if smoke else (1 << 16, 1 << 18):
        q, k, v = draw((1, 1, 32, 8, n, 128, 128), "bfloat16")
        for name, kernel in KERNELS.items():
            f = jax.jit(functools.partial(attention, implementation=kernel))
            row = {"what": f"time, {n} keys", "kernel": name}
            try:
                f(q, k, v).block_until_ready()  # compiles
            except Exception as error:  # of one kernel; the others go on
                yield row | {"not run": f"{error!r:.160}"}
                continue
            calls, began = 2 if smoke else 50, time.perf_counter()
            for _ in range(calls):
                out = f(q, k, v)
            out.block_until_ready()
            seconds = (time.perf_counter() - began) / calls
            speed = (k.nbytes + v.nbytes) / seconds / 1e9
            yield row | {"µs": f"{1e6 * seconds:.1f}", "GB/s": f"{speed:.0f}"}


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    kind = jax.devices()[0].device_kind
    if not args.smoke and jax.default_backend() != "gpu":
        sys.exit(f"JAX finds no GPU here, its devices are {jax.devices()}")
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"gpu-{re.sub('[^a-z0-9]+', '-', kind.lower())}.md"
    wrong = 0
    with path.open("w", encoding="utf-8") as page:

        def tell(line: str):
            print(line, flush=True)
            print(line, file=page, flush=True)

        tell(f"# {kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}\n")
        if args.smoke:
            tell("A rehearsal with small sizes: its times say nothing.\n")
        for part in (correct, times):
            for row in part(args.smoke):
                tell("- " + ", ".join(f"{name}: {x}" for name, x in row.items()))
                wrong += row.get("ok") is False
        tell(f"\n{wrong} results are wrong.")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
