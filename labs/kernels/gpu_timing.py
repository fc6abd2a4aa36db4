"""Times on the device at hand: those of the fastest of a few rounds of many calls, the host waiting
at the end only."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from gpu_llama import room

IN_CACHE = 1 << 28  # bytes: no GPU's L2 holds a quarter of them


def seconds(f, *arguments, calls: int = 10, rounds: int = 5) -> float:
    """Of one call: the fastest round of `calls`, which the device runs one after another."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            done = f(*arguments)  # one result at a time is alive
        jax.block_until_ready(done)
        times.append((time.perf_counter() - began) / calls)
        if sum(times) * calls > 2:
            break
    return min(times)


def repeated(f, times: int):
    """A program that calls f(q, k, v) with each pair of `pairs`, so often, one after another.

    Each call has a query that waits for the last. What it takes to start a program, longer than
    many a kernel, is shared by all; and a pair has left the GPU's L2 when its turn comes again.
    """

    def run(q, pairs):
        def once(_, q):
            for k, v in pairs:
                q = q + 0 * f(q, k, v).astype(q.dtype)  # some return float32
            return q

        return jax.lax.fori_loop(0, times, once, q)

    return jax.jit(run)


def call_seconds(f, q, pairs, *, calls: int, smoke: bool) -> float:
    """Of one of about so many calls in a program."""
    times = 1 if smoke else -(-calls // len(pairs))
    run = repeated(f, times)
    few = {"calls": 1, "rounds": 1} if smoke else {"calls": 2}
    return seconds(run, q, pairs, **few) / (times * len(pairs))


def random_pairs(shape, dtype, most: int) -> list[tuple]:
    """Keys and values, each array its own; so many pairs, at most, as the L2 cannot hold."""
    size = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
    count = int(max(1, min(most, -(-IN_CACHE // size), 0.6 * room() // size)))
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(jax.random.key(0), 2 * count)
    return [(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(count)]


def bandwidths(smoke: bool) -> dict[str, float]:
    """Bytes per second: of a program that writes an array over (what it reads counts, too), and of
    one that only reads, as a kernel over a cache does nearly."""
    n = 1 << 18 if smoke else min(1 << 28, int(room() / 40))
    x = jax.random.normal(jax.random.key(0), (n,), jnp.float32)
    calls = 10
    read = x.nbytes / seconds(jax.jit(jnp.max), x, calls=calls)
    add, times = jax.jit(lambda x: x + 1, donate_argnums=0), []
    for _ in range(5):
        x = jax.block_until_ready(add(x))
        began = time.perf_counter()
        for _ in range(calls):
            x = add(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - began) / calls)
    return {"copy": 2 * x.nbytes / min(times), "read": read}
