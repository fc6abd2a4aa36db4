"""Prefill with the sequence sharded: the queries of a whole prompt are sharded as its keys are.

Decoding has few queries, which every device can hold; a prompt has as many queries as keys.
`ring_attention` sends the keys around. `ulysses_attention` exchanges shards of the sequence for
shards of the heads.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from treeattn.decode import ring_output, run_on_mesh
from treeattn.inputs import (
    Inputs,
    Keys,
    Output,
    Queries,
    Scale,
    Values,
    check_inputs,
    gather_inputs,
    pad_axis,
)
from treeattn.layout import Layout, deal, on_devices, place
from treeattn.local import Implementation, attend_inputs, output_of


def ring_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: NamedSharding | None = None,
    causal: bool = True,
    scale: Scale = None,
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Any:
    """Ring Attention with the queries sharded like the keys: prefill (Liu et al. 2023).

    Every device keeps its queries, and all shards of the keys visit it. With `causal`, query i sees
    keys 0 … i, and a device skips the shards after its own.

    sharding: the sharding of q, k, v and the result, P(batch, sequence, heads). The number
              of queries or keys need not be a multiple of the number of devices.
    Other arguments are as in `attend`.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), sharded in the same
    way. Raises what `tree_decode` raises, and ValueError if causal attention has more or fewer
    queries than keys.

    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> print(ring_attention(x, x, x, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 8, 2, 4)
    """
    inputs = gather_inputs(q, k, v, None, None, None, scale, causal)
    return run_on_mesh(_prefill, inputs, sharding, False, ring_output, implementation, return_lse)


def ulysses_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: NamedSharding | None = None,
    causal: bool = True,
    scale: Scale = None,
    implementation: Implementation = None,
) -> Output:
    """Prefill by two all-to-alls: shards of the sequence become shards of the heads, and back.

    p devices share the sequence, and each of them holds h heads: all, unless the heads are sharded,
    too. Each device attends over the whole sequence for h / p heads (Jacobs et al. 2023, DeepSpeed
    Ulysses). If p does not divide the key heads, they are repeated as often as needed. Arguments
    and result are those of `ring_attention`, without return_lse. Raises ValueError if p does not
    divide h, and what `ring_attention` raises.

    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> print(ulysses_attention(x, x, x, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 8, 2, 4)
    """
    inputs = gather_inputs(q, k, v, None, None, None, scale, causal)
    return run_on_mesh(_prefill, inputs, sharding, False, _ulysses, implementation, False)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _prefill(inputs: Inputs, layout: Layout, algorithm, implementation: Implementation):
    """(out,) or (out, lse), for the whole text.

    algorithm(inputs, layout, rank, implementation), `ring_output` or `_ulysses`, runs on each
    device. It takes the device's shards, queries (b, ⌈l/p⌉, h, d) and keys (b, t, …), and returns
    the device's shards of the result.
    """
    check_inputs(inputs)
    l, n = inputs.q.shape[1], inputs.k.shape[1]
    inputs, specs = deal(inputs, layout)
    inputs = inputs.replace(q=pad_axis(inputs.q, 1, layout.whole(l)))
    along = layout.spec(layout.keys)

    def on_device(rank, inputs):
        t = inputs.k.shape[1]
        if layout.whole(n) > n:
            # When XLA:CPU splits a program, it may leave the entries that `deal` has added
            # uninitialized, so zeros are written here again. A NaN there would spoil the result
            # even where it is hidden, because 0 · NaN is NaN.
            real = (rank * t + jnp.arange(t) < n)[:, None, None]
            k, v = (jnp.where(real, x, 0) for x in (inputs.k, inputs.v))
            inputs = inputs.replace(k=k, v=v)
        return algorithm(inputs, layout, rank, implementation)

    result = on_devices(on_device, layout, inputs, specs.replace(q=along), along)
    if layout.whole(l) == l:
        return result
    # p does not divide l: reshard, then cut.
    return tuple(place(x, layout.spec(), layout)[:, :l] for x in result)


def _ulysses(inputs: Inputs, layout: Layout, rank, implementation: Implementation):
    """Shards of the text become shards of the heads, (b, p·⌈l/p⌉, h/p, d), and back."""
    p = layout.shards
    h, h_kv = inputs.q.shape[2], inputs.k.shape[2]
    if h % p:
        raise ValueError(f"q: expected heads that {p} devices can share evenly, got {h}")

    def exchange(x, split_axis: int, concat_axis: int):
        if p == 1:
            return x
        return lax.all_to_all(x, layout.keys, split_axis, concat_axis, tiled=True)

    repeats = p // math.gcd(p, h_kv)
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (inputs.k, inputs.v))
    q, k, v = (exchange(x, 2, 1) for x in (inputs.q, k, v))
    state = attend_inputs(inputs.replace(q=q, k=k, v=v), implementation)
    return (exchange(output_of(state, inputs)[0], 1, 2),)
