"""Shares of the heads: of h heads over p devices, share r is r·s … (r + 1)·s − 1 with s = ⌈h/p⌉."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float

from treeattn.devices.mesh import Axes
from treeattn.devices.message import move_state
from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState


def pad_heads(state: AttentionState, axes: Axes) -> AttentionState:
    """The state with heads that saw no keys at its end, so that the devices share them evenly.

    10 heads over 4 devices become 12: fields (…, 12) and (…, 12, dv).
    """
    added = -state.max.shape[-1] % lax.axis_size(axes)
    if not added:
        return state
    shape = (*state.max.shape[:-1], added)
    more = AttentionState.identity(shape, state.numerator.shape[-1], state.max.dtype)
    heads = state.max.ndim - 1
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=heads), state, more)


def own_heads(x: Float[Array, "..."], axes: Axes, axis: int = -1) -> Float[Array, "..."]:
    """This device's share of an axis that all devices have whole, the last by default.

    (…, 12) becomes (…, 3) over 4 devices: entries 3 … 5 on device 1.
    """
    share = x.shape[axis] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * share, share, axis)


def gather_heads(
    share, axes: Axes, heads: int, axis: int | None = None, wire: DTypeLike | None = None
):
    """All of `heads` on every device, of arrays that are shared along their axis of heads.

    share: a state of ⌈heads/p⌉ heads, or a pytree of arrays
    axis:  that axis; None for the last of a state's `max`
    wire:  as in `merge_across`, for a state
    """
    axis = share.max.ndim - 1 if axis is None else axis
    if heads == 0:  # XLA gathers no arrays of no elements
        return share

    def gather(x):
        padded = lax.all_gather(x, axes, axis=axis, tiled=True)
        return lax.slice_in_dim(padded, 0, heads, axis=axis)

    if isinstance(share, AttentionState):  # in one message
        return move_state(gather, share, wire)
    return jax.tree.map(gather, share)
