"""On what do the bits of attention depend? `check_invariance`, asked of ours and of others.

python benchmarks/invariance.py                the table, half an hour
python benchmarks/invariance.py --write        also benchmarks/results/invariance.md
python benchmarks/invariance.py --only ring    rows with this in their names

4 heads of 64 on 2 key heads, float32 unless a row says otherwise. What decodes over devices runs on
4 simulated ones, and on 1, 2 and 8 for the column "devices". PyTorch is optional.
"""

import argparse
import datetime
import functools
import itertools
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import treeattn
from treeattn_conformance import AXES, Report, check_invariance

try:
    import torch
except ImportError:
    torch = None

DEVICES = (4, 1, 2, 8)  # the first is what the other columns are asked of
HALF = " bfloat16"  # in a row's name


def einsum(q, k, v):
    """NumPy's own loops."""
    s = np.einsum("blhd,bnhd->bhln", q, k) / np.float32(np.sqrt(q.shape[-1]))
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhln,bnhd->blhd", p / p.sum(-1, keepdims=True), v)


def matmul(q, k, v):
    """NumPy's BLAS."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    s = q @ k.swapaxes(2, 3) / np.float32(np.sqrt(q.shape[-1]))
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def with_heads(f: Callable) -> Callable:
    """f of as many key heads as query heads."""

    def g(q, k, v):
        k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return f(q, k, v)

    return g


def in_parts(run: Callable, merge: Callable, finish: Callable) -> Callable:
    """Attention by states: parts of the keys, and what is in flight, are states that merge."""
    run, merge, finish = (jax.jit(f) for f in (run, merge, finish))

    def f(q, k, v, *, kv_lengths=None, splits=None, in_flight=None):
        if in_flight:
            splits = (k.shape[1] - in_flight, in_flight)
        if not splits:
            return finish(run(q, k, v, kv_lengths=kv_lengths))
        ends = np.cumsum((0, *splits))
        parts = [(k[:, i:j], v[:, i:j]) for i, j in itertools.pairwise(ends)]
        return finish(functools.reduce(merge, [run(q, *part) for part in parts]))

    return f


def blockwise() -> Callable:
    run = functools.partial(treeattn.attend, implementation="blockwise")
    return in_parts(run, treeattn.merge, treeattn.finalize)


def exact() -> Callable:
    return in_parts(
        treeattn.attend_exact,
        lambda a, b: a.merge(b),
        lambda state: treeattn.finalize(state.rounded()),
    )


def over_devices(decode: Callable, **options) -> Mapping[int, Callable]:
    """`tree_decode` or `ring_decode`, for each number of devices."""

    def on(p: int) -> Callable:
        mesh = treeattn.kv_mesh(jax.devices()[:p])
        run = jax.jit(functools.partial(decode, mesh=mesh, axis="kv", return_lse=True, **options))

        def f(q, k, v, *, kv_lengths=None):
            return run(q, k, v, kv_lengths=kv_lengths)

        return f

    return {p: on(p) for p in DEVICES}


def in_powers_of_two(family: Mapping[int, Callable]) -> Mapping[int, Callable]:
    """For `block`, which needs them: keys that do not count fill up the memory."""

    def filled(f: Callable) -> Callable:
        def g(q, k, v, *, kv_lengths=None):
            n = k.shape[1]
            room = (0, 0), (0, max(1 << 13, 1 << (n - 1).bit_length()) - n), (0, 0), (0, 0)
            k, v = (np.pad(x, room) for x in (k, v))
            return f(q, k, v, kv_lengths=np.full(len(q), n) if kv_lengths is None else kv_lengths)

        return g

    return {p: filled(f) for p, f in family.items()}


def jax_nn(dtype: str) -> Callable:
    run = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="xla"))

    def f(q, k, v, *, kv_lengths=None):
        q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
        lengths = None if kv_lengths is None else np.int32(kv_lengths)
        return run(q, k, v, key_value_seq_lengths=lengths)

    return f


def sdpa(dtype: str) -> Callable:
    def f(q, k, v, *, kv_lengths=None):
        mask = None
        if kv_lengths is not None:
            mask = torch.from_numpy(np.arange(k.shape[1]) < np.reshape(kv_lengths, (-1, 1, 1, 1)))
        q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2) for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).float().numpy()  # NumPy has no bfloat16; bits stay apart

    return f


def contestants() -> dict[str, Callable | Mapping[int, Callable]]:
    decode = functools.partial(over_devices, treeattn.tree_decode)
    found = {
        "NumPy, einsum": with_heads(einsum),
        "NumPy, matmul": with_heads(matmul),
        "`jax.nn.dot_product_attention`": jax_nn("float32"),
        f"`jax.nn.dot_product_attention`,{HALF}": jax_nn("bfloat16"),
        '`attend`, "blockwise"': blockwise(),
        '`attend`, "exact"': exact(),
    }
    if torch is not None:
        found |= {
            "PyTorch SDPA": sdpa("float32"),
            f"PyTorch SDPA,{HALF}": sdpa("bfloat16"),
        }
    for method in ("allreduce", "butterfly", "gather", "reduce_scatter", "all_to_all", "exact"):
        found[f'`tree_decode`, "{method}"'] = decode(method=method)
    blocks = decode(method="butterfly", block=256)
    found['`tree_decode`, "butterfly", block=256'] = in_powers_of_two(blocks)
    found["`ring_decode`"] = over_devices(treeattn.ring_decode)
    return found


def cells(report: Report) -> list[str]:
    """For each axis: the largest share of elements that differ, and the largest difference."""
    said = {"passed": "same", "skipped": "–", "failed": "error"}
    words = {x.case: said[x.status] for x in report.results}
    for result in report.results:
        if result.difference:
            share = 100 * result.difference.share
            words[result.case] = f"{share:.2g} %, {result.difference.largest:.0e}"
    return [words.get(axis, "–") for axis in AXES]


def asked(name: str, f: Callable | Mapping[int, Callable]) -> Report:
    """Over devices, and exactly, fewer sizes: every shape is a program, and slow to compile."""
    options = {"dtype": "bfloat16"} if HALF in name else {}
    if isinstance(f, Mapping) or "exact" in name:
        options |= {"keys": (4099,), "batches": (1, 2, 8), "queries": (1, 2, 8, 33)}
    return check_invariance(f, **options)


def machine() -> str:
    packages = ["jax", "numpy"] + (["torch"] if torch is not None else [])
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    treeattn.simulate_devices(max(DEVICES))
    rows = {name: f for name, f in contestants().items() if args.only in name}
    lines = [
        f"On what the bits depend: {machine()}. 4 heads of 64 on 2 key heads. In each cell the",
        "largest share of the elements of an answer that differ, and the largest difference; the",
        "outputs are about 0.1, and lse, where it is returned, about 8. Decoding over devices, and",
        "the exact sums, are asked at 4,099 keys, in batches of 1, 2 and 8, with 1 to 33 queries;",
        "on 4 devices, but for that column.",
        "",
        "| | " + " | ".join(AXES) + " |",
        "|---" * (len(AXES) + 1) + "|",
    ]
    for name, f in tqdm(rows.items(), unit="function"):
        report = asked(name, f)
        print(f"\n{name}\n{report}", file=sys.stderr, flush=True)
        lines.append(f"| {name} | " + " | ".join(cells(report)) + " |")
        jax.clear_caches()
    print("\n".join(lines))
    if args.write:
        path = Path(__file__).parent / "results" / "invariance.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
