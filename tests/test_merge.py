"""Merging states where it breaks elsewhere: no keys, infinities, NaN; and its bits and programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_state import INF, close, random_states

from treeattn import (
    AttentionState,
    finalize,
    from_output,
    merge,
    reduce_chain,
    reduce_tree,
    scan_states,
)

# ---------------------------------------------------------------- dtypes, the identity


DTYPES = [(dtype, dtype) for dtype in ("bfloat16", "float32", "float64")]
DTYPES += [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")]


@pytest.mark.parametrize(("narrow", "dtype"), DTYPES)
def test_the_identity_changes_no_bit(narrow, dtype):
    """Nor where it is in a narrower dtype, in which another number stands for −∞. And finalize
    keeps the dtype, but never a half-precision lse."""
    state, none = random_states(1, (16,), dtype=dtype), AttentionState.identity((16,), 3, dtype)
    state = state._replace(max=state.max.at[:3].set(jnp.array([-1e6, -1e38, 0], dtype)))
    state = jax.tree.map(lambda x, y: jnp.concatenate([x, y[:1]]), state, none)  # no keys, too
    none = AttentionState.identity((17,), 3, narrow)
    for merged in jax.jit(merge)(none, state), jax.jit(merge)(state, none):
        assert {x.dtype for x in merged} == {np.dtype(dtype)}
        jax.tree.map(np.testing.assert_array_equal, merged, state)
    out, lse = finalize(state)
    assert out.dtype == dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("reduce", [reduce_chain, reduce_tree])
def test_no_states_at_all_are_no_keys(reduce):
    out, lse = finalize(reduce(AttentionState.identity((2, 0), 3), axis=1))
    assert out.shape == (2, 3) and not out.any() and (lse == -INF).all()
    assert scan_states(AttentionState.identity((0, 2), 3)).max.shape == (0, 2)


# ---------------------------------------------------------------- infinities and NaN


@pytest.mark.parametrize(
    ("lse", "beside"), [(-INF, INF), (-INF, 7.0), (-INF, np.nan), (INF, INF), (INF, 7.0)]
)
def test_an_infinite_lse_means_no_keys(lse, beside):
    """Whatever stands beside it, and its gradients are 0."""
    one = from_output(np.ones((1, 3)), np.ones(1))

    def loss(out, lse):
        results = finalize(merge(from_output(out, lse), one))
        return sum(x.sum() for x in results), results

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    gradients, results = run(np.full((1, 3), beside), np.full(1, lse))
    close(results, (np.ones((1, 3)), np.ones(1)))
    assert not any(np.any(x) for x in gradients)


def test_a_nan_with_an_infinite_lse_is_not_lost():
    """FlashAttention-2 writes lse = +∞ for a sum that is NaN, as it does for no keys."""
    state = from_output(np.array([[np.nan, 2.0], [np.nan, np.nan]]), np.full(2, INF))
    for of_nan in state, merge(state, from_output(np.ones((2, 2)), np.zeros(2))):
        out, lse = finalize(of_nan)
        assert np.isnan(lse).all() and np.isnan(out).any(axis=-1).all()


def test_an_infinite_score_takes_all_the_weight():
    states = AttentionState(np.array([INF, 0]), np.ones(2), np.array([[5.0], [1.0]]))
    for order in (0, 1), (1, 0):
        ordered = jax.tree.map(lambda x, order=order: x[list(order)], states)
        np.testing.assert_array_equal(finalize(reduce_tree(ordered))[0], [5.0])


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("dv", [1, 24])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_output_has_the_bits_of_a_product_with_the_reciprocal(dtype, dv, optimized):
    """n / d has them in some releases of JAX, unless dv is 1, and in others it has its own."""
    state = random_states(6, (2, 64), dv, dtype)
    _, d, n = map(np.asarray, state)
    for run in finalize, jax.jit(lambda x: finalize(x)):
        np.testing.assert_array_equal(run(state)[0], n * (1 / d)[..., None])
    assert dv == 1 or (n / d[..., None] != n * (1 / d)[..., None]).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merging_commutes_bit_for_bit(dtype, optimized):
    """Also where the result is used at once, and the compiler may fuse products and sums."""
    a, b = (random_states(seed, (2, 64), 24, dtype) for seed in (0, 1))
    b = b._replace(max=b.max.at[:, ::9].set(a.max[:, ::9]))  # equal pivots, too

    def used_at_once(a, b):
        return finalize(merge(a, b))

    for f in merge, jax.jit(merge), used_at_once, jax.jit(used_at_once):
        close(f(a, b), f(b, a), rtol=0, atol=0)
    swapped = jax.jit(lambda a, b: used_at_once(b, a))  # another program
    close(jax.jit(used_at_once)(a, b), swapped(a, b), rtol=0, atol=0)


# ---------------------------------------------------------------- one program


def test_called_by_itself_it_is_one_program(unchecked):
    """As STEPS of test_compiled_once.py says; and nested in another, none of its own."""
    state = AttentionState(np.ones(3), np.ones(3), np.ones((3, 2)))  # NumPy's arrays will do
    calls = (merge, state, state), (finalize, state), (from_output, state.numerator, state.max)
    for function, *arguments in calls:
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(function(*arguments)))
        assert f"@_{function.__name__}" not in jax.jit(function).lower(*arguments).as_text()
