"""Numbers as a dtype would hold them, bfloat16 included, which NumPy has not."""

import numpy as np

DTYPES = ("float64", "float32", "float16", "bfloat16")


def bfloat16(x) -> np.ndarray:
    """`x` rounded to bfloat16, to nearest even; the array is float32, for NumPy has no other."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def rounded(x, dtype: str) -> np.ndarray:
    """`x` rounded to a dtype by its name, one of `DTYPES`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {list(DTYPES)}")
    return bfloat16(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)
