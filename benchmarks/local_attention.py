"""One query against a long cache on a CPU: `treeattn.attention` beside PyTorch and `jax.nn`.

python benchmarks/local_attention.py               8k to 64k keys, about 15 minutes
python benchmarks/local_attention.py --write       also benchmarks/results/local_attention.md

16 heads of 128, on as many key heads and on 4, and the packaged Llama's 9 heads of 64 on 3. Each
peer is called in every way that its users recommend for one query (see `pytorch_calls`), on keys in
treeattn's layout (batch, keys, heads, head_dim) and in PyTorch's own, with the heads before the
keys. Each call runs twice, and the second run counts, in turn with all others; the table gives the
fastest way of each. Needs PyTorch and a C++ compiler.
"""

import argparse
import functools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from machine import machine
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

import treeattn

SHAPES = {  # heads, key heads, head_dim
    "MHA": (16, 16, 128),
    "GQA-4": (16, 4, 128),
    "SmolLM2": (9, 3, 64),
}
KEYS = {"MHA": (1 << 14, 1 << 16), "GQA-4": (1 << 14, 1 << 16), "SmolLM2": (1 << 13, 1 << 16)}
DTYPES = {"float32": 1e-4, "bfloat16": 1e-2}  # and the tolerated error, see check_values
OURS, JAX, READING = "treeattn", "jax.nn", "reading it all"
LAYOUTS = "(b, n, h, d)", "(b, h, n, d)"
FUNCTIONS, WRITTEN = "functions, ", "sums, "  # PyTorch's attention functions, and none of them
FUSED = {  # a product and a sum in one step, and up to 64 sums in one loop
    "cpp.enable_floating_point_contract_flag": "fast",
    "cpp.max_horizontal_fusion_size": 64,
}


def contestants(n: int, shape: tuple, dtype: str, pool: ThreadPoolExecutor) -> dict:
    """(name, way) -> a call without arguments that returns when its result is there."""
    rng = np.random.default_rng(0)
    heads, kv_heads, d = shape
    q = rng.normal(size=(1, 1, heads, d)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, n, kv_heads, d)).astype(np.float32)
    jq, jk, jv = (jnp.asarray(x, dtype) for x in (q, k, v))
    ours = jax.jit(treeattn.attention)
    theirs = jax.jit(jax.nn.dot_product_attention)
    parts = np.array_split(np.ones(jk.nbytes * 2 // 4, np.float32), os.cpu_count())
    calls = {
        (OURS, ""): lambda: jax.block_until_ready(ours(jq, jk, jv)),
        (JAX, ""): lambda: jax.block_until_ready(theirs(jq, jk, jv)),
        (READING, ""): lambda: list(pool.map(np.max, parts)),  # as fast as NumPy reads memory
    }
    return calls | pytorch_calls(q, k, v, dtype)


def pytorch_calls(q, k, v, dtype: str) -> dict:
    """(peer, way) -> a call of PyTorch's; the peers' names end with the layout of the keys.

    SDPA: `scaled_dot_product_attention`, the queries of a key head as rows of one head
    MATH rows: the same function by its backend MATH, on one of those rows at a time, compiled
    flex: `flex_attention`, compiled
    sums: no attention function, but `by_lines`, compiled ahead of time

    Other ways that were tried are on benchmarks/README.md.
    """
    # A copy, because PyTorch's own memory begins at a line of the processor's cache.
    given = (torch.from_numpy(x).to(getattr(torch, dtype), copy=True) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in given)
    heads, kv_heads = q.shape[1], k.shape[1]
    rows = q.reshape(1, kv_heads, heads // kv_heads, -1)
    in_float32 = rows.float()  # inside a compiled function they would be converted for each key
    torch.compiler.reset()
    flex, math = (torch.compile(x, dynamic=False) for x in (flex_attention, by_math))

    calls = {}
    for layout, keys in zip(LAYOUTS, ((k, v), (k.contiguous(), v.contiguous())), strict=True):
        functions, written = FUNCTIONS + layout, WRITTEN + layout
        calls[functions, "SDPA"] = functools.partial(scaled_dot_product_attention, rows, *keys)
        calls[functions, "MATH rows"] = functools.partial(math, in_float32, *keys)
        calls[functions, "flex"] = functools.partial(flex, q, *keys, enable_gqa=kv_heads != heads)
        calls[written, ""] = ahead_of_time(by_lines, in_float32[0], *keys)
    return calls


def by_math(q, k, v):
    """Attention by products, to be compiled, of one row of queries at a time.

    q (1, kv_heads, rows, d) in float32, keys and values (1, kv_heads, n, d)
    """
    with sdpa_kernel(SDPBackend.MATH):
        k, v = k.float(), v.float()
        return torch.cat([scaled_dot_product_attention(x, k, v) for x in q.split(1, 2)], 2)


def by_lines(q, k, v):
    """Attention by sums, to be compiled: its loops run in the order of the keys' memory.

    Values are added up over a block of keys first, in pieces of 64 bytes, a line of the processor's
    cache. Inductor fuses the sums of all pieces and rows into a loop that reads each value once.

    q (kv_heads, rows, d) in float32, keys and values (1, kv_heads, n, d) -> (kv_heads, rows, d)
    """
    dim = 0 if k.stride(1) < k.stride(2) else 1  # where the keys are, in k
    block = min(1024, k.shape[2] // 32) if dim == 0 else 256
    pieces = v.shape[-1] * v.itemsize // 64
    k, v = (x[0].movedim(1, dim).float() for x in (k, v))
    s = torch.stack([(x.unsqueeze(dim) * k).sum(-1) for x in q.unbind(1)], 1) * q.shape[-1] ** -0.5
    if dim == 0:  # 16 keys at a time: with all their heads they fill vectors
        # `expand` and `amax` store the maxima 16 times: after `repeat`, exp is not vectorized.
        s = s.unflatten(0, (32, -1, 16))
        p = torch.exp(s - s.amax(1).amax(0).expand(16, 16, -1, -1).amax(1))
        total = p.sum(1).sum(0).sum(0).T
        p = p.flatten(0, 2)
    else:
        p = torch.exp(s - s.amax(-1, keepdim=True))
        total = p.sum(-1)
    weights = [w.unflatten(dim, (-1, block))[..., None] for w in p.unbind(1)]
    values = v.unflatten(dim, (-1, block)).chunk(pieces, -1)
    parts = torch.stack([(w * x).sum(dim + 1) for w in weights for x in values], 2).flatten(2)
    result = parts.unflatten(dim, (32, -1)).sum(dim + 1).sum(dim)
    return result.view(q.shape) / total[..., None]


def ahead_of_time(function, *args):
    """function(*args) as a compiled program, called without Dynamo's checks of its arguments."""

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    exported = torch.export.export(Module(), args)
    path = torch._inductor.aoti_compile_and_package(exported, inductor_configs=FUSED)
    return functools.partial(torch._inductor.aoti_load_package(path), *args)


def check_values(calls: dict, tolerance: float) -> None:
    """Raises AssertionError where a peer's result differs from treeattn's by more than `tolerance`,
    relative to the largest value."""
    ours = torch.from_dlpack(calls[OURS, ""]()).flatten()
    for name, call in calls.items():
        if name[0] != READING:
            error = (torch.from_dlpack(call()).flatten() - ours).abs().max() / ours.abs().max()
            assert error < tolerance, (name, error)


def time_in_turn(calls: dict, rounds: int) -> dict[tuple, tuple[float, float]]:
    """Of each call, the median milliseconds of the clock and of the processor.

    A pause before each call lets the threads of the one before fall asleep.
    """
    times = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first one compiles
        for name, call in calls.items():
            time.sleep(0.02)
            call()
            start = time.perf_counter(), time.process_time()
            call()
            took = time.perf_counter() - start[0], time.process_time() - start[1]
            if turn:
                times[name].append(took)
    return {
        name: tuple(1e3 * statistics.median(column) for column in zip(*values, strict=True))
        for name, values in times.items()
    }


PEERS = [kind + layout for kind in (FUNCTIONS, WRITTEN) for layout in LAYOUTS] + [JAX]
HEAD = ["case", "ms", *PEERS, "read rate"]
EXPLAINED = """`ms`: a call of treeattn, by the clock. Then each peer's time over ours, so above 1
treeattn is ahead: by the clock, in brackets by the processor (both cores). `functions`: PyTorch's
attention functions on keys in that layout, with the name of the fastest one; `sums`: attention
written as sums in PyTorch, compiled. `read rate`: NumPy's time to read the same bytes, over
treeattn's."""


def row(case: str, times: dict[tuple, tuple[float, float]]) -> str:
    """A line of the table: ours in milliseconds, and the others' times over ours."""
    ours = times[OURS, ""]
    cells = [case, f"{ours[0]:.1f}"]
    for peer in PEERS:
        ways = {way: t for (name, way), t in times.items() if name == peer}
        best = min(ways, key=ways.get)
        clock, processor = (x / y for x, y in zip(ways[best], ours, strict=True))
        cells.append(f"{clock:.2f} ({processor:.2f}) {best}".strip())
    cells.append(f"{times[READING, ''][0] / ours[0]:.0%}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    shapes = "16 heads of 128, SmolLM2 9 heads of 64 on 3"
    about = machine("jax", "numpy", "torch")
    lines = [f"One query, {shapes}. {about}.", "", EXPLAINED, ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    pool = ThreadPoolExecutor(os.cpu_count())
    cases = [(x, n, t) for x in SHAPES for n in KEYS[x] for t in DTYPES]
    for name, n, dtype in tqdm(cases, unit="case"):
        calls = contestants(n, SHAPES[name], dtype, pool)
        check_values(calls, DTYPES[dtype])
        times = time_in_turn(calls, args.rounds)
        lines.append(row(f"{n // 1024}k, {name}, {dtype}", times))
    print("\n".join(lines))
    if args.write:
        path = Path(__file__).parent / "results" / "local_attention.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
