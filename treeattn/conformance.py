"""Does that merge, or that kernel, do what it should? Test vectors and a checker for anybody's.

    print(check_merge(merge))      merge([(out, lse), …]) -> (out, lse) of all their keys
    print(check_kernel(kernel))    kernel(q, k, v, **options) -> (out, lse)

In any framework: they get NumPy arrays, and what they return goes through `np.asarray`. q is
(b, l, h, d), k and v (b, n, h_kv, d), out (b, l, h, d), and lse (b, l, h), a natural logarithm. No
keys are out 0 and lse −∞. A wrong answer is compared with what known mistakes would have given,
their *fingerprints*. This file needs NumPy alone and can be copied.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

# What known mistakes are, and their cures.
FINGERPRINTS = {
    "log base 2": "lse is in base 2 on one side and natural on the other: multiply by log 2",
    "lse +inf for no keys": "write −∞ where there were no keys, and read +∞ as −∞",
    "finite lse for no keys": "a lowest number stands for −∞: write −∞, and guard the subtraction",
    "mean(V) for no keys": "a softmax over nothing was uniform: write 0, and lse −∞",
    "NaN for no keys": "(−∞) − (−∞), or 0 / 0: replace infinite pivots before subtracting",
    "stale NaN": "0 · NaN is NaN: select values with where, do not multiply them by 0",
    "lse in bfloat16": "keep lse in float32: its error is one of an exponent",
    "lse in float16": "keep lse in float32: its error is one of an exponent",
    "lse + block_lse": "sums of exponentials add, not their logarithms: use logaddexp",
    "sums in 16 bits": "keep and send partial sums in float32: each addition rounds",
    "sinks once a shard": "a sink is one more key: add it on one device, or after the merge",
    "sinks ignored": "a sink adds exp(sink) to the denominator, also when lse is returned",
    "local positions": "bound striped keys by their position in the text: local · p + rank",
    "axes of lse": "lse is (b, l, h) here, and (b, h, l) in many kernels: transpose",
    "exp overflows": "subtract the maximum before the exponential, across the shards too",
}
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 3e-3, "bfloat16": 1.6e-2}


class Case(NamedTuple):
    """One question: f(*arguments, **options) should be (out, lse), here in float64."""

    name: str
    arguments: tuple
    options: dict
    out: np.ndarray
    lse: np.ndarray
    uniform: np.ndarray  # what a softmax over nothing gives
    infinite: str | None = None  # the fingerprint of NaN and ∞ in rows that have keys


class Result(NamedTuple):
    case: str
    status: str  # "passed", "failed" or "skipped"
    fingerprints: tuple[str, ...] = ()
    detail: str = ""


class Report(NamedTuple):
    results: tuple[Result, ...]

    def names(self, status: str) -> list[str]:
        """The cases that "passed", "failed" or were "skipped"."""
        return [result.case for result in self.results if result.status == status]

    @property
    def fingerprints(self) -> set[str]:
        return {name for result in self.results for name in result.fingerprints}

    def __str__(self) -> str:
        lines = [
            f"{case:24} {status:8} {', '.join(found) or detail}".rstrip()
            for case, status, found, detail in self.results
        ]
        cures = [f"{name}: {FINGERPRINTS[name]}" for name in sorted(self.fingerprints)]
        return "\n".join([*lines, *cures])


@np.errstate(all="ignore")
def merge(parts) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all keys from those of disjoint sets of them, in float64.

    parts: pairs of out (b, l, h, d) and lse (b, l, h), of any dtype
    """
    out = np.stack([np.asarray(part[0], np.float64) for part in parts])
    lse = np.stack([np.asarray(part[1], np.float64) for part in parts])
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    no_keys = np.isneginf(lse)
    out = np.where(no_keys[..., None], 0, out)
    m = lse.max(axis=0)
    w = np.exp(lse - np.where(np.isneginf(m), 0, m))
    d = w.sum(axis=0)
    n = (out * w[..., None]).sum(axis=0)
    divisor = np.where(d == 0, 1, d)
    return n / divisor[..., None], m + np.log(divisor)


def attend(
    q,
    k,
    v,
    *,
    mask=None,
    kv_lengths=None,
    scale=None,
    sinks=None,
    query_positions=None,
    key_positions=None,
):
    """(out, lse) in float64, key by key. The options are those that kernels are asked for.

    mask (b, 1, l, n): True where a query may see a key. kv_lengths (b,): only so many keys count.
    sinks (h,): the score of one more key for every query, whose value is 0.
    query_positions (l,), key_positions (n,): queries see the keys up to their own position.
    """
    q = np.asarray(q, np.float64)
    k = _for_each_query_head(np.asarray(k, np.float64), q)
    v = _for_each_query_head(np.asarray(v, np.float64), q)
    b, l, h, d = q.shape
    n = k.shape[1]
    seen = np.ones((b, 1, l, n), bool) if mask is None else np.asarray(mask)
    if kv_lengths is not None:
        lengths = np.asarray(kv_lengths)[:, None, None, None]
        seen = seen & (np.arange(n) < lengths)
    if query_positions is not None:
        seen = seen & (np.asarray(key_positions) <= np.asarray(query_positions)[:, None])
    if scale is None:
        scale = d**-0.5
    s = np.einsum("blhd,bnhd->bhln", q, k) * scale
    s = np.where(seen, s, -np.inf).transpose(3, 0, 2, 1)  # (n, b, l, h)
    shape = (b, l, h, v.shape[-1])
    parts = [(np.broadcast_to(v[:, None, i], shape), s[i]) for i in range(n)]
    if sinks is not None:
        parts.append((np.zeros(shape), np.broadcast_to(sinks, (b, l, h))))
    return merge(parts)


def _for_each_query_head(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keys or values (b, n, h_kv, d) as (b, n, h, d): each head as often as q's heads read it."""
    return np.repeat(x, q.shape[2] // x.shape[2], axis=2)


def bfloat16(x) -> np.ndarray:
    """`x` rounded to bfloat16, to nearest even; the array is float32, for NumPy has no other."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(x, dtype: str) -> np.ndarray:
    """`x` rounded to a dtype by its name."""
    return bfloat16(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)


def merge_cases(dtype: str = "float32") -> list[Case]:
    """The questions to a merge; `out` in `dtype`, lse in float32 (float64 if `dtype` is)."""
    rng = np.random.default_rng(0)

    def shards(p, shape=(2, 3, 4), mean=8.0, empty=(), below=-np.inf, stale=0.0):
        """p pairs (out, lse); no keys in the shards `empty`, and wherever lse is below `below`."""
        outs = 1 + rng.normal(size=(p, *shape, 4)) / 2
        lses = rng.normal(mean, 2, (p, *shape))
        lses = lses.astype("float64" if dtype == "float64" else "float32")
        is_empty = np.isin(np.arange(p), empty)[:, None, None, None]
        none = is_empty | (lses < below)
        outs = np.where(none[..., None], stale, outs)
        lses = np.where(none, -np.inf, lses)
        return list(zip(rounded(outs, dtype), lses, strict=True))

    infinite = shards(3, empty=[1])
    large = 1000.0 if dtype == "float64" else 120.0
    cases = {
        "two shards": (shards(2), None),
        "seven shards": (shards(7), None),
        "batch = queries = heads": (shards(3, (4, 4, 4)), None),
        "one query": (shards(3, (3, 1, 3)), None),
        "256 shards": (shards(256, (1, 2, 3)), None),
        "large lse": (shards(3, mean=large), "exp overflows"),
        "very negative lse": (shards(3, mean=-large), "exp overflows"),
        "empty shards": (shards(4, empty=[0, 1, 3]), "NaN for no keys"),
        "ragged": (shards(4, below=9.0), "NaN for no keys"),
        "no keys anywhere": (shards(3, empty=[0, 1, 2], stale=0.5), "NaN for no keys"),
        "lse +inf for no keys": ([(o, np.abs(l)) for o, l in infinite], "lse +inf for no keys"),
        "stale NaN": (shards(3, empty=[1], stale=np.nan), "stale NaN"),
    }
    return [
        Case(name, (parts,), {}, *merge(parts), np.array(0.5), infinite)
        for name, (parts, infinite) in cases.items()
    ]


def kernel_cases(dtype: str = "float32") -> list[Case]:
    """The questions to a kernel: attention with d = 16, over 40 keys."""
    rng = np.random.default_rng(1)

    def qkv(b=2, l=3, h=4, h_kv=4, n=40, size=1.0):
        q = rng.normal(size=(b, l, h, 16))
        k = rng.normal(size=(b, n, h_kv, 16))
        v = rng.normal(size=(b, n, h_kv, 16))
        return [rounded(x, dtype) for x in (q * size, k, v)]

    stale = qkv()
    for keys_or_values in stale[1:]:
        keys_or_values[1, 7:] = np.nan
    mask = rng.random((2, 1, 3, 40)) < 0.5
    mask[1, 0, 2] = False
    causal = {"query_positions": np.arange(37, 40), "key_positions": np.arange(40)}
    cases = {
        "plain": (qkv(), {}, None),
        "grouped heads": (qkv(h_kv=2), {"scale": 0.5}, None),
        "batch = queries = heads": (qkv(4, 4, 4), {}, None),
        "large scores": (qkv(size=400.0), {}, "exp overflows"),
        "a row without keys": (qkv(), {"kv_lengths": np.array([40, 0])}, "NaN for no keys"),
        "a masked query": (qkv(), {"mask": mask}, "NaN for no keys"),
        "stale NaN": (stale, {"kv_lengths": np.array([40, 7])}, "stale NaN"),
        "causal step": (qkv(), causal, None),
        "one stripe of four": (qkv(n=10), causal | {"key_positions": np.arange(1, 40, 4)}, None),
        "sinks": (qkv(), {"sinks": np.array([0.0, 2.0, 4.0, 5.0])}, None),
    }
    found = []
    for name, ((q, k, v), options, infinite) in cases.items():
        out, lse = attend(q, k, v, **options)
        uniform = _for_each_query_head(v, q).mean(1, keepdims=True)
        found.append(Case(name, (q, k, v), options, out, lse, uniform, infinite))
    return found


def wrong_merges(parts) -> Iterator:
    """What known mistakes make of the parts: (fingerprint, (out, lse)) of each."""
    out, lse = merge(parts)
    total = sum(x[1] for x in parts)
    yield "log base 2", (out, lse / np.log(2))
    off, off_lse = merge([(o, l * np.log(2)) for o, l in parts])
    yield "log base 2", (off, off_lse)
    yield "log base 2", (off, off_lse / np.log(2))
    yield "lse + block_lse", (out, total)
    yield "lse + block_lse", (sum(o * np.exp(l - total)[..., None] for o, l in parts), total)
    for dtype in ("bfloat16", "float16"):
        off, off_lse = merge([(o, rounded(l, dtype)) for o, l in parts])
        for answer in (off_lse, lse, rounded(off_lse, dtype)):
            yield f"lse in {dtype}", (off, answer)
    finite_lse = np.where(np.isinf(lse), 0, lse)
    weights = [np.exp(part[1] - finite_lse) for part in parts]
    turned = [w.swapaxes(1, 2) for w in weights]
    for wrong in ([w[..., None] for w in turned], weights, turned):
        try:
            off = sum(part[0] * w for part, w in zip(parts, wrong, strict=True))
        except ValueError:  # these shapes do not even broadcast
            continue
        for answer in (lse, lse.swapaxes(1, 2)):
            yield "axes of lse", (off, answer)


def wrong_kernels(q, k, v, *, sinks=None, **options) -> Iterator:
    """As `wrong_merges`, for attention over these keys."""
    out, lse = attend(q, k, v, sinks=sinks, **options)
    yield "log base 2", (out, lse / np.log(2))
    yield "axes of lse", (out, lse.swapaxes(1, 2))
    if sinks is not None:
        without = attend(q, k, v, **options)
        yield "sinks ignored", without
        yield "sinks ignored", (out, without[1])
        for p in range(2, 65):  # shards
            p_sinks = (0 * out, lse * 0 + sinks + np.log(p))
            yield "sinks once a shard", merge([without, p_sinks])
    if "query_positions" in options:
        position = options["query_positions"][:, None]
        l = q.shape[1]
        n = k.shape[1]
        i = np.arange(l)[:, None]
        key = np.arange(n)
        seen = [key <= i]  # as if the first query stood at the first key
        for p in range(1, 17):  # keys dealt in stripes: number key // p of `kept` on a device
            kept = (n - key % p + p - 1) // p
            seen += [key // p <= kept - l + i, key // p <= position]
        for mask in seen:
            yield "local positions", attend(q, k, v, mask=mask[None, None])


def check_merge(merge: Callable, *, dtype: str = "float32", tolerance=None) -> Report:
    """Ask `merge` all `merge_cases`.

    dtype: of the outs: "float64", "float32", "float16", or "bfloat16", whose numbers come in
           float32 arrays, to be converted without loss.
    tolerance: of out, absolute and relative; `TOLERANCES[dtype]` when None. That of lse is 2e-5
               (1e-10 in float64): it is a float32 number whatever the dtype of out.

    A function that raises NotImplementedError is not asked that case: "skipped".
    """
    return _check(merge, merge_cases(dtype), wrong_merges, dtype, tolerance)


def check_kernel(kernel: Callable, *, dtype: str = "float32", tolerance=None) -> Report:
    """Ask `kernel` all `kernel_cases`, whose options are those of `attend`; as `check_merge`."""
    return _check(kernel, kernel_cases(dtype), wrong_kernels, dtype, tolerance)


@np.errstate(all="ignore")
def _check(function, cases: list[Case], mistakes, dtype: str, tolerance) -> Report:
    """Ask the function all cases; mistakes: `wrong_merges` or `wrong_kernels`."""
    of_lse = 1e-10 if dtype == "float64" else 2e-5
    tolerances = (tolerance or TOLERANCES[dtype], of_lse)
    results = []
    for case in cases:
        try:
            answer = function(*case.arguments, **case.options)
            out, lse = [np.asarray(x).astype(np.float64) for x in answer]
        except NotImplementedError as error:
            results.append(Result(case.name, "skipped", (), str(error)))
        except Exception as error:
            results.append(Result(case.name, "failed", (), f"{type(error).__name__}: {error}"))
        else:
            results.append(_judge(case, (out, lse), mistakes, tolerances))
    return Report(tuple(results))


def _judge(case: Case, answer, mistakes, tolerances) -> Result:
    """Passed, or failed with the mistakes that would have given this answer (out, lse)."""
    expected = (case.out, case.lse)
    if _close(answer, expected, tolerances):
        return Result(case.name, "passed")
    wrong = mistakes(*case.arguments, **case.options)
    found = [
        name
        for name, would_be in wrong
        if _close(answer, would_be, tolerances) and not np.isnan(would_be[0]).any()
    ]
    shapes = [x.shape for x in answer]
    expected_shapes = [x.shape for x in expected]
    if shapes != expected_shapes:
        detail = f"shapes {shapes}, expected {expected_shapes}"
    else:
        found = found or list(_signs(case, *answer, tolerances))
        of_out = _largest_error(answer[0], case.out)
        of_lse = _largest_error(answer[1], case.lse)
        detail = f"off by {of_out:.1e} (out), {of_lse:.1e} (lse)"
    return Result(case.name, "failed", tuple(dict.fromkeys(found)), detail)


def _largest_error(x: np.ndarray, expected: np.ndarray) -> float:
    return np.abs(x - expected)[np.isfinite(expected)].max(initial=0)


def _close(answer, expected, tolerances) -> bool:
    return all(
        x.shape == y.shape and np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        for x, y, tolerance in zip(answer, expected, tolerances, strict=True)
    )


def _signs(case: Case, out, lse, tolerances) -> Iterator[str]:
    """Fingerprints that are seen in the numbers themselves: without keys, then with keys."""
    none = np.isneginf(case.lse)
    uniform = np.broadcast_to(case.uniform, out.shape)
    if np.isposinf(lse[none]).any():
        yield "lse +inf for no keys"
    if np.isfinite(lse[none]).any():
        yield "finite lse for no keys"
    if np.isnan(lse[none]).any() or np.isnan(out[none]).any():
        yield "NaN for no keys"
    elif out[none].any() and np.allclose(out[none], uniform[none], rtol=0.01, atol=0.01):
        yield "mean(V) for no keys"
    out = out[~none]
    lse = lse[~none]
    expected = (case.out[~none], case.lse[~none])
    error = np.abs(lse / expected[1] - 1).max(initial=0)
    finite = np.isfinite(out).all() and np.isfinite(lse).all()
    if lse.size and not (finite and out.any()):
        if case.infinite:
            yield case.infinite
    elif _close((out, lse), expected, tolerances):
        return
    elif error <= 0.1 and np.array_equal(lse, bfloat16(lse)):
        yield "lse in bfloat16"
    elif error <= 0.01 and np.array_equal(lse, lse.astype(np.float16)):
        yield "lse in float16"
    elif _close((out, lse), expected, (0.1, tolerances[1])):
        if np.abs(out - expected[0]).max() > 1e-4:
            yield "sums in 16 bits"
