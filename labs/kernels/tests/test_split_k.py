"""The split-K kernel: interpreted, against dense attention in float64; and lowered for CUDA."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

from labs.kernels import tiles
from labs.kernels.split_k import split_k_attend
from treeattn import ancestor_mask, attend, finalize, kv_mesh, merge, ring_decode, tree_decode

pytestmark = pytest.mark.slow

# (batch, queries, heads, key heads, keys, head_dim, value head_dim)
SHAPES = {
    "one query, several splits": (1, 1, 2, 2, 1300, 64, 64),
    "grouped heads, rows of their own": (3, 1, 9, 3, 600, 128, 128),
    "few queries, odd sizes": (2, 5, 6, 2, 300, 80, 200),
    "more queries than a tile": (1, 40, 8, 4, 90, 256, 24),
    "one key": (2, 3, 2, 1, 1, 4, 5),
}
ERROR = {"float32": 2e-6, "bfloat16": 3e-5, "float16": 3e-6}  # of values near 1

eager = functools.partial(attend, implementation=split_k_attend)
run = jax.jit(eager, static_argnames="causal")


def draw(seed, shape, which, dtype):
    """(q, k, v), options: everything but the shapes comes from the seed."""
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    options = {
        "mask": rng.random((b, 1, l, n)) < rng.choice([0.0, 0.05, 0.5, 1.0]),
        "bias": rng.normal(size=(1, h, 1, n)).astype(np.float32),
        "kv_lengths": rng.integers(0, n + 1, b).astype(np.int32),
    }
    options["bias"][rng.random((1, h, 1, n)) < rng.choice([0.0, 0.5])] = -np.inf
    return (q, k, v), {name: options[name] for name in which}


def check(arrays, state, *, error, **options):
    """That a state is that of dense attention in float64, in float32."""
    assert {x.dtype for x in state} == {jnp.dtype("float32")}
    out, lse = finalize(state)
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=5 * error)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=1e-6, atol=2e-6)


ALL = ("mask", "bias", "kv_lengths")
CASES = [(name, "float32", ALL) for name in SHAPES]
CASES += [("grouped heads, rows of their own", x, ALL) for x in ("bfloat16", "float16")]
CASES += [("one query, several splits", "bfloat16", ())]


@pytest.mark.parametrize(("name", "dtype", "which"), CASES, ids=str)
def test_any_values_lengths_and_masks(name, dtype, which):
    f = jax.jit(eager)
    for seed in range(5):
        arrays, options = draw(seed, SHAPES[name], which, dtype)
        check(arrays, f(*arrays, **options), error=ERROR[dtype], **options)


@pytest.mark.parametrize("d", [1, 72, 256])
def test_every_width(d):
    arrays, _ = draw(d, (1, 1, 4, 2, 70, d, d), (), "bfloat16")
    check(arrays, run(*arrays), error=ERROR["bfloat16"])


def test_a_mask_and_a_bias_of_each_shape():
    b, l, h, _, n, _, _ = shape = (2, 3, 4, 2, 50, 16, 16)
    arrays, _ = draw(1, shape, (), "float32")
    rng, full = np.random.default_rng(0), (b, h, l, n)
    for shared in (1, 6, 12):
        shape = tuple(1 if shared >> i & 1 else size for i, size in enumerate(full))
        options = {"bias": rng.normal(size=shape), "mask": rng.random(shape) < 0.7}
        options["bias"] = options["bias"].astype(("float16", "float64")[shared % 2])
        check(arrays, run(*arrays, **options), error=2e-6, **options)


def loss(f, q, k, v, w, u, **options):
    out, lse = finalize(f(q, k, v, **options))
    return jnp.sum(w * out) + jnp.sum(u * jnp.where(jnp.isneginf(lse), 0, lse))


def test_the_gradient_is_the_blockwise_one():
    (q, k, v), options = draw(4, (2, 3, 4, 2, 300, 16, 24), ("mask", "kv_lengths"), "float32")
    rng = np.random.default_rng(1)
    w, u = rng.normal(size=(*q.shape[:3], 24)), rng.normal(size=q.shape[:3])
    found = jax.jit(jax.grad(functools.partial(loss, run), (0, 1, 2)))(q, k, v, w, u, **options)
    for ours, expected in zip(found, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize(
    "hide",
    [
        {"mask": np.zeros((1, 1, 1, 1), bool)},
        {"bias": np.full((1, 1, 1, 1), -np.inf, np.float32)},
        {"kv_lengths": np.zeros(1, np.int32)},
    ],
    ids=lambda hide: next(iter(hide)),
)
def test_no_keys_give_the_identity(hide):
    (q, k, v), _ = draw(0, (1, 2, 2, 2, 600, 16, 8), (), "float32")
    state = run(q, k, v, **hide)
    assert np.all(np.isneginf(state.max))
    assert not np.any(state.denominator) and not np.any(state.numerator)


@pytest.mark.parametrize("name", ["mask", "bias", "kv_lengths"])
def test_what_is_hidden_from_all_may_be_nan(name):
    q, k, v = arrays = draw(0, (2, 3, 4, 2, 72, 64, 64), (), "bfloat16")[0]
    visible = np.ones((2, 1, 1, 72), bool)
    visible[0, ..., 0 if name == "kv_lengths" else 3 :] = False
    options = {
        "mask": {"mask": visible},
        "bias": {"bias": np.where(visible, 0, -np.inf).astype(np.float32)},
        "kv_lengths": {"kv_lengths": np.array([0, 72], np.int32)},
    }[name]
    rows = np.moveaxis(visible, -1, 1)
    poisoned = [jnp.where(rows, x, jnp.nan) for x in (k, v)]
    check(arrays, run(q, *poisoned, **options), error=ERROR["bfloat16"], **options)


@pytest.mark.parametrize("dtype", ERROR)
def test_finite_inputs_make_no_nan(dtype):
    f = jax.jit(eager)

    @settings(max_examples=15)
    @given(seed=st.integers(0, 2**32), qk=st.sampled_from([1, 100, 1e4, 1e19, 1e30, 3e38]))
    def test(seed, qk):
        rng, top = np.random.default_rng(seed), float(jnp.finfo(dtype).max)
        q, k, v = (
            jnp.asarray(
                np.clip(size * rng.choice([-1, 0, 1e-3, 1], (1, x, 1, 16)), -top, top), dtype
            )
            for x, size in ((1, qk), (600, qk), (600, 3e38))
        )
        out, lse = finalize(f(q, k, v))
        assert not np.any(np.isnan(out)) and np.all(np.isfinite(lse))

    test()


def test_small_weights_in_float16():
    """One key leads, and 16,383 others weigh e⁻¹⁶ each: below the numbers that float16 rounds."""
    n = 1 << 14
    k = np.zeros((1, n, 1, 16), np.float16)
    k[:, 0, :, 0] = 16
    q = np.zeros((1, 1, 1, 16), np.float16)
    q[..., 0] = 1
    v = np.ones((1, n, 1, 16), np.float16)
    v[:, 0] = 0
    out, _ = finalize(run(q, k, v, scale=1.0))
    tail = (n - 1) * np.exp(-16.0)
    np.testing.assert_allclose(out[0, 0, 0], tail / (1 + tail), rtol=2e-5)


def test_what_the_parts_of_a_factor_leave_out():
    """As `dot` says: of a product of float32, and of a weight that multiplies bfloat16."""
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    high, low = (np.asarray(part, np.float64) for part in tiles.split_float(x, jnp.float32))
    assert np.all(high + low == x)
    assert 0.9 * 2**-10 < np.max(np.abs(low / x)) <= 2**-10
    high, low = (np.asarray(part, np.float64) for part in tiles.split_float(x, jnp.bfloat16))
    assert 0.2 * 2**-15 < np.max(np.abs((high + low) / x - 1)) <= 2**-15


def test_a_tree_of_candidates_over_a_cache():
    """The state after the cache, and that after the candidates under their mask, merged."""
    parents = [-1, 0, 0, 1, -1, 4, 2, 6]
    l, n = len(parents), 500
    (q, k, v), _ = draw(0, (1, l, 8, 2, n + l, 64, 64), (), "bfloat16")
    own = ancestor_mask(np.array(parents))
    state = merge(run(q, k[:, :n], v[:, :n]), run(q, k[:, n:], v[:, n:], mask=own[None, None]))
    mask = np.concatenate([np.ones((l, n), bool), own], axis=1)
    check((q, k, v), state, error=ERROR["bfloat16"], mask=mask)


@pytest.mark.parametrize("decode", [tree_decode, ring_decode])
def test_over_devices(decode):
    arrays, options = draw(2, (2, 2, 4, 2, 301, 32, 32), ("kv_lengths",), "float32")
    sharding = NamedSharding(kv_mesh(jax.devices()[:3]), P(None, "kv"))
    out = decode(*arrays, **options, sharding=sharding, implementation=split_k_attend)
    np.testing.assert_allclose(out, dense_attention(*arrays, **options), atol=1e-5)


def test_what_is_refused(unchecked):
    wide = [jnp.ones((1, 1, 1, 257), jnp.float32)] * 3
    with pytest.raises(ValueError, match=r"^q: .* head_dim up to 256, got 257"):
        eager(*wide)
    many = [jax.ShapeDtypeStruct((1 << 16, 1, 1, 16), jnp.float32)] * 3
    with pytest.raises(ValueError, match=r"^q: .* at most 65535 rows, got 65536"):
        jax.eval_shape(eager, *many)


# Lowered for CUDA, without a GPU.

CALL = "custom_call @__gpu$xla.gpu.triton"
BOTH = 2  # kernels: over the keys, and over the states of their splits


def on_cuda(devices: int = 1):
    """(a mesh of abstract devices, a context in which programs are lowered for them): from
    JAX 0.11 or so on, Pallas asks which GPU it is."""
    options, context = {}, contextlib.nullcontext
    about = getattr(jax.sharding, "AbstractDevice", None)
    if about is not None and "platform" in inspect.signature(about).parameters:
        options = {"abstract_device": about("NVIDIA H100 80GB HBM3", 132, "cuda")}
        context = jax.sharding.use_abstract_mesh
    mesh = AbstractMesh((devices,), ("kv",), axis_types=(AxisType.Auto,), **options)
    return mesh, context(mesh) if options else context()


def lowered(f, *arguments, **options) -> str:
    with on_cuda()[1]:
        traced = jax.jit(f).trace(*arguments, **options)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def shapes(dtype="bfloat16", *, b=2, l=1, h=16, h_kv=4, n=4096, d=128, dv=128):
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)
EVERYTHING = {
    "mask": jax.ShapeDtypeStruct((2, 1, 5, 4096), jnp.bool_),
    "bias": jax.ShapeDtypeStruct((1, 16, 1, 4096), jnp.float32),
    "kv_lengths": LENGTHS,
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
}


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("d", "dv"), [(96, 96), (256, 256)])
def test_every_dtype_and_width_is_lowered(dtype, d, dv):
    text = lowered(eager, *shapes(dtype, l=5, d=d, dv=dv), **EVERYTHING)
    assert text.count(CALL) == BOTH


def test_one_split_takes_no_merge():
    assert lowered(eager, *shapes(n=256), kv_lengths=LENGTHS).count(CALL) == 1


def test_heads_and_tiles_are_in_the_grids_first_dimension():
    """CUDA's other two end at 65,535. A text of 32,768 tokens and 128 heads on one key head."""
    q, k, v = shapes(b=1, l=32_768, h=128, h_kv=1, n=64, d=256, dv=256)
    assert tiles.tile_of(q, v).tiles > 65_535
    assert lowered(eager, q, k, v).count(CALL) == 1


def test_the_kernel_multiplies_by_tensor_cores_whatever_jax_is_set_to():
    """They round factors, which is why there are several products: three in float32."""
    with jax.default_matmul_precision("highest"):
        program = str(jax.make_jaxpr(eager)(*shapes("float32")))
    assert program.count("dot_general") == 2 * (3 + 3)  # compiled and interpreted
    assert program.count("Precision.DEFAULT") >= 12 and "HIGHEST" not in program
