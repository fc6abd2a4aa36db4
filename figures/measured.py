"""The results that the scripts in benchmarks/ wrote, for the figures that show them."""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def measured(name: str, results: str | Path | None = None, *, script: str | None = None):
    """The contents of {name}.json in the folder `results`; a checkout's own when None.

    script: which writes it; benchmarks/{name}.py when None

    Raises ValueError if the file is missing, as it is outside of a checkout.
    """
    script = script or f"benchmarks/{name}.py"
    path = Path(RESULTS if results is None else results) / f"{name}.json"
    if not path.is_file():
        raise ValueError(
            f"results: expected a folder with {path.name}, as {script} writes it and a checkout "
            f"has it in benchmarks/results, got {path.parent}"
        )
    return json.loads(path.read_text(encoding="utf-8"))
