"""A step as many programs, or as few: the same logits, the same cache; counted."""

import collections
from pathlib import Path

import jax
import numpy as np
import pytest
from test_pallas import CALL, lowered, on_cuda

from treeattn import Llama, ancestor_mask, depths, kv_mesh
from treeattn.kernel.choice import resolve
from treeattn.kernel.inputs import check_inputs
from treeattn_llama import cache as caches
from treeattn_llama import layers
from treeattn_llama.static import static_of

pytestmark = pytest.mark.slow

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
TEXT = np.random.default_rng(0).integers(0, 96, (2, 20))


@pytest.fixture(scope="module")
def model():
    return Llama.load(SMALL)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setitem(layers.MAX_TOKENS_IN_ONE_PROGRAM, "cpu", 64)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_the_first_layer_compiles_no_other_compiles_again(devices):
    def prefill(model):
        sizes.append((len(model.weights.layers), model.config.layers))
        model.prefill([[5, 7, 11, 13]], model.new_cache(1, 52))
        sizes.append(tuple(f._cache_size() for f in programs))

    programs, sizes = (layers.extend_layer, layers.prefill_layer, layers.to_logits), []
    mesh = None if devices == 1 else kv_mesh(jax.devices()[:2])
    prefill(Llama.load(SMALL, mesh=mesh, meanwhile=prefill))
    (one, one_), first, (all_, all__), then = sizes
    assert one == one_ == 1 < all_ == all__ and first == then


def test_what_fails_meanwhile_is_raised():
    with pytest.raises(ValueError, match="layer: expected an integer from 0 to 0, got 1"):
        Llama.load(SMALL, meanwhile=lambda first: first.layer_qkv(TEXT, 1))


def some_steps(model):
    """Logits of a prompt, of a tree of candidates that is not kept, and of three more tokens."""
    logits, cache = model.prefill(TEXT[:, :12].tolist(), model.new_cache(2, 24))
    parents = np.array([-1, 0, 0, 1])
    tree = {"positions": 12 + depths(parents)[None].repeat(2, 0), "mask": ancestor_mask(parents)}
    tree["mask"] = tree["mask"][None]
    found = [logits, model.extend(TEXT[:, 12:16], cache, **tree)[0]]
    _, new = model.extend(TEXT[:, 12:16], cache)
    cache = model.commit(cache, new, counts=np.array([1, 2]), select=np.array([[0, 1]] * 2))
    for i in range(2):
        logits, cache = model.step(TEXT[:, 13 + i : 14 + i], cache, last=True)
        found.append(logits)
    return found, cache


@pytest.mark.parametrize("devices", [1, 3])
def test_few_programs_give_what_many_give(model, devices, monkeypatch):
    model = model if devices == 1 else model.on(kv_mesh(jax.devices()[:devices]))
    many, cache = some_steps(model)
    monkeypatch.setitem(layers.MAX_TOKENS_IN_ONE_PROGRAM, "cpu", 64)
    few, same = some_steps(model)
    for a, b in zip(jax.tree.leaves((many, cache)), jax.tree.leaves((few, same)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def counted(model, monkeypatch) -> dict[str, int]:
    """The compiled programs that a decoding step calls, when all are compiled."""
    _, cache = model.prefill([TEXT[0, :5].tolist()], model.new_cache(1, 8))
    _, cache = model.step(TEXT[:1, 5:6], cache, last=True)
    found = collections.Counter()

    def counting(name, f):
        def call(*arguments, **options):
            found[name] += 1
            return f(*arguments, **options)

        return call

    for module, names in (
        (layers, ("embed", "extend_layer", "to_logits")),
        (caches, ("append", "advance")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    one = {
        f"all {name}": counting(f"all {name}", f)
        for name, f in layers.ONE_PROGRAM._asdict().items()
    }
    monkeypatch.setattr(layers, "ONE_PROGRAM", layers.Programs(*one.values()))
    model.step(TEXT[:1, 6:7], cache, last=True)
    return dict(found)


def test_a_step_on_a_cpu_is_a_program_a_layer(model, monkeypatch):
    n = model.config.layers
    expected = {"embed": 1, "extend_layer": n, "append": n, "advance": 1, "to_logits": 1}
    assert counted(model, monkeypatch) == expected


@pytest.mark.usefixtures("at_once")
def test_a_step_on_a_gpu_is_three_programs(model, monkeypatch):
    assert counted(model, monkeypatch) == {"all run": 1, "all write": 1, "to_logits": 1}


def test_which_platform_runs_how_many():
    for gpu in ("cuda", "gpu"):
        assert layers.programs(gpu, 1) is layers.programs(gpu, 64) is layers.ONE_PROGRAM
        assert layers.programs(gpu, 65) is layers.PROGRAM_A_LAYER
    assert layers.programs("cpu", 1) is layers.PROGRAM_A_LAYER


@pytest.mark.usefixtures("at_once")
def test_the_cache_is_written_in_place(model):
    _, cache = model.prefill([TEXT[0, :5].tolist()], model.new_cache(1, 8))
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((cache.k, cache.v))]
    _, cache = model.step(TEXT[:1, 5:6], cache)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((cache.k, cache.v))] == before


def test_the_kernel_is_in_the_program_for_a_gpu(model):
    model = model.using("tree", implementation="pallas")
    cache, static = model.new_cache(2, 64), static_of(model, (2, 1))

    def step(weights, tokens, cache):
        how = {"static": static, "see_cache": True}
        return layers.run_layers(weights, tokens, cache, None, None, None, **how)

    text = lowered(step, model.weights, TEXT[:, :1], cache, context=on_cuda()[1])
    count = text.count("call @extend_layer")
    # Towards the cache, in the one function that a layer is; a new token's own key takes none.
    assert count == model.config.layers and text.count(CALL) == 1
    assert "stablehlo.while" not in text  # no row of the batch waits for another


def test_rows_of_a_batch_do_not_wait_for_each_other_on_a_gpu():
    q, k = np.ones((3, 1, 2, 8)), np.ones((3, 64, 2, 8))
    inputs = check_inputs(q, k, k, kv_lengths=np.array([1, 5, 64]))
    assert not any(resolve(None, inputs, gpu).by_row for gpu in ("cuda", "gpu"))
    assert resolve(None, inputs, "cpu").by_row
