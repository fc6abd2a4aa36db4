"""The adapter of flash-attn-jax's kernel, where there is no GPU: what it is asked, what comes back.

A stand-in has the kernel's signature, axes and lse; the program for CUDA is lowered, not run.
"""

import functools
import types
from itertools import pairwise

import attentions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import PREFILLS, check, check_gradients, kernel
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn.flash as flash
from treeattn import attend, finalize
from treeattn.inputs import gather_inputs
from treeattn_conformance import attend as plain


def draw(dtype="float16", l=3, n=40, d=16):
    return [jnp.asarray(x, dtype) for x in attentions.draw(l=l, n=n, d=d)]


def mha(q, k, v, *, window_size_left, window_size_right, softmax_scale, is_causal):
    assert (window_size_left, window_size_right, is_causal) == (-1, -1, False)
    out, lse = kernel(q, k, v, scale=softmax_scale)
    return out, lse.swapaxes(1, 2)


def varlen(*arrays, max_seqlen_q, max_seqlen_k, softmax_scale, **_):
    """Segment i has the queries from starts_q[i] on and the keys from starts_k[i] on.

    Its lse is (h, max_seqlen_q), with ∞ for no keys.
    """
    q, k, v, starts_q, starts_k = map(np.asarray, arrays)
    outs, lses = [], []
    for (i, j), (m, n) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        keys = (np.append(x[m:n], x[:1], axis=0)[None] for x in (k, v))  # and one that is not seen
        out, lse = plain(q[None, i:j], *keys, kv_lengths=[n - m], scale=softmax_scale)
        outs.append(out[0])
        lse = np.where(np.isinf(lse[0]), np.inf, lse[0])
        lses.append(np.pad(lse, ((0, max_seqlen_q - (j - i)), (0, 0))).T)
    return jnp.asarray(np.concatenate(outs), q.dtype), jnp.asarray(lses, jnp.float32)


@pytest.fixture
def stand_in(monkeypatch):
    forward = types.SimpleNamespace(flash_mha_fwd=mha)
    rows = types.SimpleNamespace(flash_mha_varlen_fwd=varlen)
    monkeypatch.setattr(flash, "load", lambda: (forward, rows))


def run(q, k, v, kv_lengths=None, scale=None):
    return finalize(flash.flash_attend(gather_inputs(q, k, v, None, None, kv_lengths, scale)))


OPTIONS = [
    {},
    {"kv_lengths": [40, 0], "scale": 0.5},
    {"kv_lengths": [7, 33]},
    {"scale": jnp.float32(0.5)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_states_are_those_of_dense_attention(stand_in, options):
    arrays = draw()
    check(run(*arrays, **options), *arrays, atol=2e-3, **options)


def test_the_gradient_is_that_of_the_plain_form(stand_in):
    q, k, v = draw()
    w = np.random.default_rng(1).normal(size=q.shape)
    found = jax.jit(jax.grad(lambda *x: jnp.sum(w * run(*x)[0]), (0, 1, 2)))(q, k, v)
    check_gradients(found, q, k, v, w, atol=2e-3)


REFUSED = {
    "q: the flash kernel takes float16": (draw("float32"), {}),
    "q: the flash kernel takes a head_dim up to 256": (draw(d=264), {}),
    "mask: the flash kernel takes none": (draw(), {"mask": np.ones((1, 1, 1, 40), bool)}),
    "bias: the flash kernel takes none": (draw(), {"bias": np.zeros((1, 1, 1, 40), np.float32)}),
    "kv_lengths: the flash kernel takes none": (
        draw(l=40),
        {"kv_lengths": np.array([1, 2]), "causal": True},
    ),
    "v: the flash kernel expects the queries' head_dim, 16": ((*draw()[:2], draw(d=8)[2]), {}),
}


def test_every_option_is_taken_or_refused():
    refused = {message.split(":")[0] for message in REFUSED}
    missing = {*attentions.OPTIONS, *attentions.STATIC} - {"scale", "causal"} - refused
    assert not missing, f"why_not in treeattn/flash.py, and a row of REFUSED here, for {missing}"


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernel_does_not_take_is_refused(message):
    arrays, options = REFUSED[message]
    traced = jax.jit(lambda *x: attend(*x, implementation="flash", **options))
    with pytest.raises(ValueError, match="^" + message):
        traced.lower(*arrays)


@pytest.mark.parametrize("lengths", [None, np.array([40, 3])])
def test_a_program_for_cuda_calls_the_kernel(request, lengths):
    request.getfixturevalue("flash")
    program = jax.jit(lambda *x: attend(*x, kv_lengths=lengths, implementation="flash"))
    text = program.trace(*draw()).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @flash_mha" in text and "dot_general" not in text


def test_flash_prefill_is_lowered_with_its_causal_kernel(request):
    request.getfixturevalue("flash")
    sharding = NamedSharding(AbstractMesh((8,), ("kv",)), P(None, "kv"))
    q, kv = (jax.ShapeDtypeStruct((1, 4096, h, 64), jnp.bfloat16) for h in (16, 8))
    for prefill in PREFILLS.values():
        f = functools.partial(prefill, sharding=sharding, implementation="flash")
        text = jax.jit(f).trace(q, kv, kv).lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @flash_mha_fwd" in line]
        assert any("is_causal = true" in line for line in calls)
        assert "4096x4096" not in text  # no mask anywhere


def test_unasked_it_is_taken_for_long_texts_on_a_gpu(monkeypatch):
    long, short = draw(l=flash.LONG_TEXT + 1), draw(l=flash.LONG_TEXT)
    inputs = [gather_inputs(*x, None, None, None, None) for x in (long, short)]
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: name)
    assert not flash.is_best(inputs[0])  # this is a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [flash.is_best(x) for x in inputs] == [True, False]
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: None)
    assert not flash.is_best(inputs[0])

    asked = []
    monkeypatch.setattr(flash, "is_best", asked.append)  # which returns None: no
    jax.clear_caches()
    attend(*long)
    assert len(asked) == 1
