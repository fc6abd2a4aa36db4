"""Plans to split a decode step, checked by brute force, the advice, and the command."""

import contextlib
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.cost import __main__ as cost
from labs.cost.advice import FASTEST, advise, best_of_each, least_devices, plans
from labs.cost.merges import MERGES, SCATTERING, merge_messages
from labs.cost.models import MODELS
from labs.cost.network import collective_seconds
from labs.cost.steps import CORNERS, Plan, Rates
from labs.cost.topology import every_nth, preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")
LLAMA = MODELS["llama-3.1-8b"]
DEEPSEEK = MODELS["deepseek-v3"]
# All rates differ, so that two of them swapped would show.
RATES = Rates(0.5, 5e-6, 11e-6, inside=1.3, between=1.7, exchange=40e-6, send=23e-6)


# ------------------------------------------------------------------------- all plans, by force


def brute_force(model, batch, context, p):
    """(seconds, bytes held) of all plans on p devices, calculated by code of its own."""
    found = []
    numbers = [n for n in range(1, p + 1) if p % n == 0]
    for split in itertools.product(numbers, repeat=5):
        shares, stages, heads, inside, copies = split
        if math.prod(split) != p or shares > batch or stages > model.layers:
            continue
        sequence = inside * copies
        if heads > (model.heads if sequence == 1 else model.kv_heads):
            continue
        if model.heads % heads or max(heads, model.kv_heads) % min(heads, model.kv_heads):
            continue
        everywhere = copies > 1 and heads * inside == 1
        over = heads * inside
        if model.heads % over or model.hidden % over:
            continue
        blocks = [heads * sequence, stages * heads * sequence]
        blocks += [1, sequence] if everywhere or copies == 1 else [heads, over]
        if p > 8 and any(b != p and 8 % b and b % 8 for b in blocks):
            continue
        for merge in [None] if sequence == 1 else FASTEST:
            if copies > 1 and merge in SCATTERING:
                continue
            reach = sequence if everywhere or copies == 1 else heads * sequence
            if merge == "one-shot" and reach > 8:
                continue
            found.append(priced(model, batch, context, split, merge, everywhere))
    return found


def priced(model, batch, context, split, merge, everywhere):
    """(seconds, bytes) of one plan; the weights over heads × inside devices."""
    shares, stages, heads, inside, copies = split
    sequence = inside * copies
    over = heads * inside
    of_share = math.ceil(batch / shares)
    rows = math.ceil(of_share / stages)
    key_heads = math.ceil(model.kv_heads / heads)
    query_heads = model.heads // heads
    held_layers = math.ceil(model.layers / stages)
    layers = stages * held_layers if of_share > 1 else model.layers
    width, d = model.width, model.head_dim
    own = math.ceil(query_heads / inside)
    asked = query_heads if merge == "helix" else own
    kept = key_heads if merge == "helix" else math.ceil(key_heads / inside)
    layer = width * d * (asked + 2 * kept) + own * d * width + 3 * width * model.hidden / over
    last = model.vocabulary * width / over
    read = layers * layer + last
    bandwidth = 0.5 * 3.35e12
    weights = max(2 * read / bandwidth, 2 * rows * read / 989e12)
    keys = math.ceil(context / sequence)
    attend = 5e-6 + max(
        4 * rows * keys * key_heads * d / bandwidth,
        4 * rows * keys * query_heads * d / 989e12,
    )
    merging, crosses = 0.0, False
    between = every_nth(DGX, heads) if copies > 1 and not everywhere else DGX
    if merge:
        w = Workload(1, batch=rows, heads=query_heads, kv_heads=key_heads, head_dim=d)
        sent = merge_messages(merge, w, sequence, node_size=between.node_size)
        sent = [(kind, size, some or sequence, stride) for kind, size, _, some, stride in sent]
        if inside > 1 and merge != "helix":
            sent.append(("all-gather", 2 * rows * query_heads * d / inside, inside, 1))
        for kind, size, among, stride in sent:
            there = every_nth(between, stride)
            far = among > there.node_size
            merging += (1.7 if far else 1.3) * collective_seconds(kind, among, size, there)
            crosses |= far
        merging = max(merging, 40e-6) if crosses else merging
    sums = 0.0
    if over > 1:
        kinds = ["allreduce", "one-shot"] if over <= 8 else ["allreduce"]
        kinds += ["in-switch"] * (over <= 8 and 2 * rows * width >= 2**18)
        one = min(collective_seconds(kind, over, 2 * rows * width, DGX) for kind in kinds)
        logits = collective_seconds("all-gather", over, 2 * rows * model.vocabulary / over, DGX)
        sums = (1.7 if over > 8 else 1.3) * ((2 * layers + 1) * one + logits)
    if stages > 1:
        group = heads * sequence
        near = stages * group <= 8
        there = every_nth(DGX, group if near else max(group, 8))
        hop = collective_seconds("butterfly", 2, 2 * rows * width, there)
        sums += stages * (1.3 * hop if near else max(1.7 * hop, 23e-6))
    seconds = weights + layers * (attend + merging + 7 * 11e-6) + sums
    cache = held_layers * 4 * of_share * keys * key_heads * d
    held = 2 * (held_layers * layer + (1 if stages > 1 else 2) * last) + cache
    return seconds, held


@settings(max_examples=12, deadline=None)
@given(
    p=st.sampled_from([1, 2, 3, 6, 8, 12, 16, 24]),
    batch=st.sampled_from([1, 3, 48]),
    context=st.integers(1, 10**8),
    kv_heads=st.sampled_from([1, 8, 32]),
)
def test_the_advice_is_the_best_of_all_plans(p, batch, context, kv_heads):
    model = replace(LLAMA, kv_heads=kv_heads)
    steps = advise(model, batch, context, p, DGX, RATES, exactly=True)
    expected = sorted(brute_force(model, batch, context, p))
    found = sorted((s.seconds, s.memory_bytes) for s in steps)
    assert len(found) == len(expected)
    np.testing.assert_allclose([x[0] for x in found], [x[0] for x in expected], rtol=1e-9)
    assert sorted(x[1] for x in found) == pytest.approx(sorted(x[1] for x in expected))
    fitting = [seconds for seconds, held in expected if held <= 0.9 * 80e9]
    assert [s.fits for s in steps] == [True] * len(fitting) + [False] * (len(steps) - len(fitting))
    if fitting:
        assert steps[0].seconds == pytest.approx(min(fitting), abs=1e-6)


def test_the_merges_that_are_tried_are_fast_enough():
    """They come within a hundredth of the best of all merges, in every corner."""
    for batch, context, p in ((1, 10**6, 16), (32, 100_000, 16)):
        for rates in CORNERS.values():
            few, every = (
                advise(LLAMA, batch, context, p, DGX, rates, merges=merges, exactly=True)[0]
                for merges in (FASTEST, MERGES)
            )
            assert few.seconds <= 1.01 * every.seconds


def test_some_devices_may_be_left():
    """More devices are never slower. For 8 sequences, Llama 3.1 70B uses 24 of 31 H100s."""
    times = [advise(LLAMA, 4, 32_000, p, DGX)[0].seconds for p in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)
    assert advise(MODELS["llama-3.1-70b"], 8, 128_000, 31, DGX)[0].plan.devices == 24
    assert Plan(heads=16) in plans(LLAMA, 1, 16)  # copies of key heads
    with pytest.raises(ValueError, match="devices: expected at least 1, got 0"):
        list(plans(LLAMA, 1, 0))


# ------------------------------------------------------------------------------- the advice


@pytest.mark.parametrize("corner", CORNERS)
def test_advice_that_no_choice_of_constants_changes(corner):
    """Split heads in a node, the batch of many sequences, the sequence of one key head."""
    mqa = replace(LLAMA, kv_heads=1)
    for model, batch, context, p, devices, family in (
        (LLAMA, 1, 10**6, 8, 8, "heads"),
        (LLAMA, 1, 8_000, 16, 8, "heads"),  # and a replica on the others
        (MODELS["llama-3.1-70b"], 8, 64_000, 16, 16, "batch + heads"),
        (LLAMA, 64, 32_000, 8, 8, "heads"),
        (LLAMA, 1, 4 * 10**6, 32, 32, "heads + sequence"),  # between nodes, heads in each
        (mqa, 1, 10**6, 8, 8, "sequence"),
    ):
        best = advise(model, batch, context, p, DGX, CORNERS[corner])[0]
        assert best.fits and best.plan.devices == devices
        assert family in best.plan.family if model is mqa else best.plan.family == family


def test_advice_that_depends_on_the_network():
    """For one sequence a second node pays from some 640,000 keys on as repaired, and from 154,000
    by data sheets."""
    for keys, devices in ((85_000, [8, 8, 8]), (300_000, [8, 16, 8]), (2_000_000, [16, 16, 16])):
        best = [advise(LLAMA, 1, keys, 16, DGX, rates)[0] for rates in CORNERS.values()]
        assert [step.plan.devices for step in best] == devices


def test_what_does_not_fit_says_how_many_devices_would():
    """Ten million keys of Llama 3.1 8B are 1.3 TB: three nodes, or two in 8 bits."""
    assert least_devices(LLAMA, 1, 10**7, DGX) == 24
    assert least_devices(LLAMA, 1, 10**7, DGX, cache_dtype="float8") == 16
    assert least_devices(LLAMA, 1, 10**12, DGX) is None
    for model, batch, context in ((LLAMA, 7, 300_000), (DEEPSEEK, 1, 10_000)):
        least = least_devices(model, batch, context, DGX)
        for p in (x for x in (*range(1, 8), *range(8, least + 1, 8)) if x <= least):
            steps = advise(model, batch, context, p, DGX, merges=("gather",), exactly=True)
            assert bool(steps and steps[0].fits) == (p == least)


def test_latent_attention_splits_the_sequence_and_a_pipeline_the_weights():
    """DeepSeek-V3 in 8 bits: two nodes are stages of layers, and each splits the sequence."""
    for batch in (1, 32):
        best = advise(DEEPSEEK, batch, 128_000, 16, DGX, weight_dtype="float8")[0]
        assert best.fits and (best.plan.stages, best.plan.sequence) == (2, 8)
    assert not advise(DEEPSEEK, 1, 128_000, 16, DGX)[0].fits  # 1.34 TB of weights


# ------------------------------------------------------------------------------ the program


def test_the_table_and_the_best_of_each_kind(capsys):
    """The advice, the table's rows, and the corners."""
    steps = advise(LLAMA, 1, 10**6, 16, DGX)
    best = best_of_each(steps)
    assert best[0] == steps[0] and [s for s in steps if s in best] == best
    assert len({str(s.plan) for s in best}) == len(best) < len(steps)
    cost.main(["--model", "llama-3.1-8b", "--nodes", "2", "--context", "1M"])
    text = capsys.readouterr().out
    assert "do: 8× heads · 2× sequence, helix, 10.8 ms" in text and "the 5 below it" in text
    assert all(f" {s.plan.devices}  {s.plan}" in text for s in best)
    assert all(f"\n{corner} " in text for corner in CORNERS)
    assert "1.00 on 8, 1.08 on 16, 0.87 on 32 of the measured times" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--nodes 2 --context 8k", ", on 8 of the 16: run 2 replicas"),
        ("--devices 9 --context 8k", ", on 8 of the 9; 1 left over"),
        ("--nodes 2 --context 10M", "nothing fits: 83 GB on each device; 24 devices would do"),
        ("--nodes 2 --context 10M", "slow network  nothing fits"),
        ("--nodes 2 --context 10M --cache-dtype float8", "do: 8× heads · 2× sequence"),
        ("--context 1000000M", "more devices than the network joins"),
        ("--model {config} --devices 2 --context 1.5k", ", batch 1, 1,500 keys each, on 2 × H100"),
        ("--context 0", "argument --context: expected a whole number from 1 on"),
        ("--context many", "argument --context: expected a whole number from 1 on"),
        ("--context 9 --nodes 9999", "dgx-h100 joins 4096 devices, got 79992"),
        ("--context 9 --model gpt", "--model: model: expected a config.json or one of"),
        ("--context 9 --nodes 2 --devices 1", "not allowed with argument --nodes"),
    ],
)
def test_command_line(capsys, tmp_path, arguments, expected):
    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 1024, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with contextlib.suppress(SystemExit):
        cost.main(arguments.format(config=tmp_path).split())
    assert expected in "".join(capsys.readouterr())
