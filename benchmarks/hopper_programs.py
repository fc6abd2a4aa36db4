"""What an H100 would be given to run, compiled without one: its kernels, and what they pass on.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc   # of jax's version; no driver
    python benchmarks/hopper_programs.py

XLA compiles for a described GPU as for a present one, NVIDIA's assembler included. That shows how
many kernels a call starts and what lies in global memory between them, registers and spills of the
kernel in examples/cluster_merge.py; not how long anything takes.
"""

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
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from described_gpus import h100s  # noqa: E402

import treeattn  # noqa: E402


def compiled(f, device, n: int, h: int = 32, h_kv: int = 8, d: int = 128):
    """The program of the attention by f of one query over n keys."""
    on = jax.sharding.SingleDeviceSharding(device)
    shapes = (1, 1, h, d), (1, n, h_kv, d), (1, n, h_kv, d)
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=on) for x in shapes]
    about = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    one = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(one,), abstract_device=about)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(lambda *x: treeattn.finalize(f(*x))[0]).trace(*arrays)
        return traced.lower().compile()


def row(name: str, program) -> str:
    """Its kernels, those after the one that reads the keys, and what that one writes."""
    entry = program.as_text().split("\nENTRY ")[1].split("\n}")[0]
    lines = [x for x in entry.splitlines() if re.search(r" (fusion|custom-call|copy)\(", x)]
    at = next(i for i, x in enumerate(lines) if " custom-call(" in x)
    written = re.findall(r"f32\[([\d,]+)\]", lines[at].split(" custom-call(")[0])
    size = sum(4 * functools.reduce(lambda a, b: a * int(b), x.split(","), 1) for x in written)
    return f"| {name} | {len(lines)} | {len(lines) - 1 - at} | {size / 1e3:.0f} |"


def main() -> None:
    if why := cluster_merge.missing():
        print(why)
        return
    try:
        (device,) = h100s(1)
    except NotImplementedError as missing:
        print(missing)
        return
    split = functools.partial(treeattn.attend, implementation="pallas")
    two = functools.partial(cluster_merge.cluster_attend, clusters=2)
    fs = {"split-K": split, "cluster of 8": cluster_merge.cluster_attend, "two clusters": two}
    print("One query of 32 heads on 8 key heads of 128, in bfloat16.\n")
    print("| | kernels | of them after the keys' | kB of states |\n|---|---|---|---|")
    for n in (4096, 65536):
        for name, f in fs.items():
            print(row(f"{name}, {n:,} keys", compiled(f, device, n)), flush=True)
    said = sorted(Path(DUMP).glob("*.ptxas"))[0].read_text("utf-8")
    print("\nptxas, for sm_90a:", ", ".join(re.findall(r"\d+ registers|\d+ bytes spill \w+", said)))
    reads = sorted(Path(DUMP).glob("*.ptx"))[0].read_text("utf-8").count("ld.shared::cluster")
    print("loads from other blocks' shared memory in the code, by each thread:", reads)


if __name__ == "__main__":
    main()
