"""The layer's step compiled for eight H100s that are only described to XLA: what they would send.

    python -m labs.sharding.h100s labs/sharding/results/h100s.md

It needs XLA's compiler for CUDA, of jax's version, and neither a driver nor a GPU (`make
gpu-programs` sets it up). Nothing is run: this shows what is sent and held, not how long it takes.
"""

import datetime
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import treeattn
from labs.sharding.__main__ import LLAMA_8B, crossings, program

# As NVIDIA's data sheet and cudaGetDeviceProperties describe it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  runtime_version: "13.0.0" driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 1 patch: 1 }
"""
AXES = "batch", "heads", "kv"
MESHES = (2, 2, 2), (1, 8, 1), (1, 4, 2), (1, 1, 8)
ROWS, KEYS = 2, 131_072  # of the batch, and slots of each row's cache


def h100s(n: int) -> list[jax.Device]:
    """So many described H100s of one machine. Raises NotImplementedError without the compiler."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    topology = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=f"1x1x{n}")
    return topology.devices


def mesh_of(devices, shape: tuple[int, int, int]) -> Mesh:
    """The devices as a box of that shape."""
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def page(devices) -> Iterator[str]:
    """The lines of the page of results."""
    yield "# A layer on eight H100s that are not there"
    yield ""
    yield f"Compiled without a GPU on {datetime.date.today()}, by jax {jax.__version__} and"
    yield f"jax-cuda13-pjrt {version('jax-cuda13-pjrt')} (`make gpu-programs`). Nothing was run."
    yield ""
    yield f"A step of a layer of Llama 3.1 8B's sizes in float32: {ROWS} rows, a token each, with"
    yield f"room for {KEYS:,} keys a row."
    for shape in MESHES:
        mesh = mesh_of(devices, shape)
        compiled = program(LLAMA_8B, ROWS, KEYS, mesh)
        held = treeattn.memory(compiled).argument_bytes
        yield ""
        yield f"## {' × '.join(f'{n} {axis}' for n, axis in zip(shape, AXES, strict=True))}"
        yield ""
        yield f"```\n{crossings(treeattn.collectives(compiled), mesh)}\n```"
        yield ""
        yield f"A device holds {held / 1e6:,.0f} MB of weights and cache."


def main() -> None:
    try:
        devices = h100s(8)
    except NotImplementedError as missing:
        sys.exit(f"JAX's plugin for CUDA is not installed: {missing}")
    lines = []
    for line in page(devices):
        lines.append(line)
        print(line, flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
