"""Attention is log-sum-exp of dual numbers: a key is s + vε, ε² = 0, and the result lse + out·ε.

So forward mode along the values turns any program for log-sum-exp into one for attention, in the
same passes; reverse mode takes a second one, and keeps something of every key.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st

from treeattn import attention_from_energy, energy
from treeattn.gradient import log_sum_exp

# In symbols: a + bε is the matrix [[a, b], [0, a]].


def dual(a, b, square=0):
    return sp.Matrix([[a, b], [square * b, a]])


def test_the_rules_of_dual_numbers():
    s, x, y, z, c, d = sp.symbols("s x Y Z c d", positive=True)
    assert dual(s, x) * dual(c, d) == dual(s * c, s * d + x * c)
    assert dual(s, x).exp() == dual(sp.exp(s), sp.exp(s) * x)
    assert dual(z, y).log() == dual(sp.log(z), y / z)
    for wrong in (dual(sp.log(z), y), dual(sp.log(z), z / y)):  # not divided; upside down
        assert dual(z, y).log() != wrong
    with_one = dual(s, x, square=1).exp() - dual(sp.exp(s), sp.exp(s) * x, square=1)
    assert sp.simplify(with_one) != sp.zeros(2)


@pytest.mark.parametrize("n", [1, 3])
def test_log_sum_exp_of_dual_keys_is_lse_and_attention(n):
    """With a matrix's exp and log, which know nothing of attention, for free scores and values."""
    s, v = sp.symbols(f"s:{n}", positive=True), sp.symbols(f"v:{n}", positive=True)
    mass, moment = sp.symbols("Z Y", positive=True)
    total = sum((dual(a, b).exp() for a, b in zip(s, v, strict=True)), sp.zeros(2))
    assert total[0, 0] == total[1, 1] and total[1, 0] == 0
    result = dual(mass, moment).log().subs({mass: total[0, 0], moment: total[0, 1]})
    z = sum(map(sp.exp, s))
    attention = sum(sp.exp(a) * b for a, b in zip(s, v, strict=True)) / z
    assert result == dual(sp.log(z), attention)
    assert result != dual(sp.log(z), sum(v) / n) or n == 1  # weights that are all alike


# In numbers


def forward(lse, s, v):
    """(lse, out) of scores s (n,) and values v (n, dv), by forward mode along each coordinate."""
    return jax.vmap(lambda rate: jax.jvp(lse, (s,), (rate,)), in_axes=1, out_axes=(None, 0))(v)


def pair(a, b):
    """log(eᵃ + eᵇ); where both are −∞ its derivatives are 0, and `jnp.logaddexp`'s are NaN."""
    return log_sum_exp(jnp.stack([a, b]))


PROGRAMS = {
    "at once": log_sum_exp,
    "in pieces": lambda s: pair(log_sum_exp(s[:3]), pair(s[3], log_sum_exp(s[4:]))),
    "a chain": lambda s: functools.reduce(pair, list(s)),
}
PUSHED = {name: jax.jit(functools.partial(forward, lse)) for name, lse in PROGRAMS.items()}


@pytest.mark.parametrize("name", PROGRAMS)
@given(st.lists(st.floats(-700, 700) | st.just(-np.inf), min_size=8, max_size=8))
def test_any_program_for_log_sum_exp_pushed_forward(name, scores):
    """Also where scores are −∞, as of masked keys; without any key out is 0."""
    s = np.array(scores)
    v = np.random.default_rng(0).normal(size=(8, 3))
    lse, out = PUSHED[name](s, v)
    if np.all(np.isinf(s)):
        assert lse == -np.inf and not np.any(out)
        return
    weights = np.exp(s - s.max())
    np.testing.assert_allclose(lse, s.max() + np.log(weights.sum()), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out, weights @ v / weights.sum(), rtol=1e-10, atol=1e-12)


def online(q, k, nudge):
    """log Σ exp(q·k_a + nudge_a) in one pass over the keys, as an online softmax does."""

    def step(carry, key):
        m, d = carry
        score = key[0] @ q + key[1]
        largest = jax.lax.stop_gradient(jnp.maximum(m, score))
        return (largest, d * jnp.exp(m - largest) + jnp.exp(score - largest)), None

    none = jnp.asarray(-jnp.inf, k.dtype), jnp.asarray(0, k.dtype)
    (m, d), _ = jax.lax.scan(step, none, (k, nudge))
    return m + jnp.log(d)


def online_forward(q, k, v):
    return forward(lambda nudge: online(q, k, nudge), jnp.zeros(len(k), k.dtype), v)[1]


def online_reverse(q, k, v):
    return jax.grad(lambda zeta: online(q, k, v @ zeta))(jnp.zeros(v.shape[1], v.dtype))


def temporary_bytes(program, n: int) -> int:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64,), (n, 64), (n, 64))]
    return jax.jit(program).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_forward_mode_takes_one_pass_and_keeps_nothing():
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=shape) for shape in ((4,), (10, 4), (10, 2)))
    wanted = np.exp(k @ q) @ v / np.exp(k @ q).sum()
    for program, passes, bytes_a_key in ((online_forward, 1, 0), (online_reverse, 2, 8)):
        np.testing.assert_allclose(jax.jit(program)(q, k, v), wanted, rtol=1e-12)
        assert str(jax.make_jaxpr(program)(q, k, v)).count("scan[") == passes
        grown = temporary_bytes(program, 8192) - temporary_bytes(program, 4096)
        assert bytes_a_key * 4096 <= grown <= 3 * bytes_a_key * 4096


def test_what_the_directions_cost():
    """Flops a key, d = dv = 64: along V as a dense softmax, reverse in ζ half as many more."""
    shapes = (64,), (4096, 64), (4096, 64)

    def along_the_values(q, k, v):
        return forward(jax.scipy.special.logsumexp, k @ q / 8, v)[1]

    def dense(q, k, v):
        return jax.nn.softmax(k @ q / 8) @ v

    def forward_in_the_source(q, k, v):
        return jax.jacfwd(energy)(jnp.zeros(64, "float32"), q, k, v)

    def flops(program):
        arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return jax.jit(program).lower(*arrays).compile().cost_analysis()["flops"]

    programs = along_the_values, dense, attention_from_energy, forward_in_the_source
    counted = [flops(program) / 4096 for program in programs]
    np.testing.assert_allclose(counted[:3], [261, 262, 390], atol=4)
    assert 64 * 2 * 64 < counted[3] < 64 * 2 * 64 + 1000
