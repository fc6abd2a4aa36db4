"""Algorithm 3 on whole numbers: what no order, tree, mesh or partition of the keys can change.

The papers' Algorithm 3 agrees on the largest score before it sums. So does this: first on where the
digits of weights begin, then on where those of weighted values do, and then the sums are sums of
integers, which any Allreduce forms in any order. (2024 §5.2, 2025 §5.2, Algorithm 3; the sums of
`treeattn.kernel.exact`.)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from treeattn.devices.mesh import Axes
from treeattn.idea.state import AttentionState, finalize, from_output, rescale
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.exact import ExactState, from_state, limbs, rounded
from treeattn.kernel.exactly import attend_exactly
from treeattn.kernel.inputs import Inputs


def merge_exact(state: ExactState, axes: Axes) -> AttentionState:
    """Inside `shard_map`: the merge of all devices' exact states along the axes, rounded once.

    Fields (..., h), and (..., h, dv); the result is the state (lse, 1, out), the same bits on every
    device. Three Allreduces: two of float32 (..., h), and one of int32 (limbs, ..., h, dv + 2), 4
    limbs for up to 127 devices, 6 for up to 32,767.
    """
    state = state.counted_from(lax.pmax(state.index, axes))
    state = state.with_values_from(lax.pmax(state.offset, axes))
    bits = 24 if lax.axis_size(axes) < 128 else 16
    n = limbs(state.numerator, bits)
    d = limbs(state.denominator, bits)[..., None]
    invalid = jnp.broadcast_to(state.invalid[..., None].astype(jnp.int32), d.shape)
    total = lax.psum(jnp.concatenate([n, d, invalid], axis=-1), axes)
    state = state._replace(invalid=total[0, ..., -1] > 0)
    return rounded(state, total[..., -2], total[..., :-2], bits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def exact(inputs: Inputs, axes: Axes) -> AttentionState:
    """What one device does: its shard in, everybody's state out, with bits that nothing moves.

    inputs: q (b, l, h, d), the same on all devices of the axes, and a shard of k and v (b, t, …)
    Fields (b, l, h) and (b, l, h, dv), the same on all. The derivative is that of Algorithm 3 in
    floating point.
    """
    return merge_exact(attend_exactly(inputs), axes)


@exact.defjvp
def _exact_jvp(axes, primals, tangents):
    def in_floats(inputs):
        return _allreduce(attend_inputs(inputs.replace(implementation="blockwise")), axes)

    _, tangent = jax.jvp(in_floats, primals, tangents)
    return exact(*primals, axes), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def merge_rounded(state: AttentionState, axes: Axes) -> AttentionState:
    """`merge_exact` of states that are rounded already, each as a single key.

    Fields (..., h) and (..., h, dv), in float32 or narrower. The same states give the same bits in
    any order, on any mesh; another partition of the keys has other states.
    """
    return merge_exact(from_state(jax.tree.map(lambda x: x.astype(jnp.float32), state)), axes)


@merge_rounded.defjvp
def _merge_rounded_jvp(axes, primals, tangents):
    def in_floats(state):
        return _allreduce(jax.tree.map(lambda x: x.astype(jnp.float32), state), axes)

    _, tangent = jax.jvp(in_floats, primals, tangents)
    return merge_rounded(*primals, axes), tangent


def _allreduce(state: AttentionState, axes: Axes) -> AttentionState:
    """Algorithm 3 in floating point: the state (lse, 1, out), as `merge_exact` gives it."""
    m = lax.pmax(lax.stop_gradient(state.max), axes)
    _, d, n = rescale(state, m)
    merged = AttentionState(m, lax.psum(d, axes), lax.psum(n, axes))
    return from_output(*finalize(merged))
