"""The bytes that a program sends and holds, read from the program itself.

`collectives` lists the collectives of a jitted function, as written (`jax.jit(f).lower(...)`) or as
XLA compiled it (its `.compile()`): the kind of each, how often it runs, including the trip counts
of the loops around it, and its bytes on each device. `memory` gives the bytes that the compiled
function holds on each device. These numbers are exact, and the same in every process; times are
not.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from treeattn.hlo import Computation, Instruction, array_bytes, parse

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

    kind:          one of `COLLECTIVE_KINDS`; an asynchronous collective counts once, at its start
    count:         how often it runs, including the trip counts of the loops around it
    operand_bytes: bytes of a device's operands in one run. If XLA has joined several collectives
                   into one, the operands of all of them count
    shapes:        its operands, as in ("f32[1,16,128]", "f32[1,16]"), the largest first, because
                   the order in which XLA joins them means nothing
    groups:        the devices that communicate with each other, numbered in the order of the
                   program's mesh; pairs (from, to) for a collective-permute; () if the program
                   does not name them, which means all devices
    """

    kind: str
    count: int  # type: ignore[assignment]  # hides the method tuple.count
    operand_bytes: int
    shapes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def devices(self) -> int:
        """Devices in a group, 0 if the program names none; a collective-permute's pairs."""
        if self.kind == "collective-permute":
            return len(self.groups)
        return len(self.groups[0]) if self.groups else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of one device's operands over all `count` runs."""
        return self.count * self.operand_bytes

    @property
    def sent_bytes(self) -> int:
        """The least bytes that a device sends over all runs, on average over the devices.

        That is 2 (p − 1)/p of its operand in an Allreduce (2024 eq. 33, 2025 eq. 12), and
        (p − 1)/p in a reduce-scatter or an all-to-all. An all-gather sends the operand p − 1 times.
        A device that sends in a collective-permute or collective-broadcast sends the whole operand.
        A ring sends as much from every device; in a tree the root sends more than a leaf. A network
        whose switches add numbers themselves can do with less. Raises ValueError if the program
        does not name the devices.
        """
        p = self.devices
        if p == 0:
            raise ValueError(f"sent_bytes: the program does not say how many run the {self.kind}")
        shares = {  # of the operand, in p-ths
            "all-reduce": 2 * (p - 1),
            "all-gather": p * (p - 1),
            "collective-permute": p,
            "collective-broadcast": p,
        }
        bytes_times_p = shares.get(self.kind, p - 1) * self.operand_bytes
        return self.count * -(-bytes_times_p // p)


class Memory(NamedTuple):
    """Bytes that a compiled function holds on each device.

    alias_bytes: of output_bytes, those written in the place of a donated argument. A donated cache
                 that is not copied has all of its bytes here
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    alias_bytes: int

    @property
    def held_bytes(self) -> int:
        """Arguments and temporaries, as the papers count (2024 eq. 29-30, 2025 eq. 8-9)."""
        return self.argument_bytes + self.temporary_bytes


def collectives(program: Any) -> list[Collective]:
    """The collectives of a program, in the order of its text.

    program: `jax.jit(f).lower(...)`, for the collectives as written; its `.compile()`, for the
             collectives that run, after XLA has joined, moved or removed some; another object
             whose `as_text()` gives HLO; or HLO text. For an object of Equinox pass its `.lowered`
             or `.compiled`, which are JAX's

    Of a conditional's branches only the one with the most bytes counts. Raises TypeError for any
    other program, and ValueError for a collective in a loop without a trip count: only XLA notes
    trip counts, when it compiles a loop that runs a fixed number of times.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], "kv")
    >>> spec = jax.sharding.PartitionSpec("kv")
    >>> body = lambda x: jax.lax.psum(x, "kv")
    >>> program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    >>> (allreduce,) = collectives(program.lower(jax.numpy.ones(32, "float32")))
    >>> print(allreduce.kind, allreduce.operand_bytes)
    all-reduce 64
    """
    if isinstance(program, jax.stages.Lowered):
        text = program.as_text(dialect="hlo")
    else:
        text = program if isinstance(program, str) else _call("program", program, "as_text")
    computations, entry = parse(text)
    return _walk(entry, computations)


def memory(compiled: Any) -> Memory:
    """The bytes that a compiled function holds on each device, as XLA counts them.

    compiled: `jax.jit(f).lower(...).compile()`, or another object with its `memory_analysis()`

    >>> compiled = jax.jit(lambda x: x[:2]).lower(jax.numpy.ones(16, "float32")).compile()
    >>> held = memory(compiled)
    >>> print(held.argument_bytes, held.output_bytes)
    64 8
    """
    stats = _call("compiled", compiled, "memory_analysis")
    return Memory(
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
    )


def _call(name: str, program: Any, method: str) -> Any:
    """`program.method()`. Raises TypeError if there is none, or if it gives None."""
    analysis = getattr(program, method, lambda: None)()
    if analysis is None:
        raise TypeError(
            f"{name}: expected jax.jit(f).lower(...).compile(), or an object whose {method}() "
            f"returns what JAX's does, got {type(program).__name__}; of an object of Equinox pass "
            "its .compiled"
        )
    return analysis


def collectives_table(collectives: Iterable[Collective]) -> str:
    """The collectives as lines of text: how often each runs, and its bytes over all runs.

    "bytes put in" are those of a device's operands, "sent" the least that a device sends, on
    average over the devices. Raises ValueError if a collective does not say which devices take
    part.

    >>> all_eight = (tuple(range(8)),)
    >>> print(collectives_table([Collective("all-reduce", 3, 64, ("f32[16]",), all_eight)]))
    collective  runs  bytes put in  sent  operands
    all-reduce     3           192   336  f32[16]
    all            3           192   336
    """
    counted = [(c.kind, c.count, c.total_bytes, c.sent_bytes, c.shapes) for c in collectives]
    if not counted:
        return "no collectives"
    _, *columns, _ = zip(*counted, strict=True)
    counted.append(("all", *map(sum, columns), ()))
    rows = [("collective", "runs", "bytes put in", "sent", "operands")]
    for kind, *numbers, shapes in counted:
        rows.append((kind, *(f"{n:,}" for n in numbers), " ".join(shapes)))
    w0, w1, w2, w3, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for kind, runs, put_in, sent, operands in rows:
        line = f"{kind:{w0}}  {runs:>{w1}}  {put_in:>{w2}}  {sent:>{w3}}  {operands}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _walk(name: str, computations: dict[str, Computation]) -> list[Collective]:
    """The collectives of one run of the computation `name`, and of those that it calls."""
    computation = computations[name]
    listed = []
    for instruction in computation.values():
        kind = instruction.opcode.removesuffix("-start")
        if instruction.opcode.endswith(("-update", "-done")):
            continue  # counted at its start
        if kind in COLLECTIVE_KINDS:
            listed.append(_collective(kind, instruction, computation))
        elif instruction.opcode == "while":
            parts = instruction.called("condition", "body")
            looped = [c for part in parts for c in _walk(part, computations)]
            if looped:  # a loop without collectives needs no trip count
                trips = instruction.trip_count()
                listed += [c._replace(count=c.count * trips) for c in looped]
        elif instruction.opcode == "conditional":
            names = ("branch_computations", "true_computation", "false_computation")
            branches = [_walk(branch, computations) for branch in instruction.called(*names)]
            listed += max(branches, key=lambda branch: sum(c.total_bytes for c in branch))
        else:
            for callee in instruction.called("calls", "to_apply", "called_computations"):
                listed += _walk(callee, computations)
    return listed


def _collective(kind: str, instruction: Instruction, computation: Computation) -> Collective:
    """The instruction as a `Collective`. Its operands' shapes are looked up in the computation."""
    names = instruction.operands()
    if kind == "ragged-all-to-all":  # the other operands are the output, offsets and sizes
        names = names[:1]
    operands = [array for name in names for array in computation[name].arrays()]
    return Collective(
        kind=kind,
        count=1,
        operand_bytes=sum(map(array_bytes, operands)),
        shapes=tuple(sorted(operands, key=array_bytes, reverse=True)),
        groups=tuple(map(tuple, instruction.groups())),
    )
