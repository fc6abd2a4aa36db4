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


def check_wire(wire: DTypeLike | None, method: str = "") -> None:
    """Raise a ValueError for what is neither None nor a floating-point dtype of 16 bits or more."""
    if wire is None:
        return
    if method == "exact":
        raise ValueError(f"wire: method 'exact' sends integers, which {wire!r} would round")
    try:
        fits = jnp.issubdtype(wire, jnp.floating) and jnp.finfo(wire).bits >= 16
    except TypeError:  # no dtype at all
        fits = False
    if not fits:
        raise ValueError(
            f"wire: expected a floating-point dtype of 16 bits or more, or None, got {wire!r}"
        )


def join_fields(state: AttentionState) -> Float[Array, "... fields"]:
    """The three fields as one array (..., h, dv + 2), so that one message carries them: n, d, m."""
    m, d, n = state
    return jnp.concatenate([n, d[..., None], m[..., None]], axis=-1)


def split_fields(joined: Float[Array, "... fields"]) -> AttentionState:
    """The inverse of `join_fields`."""
    return AttentionState(joined[..., -1], joined[..., -2], joined[..., :-2])


def join_keys_values(
    k: Float[Array, "b t h d"], v: Float[Array, "b t h dv"]
) -> Float[Array, "b t h both"]:
    """Keys and values of a shard as one array (b, t, h_kv, d + dv), which is one message."""
    return jnp.concatenate([k, v], axis=-1)


def split_keys_values(joined: Float[Array, "b t h both"], d: int):
    """The inverse of `join_keys_values`, for keys of size d: (k, v)."""
    return joined[..., :d], joined[..., d:]


def move_state(
    collective: Callable, state: AttentionState, wire: DTypeLike | None
) -> AttentionState:
    """The state that arrives, when `collective` moves one array (..., h, dv + 2) that carries it.

    wire: None to send the three fields as they are; a dtype for the output, with lse beside it
    """
    if wire is None:
        return split_fields(collective(join_fields(state)))
    out, lse = finalize(state)
    return from_output(*move_output(collective, out.astype(wire), lse))


def move_output(collective: Callable, out: Float[Array, "... d"], lse: Float[Array, "..."]):
    """(out, lse) that arrive, when `collective` moves one array of both.

    It is (..., h, dv + 1) where they are of one dtype. Else it holds 16-bit integers: for an output
    in bfloat16 and lse in float32, (..., h, dv + 2).
    """
    if out.dtype != lse.dtype:
        return _move_bits(collective, out, lse)
    arrived = collective(jnp.concatenate([out, lse[..., None]], axis=-1))
    return arrived[..., :-1], arrived[..., -1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bits(collective: Callable, out, lse):
    """(out, lse) after a collective that moves arrays (..., h, lanes), as the bits of one array.

    As integers: a float that is sent as another may lose bits on the way, where it is a NaN.
    """
    out_bits = _to_lanes(out)
    lse_bits = _to_lanes(lse[..., None])
    arrived = collective(jnp.concatenate([out_bits, lse_bits], axis=-1))
    out_bits, lse_bits = jnp.split(arrived, [out_bits.shape[-1]], axis=-1)
    return _from_lanes(out_bits, out.dtype), _from_lanes(lse_bits, lse.dtype)[..., 0]


@_move_bits.defjvp
def _move_bits_jvp(collective, primals, tangents):
    """Bits have no derivative; a collective that moves numbers is linear in them."""
    out, lse = tangents
    out = collective(out)
    lse = collective(lse[..., None])[..., 0]
    return _move_bits(collective, *primals), (out, lse)


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
