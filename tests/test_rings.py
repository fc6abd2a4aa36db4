"""Rings as a GPU's kernel runs them: keys and values in one message, two steps to a loop's turn.

Any function as `implementation` takes that way, so that it runs here. What eight H100s make of it
is `tests/test_gpu_programs.py`'s.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn.program import collectives, count_collectives, total_bytes
from treeattn.devices.on_device import ring
from treeattn.kernel.inputs import check_inputs

B, L, N, H, H_KV, D = 2, 3, 11, 4, 2, 4  # 11 keys: the last shard is short


def kernel(q, k, v, *, scale, mask=None, bias=None, kv_lengths=None, causal=False):
    """The plain implementation by another name."""
    options = {"mask": mask, "bias": bias, "kv_lengths": kv_lengths, "causal": causal}
    return treeattn.attend(q, k, v, scale=scale, implementation="blockwise", **options)


def arrays(l=L, n=N, dv=D):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, l, H, D))
    return q, rng.normal(size=(B, n, H_KV, D)), rng.normal(size=(B, n, H_KV, dv)), rng


def hidings(rng):
    return {
        "ragged": {},
        "lengths": {"kv_lengths": np.array([7, 0])},
        "mask": {"mask": rng.random((B, 1, L, N)) < 0.6},
        "bias": {"bias": rng.normal(size=(1, H, 1, N))},
    }


@pytest.mark.parametrize(("p", "kind"), [(2, "ragged"), (3, "lengths"), (6, "mask"), (6, "bias")])
def test_a_ring_of_whole_messages(p, kind):
    """Out, lse and gradients of values of another size; a message a step, of as many bytes."""
    q, k, v, rng = arrays(dv=6)
    options = hidings(rng)[kind]
    w = rng.normal(size=(B, L, H, 6))
    u = rng.normal(size=(B, L, H)) * (kind != "lengths")  # of the row without keys lse is −∞
    decode = functools.partial(
        treeattn.ring_decode,
        mesh=treeattn.kv_mesh(jax.devices()[:p]),
        axis="kv",
        implementation=kernel,
        return_lse=True,
        **options,
    )

    def loss(q, k, v):
        out, lse = decode(q, k, v)
        return jnp.sum(w * out) + jnp.sum(u * jnp.where(u == 0, 0, lse)), (out, lse)

    program = jax.jit(decode).lower(q, k, v).compile()
    (_, (out, lse)), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-12)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], atol=1e-12)
    for x, y in zip(grads, dense_gradients(q, k, v, w, u, **options), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)

    found = [c for c in collectives(program) if c.kind == "collective-permute"]
    t = -(-N // p)
    besides = {"mask": B * L * t, "bias": 8 * H * t}.get(kind, 0)
    assert total_bytes(found) == (p - 1) * (8 * B * t * H_KV * (D + 6) + besides)
    assert count_collectives(found) == (p - 1) * (2 if besides else 1)


def test_a_causal_ring_of_whole_messages():
    q, k, v, rng = arrays(l=N)
    w = rng.normal(size=q.shape)
    mesh = treeattn.kv_mesh(jax.devices()[:5])
    attention = functools.partial(
        treeattn.ring_attention, mesh=mesh, axis="kv", implementation=kernel
    )

    def loss(*x):
        out = attention(*x)
        return jnp.sum(w * out), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    causal = {"mask": np.tri(N, dtype=bool)[None, None]}
    np.testing.assert_allclose(out, dense_attention(q, k, v, **causal), atol=1e-12)
    expected = dense_gradients(q, k, v, w, **causal)
    for x, y in zip(grads, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)


def test_lengths_do_not_travel():
    """They are computed, so a ring has to know how; it would count its own keys of every shard."""
    q, k, v, _ = arrays()
    inputs = check_inputs(q, k, v, kv_lengths=np.array([7, 0]))
    with pytest.raises(ValueError, match="lengths_of: expected the lengths of every device's"):
        ring(inputs, ("kv",))
