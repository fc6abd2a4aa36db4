"""A function as implementation=: what it is given, must return and cannot be asked.

tests/test_attend.py and tests/test_decode.py have its values and gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import check, draw, kernel, over

from treeattn import AttentionState, attend, attention, tree_decode

SHAPE = {"l": 3, "n": 40, "d": 16, "dtype": np.float32}


def without_options(q, k, v, *, scale):
    return kernel(q, k, v, scale=scale)


WRONG = {
    "out alone": (lambda out, lse: out, TypeError, "off to return .out, lse., .* got "),
    "nothing": (lambda out, lse: None, TypeError, "off to return .* got NoneType"),
    "lse in 16 bits": (
        lambda out, lse: (out, lse.astype(jnp.bfloat16)),
        TypeError,
        "off's lse: expected float64 or wider, got bfloat16",
    ),
    "axes of lse": (
        lambda out, lse: (out, lse.swapaxes(1, 2)),
        ValueError,
        r"off's lse: expected shape \(2, 3, 4\), got \(2, 4, 3\)",
    ),
    "heads first": (
        lambda out, lse: (out.swapaxes(1, 2), lse),
        ValueError,
        r"off's out: expected shape \(2, 3, 4, 16\), got \(2, 4, 3, 16\)",
    ),
    "integers": (lambda out, lse: (out.astype(int), lse), TypeError, "off's out: .* got dtype int"),
    "None for lse": (lambda out, lse: (out, None), TypeError, "off's lse: .* got NoneType"),
    "a narrow state": (
        lambda out, lse: AttentionState(*(x.astype(jnp.float32) for x in (lse, lse, out))),
        TypeError,
        "off's max: expected float64 or wider, got float32",
    ),
    "a state of other axes": (
        lambda out, lse: AttentionState(lse, lse[:, :1], out),
        ValueError,
        r"off's denominator: .* got \(2, 1, 4\)",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_returns_is_checked(name):
    change, error, message = WRONG[name]

    def off(q, k, v, **options):
        return change(*kernel(q, k, v, **options))

    with pytest.raises(error, match="^implementation: .*" + message):
        attend(*draw(**SHAPE | {"dtype": np.float64}), implementation=off)


def test_a_partial_has_no_name():
    with pytest.raises(TypeError, match=r"expected functools\.partial\(.*\) to return"):
        attend(*draw(**SHAPE), implementation=functools.partial(lambda *x, **options: None))


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_asked_of_a_function_is_refused_by_name():
    q, k, v = draw(**SHAPE)
    asked = {"mask": np.ones((2, 1, 3, 40), bool), "bias": np.zeros((1, 1, 3, 40), np.float32)}
    asked |= {"kv_lengths": np.array([3, 3]), "causal": True}
    for name, value in asked.items():
        keys = (x[:, :3] if name in ("causal", "kv_lengths") else x for x in (k, v))
        with pytest.raises(TypeError, match=rf"without_options\(\) got .* argument '{name}'"):
            attend(q, *keys, implementation=without_options, **{name: value})
    with pytest.raises(TypeError, match=r"argument 'kv_lengths'"):  # 40 keys on 3 devices
        tree_decode(q, k, v, implementation=without_options, sharding=over(keys=3))


def test_what_a_function_is_given():
    """The options that the call has, in a program and so asked once, and nothing without keys."""
    given = []

    def noted(q, k, v, **options):
        given.append((q, k, v, options))
        return kernel(q, k, v, **options)

    arrays = q, k, v = draw(**SHAPE | {"dtype": np.float16})
    run = functools.partial(attend, implementation=noted)
    for _ in range(2):
        run(*arrays)
    jax.jit(lambda scale: run(*arrays, scale=scale))(0.25)
    mask, traced = np.ones((1, 1, 3, 40), bool), np.array([-3, 90], np.int64)
    jax.jit(lambda n: run(*arrays, kv_lengths=n, mask=mask))(traced)
    nothing = run(q, k[:, :0], v[:, :0])
    assert nothing.numerator.shape == q.shape and np.isneginf(nothing.max).all()
    plain, scaled, masked = (options for *_, options in given)
    assert [(x.dtype, x.shape) for x in given[0][:3]] == [(x.dtype, x.shape) for x in arrays]
    assert plain == {"scale": 0.25} and isinstance(plain["scale"], float)
    assert (scaled["scale"].shape, scaled["scale"].dtype) == ((), "float32")
    assert set(masked) == {"scale", "mask", "kv_lengths"} and masked["mask"].shape == mask.shape
    assert masked["kv_lengths"].dtype == "int32"


def test_a_state_of_ones_own_meets_by_a_method_of_ones_own(unchecked):
    """Sums without a pivot, which only that method knows how to merge."""

    def sums(q, k, v, *, scale):
        out, lse = kernel(q, k, v, scale=scale)
        return {"d": jnp.exp(lse), "n": jnp.exp(lse)[..., None] * out}

    def add(state, axes):
        d, n = jax.lax.psum((state["d"], state["n"]), axes)
        return AttentionState(jnp.zeros_like(d), d, n)

    arrays = draw(n=8)
    sharding = over(keys_a=2, keys_b=2)
    decode = functools.partial(tree_decode, *arrays, implementation=sums, sharding=sharding)
    check(decode(method=add, return_lse=True), *arrays)
    with pytest.raises(TypeError, match="method: expected it to return an AttentionState, got d"):
        decode(method=lambda state, axes: state)
    with pytest.raises(TypeError, match="state: expected an AttentionState, got dict"):
        decode()  # "allreduce" does not know it
    with pytest.raises(TypeError, match="implementation: expected an AttentionState, got dict"):
        attention(*arrays, implementation=sums)
