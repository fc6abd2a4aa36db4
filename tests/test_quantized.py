"""Keys and values in 8 bits with scales, against float64 attention over what they stand for."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn import attend, attention, dequantize, finalize, kv_mesh, merge, quantize, tree_decode
from treeattn.cost.program import collectives, memory, total_bytes
from treeattn.devices.merge import METHODS
from treeattn.kernel.products import widen_float8

LARGEST = {"int8": 127, "float8_e4m3fn": 448}


# The numbers


def numbers_of(x, dtype):
    """(numbers, scale) in NumPy, and ml_dtypes for float8."""
    wide = np.asarray(x, np.float64)
    scale = np.abs(wide).max(axis=-1, initial=0) / LARGEST[dtype]
    steps = wide / np.where(scale > 0, scale, 1)[..., None]
    if dtype == "int8":
        return np.rint(steps).astype(np.int8), scale
    return steps.astype(ml_dtypes.float8_e4m3fn), scale


quantize_jitted = jax.jit(quantize, static_argnames="dtype")


@pytest.mark.parametrize("dtype", LARGEST)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-30, 1e-3, 1, 1e30]))
def test_each_number_is_the_nearest_step(dtype, seed, size):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 5, 3, 16)) * size * np.where(rng.random((2, 5, 3, 1)) < 0.3, 50, 1)
    x[rng.random((2, 5, 3)) < 0.1] = 0
    numbers, scale = quantize_jitted(x, dtype=dtype)
    expected, expected_scale = numbers_of(x, dtype)
    assert numbers.dtype == dtype and scale.dtype == np.float64
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(numbers), expected)
    error = np.abs(np.asarray(dequantize(numbers, scale)) - x)
    bound = np.maximum(np.abs(x) / 16, scale[..., None] / 1024)  # as documented
    bound = scale[..., None] / 2 if dtype == "int8" else bound
    assert (error <= bound * (1 + 1e-9)).all()


def test_ties_go_to_the_even_step():
    x = np.float32([127, 0.5, 1.5, -0.5, -2.5, 126.5]).reshape(1, 1, 1, 6)
    numbers, scale = quantize(x)
    np.testing.assert_array_equal(numbers[0, 0, 0], [127, 0, 2, 0, -2, 126])
    assert scale.item() == 1


@pytest.mark.parametrize(("wrong", "dtype"), [(np.nan, "int8"), (-np.inf, "float8_e4m3fn")])
def test_what_is_not_finite_has_the_scale_nan(wrong, dtype):
    x = np.ones((1, 3, 2, 4), np.float16)
    x[0, 1, 1, 2] = wrong
    numbers, scale = quantize(x, dtype)
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(scale), [[[0, 0], [0, 1], [0, 0]]])
    assert not np.asarray(numbers[0, 1, 1], np.float32).any()
    out, lse = finalize(attend(np.ones((1, 1, 2, 4)), numbers, numbers, **both(scale)))
    assert np.isfinite(out[:, :, 0]).all() and np.isnan(out[:, :, 1]).all()
    assert np.isnan(lse[0, 0, 1])


def test_zeros_have_a_scale_of_zero():
    numbers, scale = quantize(np.zeros((1, 2, 1, 4), np.float32))
    assert not np.asarray(scale).any() and not np.asarray(dequantize(numbers, scale)).any()
    out = attention(np.ones((1, 1, 1, 4), np.float32), numbers, numbers, **both(scale))
    np.testing.assert_array_equal(out, 0)


def test_every_number_of_float8_is_read_as_it_is():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(widen_float8(jnp.asarray(every)), every.astype(np.float32))


# Attention

# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "streams, rows": (2, 1, 4, 2, 1300, 32, 16),
    "many queries": (2, 5, 4, 2, 1100, 8, 6),
    "one key": (2, 3, 2, 1, 1, 4, 4),
}
SCALES = {
    "a token and head": lambda s: s,
    "a head": lambda s: s[:, :1],
    "one": lambda s: s[:1, :1, :1],
}


def both(scale):
    return {"key_scale": scale, "value_scale": scale}


def draw(seed, shape, dtype):
    """(q, k, v, key_scale, value_scale), options, rng: k and v in 8 bits, of any numbers."""
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(b, l, h, d)) * rng.choice([0.1, 1.0, 5.0])
    k, v = rng.normal(size=(b, n, h_kv, d)), rng.normal(size=(b, n, h_kv, dv))
    k, key_scale = numbers_of(k * rng.choice([1, 30], (b, n, h_kv, 1)), dtype)
    v, value_scale = numbers_of(v * rng.choice([1, 30], (b, n, h_kv, 1)), dtype)
    bias = rng.normal(size=(1, h, 1, n)) * 3
    bias[rng.random(bias.shape) < rng.choice([0.0, 0.5])] = -np.inf
    options = {
        "mask": rng.random((b, 1, l, n)) < rng.choice([0.0, 0.05, 0.5, 1.0]),
        "bias": bias,
        "kv_lengths": rng.integers(0, n + 1, b).astype(np.int32),
    }
    return (q, k, v, key_scale, value_scale), options, rng


def floats(numbers, scale):
    """What they stand for, in float64."""
    return np.asarray(numbers).astype(np.float64) * np.asarray(scale, np.float64)[..., None]


@functools.cache
def value_and_gradients(_shape, _dtype, _scales):
    """(out, lse) and gradients of Σ w·out + Σ u·lse over the rows with keys, compiled once."""

    def loss(q, key_scale, value_scale, bias, k, v, w, u, options):
        given = {"key_scale": key_scale, "value_scale": value_scale, "bias": bias}
        out, lse = finalize(attend(q, k, v, **given, **options))
        seen = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(w * out) + jnp.sum(u * seen), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))


CASES = [
    ("streams, rows", "int8", "a token and head"),
    ("streams, rows", "float8_e4m3fn", "a head"),
    ("many queries", "int8", "one"),
    ("many queries", "float8_e4m3fn", "a token and head"),
    ("one key", "int8", "a token and head"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "scales"), CASES)
def test_values_and_gradients(name, dtype, scales):
    shape = SHAPES[name]
    run = value_and_gradients(shape, dtype, scales)

    @settings(max_examples=12)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        (q, k, v, *given), options, rng = draw(seed, shape, dtype)
        key_scale, value_scale = map(SCALES[scales], given)
        w, u = rng.normal(size=(*q.shape[:3], shape[-1])), rng.normal(size=q.shape[:3])
        bias = options.pop("bias")
        (_, (out, lse)), found = run(q, key_scale, value_scale, bias, k, v, w, u, options)
        options["bias"] = bias
        wide_k, wide_v = floats(k, key_scale), floats(v, value_scale)
        np.testing.assert_allclose(out, dense_attention(q, wide_k, wide_v, **options), atol=1e-11)
        expected_lse = dense_weights(q, wide_k, **options)[1]
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-11, atol=1e-11)
        of_q, of_k, of_v = dense_gradients(q, wide_k, wide_v, w, u, **options)
        np.testing.assert_allclose(found[0], of_q, rtol=1e-9, atol=1e-9)
        for got, of_wide, numbers in zip(found[1:3], (of_k, of_v), (k, v), strict=True):
            by_entry = (of_wide * numbers.astype(np.float64)).sum(axis=-1)
            shared = tuple(i for i in range(3) if got.shape[i] < by_entry.shape[i])
            expected = by_entry.sum(axis=shared, keepdims=True)
            np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)
        assert np.isfinite(found[3]).all()

    check()


@pytest.mark.slow
def test_called_as_users_call_it():
    """In float32, without jit, and by `attention`; in parts that merge; and under vmap."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 1, 4, 32)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 600, 2, 32)).astype(np.float32)
    (k, key_scale), (v, value_scale) = quantize(k), quantize(v)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    expected = dense_attention(q, floats(k, key_scale), floats(v, value_scale))
    out, _ = finalize(attend(q, k, v, **scales))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(attention(q, k, v, **scales), expected, atol=1e-6)
    half = attention(jnp.asarray(q, jnp.bfloat16), k, v, **scales)
    assert half.dtype == jnp.bfloat16

    def part(keys):
        cut = {name: x[:, keys] for name, x in scales.items()}
        return attend(q, k[:, keys], v[:, keys], **cut)

    merged, _ = finalize(merge(part(slice(500, None)), part(slice(0, 500))))
    np.testing.assert_allclose(merged, expected, atol=1e-6)
    # A float state merges with it: new tokens beside a cache.
    wide = (dequantize(k, key_scale)[:, :7], dequantize(v, value_scale)[:, :7])
    mixed, _ = finalize(merge(attend(q, *wide), part(slice(7, None))))
    np.testing.assert_allclose(mixed, expected, atol=1e-6)

    def one(q, k, v, key_scale, value_scale):
        given = {"key_scale": key_scale[None], "value_scale": value_scale[None]}
        return attention(q[None], k[None], v[None], **given)[0]

    rows = jax.vmap(one)(q, k, v, key_scale, value_scale)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_causal():
    (q, k, v, *scales), _, _ = draw(0, (1, 40, 2, 2, 40, 8, 6), "int8")
    given = {"key_scale": scales[0], "value_scale": scales[1]}
    wide = floats(k, scales[0]), floats(v, scales[1])
    expected = dense_attention(q, *wide, mask=np.tri(40, dtype=bool)[None, None])
    np.testing.assert_allclose(attention(q, k, v, causal=True, **given), expected, atol=1e-11)


@pytest.mark.parametrize(("n", "bad"), [(40, np.inf), (600, np.nan)])
def test_scales_that_nobody_sees_may_be_anything(bad, n):
    (q, k, v, key_scale, value_scale), _, _ = draw(1, (2, 1, 2, 2, n, 16, 8), "int8")
    lengths = np.array([0, 30])
    expected = dense_attention(q, floats(k, key_scale), floats(v, value_scale), kv_lengths=lengths)
    key_scale[0] = key_scale[1, 30:] = value_scale[0] = value_scale[1, 30:] = bad

    def total(q, key_scale, value_scale):
        given = {"key_scale": key_scale, "value_scale": value_scale}
        out, lse = finalize(attend(q, k, v, kv_lengths=lengths, **given))
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse)), out

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), gradients = run(q, key_scale, value_scale)
    np.testing.assert_allclose(out, expected, atol=1e-11)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.any(gradients[0][0]) and not np.any(gradients[1][0])


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("dtype", LARGEST)
def test_no_cache_of_floats_is_made(dtype, queries):
    """What is held besides the arguments is what float32 needs: it does not grow with the keys."""

    def temporary(n, dtype):
        q = jax.ShapeDtypeStruct((1, queries, 8, 64), jnp.float32)
        k = jax.ShapeDtypeStruct((1, n, 2, 64), dtype)
        scale = jax.ShapeDtypeStruct((1, n, 2), jnp.float32)
        given = {} if dtype == jnp.float32 else both(scale)
        return memory(jax.jit(attend).lower(q, k, k, **given).compile()).temporary_bytes

    held = temporary(1 << 14, dtype)
    assert temporary(1 << 15, dtype) - held < 1000
    assert held <= 1.01 * temporary(1 << 14, jnp.float32)


# What is wrong

Q = np.ones((1, 1, 2, 4), np.float32)
K = np.ones((1, 3, 2, 4), np.float32)
K8 = K.astype(np.int8)
SCALE = np.ones((1, 3, 2), np.float32)


# (what is changed of a good call, the error, what it says)
WRONG = [
    ({"key_scale": None}, ValueError, "key_scale: expected one beside k of int8, got None"),
    ({"value_scale": None}, ValueError, "value_scale: expected one beside v of int8, got None"),
    (both(None), ValueError, "key_scale: expected one beside k of int8, got None"),
    ({"k": K, "v": K}, ValueError, "key_scale: goes with k of int8 or float8_e4m3fn, got k of"),
    ({"v": K}, ValueError, "value_scale: goes with v of int8 or float8_e4m3fn, got v of"),
    ({"v": K8.astype(jnp.float8_e4m3fn)}, TypeError, "one dtype, got k int8, v float8_e4m3fn"),
    ({"k": K8.astype(np.uint8)}, ValueError, "k of int8 or float8_e4m3fn, .* dtype uint8"),
    ({"k": K8.astype(jnp.float8_e5m2)}, ValueError, "key_scale: .* dtype float8_e5m2"),
    ({"q": Q.astype(np.int8)}, TypeError, "q: expected a floating-point array, got .* int8"),
    ({"k": K8.tolist()}, ValueError, "key_scale: goes with k of int8"),
    ({"key_scale": SCALE[:, :2]}, ValueError, r"key_scale: .*kv_heads\) = \(1, 3, 2\), got"),
    ({"value_scale": SCALE[0]}, ValueError, "value_scale: expected a shape that broadcasts"),
    ({"key_scale": SCALE[..., None]}, ValueError, "key_scale: expected a shape that broadcasts"),
    ({"value_scale": SCALE.astype(int)}, TypeError, "value_scale: .*floating-point.* int64"),
    ({"ends": np.array([[3, 2, 3]]), "q": K}, ValueError, "ends: .* take no key_scale"),
    ({"implementation": "exact"}, ValueError, "'exact' takes no keys of int8 with scales"),
    ({"implementation": "pallas"}, ValueError, "use 'blockwise', or floats: dequantize"),
    ({"implementation": "flash"}, ValueError, "implementation: 'flash' takes no keys of int8"),
    ({"implementation": dense_attention}, ValueError, "implementation: dense_attention takes no"),
    ({"implementation": "nonsense"}, ValueError, "implementation: expected one of"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_refused(changes, error, message, unchecked):
    with pytest.raises(error, match=message):
        attend(**{"q": Q, "k": K8, "v": K8} | both(SCALE) | changes)


def test_a_gpu_is_left_to_the_plain_implementation():
    chosen = treeattn.which_implementation(Q, K8, K8, platform="cuda", **both(SCALE))
    assert chosen == "blockwise"


def test_method_exact_takes_none():
    mesh = kv_mesh(jax.devices()[:2])
    with pytest.raises(ValueError, match="'exact' takes no keys of int8 with scales"):
        tree_decode(Q, K8, K8, mesh=mesh, axis="kv", method="exact", **both(SCALE))


def test_what_does_not_fit_the_pair(unchecked):
    with pytest.raises(TypeError, match="x: expected a floating-point array, got dtype int8"):
        quantize(K8)
    with pytest.raises(ValueError, match="x: expected 4 axes"):
        quantize(K[0])
    for dtype in ("int4", "nonsense", jnp.float8_e5m2, np.float32, None):
        with pytest.raises(ValueError, match="dtype: expected int8 or float8_e4m3fn, got"):
            quantize(K, dtype)
    with pytest.raises(TypeError, match="numbers: expected int8 or float8_e4m3fn, got"):
        dequantize(K, SCALE)
    with pytest.raises(ValueError, match="scale: expected a shape that broadcasts to"):
        dequantize(K8, SCALE[:, :2])


# Devices

DECODERS = {name: functools.partial(tree_decode, method=name) for name in METHODS}
DECODERS |= {"ring": treeattn.ring_decode, "pass_q": treeattn.pass_q_decode}


@functools.cache
def decoder(name, shape):
    """(q, k, v, scales, options) -> out, compiled once for each dtype."""
    nodes = shape[0] if len(shape) == 2 else None
    mesh = kv_mesh(jax.devices()[: np.prod(shape)], nodes=nodes)
    decode = functools.partial(DECODERS[name], mesh=mesh, axis=mesh.axis_names)

    def run(q, k, v, key_scale, value_scale, options):
        return decode(q, k, v, key_scale=key_scale, value_scale=value_scale, **options)

    return jax.jit(run)


ON_MESHES = [
    ("allreduce", (2, 3), 37, "int8", "a token and head"),
    ("butterfly", (3,), 37, "float8_e4m3fn", "a token and head"),
    ("reduce_scatter", (2,), 37, "int8", "a head"),
    ("hierarchical", (2, 2), 37, "int8", "a token and head"),
    ("gather", (4,), 1, "int8", "a head"),
    ("all_to_all", (3,), 37, "int8", "one"),
    ("ring", (3,), 37, "int8", "a token and head"),
    ("ring", (4,), 5, "float8_e4m3fn", "a head"),
    ("pass_q", (2,), 37, "float8_e4m3fn", "a token and head"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "n", "dtype", "scales"), ON_MESHES)
def test_shards_with_scales(name, shape, n, dtype, scales):
    run = decoder(name, shape)

    @settings(max_examples=5, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        (q, k, v, *given), options, _ = draw(seed, (2, 2, 4, 2, n, 8, 6), dtype)
        key_scale, value_scale = map(SCALES[scales], given)
        out = run(q, k, v, key_scale, value_scale, options)
        wide = floats(k, key_scale), floats(v, value_scale)
        np.testing.assert_allclose(out, dense_attention(q, *wide, **options), atol=1e-11)

    check()


def test_a_cache_stays_where_it_is_with_its_scales():
    """Rows, heads and text on axes of their own; and blocks of the same bits on 2 and 4 devices."""
    mesh = kv_mesh(jax.devices()[:8], batch=2, heads=2)
    (q, k, v, *scales), _, _ = draw(3, (2, 1, 4, 2, 64, 8, 8), "int8")
    expected = dense_attention(q, floats(k, scales[0]), floats(v, scales[1]))
    lies = NamedSharding(mesh, P("batch", "kv", "heads"))
    k, v, key_scale, value_scale = (jax.device_put(x, lies) for x in (k, v, *scales))
    given = {"key_scale": key_scale, "value_scale": value_scale}
    out = tree_decode(q, k, v, mesh=mesh, axis="kv", **given)
    np.testing.assert_allclose(out, expected, atol=1e-11)
    assert out.sharding.spec == P("batch", None, "heads")
    bits = []
    for p in (2, 4):
        how = {"mesh": kv_mesh(jax.devices()[:p]), "axis": "kv", "method": "butterfly", "block": 16}
        out = tree_decode(
            q, *map(np.asarray, (k, v)), key_scale=scales[0], value_scale=scales[1], **how
        )
        np.testing.assert_allclose(out, expected, atol=1e-11)
        bits.append(np.asarray(out).tobytes())
    assert bits[0] == bits[1]


def sent(name, dtype):
    """The collectives of a decoding step over four devices, as (kind, shapes)."""
    mesh = kv_mesh(jax.devices()[:4])

    def lying(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    q = lying((1, 1, 8, 64), jnp.float32, P())
    k = lying((1, 4096, 2, 64), dtype, P(None, "kv"))
    scale = lying((1, 4096, 2), jnp.float32, P(None, "kv"))
    given = {} if dtype == jnp.float32 else both(scale)
    decode = jax.jit(functools.partial(DECODERS[name], mesh=mesh, axis="kv"))
    return collectives(decode.lower(q, k, k, **given).compile())


@pytest.mark.parametrize("name", ["allreduce", "butterfly", "all_to_all"])
def test_the_messages_are_those_of_a_float_cache(name):
    """The state does not know in how many bits the keys were: the same collectives and bytes."""
    assert sent(name, jnp.int8) == sent(name, jnp.float8_e4m3fn) == sent(name, jnp.float32)


def test_a_ring_sends_numbers_and_scales():
    whole = total_bytes(sent("ring", jnp.float32))
    small = total_bytes(sent("ring", jnp.int8))
    assert small / whole == (64 + 4) / (4 * 64)
