"""What a program of the Mosaic kernel does: the state of a tile of queries after a split of keys.

What is written out here, and left to Triton in treeattn/kernel/pallas.py: the copies of keys and
values into shared memory, some blocks ahead, and who waits for whom. Factors change places: a
product of tensor cores has at least 16 rows, but 8 columns. So keys are its rows, 16 for each of
four warps, and queries its columns, of which 8 are full where 8 query heads read one key head.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.state import finite
from treeattn.kernel.masks import mask_and_clip, shown_by
from treeattn.kernel.mosaic_tiles import (
    CHUNK,
    chunks,
    columns,
    factor_dtype,
    load,
    load_along,
    load_columns,
    load_rows,
    parts_of,
    plgpu,
    product,
    store,
    sums_of,
    write_queries,
    write_rows,
)
from treeattn.kernel.tiles import ceil, divide

KEYS = 64  # of a block
ROWS = 8  # of keys in shared memory that lie together, and are copied


class Tiling(NamedTuple):
    """How the work is divided.

    rows:   queries a program takes, of those that read one key head
    tiles:  programs that these queries need
    splits: parts of a head's keys, a program for each
    stages: blocks of keys, and of values, that are here or on their way
    """

    rows: int
    tiles: int
    splits: int
    stages: int


def scratch_types(tiling: Tiling, d: int, dv: int, dtype) -> dict[str, Any]:
    """A program's shared memory, for head_dims d and dv, and its barriers."""
    rows, stages = tiling.rows, tiling.stages
    factor = factor_dtype(dtype)
    parts = 1 if dtype == factor else 3
    # As a product reads them: eight rows of 128 bytes together, none in another's bank.
    tiles = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    transforms = tiles, plgpu.SwizzleTransform(128)
    found = {
        "tile": plgpu.SMEM((parts, d, rows), factor),
        "keys": plgpu.SMEM((stages, KEYS, d), dtype, transforms=transforms),
        "values": plgpu.SMEM((stages, KEYS, dv), dtype, transforms=transforms),
        "weights": [plgpu.SMEM((KEYS, rows), factor) for _ in range(max(parts, 2))],
        "keys_there": plgpu.Barrier(num_barriers=stages),
        "values_there": plgpu.Barrier(num_barriers=stages),
    }
    if parts > 1:
        found["part"] = plgpu.SMEM((KEYS, min(dv, CHUNK)), factor)
    return found


def shared_bytes(tiling: Tiling, d: int, dv: int, dtype) -> int:
    """Of the same, with what sums over warps take."""
    size, parts = jnp.dtype(dtype).itemsize, 3 if dtype == jnp.float32 else 1
    cache = tiling.stages * KEYS * (d + dv) * size
    factors = parts * tiling.rows * d + max(parts, 2) * KEYS * tiling.rows
    factors += KEYS * min(dv, CHUNK) * (parts > 1)
    return cache + 2 * factors + (4 << 10)


class Copies(NamedTuple):
    """How keys and values get into shared memory.

    bulk:  by the unit that Hopper and newer GPUs have for it, which arrives at a barrier; else by
           each thread, which then waits for all copies but the last ones
    later: so many are on their way while one is waited for, until there are no more
    """

    bulk: bool
    later: int

    def can_copy(self, count: int) -> bool:
        """Whether so many keys can be copied, of a block."""
        return count % (ROWS if self.bulk else KEYS) == 0

    def start(self, source, target, there) -> None:
        """Begin to copy."""
        if self.bulk:
            plgpu.copy_gmem_to_smem(source, target, there)
            return
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def wait(self, there, more) -> None:
        """Until the oldest is there. more: whether `later` ones are on their way, not fewer."""
        if self.bulk:
            plgpu.barrier_wait(there)
            return
        pl.when(more)(lambda: plgpu.wait_gmem_to_smem(self.later))
        pl.when(~more)(lambda: plgpu.wait_gmem_to_smem(0))

    def commit(self) -> None:
        """Before a copy comes to where the threads have read, or a product reads what they wrote.

        Without the unit there is nothing to tell: the threads wait for each other as it is.
        """
        if self.bulk:
            plgpu.commit_smem()


def program(
    q, k, v, *rest, given, n, more, scale, group, causal, tiling, copies, interpret, **scratch
):
    """One program: the state of a tile of queries after one split of a head's keys.

    References to q (b, l, h, d); k (b, keys, h_kv · d) and v (b, keys, h_kv · dv), of which n keys
    count; then to what is `given`: lengths (b,); factor (1,), of the scale; added, to scores,
    (b, h_kv, keys, queries), and seen, the most that is added to those of a key, (b, h_kv, keys);
    new_k, new_v, new_lengths and new_added, the same of a block of keys more, which the last split
    goes on with; then the state's fields, (splits, b, h_kv, tiles, rows) and
    (splits, b, h_kv, tiles, dv, rows).

    given:     names of those
    n:         keys of a text, and how many `more` there are
    group:     query heads that read one key head
    interpret: whether numbers are multiplied by XLA, as there are no tensor cores
    """
    *found, m_out, d_out, n_out = rest
    of = dict(zip(given, found, strict=True))
    tile = scratch["tile"]
    keys = scratch["keys"]
    values = scratch["values"]
    weights = scratch["weights"]
    rows, tiles, splits, stages = tiling
    d, dv, room = keys.shape[2], values.shape[2], k.shape[1]
    head, number = divide(lax.axis_index("head"), tiles)
    split, text = lax.axis_index("split"), lax.axis_index("text")
    mine = pl.ds(number * rows, rows)
    parts = functools.partial(parts_of, dtype=tile.dtype, count=len(weights))
    multiply = functools.partial(product, interpret=interpret)

    stop = jnp.int32(n)
    if "lengths" in of:
        stop = jnp.clip(of["lengths"][text], 0, n)
    keys_a_split = ceil(ceil(stop, KEYS), splits) * KEYS
    start = split * keys_a_split
    stop = jnp.minimum(start + keys_a_split, stop)
    if causal:
        last, _ = divide(number * rows + (rows - 1), group)
        stop = jnp.minimum(stop, last + 1)
    blocks = ceil(jnp.maximum(stop - start, 0), KEYS)
    new_blocks = (split == splits - 1).astype(jnp.int32) * int(more > 0)
    copied = more > 0 and copies.can_copy(of["new_k"].shape[1])  # a few others are read
    all_copied = blocks + new_blocks if copied else blocks
    new_stop = jnp.int32(more)
    if "new_lengths" in of:
        new_stop = jnp.clip(of["new_lengths"][text], 0, more)
    # Weights divided by at least their number keep the sum of values in float32's range.
    most = 1 if v.dtype == jnp.float16 else pl.next_power_of_2(n + more)

    def first(i):  # of the block's keys; the cache's last block overlaps the one before
        return jnp.minimum(start + i * KEYS, room - KEYS)

    def fetch(name, target, there, i):
        """Begin to copy block i, of the new keys after the others, if there is one."""
        slot = lax.rem(i, jnp.int32(stages))
        width = target.shape[2]
        mine = pl.ds(head * width, width)

        def copy():
            block = {"k": k, "v": v}[name].at[text, pl.ds(first(i), KEYS), mine]
            copies.start(block, target.at[slot], there.at[slot])

        def copy_new():
            new = of[f"new_{name}"]
            few = target.at[slot].at[pl.ds(0, new.shape[1])]
            copies.start(new.at[text, :, mine], few, there.at[slot])

        pl.when(i < blocks)(copy)
        if copied:
            pl.when((i == blocks) & (new_blocks > 0))(copy_new)

    fetch_keys = functools.partial(fetch, "k", keys, scratch["keys_there"])
    fetch_values = functools.partial(fetch, "v", values, scratch["values_there"])

    def shared(x):
        """The place of this text and head in x (b, h_kv, …), 0 where all share an entry."""
        return text * int(x.shape[0] > 1), head * int(x.shape[1] > 1)

    def block_keys(i, shape, axis: int, new: bool):
        """(numbers, whether they are of this block): of its keys, along the axis."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, axis)
        if new:
            return key, key < new_stop
        key = first(i) + key
        return key, (key >= start + i * KEYS) & (key < stop)

    def without_others(i, block, axis: int, new: bool):
        """Values, with 0 for those that do not count: memory never written may be NaN."""
        counts = block_keys(i, block.shape, axis, new)[1]
        if "seen" in of and not new:
            x = of["seen"].at[*shared(of["seen"]), pl.ds(first(i), KEYS)]
            counts = counts & shown_by(load_along(x, block, axis))
        return jnp.where(counts, block, jnp.zeros_like(block))

    def scores(slot):
        s = sums_of(jnp.zeros((KEYS, rows), jnp.float32))
        for chunk in chunks(d):
            queries = [load_columns(tile.at[j, chunk, :]) for j in range(len(tile))]
            s = multiply(s, parts(load_rows(keys.at[slot, :, chunk], tile.dtype)), queries)
        return s

    def add_values(i, block, numerator, new: bool):
        factors = [load_columns(x) for x in weights]
        if block.dtype == tile.dtype:
            turned = load_rows(block.T, tile.dtype)
            return multiply(numerator, [without_others(i, turned, 1, new)], factors)
        # Numbers of 32 bits are not transposed on their way from shared memory: their parts are.
        part = scratch["part"].at[:, pl.ds(0, block.shape[1])]
        for j, x in enumerate(parts(without_others(i, load_rows(block, tile.dtype), 0, new))):
            part[...] = x
            copies.commit()
            turned = load_rows(part.T, tile.dtype)
            numerator = multiply(numerator, [turned], factors[: len(weights) - j])
        return numerator

    def visibility(i, shape, new: bool):
        key, visible = block_keys(i, shape, 0, new)
        if causal and not new:
            query = number * rows + plgpu.broadcasted_iota(jnp.int32, shape, 1)
            visible = visible & (key <= lax.div(query, jnp.int32(group)))
        name = "new_added" if new else "added"
        if name not in of:
            return visible, None
        x = of[name]
        here = pl.ds(0 if new else first(i), KEYS)
        bias = load(x.at[*shared(x), here, mine], plgpu.Layout.WGMMA).astype(jnp.float32)
        return visible & shown_by(bias), bias

    def add_block(i, state, new: bool = False):
        m, denominator, numerator = state
        slot = lax.rem(i, jnp.int32(stages))
        later = i + stages < all_copied

        def wait(there):
            if copied or not new:
                copies.wait(scratch[there].at[slot], later)

        wait("keys_there")
        s = scores(slot)
        s = mask_and_clip(s * columns(root, s) * columns(scaled, s), *visibility(i, s.shape, new))
        pivot = jnp.maximum(m, jnp.max(s, axis=0))
        weight = jnp.exp(finite(m) - finite(pivot))
        p = jnp.exp(s - columns(finite(pivot), s))
        for target, part in zip(weights, parts(p * (1 / most)), strict=True):
            target[...] = part
        copies.commit()  # the weights; and the keys have been read
        fetch_keys(i + stages)
        wait("values_there")
        numerator = tuple(
            add_values(i, values.at[slot, :, chunk], x * columns(weight, x), new)
            for chunk, x in zip(chunks(dv), numerator, strict=True)
        )
        copies.commit()  # the values have been read
        fetch_values(i + stages)
        return pivot, denominator * weight + jnp.sum(p, axis=0), numerator

    for i in range(stages):
        for f in (fetch_keys, fetch_values):
            f(jnp.int32(i))
    root = write_queries(q.at[text], tile, number * rows, head, group)
    scaled = root * (scale * of["factor"][0] if "factor" in of else scale)
    copies.commit()
    m = sums_of(jnp.full(rows, -jnp.inf, jnp.float32))
    numerator = tuple(sums_of(jnp.zeros((x.size, rows), jnp.float32)) for x in chunks(dv))
    state = m, jnp.zeros_like(m), numerator
    state = lax.fori_loop(jnp.int32(0), blocks, add_block, state)
    if more:

        def add_new(i, state):
            if not copied:
                slot = lax.rem(blocks + i, jnp.int32(stages))
                write_rows(of["new_k"].at[text], keys.at[slot], head * d)
                write_rows(of["new_v"].at[text], values.at[slot], head * dv)
                copies.commit()
            return add_block(blocks + i, state, new=True)

        state = lax.fori_loop(jnp.int32(0), new_blocks, add_new, state)
    m, denominator, numerator = state
    here = split, text, head, number
    store(m_out.at[here], m)
    store(d_out.at[here], denominator)
    for chunk, x in zip(chunks(dv), numerator, strict=True):
        total = finite(x * most)
        seen = columns(denominator, total) != 0  # a weight of 0 times a value that is NaN is NaN
        store(n_out.at[*here, chunk], jnp.where(seen, total, jnp.zeros_like(total)))
