"""What calls take: each wrong argument raises a ValueError or a TypeError that names it."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import Llama, pack, pack_tree
from labs.cost.formulas import Workload, v_ring, v_tree
from labs.cost.topology import Level
from treeattn_llama import inputs
from treeattn_llama.cache import new_cache as new_cache_of
from treeattn_llama.sampling import sample
from treeattn_llama.text import stream
from treeattn.trees.draft import beam_search, expand_tree

LLAMAS = Path(__file__).parent / "data" / "llamas"


@pytest.fixture(scope="module")
def model():
    return Llama.load(LLAMAS / "llama3")


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2], [3, 4]],
        ((1, 2), [3, 4]),
        np.array([[1, 2], [3, 4]], np.uint8),
        jnp.array([[1, 2], [3, 4]]),
        [jnp.array([1, 2]), np.array([3, 4])],
        [[jnp.int32(1), np.int64(2)], [3, 4]],
    ],
)
def test_prompts_come_as_lists_or_as_anybodys_arrays(prompts):
    assert inputs.prompt_lists(prompts) == [[1, 2], [3, 4]]
    assert inputs.prompt_lengths(prompts).tolist() == [2, 2]


@pytest.mark.parametrize(
    "prompts",
    [
        *(5, None, jnp.int32(5), iter([[1]]), {1: [2]}, {"a": 1}, "Hi", ["Hi"]),
        *([1, 2], jnp.arange(3), [[1, [2]]], [[1.0, 2.0]], [[True]], [[None]]),
        *([[]], [], [[[1]]], np.zeros((2, 0), int)),
    ],
)
def test_prompts_that_are_none(prompts, unchecked):
    with pytest.raises((ValueError, TypeError), match=r"^prompts: expected "):
        inputs.prompt_lists(prompts)


def test_prompts_are_whatever_arrays_they_like(model):
    want = np.asarray(model.prefill([[1, 2, 3]], model.new_cache(1, 8))[0])
    for prompts in (jnp.array([[1, 2, 3]]), [jnp.arange(1, 4)], np.array([[1, 2, 3]], np.int8)):
        found = model.prefill(prompts, model.new_cache(1, 8))[0]
        np.testing.assert_array_equal(found, want)


# Every public function by its arguments, and what each of them is not


NO_INTEGER = (2.5, 2.0, "2", None, [2], True, np.array([2]), np.float32(2), np.bool_(True), 1j)
NO_NUMBER = ("1", [1.0], True, np.ones(2), 1j, object())
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))
NO_MESH = (3, "kv", (), jnp.zeros(2))
NO_DTYPE = ("int8", "nonsense", np.int32, bool, complex, 3, "float8_e4m3fn", jnp.float8_e5m2)


def takes(function, **wrong):
    """(name, call, value) for each wrong value of each argument of a function of one dict."""
    for argument, values in wrong.items():
        for value in values:
            call = functools.partial(function, {argument: value})
            shown = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # the same in every process
            yield pytest.param(argument, call, id=f"{function.__name__} {argument}={shown:.30}")


def new_cache(model, options):
    model.new_cache(**{"batch": 1, "capacity": 8} | options)


def grow(model, options):
    model.grow(**{"cache": model.new_cache(1, 8), "capacity": 8} | options)


def commit(model, options):
    cache = model.new_cache(1, 8)
    new = tuple([(np.zeros((1, 2, 2, 8), np.float32),) * 2] * 2)
    model.commit(**{"cache": cache, "new": new} | options)


def step(model, options):
    model.step(**{"tokens": [[1]], "cache": model.new_cache(1, 8)} | options)


def prefill(model, options):
    model.prefill(**{"prompts": [[1]], "cache": model.new_cache(1, 8)} | options)


def layer_qkv(model, options):
    model.layer_qkv(**{"token_ids": [[1]]} | options)


def logits(model, options):
    model.logits(options["tokens"])


def load(_, options):
    Llama.load(**{"path": LLAMAS / "llama3"} | options)


def on(model, options):
    model.on(**{"mesh": None} | options)


def using(model, options):
    model.using(**{"attention": "tree"} | options)


def streams(model, options):
    stream(model, **{"prompts": [[1]], "max_new_tokens": 1, "key": jax.random.key(0)} | options)


def samples(_, options):
    sample(**{"logits": np.zeros((1, 3)), "key": jax.random.key(0)} | options)


BEAM = np.zeros((1, 2, 3), int)


def packs(_, options):
    pack(**{"beam": BEAM} | options)


def packs_tree(_, options):
    pack_tree(**{"tree": ([[1]], [[-1]], [1])} | options)


def even(paths):
    return np.full((*paths.shape[:2], 4), -np.log(4))


def searches(_, options):
    beam_search(**{"log_probs": even, "width": 2, "length": 2} | options)


def expands(_, options):
    expand_tree(**{"log_probs": even, "depth": 2, "width": 2, "budget": 3} | options)


def works(_, options):
    Workload(**{"context": 64} | options)


def counts(_, options):
    v_tree(**{"w": Workload(64), "p": 2} | options)
    Workload(64).chunk(**{"p": 2} | options)


def levels(_, options):
    Level(**{"name": "x", "size": 8, "latency": 1e-6, "bandwidth": 1e9} | options)


OTHERS = new_cache_of(3, 1, 8, 2, 8, jnp.float32, None)  # of a model with three layers
NO_CACHE = (None, 3, (), ((), (), [0]), OTHERS)
TOKENS = ([[96]], [[-1]], [1], [[0.5]], [["a"]], None, [[1], [1, 2]], [[True]])
POSITIVE = (*NO_INTEGER, 0, -1)
CALLS = [
    *takes(new_cache, batch=POSITIVE, capacity=POSITIVE),
    *takes(grow, capacity=(*POSITIVE, 7), cache=NO_CACHE),
    *takes(step, cache=NO_CACHE),
    *takes(prefill, cache=NO_CACHE),
    *takes(commit, cache=NO_CACHE, new=(None, 3, (), [], ((np.zeros((2, 1, 2, 8)),) * 2,) * 2)),
    *takes(commit, counts=([3], [-1], 1, [0.5]), select=([0], [[2]], [[0.5]], "a")),
    *takes(step, tokens=TOKENS, counts=([2], [-1], 1, [0.5], "a", [[1]])),
    *takes(step, positions=([1], [[0.5]], "a"), mask=([[[1]]], True, np.ones((1, 2, 2), bool))),
    *takes(prefill, prompts=(5, None, [[]], [1], [[96]], [[1] * 9]), chunk=POSITIVE),
    *takes(layer_qkv, layer=(*NO_INTEGER, -1, 2)),
    *takes(logits, tokens=TOKENS),
    *takes(load, mesh=NO_MESH, dtype=NO_DTYPE, attention=("trees", [1], {}, None, 3)),
    *takes(load, prefill_with=("tree", [1], 3), shard_weights=("no", 1, None)),
    *takes(on, mesh=NO_MESH),
    *takes(using, attention=("trees", [1], 3), prefill_with=("tree", {}, 3)),
    *takes(
        streams, prompts=(5, None, [], [[]], [1]), max_new_tokens=POSITIVE, stop=(5, [0.5], "a")
    ),
    *takes(streams, capacity=[x for x in POSITIVE if x is not None], top_p=NO_NUMBER),
    *takes(samples, temperature=(*NO_NUMBER, *NOT_FINITE, -1), top_p=(*NOT_FINITE, 0, 1.5, None)),
    *takes(packs, beam=(None, 3, "a", BEAM[0], BEAM + 0.5), pad_token=(*NO_INTEGER, 2**70)),
    *takes(packs, lengths=([[1, 9]], [[1, -1]], [1, 1], "a", [[0.5, 1]])),
    *takes(packs_tree, tree=(None, 3, [1], ([[1]],)), pad_token=(*NO_INTEGER, 2**70)),
    *takes(searches, log_probs=(None, 3, lambda paths: None, lambda paths: np.zeros((1, 2)))),
    *takes(searches, width=POSITIVE, length=POSITIVE, batch=POSITIVE),
    *takes(expands, depth=POSITIVE, width=POSITIVE, budget=POSITIVE, batch=POSITIVE),
    *takes(works, context=POSITIVE, batch=POSITIVE, heads=POSITIVE, layers=POSITIVE),
    *takes(works, kv_heads=(3, 0, 2.5, "2", True), dtype=("int8", None, 3)),
    *takes(counts, p=POSITIVE),
    *takes(levels, size=POSITIVE, latency=(*NO_NUMBER, 0, *NOT_FINITE), links=(0, 2.5, True)),
]


@pytest.mark.parametrize("argument, call", CALLS)
def test_a_wrong_argument_is_named(model, unchecked, argument, call):
    with pytest.raises((ValueError, TypeError), match=rf"^{argument}\b.*: |^{argument}: "):
        functools.partial(call.func, model)(*call.args)


SEVEN = (np.int8(7), np.uint64(7), jnp.int32(7), np.array(7))


@pytest.mark.parametrize("n", SEVEN, ids=lambda n: type(n).__name__)
def test_anybodys_whole_numbers_are_taken(model, unchecked, n):
    assert model.new_cache(n, n).k[0].shape == (7, 7, 2, 8)
    assert model.grow(model.new_cache(1, 2), n).capacity == 7
    assert len(list(stream(model, [[1]], max_new_tokens=n, capacity=n, stop=[n]))) <= 7
    beam, _ = beam_search(even, width=n, length=np.int64(2))
    assert beam.shape == (1, 7, 2) and beam_search(even, width=2, length=n)[0].shape == (1, 2, 7)
    assert pack(BEAM, [[1, 1]], pad_token=n).packed_beam.tolist() == [[0]]
    huge = Workload(np.int32(2**30), heads=np.int8(127), head_dim=n)
    assert v_ring(huge, n) == v_ring(Workload(2**30, heads=127, head_dim=7), 7)


def test_a_wrong_capacity_does_no_harm(model, unchecked):
    with pytest.raises(TypeError, match="capacity"):
        model.new_cache(1, 5.0)
    assert model.new_cache(1, 5).capacity == 5
    with pytest.raises(TypeError, match="max_new_tokens"):
        stream(model, [[1, 2, 3]], max_new_tokens=2.5)
    assert len(list(stream(model, [[1, 2, 3]], max_new_tokens=2, stop=[]))) == 2


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (0, 0)])
def test_no_tokens_have_no_logits(model, shape):
    tokens = np.zeros(shape, int)
    assert model.logits(tokens).shape == (*shape, 96)
    assert model.layer_qkv(tokens, 1)[0].shape == (*shape, 4, 8)


def test_a_step_of_no_tokens_changes_nothing(model, unchecked):
    first, cache = model.prefill([[1, 2, 3]], model.new_cache(1, 8))
    tokens = np.zeros((1, 0), int)
    assert model.extend(tokens, cache)[0].shape == (1, 0, 96)
    logits, cache = model.step(tokens, cache)
    assert logits.shape == (1, 0, 96) and cache.lengths == 3
    with pytest.raises(ValueError, match="last: expected at least one token"):
        model.step(tokens, cache, last=True)
    logits, _ = model.step([[4]], cache)
    want = model.logits([[1, 2, 3, 4]])
    np.testing.assert_allclose(first, want[:, 2], atol=1e-4)
    np.testing.assert_allclose(logits, want[:, 3:], atol=1e-4)


def test_a_model_is_itself_and_is_shown_without_its_weights(model):
    other = model.using("ring")
    assert model == model and model != other and {model: 1, other: 2}[other] == 2
    assert len(repr(model)) < 600
    for part in ("vocabulary=96", "mesh=None", "attention='tree'", "dtype=float32"):
        assert part in repr(model)
    assert "attention='ring'" in repr(other)


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-300, np.float64(1e-20)])
def test_at_the_lowest_temperatures_sampling_is_greedy(temperature):
    logits = np.random.default_rng(0).normal(scale=30, size=(4, 50)).astype(np.float32)
    found = sample(logits, jax.random.key(0), temperature=temperature)
    np.testing.assert_array_equal(found, logits.argmax(axis=-1))
    cut = sample(logits, jax.random.key(0), temperature=temperature, top_p=0.5)
    np.testing.assert_array_equal(cut, logits.argmax(axis=-1))
