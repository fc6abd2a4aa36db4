"""What each kernel of a call takes by itself: JAX's profiler has the GPU's own clock."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

NONE = "the profiler says nothing of a GPU's kernels here"


def kernel_times(f: Callable, *arguments) -> dict[str, list[float]]:
    """By name, the seconds of each kernel that GPUs start for one call of f; {} without a GPU."""
    jax.block_until_ready(f(*arguments))
    times = defaultdict(list)
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the host's part takes minutes
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(f(*arguments))
        for path in Path(folder).rglob("*.xplane.pb"):
            planes = jax.profiler.ProfileData.from_file(str(path)).planes
            for name, duration in events_on_gpus(planes):
                times[name].append(duration)
    return dict(times)


def events_on_gpus(planes) -> Iterator[tuple[str, float]]:
    """(name, seconds) of what ran on a GPU's streams; a profile has other lines, of sums."""
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    yield event.name, event.duration_ns / 1e9


def rows(times: dict[str, list[float]], calls: int, size: int) -> Iterator[dict]:
    """Of so many calls, each of which reads `size` bytes of keys and values: the package's kernels
    by name, and what else ran, together."""
    own = {name: found for name, found in times.items() if "treeattn" in name}
    for name, found in own.items():
        t = sum(found) / calls
        row = {"kernel": name, "a call": len(found) / calls, "µs": 1e6 * t}
        yield row | ({"GB/s": size / t / 1e9} if "split_k" in name else {})
    others = [t for name, found in times.items() if name not in own for t in found]
    if others:
        yield {"kernel": "others", "a call": len(others) / calls, "µs": 1e6 * sum(others) / calls}
