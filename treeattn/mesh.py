"""Attention over a mesh: three algorithms, and the program that runs one of them.

    Tree(method)    each device attends to its own keys, then the states merge
    ring            the keys visit every device
    ulysses         shards of the text become shards of the heads

Each is a function (inputs, shards, rank, implementation) -> (out, lse) that every device runs on
its shards. A call of `tree_decode` runs these in turn:

    gather_inputs                 inputs.py     lengths and scale are checked
    key_shards_of                 key_shards.py the sharding is checked
    move_to_mesh                  key_shards.py arrays committed to one device move to the mesh
    check_inputs                  inputs.py     shapes and dtypes are checked
    deal                          key_shards.py the keys are padded to equal shards
    on_each_device                key_shards.py each device runs what follows (a `shard_map`)
    attend_inputs                 local.py      the device's shard becomes a state
    merge_across                  across.py     the devices' states are merged
    finalize                      state.py      a state becomes the output
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from treeattn.across import METHODS, Method, merge_across
from treeattn.checks import check_choice
from treeattn.inputs import (
    Bias,
    Inputs,
    Keys,
    Lengths,
    Mask,
    Output,
    Queries,
    Scale,
    Values,
    check_inputs,
    gather_inputs,
    pad_axis,
)
from treeattn.key_shards import (
    KeyShards,
    Sharding,
    deal,
    key_shards_of,
    local_lengths,
    move_to_mesh,
    on_each_device,
    place,
)
from treeattn.local import Implementation, attend_inputs, check_implementation, output_of
from treeattn.ring import visit_shards
from treeattn.state import merge


class Tree(NamedTuple):
    """Tree Attention: each device attends to its own keys, then the devices merge their states."""

    method: Method

    @property
    def shards_heads(self) -> bool:
        """Whether the result's heads are sharded along the keys' axes."""
        return isinstance(self.method, str) and METHODS[self.method].shards_heads

    def __call__(self, inputs: Inputs, shards: KeyShards, rank, implementation: Implementation):
        own = inputs.replace(lengths=local_lengths(inputs, shards, rank))
        state = attend_inputs(own, implementation)
        return output_of(merge_across(state, shards.keys, method=self.method), inputs)


def ring(inputs: Inputs, shards: KeyShards, rank, implementation: Implementation):
    """Ring Attention: every shard of the keys visits every device, and is merged there.

    If causal, query i has key i's position, so a device skips later devices' shards. In decoding,
    all devices have the same queries but merge the shards in different orders, so their states
    agree only up to rounding.
    """

    def state_of(shard, owner, causal=False):
        k, v, mask, bias = shard
        lengths = local_lengths(inputs, shards, owner)
        visited = inputs.replace(k=k, v=v, mask=mask, bias=bias, lengths=lengths, causal=causal)
        return attend_inputs(visited, implementation)

    def visit(state, shard, owner):
        if not inputs.causal:
            return merge(state, state_of(shard, owner))
        earlier = owner < rank
        return lax.cond(earlier, lambda: merge(state, state_of(shard, owner)), lambda: state)

    shard = inputs.k, inputs.v, inputs.mask, inputs.bias
    own = state_of(shard, rank, inputs.causal)
    return output_of(visit_shards(visit, own, shard, shards.keys), inputs)


def ulysses(inputs: Inputs, shards: KeyShards, rank, implementation: Implementation):
    """Shards of the text become shards of the heads, (b, p·⌈l/p⌉, h/p, d), and back."""
    p = shards.devices
    h, h_kv = inputs.q.shape[2], inputs.k.shape[2]
    if h % p:
        raise ValueError(f"q: expected heads that {p} devices can share evenly, got {h}")

    def exchange(x, split_axis: int, concat_axis: int):
        if p == 1:
            return x
        return lax.all_to_all(x, shards.keys, split_axis, concat_axis, tiled=True)

    repeats = p // math.gcd(p, h_kv)
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (inputs.k, inputs.v))
    q, k, v = (exchange(x, 2, 1) for x in (inputs.q, k, v))
    state = attend_inputs(inputs.replace(q=q, k=k, v=v), implementation)
    return tuple(exchange(x, 1, 2) for x in output_of(state, inputs))


def _run(algorithm, inputs, sharding, striped, implementation, return_lse, shard_queries=False):
    """Run `algorithm` on every device; return out, or (out, lse) if `return_lse`.

    shard_queries: the queries and the result are sharded as the keys are, not replicated.

    The implementation and the keys' sharding are checked here, because inside a trace they cannot
    be.
    """
    check_implementation(implementation, inputs.q)
    shards = key_shards_of(inputs, sharding, striped)
    options = shards, algorithm, implementation, bool(return_lse), shard_queries
    results = _program(move_to_mesh(inputs, shards), *options)
    return results if return_lse else results[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _program(
    inputs: Inputs, shards: KeyShards, algorithm, implementation, return_lse, shard_queries
):
    """(out,) or (out, lse): (b, l, h, dv) and (b, l, h); more heads if the merge shards them."""
    check_inputs(inputs)
    l, n = inputs.q.shape[1], inputs.k.shape[1]
    inputs, specs = deal(inputs, shards)
    if shard_queries:  # padded to equal shards, as the keys are
        result = shards.spec(shards.keys)
        inputs = inputs.replace(q=pad_axis(inputs.q, 1, shards.padded_length(l)))
        specs = specs.replace(q=result)
    elif isinstance(algorithm, Tree) and algorithm.shards_heads:
        result = P(shards.batch, None, shards.heads + shards.keys)
    else:
        result = shards.spec()

    def on_device(rank, inputs):
        if shard_queries and shards.padded_length(n) > n:
            inputs = _without_padding(inputs, rank, n)
        return algorithm(inputs, shards, rank, implementation)[: 1 + return_lse]

    results = on_each_device(on_device, shards, inputs, specs, result)
    if not shard_queries or shards.padded_length(l) == l:
        return results
    # p does not divide l: reshard, then cut.
    return tuple(place(x, shards.spec(), shards)[:, :l] for x in results)


def _without_padding(inputs: Inputs, rank, n: int) -> Inputs:
    """The inputs, zero in the slots from n on.

    When XLA:CPU splits a program, it may leave the entries that `deal` has added uninitialized, so
    zeros are written here again. In decoding, lengths hide these slots from every query, and
    `attend` zeroes them. In a prefill the padded queries see them.
    """
    t = inputs.k.shape[1]
    real = (rank * t + jnp.arange(t) < n)[:, None, None]
    return inputs.replace(k=jnp.where(real, inputs.k, 0), v=jnp.where(real, inputs.v, 0))


def tree_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: Sharding = None,
    striped: bool = False,
    kv_lengths: Lengths = None,
    mask: Mask = None,
    bias: Bias = None,
    scale: Scale = None,
    method: Method = "allreduce",
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Output | Any:
    """Attention over a sharded cache, by merging the devices' states (2024 and 2025, Algorithm 3).

    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> q, k, v = (jax.numpy.ones((1, n, 2, 4)) for n in (1, 8, 8))
    >>> print(tree_decode(q, k, v, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 1, 2, 4)

    sharding: how k and v are sharded, NamedSharding(mesh, P(batch, keys, heads)), or the spec alone
              where `jax.set_mesh` has set a mesh. Each entry is None, an axis, or a tuple of axes,
              outermost first. q and the result are sharded as P(batch, None, heads), so nothing is
              sent along batch or heads. Along axes that it does not name, arrays are replicated.
              None takes k's own; inside `jax.jit` it is unknown if the mesh has an Auto axis.
              Arrays of NumPy, and arrays that are replicated or on one device, are moved to their
              shards. kv_len may be any number, because the program pads the keys.
    striped:  key i is in slot `striped_slot(i, kv_len, p)`, on device i mod p of the p devices
              along the keys' axes, so a half-empty cache keeps all devices busy. kv_len is a
              multiple of p. mask and bias are in the order of the slots; kv_lengths counts keys.
    method:   how states are merged, as in `merge_across`. "all_to_all" also shards the result's
              heads along the keys' axes, and pads the heads that each device holds to a multiple of
              p with heads of output 0.
    Other arguments are as in `attend`; each device runs the implementation on its own shard.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), the natural
    logarithm of the sum of exponentials, in float32 or wider. Devices send states, whose size does
    not depend on kv_len.

    Raises TypeError or ValueError that names the argument: besides what `attend` raises, for a
    sharding that is unknown, that k or v does not have, or that the devices cannot share evenly.
    Inside a `shard_map` that has split the keys' axes, call `attend`, `merge_across` and `finalize`
    instead. Inside one that has split other axes, a gradient of this function needs that
    shard_map's check_vma=False; otherwise JAX says "Input primal JAX type to VJP function is …".
    """
    check_choice("method", method, tuple(METHODS))
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale)
    return _run(Tree(method), inputs, sharding, striped, implementation, return_lse)


def ring_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: Sharding = None,
    striped: bool = False,
    kv_lengths: Lengths = None,
    mask: Mask = None,
    bias: Bias = None,
    scale: Scale = None,
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Output | Any:
    """Ring Attention for decoding: every shard of the cache visits every device.

    The ring is that of Liu et al. 2023, as in 2024 §6.3. Arguments, result and errors are those of
    `tree_decode`, but for `method`. In each of p − 1 steps a device passes on the shard that it
    holds, and attends to the one that arrives. With shards of t keys, and dv = d, each device sends
    2·b·t·h_kv·d·(p − 1) elements, and those of its shards of mask and bias. 2024 eq. 31–32 counts p
    steps; the last would return each shard to its owner.

    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> q, k, v = (jax.numpy.ones((1, n, 2, 4)) for n in (1, 8, 8))
    >>> print(ring_decode(q, k, v, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 1, 2, 4)
    """
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale)
    return _run(ring, inputs, sharding, striped, implementation, return_lse)


def ring_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: Sharding = None,
    causal: bool = True,
    scale: Scale = None,
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Output | Any:
    """Ring Attention with the queries sharded like the keys: prefill (Liu et al. 2023).

    Every device keeps its queries, and all shards of the keys visit it. With `causal`, query i sees
    keys 0 … i, and a device skips the shards after its own.

    sharding: the sharding of q, k, v and the result, P(batch, keys, heads). The number
              of queries or keys need not be a multiple of the number of devices.
    Other arguments are as in `attend`.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), sharded in the same
    way; along Explicit axes only if they can share l evenly. Raises what `tree_decode` raises, and
    ValueError if causal attention has more or fewer queries than keys.

    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> print(ring_attention(x, x, x, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 8, 2, 4)
    """
    inputs = gather_inputs(q, k, v, None, None, None, scale, causal)
    return _run(ring, inputs, sharding, False, implementation, return_lse, shard_queries=True)


def ulysses_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: Sharding = None,
    causal: bool = True,
    scale: Scale = None,
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Output | Any:
    """Prefill by two all-to-alls: shards of the text become shards of the heads, and back.

    p devices share the text, and each of them holds h heads: all, unless the heads are sharded,
    too. Each device attends over the whole text for h / p heads (Jacobs et al. 2023, DeepSpeed
    Ulysses). If p does not divide the key heads, they are repeated as often as needed. Arguments
    and result are those of `ring_attention`. Raises ValueError if p does not divide h, and what
    `ring_attention` raises.

    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> print(ulysses_attention(x, x, x, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 8, 2, 4)
    """
    inputs = gather_inputs(q, k, v, None, None, None, scale, causal)
    return _run(ulysses, inputs, sharding, False, implementation, return_lse, shard_queries=True)
