"""The table and the figure of what benchmarks/gpu.py wrote."""

import importlib.util
import json
from pathlib import Path

PREDICTIONS = Path(__file__).parent / "results" / "gpu_predictions.json"
MARKS = ("o-", "s--", "^-.", "D:", "v-", "x--")  # lines told apart without colour


def line(row: dict) -> str:
    """A row in words."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if value != "")


def headline(about: dict) -> str:
    """What the results are of, and what cannot run there."""
    said = f"{about['device']}, compute capability {about['compute capability']}, "
    said += f"JAX {about['jax']}, Python {about['python']}."
    reasons = [f"{name} ({why})" for name, why in about["cannot run"].items()]
    return f"{said} Not run: {'; '.join(reasons)}." if reasons else f"{said} All can run."


def with_predictions(rows: list[dict], device: str) -> list[dict]:
    """The rows, beside what was measured what had been predicted of it on that device."""
    predictions = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    if predictions["device"] not in device:
        return rows
    found = []
    for row in rows:
        said = {}
        for prediction in predictions["rows"]:
            if is_of(prediction["of"], row):
                field = prediction["field"]
                said[f"{field} predicted"] = f"{prediction['low']} to {prediction['high']}"
        found.append(row | said)
    return found


def is_of(fields: dict, row: dict) -> bool:
    """Whether the row has these fields; of several values in a list, one of them."""
    for name, values in fields.items():
        if row.get(name) not in (values if isinstance(values, list) else [values]):
            return False
    return True


def table(rows: list[dict]) -> list[str]:
    """Markdown: a column for each field that any row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(str(row.get(name, "")) for name in columns) + " |")
    return lines


def report(path: Path) -> str:
    """Write the table beside the results, and the figure if matplotlib is there; the table."""
    results = json.loads(path.read_text(encoding="utf-8"))
    parts = results["parts"]
    about = next((row for row in parts["device"]["rows"] if "device" in row), {"device": "unknown"})
    lines = [f"# {about['device']}, {results['date']}", ""]
    lines += [headline(about), ""] if "jax" in about else []
    cut = [name for name, part in parts.items() if part["status"] != "done"]
    lines += [f"Incomplete: {', '.join(cut)}.", ""] if cut else []
    if results["smoke"]:
        lines += ["A rehearsal with small sizes: its times say nothing.", ""]
    for name, part in parts.items():
        lines += [f"## {name}", "", f"{part['status']}, {part.get('seconds', 0)} s.", ""]
        rows = with_predictions(part["rows"], about["device"])
        if name == "correct":
            run = [row for row in rows if "ok" in row]
            right = [row for row in run if row["ok"]]
            lines += [f"{len(right)} of {len(run)} agree with float64.", ""]
            rows = [row for row in rows if row not in right]  # what is wrong, or was not run
        for what in dict.fromkeys(row.get("what", "") for row in rows):
            lines += [*table([row for row in rows if row.get("what", "") == what]), ""]
    if importlib.util.find_spec("matplotlib") is None:
        lines += ["matplotlib is not installed here: draw the figure later, by `--report`.", ""]
    else:
        figure(parts, about["device"]).savefig(path.with_suffix(".png"), dpi=110)
    text = "\n".join(lines)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def figure(parts: dict, device: str):
    """Left: bandwidth of local attention by keys. Right: tokens per second by context."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = drawn.subplots(ncols=2)
    rows = [row for row in parts.get("local", {}).get("rows", []) if "share" in row]
    rows = [row for row in rows if row["dtype"] == "bfloat16" and row["heads"].endswith("/8")]
    lines(left, rows, "implementation", "keys", "share")
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(title=f"One query on {device}", xlabel="keys", ylabel="share of read bandwidth")
    rows = [
        row
        for name in ("packaged", "large")
        for row in parts.get(name, {}).get("rows", [])
        if "tokens/s" in row
    ]
    lines(right, rows, "model", "context", "tokens/s")
    right.set(title="Decoding one text", xlabel="tokens of context", ylabel="tokens per second")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend(frameon=False)
    return drawn


def lines(axes, rows: list[dict], by: str, x: str, y: str) -> None:
    for name, mark in zip(dict.fromkeys(row[by] for row in rows), MARKS, strict=False):
        own = [row for row in rows if row[by] == name]
        axes.plot([row[x] for row in own], [row[y] for row in own], mark, label=name)
