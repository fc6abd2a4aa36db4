"""Beams of candidate tokens as packed prefix trees: pack, verify in one pass, unpack.

A drafter proposes M candidates of up to C tokens each. Most of them begin alike, so a
model that reads them one by one computes the same hidden states many times. Candidates
that share a *prefix* share all hidden states over it; candidates that merely share a
token do not. So the distinct prefixes are the nodes of a tree, `pack` lists each node
once, and the attention mask lets a node see exactly its own prefix: its ancestors and
itself. One forward pass over the nodes then gives the results of M separate passes, and
`unpack` puts them back into the beam's shape.

    Mars is a       red        Mars ─ is ┬ a ─────── red
    Mars is reddish when                 ├ reddish ─ when
    Mars is dark    red                  └ dark ──── red

The nodes are numbered candidate by candidate, then by position: first all tokens of
candidate 0, then the tokens of candidate 1 that candidate 0 lacks, and so on. All results
follow from one table, `_common_prefix`: how many leading tokens two candidates share.

Given NumPy arrays or nested lists, each function returns NumPy arrays. Given JAX arrays, traced
arrays included, it returns JAX arrays.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer, Shaped

from treeattn.checks import (
    Array,
    Numbers,
    as_array,
    as_integers,
    bounded,
    check_rank,
    check_shape,
    integer,
    namespace,
)

# M candidates of C tokens for each text, and the number of tokens of each candidate.
Beam = Integer[Array, "batch candidates width"] | Numbers
Lengths = Integer[Array, "batch candidates"] | Numbers | None


class PackedBeam(NamedTuple):
    """A batch of beams with every distinct prefix once: a tree of L nodes for each text.

    packed_beam:      (B, L)     each node's token, in the beam's dtype; `pad_token` after the last
    attention_mask:   (B, L, L)  True where node i may attend to node j: j is i or an ancestor
                                 of i. Rows and columns of pads are False throughout, so the
                                 diagonal is True at nodes and False at pads
    position_offsets: (B, L)     int32, a node's position in its candidate, counted from 0. Its
                                 position in the model is context length + offset. 0 at a pad
    unpack_map:       (B, M, C)  int32 in [0, L): the node of candidate m's token c; 0 at
                                 positions beyond a candidate's length

    >>> packed = pack([[[7, 8], [7, 9]]])  # two candidates that share their first token
    >>> print(packed.packed_beam[0], packed.position_offsets[0])
    [7 8 9] [0 1 1]
    >>> print(packed.attention_mask[0].astype(int)[2])  # the node of 9 sees 7 and not 8
    [1 0 1]
    """

    packed_beam: Integer[Array, "batch nodes"]
    attention_mask: Bool[Array, "batch nodes nodes"]
    position_offsets: Int[Array, "batch nodes"]
    unpack_map: Int[Array, "batch candidates width"]


def prefix_encoding(beam: Beam, lengths: Lengths = None) -> Int[Array, "batch candidates width"]:
    """(B, M, C) int32: the first candidate with the same tokens as m up to and including c.

    Candidate m's own index marks the tokens that it adds to the tree, and a smaller index a token
    that it shares. The candidates may come in any order, and those that share a prefix need not be
    neighbours. `lengths` is as in `pack`; positions beyond a candidate's length encode as −1.

    Raises as `pack` does.

    >>> print(prefix_encoding([[[7, 8], [7, 9]]])[0])
    [[0 0]
     [0 1]]
    """
    xp, beam, lengths = _checked(beam, lengths)
    encoding = _encode(xp, _common_prefix(xp, beam, lengths), beam.shape[2])
    column = xp.arange(beam.shape[2], dtype=xp.int32)
    real = column[None, None] < lengths[..., None]
    return xp.where(real, encoding, -1)


def packed_token_indices(beam: Beam, lengths: Lengths = None) -> Int[Array, "batch nodes"]:
    """(B, L) int32: the index in the beam, candidate by candidate, of each token of `packed_beam`.

    Token c of candidate m has index m·C + c. For a token that several candidates share, m is the
    first of these candidates. −1 after a text's last node. The arguments, the errors and L are
    those of `pack`.

    >>> print(packed_token_indices([[[7, 8], [7, 9]]]))
    [[0 1 3]]
    """
    xp, beam, lengths = _checked(beam, lengths)
    width = beam.shape[2]
    _, owner, offsets, real = _nodes(xp, _common_prefix(xp, beam, lengths), lengths, width)
    return xp.where(real, owner * width + offsets, -1)


def pack(beam: Beam, lengths: Lengths = None, *, pad_token: int = 0) -> PackedBeam:
    """Pack each beam of the batch into the tree of its prefixes; see `PackedBeam`.

    beam:      (B, M, C) token ids, of any integer dtype; M candidates of C tokens
    lengths:   (B, M) tokens of each candidate, 0 … C; None means C. Beyond a candidate's
               length the beam may hold anything
    pad_token: fills `packed_beam` after a text's last node

    L is the number of nodes of the text that has the most. Inside jit or vmap, where that number is
    unknown, L is M·C, and the first entries are the same. Equal candidates, and a candidate that is
    a prefix of another, share their nodes and keep their entries of `unpack_map`. An empty
    candidate adds no nodes. A beam without candidates (M = 0), without positions (C = 0) or with
    empty candidates only is a tree without nodes: L = 0 outside jit, and all M·C entries are pads
    inside jit.

    A candidate's tokens can belong to any number of earlier candidates: number 2 of
    [[1, 2, 3], [1, 4, 5], [1, 4, 6]] takes its first token from number 0, the second from 1
    and adds the third. So `unpack_map` looks up each position's owner in the encoding, and
    the node's number in a cumulative sum over the tokens that each candidate adds.

    Memory: besides its arguments and results, the compiled program holds at most 10·B·M·L
    bytes, with L = M·C. The mask has B·L·L bytes, so the bound is 10 / C of the mask. A program
    may hold less: for 64 beams of 32 candidates of 16 tokens it is 1 / 60 of the mask. NumPy
    keeps every intermediate array and needs 4 to 6 times the mask.

    Raises TypeError if beam or lengths are not integers, or are ragged. Raises ValueError if
    their shapes do not fit, if a length is negative or beyond C (inside jit, lengths are
    clipped instead), or if pad_token does not fit the beam's dtype. Also raises ValueError if
    `beam` is NumPy's, `lengths` is JAX's, and a token id is too large for JAX's integers.

    >>> print(pack([[[7, 8], [7, 0]]], lengths=[[2, 1]]).packed_beam)
    [[7 8]]
    """
    xp, beam, lengths = _checked(beam, lengths)
    tokens = np.iinfo(beam.dtype)
    pad_token = integer(f"pad_token ({tokens.dtype})", pad_token, tokens.min, tokens.max)
    if xp is np:
        return _pack(np, beam, lengths, pad_token)
    packed = _pack_jit(beam, lengths, pad_token)
    if isinstance(packed.packed_beam, jax.core.Tracer):
        return packed
    nodes = np.diagonal(packed.attention_mask, axis1=1, axis2=2).sum(axis=1)
    return _first_nodes(packed, int(nodes.max(initial=0)))


def unpack(
    packed: Shaped[Array, "batch nodes *features"], unpack_map: Int[Array, "batch candidates width"]
) -> Shaped[Array, "batch candidates width *features"]:
    """The results of the nodes, put back into the beam's shape. Differentiable.

    packed:     (B, L, ...) one entry for each node: tokens, hidden states, logits
    unpack_map: (B, M, C) as `pack` returned it
    Returns     (B, M, C, ...). Positions beyond a candidate's length repeat node 0, or are zeros if
                there are no nodes.

    Raises TypeError or ValueError if unpack_map is not an integer array of that shape, with
    entries from 0 to L − 1 (inside jit, entries are clipped instead). Raises ValueError if `packed`
    is NumPy's, `unpack_map` is JAX's, and an integer in `packed` is too large for JAX's integers.

    >>> packed = pack([[[7, 8], [7, 9]]])
    >>> print(unpack(packed.packed_beam, packed.unpack_map)[0])
    [[7 8]
     [7 9]]
    """
    packed = as_array("packed", packed)
    unpack_map = as_integers("unpack_map", unpack_map)
    check_rank(3, "(batch, M, C)", unpack_map=unpack_map)
    if packed.ndim < 2 or packed.shape[0] != unpack_map.shape[0]:
        raise ValueError(
            f"packed: expected axes (batch, L, ...) with batch = {unpack_map.shape[0]} as in "
            f"unpack_map, got shape {packed.shape}"
        )
    xp = namespace(packed, unpack_map)
    last = max(packed.shape[1] - 1, 0)
    unpack_map = bounded("unpack_map", unpack_map, 0, last, f"node numbers from 0 to {last}")
    if packed.shape[1] == 0:
        return xp.zeros((*unpack_map.shape, *packed.shape[2:]), packed.dtype)
    text = xp.arange(len(unpack_map))[:, None, None]
    return _to_namespace("packed", packed, xp)[text, xp.asarray(unpack_map)]


def _common_prefix(xp, beam, lengths):
    """(B, M, M) int32: the number of leading tokens that candidates m and n share."""
    width = beam.shape[2]
    column = xp.arange(width, dtype=xp.int32)[None, None, None]
    differ = beam[:, :, None] != beam[:, None]  # (B, M, M, C)
    first_difference = xp.where(differ, column, width)
    common = xp.min(first_difference, axis=-1, initial=width)
    shorter = xp.minimum(lengths[:, :, None], lengths[:, None])
    return xp.minimum(common, shorter)


def _encode(xp, common, width):
    """(B, M, C): the first candidate that shares m's tokens up to c; m itself beyond m's length."""
    candidate = xp.arange(common.shape[1], dtype=xp.int32)
    column = xp.arange(width, dtype=xp.int32)[None, None, None]
    shared = column < common[..., None]  # (B, M, M, C)
    sharing = xp.where(shared, candidate[None, None, :, None], candidate[None, :, None, None])
    return xp.min(sharing, axis=2, initial=common.shape[1])


def _pack(xp, beam, lengths, pad_token):
    """`pack` of checked arguments; xp is numpy or jax.numpy."""
    width = beam.shape[2]
    common = _common_prefix(xp, beam, lengths)
    start, owner, offsets, real = _nodes(xp, common, lengths, width)
    # A token's number is its position plus the `start` of the candidate that owns its prefix.
    encoding = _encode(xp, common, width)
    owners_start = xp.take_along_axis(start, _joined(encoding), axis=1)
    column = xp.arange(width, dtype=xp.int32)[None, None]
    numbers = owners_start.reshape(encoding.shape) + column
    unpack_map = xp.where(column < lengths[..., None], numbers, 0)
    tokens = xp.take_along_axis(_joined(beam), owner * width + offsets, axis=1)
    tokens = xp.where(real, tokens, xp.asarray(pad_token, dtype=beam.dtype))
    mask = _mask(xp, common, owner, offsets, real)
    return PackedBeam(tokens, mask, offsets, unpack_map)


def _nodes(xp, common, lengths, width):
    """For each node the candidate that adds it, and its position there, in four arrays.

    start:   (B, M) the node that candidate m adds at position c has the number start[m] + c
    owner:   (B, L) the candidate that adds the node. L is M·C inside jit, and the largest number
             of nodes in the batch elsewhere
    offsets: (B, L) the node's position in its owner
    real:    (B, L) False at pads

    The last node that a candidate adds has number `end` − 1. In [[1, 2, 3], [1, 4, 5]] the second
    candidate borrows one token and adds two, so end = [3, 5] and start = [0, 2]. Its tokens 4 and 5
    are nodes 2 + 1 and 2 + 2. Its token 1 belongs to the first candidate and is node 0 + 0.
    """
    candidates = common.shape[1]
    borrowed = xp.max(xp.tril(common, -1), axis=2, initial=0)  # (B, M), from earlier candidates
    end = (lengths - borrowed).cumsum(axis=1, dtype=xp.int32)
    start = end - lengths

    # Candidates are in order, so node i belongs to the candidate whose index is the number of
    # candidates with `end` at most i.
    size = candidates * width if isinstance(end, jax.core.Tracer) else int(end.max(initial=0))
    node = xp.arange(size, dtype=xp.int32)[None]
    ended = node[..., None] >= end[:, None]  # (B, L, M)
    owner = xp.sum(ended, axis=2, dtype=xp.int32)  # (B, L)
    real = owner < candidates
    owner = xp.minimum(owner, candidates - 1)
    offsets = xp.where(real, node - xp.take_along_axis(start, owner, axis=1), 0)
    return start, owner, offsets, real


def _joined(table):
    """(B, M, C) as (B, M·C), candidate after candidate."""
    batch, candidates, width = table.shape
    return table.reshape(batch, candidates * width)


def _mask(xp, common, owner, offsets, real):
    """(B, L, L) bool: node j is on the path of the candidate that adds node i, and not below i.

    `common` comes from `_common_prefix`, the others from `_nodes`.
    """
    shared = xp.take_along_axis(common, owner[:, None], axis=2)  # (B, M, L)
    through = (shared > offsets[:, None]) & real[:, None]  # candidate m runs through node j
    deepest = xp.where(real, offsets, -1)  # a pad sees nothing
    not_below = offsets[:, None] <= deepest[..., None]
    if xp is np:
        on_the_path = through[np.arange(len(owner))[:, None], owner]
    else:
        on_the_path = _look_up(through, owner)
    return on_the_path & not_below


def _look_up(table, candidate):
    """(B, L, L): table[b, candidate[b, i], j], for a table (B, M, L) of bools.

    Each column of the table is packed into ⌈M / 32⌉ words, with a bit for each candidate: 35 is bit
    3 of the second word. XLA takes ten times as long to gather entries as to test a bit.
    """
    candidates = table.shape[1]
    member = jnp.zeros((), jnp.uint32)
    for first in range(0, candidates, 32):
        bit = jnp.arange(min(32, candidates - first), dtype=jnp.uint32)
        of_word = table[:, first : first + 32]
        bits = of_word.astype(jnp.uint32) << bit[None, :, None]
        word = jnp.sum(bits, axis=1, dtype=jnp.uint32)
        # For a candidate of a later word the shift is above 31. For one of an earlier word it is
        # negative, and wraps to a large number. Either shift leaves no bit.
        shift = candidate.astype(jnp.uint32) - jnp.uint32(first)
        member = member | (word[:, None] >> shift[:, :, None])
    return (member & 1) == 1


_pack_jit = jax.jit(partial(_pack, jnp), static_argnames="pad_token")


@partial(jax.jit, static_argnames="size")
def _first_nodes(packed: PackedBeam, size: int) -> PackedBeam:
    """The first `size` of L nodes, if the nodes beyond are pads."""
    tokens, mask, offsets, unpack_map = packed
    return PackedBeam(tokens[:, :size], mask[:, :size, :size], offsets[:, :size], unpack_map)


def _to_namespace(name, x, xp):
    """`x` as an array of numpy or jax.numpy (xp). Raises ValueError if integers would change.

    Without jax_enable_x64, JAX silently keeps only the lower 32 bits of an integer.
    """
    array = xp.asarray(x)
    of_integers = array.dtype != x.dtype and jnp.issubdtype(x.dtype, jnp.integer)
    if of_integers and (x.astype(array.dtype) != x).any():
        raise ValueError(
            f"{name}: expected integers that {array.dtype} holds, got {x.min()} to {x.max()}: "
            "pass NumPy's arrays only, or set jax_enable_x64"
        )
    return array


def _checked(beam, lengths) -> tuple[Any, Array, Array]:
    """(numpy or jax.numpy, beam, lengths in int32). Raises as `pack` does."""
    beam = as_integers("beam", beam)
    check_rank(3, "(batch, M, C)", beam=beam)
    shape = beam.shape[:2]
    width = beam.shape[2]
    lengths = np.full(shape, width) if lengths is None else as_integers("lengths", lengths)
    check_shape(shape, lengths=lengths)
    xp = namespace(beam, lengths)
    lengths = bounded("lengths", lengths, 0, width, f"0 to C = {width} tokens")
    return xp, _to_namespace("beam", beam, xp), xp.asarray(lengths)
