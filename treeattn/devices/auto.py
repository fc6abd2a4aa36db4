"""method="auto": the merge that is fastest on the devices at hand, by what was measured on them.

Counted are the collectives that each method compiles to, and what a device puts into them; what a
device computes in between differs little, and is left out.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from treeattn.devices.layout import Layout
from treeattn.devices.merge import METHODS, SCATTERED
from treeattn.devices.mesh import Axes
from treeattn.kernel.inputs import Inputs
from treeattn.measured import CollectiveTimes, Group

ONE_ORDER = ("butterfly", "gather", "all_to_all")  # that `block` allows


class Sent(NamedTuple):
    """A collective: its kind, the bytes that a device puts in, and among which devices."""

    kind: str
    size: int
    group: Group


class StateSize(NamedTuple):
    """The states that a device merges: queries of all its rows, heads, and bytes of each.

    rows:     queries of all rows that the device has
    heads:    query heads that it has
    values:   numbers of an output
    item:     bytes of a number of the state
    out_item: of one of the output
    wire:     of one on the wire, or None where states travel as they are
    """

    rows: int
    heads: int
    values: int
    item: int
    out_item: int
    wire: int | None

    def share(self, p: int) -> "StateSize":
        """A device's share of the heads over p devices."""
        return self._replace(heads=-(-self.heads // p))

    @property
    def lse(self) -> int:
        """Bytes of a number for each query and head."""
        return self.rows * self.heads * self.item

    @property
    def sums(self) -> int:
        """Bytes of denominators and numerators together."""
        return self.lse * (self.values + 1)

    @property
    def state(self) -> int:
        """Bytes of a state in one message."""
        if self.wire is None:
            return self.lse * (self.values + 2)
        return self.lse + self.wired

    @property
    def wired(self) -> int:
        """Bytes of the outputs on the wire."""
        return self.rows * self.heads * self.values * (self.wire or self.item)

    @property
    def output(self) -> int:
        """Bytes of finished outputs, with their lse."""
        return self.lse + self.rows * self.heads * self.values * self.out_item


def fastest_method(
    measured: CollectiveTimes | None,
    inputs: Inputs,
    layout: Layout,
    *,
    scatter: bool = False,
    block: int | None = None,
    wire: DTypeLike | None = None,
) -> str:
    """The method whose collectives take least by what was measured; the first of equals.

    Where nothing was measured, the default: "allreduce", with scatter "reduce_scatter", with block
    "butterfly". Raises ValueError where a group as large as the layout's was not measured.
    """
    groups = [_group(layout.mesh, (name,)) for name in layout.axes]
    methods = [m for m in METHODS if m != "hierarchical" or len(layout.axes) > 1]
    if scatter:
        methods = [m for m in methods if m in (*SCATTERED, "hierarchical")]
    if block is not None:
        methods = [m for m in methods if m in ONE_ORDER]
    if measured is None or all(g.devices == 1 for g in groups) or len(methods) < 2:
        return methods[0]
    size = _state_size(inputs, layout, wire)
    whole = _group(layout.mesh, layout.axes)

    def seconds(method: str) -> float:
        sent = collectives_of(method, size, groups, whole, scatter=scatter)
        return sum(measured.seconds(x.kind, x.size, *x.group) for x in sent)

    return min(methods, key=seconds)


def collectives_of(
    method: str, size: StateSize, groups: list[Group], whole: Group, *, scatter: bool = False
) -> list[Sent]:
    """What a method compiles to, over axes with these groups, outermost first, whole together."""
    if method in SCATTERED:
        sent = _scattered(method, size, whole)
        if not scatter:
            sent.append(Sent("all-gather", size.share(whole.devices).output, whole))
        return sent
    if method == "hierarchical":
        return _by_nodes(size, groups, scatter)
    sent = []
    for group in reversed(groups):
        if method == "allreduce":
            sent += _sums("all-reduce", size, group)
        elif method == "butterfly":
            sent += [Sent("collective-permute", size.state, group)] * _rounds(group.devices)
        else:
            sent.append(Sent("all-gather", size.state, group))
    return sent


def _scattered(method: str, size: StateSize, group: Group) -> list[Sent]:
    """Each device ends with its share of the heads, of which the last may be padding."""
    p = group.devices
    padded = size._replace(heads=size.share(p).heads * p)
    if method == "all_to_all":
        return [Sent("all-to-all", padded.state, group)]
    return _sums("reduce-scatter", padded, group)


def _by_nodes(size: StateSize, groups: list[Group], scatter: bool) -> list[Sent]:
    """Shares within a node, which is the last group, merged between nodes, and gathered again."""
    if scatter:
        p = math.prod(group.devices for group in groups)
        share = size._replace(heads=size.share(p).heads * p)  # padded once, for all of them
        sent = []
        for group in reversed(groups):
            sent.append(Sent("all-to-all", share.state, group))
            share = share.share(group.devices)
        return sent
    *between, inside = groups
    sent = _scattered("all_to_all", size, inside)
    share = size.share(inside.devices)
    sent += [Sent("all-gather", share.state, group) for group in reversed(between)]
    return [*sent, Sent("all-gather", share.state, inside)]


def _sums(kind: str, size: StateSize, group: Group) -> list[Sent]:
    """Pivots, then sums; with a wire, everybody's lse, then weighted outputs."""
    if size.wire is None:
        return [Sent("all-reduce", size.lse, group), Sent(kind, size.sums, group)]
    return [Sent("all-gather", size.lse, group), Sent(kind, size.wired, group)]


def _rounds(p: int) -> int:
    """Of a butterfly: two more where p is no power of two."""
    core = p.bit_length() - 1
    return core + (0 if p == 1 << core else 2)


def _group(mesh: Mesh | AbstractMesh, axes: Axes) -> Group:
    """The devices along the axes, and how far apart neighbours along the innermost are."""
    names = list(mesh.axis_names)
    strides = [math.prod(mesh.shape[n] for n in names[names.index(a) + 1 :]) for a in axes]
    return Group(math.prod(mesh.shape[name] for name in axes), min(strides))


def _state_size(inputs: Inputs, layout: Layout, wire: DTypeLike | None) -> StateSize:
    """Of what one device of the layout merges."""
    b, l, h, _ = inputs.q.shape
    rows = b // math.prod(layout.mesh.shape[name] for name in layout.batch) * l
    heads = h // math.prod(layout.mesh.shape[name] for name in layout.heads)
    return StateSize(
        rows,
        heads,
        inputs.v.shape[-1],
        item=max(4, jnp.dtype(inputs.q.dtype).itemsize),
        out_item=jnp.dtype(inputs.q.dtype).itemsize,
        wire=None if wire is None else jnp.dtype(wire).itemsize,
    )
