"""F, its gradient and its higher derivatives, against plain NumPy sums in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeattn
from treeattn import attention_from_energy, causal_energy, cumulant, energy, log_likelihood
from treeattn.idea.energy import log_sum_exp

# (n, d, dv): one key, dv ≠ d both ways, many keys
SHAPES = [(1, 1, 1), (5, 4, 3), (7, 2, 6), (40, 8, 1)]
MASKS = ["none", "all", "one", "random", "nothing"]
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


@jax.jit
def derivatives(zeta, q, k, v, mask=None):
    """F(ζ), ∇F(ζ), and the cumulants of order 0 to 3: one program a shape."""
    f, gradient = jax.value_and_grad(energy)(zeta, q, k, v, mask=mask)
    return f, gradient, [cumulant(order, q, k, v, mask=mask) for order in range(4)]


def draw(n, d, dv, mask, seed, dtype=np.float64):
    """(zeta, q, k, v), mask: the mask of that kind, with at least one False if it hides any."""
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in ((dv,), (d,), (n, d), (n, dv))]
    visible = {
        "none": None,
        "all": np.ones(n, bool),
        "one": np.arange(n) == rng.integers(n),
        "random": rng.random(n) < 0.5,
        "nothing": np.zeros(n, bool),
    }
    return arrays, visible[mask]


def brute_force(zeta, q, k, v, mask, scale=None):
    """(F(ζ), the tilted weights (n,)): a sum over the keys, one Python float at a time."""
    scale = 1 / np.sqrt(len(q)) if scale is None else scale
    keys = range(len(k)) if mask is None else np.flatnonzero(mask)
    terms = np.zeros(len(k))
    for a in keys:
        terms[a] = np.exp(scale * np.dot(q, k[a]) + np.dot(zeta, v[a]))
    total = sum(terms)
    return (np.log(total), terms / total) if total else (-np.inf, terms)


cases = given(
    shape=st.sampled_from(SHAPES), mask=st.sampled_from(MASKS), seed=st.integers(0, 2**32 - 1)
)


@cases
def test_energy_and_its_gradient_at_any_source(shape, mask, seed):
    (zeta, q, k, v), mask = draw(*shape, mask, seed)
    f, weights = brute_force(zeta, q, k, v, mask)
    f_jax, gradient, _ = derivatives(zeta, q, k, v, mask)
    close(f_jax, f)
    close(gradient, weights @ v)


@cases
def test_cumulants_are_central_moments_of_the_values(shape, mask, seed):
    (zeta, q, k, v), mask = draw(*shape, mask, seed)
    f, p = brute_force(0 * zeta, q, k, v, mask)
    mean = p @ v
    c = v - mean
    _, _, k = derivatives(zeta, q, k, v, mask)
    close(k[0], f)
    close(k[1], mean)
    close(k[2], np.einsum("a,aA,aB->AB", p, c, c))
    close(k[3], np.einsum("a,aA,aB,aC->ABC", p, c, c, c))


def test_the_fourth_cumulant_is_not_the_fourth_central_moment():
    (_, q, k, v), _ = draw(7, 2, 2, "none", 0)
    _, p = brute_force(np.zeros(2), q, k, v, None)
    c = v - p @ v
    moment = np.einsum("a,aA,aB,aC,aD->ABCD", p, c, c, c, c)
    s = np.einsum("a,aA,aB->AB", p, c, c)
    pairings = (
        np.einsum("AB,CD->ABCD", s, s)
        + np.einsum("AC,BD->ABCD", s, s)
        + np.einsum("AD,BC->ABCD", s, s)
    )
    k4 = jax.jit(cumulant, static_argnums=0)(4, q, k, v)
    close(k4, moment - pairings)
    assert not np.allclose(k4, moment)


@pytest.mark.parametrize("scale", [1.0, 0.25, 2])
def test_scale_multiplies_the_scores_only(scale):
    (zeta, q, k, v), _ = draw(5, 4, 3, "none", 1)
    close(energy(zeta, q, k, v, scale=scale), brute_force(zeta, q, k, v, None, scale)[0])


@cases
def test_the_gradient_lies_in_the_convex_hull(shape, mask, seed):
    """Attention is an average: no direction sees it outside the visible values."""
    (zeta, q, k, v), mask = draw(*shape, mask, seed)
    visible = v if mask is None else v[mask]
    if len(visible):
        _, z, _ = derivatives(0 * zeta, q, k, v, mask)
        assert np.all(z <= visible.max(0) + 1e-12) and np.all(z >= visible.min(0) - 1e-12)
        assert zeta @ z <= (visible @ zeta).max() + 1e-12


@pytest.mark.parametrize("n, d, dv", SHAPES)
def test_causal_energy(n, d, dv):
    (_, _, k, v), _ = draw(n, d, dv, "none", 2)
    rng = np.random.default_rng(3)
    q, zeta = rng.normal(size=(n, d)), rng.normal(size=(n, dv))
    rows = [brute_force(zeta[i], q[i], k[: i + 1], v[: i + 1], None) for i in range(n)]
    close(jax.jit(causal_energy)(zeta, q, k, v), sum(f for f, _ in rows))
    gradient = jax.jit(jax.grad(causal_energy))(zeta, q, k, v)
    close(gradient, np.stack([p @ v[: i + 1] for i, (_, p) in enumerate(rows)]))


def test_the_cross_hessians_of_causal_energy_are_zero():
    (_, q, k, v), _ = draw(5, 4, 3, "none", 2)
    rng = np.random.default_rng(3)
    q, zeta = rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
    hessian = jax.jit(jax.hessian(causal_energy))(zeta, q, k, v)  # (n, dv, n, dv)
    for i in range(5):
        assert not np.any(np.delete(hessian[i], i, axis=1))
        p = brute_force(zeta[i], q[i], k[: i + 1], v[: i + 1], None)[1]
        close(hessian[i, :, i], np.cov(v[: i + 1].T, aweights=p, ddof=0))


def printed(zeta, q, k, v, *, source_of="query", hold=lambda m: m):
    """F_tot in one line of NumPy each, to be mutated: `hold` is what is done to the maximum."""
    ours = zeta @ v.T if source_of == "query" else jnp.sum(zeta * v, axis=-1)
    s = jnp.where(np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]) + ours, -jnp.inf)
    m = hold(jnp.max(s, axis=1))
    return jnp.sum(jnp.log(jnp.sum(jnp.exp(s - m[:, None]), axis=1)))


@pytest.mark.parametrize(
    "f, is_attention",
    [
        (causal_energy, True),
        (functools.partial(printed, hold=jax.lax.stop_gradient), True),
        (printed, False),  # the maximum not stopped
        (functools.partial(printed, hold=jax.lax.stop_gradient, source_of="key"), False),
    ],
    ids=["ours", "written out", "maximum not stopped", "ζ_a for ζ_i"],
)
def test_mutations_are_caught(f, is_attention):
    (_, _, k, v), _ = draw(5, 4, 3, "none", 9)
    q = np.random.default_rng(10).normal(size=(5, 4))
    weights = [brute_force(np.zeros(3), q[i], k[: i + 1], v[: i + 1], None)[1] for i in range(5)]
    rows = np.stack([p @ v[: i + 1] for i, p in enumerate(weights)])
    gradient = jax.jit(jax.grad(f))(np.zeros((5, 3)), q, k, v)
    assert np.allclose(gradient, rows, rtol=1e-12, atol=1e-12) == is_attention


def test_vmap_gives_causal_grouped_query_attention_and_its_gradients():
    batch, length, kv_heads, group, d, dv = 2, 6, 2, 3, 4, 3
    rng = np.random.default_rng(11)
    q = rng.normal(size=(batch, length, kv_heads * group, d))
    k, v = (rng.normal(size=(batch, length, kv_heads, size)) for size in (d, dv))
    mask = np.tri(length, dtype=bool)

    def one(q, k, v, mask):
        return attention_from_energy(q, k, v, mask=mask)

    queries = jax.vmap(one, in_axes=(0, None, None, 0))
    heads = jax.vmap(queries, in_axes=(1, None, None, None), out_axes=1)
    kv = jax.vmap(heads, in_axes=(1, 1, 1, None), out_axes=1)
    rows = jax.vmap(kv, in_axes=(0, 0, 0, None))

    def by_energy(q, k, v):
        out = rows(q.reshape(batch, length, kv_heads, group, d), k, v, mask)
        return out.reshape(batch, length, kv_heads * group, dv)

    def dense(q, k, v):
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        s = jnp.einsum("blhd,bnhd->bhln", q, k) / np.sqrt(d)
        return jnp.einsum("bhln,bnhv->blhv", jax.nn.softmax(jnp.where(mask, s, -jnp.inf)), v)

    cotangent = rng.normal(size=(batch, length, kv_heads * group, dv))

    def everything(f):
        out, pull = jax.vjp(jax.jit(f), q, k, v)
        return [out, *pull(cotangent)]

    for a, b in zip(everything(by_energy), everything(dense), strict=True):
        close(a, b)
    close(by_energy(q, k, v), treeattn.attention(q, k, v, mask=mask[None, None]))


def test_no_queries_and_no_keys():
    k = v = np.zeros((0, 3))
    assert causal_energy(v, k, k, v) == 0
    assert energy(np.ones(3), np.ones(3), k, v) == -np.inf
    close(attention_from_energy(np.ones(3), k, v), np.zeros(3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_visible_gives_minus_infinity_and_zero_derivatives(dtype):
    (zeta, q, k, v), nothing = draw(5, 4, 3, "nothing", 4, dtype)
    f, gradient, cumulants = derivatives(zeta, q, k, v, nothing)
    assert f == cumulants[0] == -np.inf
    for derivative in (gradient, *cumulants[1:]):
        assert not np.any(derivative)

    @jax.jit
    def gradients(zeta, q, k, v):
        """In all inputs: of F, and of a loss through attention."""

        def loss(q, k, v):
            return jnp.sum(attention_from_energy(q, k, v, mask=nothing) ** 2)

        of_f = jax.grad(energy, argnums=(0, 1, 2, 3))(zeta, q, k, v, mask=nothing)
        return *of_f, *jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for gradient in gradients(zeta, q, k, v):
        assert not np.any(gradient)
    assert log_likelihood(zeta, zeta, q, k, v, mask=nothing) == np.inf


@pytest.mark.parametrize("s", [[-np.inf] * 3, [0.5, -np.inf, 1.5]], ids=["no keys", "two keys"])
def test_hidden_scores_have_no_derivative(s):
    """Of log-sum-exp itself: with a mask in front of it, the mask would hide a NaN."""
    p = np.exp(s) / max(sum(np.exp(s)), 1e-300)
    close(jax.jit(jax.grad(log_sum_exp))(np.array(s)), p)
    close(jax.jit(jax.hessian(log_sum_exp))(np.array(s)), np.diag(p) - np.outer(p, p))


def test_what_masked_keys_hold_does_not_matter():
    (zeta, q, k, v), _ = draw(5, 4, 3, "none", 5)
    mask = np.array([True, False, True, False, True])
    worst = [np.where(mask[:, None], x, bad) for x, bad in ((k, np.inf), (v, np.nan))]

    @jax.jit
    def everything(k, v):
        f, gradients = jax.value_and_grad(energy, argnums=(0, 1))(zeta, q, k, v, mask=mask)
        return [f, *gradients, cumulant(2, q, k, v, mask=mask)]

    for a, b in zip(everything(k, v), everything(*worst), strict=True):
        close(a, b)
    gradient = jax.jit(jax.grad(energy, argnums=(2, 3)))(zeta, q, *worst, mask=mask)
    assert np.all(np.isfinite(gradient[0])) and not np.any(gradient[0][~mask])
    assert np.all(np.isfinite(gradient[1])) and not np.any(gradient[1][~mask])


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_scores_far_from_zero(shift):
    """exp(1e4) overflows; a difference of scores does not."""
    k, v = np.array([[shift], [shift + 1], [-shift]]), np.array([[1.0], [2.0], [3.0]])
    visible = np.array([True, True, False])
    p = 1 / (1 + np.e)
    close(energy(np.zeros(1), np.ones(1), k, v, mask=visible), shift + np.log(1 + np.e))
    close(attention_from_energy(np.ones(1), k, v, mask=visible), [p * 1 + (1 - p) * 2])
    close(cumulant(2, np.ones(1), k, v, mask=visible), [[p * (1 - p)]])


def test_a_score_out_of_range_takes_all_the_weight():
    q, k, v = (np.full(s, 1e30, "float32") for s in ((2,), (3, 2), (3, 2)))
    k[1:] *= -1
    v[:] = [[1, 2], [3, 4], [5, 6]]
    close(attention_from_energy(q, k, v), [1, 2])


@pytest.mark.parametrize(
    "dtype, sums", [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")]
)
def test_sums_are_in_float32_or_wider(dtype, sums):
    (zeta, q, k, v), _ = draw(40, 8, 4, "none", 6)
    zeta, q, k, v = (jnp.asarray(x, dtype) for x in (zeta, q, k, v))
    assert energy(zeta, q, k, v).dtype == cumulant(0, q, k, v).dtype == sums
    out = attention_from_energy(q, k, v)
    assert out.dtype == dtype
    exact = attention_from_energy(*(x.astype("float64") for x in (q, k, v)))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype("float64"), exact, rtol=0, atol=3 * eps)


def test_gamma_is_a_product_less_the_energy():
    (zeta, q, k, v), mask = draw(5, 4, 3, "random", 7)
    z = np.arange(3.0)
    expected = z @ zeta - brute_force(zeta, q, k, v, mask)[0]
    close(log_likelihood(zeta, z, q, k, v, mask=mask), expected)


def test_energy_is_the_lse_of_the_state():
    """At ζ = 0 this module and `attend` see the same sums."""
    (_, q, k, v), mask = draw(40, 8, 4, "random", 8)
    q4, k4, v4 = q[None, None, None], k[None, :, None], v[None, :, None]
    out, lse = treeattn.finalize(treeattn.attend(q4, k4, v4, mask=mask[None, None, None]))
    close(energy(np.zeros(4), q, k, v, mask=mask), lse.item())
    close(attention_from_energy(q, k, v, mask=mask), out.ravel())


GOOD = {"zeta": np.ones(3), "q": np.ones(4), "k": np.ones((5, 4)), "v": np.ones((5, 3))}


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("zeta", np.ones(4), ValueError),
        ("zeta", np.ones(3, int), TypeError),
        ("q", np.ones((1, 4)), ValueError),
        ("q", np.ones(4, complex), TypeError),
        ("q", [1.0] * 4, TypeError),
        ("k", np.ones((5, 3)), ValueError),
        ("k", np.ones(4), ValueError),
        ("v", np.ones((4, 3)), ValueError),
        ("mask", np.ones(4, bool), ValueError),
        ("mask", np.ones(5, int), TypeError),
        ("mask", [True] * 5, TypeError),
    ],
)
def test_bad_input_is_named(unchecked, name, bad, error):
    with pytest.raises(error, match=f"^{name}: expected"):
        energy(**{**GOOD, name: bad})


def test_other_bad_input_is_named(unchecked):
    zeta, q, k, v = GOOD.values()
    with pytest.raises(TypeError, match="one dtype"):
        energy(zeta, q.astype("float32"), k, v)
    with pytest.raises(TypeError, match="order"):
        cumulant(1.0, q, k, v)
    with pytest.raises(ValueError, match="order"):
        cumulant(-1, q, k, v)
    with pytest.raises(ValueError, match=r"^z: expected"):
        log_likelihood(zeta, np.ones(2), q, k, v)
    with pytest.raises(ValueError, match=r"^q: expected"):
        causal_energy(np.ones((5, 3)), np.ones((4, 4)), k, v)
    with pytest.raises(ValueError, match=r"^zeta: expected"):
        causal_energy(np.ones((4, 3)), k, k, v)
