"""check_invariance names each planted dependence of a function's bits, and nothing else."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest

from labs.exact.axes import AXES
from labs.exact.bits import bits, compare
from labs.exact.invariance import check_invariance
from treeattn_conformance import attend

SMALL = {
    "heads": (2, 1),
    "head_dim": 8,
    "keys": (257, 1031),
    "batches": (1, 2, 8),
    "queries": (1, 2, 9),
}


# Functions whose bits depend on what is planted, and on nothing else: every row by itself, its keys
# sorted by their values, and then added in float32 in parts that the plant chooses.


def scores(q, k):
    """(l, h, n) of one row, each number on its own: q (l, h, d), k (n, h, d)."""
    products = q[:, :, None] * k.swapaxes(0, 1)
    return functools.reduce(np.add, np.moveaxis(products.astype(np.float64), -1, 0))


def state(s, v, pivot=None):
    """(max, denominator, numerator) in float32 of scores (l, h, n) and values (n, h, d)."""
    m = np.float32(s.max(-1) if pivot is None else pivot)
    w = np.exp(np.float32(s) - m[..., None])
    return m, w.sum(-1), (w[..., None] * np.float32(v.swapaxes(0, 1))).sum(-2)


def merged(a, b):
    m = np.maximum(a[0], b[0])
    x, y = (np.exp(state[0] - m) for state in (a, b))
    return m, x * a[1] + y * b[1], x[..., None] * a[2] + y[..., None] * b[2]


def by_value(k, v):
    order = np.argsort(k[:, 0, 0], kind="stable")
    return k[order], v[order]


def one_row(q, k, v, lengths=(), *, pivot=None, sort=by_value):
    """(out, lse) of a row whose keys are attended to in parts of these lengths, then merged."""
    if not lengths:
        k, v = sort(k, v)
    ends = np.cumsum([0, *(lengths or [len(k)])])
    states = []
    for i, j in itertools.pairwise(ends):
        part = sort(k[i:j], v[i:j])
        states.append(state(scores(q, part[0]), part[1], pivot))
    m, d, n = functools.reduce(merged, states)
    return n / d[..., None], m + np.log(d)


def in_blocks(n, size):
    return (size,) * (n // size) + ((n % size,) if n % size else ())


def rows(one, q, k, v, kv_lengths=None):
    """All rows, each by `one(row, q, k, v)`, with the keys that count only."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    lengths = [k.shape[1]] * len(q) if kv_lengths is None else kv_lengths
    answers = [one(i, q[i], k[i, :n], v[i, :n]) for i, n in enumerate(lengths)]
    return tuple(np.stack(x) for x in zip(*answers, strict=True))


def sorted_blocks(size, q, k, v):
    """Blocks of the sorted keys: the order in which they came does not matter."""
    return one_row(q, *by_value(k, v), in_blocks(len(k), size))


def planted(choose):
    """f whose blocks have the size choose(q, k, kv_lengths, row, options)."""

    def f(q, k, v, *, kv_lengths=None, **options):
        def one(i, *row):
            return sorted_blocks(choose(q, k, kv_lengths, i, options), *row)

        return rows(one, q, k, v, kv_lengths)

    return f


def in_given_order(q, k, v, *, kv_lengths=None, **options):
    def one(i, *row):
        return one_row(*row, sort=lambda k, v: (k, v))

    return rows(one, q, k, v, kv_lengths)


def in_parts(q, k, v, *, kv_lengths=None, **options):
    """Parts as asked for by the one option that is given."""
    n = k.shape[1]
    parts = options.get("splits", ())
    if "devices" in options:
        p = options["devices"]
        parts = [len(x) for x in np.array_split(np.arange(n), p)]
    if "in_flight" in options:
        parts = (n - options["in_flight"], options["in_flight"])
    return rows(lambda i, *row: one_row(*row, parts), q, k, v, kv_lengths)


def only(option, f):
    """f, which knows of the options this one only."""

    def g(q, k, v, *, kv_lengths=None, **options):
        return f(q, k, v, kv_lengths=kv_lengths, **{x: options[x] for x in options if x == option})

    return g


def one_pivot_for_all_rows(q, k, v, *, kv_lengths=None, **options):
    largest = []
    rows(lambda i, q, k, v: largest.append(scores(q, k).max(-1)) or (0,), q, k, v, kv_lengths)
    pivot = np.max(largest, axis=0)
    return rows(lambda i, *row: one_row(*row, pivot=pivot), q, k, v, kv_lengths)


def one_pivot_for_all_queries(q, k, v, *, kv_lengths=None, **options):
    def one(i, q, k, v):
        return one_row(q, k, v, pivot=np.repeat(scores(q, k).max((0, 2))[None], len(q), axis=0))

    return rows(one, q, k, v, kv_lengths)


def padding_leaks(q, k, v, *, kv_lengths=None, **options):
    """The first value after those that count has a weight of 1e-7."""
    out, lse = in_parts(q, k, v, kv_lengths=kv_lengths)
    for i, n in enumerate([] if kv_lengths is None else kv_lengths):
        out[i] += np.float32(1e-7) * v[i, n : n + 1].sum(0, dtype=np.float32).repeat(2, axis=0)
    return out, lse


def a_neighbour_leaks(q, k, v, *, kv_lengths=None, **options):
    out, lse = in_parts(q, k, v, kv_lengths=kv_lengths)
    return out + np.float32(1e-7) * np.roll(out, 1, axis=0), lse


def by_address(q, k, v, *, kv_lengths=None, **options):
    size = 128 if k.ctypes.data % 64 else 64
    return planted(lambda *_: size)(q, k, v, kv_lengths=kv_lengths)


def either(condition):
    return 64 if condition else 100


PLANTED = [
    ("address", by_address),
    ("batch", planted(lambda q, *_: either(len(q) > 1))),  # one row: as if by another kernel
    ("batch", planted(lambda q, *_: either(len(q) > 4))),  # many rows: fewer splits
    ("row", planted(lambda q, k, lengths, i, options: either(i % 2))),
    ("row", planted(lambda q, k, lengths, i, options: either(i == 7))),
    ("neighbours", one_pivot_for_all_rows),
    ("neighbours", a_neighbour_leaks),
    (
        "neighbours",  # as many splits as the longest row wants
        planted(lambda q, k, n, *_: either(n is not None and max(n) > 600 and min(n) < 600)),
    ),
    ("queries", planted(lambda q, *_: either(q.shape[1] == 1 or q.shape[1] == 8))),
    ("queries", one_pivot_for_all_queries),
    ("order", in_given_order),
    ("padding", planted(lambda q, k, n, *_: -(-k.shape[1] // 3) if n is not None else 100)),
    ("padding", padding_leaks),
    ("blocks", planted(lambda *x: x[-1].get("block", 100))),
    ("splits", only("splits", in_parts)),
    ("devices", only("devices", in_parts)),
    ("in flight", only("in_flight", in_parts)),
]


@pytest.mark.parametrize(("axis", "f"), PLANTED)
def test_a_planted_dependence_is_named_and_nothing_else(axis, f):
    report = check_invariance(f, **SMALL)
    assert report.names("failed") == [axis], str(report)
    assert report.names("skipped") == []
    assert f"{axis}: {AXES[axis]}" in str(report)


@pytest.mark.parametrize(
    "f",
    [
        one_pivot_for_all_rows,
        planted(lambda q, k, *_: either(np.abs(k[:, 0]).max(axis=-1).std() > 0)),  # any other row
        planted(lambda q, *_: either(np.abs(q).max() > 8 and len(q) == 8)),  # as for a common scale
        planted(lambda q, *_: either((q == 0).all(axis=(1, 2, 3)).any())),  # an empty one
    ],
)
def test_neighbours_are_named_by_what_they_hold(f):
    """Without lengths."""
    options = {"axes": ["batch", "row", "neighbours", "queries"], **SMALL}
    report = check_invariance(lambda q, k, v: f(q, k, v), **options)
    assert report.names("failed") == ["neighbours"], str(report)


def test_every_axis_is_planted():
    assert {axis for axis, _ in PLANTED} == set(AXES) - {"repeats"}


def exact(q, k, v, *, kv_lengths=None, block=None, **options):
    """Sums of whole numbers, in the parts that are asked for; a maximum of all keys before."""

    def one(i, q, k, v):
        n = len(k)
        parts = options.get("splits", ())
        if "in_flight" in options:
            parts = (n - options["in_flight"], options["in_flight"])
        if "devices" in options:
            parts = [len(x) for x in np.array_split(np.arange(n), options["devices"])]
        if block:
            parts = in_blocks(n, block)
        s = scores(q, k)
        m = s.max(-1, keepdims=True)
        w = np.rint(np.exp(s - m) * 2.0**30)
        wv = np.rint(w[..., None] * v.swapaxes(0, 1) * 2.0**16).astype(np.int64)
        ends = np.cumsum([0, *(parts or [n])])
        sums = [
            (w[..., i:j].astype(np.int64).sum(-1), wv[..., i:j, :].sum(-2))
            for i, j in itertools.pairwise(ends)
        ]
        d, total = (functools.reduce(np.add, x) for x in zip(*sums, strict=True))
        out = np.float32(total / d[..., None] / 2.0**16)
        return out, np.float32(m[..., 0] + np.log(d) - 30 * np.log(2))

    return rows(one, q, k, v, kv_lengths)


def test_sums_of_whole_numbers_depend_on_nothing():
    report = check_invariance(exact, **SMALL)
    assert report.names("passed") == list(AXES), str(report)


def test_the_exact_one_is_attention():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 2, 8)).astype(np.float32) for n in (3, 300, 300))
    found = exact(q, k, v, splits=(100, 200), kv_lengths=[300, 300])
    expected = attend(q, k, v, scale=1)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


# What is said of a difference


def test_one_bit_of_one_element_is_found_and_counted():
    """One ulp, of element [7, 0, 1, 3] of lse's eight rows and of nothing in out."""

    def f(q, k, v):
        out, lse = exact(q, k, v)
        if len(q) == 8 and k.shape[1] == 257:
            lse[7, 0, 1] = np.nextafter(lse[7, 0, 1], np.float32(np.inf))
        return out, lse

    report = check_invariance(f, **SMALL)
    assert report.names("failed") == ["row"], str(report)
    (difference,) = (x.difference for x in report.results if x.difference)
    assert difference[:2] == (4, 1)
    assert difference.share == 1 / (7 * (2 * 8 + 2))
    lse = exact(*(np.ones((1, n, 2, 8), np.float32) for n in (1, 257, 257)))[1]
    assert 0 < difference.largest <= np.spacing(lse).max() * 2
    assert difference.first == "257 keys, batch of 8, row + 1 against 0: lse[7, 0, 1]"
    assert "1 of 4 pairs, up to 0.79 % of the elements, by up to" in str(report)


def test_bits_of_zeros_and_nans():
    """Zeros of two signs are two; NaNs are one, whatever their sign and payload."""
    quiet = np.uint32(0x7FC00000)
    nans = np.array([quiet, quiet + 1, quiet | (1 << 31)], np.uint32).view(np.float32)
    assert len(set(bits(nans).tolist())) == 1
    assert bits(np.float32(0)) != bits(np.float32(-0.0))
    assert bits(np.float32(1))[()] == 0x3F800000
    for dtype in ("float16", "float32", "float64", jax.numpy.bfloat16):
        x = np.array([0, -0.0, np.nan, 1, np.inf], dtype)
        assert len(set(bits(x).tolist())) == 5
    found = compare("", [np.array([0.0, np.nan, 1])], [np.array([-0.0, -np.nan, 1])])
    assert (found.share, found.largest, found.first) == (1 / 3, 0, "out[0]")
    found = compare("", [np.array([1.0, 2, 3]), np.ones(1)], [np.array([1, 1.5, 7]), np.zeros(1)])
    assert (found.share, found.largest, found.first) == (3 / 4, 4, "out[1]")


def test_a_number_against_nan_and_other_shapes_and_dtypes():
    x = np.ones((2, 3), np.float32)
    y = x.copy()
    y[1, 2] = np.nan
    found = compare("", [x, x], [x, y], start=(5,))
    assert found.first == "lse[6, 2]" and np.isnan(found.largest) and found.share == 1 / 12
    for other in (x[:1], x.astype(np.float64)):
        assert compare("", [x], [other]).share == 1
    assert compare("", [x], [x, x]).share == 1
    assert compare("", [x], [x]).first == ""


# What is asked


def test_what_is_asked_is_bounded():
    """As the docstring says, with all options."""
    calls = []

    def f(q, k, v, **options):
        assert all(x.ctypes.data % 16 == 0 for x in (q, k, v))
        calls.append((q.shape, k.shape, options))
        return q

    report = check_invariance(f, heads=(1, 1), head_dim=2)
    assert report.names("passed") == list(AXES)
    assert 180 < len(calls) <= 210
    assert max(k[0] * k[1] for _, k, _ in calls) == 64 * 1031
    shapes = {(q[0], q[1], k[1]) for q, k, _ in calls}
    assert {(b, l) for b, l, n in shapes if n == 1031} >= {(1, 8), (2, 8), (64, 8), (1, 33)}
    assert {n for _, _, n in shapes} >= {257, 1031, 4099, 4100, 8192, 8198}
    assert all(sum(o["splits"]) == k[1] for _, k, o in calls if "splits" in o)
    assert {o["splits"][-1] for *_, o in calls if "splits" in o} >= {1, 257 - 128, 4099 % 256}
    assert {o["devices"] for *_, o in calls if "devices" in o} == {1, 2, 4, 8}


def test_other_bits_at_every_call_end_it():
    counter = itertools.count()

    def noisy(q, k, v):
        return exact(q, k, v)[0] * np.float32(1 + 1e-6 * next(counter))

    report = check_invariance(noisy, **SMALL)
    assert report.names("failed") == ["repeats"]
    assert report.names("passed") == [] and len(report.names("skipped")) == len(AXES) - 1


@pytest.mark.parametrize("answer", [0.0, np.nan])
def test_an_answer_that_says_nothing_fails(answer):
    report = check_invariance(lambda q, k, v: np.full_like(q, answer), **SMALL)
    assert report.names("failed") == ["repeats"] and "no two different numbers" in str(report)


def test_a_buffer_that_is_returned_again_is_read_in_time():
    """An answer is copied before the next call overwrites it."""
    buffers = {}

    def f(q, k, v):
        out, _ = planted(lambda q, *_: either(len(q) > 1))(q, k, v)
        buffer = buffers.setdefault(out.shape[1:], np.empty((8, *out.shape[1:]), np.float32))
        buffer[: len(out)] = out
        return buffer[: len(out)]

    assert check_invariance(f, **SMALL).names("failed") == ["batch"]


def test_arguments_that_are_written_into_do_no_harm():
    def f(q, k, v):
        out = exact(q, k, v)
        q[:] = k[:] = v[:] = 7
        return out

    assert check_invariance(f, **SMALL).names("failed") == []


def test_what_a_function_has_not_is_skipped_and_what_raises_fails():
    def f(q, k, v, *, kv_lengths=None, splits=None):
        if kv_lengths is not None:
            raise NotImplementedError("no lengths")
        if q.shape[1] == 9:
            raise TypeError("nine")
        return exact(q, k, v, splits=splits or ())

    report = check_invariance(f, **SMALL)
    assert report.names("failed") == ["queries"] and "TypeError: nine" in str(report)
    assert report.names("skipped") == ["padding", "blocks", "devices", "in flight"]
    assert "padding                  skipped  no lengths" in str(report)
    assert "devices                  skipped  it has no option devices" in str(report)


def test_what_others_would_be_compared_with_may_be_missing():
    """One row alone, here: no batch is compared with what came before."""

    def f(q, k, v):
        if len(q) == 1:
            raise NotImplementedError("at least two rows")
        return exact(q, k, v)

    report = check_invariance(f, axes=["batch", "row", "order", "queries"], **SMALL)
    assert report.names("skipped") == ["batch", "queries"], str(report)
    assert report.names("failed") == [] and "skipped  at least two rows" in str(report)


def test_a_function_for_each_number_of_devices():
    def shards(p, q, k, v, *, kv_lengths=None):
        if p == 3:
            raise NotImplementedError("three")
        return in_parts(q, k, v, kv_lengths=kv_lengths, devices=p)

    family = {p: functools.partial(shards, p) for p in (1, 2, 3, 4)}
    report = check_invariance(family, **SMALL)
    assert report.names("failed") == ["devices"], str(report)
    assert "4 of 4 pairs" in str(report)
    family = {p: functools.partial(exact, devices=p) for p in (1, 2, 4)}
    assert check_invariance(family, axes=["devices"], **SMALL).names("passed") == [
        "repeats",
        "devices",
    ]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_arguments_have_their_dtype(dtype):
    def f(q, k, v):
        for x in (q, k, v):
            assert x.dtype == ("float32" if dtype == "bfloat16" else dtype)
        np.testing.assert_array_equal(v, np.asarray(jax.numpy.asarray(v, dtype).astype(v.dtype)))
        return q

    assert check_invariance(f, dtype=dtype, **SMALL).names("failed") == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"axes": ["shape"]}, "axes has ['shape'], expected some of ['repeats', 'address'"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of"),
        ({"keys": ()}, "keys is (), expected numbers of at least 34"),
        ({"keys": (257, 33)}, "keys is (257, 33), expected numbers of at least 34"),
        ({"f": {}}, "f is an empty mapping"),
    ],
)
def test_what_cannot_be_asked(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_invariance(**{"f": exact, **wrong})
