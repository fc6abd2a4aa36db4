"""Faults that were met in public, each remade as a change of a function in `right_ones.py`.

The code here is our own. A link leads to each fault's report, and our change has the same idea.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import right_ones
from right_ones import build, commit, kernel, merge_at_once, merge_in_turn

from treeattn_conformance import bfloat16


class Bug(NamedTuple):
    link: str
    function: Callable
    names: tuple[str, ...]  # names that the suite gives; () if it gives none


def changed(right: Callable, *changes: tuple[str, str]) -> Callable:
    """The function with pieces of its text replaced."""
    source = inspect.getsource(right)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    names = dict(vars(right_ones), bfloat16=bfloat16)
    exec(source, names)
    return names[right.__name__]


def in_turn(*changes: tuple[str, str]) -> Callable:
    """`merge_in_turn` of a changed `merge_two`."""
    two = changed(right_ones.merge_two, *changes)
    return changed_names(merge_in_turn, merge_two=two)


def changed_names(right: Callable, **others) -> Callable:
    names = dict(vars(right_ones), **others)
    exec(inspect.getsource(right), names)
    return names[right.__name__]


GUARD = "m = np.where(np.isneginf(m), 0, m)"
READS = "np.where(np.isposinf(s), -np.inf, s)"
UNREAD = "v = np.where(seen.any(axis=(1, 2))[:, :, None, None], v, 0)"
LN2 = float(np.log(2))


def ring_with_log1p(parts):
    """new lse = lse + log(1 + exp(block lse − lse)), in float32."""
    out, lse = parts[0][0], np.float32(parts[0][1])
    for block, block_lse in parts[1:]:
        new = lse + np.log1p(np.exp(np.float32(block_lse) - lse))
        out = np.exp(lse - new)[..., None] * out + np.exp(block_lse - new)[..., None] * block
        lse = new
    return out, lse


def added_lse(parts):
    total = sum(lse for _, lse in parts)
    return sum(out * np.exp(lse - total)[..., None] for out, lse in parts), total


def fewer_pages(q, k, v):
    """The first 16 keys and the last 8."""
    kept = np.unique(np.clip(np.r_[0:16, -8:0] % k.shape[1], 0, k.shape[1] - 1))
    return kernel(q, k[:, kept], v[:, kept])


hidden_as_a_number = changed(
    kernel,
    ("s = np.where(seen, s, -np.inf)", "s = np.where(seen, s, -1e4)"),
    ("p = np.where(seen,", "p = np.where(seen.any(axis=3, keepdims=True),"),
    ("v = np.where(seen.any(axis=(1, 2))[:, :, None, None], v, 0)", "v = np.asarray(v)"),
)


BUGS = {
    "merge": [
        Bug(
            "https://github.com/vllm-project/vllm/pull/39148",
            in_turn((GUARD, "m = m")),
            ("NaN for no keys",),
        ),
        Bug(
            "https://github.com/flashinfer-ai/flashinfer/issues/4051",
            changed(merge_at_once, ("np.where(np.isneginf(m), 0, m)", "m")),
            ("NaN for no keys",),
        ),
        Bug(
            "https://github.com/vllm-project/vllm/pull/15492",
            in_turn((READS, "s")),
            ("lse +inf for no keys",),
        ),
        Bug(
            "https://github.com/sgl-project/sglang/issues/40903",
            lambda parts: merge_at_once([(out, lse / LN2) for out, lse in parts]),
            ("log base 2",),
        ),
        Bug(
            "https://github.com/vllm-project/vllm/pull/28840",
            changed(merge_at_once, ("np.exp(", "np.exp2("), ("np.log(", "np.log2(")),
            ("log base 2",),
        ),
        Bug(
            "https://github.com/zhuzilin/ring-flash-attention/issues/20",
            added_lse,
            ("lse + block_lse",),
        ),
        Bug(
            "https://github.com/zhuzilin/ring-flash-attention/pull/30",
            ring_with_log1p,
            ("pivot is not the maximum",),
        ),
        Bug(
            "https://github.com/SHI-Labs/NATTEN/pull/202",
            changed(
                merge_at_once,
                ("np.where(np.isneginf(m), 0, m)", "np.zeros_like(m)"),
                ("float64", "float32"),
            ),
            ("exp overflows",),
        ),
        Bug(
            "https://github.com/vllm-project/vllm-omni/pull/5543",
            lambda parts: merge_at_once(
                [(o, s.swapaxes(1, 2) if s.shape[1] == s.shape[2] else s) for o, s in parts]
            ),
            ("axes of lse",),
        ),
        Bug(
            "https://github.com/vllm-project/vllm/pull/57012",
            lambda parts: (merge_at_once(parts)[0], merge_at_once(parts)[1].swapaxes(1, 2)),
            ("axes of lse",),
        ),
        Bug(
            "https://github.com/flashinfer-ai/flashinfer/issues/5107",
            lambda parts: merge_at_once([(bfloat16(out), lse) for out, lse in parts]),
            ("rounded to 16 bits",),
        ),
        Bug(
            "https://github.com/jax-ml/jax/issues/32484",
            lambda parts: merge_at_once([(out, bfloat16(lse)) for out, lse in parts]),
            ("lse in bfloat16",),
        ),
        Bug(
            "https://github.com/flashinfer-ai/flashinfer/issues/4452",
            lambda parts: (merge_at_once(parts)[0], np.maximum(merge_at_once(parts)[1], -5e4)),
            ("finite lse for no keys", "−∞ is a number that scores reach"),
        ),
    ],
    "attention": [
        Bug(
            "https://github.com/flashinfer-ai/flashinfer/issues/4267",
            changed(kernel, ("m = s.max(axis=3)", "m = s.max(axis=3, initial=-5e4)")),
            ("−∞ is a number that scores reach",),
        ),
        Bug(
            "https://github.com/ohdearquant/lattice/issues/361",
            lambda q, k, v, mask=None: hidden_as_a_number(q, k, v, mask=mask),
            ("−∞ is a number that scores reach",),
        ),
        Bug(
            "https://github.com/Dao-AILab/flash-attention/pull/978",
            lambda *qkv, **options: _lse_of(kernel(*qkv, **options), -np.inf, np.inf),
            ("lse +inf for no keys",),
        ),
        Bug(
            "https://github.com/Dao-AILab/flash-attention/issues/2374",
            changed(
                kernel,
                (UNREAD, "v = v"),
            ),
            ("stale NaN",),
        ),
        Bug(
            "https://github.com/onnx/onnx/pull/7274",
            changed(
                kernel,
                (
                    "np.repeat(k, g, axis=2), np.repeat(v, g, axis=2)",
                    "np.tile(k, (1, 1, g, 1)), np.tile(v, (1, 1, g, 1))",
                ),
            ),
            ("heads tiled",),
        ),
        Bug(
            "https://github.com/NVIDIA/apex/issues/1390",
            changed(
                kernel,
                ("s = np.where(seen, s, -np.inf)", "s = np.where(seen, s, -1e9)"),
                ("np.where(seen, np.exp(s - m[..., None]), 0)", "np.exp(s - m[..., None])"),
                (
                    "v = np.where(seen.any(axis=(1, 2))[:, :, None, None], v, 0)",
                    "v = np.nan_to_num(v)",
                ),
            ),
            ("finite lse for no keys", "mean(V) for no keys"),
        ),
        Bug(
            "https://github.com/flashinfer-ai/flashinfer/issues/2113",
            lambda *qkv, **options: _scaled_lse(kernel(*qkv, **options), 1 / LN2),
            ("log base 2",),
        ),
        Bug(
            "https://github.com/Dao-AILab/flash-attention/pull/2752",
            changed(
                kernel,
                ("m = np.maximum(m, sinks[:, None])", "m = m"),
                ("np.exp(sinks[:, None] - m)", "np.exp(np.float32(sinks[:, None] - m))"),
            ),
            ("sinks not in the maximum",),
        ),
        Bug(
            "https://github.com/mlc-ai/mlc-llm/pull/3426",
            changed(kernel, ("1 / np.sqrt(q.shape[3])", "1.0")),
            ("scale",),
        ),
        Bug(
            "https://github.com/BobMcDear/attorch/issues/14",
            changed(kernel, ("1 / np.sqrt(q.shape[3])", "0.5")),
            ("scale",),
        ),
        Bug(
            "https://github.com/BobMcDear/attorch/issues/14 (heads)",
            lambda q, k, v: kernel(np.repeat(q[:, :, :1], q.shape[2], 2), k[:, :, :1], v[:, :, :1]),
            ("first head for all",),
        ),
        Bug(
            "https://github.com/Dao-AILab/flash-attention/issues/282",
            lambda q, k, v, *, query_positions=None, key_positions=None: kernel(
                q,
                k,
                v,
                query_positions=None if query_positions is None else np.arange(q.shape[1]),
                key_positions=np.arange(k.shape[1]),
            ),
            ("causal from the first key",),
        ),
        Bug(
            "https://github.com/flashinfer-ai/flashinfer/issues/4347",
            fewer_pages,
            (),
        ),
        Bug(
            "https://github.com/pegainfer-project/pegainfer/issues/291",
            lambda q, k, v, *, kv_lengths=None: kernel(
                q, k, v, kv_lengths=None if kv_lengths is None else kv_lengths // 16 * 16 + 16
            ),
            ("keys beyond the length",),
        ),
        Bug(
            "https://github.com/georg-wolflein/good-features/pull/1",
            changed(
                kernel,
                ("s = np.where(seen, s, -np.inf)", "s = s * seen"),
                ("np.where(seen, np.exp(s - m[..., None]), 0)", "np.exp(s - m[..., None])"),
                (UNREAD, "v = np.nan_to_num(v)"),
            ),
            ("hidden scores are 0",),
        ),
        Bug(
            "https://github.com/huggingface/pytorch-image-models/pull/2236",
            changed(
                kernel,
                ("s = np.where(seen, s, -np.inf)", "s = s"),
                ("d = p.sum(axis=3)", "d = np.exp(s - m[..., None]).sum(axis=3)"),
            ),
            ("masked after the softmax",),
        ),
        Bug(
            "https://github.com/vllm-project/flash-attention/pull/87",
            lambda *qkv, **options: _turned_groups(kernel(*qkv, **options)),
            ("heads regrouped",),
        ),
        Bug(
            "https://github.com/deepseek-ai/FlashMLA/pull/106",
            lambda *qkv, **options: _scaled_lse(kernel(*qkv, **options), 1 / LN2),
            ("log base 2",),
        ),
    ],
    "tree": [
        Bug(
            "https://github.com/lablup/mlxcel/pull/1214",
            changed(
                build,
                ("positions[r, i] = positions[r, p] + 1", "positions[r, i] = lengths[r] + i"),
                ("positions[r, i] = lengths[r]\n", "positions[r, i] = lengths[r] + i\n"),
            ),
            ("positions by index",),
        ),
        Bug(
            "https://github.com/sgl-project/sglang/pull/29587",
            changed(build, ("next_token[r, p] = i", "next_token[r, i - 1] = i")),
            (),
        ),
        Bug(
            "https://github.com/sgl-project/sglang-jax/pull/1188",
            changed(build, ("    return {", "    mask[:, 0] = True\n    return {")),
            ("root sees drafts",),
        ),
        Bug(
            "https://github.com/PaddlePaddle/FastDeploy/pull/3514",
            changed(
                build,
                ("    return {", "    mask[:] = np.tril(np.ones((n, n), bool))\n    return {"),
            ),
            ("causal mask",),
        ),
    ],
    "commit": [
        Bug(
            "https://github.com/sgl-project/sglang/pull/15360",
            changed(commit, ("lengths[r] + accepted[r, i]]", "lengths[r] + i]")),
            ("path kept as a dense prefix",),
        ),
    ],
}


def _lse_of(answer, old, new):
    return answer[0], np.where(answer[1] == old, new, answer[1])


def _scaled_lse(answer, factor):
    return answer[0], answer[1] * factor


def _turned_groups(answer):
    """lse of grouped heads, written as (groups, key heads) and read as (key heads, groups)."""
    out, lse = answer
    b, l, h = lse.shape
    if h % 2:
        return answer
    return out, lse.reshape(b, l, 2, h // 2).swapaxes(2, 3).reshape(b, l, h)
