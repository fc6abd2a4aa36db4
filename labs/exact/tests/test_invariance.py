"""check_invariance names each planted dependence of a function's bits, and nothing else."""

import functools
import itertools

import numpy as np
import pytest

from labs.exact.axes import AXES
from labs.exact.invariance import bits, check_invariance, difference

SMALL = {
    "heads": (2, 1),
    "head_dim": 8,
    "keys": (257, 1031),
    "batches": (2, 8),
    "queries": (2, 9),
}


# Functions whose bits depend on the planted axis alone. Every row is calculated by itself, with its
# keys sorted by their values. Terms are added in float32, in parts whose size the plant chooses.


def one_row(q, k, v, size=100, *, unit=1, sort=True):
    """(Σ (q·k) v, the largest q·k) of a row: q (l, h, d), k and v (n, h, d)."""
    if sort:
        order = np.argsort(k[:, 0, 0], kind="stable")
        k, v = k[order], v[order]
    s = scores(q, k)
    terms = np.float32(s / unit)[..., None] * v.swapaxes(0, 1)
    parts = [terms[:, :, i : i + size].sum(axis=2) for i in range(0, len(k), size)]
    return functools.reduce(np.add, parts) * np.float32(unit), np.float32(s.max(-1))


def scores(q, k):
    """(l, h, n), each number on its own."""
    products = q[:, :, None] * k.swapaxes(0, 1)
    return functools.reduce(np.add, np.moveaxis(products.astype(np.float64), -1, 0))


def rows(one, q, k, v, kv_lengths=None):
    """All rows, each by `one(row, q, k, v)`, with only the keys that count."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    lengths = [k.shape[1]] * len(q) if kv_lengths is None else kv_lengths
    answers = [one(i, q[i], k[i, :n], v[i, :n]) for i, n in enumerate(lengths)]
    return tuple(np.stack(x) for x in zip(*answers, strict=True))


def planted(choose):
    """f whose parts have the size choose(q, k, kv_lengths, row)."""

    def f(q, k, v, *, kv_lengths=None):
        return rows(lambda i, *x: one_row(*x, choose(q, k, kv_lengths, i)), q, k, v, kv_lengths)

    return f


fixed = planted(lambda *_: 100)


def in_given_order(q, k, v, *, kv_lengths=None):
    return rows(lambda i, *x: one_row(*x, sort=False), q, k, v, kv_lengths)


def one_unit_for_all_rows(q, k, v, *, kv_lengths=None):
    (largest,) = rows(lambda i, q, k, v: [scores(q, k).max(-1)], q, k, v, kv_lengths)
    unit = 1 + np.max(largest, axis=0)[..., None]
    return rows(lambda i, *x: one_row(*x, unit=unit), q, k, v, kv_lengths)


def one_unit_for_all_queries(q, k, v, *, kv_lengths=None):
    def one(i, q, k, v):
        return one_row(q, k, v, unit=1 + scores(q, k).max((0, 2))[:, None])

    return rows(one, q, k, v, kv_lengths)


def padding_leaks(q, k, v, *, kv_lengths=None):
    """The first value after those that count has a weight of 1e-7."""
    out, lse = fixed(q, k, v, kv_lengths=kv_lengths)
    for i, n in enumerate([] if kv_lengths is None else kv_lengths):
        out[i] += np.float32(1e-7) * v[i, n : n + 1].sum(0, dtype=np.float32).repeat(2, axis=0)
    return out, lse


def a_neighbour_leaks(q, k, v, *, kv_lengths=None):
    out, lse = fixed(q, k, v, kv_lengths=kv_lengths)
    return out + np.float32(1e-7) * np.roll(out, 1, axis=0), lse


def one_bit(q, k, v):
    """One element of one row's lse differs by one bit."""
    out, lse = fixed(q, k, v)
    if len(q) == 8 and k.shape[1] == 257:
        lse[7, 0, 1] = np.nextafter(lse[7, 0, 1], np.float32(np.inf))
    return out, lse


def raises(q, k, v):
    if q.shape[1] == 9:
        raise TypeError("nine")
    return fixed(q, k, v)


def in_one_buffer():
    """An answer has to be copied before the next call overwrites it."""
    buffers = {}

    def f(q, k, v):
        out, _ = planted(lambda q, *_: either(len(q) > 1))(q, k, v)
        buffer = buffers.setdefault(out.shape[1:], np.empty((8, *out.shape[1:]), np.float32))
        buffer[: len(out)] = out
        return buffer[: len(out)]

    return f


def either(condition):
    return 64 if condition else 100


calls = itertools.count()
PLANTED = [
    ("repeats", lambda q, k, v: q * np.float32(1 + 1e-6 * next(calls))),
    ("repeats", lambda q, k, v: np.zeros_like(q)),  # says nothing
    ("repeats", lambda q, k, v: np.full_like(q, np.nan)),
    ("address", planted(lambda q, k, *_: either(k.ctypes.data % 64))),
    ("batch", planted(lambda q, *_: either(len(q) > 1))),  # one row: as if by another kernel
    ("batch", planted(lambda q, *_: either(len(q) > 4))),  # many rows: fewer splits
    ("batch", in_one_buffer()),
    ("row", planted(lambda q, k, lengths, i: either(i % 2))),
    ("row", planted(lambda q, k, lengths, i: either(i == 7))),
    ("row", one_bit),
    ("neighbours", one_unit_for_all_rows),
    ("neighbours", lambda q, k, v: one_unit_for_all_rows(q, k, v)),  # without lengths
    ("neighbours", a_neighbour_leaks),
    (
        "neighbours",  # as many splits as the longest row wants
        planted(lambda q, k, n, _: either(n is not None and max(n) > 600 and min(n) < 600)),
    ),
    ("neighbours", planted(lambda q, *_: either(abs(q).max() > 8 and len(q) == 8))),  # a scale
    ("neighbours", planted(lambda q, *_: either((q == 0).all(axis=(1, 2, 3)).any()))),
    ("queries", planted(lambda q, *_: either(q.shape[1] == 1 or q.shape[1] == 8))),
    ("queries", one_unit_for_all_queries),
    ("queries", raises),
    ("order", in_given_order),
    ("padding", planted(lambda q, k, n, _: -(-k.shape[1] // 3) if n is not None else 100)),
    ("padding", padding_leaks),
    ("ways", {"100": fixed, "again": fixed, "64": planted(lambda *_: 64)}),
]


@pytest.mark.parametrize(("axis", "f"), PLANTED)
def test_a_planted_dependence_is_named_and_nothing_else(axis, f):
    report = check_invariance(f, **SMALL)
    assert report.names("failed") == [axis], str(report)
    assert not report and f"{axis}: {AXES[axis]}" in str(report)
    others = len(AXES) - 1 if axis == "repeats" else 0
    assert len(report.names("skipped")) >= others


def test_what_depends_on_nothing_passes():
    def overwrites(q, k, v, *, kv_lengths=None):
        assert all(x.dtype == np.float32 and x.ctypes.data % 16 == 0 for x in (q, k, v))
        answer = fixed(q, k, v, kv_lengths=kv_lengths)
        q[:] = k[:] = v[:] = 7
        return answer

    report = check_invariance({"one": overwrites, "another": fixed}, **SMALL)
    assert report and report.names("passed") == list(AXES), str(report)


def test_what_cannot_be_asked_is_skipped():
    """Padding without lengths, other ways, and here comparisons with one row alone."""

    def f(q, k, v):
        if len(q) == 1:
            raise NotImplementedError("at least two rows")
        return fixed(q, k, v)

    report = check_invariance(f, **SMALL)
    assert report.names("skipped") == ["batch", "queries", "padding", "ways"], str(report)
    assert report.names("failed") == [] and "skipped  at least two rows" in str(report)
    some = check_invariance(f, axes=["order"], **SMALL)
    assert some.names("passed") == ["repeats", "order"]
    with pytest.raises(ValueError, match=r"axes: expected some of \['repeats', .*got \['shape'\]"):
        check_invariance(f, axes=["shape"])


def test_differences():
    """+0 and −0 differ. NaNs of any sign and payload are the same."""
    quiet = np.uint32(0x7FC00000)
    nans = np.array([quiet, quiet + 1, quiet | (1 << 31)], np.uint32).view(np.float32)
    assert len(set(bits(nans).tolist())) == 1 and bits(np.float32(1))[()] == 0x3F800000
    for dtype in ("float16", "float32", "float64"):
        assert len(set(bits(np.array([0, -0.0, np.nan, 1, np.inf], dtype)).tolist())) == 5
    zeros, ones = np.zeros(3), np.ones(1)
    x = np.array([1.0, 2, 3])
    for answer, expected, share, largest in (
        ([x], [x], 0, 0),
        ([x], [-x + 2 * x], 0, 0),
        ([zeros], [-zeros], 1, 0),
        ([x, ones], [np.array([1, 1.5, 7]), 0 * ones], 3 / 4, 4),
        ([x, ones], [np.array([1, np.nan, 3]), ones], 1 / 4, np.nan),
        ([np.stack([x, 2 * x])], [x[None]], 1 / 2, 3),
        ([x], [x[:2]], 1, np.nan),
        ([x], [x.astype(np.float32)], 1, np.nan),
        ([x], [x, x], 1, np.nan),
    ):
        np.testing.assert_equal(difference(answer, expected), (share, largest))
