"""Collectives between real processes of this machine, and what a model makes of them.

    python benchmarks/collectives.py                 2 and 4 processes; a few minutes
    python benchmarks/collectives.py --write         also store benchmarks/results/collectives.md

Each process has one CPU device; they talk over gloo, by TCP on the loopback. For each collective
a time of the form α + β · bytes is fitted twice: to messages that stay in the processors' caches,
and to larger ones. The fits predict messages that they have not seen, and `tree_decode`: as the
time of the same attention and arithmetic with a collective of one number behind it (processes wait
for each other's computing, too), and for each operand of the collectives that the compiled program
has, what a message of its size takes more than an empty one. gloo sends operands one by one, also
where the program has joined them. All processes start a call together; of 60 calls the fastest
counts, on the process that takes longest.
"""

import argparse
import functools
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from labs.cost import fit_ranges

SMALL = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)  # fitted
LARGE = (1 << 19, 1 << 20, 1 << 21)  # fitted apart
UNSEEN = (1 << 15, 1 << 17, 1 << 22, 1 << 23)  # predicted
KINDS = ("all-reduce", "all-gather", "collective-permute")
METHODS = {"allreduce": "all-reduce", "butterfly": "collective-permute", "gather": "all-gather"}
BATCHES = (16, 64)  # sequences of 64 keys, 16 heads of 128: states of 8 kB each
REPEATS = 60  # calls, of which the fastest counts: what else runs here only adds to a time
RESULT = Path(__file__).parent / "results" / "collectives.md"


def floats(shape: str) -> int:
    """The bytes of an operand such as "f32[16,1,16,128]"."""
    return 4 * math.prod(int(n) for n in re.findall(r"\d+", shape.removeprefix("f32")))


def measure(rank: int, processes: int, address: str) -> dict:
    """On one process: seconds of every collective and size, and of every way to decode."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import treeattn
    from labs.cost import Group, collectives, fastest_seconds, measure_collectives

    treeattn.simulate_devices(1)
    treeattn.initialize(address, processes, rank)
    mesh = treeattn.kv_mesh()
    ring = [(i, (i + 1) % processes) for i in range(processes)]
    fastest = functools.partial(fastest_seconds, mesh=mesh, repeats=REPEATS)

    def place(shape, spec):
        rng = np.random.default_rng(0)
        whole = rng.normal(size=shape).astype(np.float32)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), whole.__getitem__)

    def one(kind, x):
        if kind == "all-reduce":
            return jax.lax.psum(x, "kv")
        if kind == "all-gather":
            return jax.lax.all_gather(x, "kv")
        return jax.lax.ppermute(x, "kv", ring)

    sizes = (*SMALL, *LARGE, *UNSEEN)
    found = measure_collectives(Group(processes), kinds=KINDS, sizes=sizes, repeats=REPEATS)

    decode = []
    rounds = math.ceil(math.log2(processes))
    merges = {"all-reduce": 1, "collective-permute": rounds, "all-gather": processes - 1}
    for batch in BATCHES:
        q = place((batch, 1, 16, 128), P())
        k, v = (place((batch, 64, 4, 128), P(None, "kv")) for _ in "kv")

        def local(kind, q, k, v):
            """What a device computes, with a collective of one number."""
            state = treeattn.attend(q, k, v)
            for _ in range(merges[kind]):  # with a state of this size, without sending it
                state = treeattn.merge(state, jax.lax.optimization_barrier(state))
            out, lse = treeattn.finalize(state)
            return out, one(kind, lse[:1, 0, :1])

        specs = dict(in_specs=(P(), P(None, "kv"), P(None, "kv")), out_specs=P("kv"))
        for method, kind in METHODS.items():
            alone = functools.partial(local, kind)
            alone = fastest(
                jax.jit(jax.shard_map(alone, mesh=mesh, check_vma=False, **specs)), q, k, v
            )
            program = jax.jit(
                lambda q, k, v, m=method: treeattn.tree_decode(
                    q, k, v, mesh=mesh, axis="kv", method=m
                )
            )
            listed = collectives(program.lower(q, k, v).compile())
            sent = [(c.kind, c.count, [floats(shape) for shape in c.shapes]) for c in listed]
            decode.append((batch, method, alone, fastest(program, q, k, v), sent))
    jnp.zeros(())  # the backend lives until here
    return {"found": found, "decode": decode}


def start(processes: int) -> dict:
    """Run `measure` on so many processes; the first one's answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--rank"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [*command, str(rank), str(processes), address],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"processes: one of {processes} failed")
    return json.loads(outputs[0].splitlines()[-1])


def fit(times: dict[str, float], sizes) -> tuple[float, float]:
    """α and β of α + β · bytes for these sizes."""
    (line,) = fit_ranges({size: times[str(size)] for size in sizes})
    return line.latency, line.seconds_per_byte


def predicted(models, size: int) -> float:
    """Seconds of a message, by the fit of its sizes: they part halfway between 256 and 512 KiB."""
    alpha, beta = models[size > SMALL[-1] * 1.5]
    return alpha + beta * size


def bytes_(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def report(results: dict[int, dict]) -> str:
    """The tables, in Markdown."""
    lines = [
        "# Collectives between processes of one machine",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {os.cpu_count()} cores "
        f"({platform.machine()}), one CPU device a process, gloo over the loopback. Of {REPEATS} "
        f"calls the fastest, on the process that takes longest. Load average before and after: "
        f"{results['load']}.",
    ]
    if results["busy"]:
        lines += [
            "",
            "The load is above the number of cores: other programs took part of both, and whoever "
            "waits for another process waits for those. Repeat it on a quiet machine before the "
            "ratios are taken for the model's.",
        ]
    for processes, result in ((n, results[n]) for n in results if isinstance(n, int)):
        found = result["found"]
        models = {}
        lines += ["", f"## {processes} processes", ""]
        head = " | ".join(f"{bytes_(size)}: measured, predicted, ratio" for size in UNSEEN)
        lines += [f"| collective | α, µs | 1/β, GB/s | α, large | 1/β, large | {head} |"]
        lines += ["|---" * (5 + len(UNSEEN)) + "|"]
        for kind in KINDS:
            models[kind] = [fit(found[kind], sizes) for sizes in (SMALL, LARGE)]
            row = [kind]
            for alpha, beta in models[kind]:
                row += [f"{1e6 * alpha:.0f}", f"{1e-9 / beta:.2f}" if beta else "–"]
            for size in UNSEEN:
                seen = found[kind][str(size)]
                said = predicted(models[kind], size)
                row.append(f"{1e3 * seen:.2f} ms, {1e3 * said:.2f} ms, {said / seen:.2f}")
            lines.append("| " + " | ".join(row) + " |")
        lines += ["", "| batch | tree_decode by | computing | measured | predicted | ratio |"]
        lines += ["|---|---|---|---|---|---|"]
        for batch, method, alone, seen, sent in result["decode"]:
            empty = predicted(models[METHODS[method]], 4)
            said = (
                alone
                - empty
                + sum(
                    count * sum(predicted(models[kind], size) for size in operands)
                    for kind, count, operands in sent
                )
            )
            lines.append(
                f"| {batch} | {method} | {1e3 * alone:.2f} ms | {1e3 * seen:.2f} ms "
                f"| {1e3 * said:.2f} ms | {said / seen:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"store {RESULT.name}")
    args = parser.parse_args()
    if args.rank:
        rank, processes, address = args.rank
        print(json.dumps(measure(int(rank), int(processes), address)), flush=True)
        return
    before = os.getloadavg()[0]
    results = {n: start(n) for n in (2, 4)}
    results["busy"] = before > os.cpu_count()
    results["load"] = f"{before:.1f} and {os.getloadavg()[0]:.1f}"
    text = report(results)
    print(text)
    if args.write:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
