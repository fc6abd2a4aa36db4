"""Where the parts of a plan lie on a topology: blocks of neighbours, and devices far apart."""

import functools
import math
from dataclasses import replace

from labs.cost.topology import Level, Protocol, Topology
from treeattn.idea.arrays import integer


@functools.lru_cache(maxsize=1024)
def every_nth(topology: Topology, stride: int) -> Topology:
    """What a collective of every stride-th device meets while all the others run the same.

    Devices 0, stride, 2 stride, … have the topology returned; device 1 and those as far from it,
    …, have as much beside them, so that links which a node's devices share carry all of theirs.
    With one device in a node a ring's messages wait for the network as a tree's do: NCCL's
    `tuning.cc` takes the tree's hop then.

    On a torus the devices are laid along its sides: the stride is taken out of the last ones. Where
    it is a part of a side, hops are as long as that, which is too much for those along others.

    Raises TypeError for a stride that is no whole number, ValueError for one below 1.
    """
    stride = integer("stride", stride, 1)
    if stride == 1:
        return topology
    levels = []
    units = topology.unit_sizes()
    left = stride
    devices = 1  # of the collective, in a unit of the level
    for level, unit in zip(topology.levels, units, strict=True):
        size = max(1, -(-level.size // left))
        if isinstance(level.wiring, tuple):
            levels.append(_part_of_torus(level, left))
        else:
            ports = level.links or unit
            own = min(ports, devices)
            share = ports * devices / (unit * own)
            links = None if level.links is None else own
            bandwidth = level.bandwidth * share
            levels.append(replace(level, size=size, bandwidth=bandwidth, links=links))
        left = max(1, left // level.size)
        devices *= size
    protocols = topology.protocols
    if levels[0].size == 1:
        protocols = tuple(_with_hops_of_trees(x, protocols) for x in protocols)
    far = stride * topology.stride
    return replace(topology, levels=tuple(levels), protocols=protocols, stride=far)


def _part_of_torus(level: Level, stride: int) -> Level:
    sides = list(level.wiring)
    while len(sides) > 1 and stride % sides[-1] == 0:
        stride //= sides.pop()
    part = min(stride, sides[-1])
    sides[-1] = -(-sides[-1] // part)
    return replace(
        level,
        size=math.prod(sides),
        wiring=tuple(sides),
        latency=level.latency * part,
        bandwidth=level.bandwidth / part,
    )


def _with_hops_of_trees(x: Protocol, protocols: tuple[Protocol, ...]) -> Protocol:
    """A ring's protocol with the tree's hop between nodes, where the table has such a tree."""
    if x.algorithm != "ring":
        return x
    far = [t.far for t in protocols if t.algorithm == "tree" and t.name == x.name]
    return replace(x, far=max([x.far, *far]))


def lies_well(block: int, devices: int, topology: Topology) -> bool:
    """Whether `devices` neighbours fall into blocks that do not straddle nodes without need.

    That is: a block lies in one node, or fills nodes. Otherwise the first block, whose times are
    calculated, would not be the slowest one.
    """
    node = topology.node_size
    return devices in (block, 1) or devices <= node or not (node % block and block % node)
