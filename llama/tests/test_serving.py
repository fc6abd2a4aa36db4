"""Merges as serving systems do them: right, and sending what their tables say."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

import treeattn
from labs.cost.formulas import Workload
from labs.cost.merges import merge_messages, traffic
from treeattn.program import collectives, count_collectives, sent_bytes, total_bytes
from labs.cost.topology import preset
from treeattn.devices.heads import own_heads
from treeattn.devices.merge import merge_across
from treeattn.idea.state import from_output, reduce_tree

AXIS = "kv"


# Each takes a device's own (out, lse) in the queries' dtype and in float32, and returns the
# merged output: of all heads, or of the device's share of them.


def algorithm_3(out, lse):
    """The papers': a maximum and two sums of float32 states."""
    return treeattn.finalize(merge_across(from_output(out, lse), AXIS))[0]


def all_to_all(out, lse):
    """vLLM and SGLang (`a2a`): outputs in 16 bits and their lse change hands once."""
    merged = merge_across(from_output(out, lse), AXIS, method="all_to_all", wire=out.dtype)
    return treeattn.finalize(merged)[0]


def helix(out, lse):
    """TensorRT-LLM: the same with two statistics, a maximum and a sum, beside the output."""
    m, d, _ = from_output(out, lse)

    def exchange(x):
        return lax.all_to_all(x[None], AXIS, split_axis=3, concat_axis=0, tiled=True)

    out, m, d = (exchange(x) for x in (out, m, d))
    numerators = out.astype(jnp.float32) * d[..., None]
    return treeattn.finalize(reduce_tree(treeattn.AttentionState(m, d, numerators)))[0]


def weighted(out, lse):
    """A device's term of the output: weighted by what all of the lse give."""
    everybody = lax.all_gather(lse, AXIS)
    return out * jnp.exp(lse - jax.nn.logsumexp(everybody, axis=0))[..., None].astype(out.dtype)


def gather_and_scatter(out, lse):
    """vLLM (`ag_rs`): a gather of lse, and a reduce-scatter of weighted outputs in 16 bits."""
    return lax.psum_scatter(weighted(out, lse), AXIS, scatter_dimension=2, tiled=True)


def gather_and_slice(out, lse):
    """SGLang: a gather of lse, and an Allreduce of weighted outputs; a device keeps its share."""
    return own_heads(lax.psum(weighted(out, lse), AXIS), (AXIS,), axis=2)


def gather(out, lse):
    """Everybody's float32 states, everywhere."""
    return treeattn.finalize(merge_across(from_output(out, lse), AXIS, method="gather"))[0]


WHOLE = {algorithm_3, gather}

# Bytes that a device sends for a layer: b = 1, h heads of d, 16-bit outputs, f = (p − 1)/p.
TABLE = {
    algorithm_3: lambda p, h, d: 2 * (p - 1) * h * (4 * d + 8) // p,
    all_to_all: lambda p, h, d: (p - 1) * h * (2 * d + 4) // p,
    helix: lambda p, h, d: (p - 1) * h * (2 * d + 8) // p,
    gather_and_scatter: lambda p, h, d: (p - 1) * h * 2 * d // p + (p - 1) * 4 * h,
    gather_and_slice: lambda p, h, d: 2 * (p - 1) * h * 2 * d // p + (p - 1) * 4 * h,
    gather: lambda p, h, d: (p - 1) * h * (4 * d + 8),
}


def device(merge, queries_gathered, q, k, v):
    """What one device does: its share of the queries' heads, if it has no more, its keys."""
    if queries_gathered:
        q = lax.all_gather(q, AXIS, axis=2, tiled=True)
    out, lse = treeattn.finalize(treeattn.attend(q, k, v, implementation="blockwise"))
    return merge(out.astype(q.dtype), lse).astype(q.dtype)


def program(merge, mesh, queries_gathered=False):
    heads, keys = P(None, None, AXIS), P(None, AXIS)
    return jax.jit(
        jax.shard_map(
            functools.partial(device, merge, queries_gathered),
            mesh=mesh,
            in_specs=(heads if queries_gathered else P(), keys, keys),
            out_specs=P() if merge in WHOLE else heads,
            check_vma=False,
        )
    )


@pytest.mark.parametrize("merge", TABLE, ids=lambda f: f.__name__)
def test_they_are_attention(merge):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 1, 8, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 64, 2, 16)), jnp.float32) for _ in range(2))
    out = program(merge, treeattn.kv_mesh(jax.devices()[:4]), queries_gathered=True)(q, k, v)
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("p", [8, 64])
@pytest.mark.parametrize("queries_gathered", [False, True], ids=["queries", "gathered"])
@pytest.mark.parametrize("merge", TABLE, ids=lambda f: f.__name__)
def test_they_send_what_the_table_says(merge, queries_gathered, p):
    """In programs lowered for CUDA, where XLA joins no collectives."""
    h, d = max(16, p), 128  # at least a head each
    mesh = AbstractMesh((p,), (AXIS,), axis_types=(AxisType.Auto,))
    q = jax.ShapeDtypeStruct((1, 1, h, d), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8 * p, h, d), jnp.bfloat16)
    lowered = (
        program(merge, mesh, queries_gathered).trace(q, k, k).lower(lowering_platforms=("cuda",))
    )
    queries = (p - 1) * 2 * h * d // p if queries_gathered else 0
    assert sent_bytes(collectives(lowered)) == TABLE[merge](p, h, d) + queries


DECODES = {  # by the names of `labs.cost.merges`
    "tree": {},
    "butterfly": {"method": "butterfly"},
    "gather": {"method": "gather"},
    "reduce-scatter": {"method": "reduce_scatter", "scatter": True},
    "ag-rs": {"method": "reduce_scatter", "scatter": True, "wire": jnp.bfloat16},
    "a2a": {"method": "all_to_all", "scatter": True, "wire": jnp.bfloat16},
    "sglang": {"wire": jnp.bfloat16},
}


@pytest.mark.parametrize("merge", DECODES)
def test_tree_decode_sends_what_the_model_prices(merge):
    """As written for a GPU: as many collectives, of as many bytes."""
    p, h, d = 8, 16, 128
    mesh = AbstractMesh((p,), (AXIS,), axis_types=(AxisType.Auto,))
    q = jax.ShapeDtypeStruct((2, 1, h, d), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 8 * p, h, d), jnp.bfloat16)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis=AXIS, **DECODES[merge])
    decode = functools.partial(decode, implementation="blockwise")
    lowered = jax.jit(decode).trace(q, k, k).lower(lowering_platforms=("cuda",))
    found = collectives(lowered)
    w = Workload(8 * p, batch=2, heads=h, head_dim=d)
    model = traffic(merge_messages(merge, w, p, gather_queries=False), p, preset("dgx-h100"))
    assert (count_collectives(found), total_bytes(found)) == (
        model.collectives,
        model.operand_bytes,
    )


@pytest.mark.parametrize(("nodes", "g", "h"), [(2, 8, 16), (4, 2, 16), (2, 4, 6), (1, 4, 16)])
def test_by_nodes_tree_decode_sends_what_the_model_prices(nodes, g, h):
    """In the node, across, in the node; of 6 heads on 4 devices two are padding."""
    axes = ("node", "device") if nodes > 1 else ("device",)
    sizes = (nodes, g)[-len(axes) :]
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    p = nodes * g
    q = jax.ShapeDtypeStruct((2, 1, h, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 8 * p, h, 128), jnp.bfloat16)
    decode = functools.partial(treeattn.tree_decode, mesh=mesh, axis=axes, method="hierarchical")
    decode = functools.partial(decode, implementation="blockwise")
    lowered = jax.jit(decode).trace(q, k, k).lower(lowering_platforms=("cuda",))
    found = collectives(lowered)
    w = Workload(8 * p, batch=2, heads=h, head_dim=128)
    messages = merge_messages("hierarchical", w, p, node_size=g)
    sent = [(x.kind, x.message_bytes) for x in messages]
    assert [(c.kind, c.operand_bytes) for c in found] == sent
    dgx = preset("dgx-h100")
    level = replace(dgx.levels[0], size=g)
    model = traffic(messages, p, replace(dgx, levels=(level, dgx.levels[1])))
    assert (model.collectives, model.operand_bytes) == (len(found), total_bytes(found))
    assert model.sent_bytes == pytest.approx(sent_bytes(found))


def test_the_table_at_eight_devices():
    """As published for 16 heads of 128: with the gather of queries, but for Helix and ours."""
    p, h, d = 8, 16, 128
    queries = (p - 1) * 2 * h * d // p
    sent = {merge.__name__: f(p, h, d) for merge, f in TABLE.items()}
    assert sent["algorithm_3"] == 14_560 and sent["gather"] == 58_240 and sent["helix"] == 3_696
    assert sent["gather_and_scatter"] + queries == 7_616
    assert sent["all_to_all"] + queries == 7_224
    assert sent["gather_and_slice"] + queries == 11_200
