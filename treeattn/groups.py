"""Between whom a collective sends, as its HLO says it.

It is written in one of four ways: pairs {{0,1},{1,0}}; groups {{0,1},{2,3}}; groups
[2,2]<=[2,2]T(1,0), here the columns of an array of numbers in order; or the axes of a mesh, as in
mesh['node'=2,'device'=4] {'device'}. The numbers count the devices of the program's mesh in order.
"""

import math
import re

import numpy as np


def groups(attributes: str) -> list[list[int]]:
    """The groups, or pairs, of devices by their numbers; none where they are not written."""
    if lists := re.search(r"(?:source_target_pairs|replica_groups)=\{([\d,{}]*)\}", attributes):
        inside = re.findall(r"\{([\d,]+)\}", lists[1])
        return [[int(n) for n in group.split(",")] for group in inside]
    short = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if short:
        result, shape, order = (_numbers(text) for text in short.groups())
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose(order or None)
        return numbers.reshape(result).tolist()
    of_mesh = re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes)
    return _groups_of_mesh(*of_mesh.groups()) if of_mesh else []


def _groups_of_mesh(axes: str, devices: str, within: str) -> list[list[int]]:
    """Groups along the axes `within`, of numbers in order or as device_ids=([3,2]T(1,0)) says."""
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", axes)}
    names = list(sizes)
    numbers = np.arange(math.prod(sizes.values()))
    if ids := re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", devices):
        numbers = numbers.reshape(_numbers(ids[1])).transpose(_numbers(ids[2]) or None)
    numbers = numbers.reshape(list(sizes.values()))
    inner = re.findall(r"'(.*?)'", within)
    outer = [name for name in names if name not in inner]
    numbers = numbers.transpose([names.index(name) for name in outer + inner])
    return numbers.reshape(-1, math.prod(sizes[name] for name in inner)).tolist()


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",")] if text else []
