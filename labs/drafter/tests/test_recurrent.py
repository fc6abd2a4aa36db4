"""The drafter: its file, its search, what it learns, and that it never changes a text."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labs.drafter import distil
from labs.drafter.recurrent import (
    Shared,
    borrow,
    draft_beam,
    load_drafter,
    next_state,
    save_drafter,
    unit,
)
from labs.drafter.write import write
from treeattn_llama import Llama

LLAMA = Path(__file__).parents[3] / "llama" / "tests" / "data" / "llamas" / "llama32"


@pytest.fixture(scope="module")
def model():
    return Llama.load(LLAMA, dtype=np.float32)


def random_drafter(model, seed=0):
    key = jax.random.key(seed)
    drafter = distil.initial(key, model.config.width, 2, 8)
    drafter = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(key, x.shape), drafter)
    return drafter, borrow(model, np.arange(0, model.config.vocabulary, 2))


def test_the_search_is_that_of_all_paths():
    """A beam as wide as there are tokens keeps every path of two: the best four, by enumeration."""
    rng = np.random.default_rng(0)
    drafter = distil.initial(jax.random.key(1), 6, 1, 4)
    shared = Shared(*(jnp.asarray(rng.normal(size=(n, 6)), jnp.float32) for n in (9, 5)), None)
    shared = shared._replace(tokens=jnp.array([1, 3, 4, 6, 8]))
    state, certain = jnp.asarray(rng.normal(size=(1, 6)), jnp.float32), jnp.array([2])
    beam, scores = draft_beam(drafter, shared, state, certain, width=5, length=2)

    def log_probabilities(state, token):
        state = next_state(drafter, state, shared.embedding[token])
        return state, jax.nn.log_softmax(shared.head @ state)

    first, log = log_probabilities(unit(state[0]), 2)
    paths = {}
    for i, j in itertools.product(range(5), repeat=2):
        _, after = log_probabilities(first, shared.tokens[i])
        paths[int(shared.tokens[i]), int(shared.tokens[j])] = float(log[i] + after[j])
    best = sorted(paths, key=paths.get, reverse=True)[:5]
    assert [tuple(path) for path in np.asarray(beam[0]).tolist()] == best
    np.testing.assert_allclose(scores[0].sum(axis=1), [paths[path] for path in best], rtol=1e-5)


@pytest.mark.parametrize("width,length", [(1, 1), (3, 2), (2, 4)])
def test_a_text_does_not_depend_on_who_drafted_it(model, width, length):
    prompt = np.random.default_rng(width).integers(0, model.config.vocabulary, 9).tolist()
    alone = write(model, prompt, 20)
    drafted = write(model, prompt, 20, random_drafter(model), width=width, length=length)
    assert drafted.tokens == alone.tokens
    assert len(alone.by_call) == 20 >= len(drafted.by_call)


def test_a_good_draft_saves_calls(model):
    """One that is trained on this model's own text."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocabulary, (16, 6))
    rows = np.array([[*prompt, *write(model, prompt.tolist(), 24).tokens] for prompt in prompts])
    texts = distil.read(model, rows, 24, top=8)
    tokens = np.arange(model.config.vocabulary)
    texts = distil.prepared(texts, tokens, np.asarray(model.weights.norm))
    shared = borrow(model, tokens)
    adam = distil.optimizer(150, 1e-2)
    drafter = distil.initial(jax.random.key(0), model.config.width, 1, 32)
    moments = adam.init(drafter)
    starts = np.flatnonzero(np.arange(len(texts.after)) + 1 < texts.end)
    losses = []
    for _ in range(150):
        batch = distil.examples(texts, rng.choice(starts, 32), tokens, 3)
        drafter, moments, value = distil.update(
            drafter, moments, shared, batch, 0.8, 0.2, adam=adam
        )
        losses.append(float(value))
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    prompt = prompts[0].tolist()
    drafted = write(model, prompt, 24, (drafter, shared), width=2, length=3)
    assert drafted.tokens == rows[0, 6:].tolist()
    assert len(drafted.by_call) < 20


def test_a_file_there_and_back(model, tmp_path):
    drafter, shared = random_drafter(model)
    path = tmp_path / "drafter.safetensors"
    save_drafter(path, drafter, shared, "llama32")
    found, borrowed = load_drafter(model, path)
    np.testing.assert_array_equal(borrowed.tokens, shared.tokens)
    for a, b in zip(found, drafter, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    with pytest.raises(FileNotFoundError, match="draft: no file"):
        load_drafter(model, tmp_path / "none")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="no readable safetensors"):
        load_drafter(model, path)
    with pytest.raises(ValueError, match=r"for models of width 576"):
        load_drafter(model)  # the packaged one is for the packaged model
