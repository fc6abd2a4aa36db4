"""Reading XLA's text form of a program (HLO): its computations, and how often its loops run.

A program is a list of computations, a computation a list of instructions

    %name = f32[2,16]{1,0} all-reduce(%operand), replica_groups={{0,1}}, to_apply=%region

that may call other computations. `treeattn.cost.program` reads collectives with it.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    arguments: str  # what stands between the parentheses
    attributes: str  # and after them

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that this one takes."""
        return re.findall(r"%?([\w.\-]+)(?=,|$)", self.arguments)

    def attribute(self, name: str) -> str | None:
        """The attribute `name=…` as text, up to its closing brace or the next comma."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1] if found else None

    def called(self, *attributes: str) -> list[str]:
        """The computations that the instruction calls under these attributes."""
        texts = [self.attribute(name) or "" for name in attributes]
        return [name for text in texts for name in re.findall(r"[\w.\-]+", text)]


# Instructions by name, in order; the last one's result is the computation's.
Computation = dict[str, Instruction]
Computations = dict[str, Computation]


def parse(text: str) -> tuple[Computations, str]:
    """(computations by name, the entry's name). ValueError when there is no entry."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is not None:
            instruction = _instruction(line)
            current[instruction.name] = instruction
            if line.lstrip().startswith("ROOT "):
                current["ROOT"] = current.pop(instruction.name)
                current[instruction.name] = instruction
        elif head := re.match(r"(ENTRY )?%?([\w.\-]+)( \(.*)? \{$", line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
    if entry is None:
        raise ValueError("program: expected HLO text with an ENTRY computation, found none")
    return computations, entry


def _instruction(line: str) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line).strip().removeprefix("ROOT ")
    name, rest = line.removeprefix("%").split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = start + _closing(rest[start:])
    return Instruction(name, type_, rest[:start], rest[start + 1 : end - 1], rest[end:])


def _closing(text: str) -> int:
    """The length of the parenthesis that `text` begins with."""
    depth = 0
    for i, char in enumerate(text, 1):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i
    raise ValueError(f"program: unbalanced parentheses in {text[:80]!r}")


def shapes(type_: str) -> list[str]:
    """The arrays of a type, without layouts: "(f32[2]{0}, s32[])" -> ["f32[2]", "s32[]"]."""
    return re.findall(r"\b[a-z]\w*\[[\d,]*\]", type_)


def shape_bytes(shape: str) -> int:
    """The bytes of an array: "bf16[2,3]" -> 12."""
    dtype, dims = shape[:-1].split("[")
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.ceil(math.prod(int(n) for n in dims.split(",") if n) * bits / 8)


def trip_count(loop: Instruction, inside: Computation, computations: Computations) -> int:
    """How often the body of the while `loop` runs: as XLA notes it, or by running its counter.

    Raises ValueError when that depends on what the program computes.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known[1])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    condition, body = computations[condition], computations[body]
    try:
        return _run(
            lambda i: _element(loop.operands[0], i, inside, None, computations),
            lambda state: _value("ROOT", condition, state, computations),
            lambda i, state: _element("ROOT", i, body, state, computations),
        )
    except _UnknownError as unknown:
        raise ValueError(
            f"program: how often the loop {loop.name} runs is not fixed, it depends on {unknown}"
        ) from None


class _UnknownError(Exception):
    """A value that only running the program would show."""


class _NeededError(Exception):
    """An element of a loop's state that decides its trip count as well."""


class _State(dict):
    """The elements of a loop's state that decide how often it runs, by index."""

    def __missing__(self, index: int):
        raise _NeededError(index)


def _run(start: Callable, condition: Callable, step: Callable, limit: int = 1_000_000) -> int:
    """Trips of `while condition(state): state = step(state)`, on the elements that decide."""
    deciding: list[int] = []
    while True:
        try:
            state, trips = _State({i: start(i) for i in deciding}), 0
            while condition(state):
                state = _State({i: step(i, state) for i in deciding})
                trips += 1
                if trips > limit:
                    raise _UnknownError(f"more than {limit} steps")
            return trips
        except _NeededError as needed:
            deciding.append(needed.args[0])


_SCALAR = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "select": lambda test, a, b: a if test else b,
    "compareLT": lambda a, b: a < b,
    "compareLE": lambda a, b: a <= b,
    "compareGT": lambda a, b: a > b,
    "compareGE": lambda a, b: a >= b,
    "compareEQ": lambda a, b: a == b,
    "compareNE": lambda a, b: a != b,
}
_SAME = ("copy", "convert", "bitcast", "reshape", "optimization-barrier")


def _value(name: str, inside: Computation, given, computations: Computations) -> int | bool:
    """The integer or boolean that an instruction computes.

    given: what its computation is given: a loop's state, a list of functions that return the
           arguments of a call, or None at the program's entry.
    """
    this = inside[name]

    def operand(i: int):
        return _value(this.operands[i], inside, given, computations)

    if this.opcode == "constant" and this.arguments in ("true", "false"):
        return this.arguments == "true"
    if this.opcode == "constant" and re.fullmatch(r"-?\d+", this.arguments):
        return int(this.arguments)
    if this.opcode in _SAME:
        return operand(0)
    if function := _SCALAR.get(this.opcode + (this.attribute("direction") or "")):
        return function(*(operand(i) for i in range(len(this.operands))))
    if this.opcode == "get-tuple-element":
        index = int(this.attribute("index"))
        return _element(this.operands[0], index, inside, given, computations)
    if this.opcode == "parameter" and isinstance(given, list):
        return given[int(this.arguments)]()
    if this.opcode in ("fusion", "call"):
        (callee,) = this.called("calls", "to_apply")
        arguments = [lambda i=i: operand(i) for i in range(len(this.operands))]
        return _value("ROOT", computations[callee], arguments, computations)
    raise _UnknownError(f"{this.name} = {this.opcode}(…)")


def _element(name: str, index: int, inside: Computation, given, computations: Computations):
    """Element `index` of the tuple that an instruction computes, as `_value` gives it."""
    this = inside[name]
    if this.opcode == "tuple":
        return _value(this.operands[index], inside, given, computations)
    if this.opcode in _SAME:
        return _element(this.operands[0], index, inside, given, computations)
    if this.opcode == "parameter" and isinstance(given, _State):
        return given[index]
    raise _UnknownError(f"{this.name} = {this.opcode}(…)")
