"""Kernels, as functions for `implementation=` and `method=`: simulated and compiled, not run."""
