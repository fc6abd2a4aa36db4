"""Numbers rounded to a dtype, also to bfloat16, which NumPy does not have."""

import numpy as np

# How far a result of each dtype may be off, absolute and relative.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 3e-3, "bfloat16": 1.6e-2}


def bfloat16(x) -> np.ndarray:
    """`x` rounded to bfloat16, to nearest even, in a float32 array, as NumPy has no bfloat16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(x, dtype: str) -> np.ndarray:
    """`x` rounded to a dtype by its name, one of `TOLERANCES`."""
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {list(TOLERANCES)}")
    return bfloat16(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)
