"""A whole step by a plan: by hand, term by term; and the sizes of models."""

import json
from dataclasses import replace

import numpy as np
import pytest

from labs.cost.models import MODELS, find_model
from labs.cost.network import collective_seconds
from labs.cost.steps import DATA_SHEETS, REPAIRED, Plan, step_cost
from labs.cost.topology import preset
from labs.cost.workload import Workload

DGX = preset("dgx-h100")
LLAMA = MODELS["llama-3.1-8b"]
DEEPSEEK = MODELS["deepseek-v3"]


def test_the_models_are_as_large_as_their_names():
    """A step reads all weights but those of an untied input embedding."""
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
    """Each token draws 8 of 256 experts evenly: the formula agrees with drawing them."""
    sparse = 3 * DEEPSEEK.width * DEEPSEEK.expert_hidden * (DEEPSEEK.layers - DEEPSEEK.dense_layers)
    dense = 3 * DEEPSEEK.width * DEEPSEEK.hidden * DEEPSEEK.dense_layers
    rng = np.random.default_rng(0)
    for tokens in (1, 8, 64):
        drawn = rng.permuted(np.tile(np.arange(256), (100 * tokens, 1)), axis=1)[:, :8]
        met = [len(set(x.ravel())) for x in drawn.reshape(100, tokens * 8)]
        found = (DEEPSEEK.feed_forward(tokens) - dense) / sparse - DEEPSEEK.shared_experts
        assert found == pytest.approx(np.mean(met), rel=0.01)


CONFIGS = {
    "llama-3.1-8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "deepseek-v3": {
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
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_from_its_config(tmp_path, name):
    """In Hugging Face's names, as their files have them: a Llama, and an MLA with experts."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert replace(find_model(tmp_path), name=name) == MODELS[name]
    assert find_model(tmp_path / "config.json") == find_model(tmp_path)


@pytest.mark.parametrize("text", ['{"hidden_size": 8}', "[", "[]", '"llama"'])
def test_a_config_without_sizes_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"model: .*config.json has no sizes of a model"):
        find_model(tmp_path)


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


@pytest.mark.parametrize(
    ("plan", "quick"),
    [
        (Plan(1, 1, 16, "tree", False), 0.84),
        (Plan(1, 8, 2, "helix"), 0.76),
        (Plan(1, 8, 2, "gather", True, 2), 0.83),
    ],
)
def test_a_trees_step_waits_for_latencies_and_not_for_bandwidth(plan, quick):
    """The explainer's "absolute bottleneck": about 1 % of a step on two nodes is bytes.

    The rates are the data sheets'. Half the latencies include half a kernel's start.
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
    assert ring[1] / ring[0] == pytest.approx(0.5, abs=0.02)  # a ring's step is nearly all bytes
