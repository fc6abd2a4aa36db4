"""Meshes as users have them: axes in any order, of a context, of an enclosing `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

import treeattn
from treeattn.devices.merge import METHODS

CAUSAL = {"ring_attention": treeattn.ring_attention, "ulysses": treeattn.ulysses_attention}
DECODERS = {
    method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS
} | {"ring": treeattn.ring_decode, "pass_q": treeattn.pass_q_decode}


def arrays(seed, b, l, n, h, h_kv, d=4):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(b, l, h, d))
    k, v = rng.normal(size=(2, b, n, h_kv, d))
    return q, k, v


@pytest.mark.parametrize("name", [*DECODERS, *CAUSAL])
def test_axes_in_another_order_than_the_meshs(name):
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("node", "device"))
    axis = "device", "node"
    if name in CAUSAL:
        q, k, v = arrays(0, 1, 13, 13, 6, 2)
        out = CAUSAL[name](q, k, v, mesh=mesh, axis=axis)
        expected = dense_attention(q, k, v, mask=np.tri(13, dtype=bool)[None, None])
    else:
        q, k, v = arrays(0, 1, 4, 13, 4, 2)
        out = DECODERS[name](q, k, v, mesh=mesh, axis=axis)
        expected = dense_attention(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-12)


KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_of_the_context(kind, placed):
    """`jax.set_mesh(jax.make_mesh(…))`, whose axes are Explicit from JAX 0.9 on."""
    mesh = jax.make_mesh((2, 2), ("data", "kv"), axis_types=(KINDS[kind],) * 2)
    q, k, v = arrays(0, 2, 4, 4, 4, 2)
    with jax.set_mesh(mesh):
        if placed:
            k, v = jax.device_put((k, v), NamedSharding(mesh, P("data", "kv")))
        out = treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv")
        np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-12)
        jitted = jax.jit(functools.partial(treeattn.ring_attention, mesh=mesh, axis="kv"))
        expected = dense_attention(q, k, v, mask=np.tri(4, dtype=bool)[None, None])
        np.testing.assert_allclose(jitted(q, k, v), expected, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_shard_map_over_another_axis(kind):
    mesh = jax.make_mesh((2, 2), ("data", "kv"), axis_types=(KINDS[kind],) * 2)
    q, k, v = arrays(0, 2, 2, 7, 4, 2)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", batch_axis="data")
    rows = jax.shard_map(
        decode, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    q, k, v = jax.device_put((q, k, v), NamedSharding(mesh, P("data")))
    np.testing.assert_allclose(jax.jit(rows)(q, k, v), dense_attention(q, k, v), atol=1e-12)


def test_another_mesh_than_the_contexts_is_refused():
    x = jnp.ones((1, 2, 2, 4))
    mesh, other = (jax.make_mesh((n,), ("kv",), axis_types=(AxisType.Auto,)) for n in (2, 3))
    with jax.set_mesh(other), pytest.raises(ValueError, match="mesh: expected the context's"):
        treeattn.tree_decode(x, x, x, mesh=mesh, axis="kv")

    def inside(x):
        return treeattn.tree_decode(x, x, x, mesh=mesh, axis="kv")

    with pytest.raises(ValueError, match="are manual here already"):
        jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)


@pytest.mark.parametrize("method", METHODS)
def test_vmap_and_the_gradient_under_it(method):
    mesh, arguments = treeattn.kv_mesh(jax.devices()[:2]), arrays(0, 3, 2, 5, 2, 2)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis="kv", method=method)

    def row(q, k, v):
        return jnp.sum(decode(q[None], k[None], v[None]) ** 2)

    def whole(*x):
        return jnp.sum(treeattn.attention(*x) ** 2)

    value, got = jax.jit(jax.vmap(jax.value_and_grad(row, (0, 1, 2))))(*arguments)
    total, expected = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(*arguments)
    np.testing.assert_allclose(value.sum(), total, rtol=1e-12)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
