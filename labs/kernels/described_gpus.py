"""Descriptions of GPUs, from which XLA compiles without a GPU, as its own tools do.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc   # of jax's version; no driver

XLA compiles for a described GPU as for a real one, NVIDIA's assembler included. `make gpu-programs`
runs

    python -m labs.kernels.described_gpus MODULE FILE

which calls the module's `page` with eight described H100s, and writes its text into the file.
"""

import importlib
import os
import sys
from pathlib import Path

import jax
from jax.experimental import topologies

# An H100, from NVIDIA's data sheet and cudaGetDeviceProperties.
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
SHARED = {(8, 0): 166912, (8, 9): 101376, (10, 0): 232448, (12, 0): 101376}  # bytes for a block
MISSING = (
    "JAX's plugin for CUDA is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt "
    "nvidia-cuda-nvcc, of JAX's version"
)


def h100s(n: int, target: str = H100) -> list[jax.Device]:
    """n H100s of one machine, or n GPUs of another description.

    Raises NotImplementedError, with the packages to install, if JAX's plugin for CUDA is missing.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            "h100", "cuda", target_config=target, topology=f"1x1x{n}"
        )
    except NotImplementedError:
        raise NotImplementedError(MISSING) from None
    return topology.devices


def gpu(major: int, minor: int) -> jax.Device:
    """A GPU of a compute capability, 9.0 or one of `SHARED`, which decides the machine code.

    Apart from its shared memory, it is described as an H100.
    """
    text = H100
    if (major, minor) in SHARED:
        text = text.replace("{ major: 9 f", f"{{ major: {major} minor: {minor} f")
        text = text.replace("232448", str(SHARED[major, minor]))
    if major < 9:
        text = text.replace("feature_extension: ACCELERATED_FEATURES", "")
    return h100s(1, text)[0]


def main() -> None:
    module, file = sys.argv[1:]
    try:
        devices = h100s(8)
    except NotImplementedError as missing:
        sys.exit(str(missing))
    lines = []
    for line in importlib.import_module(module).page(devices):
        lines.append(line)
        print(line, flush=True)
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
