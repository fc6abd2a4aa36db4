"""What calls take: each wrong argument raises a ValueError or a TypeError that names it."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import Llama
from treeattn.llama import inputs

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
