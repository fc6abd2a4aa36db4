"""The text of a compiled program (HLO), as computations and their instructions.

The text is a list of computations, each a list of instructions, which may call other computations:

    %name = f32[2,16]{1,0} all-reduce(%operand), replica_groups={{0,1}}, to_apply=%region

HLO writes the devices that communicate in one of four ways:

    {{0,1},{1,0}}                         pairs (from, to)
    {{0,1},{2,3}}                         groups
    [2,2]<=[2,2]T(1,0)                    groups: rows of arange(4).reshape(2, 2).transpose(1, 0)
    mesh['node'=2,'device'=4] {'device'}  groups along axes of a mesh

The numbers count the devices of the program's mesh in order.
"""

import math
import re
from typing import NamedTuple

import numpy as np


class Instruction(NamedTuple):
    """One line of a computation.

    rest: the operands, the closing parenthesis and the attributes
    """

    name: str
    type: str
    opcode: str
    rest: str

    def called(self, *attributes: str) -> list[str]:
        """The computations that the instruction calls under these attributes."""
        lists = re.findall(rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return [name for text in lists for name in re.findall(r"[\w.\-]+", text)]

    def operands(self) -> list[str]:
        """The names of the instructions whose results are the operands."""
        return re.findall(r"[\w.\-]+", self.rest.partition(")")[0])

    def arrays(self) -> list[str]:
        """The arrays of the result, without layouts: "(f32[2]{0}, s32[])" -> f32[2], s32[]."""
        return re.findall(r"\b[a-z]\w*\[[\d,]*\]", self.type)

    def trip_count(self) -> int:
        """How often a while loop runs. Raises ValueError unless XLA noted it when compiling."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        if known is None:
            raise ValueError(
                f"program: it does not say how often the loop {self.name} runs. Expected "
                "jax.jit(f).lower(...).compile(), and loops that run a fixed number of times"
            )
        return int(known[1])

    def groups(self) -> list[list[int]]:
        """The groups, or pairs, of devices by their numbers; none if they are not written."""
        if lists := re.search(r"(?:source_target_pairs|replica_groups)=\{([\d,{}]*)\}", self.rest):
            return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", lists[1])]
        rows = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.rest)
        if rows:
            shape, *transposition = rows.groups()
            return _transposed(*transposition).reshape(_numbers(shape)).tolist()
        mesh = re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", self.rest)
        return _groups_of_mesh(*mesh.groups()) if mesh else []


Computation = dict[str, Instruction]  # by name
# The opcode is the first lower-case word with a parenthesis after it. No type contains such a word.
_LINE = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ?([a-z][\w\-]*)\((.*)")


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """(computations by name, the entry's name). Raises ValueError if there is no entry."""
    computations: dict[str, Computation] = {}
    entry = None
    current = None
    # Pallas writes notes about its kernels for TPUs over several lines.
    text = re.sub(r"kernel_metadata=\{\n.*?\n\}", "", text, flags=re.DOTALL)
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is not None:
            parts = _LINE.match(re.sub(r"/\*.*?\*/", "", line.strip()))
            if parts is None:
                raise ValueError(f"program: expected an instruction, got {line[:80]!r}")
            current[parts[1]] = Instruction(*parts.groups())
        elif head := re.match(r"(ENTRY )?%?([\w.\-]+)( \(.*)? \{$", line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
    if entry is None:
        raise ValueError("program: expected HLO text with an ENTRY computation, found none")
    return computations, entry


def array_bytes(array: str) -> int:
    """The bytes of an array: "bf16[2,3]" -> 12."""
    dtype, dimensions = array[:-1].split("[")
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.ceil(math.prod(_numbers(dimensions)) * bits / 8)


def _groups_of_mesh(axes: str, devices: str, within: str) -> list[list[int]]:
    """The groups of devices along the mesh axes `within`.

    The mesh holds the numbers in order, unless `devices` gives another order, as in
    device_ids=([3,2]T(1,0)).
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", axes)}
    ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", devices)
    numbers = _transposed(*ids.groups()) if ids else np.arange(math.prod(sizes.values()))
    inner = re.findall(r"'(.*?)'", within)
    axes_within = [list(sizes).index(name) for name in inner]
    numbers = numbers.reshape(*sizes.values())
    numbers = np.moveaxis(numbers, axes_within, range(-len(inner), 0))
    return numbers.reshape(-1, math.prod(sizes[name] for name in inner)).tolist()


def _transposed(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2, … in this shape, with its axes in this order: "3,2" and "1,0" -> [[0,2,4], …]."""
    sizes = _numbers(shape)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(order) or None)


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []
