"""A decoder layer by hand on a mesh of three axes: rows, heads with their weights, and keys."""

from labs.sharding.layer import Cache, Sizes, Weights, cache_specs, layer_step, weight_specs

__all__ = ["Cache", "Sizes", "Weights", "cache_specs", "layer_step", "weight_specs"]
