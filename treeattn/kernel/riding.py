"""A few new tokens ride with the kernel over a cache: one call for the keys of both.

A model's step attends to what is cached and to its own new tokens. As two attentions and a merge
these are a dozen kernels on a GPU, most of which start for longer than they run. Instead the last
program of each head, whose share of the cache is the smallest, goes on with the new keys, and the
second kernel merges and divides as it does anyway.
"""

import functools
from collections.abc import Callable

import jax

from treeattn.idea.arrays import Array
from treeattn.idea.state import finalize, merge
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.inputs import Inputs, NewKeys

MOST = 64  # new keys of a row: a block or two of the kernel's


def can_ride(inputs: Inputs, new: NewKeys) -> bool:
    """Whether the kernel that is resolved for the cache's `inputs` takes the new keys, too."""
    sizes = *inputs.q.shape, *inputs.v.shape, *new.v.shape
    return (
        inputs.implementation in ("pallas", "mosaic") and new.k.shape[1] <= MOST and 0 not in sizes
    )


def attention_with_new(inputs: Inputs, new: NewKeys) -> Array:
    """The attention (b, l, h, dv) to both, in the queries' dtype, of what `can_ride`."""
    together = _kernel(inputs.implementation)
    if inputs.elsewhere is None:
        return together(inputs, new)
    apart = inputs.replace(implementation=inputs.elsewhere, elsewhere=None)
    return jax.lax.platform_dependent(
        cuda=functools.partial(together, inputs.replace(elsewhere=None, on_cuda=True), new),
        default=functools.partial(_attention_apart, apart, new),
    )


def _kernel(name: str) -> Callable:
    """The function that does it by the kernel of that name, imported as `load_kernel` does."""
    if name == "mosaic":
        from treeattn.kernel.mosaic import mosaic_attention_with_new

        return mosaic_attention_with_new
    from treeattn.kernel.pallas import pallas_attention_with_new

    return pallas_attention_with_new


def _attention_apart(inputs: Inputs, new: NewKeys) -> Array:
    """The same by two attentions."""
    state = merge(attend_inputs(inputs), attend_inputs(new.inputs(inputs)))
    return finalize(state)[0].astype(inputs.q.dtype)
