"""The merge between TPUs, inside a kernel: devices write states into each other's memory.

A protocol is a function that all devices run, after which `mine` is the merge of all states:

    protocol(mine, inbox, sent, arrived, free, axis, partners, merge)

    mine      (b, rows, ·), the device's own state, as `pack` writes it
    inbox     (slots, b, rows, ·), where other devices write
    sent      (slots,), counts the bytes that have left this device
    arrived   (slots,), counts the bytes that have arrived in this device's inbox
    free      (rounds,), counts slots that the round's partner has read
    axis      of the mesh; a device's number along it is its name
    partners  the devices to which this device writes, and which write to it
    merge     of two packed states

`mine` and `inbox` are in the core's own memory, VMEM. `sent`, `arrived` and `free` are arrays of
semaphores. A semaphore is a counter: any device may add to it, its owner waits until it is at least
a value, and subtracts that value. Each device calls `enter` before it runs the protocol.

The barrier semaphore outlives the kernel, so a partner's next call may add to it during this one.
No barrier of this call takes that signal for another device's: a merge ends on no device before all
devices have passed their barriers.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # a TPU's registers are 8 by 128 numbers of 32 bits; messages are padded to them
# Stands for −∞ as a pivot. It is finite, because −∞ − (−∞) is NaN, and LOW − LOW is 0.
LOW = float(np.finfo(np.float32).min)


def width(dv: int) -> int:
    """Columns of a message: dv for n, one for m and one for d, in whole registers."""
    return -(-(dv + 2) // LANES) * LANES


def pack(m, d, n):
    """A state as one array: m and d (..., 1), n (..., dv) become (..., width(dv))."""
    dv = n.shape[-1]
    column = lax.broadcasted_iota(jnp.int32, (*n.shape[:-1], width(dv) - dv), n.ndim - 1)
    rest = jnp.where(column == 0, m, jnp.where(column == 1, d, 0.0))
    return jnp.concatenate([n, rest], axis=-1)


def merge(a, b, *, dv: int):
    """`treeattn.merge` of two packed states. Without keys, the pivot is LOW, and n and d are 0."""
    a, b = (jnp.clip(state, LOW, -LOW) for state in (a, b))  # ∞, a sum too large, times 0 is NaN
    m = jnp.maximum(a[..., dv : dv + 1], b[..., dv : dv + 1])
    x, y = (jnp.exp(state[..., dv : dv + 1] - m) for state in (a, b))
    column = lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 1)
    return jnp.where(column == dv, m, a * x + b * y)


def enter(inbox, axis, partners) -> None:
    """Tells the partners that this device runs the kernel, so that they may write to its inbox."""
    # The protocols overwrite these NaN. The interpreter reports a device that writes to an inbox
    # without waiting, because that write and this one are not ordered.
    inbox[...] = jnp.full_like(inbox, jnp.nan)
    for partner in partners:
        pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1, device_id={axis: partner})


def swap_partners(me, p: int) -> list:
    """A butterfly's partners, round by round: the devices whose number differs in one bit."""
    return [me ^ (1 << r) for r in range(p.bit_length() - 1)]


def butterfly(mine, inbox, sent, arrived, free, axis, partners, merge):
    """In round r, devices i and i ^ 2ʳ swap their states, and both merge them."""
    me, slots = lax.axis_index(axis), len(inbox)
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), len(partners))
    for r, partner in enumerate(partners):
        slot = r % slots
        if r >= slots:
            pl.semaphore_wait(free.at[r], 1)
        copy = pltpu.make_async_remote_copy(
            mine, inbox.at[slot], sent.at[slot], arrived.at[slot], device_id={axis: partner}
        )
        copy.start()
        copy.wait_recv()
        copy.wait_send()
        own, received = mine[...], inbox[slot]
        lower = jnp.where(me < partner, own, received)
        upper = jnp.where(me < partner, received, own)
        mine[...] = merge(lower, upper)
        if r + slots < len(partners):
            reader = partners[r + slots]
            pl.semaphore_signal(free.at[r + slots], 1, device_id={axis: reader})


def other_devices(me, p: int) -> list:
    return [(me + i) % p for i in range(1, p)]


def one_shot(mine, inbox, sent, arrived, free, axis, partners, merge):
    """Each device writes its state to all others. Then each merges all states, in one order."""
    me = lax.axis_index(axis)
    inbox[me] = mine[...]
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), len(partners))
    copies = [
        pltpu.make_async_remote_copy(
            mine, inbox.at[me], sent.at[0], arrived.at[0], device_id={axis: partner}
        )
        for partner in partners
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait_recv()
        copy.wait_send()
    merged = inbox[0]
    for i in range(1, len(partners) + 1):
        merged = merge(merged, inbox[i])
    mine[...] = merged
