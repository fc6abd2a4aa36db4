"""The formulas that notebook 06 prints, as they stand there, and what it says by them."""

import ast
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from figures.printed import TABLE_1_H100, TABLE_1_MI300X, TABLE_2_RTX4090
from treeattn import collectives, kv_mesh, memory, ring_decode, tree_decode

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "06_topology_and_cost.ipynb"
NAMES = {"numel_kv", "numel_state", "v_ring", "v_allreduce", "v_tree", "mem_ring", "mem_tree"}
NAMES |= {"play", "ring", "tree", "by_nodes", "butterfly", "seconds", "decode_seconds"}
NAMES |= {"script", "fitted", "least_seconds"}


def definitions() -> dict:
    """What the notebook's cells of functions and constants alone define."""
    found = {"np": np}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        tree = ast.parse("".join(cell["source"])) if cell["cell_type"] == "code" else ast.parse("")
        kinds = {type(x) for x in tree.body}
        if ast.FunctionDef in kinds and kinds <= {ast.FunctionDef, ast.Assign, ast.ImportFrom}:
            exec(compile(tree, NOTEBOOK.name, "exec"), found)
    assert set(found) >= NAMES
    return found


SAID = definitions()
numel_kv, numel_state, v_ring, v_tree = (
    SAID[name] for name in ("numel_kv", "numel_state", "v_ring", "v_tree")
)
mem_ring, mem_tree = SAID["mem_ring"], SAID["mem_tree"]


# --------------------------------------------------------------------------- volumes, memory


def test_the_papers_formulas_as_printed():
    """2024 eq. 29-35 in their own symbols, for as many key heads as query heads."""
    b, n_h, d, t, p = 3, 16, 2048, 4096, 8
    assert mem_ring(b, t, d) == 4 * b * t * d + 2 * b * d
    assert mem_tree(b, t, d, n_h) == 2 * b * t * d + 2 * b * d + 2 * b * n_h
    assert numel_kv(b, t, d) == 2 * b * t * d
    assert v_ring(b, t, d, p) == 2 * b * t * d * p
    assert numel_state(b, d, n_h) == b * d + 2 * b * n_h
    assert SAID["v_allreduce"](100, p) == 2 * 7 / 8 * 100
    assert v_tree(b, d, n_h, p) == 2 * (p - 1) / p * (b * d + 2 * b * n_h)


def test_papers_volumes_in_one_unit():
    """eq. 31 sums over devices for one step, eq. 35 is one device's share: p/(p − 1) apart."""
    t, p = 80_000, 8
    one_device = (p - 1) * numel_kv(1, t, 2048)
    assert v_ring(1, t, 2048, p) / one_device == pytest.approx(p / (p - 1))
    assert one_device == 2_293_760_000 and v_tree(1, 2048, 16, p) == 3640


def test_v_ring_does_not_depend_on_the_devices():
    """2024 eq. 31 is 2·b·N·d, whatever p; what one step moves, by all devices."""
    found = {v_ring(3, 640_000 // p, 2048, p) for p in (2, 8, 64, 128)}
    assert found == {2 * 3 * 640_000 * 2048}


def test_all_steps_of_a_ring_grow_with_its_devices():
    """The explainer's "total", above a formula of one step: 2·b·N·d elements in each of p − 1."""
    step = 2 * 2 * 640_000 * 2048
    totals = [p * (p - 1) * numel_kv(2, 640_000 / p, 2048) for p in (2, 8, 64)]
    assert totals == [(p - 1) * step for p in (2, 8, 64)]
    # One device sends no more with more of them: at most its part of everything, once.
    assert 63 * numel_kv(2, 640_000 / 64, 2048) < step


def test_grouped_queries_shrink_what_a_ring_moves_and_not_what_a_tree_does():
    """The explainer's "about 4000 times" for Llama 3.1 8B at 32k on 8 devices, per step, is for 32
    key heads; the model has 8 (t d_kv against d + 2 n_h, as the explainer divides)."""
    state = numel_state(1, 4096, 32)
    for kv_width, times in ((4096, 4033), (1024, 1008)):
        assert round(numel_kv(1, 32_768 // 8, kv_width) / 2 / state) == times


def test_a_rings_step_against_a_state_is_as_many_orders_as_the_chunk_is_long():
    """Not "two to three": 3 to 3.9, of Llama 3.1 8B on 8 devices at Table 1's lengths."""
    for context, times in ((3_200, 98), (32_768, 1008), (262_144, 8066)):
        assert round(numel_kv(1, context // 8, 1024) / 2 / numel_state(1, 4096, 32)) == times


def test_a_tree_holds_less_without_a_condition():
    """2024 §6.2's 2·b·n_h ≤ 2·b·t·d is 1 ≤ t·d_h; how much less depends on the keys a device."""
    for d_h in (1, 64, 128):
        for t in (1, 2, 1000):
            assert mem_tree(1, t, 16 * d_h, 16) <= mem_ring(1, t, 16 * d_h)
    for t, ratio in ((1, 1.49), (16, 1.94), (1000, 2.0)):
        found = mem_ring(1, t, 2048) / mem_tree(1, t, 2048, 16)
        assert found == pytest.approx(ratio, abs=0.005)
        assert numel_kv(1, t, 2048) > v_tree(1, 2048, 16, 2)  # one device, the whole reduction


def test_memory_of_many_layers():
    """Half the memory for one block; for many layers' caches the ring's extra chunk is one more."""
    chunk = numel_kv(1, 64_000, 2048)
    for layers, ratio in ((1, 2.0), (32, 1.03)):
        ring = (layers - 1) * chunk + mem_ring(1, 64_000, 2048)
        tree = (layers - 1) * chunk + mem_tree(1, 64_000, 2048, 16)
        assert ring / tree == pytest.approx(ratio, abs=0.005)


def test_figure_4():
    """The gap between ring and tree is 524 MB at 64,000 keys a device, in 2 bytes, at hidden size
    2048; doubling the hidden size doubles it, to 1048.6 MB, printed as 1040: 0.8 % apart."""
    for d, gap in ((2048, 524_288_000), (4096, 1_048_576_000)):
        found = 2 * (mem_ring(1, 64_000, d) - mem_tree(1, 64_000, d, d // 128))
        assert found == gap - 2 * 2 * (d // 128)  # less the state's d and m
    assert gap / 1040e6 == pytest.approx(1.008, abs=0.001)


def test_the_roofline():
    """One query reads 2 b t d elements and waits for memory: 655 MB at 3.35 TB/s are 196 µs, where
    2024 §6.3 says O(10⁻⁵) s. Its 4 b t d operations would be done in a thousandth of that."""
    assert 2 * numel_kv(1, 80_000, 2048) / 3.35e12 == pytest.approx(195.6e-6, rel=1e-3)
    assert 4 * 80_000 * 2048 / 989e12 < 1e-6


def test_moving_a_chunk_takes_milliseconds():
    """2024 §6.3's O(10⁻³) s to move that chunk: 1.46 ms over NVLink, 13.1 ms over InfiniBand."""
    chunk = 2 * numel_kv(1, 80_000, 2048)
    assert chunk / 450e9 == pytest.approx(1.46e-3, rel=5e-3)
    assert chunk / 50e9 == pytest.approx(13.1e-3, rel=5e-3)


def test_on_one_device_there_is_little_to_save():
    """2024 §7: the states of 132 multiprocessors, written to memory and read, beside the keys."""
    states = 2 * 132 * 4 * numel_state(1, 2048, 16) / 3.35e12
    assert states == pytest.approx(0.66e-6, rel=0.01)
    assert states < 0.004 * 2 * numel_kv(1, 80_000, 2048) / 3.35e12


# ------------------------------------------------------------------- beside compiled programs


def gather_the_cache(q, k, v, *, sharding):
    """Every device gets the whole cache, and attends to it."""

    def body(q, k, v):
        k, v = (jax.lax.all_gather(x, "kv", axis=1, tiled=True) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v)

    whole, dealt = PartitionSpec(), PartitionSpec(None, "kv")
    specs = {"in_specs": (whole, dealt, dealt), "out_specs": whole}
    return jax.shard_map(body, mesh=sharding.mesh, **specs, check_vma=False)(q, k, v)


PROGRAMS = {
    "ring": ring_decode,
    "allreduce": functools.partial(tree_decode, method="allreduce"),
    "butterfly": functools.partial(tree_decode, method="butterfly"),
    "gather": functools.partial(tree_decode, method="gather"),
    "the cache": gather_the_cache,
}


@functools.cache
def compiled(name):
    """8 devices, 32k keys, float32, 16 heads of 128: the papers' own workload."""
    q = jax.ShapeDtypeStruct((1, 1, 16, 128), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, 32_768, 16, 128), jnp.float32)
    sharding = NamedSharding(kv_mesh(jax.devices()[:8]), PartitionSpec(None, "kv"))
    program = functools.partial(PROGRAMS[name], sharding=sharding)
    return jax.jit(program).lower(q, cache, cache).compile()


def put_in(name):
    return sum(x.total_bytes for x in collectives(compiled(name)))


def test_reference_counts():
    """What a device puts into collectives, and that it sends 32,264 times less than in a ring."""
    allreduce = collectives(compiled("allreduce"))
    assert [(x.kind, x.count) for x in allreduce] == [("all-reduce", 1)] * 2  # of three written
    assert put_in("allreduce") == 8320 == 4 * numel_state(1, 2048, 16)
    assert put_in("butterfly") == 3 * 8320
    chunk = 4 * numel_kv(1, 32_768 // 8, 2048)
    assert put_in("ring") == 7 * chunk == 469_762_048
    assert round(7 * chunk / (4 * v_tree(1, 2048, 16, 8))) == 32_264


def test_partially_reduced_objects_are_less_to_send_and_to_hold():
    """2024 and 2025 §7: an Allreduce of states, beside a gather of all states and one of keys."""
    assert 4 * v_tree(1, 2048, 16, 8) == 14_560
    assert 7 * put_in("gather") == 58_240  # to seven others
    assert 7 * put_in("the cache") == 7 * 4 * numel_kv(1, 32_768 // 8, 2048)
    held = [memory(compiled(x)).held_bytes for x in ("allreduce", "gather", "the cache")]
    assert held[0] < 1.01 * held[1] and 7 * held[0] < held[2]


@pytest.mark.parametrize("name", ["ring", "allreduce", "butterfly"])
def test_compiled_memory(name, optimized):
    """A tree holds what eq. 30 says, within a tenth; a ring what eq. 29 says, and a chunk more.

    XLA keeps the caller's chunk besides the two that the ring moves.
    """
    t = 32_768 // 8
    held = memory(compiled(name)).held_bytes
    model = 4 * mem_tree(1, t, 2048, 16)
    if name == "ring":
        model = 4 * (mem_ring(1, t, 2048) + numel_kv(1, t, 2048))
    assert 0.95 * model <= held <= 1.1 * model


# ------------------------------------------------------------------------------- the network


def test_the_latencies_of_a_tree_are_nccls():
    """A chain of seven in a node, a tree of depth ⌊log₂ nodes⌋ between, up and down."""
    for p in (8, 16, 24, 128):
        depth = (p // 8).bit_length() - 1
        rounds = SAID["tree"](p, 0)
        played = SAID["play"](rounds, SAID["IN_TREE"], gap=0.0)
        expected = 2 * (7 * 0.6e-6 + depth * 5e-6)
        assert max(arrival for *_, arrival in played) == pytest.approx(expected)


def test_what_the_collectives_send():
    """Rounds, and bytes of the busiest device, on 16 devices on two nodes, of 1,600 bytes."""
    for name, rounds, sent in (
        ("ring", 30, 30 * 100),
        ("tree", 16, 2 * 1600),
        ("by_nodes", 7, 2 * 1400 + 200),
        ("butterfly", 4, 4 * 1600),
    ):
        found = SAID[name](16, 1600)
        sends = np.zeros(16)
        for a, _, size in (message for messages in found for message in messages):
            sends[a] += size
        assert (len(found), sends.max()) == (rounds, sent), name


@pytest.mark.parametrize("name", ["tree", "by_nodes", "butterfly"])
def test_every_contribution_reaches_every_device(name):
    for p in (8, 16, 64):
        heard = [{i} for i in range(p)]
        for messages in SAID[name](p, 1.0):
            before = [set(x) for x in heard]
            for a, b, _ in messages:
                heard[b] |= before[a]
        assert all(len(x) == p for x in heard)


def test_a_flat_ring_takes_six_times_a_tree():
    """315 µs on 128 devices; by one tree 59, where a library's two trees of halves take 56."""
    found = {name: 1e6 * SAID["seconds"](name, 128, 8320) for name in SAID["COLLECTIVES"]}
    expected = {"ring": 315, "tree": 59, "by nodes": 44, "butterfly": 63}
    assert found == pytest.approx(expected, abs=0.6)


def test_the_gap_of_a_block_widens():
    """With the context and the GPUs: 69 on 8, some 3,300 on 128 where 8 is printed."""
    ratios = [
        ring / tree for ring, tree in (SAID["decode_seconds"](5_120_000, p) for p in (8, 128))
    ]
    assert ratios == pytest.approx([69, 3256], rel=0.01)


# -------------------------------------------------------------------------------- the tables

LLAMA_8B, LLAMA_1B = (32, 32, 8, 128, 7.505e9), (16, 32, 8, 64, 1.236e9)


@pytest.mark.parametrize(
    ("rows", "machine", "within", "bandwidth"),
    [
        (TABLE_1_MI300X, (4, 5.3e12, 1307e12, *LLAMA_8B), 0.16, 48e9),
        (TABLE_2_RTX4090, (2, 1.008e12, 165e12, *LLAMA_1B), 0.07, 4.5e9),
    ],
)
def test_the_script_as_printed_gives_both_columns(rows, machine, within, bandwidth):
    fit = SAID["fitted"](rows, machine)
    found = [SAID["script"](row.context, machine, *fit) for row in rows]
    printed = [(row.tree.mean, row.ring.mean) for row in rows]
    assert abs(np.array(found) / printed - 1).max() < within + 0.005
    assert fit[1] == pytest.approx(bandwidth, rel=0.03)


def test_a_prefill_that_cannot_have_been_run():
    """At 256k it takes longer than is printed for all, at the data sheet's peak."""
    least = SAID["least_seconds"](256_000, (8, 3.35e12, 989e12, *LLAMA_8B))
    assert least == pytest.approx(4.56, abs=0.01) and TABLE_1_H100[-1].tree.mean == 2.89
