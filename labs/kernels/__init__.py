"""Kernels for GPUs, as functions for `implementation=`: interpreted, and not run on one."""

from labs.kernels.split_k import split_k_attend

__all__ = ["split_k_attend"]
