"""What a call is given: arrays and numbers, checked, with errors that name the argument.

Values are looked at before a function is compiled; shapes and dtypes while it is traced, which is
once a shape.
"""

import operator
import sys

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


def namespace(*arrays: Array):
    """The module to compute with: numpy when every array is NumPy's, else jax.numpy."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """The dtype of sums over these arrays: float64 if any of them is, else float32.

    `jnp.promote_types` would refuse float16 where jax_numpy_dtype_promotion is "strict".
    """
    double = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.result_type(jnp.float64 if double else jnp.float32)


def integer(name: str, x, least: int | None = None, most: int | None = None) -> int:
    """`x` as an int: any whole number of Python's, NumPy's or JAX's, but no bool and no float.

    Raises a TypeError for anything else, and a ValueError below `least` or above `most`.
    """
    expected = "an integer"
    if most is not None:
        expected += f" from {least} to {most}"
    elif least is not None:
        expected += f" of at least {least}"
    try:
        found = None if isinstance(x, bool) else operator.index(x)
    except TypeError:  # of NumPy's and JAX's booleans, too, and of a traced value
        found = None
    if found is None:
        raise TypeError(f"{name}: expected {expected}, got {x!r}")
    if (least is not None and found < least) or (most is not None and found > most):
        raise ValueError(f"{name}: expected {expected}, got {found}")
    return found


def as_array(name: str, x) -> Array:
    """`x`, made an array if it is a number or a (nested) list of numbers.

    Raises a TypeError for a ragged list, for text and for another library's tensors.
    """
    if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.dtype.itemsize > 8:
        raise TypeError(f"{name}: expected at most 64 bits, got dtype {x.dtype}: use .astype")
    if isinstance(x, Array):
        return x
    if hasattr(x, "__dlpack__"):
        kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
        raise TypeError(f"{name}: expected a JAX or NumPy array, got {kind}: use jnp.from_dlpack")
    try:
        found = np.asarray(x)
    except ValueError:
        found = None
    if found is None or found.dtype.kind in "OSU":
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    return found


def check_floating(**arrays: Array) -> None:
    """Raise a TypeError that names the first array whose dtype is not float16, bfloat16, float32
    or float64."""
    for name, x in arrays.items():
        _check_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: expected a floating-point array, got dtype {x.dtype}")
        if jnp.dtype(x.dtype).itemsize < 2:
            raise TypeError(f"{name}: expected 16 bits or more, got dtype {x.dtype}: use .astype")


def check_integers(**arrays: Array) -> None:
    """Raise a TypeError that names the first array that does not hold integers."""
    for name, x in arrays.items():
        _check_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: expected an array of integers, got dtype {x.dtype}")


def _check_array(name: str, x) -> None:
    if not isinstance(x, Array | np.generic):
        as_array(name, x)  # says what to do about another library's tensors
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")


def bounded(name: str, x: Array, least: int, most, expected: str) -> Array:
    """The integers `x` as int32, from `least` to `most`, a number or an array, within int32.

    Raises a ValueError, with what was expected, for an entry outside. Nobody can look at the
    entries of a traced array, or of one that other processes hold: they are clipped.
    """
    hidden = isinstance(x, jax.core.Tracer)
    if isinstance(x, jax.Array) and not hidden:
        hidden = not (x.is_fully_addressable or x.is_fully_replicated)
    if hidden:
        # Before it is narrowed, and within what its own dtype can hold.
        lowest = max(np.iinfo(x.dtype).min, -(2**31))
        highest = min(np.iinfo(x.dtype).max, 2**31 - 1)
        least = np.clip(least, lowest, highest).astype(x.dtype)
        most = np.clip(most, lowest, highest).astype(x.dtype)
        return jnp.clip(x, least, most).astype(jnp.int32)
    came = np.asarray(x)
    wrong = (came < least) | (came > most)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{name}: expected {expected}, got {came[where]} at {where}")
    return x.astype(np.int32)


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


def check_hashable(name: str, function) -> None:
    """Raise a TypeError for a function that `jax.jit` cannot recognize by its hash."""
    try:
        hash(function)
    except TypeError:
        raise TypeError(
            f"{name}: expected a function that can be hashed, got {type(function).__name__}: "
            "if it is a dataclass, use @dataclass(frozen=True)"
        ) from None


def check_scale(scale, d: int, dtype) -> Array | float:
    """`scale` as a scalar array, 1/√d where it is None.

    Raises a ValueError for anything but a real number, and, if it can be looked at, for one that
    is not finite in `dtype`, that of the scores.
    """
    if scale is None:
        return d**-0.5
    if type(scale) is int and abs(scale) <= sys.float_info.max:  # NumPy has no int beyond 64 bits
        scale = float(scale)
    scale = as_array("scale", scale)
    real = any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if scale.shape != () or not real:
        raise ValueError(f"scale: expected a real number, got {scale.dtype} of shape {scale.shape}")
    if isinstance(scale, jax.core.Tracer):
        return scale
    if not abs(float(scale)) <= float(jnp.finfo(dtype).max):  # nor is a NaN
        beyond = f", which {dtype} does not hold" if np.isfinite(float(scale)) else ""
        raise ValueError(f"scale: expected a finite number, got {scale}{beyond}")
    return scale


def check_broadcasts(name: str, x: Array, target: tuple[int, ...], layout: str) -> None:
    """Raise a ValueError unless `x` has `target`'s rank and each axis is 1 or `target`'s."""
    fits = x.ndim == len(target) and all(n in (1, m) for n, m in zip(x.shape, target, strict=True))
    if not fits:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {layout} = {target}, got {x.shape}"
        )
