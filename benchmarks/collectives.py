"""Collectives between real processes of this machine, and what a model makes of them.

    python benchmarks/collectives.py                 2 and 4 processes; a few minutes
    python benchmarks/collectives.py --write         also store benchmarks/results/collectives.md

Each process has one CPU device; they talk over gloo, by TCP on the loopback. For each collective
a time of the form α + β · bytes is fitted to small messages. It predicts larger messages, and
`tree_decode`, as the time of the same attention without a collective and the fitted times of the
collectives that the compiled program has. All processes start a call together; of 60 calls the
fastest counts, on the process that takes longest.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SMALL = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)  # fitted
LARGE = (1 << 20, 1 << 22)  # predicted
KINDS = {"all-reduce": "psum", "all-gather": "all_gather", "collective-permute": "ppermute"}
METHODS = ("allreduce", "butterfly", "gather")
BATCHES = (16, 64)  # sequences of 64 keys, 16 heads of 128: states of 8 kB each
REPEATS = 60  # calls, of which the fastest counts: what else runs here only adds to a time
RESULT = Path(__file__).parent / "results" / "collectives.md"


def measure(rank: int, processes: int, address: str) -> dict:
    """On one process: seconds of every collective and size, and of every way to decode."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import treeattn
    from treeattn.cost.program import collectives

    treeattn.simulate_devices(1)
    treeattn.initialize(address, processes, rank)
    mesh = treeattn.kv_mesh()
    ring = [(i, (i + 1) % processes) for i in range(processes)]
    gather = jax.jit(
        jax.shard_map(lambda x: jax.lax.pmax(x, "kv"), mesh=mesh, in_specs=P("kv"), out_specs=P())
    )

    def place(shape, spec, fill=None):
        rng = np.random.default_rng(0)
        whole = rng.normal(size=shape).astype(np.float32)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), whole.__getitem__)

    together = place((processes,), P("kv"))

    def fastest(program, *arguments) -> float:
        times = []
        for _ in range(REPEATS + 3):
            jax.block_until_ready(gather(together))  # start together
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times.append(time.perf_counter() - start)
        slowest = gather(place_local(np.min(times[3:])))
        return float(np.asarray(slowest.addressable_shards[0].data)[0])

    def place_local(value: float):
        return jax.make_array_from_callback(
            (processes,), NamedSharding(mesh, P("kv")), lambda _: np.array([value], np.float32)
        )

    def one(kind, x):
        if kind == "all-reduce":
            return jax.lax.psum(x, "kv")
        if kind == "all-gather":
            return jax.lax.all_gather(x, "kv")
        return jax.lax.ppermute(x, "kv", ring)

    found = {"nothing": {}, **{kind: {} for kind in KINDS}}
    for size in (*SMALL, *LARGE):
        x = place((processes, size // 4), P("kv"))
        for kind in found:
            program = jax.jit(
                jax.shard_map(
                    lambda x, kind=kind: x + 1.0 if kind == "nothing" else one(kind, x),
                    mesh=mesh, in_specs=P("kv"), out_specs=P("kv"), check_vma=False,
                )
            )  # fmt: skip
            found[kind][size] = fastest(program, x)

    decode = []
    for batch in BATCHES:
        q = place((batch, 1, 16, 128), P())
        k, v = (place((batch, 64, 4, 128), P(None, "kv")) for _ in "kv")

        def local(q, k, v):
            return treeattn.finalize(treeattn.attend(q, k, v))[0]

        specs = dict(in_specs=(P(), P(None, "kv"), P(None, "kv")), out_specs=P("kv"))
        alone = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))
        attend = fastest(alone, q, k, v)
        for method in METHODS:
            program = jax.jit(
                lambda q, k, v, m=method: treeattn.tree_decode(
                    q, k, v, mesh=mesh, axis="kv", method=m
                )
            )
            listed = collectives(program.lower(q, k, v).compile())
            sent = [(c.kind, c.count, c.operand_bytes) for c in listed]
            decode.append((batch, method, attend, fastest(program, q, k, v), sent))
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
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=900)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"processes: one of {processes} failed")
    return json.loads(outputs[0].splitlines()[-1])


def fit(times: dict[str, float], sizes) -> tuple[float, float]:
    """α and β of α + β · bytes, by least squares of relative errors, neither negative."""
    x, y = np.array(sizes, float), np.array([times[str(size)] for size in sizes])
    a = np.stack([1 / y, x / y], axis=1)
    alpha, beta = np.linalg.lstsq(a, np.ones(len(y)), rcond=None)[0]
    return max(float(alpha), 0.0), max(float(beta), 0.0)


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
        found, models = result["found"], {}
        lines += ["", f"## {processes} processes", ""]
        lines += ["| collective | α, µs | 1/β, GB/s | largest miss, fitted sizes | " + " | ".join(
            f"{size >> 20} MiB: measured, predicted, ratio" for size in LARGE) + " |"]  # fmt: skip
        lines += ["|---" * (4 + len(LARGE)) + "|"]
        for kind in KINDS:
            alpha, beta = models[kind] = fit(found[kind], SMALL)
            misses = [abs((alpha + beta * s) / found[kind][str(s)] - 1) for s in SMALL]
            row = [kind, f"{1e6 * alpha:.0f}", f"{1e-9 / beta:.2f}" if beta else "–"]
            row.append(f"{100 * max(misses):.0f} %")
            for size in LARGE:
                seen, said = found[kind][str(size)], alpha + beta * size
                row.append(f"{1e3 * seen:.2f} ms, {1e3 * said:.2f} ms, {said / seen:.2f}")
            lines.append("| " + " | ".join(row) + " |")
        empty = np.median([found["nothing"][str(s)] for s in SMALL])
        lines += ["", f"A program without a collective takes {1e6 * empty:.0f} µs to call; a call "
                  "with several pays that once.", ""]  # fmt: skip
        lines += ["| batch | tree_decode by | attention alone | measured | predicted | ratio |"]
        lines += ["|---|---|---|---|---|---|"]
        for batch, method, attend, seen, sent in result["decode"]:
            said = attend
            for kind, count, size in sent:
                alpha, beta = models[kind]
                said += count * (max(alpha - empty, 0.0) + beta * size)
            lines.append(
                f"| {batch} | {method} | {1e3 * attend:.2f} ms | {1e3 * seen:.2f} ms "
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
