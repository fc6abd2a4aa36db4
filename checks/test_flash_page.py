"""The code of the page about flash-attn-jax: it lowers for CUDA, and with stand-ins it is right."""

import jax
import jax.numpy as jnp
import pytest
from pages import SITE, blocks
from test_flash import draw, mha, varlen

from treeattn_conformance import check_attention


@pytest.fixture
def page(request, monkeypatch):
    """The names that the page's code defines; what it changes is changed back."""
    for module in request.getfixturevalue("flash").load():
        monkeypatch.setattr(module, "get_sm_count", module.get_sm_count)
    names = {}
    for block in blocks(SITE / "flash_attn_jax.md"):
        exec(block.code, names)
    return names


def test_the_pages_rows_of_lengths_lower(page):
    arrays = draw("bfloat16")
    program = jax.jit(page["with_lengths"], static_argnums=4)
    traced = program.trace(*arrays, jnp.array([3, 40], "int32"), 0.125)
    out, lse = traced.out_info
    assert (out.shape, lse.shape) == ((2, 3, 4, 16), (2, 3, 4)) and lse.dtype == jnp.float32
    assert "varlen" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_with_the_kernels_axes_and_infinity_the_pages_functions_conform(page, monkeypatch):
    """In the kernels' place stand what their source states: (b, h, l), and +∞ for no keys."""
    monkeypatch.setattr(page["flash_fwd"], "flash_mha_fwd", mha)
    monkeypatch.setattr(page["varlen_fwd"], "flash_mha_varlen_fwd", varlen)

    def pages(q, k, v, *, scale=None, kv_lengths=None, **options):
        if options:
            raise NotImplementedError
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (jnp.asarray(x) for x in (q, k, v))
        if kv_lengths is None:
            return page["attention"](q, k, v, scale)
        return page["with_lengths"](q, k, v, jnp.asarray(kv_lengths, jnp.int32), scale)

    report = check_attention(pages)
    assert not report.names("failed"), str(report)
    assert {"plain", "a row without keys", "stale NaN"} <= set(report.names("passed"))
