"""What else is a state: a sink, a prefix that many share, latent attention, a sliding window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_weights

from treeattn import (
    attend,
    attention,
    finalize,
    from_output,
    kv_mesh,
    merge,
    merge_across,
    tree_decode,
)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-12)


OVER = NamedSharding(kv_mesh(jax.devices()[:4]), P(None, "kv"))
CACHE = (2, 1, 4, 8), (2, 16, 2, 8), (2, 16, 2, 6), (4,)  # q, k, v, sinks


def sink_state(sinks, like):
    """A learned score for each head, of a key without a value: it only takes weight away."""
    lse = jnp.broadcast_to(sinks, like.max.shape)
    return from_output(jnp.zeros_like(like.numerator), lse)


def with_sinks(q, k, v, sinks):
    state = attend(q, k, v)
    return finalize(merge(state, sink_state(sinks, state)))[0]


def dense_with_sinks(q, k, v, sinks):
    """Each weight times the share that the keys keep beside the sink."""
    _, lse = dense_weights(q, k)
    return dense_attention(q, k, v) / (1 + np.exp(np.asarray(sinks) - lse))[..., None]


def test_a_sink_is_a_state_without_a_value():
    """And its gradient is what it takes away."""
    q, k, v, sinks = draw(0, *CACHE)
    close(with_sinks(q, k, v, 3 * sinks), dense_with_sinks(q, k, v, 3 * sinks))
    gradient = jax.jit(jax.grad(lambda sinks: with_sinks(q, k, v, sinks).sum()))(sinks)
    step = 1e-6
    for i, one in enumerate(step * np.eye(4)):
        higher, lower = (dense_with_sinks(q, k, v, x).sum() for x in (sinks + one, sinks - one))
        np.testing.assert_allclose(gradient[i], (higher - lower) / (2 * step), rtol=1e-6)


def test_a_sink_counts_once_and_not_once_a_shard():
    q, k, v, sinks = draw(0, *CACHE)
    wanted = dense_with_sinks(q, k, v, sinks)
    state = from_output(*tree_decode(q, k, v, sharding=OVER, return_lse=True))
    sink = sink_state(sinks, state)
    close(finalize(merge(state, sink))[0], wanted)
    for _ in range(4):  # what a kernel would do that knows its own shard only
        state = merge(state, sink)
    assert np.abs(finalize(state)[0] - wanted).max() > 0.01


@pytest.mark.parametrize("method", ["allreduce", "butterfly", "gather"])
def test_sinks_travel_with_any_merge_inside_shard_map(method):
    """On one device of the mesh only: where else would they be counted twice."""
    q, k, v, sinks = draw(0, *CACHE)

    def body(k, v):
        state = attend(q, k, v)
        here = jnp.where(jax.lax.axis_index("kv") == 0, sinks, -jnp.inf)
        state = merge(state, sink_state(here, state))
        return finalize(merge_across(state, "kv", method=method))[0]

    specs = {"in_specs": P(None, "kv"), "out_specs": P(), "check_vma": False}
    run = jax.jit(jax.shard_map(body, mesh=OVER.mesh, **specs))
    close(run(k, v), dense_with_sinks(q, k, v, sinks))


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
    q, *prefix, k, v = draw(seed, (3, 2, 4, 8), (24, 2, 8), (24, 2, 6), (3, 9, 2, 8), (3, 9, 2, 6))
    lengths = np.array(lengths)
    out = jax.jit(cascade)(q, prefix, (k, v), lengths)
    whole = [
        jnp.concatenate([jnp.stack([x] * 3), y], 1) for x, y in zip(prefix, (k, v), strict=True)
    ]
    close(out, dense_attention(q, *whole, kv_lengths=24 + lengths))


def test_latent_attention_is_grouped_queries_over_one_head():
    """DeepSeek's: keys and values are made of one latent c per token; heads only differ in maps.

    Scores q_h·(W_h c) = (W_hᵀ q_h)·c: with absorbed queries, one key head of the latent and a
    rotary part, whose values are the latent alone: d ≠ dv.
    """
    b, n, h, d, latent, rotary = 2, 12, 4, 8, 10, 3
    q, q_r, up_k, up_v = draw(0, (b, 1, h, d), (b, 1, h, rotary), (h, latent, d), (h, latent, 5))
    c, k_r = draw(1, (b, n, 1, latent), (b, n, 1, rotary))  # one head for all
    k = jnp.einsum("bnic,hcd->bnhd", c, up_k)
    k = jnp.concatenate([k, jnp.broadcast_to(k_r, (b, n, h, rotary))], -1)
    v = jnp.einsum("bnic,hcv->bnhv", c, up_v)
    scale = (d + rotary) ** -0.5
    wanted = dense_attention(jnp.concatenate([q, q_r], -1), k, v, scale=scale)

    absorbed = jnp.concatenate([jnp.einsum("blhd,hcd->blhc", q, up_k), q_r], -1)
    keys = jnp.concatenate([c, k_r], -1)
    for out in (  # (b, 1, h, latent)
        attention(absorbed, keys, c, scale=scale),
        tree_decode(absorbed, keys, c, scale=scale, sharding=OVER),
    ):
        close(jnp.einsum("blhc,hcv->blhv", out, up_v), wanted)


def test_a_sliding_window_over_stripes():
    """A key's position, and not its place, decides: token t lies on device t mod p."""
    p, n, now = 4, 32, 29  # the query is token 29; later places hold nothing yet
    q, k, v = draw(0, (1, 1, 4, 8), (1, n, 2, 8), (1, n, 2, 6))
    stripes = np.arange(n).reshape(-1, p).T.ravel()  # the positions in the order of the slots
    for window in (1, 7, 100):
        seen = (stripes <= now) & (stripes > now - window)
        out = tree_decode(
            *(q, k[:, stripes], v[:, stripes]),
            sharding=OVER,
            striped=True,
            kv_lengths=np.array([now + 1]),
            mask=jnp.asarray(seen)[None, None, None],
        )
        keys = slice(max(0, now - window + 1), now + 1)
        close(out, dense_attention(q, k[:, keys], v[:, keys]))
        shares = seen.reshape(p, -1).sum(axis=1)  # dealt like cards, a window is everybody's work
        assert shares.max() - shares.min() <= 1
