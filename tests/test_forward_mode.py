"""Attention is log-sum-exp of dual numbers: a key is s + vε, ε² = 0, and the result lse + out·ε.

So forward mode along the values turns any program for log-sum-exp into one for attention, logaddexp
into the merge, and Algorithm 1 into Algorithm 3.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import attention_of_scores, dense_attention

from treeattn import finalize, from_output, kv_mesh, merge, tree_decode
from treeattn.gradient import log_sum_exp
from treeattn.program import collectives, sent_bytes, total_bytes


def pushed(lse, s, v):
    """(out, lse) of scores s (...) and values v (..., dv): forward mode along each coordinate."""
    along = jax.vmap(lambda rate: jax.jvp(lse, (s,), (rate,)), in_axes=-1, out_axes=(None, -1))
    return along(v)[::-1]


def pair(a, b):
    """log(eᵃ + eᵇ); where both are −∞ its derivatives are 0, and `jnp.logaddexp`'s are NaN."""
    return log_sum_exp(jnp.stack([a, b]))


PROGRAMS = {
    "at once": log_sum_exp,
    "in pieces": lambda s: pair(log_sum_exp(s[:3]), pair(s[3], log_sum_exp(s[4:]))),
    "a chain": lambda s: functools.reduce(pair, list(s)),
}
PUSHED = {name: jax.jit(functools.partial(pushed, lse)) for name, lse in PROGRAMS.items()}


@pytest.mark.parametrize("name", PROGRAMS)
@given(st.lists(st.floats(-700, 700) | st.just(-np.inf), min_size=8, max_size=8))
def test_any_program_for_log_sum_exp_pushed_forward(name, scores):
    """Also where scores are −∞, as of masked keys; without any key out is 0."""
    s, v = np.array(scores), np.random.default_rng(0).normal(size=(8, 3))
    for found, wanted in zip(PUSHED[name](s, v), attention_of_scores(s, v)[:2], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_logaddexp_pushed_forward_is_the_packages_merge():
    """With −∞ as identity; of two empty states `merge` has a guard, and logaddexp has none."""
    rng = np.random.default_rng(0)
    lse, out = rng.normal(size=(2, 5)) * 30, rng.normal(size=(2, 5, 3))
    lse[0, 1:3] = lse[1, 2:4] = -np.inf
    out[lse == -np.inf] = 0
    none = lse.max(axis=0) == -np.inf
    found = jax.jit(pushed, static_argnums=0)(lambda x: jnp.logaddexp(x[0], x[1]), lse, out)
    wanted = finalize(merge(*map(from_output, out, lse)))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x[~none], y[~none], rtol=1e-12, atol=1e-12)
    assert np.isnan(found[0][none]).all() and not np.any(wanted[0][none])
    assert np.isneginf(wanted[1][none]).all()


# ------------------------------------------------------------------------------------ on devices


def energy(s):
    """Algorithm 1 over the mesh: a maximum, a sum, a logarithm."""
    m = jax.lax.pmax(jax.lax.stop_gradient(s.max()), "kv")
    return m + jnp.log(jax.lax.psum(jnp.exp(s - m).sum(), "kv"))


def forward(q, k, v):
    return pushed(energy, k @ q * q.size**-0.5, v)[0]


def reverse(q, k, v):
    s = k @ q * q.size**-0.5
    return jax.grad(lambda zeta: energy(s + v @ zeta))(jnp.zeros(v.shape[1], v.dtype))


def sends(program):
    """What it compiles to: each collective's operands and the bytes, put in and sent."""
    found = collectives(program.compile())
    return [collective.shapes for collective in found], total_bytes(found), sent_bytes(found)


@pytest.mark.parametrize("p", [4, 8])
def test_forward_mode_of_algorithm_1_is_algorithm_3(p):
    """To the byte: two Allreduces, where reverse mode takes three in a row."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((64,), (240, 64), (240, 64)))
    heads = q[None, None, None], k[None, :, None], v[None, :, None]
    mesh = kv_mesh(jax.devices()[:p])
    put_in = 4 * (64 + 2)
    bytes_of_tree = [put_in, 2 * (p - 1) * put_in // p]  # sent by each of eight devices: 462
    for f, shapes in (
        (forward, [("f32[]",), ("f32[64]", "f32[]")]),
        (reverse, [("f32[]",), ("f32[]",), ("f32[64]",)]),
    ):
        specs = {"in_specs": (P(), P("kv"), P("kv")), "out_specs": P()}
        # Without check_vma=False, a psum inside vmap raises in JAX 0.8.3.
        run = jax.jit(jax.shard_map(f, mesh=mesh, **specs, check_vma=f is not forward))
        wanted = dense_attention(*heads)[0, 0, 0]
        np.testing.assert_allclose(run(q, k, v), wanted, rtol=1e-5, atol=1e-6)
        assert sends(run.lower(q, k, v)) == (shapes, *bytes_of_tree)
    cache = NamedSharding(mesh, P(None, "kv"))
    tree = jax.jit(functools.partial(tree_decode, sharding=cache))
    shapes, *sizes = sends(tree.lower(*heads))
    assert len(shapes) == 2 and sizes == bytes_of_tree
