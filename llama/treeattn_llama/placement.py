"""How a model lies on the devices of a mesh: which of its axes rows, heads, text and weights have.

Of the axes of a mesh one may share out a batch's rows and another the heads, with the weights that
make them (tensor parallelism); all others share out the text. A device along the heads' axis runs
a smaller model: its query heads and the key heads that they read, and its part of the MLP's width,
from the same input. Two sums over that axis close a layer.
"""

import dataclasses
from typing import NamedTuple

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from treeattn.devices.layout import Layout, count_devices, mesh_axes
from treeattn.devices.mesh import Axes, AxisNames
from treeattn_llama.reading.config import Config

# What `kv_mesh` calls the axes of rows and of heads.
NAMES = {"batch_axis": "batch", "head_axis": "heads"}


class Placement(NamedTuple):
    """How a model lies on the devices.

    layout: which axes of the mesh the rows, the heads and (its `axes`) the text are dealt over;
            None: there is one device
    parts:  the axes along which the weights are dealt besides those of the heads: the text's, or
            none
    """

    layout: Layout | None = None
    parts: Axes = ()

    @property
    def weight_axes(self) -> Axes:
        """The axes that weights are dealt over, those of the heads first."""
        return (() if self.layout is None else self.layout.heads) + self.parts

    @property
    def text_alone(self) -> bool:
        """Whether nothing but the text is dealt over the devices, if there are several."""
        return self.layout is None or not (self.layout.batch or self.weight_axes)

    @property
    def rows(self) -> int:
        """Among how many devices a batch's texts are shared."""
        return 1 if self.layout is None else count_devices(self.layout.mesh, self.layout.batch)

    @property
    def groups(self) -> int:
        """Among how many devices the heads are shared."""
        return 1 if self.layout is None else count_devices(self.layout.mesh, self.layout.heads)

    @property
    def members(self) -> int:
        """Among how many devices the weights of each such group are shared."""
        return 1 if self.layout is None else count_devices(self.layout.mesh, self.parts)

    def of_rows(self, x, along: Axes = ()) -> P:
        """How an array (b or 1, length, …) lies, whose length lies along the given axes."""
        batch = self.layout.batch if x is not None and x.shape[0] > 1 else ()
        return P(batch or None, along or None) if along else P(batch or None)


def place_model(
    config: Config,
    mesh: Mesh | None,
    shard_weights: bool = False,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
) -> Placement:
    """How a model so configured lies on a mesh; the arguments are `Llama`'s.

    Raises TypeError for what is no name, and ValueError for axes that the mesh lacks or that are
    named twice, and for key heads that the devices cannot share evenly.
    """
    given = {"batch_axis": batch_axis, "head_axis": head_axis}
    if mesh is None:
        for name, came in given.items():
            if came not in (None, ()):
                raise ValueError(f"{name}: expected a mesh with such an axis, got {came!r} alone")
        return Placement()
    batch, heads = (_axes_named(mesh, name, came) for name, came in given.items())
    if both := set(batch) & set(heads):
        raise ValueError(f"batch_axis, head_axis: expected different axes, got {both} for both")
    text = tuple(name for name in mesh.axis_names if name not in (*batch, *heads))
    # An axis of one device shares out nothing.
    batch, heads = (tuple(name for name in axes if mesh.shape[name] > 1) for axes in (batch, heads))
    if batch or heads:
        text = tuple(name for name in text if mesh.shape[name] > 1)
    layout = Layout(mesh, text, batch, heads)
    check_shares("head_axis", layout.heads, mesh, config.kv_heads, "key heads")
    return Placement(layout, text if shard_weights else ())


def _axes_named(mesh: Mesh, argument: str, came: AxisNames | None) -> Axes:
    """The axes of that argument; None: the one that `kv_mesh` would call so, if there is one."""
    if came is None:
        return tuple(name for name in mesh.axis_names if name == NAMES[argument])
    return mesh_axes(mesh, came, argument)


def check_shares(argument: str, axes: Axes, mesh: Mesh, n: int, what: str) -> None:
    """Raise a ValueError, with what would fit, unless the devices along the axes share n evenly."""
    devices = count_devices(mesh, axes)
    if n % devices:
        fitting = [str(m) for m in range(1, n + 1) if not n % m]
        raise ValueError(
            f"{argument}: the {devices} devices along {axes} cannot share {n} {what} evenly; "
            f"{' or '.join(fitting)} could"
        )


def check_texts(argument: str, place: Placement, texts: int) -> None:
    """Raise a ValueError, with what would fit, unless the devices can share so many texts."""
    if place.layout is None:
        return
    axes = place.layout.batch
    devices = count_devices(place.layout.mesh, axes)
    if texts % devices:
        raise ValueError(
            f"{argument}: expected a multiple of {devices} texts, which the devices along {axes} "
            f"share, got {texts}"
        )


def own_config(config: Config, place: Placement) -> Config:
    """Of the smaller model that a device along the heads' axis runs.

    An MLP's width that the devices do not divide is rounded up: zeros fill it.
    """
    groups = place.groups
    return dataclasses.replace(
        config,
        heads=config.heads // groups,
        kv_heads=config.kv_heads // groups,
        mlp_width=-(-config.mlp_width // groups),
    )
