"""Decoding from a sharded cache: by a tree of states, and by the rings it is compared with.

A call goes straight down:

    check_inputs      kernel/inputs.py      what is wrong is named
    lay_out           devices/layout.py     along which of the mesh's axes keys, rows and heads lie
    resolve_on_mesh   devices/layout.py     which implementation its devices run
    deal              devices/shards.py     the cache in shards, one for each device
    tree, ring, …     devices/on_device.py  on every device: attend to the shard, merge the states
    finalize          idea/state.py         a state becomes the output
"""

import functools
import os

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float

from treeattn.devices.auto import fastest_method
from treeattn.devices.heads import gather_heads
from treeattn.devices.layout import (
    Layout,
    count_devices,
    lay_out,
    refuse_exact,
    resolve_on_mesh,
)
from treeattn.devices.merge import METHODS, SCATTERED, WHOLE, check_method, scatter_by_nodes
from treeattn.devices.mesh import AnyMesh, AxisNames
from treeattn.devices.message import check_wire, move_output
from treeattn.devices.on_device import ON_DEVICE
from treeattn.devices.shards import deal, over_shards, own_lengths
from treeattn.idea.arrays import Array, Scale, integer
from treeattn.idea.state import AttentionState, finalize
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.inputs import (
    Bias,
    Implementation,
    Inputs,
    Keys,
    Lengths,
    Mask,
    Output,
    Queries,
    Values,
    check_inputs,
)
from treeattn.kernel.quantized import Scales
from treeattn.measured import CollectiveTimes, find_measured

OutputAndLse = tuple[Output, Float[Array, "b l h"]]


def tree_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mesh: AnyMesh,
    axis: AxisNames,
    kv_lengths: Lengths | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: Scale = None,
    key_scale: Scales | None = None,
    value_scale: Scales | None = None,
    method: str = "allreduce",
    implementation: Implementation = None,
    return_lse: bool = False,
    scatter: bool = False,
    block: int | None = None,
    wire: DTypeLike | None = None,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
    measured: CollectiveTimes | str | os.PathLike | None = None,
):
    """Attention of q, present on every device, over keys and values sharded along `axis`.

    Layouts, mask, bias, kv_lengths, scale, and key_scale and value_scale, with which keys and
    values are in 8 bits, are those of `attend`, and implementation is, too. What is sent is as
    large for every dtype of the keys: a state.
    The keys are dealt to the devices in contiguous shards; kv_len need not divide by their
    number, and may be smaller. A cache that is already sharded so stays where it is.
    axis names one axis of the mesh, or several in any order, outermost first; method is
    `merge_across`'s, and so is wire, the dtype in which numerators travel.
    A program is compiled for each number given as scale, an array's as well; one that is traced,
    inside `jax.jit`, is an argument of the program.

    batch_axis, head_axis: the mesh's axes, one or several each, along which rows are sharded, and
             heads: query and key heads alike, so that each device has the queries that read its
             keys. Rows and key heads must divide by the devices along them. Nothing crosses
             these axes, and the result stays sharded along them. None: as k, v or q lie, where
             that can be seen: outside of `jax.jit` and other transformations, and along Explicit
             axes; () for none. Where it cannot be seen, axes that are not named here are left to
             XLA. It splits the plain implementation as the arrays lie, though "gather",
             "reduce_scatter", "all_to_all" and pass-Q then send states along them, too; a GPU's
             kernel it cannot split, and **gathers the whole cache along them**, with a warning:
             name them there. In a `shard_map` over some of them these are split already.

    scatter: "reduce_scatter", "all_to_all" and "hierarchical" can leave each device with its share
             of the heads, as a projection that is sharded along them wants it. The result is then
             sharded so, and has ⌈h/p⌉·p heads; those beyond h have output 0 and lse −∞. By
             "hierarchical", neighbouring shares lie in different nodes.

    block:   for the same bits from every number of devices. Each block of so many keys is attended
             to by itself, and the blocks' states merge along one tree, of which the devices hold
             subtrees: the order of all sums depends on block alone. The number of devices, and
             that of a shard's blocks, must be powers of two, and method "gather", "butterfly" or
             "all_to_all". It costs a state for each block, and time: with blocks of 1,024 keys
             1.3 to 1.7 times as much on a CPU. Without it, the devices' number decides the bits.
             The order of sums is all that it fixes, and programs are compiled one by one: with JAX
             0.12 on a CPU less than 1 % of the numbers were seen to differ in their last bits, with
             0.8.3 none. Method "exact" leaves nothing to the compiler.

    method "exact": for the same bits whatever the partition of the keys, their order, the mesh, its
             axes, and the rows and queries beside: the bits of one row's out and lse depend on its
             query and on the set of its keys alone, within one version of JAX on one kind of
             device. All sums are sums of integers (`treeattn.kernel.exact`). It takes no
             implementation but "exact", float16, bfloat16 and float32, and up to 2^28 keys; sends
             four integers for every number of an AttentionState; and has the gradient of
             "allreduce". A NaN in anything that a query sees makes all of its out and lse NaN.
             No other method takes the implementation "exact": states that are rounded before they
             merge depend on the number of devices.

    method "auto": the one whose collectives take least on these devices by a file of measured
             times (`treeattn.measured`; `python -m labs.cost --calibrate FILE` writes it):
             measured, or else the file that the environment variable TREEATTN_MEASURED names.
             Without either, "allreduce" ("reduce_scatter" with scatter, "butterfly" with block).
             Processes that decode together must read the same times.

    Returns out (b, l, h, dv) in q's dtype; with return_lse also lse (b, l, h), the natural
    logarithm of the sum of exponentials, in float32 or wider. Both are the same on every device,
    unless scattered.

    Raises ValueError for an axis that the mesh lacks or that `shard_map` has made manual, rows or
    heads that do not divide, an unknown method or wire, a method that does not scatter when asked
    to, a block that does not make such a tree, another mesh than that of `jax.set_mesh`, and
    whatever `attend` refuses; and, with method "auto", for a file that cannot be read, that has
    keys which nobody knows, or that was measured on another kind of device, on fewer devices than
    the mesh has, or without groups as large as its axes; TypeError where measured is no such thing.
    """
    check_method(method)
    check_wire(wire, method)
    if scatter and method in (*WHOLE, "exact"):
        can = (*SCATTERED, "hierarchical")
        raise ValueError(f"scatter: expected one of the methods {can}, got {method!r}")
    if method == "exact":
        implementation = _check_exact(implementation)
    else:
        refuse_exact(implementation)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    inputs = check_inputs(q, k, v, mask, bias, kv_lengths, scale, **scales)
    layout = lay_out(inputs, mesh, axis, batch_axis, head_axis)
    inputs = resolve_on_mesh(implementation, inputs, layout)
    if method == "auto":
        methods = _methods(layout, scatter, block)
        times = find_measured(measured)
        method = fastest_method(times, methods, inputs, layout, scatter=scatter, wire=wire)
    if block is not None:
        shards = count_devices(mesh, layout.axes)
        _check_block(integer("block", block), method, k.shape[1], shards, wire)
    wire = None if wire is None else jnp.dtype(wire)
    out, lse = _decode(inputs, layout, method, scatter, block, wire)
    return (out, lse) if return_lse else out


def ring_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mesh: AnyMesh,
    axis: AxisNames,
    kv_lengths: Lengths | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: Scale = None,
    key_scale: Scales | None = None,
    value_scale: Scales | None = None,
    implementation: Implementation = None,
    return_lse: bool = False,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
):
    """Ring Attention for decoding: every shard of the cache visits every device.

    (Liu et al. 2023; 2024 §6.3.) Arguments, result and errors as `tree_decode`, without those that
    are about merging. Keys in 8 bits travel so, with their scales. In each of p − 1
    steps a device sends the shard it holds to its neighbour, and attends to it meanwhile:
    2·b·t·d_kv·(p − 1) elements from each device (2024 eq. 31–32 counts p steps; the last would
    bring the shards home), keys and values in one message on a GPU, in two on a CPU. It takes no
    implementation "exact".
    """
    refuse_exact(implementation)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    inputs = check_inputs(q, k, v, mask, bias, kv_lengths, scale, **scales)
    layout = lay_out(inputs, mesh, axis, batch_axis, head_axis)
    inputs = resolve_on_mesh(implementation, inputs, layout)
    out, lse = _decode(inputs, layout, "ring")
    return (out, lse) if return_lse else out


def pass_q_decode(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mesh: AnyMesh,
    axis: AxisNames,
    kv_lengths: Lengths | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: Scale = None,
    key_scale: Scales | None = None,
    value_scale: Scales | None = None,
    implementation: Implementation = None,
    return_lse: bool = False,
    wire: DTypeLike | None = None,
    batch_axis: AxisNames | None = None,
    head_axis: AxisNames | None = None,
):
    """A ring that moves the queries ("pass-Q"); the cache stays where it is.

    (Yang et al. 2024, arXiv 2411.01783.) Arguments, result and errors as `ring_decode`; wire as in
    `tree_decode`. The queries are dealt to the devices along q_len. Each share visits every device:
    p − 1 steps of b·⌈l/p⌉·h·d elements from each, sent before the device attends to them. An
    all-to-all brings the states of each share home, b·⌈l/p⌉·h·(dv + 2) elements to every other
    device, where they merge, and a gather gives them to all. All of it is the same for any context.
    A single query is on one device only; the other shares travel empty.
    """
    refuse_exact(implementation)
    check_wire(wire)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    inputs = check_inputs(q, k, v, mask, bias, kv_lengths, scale, **scales)
    layout = lay_out(inputs, mesh, axis, batch_axis, head_axis)
    inputs = resolve_on_mesh(implementation, inputs, layout)
    wire = None if wire is None else jnp.dtype(wire)
    out, lse = _decode(inputs, layout, "pass_q", wire=wire)
    return (out, lse) if return_lse else out


def _check_exact(implementation: Implementation) -> str:
    """ "exact", of which method "exact" is made; a ValueError for another implementation."""
    if implementation not in (None, "exact"):
        raise ValueError(
            f"implementation: method 'exact' takes None or 'exact', got {implementation!r}"
        )
    return "exact"


# Methods that merge in an order of their own, whatever a compiler does.
ONE_ORDER = ("butterfly", "gather", "all_to_all")


def _methods(layout: Layout, scatter: bool, block: int | None) -> list[str]:
    """Of which "auto" takes the fastest."""
    found = [m for m in METHODS if m != "hierarchical" or len(layout.axes) > 1]
    if scatter:
        found = [m for m in found if m not in WHOLE]
    if block is not None:
        found = [m for m in found if m in ONE_ORDER]
    return found


def _check_block(block: int, method: str, n: int, p: int, wire) -> None:
    """Raise a ValueError unless blocks of a cache of n keys are the leaves of one binary tree."""
    if method not in ONE_ORDER:
        raise ValueError(f"block: method {method!r} has no order of its own to keep")
    if wire is not None:
        raise ValueError(
            f"wire: what {jnp.dtype(wire)} rounds depends on the devices, which block is against"
        )
    blocks, rest = divmod(n, p * block) if block > 0 else (0, n)
    if rest or blocks.bit_count() != 1 or p.bit_count() != 1:
        raise ValueError(
            f"block: expected shards of 1, 2, 4, … blocks on 1, 2, 4, … devices, got {n} keys on "
            f"{p} devices in blocks of {block}"
        )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _decode(
    inputs: Inputs,
    layout: Layout,
    name: str,
    scatter: bool = False,
    block: int | None = None,
    wire: DTypeLike | None = None,
) -> OutputAndLse:
    """(out, lse), (b, l, h, dv) and (b, l, h), of checked inputs, by the method or ring `name`."""
    axes = layout.axes
    by_nodes = scatter and name == "hierarchical"
    scattered = name in SCATTERED

    def state_of_all_shards(rank, inputs) -> AttentionState:
        own = own_lengths(inputs, rank)
        if by_nodes:
            return scatter_by_nodes(attend_inputs(own), axes, wire)
        if name in METHODS:
            return ON_DEVICE[name](own, axes, block=block, wire=wire)
        if name == "pass_q":
            return ON_DEVICE[name](own, axes, wire=wire)
        if name == "ring" and inputs.lengths is not None:
            return ON_DEVICE[name](own, axes, lengths_of=lambda r: own_lengths(inputs, r).lengths)
        return ON_DEVICE[name](own, axes)

    def on_device(rank, inputs):
        state = state_of_all_shards(rank, inputs)
        out, lse = finalize(state)
        out = out.astype(inputs.q.dtype)
        if scattered and not scatter:
            h = inputs.q.shape[2]
            gather = functools.partial(gather_heads, axes=axes, heads=h, axis=2)
            return move_output(gather, out, lse)
        return out, lse

    inputs, specs = deal(inputs, layout)
    heads = layout.heads
    if scatter:  # each device's share is one of its own heads
        heads += axes[::-1] if by_nodes else axes
    result = P(layout.batch or None, None, heads or None)
    return over_shards(on_device, layout.mesh, axes, (specs,), result, left=layout.left)(inputs)
