"""Checks of arrays and numbers, whose errors name the argument.

The numbers in arrays are checked at every call, before a jitted function is entered. Those of
traced arrays are unknown: they are clipped, or not checked. Shapes, and
most dtypes, are checked while the function is traced, so only when it is compiled anew.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Numbers = Sequence[Any] | float  # (nested) lists of numbers, or a number: `as_array` takes them


def namespace(*arrays: Array):
    """The module to compute with: jax.numpy if any of the arrays is JAX's, else numpy."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def accumulation_dtype(*arrays: Array) -> np.dtype[Any]:
    """The dtype of sums over these arrays: float64 if any of them is, else float32.

    `jnp.promote_types` is not used, because it refuses float16 where jax_numpy_dtype_promotion is
    "strict".
    """
    double = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.result_type(jnp.float64 if double else jnp.float32)


def integer(name: str, x, least: int, most: int | None = None) -> int:
    """`x` as an int, from any whole number of Python, NumPy or JAX, but not from a bool or a float.

    Raises TypeError for anything else, and ValueError below `least` or above `most`.
    """
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    expected = f"an integer {limits}"
    try:
        number = None if isinstance(x, bool | np.bool_) else operator.index(x)
    except TypeError:  # JAX's booleans and traced values raise it, too
        number = None
    if number is None:
        raise TypeError(f"{name}: expected {expected}, got {x!r:.40}")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}: expected {expected}, got {number}")
    return number


def as_array(name: str, x) -> Array:
    """`x`, made an array if it is a number or a (nested) list of numbers.

    Raises TypeError for ragged lists, text and other libraries' tensors.
    """
    if isinstance(x, Array):
        return x
    if hasattr(x, "__dlpack__"):
        kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
        raise TypeError(f"{name}: expected a JAX or NumPy array, got {kind}: use jnp.from_dlpack")
    try:
        array = np.asarray(x)
    except ValueError:
        raise TypeError(f"{name}: expected an array, got a ragged list: pad it") from None
    if array.dtype.kind in "OSU":
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    return array


def as_integers(name: str, x) -> Array:
    """`x` as by `as_array`. Raises its errors, and TypeError if the entries are not integers."""
    array = as_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an array of integers, got dtype {array.dtype}")
    return array


def check_one_dtype(**arrays: Array) -> None:
    """Raise TypeError unless all arrays have the same dtype."""
    if len({jnp.dtype(x.dtype) for x in arrays.values()}) > 1:
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"expected one dtype, got {dtypes}")


def check_floating(least_bits: int = 16, **arrays: Array) -> None:
    """Raise TypeError for the first array that is not floating-point, of so many bits or more."""
    for name, x in arrays.items():
        if not isinstance(x, Array | np.generic):
            as_array(name, x)  # another library's tensor gets its own error
            raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: expected a floating-point array, got dtype {x.dtype}")
        if jnp.finfo(x.dtype).bits < least_bits:
            expected = f"{least_bits} bits or more"
            raise TypeError(f"{name}: expected {expected}, got dtype {x.dtype}: use .astype")


def check_keys(**arrays: Array) -> None:
    """Raise TypeError unless keys and values have one floating-point dtype, of 8 bits or more."""
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name}: expected a floating-point array, got dtype {x.dtype}: integers need "
                "their scales: attend to a block at a time, times its scales, and merge, as in "
                "site/variants.md, A quantised cache"
            )
    check_floating(8, **arrays)
    check_one_dtype(**arrays)


def bounded(name: str, x: Array, least: int, most, expected: str) -> Array:
    """The integers `x` as int32. Raises ValueError for an entry below `least` or above `most`.

    `most` is a number or an array. Both bounds must fit int32. `expected` is the error's text for
    what is allowed. Entries that this process cannot inspect, because they are traced or on other
    processes' devices, are clipped.
    """
    unknown = isinstance(x, jax.core.Tracer)
    if isinstance(x, jax.Array) and not unknown:
        unknown = not (x.is_fully_addressable or x.is_fully_replicated)
    if unknown:
        # Clip first, and narrow to int32 after: narrowing an entry beyond int32 would wrap it.
        if x.dtype.itemsize < 4:  # an 8- or 16-bit dtype may not hold the bounds
            x = x.astype(jnp.int32)
        least, most = (jnp.asarray(bound, x.dtype) for bound in (least, most))
        return jnp.clip(x, least, most).astype(jnp.int32)
    entries = np.asarray(x)
    wrong = (entries < least) | (entries > most)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{name}: expected {expected}, got {entries[where]} at {where}")
    return x.astype(np.int32)


def check_one_floating_dtype(**arrays: Array) -> None:
    """Raise TypeError unless all arrays have the same floating-point dtype."""
    check_floating(**arrays)
    check_one_dtype(**arrays)


def check_shape(shape: tuple[Any, ...], **arrays: Array) -> None:
    """Raise ValueError for the first array of another shape than `shape`, that of the others."""
    for name, x in arrays.items():
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, as the others, got {x.shape}")


def check_rank(rank: int, layout: str, **arrays: Array) -> None:
    """Raise ValueError for the first array without `rank` axes."""
    for name, x in arrays.items():
        if x.ndim != rank:
            raise ValueError(f"{name}: expected {rank} axes {layout}, got shape {x.shape}")


def check_choice(name: str, x, names: tuple[str | None, ...]) -> None:
    """Raise ValueError unless `x` is one of the names or a function.

    Raise TypeError for a function that `jax.jit` cannot recognize by its hash.
    """
    if not callable(x):
        if not isinstance(x, str | None) or x not in names:
            raise ValueError(f"{name}: expected one of {names}, or a function, got {x!r}")
        return
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            f"{name}: expected a function that can be hashed, got {type(x).__name__}: "
            "if it is a dataclass, use @dataclass(frozen=True)"
        ) from None


def check_scale(scale, d: int, dtype) -> Array | float:
    """`scale` as a scalar array, or 1/√d if it is None.

    Raises what `as_array` raises, ValueError for an array that is not one real number, and, unless
    it is traced, for a number that is not finite in `dtype`, the dtype of the scores.
    """
    if scale is None:
        return d**-0.5
    scale = as_array("scale", scale)
    real = any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if scale.shape != () or not real:
        raise ValueError(
            f"scale: expected a real number, got {scale.dtype} of shape {scale.shape}: multiply q "
            "by the scales of its heads or texts (site/variants.md, A quantised cache)"
        )
    if isinstance(scale, jax.core.Tracer):
        return scale
    if not abs(float(scale)) <= float(jnp.finfo(dtype).max):  # true for a NaN, too
        raise ValueError(f"scale: expected a finite number of {dtype}, got {scale}")
    return scale
