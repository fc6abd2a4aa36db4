"""The code of site/flash_attn_jax.md: it imports, traces and lowers; its axes and +∞ are mended."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import SITE, blocks

from treeattn_conformance import attend, check_attention

PAGE = SITE / "flash_attn_jax.md"


@pytest.fixture
def page(flash, monkeypatch):
    """The names that the page's code defines; what it changes is changed back."""
    for module in flash.load():
        monkeypatch.setattr(module, "get_sm_count", module.get_sm_count)
    names = {}
    for block in blocks(PAGE):
        exec(block.code, names)
    return names


def test_rows_of_lengths_lower(page):
    q = jax.ShapeDtypeStruct((2, 3, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 40, 2, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    program = jax.jit(page["with_lengths"], static_argnums=4).trace(q, k, k, lengths, 0.125)
    out, lse = program.out_info
    assert out.shape == (2, 3, 8, 64) and lse.shape == (2, 3, 8) and lse.dtype == jnp.float32
    assert "varlen" in program.lower(lowering_platforms=("cuda",)).as_text()


def test_with_the_kernels_axes_and_infinity_the_pages_functions_conform(page, monkeypatch):
    """In the kernels' place stand what their source states: (b, h, l), and +∞ for no keys."""

    def fwd(q, k, v, *, softmax_scale, is_causal, window_size_left, window_size_right):
        q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
        out, lse = attend(q, k, v, scale=softmax_scale)
        return jnp.asarray(out, jnp.float32), jnp.asarray(lse.swapaxes(1, 2), jnp.float32)

    def varlen_fwd(q, k, v, starts_q, starts_k, *, max_seqlen_q, max_seqlen_k, softmax_scale):
        q, k, v, starts_q, starts_k = (np.asarray(x) for x in (q, k, v, starts_q, starts_k))
        outs, lses = [], []
        for i in range(len(starts_q) - 1):
            rows, keys = (slice(x[i], x[i + 1]) for x in (starts_q, starts_k))
            n = [keys.stop - keys.start]
            seen = (np.append(x[keys], x[:1], axis=0)[None] for x in (k, v))  # and one that is not
            out, lse = attend(q[None, rows], *seen, kv_lengths=n, scale=softmax_scale)
            outs.append(out[0])
            lse = np.where(np.isneginf(lse[0]), np.inf, lse[0])
            lses.append(np.pad(lse, ((0, max_seqlen_q - len(lse)), (0, 0))).T)
        return jnp.asarray(np.concatenate(outs)), jnp.asarray(np.stack(lses), jnp.float32)

    monkeypatch.setattr(page["flash_fwd"], "flash_mha_fwd", fwd)
    monkeypatch.setattr(page["varlen_fwd"], "flash_mha_varlen_fwd", varlen_fwd)

    def kernel(q, k, v, *, scale=None, kv_lengths=None, **options):
        if options:
            raise NotImplementedError
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (jnp.asarray(x) for x in (q, k, v))
        if kv_lengths is None:
            return page["attention"](q, k, v, scale)
        return page["with_lengths"](q, k, v, jnp.asarray(kv_lengths, jnp.int32), scale)

    report = check_attention(kernel)
    assert not report.names("failed"), str(report)
    assert {"plain", "a row without keys", "stale NaN"} <= set(report.names("passed"))
