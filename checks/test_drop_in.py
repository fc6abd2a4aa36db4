"""The drop-in of site/howto_model.md: what `jax.nn.dot_product_attention` returns, over shards."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import SITE, blocks

import treeattn

B, L, N, H, G, D = 2, 3, 12, 4, 2, 8  # rows, queries, keys, heads, key heads, head_dim
JAX = jax.nn.dot_product_attention


@pytest.fixture(scope="module")
def drop_in():
    """The page's function, bound to keys that are sharded over four devices."""
    names: dict = {}
    for block in blocks(SITE / "howto_model.md"):
        exec(block.code.partition("\n\nsimulate_devices")[0], names)
    cache = NamedSharding(treeattn.kv_mesh(jax.devices()[:4]), P(None, "kv"))
    return functools.partial(names["dot_product_attention"], sharding=cache)


def normal(seed: int, *shape: int):
    """In float32: of float64, `jax.nn.dot_product_attention` makes NaN where no key is seen."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


Q, K, V = normal(0, B, L, H, D), normal(1, B, N, G, D), normal(2, B, N, G, D)
LENGTHS = jnp.array([N, 5], jnp.int32)
PADDING = (jnp.arange(N) < LENGTHS[:, None])[:, None, None]
CALLS = {
    "nothing": {},
    "bias": {"bias": normal(3, 1, H, L, N)},
    "a padding mask": {"mask": PADDING},
    "lengths": {"key_value_seq_lengths": LENGTHS, "scale": 0.5},
    "causal": {"is_causal": True},
    "a window": {"local_window_size": 2, "mask": PADDING},
    "a window to the left": {"local_window_size": (1, 0)},
    "padded queries": {"query_seq_lengths": jnp.array([3, 2], jnp.int32), "is_causal": True},
}


def test_it_has_the_arguments_of_jaxs_own(drop_in):
    theirs = inspect.signature(JAX).parameters.values()
    ours = inspect.signature(drop_in).parameters
    names = [x.name for x in theirs if x.name != "implementation"]
    assert [*names, "sharding"] == list(ours)
    assert all(ours[x.name].default == x.default for x in theirs if x.name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_jaxs_own(name, drop_in):
    def loss(f, q, k, v):
        out = f(q, k, v, **CALLS[name])
        return jnp.sin(3 * out).sum(), out

    with jax.numpy_rank_promotion("allow"):
        grad = jax.grad(loss, (1, 2, 3), has_aux=True)
        ours, theirs = (jax.jit(functools.partial(grad, f))(Q, K, V) for f in (drop_in, JAX))
    for came, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(came, right, atol=1e-5)


def test_an_additive_mask_is_refused_beside_another(drop_in):
    with pytest.raises(TypeError, match="float32"):
        drop_in(Q, K, V, mask=jnp.zeros((B, 1, L, N), jnp.float32), is_causal=True)


def test_the_residual(drop_in):
    (out, lse), (_, right) = (f(Q, K, V, return_residual=True) for f in (drop_in, JAX))
    assert out.shape == Q.shape
    np.testing.assert_allclose(lse, right, atol=1e-5)
