"""The same attention on one to eight devices, in any order of the keys: whose bits move?

python -m labs.exact
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labs.exact import exact_state, merge_exact
from treeattn import kv_mesh, simulate_devices, tree_decode

DEVICES = 1, 2, 3, 5, 8
KEYS = 1000


def outputs(q, k, v, **options):
    """The outputs on each number of devices, the keys in another order on each."""
    decode = jax.jit(functools.partial(tree_decode, **options), static_argnames="sharding")
    for p in DEVICES:
        order = np.random.default_rng(p).permutation(KEYS)
        sharding = NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))
        yield np.asarray(decode(q, k[:, order], v[:, order], sharding=sharding))


def main():
    simulate_devices(max(DEVICES))
    rng = np.random.default_rng(0)
    shapes = (1, 1, 8, 64), (1, KEYS, 2, 64), (1, KEYS, 2, 64)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    ways = {
        "floats": {},
        "exact sums": {"implementation": exact_state, "method": merge_exact},
    }
    print(f"one query of 8 heads, {KEYS:,} keys in another order on each number of devices")
    for name, options in ways.items():
        first, *others = outputs(q, k, v, **options)
        for p, out in zip(DEVICES[1:], others, strict=True):
            moved = (out != first).sum()
            print(f"{name:>10}, {p} devices: {moved:3} of {out.size} outputs differ from one's")


if __name__ == "__main__":
    main()
