"""A function as implementation=: what it is given and must return, and how far the rest reaches."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn import AttentionState, attend, attention, finalize, kv_mesh, tree_decode
from treeattn_conformance import check_attention
from treeattn_llama import Llama

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
EXAMPLE = Path(__file__).parent.parent / "examples" / "kernels.py"
spec = importlib.util.spec_from_file_location("kernels", EXAMPLE)
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


def draw(b=2, l=3, h=4, h_kv=2, n=40, d=16, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, d)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def plain(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False):
    """A kernel as somebody might write it, in plain JAX, with gradients."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2).astype(jnp.float32) for x in (k, v))
    s = jnp.einsum("blhd,bnhd->bhln", q.astype(jnp.float32), k) * scale
    seen = jnp.ones(s.shape, bool)
    if mask is not None:
        seen = seen & mask
    if bias is not None:
        s = s + bias
    if kv_lengths is not None:
        seen = seen & (jnp.arange(k.shape[1]) < kv_lengths[:, None])[:, None, None]
    if causal:
        seen = seen & jnp.tri(q.shape[1], dtype=bool)
    lse = jax.nn.logsumexp(s, axis=-1, where=seen)
    p = jnp.where(seen, jnp.exp(s - jnp.where(jnp.isinf(lse), 0, lse)[..., None]), 0)
    return jnp.einsum("bhln,bnhd->blhd", p, v).astype(q.dtype), lse.swapaxes(1, 2)


def plain_state(q, k, v, **options):
    return treeattn.from_output(*plain(q, k, v, **options))


def without_options(q, k, v, *, scale):
    return plain(q, k, v, scale=scale)


def returns(change):
    """A kernel that returns something else than it should."""

    def off(q, k, v, **options):
        return change(*plain(q, k, v, **options))

    return off


WRONG = {
    "out alone": (lambda out, lse: out, TypeError, "off to return an AttentionState or .out, lse."),
    "lse in 16 bits": (
        lambda out, lse: (out, lse.astype(jnp.bfloat16)),
        TypeError,
        "off's lse in float32 or wider, got bfloat16",
    ),
    "axes of lse": (
        lambda out, lse: (out, lse.swapaxes(1, 2)),
        ValueError,
        r"off's lse \(batch, q_len, heads\) = \(2, 3, 4\), got \(2, 4, 3\)",
    ),
    "heads first": (
        lambda out, lse: (out.swapaxes(1, 2), lse),
        ValueError,
        r"off's out .*value head_dim\) = \(2, 3, 4, 16\), got \(2, 4, 3, 16\)",
    ),
    "integers": (lambda out, lse: (out.astype(int), lse), TypeError, "off's out .* got int"),
    "None": (lambda out, lse: (out, None), TypeError, "off's lse .* got NoneType"),
    "a narrow state": (
        lambda out, lse: AttentionState(*(x.astype(jnp.float16) for x in (lse, lse, out))),
        TypeError,
        "off's max in float32 or wider, got float16",
    ),
    "a state of other axes": (
        lambda out, lse: AttentionState(lse, lse[:, :1], out.astype(jnp.float32)),
        ValueError,
        r"off's denominator .* got \(2, 1, 4\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_returns_is_checked(name):
    change, error, message = WRONG[name]
    with pytest.raises(error, match="^implementation: expected " + message):
        attend(*draw(), implementation=returns(change))


def test_what_cannot_be_asked_of_a_function_is_refused_by_name():
    q, k, v = draw()
    asked = {"mask": np.ones((2, 1, 3, 40), bool), "bias": np.zeros((1, 1, 3, 40), np.float32)}
    asked["kv_lengths"] = np.array([3, 40])
    for name, value in asked.items():
        with pytest.raises(ValueError, match=f"^{name}: the implementation without_options takes"):
            attend(q, k, v, implementation=without_options, **{name: value})
    with pytest.raises(ValueError, match=r"^causal: the implementation without_options takes"):
        attend(q, k[:, :3], v[:, :3], causal=True, implementation=without_options)
    with pytest.raises(ValueError, match=r"^ends: the implementation plain is given none"):
        attend(q, k[:, :3], v[:, :3], ends=np.full((2, 3), 3), implementation=plain)
    with pytest.raises(ValueError, match=r"^kv_lengths: .*devices cannot share evenly"):
        where = {"mesh": kv_mesh(jax.devices()[:3]), "axis": "kv"}
        tree_decode(q, k, v, implementation=without_options, **where)
    with pytest.raises(ValueError, match=r"implementation: method 'exact' takes"):
        where = {"mesh": kv_mesh(jax.devices()[:2]), "axis": "kv", "method": "exact"}
        tree_decode(q, k, v, implementation=plain, **where)

    class Unhashable:
        __hash__ = None

        def __call__(self, q, k, v, *, scale):
            return plain(q, k, v, scale=scale)

    with pytest.raises(TypeError, match=r"implementation: .*hashable function, got Unhashable"):
        attend(q, k, v, implementation=Unhashable())
    with pytest.raises(ValueError, match=r"implementation: expected one of .*, or a function"):
        attend(q, k, v, implementation="plain")
    narrow = jax.jit(functools.partial(attend, implementation=without_options))
    with pytest.raises(TypeError, match=r"without_options's lse in float64 or wider, got float32"):
        narrow(*draw(dtype=np.float64))


def test_what_a_function_is_given():
    given = []

    def kernel(q, k, v, **options):
        given.append((q, k, v, options))
        return plain(q, k, v, **options)

    q, k, v = draw(dtype=np.float16)
    attend(q, k, v, implementation=kernel)
    ((*arrays, options),) = given
    assert [x.dtype for x in arrays] == ["float16"] * 3 and [x.shape for x in arrays] == [
        x.shape for x in (q, k, v)
    ]
    assert options == {"scale": 0.25} and isinstance(options["scale"], float)
    mask = np.ones((1, 1, 3, 40), bool)
    lengths = jax.jit(lambda n: attend(q, k, v, kv_lengths=n, mask=mask, implementation=kernel))
    out, _ = finalize(lengths(np.array([-3, 90], np.int64)))
    assert not out[0].any() and out[1].any()
    options = given[1][-1]
    assert set(options) == {"scale", "mask", "kv_lengths"}
    assert options["kv_lengths"].dtype == "int32" and options["mask"].shape == (1, 1, 3, 40)
    traced = jax.jit(lambda scale: attend(q, k, v, scale=scale, implementation=kernel))
    np.testing.assert_allclose(finalize(traced(0.25))[1], finalize(attend(q, k, v))[1], rtol=1e-5)
    assert given[2][-1]["scale"].shape == () and given[2][-1]["scale"].dtype == "float32"
    nothing = attend(q, k[:, :0], v[:, :0], implementation=kernel)
    assert len(given) == 3 and not nothing.denominator.any()
    assert nothing.numerator.shape == q.shape and np.isneginf(nothing.max).all()
    assert treeattn.which_implementation(q, k, v, implementation=kernel) is kernel


@pytest.mark.parametrize("kernel", [plain, plain_state])
def test_values_and_gradients_are_the_functions_own(kernel):
    """jit, vmap and grad, of attend and over a mesh, with all options."""
    q, k, v = draw()
    rng = np.random.default_rng(1)
    lengths = np.array([40, 7])
    options = {"mask": rng.random((2, 1, 3, 40)) < 0.5, "kv_lengths": lengths, "scale": 0.3}
    options["mask"][1, 0, 2] = False
    options["bias"] = rng.normal(size=(1, 4, 1, 40)).astype(np.float32)
    run = jax.jit(functools.partial(attend, implementation=kernel, **options))
    out, lse = finalize(run(q, k, v))
    expected = dense_attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=2e-6)
    by_row = jax.vmap(functools.partial(attention, implementation=kernel))
    found = by_row(q[:, None], k[:, None], v[:, None])[:, 0]
    np.testing.assert_allclose(found, dense_attention(q, k, v), atol=2e-6)

    w, u = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    where = {"mesh": kv_mesh(jax.devices()[:3]), "axis": "kv", "return_lse": True}

    def loss(q, k, v):
        out, lse = tree_decode(q, k, v, implementation=kernel, **where, **options)
        return jnp.sum(w * out) + jnp.sum(u * jnp.where(jnp.isinf(lse), 0, lse))

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for x, y in zip(found, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.fixture
def in_32_bits():
    """As users have it: with 64 bits on, JAX's own kernel divides an int32 by an int64."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.parametrize("name", ["of_numpy", "jax_nn", "jax_decode"])
def test_kernels_that_run_here(name, in_32_bits):
    """Asked by the suite, and by eight devices whose last shard has no keys."""
    kernel, *_, dtype = kernels.KERNELS[name]
    report = check_attention(kernels.asked(kernel, dtype))
    assert set(report.names("failed")) <= {"stale NaN"}, str(report)
    assert {"plain", "grouped heads", "large scores"} <= set(report.names("passed"))
    assert "a row without keys" in report.names("passed"), str(report)
    q, k, v = draw(n=130)
    options = {"kv_lengths": np.array([130, 41])}
    decode = functools.partial(
        tree_decode, mesh=kv_mesh(jax.devices()[:8]), axis="kv", implementation=kernel
    )
    expected = dense_attention(q, k, v, **options)
    for method in ("allreduce", "butterfly"):
        found = jax.jit(functools.partial(decode, method=method))(q, k, v, **options)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_rings_take_a_function():
    q, k, v = draw(l=40)
    where = {"mesh": kv_mesh(jax.devices()[:4]), "axis": "kv", "implementation": plain_state}
    for decode in (treeattn.ring_decode, treeattn.pass_q_decode):
        found = jax.jit(functools.partial(decode, **where))(q[:, :3], k, v)
        np.testing.assert_allclose(found, dense_attention(q[:, :3], k, v), atol=2e-6)
    causal = dense_attention(q, k, v, mask=np.tri(40, dtype=bool))
    for prefill in (treeattn.ring_attention, treeattn.ulysses_attention):
        found = jax.jit(functools.partial(prefill, **where))(q, k, v)
        np.testing.assert_allclose(found, causal, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_llama_takes_a_function(devices):
    mesh = None if devices == 1 else kv_mesh(jax.devices()[:2])
    prompts = [[5, 7, 11, 13, 17], [5, 8, 2, 9, 1]]

    def logits(implementation):
        model = Llama.load(SMALL, mesh=mesh, implementation=implementation)
        first, cache = model.prefill(prompts, model.new_cache(2, 24))
        second, _ = model.step(np.array([[3], [4]]), cache)
        return first, second

    for x, y in zip(logits(plain), logits(None), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_what_is_not_here_is_said(capsys):
    kernels.main(["cudnn", "flash_attn3"])
    assert capsys.readouterr().out.startswith("cudnn: needs a GPU\n\nflash_attn3: ")
