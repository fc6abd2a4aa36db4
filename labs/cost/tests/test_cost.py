"""The papers' formulas, and the model of what each way of decoding sends, holds and takes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from treeattn import attend, kv_mesh, pass_q_decode, ring_decode, tree_decode
from labs.cost import report
from labs.cost.formulas import (
    Workload,
    mem_ring,
    mem_tree,
    numel_kv,
    numel_state,
    v_allreduce,
    v_ring,
    v_tree,
)
from labs.cost.merges import merge_in_pieces, merge_messages, traffic
from labs.cost.network import collective_seconds
from labs.cost.prefill import prefill_seconds
from treeattn.program import (
    collectives,
    count_collectives,
    memory,
    sent_bytes,
    total_bytes,
)
from labs.cost.roofline import attend_seconds, step_seconds
from labs.cost.strategies import (
    STRATEGIES,
    decode_cost,
    memory_bytes,
)
from labs.cost.topology import CORNERS, PRESETS, corners, preset
from labs.cost.work import count_rounds, count_tree

DGX = preset("dgx-h100")


def compare(w, p, topology):
    return [decode_cost(strategy, w, p, topology) for strategy in STRATEGIES]


# ------------------------------------------------------------------------ the papers' formulas


def test_the_papers_formulas_as_printed():
    """2024 eq. 29-35 in their own symbols, for as many key heads as query heads."""
    b, n_h, d_h, t, p = 3, 16, 128, 4096, 8
    d = n_h * d_h
    w = Workload(t * p, batch=b, heads=n_h, head_dim=d_h)
    assert mem_ring(w, p) == 4 * b * t * d + 2 * b * d
    assert mem_tree(w, p) == 2 * b * t * d + 2 * b * d + 2 * b * n_h
    assert numel_kv(w, p) == 2 * b * t * d
    assert v_ring(w, p) == 2 * b * t * d * p
    assert numel_state(w) == b * d + 2 * b * n_h
    assert v_allreduce(100, p) == 2 * 7 / 8 * 100
    assert v_tree(w, p) == 2 * (p - 1) / p * (b * d + 2 * b * n_h)


def test_figure_4():
    """Figure 4's gap between ring and tree is 524,288,000 bytes at 64,000 keys a device.

    In 2 bytes, at hidden size 2048, on two devices; doubling the hidden size doubles it, to
    1,048,576,000 bytes, which the papers print as 1040 MB.
    """
    for hidden, gap in ((2048, 524_288_000), (4096, 1_048_576_000)):
        w = Workload(128_000, heads=hidden // 128)
        assert w.dtype_bytes * numel_kv(w, 2) == gap
        difference = w.dtype_bytes * (mem_ring(w, 2) - mem_tree(w, 2))
        assert difference == gap - w.dtype_bytes * 2 * w.heads  # less the state's d and m


def test_grouped_queries_shrink_what_a_ring_moves_and_not_what_a_tree_does():
    full, grouped = Workload(2**20, heads=32), Workload(2**20, heads=32, kv_heads=8)
    assert numel_kv(full, 8) == 4 * numel_kv(grouped, 8)
    assert numel_state(full) == numel_state(grouped)
    # The explainer's "about 4000 times" for Llama 3.1 8B at 32k on 8 devices, per step, is for
    # 32 key heads; the model has 8 (t d_kv against d + 2 n_h, as the explainer divides).
    assert [
        round(numel_kv(w, 8) / 2 / numel_state(w))
        for w in (Workload(32768, heads=32), Workload(32768, heads=32, kv_heads=8))
    ] == [4033, 1008]


# --------------------------------------------------------------- the model and the compiler


def kv_gather(q, k, v, *, mesh, axis):
    """Every device gets the whole cache: what the strategy "kv-gather" describes."""

    def body(q, k, v):
        k, v = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v)

    sharded = PartitionSpec(None, axis)
    specs = (PartitionSpec(), sharded, sharded)
    return jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )(q, k, v)


def own_kernel(q, k, v, *, scale):
    """The plain implementation, for which a ring runs as for a GPU's kernel."""
    return attend(q, k, v, scale=scale, implementation="blockwise")


PROGRAMS = {
    "ring": functools.partial(ring_decode, implementation=own_kernel),
    "ring on a CPU": ring_decode,
    "pass-q": pass_q_decode,
    "kv-gather": kv_gather,
    "tree-joined": functools.partial(tree_decode, method="allreduce"),
    "butterfly": functools.partial(tree_decode, method="butterfly"),
    "gather": functools.partial(tree_decode, method="gather"),
}


@functools.cache
def compiled(strategy, w, p):
    mesh = kv_mesh(jax.devices()[:p])

    def cache(heads, length):
        shape = (w.batch, length, heads, w.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(w.dtype))

    arrays = cache(w.heads, w.queries), *[cache(w.kv_heads, w.context)] * 2
    program = functools.partial(PROGRAMS[strategy], mesh=mesh, axis="kv")
    return jax.jit(program).lower(*arrays).compile()


GROUPED = Workload(4096, batch=2, heads=8, kv_heads=2, head_dim=32, queries=3, dtype="float32")
PAPERS = Workload(32768, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "p"),
    [*((s, p) for s in STRATEGIES if s in PROGRAMS for p in (2, 8)), ("butterfly", 6)],
)
def test_the_compiled_program_runs_what_the_model_counts(strategy, p):
    w = replace(GROUPED, context=512 * p)  # no padding, which would have to be spread first
    found = collectives(compiled(strategy, w, p))
    if strategy == "pass-q":  # leave out the all-gather that puts dealt-out results together
        found = [c for c in found if c.kind != "all-gather"]
    model = decode_cost(strategy, w, p, DGX)
    assert count_collectives(found) == model.collectives
    assert total_bytes(found) == model.operand_bytes


@pytest.mark.slow
def test_reference_counts():
    """8 devices, 32k keys, float32, 16 heads of 128: the numbers of the papers' own workload."""
    allreduce = collectives(compiled("tree-joined", PAPERS, 8))
    assert len(allreduce) == 2  # of three written: XLA joins the two sums
    assert total_bytes(allreduce) == 8320 == 4 * numel_state(PAPERS)
    butterfly = collectives(compiled("butterfly", PAPERS, 8))
    assert [(c.kind, c.count, c.operand_bytes) for c in butterfly] == [
        ("collective-permute", 1, 8320)
    ] * 3
    ring = collectives(compiled("ring on a CPU", PAPERS, 8))  # which sends two arrays a step
    assert [(c.kind, c.count) for c in ring] == [("collective-permute", 7)] * 2
    assert count_collectives(ring) == 2 * decode_cost("ring", PAPERS, 8, DGX).collectives
    assert total_bytes(ring) == 469_762_048 == 4 * 7 * numel_kv(PAPERS, 8)
    # Of both what a device sends; of an Allreduce that is more than it puts in.
    assert sent_bytes(allreduce) == 14_560 and sent_bytes(ring) == 469_762_048
    assert round(sent_bytes(ring) / sent_bytes(allreduce)) == 32_264


def test_partially_reduced_objects_are_less_to_send_and_to_hold():
    """2024 and 2025 §7: an Allreduce of states, beside a gather of all states and one of keys."""
    programs = [compiled(s, PAPERS, 8) for s in ("tree-joined", "gather", "kv-gather")]
    sent = [sent_bytes(collectives(program)) for program in programs]
    assert sent[:2] == [14_560, 58_240] and sent[2] == 7 * 4 * numel_kv(PAPERS, 8)
    held = [memory(program).held_bytes for program in programs]
    assert held[0] < 1.01 * held[1] and 7 * held[0] < held[2]


@pytest.mark.parametrize("strategy", ["ring", "tree-joined", "butterfly"])
def test_compiled_memory(strategy, optimized):
    """A tree holds what eq. 30 says, within a tenth; a ring what eq. 29 says, and a chunk more.

    XLA keeps the caller's chunk besides the two that the ring moves.
    """
    ring = strategy == "ring"
    held = memory(compiled("ring on a CPU" if ring else strategy, PAPERS, 8)).held_bytes
    model = memory_bytes(strategy, PAPERS, 8)
    if ring:
        assert model == 4 * mem_ring(PAPERS, 8)
        model += 4 * numel_kv(PAPERS, 8)
    if strategy == "tree-joined":
        assert model == 4 * mem_tree(PAPERS, 8)
    assert 0.95 * model <= held <= 1.1 * model


# --------------------------------------------------------------------------- the model itself


def test_the_roofline():
    """One query reads 2 b t d_kv elements and waits for memory; many wait for arithmetic."""
    w = Workload(640_000, dtype="bfloat16")
    # 655 MB at 3.35 TB/s: 196 µs, where 2024 §6.3 says O(10⁻⁵) s.
    assert attend_seconds(w, 80_000, 1, DGX.device) == pytest.approx(195.6e-6, rel=1e-3)
    assert attend_seconds(w, 80_000, 10_000, DGX.device) == pytest.approx(
        4 * 10_000 * 80_000 * 2048 / 989e12
    )


def test_moving_a_chunk_takes_milliseconds():
    """2024 §6.3's O(10⁻³) s to move that chunk: 1.46 ms over NVLink, 13.1 ms over InfiniBand."""
    chunk = 2 * numel_kv(Workload(640_000), 8)
    nvlink, infiniband = (x.latency + chunk / x.bandwidth for x in DGX.levels)
    assert nvlink == pytest.approx(1.46e-3, rel=5e-3)
    assert infiniband == pytest.approx(13.1e-3, rel=5e-3)


def test_one_device_sends_nothing():
    w = Workload(10_000)
    for c in compare(w, 1, DGX):
        assert (c.collectives, c.rounds, c.operand_bytes, c.sent_bytes) == (0, 0, 0, 0)
        attend = attend_seconds(w, 10_000, 1, DGX.device) + DGX.launch
        assert c.seconds == c.compute_seconds == attend


def test_layers_add_up_and_share_their_working_memory():
    w = Workload(100_000, kv_heads=4)
    for one, ten in zip(compare(w, 16, DGX), compare(replace(w, layers=10), 16, DGX), strict=True):
        for field in ("collectives", "rounds", "operand_bytes", "sent_bytes", "seconds"):
            assert getattr(ten, field) == pytest.approx(10 * getattr(one, field))
        assert ten.memory_bytes == one.memory_bytes + 9 * 2 * numel_kv(w, 16)


def test_overlap_hides_the_shorter_of_attending_and_sending():
    w = Workload(640_000)
    plain, hidden = (decode_cost("ring", w, 8, DGX, overlap=o) for o in (False, True))
    step = plain.compute_seconds / 8
    sending = plain.latency_seconds + plain.volume_seconds
    assert plain.seconds == pytest.approx(8 * step + sending)
    assert hidden.seconds == pytest.approx(step + sending)  # sending is what takes longer
    many = replace(w, queries=64_000)  # a prefill: now attending does
    hidden = decode_cost("ring", many, 8, DGX, overlap=True)
    assert hidden.seconds == pytest.approx(hidden.compute_seconds)
    tree = [decode_cost("butterfly", w, 8, DGX, overlap=o) for o in (False, True)]
    assert tree[0] == tree[1]


def test_devices_need_not_fill_nodes_nor_divide_the_context():
    """The longest chunk counts, and the Allreduce that goes by nodes falls back to a tree."""
    w = Workload(1_000_001)
    twelve = {c.strategy: c for c in compare(w, 12, DGX)}
    assert twelve["butterfly"].rounds == 5  # 8 swap in 3 rounds, 4 hand in and get back
    attend = attend_seconds(w, 83_334, 1, DGX.device) + DGX.launch
    assert twelve["butterfly"].compute_seconds == attend


def test_papers_volumes_in_one_unit():
    """eq. 31 sums over devices for one step, eq. 35 is one device's share: p/(p − 1) apart."""
    w, p = Workload(640_000), 8
    one_device = (p - 1) * numel_kv(w, p)
    assert v_ring(w, p) / one_device == pytest.approx(p / (p - 1))
    assert decode_cost("ring", w, p, DGX).sent_bytes == w.dtype_bytes * one_device
    assert decode_cost("tree", w, p, DGX).sent_bytes == pytest.approx(4 * v_tree(w, p))


def test_memory_of_many_layers():
    """Half the memory for one block; for many layers' caches the ring's extra chunk is one more."""
    for layers in (1, 32):
        w = Workload(128_000, layers=layers)
        ring, tree = (memory_bytes(s, w, 2) for s in ("ring", "tree"))
        assert ring / tree == pytest.approx((layers + 1) / layers, rel=1e-3)


def test_a_tree_holds_less_without_a_condition():
    """2024 §6.2's 2·b·n_h ≤ 2·b·t·d is 1 ≤ t·d_h; how much less depends on the keys a device."""
    for d_h in (1, 64, 128):
        for t in (1, 2, 1000):
            w = Workload(2 * t, heads=16, head_dim=d_h)
            assert mem_tree(w, 2) <= mem_ring(w, 2)
    for t, ratio in ((1, 1.49), (16, 1.94), (1000, 2.0)):
        w = Workload(2 * t)
        assert mem_ring(w, 2) / mem_tree(w, 2) == pytest.approx(ratio, abs=0.005)
        assert v_ring(w, 2) / 2 > v_tree(w, 2)  # of one device, over the whole reduction


def test_v_ring_does_not_depend_on_the_devices():
    """2024 eq. 31 is 2·b·N·d, whatever p; what one step moves, by all devices."""
    w = Workload(640_000, batch=3)
    assert {v_ring(w, p) for p in (2, 8, 64, 128)} == {2 * 3 * 640_000 * 2048}


def test_on_one_device_there_is_little_to_save():
    """2024 §7: the states of 132 multiprocessors, written to memory and read, beside the keys."""
    w = Workload(640_000)
    states = 2 * 132 * 4 * numel_state(w) / DGX.device.memory_bandwidth
    keys = attend_seconds(w, 80_000, 1, DGX.device)
    assert states == pytest.approx(0.66e-6, rel=0.01) and states < 0.004 * keys


@pytest.mark.parametrize("name", PRESETS)
def test_no_ring_decodes_one_token_faster(name):
    """2024 and 2025 §5.3, of Allreduces. A butterfly wins even over a link of 1 ms and 1 TB/s.

    There three Allreduces, which wait for three times as many messages, do not.
    """
    topology = preset(name)
    links = replace(topology.levels[0], latency=1e-3, bandwidth=1e12)
    slow = replace(topology, levels=(links, *topology.levels[1:]), protocols=())
    w = Workload(640_000)
    for p in (2, 8, 64):
        ring = decode_cost("ring", w, p, topology).seconds
        for allreduce in ("tree", "tree-joined", "butterfly"):
            assert ring > 10 * decode_cost(allreduce, w, p, topology).seconds
        ring, butterfly = (decode_cost(s, w, p, slow).seconds for s in ("ring", "butterfly"))
        assert ring > 2 * butterfly
    if name == "dgx-h100":
        times = [decode_cost(s, w, 8, slow).seconds for s in ("tree", "ring", "butterfly")]
        assert times[0] / times[1] == pytest.approx(3.2, abs=0.05)
        assert times[1] / times[2] == pytest.approx(4.1, abs=0.05)


def merge_bytes(merge, w, p, **keywords):
    return traffic(merge_messages(merge, w, p, node_size=8, **keywords), p, DGX).sent_bytes


@pytest.mark.parametrize("p", [8, 64])
def test_what_serving_systems_send(p):
    """By the formulas derived from their code, for 16 heads of 128, with f = (p − 1)/p."""
    b, h, d, f = 3, 16, 128, (p - 1) / p
    w = Workload(10_000, batch=b, heads=h, head_dim=d)
    queries = f * 2 * b * h * d  # what the gather of queries sends
    for merge, sent, gathered in (
        ("tree", 2 * f * b * h * (4 * d + 8), 0),
        ("tree-joined", 2 * f * b * h * (4 * d + 8), 0),
        ("ag-rs", f * 4 * b * h * d + (p - 1) * 4 * b * h, queries),
        ("a2a", f * b * h * (4 * d + 4), queries),
        ("helix", f * b * h * (2 * d + 8), 0),
        ("sglang", f * 6 * b * h * d + (p - 1) * 4 * b * h, queries),
        ("gather", (p - 1) * b * h * (4 * d + 8), 0),
        ("one-shot", (p - 1) * b * h * (4 * d + 8), 0),
        ("hierarchical", (2 * 7 / 8 + (p // 8 - 1) / 8) * b * h * (4 * d + 8), 0),
    ):
        assert merge_bytes(merge, w, p) == pytest.approx(sent), merge
        without = merge_bytes(merge, w, p, gather_queries=False)
        assert without == pytest.approx(sent - gathered), merge


def test_pieces_of_a_merge_save_little_and_cost_launches():
    """Head by head, the papers' block takes longer: what a merge waits for is not its bytes."""
    w = Workload(640_000)
    whole = merge_in_pieces("tree", w, 8, DGX, 1)
    assert whole == pytest.approx(decode_cost("tree", w, 8, DGX).seconds)
    for pieces in (2, 4, 16):
        assert merge_in_pieces("tree", w, 8, DGX, pieces) > 0.9 * whole
    assert merge_in_pieces("tree", w, 8, DGX, 16) > 2 * whole
    # With bytes enough, pieces hide them: 4,096 sequences on 100 Gb/s Ethernet.
    many, slow = Workload(8_000, batch=4096), preset("ethernet")
    one, four = (merge_in_pieces("tree", many, 16, slow, pieces) for pieces in (1, 4))
    assert four / one == pytest.approx(0.75, abs=0.03)
    with pytest.raises(ValueError, match="pieces: expected a divisor of 16 key heads, got 3"):
        merge_in_pieces("tree", w, 8, DGX, 3)


def test_prefill_by_hand():
    """All tokens new and causal: half of the pairs; a ring's sends hide, an all-gather's do not."""
    w = Workload(2**17, queries=2**17)
    pairs = 2**17 * (2**17 + 1) / 2
    attend = 4 * pairs * w.d / 8 / DGX.device.flops
    ring, sending = prefill_seconds("ring", w, 8, DGX)
    assert sending < attend and ring == pytest.approx(attend + 8 * DGX.launch)
    gather, sending = prefill_seconds("kv-gather", w, 8, DGX)
    assert gather == pytest.approx(attend + sending + DGX.launch)
    whole, _ = prefill_seconds("ring", w, 8, DGX, causal=False)
    assert whole == pytest.approx(2 * ring, rel=2e-3)  # but for the launches
    for strategy in ("ring", "ring-in-order", "kv-gather", "ulysses", "tree"):
        alone, nothing = prefill_seconds(strategy, w, 1, DGX)
        assert nothing == 0 and alone == pytest.approx(8 * attend, rel=1e-3)
    # Of 2 key heads on 3 devices each is sent three times, as `ulysses_attention` repeats them.
    few = Workload(3 * 10**6, heads=12, kv_heads=2, queries=1)
    _, sending = prefill_seconds("ulysses", few, 3, DGX)
    rows = [collective_seconds("all-to-all", 3, 2 * x * 128, DGX) for x in (12, 6 * 10**6)]
    assert sending == pytest.approx(2 * sum(rows))
    with pytest.raises(ValueError, match="ulysses needs a query head a device, got 16 heads"):
        prefill_seconds("ulysses", w, 32, DGX)
    with pytest.raises(ValueError, match="strategy: expected one of ring, ring-in-order, kv-"):
        prefill_seconds("butterfly", w, 8, DGX)


def in_lock_step(new, old, p, w, topology):
    """Seconds of a causal ring over contiguous chunks, device by device and step by step."""
    total = 0.0
    size = 4 * (old + new) // p * w.d_kv
    sending = collective_seconds("ring", 2, size, topology)
    for step in range(p):
        slowest = 0.0
        for device in range(p):
            owner = (device - step) % p
            mine = range(device * new // p, (device + 1) * new // p)
            theirs = range(owner * new // p, (owner + 1) * new // p)
            pairs = len(mine) * old // p + sum(k <= q for q in mine for k in theirs)
            reading = size / topology.device.memory_bandwidth
            multiplying = 4 * pairs * w.d / topology.device.flops
            slowest = max(slowest, multiplying, reading)
        slowest += topology.launch
        total += slowest if step == p - 1 else max(slowest, sending)
    return total


@pytest.mark.parametrize(("new", "old"), [(64, 0), (64, 640), (8, 8000)])
def test_a_ring_over_contiguous_chunks_waits_for_the_last_device(new, old):
    """Nearly twice a dealt one's time where all is new, whatever else there is to wait for."""
    w = Workload(new + old, heads=4, queries=new)
    slow = replace(DGX, device=replace(DGX.device, flops=1e9))  # so that pairs count
    found, sending = prefill_seconds("ring-in-order", w, 4, slow)
    assert found == pytest.approx(in_lock_step(new, old, 4, w, slow))
    dealt, same = prefill_seconds("ring", w, 4, slow)
    assert sending == same and found > dealt
    assert prefill_seconds("ring-in-order", w, 4, slow, causal=False)[0] == pytest.approx(
        prefill_seconds("ring", w, 4, slow, causal=False)[0]
    )
    whole = Workload(2**20, heads=32, kv_heads=8, queries=2**20)
    for p, times in ((2, 1.5), (8, 1.875), (64, 1.98)):
        ring, in_order = (prefill_seconds(s, whole, p, DGX)[0] for s in ("ring", "ring-in-order"))
        assert in_order / ring == pytest.approx(times, rel=0.01), p


def test_where_ring_and_tree_take_as_long_in_a_prefill():
    """Few new tokens are the tree's, all new the ring's, where key heads are shared."""
    for kv_heads, new, ring_wins in ((1, 2**10, False), (1, 2**20, True), (16, 2**18, False)):
        w = Workload(2**20, queries=new, kv_heads=kv_heads)
        ring, tree = (prefill_seconds(s, w, 128, DGX)[0] for s in ("ring", "tree"))
        assert (ring < tree) == ring_wins, (kv_heads, new)


def test_all_steps_of_a_ring_grow_with_its_devices():
    """The explainer's "total", above a formula of one step: 2·b·N·d elements in each of p − 1."""
    w = Workload(640_000, batch=2)
    for p in (2, 8, 64):
        step = 2 * w.batch * w.context * w.d
        assert v_ring(w, p) == step
        everybody = p * decode_cost("ring", w, p, DGX).sent_bytes / w.dtype_bytes
        assert everybody == pytest.approx((p - 1) * step)
    # One device sends no more with more of them: at most its part of everything, once.
    assert decode_cost("ring", w, 64, DGX).sent_bytes < w.dtype_bytes * step


def test_a_rings_step_against_a_state_is_as_many_orders_as_the_chunk_is_long():
    """Not "two to three": 3 to 3.9, of Llama 3.1 8B on 8 devices at Table 1's lengths."""
    for context, times in ((3_200, 98), (32_768, 1008), (262_144, 8066)):
        w = Workload(context, heads=32, kv_heads=8)
        assert round(numel_kv(w, 8) / 2 / numel_state(w)) == times


def test_a_ring_loses_less_on_a_torus():
    """2025 §6.4, of TPU pods: 1,200 times a tree's time on 64 chips, 2,600 on as many H100s."""
    block = Workload(5_120_000)
    for name, times in (("tpu-v5p", 1200), ("dgx-h100", 2600)):
        ring, tree = (decode_cost(s, block, 64, preset(name)).seconds for s in ("ring", "tree"))
        assert ring / tree == pytest.approx(times, rel=0.02)


# ------------------------------------------------- latent values, and a cache of another dtype


def test_latent_values_are_stored_with_their_keys():
    """DeepSeek-V2 and V3: 576 numbers a token, attended to with 128 heads, outputs of 512."""
    w = Workload(10_000, batch=3, heads=128, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    assert (w.d, w.d_out, w.d_kv, w.kv_width) == (128 * 576, 128 * 512, 576, 576)
    assert numel_kv(w, 8) == 3 * 1250 * 576
    assert numel_kv(replace(w, latent=False), 8) == 3 * 1250 * (576 + 512)
    assert numel_state(w) == 3 * 128 * (512 + 2)
    reading = 3 * 1250 * 576 * 2 / 3.35e12
    assert attend_seconds(w, 1250, 1, DGX.device) == pytest.approx(reading)
    multiplying = 2 * 3 * 1250 * 128 * (576 + 512) / 989e12
    assert attend_seconds(w, 1250, 1, DGX.device) / multiplying == pytest.approx(1.22, abs=0.01)
    # What is gathered are queries of 576 numbers, what is sent on, outputs of 512.
    sent = merge_bytes("a2a", w, 8)
    assert sent == pytest.approx(7 / 8 * 3 * 128 * (2 * 576 + 2 * 512 + 4))
    # A ring has half as much to send; the heads' all-to-alls have outputs shorter than the queries.
    ring, plain = (decode_cost("ring", x, 8, DGX) for x in (w, replace(w, latent=False)))
    assert ring.sent_bytes == 7 * 2 * numel_kv(w, 8) and ring.rounds == plain.rounds == 7
    many = replace(w, queries=1000)
    sending = [
        prefill_seconds("ulysses", x, 8, DGX)[1] for x in (many, replace(many, latent=False))
    ]
    assert sending[0] < sending[1]


def test_bytes_count_from_some_tokens_on():
    """vLLM's all-to-all on 8 GPUs: 14 tokens of DeepSeek-V3, 240 of Llama 3.1 8B."""
    latent = Workload(1, heads=128, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    for w, tokens in ((latent, 14), (Workload(1, heads=32, kv_heads=8), 240)):
        for batch in (tokens - 1, tokens):
            sent = traffic(merge_messages("a2a", replace(w, batch=batch), 8), 8, DGX)
            assert (sent.volume > sent.latency) == (batch == tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cache_of_bytes_is_half_of_one_of_bfloat16(strategy):
    """The queries and the outputs stay; so does a merge, which is the point."""
    w = Workload(100_000, kv_heads=4)
    half = replace(w, cache_dtype="float8")
    assert replace(w, cache_dtype="int8").cache_bytes == half.cache_bytes == 1
    sent, sent_half = (decode_cost(strategy, x, 8, DGX).sent_bytes for x in (w, half))
    assert sent_half == (sent / 2 if strategy in ("ring", "kv-gather") else sent)
    saved = memory_bytes(strategy, w, 8) - memory_bytes(strategy, half, 8)
    copies = {"ring": 2, "kv-gather": 9}.get(strategy, 1)
    assert saved == copies * numel_kv(w, 8)
    times = [attend_seconds(x, w.chunk(8), 1, DGX.device) for x in (w, half)]
    assert times[1] == pytest.approx(times[0] / 2)


# --------------------------------------------------------------------------- other networks


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_own_hop_between_nodes_stays_in_every_corner(name):
    """TCP does not become InfiniBand because a library is older, or its kernels are fused."""
    base = preset(name)
    for corner, there in corners(base).items():
        hops = {x.far for x in there.protocols}
        if base.far is not None:
            assert hops == {base.far * (2.2 if corner == "slow" else 1.0)}
        assert all(x.far >= 2.7e-6 for x in there.protocols)
    two = 2 * base.node_size
    if name == "ethernet":
        times = [collective_seconds("allreduce", two, 8192, t) for t in corners(base).values()]
        assert min(times) > 60e-6


def test_no_kernel_reads_another_cards_memory_where_it_cannot():
    cards = preset("rtx4090")
    assert all(x.algorithm != "direct" for x in cards.protocols)
    for kind in ("one-shot", "in-switch"):
        with pytest.raises(ValueError, match=f"kind: {kind} reads other devices' memory"):
            collective_seconds(kind, 2, 8192, cards)
    # PCIe's hops, not NVLink's: NCCL's own formula for a ring of two, 6.6 + 2 · 1.0 µs.
    assert collective_seconds("ring-allreduce", 2, 0, cards) == pytest.approx(8.6e-6)
    assert collective_seconds("ring-allreduce", 2, 0, DGX) == pytest.approx(7.8e-6)
    for there in corners(cards).values():
        assert not there.peers


def test_choices_of_constants_have_the_networks_own_names():
    assert list(corners(DGX)) == list(CORNERS)
    instinct = preset("mi300x")
    assert list(corners(instinct)) == ["fused", "RCCL 2.20", "slow"]
    assert corners(instinct)["RCCL 2.20"] == instinct == CORNERS["NCCL 2.8"](instinct)
    pod = corners(preset("tpu-v5p"))
    assert not any("NCCL" in name for name in pod) and pod["assumed"] == preset("tpu-v5p")
    base, fast, slow = (
        collective_seconds("allreduce", 64, 8192, pod[x]) for x in ("assumed", "halved", "slow")
    )
    assert fast < base < slow


# ------------------------------------------------------------------------------ for all


@given(
    strategy=st.sampled_from(STRATEGIES),
    name=st.sampled_from(sorted(PRESETS)),
    p=st.sampled_from([1, 2, 5, 8, 12, 64, 100]),
    context=st.integers(1, 10**8),
    more=st.integers(1, 100),
    kv_heads=st.sampled_from([1, 4, 16]),
)
def test_monotone(strategy, name, p, context, more, kv_heads):
    """More keys, batch, layers or key heads never cost less; nor does anything cost nothing."""
    topology = preset(name)
    assume(topology.peers or strategy != "one-shot")
    w = Workload(context, kv_heads=kv_heads)
    base = decode_cost(strategy, w, p, topology)
    assert base.seconds > 0
    larger = (
        replace(w, context=context * more),
        replace(w, batch=more),
        replace(w, layers=more),
        replace(w, kv_heads=16),
        replace(w, queries=more),
    )
    for other in larger:
        found = decode_cost(strategy, other, p, topology)
        for field in ("seconds", "sent_bytes", "operand_bytes", "memory_bytes"):
            assert getattr(found, field) >= getattr(base, field) * (1 - 1e-12)


@given(
    strategy=st.sampled_from(STRATEGIES),
    p=st.sampled_from([2, 8, 12, 64]),
    context=st.integers(1000, 10**8),
    unit=st.sampled_from([1e-3, 1e3]),
)
def test_dimensions(strategy, p, context, unit):
    """With every rate in another unit of time, and every delay too, so is every time."""
    other = replace(
        DGX.scaled(latency=unit, bandwidth=1 / unit),
        device=replace(
            DGX.device,
            memory_bandwidth=DGX.device.memory_bandwidth / unit,
            flops=DGX.device.flops / unit,
        ),
    )
    w = Workload(context)
    there, here = decode_cost(strategy, w, p, other), decode_cost(strategy, w, p, DGX)
    for field in ("compute_seconds", "latency_seconds", "volume_seconds", "seconds"):
        assert getattr(there, field) == pytest.approx(unit * getattr(here, field))


# ------------------------------------------------------------------------ text and bad input


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (report.bytes_text(655_360_000), "655 MB"),
        (report.bytes_text(999.9), "1 kB"),
        (report.bytes_text(0), "0 B"),
    ],
)
def test_numbers_as_text(text, expected):
    assert text == expected


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    for field in ("context", "batch", "heads", "head_dim", "queries", "layers"):
        for value, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError)):
            with pytest.raises(error, match=f"{field}: expected"):
                Workload(**{"context": 10, field: value})
    with pytest.raises(ValueError, match="kv_heads: expected a divisor of 16 heads, got 3"):
        Workload(10, kv_heads=3)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        Workload(10, dtype="int8")
    with pytest.raises(ValueError, match=r"cache_dtype: expected one of .*, int8, got 'int3'"):
        Workload(10, cache_dtype="int3")
    with pytest.raises(ValueError, match=r"value_dim: a latent value .* of 128 numbers, got 256"):
        Workload(10, value_dim=256, latent=True)
    with pytest.raises(ValueError, match=r"strategy: expected one of ring, .* got 'star'"):
        decode_cost("star", Workload(10), 8, DGX)
    with pytest.raises(ValueError, match="p: expected an integer of at least 1, got 0"):
        decode_cost("ring", Workload(10), 0, DGX)
    with pytest.raises(ValueError, match="node_size: expected an integer of at least 1, got 0"):
        merge_messages("hierarchical", Workload(10), 8, node_size=0)
    with pytest.raises(ValueError, match="at most 4096 devices"):
        compare(Workload(10), 4097, DGX)


def test_the_roofline_of_a_step_bends_where_products_take_longer_than_reading():
    times = step_seconds(
        [1, 4, 8],
        1,
        parameters=10.0,
        weight_bytes=40.0,
        cache_bytes=10.0,
        peak=10.0,
        bandwidth=10.0,
    )
    assert times.tolist() == [5, 8, 16]
    four = step_seconds(
        1, 4, parameters=10.0, weight_bytes=40.0, cache_bytes=10.0, peak=10.0, bandwidth=10.0
    )
    assert four == 8


def test_the_rounds_of_a_tree_are_counted():
    """(rounds, work, depth): p − 1 merges; of four children a node, two merges a round."""
    assert count_tree(100, 2) == (7, 99, 7)
    assert count_tree(16, 4) == (2, 15, 6)
    assert [count_rounds(p, 3) for p in (1, 3, 4, 27)] == [0, 1, 2, 3]
