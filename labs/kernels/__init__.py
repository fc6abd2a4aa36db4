"""Kernels for GPUs, as functions for `implementation=`. They were interpreted, not run on a GPU."""

from labs.kernels.split_k import split_k_attend

__all__ = ["split_k_attend"]
