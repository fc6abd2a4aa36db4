"""A Llama whose cache is in 8 bits, against one by the book that rounds its keys and values so."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from plain_llama import plain_logits

from treeattn import Llama, ancestor_mask, depths, kv_mesh
from treeattn.cost.program import collectives
from treeattn.llama import generate, open_checkpoint, rotary_frequencies

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
TEXT = np.random.default_rng(0).integers(0, 96, 41)
LARGEST = {"int8": 127, "float8_e4m3fn": 448}


@pytest.fixture(scope="module")
def model():
    return Llama.load(SMALL, dtype="float64")


@functools.cache
def wanted(dtype):
    """The logits after each token of TEXT, (41, vocabulary)."""
    checkpoint = open_checkpoint(SMALL)

    def rounded(x):
        scale = (np.abs(x).max(axis=-1, keepdims=True) / LARGEST[dtype]).astype(np.float32)
        steps = x / scale
        if dtype == "int8":
            return np.rint(steps) * scale.astype(float)
        return steps.astype(ml_dtypes.float8_e4m3fn).astype(float) * scale

    frequencies = rotary_frequencies(checkpoint.config).astype(float)
    return plain_logits(checkpoint, TEXT, frequencies, rounded)


def check(logits, wanted):
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())


def in_parts(model, prompt=20):
    """The logits after tokens prompt − 1, … of TEXT: a prompt, then steps of 1 and 4 tokens."""
    logits, cache = model.prefill([TEXT[:prompt]], model.new_cache(1, 48))
    seen = [np.asarray(logits)]
    at = prompt
    while at < len(TEXT):
        some = TEXT[at : at + (1 if at % 5 == 0 else 4)]
        logits, cache = model.step(some[None], cache)
        seen.append(np.asarray(logits[0]))
        at += len(some)
    return np.concatenate(seen), cache


@pytest.mark.parametrize("dtype", LARGEST)
def test_one_device(model, dtype):
    """All at once and in parts, prompts whole and in chunks, the same rounded keys and values."""
    small = model.using("tree", cache_dtype=dtype)
    check(small.logits(TEXT[None])[0], wanted(dtype))
    logits, cache = in_parts(small)
    check(logits, wanted(dtype)[19:])
    assert cache.k[0].numbers.dtype == dtype and cache.k[0].scale.dtype == np.float32
    difference = np.abs(wanted(dtype) - np.asarray(model.logits(TEXT[None])[0])).max()
    assert difference > 1e-3  # or nothing was tested
    # A cache of 8 bits is a quarter of float32's bytes, and a scale for each token and head.
    d = model.config.head_dim
    ours = sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
    floats = model.new_cache(1, 48)
    assert ours / sum(x.nbytes for x in floats.k + floats.v) == (d + 4) / (8 * d)


ON_MESHES = [
    ({}, "ring", {}),
    ({"heads": 2}, "all_to_all", {"shard_weights": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "attention", "options"), ON_MESHES, ids=str)
def test_meshes(model, axes, attention, options):
    """Prompts go by a ring of floats, steps over shards of numbers and scales."""
    mesh = kv_mesh(jax.devices()[:4], **axes)
    small = model.on(mesh, attention=attention, cache_dtype="int8", **options)
    logits, cache = in_parts(small)
    check(logits, wanted("int8")[19:])
    scale = cache.k[0].scale
    assert scale.sharding.is_equivalent_to(cache.k[0].numbers.sharding, 4)
    assert scale.addressable_shards[0].data.size == scale.size // 4
    larger = small.grow(cache, 80)
    tokens = np.array([[1, 2, 3]])
    check(small.extend(tokens, larger)[0], np.asarray(small.extend(tokens, cache)[0]))


@pytest.mark.slow
def test_candidates_and_drafts(model):
    """A tree of candidates sees what the cache will give back, and a draft changes no text."""
    small = model.using("tree", cache_dtype="int8")
    parents = np.array([-1, 0, 0, 1])
    _, cache = small.prefill([TEXT[:20]], small.new_cache(1, 48))
    tokens = np.array([TEXT[[20, 21, 7, 22]]])
    positions = 20 + depths(parents)[None]
    mask = ancestor_mask(parents)[None]
    logits, new = small.extend(tokens, cache, positions=positions, mask=mask)
    check(logits[0, [0, 1, 3]], wanted("int8")[20:23])
    select, counts = np.array([[0, 1, 3]]), np.array([3])
    cache = small.commit(cache, new, counts=counts, select=select)
    check(small.step(TEXT[None, 23:24], cache)[0][0, 0], wanted("int8")[23])
    plain = generate(small, TEXT[:9].tolist(), max_new_tokens=12).tokens
    assert generate(small, TEXT[:9].tolist(), max_new_tokens=12, draft="suffix").tokens == plain


def test_a_step_sends_what_it_sends_with_floats(model):
    four = model.on(kv_mesh(jax.devices()[:4]))

    def sent(one):
        def step(cache):
            return one.extend(np.zeros((1, 1), np.int32), cache)[0]

        program = jax.jit(step).lower(one.new_cache(1, 64)).compile()
        return sorted((c.kind, c.shapes, c.axes) for c in collectives(program, one.mesh))

    assert sent(four.using("tree", cache_dtype="int8")) == sent(four)


def test_what_does_not_fit_is_refused(model, unchecked):
    for wrong in ("int4", "float8_e5m2", "float32", 8, jnp.uint8, True):
        with pytest.raises(ValueError, match="cache_dtype: expected int8 or float8_e4m3fn, or Non"):
            model.using("tree", cache_dtype=wrong)
    int8 = {"cache_dtype": jnp.int8}
    with pytest.raises(ValueError, match="implementation: 'pallas' takes no cache_dtype; use"):
        model.using("tree", implementation="pallas", **int8)
    for attention in ("exact", lambda q, k, v, lengths, axes: None):
        with pytest.raises(ValueError, match=r"attention: .* takes no cache_dtype"):
            model.using(attention, **int8)
    with pytest.raises(ValueError, match="cache_dtype: an exact model takes one of"):
        Llama.load(SMALL, weights="int8", exact=True, **int8)
    small = model.using("tree", **int8)
    tokens = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=r"cache: the model has cache_dtype=.*int8.*, got float64"):
        small.step(tokens, model.new_cache(1, 8))
    with pytest.raises(ValueError, match="cache: the model has cache_dtype=None, got int8"):
        model.prefill([[1]], small.new_cache(1, 8))
