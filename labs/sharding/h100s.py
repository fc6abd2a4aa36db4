"""The layer's step compiled for eight H100s that are only described to XLA: what they would send.

    python -m labs.sharding.h100s labs/sharding/results/h100s.md

It needs XLA's compiler for CUDA, of jax's version, and neither a driver nor a GPU; `make gpu-programs`
sets it up. Nothing is run: this shows what is sent and held, not how long anything takes.
"""

import os

import jax
from jax.experimental import topologies

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
KEYS = 131_072  # of a row: slots of the cache
MESHES = (2, 2, 2), (1, 8, 1), (1, 4, 2), (1, 1, 8)  # devices along "batch", "heads" and "kv"


def h100s(n: int) -> list[jax.Device]:
    """So many described H100s of one machine. Raises NotImplementedError without the compiler."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    topology = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=f"1x1x{n}")
    return topology.devices
