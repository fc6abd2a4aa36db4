"""What an H100 would be given to run, compiled without one: its kernels, and what they pass on.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc   # of jax's version; no driver
    python benchmarks/hopper_programs.py

XLA compiles for a described GPU as for a present one, NVIDIA's assembler included. That shows how
many kernels a call starts and what lies in global memory between them, how many a layer of a Llama
takes for a token or a tree of them, and registers and spills of the kernel in
examples/cluster_merge.py; not how long anything takes.
"""

import dataclasses
import functools
import os
import re
import sys
import tempfile
from pathlib import Path

DUMP = tempfile.mkdtemp()
os.environ |= {
    "JAX_PLATFORMS": "",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "MOSAIC_GPU_DUMP_TO": DUMP,
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_PTX": "1",
}
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import cluster_merge  # noqa: E402
from described_gpus import h100s  # noqa: E402
from described_programs import array, compiled, kernels, llama_step  # noqa: E402

import treeattn  # noqa: E402
from treeattn_llama import Config  # noqa: E402

# The sizes of SmolLM2-135M and of Llama 3.1 8B, but for the vocabulary.
SIZES = {
    "SmolLM2-135M": {"width": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp_width": 1536},
    "Llama 3.1 8B": {
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp_width": 14336,
    },
}
CAPACITY = 4096  # keys of a Llama's row
STEPS = (1, 1), (4, 1), (1, 8), (1, 64)  # rows, tokens of each


def attention_program(f, device, n: int, h: int = 32, h_kv: int = 8, d: int = 128):
    """The program of the attention by f of one query over n keys."""
    shapes = (1, 1, h, d), (1, n, h_kv, d), (1, n, h_kv, d)
    return compiled(f, *(array(device, *shape) for shape in shapes))


def row(name: str, program) -> str:
    """Its kernels, those after the one that reads the keys, and what that one writes."""
    lines = kernels(program)
    at = next(i for i, x in enumerate(lines) if " custom-call(" in x)
    written = re.findall(r"f32\[([\d,]+)\]", lines[at].split(" custom-call(")[0])
    size = sum(4 * functools.reduce(lambda a, b: a * int(b), x.split(","), 1) for x in written)
    return f"| {name} | {len(lines)} | {len(lines) - 1 - at} | {size / 1e3:.0f} |"


def kernels_of_a_layer(name: str, device, implementation: str, rows: int, tokens: int) -> int:
    """What a fourth layer adds to the kernels of three, without what writes the cache."""
    config = Config(
        vocabulary=1024,
        layers=1,
        context=CAPACITY,
        norm_epsilon=1e-5,
        rotary_base=1e5,
        tied=True,
        **SIZES[name],
    )

    def count(layers: int) -> int:
        deeper = dataclasses.replace(config, layers=layers)
        program = llama_step(deeper, device, rows, tokens, CAPACITY, implementation)
        return len(kernels(program))

    return count(4) - count(3)


def split_k(implementation: str):
    def f(q, k, v):
        return treeattn.attention(q, k, v, implementation=implementation)

    return f


def split_k_state(implementation: str):
    def f(q, k, v):
        return treeattn.finalize(treeattn.attend(q, k, v, implementation=implementation))[0]

    return f


def in_clusters(clusters: int):
    """The kernel of examples/cluster_merge.py, and what divides."""

    def f(q, k, v):
        return treeattn.finalize(cluster_merge.cluster_attend(q, k, v, clusters=clusters))[0]

    return f


def main() -> None:
    if why := cluster_merge.missing():
        print(why)
        return
    try:
        (device,) = h100s(1)
    except NotImplementedError as missing:
        print(missing)
        return
    fs = {
        "split-K": split_k("pallas"),
        "split-K, a state first": split_k_state("pallas"),
        "split-K by Mosaic": split_k("mosaic"),
        "split-K by Mosaic, a state first": split_k_state("mosaic"),
        "cluster of 8": in_clusters(1),
        "two clusters": in_clusters(2),
    }
    print("One query of 32 heads on 8 key heads of 128, in bfloat16.\n")
    print("| | kernels | of them after the keys' | kB of states |\n|---|---|---|---|")
    for n in (4096, 65536):
        for name, f in fs.items():
            print(row(f"{name}, {n:,} keys", attention_program(f, device, n)), flush=True)
    print("\nA layer of a Llama, without what writes the cache.\n")
    print("| | kernels, of one token | of four rows, a token each | of a tree of 8 | of 64 |")
    print("|---|---|---|---|---|")
    for name in SIZES:
        for by, title in (("pallas", name), ("mosaic", f"{name} by Mosaic")):
            counts = [kernels_of_a_layer(name, device, by, *step) for step in STEPS]
            print(f"| {title} | {' | '.join(map(str, counts))} |", flush=True)
    said = sorted(Path(DUMP).glob("*.ptxas"))[0].read_text("utf-8")
    print("\nptxas, for sm_90a:", ", ".join(re.findall(r"\d+ registers|\d+ bytes spill \w+", said)))
    reads = sorted(Path(DUMP).glob("*.ptx"))[0].read_text("utf-8").count("ld.shared::cluster")
    print("loads from other blocks' shared memory in the code, by each thread:", reads)


if __name__ == "__main__":
    main()
