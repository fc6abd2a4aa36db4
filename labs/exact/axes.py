"""The axes on which a function's bits may depend, and the questions that tell them apart.

From one question to the next a single thing changes, so that the axis that is named is the one that
matters; between them they lead from a query alone to any batch that it may be in.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from treeattn_conformance import bfloat16

# What a function's bits may depend on, and what its author can do.
AXES = {
    "repeats": "the same call twice: no additions in the order in which threads come, no memory"
    " that was never written; the other axes are not asked",
    "address": "where in memory the arguments lie: loops that peel off what is not aligned add"
    " their terms in another order",
    "batch": "how many rows are asked at once: the sizes of tiles, and how many splits the keys"
    " get, have to follow from a row's own shape",
    "row": "which row of the batch it is: every row of a tile has to be added up alike",
    "neighbours": "what else is in the batch: a pivot, a length or a scale of all rows is not"
    " one's own",
    "queries": "how many queries, beside which: one is a matrix times a vector, several are a"
    " product of matrices, which adds in another order; decode two wide, or fix the tiles",
    "order": "the order of the keys: a maximum, and after it sums of whole numbers, have none",
    "padding": "how long the memory is in which the keys lie: blocks have to start from the first"
    " key, and have one size",
    "blocks": "the size of blocks: fix it, or make the sums exact",
    "splits": "which keys are attended to together: merges round; split by position in the text,"
    " at the same places every time, or make the sums exact",
    "devices": "how many devices share the keys: blocks of a fixed size, merged along a tree that"
    " does not know the devices, or sums that are exact",
    "in flight": "whether a key comes with the call or was cached before: split the keys by"
    " position, not by when they arrived",
}
OPTIONS = {
    "padding": "kv_lengths",
    "blocks": "block",
    "splits": "splits",
    "devices": "devices",
    "in flight": "in_flight",
}
DTYPES = ("float64", "float32", "float16", "bfloat16")
MOST = 70_000  # keys of all rows of a call


class Call(NamedTuple):
    q: np.ndarray  # (b, l, h, d)
    k: np.ndarray  # (b, n, h_kv, d)
    v: np.ndarray  # (b, n, h_kv, d)
    options: Mapping = MappingProxyType({})
    offset: int = 0  # of the arrays' addresses, in bytes past a multiple of 64


class Question(NamedTuple):
    """These parts, along rows and queries, of two calls' answers should have the same bits."""

    pair: str
    call: Call
    expected: Call  # whose rows and queries stand for as many as there are in the other
    part: tuple = (slice(None), slice(None))
    expected_part: tuple = (slice(None), slice(None))


class Settings(NamedTuple):
    """What is asked; the arguments of `check_invariance`."""

    dtype: str
    heads: tuple[int, int]
    head_dim: int
    keys: Sequence[int]
    batches: Sequence[int]
    queries: Sequence[int]
    devices: Sequence[int]
    takes_lengths: bool

    def draw(self, n: int, b: int = 1, l: int = 1, seed: int = 0) -> Call:
        """Normally distributed numbers, the same every time."""
        rng = np.random.default_rng([seed, n])
        h, h_kv = self.heads
        drawn = np.float64 if self.dtype == "float64" else np.float32
        shapes = (b, l, h, self.head_dim), (b, n, h_kv, self.head_dim), (b, n, h_kv, self.head_dim)
        return Call(*(self.rounded(rng.standard_normal(shape, dtype=drawn)) for shape in shapes))

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return bfloat16(x) if self.dtype == "bfloat16" else x.astype(self.dtype)

    def steps(self) -> Iterator[tuple[int, int, list[int]]]:
        """(keys, queries, batches): a step of decoding and one of eight tokens, in turn."""
        for i, n in enumerate(self.keys):
            yield n, (1, 8)[i % 2], sorted(b for b in self.batches if 1 < b <= MOST / n)


def in_rows(call: Call, b: int) -> Call:
    """The only row of this call, b times."""
    return Call(*(np.repeat(x, b, axis=0) for x in call[:3]))


def repeats(asked: Settings) -> Iterator[Question]:
    for n, l, batches in asked.steps():
        call = asked.draw(n, max([1, *batches]), l)
        for time in ("second", "third"):
            yield Question(f"{n} keys, the {time} time", call._replace(options={}), call)


def address(asked: Settings) -> Iterator[Question]:
    for n, l, _ in asked.steps():
        call = asked.draw(n, 2, l)
        for offset in (16, 32):
            moved = call._replace(offset=offset)
            yield Question(f"{n} keys, {offset} bytes past a multiple of 64", moved, call)


def batch(asked: Settings) -> Iterator[Question]:
    """One row, and copies of it."""
    for n, l, batches in asked.steps():
        alone = asked.draw(n, l=l)
        for b in batches:
            yield Question(
                f"{n} keys, batch of {b} against 1", in_rows(alone, b), alone, (slice(0, 1),)
            )


def row(asked: Settings) -> Iterator[Question]:
    """Rows that are copies of each other."""
    for n, l, batches in asked.steps():
        for b in batches:
            copies = in_rows(asked.draw(n, l=l), b)
            yield Question(
                f"{n} keys, batch of {b}, row + 1 against 0",
                copies,
                copies,
                (slice(1, None),),
                (slice(0, 1),),
            )


def neighbours(asked: Settings) -> Iterator[Question]:
    """One row among its copies, and among others."""
    for n, l, batches in asked.steps():
        for b in sorted({batches[0], batches[-1]}) if batches else ():
            mine = asked.draw(n, l=l)
            copies = in_rows(mine, b)
            others = asked.draw(n, b, l, seed=1)
            place = slice(b // 3, b // 3 + 1)
            for size in (1, 4, 0):
                changed = Call(size * others.q, others.k, size * others.v)
                for x, y in zip(changed[:3], mine[:3], strict=True):
                    x[place] = y
                pair = f"{n} keys, batch of {b}, neighbours {size} times normal"
                yield Question(pair, changed, copies, (place,), (place,))
            if asked.takes_lengths:
                yield from _lengths(copies, place)


def _lengths(copies: Call, place: slice) -> Iterator[Question]:
    """Half of the keys count in all rows, and then fewer or more in all rows but one."""
    b = len(copies.q)
    n = copies.k.shape[1]
    half = np.full(b, n // 2)
    expected = copies._replace(options={"kv_lengths": half})
    random = np.random.default_rng(2).integers(1, n // 2 + 1, b)
    for name, lengths in (("shorter", random), ("longer", np.full(b, n))):
        lengths[place] = n // 2
        changed = copies._replace(options={"kv_lengths": lengths})
        pair = f"{n // 2} of {n} keys, batch of {b}, {name} neighbours"
        yield Question(pair, changed, expected, (place,), (place,))


def queries(asked: Settings) -> Iterator[Question]:
    """One query alone, as several copies, and among others."""
    for n in asked.keys:
        alone = asked.draw(n)
        for l in asked.queries:
            if l == 1:
                continue
            copies = alone._replace(q=np.repeat(alone.q, l, axis=1))
            yield Question(f"{n} keys, {l} queries against 1", copies, alone)
            others = alone._replace(q=asked.draw(n, l=l, seed=1).q)
            place = slice(l // 2, l // 2 + 1)
            others.q[:, place] = alone.q
            pair = f"{n} keys, {l} different queries against 1"
            yield Question(pair, others, alone, (slice(None), place))


def order(asked: Settings) -> Iterator[Question]:
    for n, l, _ in asked.steps():
        call = asked.draw(n, 2, l)
        orders = {
            "backwards": np.arange(n)[::-1],
            "halves swapped": np.roll(np.arange(n), n // 2),
            "shuffled": np.random.default_rng(0).permutation(n),
        }
        for name, places in orders.items():
            other = call._replace(k=call.k[:, places], v=call.v[:, places])
            yield Question(f"{n} keys, {name}", other, call)


def padding(asked: Settings) -> Iterator[Question]:
    """The same keys in longer memory, with numbers after them that do not count."""
    for n, l, _ in asked.steps():
        call = asked.draw(n, 2, l)._replace(options={"kv_lengths": np.full(2, n)})
        for room in (n + 1, 1 << n.bit_length(), 2 * n):
            rest = asked.draw(room, 2, l, seed=1)
            k, v = (
                np.concatenate([x, 4 * y[:, n:]], axis=1)
                for x, y in zip(call[1:3], rest[1:3], strict=True)
            )
            yield Question(f"{n} keys in room for {room}", call._replace(k=k, v=v), call)


def blocks(asked: Settings) -> Iterator[Question]:
    sizes = (16, 128, 1000)
    yield from _options(asked, {f"blocks of {size}": {"block": size} for size in sizes})


def splits(asked: Settings) -> Iterator[Question]:
    """The keys in parts, as many as each number says."""
    for n, l, _ in asked.steps():
        call = asked.draw(n, 2, l)
        cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, n), 4, replace=False))
        parts = {
            "two halves": (n // 2, n - n // 2),
            "all but one, and one": (n - 1, 1),
            "parts of 256": (256,) * (n // 256) + ((n % 256,) if n % 256 else ()),
            "five parts": tuple(int(x) for x in np.diff([0, *cuts, n])),
        }
        for name, lengths in parts.items():
            split = call._replace(options={"splits": lengths})
            yield Question(f"{n} keys, {name} against all at once", split, call)


def devices(asked: Settings) -> Iterator[Question]:
    first, *others = asked.devices
    for n, l, _ in asked.steps():
        call = asked.draw(n, 2, l)._replace(options={"devices": first})
        for p in others:
            pair = f"{n} keys, {p} devices against {first}"
            yield Question(pair, call._replace(options={"devices": p}), call)


def in_flight(asked: Settings) -> Iterator[Question]:
    """The last keys come with the call; or all were there before."""
    counts = (1, 2, 9, 33)
    yield from _options(asked, {f"{m} in flight against none": {"in_flight": m} for m in counts})


def _options(asked: Settings, named: dict[str, dict]) -> Iterator[Question]:
    for n, l, _ in asked.steps():
        call = asked.draw(n, 2, l)
        for name, options in named.items():
            yield Question(f"{n} keys, {name}", call._replace(options=options), call)


QUESTIONS = {
    "repeats": repeats,
    "address": address,
    "batch": batch,
    "row": row,
    "neighbours": neighbours,
    "queries": queries,
    "order": order,
    "padding": padding,
    "blocks": blocks,
    "splits": splits,
    "devices": devices,
    "in flight": in_flight,
}
