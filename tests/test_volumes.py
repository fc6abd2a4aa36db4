"""The papers' volumes and memory: their formulas, as printed, beside what compiled programs do.

All formulas count elements; 2024 eq. 29-35 are 2025 eq. 8-14. In the papers' symbols: b texts, t
keys on each of p devices, n_h heads of d_h, d = n_h d_h.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import (
    AttentionState,
    attend,
    attention,
    collectives,
    finalize,
    kv_mesh,
    memory,
    merge_across,
    ring_decode,
    tree_decode,
)

HEADS, HEAD_DIM = 16, 128  # of the papers' attention block
D = HEADS * HEAD_DIM
H100 = {"memory": 3.35e12, "flops": 989e12, "nvlink": 450e9, "infiniband": 50e9}  # data sheets


def mem_ring(b, t, d):
    return 4 * b * t * d + 2 * b * d


def mem_tree(b, t, d, n_h):
    return 2 * b * t * d + 2 * b * d + 2 * b * n_h


def numel_kv(b, t, d):
    return 2 * b * t * d


def v_ring(b, t, d, p):
    return numel_kv(b, t, d) * p


def numel_state(b, d, n_h):
    return b * d + 2 * b * n_h


def v_tree(b, d, n_h, p):
    return 2 * (p - 1) / p * numel_state(b, d, n_h)


# ------------------------------------------------------------------------- compiled programs


def gather_keys(q, k, v, *, sharding):
    """Every device gets the whole cache."""

    def body(q, k, v):
        k, v = (jax.lax.all_gather(x, "kv", axis=1, tiled=True) for x in (k, v))
        return finalize(attend(q, k, v))[0]

    specs = {"in_specs": (P(), sharding.spec, sharding.spec), "out_specs": P()}
    return jax.jit(jax.shard_map(body, mesh=sharding.mesh, **specs, check_vma=False))(q, k, v)


DECODE = {
    "ring": ring_decode,
    "gather keys": gather_keys,
    **{name: functools.partial(tree_decode, method=name) for name in ("butterfly", "gather")},
    "tree": tree_decode,
}


@functools.cache
def compiled(name, p=8, keys=32 * 1024):
    sharding = NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))
    q, kv = (jax.ShapeDtypeStruct((1, n, HEADS, HEAD_DIM), jnp.float32) for n in (1, keys))
    program = functools.partial(DECODE[name], sharding=sharding)
    return jax.jit(program).lower(q, kv, kv).compile()


def put_in(name, **options):
    return sum(c.total_bytes for c in collectives(compiled(name, **options)))


def sent(name, **options):
    return sum(c.sent_bytes for c in collectives(compiled(name, **options)))


@pytest.mark.parametrize("p", [2, 8])
def test_the_papers_formulas_as_printed(p):
    """Of 32-bit numbers, to the byte, for two numbers of devices and two lengths."""
    for keys in (2048, 32 * 1024):
        assert put_in("tree", p=p, keys=keys) == 4 * numel_state(1, D, HEADS)
        assert sent("tree", p=p, keys=keys) == 4 * v_tree(1, D, HEADS, p)
        assert put_in("ring", p=p, keys=keys) == 4 * (p - 1) * numel_kv(1, keys // p, D)


def test_reference_counts():
    """8 devices, 32k keys, float32, 16 heads of 128: the numbers of the papers' own workload."""
    allreduce = collectives(compiled("tree"))
    assert len(allreduce) == 2  # of three written: XLA joins the two sums
    assert put_in("tree") == 8320
    butterfly = collectives(compiled("butterfly"))
    assert [(c.kind, c.count, c.operand_bytes) for c in butterfly] == [
        ("collective-permute", 1, 8320)
    ] * 3
    ring = collectives(compiled("ring"))
    assert [(c.kind, c.count) for c in ring] == [("collective-permute", 7)] * 2
    # Of both what a device sends; of an Allreduce that is more than it puts in.
    assert sent("tree") == 14_560 and sent("ring") == put_in("ring") == 469_762_048
    assert round(sent("ring") / sent("tree")) == 32_264


def test_partially_reduced_objects_are_less_to_send_and_to_hold():
    """2024 and 2025 §7: an Allreduce of states, beside a gather of all states and one of keys."""
    assert (sent("tree"), sent("gather")) == (14_560, 58_240)
    assert sent("gather keys") == 4 * 7 * numel_kv(1, 4096, D)
    held = [memory(compiled(name)).held_bytes for name in ("tree", "gather", "gather keys")]
    assert held[0] < 1.01 * held[1] and 7 * held[0] < held[2]


def queries_travel(q, k, v):
    """On a device: its text's query (1, 1, h, d), and its keys of all texts (p, t, h, d)."""
    states = attend(jax.lax.all_gather(q, "kv", axis=0, tiled=True), k, v)  # (p, 1, h)
    m, d = (jnp.moveaxis(x, 0, -1) for x in states[:2])
    texts_last = AttentionState(m, d, jnp.moveaxis(states.numerator, 0, -2))
    return jnp.moveaxis(finalize(merge_across(texts_last, "kv", method="all_to_all"))[0], -2, 0)


def test_queries_that_travel_send_the_same_for_every_context():
    """Beside the tree's states they send the queries: of 8 texts on 8 devices."""
    mesh = kv_mesh(jax.devices()[:8])
    specs = {"in_specs": (P("kv"), P(None, "kv"), P(None, "kv")), "out_specs": P("kv")}
    program = jax.jit(jax.shard_map(queries_travel, mesh=mesh, **specs))
    rng = np.random.default_rng(0)
    counted = set()
    for keys in (64, 1024):
        shapes = (8, 1, 2, 4), (8, keys, 2, 4), (8, keys, 2, 4)
        q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        np.testing.assert_allclose(program(q, k, v), attention(q, k, v), atol=1e-6)
        found = collectives(program.lower(q, k, v).compile())
        counted.add(tuple((c.kind, c.sent_bytes) for c in found))
    queries, states = 7 * 4 * 2 * 4, 7 * 4 * 2 * (4 + 2)
    assert counted == {(("all-gather", queries), ("all-to-all", states))}


@pytest.mark.usefixtures("optimized")
def test_compiled_memory():
    """A tree holds what eq. 30 says, within a tenth; a ring what eq. 29 says, and a chunk more.

    XLA keeps the caller's chunk besides the two that the ring moves; from JAX 0.12 on half of it.
    """
    tree = 4 * mem_tree(1, 4096, D, HEADS)
    ring = 4 * (mem_ring(1, 4096, D) + numel_kv(1, 4096, D))
    for name, wanted, least in (("tree", tree, 0.95), ("ring", ring, 0.8)):
        assert least * wanted <= memory(compiled(name)).held_bytes <= 1.1 * wanted


def test_the_output_is_allocated_too():
    """2024 §6.2 says that a tree allocates none."""
    assert memory(compiled("tree")).output_bytes == 4 * D


# ---------------------------------------------------------------------------- what they mean


def test_papers_volumes_in_one_unit():
    """eq. 31 sums over devices for one step, eq. 35 is one device's share: p/(p − 1) apart."""
    t, p = 4096, 8
    assert v_ring(1, t, D, p) / (put_in("ring") / 4) == pytest.approx(p / (p - 1))
    assert v_tree(1, D, HEADS, p) == sent("tree") / 4


def test_v_ring_does_not_depend_on_the_devices():
    """2024 eq. 31 is 2·b·N·d, whatever p; what one step moves, by all devices."""
    steps = {v_ring(3, 640_000 // p, 2048, p) for p in (2, 8, 64, 128)}
    assert steps == {2 * 3 * 640_000 * 2048}


def test_all_steps_of_a_ring_grow_with_its_devices():
    """The explainer's "total", above a formula of one step: 2·b·N·d elements in each of p − 1."""
    keys = 32 * 1024
    for p in (2, 8):
        everybody = p * put_in("ring", p=p) / 4
        assert everybody == (p - 1) * v_ring(1, keys // p, D, p)
    # One device sends no more with more of them: at most its part of everything, once.
    assert put_in("ring", p=8) / 4 < v_ring(1, keys // 8, D, 8)


def test_figure_4():
    """Figure 4's gap between ring and tree is 524,288,000 bytes at 64,000 keys a device.

    In 2 bytes, at hidden size 2048, on two devices; doubling the hidden size doubles it, to
    1,048,576,000 bytes, which the papers print as 1040 MB.
    """
    for hidden, gap in ((2048, 524_288_000), (4096, 1_048_576_000)):
        n_h = hidden // 128
        assert 2 * numel_kv(1, 64_000, hidden) == gap
        difference = 2 * (mem_ring(1, 64_000, hidden) - mem_tree(1, 64_000, hidden, n_h))
        assert difference == gap - 2 * 2 * n_h  # less the state's d and m


def test_memory_of_many_layers():
    """Half the memory for one block; for many layers' caches the ring's extra chunk is one more."""
    caches = numel_kv(1, 64_000, D)  # of one layer
    for layers in (1, 32):
        ring, tree = mem_ring(1, 64_000, D), mem_tree(1, 64_000, D, HEADS)
        ring, tree = (x + (layers - 1) * caches for x in (ring, tree))
        assert ring / tree == pytest.approx((layers + 1) / layers, rel=1e-3)


def test_a_tree_holds_less_without_a_condition():
    """2024 §6.2's 2·b·n_h ≤ 2·b·t·d is 1 ≤ t·d_h; how much less depends on the keys a device."""
    for d_h in (1, 64, 128):
        for t in (1, 2, 1000):
            d = HEADS * d_h
            assert mem_tree(1, t, d, HEADS) <= mem_ring(1, t, d)
    for t, ratio in ((1, 1.49), (16, 1.94), (1000, 2.0)):
        assert mem_ring(1, t, D) / mem_tree(1, t, D, HEADS) == pytest.approx(ratio, abs=0.005)
        assert numel_kv(1, t, D) > v_tree(1, D, HEADS, 2)  # of one device, all of its steps


def test_grouped_queries_shrink_what_a_ring_moves_and_not_what_a_tree_does():
    """The explainer's "about 4000 times" for Llama 3.1 8B at 32k on 8 devices, per step.

    It is for 32 key heads; the model has 8 (t d_kv against d + 2 n_h, as the explainer divides).
    """
    state = numel_state(1, 32 * 128, 32)
    assert [round(4096 * kv_heads * 128 / state) for kv_heads in (32, 8)] == [4033, 1008]


def test_a_rings_step_against_a_state_is_as_many_orders_as_the_chunk_is_long():
    """Not "two to three": 3 to 3.9, of Llama 3.1 8B on 8 devices at Table 1's lengths."""
    state = numel_state(1, 32 * 128, 32)
    for context, times in ((3_200, 98), (32_768, 1008), (262_144, 8066)):
        assert round(context // 8 * 8 * 128 / state) == times


# ---------------------------------------------------------------------------------- on a napkin


def test_the_roofline():
    """One query reads 2·b·t·d elements and waits for memory; many wait for arithmetic."""
    reading = 2 * numel_kv(1, 80_000, D) / H100["memory"]
    # 655 MB at 3.35 TB/s: 196 µs, where 2024 §6.3 says O(10⁻⁵) s.
    assert reading == pytest.approx(195.6e-6, rel=1e-3)
    for queries, waits_for_memory in ((1, True), (10_000, False)):
        multiplying = 4 * queries * 80_000 * D / H100["flops"]
        assert (multiplying < reading) == waits_for_memory


def test_moving_a_chunk_takes_milliseconds():
    """2024 §6.3's O(10⁻³) s to move that chunk: 1.46 ms over NVLink, 13.1 ms over InfiniBand."""
    chunk = 2 * numel_kv(1, 80_000, D)
    assert chunk / H100["nvlink"] == pytest.approx(1.46e-3, rel=5e-3)
    assert chunk / H100["infiniband"] == pytest.approx(13.1e-3, rel=5e-3)


def test_on_one_device_there_is_little_to_save():
    """2024 §7: the states of 132 multiprocessors, written to memory and read, beside the keys."""
    states = 2 * 132 * 4 * numel_state(1, D, HEADS)
    assert states / H100["memory"] == pytest.approx(0.66e-6, rel=0.01)
    assert states < 0.004 * 2 * numel_kv(1, 80_000, D)
