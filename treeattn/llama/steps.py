"""A step over all layers: a program for each of them, or one for all.

On a CPU each layer is a program of its own: compiling takes a second instead of half a minute, and
dispatching is nothing beside running. A GPU runs a layer of a decoding step in less time than the
host takes to dispatch it: there few tokens go through all layers in one program, and another
writes what they bring into the cache.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from treeattn.llama import cache as caches
from treeattn.llama import layers

AT_ONCE = {"cuda": 64, "gpu": 64}  # tokens, at most; more of them keep a device busy layer by layer


def run(weights, tokens, cache, positions, mask, last, *, static, read: bool, out):
    """(the last layer's output, what all layers have to write), of checked arguments.

    read: whether the tokens see the cache; last: (b,) as in `extend_layer`, for the last layer;
    out: as in `embed`
    """
    embedding, frequencies = weights.embedding, weights.frequencies
    x, rotation = layers.embed(tokens, embedding, frequencies, cache.lengths, positions, out=out)
    entries, final = [], len(weights.layers) - 1
    for i, (w, cached) in enumerate(zip(weights.layers, cache.layers, strict=True)):
        x, new = layers.extend_layer(
            x, w, rotation, static=static, mask=mask, cached=cached if read else None,
            lengths=cache.lengths if read else None, last=last if i == final else None,
        )  # fmt: skip
        entries.append(new)
    return x, tuple(entries)


def write(arrays, new, lengths, counts, select, mesh):
    """(k, v, lengths) of a cache, of whose layers `arrays` = (k, v) are given up, and written."""
    written = [
        caches.append(cached, entries, lengths, counts, mesh=mesh, select=select)
        for cached, entries in zip(zip(*arrays, strict=True), new, strict=True)
    ]
    return (*zip(*written, strict=True), caches.advance(lengths, counts))


class Programs(NamedTuple):
    """How a step runs: the functions `run` and `write` of this module, compiled or not."""

    run: Callable
    write: Callable


BY_LAYER = Programs(run, write)
IN_ONE = Programs(
    functools.partial(jax.jit, static_argnames=("static", "read", "out"))(run),
    functools.partial(jax.jit, static_argnames="mesh", donate_argnames="arrays")(write),
)


def programs(platform: str | None, tokens: int) -> Programs:
    """Those for so many tokens of a text on devices of that platform."""
    return IN_ONE if tokens <= AT_ONCE.get(platform, 0) else BY_LAYER
