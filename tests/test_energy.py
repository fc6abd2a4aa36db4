"""F, its gradient and its higher derivatives, against plain NumPy sums in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import dense_attention, dense_gradients

from treeattn import (
    attention_from_energy,
    causal_energy,
    cumulant,
    energy,
    log_likelihood,
    memory,
)
from treeattn.gradient import log_sum_exp

SHAPES = [(1, 1, 1), (7, 2, 6), (40, 8, 3)]  # (n, d, dv): one key; dv ≠ d both ways
MASKS = ["all", "one", "random", "nothing"]
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
attention = jax.jit(attention_from_energy)
kappa = jax.jit(cumulant, static_argnums=0)


@jax.jit
def derivatives(zeta, q, k, v, mask):
    """F(ζ), ∇F(ζ), and the cumulants of order 0 to 2: one program a shape."""
    f, gradient = jax.value_and_grad(energy)(zeta, q, k, v, mask=mask)
    return f, gradient, [cumulant(order, q, k, v, mask=mask) for order in range(3)]


def draw(n, d, dv, mask, seed, dtype=np.float64):
    """(zeta, q, k, v), and the mask of that kind."""
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
    k0, k1, k2 = derivatives(zeta, q, k, v, mask)[2]
    close(k0, f)
    close(k1, mean)
    close(k2, np.einsum("a,aA,aB->AB", p, c, c))


def test_higher_cumulants():
    """The third is the third central moment; the fourth is not the fourth."""
    (_, q, k, v), mask = draw(7, 2, 2, "random", 0)
    _, p = brute_force(np.zeros(2), q, k, v, mask)
    c = v - p @ v
    close(kappa(3, q, k, v, mask=mask), np.einsum("a,aA,aB,aC->ABC", p, c, c, c))
    moment = np.einsum("a,aA,aB,aC,aD->ABCD", p, c, c, c, c)
    s = np.einsum("a,aA,aB->AB", p, c, c)
    pairings = sum(np.einsum(f"{pairs}->ABCD", s, s) for pairs in ("AB,CD", "AC,BD", "AD,BC"))
    fourth = kappa(4, q, k, v, mask=mask)
    close(fourth, moment - pairings)
    assert not np.allclose(fourth, moment)


def test_scale_multiplies_the_scores_only():
    (zeta, q, k, v), _ = draw(5, 4, 3, "all", 1)

    @jax.jit
    def run(traced):
        return [energy(zeta, q, k, v, scale=scale) for scale in (None, 2, 1.0, traced)]

    wanted = [brute_force(zeta, q, k, v, None, scale)[0] for scale in (None, 2, 1.0, 0.25)]
    close(run(0.25), wanted)


@cases
def test_the_gradient_lies_in_the_convex_hull(shape, mask, seed):
    """Attention is an average: no direction sees it outside the visible values."""
    (zeta, q, k, v), mask = draw(*shape, mask, seed)
    visible = v[mask]
    if len(visible):
        _, z, _ = derivatives(0 * zeta, q, k, v, mask)
        assert np.all(z <= visible.max(0) + 1e-12) and np.all(z >= visible.min(0) - 1e-12)
        assert zeta @ z <= (visible @ zeta).max() + 1e-12


@pytest.mark.parametrize("n, d, dv", [(1, 1, 1), (7, 2, 6)])
def test_causal_energy(n, d, dv):
    (_, _, k, v), _ = draw(n, d, dv, "all", 2)
    rng = np.random.default_rng(3)
    q, zeta = rng.normal(size=(n, d)), rng.normal(size=(n, dv))
    rows = [brute_force(zeta[i], q[i], k[: i + 1], v[: i + 1], None) for i in range(n)]
    f, gradient = jax.jit(jax.value_and_grad(causal_energy))(zeta, q, k, v)
    close(f, sum(f for f, _ in rows))
    close(gradient, np.stack([p @ v[: i + 1] for i, (_, p) in enumerate(rows)]))


def test_the_cross_hessians_of_causal_energy_are_zero():
    (_, q, k, v), _ = draw(5, 4, 3, "all", 2)
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
    (_, _, k, v), _ = draw(5, 4, 3, "all", 9)
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

    w = rng.normal(size=(batch, length, kv_heads * group, dv))

    @jax.jit
    def run(*inputs):
        out, pull = jax.vjp(by_energy, *inputs)
        return [out, *pull(w)]

    wanted = [dense_attention(q, k, v, mask=mask), *dense_gradients(q, k, v, w, mask=mask)]
    for a, b in zip(run(q, k, v), wanted, strict=True):
        close(a, b)


def test_no_queries_and_no_keys():
    k = v = np.zeros((0, 3))
    assert causal_energy(v, k, k, v) == 0
    f, gradient = jax.jit(jax.value_and_grad(energy))(np.zeros(3), np.ones(3), k, v)
    assert f == -np.inf
    close(gradient, np.zeros(3))


def test_nothing_visible_gives_minus_infinity_and_zero_derivatives():
    """In all inputs: of F, of the covariance, and of a loss through attention."""
    (zeta, q, k, v), nothing = draw(5, 4, 3, "nothing", 4, "float32")

    @jax.jit
    def run(zeta, q, k, v):
        def loss(q, k, v):
            return jnp.sum(attention_from_energy(q, k, v, mask=nothing) ** 2)

        f, of_f = jax.value_and_grad(energy, argnums=(0, 1, 2, 3))(zeta, q, k, v, mask=nothing)
        gamma = log_likelihood(zeta, zeta, q, k, v, mask=nothing)
        third = cumulant(3, q, k, v, mask=nothing)
        return f, gamma, (*of_f, third, *jax.grad(loss, argnums=(0, 1, 2))(q, k, v))

    f, gamma, gradients = run(zeta, q, k, v)
    assert f == -np.inf and gamma == np.inf
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize("s", [[-np.inf] * 3, [0.5, -np.inf, 1.5]], ids=["no keys", "two keys"])
def test_hidden_scores_have_no_derivative(s):
    """Of log-sum-exp itself: with a mask in front of it, the mask would hide a NaN."""
    p = np.exp(s) / max(sum(np.exp(s)), 1e-300)
    close(jax.jit(jax.grad(log_sum_exp))(np.array(s)), p)
    close(jax.jit(jax.hessian(log_sum_exp))(np.array(s)), np.diag(p) - np.outer(p, p))


def test_what_masked_keys_hold_does_not_matter():
    (zeta, q, k, v), _ = draw(5, 4, 3, "all", 5)
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


def test_scores_far_from_zero():
    """exp(1e4) overflows; a difference of scores does not."""
    v, visible, p = np.array([[1.0], [2.0], [3.0]]), np.array([1, 1, 0], bool), 1 / (1 + np.e)
    for shift in (-1e4, 1e4):
        k = np.array([[shift], [shift + 1], [-shift]])
        f, _, (_, mean, covariance) = derivatives(np.zeros(1), np.ones(1), k, v, visible)
        close(f, shift + np.log(1 + np.e))
        close(mean, [p * 1 + (1 - p) * 2])
        close(covariance, [[p * (1 - p)]])


def test_a_score_out_of_range_takes_all_the_weight():
    q, k, v = (np.full(s, 1e30, "float32") for s in ((2,), (3, 2), (3, 2)))
    k[1:] *= -1
    v[:] = [[1, 2], [3, 4], [5, 6]]
    close(attention(q, k, v), [1, 2])


@pytest.mark.parametrize("dtype, sums", [("bfloat16", "float32"), ("float64", "float64")])
def test_sums_are_in_float32_or_wider(dtype, sums):
    (zeta, q, k, v), _ = draw(40, 8, 4, "all", 6)
    zeta, q, k, v = (np.asarray(x, jnp.dtype(dtype)) for x in (zeta, q, k, v))
    for f in (energy, lambda zeta, q, k, v: cumulant(0, q, k, v)):
        assert jax.eval_shape(f, zeta, q, k, v).dtype == sums
    out = attention(q, k, v)
    assert out.dtype == dtype
    exact = brute_force(np.zeros(4), *(x.astype("float64") for x in (q, k, v)), None)[1] @ v
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype("float64"), exact, rtol=0, atol=3 * eps)


def test_gamma_is_a_product_less_the_energy():
    (zeta, q, k, v), mask = draw(5, 4, 3, "random", 7)
    z = np.arange(3.0)
    expected = z @ zeta - brute_force(zeta, q, k, v, mask)[0]
    close(jax.jit(log_likelihood)(zeta, z, q, k, v, mask=mask), expected)


def test_gamma_has_a_saddle_at_attention():
    """[[−C, I], [I, 0]], C the covariance: as many directions down as up."""
    (_, q, k, v), mask = draw(12, 4, 3, "random", 12)

    @jax.jit
    def run(z):
        def gamma(x):
            return log_likelihood(x[:3], x[3:], q, k, v, mask=mask)

        at = jnp.concatenate([jnp.zeros(3), z])
        return jax.grad(gamma)(at), jax.hessian(gamma)(at)

    p = brute_force(np.zeros(3), q, k, v, mask)[1]
    gradient, hessian = run(p @ v)
    eye = np.eye(3)
    close(gradient, np.zeros(6))
    close(hessian, np.block([[-np.cov(v.T, aweights=p, ddof=0), eye], [eye, 0 * eye]]))
    np.testing.assert_array_equal(np.sign(np.linalg.eigvalsh(hessian)), [-1] * 3 + [1] * 3)


def flops(function, *shapes):
    """Operations of the compiled program, for float32 arrays of these shapes; and the program."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    program = jax.jit(function).lower(*arrays).compile()
    return program.cost_analysis()["flops"], program


def test_the_gradient_costs_a_constant_factor():
    """In operations, of keys twice as wide as values; and in memory, a few numbers a key."""
    n, d, dv = 1024, 64, 32
    shapes = (dv,), (d,), (n, d), (n, dv)
    both = jax.value_and_grad(energy)
    (count, program), (of_energy, _) = flops(both, *shapes), flops(energy, *shapes)
    assert abs(count / of_energy - (d + 2 * dv) / (d + dv)) < 0.02
    assert memory(program).temporary_bytes < 20 * n  # keys and values: 384 n


def test_all_queries_cost_quadratically():
    """2024 §1 and §3: four times the operations for twice the tokens; twice for one query."""
    for f, times in ((causal_energy, 4), (lambda z, q, k, v: energy(z[0], q[0], k, v), 2)):
        (small, _), (large, _) = (flops(f, *[(n, 64)] * 4) for n in (512, 1024))
        assert large / small == pytest.approx(times, rel=0.02)


def test_a_maximum_over_devices_has_no_derivative():
    """Why every maximum here is held fixed."""
    with pytest.raises(NotImplementedError, match="pmax"):
        jax.vmap(jax.grad(lambda x: x - jax.lax.pmax(x, "i")), axis_name="i")(np.ones(2))


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
        ("mask", [1] * 5, TypeError),
        ("mask", [True] * 4, ValueError),
        ("scale", np.nan, ValueError),
        ("scale", -np.inf, ValueError),
        ("scale", jnp.array(np.inf), ValueError),
        ("scale", np.ones(2), ValueError),
        ("scale", "1", TypeError),
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
    with pytest.raises(TypeError, match=r"^zeta: expected an array, got list"):
        log_likelihood([0.0], np.ones(1), q, k, v)
    with pytest.raises(ValueError, match=r"^q: expected a head_dim d of at least 1"):
        energy(zeta, q[:0], k[:, :0], v)
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, got nan"):
        causal_energy(np.ones((5, 3)), k, k, v, scale=np.nan)
    with pytest.raises(ValueError, match=r"^q: expected"):
        causal_energy(np.ones((5, 3)), np.ones((4, 4)), k, v)
    with pytest.raises(ValueError, match=r"^zeta: expected"):
        causal_energy(np.ones((4, 3)), k, k, v)
    with pytest.raises(ValueError, match=r"^v: expected a value for each of the 5 keys"):
        causal_energy(np.ones((4, 3)), k, k, v[:4])


def test_a_list_is_a_mask(unchecked):
    zeta, q, k, v = GOOD.values()
    mask = [True, False, True, False, False]
    run = jax.jit(lambda: jax.value_and_grad(energy)(zeta, q, k, v, mask=mask))
    close(run()[0], brute_force(zeta, q, k, v, np.array(mask))[0])
    close(run()[1], np.ones(3))
