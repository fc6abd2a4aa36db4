"""Reinforcement learning on a prefix tree: the packaged model learns to add, in some minutes.

    python -m labs.training.train_on_a_tree                     # three minutes on two quiet cores
    python -m labs.training.train_on_a_tree --rows --steps 5    # two, and by separate rows as well

A step asks some questions, samples a group of answers to each, and rewards them: 1 for the right
number, less for others. An answer's advantage is its reward less the mean of its group, over the
group's standard deviation (GRPO, with one update for the samples of a step: the ratio of
probabilities is 1, and there is nothing to clip).

The questions begin alike, and so do the answers to a question: 32 rows of some 1,840 tokens are a
tree of about 100 nodes. `generate` reads each prompt once for its group, and `log_probs` computes
each node once. With --rows a second copy of the model learns from the same samples by all tokens of
all rows, and the two are compared.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from labs.training.log_probs import log_probs
from labs.training.rows import pack_rows
from treeattn_llama import Llama, generate

EXAMPLES = (("2 + 3", "5"), ("6 + 1", "7"))
AT_ONCE = 8  # rows, if they are computed separately
NEW_TOKENS = 4  # of an answer, at most


class Sums:
    """Questions for sums of two digits, after two examples, and the rewards of answers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def ask(self, rng: np.random.Generator) -> tuple[list[int], int]:
        """(the prompt's ids, the answer)."""
        a, b = rng.integers(1, 10, 2)
        chat = [{"role": "system", "content": "Answer with a number."}]
        for question, answer in EXAMPLES:
            chat.append({"role": "user", "content": question})
            chat.append({"role": "assistant", "content": answer})
        chat.append({"role": "user", "content": f"{a} + {b}"})
        return self.tokenizer.chat(chat), int(a + b)

    def reward(self, answer: list[int], right: int) -> float:
        """1 for the right number alone, 1/2 for one that is off by 1, 1/3 by 2, …; 0 for text that
        is not a number."""
        text = self.tokenizer.decode(answer).strip()
        return 1 / (1 + abs(int(text) - right)) if text.isdecimal() and len(text) < 4 else 0.0


class Batch(NamedTuple):
    """The rows of a step, as token ids, with their weights and rewards.

    weights: (rows, longest − 1), the advantage of each answer token over the number of all answer
             tokens; 0 elsewhere
    rewards: (rows,)
    """

    rows: list[list[int]]
    weights: np.ndarray
    rewards: np.ndarray


def sample(model: Llama, task, step: int, asked: int, group: int) -> Batch:
    """`asked` questions, and a group of answers to each."""
    questions = [task.ask(np.random.default_rng([0, step, i])) for i in range(asked)]
    questions = [question for question in questions for _ in range(group)]
    prompts = [prompt for prompt, _ in questions]
    key = jax.random.fold_in(jax.random.key(0), step)
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "key": key}
    answers = generate(model, prompts, **options).tokens
    pairs = zip(answers, questions, strict=True)
    rewards = np.array([task.reward(answer, right) for answer, (_, right) in pairs])
    groups = rewards.reshape(asked, group)
    off = groups - groups.mean(axis=1, keepdims=True)
    advantages = (off / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    weights = np.zeros((len(rows), max(map(len, rows)) - 1))
    for line, row, prompt, advantage in zip(weights, rows, prompts, advantages, strict=True):
        line[len(prompt) - 1 : len(row) - 1] = advantage
    return Batch(rows, weights / sum(map(len, answers)), rewards)


def loss_of(found, weights):
    """−Σ weights · (probability over its value at sampling, which is the same number)."""
    ratio = jnp.exp(found - jax.lax.stop_gradient(found))
    return -(jnp.asarray(weights, found.dtype) * ratio).sum()


# All weights but the rotary frequencies learn. If the output matrix is the embedding, the model
# has one matrix, and one copy of it learns.


def learned(model: Llama):
    """A copy of the weights that learn, because an update donates its arrays."""
    weights = model.weights._replace(frequencies=None)
    weights = weights._replace(head=None) if model.config.tied else weights
    return jax.tree.map(jnp.copy, weights)


def with_learned(model: Llama, weights) -> Llama:
    """The model with these weights."""
    weights = weights._replace(frequencies=model.weights.frequencies)
    weights = weights._replace(head=weights.embedding) if model.config.tied else weights
    return dataclasses.replace(model, weights=weights)


def gradients_by_tree(model: Llama, weights, batch: Batch):
    """The gradients of the batch's loss, each node of its tree computed once."""

    def loss(weights):
        now = with_learned(model, weights).weights
        return loss_of(log_probs(model, batch.rows, weights=now), batch.weights)

    return jax.grad(loss)(weights)


def gradients_by_rows(model: Llama, weights, batch: Batch):
    """The same gradients without a tree: all tokens of some rows at a time, added up."""

    def loss(weights, tokens, of_tokens):
        each = jax.nn.log_softmax(with_learned(model, weights).logits(tokens)[:, :-1])
        found = jnp.take_along_axis(each, tokens[:, 1:, None], axis=2)[..., 0]
        return loss_of(found, of_tokens)

    longest = batch.weights.shape[1] + 1
    tokens = np.stack([np.pad(row, (0, longest - len(row))) for row in batch.rows])
    parts = [slice(first, first + AT_ONCE) for first in range(0, len(tokens), AT_ONCE)]
    each = (jax.grad(loss)(weights, tokens[part], batch.weights[part]) for part in parts)
    return functools.reduce(add, each)


@functools.partial(jax.jit, donate_argnums=0)
def add(a, b):
    return jax.tree.map(jnp.add, a, b)


WAYS = {"tree": gradients_by_tree, "rows": gradients_by_rows}


def train(model: Llama, task, steps: int, ways=("tree",), *, rate=2e-5, asked=4, group=8):
    """({way: the learned weights}, a record of each step). The first way's model samples."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    weights = {way: learned(model) for way in ways}
    moments = {way: optimizer.init(weights[way]) for way in ways}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights, moments, change):
        updates, moments = optimizer.update(change, moments, weights)
        return optax.apply_updates(weights, updates), moments

    happened = []
    for step in tqdm(range(steps), unit="step"):
        batch = sample(with_learned(model, weights[ways[0]]), task, step, asked, group)
        tree = pack_rows(batch.rows)
        rewards = {"reward": batch.rewards.mean(), "right": float((batch.rewards == 1).mean())}
        happened.append({**rewards, "nodes": len(tree.tokens), "row_tokens": tree.row_tokens})
        for way in ways:
            began = time.perf_counter()
            change = WAYS[way](model, weights[way], batch)
            weights[way], moments[way] = update(weights[way], moments[way], change)
            jax.block_until_ready(weights[way])
            happened[-1][f"update_seconds_by_{way}"] = round(time.perf_counter() - began, 2)
    return weights, happened


def compared(before, by_tree, by_rows) -> dict[str, float]:
    """The largest difference of a weight between the ways, the largest change of a weight by
    training, and the norm of all differences over the norm of all changes."""
    off, moved = (jax.tree.map(jnp.subtract, by_tree, x) for x in (by_rows, before))
    largest = [max(float(abs(x).max()) for x in jax.tree.leaves(tree)) for tree in (off, moved)]
    relative = float(optax.tree.norm(off) / optax.tree.norm(moved))
    names = "largest_difference", "largest_change", "relative_difference"
    return dict(zip(names, (*largest, relative), strict=True))


def store(path: Path, found: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", action="store_true", help="learn by separate rows as well")
    options = parser.parse_args()
    model = Llama.load()
    ways = ("tree", "rows") if options.rows else ("tree",)
    weights, steps = train(model, Sums(model.tokenizer), options.steps, ways)
    found = {"steps": steps}
    print("right answers by step:", *(f"{step['right']:.0%}" for step in steps))
    if options.rows:
        found |= compared(learned(model), weights["tree"], weights["rows"])
        print(
            f"the weights differ by at most {found['largest_difference']:.0e}; "
            f"training moved them by up to {found['largest_change']:.0e}"
        )
    path = Path("build/train_on_a_tree.json")
    store(path, found)
    print(f"all steps: {path}")


if __name__ == "__main__":
    main()
