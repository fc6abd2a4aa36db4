"""The papers' statements about the energy, proved in symbols for a small case left general.

Three keys, two value coordinates; scores, values and sources are free symbols. What the papers
print wrongly is here twice: as printed, shown to be wrong, and put right.
"""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp

from treeattn import (
    attention_from_energy,
    causal_energy,
    cumulant,
    energy,
    log_likelihood,
)
from treeattn.cost.work import flops

N, D = 3, 2
SCORES = sp.Matrix(N, N, sp.symbols("s1:4(1:4)", real=True))  # s_ia = q_i · k_a
VALUES = sp.Matrix(N, D, sp.symbols("v1:4(1:3)", real=True))
ZETA = sp.Matrix(N, D, sp.symbols("zeta1:4(1:3)", real=True))  # a source for each query
CELLS = list(product(range(N), range(D)))
AT_ZERO = {symbol: 0 for symbol in ZETA}


def same(a, b) -> bool:
    """a = b: over one denominator, the difference's numerator expands to nothing."""
    return sp.expand(sp.numer(sp.together(a - b))) == 0


def slope(f, *symbols):
    """The derivative at ζ = 0."""
    return sp.diff(f, *symbols).subs(AT_ZERO)


def row(i, source, shift=0):
    """Z_i(ζ) = Σ_{a ≤ i} exp(s_ia + source(i, a)·v_a − shift): row i of causal attention."""
    exponents = (SCORES[i, a] + source(i, a).dot(VALUES[a, :]) - shift for a in range(i + 1))
    return sum(map(sp.exp, exponents))


def of_query(i, a):
    return ZETA[i, :]


def of_key(i, a):
    return ZETA[a, :]


def weight(i, a):
    return sp.exp(SCORES[i, a]) / sum(sp.exp(SCORES[i, b]) for b in range(i + 1))


def attention(i, A):
    return sum(weight(i, a) * VALUES[a, A] for a in range(i + 1))


# One query, the last, sees all keys.
LAST, SOURCE = N - 1, ZETA[N - 1, :]
Z = row(LAST, of_query)
F_TOT = sum(sp.log(row(i, of_query)) for i in range(N))


def mean(f):
    """⟨f(a)⟩ under the last query's attention weights."""
    return sum(weight(LAST, a) * f(a) for a in range(N))


def test_softmax_is_the_gradient_of_log_sum_exp():  # v1 eq. 1, v2 eq. 4
    x = sp.symbols("x1:4", real=True)
    total = sum(map(sp.exp, x))
    assert all(same(sp.diff(sp.log(total), x_j), sp.exp(x_j) / total) for x_j in x)


def test_the_weights_sum_to_one():  # v1 eq. 6–9, v2 eq. 16–18
    assert all(same(sum(weight(i, a) for a in range(i + 1)), 1) for i in range(N))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_z_generates_moments_and_its_logarithm_cumulants(order):  # v1 eq. 10–15, v2 eq. 19–24
    for indices in product(range(D), repeat=order):
        if list(indices) != sorted(indices):
            continue  # derivatives commute
        symbols = [SOURCE[A] for A in indices]
        raw = mean(lambda a, indices=indices: sp.prod([VALUES[a, A] for A in indices]))
        assert same(slope(Z, *symbols) / Z.subs(AT_ZERO), raw)
        derivative = slope(sp.log(Z), *symbols)
        if order == 1:
            assert same(derivative, raw)
            continue
        centred = [[VALUES[a, A] - attention(LAST, A) for A in indices] for a in range(N)]
        assert same(derivative, mean(lambda a, centred=centred: sp.prod(centred[a])))
        assert not same(derivative, raw)


def test_causal_attention_is_the_gradient_of_f_tot():  # v1 eq. 16–17, v2 eq. 25–26
    assert all(same(slope(F_TOT, ZETA[i, A]), attention(i, A)) for i, A in CELLS)
    cross = {sp.diff(F_TOT, ZETA[i, A], ZETA[j, B]) for i, A in CELLS for j, B in CELLS if i != j}
    assert cross == {0}


def test_running_sums_are_attention():  # v1 eq. 2–4, v2 eq. 1–3
    for A in range(D):
        numerator, denominator = 0, 0
        for a in range(N):
            e = sp.exp(SCORES[LAST, a])
            numerator, denominator = numerator + VALUES[a, A] * e, denominator + e
        assert same(numerator / denominator, attention(LAST, A))


def test_the_taylor_series_of_z():  # v1 eq. 12, v2 eq. 21
    t = sp.Symbol("t")
    along = {x: t * x for x in SOURCE}
    series = sp.series((Z / Z.subs(AT_ZERO)).subs(along, simultaneous=True), t, 0, 4).removeO()
    help_of = [SOURCE.dot(VALUES[a, :]) for a in range(N)]
    for order in range(4):
        moment = mean(lambda a, order=order: help_of[a] ** order) / sp.factorial(order)
        assert same(series.coeff(t, order), moment)


def test_heads_add_up_for_a_shared_source_only():  # v1 eq. 18–20, v2 eq. 27–29
    """Two heads over two keys, the output projection folded into values of three coordinates."""
    scores = sp.Matrix(2, 2, sp.symbols("s1:3(1:3)", real=True))  # (head, key)
    v = [sp.Matrix(2, 1, sp.symbols(f"v{h}_1:3", real=True)) for h in (1, 2)]  # (key, d_h = 1)
    w_o = [sp.Matrix(1, 3, sp.symbols(f"w{h}_1:4", real=True)) for h in (1, 2)]  # (d_h, d_emb)
    shared = sp.Matrix(sp.symbols("zeta1:4", real=True))
    own = [sp.Matrix(sp.symbols(f"zeta{h}_1:4", real=True)) for h in (1, 2)]
    zero = {symbol: 0 for symbol in (*shared, *own[0], *own[1])}

    def total(sources):
        return sum(
            sp.log(
                sum(sp.exp(scores[h, a] + (v[h] * w_o[h])[a, :].dot(sources[h])) for a in (0, 1))
            )
            for h in (0, 1)
        )

    p = [[sp.exp(scores[h, a]) for a in (0, 1)] for h in (0, 1)]
    for A in range(3):
        heads = [sum(p[h][a] * v[h][a] for a in (0, 1)) / sum(p[h]) * w_o[h][A] for h in (0, 1)]
        assert same(sp.diff(total([shared, shared]), shared[A]).subs(zero), sum(heads))
        for h in (0, 1):  # a source each: that head's part, not the block's output
            derivative = sp.diff(total(own), own[h][A]).subs(zero)
            assert same(derivative, heads[h]) and not same(derivative, sum(heads))


def test_other_energies_have_the_same_gradient():  # v1 §7, "a unique energy"
    for f in (F_TOT + sum(x**2 for x in ZETA), sum(ZETA[c] * attention(*c) for c in CELLS)):
        assert all(same(slope(f, ZETA[i, A]), attention(i, A)) for i, A in CELLS)
        assert not same(slope(f, ZETA[5], ZETA[5]), slope(F_TOT, ZETA[5], ZETA[5]))


# Γ, and what its stationary point is


Z_SYMBOLS = sp.Matrix(N, D, sp.symbols("z1:4(1:3)", real=True))


def stationary(gamma):
    conditions = [sp.diff(gamma, symbol) for symbol in (*Z_SYMBOLS, *ZETA)]
    (point,) = sp.solve(conditions, [*ZETA, *Z_SYMBOLS], dict=True)
    return point


def test_gamma_is_stationary_at_attention():  # v1 eq. 22–25, v2 eq. 30–33
    point = stationary(sum(Z_SYMBOLS[c] * ZETA[c] for c in CELLS) - F_TOT)
    assert all(point[symbol] == 0 for symbol in ZETA)
    assert all(same(point[Z_SYMBOLS[c]], attention(*c)) for c in CELLS)


def test_v1_equation_21_as_printed_gives_n_d_times_attention():
    point = stationary(sum(Z_SYMBOLS[c] * ZETA[c] - F_TOT for c in CELLS))
    assert all(same(point[Z_SYMBOLS[c]], N * D * attention(*c)) for c in CELLS)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_every_hessian_of_gamma_is_indefinite(d):  # v1 eq. 26, v2 eq. 34
    """[[−C, I], [I, 0]] is congruent to [[0, I], [I, 0]], whatever the symmetric C."""
    C = sp.Matrix(d, d, lambda i, j: sp.Symbol(f"c{min(i, j)}{max(i, j)}", real=True))
    eye, zero = sp.eye(d), sp.zeros(d)
    hessian = sp.Matrix(sp.BlockMatrix([[-C, eye], [eye, zero]]))
    swap = sp.Matrix(sp.BlockMatrix([[zero, eye], [eye, zero]]))
    S = sp.Matrix(sp.BlockMatrix([[eye, zero], [-C / 2, eye]]))
    assert S.det() == 1
    assert sp.expand(S.T * swap * S - hessian) == sp.zeros(2 * d)
    assert swap.eigenvals() == {1: d, -1: d}


def test_free_energy_is_f_less_a_divergence():  # v1 §7, "a variational free energy"
    w = [*sp.symbols("w1 w2", positive=True)]
    w.append(1 - sum(w))
    f = sp.Symbol("F")
    tilt = [SCORES[LAST, a] + SOURCE.dot(VALUES[a, :]) for a in range(N)]
    score_and_entropy = sum(w[a] * (tilt[a] - sp.log(w[a])) for a in range(N))
    divergence = sum(w[a] * (sp.log(w[a]) - (tilt[a] - f)) for a in range(N))  # log P = tilt − F
    assert sp.expand(score_and_entropy - (f - divergence)) == 0


# The rest of the Bayesian reading, in numbers


def head(seed=0, n=12, d=4, dv=3):
    rng = np.random.default_rng(seed)
    return rng, (rng.normal(size=d), rng.normal(size=(n, d)), rng.normal(size=(n, dv)))


@pytest.fixture(scope="module")
def problem():
    """(rng, (q, k, v), joint(ζ, z as one vector), the saddle point, fit(z, precision))"""
    rng, (q, k, v) = head()
    dv = v.shape[1]

    def joint(x):
        return log_likelihood(x[:dv], x[dv:], q, k, v)

    @jax.jit
    def fit(z, precision=0.0):
        """argmax_ζ Γ(ζ, z) − precision/2 |ζ|², by damped Newton steps."""

        def loss(zeta):
            return precision / 2 * zeta @ zeta - log_likelihood(zeta, z, q, k, v)

        def step(_, zeta):
            move = jnp.linalg.solve(jax.hessian(loss)(zeta), jax.grad(loss)(zeta))
            return zeta - move / jnp.maximum(1, jnp.linalg.norm(move))

        return jax.lax.fori_loop(0, 60, step, jnp.zeros(dv))

    saddle = jnp.concatenate([jnp.zeros(dv), attention_from_energy(q, k, v)])
    return rng, (q, k, v), joint, saddle, fit


def test_the_saddle_and_its_flows(problem):
    rng, (q, k, v), joint, saddle, _ = problem
    dv = v.shape[1]
    eye = np.eye(dv)
    expected = np.block([[-cumulant(2, q, k, v), eye], [eye, 0 * eye]])
    hessian = jax.jit(jax.hessian(joint))(saddle)
    np.testing.assert_allclose(hessian, expected, atol=1e-12)
    np.testing.assert_array_equal(np.sign(np.linalg.eigvalsh(hessian)), [-1] * dv + [1] * dv)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def last_distance(x, signs):
        def velocity(x):
            return signs * jax.grad(joint)(x)

        def step(x, _):
            ahead = x + 0.02 * velocity(x + 0.01 * velocity(x))
            return jnp.where(jnp.linalg.norm(x) < 1e3, ahead, x), None

        return jnp.linalg.norm(jax.lax.scan(step, x, length=3000)[0] - saddle)

    starts = np.asarray(saddle) + 0.1 * rng.normal(size=(5, 2 * dv))
    for sign_zeta, sign_z in product((1.0, -1.0), repeat=2):
        distances = last_distance(starts, np.repeat([sign_zeta, sign_z], dv))
        if (sign_zeta, sign_z) == (1, -1):  # climb in ζ, descend in z
            assert np.all(distances < 1e-6)
        else:
            assert np.all(distances > 10)


def test_attention_is_the_minimum_of_the_dual(problem):
    rng, (q, k, v), _, saddle, fit = problem
    n, dv = v.shape
    p = np.asarray(jax.nn.softmax(k @ q / np.sqrt(len(q))))
    f0 = energy(np.zeros(dv), q, k, v)

    @jax.jit
    def dual(z):  # F*(z) and the tilted weights that attain it
        zeta = fit(z)
        weights = jax.nn.softmax(k @ q / jnp.sqrt(len(q)) + v @ zeta)
        return log_likelihood(zeta, z, q, k, v), weights

    np.testing.assert_allclose(dual(saddle[dv:])[0], -f0, rtol=1e-12)
    for w in rng.dirichlet(np.ones(n), size=20):
        value, tilted = dual(w @ v)
        np.testing.assert_allclose(tilted @ v, w @ v, atol=1e-9)
        np.testing.assert_allclose(value, np.sum(tilted * np.log(tilted / p)) - f0, atol=1e-9)
        assert -f0 < value < np.sum(w * np.log(w / p)) - f0


@pytest.mark.parametrize("precision", [0.0, 1.0])
def test_the_fitted_source_is_zero_for_attention_only(problem, precision):
    rng, (_, _, v), _, saddle, fit = problem
    assert np.max(np.abs(fit(saddle[v.shape[1] :], precision))) < 1e-10
    for w in rng.dirichlet(np.ones(len(v)), size=5):
        assert np.max(np.abs(fit(w @ v, precision))) > 1e-3


def test_attention_is_a_posterior_mean_and_its_map_hard_attention():
    _, (q, k, v) = head(1)
    variance = np.sqrt(len(q))
    prior = np.exp((k**2).sum(1) / (2 * variance))
    joint = prior * np.exp(-((q - k) ** 2).sum(1) / (2 * variance))
    posterior = joint / joint.sum()
    out = attention_from_energy(q, k, v)
    np.testing.assert_allclose(posterior @ v, out, rtol=1e-12)
    hard = v[np.argmax(posterior)]
    assert not np.allclose(hard, out)
    np.testing.assert_allclose(attention_from_energy(q, k, v, scale=1e4), hard, rtol=1e-12)


def test_hopfield_networks_tie_values_to_keys():
    """Their update is attention with v = k; with free values it is no gradient in the query."""
    rng, (q, k, _) = head(2)
    beta = 4.0

    def hopfield_energy(xi):
        return xi @ xi / 2 - energy(np.zeros(len(q)), xi, k, k, scale=beta) / beta

    @jax.jit
    def step(xi):
        value, gradient = jax.value_and_grad(hopfield_energy)(xi)
        return value, xi - gradient, attention_from_energy(xi, k, k, scale=beta)

    xi = q
    for _ in range(5):
        before, moved, updated = step(xi)
        np.testing.assert_allclose(moved, updated, rtol=1e-10)
        assert step(updated)[0] <= before - np.sum((updated - xi) ** 2) / 2 + 1e-12
        xi = updated
    jacobian = jax.jit(jax.jacobian(attention_from_energy))
    tied, free = jacobian(q, k, k), jacobian(q, k, rng.normal(size=k.shape))
    np.testing.assert_allclose(tied, tied.T, atol=1e-12)
    assert not np.allclose(free, free.T)


def test_the_gradient_in_the_input_is_a_modified_attention():  # v1 §2, v2 App. A
    """Of a log-sum-exp of scores between tokens: each token counts as query and as key."""
    rng = np.random.default_rng(4)
    x, w_q, w_k = (rng.normal(size=s) for s in ((6, 4), (4, 4), (4, 4)))

    @jax.jit
    @jax.grad
    def gradient(x):
        return jnp.sum(jax.scipy.special.logsumexp(x @ w_q.T @ (x @ w_k.T).T, axis=1))

    p = np.asarray(jax.nn.softmax(x @ w_q.T @ (x @ w_k.T).T))
    as_query, as_key = p @ (x @ w_k.T) @ w_q, p.T @ (x @ w_q.T) @ w_k
    np.testing.assert_allclose(gradient(x), as_query + as_key, rtol=1e-10)
    assert not np.allclose(gradient(x), as_query)


# Safe softmax and Algorithms 1 and 2


def test_a_constant_shift_leaves_the_gradient():  # v1 eq. 37–39, v2 eq. 36–38
    m = sp.symbols("m1:4", real=True)
    safe = sum(sp.log(row(i, of_query, shift=m[i])) for i in range(N))
    assert all(same(slope(safe, ZETA[c]), attention(*c)) for c in CELLS)


def test_a_source_for_each_key_is_not_attention():  # v1 eq. 36, v2 eq. 35 as printed
    misprint = sum(sp.log(row(i, of_key)) for i in range(N))
    assert not any(same(slope(misprint, ZETA[c]), attention(*c)) for c in CELLS)
    for j, A in CELLS:
        received = sum(weight(i, j) for i in range(j, N))
        assert same(slope(misprint, ZETA[j, A]), VALUES[j, A] * received)


def test_log_sum_exp_is_associative():  # v1 eq. 27–28, v2 eq. 7
    a, b, c = sp.symbols("a b c", real=True)

    def lse(a, b):
        return sp.log(sp.exp(a) + sp.exp(b))

    assert sp.simplify(lse(a, lse(b, c)) - lse(lse(a, b), c)) == 0


def tree(combine, parts):
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [functools.reduce(combine, pair) for pair in pairs]
    return parts[0]


def algorithm_1(zeta, q, shards, hold):
    """(O, m) of Algorithm 1; `hold` is what is done to the maximum, in print nothing."""
    r = [k @ q + v @ zeta for k, v in shards]
    m = hold(tree(jnp.maximum, [jnp.max(x) for x in r]))
    return tree(jnp.logaddexp, [jnp.log(jnp.sum(jnp.exp(x - m))) for x in r]), m


def algorithm_2(q, shards, m, O):
    return tree(jnp.add, [jnp.exp(k @ q - m - O) @ v for k, v in shards])


def as_printed(m):
    return m


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_algorithms_1_and_2(p):
    _, (q, k, v) = head(3)
    shards = list(zip(np.array_split(k, p), np.array_split(v, p), strict=True))
    zero = np.zeros(v.shape[1])
    f, out = energy(zero, q, k, v, scale=1.0), attention_from_energy(q, k, v, scale=1.0)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)

    def value_and_gradient(f, hold):
        return jax.jit(jax.value_and_grad(lambda zeta: f(algorithm_1(zeta, q, shards, hold))))(zero)

    m = np.max(k @ q)
    value, gradient = value_and_gradient(lambda Om: Om[0], as_printed)
    close(value, f - m)
    close(gradient, out - v[np.argmax(k @ q)])  # the trap
    value, gradient = value_and_gradient(lambda Om: Om[0], jax.lax.stop_gradient)
    close(value, f - m)
    close(gradient, out)
    value, gradient = value_and_gradient(sum, as_printed)
    close(value, f)
    close(gradient, out)

    close(algorithm_2(q, shards, m, f - m), out)
    close(algorithm_2(q, shards, m, f), np.exp(-m) * out)  # handed the energy itself


def test_the_maximum_over_devices_has_no_derivative():
    def shifted(x):
        return x - jax.lax.pmax(x, "i")

    with pytest.raises(NotImplementedError, match="pmax"):
        jax.vmap(jax.grad(shifted), axis_name="i")(np.ones(2))


@pytest.mark.parametrize("d, dv", [(64, 64), (32, 128)])
def test_the_gradient_costs_a_constant_factor(d, dv):  # v1 §5.2, v2 §5.2
    for n in (256, 1024):
        shapes = (dv,), (d,), (n, d), (n, dv)
        ratio = flops(jax.value_and_grad(energy), *shapes) / flops(energy, *shapes)
        assert abs(ratio - (d + 2 * dv) / (d + dv)) < 0.02


def test_the_gradient_keeps_a_few_numbers_a_key():  # v1 §5.2, v2 §5.2
    n, d = 4096, 64
    arrays = [jax.ShapeDtypeStruct(s, "float32") for s in ((d,), (d,), (n, d), (n, d))]
    compiled = jax.jit(jax.value_and_grad(energy)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 20 * n  # keys and values: 512 n


def test_all_queries_cost_quadratically():  # v1 §1, §3
    small, large = (flops(causal_energy, *[(n, 64)] * 4) for n in (256, 512))
    assert 3.9 < large / small < 4.1
