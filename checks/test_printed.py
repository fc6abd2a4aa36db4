"""What the papers print, run as it is printed, where no notebook runs it: slips and listings."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import check, draw
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_weights

from treeattn import (
    attend,
    collectives,
    finalize,
    kv_mesh,
    merge,
    tree_decode,
)

close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)


def test_values_folded_with_the_output_projection():
    """2024 eq. 20 (2025: 29) has x with an intra-head index: W_V meets d_h numbers, and has d_emb.

    Of all its numbers, the block is what the notebook cumulants_and_physics finds it to be.
    """
    heads, n, d_h, d_emb = 2, 5, 3, 7
    x, W_O, W_V = np.ones((n, d_emb)), np.ones((heads, d_emb, d_h)), np.ones((heads, d_h, d_emb))
    folded = np.einsum("hei,hij,nj->hne", W_O, W_V, x)
    assert folded.shape == (heads, n, d_emb)  # not d_h: as long as the block's output
    with pytest.raises(ValueError, match="could not be broadcast"):
        np.einsum("hei,hij,nj->hne", W_O, W_V, x[:, :d_h])


def test_the_maximum_is_associative():
    """2024 and 2025 §5.1: it only compares, and three numbers stand in one of 13 orders."""
    triples = itertools.product(range(3), repeat=3)
    orders = {tuple(sorted(set(x)).index(a) for a in x) for x in triples}
    assert len(orders) == 13

    def associative(f):
        return all(f(t, f(r, s)) == f(f(t, r), s) for r, s, t in orders)

    assert associative(np.maximum) and not associative(lambda x, y: (x + y) / 2)


def test_algorithm_2_needs_the_number_that_algorithm_1_returns():
    """It returns O = F − m. With F itself, which "lse" names, the result is e^m times too small."""
    rng = np.random.default_rng(0)
    s, v = rng.normal(size=10), rng.normal(size=(10, 2))
    m, F = s.max(), np.log(np.exp(s).sum())
    attention = np.exp(s) @ v / np.exp(s).sum()
    for O, times in ((F - m, 1), (F, np.exp(-m))):
        close(np.exp(s - m - O) @ v, times * attention)


# Algorithm 3, and what the listings call


@pytest.mark.parametrize(("dtype", "keys"), [("float16", 18), ("bfloat16", 88), ("float32", 88)])
def test_the_maximum_of_exponentials_underflows(dtype, keys):
    """2024 Algorithm 3, steps 4-7, two chunks of zero scores: n e^-m = 0 from so many keys on."""

    def run(t):  # d = e^lse = t, n = the sum of t values 1
        d = n = jnp.asarray(t, dtype)
        m = jnp.maximum(d, d)
        return (2 * n * jnp.exp(-m)) / (2 * d * jnp.exp(-m))

    assert run(keys - 1) == 1 and jnp.isnan(run(keys))


def test_a_scale_of_one_leaves_few_keys():
    """The listings' softmax_scale: of 4,096 random keys of size 128 some two or three count."""
    rng = np.random.default_rng(0)
    s = rng.normal(size=(200, 128)) @ rng.normal(size=(4096, 128)).T

    def effective(s):  # the exponential of the entropy, in the middle of 200 queries
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return np.median(np.exp(-np.sum(p * np.log(np.maximum(p, 1e-300)), axis=1)))

    assert effective(s) < 5 and effective(s / np.sqrt(128)) > 2000


def test_the_listings_call_of_the_kernel(flash):
    """On the flash-attn-jax of today: the option window_size has become two."""
    from flash_attn_jax.flash import _flash_mha_vjp

    config = {"softmax_scale": 1.0, "is_causal": False, "window_size": (-1, -1)}
    x = jax.ShapeDtypeStruct((1, 1, 2, 64), jnp.float16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_size'"):
        jax.eval_shape(lambda x: _flash_mha_vjp.fwd(x, x, x, config), x)


def test_the_ring_of_the_footnote_is_there(flash):
    """2024, footnote 1: flash_attn_jax's ring attends to a chunk by FlashAttention 2 in each step.

    The package itself calls it no more, and it calls the kernel by an option that has become two.
    """
    from flash_attn_jax.flash_fwd import flash_mha_fwd
    from flash_attn_jax.ring_attention import ring_fwd

    def kernel(q, k, v, window_size, **options):
        left, right = window_size
        return flash_mha_fwd(q, k, v, window_size_left=left, window_size_right=right, **options)

    def lowered(mha_fwd):
        ring = functools.partial(ring_fwd, axis_name="kv", axis_size=4, mha_fwd=mha_fwd)
        specs = {"in_specs": P(None, "kv"), "out_specs": (P(None, "kv"), P(None, None, "kv"))}
        mesh = AbstractMesh((4,), ("kv",))
        x = jax.ShapeDtypeStruct((1, 4 * 128, 2, 64), jnp.float16)
        run = jax.jit(jax.shard_map(ring, mesh=mesh, **specs, check_vma=False))
        return run.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()

    text = lowered(kernel)
    (call,) = [line for line in text.splitlines() if "custom_call @flash_mha_fwd(" in line]
    assert call.count("tensor<1x128x2x64xf16>") == 4  # q, k, v and the output: one device's
    sends = [line for line in text.splitlines() if "collective_permute" in line]
    assert sum("tensor<1x128x2x64xf16>" in line for line in sends) == 2  # keys, and values
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_size'"):
        lowered(flash_mha_fwd)


def test_the_query_has_to_reach_every_device():
    """2024 and 2025 §6.2: in a tree, b·d numbers. In a ring all keys come to who has the query."""
    b, n, h, d, p = 2, 64, 8, 16, 4
    mesh, heads, cache = kv_mesh(jax.devices()[:p]), P(None, None, "kv"), P(None, "kv")
    q, k, v = draw(b=b, l=1, n=n, h=h, h_kv=h, d=d)
    sharding = NamedSharding(mesh, cache)
    run = jax.jit(functools.partial(tree_decode, sharding=sharding))
    for spec, gathered in ((heads, 8 * b * h * d // p), (P(), 0)):
        dealt = jax.device_put(q, NamedSharding(mesh, spec))
        found = collectives(run.lower(dealt, *jax.device_put((k, v), sharding)).compile())
        assert sum(c.total_bytes for c in found if c.kind == "all-gather") == gathered

    def ring(q, k, v):  # q: a device's own heads

        def mine(x):
            first = jax.lax.axis_index("kv") * (h // p)
            return jax.lax.dynamic_slice_in_dim(x, first, h // p, axis=2)

        state = attend(q, mine(k), mine(v))
        for _ in range(p - 1):
            k, v = jax.lax.ppermute((k, v), "kv", [(i, (i + 1) % p) for i in range(p)])
            state = merge(state, attend(q, mine(k), mine(v)))
        return finalize(state)

    specs = {"in_specs": (heads, cache, cache), "out_specs": heads}
    check(jax.jit(jax.shard_map(ring, mesh=mesh, **specs, check_vma=False))(q, k, v), q, k, v)


def test_the_gradient_in_the_input_is_a_modified_attention():
    """2024 §2 on Hoover et al.: how a token attends, and how it is attended to."""
    rng = np.random.default_rng(4)
    W_Q, W_K, x = *rng.normal(size=(2, 4, 4)), rng.normal(size=(6, 4))

    def lse(x):
        return jax.nn.logsumexp(x @ W_Q.T @ (x @ W_K.T).T, axis=1).sum()

    q, k = x @ W_Q.T, x @ W_K.T
    weights = dense_weights(q[None, :, None], k[None, :, None], scale=1.0)[0][0, 0]
    as_query, as_key = weights @ k @ W_Q, weights.T @ q @ W_K
    gradient = jax.jit(jax.grad(lse))(x)
    close(gradient, as_query + as_key)
    assert not np.allclose(gradient, as_query)
