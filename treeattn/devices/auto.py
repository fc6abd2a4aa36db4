"""method="auto": the merge that is fastest on the devices at hand, by what was measured on them.

Counted are the collectives that each method compiles to, and what a device puts into them; what a
device computes in between differs little, and is left out. `tree_decode`, `merge_across` and a
Llama say which methods they could take, and what a device merges; `fastest` chooses.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeattn.devices.layout import Layout
from treeattn.devices.mesh import AnyMesh, Axes
from treeattn.kernel.inputs import Inputs
from treeattn.measured import CollectiveTimes, Group


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


# The collectives of a method, by what a device merges, the groups along each axis, outermost first,
# and the one along all of them.
SentBy = Callable[[str, StateSize, list[Group], Group], list[Sent]]


def fastest(
    measured: CollectiveTimes | None,
    methods: Sequence[str],
    size: StateSize,
    mesh: AnyMesh,
    axes: Axes,
    sent: SentBy | None = None,
) -> str:
    """The method whose collectives over the axes take least by what was measured.

    The first of equals; and the first where nothing was measured, or there is one device.
    sent: what a method sends; `collectives_of` when None

    Raises ValueError for times of another kind of device than the mesh's, of fewer devices, and
    without groups as large as its axes.
    """
    groups = [group_along(mesh, (name,)) for name in axes]
    if measured is None or all(group.devices == 1 for group in groups):
        return methods[0]
    measured.check_devices(device_kind(mesh), mesh.size)
    whole = group_along(mesh, axes)

    def seconds(method: str) -> float:
        messages = (sent or collectives_of)(method, size, groups, whole)
        return sum(measured.seconds(x.kind, x.size, *x.group) for x in messages)

    return min(methods, key=seconds)


def fastest_method(
    measured: CollectiveTimes | None,
    methods: Sequence[str],
    inputs: Inputs,
    layout: Layout,
    *,
    scatter: bool = False,
    wire: DTypeLike | None = None,
) -> str:
    """The fastest of `tree_decode`'s methods, for these inputs. Raises ValueError as `fastest`."""

    def sent(*given) -> list[Sent]:
        return collectives_of(*given, scatter=scatter)

    b, l, h, _ = inputs.q.shape
    rows = b // _count(layout, layout.batch) * l
    heads = h // _count(layout, layout.heads)
    size = state_size(rows, heads, inputs.v.shape[-1], inputs.q.dtype, wire)
    return fastest(measured, methods, size, layout.mesh, layout.axes, sent)


def _count(layout: Layout, axes: Axes) -> int:
    return math.prod(layout.mesh.shape[name] for name in axes)


def collectives_of(
    method: str,
    size: StateSize,
    groups: list[Group],
    whole: Group,
    *,
    scatter: bool = False,
    finished: bool = True,
) -> list[Sent]:
    """What a method compiles to, over axes with these groups, outermost first, whole together.

    scatter:  whether each device keeps its share of the heads, where a method leaves it that
    finished: whether shares that everybody is to have travel as outputs; else as states
    """
    if method in ("reduce_scatter", "all_to_all"):
        sent = _scattered(method, size, whole)
        if not scatter:
            share = size.share(whole.devices)
            sent.append(Sent("all-gather", share.output if finished else share.state, whole))
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


def group_along(mesh: AnyMesh, axes: Axes) -> Group:
    """The devices along the axes, and how far apart neighbours along the innermost are."""
    names = list(mesh.axis_names)
    strides = [math.prod(mesh.shape[n] for n in names[names.index(a) + 1 :]) for a in axes]
    return Group(math.prod(mesh.shape[name] for name in axes), min(strides))


def device_kind(mesh: AnyMesh) -> str | None:
    """The kind of a mesh's devices, as JAX names it; None where an AbstractMesh does not say."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    device = getattr(mesh, "abstract_device", None)
    return None if device is None else device.device_kind


def surrounding_mesh(axes: Axes) -> AnyMesh:
    """The mesh of the `shard_map` around the call; a ValueError where it has no such axes."""
    mesh = jax.sharding.get_abstract_mesh()
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(
                f"axis_name: method 'auto' expects axes of the mesh of a shard_map, which has "
                f"{mesh.axis_names}, got {name!r}"
            )
    return mesh


def state_size(
    rows: int, heads: int, values: int, dtype: DTypeLike, wire: DTypeLike | None
) -> StateSize:
    """Of states of so many queries and heads, of outputs of that size and dtype."""
    item = jnp.dtype(dtype).itemsize
    sent = None if wire is None else jnp.dtype(wire).itemsize
    return StateSize(rows, heads, values, item=max(4, item), out_item=item, wire=sent)
