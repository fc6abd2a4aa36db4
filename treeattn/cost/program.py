"""What a program sends and holds, read from the program itself.

`collectives` lists the collectives of a jitted function, as written (`jax.jit(f).lower(...)`) or
as XLA compiled it (its `.compile()`): their kinds, how often each runs, with the trip counts of
the loops around it, and the bytes that it takes from each device. `memory` gives what the
compiled function holds on each device. Both are exact and repeat between processes, which times
do not.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

from treeattn.cost import hlo

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """One collective instruction of a program, as each device runs it.

    kind:          one of `KINDS`; the two halves of an asynchronous one are one
    count:         how often it runs, with the trip counts of the loops around it
    operand_bytes: what a device puts in, each time, all operands of a joined collective
    result_bytes:  what a device gets out, each time
    shapes:        its operands, as in ("f32[1,16,128]", "f32[1,16]"); the largest first, since
                   the order in which XLA joins them means nothing
    devices:       how many take part in a group; for a collective-permute, pairs that send;
                   0 when the program does not say, which means all
    """

    kind: str
    count: int
    operand_bytes: int
    result_bytes: int
    shapes: tuple[str, ...]
    devices: int

    @property
    def total_bytes(self) -> int:
        """Bytes that one device puts in over all `count` runs."""
        return self.count * self.operand_bytes


class Memory(NamedTuple):
    """Bytes that a compiled function holds on each device."""

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments and temporaries: what the papers count (v1 eq. 29-30, v2 eq. 8-9)."""
        return self.argument_bytes + self.temporary_bytes


def collectives(program: jax.stages.Lowered | jax.stages.Compiled | str) -> list[Collective]:
    """The collectives of a program, in the order of its text.

    program: what `jax.jit(f).lower(...)` returns, for the collectives that were written; what
             its `.compile()` returns, for those that run, after XLA has joined, moved or
             removed some; or HLO text.

    Of a conditional's branches, the one that puts in most counts. Raises TypeError for anything
    else, and ValueError for a collective in a loop whose trip count the program does not fix.
    """
    computations, entry = hlo.parse(_text(program))
    return _walk(entry, 1, computations)


def memory(compiled: jax.stages.Compiled) -> Memory:
    """What a compiled function holds on each device, in bytes, by XLA's own account."""
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"compiled: expected jax.jit(f).lower(...).compile(), got {type(compiled).__name__}"
        )
    stats = compiled.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes, stats.temp_size_in_bytes, stats.output_size_in_bytes
    )


def count(found: Iterable[Collective], kind: str | None = None) -> int:
    """How many collectives (of one kind) each device runs, loops included."""
    return sum(c.count for c in found if kind in (None, c.kind))


def total_bytes(found: Iterable[Collective], kind: str | None = None) -> int:
    """Bytes that each device puts into the collectives (of one kind), loops included."""
    return sum(c.total_bytes for c in found if kind in (None, c.kind))


def table(found: Iterable[Collective]) -> str:
    """The collectives as lines of text: what runs, how often, and what each device puts in."""
    found = list(found)
    if not found:
        return "no collectives"
    rows = [("collective", "runs", "bytes each", "bytes", "operands")]
    for c in found:
        numbers = f"{c.count:,}", f"{c.operand_bytes:,}", f"{c.total_bytes:,}"
        rows.append((c.kind, *numbers, " ".join(c.shapes)))
    rows.append(("all", f"{count(found):,}", "", f"{total_bytes(found):,}", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for kind, *numbers, operands in rows:
        aligned = [text.rjust(width) for text, width in zip(numbers, widths[1:4], strict=True)]
        lines.append("  ".join([kind.ljust(widths[0]), *aligned, operands]).rstrip())
    return "\n".join(lines)


def _text(program: jax.stages.Lowered | jax.stages.Compiled | str) -> str:
    if isinstance(program, str):
        return program
    if isinstance(program, jax.stages.Compiled):
        return program.as_text()
    if isinstance(program, jax.stages.Lowered):
        return program.as_text(dialect="hlo")
    raise TypeError(
        "program: expected jax.jit(f).lower(...), its .compile(), or HLO text, "
        f"got {type(program).__name__}"
    )


def _walk(name: str, times: int, computations: hlo.Computations) -> list[Collective]:
    """The collectives of the computation `name`, run `times` times."""
    inside, found = computations[name], []
    for key, this in inside.items():
        kind = this.opcode.removesuffix("-start")
        if key == "ROOT" or this.opcode.endswith(("-update", "-done")):
            continue  # listed under its own name as well; counted where it starts
        if kind in KINDS:
            found.append(_collective(kind, times, this, inside))
        elif this.opcode == "while":
            parts = this.called("condition", "body")
            looped = [c for part in parts for c in _walk(part, times, computations)]
            if looped:  # a loop that sends nothing may run as often as it likes
                trips = hlo.trip_count(this, inside, computations)
                found += [c._replace(count=c.count * trips) for c in looped]
        elif this.opcode == "conditional":
            branches = this.called("branch_computations", "true_computation", "false_computation")
            found += max((_walk(b, times, computations) for b in branches), key=total_bytes)
        else:
            for callee in this.called("calls", "to_apply", "called_computations"):
                found += _walk(callee, times, computations)
    return found


def _collective(
    kind: str, times: int, this: hlo.Instruction, inside: hlo.Computation
) -> Collective:
    operands = [shape for name in this.operands for shape in hlo.shapes(inside[name].type)]
    results = hlo.shapes(this.type)
    if this.opcode.endswith("-start") and kind != "all-reduce":
        # The type of these is (operands, results, context …).
        results = results[len(operands) : 2 * len(operands)]
    return Collective(
        kind,
        times,
        sum(map(hlo.shape_bytes, operands)),
        sum(map(hlo.shape_bytes, results)),
        tuple(sorted(operands, key=hlo.shape_bytes, reverse=True)),
        _devices(this.attributes),
    )


def _devices(attributes: str) -> int:
    """The size of a group: the first of {{0,1},{2,3}}, or the last number of [2,2]<=[4]."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{}]*)\}", attributes):
        return pairs[1].count("{")
    if short := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(short[1])
    if long := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(long[1].split(","))
    return 0
