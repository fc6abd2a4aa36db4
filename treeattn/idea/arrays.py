"""The array type of the signatures, the checks that every public function shares, and padding."""

import math
import numbers
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Array = jax.Array | np.ndarray
Scale = float | int | Float[Array, ""] | None  # None: 1/√head_dim


def namespace(*arrays: Array):
    """The module to compute with: numpy when every array is NumPy's, else jax.numpy."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """float64 when any of the arrays is; float32 otherwise. What is summed is summed in it."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def varying_like(tree, *arrays: Array | None):
    """`tree`, typed as differing between the devices along every axis that an array differs along.

    Inside `shard_map` a loop's carry must have the type that its body gives it. A sum over no
    elements of an array is 0 and has its type, in every release of JAX; XLA drops the addition.

    Integers and booleans in the tree stay as they are: lengths and masks are no carries, and
    must not come to depend on what a gradient is taken by.
    """
    given = (jnp.asarray(x) for x in arrays if x is not None)
    # An integer: it has no gradient.
    zero = sum(jnp.sum(x[None][:0].astype(jnp.int32)) for x in given)

    def vary(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.add(x, zero.astype(x.dtype)) if floating else x

    return jax.tree.map(vary, tree)


def pad_axis(x: Array | None, axis: int, size: int) -> Array | None:
    """`x` with zeros (or False) at the end of `axis`, up to `size`."""
    if x is None or x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def integer(name: str, x, least: int | None = None, most: int | None = None) -> int:
    """`x` as an int: any whole number of Python's, NumPy's or JAX's, but no bool and no float.

    Raises a TypeError for anything else, and a ValueError below `least` or above `most`.
    """
    expected = "an integer"
    if least is not None and most is not None:
        expected += f" from {least} to {most}"
    elif least is not None:
        expected += f" of at least {least}"
    elif most is not None:
        expected += f" of at most {most}"
    try:
        found = None if _is_bool(x) else operator.index(x)
    except TypeError:  # a traced value's is one, too
        found = None
    if found is None:
        raise TypeError(f"{name}: expected {expected}, got {x!r}")
    if (least is not None and found < least) or (most is not None and found > most):
        raise ValueError(f"{name}: expected {expected}, got {found}")
    return found


def number(name: str, x, above: float | int | None = None) -> float:
    """`x` as a float: any finite real number of Python's, NumPy's or JAX's, but no bool.

    Raises a TypeError for anything else, and a ValueError unless it is finite and over `above`.
    """
    expected = "a finite number" if above is None else f"a finite number above {above}"
    is_number = isinstance(x, numbers.Real | Array) and not _is_bool(x)
    try:
        found = float(x) if is_number else None
    except TypeError:  # an array of several, a traced one, a complex number
        found = None
    except OverflowError:  # an int that no float holds
        found = math.inf
    if found is None:
        raise TypeError(f"{name}: expected {expected}, got {x!r:.40}")
    if not math.isfinite(found) or (above is not None and found <= above):
        raise ValueError(f"{name}: expected {expected}, got {x}")
    return found


def _is_bool(x) -> bool:
    return isinstance(x, bool) or getattr(x, "dtype", None) == np.bool_


def as_array(name: str, x) -> Array:
    """`x`, made an array if it is a number or a (nested) list of numbers.

    Raises a TypeError for a ragged list and for another library's tensors.
    """
    if isinstance(x, Array):
        return x
    if hasattr(x, "__dlpack__"):
        kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
        raise TypeError(f"{name}: expected a JAX or NumPy array, got {kind}: use jnp.from_dlpack")
    try:
        found = np.asarray(x)
    except ValueError:
        found = None
    if found is None or found.dtype == object:
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


def check_ends(ends: Array) -> Array:
    """`ends` (b, n) in int32: of each row's nodes, in depth-first order, where its subtree ends.

    Raises a ValueError unless every node's interval, of the numbers j … ends[j] − 1, begins with
    itself and lies within another's or apart from it. Entries that nobody can look at are clipped
    to 0 … n.
    """
    size = ends.shape[1]
    checked = bounded("ends", ends, 0, size, f"the ends of subtrees, up to {size} nodes")
    if isinstance(checked, jax.core.Tracer):
        return checked
    for row, line in enumerate(np.asarray(checked).tolist()):
        open_ends = [size]  # of the subtrees that the node at hand lies in, the innermost last
        for node, end in enumerate(line):
            while open_ends[-1] <= node:
                open_ends.pop()
            if not node < end <= open_ends[-1]:
                raise ValueError(
                    f"ends: expected depth-first order, where node {node}'s subtree ends at "
                    f"{node + 1} to {open_ends[-1]}, got {end} in row {row}"
                )
            open_ends.append(end)
    return checked


def check_nodes(nodes: Array, size: int) -> Array:
    """`nodes` (places,) in int32: the node, of `size`, at each place; −1 at an empty one.

    Raises TypeError for what are no integers, ValueError for another shape, and unless every node
    has one place. Entries that nobody can look at are clipped to −1 … size − 1.
    """
    nodes = as_array("nodes", nodes)
    check_integers(nodes=nodes)
    check_rank(1, "(places,)", nodes=nodes)
    checked = bounded("nodes", nodes, -1, size - 1, f"−1, or one of {size} nodes")
    if not isinstance(checked, jax.core.Tracer):
        times = np.bincount(np.asarray(checked) + 1, minlength=size + 1)[1:]
        wrong = np.flatnonzero(times != 1)
        if wrong.size:
            node = wrong[0]
            raise ValueError(
                f"nodes: expected each of {size} nodes at one place, got node {node} {times[node]} "
                "times"
            )
    return checked


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


def check_scale(scale, d: int, dtype) -> Array | float:
    """`scale` as a scalar array, 1/√d where it is None.

    Raises a ValueError for anything but a real number, and, if it can be looked at, for one that
    is not finite in `dtype`, that of the scores.
    """
    if scale is None:
        return d**-0.5
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
