"""Times of exact sums and of the core's own attention: medians, in turn, in one process.

python -m labs.exact.measure
"""

import functools
import os
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from labs.exact import exact_attend
from treeattn import attention

TURNS = 11
CASES = {  # queries, heads, key heads, keys, head_dim
    "1 query, 16 heads of 128 on 4, 16k keys": (1, 16, 4, 16_384, 128),
    "1 query, 9 heads of 64 on 3, 8k keys": (1, 9, 3, 8_192, 64),
    "64 queries, 9 heads of 64 on 3, 4k keys": (64, 9, 3, 4_096, 64),
}


def seconds(f, *args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - start


def times(l, h, h_kv, n, d) -> np.ndarray:
    """Median seconds of plain and of exact attention."""
    rng = np.random.default_rng(0)
    shapes = (1, l, h, d), (1, n, h_kv, d), (1, n, h_kv, d)
    inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    ways = [jax.jit(functools.partial(attention, implementation=x)) for x in (None, exact_attend)]
    for f in ways:
        seconds(f, *inputs)
    return np.median([[seconds(f, *inputs) for f in ways] for _ in range(TURNS)], axis=0)


def main():
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, float32")
    for name, case in CASES.items():
        plain, exact = 1e3 * times(*case)
        print(f"{name:<41} {plain:7.1f} ms  {exact:8.1f} ms  {exact / plain:5.1f} times")


if __name__ == "__main__":
    main()
