"""What else is a state: a sink, a prefix that many share, latent attention, a sliding window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

from treeattn import (
    attend,
    attention,
    finalize,
    from_output,
    kv_mesh,
    memory,
    merge,
    merge_across,
    tree_decode,
)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def over(p):
    """How keys lie on p devices."""
    return NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))


def sink_state(sinks, like):
    """A learned score for each head, of a key without a value: it only takes weight away."""
    lse = jnp.broadcast_to(sinks, like.max.shape)
    return from_output(jnp.zeros_like(like.numerator), lse)


def dense_with_sinks(q, k, v, sinks, **options):
    """One more key, whose score is the head's sink whatever the query, and whose value is 0."""
    (b, l, h, _), n, groups = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    k, v = (np.repeat(np.asarray(x), groups, axis=2) for x in (k, v))
    k, v = (np.concatenate([x, np.zeros_like(x[:, :1])], axis=1) for x in (k, v))
    bias = np.zeros((b, h, l, n + 1))
    bias[..., -1] = np.asarray(sinks)[:, None]
    return dense_attention(q, k, v, bias=bias, **options)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_a_sink_is_a_state_without_a_value(seed):
    q, k, v, sinks = draw(seed, (2, 3, 4, 8), (2, 16, 2, 8), (2, 16, 2, 6), (4,))
    state = attend(q, k, v)
    out, _ = finalize(merge(state, sink_state(sinks * 3, state)))
    np.testing.assert_allclose(out, dense_with_sinks(q, k, v, sinks * 3), atol=1e-12)


def test_a_sink_counts_once_and_not_once_a_shard():
    p = 5
    q, k, v, sinks = draw(0, (2, 1, 4, 8), (2, 16, 2, 8), (2, 16, 2, 6), (4,))
    want = dense_with_sinks(q, k, v, sinks)
    out, lse = tree_decode(q, k, v, sharding=over(p), return_lse=True)
    state = from_output(out, lse)
    sink = sink_state(sinks, state)
    np.testing.assert_allclose(finalize(merge(state, sink))[0], want, atol=1e-12)
    for _ in range(p):  # what a kernel would do that knows its own shard only
        state = merge(state, sink)
    assert np.abs(finalize(state)[0] - want).max() > 0.01


def test_sinks_have_gradients():
    q, k, v, sinks = draw(0, (1, 1, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), (2,))

    @jax.jit
    def loss(sinks):
        state = attend(q, k, v)
        return finalize(merge(state, sink_state(sinks, state)))[0].sum()

    step, got = 1e-6, jax.grad(loss)(sinks)
    for i, one in enumerate(np.eye(2)):
        slope = (loss(sinks + step * one) - loss(sinks - step * one)) / (2 * step)
        np.testing.assert_allclose(got[i], slope, rtol=1e-6)


def cascade(q, prefix, own, lengths):
    """Rows that share a prefix: attended once, by all of their queries, and merged with each own.

    q (b, l, h, d); prefix k, v (n, h_kv, ·), own k, v (b, n_own, h_kv, ·) of which lengths (b,).
    """
    b, l = q.shape[:2]
    together = attend(q.reshape(1, b * l, *q.shape[2:]), *(x[None] for x in prefix))
    shared = jax.tree.map(lambda x: x.reshape(b, l, *x.shape[2:]), together)
    return finalize(merge(shared, attend(q, *own, kv_lengths=lengths)))[0]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_a_shared_prefix_is_attended_once(lengths, seed):
    q, pk, pv, k, v = draw(seed, (3, 2, 4, 8), (24, 2, 8), (24, 2, 6), (3, 9, 2, 8), (3, 9, 2, 6))
    lengths = np.array(lengths)
    out = jax.jit(cascade)(q, (pk, pv), (k, v), lengths)
    whole = [
        np.concatenate([np.broadcast_to(x, (3, *x.shape)), y], 1) for x, y in ((pk, k), (pv, v))
    ]
    np.testing.assert_allclose(out, dense_attention(q, *whole, kv_lengths=24 + lengths), atol=1e-12)


def test_a_cascade_reads_the_prefix_once(optimized):
    """What its program is given: the prefix's keys, and not a copy for each row."""
    b, n, own = 8, 1024, 16
    q, pk, k = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((b, 1, 4, 64), (n, 4, 64), (b, own, 4, 64))
    )
    lengths = jax.ShapeDtypeStruct((b,), jnp.int32)
    program = jax.jit(cascade).lower(q, (pk, pk), (k, k), lengths).compile()
    held = memory(program)
    prefix = 2 * n * 4 * 64 * 4
    assert held.held_bytes < 3 * prefix < b * prefix


def test_latent_attention_is_grouped_queries_over_one_head():
    """DeepSeek's: keys and values are made of one latent c per token; heads only differ in maps.

    Scores q_h·(W_h c) = (W_hᵀ q_h)·c: with absorbed queries, one key head of the latent and a
    rotary part, whose values are the latent alone: d ≠ dv.
    """
    b, n, h, d, latent, rotary = 2, 12, 4, 8, 10, 3
    q, q_r, c, k_r, up_k, up_v = draw(
        0,
        (b, 1, h, d),
        (b, 1, h, rotary),
        (b, n, latent),
        (b, n, rotary),
        (h, latent, d),
        (h, latent, 5),
    )
    scale = (d + rotary) ** -0.5
    k = np.concatenate(
        [np.einsum("bnc,hcd->bnhd", c, up_k), np.broadcast_to(k_r[:, :, None], (b, n, h, rotary))],
        -1,
    )
    v = np.einsum("bnc,hcv->bnhv", c, up_v)
    want = dense_attention(np.concatenate([q, q_r], -1), k, v, scale=scale)

    absorbed = jnp.concatenate([jnp.einsum("blhd,hcd->blhc", q, up_k), q_r], -1)
    keys = jnp.concatenate([c, k_r], -1)[:, :, None]  # one head, of the latent and the rotary part
    for decode in (
        attention,
        lambda *x, **options: tree_decode(*x, sharding=over(3), **options),
    ):
        out = decode(absorbed, keys, c[:, :, None], scale=scale)  # (b, 1, h, latent)
        np.testing.assert_allclose(jnp.einsum("blhc,hcv->blhv", out, up_v), want, atol=1e-12)


@pytest.mark.parametrize("window", [1, 7, 100])
def test_a_sliding_window_over_stripes(window):
    """A key's position, and not its place, decides: token t lies on device t mod p."""
    p, n, now = 4, 32, 29  # the query is token 29; later places hold nothing yet
    q, k, v = draw(0, (1, 1, 4, 8), (1, n, 2, 8), (1, n, 2, 6))
    stripes = np.arange(n).reshape(-1, p).T.ravel()  # the positions in the order of the slots
    seen = (stripes <= now) & (stripes > now - window)
    out = tree_decode(
        *(q, k[:, stripes], v[:, stripes]),
        sharding=over(p),
        striped=True,
        kv_lengths=np.array([now + 1]),
        mask=jnp.asarray(seen)[None, None, None],
    )
    keys = slice(max(0, now - window + 1), now + 1)
    np.testing.assert_allclose(out, dense_attention(q, k[:, keys], v[:, keys]), atol=1e-12)
    shares = seen.reshape(p, -1).sum(axis=1)  # dealt like cards, a window is everybody's work
    assert shares.max() - shares.min() <= 1


def test_sinks_travel_with_any_merge_inside_shard_map():
    """On one device of the mesh only: where else would they be counted twice."""
    q, k, v, sinks = draw(0, (1, 1, 4, 8), (1, 8, 2, 8), (1, 8, 2, 6), (4,))
    for method in ("allreduce", "butterfly", "gather"):

        def body(k, v, method=method):
            state = attend(q, k, v)
            here = jnp.where(jax.lax.axis_index("kv") == 0, sinks, -jnp.inf)
            return finalize(
                merge_across(merge(state, sink_state(here, state)), "kv", method=method)
            )[0]

        f = jax.shard_map(
            body, mesh=over(4).mesh, in_specs=P(None, "kv"), out_specs=P(), check_vma=False
        )
        np.testing.assert_allclose(jax.jit(f)(k, v), dense_with_sinks(q, k, v, sinks), atol=1e-12)
