"""Checks merges and kernels that people use, and writes the table real_code.md.

    python conformance/real_code.py            write real_code.md, if no row is red
    python conformance/real_code.py --print    print it, and write nothing

Merges that run only on GPUs are written again here in NumPy, from the formulas of the linked
sources. PyTorch's rows need torch. `expect` maps questions or mistakes to the reason why a
function's callers never meet them. A row with any other failure is red, and the exit code is 1.
"""

import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

import adapters
from treeattn_conformance import Report, check_attention, check_merge, folded

PAGE = Path(__file__).parent / "real_code.md"
GITHUB = "https://github.com"


# ---------------------------------------------------------------- merges


@folded
def triton(out, lse, other_out, other_lse):
    """vLLM's and SGLang's kernels in Triton. They read +∞, which FlashAttention 2 writes, as −∞."""
    lse, other_lse = (np.where(x == np.inf, -np.inf, x) for x in (lse, other_lse))
    top = np.maximum(lse, other_lse)
    a, b = np.exp(lse - top), np.exp(other_lse - top)
    return out * (a / (a + b))[..., None] + other_out * (b / (a + b))[..., None], np.log(
        a + b
    ) + top


@folded
def flashinfer(out, lse, other_out, other_lse):
    """FlashInfer's merge_state, whose lse is in base 2."""
    s, other_s = lse / np.log(2), other_lse / np.log(2)
    top = np.maximum(s, other_s)
    a, b = np.exp2(s - top), np.exp2(other_s - top)
    merged = out * (a / (a + b))[..., None] + other_out * (b / (a + b))[..., None]
    return merged, (np.log2(a + b) + top) * np.log(2)


@folded
def ring_flash_attention(out, lse, block_out, block_lse):
    """out moves towards block_out by the sigmoid of block_lse − lse."""
    share = 1 / (1 + np.exp(lse - block_lse))
    return out - share[..., None] * (out - block_out), lse + np.logaddexp(0, block_lse - lse)


# ---------------------------------------------------------------- kernels


def tree_attn_decode(q, k, v):
    """Algorithm 3 over four shards of the keys: a maximum, two sums, a quotient. No lse."""
    heads = q.shape[2] // k.shape[2]
    shards = []
    for keys, values in zip(
        *(np.array_split(x.repeat(heads, 2), 4, 1) for x in (k, v)), strict=True
    ):
        scores = np.einsum("blhd,bnhd->blhn", q, keys) * q.shape[-1] ** -0.5
        if scores.size:
            top = scores.max(axis=-1, keepdims=True)
            lse = np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
            out = np.einsum("blhn,bnhd->blhd", np.exp(scores - top - lse), values)
            shards.append((out * np.exp(lse), np.exp(lse), top))
    highest = np.max([top for *_, top in shards], axis=0)
    num = sum(num * np.exp(top - highest) for num, _, top in shards)
    den = sum(den * np.exp(top - highest) for _, den, top in shards)
    return num / np.maximum(den, 1e-8)


def jax_nn(q, k, v, *, scale=None, **options):
    """jax.nn.dot_product_attention, by XLA, with its residual."""
    import jax
    import jax.numpy as jnp

    adapters.without(options, "sinks")
    adapters.same_dimension(k, v)
    mask = jnp.asarray(adapters.visible(q, k, **options))
    q, k, v = map(jnp.asarray, (q, k, v))
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, implementation="xla", return_residual=True
    )


# ---------------------------------------------------------------- the table

# Conditions under which a failure does no harm
ONE_HAS_KEYS = "if one of the two always has keys"
ZERO_WRITTEN = "if the kernel before it wrote 0 where there were no keys"
ALL_SEE = "if every row sees a key"
ZEROED = "if memory that holds no key yet is 0"


class Row(NamedTuple):
    what: str
    source: str
    ask: Callable[..., Report]
    function: Callable
    expect: Mapping[str, str]
    needs: str = "numpy"


ROWS = (
    Row(
        "vLLM, `merge_attn_states`",
        f"{GITHUB}/vllm-project/vllm/blob/main/vllm/v1/attention/ops/triton_merge_attn_states.py",
        check_merge,
        triton,
        {"NaN for no keys": ONE_HAS_KEYS, "stale NaN": ZERO_WRITTEN},
    ),
    Row(
        "SGLang, `merge_state`",
        f"{GITHUB}/sgl-project/sglang/blob/main/python/sglang/srt/layers/attention/triton_ops/merge_state.py",
        check_merge,
        triton,
        {"NaN for no keys": ONE_HAS_KEYS, "stale NaN": ZERO_WRITTEN},
    ),
    Row(
        "FlashInfer, `merge_state`",
        f"{GITHUB}/flashinfer-ai/flashinfer/blob/main/include/flashinfer/attention/cascade.cuh",
        check_merge,
        flashinfer,
        {
            "NaN for no keys": ONE_HAS_KEYS,
            "lse +inf for no keys": "if its own kernels wrote the shards: they write −∞",
            "stale NaN": ZERO_WRITTEN,
        },
    ),
    Row(
        "ring-flash-attention, `update_out_and_lse`",
        f"{GITHUB}/zhuzilin/ring-flash-attention/blob/main/ring_flash_attn/utils.py",
        check_merge,
        ring_flash_attention,
        {"NaN for no keys": "if every block that is merged has keys"},
    ),
    Row(
        "ring-attention-pytorch, `tree_attn_decode`",
        f"{GITHUB}/lucidrains/ring-attention-pytorch/blob/main/ring_attention_pytorch/tree_attn_decoding.py",
        check_attention,
        tree_attn_decode,
        {},
    ),
    Row(
        "`jax.nn.dot_product_attention`",
        "https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html",
        check_attention,
        jax_nn,
        {
            "mean(V) for no keys": ALL_SEE,
            "finite lse for no keys": ALL_SEE,
            "stale NaN": ZEROED,
        },
        "jax",
    ),
    Row(
        "PyTorch, SDPA on a CPU",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        check_attention,
        adapters.torch_sdpa,
        {"no keys as lse 0": ALL_SEE, "stale NaN": ZEROED},
        "torch",
    ),
    Row(
        "PyTorch, `flex_attention`",
        "https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html",
        check_attention,
        adapters.flex,
        {"stale NaN": ZEROED},
        "torch",
    ),
)
HEAD = """# Merges and kernels that people use, as the suite finds them

`python conformance/real_code.py` writes this page. "Known" counts failures that
`expect=` names, with the reason. Questions about options that a function lacks are skipped. Merges
that need a GPU are written again in NumPy, by the formulas of the linked sources.

| code | passed | known | skipped | failures that are known, and when they do no harm |
|---|---|---|---|---|"""


def there_are(row: Row) -> bool:
    return importlib.util.find_spec(row.needs) is not None


def line(row: Row, report: Report) -> str:
    counts = (len(report.names(status)) for status in ("passed", "expected", "skipped"))
    reasons: dict[str, list[str]] = {}
    for name, reason in row.expect.items():
        reasons.setdefault(reason, []).append(name)
    said = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return f"| [{row.what}]({row.source}) | {' | '.join(map(str, counts))} | {said or '–'} |"


def main(options: list[str]) -> int:
    lines, red = [HEAD], False
    for row in ROWS:
        if not there_are(row):
            print(f"{row.what}: {row.needs} is not installed, so nothing is written")
            options = ["--print"]
            continue
        report = row.ask(row.function, expect=row.expect)
        if not report:
            print(f"{row.what}\n{report}\n", file=sys.stderr)
        red = red or not report
        lines.append(line(row, report))
    page = "\n".join(lines) + "\n"
    if "--print" in options or red:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    return red


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    with np.errstate(all="ignore"):
        sys.exit(main(sys.argv[1:]))
