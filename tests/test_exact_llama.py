"""The exact Llama: what a call shares with others, and where its cache lies, moves no bit."""

from pathlib import Path

import jax
import numpy as np
import pytest

from treeattn import Llama, ancestor_mask, depths, kv_mesh
from treeattn.llama import fixed
from treeattn.llama.text import generate

pytestmark = pytest.mark.slow

LLAMAS = Path(__file__).parent / "data" / "llamas"
TEXT = np.random.default_rng(0).integers(0, 96, 30)
START = 17  # tokens of TEXT that are a prompt, in most tests


@pytest.fixture(scope="module")
def one():
    return Llama.load(LLAMAS / "llama3", weights="int8", exact=True)


@pytest.fixture(scope="module")
def wanted(one):
    """The logits after each token of TEXT, from one call without a cache (30, vocabulary)."""
    return np.asarray(one.logits(TEXT[None])[0])


def same(found, wanted):
    np.testing.assert_array_equal(np.asarray(found), wanted)


def after_prompt(model, rows=1, chunk=1024):
    """(logits, cache) after the first START tokens, in each of so many texts."""
    return model.prefill([TEXT[:START].tolist()] * rows, model.new_cache(rows, 48), chunk=chunk)


def test_it_is_the_model_of_8_bits(one, wanted):
    plain = Llama.load(LLAMAS / "llama3", weights="int8")
    np.testing.assert_allclose(wanted, plain.logits(TEXT[None])[0], atol=2e-3 * wanted.max())


def test_logits_of_a_shorter_text(one, wanted):
    same(one.logits(TEXT[None, :1])[0], wanted[:1])


def test_prefill_in_any_chunks(one, wanted):
    """Of which the last is shorter; then a step of as many tokens, which is the same program."""
    logits, cache = after_prompt(one, chunk=5)
    same(logits[0], wanted[START - 1])
    logits, _ = one.step(TEXT[None, START : START + 5], cache)
    same(logits[0], wanted[START : START + 5])


def test_a_token_at_a_time(one, wanted):
    _, cache = after_prompt(one)
    for i in range(START, START + 4):
        logits, cache = one.step(TEXT[None, i : i + 1], cache, last=True)
        same(logits[0], wanted[i])


def test_neighbours_and_rows(one, wanted):
    """Three texts of other lengths in one call, ours the last of them."""
    others = [[1, 2, 3], TEXT[5:26].tolist()]
    logits, cache = one.prefill([*others, TEXT[:START].tolist()], one.new_cache(3, 64))
    same(logits[2], wanted[START - 1])
    step = np.stack([[9, 8], [7, 7], TEXT[START : START + 2]])
    logits, cache = one.step(step, cache)
    same(logits[2], wanted[START : START + 2])


def in_a_tree(model, rows=1):
    """The logits along one path of a tree of candidates, and after it was committed."""
    _, cache = after_prompt(model, rows)
    parents = np.array([-1, 0, 0, 2, 2, 4])
    path = np.array([0, 2, 4, 5])
    tokens = np.array([TEXT[START], 3, TEXT[START + 1], 5, TEXT[START + 2], TEXT[START + 3]])
    positions = START + depths(parents)[None].repeat(rows, 0)
    tree = {"positions": positions, "mask": ancestor_mask(parents)[None]}
    logits, new = model.extend(tokens[None].repeat(rows, 0), cache, **tree)
    select = path[None].repeat(rows, 0)
    cache = model.commit(cache, new, select=select, counts=np.full(rows, 4))
    after, _ = model.step(TEXT[None, START + 4 : START + 5].repeat(rows, 0), cache, last=True)
    return np.concatenate([logits[0, path], after[:1]])


def test_candidates_of_a_tree_are_tokens_of_a_text(one, wanted):
    same(in_a_tree(one), wanted[START : START + 5])


@pytest.mark.parametrize(("devices", "nodes"), [(2, None), (4, 2), (8, None)])
def test_any_number_of_devices(one, wanted, devices, nodes):
    model = one.on(kv_mesh(jax.devices()[:devices], nodes=nodes))
    same(in_a_tree(model), wanted[START : START + 5])


def test_the_text_is_the_same_with_a_draft(one):
    """Greedy, and sampled: with equal logits there are no ties to fall otherwise."""
    prompt = TEXT[:9].tolist()
    options = {"max_new_tokens": 8, "capacity": 48}
    again = prompt + generate(one, prompt, **options).tokens + prompt
    sampled = {"temperature": 0.1, "key": jax.random.key(1)}
    for how in ({}, sampled):
        plain, drafted = (
            generate(one, again, draft=draft, budget=4, **options, **how)
            for draft in (None, "suffix")
        )
        assert drafted.tokens == plain.tokens
        assert how or any(step.size > 1 for step in drafted.trace)


def test_biases():
    model = Llama.load(LLAMAS / "biased", weights="int8", exact=True)
    tokens = TEXT[None] % model.config.vocabulary
    wanted = np.asarray(model.logits(tokens)[0])
    cache = model.new_cache(1, 32)
    for at in range(0, 12, 4):
        logits, cache = model.step(tokens[:, at : at + 4], cache)
        same(logits[0], wanted[at : at + 4])


def test_numbers_alone_and_among_others():
    x = np.random.default_rng(0).normal(size=(37, 65)).astype(np.float32) * 5
    weight = np.ones(65, np.float32)
    functions = {
        "silu": (fixed.silu, lambda x: x / (1 + np.exp(-x))),
        "norm": (
            lambda x: fixed.rms_norm(x, weight, 1e-5),
            lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5),
        ),
    }
    for f, oracle in functions.values():
        f = jax.jit(f)
        whole = f(x)
        np.testing.assert_allclose(whole, oracle(x.astype(float)), rtol=3e-6, atol=1e-6)
        for rows in (slice(0, 1), slice(3, 8), slice(20, 37)):
            same(f(x[rows]), np.asarray(whole[rows]))


def test_angles():
    """Nearer to the truth than float32's angle, position · frequency."""
    positions = np.array([0, 1, 77, 8191, 100_000])
    frequencies = (1e5 ** -(np.arange(32) / 32)).astype(np.float32)
    cos, sin = jax.jit(fixed.cos_and_sin)(positions, frequencies)
    angles = positions[:, None] * frequencies.astype(np.float64)
    bound = 1e-6 + 2e-9 * positions[:, None]
    assert (np.abs(cos - np.cos(angles)) < bound).all()
    assert (np.abs(sin - np.sin(angles)) < bound).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "float32"}, ValueError, 'exact: expected weights="int8"'),
        ({"exact": "yes"}, TypeError, "exact: expected True or False, got 'yes'"),
        ({"attention": "butterfly"}, ValueError, "attention: an exact model takes one of"),
        ({"prefill_with": "ring"}, ValueError, "prefill_with: an exact model takes one of"),
        ({"implementation": "pallas"}, ValueError, "implementation: an exact model takes one"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Llama.load(LLAMAS / "llama3", **({"weights": "int8", "exact": True} | options))


def test_weights_are_whole_on_every_device():
    mesh = kv_mesh(jax.devices()[:2])
    with pytest.raises(ValueError, match="shard_weights: an exact model"):
        Llama.load(LLAMAS / "llama3", weights="int8", exact=True, mesh=mesh, shard_weights=True)


@pytest.mark.usefixtures("unchecked")
def test_a_devices_exact_sums_are_for_prompts_that_merge_nothing():
    """Implementation "exact" of a model that is not: refused by name where a ring would merge."""
    alone = Llama.load(LLAMAS / "llama3", implementation="exact")
    mesh = kv_mesh(jax.devices()[:2])
    for prefill_with in (None, "ring"):
        with pytest.raises(ValueError, match=r"implementation: a ring's .* take exact=True"):
            alone.on(mesh, prefill_with=prefill_with)
    for prefill_with in ("chunks", "ulysses"):
        alone.on(mesh, prefill_with=prefill_with)
