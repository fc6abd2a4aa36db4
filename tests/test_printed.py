"""What the papers print, run as it is printed: equations and algorithms, slips and listings."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

from treeattn import (
    attend,
    attention_from_energy,
    causal_energy,
    collectives,
    energy,
    finalize,
    kv_mesh,
    merge,
    merge_across,
    tree_decode,
)
from treeattn.program import total_bytes

close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)


def sequence(seed=0, n=5, d=4, dv=3):
    """(q, k, v) of a causal sequence, its weights (n, n) and its attention (n, dv)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(n, size)) for size in (d, d, dv))
    terms = np.exp(q @ k.T / np.sqrt(d)) * np.tri(n)
    weights = terms / terms.sum(1, keepdims=True)
    return q, k, v, weights, weights @ v


def test_running_sums_are_attention():
    """2024 eq. 2-4 (2025: 1-3), a key at a time, without the weights of all queries and keys."""
    q, k, v, _, wanted = sequence()
    for i in range(5):
        n, d = np.zeros(3), 0.0
        for k_a, v_a in zip(k[: i + 1], v[: i + 1], strict=True):
            s = np.exp(sum(q[i, A] * k_a[A] for A in range(4)) / 2)  # scale 1/√4
            n, d = n + v_a * s, d + s
        close(n / d, wanted[i])


def test_equation_21_takes_the_energy_away_too_often():
    """2024: F inside the double sum, N·d_v times; 2025 eq. 30 has it once. Both at ζ = 0."""
    q, k, v, _, wanted = sequence()

    def gamma(zeta, z, times):
        return jnp.sum(z * zeta) - times * causal_energy(zeta, q, k, v)

    slopes = jax.jit(jax.grad(gamma, argnums=(0, 1)))
    zero = np.zeros((5, 3))
    for times, z, stationary in (
        (1, wanted, True),
        (15, wanted, False),
        (15, 15 * wanted, True),
    ):
        in_zeta, in_z = slopes(zero, z, times)
        assert np.allclose(in_zeta, 0, atol=1e-12) == stationary
        assert not np.any(in_z)  # which is ζ
    assert np.all(slopes(zero + 0.1, wanted, 1)[1])  # and is 0 nowhere else


def test_a_source_for_each_key_finds_what_it_receives():
    """2024 eq. 36 (2025: 35) has ζ_a: its gradient is v_j times a column's sum of weights."""
    q, k, v, weights, wanted = sequence()

    def f_tot(zeta, of, shift):
        products = zeta @ v.T if of == "query" else jnp.sum(zeta * v, axis=1)[None]
        s = q @ k.T / 2 + products - shift[:, None]
        return jnp.log(jnp.sum(jnp.exp(s) * np.tri(5), axis=1)).sum()

    slopes, zero = jax.jit(jax.grad(f_tot), static_argnums=1), np.zeros((5, 3))
    close(slopes(zero, "key", np.zeros(5)), v * weights.sum(0)[:, None])
    assert not np.allclose(slopes(zero, "key", np.zeros(5)), wanted)
    # 2024 eq. 37-39 (2025: 36-38): with ζ_i, any constants m_i leave the gradient as it is.
    for shift in (np.zeros(5), np.random.default_rng(1).normal(size=5)):
        close(slopes(zero, "query", shift), wanted)


def test_values_folded_with_the_output_projection():
    """2024 eq. 18-20 (2025: 27-29): with one source for all heads, and W_V's inner index summed."""
    rng = np.random.default_rng(2)
    heads, n, d_h, d_emb = 2, 5, 3, 7
    x = rng.normal(size=(n, d_emb))
    W_Q, W_K, W_V = rng.normal(size=(3, heads, d_h, d_emb)) / 2
    W_O = rng.normal(size=(heads, d_emb, d_h))
    q, k, v = (np.einsum("hij,nj->hni", W, x) for W in (W_Q, W_K, W_V))
    folded = np.einsum("hei,hij,nj->hne", W_O, W_V, x)
    assert folded.shape == (heads, n, d_emb)  # not d_h: as long as the block's output
    # As printed, x has an intra-head index: W_V then meets d_h numbers, and has d_emb.
    with pytest.raises(ValueError, match="could not be broadcast"):
        np.einsum("hei,hij,nj->hne", W_O, W_V, x[:, :d_h])

    def block(zeta, values):
        return sum(causal_energy(zeta, q[h], k[h], values[h]) for h in range(heads))

    terms = np.exp(np.einsum("hld,hnd->hln", q, k) / np.sqrt(d_h)) * np.tri(n)
    each = terms / terms.sum(-1, keepdims=True) @ v
    wanted = np.einsum("hei,hni->ne", W_O, each)
    close(jax.jit(jax.grad(block))(np.zeros((n, d_emb)), folded), wanted)


def test_log_sum_exp_and_maximum_are_associative():
    """2024 and 2025 §5.1, the two displays without a number."""
    R, S, T = sp.symbols("R S T", real=True)

    def lse(x, y, parts=1):
        return sp.log((sp.exp(x) + sp.exp(y)) / parts)

    assert sp.simplify(lse(T, lse(R, S)) - lse(lse(T, R), S)) == 0
    mean = functools.partial(lse, parts=2)
    assert sp.simplify(mean(T, mean(R, S)) - mean(mean(T, R), S)) != 0
    # A maximum only compares: three numbers stand in one of 13 orders, ties included.
    triples = itertools.product(range(3), repeat=3)
    orders = {tuple(sorted(set(x)).index(a) for a in x) for x in triples}
    assert len(orders) == 13

    def associative(f):
        return all(f(t, f(r, s)) == f(f(t, r), s) for r, s, t in orders)

    assert associative(lambda x, y: x if x > y else y) and associative(np.maximum)
    assert not associative(lambda x, y: (x + y) / 2)


# Algorithms 1 and 2, over a list of shards


def algorithm_1(zeta, q, shards, hold=lambda m: m):
    """(O, m), as it is printed; `hold` is what is done to the maximum."""
    r = [k @ q + v @ zeta for k, v in shards]
    m = hold(functools.reduce(jnp.maximum, [jnp.max(x) for x in r]))
    sums = [jnp.log(jnp.sum(jnp.exp(x - m))) for x in r]
    return functools.reduce(jnp.logaddexp, sums), m


def algorithm_2(q, shards, m, O):
    return sum(jnp.exp(k @ q - m - O) @ v for k, v in shards)


@pytest.mark.parametrize("p", [1, 2, 5])
def test_algorithms_1_and_2(p):
    """O is F − m; differentiated as printed it gives attention − v_argmax; held, attention."""
    rng = np.random.default_rng(p)
    q, k, v = (rng.normal(size=size) for size in (3, (10, 3), (10, 2)))
    zero = np.zeros(2)
    shards = list(zip(np.split(k, p), np.split(v, p), strict=True))
    weights = np.exp(k @ q) / np.exp(k @ q).sum()
    O, m = jax.jit(algorithm_1)(zero, q, shards)
    close(O + m, np.log(np.exp(k @ q).sum()))  # F(0)

    def slope(f):
        return jax.jit(jax.grad(f))(zero)

    as_printed = slope(lambda zeta: algorithm_1(zeta, q, shards)[0])
    close(as_printed, weights @ v - v[np.argmax(k @ q)])
    held = functools.partial(algorithm_1, hold=jax.lax.stop_gradient)
    close(slope(lambda zeta: held(zeta, q, shards)[0]), weights @ v)
    close(slope(lambda zeta: sum(algorithm_1(zeta, q, shards))), weights @ v)
    # Table I's m, the maximum of q·k without the source, is a constant of that kind.
    tables = functools.partial(algorithm_1, hold=lambda _: jnp.max(k @ q))
    close(slope(lambda zeta: tables(zeta, q, shards)[0]), weights @ v)
    # Algorithm 2 needs that O, and is too small by e^m with the energy itself.
    close(algorithm_2(q, shards, m, O), weights @ v)
    close(algorithm_2(q, shards, m, O + m), weights @ v * np.exp(-m))


# Algorithm 3 and the listings


@pytest.mark.parametrize(("dtype", "keys"), [("float16", 18), ("bfloat16", 88), ("float32", 88)])
def test_the_maximum_of_exponentials_underflows(dtype, keys):
    """2024 Algorithm 3, steps 4-7, two chunks of zero scores: n e^-m = 0 from so many keys on."""

    def run(t):  # d = e^lse = t, n = the sum of t values 1
        d = n = jnp.asarray(t, dtype)
        m = jnp.maximum(d, d)
        return (2 * n * jnp.exp(-m)) / (2 * d * jnp.exp(-m))

    assert run(keys - 1) == 1 and jnp.isnan(run(keys))


def stand_in(q, k, v, scale):
    """What the listings' kernel returns: out (b, l, h, d) and lse (b, h, l)."""
    out, lse = finalize(attend(q, k, v, scale=scale))
    return out.astype(q.dtype), lse.transpose(0, 2, 1)


def listing_2024(q, k, v, scale):
    res, lse = stand_in(q, k, v, scale)
    lse = lse.astype(q.dtype)
    num = res * jnp.exp(lse)
    a_max = jax.lax.pmax(lse, "kv")
    num = jax.lax.psum(num * jnp.exp(-a_max), "kv")
    return num / jax.lax.psum(jnp.exp(lse - a_max), "kv")


def listing_2025(q, k, v, scale):
    res, lse = stand_in(q, k, v, scale)
    a_max = jax.lax.pmax(lse, "kv")
    num = jax.lax.psum(res * jnp.exp(lse - a_max), "kv")
    return num / jax.lax.psum(jnp.exp(lse - a_max), "kv")


def over_devices(listing, scale=1.0):
    specs = {"in_specs": (P(), P(None, "kv"), P(None, "kv")), "out_specs": P()}
    body = functools.partial(listing, scale=scale)
    return jax.jit(jax.shard_map(body, mesh=kv_mesh(jax.devices()[:2]), **specs))


@pytest.mark.parametrize("listing", [listing_2024, listing_2025])
def test_the_listings_want_a_batch_of_one(listing):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 3, 4)) for n in (1, 8, 8))
    run = over_devices(listing)
    one = [x[:1] for x in (q, k, v)]
    close(run(*one), dense_attention(*one, scale=1.0))
    assert run(q, k, v).shape == (2, 2, 3, 4)  # without an error; right is (2, 1, 3, 4)


@pytest.mark.parametrize(("listing", "finite"), [(listing_2024, False), (listing_2025, True)])
def test_the_listings_in_half_precision(listing, finite):
    """e^lse overflows above lse 11.09 in float16; scores at the listings' scale of 1 are beyond."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 4, 64)), jnp.float16) for n in (1, 4096, 4096))
    out = over_devices(listing)(q, k, v)
    assert np.isfinite(out).all() == finite and np.isnan(out).all() != finite


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
    mesh = kv_mesh(jax.devices()[:p])

    def gathered(spec):
        def array(length, spec):
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct((b, length, h, d), jnp.float32, sharding=sharding)

        cache = array(n, P(None, "kv"))
        run = jax.jit(functools.partial(tree_decode, sharding=NamedSharding(mesh, P(None, "kv"))))
        found = collectives(run.lower(array(1, spec), cache, cache).compile())
        return total_bytes(c for c in found if c.kind == "all-gather")

    assert gathered(P(None, None, "kv")) == 4 * b * h * d // p  # what each puts in of its heads
    assert gathered(P()) == 0

    def mine(x):  # a device's share of the heads
        first = jax.lax.axis_index("kv") * (h // p)
        return jax.lax.dynamic_slice_in_dim(x, first, h // p, axis=2)

    def tree(q, k, v):
        others = jnp.arange(h) // (h // p) != jax.lax.axis_index("kv")
        state = attend(jnp.where(others[:, None], 0.0, q), k, v)
        return mine(finalize(merge_across(state, "kv"))[0])

    def ring(q, k, v):
        state = None
        for _ in range(p):
            seen = attend(mine(q), mine(k), mine(v))
            state = seen if state is None else merge(state, seen)
            k, v = jax.lax.ppermute((k, v), "kv", [(i, (i + 1) % p) for i in range(p)])
        return finalize(state)[0]

    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(b, length, h, d)) for length in (1, n, n))
    for method, right in ((tree, False), (ring, True)):
        specs = {"in_specs": (P(), P(None, "kv"), P(None, "kv")), "out_specs": P(None, None, "kv")}
        out = jax.jit(jax.shard_map(method, mesh=mesh, **specs, check_vma=False))(q, k, v)
        assert np.allclose(out, dense_attention(q, k, v), atol=1e-12) == right


# Other people's energies


def test_hopfield_networks_tie_values_to_keys():
    """2024 §2: an update is attention with v = k, a gradient step; free values have no energy."""
    rng = np.random.default_rng(3)
    q, patterns, beta = rng.normal(size=4), rng.normal(size=(9, 4)), 4.0

    def hopfield(xi):
        return xi @ xi / 2 - energy(jnp.zeros(4), xi, patterns, patterns, scale=beta) / beta

    update = attention_from_energy(q, patterns, patterns, scale=beta)
    close(update, q - jax.jit(jax.grad(hopfield))(q))
    values = rng.normal(size=(9, 4))
    for v, symmetric in ((patterns, True), (values, False)):  # a gradient's Jacobian is
        jacobian = jax.jit(jax.jacobian(attention_from_energy))(q, patterns, v)
        assert np.allclose(jacobian, jacobian.T, atol=1e-12) == symmetric


def test_the_gradient_in_the_input_is_a_modified_attention():
    """2024 §2 on Hoover et al.: how a token attends, and how it is attended to."""
    rng = np.random.default_rng(4)
    W_Q, W_K, x = *rng.normal(size=(2, 4, 4)), rng.normal(size=(6, 4))

    def lse(x):
        return jax.nn.logsumexp(x @ W_Q.T @ (x @ W_K.T).T, axis=1).sum()

    s = x @ W_Q.T @ (x @ W_K.T).T
    weights = np.exp(s - s.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    as_query, as_key = weights @ (x @ W_K.T) @ W_Q, weights.T @ (x @ W_Q.T) @ W_K
    gradient = jax.jit(jax.grad(lse))(x)
    close(gradient, as_query + as_key)
    assert not np.allclose(gradient, as_query)


def test_attention_is_a_posterior_mean_under_one_prior():
    """2024 §2, Singh & Buckley: the query a noisy key, long keys favoured; not a uniform prior."""
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=4), rng.normal(size=(9, 4)), rng.normal(size=(9, 3))
    variance = 2.0  # 1 / scale
    likelihood = np.exp(-((q - k) ** 2).sum(1) / (2 * variance))
    for prior, right in ((np.exp((k**2).sum(1) / (2 * variance)), True), (np.ones(9), False)):
        mean = prior * likelihood @ v / (prior @ likelihood)
        assert np.allclose(mean, attention_from_energy(q, k, v), rtol=1e-12) == right
