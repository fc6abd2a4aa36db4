"""Attention on one device: queries and keys in, an `AttentionState` out."""

import functools
import importlib.util
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from treeattn.idea.arrays import Array
from treeattn.idea.state import AttentionState, finalize, merge, reduce_tree
from treeattn.kernel import flash
from treeattn.kernel.blockwise import attend_blockwise
from treeattn.kernel.inputs import Inputs, check_inputs

CAUSAL_BLOCK = 128  # queries under one mask, at most: half of the scores under it are hidden


def attend(
    q: Float[Array, "b l h d"],
    k: Float[Array, "b n h_kv d"],
    v: Float[Array, "b n h_kv dv"],
    *,
    mask: Bool[Array, "#b #h #l #n"] | None = None,
    bias: Float[Array, "#b #h #l #n"] | None = None,
    kv_lengths: Integer[Array, " b"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    causal: bool = False,
    implementation: str | None = None,
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
    implementation: one of these, or None: the first whose line fits

        on          dtypes         queries, keys                             implementation
        CUDA        float16, bf16  a text of more than 128 queries, no mask  "flash"
                                   or bias, one head_dim up to 256, where
                                   flash-attn-jax is installed
        CUDA        float16, bf16, all, head_dims up to 256                  "pallas"
                    float32
        anything    all            all                                       "blockwise"

    CUDA means NVIDIA's GPUs of compute capability 8.0 or higher (Ampere). Older ones, AMD's, and
    a JAX that has no Triton any more, take "blockwise": some nine small kernels for each 1,024
    keys, by estimate ten to a hundred times slower than a kernel on long contexts. So do
    float64 and wide heads. float32 with a head_dim of 256 runs in "pallas", but keeps some of its
    numbers outside of registers, and is slow. A traced call leaves the choice to its compiler.

    By name, "flash" takes any number of queries, and "pallas" runs on a CPU too, interpreted,
    which is slow. Both have the gradient of "blockwise". cuDNN's kernel is none of them: what
    JAX returns of it (`jax.nn.dot_product_attention`) is an lse rounded to the inputs' dtype.

    The state is in float32, or float64 when an input is. A score above the dtype's range
    counts as the largest finite one, and sums saturate. A query that sees no key has the state
    (−∞, 0, 0), and zero gradients. Keys and values that no query of their row and head sees may be
    NaN or ∞; a NaN in one that some of them see may reach the others, too (0 · NaN).

    Raises TypeError for dtypes that are not floating-point or differ, ValueError for shapes
    that do not fit, lengths out of range, a scale that is not finite, and a kernel by name where
    it cannot run.
    """
    inputs = check_inputs(q, k, v, mask, bias, kv_lengths, scale, causal=causal)
    return attend_inputs(resolve(implementation, inputs, platform_of(q)))


def attention(q, k, v, **options) -> Float[Array, "b l h dv"]:
    """softmax(scale · q kᵀ) v in the queries' layout and dtype; `options` as in `attend`."""
    return finalize(attend(q, k, v, **options))[0].astype(jnp.result_type(q))


def which_implementation(
    q, k, v, *, implementation: str | None = None, platform: str | None = None, **options
) -> str:
    """The implementation with which `attend` runs these arguments: "flash", "pallas", "blockwise".

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

        def run(name):
            return functools.partial(
                attend_inputs, inputs.replace(implementation=name, elsewhere=None)
            )

        return jax.lax.platform_dependent(
            cuda=run(inputs.implementation), default=run(inputs.elsewhere)
        )
    name = inputs.implementation
    if name in KERNELS:
        return _kernel(name)[0](inputs)
    if inputs.causal and inputs.mask is inputs.bias is inputs.lengths is None:
        return attend_causal(inputs)
    return attend_blockwise(inputs)


KERNELS = "flash", "pallas"
AMPERE = (8, 0)  # the least compute capability that FlashAttention-2 and XLA's Triton take


def _kernel(name: str) -> tuple[Callable, Callable]:
    """(what runs the kernel, what says why it cannot)."""
    if name == "flash":
        return flash.flash_attend, flash.obstacle
    from treeattn.kernel import pallas  # when asked for: it takes a fifth of JAX's time to import

    return pallas.pallas_attend, pallas.obstacle


def attend_in_blocks(inputs: Inputs, block: int) -> AttentionState:
    """`attend_inputs`, each block of so many keys by itself, and then a tree over the blocks.

    Which sums are formed then depends on `block` alone, and not on how a shard is read.
    """
    b, n = inputs.k.shape[:2]
    lengths = jnp.full(b, n, jnp.int32) if inputs.lengths is None else inputs.lengths

    def cut(x, axis, start):
        keyless = x is None or x.shape[axis] == 1 != n
        return x if keyless else jax.lax.dynamic_slice_in_dim(x, start, block, axis)

    def one(start):
        k, v = cut(inputs.k, 1, start), cut(inputs.v, 1, start)
        mask, bias = cut(inputs.mask, 3, start), cut(inputs.bias, 3, start)
        seen = jnp.clip(lengths - start, 0, block)
        return attend_inputs(inputs.replace(k=k, v=v, mask=mask, bias=bias, lengths=seen))

    return reduce_tree(jax.lax.map(one, jnp.arange(0, n, block)))


def resolve(implementation: str | None, inputs: Inputs, platform: str | None) -> Inputs:
    """The inputs with the implementation that will run them on that platform.

    platform: as `platform_of` gives it; None when only the program's compiler will know, which
    then chooses between CUDA and the rest.
    Raises ValueError for another name, and for a kernel that cannot run.
    """
    names = (None, "blockwise", *KERNELS)
    if implementation not in names:
        raise ValueError(f"implementation: expected one of {names}, got {implementation!r}")
    elsewhere = None
    if implementation in KERNELS:
        problem = _refusal(implementation, platform) or _kernel(implementation)[1](inputs)
        if problem is not None:
            raise ValueError(problem)
    elif implementation is None:
        implementation = _best(inputs) if platform in (None, "cuda") else "blockwise"
        if platform is None and implementation in KERNELS:
            elsewhere = "blockwise"
    # A GPU has room for all rows at once.
    by_row = inputs.by_row and platform not in (None, "cuda", "gpu")
    return inputs.replace(implementation=implementation, elsewhere=elsewhere, by_row=by_row)


def _refusal(name: str, platform: str | None) -> str | None:
    """Why the kernel of that name cannot run there; None if it can."""
    if platform in (None, "cuda") or (name == "pallas" and platform != "gpu"):
        return None  # what is no GPU has the kernel interpreted
    least = ".".join(map(str, AMPERE))
    return (
        f"implementation: {name!r} needs CUDA devices of compute capability {least} or higher, "
        f"got {'other GPUs' if platform == 'gpu' else f'{platform} devices'}"
    )


def _best(inputs: Inputs) -> str:
    """The implementation for CUDA devices, as the table of `attend` has it."""
    installed = importlib.util.find_spec("flash_attn_jax") is not None
    if inputs.q.shape[1] > CAUSAL_BLOCK and installed and flash.obstacle(inputs) is None:
        return "flash"
    return "pallas" if _kernel("pallas")[1](inputs) is None else "blockwise"


def platform_of(x) -> str | None:
    """Where `x` is or will be computed on, as `device_platform` gives it.

    None for a traced array on a host with GPUs that the kernels take: its program may as well be
    one for the host's CPU. JAX runs what is not on a device yet on `jax.default_device`.
    """
    if isinstance(x, jax.core.Tracer):
        platform = device_platform(host_device())
        return None if platform == "cuda" else platform
    if isinstance(x, jax.Array):
        return device_platform(next(iter(x.devices())))
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return device_platform(host_device() if chosen is None else chosen)


def host_device():
    """This process's first device: a GPU, where it has one and JAX is not told otherwise."""
    return jax.local_devices()[0]


def device_platform(device) -> str:
    """The device's platform: "cuda" for a GPU that the kernels take, "gpu" for any other GPU.

    JAX says "gpu" for NVIDIA's and AMD's alike. Their compute capabilities tell them apart: "9.0"
    is NVIDIA's, "gfx942" AMD's.
    """
    if device.platform not in ("gpu", "cuda", "rocm"):
        return device.platform
    version = getattr(getattr(device, "client", None), "platform_version", "cuda")
    capability = str(getattr(device, "compute_capability", ""))
    number = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if number is None or "cuda" not in version.lower():
        return "gpu"
    return "cuda" if tuple(map(int, number.groups())) >= AMPERE else "gpu"


def attend_causal(inputs: Inputs) -> AttentionState:
    """The state of queries that each see the keys up to their own, without mask and lengths.

    The text is halved until its parts are short. Each part sees itself under a mask. On the way
    back up, the second of two neighbours sees all of the first, and the states merge: a tree over
    the text, which computes few of the scores that causality hides.
    """
    (b, l), parts = inputs.q.shape[:2], 1
    while parts * CAUSAL_BLOCK < l:
        parts *= 2
    size = -(-l // parts)
    # Padded keys come last: nobody sees them.
    q, k, v = (pad_axis(x, 1, parts * size) for x in (inputs.q, inputs.k, inputs.v))

    def see(q, k, v, mask=None):
        return attend_blockwise(inputs.replace(q=q, k=k, v=v, mask=mask, causal=False))

    state = see(*_split((q, k, v), b * parts, size), jnp.tri(size, dtype=bool)[None, None])
    while parts > 1:
        parts, size = parts // 2, size * 2
        state, q, k, v = _split((state, q, k, v), b * parts, size)
        second = merge(see(_half(q, 1), _half(k, 0), _half(v, 0)), _half(state, 1))
        state = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), _half(state, 0), second)
    return jax.tree.map(lambda x: x[:, :l], state)


def _split(tree, rows: int, size: int):
    """Rows of a text as more, or fewer, of `size` tokens: (b, l, …) -> (rows, size, …)."""
    return jax.tree.map(lambda x: x.reshape(rows, size, *x.shape[2:]), tree)


def _half(tree, which: int):
    return jax.tree.map(lambda x: jnp.split(x, 2, axis=1)[which], tree)


def pad_axis(x: Array | None, axis: int, size: int) -> Array | None:
    """`x` with zeros (or False) at the end of `axis`, up to `size`."""
    if x is None or x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
