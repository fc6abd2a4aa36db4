"""Decoding from a sharded cache: `tree_decode` merges states; `ring_decode` sends the keys around.

A call of `tree_decode` runs these in turn:

    gather_inputs                 inputs.py   lengths and scale are checked
    layout_of                     layout.py   the sharding is checked
    onto_mesh                     layout.py   arrays committed to one device move to the mesh
    check_inputs                  inputs.py   shapes and dtypes are checked
    deal                          layout.py   the keys are padded to equal shards
    on_devices                    layout.py   each device runs what follows (a `shard_map`)
    attend_inputs                 local.py    the device's shard becomes a state
    merge_across                  across.py   the devices' states are merged
    finalize                      state.py    a state becomes the output
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn.across import Method, check_method, merge_across
from treeattn.inputs import (
    Bias,
    Inputs,
    Keys,
    Lengths,
    Mask,
    Queries,
    Scale,
    Values,
    check_inputs,
    gather_inputs,
)
from treeattn.layout import (
    Layout,
    deal,
    layout_of,
    local_lengths,
    on_devices,
    onto_mesh,
)
from treeattn.local import Implementation, attend_inputs, check_implementation, output_of
from treeattn.ring import visit_shards
from treeattn.state import merge


def tree_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: NamedSharding | None = None,
    striped: bool = False,
    kv_lengths: Lengths | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: Scale = None,
    method: Method = "allreduce",
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Any:
    """Attention over a sharded cache, by merging the devices' states (2024 and 2025, Algorithm 3).

    sharding: the sharding of k and v, NamedSharding(mesh, P(batch, keys, heads)). Each entry is
              None, an axis, or a tuple of axes, outermost first. q and the result are sharded as
              P(batch, None, heads), so nothing is sent along batch or heads. Along mesh axes that
              `sharding` does not name, arrays are replicated. Without `sharding`, k's own is taken,
              which must be a NamedSharding. Inside `jax.jit` k's sharding cannot be seen if the
              mesh has an Auto axis, so pass `sharding`. With `sharding`, k and v may also be
              NumPy's arrays, replicated, or on one device. If k or v is committed to one device, it
              is moved to its shards first, or copied to every device if the devices cannot share it
              evenly. Unless striped, kv_len may be any number, even smaller than the number of
              devices along the keys' axes, because the program pads the keys to equal shards.
    striped:  key i is in slot `striped_slot(i, kv_len, p)`, on device i mod p of the p devices
              along the keys' axes, so a half-empty cache keeps all devices busy. kv_len must be a
              multiple of p. mask and bias are in the order of the slots; kv_lengths counts keys.
    method:   how states are merged, as in `merge_across`. "all_to_all" also shards the result's
              heads along the keys' axes. It pads the heads that each device holds to a multiple of
              p, with heads of output 0, so the result may have more than h heads. If `sharding`
              also names axes for the heads, each shard of heads is padded by itself: the result
              holds the first shard's heads, their padding, the second shard's heads, and so on.
    Other arguments are as in `attend`. There implementation=None chooses "plain" where XLA may
    split the arrays. Here it never does, because each device calls the implementation on its own
    shard. Devices send states, whose size does not depend on kv_len.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), the natural
    logarithm of the sum of exponentials, in float32 or wider.

    Raises what `attend` raises, but accepts keys that are sharded along an Explicit axis. Raises
    ValueError, too, if `sharding` is None and k's own is unknown or not a NamedSharding, if k or v
    is known to be sharded otherwise than `sharding` says, if the devices cannot share the rows, the
    key heads, or the slots of a striped cache evenly, if the method is unknown, or if
    `jax.set_mesh` has set a mesh of other axes or sizes. Raises TypeError if `sharding` is neither
    None nor a NamedSharding, and ValueError if its spec is not P(batch, keys, heads), or if a
    `shard_map` around the call has split the keys' axes. There, call `attend`, `merge_across` and
    `finalize` instead. Inside a `shard_map` that has split other axes, a gradient of this function
    needs that shard_map's check_vma=False.

    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> q, k, v = (jax.numpy.ones((1, n, 2, 4)) for n in (1, 8, 8))
    >>> print(tree_decode(q, k, v, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 1, 2, 4)
    """
    check_method(method)
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale)
    return run_on_mesh(_decode, inputs, sharding, striped, method, implementation, return_lse)


def ring_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sharding: NamedSharding | None = None,
    striped: bool = False,
    kv_lengths: Lengths | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: Scale = None,
    implementation: Implementation = None,
    return_lse: bool = False,
) -> Any:
    """Ring Attention for decoding: every shard of the cache visits every device.

    The ring is that of Liu et al. 2023, as in 2024 §6.3. Arguments, result and errors are those of
    `tree_decode`, but for `method`. In each of p − 1 steps a device passes on the shard that it
    holds, and attends to the one that arrives. With shards of t keys, and dv = d, each device sends
    2·b·t·h_kv·d·(p − 1) elements, and those of its shards of mask and bias. 2024 eq. 31–32 counts p
    steps; the last would return each shard to its owner.

    >>> mesh = jax.make_mesh((1,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> q, k, v = (jax.numpy.ones((1, n, 2, 4)) for n in (1, 8, 8))
    >>> print(ring_decode(q, k, v, sharding=NamedSharding(mesh, P(None, "kv"))).shape)
    (1, 1, 2, 4)
    """
    inputs = gather_inputs(q, k, v, mask, bias, kv_lengths, scale)
    return run_on_mesh(_decode, inputs, sharding, striped, None, implementation, return_lse)


def run_on_mesh(program, inputs, sharding, striped, method, implementation, return_lse):
    """Call `program`, and return out, or (out, lse) if `return_lse`.

    program(inputs, layout, method, implementation) is a jitted function that returns a tuple,
    (out,) or (out, lse). The implementation and the keys' sharding are checked here, because inside
    a trace they cannot be.
    """
    check_implementation(implementation, inputs.q)
    layout = layout_of(inputs, sharding, striped)
    out, *lse = program(onto_mesh(inputs, layout), layout, method, implementation)
    return (out, *lse) if return_lse else out


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _decode(inputs: Inputs, layout: Layout, method: Method | None, implementation: Implementation):
    """(out, lse), (b, l, h, dv) and (b, l, h), by a ring if `method` is None.

    "all_to_all" rounds each device's heads up to a multiple of the number of devices that share
    the keys.
    """
    check_inputs(inputs)

    def on_device(rank, inputs):
        if method is None:
            return ring_output(inputs, layout, rank, implementation)
        own = inputs.replace(lengths=local_lengths(inputs, layout, rank))
        state = attend_inputs(own, implementation)
        return output_of(merge_across(state, layout.keys, method=method), inputs)

    inputs, specs = deal(inputs, layout)
    heads = layout.heads
    if method == "all_to_all":
        heads += layout.keys
    result = P(layout.batch, None, heads)
    return on_devices(on_device, layout, inputs, specs, result)


def ring_output(inputs: Inputs, layout: Layout, rank, implementation: Implementation):
    """(out, lse) of a device's queries after they have seen every shard.

    If causal, query i has key i's position, so a device skips later devices' shards. In decoding,
    all devices have the same queries but merge the shards in different orders, so their states
    agree only up to rounding.
    """

    def state_of(shard, owner, causal=False):
        k, v, mask, bias = shard
        lengths = local_lengths(inputs, layout, owner)
        visited = inputs.replace(k=k, v=v, mask=mask, bias=bias, lengths=lengths, causal=causal)
        return attend_inputs(visited, implementation)

    def visit(state, shard, owner):
        if not inputs.causal:
            return merge(state, state_of(shard, owner))
        earlier = owner < rank
        return lax.cond(earlier, lambda: merge(state, state_of(shard, owner)), lambda: state)

    shard = inputs.k, inputs.v, inputs.mask, inputs.bias
    own = state_of(shard, rank, inputs.causal)
    return output_of(visit_shards(visit, own, shard, layout.keys), inputs)
