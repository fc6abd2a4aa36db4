"""The adapter of flash-attn-jax's kernel, where there is no GPU: what it is asked, what comes back.

A stand-in has the kernel's signature, axes and lse; the program for CUDA is lowered, not run.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_gradients

import treeattn.flash as flash
from treeattn import attend, finalize
from treeattn.inputs import gather_inputs


def draw(dtype="float16", l=3, n=40, d=16):
    rng = np.random.default_rng(0)
    sizes = (2, l, 4, d), (2, n, 2, d), (2, n, 2, d)
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


def by_rows(q, k, v, starts_q, starts_k, *, softmax_scale, is_causal):
    """Segment i has the queries from starts_q[i] on and the keys from starts_k[i] on: (t, h, d)."""
    of_query, of_key = (
        jnp.searchsorted(starts, jnp.arange(len(x)), side="right")
        for starts, x in ((starts_q, q), (starts_k, k))
    )
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) * softmax_scale
    seen = of_query[:, None] == of_key
    lse = jax.nn.logsumexp(s, axis=-1, where=seen)
    p = jnp.where(seen, jnp.exp(s - jnp.where(jnp.isinf(lse), 0, lse)[..., None]), 0)
    return jnp.einsum("hqk,khd->qhd", p, v), jnp.where(jnp.isinf(lse), jnp.inf, lse)  # (h, q)


@pytest.fixture
def stand_in(monkeypatch):
    def mha(q, k, v, *, window_size_left, window_size_right, **options):
        assert (window_size_left, window_size_right) == (-1, -1)
        ends = [jnp.array([0, x.shape[1]]) for x in (q, k)]
        return jax.vmap(lambda q, k, v: by_rows(q, k, v, *ends, **options))(q, k, v)

    def varlen(q, k, v, starts_q, starts_k, *, max_seqlen_q, max_seqlen_k, **options):
        out, lse = by_rows(q, k, v, starts_q, starts_k, **options)
        segments = [lse[:, int(i) : int(i) + max_seqlen_q] for i in starts_q[:-1]]
        return out, jnp.stack(
            [jnp.pad(x, ((0, 0), (0, max_seqlen_q - x.shape[1]))) for x in segments]
        )

    forward = types.SimpleNamespace(flash_mha_fwd=mha)
    rows = types.SimpleNamespace(flash_mha_varlen_fwd=varlen)
    monkeypatch.setattr(flash, "load", lambda: (forward, rows))


@pytest.mark.parametrize("lengths", [None, [40, 0], [7, 33]])
@pytest.mark.parametrize("scale", [None, 0.5, np.float32(0.5)])
def test_the_states_are_those_of_dense_attention(stand_in, lengths, scale):
    q, k, v = draw()
    given = jnp.asarray(scale) if isinstance(scale, np.float32) else scale
    inputs = gather_inputs(q, k, v, None, None, lengths, given)
    out, lse = finalize(flash.flash_attend.__wrapped__(inputs))
    expected = dense_attention(q, k, v, kv_lengths=lengths, scale=scale)
    np.testing.assert_allclose(out, expected, atol=2e-3)
    assert np.array_equal(np.isinf(lse).all(axis=(1, 2)), np.array(lengths or [1, 1]) == 0)


def test_the_gradient_is_that_of_the_plain_form(stand_in):
    q, k, v = draw()
    w = np.random.default_rng(1).normal(size=q.shape)

    def loss(q, k, v):
        inputs = gather_inputs(q, k, v, None, None, None, None)
        return jnp.sum(w * finalize(flash.flash_attend(inputs))[0])

    found = jax.grad(loss, (0, 1, 2))(q, k, v)
    for x, y in zip(found, dense_gradients(q, k, v, w), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-3 * np.abs(y).max())


REFUSED = {
    "q: the flash kernel takes float16": (draw("float32"), {}),
    "q: the flash kernel takes a head_dim up to 256": (draw(d=264), {}),
    "mask: the flash kernel takes none": (draw(), {"mask": np.ones((1, 1, 1, 40), bool)}),
    "bias: the flash kernel takes none": (draw(), {"bias": np.zeros((1, 1, 1, 40), np.float32)}),
    "kv_lengths: the flash kernel takes none": (
        draw(l=40),
        {"kv_lengths": np.array([1, 2]), "causal": True},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernel_does_not_take_is_refused(message):
    arrays, options = REFUSED[message]
    traced = jax.jit(lambda *x: attend(*x, implementation="flash", **options))
    with pytest.raises(ValueError, match="^" + message):
        traced.lower(*arrays)
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"^v: the flash kernel expects the queries' head_dim, 16"):
        jax.jit(lambda *x: attend(*x, implementation="flash")).lower(q, k, v[..., :8])


def test_where_it_cannot_run_it_is_refused():
    with pytest.raises(ValueError, match=r"'flash' needs a CUDA device, got a cpu device"):
        attend(*draw(), implementation="flash")


@pytest.mark.parametrize("lengths", [None, np.array([40, 3])])
def test_a_program_for_cuda_calls_the_kernel(request, lengths):
    request.getfixturevalue("flash")
    program = jax.jit(lambda *x: attend(*x, kv_lengths=lengths, implementation="flash"))
    text = program.trace(*draw()).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @flash_mha" in text and "dot_general" not in text


def test_unasked_it_is_taken_for_long_texts_on_a_gpu(monkeypatch):
    long, short = draw(l=flash.LONG_TEXT + 1), draw(l=flash.LONG_TEXT)
    inputs = [gather_inputs(*x, None, None, None, None) for x in (long, short)]
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: name)
    assert [flash.is_best(x) for x in inputs] == [True, False]
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: None)
    assert not flash.is_best(inputs[0])

    asked = []
    monkeypatch.setattr(flash, "is_best", asked.append)  # which returns None: no
    attend(*long)
    assert not asked  # this is a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    attend(*long)
    assert len(asked) == 1
