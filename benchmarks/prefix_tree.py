"""Packing 64 beams of 32×16 with the mask: jitted `treeattn.pack` against a trie in plain Python.

python benchmarks/prefix_tree.py            about 10 seconds
"""

import statistics
import time

import jax
import numpy as np
from machine import machine

import treeattn

BATCH = 64
ROWS = 32
WIDTH = 16
ROUNDS = 20


def plain_pack(beam: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `treeattn.pack` returns, by a dictionary of edges and walks to the root.

    The only NumPy in it: the results are written into arrays, a mask row copied from the parent's.
    """
    trees = []
    for rows in beam.tolist():
        child = {}
        tokens = []
        parents = []
        offsets = []
        paths = []
        for row in rows:
            node = -1
            path = []
            for offset, token in enumerate(row):
                edge = node, token
                node = child.get(edge)
                if node is None:
                    node = child[edge] = len(tokens)
                    tokens.append(token)
                    parents.append(edge[0])
                    offsets.append(offset)
                path.append(node)
            paths.append(path)
        trees.append((tokens, parents, offsets, paths))
    size = max(len(tokens) for tokens, *_ in trees)
    packed = np.zeros((len(beam), size), beam.dtype)
    mask = np.zeros((len(beam), size, size), bool)
    position = np.zeros((len(beam), size), np.int32)
    unpack_map = np.zeros(beam.shape, np.int32)
    for b, (tokens, parents, offsets, paths) in enumerate(trees):
        packed[b, : len(tokens)] = tokens
        position[b, : len(tokens)] = offsets
        unpack_map[b] = paths
        for i, parent in enumerate(parents):
            if parent >= 0:
                mask[b, i] = mask[b, parent]
            mask[b, i, i] = True
    return packed, mask, position, unpack_map


def branching_beams(shared: float, rng: np.random.Generator) -> np.ndarray:
    """Beams whose candidates repeat, on average, the first `shared` of an earlier candidate."""
    beam = rng.integers(0, 50_000, (BATCH, ROWS, WIDTH), np.int32)
    for b, m in np.ndindex(BATCH, ROWS):
        if m and shared:
            same = min(WIDTH - 1, rng.binomial(WIDTH, shared))
            beam[b, m, :same] = beam[b, rng.integers(0, m), :same]
    return beam


def seconds(run, *args) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - began


def main() -> None:
    print(machine("jax", "numpy"))
    print(f"{BATCH} beams of {ROWS}×{WIDTH}; median ms of {ROUNDS} rounds\n")
    print("shared  nodes  plain trie  numpy pack  jitted pack  trie / jitted")
    pack = jax.jit(treeattn.pack)
    rng = np.random.default_rng(0)
    for shared in (0.0, 0.3, 0.6, 0.9):
        beam = branching_beams(shared, rng)
        on_device = jax.device_put(beam)
        plain = plain_pack(beam)
        jitted = pack(on_device)
        size = plain[0].shape[1]
        for a, b in zip(plain, jitted, strict=True):  # the same nodes, before any timing
            cut = (slice(None), *[slice(size)] * (b.ndim - 1)) if b.shape != a.shape else ...
            np.testing.assert_array_equal(a, np.asarray(b)[cut])
        times = [
            (seconds(plain_pack, beam), seconds(treeattn.pack, beam), seconds(pack, on_device))
            for _ in range(ROUNDS)
        ]
        trie, numpy, compiled = (1000 * statistics.median(x) for x in zip(*times, strict=True))
        row = f"{shared:5.0%} {size:6} {trie:13.1f} {numpy:11.1f} {compiled:12.1f}"
        print(f"{row} {trie / compiled:13.1f}×")


if __name__ == "__main__":
    main()
