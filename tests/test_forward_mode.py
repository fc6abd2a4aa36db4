"""Attention is the derivative of log-sum-exp along the values: forward mode gives the merge.

With ε² = 0, a key of score s and value v is the dual number s + vε. What is done to scores to get
their log-sum-exp, done to those, gives lse + out·ε.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

from treeattn import finalize, from_output, kv_mesh, merge, tree_decode
from treeattn.program import collectives, sent_bytes, total_bytes

close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)

# ------------------------------------------------------------------------------------ in symbols

eps = sp.Symbol("epsilon")
a, n, j = sp.symbols("a n j", integer=True, positive=True)
s, v = (sp.IndexedBase(name, real=True) for name in "sv")


def dual(f):
    """The two parts of f, an expression in ε: what it is at 0, and its slope there."""
    return f.subs(eps, 0), sp.diff(f, eps).subs(eps, 0)


def same(x, y) -> bool:
    return sp.simplify(x - y) == 0


def test_logaddexp_of_dual_numbers_is_the_merge():
    """Of (lse, out), one component of out standing for all; the sum of logarithms is no merge."""
    la, lb, oa, ob = sp.symbols("l_a l_b o_a o_b", real=True)
    x, y = la + oa * eps, lb + ob * eps
    lse, out = dual(sp.log(sp.exp(x) + sp.exp(y)))
    weight_a = sp.exp(la) / (sp.exp(la) + sp.exp(lb))
    assert same(sp.exp(lse), sp.exp(la) + sp.exp(lb))
    assert same(out, weight_a * oa + (1 - weight_a) * ob)
    gate = 1 / (1 + sp.exp(la - lb))
    assert same(out, oa + gate * (ob - oa))
    assert not same(dual(x + y)[1], out)


def test_a_state_is_a_dual_number_of_z_and_finalize_its_logarithm():
    keys = sp.Sum(sp.exp(s[a] + v[a] * eps), (a, 1, n))  # any number of keys
    d, numerator = dual(keys)
    assert same(d, sp.Sum(sp.exp(s[a]), (a, 1, n)))
    assert same(numerator, sp.Sum(sp.exp(s[a]) * v[a], (a, 1, n)))
    m, d, numerator = sp.symbols("m d n", positive=True)
    lse, out = dual(m + sp.log(d + numerator * eps))
    assert same(lse, m + sp.log(d)) and same(out, numerator / d)
    assert not same(dual(d + numerator * eps)[1], numerator / d)  # Z itself, without the logarithm


# ------------------------------------------------------------------------------------ in numbers


def merge_forward(x, y):
    """Pairs (out, lse) by the derivative of logaddexp, along each component of out."""
    (out_x, lse_x), (out_y, lse_y) = x, y

    def along(tangent_x, tangent_y):
        return jax.jvp(jnp.logaddexp, (lse_x, lse_y), (tangent_x, tangent_y))

    lse, out = jax.vmap(along, in_axes=-1, out_axes=(None, -1))(out_x, out_y)
    return out, lse


def test_it_is_the_packages_merge_with_minus_infinity_as_identity():
    rng = np.random.default_rng(0)
    lse = rng.normal(size=(2, 5)) * 30
    out = rng.normal(size=(2, 5, 3))
    lse[0, 1] = lse[1, 2] = -np.inf
    out[lse == -np.inf] = 0
    x, y = zip(out, lse, strict=True)
    found = jax.jit(merge_forward)(x, y)
    wanted = finalize(merge(from_output(*x), from_output(*y)))
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    np.testing.assert_array_equal(found[0][1], y[0][1])  # bit for bit
    np.testing.assert_array_equal(found[0][2], x[0][2])


def test_two_empty_states_are_what_logaddexp_leaves_open():
    """Its derivative has (−∞) − (−∞) in it; `merge` has the guard."""
    none = jnp.zeros((1, 2)), jnp.full(1, -jnp.inf)
    out, lse = merge_forward(none, none)
    assert np.isnan(out).all() and np.isneginf(lse).all()
    out, lse = finalize(merge(from_output(*none), from_output(*none)))
    assert not np.any(out) and np.isneginf(lse).all()


def test_any_order_of_logaddexp_pushed_forward_is_attention():
    rng = np.random.default_rng(1)
    scores, values = rng.normal(size=12), rng.normal(size=(12, 3))
    wanted = dense_attention(
        np.ones((1, 1, 1, 1)), scores[None, :, None, None], values[None, :, None], scale=1.0
    )[0, 0, 0]

    def chain(s):
        return functools.reduce(jnp.logaddexp, s)

    def tree(s):
        while len(s) > 1:
            s = jnp.concatenate([jnp.logaddexp(s[:-1:2], s[1::2]), s[len(s) // 2 * 2 :]])
        return s[0]

    def by_maximum(s):
        m = s.max()  # no stop_gradient: a maximum has a derivative, and it cancels
        return m + jnp.log(jnp.exp(s - m).sum())

    for order in (chain, tree, by_maximum, jax.nn.logsumexp):

        def along(tangent, order=order):
            return jax.jvp(order, (scores,), (tangent,))[1]

        close(jax.jit(jax.vmap(along, in_axes=1))(values), wanted)


# ------------------------------------------------------------------------------------ on devices


def energy(s):
    """Algorithm 1 over the mesh: a maximum, a sum, a logarithm."""
    m = jax.lax.pmax(jax.lax.stop_gradient(s.max()), "kv")
    return m + jnp.log(jax.lax.psum(jnp.exp(s - m).sum(), "kv"))


def forward(q, k, v):
    s = k @ q * q.size**-0.5
    return jax.vmap(lambda column: jax.jvp(energy, (s,), (column,))[1], in_axes=1)(v)


def reverse(q, k, v):
    s = k @ q * q.size**-0.5
    return jax.grad(lambda zeta: energy(s + v @ zeta))(jnp.zeros(v.shape[1], v.dtype))


def on_devices(f, p):
    specs = {"in_specs": (P(), P("kv"), P("kv")), "out_specs": P()}
    # Without check_vma=False, a psum inside vmap raises in JAX 0.8.3.
    mesh = kv_mesh(jax.devices()[:p])
    return jax.jit(jax.shard_map(f, mesh=mesh, **specs, check_vma=f is not forward))


@pytest.fixture(scope="module")
def heads():
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((64,), (240, 64), (240, 64)))
    wanted = dense_attention(*(x[None, :, None] for x in (q[None], k, v)))[0, 0, 0]
    return (q, k, v), wanted


def sends(program):
    """What it compiles to: each collective's operands and the bytes, put in and sent."""
    found = collectives(program.compile())
    return [collective.shapes for collective in found], total_bytes(found), sent_bytes(found)


@pytest.mark.parametrize("p", [4, 8])
def test_forward_mode_of_algorithm_1_is_algorithm_3(heads, p):
    """To the byte: two Allreduces, where reverse mode takes three in a row."""
    inputs, wanted = heads
    runs = {f: on_devices(f, p) for f in (forward, reverse)}
    for run in runs.values():
        np.testing.assert_allclose(run(*inputs), wanted, rtol=1e-5, atol=1e-6)
    q, k, v = inputs
    mesh = kv_mesh(jax.devices()[:p])
    cache = NamedSharding(mesh, P(None, "kv"))
    tree = jax.jit(functools.partial(tree_decode, sharding=cache))
    decode = tree.lower(q[None, None, None], k[None, :, None], v[None, :, None])
    shapes, put_in, sent = sends(runs[forward].lower(*inputs))
    assert shapes == [("f32[]",), ("f32[64]", "f32[]")] and put_in == 4 * (64 + 2)
    assert sent == 2 * (p - 1) * put_in // p  # 462 of eight devices
    shapes_of_tree, *bytes_of_tree = sends(decode)
    assert len(shapes_of_tree) == 2 and bytes_of_tree == [put_in, sent]
    shapes_of_reverse, *bytes_of_reverse = sends(runs[reverse].lower(*inputs))
    assert shapes_of_reverse == [("f32[]",), ("f32[]",), ("f32[64]",)]
    assert bytes_of_reverse == [put_in, sent]
