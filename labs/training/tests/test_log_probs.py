"""Log-probabilities of rows by their prefix tree: the losses and gradients of separate rows."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from labs.training import log_probs, pack_rows
from treeattn_llama import Config, Layer, Llama, Weights

pytestmark = pytest.mark.slow

LLAMAS = Path(__file__).parents[3] / "llama" / "tests" / "data" / "llamas"
ROWS = 6
LONGEST = 12


@pytest.fixture(scope="module", autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    return Llama.load(LLAMAS / "llama3", dtype=np.float64)


def random_llama(rng):
    """Of any shape, in float64."""
    d, f, vocabulary = (int(n) for n in rng.integers(4, 24, 3))
    kv_heads, group, half, layers = (int(n) for n in rng.integers(1, 4, 4))
    q = kv_heads * group * 2 * half
    kv = kv_heads * 2 * half
    tied, biased = (bool(x) for x in rng.integers(0, 2, 2))
    config = Config(
        vocabulary=vocabulary,
        width=d,
        layers=layers,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=2 * half,
        mlp_width=f,
        context=LONGEST,
        norm_epsilon=1e-5,
        rotary_base=100.0,
        tied=tied,
        attention_bias=biased,
        mlp_bias=biased,
    )

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]))

    def layer():
        matrices = normal(q + 2 * kv, d), normal(d, q), 1 + normal(d), normal(2 * f, d)
        biases = (normal(n) for n in (q + 2 * kv, d, 2 * f, d)) if biased else ()
        return Layer(1 + normal(d), *matrices, normal(d, f), *biases)

    embedding = normal(vocabulary, d) * 3
    head = embedding if tied else normal(vocabulary, d) * 3
    frequencies = jnp.asarray(100.0 ** -(np.arange(half) / half))
    each = tuple(layer() for _ in range(layers))
    return Llama(config, Weights(embedding, each, 1 + normal(d), head, frequencies))


def random_rows(rng, vocabulary):
    """Six rows that share prefixes of any length: equal ones, and prefixes of one another, too.

    Their trees have 17 to 32 nodes, which is one size to compile for.
    """
    while True:
        rows = [rng.integers(0, vocabulary, LONGEST)]
        while len(rows) < ROWS:
            stem = rows[rng.integers(len(rows))][: rng.integers(0, LONGEST + 1)]
            room = LONGEST - len(stem)
            rest = rng.integers(0, vocabulary, rng.integers(0, room + 1))
            rows.append(np.concatenate([stem, rest, rng.integers(0, vocabulary, 1)])[:LONGEST])
        if 16 < len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}) <= 32:
            return [rows[i] for i in rng.permutation(ROWS)]


def separately(model, weights, rows):
    """(log-probabilities, entropies) by a pass over every row alone, its end filled up: nobody
    sees what comes later."""
    return _separately(model, weights, *filled(rows))


def filled(rows):
    """(tokens (rows, longest), lengths (rows,))"""
    lengths = np.array([len(row) for row in rows])
    tokens = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows])
    return tokens.astype(np.int32), lengths


@functools.partial(jax.jit, static_argnums=0)
def _separately(model, weights, tokens, lengths):
    if model.config.tied:
        weights = weights._replace(head=weights.embedding)
    logits = dataclasses.replace(model, weights=weights).logits(tokens)
    each = jax.nn.log_softmax(logits)[:, :-1]
    entropies = -(jnp.exp(each) * each).sum(axis=2)
    each = jnp.take_along_axis(each, tokens[:, 1:, None], axis=2)[..., 0]
    there = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
    return jnp.where(there, each, 0), jnp.where(there, entropies, 0)


# Losses of the rows' log-probabilities and entropies, with what training brings along:
# (rows, longest − 1) each.


def mean_over_tokens(found, entropies, there, advantages, old):
    return -jnp.where(there, found, 0).sum() / there.sum()


def mean_over_rows(found, entropies, there, advantages, old):
    return -(jnp.where(there, found, 0).sum(axis=1) / jnp.maximum(there.sum(axis=1), 1)).mean()


def grpo(found, entropies, there, advantages, old):
    """Clipped ratios to the log-probabilities at the time of sampling."""
    ratio = jnp.exp(jnp.where(there, found - old, 0))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -jnp.where(there, gain, 0).sum() / there.sum()


def distillation(found, entropies, there, advantages, old):
    """Squared distances to a teacher's log-probabilities, with a reward for entropy."""
    distance = jnp.where(there, (found - old) ** 2, 0) - 0.1 * jnp.where(there, entropies, 0)
    return distance.sum() / there.sum()


LOSSES = mean_over_tokens, mean_over_rows, grpo, distillation


def some_data(rng, rows):
    lengths = np.array([len(row) for row in rows])
    there = np.arange(1, LONGEST) < lengths[:, None]
    advantages = rng.normal(size=(ROWS, 1))
    old = -4 + rng.normal(size=(ROWS, LONGEST - 1)) / 5
    return there, advantages, old


@functools.partial(jax.jit, static_argnums=0)
def _of_loss(loss, found, data):
    return jax.value_and_grad(lambda found: loss(*found, *data))(found)


@functools.partial(jax.jit, static_argnums=0)
def _pulled_back(model, weights, rows, cotangents):
    """(what `_separately` returns, the gradients): one program for both."""
    found, back = jax.vjp(lambda weights: _separately(model, weights, *rows), weights)
    return found, back(cotangents)[0]


def expected_gradients(model, rows, losses, data, weights=None):
    """[(loss, gradients), …] by separate rows, which are compiled once for all losses."""
    tokens, lengths = filled(rows)
    weights = model.weights if weights is None else weights
    none = np.zeros((ROWS, LONGEST - 1))
    found, _ = _pulled_back(model, weights, (tokens, lengths), (none, none))
    answers = []
    for loss in losses:
        value, cotangents = _of_loss(loss, found, data)
        _, gradients = _pulled_back(model, weights, (tokens, lengths), cotangents)
        answers.append((value, gradients))
    return answers


def gradients_by_trees(model, rows, losses, data, **options):
    """The same by their tree: one pass forward, and one back for each loss."""
    found, back = jax.vjp(
        lambda weights: log_probs(model, rows, weights=weights, return_entropies=True, **options),
        model.weights,
    )
    assert found[0].shape == (ROWS, LONGEST - 1)
    answers = []
    for loss in losses:
        value, cotangents = _of_loss(loss, found, data)
        answers.append((value, back(cotangents)[0]))
    return answers


def same(found, expected, atol=1e-10):
    """Every loss and gradient; not the rotary frequencies', which are no weights."""
    for one, other in zip(found, expected, strict=True):
        one, other = (x[1]._replace(frequencies=x[0]) for x in (one, other))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", (1, 4, 5))
def test_losses_and_gradients(shape):
    """Of models of random shape and random trees, and the gradients of all weights."""
    rng = np.random.default_rng(shape)
    model = random_llama(rng)
    for case in range(12):
        rows = random_rows(rng, model.config.vocabulary)
        data = some_data(rng, rows)
        losses = LOSSES[case % 4 :][:1]
        found = gradients_by_trees(model, rows, losses, data)
        same(found, expected_gradients(model, rows, losses, data))


def test_several_trees(model):
    rng = np.random.default_rng(7)
    rows = random_rows(rng, model.config.vocabulary)
    data = some_data(rng, rows)
    found = gradients_by_trees(model, rows, LOSSES, data, max_tokens=16)
    same(found, expected_gradients(model, rows, LOSSES, data))


MESHES = {"3": (3,), "2 × 4": (2, 4)}


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_on_devices(model, shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    dealt = model.on(Mesh(devices, ("node", "core")[: len(shape)]))
    rng = np.random.default_rng(8)
    rows = random_rows(rng, model.config.vocabulary)
    data = some_data(rng, rows)
    found = gradients_by_trees(dealt, rows, LOSSES[2:], data)
    same(found, expected_gradients(model, rows, LOSSES[2:], data))


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optax.sgd(1e-1)], ids=["AdamW", "SGD"])
def test_ten_steps(model, optimizer):
    """Not the first step's loss alone: the weights after one step are the same, and after ten."""
    rng = np.random.default_rng(9)
    batches = [random_rows(rng, model.config.vocabulary) for _ in range(10)]

    def by_trees(weights, rows, data):
        def loss(weights):
            found = log_probs(model, rows, weights=weights)
            return grpo(found, None, *data)

        return jax.grad(loss)(weights)

    def by_rows(weights, rows, data):
        return expected_gradients(model, rows, [grpo], data, weights)[0][1]

    update = jax.jit(optimizer.update)
    runs = []
    for gradient in (by_trees, by_rows):
        weights = model.weights
        moments = optimizer.init(weights)
        runs.append([])
        for i, rows in enumerate(batches):
            data = some_data(np.random.default_rng(i), rows)
            change = gradient(weights, rows, data)
            change = change._replace(frequencies=jnp.zeros_like(weights.frequencies))
            updates, moments = update(change, moments, weights)
            weights = optax.apply_updates(weights, updates)
            weights = weights._replace(frequencies=model.weights.frequencies)
            runs[-1].append(weights)
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), runs[0][-1], model.weights)
    assert max(jax.tree.leaves(moved)) > 1e-2
    for after in (0, 9):
        ends = [jax.tree.leaves(run[after]) for run in runs]
        for a, b in zip(*ends, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_a_head_that_is_the_embedding():
    """Its gradient is the embedding's, of both uses; `head` is not read, as `_separately` does."""
    model = random_llama(np.random.default_rng(1))
    assert model.config.tied
    weights = model.weights._replace(head=jnp.full_like(model.weights.head, jnp.nan))
    rows = random_rows(np.random.default_rng(10), model.config.vocabulary)
    change = jax.grad(lambda weights: log_probs(model, rows, weights=weights).sum())(weights)
    assert np.asarray(change.embedding).any()
    assert not np.asarray(change.head).any() and not np.asarray(change.frequencies).any()


def test_the_packaged_model_in_float32():
    """A loss, and its gradients: each array of weights to a thousandth of its largest gradient."""
    texts = ["The sun is a star.", "The sun is a ball of", "The sun rises", "The sun is a star."]
    with jax.enable_x64(False):
        model = Llama.load()
        rows = [model.tokenizer.encode(text) for text in texts]

        def by_rows(weights):
            weights = weights._replace(head=weights.embedding)
            return _separately.__wrapped__(model, weights, *filled(rows))[0]

        found, expected = (
            jax.value_and_grad(lambda weights, of=of: (of(weights) ** 2).mean())(model.weights)
            for of in (lambda weights: log_probs(model, rows, weights=weights), by_rows)
        )
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        pairs = zip(
            *(jax.tree.leaves(x[1]._replace(frequencies=None)) for x in (found, expected)),
            strict=True,
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max())


def test_small_rows(model):
    """No rows, rows of one token, which predict nothing, and one row."""
    assert log_probs(model, []).shape == (0, 0)
    assert log_probs(model, [[3], [4]]).shape == (2, 0)
    found = log_probs(model, [[1, 2, 3], [1]])
    expected, _ = separately(model, model.weights, [[1, 2, 3], [1]])
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_node_for_each_prefix(model):
    """What a pass computes: the nodes, and not the tokens of the rows, which read them."""
    stem = list(range(8))
    (tree,) = pack_rows([[*stem, 10 + i] for i in range(4)])
    assert (len(tree.tokens), tree.row_tokens) == (12, 36)
    of_rows = tree.unpack(np.arange(12.0))
    np.testing.assert_array_equal(of_rows[:, :8], np.tile(np.arange(8.0), (4, 1)))
    read = jax.grad(lambda of_nodes: tree.unpack(of_nodes).sum())(jnp.arange(12.0))
    np.testing.assert_array_equal(read, [4.0] * 8 + [1.0] * 4)


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls(model):
    with pytest.raises(ValueError, match="rows: expected ids below 96, got 96"):
        log_probs(model, [[1, 96]])
    with pytest.raises(ValueError, match=r"rows\[1\]: expected at least one token"):
        log_probs(model, [[1], []])
    (tree,) = pack_rows([[1, 2]])
    with pytest.raises(ValueError, match="of_nodes: expected an entry for each of 2 nodes"):
        tree.unpack(np.zeros(3))
