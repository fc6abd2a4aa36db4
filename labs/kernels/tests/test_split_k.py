"""The split-K kernel, interpreted, against dense attention in float64, and lowered for CUDA."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_weights

from labs.kernels.cases import draw
from labs.kernels.split_k import split_k_attend
from treeattn import attend, finalize, kv_mesh, ring_decode, tree_decode
from treeattn_conformance import check_attention

pytestmark = pytest.mark.slow

ERROR = {"float32": 2e-6, "bfloat16": 3e-5, "float16": 3e-6}  # of values near 1

eager = functools.partial(attend, implementation=split_k_attend)
run = jax.jit(eager)


def check(arrays, state, **options):
    """Asserts that a state, in float32, is that of dense attention in float64."""
    assert {x.dtype for x in state} == {jnp.dtype("float32")}
    out, lse = finalize(state)
    error = 5 * ERROR[str(arrays[0].dtype)]
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=error)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", ERROR)
def test_the_suites_questions(dtype):
    def kernel(q, k, v, *, query_positions=None, key_positions=None, mask=None, **options):
        if query_positions is not None:
            seen = key_positions <= query_positions[:, None]
            mask = seen if mask is None else mask & seen
        if lacking := {"sinks", "window"} & set(options):
            raise NotImplementedError(*lacking)
        arrays = (jnp.asarray(x, dtype) for x in (q, k, v))
        return finalize(run(*arrays, mask=mask, **options))

    large = [
        "34 heads, 133 queries",
        "512 keys, 128 queries",
        "a row without keys",
        "a causal prompt of 513",
    ]
    only = None if dtype == "float32" else large
    report = check_attention(kernel, dtype=dtype, tolerance=5 * ERROR[dtype], only=only)
    report.raise_for_failures()


def test_a_mask_and_a_bias_of_each_shape():
    arrays = draw((2, 3, 4, 2, 600, 16, 24), "float32")
    rng, full = np.random.default_rng(0), (2, 4, 3, 600)
    for shared in (1, 6, 12):
        shape = tuple(1 if shared >> i & 1 else size for i, size in enumerate(full))
        options = {"bias": rng.normal(size=shape), "mask": rng.random(shape) < 0.7}
        options["bias"] = options["bias"].astype(("float16", "float64")[shared % 2])
        options["bias"][rng.random(shape) < 0.3] = -np.inf
        options["kv_lengths"] = rng.integers(0, 601, 2)
        check(arrays, run(*arrays, **options), **options)


@pytest.mark.parametrize("name", ["mask", "bias", "kv_lengths"])
def test_what_is_hidden_from_all_may_be_nan(name):
    """A row without keys has the identity as its state."""
    q, k, v = draw((2, 3, 4, 2, 600, 64, 64), "bfloat16")
    lengths = np.array([0, 70], np.int32)
    visible = (np.arange(600) < lengths[:, None])[:, None, None]
    bias = np.where(visible, 0, -np.inf).astype(np.float32)
    options = {name: {"mask": visible, "bias": bias, "kv_lengths": lengths}[name]}
    rows = np.moveaxis(visible, -1, 1)
    arrays = q, *(jnp.where(rows, x, jnp.nan) for x in (k, v))
    state = run(*arrays, **options)
    assert np.all(np.isneginf(state.max[0]))
    assert not np.any(state.denominator[0]) and not np.any(state.numerator[0])
    check([jnp.nan_to_num(x) for x in arrays], state, **options)


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
    """One key leads, and 16,383 others weigh e⁻¹⁶ each, where float16 loses bits."""
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


@pytest.mark.parametrize("decode", [tree_decode, ring_decode])
def test_over_devices(decode):
    arrays = draw((2, 2, 4, 2, 301, 32, 32), "float32")
    options = {"kv_lengths": np.array([17, 290], np.int32)}
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


# Lowered for CUDA without a GPU: the kernel over the keys, and the kernel over the splits' states


def on_cuda():
    """A context for lowering to an H100, which Pallas asks for since JAX 0.11."""
    try:
        about = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    except (AttributeError, TypeError):  # an older JAX
        return contextlib.nullcontext()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=about)
    return jax.sharding.use_abstract_mesh(mesh)


def kernels(shape, dtype="bfloat16", **options) -> int:
    """The number of kernels to which a call is lowered."""
    b, l, h, h_kv, n, d, dv = shape
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    with on_cuda():
        traced = jax.jit(eager).trace(*(jax.ShapeDtypeStruct(x, dtype) for x in shapes), **options)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @__gpu$xla.gpu.triton")


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("d", [96, 256])
def test_every_dtype_and_width_is_lowered(dtype, d):
    options = {"mask": np.ones((2, 1, 5, 4096), bool), "bias": np.ones((1, 16, 1, 4096))}
    shape = 2, 5, 16, 4, 4096, d, d
    assert kernels(shape, dtype, **options, kv_lengths=np.ones(2, int), scale=jnp.float32(1)) == 2


def test_one_split_takes_no_merge():
    assert kernels((2, 1, 16, 4, 256, 128, 128), kv_lengths=np.array([9, 256])) == 1


def test_heads_and_tiles_are_in_the_grids_first_dimension():
    """CUDA's other two end at 65,535. A text of 32,768 tokens and 128 heads on one key head."""
    assert kernels((1, 32_768, 128, 1, 64, 256, 256)) == 1


def test_the_kernel_multiplies_by_tensor_cores_whatever_jax_is_set_to():
    """Tensor cores round factors, so there are several products: three in float32."""
    with jax.default_matmul_precision("highest"):
        arrays = draw((2, 1, 16, 4, 4096, 128, 128), "float32")
        program = str(jax.make_jaxpr(eager)(*arrays))
    assert program.count("dot_general") == 2 * (3 + 3)  # compiled and interpreted
    assert program.count("Precision.DEFAULT") >= 12 and "HIGHEST" not in program
