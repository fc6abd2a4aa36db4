"""Decoding and prefill over meshes against dense attention in float64."""

import functools
import itertools

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
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from oracles import dense_attention, dense_weights
from test_meshes import sends
from totals import count_collectives, total_bytes

import treeattn
from treeattn import collectives, from_output, tree_decode
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
# 5 keys: fewer than devices on some meshes; 37 divides by none of them. Where "keys_b" comes first
# the keys lie along the axes in another order than the mesh's.
NODES, ALL_ROLES = {"keys_a": 4, "keys_b": 2}, {"heads": 2, "keys": 2, "rows": 2}
EVERY = ({"keys": 5}, 37), ({"keys_b": 2, "keys_a": 3}, 5)
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
    ({"keys_b": 2, "keys_a": 2}, 19, ""),
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
    """All-gather refuses an axis of size 0."""
    for b, n, h in [(1, 0, 4), (0, 5, 4), (1, 5, 0)]:
        q, k = np.ones((b, 5, h, 4)), np.ones((b, n, 1 if h == 0 else 4, 4))
        options = {} if name in DECODERS else {"causal": False}
        attend = functools.partial((DECODERS | PREFILLS)[name], return_lse=True, **options)
        found = attend(q, k, k, sharding=over(keys_a=2, keys_b=2))
        assert found[0].shape == q.shape and found[1].shape == q.shape[:3]
        check(found, q, k, k)


@pytest.mark.parametrize("name", DECODERS | PREFILLS)
def test_a_symbolic_size_is_refused_by_its_axis(name):
    """XLA:CPU crashes on a reshape of a symbolic batch inside of `shard_map`."""
    (x,) = jax.export.symbolic_shape("x")
    decode = jax.jit(functools.partial((DECODERS | PREFILLS)[name], sharding=over(keys=4)))
    for axis, *sizes in [
        ("q: expected a batch", (x, 8), (x, 8)),
        ("q: expected a length", (1, x), (1, 8)),
        ("k: expected a length", (1, 8), (1, 8 * x)),
    ]:
        q, k = (jax.ShapeDtypeStruct((*size, 4, 4), jnp.float32) for size in sizes)
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


DTYPES = [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float8_e4m3fn")]


@pytest.mark.parametrize(("dtype", "of_keys"), DTYPES)
@pytest.mark.parametrize("name", ["allreduce", "ring"])
def test_half_precision_keeps_its_sums_in_float32(name, dtype, of_keys):
    """And so does a cache that is narrower than the queries."""
    # Scores to ±500: exp of any of them overflows half precision, and most float32.
    q, k, v = draw(l=1, n=4096, h_kv=4, d=64)
    q, k, v = jnp.asarray(q * 8, dtype), jnp.asarray(k * 8, of_keys), jnp.asarray(v, of_keys)
    out, lse = DECODERS[name](q, k, v, sharding=over(keys=8), return_lse=True)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    dense = dense_attention(q, k, v)
    np.testing.assert_allclose(np.asarray(out, np.float64), dense, atol=0.02, rtol=0.02)
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], rtol=1e-4)


def test_a_traced_scale_has_a_gradient():
    """Its values the other tests ask, and test_compiled_once.py that none is compiled anew."""
    q, k, v = draw(b=1, l=1, n=9)
    decode = functools.partial(tree_decode, q, k, v, sharding=over(keys=3))
    check_grads(lambda scale: decode(scale=scale), (0.7,), 1)


NUMBERS = -np.inf, np.inf, np.nan, np.finfo(np.float32).max, 0, 1
ROWS = np.float32([*itertools.product(NUMBERS, repeat=3)])


@pytest.mark.parametrize("sizes", [{"keys": 7}, {"keys": 8}, {"keys_a": 2, "keys_b": 3}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_device_has_the_same_bits(method, sizes, optimized):
    """Also where p is no power of two, and by nodes; unless the devices share the heads. There is
    a NaN where a merge has one: any of six numbers is in any field of one device after the other,
    and the others have ordinary ones, or no keys. What each device sends is as the method's formula
    says."""
    mesh = over(**sizes).mesh
    p = mesh.size
    ordinary = np.random.default_rng(0).uniform(1, 9, (p, p, len(ROWS), 3))
    fields = np.append(ordinary, np.broadcast_to([-np.inf, 0, 0], ordinary.shape), axis=1)
    for device in range(p):
        fields[device, [device, p + device]] = ROWS  # device, case, row, field
    m, d, n = np.moveaxis(np.float32(fields), -1, 0)
    states = treeattn.AttentionState(*map(jnp.asarray, (m, d, n[..., None])))

    def body(states):
        own = jax.tree.map(lambda x: x[0], states)
        merged = merge_across(own, mesh.axis_names, method=method)
        return jax.tree.map(lambda x: x[None], merged)

    spec = P(mesh.axis_names)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(f).lower(states).compile()
    found, own = collectives(program), {"b": 2 * p, "l": 1, "d": 1, "item": 4, "shard": []}
    expected = sends(method, [*sizes.values()], h=len(ROWS), **own)
    assert (count_collectives(found), total_bytes(found)) == expected
    merged = program(states)
    for x in merged:
        if not METHODS[method].shards_heads:
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    whole = (np.concatenate(x, axis=1)[:, : len(ROWS)] for x in merged)  # of the first, or of all
    out, lse = treeattn.finalize(treeattn.AttentionState(*whole))
    wanted = treeattn.finalize(treeattn.reduce_chain(states))
    np.testing.assert_allclose(out, wanted[0], rtol=1e-5)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(wanted[1]))
