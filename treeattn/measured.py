"""What collectives take on one's own devices: measured, fitted and kept in a file.

`python -m treeattn.cost --calibrate FILE` writes such a file. `tree_decode` and `merge_across` by
method "auto", a Llama by attention "auto", and `python -m treeattn.cost --measured FILE` read it:
the file that they are given, or else the one that the environment variable TREEATTN_MEASURED names.

The file is JSON: when and where it was measured, and for each kind of collective and each group of
devices its seconds, latency + bytes · seconds_per_byte, by ranges of bytes. Bytes are those that a
device puts into the collective, as a compiled program shows them.
"""

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

VARIABLE = "TREEATTN_MEASURED"
FORMAT = "treeattn collectives, version 1"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Group(NamedTuple):
    """So many devices, each `stride` after the one before, while all others do the same."""

    devices: int
    stride: int = 1


class Fit(NamedTuple):
    """Seconds of a collective of up to `most` bytes: latency + bytes · seconds_per_byte."""

    most: float
    latency: float
    seconds_per_byte: float


@dataclass(frozen=True, repr=False)
class CollectiveTimes:
    """What was measured, where and when.

    device:   the devices' kind, as JAX names it
    count:    how many there were
    date:     YYYY-MM-DD
    versions: of jax, of its backend and of Python, by name
    fits:     by kind and group, ranges of bytes that grow; the last has no end
    """

    device: str
    count: int
    date: str
    versions: Mapping[str, str]
    fits: Mapping[tuple[str, Group], Sequence[Fit]]

    def __repr__(self) -> str:
        """Everything but the times."""
        return f"CollectiveTimes(of {self.count} × {self.device!r}, on {self.date})"

    def __hash__(self) -> int:  # equal ones have equal dates; a program is compiled for each
        return hash((self.device, self.count, self.date))

    @property
    def groups(self) -> list[Group]:
        """The groups that were measured, the smallest first."""
        return sorted({group for _, group in self.fits})

    def seconds(self, kind: str, size: int | float, devices: int, stride: int = 1) -> float:
        """Seconds of a collective of `kind`, into which each of a group's devices puts size bytes.

        Of the groups of so many devices, the one whose stride is nearest, as a ratio. Nothing is
        sent by one device. Raises ValueError for a kind, or a number of devices, that was not
        measured.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if devices == 1:
            return 0.0
        found = [g for k, g in self.fits if k == kind and g.devices == devices]
        if not found:
            known = sorted({g.devices for k, g in self.fits if k == kind})
            raise ValueError(
                f"devices: {kind} was measured among {known} devices, got {devices}: calibrate "
                "with such a group"
            )
        nearest = min(found, key=lambda g: (abs(math.log(g.stride / stride)), g.stride))
        fit = next(x for x in self.fits[kind, nearest] if size <= x.most)
        return fit.latency + size * fit.seconds_per_byte

    def check_devices(self, kind: str | None, count: int) -> None:
        """Raise ValueError where times say nothing of so many devices of that kind (None: any).

        Fewer than were measured are some of them; of more, nobody knows how far apart they are.
        """
        if kind not in (None, self.device):
            raise ValueError(
                f"measured: expected times of {kind!r}, as the mesh has, got those of "
                f"{self.device!r} (of {self.date})"
            )
        if count > self.count:
            raise ValueError(
                f"measured: expected times of {count} devices at least, as the mesh has, got those "
                f"of {self.count} (of {self.date}): calibrate on all of them"
            )


def fit_line(times: Mapping[int, float]) -> tuple[float, float]:
    """(latency, seconds per byte) of times by bytes: least squares of relative errors, none < 0.

    Raises ValueError for fewer than two sizes, and for times that are not above 0.
    """
    if len(times) < 2:
        raise ValueError(f"times: expected two sizes at least, got {list(times)}")
    sizes = np.array(list(times), float)
    seconds = np.array(list(times.values()), float)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(f"times: expected finite seconds above 0, got {seconds.tolist()}")
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)
    ones = np.ones(len(seconds))
    best = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if (best < 0).any():  # the better of the two lines on the border
        alone = [columns[:, k] @ ones / (columns[:, k] @ columns[:, k]) for k in (0, 1)]
        choices = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
        best = min(choices, key=lambda x: float(((columns @ x - 1) ** 2).sum()))
    return float(best[0]), float(best[1])


def fit_ranges(times: Mapping[int, float], ends: Sequence[int] = ()) -> list[Fit]:
    """A line for the sizes up to each end, and one for those from the last end on.

    An end that was measured belongs to the ranges on both of its sides. Raises ValueError for a
    range with fewer than two sizes.
    """
    fits = []
    least = 0.0
    for most in (*ends, math.inf):
        chosen = {size: times[size] for size in sorted(times) if least <= size <= most}
        fits.append(Fit(most, *fit_line(chosen)))
        least = most
    return fits


def write_measured(measured: CollectiveTimes, path: str | os.PathLike) -> None:
    """Write the file, whole or not at all."""
    fits = []
    for (kind, group), ranges in measured.fits.items():
        listed = [
            {
                "most": None if fit.most == math.inf else fit.most,
                "latency": fit.latency,
                "seconds_per_byte": fit.seconds_per_byte,
            }
            for fit in ranges
        ]
        fits.append({"kind": kind, **group._asdict(), "ranges": listed})
    told = {
        "format": FORMAT,
        "device": measured.device,
        "count": measured.count,
        "date": measured.date,
        "versions": dict(measured.versions),
        "fits": fits,
    }
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_measured(path: str | os.PathLike) -> CollectiveTimes:
    """What a file says. Raises ValueError, which names the file and what is wrong in it."""
    path = Path(path)
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"measured: cannot read {path}: {error.strerror}") from error
    return _read(path, changed)


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> CollectiveTimes:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"measured: {path} is no JSON file: {error}") from error
    found = told.get("format") if isinstance(told, dict) else None
    if found != FORMAT:
        raise ValueError(f"measured: {path} should have the format {FORMAT!r}, got {found!r}")
    try:
        _check_keys(told, ("format", "device", "count", "date", "versions", "fits"))
        fits = dict(_fits_of_row(row) for row in told["fits"])
        measured = CollectiveTimes(
            str(told["device"]), int(told["count"]), str(told["date"]), told["versions"], fits
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"measured: {path} has a part that cannot be read: {error!r}") from error
    if not fits or len(fits) < len(told["fits"]):
        raise ValueError(f"measured: {path} has no fits, or several of one kind and group")
    return measured


def _check_keys(row: Mapping, known: Sequence[str]) -> None:
    """Raise ValueError for a key that nobody knows: what it means would be left out in silence."""
    if unknown := sorted(set(row) - set(known)):
        raise ValueError(f"expected no keys but {', '.join(known)}, got {', '.join(unknown)}")


def _fits_of_row(row: Mapping) -> tuple[tuple[str, Group], list[Fit]]:
    """((kind, group), ranges) of a row of the file; a ValueError for what cannot be."""
    _check_keys(row, ("kind", "devices", "stride", "ranges"))
    kind = row["kind"]
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    group = Group(int(row["devices"]), int(row["stride"]))
    if group.devices < 2 or group.stride < 1:
        raise ValueError(f"group: expected two devices or more, got {group}")
    ranges = []
    for x in row["ranges"]:
        _check_keys(x, Fit._fields)
        most = math.inf if x["most"] is None else float(x["most"])
        ranges.append(Fit(most, float(x["latency"]), float(x["seconds_per_byte"])))
    ends = [fit.most for fit in ranges]
    if not ends or ends[-1] != math.inf or ends != sorted(set(ends)):
        raise ValueError(f"ranges: expected ends that grow, the last null, got {ends}")
    if any(not (0 <= t < math.inf) for fit in ranges for t in fit[1:]):
        raise ValueError(f"ranges: expected times of 0 or more, got {ranges}")
    return (kind, group), ranges


def find_measured(
    given: CollectiveTimes | str | os.PathLike | None = None,
) -> CollectiveTimes | None:
    """What was given, read if it is a path; else the file that TREEATTN_MEASURED names, or None.

    Raises TypeError for what is neither times nor a path.
    """
    if isinstance(given, CollectiveTimes):
        return given
    if given is None:
        path = os.environ.get(VARIABLE)
        return read_measured(path) if path else None
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"measured: expected CollectiveTimes, the path of a file, or None, got {given!r:.60}"
        )
    return read_measured(given)
