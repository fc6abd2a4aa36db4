"""A Llama's first matrix and its last, the embedding and the head, whole or dealt over devices.

Where they are dealt, a device has some of the vocabulary's rows: a token's embedding comes from the
device that has it, by a sum over them all, and the logits are gathered.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from treeattn.devices.mesh import Axes
from treeattn.devices.shards import over_shards
from treeattn.idea.arrays import Array
from treeattn_llama.dealing import field_spec
from treeattn_llama.int8 import Int8Matrix
from treeattn_llama.placement import Placement
from treeattn_llama.products import take_rows, take_token
from treeattn_llama.weights import map_parts


def embed_tokens(
    table: Float[Array, "n width"] | Int8Matrix,
    tokens: Int[Array, "b l"],
    at: Placement,
    along: Axes = (),
) -> Float[Array, "b l width"]:
    """The tokens' rows, which lie as the tokens do.

    along: the axes of the mesh, if any, along which the tokens of each text are dealt
    """
    if at.text_alone:
        return take_rows(table, tokens)

    def body(_, table, tokens):
        axes = at.weight_axes
        if along and at.parts:  # each device has other tokens: the group's rows come together
            table = jax.tree.map(lambda x: jax.lax.all_gather(x, at.parts, tiled=True), table)
            axes = at.layout.heads
        if not axes:
            return take_rows(table, tokens)
        own = tokens - jax.lax.axis_index(axes) * table.shape[0]
        mine = (own >= 0) & (own < table.shape[0])
        rows = take_rows(table, jnp.where(mine, own, 0))
        return jax.lax.psum(jnp.where(mine[..., None], rows, 0), axes)

    rows = at.of_rows(tokens, along)
    specs = _specs(table, "embedding", at), rows
    return over_shards(body, at.layout.mesh, at.layout.axes, specs, rows)(table, tokens)


def to_logits(
    read: Callable,
    x: Float[Array, "b l width"],
    norm: Float[Array, " width"],
    head: Float[Array, "n width"] | Int8Matrix,
    last: Int[Array, " b"] | None,
    at: Placement,
    along: Axes = (),
) -> Float[Array, "b *l vocabulary"]:
    """After each token, or (b, vocabulary) after each row's token `last`.

    read:  from some tokens' x, norm and head to their logits
    along: as in `embed_tokens`; then with `last` only
    The vocabulary may end in rows of zeros, which fill it up.
    """

    def body(_, x, norm, head, last):
        logits = read(_last_tokens(x, last, along), norm, head)
        axes = at.weight_axes
        if not axes:
            return logits
        return jax.lax.all_gather(logits, axes, axis=logits.ndim - 1, tiled=True)

    if at.text_alone:
        return read(_last_tokens(x, last, ()), norm, head)
    rows = at.layout.rows()
    specs = at.of_rows(x, along), P(), _specs(head, "head", at), rows
    return over_shards(body, at.layout.mesh, at.layout.axes, specs, rows)(x, norm, head, last)


def _last_tokens(x, last, along: Axes):
    """x (b, l, width) as it is, or (b, width) of each row's token `last`, wherever it lies."""
    if last is None:
        return x
    if not along:
        return take_token(x, last)[:, 0]
    own = jnp.maximum(last, 0) - jax.lax.axis_index(along) * x.shape[1]
    mine = (own >= 0) & (own < x.shape[1])
    return jax.lax.psum(jnp.where(mine[:, None], take_token(x, own)[:, 0], 0), along)


def _specs(table, field: str, at: Placement):
    """How a matrix of that name lies, and the scale of its rows if it has one."""
    return map_parts(lambda _, name: field_spec(name, at.weight_axes), table, field)
