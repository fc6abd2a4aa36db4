"""The axes on which a function's bits may depend, and the questions that tell them apart.

Each question changes a single thing, so the axis that fails is the cause. Together the questions
lead from a query alone to any batch that contains the query.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# The axes on which a function's bits may depend, and what its author can do.
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
    "ways": "which of the functions is called: blocks, splits and devices cut the keys, and merges"
    " round; cut by position in the text, at the same places every time, or make the sums exact",
}
MOST = 70_000  # keys of all rows of a call


class Call(NamedTuple):
    q: np.ndarray  # (b, l, h, d)
    k: np.ndarray  # (b, n, h_kv, d)
    v: np.ndarray  # (b, n, h_kv, d)
    lengths: np.ndarray | None = None  # (b,), for `kv_lengths`
    offset: int = 0  # of the arrays' addresses, in bytes past a multiple of 64
    way: int = 0  # which of the functions


class Question(NamedTuple):
    """Two calls' answers should have the same bits in these parts, along rows and queries."""

    pair: str
    call: Call
    expected: Call  # its rows and queries are broadcast to those of `call`
    part: tuple = (slice(None), slice(None))
    expected_part: tuple = (slice(None), slice(None))


class Settings(NamedTuple):
    """The arguments of `check_invariance`."""

    heads: tuple[int, int]
    head_dim: int
    keys: Sequence[int]
    batches: Sequence[int]
    queries: Sequence[int]
    ways: Sequence[str]  # the functions' names
    takes_lengths: bool

    def draw(self, n: int, b: int = 1, l: int = 1, seed: int = 0) -> Call:
        """Normally distributed numbers, the same every time."""
        rng = np.random.default_rng([seed, n])
        h, h_kv = self.heads
        shapes = (b, l, h, self.head_dim), (b, n, h_kv, self.head_dim), (b, n, h_kv, self.head_dim)
        return Call(*(rng.standard_normal(shape, dtype=np.float32) for shape in shapes))

    def batches_of(self, n: int) -> list[int]:
        """Numbers of rows with n keys each."""
        return [b for b in self.batches if b <= MOST / n]


def in_rows(call: Call, b: int) -> Call:
    """The only row of this call, b times."""
    return Call(*(np.repeat(x, b, axis=0) for x in call[:3]))


# Each axis asks about n keys and l queries, which are one or eight new tokens.


def repeats(asked: Settings, n: int, l: int) -> Iterator[Question]:
    call = asked.draw(n, max([1, *asked.batches_of(n)]), l)
    for time in ("second", "third"):
        yield Question(f"the {time} time", Call(*call), call)


def address(asked: Settings, n: int, l: int) -> Iterator[Question]:
    call = asked.draw(n, 2, l)
    for offset in (16, 32):
        moved = call._replace(offset=offset)
        yield Question(f"{offset} bytes past a multiple of 64", moved, call)


def batch(asked: Settings, n: int, l: int) -> Iterator[Question]:
    """One row against copies of it."""
    alone = asked.draw(n, l=l)
    for b in asked.batches_of(n):
        yield Question(f"batch of {b} against 1", in_rows(alone, b), alone, (slice(0, 1),))


def row(asked: Settings, n: int, l: int) -> Iterator[Question]:
    """Rows that are copies of each other."""
    for b in asked.batches_of(n):
        copies = in_rows(asked.draw(n, l=l), b)
        others, first = (slice(1, None),), (slice(0, 1),)
        yield Question(f"batch of {b}, others against the first", copies, copies, others, first)


def neighbours(asked: Settings, n: int, l: int) -> Iterator[Question]:
    """One row among its copies, and among other rows."""
    for b in asked.batches_of(n):
        mine = asked.draw(n, l=l)
        copies = in_rows(mine, b)
        others = asked.draw(n, b, l, seed=1)
        place = slice(b // 3, b // 3 + 1)
        for size in (1, 4, 0):
            changed = Call(size * others.q, others.k, size * others.v)
            for x, y in zip(changed[:3], mine[:3], strict=True):
                x[place] = y
            pair = f"batch of {b}, neighbours {size} times normal"
            yield Question(pair, changed, copies, (place,), (place,))
        if asked.takes_lengths:
            yield from _lengths(copies, place)


def _lengths(copies: Call, place: slice) -> Iterator[Question]:
    """Half of the keys count in all rows, and then fewer or more in all rows but one."""
    b = len(copies.q)
    n = copies.k.shape[1]
    expected = copies._replace(lengths=np.full(b, n // 2))
    random = np.random.default_rng(2).integers(1, n // 2 + 1, b)
    for name, lengths in (("shorter", random), ("longer", np.full(b, n))):
        lengths[place] = n // 2
        pair = f"{n // 2} of them, batch of {b}, {name} neighbours"
        yield Question(pair, copies._replace(lengths=lengths), expected, (place,), (place,))


def queries(asked: Settings, n: int, _: int) -> Iterator[Question]:
    """One query alone, as several copies, and among others."""
    alone = asked.draw(n)
    for l in asked.queries:
        copies = alone._replace(q=np.repeat(alone.q, l, axis=1))
        yield Question(f"{l} queries against 1", copies, alone)
        others = alone._replace(q=asked.draw(n, l=l, seed=1).q)
        place = slice(l // 2, l // 2 + 1)
        others.q[:, place] = alone.q
        yield Question(f"{l} different queries against 1", others, alone, (slice(None), place))


def order(asked: Settings, n: int, l: int) -> Iterator[Question]:
    call = asked.draw(n, 2, l)
    orders = {
        "backwards": np.arange(n)[::-1],
        "halves swapped": np.roll(np.arange(n), n // 2),
        "shuffled": np.random.default_rng(0).permutation(n),
    }
    for name, places in orders.items():
        yield Question(name, call._replace(k=call.k[:, places], v=call.v[:, places]), call)


def padding(asked: Settings, n: int, l: int) -> Iterator[Question]:
    """The same keys in longer memory, with numbers after them that do not count."""
    if not asked.takes_lengths:
        return
    call = asked.draw(n, 2, l)._replace(lengths=np.full(2, n))
    for room in (n + 1, 1 << n.bit_length(), 2 * n):
        rest = asked.draw(room, 2, l, seed=1)
        k = np.concatenate([call.k, 4 * rest.k[:, n:]], axis=1)
        v = np.concatenate([call.v, 4 * rest.v[:, n:]], axis=1)
        yield Question(f"room for {room}", call._replace(k=k, v=v), call)


def ways(asked: Settings, n: int, l: int) -> Iterator[Question]:
    """The first function against each other function."""
    first, *others = asked.ways
    call = asked.draw(n, 2, l)
    for way, name in enumerate(others, 1):
        yield Question(f"{name} against {first}", call._replace(way=way), call)


ALL = repeats, address, batch, row, neighbours, queries, order, padding, ways
QUESTIONS = {axis.__name__: axis for axis in ALL}


def questions(axis: str, asked: Settings) -> Iterator[Question]:
    """All questions about an axis. Those with the same expected call are neighbours."""
    for i, n in enumerate(asked.keys):
        for question in QUESTIONS[axis](asked, n, (1, 8)[i % 2]):
            yield question._replace(pair=f"{n} keys, {question.pair}")
