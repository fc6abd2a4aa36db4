"""The split-K kernel, interpreted, beside the core's own attention, and its grid for a long cache.

python -m labs.kernels
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from labs.kernels.split_k import obstacle, split_k_attend
from labs.kernels.tiles import tile_of
from treeattn import attend, finalize


def main() -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 1, 8, 64), (2, 1200, 2, 64), (2, 1200, 2, 64)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    if why := obstacle(q, v):
        print(why)
        return
    options = {"kv_lengths": jnp.array([1200, 700]), "mask": rng.random((1, 1, 1, 1200)) < 0.8}
    found, plain = (
        finalize(jax.jit(functools.partial(attend, implementation=f))(q, k, v, **options))
        for f in (split_k_attend, "blockwise")
    )
    print("on", jax.devices()[0].device_kind, "(interpreted, where it is no CUDA device)")
    print("2 rows of 8 heads on 2 key heads, 1,200 keys in bfloat16, a mask and lengths")
    for name, x, y in zip(("out", "lse"), found, plain, strict=True):
        print(f"largest difference of {name} to blockwise: {jnp.abs(x - y).max():.0e}")
    print("\none query of 32 heads on 8 key heads of 128, by keys:")
    for n in (4096, 65_536, 1_048_576):
        q, v = (jax.ShapeDtypeStruct((1, *x, 128), jnp.bfloat16) for x in ((1, 32), (n, 8)))
        tiling = tile_of(q, v)
        print(f"{n:>9,}: {8 * tiling.tiles * tiling.splits} programs, {tiling.splits} splits")


if __name__ == "__main__":
    main()
