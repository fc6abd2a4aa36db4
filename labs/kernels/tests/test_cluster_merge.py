"""The merge through a cluster's shared memory: interpreted, with races looked for; and lowered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import dense_attention, dense_weights

import treeattn
from labs.kernels import cluster_merge as example
from labs.kernels.split_k import split_k_attend
from treeattn import finalize, merge

pytestmark = pytest.mark.slow

if example.missing():
    pytest.skip(example.missing(), allow_module_level=True)


def draw(shape, dtype="bfloat16", seed=0):
    b, l, h, h_kv, n, d, dv = shape
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return [jnp.asarray(rng.normal(size=x), dtype) for x in shapes]


def run(q, k, v, lengths=None, **sizes):
    f = jax.jit(functools.partial(example.cluster_attend, **sizes))
    with example.interpreted():
        return jax.block_until_ready(f(q, k, v, kv_lengths=lengths))


def check(arrays, state, lengths=None):
    assert {x.dtype for x in state} == {jnp.dtype("float32")}
    out, lse = finalize(state)
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    options = {} if lengths is None else {"kv_lengths": lengths}
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=1e-5)
    np.testing.assert_allclose(lse, dense_weights(q, k, **options)[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("cluster", "clusters", "shape", "lengths", "dtype"),
    [
        (1, 1, (1, 1, 1, 1, 40, 64, 64), None, "bfloat16"),  # fewer keys than a block takes
        (2, 1, (2, 1, 4, 2, 301, 64, 64), [-1, 290], "bfloat16"),  # a text without keys
        (4, 1, (1, 3, 8, 2, 520, 64, 128), None, "float16"),  # a tile of grouped queries
        (8, 1, (1, 1, 9, 1, 1100, 128, 64), [1037], "bfloat16"),
        (8, 1, (1, 1, 2, 1, 130, 64, 64), None, "bfloat16"),  # five blocks without keys
        (2, 3, (1, 1, 2, 1, 600, 64, 64), [601], "bfloat16"),  # clusters that merge outside
    ],
    ids=str,
)
def test_against_float64(cluster, clusters, shape, lengths, dtype):
    arrays = draw(shape, dtype)
    lengths = None if lengths is None else np.array(lengths, np.int32)
    state = run(*arrays, lengths, cluster=cluster, clusters=clusters)
    check(arrays, state, lengths)


def test_no_keys_give_the_identity_and_states_merge():
    q, k, v = draw((1, 1, 4, 2, 200, 64, 64))
    none = run(q, k, v, np.array([0]), cluster=4)
    assert np.all(np.isneginf(none.max)) and not np.any(none.numerator)
    assert not np.any(none.denominator)
    rest = treeattn.attend(q, k[:, 120:], v[:, 120:])
    state = merge(none, merge(run(q, k, v, np.array([120]), cluster=4), rest))
    check((q, k, v), state)


def test_a_missing_barrier_is_a_race(monkeypatch):
    """The interpreter would find it, had a block read a state that may not be there."""
    monkeypatch.setattr(example, "_everybody", lambda together: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        run(*draw((1, 1, 1, 1, 130, 64, 64)), cluster=2)
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def test_what_does_not_fit_is_refused():
    q, k, v = draw((1, 9, 8, 1, 100, 64, 64))
    for changes in ({}, {"cluster": 3}):
        with pytest.raises(ValueError, match="q: 72 rows, of 64; cluster: "):
            example.cluster_attend(q, k, v, **changes)


# Lowered for an H100, without one.

CALL = "custom_call @__gpu$xla.gpu.triton"


def on_cuda():
    """A context in which programs are lowered for an H100."""
    about = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=about)
    return jax.sharding.use_abstract_mesh(mesh)


# What a merge of states is made of, where no kernel does it.
OUTSIDE = r"stablehlo\.(reduce|exponential|(maximum|multiply|add) .*f32)"


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


@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize(("d", "dv"), [(64, 128), (128, 64)])
def test_one_kernel_and_a_tree_of_reads(cluster, d, dv):
    q, k, v = draw((2, 1, 16, 4, 1000, d, dv))
    f = jax.jit(functools.partial(example.cluster_attend, cluster=cluster))
    with on_cuda():
        traced = f.trace(q, k, v, kv_lengths=np.array([9, 1000]))
        lowered = traced.lower(lowering_platforms=("cuda",))
    (kernel,) = modules(lowered.compiler_ir())
    rounds = cluster.bit_length() - 1
    # Once a round, an address of each field's in the other block's shared memory: JAX 0.11 writes
    # an operation of MLIR's for it, 0.12 the instruction itself.
    addresses = re.findall(r'nvvm\.mapa"|"mapa\.shared::cluster\.u32 \$0, \$1, \$2;"', kernel)
    assert len(addresses) == 3 * rounds
    # Once a round, and in the end, all blocks wait for each other; a block alone for nobody.
    waits = kernel.count("mbarrier.arrive.shared::cluster")
    assert waits == (rounds + 1 if rounds else 0)
    # Outside the kernel no numbers of states are compared, multiplied or added.
    assert not re.search(OUTSIDE, lowered.as_text())


def test_split_k_merges_in_a_second_kernel():
    """And a tree of merges is what the search finds where there is one."""
    q, k, v = draw((2, 1, 16, 4, 1000, 64, 64))
    f = functools.partial(treeattn.attend, implementation=split_k_attend)
    with on_cuda():
        text = jax.jit(f).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    numbers = OUTSIDE.replace("reduce|", "")  # there are sums of no elements, which XLA drops
    assert text.count(CALL) == 2 and not re.search(numbers, text)
    states = treeattn.AttentionState.identity((8, 2, 1, 16), 64)
    assert re.search(numbers, jax.jit(treeattn.reduce_tree).lower(states).as_text())
