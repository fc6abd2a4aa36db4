"""The Mosaic kernels: interpreted, with a search for races, and lowered for an H100."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeattn
from labs.kernels import cluster_merge
from labs.kernels.gpu_checks import difference, draw, right
from labs.kernels.gpu_programs import on_cuda
from labs.kernels.mosaic_decode import missing, mosaic_attend
from labs.kernels.split_k import split_k_attend

pytestmark = pytest.mark.slow
is_new = pytest.mark.skipif(bool(missing()), reason=str(missing()))


def attending(implementation, **options):
    """`attend` by this implementation, or by a partial of it."""
    f = functools.partial(implementation, **options)
    return jax.jit(functools.partial(treeattn.attend, implementation=f))


def run(arrays, cluster, **options):
    kernel = {"cluster": cluster} if cluster else {}
    f = attending(cluster_merge.cluster_attend if cluster else mosaic_attend, **kernel)
    with cluster_merge.interpreted():
        return jax.block_until_ready(f(*arrays, **options))


@is_new
@pytest.mark.parametrize(
    ("cluster", "shape", "lengths", "dtype"),
    [
        (0, (1, 1, 4, 2, 600, 64, 128), [600], "bfloat16"),  # splits; the last block overlaps
        (0, (2, 3, 8, 2, 304, 128, 64), [0, 290], "float16"),  # a text without keys
        (2, (2, 1, 4, 2, 304, 64, 64), [0, 290], "bfloat16"),
        (4, (1, 3, 8, 2, 520, 64, 128), [520], "float16"),  # a tile of grouped queries
        (8, (1, 1, 9, 1, 1104, 128, 64), [1037], "bfloat16"),
        (8, (1, 1, 2, 1, 136, 64, 64), [130], "bfloat16"),  # five blocks without keys
    ],
    ids=str,
)
def test_against_float64(cluster, shape, lengths, dtype):
    """Memory past the lengths may hold any numbers."""
    q, k, v = draw(shape, dtype)
    options = {"kv_lengths": np.array(lengths, np.int32)}
    past = (np.arange(shape[4]) >= options["kv_lengths"][:, None])[..., None, None]
    arrays = q, *(jnp.where(past, jnp.nan, x) for x in (k, v))
    state = run(arrays, cluster, **options)
    assert {x.dtype for x in state} == {jnp.dtype("float32")}
    (out, lse), expected = treeattn.finalize(state), right(*arrays, **options)
    assert difference(out, expected[0]) < 1e-5
    assert difference(lse, expected[1]) < 2e-6


@is_new
def test_a_missing_barrier_is_a_race(monkeypatch):
    """The interpreter finds a block that reads a state before it must have been written."""
    monkeypatch.setattr(cluster_merge, "_everybody", lambda together: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        run(draw((1, 1, 1, 1, 136, 64, 64), "bfloat16"), 2)
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@is_new
def test_what_does_not_fit_is_refused(unchecked):
    fits = {"b": 1, "l": 1, "h": 8, "h_kv": 2, "n": 64, "d": 64, "dv": 64}
    for changes, dtype, match in (
        ({"l": 9}, "float16", r"^q: .* takes 32 queries a key head, got 36"),
        ({"n": 60}, "float16", r"^k: .* 64 keys or more, a multiple of 8, got 60"),
        ({"d": 96}, "float16", r"^q: .* head_dims of 64, 128, 192 or 256, got 96"),
        ({}, "float32", r"^q: .* float16 or bfloat16, got float32"),
    ):
        with pytest.raises(ValueError, match=match):
            mosaic_attend(*draw((fits | changes).values(), dtype), scale=1.0)
    with pytest.raises(ValueError, match=r"^cluster: expected a power of two, got 3"):
        run(draw(fits.values(), "float16"), 3)


def test_an_older_jax_is_told():
    if not missing():
        pytest.skip("this JAX has Mosaic")
    with pytest.raises(ValueError, match=r"need JAX 0\.11\.2 or newer"):
        mosaic_attend(*draw((1, 1, 2, 1, 64, 64, 64), "float16"), scale=1.0)


# Lowered for an H100, without one.

# The operations of a merge of states outside a kernel. XLA drops sums of no elements.
OUTSIDE = r"stablehlo\.(exponential|(maximum|multiply|add) .*f32)"


def lowered(f, arrays, **options):
    with on_cuda():
        return f.trace(*arrays, **options).lower(lowering_platforms=("cuda",))


def modules(program):
    """The kernels of a lowered program, each as the text of its MLIR module."""
    from jaxlib.mlir import ir

    def calls(op):
        inner = (o for region in op.regions for block in region for o in block)
        for o in inner:
            yield from [o] if o.operation.name == "stablehlo.custom_call" else calls(o)

    for call in calls(program.operation):
        assert "mosaic_gpu" in str(call.attributes["call_target_name"])
        program.context.allow_unregistered_dialects = True
        module = ir.StringAttr(call.attributes["mhlo.backend_config"]["module"]).value_bytes
        yield str(ir.Module.parse(module, program.context))


@is_new
@pytest.mark.parametrize(("cluster", "d", "dv"), [(1, 64, 128), (2, 128, 64), (8, 64, 128)])
def test_one_kernel_and_a_tree_of_reads(cluster, d, dv):
    arrays = draw((2, 1, 16, 4, 1000, d, dv), "bfloat16")
    f = attending(cluster_merge.cluster_attend, cluster=cluster)
    program = lowered(f, arrays, kv_lengths=np.array([9, 1000]))
    (kernel,) = modules(program.compiler_ir())
    rounds = cluster.bit_length() - 1
    # Once a round, the program maps each field to its address in the other block's shared memory,
    # by an operation of MLIR in JAX 0.11, by the instruction in 0.12. A numerator has chunks of 64.
    addresses = re.findall(r'nvvm\.mapa"|"mapa\.shared::cluster\.u32 \$0, \$1, \$2;"', kernel)
    assert len(addresses) == (2 + dv // 64) * rounds
    # All blocks wait for each other once a round and at the end. A single block does not wait.
    waits = kernel.count("mbarrier.arrive.shared::cluster")
    assert waits == (rounds + 1 if rounds else 0)
    # Outside the kernel, no states are merged: nothing is compared, multiplied or added.
    assert not re.search(OUTSIDE, program.as_text())


def test_split_k_merges_in_a_second_kernel():
    """The search for a tree of merges finds one in a program that has one."""
    arrays = draw((2, 1, 16, 4, 1000, 64, 64), "bfloat16")
    assert not re.search(OUTSIDE, lowered(attending(split_k_attend), arrays).as_text())
    states = treeattn.AttentionState.identity((8, 2, 1, 16), 64)
    assert re.search(OUTSIDE, jax.jit(treeattn.reduce_tree).lower(states).as_text())
