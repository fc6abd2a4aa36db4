"""The split-K kernel, interpreted, beside the core's own attention.

python -m labs.kernels
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from labs.kernels.split_k import obstacle, split_k_attend
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


if __name__ == "__main__":
    main()
