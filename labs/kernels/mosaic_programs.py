"""What NVIDIA's assembler says of the kernel by Mosaic GPU, for GPUs that are not there.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc   # of jax's version; no driver
    python benchmarks/mosaic_programs.py [--smoke] [A100 H100 B200 L4 "RTX PRO 6000"]

How many kernels a call starts; of the one that reads the keys, and of the one that merges,
registers of a thread and what of them is spilled; and a program's shared memory: for GPUs described
to XLA, an A100, an H100 and others. Not how long anything takes, nor that it is right.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

DUMP = tempfile.mkdtemp()
os.environ |= {
    "JAX_PLATFORMS": "",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "MOSAIC_GPU_DUMP_TO": DUMP,
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_PTX": "1",
}

import described_gpus  # noqa: E402
import jax.extend.backend  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from described_programs import KIND, array, compiled, kernels, llama_step  # noqa: E402

import treeattn  # noqa: E402
from treeattn_llama import Config  # noqa: E402

GPUS = {(9, 0): "H100", (10, 0): "B200", (8, 0): "A100", (8, 9): "L4", (12, 0): "RTX PRO 6000"}
PLAIN = described_gpus.H100
KEYS = 65536
# Name: queries, heads, key heads, both head_dims, dtype, and what is beside: a mask and lengths, or
# the queries' own keys, "new".
CASES = {
    "bfloat16, heads of 128, 1 query": (1, 32, 8, 128, 128, jnp.bfloat16, None),
    "bfloat16, heads of 64, 1 query": (1, 9, 3, 64, 64, jnp.bfloat16, None),
    "float16, heads of 128, 5 queries, mask, lengths": (5, 32, 8, 128, 128, jnp.float16, "mask"),
    "bfloat16, heads of 256, 1 query": (1, 16, 8, 256, 256, jnp.bfloat16, None),
    "bfloat16, heads of 128, 64 queries": (64, 32, 8, 128, 128, jnp.bfloat16, None),
    "float32, heads of 128, 1 query": (1, 32, 8, 128, 128, jnp.float32, None),
    "float32, heads of 256, 1 query": (1, 16, 8, 256, 256, jnp.float32, None),
    "bfloat16, latents of 576 and 512, 1 query": (1, 16, 1, 576, 512, jnp.bfloat16, None),
    "bfloat16, heads of 128, 1 query and its own key": (1, 32, 8, 128, 128, jnp.bfloat16, "new"),
    "bfloat16, heads of 128, a tree of 8": (8, 32, 8, 128, 128, jnp.bfloat16, "new"),
    "bfloat16, heads of 128, a tree of 64": (64, 32, 8, 128, 128, jnp.bfloat16, "new"),
}


def described(capability: tuple[int, int]) -> jax.Device:
    """A GPU of that compute capability; Mosaic, which asks for JAX's device, is told as well.

    Of the H100's description only what programs are made by is another: the instructions.
    """
    major, minor = capability
    own = f"major: {major} minor: {minor}"
    if major >= 9:
        own += " feature_extension: ACCELERATED_FEATURES"
    own = re.sub(r"major: 9 feature_extension: \w+", own, PLAIN, count=1)
    here = SimpleNamespace(compute_capability=f"{major}.{minor}", device_kind=KIND)
    jax.extend.backend.get_default_device = lambda: here
    described_gpus.H100 = own
    return described_gpus.h100s(1)[0]


def call(device, name: str):
    """The program of one call."""
    l, h, h_kv, d, dv, dtype, more = CASES[name]
    beside = {}
    if more == "mask":
        beside["mask"] = array(device, 1, 1, l, KEYS, dtype=jnp.bool_)
        beside["kv_lengths"] = array(device, 1, dtype=jnp.int32)
    q, k, v = (1, l, h, d), (1, KEYS, h_kv, d), (1, KEYS, h_kv, dv)

    def output(q, k, v, beside):
        return treeattn.attention(q, k, v, implementation="mosaic", **beside)

    return compiled(output, *(array(device, *shape, dtype=dtype) for shape in (q, k, v)), beside)


def a_layer(heads: int, kv_heads: int, head_dim: int) -> Config:
    """A Llama of one layer and little besides: what its attention is given is the same."""
    return Config(
        vocabulary=256,
        width=256,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=256,
        context=KEYS,
        norm_epsilon=1e-5,
        rotary_base=1e5,
        tied=True,
    )


def row(device, gpu: str, name: str) -> str:
    """A row of the table."""
    for file in Path(DUMP).iterdir():
        file.unlink()
    l, h, h_kv, d, _, _, more = CASES[name]
    try:
        if more == "new":
            program = llama_step(a_layer(h, h_kv, d), device, 1, l, KEYS, "mosaic")
        else:
            program = call(device, name)
    except ValueError as refused:
        return f"| {gpu} | {name} | refused: {str(refused).rpartition(', which ')[2]} | | | | | |"
    first, second = (assembled(x) for x in ("split_k", "merge_splits"))
    target = re.findall(r"^\.target (\w+)", next(Path(DUMP).glob("*.ptx")).read_text(), re.M)[0]
    module = next(Path(DUMP).glob("*split_k*before_layout_inference.txt")).read_text("utf-8")
    size = int(re.findall(r"dynamic_shared_memory_size %c(\d+)", module)[0])
    count = "in a step" if more == "new" else len(kernels(program))
    return f"| {gpu}, {target} | {name} | {count} | {first} | {size:,} | {second} |"


def assembled(kernel: str) -> str:
    """Registers of a thread of the kernel, and bytes that are spilled: two columns of the table."""
    (said,) = (x.read_text("utf-8") for x in Path(DUMP).glob(f"*{kernel}*.ptxas"))
    registers = max(map(int, re.findall(r"(\d+) registers", said)))
    stores, loads = (
        max(map(int, re.findall(rf"(\d+) bytes spill {x}", said))) for x in ("stores", "loads")
    )
    return f"{registers} | {stores}, {loads}"


def main() -> None:
    try:
        treeattn.which_implementation(*3 * [jnp.zeros((1, 1, 1, 64))], implementation="mosaic")
    except ValueError as lacking:
        print(lacking)
        return
    names = list(CASES)[:1] if "--smoke" in sys.argv else list(CASES)
    chosen = [x for x in GPUS if GPUS[x] in sys.argv]
    if not chosen:
        print(
            "| for | over 65,536 keys | kernels | registers | spilled: stored, loaded "
            "| shared, bytes | registers of the second | spilled |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for gpu in GPUS.values():  # a process each: XLA remembers the GPU that was described first
            subprocess.run([sys.executable, *sys.argv, gpu], check=True)
    for capability in chosen:
        try:
            device = described(capability)
        except NotImplementedError as missing:
            print(missing)
            return
        for name in names:
            print(row(device, GPUS[capability], name), flush=True)


if __name__ == "__main__":
    main()
