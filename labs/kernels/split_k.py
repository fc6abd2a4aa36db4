"""The functions of a split-K kernel, whichever backend it is written in, and their derivatives."""

from collections.abc import Callable

import jax

from treeattn.idea.state import AttentionState, finalize
from treeattn.kernel.blockwise import attend_blockwise, blockwise_attention
from treeattn.kernel.inputs import Inputs, NewKeys
from treeattn.kernel.one_key import attend_one_key


def with_derivatives(run: Callable) -> tuple[Callable, Callable, Callable]:
    """(attend, attention, attention_with_new), each with the derivative of the blockwise form.

    run: the kernel, run(inputs, output_dtype=None, new=None), where there are queries and keys: the
         state's fields, or in an output's dtype a tuple of that output alone
    """

    @jax.custom_vjp
    def attend(inputs: Inputs) -> AttentionState:
        """The state by the kernel, of inputs that have no `obstacle`."""
        if 0 in (*inputs.q.shape, *inputs.v.shape):
            return attend_blockwise(inputs)
        if inputs.k.shape[1] == 1:
            return attend_one_key(inputs)
        return AttentionState(*run(inputs))

    @jax.custom_vjp
    def attention(inputs: Inputs):
        """The output of that state (b, l, h, dv) in the queries' dtype; the kernel divides."""
        if 0 in (*inputs.q.shape, *inputs.v.shape):
            return blockwise_attention(inputs)
        if inputs.k.shape[1] == 1:
            return finalize(attend_one_key(inputs))[0].astype(inputs.q.dtype)
        return run(inputs, inputs.q.dtype)[0]

    @jax.custom_vjp
    def attention_with_new(inputs: Inputs, new: NewKeys):
        """The output (b, l, h, dv) after both, of what `can_ride`, in the queries' dtype."""
        return run(inputs, inputs.q.dtype, new)[0]

    for f, blockwise in (
        (attend, attend_blockwise),
        (attention, blockwise_attention),
        (attention_with_new, blockwise_attention),
    ):
        _differentiate(f, blockwise)
    return attend, attention, attention_with_new


def _differentiate(f, blockwise: Callable) -> None:
    """Give `f` the gradients of `blockwise`, which takes the same arguments."""
    f.defvjp(
        lambda *arguments: (f(*arguments), arguments),
        lambda arguments, cotangent: jax.vjp(blockwise, *arguments)[1](cotangent),
    )
