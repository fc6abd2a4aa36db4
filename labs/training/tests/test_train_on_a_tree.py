"""The example of a whole run of training: rows packed as trees, and the same rows by themselves."""

import types
from pathlib import Path

import jax
import pytest

from labs.training import benchmark, train_on_a_tree
from treeattn_llama import Llama

pytestmark = pytest.mark.slow

LLAMAS = Path(__file__).parents[3] / "llama" / "tests" / "data" / "llamas"


class EvenTokens:
    """In place of questions and rewards: prompts that begin alike, and how many ids are even."""

    def ask(self, rng):
        return [5, 6, 7, *rng.integers(3, 96, 3).tolist()], None

    def reward(self, answer, _):
        return sum(token % 2 == 0 for token in answer) / len(answer)


def test_training_on_a_tree_and_by_rows_gives_the_same_weights():
    """The whole run, samples included, with a small model in float64; and the benchmark's step."""
    with jax.enable_x64(True):
        model = Llama.load(LLAMAS / "llama32", dtype="float64")
        assert model.config.tied
        sizes = {"rate": 1e-2, "asked": 2, "group": 3}
        weights, steps = train_on_a_tree.train(model, EvenTokens(), 3, ("tree", "rows"), **sizes)
        before = train_on_a_tree.learned(model)
        found = train_on_a_tree.compared(before, weights["tree"], weights["rows"])
        timed = benchmark.measure(model, [[1, 2, 3], [1, 2], [4, 5, 6, 7]])
    assert found["largest_difference"] < 1e-10 and found["largest_change"] > 1e-2
    assert found["relative_difference"] < 1e-10
    assert all(0 < step["reward"] < 1 and step["nodes"] < step["row_tokens"] for step in steps)
    assert timed["tokens"] == {"tree": 7, "packed": 9, "padded": 12}
    assert min(timed["seconds"].values()) > 0 and min(timed["temporary_bytes"].values()) > 0


def test_sums_are_rewarded_for_being_right():
    sums = train_on_a_tree.Sums(None)
    sums.tokenizer = types.SimpleNamespace(decode=lambda text: text)
    said = ["12", " 12\n", "13", "9", "1212", "twelve", "", "-12"]
    rewards = [sums.reward(text, 12) for text in said]
    assert rewards == [1, 1, 1 / 2, 1 / 4, 0, 0, 0, 0]
