"""This project's own merges, kernels, decoding and trees pass the suite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_weights

import treeattn
from treeattn import (
    ancestor_mask,
    attend,
    depths,
    finalize,
    from_output,
    kv_mesh,
    reduce_chain,
    reduce_tree,
    tree_decode,
)
from treeattn.across import METHODS
from treeattn_conformance import bfloat16, check_attention, check_merge, check_tree
from treeattn_conformance.forward import attention_questions

WHOLE = [name for name, way in METHODS.items() if not way.shards_heads]


def options_as_masks(
    q, k, kv_lengths=None, mask=None, query_positions=None, key_positions=None, window=None
):
    """(kv_lengths, mask) for any of the options, always of the same shapes."""
    (b, l), n = q.shape[:2], k.shape[1]
    mask = np.ones((b, 1, l, n), bool) if mask is None else mask
    if window is not None and query_positions is None:
        query_positions, key_positions = np.arange(n - l, n), np.arange(n)
    if query_positions is not None:
        mask = mask & (key_positions <= query_positions[:, None])
    if window is not None:
        mask = mask & (key_positions > query_positions[:, None] - window)
    return np.full(b, n) if kv_lengths is None else kv_lengths, mask


def with_sinks(kernel):
    """A kernel with sinks: one more state, whose value is 0, merged once."""

    def run(q, k, v, *, sinks=None, **options):
        out, lse = kernel(q, k, v, **options)
        if sinks is None:
            return out, lse
        sink = jnp.broadcast_to(jnp.asarray(sinks, lse.dtype), lse.shape)
        states = from_output(out, lse), from_output(jnp.zeros_like(out), sink)
        return finalize(treeattn.merge(*states))

    return run


def assert_passes(report):
    assert not report.names("failed") and not report.names("skipped"), str(report)


def test_expected_answers_are_dense_softmax():
    """Against the oracle of the other tests, which has neither sinks nor positions nor NaN."""
    for case in attention_questions("float64"):
        q, k, v = case.arguments.values()
        if "sinks" in case.options:
            continue
        others = {name: x for name, x in case.options.items() if name != "scale"}
        lengths, mask = options_as_masks(q, k, **others)
        options = {"mask": mask, "kv_lengths": lengths, "scale": case.options.get("scale")}
        out = dense_attention(q, k, np.nan_to_num(v), **options)
        _, lse = dense_weights(q, k, **options)
        np.testing.assert_allclose(case.right[0], out, atol=1e-12)
        np.testing.assert_allclose(case.right[1], lse, atol=1e-12)


def test_bfloat16_rounds_as_jax_does():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 1e3
    x = np.concatenate([x, [0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8]]).astype(np.float32)
    expected = np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(bfloat16(x), expected)


# tests/test_state.py asks about float32
@pytest.mark.parametrize(
    ("reduce", "dtype"),
    [
        (reduce_tree, "bfloat16"),
        (reduce_chain, "float64"),
        pytest.param(reduce_chain, "float16", marks=pytest.mark.slow),
    ],
)
def test_our_merges_pass(reduce, dtype):
    reduced = jax.jit(lambda states: finalize(reduce(states)))

    def ours(parts):
        out, lse = (np.stack(x) for x in zip(*parts, strict=True))
        return reduced(from_output(jnp.asarray(out, dtype), jnp.asarray(lse)))

    assert_passes(check_merge(ours, dtype=dtype))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_our_kernel_passes(dtype):
    run = jax.jit(lambda *x, **options: finalize(attend(*x, **options)))

    def ours(q, k, v, *, scale=None, **options):
        lengths, mask = options_as_masks(q, k, **options)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
        return run(q, k, v, mask=mask, kv_lengths=lengths, scale=jnp.float32(scale))

    assert_passes(check_attention(with_sinks(ours), dtype=dtype))


@pytest.mark.slow  # test_gradients.py asks of its values and gradients
@pytest.mark.parametrize("method", WHOLE)
def test_decoding_from_shards_passes(method):
    mesh = kv_mesh(jax.devices()[:4], nodes=2)
    sharding = NamedSharding(mesh, P(None, ("node", "device")))

    def ours(q, k, v, *, scale=None, **options):
        lengths, mask = options_as_masks(q, k, **options)
        options = {"mask": mask, "kv_lengths": lengths, "scale": scale, "method": method}
        return tree_decode(q, k, v, sharding=sharding, return_lse=True, **options)

    assert_passes(check_attention(with_sinks(ours)))


def test_our_trees_pass():
    def ours(parents, lengths):
        positions = lengths[:, None] + depths(parents)
        return {"mask": ancestor_mask(parents), "positions": positions}

    report = check_tree(ours)
    assert report.names("passed") == ["mask", "positions"], str(report)
