"""A whole step by a plan: by hand, term by term; and the sizes of models."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.cost.advice import plans
from labs.cost.models import MODELS, find_model
from labs.cost.network import collective_seconds
from labs.cost.steps import CORNERS, DATA_SHEETS, REPAIRED, Plan, attend_seconds, step_cost
from labs.cost.topology import every_nth, preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")
LLAMA = MODELS["llama-3.1-8b"]
DEEPSEEK = MODELS["deepseek-v3"]


def test_the_models_are_as_large_as_their_names():
    """Weights that a step reads: all but the input embedding, where that is another matrix."""
    for name, weights, parameters in (
        ("llama-3.2-1b", 1.24e9, 1.24e9),
        ("llama-3.1-8b", 7.50e9, 8.03e9),
        ("llama-3.1-70b", 69.5e9, 70.6e9),
        ("llama-3.1-405b", 403.7e9, 405.8e9),
        ("deepseek-v3", 36.5e9, 671e9),
    ):
        assert MODELS[name].weights == pytest.approx(weights, rel=0.01)
        assert MODELS[name].parameters == pytest.approx(parameters, rel=0.004)


def test_experts_that_tokens_meet():
    """Drawn evenly, 8 of 256 for each of so many tokens: by the formula, and by drawing them."""
    sparse = 3 * DEEPSEEK.width * DEEPSEEK.expert_hidden * (DEEPSEEK.layers - DEEPSEEK.dense_layers)
    dense = 3 * DEEPSEEK.width * DEEPSEEK.hidden * DEEPSEEK.dense_layers
    rng = np.random.default_rng(0)
    for tokens in (1, 8, 64):
        drawn = rng.permuted(np.tile(np.arange(256), (100 * tokens, 1)), axis=1)[:, :8]
        met = [len(set(x.ravel())) for x in drawn.reshape(100, tokens * 8)]
        found = (DEEPSEEK.feed_forward(tokens) - dense) / sparse - DEEPSEEK.shared_experts
        assert found == pytest.approx(np.mean(met), rel=0.01)


def test_a_model_from_its_config(tmp_path):
    """In Hugging Face's names, as their files have them: a Llama, and an MLA with experts."""
    llama = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    deepseek = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    }
    for config, known in ((llama, LLAMA), (deepseek, DEEPSEEK)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert replace(find_model(tmp_path), name=known.name) == known
        assert find_model(tmp_path / "config.json") == find_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ValueError, match=r"model: .*config.json lacks 'num_attention_heads'"):
        find_model(tmp_path)
    for text in ("[", "[]", '"llama"', json.dumps(llama | {"hidden_size": "wide"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"model: .*config.json"):
            find_model(tmp_path)
    with pytest.raises(ValueError, match=r"model: expected a config.json or one of .* got 'gpt'"):
        find_model("gpt")


def test_a_mixture_of_experts_in_other_names(tmp_path):
    """Qwen3-30B-A3B: 30.5 billion parameters, of which a token uses 3.3, as its makers say."""
    qwen = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    model = find_model(tmp_path)
    assert model.parameters == pytest.approx(30.5e9, rel=0.005)
    embedding = model.vocabulary * model.width
    assert model.weights + embedding == pytest.approx(3.3e9, rel=0.02)


# ---------------------------------------------------------------------------- a step, by hand


def test_a_step_by_hand():
    """Llama 3.1 8B, a million keys on 8 H100s by heads: a key head each."""
    step = step_cost(LLAMA, Plan(heads=8), 1, 10**6, DGX, DATA_SHEETS)
    assert step.attend == pytest.approx(32 * (3e-6 + 2 * 10**6 * 128 * 2 / 3.35e12))
    assert step.weights == pytest.approx(2 * LLAMA.weights / 8 / 3.35e12)
    sums = 65 * collective_seconds("one-shot", 8, 2 * 4096, DGX)  # two a layer, and the embedding's
    logits = collective_seconds("all-gather", 8, 2 * 128_256 / 8, DGX)
    assert step.merge == 0 and step.sums == pytest.approx(sums + logits)
    assert step.kernels == pytest.approx(32 * 7 * 3e-6)
    # All 8.03 billion are held, the input embedding among them.
    assert step.memory_bytes == pytest.approx(2 * 8.03e9 / 8 + 32 * 2 * 10**6 * 128 * 2, rel=1e-3)
    # On 16, key heads are on two devices each, unless their sequence is split.
    twice = step_cost(LLAMA, Plan(heads=16), 1, 10**6, DGX, DATA_SHEETS)
    assert twice.attend == pytest.approx(step.attend)
    both = step_cost(LLAMA, Plan(1, 8, 2, "helix"), 1, 10**6, DGX, DATA_SHEETS)
    assert both.attend == pytest.approx(step.attend / 2, rel=0.02) and both.merge > 0
    # With all weights everywhere nothing is summed, and all of them are read.
    papers = step_cost(LLAMA, Plan(1, 1, 8, "tree", False), 1, 10**6, DGX, DATA_SHEETS)
    assert papers.weights == pytest.approx(8 * step.weights) and papers.sums == 0


def test_what_the_repairs_change():
    """Reading by its share, kernels and starts by theirs, whatever leaves a node by its factor."""
    inside, across = Plan(heads=8), Plan(1, 8, 2, "gather", True, 2)
    for plan in (inside, across):
        sheet, repaired = (
            step_cost(LLAMA, plan, 1, 10**6, DGX, r) for r in (DATA_SHEETS, REPAIRED)
        )
        assert repaired.weights == pytest.approx(sheet.weights / 0.62)
        reading = sheet.attend - 32 * 3e-6
        assert repaired.attend == pytest.approx(reading / 0.62 + 32 * 6.6e-6)
        assert repaired.kernels == pytest.approx(32 * 7 * 12.6e-6)
        assert repaired.sums == sheet.sums
    assert repaired.merge == pytest.approx(32 * 81e-6)
    over_both = Plan(heads=16)
    sheet, repaired, slow = (
        step_cost(LLAMA, over_both, 1, 10**6, DGX, r).sums
        for r in (DATA_SHEETS, REPAIRED, CORNERS["slow network"])
    )
    assert (repaired / sheet, slow / sheet) == pytest.approx((1.85, 2.2 * 1.85))


def test_weights_in_each_node_and_the_sequence_across():
    """Of 8 GPUs on each of two nodes only the merge crosses: one state a layer, a card each."""
    plan = Plan(1, 8, 2, "gather", True, copies=2)
    assert (plan.group, plan.weights_over, plan.devices) == (16, 8, 16)
    assert str(plan) == "8× heads · 2× sequence, gather, weights 2 times"
    step = step_cost(LLAMA, plan, 1, 10**6, DGX, DATA_SHEETS)
    alone = step_cost(LLAMA, Plan(heads=8), 1, 10**6, DGX, DATA_SHEETS)
    assert step.weights == alone.weights and step.sums == alone.sums
    # LL: 6.6 µs, the network's hop as a tree has it, and 4 heads' float32 state on 48 % of a card.
    state = 4 * 4 * (128 + 2)
    assert step.merge == pytest.approx(32 * (6.6e-6 + 5e-6 + state / (0.48 * 50e9)), rel=1e-3)
    # By data sheets it beats the weights split over both nodes, whose Allreduces cross.
    over_both = step_cost(LLAMA, Plan(1, 8, 2, "helix"), 1, 10**6, DGX, DATA_SHEETS)
    assert over_both.seconds - step.seconds == pytest.approx(0.86e-3, abs=0.02e-3)
    assert over_both.sums - step.sums > 1.2e-3


def test_a_pipeline_divides_the_memory_and_not_the_time():
    for batch in (1, 8):
        alone = step_cost(LLAMA, Plan(heads=8), -(-batch // 2), 10**5, DGX)
        step = step_cost(LLAMA, Plan(heads=8, stages=2), batch, 10**5, DGX)
        hop = collective_seconds("butterfly", 2, 2 * -(-batch // 2) * 4096, every_nth(DGX, 8))
        assert 1.85 * hop < 31e-6
        assert step.seconds == pytest.approx(alone.seconds + 2 * 31e-6)
        full = step_cost(LLAMA, Plan(heads=8), batch, 10**5, DGX).memory_bytes
        assert step.memory_bytes == pytest.approx(full / 2)
    # Stages of 32 layers in three wait for those of 11; a single sequence for nobody.
    three = Plan(stages=3)
    assert step_cost(LLAMA, three, 1, 10, DGX).kernels == pytest.approx(32 * 7 * 12.6e-6)
    assert step_cost(LLAMA, three, 3, 10, DGX).kernels == pytest.approx(33 * 7 * 12.6e-6)


def test_dtypes_of_weights_and_cache_are_apart():
    plan = Plan(1, 8, 2, "gather", True, copies=2)
    base = step_cost(LLAMA, plan, 1, 10**6, DGX)
    cache = step_cost(LLAMA, plan, 1, 10**6, DGX, cache_dtype="float8")
    weights = step_cost(LLAMA, plan, 1, 10**6, DGX, weight_dtype="int4")
    start = 32 * REPAIRED.start
    assert cache.attend - start == pytest.approx((base.attend - start) / 2)
    assert weights.weights == pytest.approx(base.weights / 4)
    for other, field in ((cache, "attend"), (weights, "weights")):
        for same in {"weights", "attend", "merge", "sums", "kernels"} - {field}:
            assert getattr(other, same) == getattr(base, same)
        assert other.memory_bytes < base.memory_bytes
    some = step_cost(LLAMA, plan, 1, 10**6, DGX, feed_forward_dtype="float8")
    assert weights.weights < some.weights < base.weights
    for name in ("weight_dtype", "cache_dtype", "feed_forward_dtype"):
        with pytest.raises(ValueError, match=f"{name}: expected one of .*, got 'int3'"):
            step_cost(LLAMA, plan, 1, 10, DGX, **{name: "int3"})


def test_reading_or_multiplying_whichever_takes_longer():
    """The roofline of attending: one query waits for memory, ten thousand for arithmetic."""
    w = Workload(640_000)
    one = attend_seconds(w, 80_000, DGX.device, DATA_SHEETS)
    assert one == pytest.approx(3e-6 + 655.36e6 / 3.35e12)
    many = attend_seconds(replace(w, queries=10_000), 80_000, DGX.device, DATA_SHEETS)
    assert many == pytest.approx(3e-6 + 4 * 10_000 * 80_000 * 2048 / 989e12)


@pytest.mark.parametrize(
    ("plan", "quick"),
    [
        (Plan(1, 1, 16, "tree", False), 0.84),
        (Plan(1, 8, 2, "helix"), 0.76),
        (Plan(1, 8, 2, "gather", True, 2), 0.83),
    ],
)
def test_a_trees_step_waits_for_latencies_and_not_for_bandwidth(plan, quick):
    """The explainer's "absolute bottleneck": of a step on two nodes about 1 % is bytes.

    By data sheets; half the latencies are half of a kernel's start, too.
    """
    half = DATA_SHEETS._replace(start=1.5e-6, kernel=1.5e-6)
    networks = (DGX, DGX.scaled(bandwidth=2.0), DGX.scaled(latency=0.5))
    base, wide, short = (
        step_cost(LLAMA, plan, 1, 10**6, network, rates).seconds
        for network, rates in zip(networks, (DATA_SHEETS, DATA_SHEETS, half), strict=True)
    )
    assert 0.985 < wide / base <= 1
    assert short / base == pytest.approx(quick, abs=0.012)
    ring = [collective_seconds("ring", 16, Workload(10**6).cache_bytes(16), n) for n in networks]
    assert ring[1] / ring[0] == pytest.approx(0.5, abs=0.02)  # of a ring nearly all of it is


@settings(max_examples=15, deadline=None)
@given(
    model=st.sampled_from([LLAMA, DEEPSEEK]),
    p=st.sampled_from([2, 6, 8, 16]),
    batch=st.integers(1, 64),
    context=st.integers(1, 10**7),
    more=st.integers(1, 8),
    data=st.data(),
)
def test_more_keys_and_sequences_never_cost_less(model, p, batch, context, more, data):
    plan = data.draw(st.sampled_from(list(plans(model, batch, p, merges=("tree", "a2a")))))
    base = step_cost(model, plan, batch, context, DGX)
    for step in (
        step_cost(model, plan, batch * more, context, DGX),
        step_cost(model, plan, batch, context * more, DGX),
        step_cost(model, plan, batch, context, DGX, cache_dtype="float32"),
    ):
        assert step.seconds >= base.seconds * (1 - 1e-12)
        assert step.memory_bytes >= base.memory_bytes
