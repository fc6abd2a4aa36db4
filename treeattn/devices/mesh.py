"""Devices to shard a cache over: simulated on a CPU, of one process or of many; and meshes."""

import os
import sys
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


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 10,
    initialization_timeout: int = 20,
    **options,
) -> None:
    """Join the other processes of a cluster: `jax.distributed.initialize`, made safe to fail in.

    Call it first in every process; afterwards `jax.devices()` are those of all processes, and
    a mesh of them works as one process's does. Under SLURM, Open MPI and Kubernetes leave all
    arguments out, and JAX finds them. Otherwise give the address ("host:port") of process 0,
    the number of processes, and this one's number from 0.

    heartbeat_timeout_seconds: how long a silent process counts as alive.
    initialization_timeout:    how many seconds to wait for the others to arrive.
    options:                   passed on to `jax.distributed.initialize`.

    From here on an uncaught exception ends the process at once, without the orderly shutdown
    that would wait for the others; the others then find out within the heartbeat's time, or
    at the next collective, and end as well.

    Raises RuntimeError when not all processes arrive in time.
    """
    sys.excepthook = _end_at_once
    try:
        jax.distributed.initialize(
            coordinator_address, num_processes, process_id, **options,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            initialization_timeout=initialization_timeout,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"initialize: process {process_id} of {num_processes} did not find the others at "
            f"{coordinator_address} within {initialization_timeout} seconds"
        ) from error


def _end_at_once(kind, error, trace) -> None:
    """Print the exception as Python would, and leave without waiting for anybody."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
