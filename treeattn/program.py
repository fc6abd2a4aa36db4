"""What a program sends and holds, read from the program itself.

`collectives` lists the collectives of a jitted function, as written (`jax.jit(f).lower(...)`) or
as XLA compiled it (its `.compile()`): their kinds, how often each runs, with the trip counts of
the loops around it, and the bytes that it takes from each device. `memory` gives what the
compiled function holds on each device. Both are exact and repeat between processes, which times
do not.

`collectives` reads the program's text (HLO): a list of computations, each of them a list of
instructions, which may call other computations:

    %name = f32[2,16]{1,0} all-reduce(%operand), replica_groups={{0,1}}, to_apply=%region
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

from treeattn.groups import groups

COLLECTIVE_KINDS = (
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

    kind:          one of `COLLECTIVE_KINDS`; the two halves of an asynchronous one are one
    count:         how often it runs, with the trip counts of the loops around it
    operand_bytes: what a device puts in, each time, all operands of a joined collective
    shapes:        its operands, as in ("f32[1,16,128]", "f32[1,16]"); the largest first, since
                   the order in which XLA joins them means nothing
    groups:        who takes part with whom, devices numbered in the order of the program's mesh;
                   for a collective-permute, pairs (from, to); () when the program does not say,
                   which means all
    """

    kind: str
    count: int
    operand_bytes: int
    shapes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def devices(self) -> int:
        """How many take part in a group; for a collective-permute, pairs that send; 0: all."""
        if self.kind == "collective-permute":
            return len(self.groups)
        return len(self.groups[0]) if self.groups else 0

    @property
    def total_bytes(self) -> int:
        """Bytes that one device puts in over all `count` runs."""
        return self.count * self.operand_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device must send over all runs, in a network that adds up nothing itself.

        Of an Allreduce every device sends 2 (p − 1)/p of what it puts in, at least (2024 eq. 33,
        2025 eq. 12), of a reduce-scatter and an all-to-all (p − 1)/p; what it gives to an
        all-gather it sends to p − 1 others, along a ring or otherwise. Raises ValueError where
        the program does not say how many take part.
        """
        p = self.devices
        if p == 0:
            raise ValueError(f"sent_bytes: the program does not say how many run the {self.kind}")
        shares = {  # of the operand, in p-ths
            "all-reduce": 2 * (p - 1),
            "reduce-scatter": p - 1,
            "all-to-all": p - 1,
            "ragged-all-to-all": p - 1,
            "all-gather": p * (p - 1),
        }
        bytes_times_p = shares.get(self.kind, p) * self.operand_bytes
        return self.count * -(-bytes_times_p // p)


class Memory(NamedTuple):
    """Bytes that a compiled function holds on each device."""

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int

    @property
    def held_bytes(self) -> int:
        """Arguments and temporaries: what the papers count (2024 eq. 29-30, 2025 eq. 8-9)."""
        return self.argument_bytes + self.temporary_bytes


def collectives(program: jax.stages.Lowered | jax.stages.Compiled | str) -> list[Collective]:
    """The collectives of a program, in the order of its text.

    program: what `jax.jit(f).lower(...)` returns, for the collectives that were written; what
             its `.compile()` returns, for those that run, after XLA has joined, moved or
             removed some; or HLO text

    Of a conditional's branches, the one that puts in most counts. Raises TypeError for anything
    else, and ValueError for a collective in a loop without a trip count: XLA notes it when it
    compiles, where the program fixes it.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], "kv")
    >>> spec = jax.sharding.PartitionSpec("kv")
    >>> body = lambda x: jax.lax.psum(x, "kv")
    >>> program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    >>> (found,) = collectives(program.lower(jax.numpy.ones(32, "float32")))
    >>> print(found.kind, found.operand_bytes)
    all-reduce 64
    """
    computations, entry = _parse(_text(program))
    return _walk(entry, computations)


def memory(compiled: jax.stages.Compiled) -> Memory:
    """What a compiled function holds on each device, in bytes, by XLA's own account.

    >>> compiled = jax.jit(lambda x: x[:2]).lower(jax.numpy.ones(16, "float32")).compile()
    >>> held = memory(compiled)
    >>> print(held.argument_bytes, held.output_bytes)
    64 8
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"compiled: expected jax.jit(f).lower(...).compile(), got {type(compiled).__name__}"
        )
    stats = compiled.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes, stats.temp_size_in_bytes, stats.output_size_in_bytes
    )


def count_collectives(found: Iterable[Collective]) -> int:
    """How many collectives each device runs, loops included."""
    return sum(c.count for c in found)


def total_bytes(found: Iterable[Collective]) -> int:
    """Bytes that each device puts into the collectives, loops included."""
    return sum(c.total_bytes for c in found)


def sent_bytes(found: Iterable[Collective]) -> int:
    """Bytes that each device must send in the collectives, loops included."""
    return sum(c.sent_bytes for c in found)


def collectives_table(found: Iterable[Collective]) -> str:
    """The collectives as lines of text: how often each runs, and how many bytes that takes.

    Of all runs: what each device puts in, and what it must send at least.

    >>> everybody = (tuple(range(8)),)
    >>> print(collectives_table([Collective("all-reduce", 3, 64, ("f32[16]",), everybody)]))
    collective  runs  bytes put in  sent  operands
    all-reduce     3           192   336  f32[16]
    all            3           192   336
    """
    found = list(found)
    if not found:
        return "no collectives"
    rows = [("collective", "runs", "bytes put in", "sent", "operands")]
    for c in found:
        numbers = f"{c.count:,}", f"{c.total_bytes:,}", f"{c.sent_bytes:,}"
        rows.append((c.kind, *numbers, " ".join(c.shapes)))
    numbers = f"{count_collectives(found):,}", f"{total_bytes(found):,}", f"{sent_bytes(found):,}"
    return _columns([*rows, ("all", *numbers, "")])


def _columns(rows: list[tuple[str, ...]]) -> str:
    """Lines of aligned columns: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *middle, last in rows:
        middle = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *middle, last]).rstrip())
    return "\n".join(lines)


def _text(program: jax.stages.Lowered | jax.stages.Compiled | str) -> str:
    """The program's HLO."""
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


class _Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    rest: str  # the operands, the closing parenthesis, the attributes

    def called(self, *attributes: str) -> list[str]:
        """The computations that the instruction calls under these attributes."""
        found = re.findall(rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return [name for text in found for name in re.findall(r"[\w.\-]+", text)]


# Instructions by name.
_Computation = dict[str, _Instruction]
# The first word before a parenthesis is the opcode: types have none, or none after a space.
_LINE = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ?([a-z][\w\-]*)\((.*)")


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """(computations by name, the entry's name). ValueError when there is no entry."""
    computations = {}
    entry = None
    current = None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is not None:
            parts = _LINE.match(re.sub(r"/\*.*?\*/", "", line.strip()))
            if parts is None:
                raise ValueError(f"program: expected an instruction, got {line[:80]!r}")
            current[parts[1]] = _Instruction(*parts.groups())
        elif head := re.match(r"(ENTRY )?%?([\w.\-]+)( \(.*)? \{$", line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
    if entry is None:
        raise ValueError("program: expected HLO text with an ENTRY computation, found none")
    return computations, entry


def _walk(name: str, computations: dict[str, _Computation]) -> list[Collective]:
    """The collectives of one run of the computation `name`, with those that it calls."""
    inside = computations[name]
    found = []
    for instruction in inside.values():
        kind = instruction.opcode.removesuffix("-start")
        if instruction.opcode.endswith(("-update", "-done")):
            continue  # counted where it starts
        if kind in COLLECTIVE_KINDS:
            found.append(_collective(kind, instruction, inside))
        elif instruction.opcode == "while":
            parts = instruction.called("condition", "body")
            looped = [c for part in parts for c in _walk(part, computations)]
            if looped:  # a loop that sends nothing may run as often as it likes
                trips = _trip_count(instruction)
                found += [c._replace(count=c.count * trips) for c in looped]
        elif instruction.opcode == "conditional":
            names = ("branch_computations", "true_computation", "false_computation")
            branches = [_walk(branch, computations) for branch in instruction.called(*names)]
            found += max(branches, key=total_bytes)
        else:
            for callee in instruction.called("calls", "to_apply", "called_computations"):
                found += _walk(callee, computations)
    return found


def _trip_count(loop: _Instruction) -> int:
    """How often a while loop runs, as XLA noted when it compiled it; else a ValueError."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if known is None:
        raise ValueError(
            f"program: it does not say how often the loop {loop.name} runs. Expected a compiled "
            "program (jax.jit(f).lower(...).compile()), whose loops run a fixed number of times"
        )
    return int(known[1])


def _collective(kind: str, instruction: _Instruction, inside: _Computation) -> Collective:
    """The instruction, one of the computation `inside`, which has its operands' shapes."""
    names = re.findall(r"[\w.\-]+", instruction.rest.partition(")")[0])
    operands = [shape for name in names for shape in _shapes(inside[name].type)]
    return Collective(
        kind=kind,
        count=1,
        operand_bytes=sum(map(_shape_bytes, operands)),
        shapes=tuple(sorted(operands, key=_shape_bytes, reverse=True)),
        groups=tuple(map(tuple, groups(instruction.rest))),
    )


def _shapes(type_: str) -> list[str]:
    """The arrays of a type, without layouts: "(f32[2]{0}, s32[])" -> ["f32[2]", "s32[]"]."""
    return re.findall(r"\b[a-z]\w*\[[\d,]*\]", type_)


def _shape_bytes(shape: str) -> int:
    """The bytes of an array: "bf16[2,3]" -> 12."""
    dtype, dims = shape[:-1].split("[")
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.ceil(math.prod(int(n) for n in dims.split(",") if n) * bits / 8)
