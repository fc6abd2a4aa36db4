"""What carries a state from device to device: one array, so that it is one message.

A message costs its start before it costs its bytes: three collectives for the three fields of a
state, or two for an output in 16 bits and its lse in 32, would cost more than they save.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, from_output


def check_wire(wire: DTypeLike | None) -> None:
    """Raise a ValueError for what is neither None nor a floating-point dtype of 16 bits or more."""
    if wire is None:
        return
    try:
        fits = jnp.issubdtype(wire, jnp.floating) and jnp.finfo(wire).bits >= 16
    except TypeError:  # no dtype at all
        fits = False
    if not fits:
        raise ValueError(
            f"wire: expected a floating-point dtype of 16 bits or more, or None, got {wire!r}"
        )


def pack_state(state: AttentionState) -> Float[Array, "... packed"]:
    """The three fields as one array, so that one message carries them: numerator, d, m."""
    m, d, n = state
    return jnp.concatenate([n, d[..., None], m[..., None]], axis=-1)


def unpack_state(packed: Float[Array, "... packed"]) -> AttentionState:
    """The inverse of `pack_state`."""
    return AttentionState(packed[..., -1], packed[..., -2], packed[..., :-2])


def travel(collective: Callable, state: AttentionState, wire: DTypeLike | None) -> AttentionState:
    """The state that arrives, when `collective` moves one array (..., h, packed) that carries it.

    wire: None to send the three fields as they are; a dtype for the output, with lse beside it
    """
    if wire is None:
        return unpack_state(collective(pack_state(state)))
    out, lse = finalize(state)
    return from_output(*as_one(collective, out.astype(wire), lse))


def as_one(collective: Callable, out: Float[Array, "... d"], lse: Float[Array, "..."]):
    """(out, lse) that arrive, when `collective` moves one array (..., h, packed) of both."""
    if out.dtype != lse.dtype:
        return _as_bits(collective, out, lse)
    arrived = collective(jnp.concatenate([out, lse[..., None]], axis=-1))
    return arrived[..., :-1], arrived[..., -1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_bits(collective: Callable, out, lse):
    """(out, lse) after a collective that moves arrays (..., h, lanes), as the bits of one array.

    As integers: a float that is sent as another may lose bits on the way, where it is a NaN.
    """
    bits = _to_lanes(out), _to_lanes(lse[..., None])
    arrived = collective(jnp.concatenate(bits, axis=-1))
    arrived = jnp.split(arrived, [bits[0].shape[-1]], axis=-1)
    out, lse = (_from_lanes(x, y.dtype) for x, y in zip(arrived, (out, lse), strict=True))
    return out, lse[..., 0]


@_as_bits.defjvp
def _as_bits_jvp(collective, primals, tangents):
    """Bits have no derivative; a collective that moves numbers is linear in them."""
    out, lse = tangents
    moved = collective(out), collective(lse[..., None])[..., 0]
    return _as_bits(collective, *primals), moved


def _to_lanes(x):
    """(..., n) numbers as 16-bit integers (..., n · lanes), as many a number as its bits fill."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return bits.reshape(*x.shape[:-1], x.shape[-1] * (x.dtype.itemsize // 2))


def _from_lanes(bits, dtype):
    """The inverse of `_to_lanes`."""
    lanes = dtype.itemsize // 2
    if lanes > 1:
        bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // lanes, lanes)
    return jax.lax.bitcast_convert_type(bits, dtype)
