"""The layer's step, compiled for eight H100s from their description, and the bytes that it sends.

`make gpu-programs` writes results/h100s.md with this module, without a driver or a GPU. Nothing is
run, so the page shows the bytes that are sent and held, and no times.
"""

import datetime
from collections.abc import Iterator
from importlib.metadata import version

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import treeattn
from labs.sharding.__main__ import LLAMA_8B, crossings, program

AXES = "batch", "heads", "kv"
MESHES = (2, 2, 2), (1, 8, 1), (1, 4, 2), (1, 1, 8)
ROWS, KEYS = 2, 131_072  # of the batch, and slots of each row's cache


def mesh_of(devices, shape: tuple[int, int, int]) -> Mesh:
    """A mesh of these devices in this shape."""
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def page(devices) -> Iterator[str]:
    """The lines of the page of results."""
    yield "# A layer on eight H100s that are not there"
    yield ""
    yield f"Compiled without a GPU on {datetime.date.today()}, by jax {jax.__version__} and"
    yield f"jax-cuda13-pjrt {version('jax-cuda13-pjrt')} (`make gpu-programs`). Nothing was run."
    yield ""
    yield f"A step of a layer of Llama 3.1 8B's sizes in float32: {ROWS} rows, a token each, with"
    yield f"room for {KEYS:,} keys a row."
    for shape in MESHES:
        mesh = mesh_of(devices, shape)
        compiled = program(LLAMA_8B, ROWS, KEYS, mesh)
        held = treeattn.memory(compiled).argument_bytes
        yield ""
        yield f"## {' × '.join(f'{n} {axis}' for n, axis in zip(shape, AXES, strict=True))}"
        yield ""
        yield f"```\n{crossings(treeattn.collectives(compiled), mesh)}\n```"
        yield ""
        yield f"A device holds {held / 1e6:,.0f} MB of weights and cache."
