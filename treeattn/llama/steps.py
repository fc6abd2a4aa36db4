"""The compiled programs that a step of a Llama is made of.

A step runs one program for its layers, once for each layer: compiling takes a second instead of
half a minute, and the memory that one layer needs is free again for the next.

It attends to the cache and to its own new tokens separately, and merges the two states: nothing
is written before everything is read, and the new tokens may see each other in any way that a
mask says, a tree of candidates included. Writing is a program of its own (`commit_layer`): a
program that read a cache in a loop and then wrote to it would copy all of it in between.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from treeattn.idea.state import finalize, merge
from treeattn.kernel.attend import attend
from treeattn.llama.cache import ShardAttention, append, attend_cache, axes_of, fill
from treeattn.llama.config import Config
from treeattn.llama.layers import (
    after_attention,
    queries_keys_values,
    rotation,
    to_logits,
)
from treeattn.llama.parallel import among_new
from treeattn.llama.weights import Layer


@dataclasses.dataclass(frozen=True)
class How:
    """What the programs depend on besides arrays: a new one compiles anew."""

    config: Config
    mesh: Mesh | None
    attention: ShardAttention | None  # towards the cache; None where there is none
    implementation: str | None


@jax.jit
def embed(embedding, frequencies, tokens, positions, lengths):
    """The first layer's input (b, l, d), and its `Rotation` (b or 1, l, head_dim / 2).

    positions: (b, l); None: those after a cached text of `lengths` (b,), or from 0 on.
    """
    if positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = positions if lengths is None else lengths[:, None] + positions
    return embedding[tokens], rotation(positions, frequencies, embedding.dtype)


def run_layer(x, w: Layer, turn, mask, old, lengths, last, how: How):
    """One layer: (its output, (the keys, the values) of its tokens).

    old:  the layer's cached (keys, values), of which `lengths` (b,) are in use; None without a
          cache
    last: (b,) the one token of each row whose output is wanted, without a mask; None: of all
    """
    q, k, v = queries_keys_values(x, w, turn, how.config)
    if last is None:
        state = among_new(q, k, v, mask, how.implementation)
    else:
        x, q = take_token(x, last), take_token(q, last)
        state = attend(q, k, v, kv_lengths=last + 1, implementation=how.implementation)
    if old is not None:
        state = merge(attend_cache(q, *old, lengths, how.mesh, how.attention), state)
    out = finalize(state)[0].astype(x.dtype)
    return after_attention(x, w, out, how.config), (k, v)


layer_qkv = jax.jit(queries_keys_values, static_argnames="config")


def take_token(x, last):
    """(b, 1, …): token last[row] of every row; its first where `last` is −1, its only one too."""
    last = jnp.clip(last, 0, x.shape[1] - 1).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.take_along_axis(x, last, axis=1)


@functools.partial(jax.jit, static_argnames="how")
def extend_layer(x, w, turn, mask, old, lengths, last=None, *, how):
    """`run_layer`; the cache stays as it is."""
    return run_layer(x, w, turn, mask, old, lengths, last, how)


def wait_on_cpus(arrays, mesh: Mesh | None) -> None:
    """Return when `arrays` are there, if simulated devices compute them.

    XLA:CPU keeps a thread for a small program while that waits for its inputs. With one for every
    device, none is left for the collectives that the inputs come from, and nothing moves again.
    """
    if mesh is not None and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="old")
def commit_layer(old, new, lengths, counts, select, *, mesh):
    """The layer's cache with what `extend_layer` returned, or a selection of it, written."""
    return append(old, new, lengths, counts, mesh, select)


@functools.partial(jax.jit, static_argnames=("how", "attention"), donate_argnames=("x", "old"))
def prefill_layer(x, w, turn, old, *, how, attention):
    """A layer over whole prompts, sharded along the text: its output, and the empty cache filled.

    attention: like `ring_attention`
    """
    q, k, v = queries_keys_values(x, w, turn, how.config)
    axes = axes_of(how.mesh)
    out = attention(q, k, v, mesh=how.mesh, axis=axes, implementation=how.implementation)
    return after_attention(x, w, out, how.config), fill(old, (k, v), how.mesh)


@functools.partial(jax.jit, static_argnames="epsilon")
def logits(x, norm, head, last, *, epsilon):
    """(b, l, vocabulary) of all tokens, or (b, vocabulary) of each row's token `last` (b,)."""
    if last is not None:
        x = take_token(x, last)[:, 0]
    return to_logits(x, norm, head, epsilon)


@jax.jit
def advance(lengths, counts):
    """The lengths after `counts` more tokens."""
    return lengths + counts


@jax.jit
def choose(rows, a, b):
    """`a` (b, …) in the rows that are True, `b` in the others."""
    return jnp.where(rows[:, None], a, b)
