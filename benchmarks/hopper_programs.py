"""What an H100 would be given to run, compiled without one: its kernels, and what they pass on.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc   # of jax's version; no driver
    python benchmarks/hopper_programs.py

XLA compiles for a described GPU as for a present one, NVIDIA's assembler included. That shows how
many kernels a call starts and what lies in global memory between them, how many a layer of a Llama
takes for a token, and registers and spills of the kernel in examples/cluster_merge.py; not how long
anything takes.
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
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from described_gpus import h100s  # noqa: E402

import treeattn  # noqa: E402
from treeattn.llama import Config, Layer, Llama, Weights  # noqa: E402

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


def array(device, *shape: int, dtype=jnp.bfloat16):
    """An array on the described device, of which there is the shape only."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(f, *arguments):
    """The program of f for an H100."""
    about = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    one = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(one,), abstract_device=about)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*arguments).lower().compile()


def attention_program(f, device, n: int, h: int = 32, h_kv: int = 8, d: int = 128):
    """The program of the attention by f of one query over n keys."""
    shapes = (1, 1, h, d), (1, n, h_kv, d), (1, n, h_kv, d)
    return compiled(f, *(array(device, *shape) for shape in shapes))


def kernels(program) -> list[str]:
    """The lines of a program's text that start a kernel."""
    entry = program.as_text().split("\nENTRY ")[1].split("\n}")[0]
    return [x for x in entry.splitlines() if re.search(r" (fusion|custom-call|copy)\(", x)]


def row(name: str, program) -> str:
    """Its kernels, those after the one that reads the keys, and what that one writes."""
    lines = kernels(program)
    at = next(i for i, x in enumerate(lines) if " custom-call(" in x)
    written = re.findall(r"f32\[([\d,]+)\]", lines[at].split(" custom-call(")[0])
    size = sum(4 * functools.reduce(lambda a, b: a * int(b), x.split(","), 1) for x in written)
    return f"| {name} | {len(lines)} | {len(lines) - 1 - at} | {size / 1e3:.0f} |"


def llama_program(config: Config, device, rows: int):
    """The program of a step of one token a row."""
    c = config
    of = functools.partial(array, device)
    q = c.heads * c.head_dim
    kv = c.kv_heads * c.head_dim
    layer = Layer(
        attention_norm=of(c.width),
        qkv=of(q + 2 * kv, c.width),
        output=of(c.width, q),
        mlp_norm=of(c.width),
        gate_up=of(2 * c.mlp_width, c.width),
        down=of(c.width, c.mlp_width),
    )
    embedding = of(c.vocabulary, c.width)
    frequencies = of(c.head_dim // 2, dtype=jnp.float32)
    weights = Weights(embedding, (layer,) * c.layers, of(c.width), embedding, frequencies)
    model = Llama(config, weights, implementation="pallas")
    cache = jax.eval_shape(lambda: model.new_cache(rows, CAPACITY))
    cache = jax.tree.map(lambda x: of(*x.shape, dtype=x.dtype), cache)

    def step(weights, tokens, cache):
        return dataclasses.replace(model, weights=weights).extend(tokens, cache)

    return compiled(step, weights, of(rows, 1, dtype=jnp.int32), cache)


def kernels_of_a_layer(name: str, device, rows: int = 1) -> int:
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
    three, four = (
        len(kernels(llama_program(dataclasses.replace(config, layers=n), device, rows)))
        for n in (3, 4)
    )
    return four - three


def split_k(q, k, v):
    return treeattn.attention(q, k, v, implementation="pallas")


def split_k_state(q, k, v):
    return treeattn.finalize(treeattn.attend(q, k, v, implementation="pallas"))[0]


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
        "split-K": split_k,
        "split-K, a state first": split_k_state,
        "cluster of 8": in_clusters(1),
        "two clusters": in_clusters(2),
    }
    print("One query of 32 heads on 8 key heads of 128, in bfloat16.\n")
    print("| | kernels | of them after the keys' | kB of states |\n|---|---|---|---|")
    for n in (4096, 65536):
        for name, f in fs.items():
            print(row(f"{name}, {n:,} keys", attention_program(f, device, n)), flush=True)
    print("\nA layer of a Llama, for one token a row, without what writes the cache.\n")
    print("| | kernels, of one row | of four rows |\n|---|---|---|")
    for name in SIZES:
        one, four = (kernels_of_a_layer(name, device, rows) for rows in (1, 4))
        print(f"| {name} | {one} | {four} |", flush=True)
    said = sorted(Path(DUMP).glob("*.ptxas"))[0].read_text("utf-8")
    print("\nptxas, for sm_90a:", ", ".join(re.findall(r"\d+ registers|\d+ bytes spill \w+", said)))
    reads = sorted(Path(DUMP).glob("*.ptx"))[0].read_text("utf-8").count("ld.shared::cluster")
    print("loads from other blocks' shared memory in the code, by each thread:", reads)


if __name__ == "__main__":
    main()
