"""Log-probabilities of rows by their prefix tree: those of separate rows, and their gradients."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from labs.training import log_probs
from treeattn_llama import Llama

pytestmark = pytest.mark.slow

LLAMAS = Path(__file__).parents[3] / "llama" / "tests" / "data" / "llamas"
VOCABULARY = 96
ROWS = 6
LONGEST = 12


@functools.partial(jax.jit, static_argnums=0)
def separately(model, weights, tokens, lengths, pull):
    """(log-probabilities, the gradient of their sum weighted by `pull`) of each row alone,
    padded at its end, because no token sees later tokens."""

    def by_rows(weights):
        logits = dataclasses.replace(model, weights=weights).logits(tokens)
        each = jax.nn.log_softmax(logits)[:, :-1]
        each = jnp.take_along_axis(each, tokens[:, 1:, None], axis=2)[..., 0]
        return jnp.where(jnp.arange(1, tokens.shape[1]) < lengths[:, None], each, 0)

    found, back = jax.vjp(by_rows, weights)
    return found, back(pull)[0]


def random_rows(rng):
    """Rows that share prefixes of any length; at least one begins another, or is equal to it."""
    rows = [rng.integers(0, VOCABULARY, LONGEST)]
    while len(rows) < ROWS - 1:
        stem = rows[rng.integers(len(rows))][: rng.integers(0, LONGEST)]
        rest = rng.integers(0, VOCABULARY, rng.integers(0, LONGEST - len(stem)) + 1)
        rows.append(np.concatenate([stem, rest]))
    rows.append(rows[rng.integers(len(rows))][: rng.integers(1, LONGEST)])
    return [rows[i] for i in rng.permutation(ROWS)]


def compare(model, alone, rng, atol):
    """Compare `model` with `alone`, row by row. Random numbers weight the log-probabilities, so the
    gradients of every loss agree."""
    rows = random_rows(rng)
    pull = rng.normal(size=(ROWS, LONGEST - 1)).astype(model.weights.norm.dtype)
    weights = model.weights
    if model.config.tied:  # the embedding is used twice, and `head` is not read
        weights = weights._replace(head=jnp.full_like(weights.head, jnp.nan))
    found, back = jax.vjp(lambda weights: log_probs(model, rows, weights=weights), weights)
    change = back(pull)[0]
    assert found.dtype == pull.dtype and not np.any(change.frequencies)  # which are no weights

    tied = weights._replace(head=weights.embedding) if model.config.tied else weights
    lengths = np.array([len(row) for row in rows])
    tokens = np.stack([np.pad(row, (0, LONGEST - len(row))) for row in rows]).astype(np.int32)
    expected, expected_change = separately(alone, tied, tokens, lengths, pull)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    if model.config.tied:
        both = expected_change.embedding + expected_change.head
        expected_change = expected_change._replace(embedding=both, head=change.head)
        assert not np.any(change.head)
    expected_change = expected_change._replace(frequencies=change.frequencies)
    for a, b in zip(jax.tree.leaves(change), jax.tree.leaves(expected_change), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "shape"), [("biased", None), ("llama2", (3,)), ("llama32", (2, 4))]
)
def test_log_probabilities_and_their_gradients(name, shape):
    """Biases, no shared key heads, tied. On one device, three, and a mesh of two axes."""
    with jax.enable_x64(True):
        model = alone = Llama.load(LLAMAS / name, dtype=np.float64)
        if shape:
            devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
            model = alone.on(Mesh(devices, ("node", "core")[: len(shape)]))
        rng = np.random.default_rng(0)
        for _ in range(6):
            compare(model, alone, rng, 1e-10)


def test_in_float32():
    with jax.enable_x64(False):
        model = Llama.load(LLAMAS / "llama3")
        compare(model, model, np.random.default_rng(1), 2e-5)


@pytest.mark.usefixtures("unchecked")
def test_small_and_wrong_rows():
    """No rows, rows of one token, which predict nothing, and unknown ids."""
    model = Llama.load(LLAMAS / "llama3")
    assert log_probs(model, [[3], [4]]).shape == (2, 0)
    assert log_probs(model, []).shape[0] == 0
    with pytest.raises(ValueError, match="rows: expected ids below 96, got 96"):
        log_probs(model, [[1, 96]])
