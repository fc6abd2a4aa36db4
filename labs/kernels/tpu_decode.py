"""Tree decoding for TPUs: a kernel that reads the cache, and merges the devices' states itself.

    one_kernel("kv")    {"implementation": …, "method": …} for `tree_decode`: all in one kernel
    attend_on_tpu       an `implementation`: the state of a device's own keys
    merge_on_tpus       a `method`: the merge of all devices' states

Pallas compiles the kernels for TPUs. Elsewhere its interpreter simulates a TPU core for each of
JAX's devices, and raises JaxRuntimeError at a race. Both need JAX 0.12 or newer. The kernels take
no masks and no biases, and have no gradient. Errors name the argument.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from labs.kernels.remote_merge import (
    LANES,
    LOW,
    butterfly,
    enter,
    merge,
    one_shot,
    other_devices,
    pack,
    swap_partners,
    width,
)
from treeattn import AttentionState

ROOM = 2 << 20  # bytes of a block of keys and values, unpadded; two blocks are in VMEM at a time
MOST = 512  # keys of a block
EXACT = lax.Precision.HIGHEST  # products of float32 as in float32
# A copy counts at a random place of the vector clocks. With Pallas's own size, some eight places,
# copies often share a place, and a race between them can be missed.
SIMULATED = pltpu.InterpretParams(detect_races=True, vector_clock_size=1024)


class Protocol(NamedTuple):
    """How devices merge: a function as in remote_merge.py, and what it needs."""

    run: Callable
    partners: Callable  # (own number, p) -> the devices with which it exchanges states
    slots: Callable  # p -> the inbox's slots, if the caller gives no number


BUTTERFLY = Protocol(butterfly, swap_partners, lambda p: p.bit_length() - 1)
ONE_SHOT = Protocol(one_shot, other_devices, lambda p: p)


class Merging(NamedTuple):
    """A protocol along an axis of p devices."""

    protocol: Protocol
    axis: str
    p: int
    slots: int

    def partners(self) -> list:
        return self.protocol.partners(lax.axis_index(self.axis), self.p)


class Merged(NamedTuple):
    """A state that is merged along an axis already."""

    state: AttentionState
    axis: str


def missing() -> str | None:
    """Why this JAX cannot run the kernels; None if it can."""
    if jax.__version_info__ >= (0, 12):
        return None
    return f"the kernels for TPUs need JAX 0.12 or newer, and this is {jax.__version__}"


def one_kernel(axis: str = "kv", *, protocol=BUTTERFLY, slots=None) -> dict[str, Any]:
    """Options for `tree_decode`, with which one kernel reads the cache and merges along `axis`.

    protocol: BUTTERFLY, for a power of two of devices, or ONE_SHOT, for any number
    slots:    of a butterfly's inbox, which reuses them if there are fewer than rounds

    JAX compiles the functions of each call anew, so call this once. The functions raise ValueError
    if the mesh or this JAX does not fit.
    """

    def attend_and_merge(q, k, v, *, scale, kv_lengths=None, **others):
        merging = _merging((axis,), protocol, slots)
        return Merged(_attend(q, k, v, scale, kv_lengths, merging, others), axis)

    def already_merged(found, axes):
        if not isinstance(found, Merged):  # by another implementation, or without keys
            return merge_on_tpus(found, axes, protocol=protocol)
        if axes != (found.axis,):
            raise ValueError(f"sharding: expected keys along {found.axis!r} only, got {axes}")
        return found.state

    return {"implementation": attend_and_merge, "method": already_merged}


def attend_on_tpu(q, k, v, *, scale, kv_lengths=None, **others) -> AttentionState:
    """The state of the queries, for `implementation=` of the core's functions.

    q (b, l, h, d), k (b, n, h_kv, d), v (b, n, h_kv, dv), kv_lengths (b,). Keys and values past the
    lengths may hold any numbers.

    Raises ValueError for other options, such as a mask, and for a dtype or head_dim that the kernel
    does not take. In a gradient it raises NotImplementedError.
    """
    return _attend(q, k, v, scale, kv_lengths, None, others)


def merge_on_tpus(state, axes, *, protocol=BUTTERFLY) -> AttentionState:
    """The merge of all devices' states along one axis, for `method=` of the core's functions."""
    m, d, n = state
    if m.dtype != jnp.float32:
        raise TypeError(f"state: the kernels for TPUs merge float32, got {m.dtype}")
    merging = _merging(axes, protocol, None)
    if merging is None or m.size == 0:
        return state
    dv = n.shape[-1]
    columns = (x.reshape(1, m.size, -1) for x in (jnp.maximum(m, LOW), d, n))
    merged = _unpack(_call(_merge_kernel, [pack(*columns)], None, dv, merging), dv)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), merged, state)


def _merging(axes, protocol: Protocol, slots: int | None) -> Merging | None:
    """None for a single device. Raises ValueError if the devices cannot merge so."""
    if len(axes) != 1:
        raise ValueError(f"sharding: the kernels for TPUs merge along one axis, got {axes}")
    try:
        p = lax.axis_size(axes[0])
    except NameError:
        raise ValueError(f"axis: expected an axis of the mesh, got {axes[0]!r}") from None
    if protocol.partners is swap_partners and p & (p - 1):
        raise ValueError(f"protocol: BUTTERFLY needs 2, 4, 8, … devices, got {p}; try ONE_SHOT")
    return Merging(protocol, axes[0], p, slots or protocol.slots(p)) if p > 1 else None


def _attend(q, k, v, scale, lengths, merging: Merging | None, others) -> AttentionState:
    for name in others:
        raise ValueError(
            f"{name}: the kernels for TPUs take no {name}; use implementation='blockwise'"
        )
    for name, x in (("q", q), ("k", k)):  # v is of k's dtype
        if x.dtype in (jnp.float16, jnp.float64):
            raise ValueError(
                f"{name}: the kernels for TPUs take bfloat16 and float32, got {x.dtype}; use "
                "implementation='blockwise'"
            )
    (b, l, h, d), (n, h_kv, dv) = q.shape, v.shape[1:]
    grouped = (q.astype(jnp.float32) * scale).reshape(b, l, h_kv, h // h_kv, d)
    grouped = jnp.moveaxis(grouped, 2, 1).reshape(b, h_kv, -1, d)
    lengths = jnp.full(b, n, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    key_bytes = h_kv * (d + dv) * k.dtype.itemsize
    block = min(n, MOST, max(ROOM // key_bytes // LANES * LANES, LANES))
    if block * key_bytes > 2 * ROOM:  # more was not compiled
        raise ValueError(
            f"k, v: {block} keys of {h_kv} heads with head_dims {d} and {dv} take more than "
            f"{2 * ROOM} bytes; use implementation='blockwise'"
        )
    state = _unpack(_call(_attend_kernel, [lengths, grouped, k, v], block, dv, merging), dv)

    def by_query(x):  # (b, h_kv · l · group, …) to (b, l, h, …)
        x = x.reshape(b, h_kv, l, h // h_kv, *x.shape[2:])
        return jnp.moveaxis(x, 1, 2).reshape(b, l, h, *x.shape[4:])

    return jax.tree.map(by_query, state)


def _unpack(packed, dv: int) -> AttentionState:
    n, m, d = packed[..., :dv], packed[..., dv], packed[..., dv + 1]
    m = jnp.where(d == 0, -jnp.inf, jnp.where(jnp.isnan(d), d, m))
    return AttentionState(m, d, n)


def _call(kernel, arrays, block: int | None, dv: int, merging: Merging | None):
    """The packed states (b, rows, width(dv)) that a kernel leaves on this device."""
    if (reason := missing()) is not None:
        raise ValueError(reason)
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    if block is None:
        (state,) = arrays
        shape, grid, in_specs = state.shape, (1,), [whole]
    else:
        _, q, k, v = arrays
        shape = q.shape[0], q.shape[1] * q.shape[2], width(dv)
        grid = len(k), pl.cdiv(k.shape[1], block)
        in_specs = [
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, *q.shape[1:]), lambda i, j: (i, 0, 0, 0)),
        ]
        for x in (k, v):
            in_specs.append(pl.BlockSpec((None, block, *x.shape[2:]), lambda i, j: (i, j, 0, 0)))
    scratch, extra = [pltpu.VMEM(shape, jnp.float32)], {}
    if merging:
        slots = merging.slots
        scratch += [pltpu.VMEM((slots, *shape), jnp.float32)]
        scratch += [pltpu.SemaphoreType.DMA((slots,))] * 2
        scratch += [pltpu.SemaphoreType.REGULAR((merging.p.bit_length(),))]
        # Kernels along different axes of a mesh must not share a barrier semaphore: a device of one
        # axis would be counted for the other. Two meshes in one program may share one by mistake.
        number = jax.sharding.get_abstract_mesh().axis_names.index(merging.axis)
        extra = {"compiler_params": pltpu.CompilerParams(collective_id=number)}
    call = pl.pallas_call(
        functools.partial(kernel, dv=dv, merging=merging),
        grid=grid,
        in_specs=in_specs,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_shapes=scratch,
        interpret=False if _is_for_tpus() else SIMULATED,
        name="treeattn_tpu_decode",
        **extra,
    )
    with jax.enable_x64(False):  # Mosaic's indices have 32 bits
        return call(*_forward_only(arrays))


@jax.custom_jvp
def _forward_only(arrays):
    return arrays


@_forward_only.defjvp
def _no_gradient(*_):
    raise NotImplementedError(
        "implementation, method: the kernels for TPUs have no gradient; leave both out, or use "
        "implementation='blockwise' and method='allreduce'"
    )


def _is_for_tpus() -> bool:
    """Whether the program is traced for TPUs: for the mesh's devices, or for this process's."""
    about = jax.sharding.get_abstract_mesh().abstract_device
    return (about.platform if about else jax.default_backend()) == "tpu"


def _merge_kernel(state, out, mine, *memory, dv: int, merging: Merging):
    mine[...] = state[...]
    enter(memory[0], merging.axis, merging.partners())
    _merge_all(mine, memory, dv, merging)
    out[...] = mine[...]


def _merge_all(mine, memory, dv: int, merging: Merging) -> None:
    pair = functools.partial(merge, dv=dv)
    merging.protocol.run(mine, *memory, merging.axis, merging.partners(), pair)


def _attend_kernel(lengths, q, k, v, out, mine, *memory, dv: int, merging: Merging | None):
    """One step: a block of a text's keys. The last step merges the states of all devices.

    References to lengths (b,), q (h_kv, rows, d), k (block, h_kv, d) and v (block, h_kv, dv). The
    others are as in remote_merge.py, `out` as `mine`.
    """
    text, step = pl.program_id(0), pl.program_id(1)
    h_kv, rows, _ = q.shape
    block, length = len(k), lengths[text]
    if merging:

        @pl.when((text == 0) & (step == 0))
        def _():
            enter(memory[0], merging.axis, merging.partners())

    @pl.when(step == 0)
    def _():
        zeros = jnp.zeros((h_kv * rows, dv + 1), jnp.float32)
        mine[text] = pack(zeros[:, :1] + LOW, zeros[:, :1], zeros[:, 1:])

    @pl.when(step * block < length)
    def _():
        def is_key(*shape, axis):
            return step * block + lax.broadcasted_iota(jnp.int32, shape, axis) < length

        states = []
        for head in range(h_kv):
            keys = k[:, head].astype(jnp.float32)
            values = v[:, head].astype(jnp.float32)
            s = lax.dot_general(q[head], keys, (((1,), (1,)), ((), ())), EXACT)
            s = jnp.where(is_key(rows, block, axis=1), jnp.clip(s, LOW, -LOW), LOW)
            m = jnp.max(s, axis=1, keepdims=True)
            p = jnp.where(is_key(rows, block, axis=1), jnp.exp(s - m), 0)
            # Memory past the length may be NaN, and 0 · NaN is NaN.
            values = jnp.where(is_key(block, dv, axis=0), values, 0)
            # Of sums that are too large, some may be ∞ and others −∞, and their sum would be NaN.
            n = jnp.dot(p / MOST, values, precision=EXACT) * MOST
            states.append((m, jnp.sum(p, axis=1, keepdims=True), n))
        of_block = pack(*(jnp.concatenate(x, axis=0) for x in zip(*states, strict=True)))
        mine[text] = merge(mine[text], of_block, dv=dv)

    @pl.when((text == pl.num_programs(0) - 1) & (step == pl.num_programs(1) - 1))
    def _():
        if merging:
            _merge_all(mine, memory, dv, merging)
        out[...] = mine[...]
