"""Are the gradients of an attention right, over shards or at once? If not, which mistake is it?

The forward pass can be right while the backward pass is wrong. The loss still falls, and the model
learns nonsense.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .judge import (
    TOGETHER,
    Asked,
    Mistake,
    Question,
    Subject,
    judge,
    prepared,
    questions_of,
    together,
)
from .pairs import along, size_of
from .reference import TOLERANCES, holes, rounded, scores, softmax
from .report import Report

GRADIENT_CURES = {
    "lse without a gradient": "dS = P · (dout·v − Σ dout·out + dlse), with the merged out: a merge "
    "weighs by lse, which has a gradient, too",
    "no normalization": "dS = P · (dout·v − Σ dout·out + dlse): Σ dout·out is missing",
    "lse in base 2": "P = exp(s − lse) wants the natural lse; scores that were multiplied by "
    "log2(e) have that factor in their gradient",
    "a shard's own lse": "P = exp(s − lse) wants the merged lse, and Σ dout·out the merged out",
    "keys of the first round": "differentiate by the keys that have arrived, not by those saved",
    "grouped heads not added": "a key head's gradient is the sum over its query heads",
    "gradients of one shard": "dq adds up over all shards of the keys",
    "p times": "inside shard_map, gradients are of the sum of all devices' losses: count one loss",
    "averaged over shards": "gradients add up over the shards: a sum, no mean",
    "heads tiled": "query head i reads key head i // (h // h_kv), and its gradients go there",
    "scale left out": "the derivative of scale · q·k by q is scale · k, and by k scale · q",
    "scale twice": "q that was multiplied by scale before has it already",
    "stale NaN": "0 · NaN is NaN: select keys and values with where, do not multiply them by 0",
    "hidden keys in the backward": "backward hides the keys that forward hides: P is 0 there",
    "tiles lost beside hidden ones": "skip a block of keys, or a tile of queries, only where all "
    "its pairs are hidden, and go on behind it",
}


class Slip(NamedTuple):
    """The parts that a backward pass can get wrong. The defaults are right."""

    shards: int = 1  # parts of the keys
    own: tuple[str, ...] = ()  # "lse", "out": a shard's own array in place of the merged array
    out: bool = True  # whether Σ dout·out is subtracted
    blind: tuple[str, ...] = ()  # the options whose hidden keys backward sees
    empty: float = 0.0  # the lse of queries without keys
    reads: bool = False  # whether hidden keys are multiplied by 0, and not left out
    powers: tuple[int, int] = (1, 1)  # of the scale in dq and in dk
    dlse: float = 1.0  # its factor
    base: float = 1.0  # lse's factor
    ds: float = 1.0  # the factor of all scores' gradients
    heads: str = "sum"  # over the query heads of a key head: "sum", "first" or "last"
    tiled: bool = False  # whether query head i belongs to key head i % h_kv
    first: bool = False  # whether each round reads the keys of the first round
    part: str = "sum"  # of dq, over shards: "sum", "first", "last" or "each"
    dq: float = 1.0  # the factor of dq
    dkv: float = 1.0  # the factor of dk and dv


RIGHT = Slip()


def backward(
    q, k, v, dout, *, dlse=None, scale=None, slip: Slip = RIGHT, **options
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) of Σ dout·out + Σ dlse·lse, in float64. `scores` has the other options.

    The score of a seen key has the gradient dS = P · (dout·v − Σ dout·out + dlse).
    """
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options["scale"] = scale
    s = scores(q, k, **options)
    known = {name: x for name, x in options.items() if name not in slip.blind}
    hidden = np.isneginf(scores(q, k, **known))
    q, dout = (np.asarray(x, np.float64) for x in (q, dout))
    dlse = np.zeros(q.shape[:3]) if dlse is None else np.asarray(dlse, np.float64)
    # keys that no query sees may be NaN
    read = slip.reads | ~np.isneginf(s).all(axis=(1, 2))[..., None, None]
    k, v = (np.repeat(np.where(read, x, 0).astype(np.float64), group, axis=2) for x in (k, v))
    out, lse = softmax(s, v)
    shards = np.array_split(np.arange(k.shape[1]), slip.shards)
    dq = np.zeros((slip.shards, *q.shape))
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for i, at in enumerate(shards):
        used = shards[0 if slip.first else i][: len(at)]
        at = at[: len(used)]
        s_here = np.einsum("blhd,bnhd->blhn", q, k[:, used]) * scale
        s_here = np.where(hidden[..., at], -np.inf, s_here)
        own_out, own_lse = softmax(s_here, v[:, used])
        lse_here = own_lse if "lse" in slip.own else lse
        out_here = own_out if "out" in slip.own else out
        pivot = np.where(np.isneginf(lse_here), slip.empty, lse_here * slip.base)
        p = np.exp(s_here - pivot[..., None])
        dp = np.einsum("blhd,bnhd->blhn", dout, v[:, used])
        normal = slip.out * (dout * out_here).sum(axis=-1)
        ds = slip.ds * p * (dp - (normal - slip.dlse * dlse)[..., None])
        of_q, of_k = (scale**power for power in slip.powers)
        dq[i] = of_q * np.einsum("blhn,bnhd->blhd", ds, k[:, used])
        dk[:, at] = of_k * slip.dkv * np.einsum("blhn,blhd->bnhd", ds, q)
        dv[:, at] = slip.dkv * np.einsum("blhn,blhd->bnhd", p, dout)
    ways = {
        "sum": np.sum,
        "first": functools.partial(np.take, indices=0),
        "last": functools.partial(np.take, indices=-1),
        "each": lambda x, axis: x,
    }
    grouped, axis = ((group, -1), 2) if slip.tiled else ((-1, group), 3)
    heads = (x.reshape(*x.shape[:2], *grouped, x.shape[-1]) for x in (dk, dv))
    return slip.dq * ways[slip.part](dq, axis=0), *(ways[slip.heads](x, axis=axis) for x in heads)


def slips() -> Iterator[tuple[str, Slip]]:
    """Known mistakes, each once for every form and every number of shards."""
    ln2 = np.log(2)
    yield "lse without a gradient", Slip(dlse=0)
    yield "no normalization", Slip(out=False)
    for base, ds in ((1 / ln2, 1), (ln2, 1), (1, ln2), (1, 1 / ln2)):
        yield "lse in base 2", Slip(base=base, ds=ds)
    for heads in ("first", "last"):
        yield "grouped heads not added", Slip(heads=heads)
    yield "heads tiled", Slip(tiled=True)
    for power, name in ((0, "scale left out"), (2, "scale twice")):
        for powers in ((power, 1), (1, power), (power, power)):
            yield name, Slip(powers=powers)
    hiding = "causal", "kv_lengths", "mask"
    for blind in (hiding, *((x,) for x in hiding)):
        for empty in (0, np.inf):
            yield "hidden keys in the backward", Slip(blind=blind, reads=True, empty=empty)
    yield "stale NaN", Slip(reads=True)
    for p in range(2, 9):
        for dlse in (0, 1):
            yield "lse without a gradient", Slip(p, own=("out",), dlse=dlse)
            yield "a shard's own lse", Slip(p, own=("lse",), dlse=dlse)
            yield "a shard's own lse", Slip(p, own=("lse", "out"), dlse=dlse)
        yield "keys of the first round", Slip(p, first=True)
        for part in ("first", "last"):
            yield "gradients of one shard", Slip(p, part=part)
        yield "p times", Slip(p, part="first", dq=p, dkv=p)
        for name, x in (("p times", p), ("averaged over shards", 1 / p)):
            for dq, dkv in ((1, x), (x, 1), (x, x)):
                yield name, Slip(p, dq=dq, dkv=dkv)


def gradient_questions(dtype: str = "float32") -> list[Question]:
    rng = np.random.default_rng(3)

    def qkv(b=2, l=5, h=4, h_kv=4, n=16, d=8, d_v=8):
        shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, d_v), (b, l, h, d_v)
        q, k, v, dout = (rng.normal(size=shape) for shape in shapes)
        found = {"q": q, "k": k, "v": 0.5 + v, "dout": dout}
        return {name: rounded(x, dtype) for name, x in found.items()}

    large = qkv()  # scores near 90, whose exponentials overflow, and no key has all the weight
    large["q"][..., 0], large["k"][..., 0] = 256, 1
    stale = qkv()
    for name in "kv":
        stale[name][1, 7:] = np.nan
    dlse = rounded(rng.normal(size=(2, 5, 4)), dtype)
    prompt = qkv(1, 257, 1, 1, n=257)
    prompt["k"] = prompt["q"]  # so a query's own key weighs most
    asked = {
        "as many queries as keys": (qkv(l=16), {}),
        "one query, d = 256": (qkv(b=3, l=1, d=256, d_v=256), {}),
        "keys in odd number": (qkv(n=17), {}),
        "other width of values": (qkv(d_v=136), {}),
        "large scores": (large, {}),
        "a loss with lse": (qkv(), {"dlse": dlse}),
        "scale": (qkv(), {"scale": 0.5}),
        "causal": (qkv(l=16), {"causal": True}),
        "lengths": (qkv(), {"kv_lengths": np.array([11, 3])}),
        "a row without keys": (qkv(), {"kv_lengths": np.array([16, 0])}),
        "stale NaN": (stale, {"kv_lengths": np.array([16, 7])}),
        "640 keys, 128 queries": (qkv(1, 128, 1, 1, n=640, d=80, d_v=80), {}),
        "hidden blocks": (qkv(4, 133, 1, 1, n=300), {"mask": holes(133, 300)}),
        "a causal prompt of 257": (prompt, {"causal": True}),
        "grouped heads": (qkv(1, 300, 34, 2), {}),
    }
    of_size = {
        "0 to 512 keys": (qkv(9, 1, 9, 9, n=549), {"kv_lengths": np.arange(9) * 64}),
        "causal: query 0 sees one of 16": (qkv(), {"causal": True}),
        "a window of 140": (qkv(1, 150, 1, 1, n=300), {"window": 140}),
        TOGETHER: (
            qkv(3, 150, 2, 1, n=150),
            {
                "dlse": rounded(rng.normal(size=(3, 150, 2)), dtype),
                "scale": 0.5,
                "causal": True,
                "kv_lengths": np.array([140, 3, 0]),
                "mask": rng.random((3, 1, 150, 150)) < 0.9,
                "window": 100,
            },
        ),
    }
    return questions_of(asked, of_size, backward)


def check_gradients(
    f: Callable, *, dtype: str = "float32", tolerance=None, only=None, expect=()
) -> Report:
    """Ask f(q, k, v, dout) -> (dq, dk, dv) for the gradients of Σ dout·out of its attention.

    q (b, l, h, d), k (b, n, h_kv, d), v (b, n, h_kv, d_v), dout (b, l, h, d_v).

    f is asked about the options that it has, one at a time, and then all at once:

    dlse (b, l, h): the loss is Σ dout·out + Σ dlse·lse
    scale: a number; 1/√d where it is left out
    causal: if True, query i sees key j for j ≤ i, also where there are more keys than queries
            (some libraries take the queries for the last of the text then)
    mask (b, 1, l, n): True where a query may see a key
    window: as in `check_attention`; with `causal`, the position of query i is i
    kv_lengths (b,): row i has kv_lengths[i] keys; the memory behind them may hold NaN, and its
            gradients are 0. So is the dq of a row without keys

    tolerance: of each gradient, relative to the largest number of its head; when None 5e-10 in
            float64, 1e-4 in float32, 1.5e-2 in float16 and 8e-2 in bfloat16. Sums that are kept in
            16 bits are seen in float32 only. dtype, only, expect: as in `check_merge`.
    """
    questions, mistakes = prepared(gradient_questions, gradient_mistakes, dtype)
    allowed = tolerance or 5 * TOLERANCES[dtype]

    def same(question: Question, answer, other) -> np.ndarray:
        """(3,): whether dq, dk and dv are the same."""
        pairs = zip(answer, other, strict=True)
        return np.array([not _off(x, y, allowed).any() for x, y in pairs])

    def describe(question: Question, answer, right: np.ndarray) -> str:
        named = zip(("dq", "dk", "dv"), answer, question.right, right, strict=True)
        return "; ".join(_describe(n, x, y, allowed) for n, x, y, is_right in named if not is_right)

    subject = Subject(read_gradients, same, describe, mistakes, GRADIENT_CURES)
    questions = together(f, questions, backward)
    return judge(f, questions, subject, only=only, expect=expect)


class Lost(Mistake):
    """Some of dq, dk and dv add up only a first or last part of their terms, or none of them."""

    def explains(self, asked: Asked, same: Callable) -> np.ndarray:
        if asked.question.name not in ("hidden blocks", "a causal prompt of 257"):
            return asked.right
        pairs = zip(asked.answer, self.given(asked.question), strict=True)
        return asked.right | [in_part(x, of) for x, of in pairs]


def in_part(x: np.ndarray, of) -> bool:
    """Whether each row of x is such a sum of the terms `of`, and some rows are not 0."""
    sums = (0 * of[0], *itertools.accumulate(of), *itertools.accumulate(of[::-1]))
    near = [np.isclose(x, y, atol=1e-4).all(-1) for y in sums]
    return x.any() & np.any(near, 0).all()


def terms(*arrays, **options) -> tuple:
    """(n, …) what each key adds to dq, and (l, …) what each query adds to dk, and to dv."""
    *qkv, dout = arrays
    of_queries = np.eye(dout.shape[1])[:, None, :, None, None] * dout
    dq, *_ = backward(*arrays, **options, slip=Slip(qkv[1].shape[1], part="each"))
    _, dk, dv = zip(*(backward(*qkv, x, **options) for x in of_queries), strict=True)
    return dq, dk, dv


def gradient_mistakes() -> Iterator[Mistake]:
    yield Lost("tiles lost beside hidden ones", terms)
    for name, slip in slips():
        yield Mistake(name, functools.partial(backward, slip=slip))


def read_gradients(question: Question, came) -> list[np.ndarray]:
    if not isinstance(came, tuple | list) or len(came) != 3:
        raise ValueError("expected three arrays, (dq, dk, dv)")
    found = []
    for name, x, right in zip(("dq", "dk", "dv"), came, question.right, strict=True):
        x = np.zeros(right.shape) if x is None else np.asarray(x).astype(np.float64)
        if x.shape != right.shape:
            raise ValueError(f"{name} has the shape {x.shape}, expected {right.shape}")
        found.append(x)
    return found


def _off(x: np.ndarray, y: np.ndarray, tolerance: float) -> np.ndarray:
    """Where x is not y, within a tolerance relative to the largest number of each row's head."""
    largest = np.nanmax(np.abs(y), axis=(1, 3), keepdims=True, initial=0)
    near = np.abs(x - y) <= tolerance * np.maximum(largest, 1e-3 * largest.max())
    return ~(near | (np.isnan(x) & np.isnan(y)))


def _describe(name: str, x: np.ndarray, y: np.ndarray, tolerance: float) -> str:
    off = _off(x, y, tolerance).any(axis=-1)
    places = along(off, ("row", "query" if name == "dq" else "key", "head"))
    return f"{name} {size_of(x[off], y[off])}{places}"
