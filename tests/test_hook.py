"""A function as implementation=: what it is given and must return, and how far the rest reaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

from treeattn import (
    AttentionState,
    attend,
    attention,
    finalize,
    from_output,
    kv_mesh,
    ring_attention,
    ring_decode,
    tree_decode,
    ulysses_attention,
)

SEEN = np.tri(40, dtype=bool)[None, None]


def draw(b=2, l=3, h=4, h_kv=2, n=40, d=16, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, d)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def over(p):
    """How keys lie on p devices."""
    return NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))


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
    return from_output(*plain(q, k, v, **options))


def without_options(q, k, v, *, scale):
    return plain(q, k, v, scale=scale)


WRONG = {
    "out alone": (lambda out, lse: out, TypeError, "off to return .out, lse., .* got "),
    "nothing": (lambda out, lse: None, TypeError, "off to return .* got NoneType"),
    "lse in 16 bits": (
        lambda out, lse: (out, lse.astype(jnp.bfloat16)),
        TypeError,
        "off's lse in float32 or wider, got bfloat16",
    ),
    "axes of lse": (
        lambda out, lse: (out, lse.swapaxes(1, 2)),
        ValueError,
        r"off's lse of shape \(2, 3, 4\), got \(2, 4, 3\)",
    ),
    "heads first": (
        lambda out, lse: (out.swapaxes(1, 2), lse),
        ValueError,
        r"off's out of shape \(2, 3, 4, 16\), got \(2, 4, 3, 16\)",
    ),
    "integers": (lambda out, lse: (out.astype(int), lse), TypeError, "off's out .* got int"),
    "None for lse": (lambda out, lse: (out, None), TypeError, "off's lse .* got NoneType"),
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_returns_is_checked(name):
    change, error, message = WRONG[name]

    def off(q, k, v, **options):
        return change(*plain(q, k, v, **options))

    with pytest.raises(error, match="^implementation: expected " + message):
        attend(*draw(), implementation=off)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_asked_of_a_function_is_refused_by_name():
    q, k, v = draw()
    asked = {"mask": np.ones((2, 1, 3, 40), bool), "bias": np.zeros((1, 1, 3, 40), np.float32)}
    asked["kv_lengths"] = np.array([3, 40])
    for name, value in asked.items():
        with pytest.raises(TypeError, match=rf"without_options\(\) got .* argument '{name}'"):
            attend(q, k, v, implementation=without_options, **{name: value})
    with pytest.raises(TypeError, match=r"without_options\(\) got .* argument 'causal'"):
        attend(q, k[:, :3], v[:, :3], causal=True, implementation=without_options)
    with pytest.raises(TypeError, match=r"argument 'kv_lengths'"):  # 40 keys on 3 devices
        tree_decode(q, k, v, implementation=without_options, sharding=over(3))
    with pytest.raises(ValueError, match=r"implementation: expected one of .*, or a function"):
        attend(q, k, v, implementation="cudnn")
    narrow = jax.jit(functools.partial(attend, implementation=without_options))
    with pytest.raises(TypeError, match=r"without_options's lse in float64 or wider, got float32"):
        narrow(*draw(dtype=np.float64))


def test_what_a_function_is_given():
    given = []

    def kernel(q, k, v, **options):
        given.append((q, k, v, options))
        return plain(q, k, v, **options)

    q, k, v = draw(dtype=np.float16)
    for _ in range(2):  # compiled into a program, and so asked once
        attend(q, k, v, implementation=kernel)
    ((*arrays, options),) = given
    assert [(x.dtype, x.shape) for x in arrays] == [(x.dtype, x.shape) for x in (q, k, v)]
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


def test_one_key_on_one_device_needs_no_lengths():
    q, k, v = draw(n=1)
    out = tree_decode(q, k, v, sharding=over(1), implementation=without_options)
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-6)


@pytest.mark.parametrize("kernel", [plain, plain_state])
def test_values_and_gradients_are_the_functions_own(kernel):
    """jit, vmap and grad, of attend and over a mesh, with all options."""
    q, k, v = draw()
    rng = np.random.default_rng(1)
    options = {"mask": rng.random((2, 1, 3, 40)) < 0.5, "kv_lengths": np.array([40, 7])}
    options["mask"][1, 0, 2] = False
    options |= {"bias": rng.normal(size=(1, 4, 1, 40)).astype(np.float32), "scale": 0.3}
    run = jax.jit(functools.partial(attend, implementation=kernel, **options))
    out, lse = finalize(run(q, k, v))
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=2e-6)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=2e-6)
    by_row = jax.vmap(functools.partial(attention, implementation=kernel))
    found = by_row(q[:, None], k[:, None], v[:, None])[:, 0]
    np.testing.assert_allclose(found, dense_attention(q, k, v), atol=2e-6)
    w, u = rng.normal(size=out.shape), rng.normal(size=lse.shape)

    def loss(q, k, v):
        options_here = options | {"sharding": over(3), "return_lse": True}
        out, lse = tree_decode(q, k, v, implementation=kernel, **options_here)
        return jnp.sum(w * out) + jnp.sum(u * jnp.where(jnp.isinf(lse), 0, lse))

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for x, y in zip(found, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize(
    ("decode", "queries"),
    [(ring_decode, 3), (ring_attention, 40), (ulysses_attention, 40)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rings_take_a_function(decode, queries):
    q, k, v = draw(l=40, h_kv=4)
    q = q[:, :queries]
    found = jax.jit(functools.partial(decode, sharding=over(4), implementation=plain_state))(
        q, k, v
    )
    mask = SEEN if queries == 40 else None
    np.testing.assert_allclose(found, dense_attention(q, k, v, mask=mask), atol=2e-6)


def test_a_state_of_ones_own_meets_by_a_method_of_ones_own(unchecked):
    """Sums without a pivot, which only that method knows how to merge."""

    def sums(q, k, v, *, scale):
        out, lse = plain(q, k, v, scale=scale)
        return {"d": jnp.exp(lse), "n": jnp.exp(lse)[..., None] * out}

    def add(state, axes):
        d, n = jax.lax.psum((state["d"], state["n"]), axes)
        return AttentionState(jnp.zeros_like(d), d, n)

    q, k, v = draw()
    decode = functools.partial(tree_decode, implementation=sums, sharding=over(4))
    found, lse = jax.jit(functools.partial(decode, method=add, return_lse=True))(q, k, v)
    np.testing.assert_allclose(found, dense_attention(q, k, v), atol=2e-6)
    np.testing.assert_allclose(lse, dense_weights(q, k)[1], atol=2e-6)
    with pytest.raises(TypeError, match=r"method: expected .* an AttentionState, got dict"):
        decode(q, k, v, method=lambda state, axes: state)
    with pytest.raises(TypeError, match=r"state: expected an AttentionState, got dict"):
        decode(q, k, v)  # "allreduce" does not know it
