"""The split-K kernel, interpreted, beside attention in float64.

python -m labs.kernels
"""

import jax

from labs.kernels.gpu_checks import compare

SHAPES = {"2 rows of 8 heads on 2 key heads, 1,200 keys": (2, 1, 8, 2, 1200, 64, 64)}


def main() -> None:
    print("on", jax.devices()[0].device_kind, "(interpreted, where it is no CUDA device)")
    for row in compare("split-K", "bfloat16", SHAPES):
        print(", ".join(f"{name} {x}" for name, x in row.items() if x != ""))


if __name__ == "__main__":
    main()
