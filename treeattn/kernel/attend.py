"""Attention on one device: queries and keys in, an `AttentionState` out."""

import functools

import jax
import jax.numpy as jnp

from treeattn.idea.arrays import Scale
from treeattn.idea.state import AttentionState, finalize, reduce_tree
from treeattn.kernel import flash
from treeattn.kernel.blockwise import attend_blockwise
from treeattn.kernel.causal import attend_causal
from treeattn.kernel.choice import KERNELS, load_kernel, platform_of, resolve
from treeattn.kernel.exact import ExactState
from treeattn.kernel.exactly import attend_exactly, attend_rounded
from treeattn.kernel.hook import attend_by_hook
from treeattn.kernel.inputs import (
    Bias,
    Ends,
    Implementation,
    Inputs,
    Keys,
    Lengths,
    Mask,
    Output,
    Queries,
    Values,
    check_inputs,
)
from treeattn.kernel.quantized import Scales


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    kv_lengths: Lengths | None = None,
    scale: Scale = None,
    causal: bool = False,
    ends: Ends | None = None,
    key_scale: Scales | None = None,
    value_scale: Scales | None = None,
    implementation: Implementation = None,
) -> AttentionState:
    """The state of each query after its keys: fields (b, l, h) and numerator (b, l, h, dv).

    q:          (b, l, h, d), floating-point; k (b, n, h_kv, d) and v (b, n, h_kv, dv) of the
                same dtype. h must be a multiple of h_kv: query head i reads key head
                i // (h // h_kv).
    mask:       True where a query may see a key; broadcasts to (b, h, l, n).
    bias:       added to the scaled scores; broadcasts to (b, h, l, n). −∞ hides the key.
    kv_lengths: (b,) only the first so many keys of each row count, 0 … n; clipped to that where
                they are traced.
    scale:      multiplies q·k; 1/√d when None. A number is compiled in, a JAX array's value is not.
    causal:     query i sees keys 0 … i, of as many keys as queries.
    ends:       (b, n) instead of a mask: query i sees key j exactly where j ≤ i < ends[j], as in
                trees whose nodes are in depth-first order (`pack_rows`), of as many keys as
                queries. Blocks of keys that a block of queries does not see are skipped. By
                "blockwise" and "exact" only.
    key_scale, value_scale: floating-point, broadcast to (b, n, h_kv); with k and v of int8 or
                float8_e4m3fn, as `quantize` returns them: key j is k[j] · key_scale[j], and its
                value v[j] · value_scale[j]. They multiply scores and weights, a block of keys at a
                time, so that no cache of floats is ever made. One scale a token and head, or one a
                head (b, 1, h_kv). Of all keys one dtype; q has its own. By "blockwise" only.
    implementation: a function, or one of these, or None: the first whose line fits

        on          dtypes         queries, keys                             implementation
        CUDA        float16, bf16  a text of more than 128 queries, no mask  "flash"
                                   or bias, one head_dim up to 256, where
                                   flash-attn-jax is installed
        CUDA        float16, bf16, no mask or bias, up to 32 queries of a    "mosaic"
                    float32        key head (16 in float32), head_dims that
                                   are multiples of 64, 64 keys or more, a
                                   multiple of 8; from JAX 0.11.2 on
        CUDA        the same       all, head_dims up to 256                  "pallas"
        CUDA        the same       head_dims up to 576, as far as shared     "mosaic"
                                   memory goes, and all where JAX has no
                                   Triton; from JAX 0.11.2 on
        anything    all            all                                       "blockwise"

    CUDA means NVIDIA's GPUs of compute capability 8.0 or higher (Ampere). Older ones, AMD's, and
    a JAX that has neither backend, take "blockwise": some nine small kernels for each 1,024
    keys, by estimate ten to a hundred times slower than a kernel on long contexts. So does
    float64. No kernel was run on a GPU here: they are interpreted, and compiled for described ones.
    "pallas" is of Triton's backend, which JAX has deprecated, and "mosaic" of the one that stays.
    That one comes first where it reads the keys once, and all arguments where they lie; others it
    would copy before. A token has h / h_kv queries of a key head. float32 with a head_dim of 256
    runs in both, but keeps some numbers outside of registers, fewer in "mosaic". A traced call
    leaves the choice to its compiler.

    By name, "flash" takes any number of queries; "pallas" and "mosaic" run on a CPU too,
    interpreted, which is slow, the second with an error where threads race for memory (JAX 0.11.2
    prints it), on one device (ValueError in a mesh of more) and in one Python thread at a time. All
    have the gradient of "blockwise". cuDNN's kernel is none of them: what JAX returns of it
    (`jax.nn.dot_product_attention`) is an lse rounded to the inputs' dtype.

    "exact" gives the same bits whatever the order of the keys, the blocks in which they are read,
    and the rows and queries beside: those of one query depend on it and on the set of its keys
    alone, within one version of JAX on one kind of device. All sums are sums of integers; n keys
    lose n · 2^−40 of their largest weight at most. The state is (lse, 1, out), its gradient that of
    "blockwise". It takes float16, bfloat16 and float32, up to 2^28 keys and a head_dim up to 4,096.
    An infinite query or key counts as NaN there, and a NaN in anything that a query sees makes all
    of its state NaN. `attend_exact` has the state before it is rounded, which merges exactly.

    A function is a kernel of one's own, kernel(q, k, v, *, scale, mask=None, bias=None,
    kv_lengths=None, causal=False), which returns the state, or (out, lse) as `from_output` reads:
    out (b, l, h, dv) in any floating-point dtype, lse (b, l, h) and a state's fields in float32 or
    wider (float64 for inputs of float64). It is called with what has been checked, as it is here:
    arrays of the shapes and dtypes above and no axis of 0, kv_lengths in int32 from 0 to n, scale a
    float, or an array () where it came as one. Of the other options it is given those that the call
    has, and need only have parameters for them; kv_lengths may be added where devices cannot share
    the keys evenly. jit, vmap, gradients and meshes reach as far as they do in the function; a new
    function compiles anew. examples/kernels.py has other libraries' kernels as such functions.

    The state is in float32, or float64 when an input is. A score above the dtype's range
    counts as the largest finite one, and sums saturate. A query that sees no key has the state
    (−∞, 0, 0), and zero gradients. Keys and values that no query of their row and head sees may be
    NaN or ∞; a NaN in one that some of them see may reach the others, too (0 · NaN).

    Raises TypeError for dtypes that are not floating-point or differ, ValueError for shapes
    that do not fit, lengths out of range, a scale that is not finite, a kernel by name where it
    cannot run, and an option that a function does not take; both for a function that returns
    something else than promised.
    """
    beside = {"ends": ends, "key_scale": key_scale, "value_scale": value_scale}
    inputs = check_inputs(q, k, v, mask, bias, kv_lengths, scale, causal=causal, **beside)
    return attend_inputs(resolve(implementation, inputs, platform_of(q)))


def attend_exact(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    kv_lengths: Lengths | None = None,
    scale: Scale = None,
    causal: bool = False,
    ends: Ends | None = None,
) -> ExactState:
    """`attend` by "exact", before it is rounded: a state whose merge is exact.

    Arguments and errors as there. Fields (b, l, h), levels (6, 2, b, l, h) and (6, 2, b, l, h, dv).
    For keys that come from several places, a cache in shards and new tokens, say: the states'
    `merge`, in any order, and `rounded`, or on a mesh `merge_across(state, axes, method="exact")`,
    once at the end, depend on the set of all keys alone. It has no gradient of its own.
    """
    inputs = check_inputs(q, k, v, mask, bias, kv_lengths, scale, causal=causal, ends=ends)
    return attend_exactly(resolve("exact", inputs, platform_of(q)))


def attention(q, k, v, **options) -> Output:
    """softmax(scale · q kᵀ) v in the queries' layout and dtype; `options` as in `attend`."""
    implementation = options.pop("implementation", None)
    inputs = check_inputs(q, k, v, **options)
    return _attention_of(resolve(implementation, inputs, platform_of(q)))


def _attention_of(inputs: Inputs):
    """`attention` of checked inputs."""
    if inputs.elsewhere is not None:
        return _where_it_compiles_for(_attention_of, inputs)
    name = inputs.implementation
    if name in KERNELS and (by_kernel := load_kernel(name).attention) is not None:
        return by_kernel(inputs)
    return finalize(attend_inputs(inputs))[0].astype(jnp.result_type(inputs.q))


def which_implementation(
    q, k, v, *, implementation: Implementation = None, platform: str | None = None, **options
) -> Implementation:
    """The implementation with which `attend` runs these arguments: "flash", "pallas", "mosaic", …

    A function is returned as it is.

    options:  as in `attend`
    platform: where; None for the device of `q`. "cuda" asks for NVIDIA's GPUs that the kernels
              take, from any machine: nothing runs.
    Raises what `attend` raises, and ImportError for "flash" where it cannot be imported.
    """
    inputs = check_inputs(q, k, v, **options)
    chosen = resolve(implementation, inputs, platform or platform_of(q)).implementation
    if chosen == "flash":
        flash.load()
    return chosen


def attend_inputs(inputs: Inputs) -> AttentionState:
    """`attend` for checked inputs, by the implementation that they name."""
    if inputs.elsewhere is not None:
        return _where_it_compiles_for(attend_inputs, inputs)
    if callable(inputs.implementation):
        return attend_by_hook(inputs)
    if inputs.implementation in KERNELS:
        return load_kernel(inputs.implementation).attend(inputs)
    if inputs.implementation == "exact":
        return attend_rounded(inputs)
    plain = inputs.mask is inputs.bias is inputs.lengths is inputs.key_scale is None
    if inputs.causal and plain:
        return attend_causal(inputs)
    return attend_blockwise(inputs)


def _where_it_compiles_for(f, inputs: Inputs):
    """f by `implementation` in a program for CUDA, by `elsewhere` in any other."""

    there = inputs.replace(elsewhere=None, on_cuda=True)
    other = inputs.replace(implementation=inputs.elsewhere, elsewhere=None)
    return jax.lax.platform_dependent(
        cuda=functools.partial(f, there), default=functools.partial(f, other)
    )


def attend_in_blocks(inputs: Inputs, block: int) -> AttentionState:
    """`attend_inputs`, each block of so many keys by itself, and then a tree over the blocks.

    Which sums are formed then depends on `block` alone, and not on how a shard is read.
    """
    b, n = inputs.k.shape[:2]
    lengths = jnp.full(b, n, jnp.int32) if inputs.lengths is None else inputs.lengths

    def cut(x, axis: int, start):
        keyless = x is None or x.shape[axis] == 1 != n
        return x if keyless else jax.lax.dynamic_slice_in_dim(x, start, block, axis)

    def state_of_block(start):
        cut_inputs = inputs.replace(
            k=cut(inputs.k, 1, start),
            v=cut(inputs.v, 1, start),
            mask=cut(inputs.mask, 3, start),
            bias=cut(inputs.bias, 3, start),
            key_scale=cut(inputs.key_scale, 1, start),
            value_scale=cut(inputs.value_scale, 1, start),
            lengths=jnp.clip(lengths - start, 0, block),
        )
        return attend_inputs(cut_inputs)

    return reduce_tree(jax.lax.map(state_of_block, jnp.arange(0, n, block)))
