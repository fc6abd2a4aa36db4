"""Log-probabilities of rows by their prefix tree: the losses and gradients of separate rows."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from treeattn import Llama, kv_mesh, log_probs, pack_rows

pytestmark = pytest.mark.slow

LLAMAS = Path(__file__).parent / "data" / "llamas"
ROWS = 6
LONGEST = 12


@pytest.fixture(scope="module", autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    return Llama.load(LLAMAS / "llama3", dtype=np.float64)


def random_rows(rng, vocabulary):
    """Six rows that share prefixes of any length: equal ones, and prefixes of one another, too."""
    rows = [rng.integers(0, vocabulary, LONGEST)]
    while len(rows) < ROWS:
        stem = rows[rng.integers(len(rows))][: rng.integers(0, LONGEST + 1)]
        room = LONGEST - len(stem)
        rest = rng.integers(0, vocabulary, rng.integers(0, room + 1))
        rows.append(np.concatenate([stem, rest, rng.integers(0, vocabulary, 1)])[:LONGEST])
    return rows


def padded(rows):
    return np.stack([np.pad(row, (0, LONGEST - len(row))) for row in rows]).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def separately(model, weights, tokens, lengths):
    """The same by a pass over every row alone, its end padded: nobody sees what comes later."""
    logits = dataclasses.replace(model, weights=weights).logits(tokens)
    each = jax.nn.log_softmax(logits)[:, :-1]
    each = jnp.take_along_axis(each, tokens[:, 1:, None], axis=2)[..., 0]
    there = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
    return jnp.where(there, each, 0)


# Losses of the rows' log-probabilities, with what training brings along: (rows, longest − 1).


def mean_over_tokens(found, there, advantages, old):
    return -jnp.where(there, found, 0).sum() / there.sum()


def mean_over_rows(found, there, advantages, old):
    return -(jnp.where(there, found, 0).sum(axis=1) / jnp.maximum(there.sum(axis=1), 1)).mean()


def grpo(found, there, advantages, old):
    """Clipped ratios to the log-probabilities at the time of sampling."""
    ratio = jnp.exp(jnp.where(there, found - old, 0))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -jnp.where(there, gain, 0).sum() / there.sum()


LOSSES = mean_over_tokens, mean_over_rows, grpo


@pytest.fixture(scope="module")
def both(model):
    """(loss and gradient by trees, the same by separate rows), of (loss, weights, rows, data)."""

    def by_trees(loss, weights, rows, data, **options):
        def total(weights):
            found = log_probs(model, rows, weights=weights, **options)
            missing = LONGEST - 1 - found.shape[1]
            return loss(jnp.pad(found, ((0, 0), (0, missing))), *data)

        return jax.value_and_grad(total)(weights)

    @functools.partial(jax.jit, static_argnums=0)
    def by_rows(loss, weights, tokens, lengths, data):
        def total(weights):
            return loss(separately(model, weights, tokens, lengths), *data)

        return jax.value_and_grad(total)(weights)

    def separate(loss, weights, rows, data):
        return by_rows(loss, weights, padded(rows), np.array([len(row) for row in rows]), data)

    return by_trees, separate


def some_data(rng, rows):
    lengths = np.array([len(row) for row in rows])
    there = np.arange(1, LONGEST) < lengths[:, None]
    advantages = rng.normal(size=(ROWS, 1))
    old = -4 + rng.normal(size=(ROWS, LONGEST - 1)) / 5
    return there, advantages, old


def same(found, expected, atol=1e-10):
    """Every loss and gradient; not the rotary frequencies', which are no weights."""
    found, expected = (x[1]._replace(frequencies=x[0]) for x in (found, expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients(model, both, loss):
    rng = np.random.default_rng(LOSSES.index(loss))
    by_trees, separate = both
    for _ in range(40):
        rows = random_rows(rng, model.config.vocabulary)
        data = some_data(rng, rows)
        found = by_trees(loss, model.weights, rows, data)
        same(found, separate(loss, model.weights, rows, data))


@pytest.mark.parametrize("options", [{"max_tokens": 20}, {"chunk": 5}])
def test_several_trees_and_parts_of_one(model, both, options):
    rng = np.random.default_rng(7)
    by_trees, separate = both
    for _ in range(2):
        rows = random_rows(rng, model.config.vocabulary)
        data = some_data(rng, rows)
        found = by_trees(grpo, model.weights, rows, data, **options)
        same(found, separate(grpo, model.weights, rows, data))


def test_on_devices(model, both):
    rng = np.random.default_rng(8)
    rows = random_rows(rng, model.config.vocabulary)
    data = some_data(rng, rows)
    dealt = model.on(kv_mesh(jax.devices()[:3]))

    def total(weights):
        found = log_probs(dealt, rows, weights=weights)
        return grpo(jnp.pad(found, ((0, 0), (0, LONGEST - 1 - found.shape[1]))), *data)

    same(jax.value_and_grad(total)(dealt.weights), both[1](grpo, model.weights, rows, data))


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optax.sgd(1e-1)], ids=["AdamW", "SGD"])
def test_ten_steps(model, both, optimizer):
    """Not the first step's loss alone: the weights after ten are the same."""
    rng = np.random.default_rng(9)
    batches = [random_rows(rng, model.config.vocabulary) for _ in range(10)]
    ends = []
    for gradient in both:
        weights = model.weights
        moments = optimizer.init(weights)
        for i, rows in enumerate(batches):
            data = some_data(np.random.default_rng(i), rows)
            _, change = gradient(grpo, weights, rows, data)
            change = change._replace(frequencies=jnp.zeros_like(weights.frequencies))
            updates, moments = optimizer.update(change, moments, weights)
            weights = optax.apply_updates(weights, updates)
            weights = weights._replace(frequencies=model.weights.frequencies)
        ends.append(weights)
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), ends[0], model.weights)
    assert max(jax.tree.leaves(moved)) > 1e-2
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)


def test_a_head_that_is_the_embedding():
    """Its gradient is the embedding's, of both uses."""
    paths = [path for path in sorted(LLAMAS.iterdir()) if path.is_dir()]
    models = (Llama.load(path, dtype=np.float64) for path in paths)
    model = next(model for model in models if model.config.tied)
    rows = random_rows(np.random.default_rng(10), model.config.vocabulary)
    lengths = np.array([len(row) for row in rows])

    def total(weights):
        return separately(
            model, weights._replace(head=weights.embedding), padded(rows), lengths
        ).sum()

    found = jax.grad(lambda weights: log_probs(model, rows, weights=weights).sum())(model.weights)
    expected = jax.grad(total)(model.weights)
    np.testing.assert_allclose(found.embedding, expected.embedding, atol=1e-10)
    assert not np.asarray(found.head).any() and not np.asarray(found.frequencies).any()


def test_small_rows(model):
    """No rows, rows of one token, which predict nothing, and one row."""
    assert log_probs(model, []).shape == (0, 0)
    assert log_probs(model, [[3], [4]]).shape == (2, 0)
    found = log_probs(model, [[1, 2, 3], [1]])
    expected = separately(model, model.weights, np.array([[1, 2, 3]]), np.array([3]))
    np.testing.assert_allclose(found, np.pad(expected, ((0, 1), (0, 0))), atol=1e-12)


def test_a_node_for_each_prefix(model):
    """What a pass computes: the nodes, and not the tokens of the rows."""
    stem = list(range(8))
    (tree,) = pack_rows([[*stem, 10 + i] for i in range(4)])
    assert (len(tree.tokens), tree.row_tokens) == (12, 36)
    of_rows = tree.unpack(np.arange(12.0))
    np.testing.assert_array_equal(of_rows[:, :8], np.tile(np.arange(8.0), (4, 1)))


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls(model):
    with pytest.raises(ValueError, match="rows: expected token ids below 96, got 96"):
        log_probs(model, [[1, 96]])
    with pytest.raises(ValueError, match=r"rows\[1\]: expected at least one token"):
        log_probs(model, [[1], []])
    with pytest.raises(ValueError, match="chunk: expected"):
        log_probs(model, [[1]], chunk=0)
    on_two = model.on(kv_mesh(jax.devices()[:2]))
    with pytest.raises(ValueError, match="chunk: on a mesh"):
        log_probs(on_two, [[1]], chunk=4)
    with pytest.raises(ValueError, match="model: expected whole weights"):
        log_probs(on_two.on(on_two.mesh, shard_weights=True), [[1]])
    exact = Llama.load(LLAMAS / "llama3", weights="int8", exact=True)
    with pytest.raises(ValueError, match=r"model: .* no exact form"):
        log_probs(exact, [[1]])
    (tree,) = pack_rows([[1, 2]])
    with pytest.raises(ValueError, match="of_nodes: expected an entry for each of 2 nodes"):
        tree.unpack(np.zeros(3))
