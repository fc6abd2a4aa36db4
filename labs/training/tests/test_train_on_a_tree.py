"""The example of a whole run of training: rows packed as trees, and the same rows by themselves."""

import json
import types
from pathlib import Path

import jax
import pytest

from labs.training import train_on_a_tree
from treeattn_llama import Llama

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]


class EvenTokens:
    """Stands for questions and rewards: prompts that begin alike, and how many ids are even."""

    def ask(self, rng):
        return [5, 6, 7, *rng.integers(3, 96, 3).tolist()], None

    def reward(self, answer, _):
        return sum(token % 2 == 0 for token in answer) / len(answer)


def test_training_on_a_tree_and_by_rows_gives_the_same_weights(tmp_path):
    """The whole run, samples included, with a small model in float64."""
    words = ["--steps", "3", "--asked", "2", "--group", "3", "--rate", "1e-2", "--rows", "--quiet"]
    words += ["--out", str(tmp_path / "curve.json")]
    with jax.enable_x64(True):
        model = Llama.load(
            REPOSITORY / "llama" / "tests" / "data" / "llamas" / "llama32", dtype="float64"
        )
        assert model.config.tied
        by_tree, by_rows, steps = train_on_a_tree.train(
            model, EvenTokens(), train_on_a_tree.arguments(words)
        )
        found = train_on_a_tree.compared(by_tree, by_rows)
    assert found["largest_difference"] < 1e-10 and found["largest_change"] > 1e-2
    assert found["relative_difference"] < 1e-10
    assert all(0 < step["reward"] < 1 and step["nodes"] < step["row_tokens"] for step in steps)
    assert json.loads((tmp_path / "curve.json").read_text()) == {"steps": steps}


def test_sums_are_rewarded_for_being_right():
    sums = train_on_a_tree.Sums(None)
    sums.tokenizer = types.SimpleNamespace(decode=lambda text: text)
    said = ["12", " 12\n", "13", "9", "1212", "twelve", "", "-12"]
    rewards = [sums.reward(text, 12) for text in said]
    assert rewards == [1, 1, 1 / 2, 1 / 4, 0, 0, 0, 0]
