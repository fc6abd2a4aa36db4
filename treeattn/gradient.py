"""Attention as the gradient of a scalar: the energy of one query over its keys.

Add ζ·v_a to each score, with a vector ζ, the source:

    F(ζ) = log Σ_a exp(q·k_a + ζ·v_a)                               (2024 eq. 15, 2025 eq. 6, 24)

Up to the constant F(0), the lse, this is the cumulant generating function of the values under the
attention weights. Its gradient at ζ = 0 is attention, and its Hessian there is the covariance of
the values. `scale` multiplies q·k, as everywhere in this package; the papers leave it out.

All functions take one query head: q (d,), k (n, d), v (n, dv), and mask (n,), an array or a list,
True where the query may see the key. q, k and v share a floating-point dtype. Sums are in float32,
or in float64 if an input is. If no key is visible, F is −∞, and its derivatives of every order, in
every argument, are zeros. `jax.vmap` maps the functions over queries, heads and batches.

They raise TypeError for a wrong dtype, and ValueError for shapes that do not fit and for a scale
that is not finite (not checked under jit), naming the argument.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from treeattn.checks import (
    Array,
    accumulation_dtype,
    as_array,
    check_floating,
    check_one_floating_dtype,
    check_rank,
    check_scale,
    check_shape,
    integer,
)
from treeattn.inputs import Scale

# The arguments of one query head: n keys, of head_dim d, and values of head_dim dv.
Source = Float[Array, " dv"]
Query = Float[Array, " d"]
Keys = Float[Array, "n d"]
Values = Float[Array, "n dv"]
Mask = Bool[Array, " n"] | Sequence[bool] | None
Scalar = Float[jax.Array, ""]


def energy(
    zeta: Source, q: Query, k: Keys, v: Values, *, mask: Mask = None, scale: Scale = None
) -> Scalar:
    """F(ζ) = log Σ_a exp(scale · q·k_a + ζ·v_a) over the visible keys (2024 eq. 15, 2025 eq. 6).

    zeta:  (dv,) the source. At 0, F is the lse of the scores.
    scale: multiplies q·k; 1/√d if None.

    Returns a scalar, float32 or float64; −∞ if no key is visible. Masked keys and values may hold
    anything, NaN included.

    >>> k, v = jnp.zeros((2, 4)), jnp.array([[1.0], [3.0]])  # two keys of score 0
    >>> print(energy(jnp.zeros(1), jnp.ones(4), k, v).round(4))  # log 2
    0.6931
    """
    mask = _check_inputs(q, k, v, mask, zeta=zeta)
    if mask is not None:
        k, v = (jnp.where(mask[:, None], x, 0) for x in (k, v))
    s = _scores(zeta, q, k, v, scale)
    return log_sum_exp(s if mask is None else jnp.where(mask, s, -jnp.inf))


def causal_energy(
    zeta: Float[Array, "n dv"], q: Float[Array, "n d"], k: Keys, v: Values, *, scale: Scale = None
) -> Scalar:
    """F_tot = Σ_i log Σ_{a ≤ i} exp(scale · q_i·k_a + ζ_i·v_a), a scalar.

    (2024 eq. 16, 2025 eq. 25.)

    zeta (n, dv) and q (n, d) hold a source and a query for each of the n keys. The gradient in
    zeta at 0 is causal attention, (n, dv).

    >>> q, v = jnp.zeros((2, 4)), jnp.array([[1.0], [3.0]])
    >>> print(jax.grad(causal_energy)(jnp.zeros((2, 1)), q, q, v).ravel())
    [1. 2.]
    """
    _check_inputs(q, k, v, causal=True, zeta=zeta)
    s = _scores(zeta, q, k, v, scale)
    below = jnp.tri(len(q), dtype=bool)
    return jnp.sum(log_sum_exp(jnp.where(below, s, -jnp.inf)))


def attention_from_energy(
    q: Query, k: Keys, v: Values, *, mask: Mask = None, scale: Scale = None
) -> Float[jax.Array, " dv"]:
    """∇F(0), by `jax.grad`: attention, (dv,) in q's dtype (2024 eq. 5, 14; 2025 eq. 5, 23).

    Returns 0 if no key is visible.

    >>> k, v = jnp.zeros((2, 4)), jnp.array([[1.0], [3.0]])
    >>> print(attention_from_energy(jnp.ones(4), k, v))
    [2.]
    """
    return cumulant(1, q, k, v, mask=mask, scale=scale)


def cumulant(
    order: int, q: Query, k: Keys, v: Values, *, mask: Mask = None, scale: Scale = None
) -> Float[jax.Array, "..."]:
    """The derivative of F at 0 of the given order, with `order` axes of length dv, in q's dtype.

    If the attention weights are the probabilities of the values, order 1 is the mean of the values,
    which is attention; order 2 their covariance; order 3 their third central moment. From order 4
    on, cumulants and central moments differ. Order 0 is F(0), the lse, in float32 or float64.

    Memory grows as n · dv**(order − 1).

    >>> k, v = jnp.zeros((2, 4)), jnp.array([[1.0], [3.0]])
    >>> print(cumulant(2, jnp.ones(4), k, v))  # the variance
    [[1.]]
    """
    order = integer("order", order, 0)
    mask = _check_inputs(q, k, v, mask)

    def derivative(zeta):
        return energy(zeta, q, k, v, mask=mask, scale=scale)

    for i in range(order):  # reverse mode once, for the derivative of a scalar; then forward mode
        derivative = jax.jacfwd(derivative) if i else jax.grad(derivative)
    value = derivative(jnp.zeros(v.shape[1], accumulation_dtype(q, k, v)))
    return value.astype(jnp.result_type(q)) if order else value


def log_likelihood(
    zeta: Source,
    z: Source,
    q: Query,
    k: Keys,
    v: Values,
    *,
    mask: Mask = None,
    scale: Scale = None,
) -> Scalar:
    """Γ(ζ, z) = z·ζ − F(ζ), one query's term of 2025 eq. 30; a scalar, ∞ if no key is visible.

    The attention weights times exp(ζ·v), normalized, are an exponential family of distributions
    over the values. Given observed values with the mean z, the log-likelihood of ζ, averaged over
    the observations, is Γ plus a term that does not depend on ζ. The only stationary point of Γ in
    (ζ, z) is (0, attention), a saddle: neither a minimum nor a maximum.

    >>> k, v = jnp.zeros((2, 4)), jnp.array([[1.0], [3.0]])
    >>> print(log_likelihood(jnp.zeros(1), jnp.array([2.0]), jnp.ones(4), k, v).round(4))
    -0.6931
    """
    _check_inputs(q, k, v, zeta=zeta, z=z)
    f = energy(zeta, q, k, v, mask=mask, scale=scale)
    dtype = accumulation_dtype(f, z)
    return jnp.dot(z.astype(dtype), zeta.astype(dtype), precision="highest") - f


def log_sum_exp(s: Float[Array, "... n"]) -> Float[jax.Array, "..."]:
    """log Σ_a exp(s_a) over the last axis, relative to the largest s.

    (2024 eq. 1, 37; 2025 eq. 4, 36.)

    A score of −∞ counts as no key, and no keys give −∞, with derivatives 0 at every order. The
    pivot m is subtracted in the exponent and added back to the logarithm. It is a constant in both
    places. Differentiating it in the exponent only would give wrong derivatives.
    """
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    empty = m == -jnp.inf
    m = jnp.where(empty, 0, m)
    total = jnp.sum(jnp.exp(s - m[..., None]), axis=-1)
    # The inner `where` keeps log 0 out: derivatives pass through both branches of the outer one.
    return jnp.where(empty, -jnp.inf, m + jnp.log(jnp.where(empty, 1, total)))


def _scores(zeta, q, k, v, scale):
    """scale · q·k_a + ζ·v_a, (..., n), of sources zeta (..., dv) and queries q (..., d)."""
    dtype = accumulation_dtype(zeta, q, k, v)
    zeta, q, k, v = (x.astype(dtype) for x in (zeta, q, k, v))
    scale = jnp.asarray(check_scale(scale, q.shape[-1], dtype), dtype)

    def dot(x, keys):  # keys first, so that XLA on CPU does not copy them to transpose them
        return jnp.einsum("nd,...d->...n", keys, x, precision="highest")

    # A score above the range counts as the largest finite number, because ∞ − ∞ is NaN. ζ·v_a is
    # added after this bound, so that a key whose score is bounded keeps its derivative in ζ.
    s = jnp.minimum(dot(q * scale, k), jnp.finfo(dtype).max)
    return s + dot(zeta, v)


def _check_inputs(q, k, v, mask=None, *, causal: bool = False, **sources) -> Array | None:
    """The mask as an array. Raises TypeError or ValueError if the arguments do not fit.

    sources: arrays with an entry for each coordinate of the values, by name
    causal:  whether there is a query, and a source, for each key
    """
    check_one_floating_dtype(q=q, k=k, v=v)
    check_floating(**sources)
    check_rank(2 if causal else 1, "(n, d)" if causal else "(d,)", q=q)
    check_rank(2, "(n, d)", k=k)
    check_rank(2, "(n, dv)", v=v)
    n, d, dv = len(k), q.shape[-1], v.shape[1]
    if d == 0:
        raise ValueError(f"q: expected a head_dim d of at least 1, got shape {q.shape}")
    if mask is not None:
        mask = as_array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask: expected booleans, got dtype {mask.dtype}")
        check_shape((n,), mask=mask)
    queries = (n,) if causal else ()
    check_shape((n, d), k=k)
    check_shape((n, dv), v=v)
    check_shape((*queries, d), q=q)
    check_shape((*queries, dv), **sources)
    return mask
