"""The example by Mosaic: interpreted, with races looked for, where JAX is new enough."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_weights

from labs.kernels import mosaic_decode
from labs.kernels.mosaic_decode import mosaic_attend
from treeattn import attend, finalize

pytestmark = pytest.mark.slow


@pytest.fixture
def mosaic():
    if why := mosaic_decode.missing():
        pytest.skip(why)


def inputs(b, l, h, h_kv, n, d, dv, dtype):
    rng = np.random.default_rng(0)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("shape", "lengths", "dtype"),
    [
        ((1, 1, 4, 2, 600, 64, 128), None, "bfloat16"),  # several splits, the last block overlaps
        ((2, 3, 8, 2, 304, 128, 64), [0, 290], "float16"),  # a text without keys
    ],
    ids=str,
)
def test_against_float64(mosaic, shape, lengths, dtype):
    q, k, v = inputs(*shape, dtype)
    options = {} if lengths is None else {"kv_lengths": np.array(lengths, np.int32)}
    if lengths is not None:  # what lies past them may be anything
        past = (np.arange(shape[4]) >= options["kv_lengths"][:, None])[..., None, None]
        k, v = (jnp.where(past, jnp.nan, x) for x in (k, v))
    f = jax.jit(functools.partial(attend, implementation=mosaic_attend))
    out, lse = finalize(f(q, k, v, **options))
    q, k, v = (np.nan_to_num(np.asarray(x, np.float64)) for x in (q, k, v))
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=2e-5)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=1e-6, atol=2e-6)


def test_what_does_not_fit_is_refused(mosaic, unchecked):
    for changes, match in (
        ({"l": 9}, r"^q: .* takes 32 queries a key head, got 36"),
        ({"n": 60}, r"^k: .* 64 keys or more, a multiple of 8, got 60"),
        ({"d": 96}, r"^q: .* head_dims of 64, 128, 192 or 256, got 96"),
        ({"dtype": "float32"}, r"^q: .* float16 or bfloat16, got float32"),
    ):
        sizes = {"b": 1, "l": 1, "h": 8, "h_kv": 2, "n": 64, "d": 64, "dv": 64, "dtype": "float16"}
        with pytest.raises(ValueError, match=match):
            mosaic_attend(*inputs(**(sizes | changes)), scale=1.0)


def test_an_older_jax_is_told():
    if not (why := mosaic_decode.missing()):
        pytest.skip("this JAX has Mosaic")
    q, k, v = inputs(1, 1, 2, 1, 64, 64, 64, "float16")
    with pytest.raises(ValueError, match=r"needs JAX 0\.11\.2 or newer"):
        mosaic_attend(q, k, v, scale=1.0)
    assert jax.__version__ in why
