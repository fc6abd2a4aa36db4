"""Tree decoding (each method) beside a ring and gathering the cache, on simulated devices.

python benchmarks/decode.py                      p = 2, 4, 8 and 32k to 512k keys, about 7 minutes
python benchmarks/decode.py --processes 2        the same calls over real processes (gloo), and
                                                 ring-attention-pytorch's tree, if installed
python benchmarks/decode.py --write              also into benchmarks/results

Two calls of each contestant in turn, of which the second counts; medians. The devices share this
machine's cores, so the *ratios* show work and bytes, not a cluster: in a ring every device attends
to all p shards, and here they do so on the same cores. Bytes and memory are those of the compiled
program, exactly.
"""

import argparse
import functools
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machine import machine
from tqdm import tqdm

import treeattn

RESULTS = Path(__file__).parent / "results"
HEADS = 16
KV_HEADS = 4
DIM = 128
BUDGET = 12e9  # bytes that all simulated devices may hold together


def gather_decode(q, k, v, *, sharding):
    """Every device collects the whole cache and attends to it alone."""

    def body(q, k, v):
        k, v = (jax.lax.all_gather(x, "kv", axis=1, tiled=True) for x in (k, v))
        return treeattn.attention(q, k, v)

    specs = {"in_specs": (P(), sharding.spec, sharding.spec), "out_specs": P()}
    return jax.shard_map(body, mesh=sharding.mesh, check_vma=False, **specs)(q, k, v)


CONTESTANTS = {
    f"tree, {method}": functools.partial(treeattn.tree_decode, method=method)
    for method in treeattn.METHODS
}
CONTESTANTS |= {"ring": treeattn.ring_decode, "gather the cache": gather_decode}


def inputs(mesh, kv_len: int):
    """A query on every device, and a cache sharded over them; the same numbers everywhere."""
    cache = NamedSharding(mesh, P(None, "kv"))

    def shard(index):
        start = index[1].start or 0
        rows = (index[1].stop or kv_len) - start
        rng = np.random.default_rng(start)
        return rng.standard_normal((1, rows, KV_HEADS, DIM), dtype=np.float32)

    shape = (1, kv_len, KV_HEADS, DIM)
    k, v = (jax.make_array_from_callback(shape, cache, shard) for _ in "kv")
    return np.ones((1, 1, HEADS, DIM), np.float32), k, v


def torch_tree(address: str, processes: int, rank: int):
    """kv_len -> a call of ring-attention-pytorch's tree decoding over gloo; None without it.

    It knows no grouped heads, and gets the key heads repeated.
    """
    try:
        import torch
        from ring_attention_pytorch import tree_attn_decode
    except ImportError as missing:
        if rank == 0:
            print(f"without ring-attention-pytorch: {missing}")
        return None
    host, port = address.split(":")
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{host}:{int(port) + 1}", world_size=processes, rank=rank
    )

    def prepare(kv_len: int):
        q = torch.ones(1, HEADS, 1, DIM)
        k, v = (torch.randn(1, HEADS, kv_len // processes, DIM) for _ in "kv")
        return lambda: tree_attn_decode(q, k, v, shard_kv_seq=False)

    return prepare


def measure(mesh, kv_len: int, rounds: int, others: dict | None = None) -> list[dict]:
    """A row a contestant: milliseconds, and the bytes that a device puts in, sends and holds.

    others: name -> a call without arguments, timed in turn with ours.
    """
    arguments = inputs(mesh, kv_len)
    sharding = arguments[1].sharding
    p = mesh.devices.size
    rows = []
    calls = {}
    for name, decode in CONTESTANTS.items():
        program = jax.jit(functools.partial(decode, sharding=sharding)).lower(*arguments).compile()
        held = treeattn.memory(program).held_bytes
        row = {"name": name, "p": p, "keys": kv_len, "ms": None, "held": held}
        found = treeattn.collectives(program)
        row["put in"] = sum(c.total_bytes for c in found)
        row["sent"] = sum(c.sent_bytes for c in found)
        rows.append(row)
        if held * p <= BUDGET:
            calls[name] = functools.partial(program, *arguments)
    for name, call in (others or {}).items():
        sizes = dict.fromkeys(("held", "put in", "sent"))
        rows.append({"name": name, "p": p, "keys": kv_len, "ms": None} | sizes)
        calls[name] = call
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            # Not timed: while it runs, what the contestant before held is given back, which
            # takes longer than a step when that was a copy of the whole cache for each device.
            jax.block_until_ready(call())
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(1e3 * (time.perf_counter() - start))
    for row in rows:
        if row["name"] in times:
            row["ms"] = statistics.median(times[row["name"]])
    return rows


def table(rows: list[dict]) -> list[str]:
    """Markdown: a line a measurement, its time also relative to the tree by Allreduce."""
    lines = ["| p | keys | method | ms | × tree | put in | sent by a device | held by a device |"]
    lines.append("|---" * 8 + "|")
    for row in rows:
        same = (r for r in rows if (r["p"], r["keys"]) == (row["p"], row["keys"]))
        tree = next(same)["ms"]
        if row["ms"] is None:
            times = "not run: too large", "–"
        else:
            times = f"{row['ms']:.1f}", f"{row['ms'] / tree:.1f}"
        sizes = ("–",) * 3
        if row["sent"] is not None:
            held = f"{row['held'] / 2**20:.1f} MiB"
            sizes = f"{row['put in']:,} B", f"{row['sent']:,} B", held
        cells = (str(row["p"]), f"{row['keys'] // 1024}k", row["name"], *times, *sizes)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(rows: list[dict], where: str, file: str | None) -> None:
    """Print the table, and write it into benchmarks/results."""
    lines = [
        f"One query, {HEADS} heads of {DIM} over {KV_HEADS} key heads, float32; medians in turn on "
        f"{where}. Put in: what a device hands to collectives; sent: what it must send at least, "
        f"on average over the devices. Held: its arguments and temporaries. {machine('jax')}.",
        "",
        *table(rows),
    ]
    print("\n".join(lines))
    if file:
        (RESULTS / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_rank(
    address: str, processes: int, rank: int, keys: list[int], rounds: int, write: bool
) -> None:
    """One real process; the first prints the table."""
    treeattn.simulate_devices(1)
    treeattn.initialize(address, processes, rank)
    mesh = treeattn.kv_mesh()
    prepare = torch_tree(address, processes, rank)
    rows = []
    for n in keys:
        others = {"PyTorch tree": prepare(n)} if prepare else None
        rows += measure(mesh, n, rounds, others)
    if rank == 0:
        report(rows, f"{processes} processes (gloo)", "decode_processes.md" if write else None)


def start_processes(count: int) -> int:
    """This script again, once a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv, "--rank", f"{address} {rank}"])
        for rank in range(count)
    ]
    return max(rank.wait() for rank in ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--keys", type=int, nargs="+", default=[2**15, 2**17, 2**19])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, help="real processes in place of devices")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="also into benchmarks/results")
    args = parser.parse_args()
    if args.rank:
        address, rank = args.rank.split()
        run_rank(address, args.processes, int(rank), args.keys, args.rounds, args.write)
        return 0
    if args.processes:
        return start_processes(args.processes)

    treeattn.simulate_devices(max(args.devices))
    rows = []
    for p, n in tqdm([(p, n) for p in args.devices for n in args.keys], unit="case"):
        rows += measure(treeattn.kv_mesh(jax.devices()[:p]), n, args.rounds)
    report(rows, "simulated devices", "decode.md" if args.write else None)
    if args.write:  # for `python -m figures figures decode_ratios`
        text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
        (RESULTS / "decode.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
