"""Collectives by gloo over sockets: forecasts, held to what `labs/cluster` measured.

python -m labs.cost.sockets [FILE]     # labs/cluster/results/times.json; writes forecasts beside it

A row of that file says which collectives the compiled program has, over which links they ran, and
how long they took. Three numbers are fitted on half of the rows, and the other half is forecast.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from labs.cost.network import simulate
from labs.cost.schedules import SCHEDULES, Round
from labs.cost.topology import DEVICES, Level, Topology

MEASURED = Path(__file__).parents[1] / "cluster" / "results" / "times.json"
GLOO = {"all-reduce": "ring-allreduce", "all-gather": "ring-gather", "all-to-all": "all-to-all"}


class Fitted(NamedTuple):
    """Seconds of an operand's collective before its first message; seconds of a hop, beside the
    delay that the network adds; and the share of a link's rate that carries data."""

    launch: float
    hop: float
    share: float


def forecast(row: dict, fitted: Fitted) -> float:
    """Seconds of a row's decode: its collectives, one after the other."""
    per_node = row["p"] // row["nodes"]
    near, far = (row[level] / 8 * fitted.share for level in ("intra", "inter"))
    levels = (
        Level("node", per_node, fitted.hop, near),
        Level("uplink", row["nodes"], fitted.hop + row["delay"], far, links=1),
    )
    links = Topology("sockets", DEVICES["H100"], levels, gap=0.0)
    return sum(
        count
        * (fitted.launch + simulate(rounds, row["p"], links, pipelined=False, rendezvous=True))
        for count, rounds in _operands(row)
    )


def _operands(row: dict) -> Iterator[tuple[int, list[Round]]]:
    """How often each operand's collective runs, and its rounds in all groups at once."""
    for kind, count, shapes, groups in row["collectives"]:
        sizes = [4 * int(np.prod(json.loads(shape.removeprefix("f32")))) for shape in shapes]
        if kind == "all-to-all":  # an operand for each device
            sizes = [sum(sizes)]
        for size in sizes:
            yield count, _rounds(kind, size, np.array(groups))


def _rounds(kind: str, operand_bytes: int, groups: np.ndarray) -> list[Round]:
    if kind == "collective-permute":
        return [Round(*groups.T, operand_bytes)]
    rounds = SCHEDULES[GLOO[kind]](groups.shape[1], operand_bytes, 1)
    return [
        x._replace(source=groups[:, x.source].ravel(), target=groups[:, x.target].ravel())
        for x in rounds
    ]


def is_fitted(rows: list[dict]) -> np.ndarray:
    """Which rows are fitted: of each method every second one."""
    methods = [row["method"] for row in rows]
    return np.array([methods[:i].count(method) % 2 == 0 for i, method in enumerate(methods)])


def fit(rows: list[dict]) -> Fitted:
    """The three numbers that forecast these rows best, by the logarithms of the ratios."""
    measured = np.array([row["seconds"] for row in rows])

    def errors(logarithms: np.ndarray) -> np.ndarray:
        fitted = Fitted(*np.exp(logarithms))
        return np.log([forecast(row, fitted) for row in rows] / measured)

    start = np.log([2e-3, 1e-3, 0.9])
    return Fitted(*np.exp(least_squares(errors, start, loss="soft_l1", f_scale=0.1).x))


def main(path: Path = MEASURED) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    used = is_fitted(rows)
    fitted = fit([row for row, use in zip(rows, used, strict=True) if use])
    seconds = [forecast(row, fitted) for row in rows]
    found = fitted._asdict() | {"fitted": used.tolist(), "seconds": seconds}
    path.with_name("forecasts.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(" ".join(f"{name} {value:.3g}" for name, value in fitted._asdict().items()))
    for row, use, forecasted in zip(rows, used, seconds, strict=True):
        ratio = forecasted / row["seconds"]
        print(f"{row['method']:14}{row['seconds']:9.3f} s{ratio:7.2f} {'fitted' * use}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
