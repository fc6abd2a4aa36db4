"""Meshes of devices: simulated ones on a CPU, and the axis that the cache is sharded over."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh


def simulate_devices(n: int) -> None:
    """Let JAX see `n` devices on this machine's CPU. Call it before JAX does any work.

    The devices share the CPU's cores: they show what a program computes and sends, not how
    fast a cluster would be. Calling it again with the same `n` changes nothing.

    Raises RuntimeError when JAX has already started with another number of devices, or on
    another platform, since the number cannot change afterwards.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise TypeError(f"n: expected a number of devices, got {n!r}")
    if n < 1:
        raise ValueError(f"n: expected at least 1 device, got {n}")
    try:
        jax.config.update("jax_num_cpu_devices", int(n))
    except RuntimeError:  # JAX has started: right only if it has what was asked for
        came = jax.devices()
        if len(came) != n or came[0].platform != "cpu":
            raise RuntimeError(
                f"simulate_devices({n}): JAX has already started with {len(came)} "
                f"{came[0].platform} device(s), and their number cannot change. Call it before "
                "anything else uses JAX (in a notebook: restart the kernel)."
            ) from None
    else:
        jax.config.update("jax_platforms", "cpu")


def kv_mesh(devices: Sequence | None = None, *, nodes: int | None = None) -> Mesh:
    """A mesh to shard a key-value cache over.

    devices: the devices, in order; all of `jax.devices()` when None.
    nodes:   None for one axis, "kv"; a number for two, ("node", "device"), with the devices
             divided evenly over the nodes, neighbours on the same node.

    Raises ValueError when there are no devices, or when they do not fill the nodes.
    """
    devices = np.asarray(jax.devices() if devices is None else devices, dtype=object).ravel()
    if devices.size == 0:
        raise ValueError("devices: expected at least one device, got none")
    if nodes is None:
        return Mesh(devices, ("kv",))
    if nodes < 1 or devices.size % nodes:
        raise ValueError(f"nodes: {devices.size} devices cannot be divided over {nodes} nodes")
    return Mesh(devices.reshape(nodes, -1), ("node", "device"))
