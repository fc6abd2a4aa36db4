"""What is counted and calculated, as lines of text."""

from collections.abc import Sequence

from labs.cost.formulas import Number
from labs.cost.sharding import Step


def advice_table(steps: Sequence[Step]) -> str:
    """The best plan of each family, in the order of the steps: its parts in milliseconds.

    Of pipelines the best alone. held: bytes of weights and cache on a device; on: devices that the
    plan uses.
    """
    parts = ("step", "weights", "attend", "merge", "Allreduces", "launches", "held", "on")
    rows = [("ms", *parts, "plan")]
    best: dict[tuple, Step] = {}
    for step in steps:
        plan = step.plan
        kind = (plan.family, plan.split_weights, plan.copies > 1)
        best.setdefault("a pipeline" if plan.stages > 1 else kind, step)
    for step in best.values():
        times = (f"{1e3 * x:.2f}" for x in (step.seconds, *step[1:6]))
        where = (bytes_text(step.memory_bytes), str(step.plan.devices))
        text = f"{step.plan}{'' if step.fits else ': does not fit'}"
        rows.append((step.plan.family, *times, *where, text))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lines of aligned columns: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *middle, last in rows:
        middle = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *middle, last]).rstrip())
    return "\n".join(lines)


def bytes_text(count: Number) -> str:
    """Three digits and a decimal unit: 655360000 -> "655 MB"."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
    name, size = next((unit for unit in units if count >= 0.9995 * unit[1]), units[-1])
    return f"{float(f'{count / size:.3g}'):g} {name}"
