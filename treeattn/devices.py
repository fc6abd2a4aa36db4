"""Meshes to shard a cache over, devices simulated on a CPU, and clusters of many processes."""

import os
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from treeattn.checks import integer


def simulate_devices(n: int) -> None:
    """Let JAX see `n` devices on this machine's CPU. Call it before JAX does any work.

    The devices share the CPU's cores. They show what a program computes and sends, but not how
    fast a cluster would be. Calling it again with the same `n` changes nothing.

    Raises RuntimeError if JAX has already started with another number of devices, or on another
    platform, because the number cannot change afterwards.

    >>> simulate_devices(9)
    >>> print(len(jax.devices()))
    9
    """
    n = integer("n", n, 1)
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # JAX has started, perhaps with these devices
        devices = jax.devices()
        if len(devices) != n or devices[0].platform != "cpu":
            raise RuntimeError(
                f"simulate_devices({n}): JAX has already started with {len(devices)} "
                f"{devices[0].platform} device(s), and their number cannot change. Call it before "
                "anything else uses JAX (in a notebook: restart the kernel)."
            ) from None
    else:
        jax.config.update("jax_platforms", "cpu")


def kv_mesh(
    devices: Sequence[Any] | None = None,  # type checkers do not know jax.Device
    *,
    nodes: int | None = None,
    heads: int | None = None,
    batch: int | None = None,
) -> Mesh:
    """A mesh to shard a key-value cache over.

    devices: the devices, in order; all of `jax.devices()` if None.
    nodes:   None for one axis, "kv"; a number for two axes, ("node", "device"), with the devices
             divided evenly over the nodes, neighbours on the same node.
    heads:   the size of an axis "heads" before these, along which the heads of queries and keys are
             sharded.
    batch:   the size of an axis "batch" before all others, along which the texts are sharded.

    Raises TypeError if `devices` holds anything but devices, or a size is not an integer, and
    ValueError if there are no devices, or if they do not fill the axes.

    >>> print(dict(kv_mesh(jax.devices()[:8], nodes=2).shape))
    {'node': 2, 'device': 4}
    """
    flat = np.asarray(jax.devices() if devices is None else devices, dtype=object).ravel()
    if flat.size == 0:
        raise ValueError("devices: expected at least one device, got none")
    for device in flat:
        if not isinstance(device, jax.Device):
            raise TypeError(f"devices: expected jax.devices() or some of them, got {device!r}")
    given = {"batch": batch, "heads": heads, "nodes": nodes}
    sizes = {name: integer(name, n, 1) for name, n in given.items() if n is not None}
    rest = flat.size
    for name, n in sizes.items():
        if rest % n:
            raise ValueError(f"{name}: {rest} devices cannot be divided into {n} equal parts")
        rest //= n
    axes = ["node" if name == "nodes" else name for name in sizes]
    axes += ["kv" if nodes is None else "device"]
    return Mesh(flat.reshape(*sizes.values(), rest), axes)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 10,
    initialization_timeout: int = 20,
    **options: Any,
) -> None:
    """Join the other processes of a cluster by `jax.distributed.initialize`, and end with them.

    Call it first in every process. Afterwards `jax.devices()` lists the devices of all processes,
    and a mesh of them works as a mesh of one process does. Under SLURM, Open MPI and Kubernetes
    leave all arguments out, because JAX finds them. Otherwise give the address ("host:port") of
    process 0, the number of processes, and the number of this process, from 0.

    heartbeat_timeout_seconds: how long a silent process counts as alive.
    initialization_timeout:    how many seconds to wait for the other processes.
    options:                   passed on to `jax.distributed.initialize`.

    Nothing here is authenticated or encrypted: whoever reaches the coordinator's port can join, and
    whoever reaches gloo's can send. Use a network that strangers cannot reach. JAX lets process 0
    listen on all of its machine's interfaces; if the coordinator's address is on loopback, this
    function lets it listen there alone. `coordinator_bind_address` names another address.

    From then on an uncaught exception ends the process at once, without the orderly shutdown
    that would wait for the other processes. They notice within the heartbeat's time, or at the
    next collective, and end as well.

    If the coordinator or another process does not arrive in time, XLA ends this process some
    five seconds after `initialization_timeout`: it prints "Terminating process … DEADLINE_EXCEEDED"
    and exits. It raises no exception, so `try` cannot catch it. A coordinator whose port is in use
    ends as well, on JAX 0.8.3 by a segmentation fault.

    On CPUs the processes then communicate through gloo, which listens at the address that this
    machine's own name resolves to. If that is a loopback address, processes on other machines fail
    with "Connection refused"; a line such as `10.0.0.2 name` in /etc/hosts mends that.

    >>> initialize("10.0.0.1:9876", num_processes=4, process_id=0)  # doctest: +SKIP
    """
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address and _on_loopback(address.rpartition(":")[0].strip("[]")):
        options.setdefault("coordinator_bind_address", address)
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        initialization_timeout=initialization_timeout,
        **options,
    )
    sys.excepthook = _end_at_once


def _on_loopback(host: str) -> bool:
    try:
        first = socket.getaddrinfo(host, None)[0]
    except OSError:  # the name does not resolve
        return False
    return ip_address(first[4][0]).is_loopback


def _end_at_once(kind, error, trace) -> None:
    """Print the exception as Python would, and exit without waiting for other processes."""
    try:
        sys.__excepthook__(kind, error, trace)
        sys.stdout.flush()
    finally:  # even if the output is closed
        os._exit(1)
