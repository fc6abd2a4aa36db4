"""Measuring collectives on the devices at hand, for `treeattn.measured`'s file.

    python -m treeattn.cost --calibrate FILE

measures on all devices of one process. In a program of several processes, each calls `calibrate`
after `treeattn.initialize`; the first one writes, and all of them get the same times.
"""

import argparse
import datetime
import functools
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.cost.formulas import Workload
from treeattn.cost.merges import Message, merge_messages
from treeattn.cost.network import PERMUTES, XLA_NAMES, collective_rounds
from treeattn.cost.report import columns
from treeattn.idea.arrays import integer
from treeattn.measured import KINDS, VARIABLE, CollectiveTimes, Group, fit_ranges, write_measured

SIZES = tuple(1 << k for k in range(8, 23, 2))  # bytes, 256 to 4 MiB
ENDS = (1 << 14, 1 << 18)  # of the ranges that have a line of their own
REPEATS = 30  # calls, of which the fastest counts: what else runs only adds to a time
ALL = ("outer", "group", "inner")


def group_mesh(devices: Sequence, group: Group) -> Mesh:
    """A mesh whose axis "group" has such groups of the devices, which are numbered in order.

    Raises ValueError where the devices do not fall into such groups.
    """
    p, stride = group
    if p < 2 or stride < 1 or len(devices) % (p * stride):
        raise ValueError(f"groups: {len(devices)} devices do not fall into groups like {group}")
    return Mesh(np.array(devices).reshape(-1, p, stride), ALL)


def all_groups(n: int) -> list[Group]:
    """For each divisor p of n devices: p neighbours, and p devices as far apart as can be."""
    found = []
    for p in range(2, n + 1):
        if n % p == 0:
            found += [Group(p, stride) for stride in sorted({1, n // p})]
    return found


def place(values: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """An array that lies so on a mesh of one process or several."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), values.__getitem__)


@functools.lru_cache(maxsize=64)
def _largest(mesh: Mesh) -> Callable:
    """A program: the largest of an array's numbers, of which each device has one."""
    axes = mesh.axis_names
    specs = {"in_specs": P(axes), "out_specs": P()}
    return jax.jit(jax.shard_map(lambda x: lax.pmax(x, axes), mesh=mesh, **specs))


def largest(mine: float, mesh: Mesh) -> float:
    """The largest of all processes' numbers; each waits for all the others."""
    everybody = place(np.full(mesh.size, mine, np.float32), mesh, P(mesh.axis_names))
    return float(np.asarray(_largest(mesh)(everybody).addressable_shards[0].data)[0])


def raise_together(error: str, mesh: Mesh) -> None:
    """Raise ValueError on all processes where one has an error: none waits for another in vain."""
    if largest(float(error != ""), mesh):
        raise ValueError(error or "path: another process cannot write the file")


def fastest_seconds(program: Callable, *arguments, mesh: Mesh, repeats: int = REPEATS) -> float:
    """Seconds of the fastest call of a compiled program, on the process where that is slowest.

    All processes start each call together; three calls before are not counted.
    """
    seconds = []
    for _ in range(repeats + 3):
        largest(0.0, mesh)  # the start line
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
    return largest(min(seconds[3:]), mesh)


def collective_program(kind: str, mesh: Mesh) -> Callable:
    """One collective among the groups of `group_mesh`, of a row of floats on each device."""
    p = mesh.shape["group"]
    ring = [(i, (i + 1) % p) for i in range(p)]

    def send(x):  # (1, n) here
        if kind == "all-reduce":
            return lax.psum(x, "group")
        if kind == "all-gather":
            return lax.all_gather(x, "group")
        if kind == "reduce-scatter":
            return lax.psum_scatter(x, "group", scatter_dimension=1, tiled=True)
        if kind == "all-to-all":
            return lax.all_to_all(x, "group", split_axis=1, concat_axis=0, tiled=True)
        return lax.ppermute(x, "group", ring)

    specs = {"in_specs": P(ALL), "out_specs": P(ALL)}
    return jax.jit(jax.shard_map(send, mesh=mesh, check_vma=False, **specs))


def measure_collectives(
    group: Group,
    devices: Sequence | None = None,
    *,
    kinds: Iterable[str] = KINDS,
    sizes: Iterable[int] = SIZES,
    repeats: int = REPEATS,
) -> dict[str, dict[int, float]]:
    """Seconds by kind and bytes, among groups of the devices (all of JAX's when None).

    Bytes are what a device puts in, rounded up to as many floats as a group divides.
    """
    mesh = group_mesh(jax.devices() if devices is None else devices, group)
    found = {kind: {} for kind in kinds}
    for size in sizes:
        floats = -(-size // (4 * group.devices)) * group.devices
        x = place(np.ones((mesh.size, floats), np.float32), mesh, P(ALL))
        for kind, times in found.items():
            program = collective_program(kind, mesh)
            times[4 * floats] = fastest_seconds(program, x, mesh=mesh, repeats=repeats)
    return found


def why_not_writable(path: str | os.PathLike) -> str:
    """What keeps a file from being written, found by writing beside it; "" if nothing does."""
    path = Path(path).absolute()
    if not path.parent.is_dir():
        return f"path: there is no folder {path.parent}"
    if path.is_dir():
        return f"path: {path} is a folder"
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return f"path: cannot write in {path.parent}: {error.strerror}"
    return ""


def calibrate(
    path: str | os.PathLike | None = None,
    devices: Sequence | None = None,
    *,
    groups: Iterable[tuple[int, int]] | None = None,
    sizes: Iterable[int] = SIZES,
    ends: Sequence[int] = ENDS,
    repeats: int = REPEATS,
    tell: Callable[[str], None] = lambda line: None,
) -> CollectiveTimes:
    """Measure all kinds of collectives among groups of the devices; write the file, if it is named.

    groups: `all_groups` when None
    sizes:  bytes that a device puts in
    ends:   of the ranges of bytes with a line of their own; two sizes at least lie in each
    tell:   called with a line about each group

    Of several processes, each of which makes the same call, that of the first device writes, and
    alone needs the folder. All return the same times, when the file is there.

    Raises ValueError for fewer than two devices, and, on all processes and before anything is
    measured, where the file cannot be written.
    """
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < 2:
        raise ValueError(
            f"devices: expected two at least to measure between, got {len(devices)}; "
            "JAX_NUM_CPU_DEVICES=8 makes eight of a CPU"
        )
    integer("repeats", repeats, 1)
    everybody = Mesh(np.array(devices), ("all",))
    writes = path is not None and jax.process_index() == devices[0].process_index
    raise_together(why_not_writable(path) if writes else "", everybody)
    fits = {}
    for group in all_groups(len(devices)) if groups is None else groups:
        group = Group(*group)
        found = measure_collectives(group, devices, sizes=sizes, repeats=repeats)
        for kind, times in found.items():
            fits[kind, group] = fit_ranges(times, ends)
        latency = 1e6 * fits["all-reduce", group][0].latency
        tell(f"{group.devices} devices, every {group.stride}: an Allreduce from {latency:.0f} µs")
    measured = CollectiveTimes(
        devices[0].device_kind,
        len(devices),
        datetime.date.today().isoformat(),
        {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "backend": devices[0].client.platform_version.splitlines()[0],
            "python": platform.python_version(),
        },
        fits,
    )
    error = ""
    if writes:
        try:
            write_measured(measured, path)
        except OSError as full:
            error = f"path: cannot write {path}: {full.strerror}"
    raise_together(error, everybody)
    return measured


def measured_seconds(measured: CollectiveTimes, messages: Iterable[Message], group: Group) -> float:
    """Seconds of the collectives of a merge, `merge_messages`, by what was measured.

    Raises ValueError for collectives that `calibrate` does not measure: kernels of one's own, and
    Allreduces by nodes, which are several.
    """
    seconds = 0.0
    for kind, size, times, devices, stride in messages:
        name = XLA_NAMES.get(kind, kind)
        if name not in KINDS:
            known = ", ".join(XLA_NAMES | dict.fromkeys(KINDS))
            raise ValueError(f"messages: expected collectives among {known}, got {kind!r}")
        among = group.devices if devices is None else devices
        rounds = collective_rounds(kind, among) if kind in PERMUTES else 1
        once = measured.seconds(name, size, among, stride * group.stride)
        seconds += times * rounds * once
    return seconds


# Merges of which every collective is measured.
MEASURED_MERGES = ("tree-joined", "butterfly", "gather", "reduce-scatter", "ag-rs", "a2a", "helix")


def measured_table(times: CollectiveTimes, w: Workload, width: int) -> str:
    """Lines of text: a layer's merges of `w` by what was measured, and an Allreduce of its width.

    w:     what all devices of a group attend to together, each to its keys
    width: of the residual stream, whose sums in 16 bits tensor parallelism needs twice a layer
    """
    rows = [("µs of a layer", "Allreduce", *MEASURED_MERGES, "fastest merge")]
    for group in times.groups:
        allreduce = times.seconds("all-reduce", 2 * w.batch * w.queries * width, *group)
        merges = {
            name: measured_seconds(times, merge_messages(name, w, group.devices), group)
            for name in MEASURED_MERGES
        }
        numbers = (f"{1e6 * x:.1f}" for x in (allreduce, *merges.values()))
        what = f"{group.devices} devices, every {group.stride}"
        rows.append((what, *numbers, min(merges, key=merges.get)))
    head = f"measured on {times.count} × {times.device} on {times.date}"
    versions = ", ".join(f"{name} {version}" for name, version in times.versions.items())
    return f"{head} ({versions})\n\n{columns(rows)}"


class CalibrateAction(argparse.Action):
    """`--calibrate FILE`: measure, write the file, say so and end, whatever else is given."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Raises SystemExit, with the parser's message for what cannot be done."""
        try:
            calibrate(values, tell=lambda line: print(line, flush=True))
        except (OSError, ValueError) as error:
            parser.error(f"{option_string}: {error}")
        parser.exit(message=f"{values} has it; {VARIABLE}={values} has it used\n")
