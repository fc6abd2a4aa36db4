"""The kernel for GPUs in Pallas's other backend, Mosaic GPU, which stays when Triton's goes.

A program returns the state of a tile of queries after a split of the keys: what it does is in
treeattn/kernel/mosaic_program.py. A second kernel merges the states of all splits
(treeattn/kernel/mosaic_merge.py).

Mosaic compiles it for CUDA devices. Anywhere else Pallas interprets it, slowly, and raises an error
where threads race for memory (JAX 0.11.2 only prints it). The interpreter has one memory: one
device, and one call at a time of all Python threads. The derivative is the blockwise form's.
"""

import functools
import math

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeattn.idea.arrays import varying_like
from treeattn.kernel.inputs import Inputs, NewKeys
from treeattn.kernel.mosaic_merge import merge_splits
from treeattn.kernel.mosaic_program import (
    KEYS,
    ROWS,
    Copies,
    Tiling,
    program,
    scratch_types,
    shared_bytes,
)
from treeattn.kernel.mosaic_tiles import interpreted, plgpu
from treeattn.kernel.split_k import with_derivatives

HOPPER = 9, 0  # the least compute capability with a unit that copies blocks
COLUMNS = 8  # of a product of tensor cores, at least
WIDTH = 64  # that a head_dim is a multiple of, where it is not copied
MAX_HEAD_DIM = 576
ROOM = 64 << 10  # bytes of keys and values on their way: three programs share a multiprocessor
PROGRAMS = 512  # that the keys are split over, about: four for each multiprocessor of an H100
KEYS_A_SPLIT = 256  # at least


def missing() -> str | None:
    """What this JAX lacks; None if it lacks nothing."""
    if hasattr(plgpu, "mma") and hasattr(plgpu, "InterpretGPUParams"):
        return None
    return f"implementation: 'mosaic' needs JAX 0.11.2 or newer, and this is {jax.__version__}"


def obstacle(inputs: Inputs) -> str | None:
    """Why the kernel cannot take these arguments, naming the argument; None if it can."""
    if (lacking := missing()) is not None:
        return lacking
    if inputs.intervals is not None:
        return "ends: the mosaic kernel takes none; use implementation='blockwise'"
    q, v = inputs.q, inputs.v
    if q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"q: the mosaic kernel takes float16, bfloat16 or float32, got {q.dtype}"
    for name, d in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if d > MAX_HEAD_DIM:
            return f"{name}: the mosaic kernel takes a head_dim up to {MAX_HEAD_DIM}, got {d}"
    if 0 in (*q.shape, *v.shape):
        return None
    most = shared_memory(capability())
    d, dv = (-(-x.shape[-1] // WIDTH) * WIDTH for x in (q, v))
    tiling = tile_of(inputs, d, dv)
    if (size := shared_bytes(tiling, d, dv, q.dtype)) > most:
        return (
            f"q, v: the mosaic kernel would hold {KEYS} keys and values of {q.dtype} with "
            f"head_dims {q.shape[-1]} and {v.shape[-1]}, which takes {size:,} bytes of shared "
            f"memory, of {most:,}"
        )
    return None


def suits(inputs: Inputs) -> bool:
    """Whether the kernel reads the keys once, and all it is given where it lies.

    Of inputs that have no `obstacle`.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.mask is not None or inputs.bias is not None or 0 in (*q.shape, *v.shape):
        return False
    if k.shape[1] < KEYS or k.shape[1] % ROWS or q.shape[3] % WIDTH or v.shape[3] % WIDTH:
        return False
    return tile_of(inputs, q.shape[3], v.shape[3]).tiles == 1


def capability() -> tuple[int, int]:
    """The compute capability that Mosaic compiles for: of JAX's device, or (9, 0) without one."""
    return _capability_of(jax.extend.backend.get_default_device())


def compiles_for(device) -> bool:
    """Whether that is this device's: it is not where JAX's default device is the host's CPU."""
    return capability() == _capability_of(device)


def _capability_of(device) -> tuple[int, int]:
    number = str(getattr(device, "compute_capability", "9.0"))
    return tuple(map(int, number.split("."))) if number.replace(".", "").isdigit() else HOPPER


def is_compiled() -> bool:
    """Whether Mosaic compiles the kernel: for JAX's device, or the one that its mesh describes.

    The interpreter, whose steps come in an order, cannot be left to a program's compiler to drop.
    """
    about = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if about is not None:
        return about.platform in ("cuda", "gpu")  # what JAX calls them, of a mesh of present ones
    return hasattr(jax.extend.backend.get_default_device(), "compute_capability")


def shared_memory(of: tuple[int, int]) -> int:
    """Bytes of it that a program may have, by the compute capability (CUDA's guide, its table of
    technical specifications)."""
    if of in ((8, 6), (8, 9)) or of[0] >= 12:
        return 99 << 10
    return (163 if of < HOPPER else 227) << 10


def _check_one_device() -> None:
    """Raises ValueError inside a `shard_map` of several, which the interpreter mixes up."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[name] for name in mesh.manual_axes)
    if devices > 1:
        raise ValueError(
            "implementation: 'mosaic' is interpreted here, which takes one device, and this is a "
            f"mesh of {devices}; use 'blockwise' or 'pallas'"
        )


def _run(inputs: Inputs, output_dtype=None, new: NewKeys | None = None) -> tuple:
    """What `merge_splits` returns, compiled for CUDA, interpreted for anything else."""
    arrays = jax.tree.leaves((inputs.arrays, new))
    inputs, new = varying_like((inputs, new), *arrays)
    interpret = not (inputs.on_cuda or is_compiled())
    if interpret:
        _check_one_device()
    states = split_states(inputs, new, interpret=interpret)
    shape = *inputs.q.shape[:3], inputs.v.shape[3]
    found = merge_splits(states, shape, interpret=interpret, output_dtype=output_dtype)
    return varying_like(found, *arrays)


mosaic_attend, mosaic_attention, mosaic_attention_with_new = with_derivatives(_run)


def tile_of(inputs: Inputs, d: int, dv: int) -> Tiling:
    """The tiling for the inputs with their head_dims padded to d and dv."""
    b, l, h, _ = inputs.q.shape
    n, h_kv, _ = inputs.v.shape[1:]
    size = inputs.q.dtype.itemsize
    queries = l * h // h_kv
    most = min(32, pl.next_power_of_2(8192 // dv)) * 2 // size  # sums that fit in registers
    rows = max(min(pl.next_power_of_2(queries), most), COLUMNS)
    tiles = pl.cdiv(queries, rows)
    wanted = pl.cdiv(PROGRAMS, b * h_kv * tiles)
    splits = pl.next_power_of_2(min(wanted, pl.cdiv(n, KEYS_A_SPLIT)))
    stages = max(1, min(4, ROOM // (KEYS * (d + dv) * size)))
    return Tiling(rows, tiles, splits, stages)


def split_states(inputs: Inputs, new: NewKeys | None = None, *, interpret: bool) -> tuple:
    """The states of all splits, as programs write them.

    Fields (splits, b, h_kv, tiles, rows), and (splits, b, h_kv, tiles, dv, rows), with dv padded.
    """
    b, _, h, _ = inputs.q.shape
    n, h_kv = inputs.v.shape[1:3]
    q = _pad(inputs.q, 3, WIDTH)
    k, v = (_pad_keys(_pad(x, 3, WIDTH), 1) for x in (inputs.k, inputs.v))
    d = k.shape[3]
    tiling = tile_of(inputs, d, v.shape[3])
    copies = Copies(interpret or capability() >= HOPPER, 2 * tiling.stages - 1)
    given = {"lengths": inputs.lengths, "added": _added(inputs, tiling)}
    if given["added"] is not None and inputs.stale:
        queries = inputs.q.shape[1] * h // h_kv  # after them is padding
        given["seen"] = jnp.max(given["added"][..., :queries].astype(jnp.float32), axis=3)
    if inputs.factor is not None:
        given["factor"] = inputs.factor.astype(jnp.float32).reshape(1)
    if new is not None:
        given |= _new(inputs, new, tiling, copies)
    given = {name: x for name, x in given.items() if x is not None}
    as_they_lie = map(_by_text, (k, v))
    each = tiling.splits, b, h_kv, tiling.tiles
    shapes = (*each, tiling.rows), (*each, tiling.rows), (*each, v.shape[3], tiling.rows)
    call = plgpu.kernel(
        functools.partial(
            program,
            given=tuple(given),
            n=n,
            more=0 if new is None else new.k.shape[1],
            scale=inputs.scale,
            group=h // h_kv,
            causal=inputs.causal,
            tiling=tiling,
            copies=copies,
            interpret=interpret,
        ),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_types=scratch_types(tiling, d, v.shape[3], k.dtype),
        grid=(h_kv * tiling.tiles, tiling.splits, b),
        grid_names=("head", "split", "text"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="treeattn_mosaic_split_k",
        **interpreted(interpret),
    )
    return tuple(call(q, *as_they_lie, *given.values()))


def _by_text(x):
    """Keys (b, n, h_kv, d) as (b, n, h_kv · d), where they lie."""
    return x.reshape(*x.shape[:2], -1)


def _new(inputs: Inputs, new: NewKeys, tiling: Tiling, copies: Copies) -> dict:
    """What programs are given of the new keys: few, which they read, or as many as they copy."""
    # What is a slice of a product, XLA would make in two kernels: for us, and for all who read it.
    arrays = lax.optimization_barrier((new.k, new.v))
    k, v = (_pad(x, 3, WIDTH) for x in arrays)
    if k.shape[1] > ROWS:
        k, v = (_pad(x, 1, ROWS if copies.bulk else KEYS) for x in (k, v))
    return {
        "new_k": _by_text(k),
        "new_v": _by_text(v),
        "new_lengths": new.lengths,
        "new_added": _added(new.inputs(inputs), tiling),
    }


def _pad(x, axis: int, size: int, *, least: bool = False):
    """x with zeros up to a multiple of `size` along the axis; or up to `size`, the least."""
    length = x.shape[axis]
    missing = max(size - length, 0) if least else -length % size
    return jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)]) if missing else x


def _pad_keys(x, axis: int):
    """x with zeros up to a number of keys that programs can copy: a block, and whole rows of 8."""
    return _pad(_pad(x, axis, ROWS), axis, KEYS, least=True)


def _added(inputs: Inputs, tiling: Tiling):
    """What is added to scores, −∞ where a key is hidden: (b, h_kv, n, queries), or None.

    b and h_kv are 1 where all share an entry.
    """
    mask, bias = inputs.mask, inputs.bias
    if mask is None and bias is None:
        return None
    x = jnp.zeros((1, 1, 1, 1), jnp.bfloat16) if bias is None else bias.astype(jnp.float32)
    x = x if mask is None else jnp.where(mask, x, jnp.asarray(-jnp.inf, x.dtype))
    l, h = inputs.q.shape[1:3]
    n, h_kv = inputs.k.shape[1:3]
    group = h // h_kv
    rows, heads = x.shape[:2]
    x = x.reshape(rows, h_kv, group, *x.shape[2:]) if heads > 1 else x[:, None]
    x = jnp.broadcast_to(x, (*x.shape[:2], group, l, n))
    x = x.transpose(0, 1, 4, 3, 2).reshape(*x.shape[:2], n, l * group)
    return _pad(_pad_keys(x, 2), 3, tiling.rows)
