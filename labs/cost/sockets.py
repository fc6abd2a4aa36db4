"""Collectives by gloo over sockets: forecasts, compared with `labs/cluster`'s measured times.

python -m labs.cost.sockets     # writes labs/cluster/results/forecasts.json

A row of `labs/cluster/results/times.json` has the collectives of a compiled program, the links over
which they ran, and the seconds that they took. Three numbers are fitted on half of the rows:
the seconds of a collective before its first message, the seconds of a hop beside the delay that the
network adds, and the share of a link's rate that carries data. The other rows are forecast.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from labs.cost.network import simulate
from labs.cost.schedules import SCHEDULES, Round
from labs.cost.topology import DEVICES, Level, Topology

RESULTS = Path(__file__).parents[1] / "cluster" / "results"
GLOO = {"all-reduce": "ring-allreduce", "all-gather": "ring-gather", "all-to-all": "all-to-all"}
START = 2e-3, 1e-3, 0.9


def forecast(row: dict, launch: float, hop: float, share: float) -> float:
    """Seconds of a row's decode: its collectives, one after the other."""
    near, far = (row[level] / 8 * share for level in ("intra", "inter"))
    levels = (
        Level("node", row["p"] // row["nodes"], hop, near),
        Level("uplink", row["nodes"], hop + row["delay"], far, links=1),
    )
    links = Topology("sockets", DEVICES["H100"], levels, gap=0.0)
    how = {"pipelined": False, "rendezvous": True}
    return sum(
        count * (launch + simulate(rounds, row["p"], links, **how))
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


def fit(rows: list[dict]) -> list[float]:
    """The three numbers that forecast these rows best, by the logarithms of the ratios."""
    measured = np.array([row["seconds"] for row in rows])

    def errors(logarithms: np.ndarray) -> np.ndarray:
        return np.log([forecast(row, *np.exp(logarithms)) for row in rows] / measured)

    return np.exp(least_squares(errors, np.log(START), loss="soft_l1", f_scale=0.1).x).tolist()


def main() -> None:
    rows = json.loads((RESULTS / "times.json").read_text())["rows"]
    methods = [row["method"] for row in rows]
    used = [methods[:i].count(method) % 2 == 0 for i, method in enumerate(methods)]
    numbers = fit([row for row, use in zip(rows, used, strict=True) if use])
    seconds = [forecast(row, *numbers) for row in rows]
    found = {"launch, hop, share": numbers, "fitted": used, "seconds": seconds}
    (RESULTS / "forecasts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
