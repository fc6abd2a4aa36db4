"""The array type of the signatures, and the checks that every public function shares."""

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def namespace(*arrays: Array):
    """The module to compute with: numpy when every array is NumPy's, else jax.numpy."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """float64 when any of the arrays is; float32 otherwise."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def check_floating(**arrays: Array) -> None:
    """Raise a TypeError that names the first array whose dtype is not floating-point."""
    for name, x in arrays.items():
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: expected a floating-point array, got dtype {x.dtype}")


def check_integers(**arrays: Array) -> None:
    """Raise a TypeError that names the first array that does not hold integers."""
    for name, x in arrays.items():
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: expected an array of integers, got dtype {x.dtype}")


def check_same_dtype(**arrays: Array) -> None:
    """Raise a TypeError that lists the dtypes when they are not all the same."""
    if len({jnp.dtype(x.dtype) for x in arrays.values()}) > 1:
        came = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"expected one dtype, got {came}")


def check_rank(rank: int, layout: str, **arrays: Array) -> None:
    """Raise a ValueError that names the first array without `rank` axes."""
    for name, x in arrays.items():
        if x.ndim != rank:
            raise ValueError(f"{name}: expected {rank} axes {layout}, got shape {x.shape}")


def check_broadcasts(name: str, x: Array, target: tuple[int, ...], layout: str) -> None:
    """Raise a ValueError unless `x` has `target`'s rank and each axis is 1 or `target`'s."""
    fits = x.ndim == len(target) and all(n in (1, m) for n, m in zip(x.shape, target, strict=True))
    if not fits:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {layout} = {target}, got {x.shape}"
        )
