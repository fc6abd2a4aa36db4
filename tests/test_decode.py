"""Decoding and prefill over meshes against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    DECODERS,
    HEADS_SHARDED,
    OPTIONS,
    PREFILLS,
    check,
    check_gradients,
    draw,
    kernel,
    over,
    own_heads,
    results,
)
from calls import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_weights

import treeattn
from treeattn import from_output, memory, tree_decode
from treeattn.across import METHODS, merge_across

HEADS = 4


def kernels_state(*arrays, **options):
    return from_output(*kernel(*arrays, **options))


HOW = {
    "": {},
    "striped": {"striped": True},
    "striped, a kernel": {"striped": True, "implementation": kernel},
    "a kernel": {"implementation": kernel},
    "a kernel's state": {"implementation": kernels_state},
    "full": {"causal": False},
}
# 5 keys: fewer than devices on some meshes; 37 divides by none of them.
NODES, ALL_ROLES = {"keys_a": 4, "keys_b": 2}, {"heads": 2, "keys": 2, "rows": 2}
EVERY = ({"keys": 5}, 37), ({"keys_a": 2, "keys_b": 3}, 5)
CASES = [
    *((name, *where, "") for name in DECODERS for where in EVERY),
    ("allreduce", {"keys_a": 2, "keys_b": 3}, 5, "a kernel's state"),
    ("allreduce", {"keys": 4}, 24, "striped"),
    ("butterfly", {"keys": 1}, 37, ""),
    ("butterfly", NODES, 5, ""),
    ("butterfly", ALL_ROLES, 5, ""),
    ("hierarchical", ALL_ROLES, 5, "a kernel"),
    ("all_to_all", {"heads": 2, "keys": 3}, 5, ""),
    ("ring", {"keys": 4}, 24, "striped, a kernel"),
    pytest.param("butterfly", {"keys": 7}, 37, "", marks=pytest.mark.slow),
    pytest.param("hierarchical", {"keys": 8}, 5, "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "sizes", "n", "how"), CASES, ids=str)
def test_values_and_gradients(name, sizes, n, how):
    decode = functools.partial(DECODERS[name], sharding=over(**sizes), return_lse=True)
    decode = functools.partial(decode, **HOW[how])
    p = sizes["keys"] if "striped" in how else 1
    key_in_slot = np.arange(n).reshape(-1, p).T.ravel()  # slot r·t + j holds key j·p + r
    slot_of_key = np.argsort(key_in_slot)

    def f(q, k, v, **options):
        found = decode(q, k, v, **options)
        if name not in HEADS_SHARDED:
            return found
        return tuple(own_heads(x, HEADS, sizes.get("heads", 1))[0] for x in found)

    @settings(max_examples=8)
    @given(st.integers(0, 2**32 - 1))
    def ask(seed):
        rng = np.random.default_rng(seed)
        q, k, v = draw(seed, n=n, d=8, dv=6)
        q *= 3
        options = {option: drawn(rng, 2, 2, n, HEADS) for option, drawn in OPTIONS.items()}
        w, u = rng.normal(size=(2, 2, HEADS, 6)), rng.normal(size=(2, 2, HEADS))
        placed = options | {x: options[x][..., key_in_slot] for x in ("mask", "bias")}
        arrays = q, k[:, key_in_slot], v[:, key_in_slot]
        found, (d_q, d_k, d_v, d_bias) = results(f, *arrays, w, u, placed)
        check(found, q, k, v, **options)
        gradients = d_q, d_k[:, slot_of_key], d_v[:, slot_of_key], d_bias[..., slot_of_key]
        check_gradients(gradients, q, k, v, w, u, **options)

    ask()


# 12 query heads read 2 key heads: Ulysses repeats these 1, 3 or 2 times.
PREFILL_CASES = [
    ({"keys_a": 2, "keys_b": 2}, 19, ""),
    ({"keys": 6}, 4, "a kernel"),
    ({"keys": 3}, 7, "full"),
    pytest.param({"keys": 3}, 19, "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sizes", "l", "how"), PREFILL_CASES, ids=str)
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_values_and_gradients(name, sizes, l, how):
    causal = how != "full"
    named = functools.partial(PREFILLS[name], sharding=over(**sizes), **HOW[how])
    prefill = functools.partial(named, return_lse=True)

    @settings(max_examples=4)
    @given(st.integers(0, 2**32 - 1))
    def ask(seed):
        q, k, v = draw(seed, l=l, n=l if causal else 19, h=12, h_kv=2, d=8, dv=6)
        w, u = draw(seed + 1, l=l, n=l, h=12, h_kv=12, d=6)[:2]
        found, gradients = results(prefill, q * 2, k, v, w, u[..., 0], {})
        check(found, q * 2, k, v, causal=causal)
        check_gradients(gradients, q * 2, k, v, w, u[..., 0], causal=causal)
        np.testing.assert_allclose(named(q * 2, k, v), found[0], atol=1e-12)

    ask()


@pytest.mark.parametrize("name", DECODERS | PREFILLS)
def test_no_keys_no_rows_and_no_heads(name):
    for b, n, h in [(1, 0, 4), (0, 5, 4), (1, 5, 0)]:
        q, k = np.ones((b, 5, h, 4)), np.ones((b, n, 1 if h == 0 else 4, 4))
        options = {} if name in DECODERS else {"causal": False}
        attend = functools.partial((DECODERS | PREFILLS)[name], return_lse=True, **options)
        found = attend(q, k, k, sharding=over(keys=4))
        assert found[0].shape == q.shape and found[1].shape == q.shape[:3]
        check(found, q, k, k)


@pytest.mark.parametrize("name", DECODERS | PREFILLS)
def test_a_symbolic_size_is_refused_by_its_axis(name):
    """XLA:CPU crashes on a reshape of a symbolic batch inside of `shard_map`."""
    (x,) = jax.export.symbolic_shape("x")
    decode = jax.jit(functools.partial((DECODERS | PREFILLS)[name], sharding=over(keys=4)))
    for axis, q, k in [
        ("q: expected a batch", (x, 8, 4, 4), (x, 8, 4, 4)),
        ("q: expected a length", (1, x, 4, 4), (1, 8, 4, 4)),
        ("k: expected a length", (1, 8, 4, 4), (1, 8 * x, 4, 4)),
    ]:
        q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q, k))
        with pytest.raises(ValueError, match=f"{axis} that is a number, got the symbolic"):
            jax.export.export(decode)(q, k, k)


@pytest.mark.parametrize("name", PREFILLS)
def test_what_a_shard_is_filled_up_with_does_not_count(name, monkeypatch):
    """XLA:CPU has left NaN there in one call of four."""

    def with_nan(x, axis, size):
        shape = (*x.shape[:axis], size - x.shape[axis], *x.shape[axis + 1 :])
        return jnp.concatenate([x, jnp.full(shape, jnp.nan)], axis)

    monkeypatch.setattr("treeattn.key_shards.pad_axis", with_nan)
    arrays = draw(b=1, l=8, n=8, h=3, h_kv=1, d=10)
    check(PREFILLS[name](*arrays, sharding=over(keys=3)), *arrays, causal=True)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_of_explicit_axes_that_cannot_share_the_text_evenly(name):
    arrays = draw(b=1, l=5, n=5, h_kv=4, d=8)
    sharding = over(AxisType.Explicit, keys=4)
    prefill = functools.partial(PREFILLS[name], sharding=sharding)
    check(prefill(*arrays), *arrays, causal=True)
    with jax.set_mesh(sharding.mesh):
        check(jax.jit(prefill)(*arrays), *arrays, causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_sums_in_float32(dtype):
    # Scores to ±500: exp of any of them overflows half precision, and most float32.
    q, k, v = (jnp.asarray(x, dtype) for x in draw(l=1, n=4096, h_kv=4, d=64))
    out, lse = tree_decode(q * 8, k * 8, v, sharding=over(keys=8), return_lse=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    dense = dense_attention(q * 8, k * 8, v)
    np.testing.assert_allclose(np.asarray(out, np.float64), dense, atol=0.02, rtol=0.02)
    np.testing.assert_allclose(lse, dense_weights(q * 8, k * 8)[1], rtol=1e-4)


@pytest.mark.parametrize("name", ["allreduce", "ring"])
def test_a_narrower_cache(name):
    q, *cache = (jnp.asarray(x, jnp.float32) for x in draw(l=1, n=21))
    cache = [x.astype(jnp.float8_e4m3fn) for x in cache]
    found = DECODERS[name](q, *cache, sharding=over(keys=4))
    assert found.dtype == jnp.float32
    check(found, q, *(x.astype(jnp.float32) for x in cache), atol=1e-6)


def test_a_narrower_cache_is_widened_a_block_at_a_time(optimized):
    def temporary(n):
        q, k = (jax.ShapeDtypeStruct((1, m, 4, 64), t) for m, t in ((1, "f4"), (n, "bfloat16")))
        f = functools.partial(tree_decode, sharding=over(keys=4))
        return memory(jax.jit(f).lower(q, k, k).compile()).temporary_bytes

    assert temporary(32768) <= temporary(8192) + 1024


def test_a_traced_scale_is_compiled_once_and_has_a_gradient():
    q, k, v = draw(b=1, l=1, n=9)

    @jax.jit
    @jax.value_and_grad
    def f(scale):
        return jnp.sum(tree_decode(q, k, v, sharding=over(keys=3), scale=scale))

    for scale in (0.3, 1.7):
        value, slope = f(scale)
        near = [dense_attention(q, k, v, scale=scale + e).sum() for e in (-1e-5, 1e-5)]
        np.testing.assert_allclose(value, np.mean(near), atol=1e-8)
        np.testing.assert_allclose(slope, (near[1] - near[0]) / 2e-5, atol=1e-6)
    assert f._cache_size() == 1


WHOLE = [name for name, way in METHODS.items() if not way.shards_heads]
MESHES = {"keys": 5}, {"keys": 8}, {"keys_a": 2, "keys_b": 3}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("method", WHOLE)
def test_every_device_has_the_same_bits(method, sizes, optimized):
    """Also where p is no power of two, and by nodes."""
    rng, mesh = np.random.default_rng(0), over(**sizes).mesh
    m, d = (jnp.asarray(rng.uniform(1, 9, (mesh.size, 6)), jnp.float32) for _ in range(2))
    n = jnp.asarray(rng.normal(size=(mesh.size, 6, 16)), jnp.float32)

    def body(*state):
        own = treeattn.AttentionState(*(x[0] for x in state))
        return tuple(x[None] for x in merge_across(own, mesh.axis_names, method=method))

    spec = P(mesh.axis_names)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for x in jax.jit(f)(m, d, n):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


@pytest.mark.parametrize("method", METHODS)
def test_states_without_heads_are_merged(method):
    """All-gather refuses an axis of size 0."""
    mesh = over(keys_a=2, keys_b=2).mesh
    body = functools.partial(merge_across, axis_name=mesh.axis_names, method=method)
    f = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    state = treeattn.AttentionState.identity((5, 0), 4)
    assert jax.jit(f)(state).numerator.shape == (5, 0, 4)


def test_a_warm_call_asks_little(unchecked):
    """Shapes and dtypes are checked where a program is traced, once a shape."""
    q, kv = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 8, 2, 4))
    assert python_calls(tree_decode, q, kv, kv, sharding=over(keys=2)) <= 21
