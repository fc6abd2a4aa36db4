"""Reinforcement learning on a prefix tree: the packaged model learns to add, in some minutes.

    python -m labs.training.train_on_a_tree                # three minutes on two quiet cores
    python -m labs.training.train_on_a_tree --rows --steps 5    # and beside it by separate rows

A step asks some questions, samples a group of answers to each, and rewards them by what they are:
1 for the right number, less for others. An answer's advantage is its reward less the mean of its
group, over the group's standard deviation (GRPO, with one update for the samples of a step: the
ratio of probabilities is 1, and there is nothing to clip).

The questions begin alike, and the answers to one of them do: 32 rows of some 1,840 tokens are a
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

SECONDS_A_STEP = 3.2  # on two cores of a server, and by separate rows so many more:
SECONDS_BY_ROWS = 15
SECONDS_TO_COMPILE = 40


class Sums:
    """Sums of two digits, after two examples; what is asked, and how good an answer is."""

    system = "Answer with a number."
    examples = (("2 + 3", "5"), ("6 + 1", "7"))

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def ask(self, rng: np.random.Generator) -> tuple[list[int], int]:
        """(the prompt's ids, the answer)."""
        a, b = rng.integers(1, 10, 2)
        said = [{"role": "system", "content": self.system}]
        for question, answer in (*self.examples, (f"{a} + {b}", None)):
            said.append({"role": "user", "content": question})
            if answer:
                said.append({"role": "assistant", "content": answer})
        return self.tokenizer.chat(said), int(a + b)

    def reward(self, answer: list[int], right: int) -> float:
        """1 for the right number and nothing else, 1/2 for one that is off by 1, 1/3 by 2, …; 0
        for what is no number."""
        said = self.tokenizer.decode(answer).strip()
        return 1 / (1 + abs(int(said) - right)) if said.isdecimal() and len(said) < 4 else 0.0


class Batch(NamedTuple):
    """The texts of a step: rows of token ids, of the same lengths, and what training brings along.

    weights: (rows, longest − 1), the advantage of each token of an answer over the number of such
             tokens; 0 elsewhere
    rewards: (rows,)
    """

    rows: list[list[int]]
    weights: np.ndarray
    rewards: np.ndarray


def sample(model: Llama, task, step: int, options) -> Batch:
    """Questions, and a group of answers to each."""
    asked = [task.ask(np.random.default_rng([options.seed, step, i])) for i in range(options.asked)]
    asked = [question for question in asked for _ in range(options.group)]
    answers = generate(
        model,
        [prompt for prompt, _ in asked],
        max_new_tokens=options.new_tokens,
        temperature=1.0,
        key=jax.random.fold_in(jax.random.key(options.seed), step),
    ).tokens
    rewards = [
        task.reward(answer, right) for answer, (_, right) in zip(answers, asked, strict=True)
    ]
    rewards = np.array(rewards)
    groups = rewards.reshape(options.asked, options.group)
    off = groups - groups.mean(axis=1, keepdims=True)
    advantages = (off / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)
    rows = [prompt + answer for (prompt, _), answer in zip(asked, answers, strict=True)]
    weights = np.zeros((len(rows), max(map(len, rows)) - 1))
    for line, row, answer, advantage in zip(weights, rows, answers, advantages, strict=True):
        line[len(row) - 1 - len(answer) : len(row) - 1] = advantage
    return Batch(rows, weights / sum(map(len, answers)), rewards)


def loss_of(found, weights):
    """−Σ weights · ratio of the probabilities now to those when it was sampled, which is now."""
    ratio = jnp.exp(found - jax.lax.stop_gradient(found))
    return -(jnp.asarray(weights, found.dtype) * ratio).sum()


# What learns: the weights but the rotary frequencies, and one matrix where embedding and output
# matrix are the same.


def learned(model: Llama):
    """A copy of them, for the update may give up what it is given."""
    weights = model.weights._replace(frequencies=None)
    weights = weights._replace(head=None) if model.config.tied else weights
    return jax.tree.map(jnp.copy, weights)


def with_learned(model: Llama, weights) -> Llama:
    """The model with these."""
    weights = weights._replace(frequencies=model.weights.frequencies)
    weights = weights._replace(head=weights.embedding) if model.config.tied else weights
    return dataclasses.replace(model, weights=weights)


def gradients_by_tree(model: Llama, weights, batch: Batch):
    def loss(weights):
        now = with_learned(model, weights).weights
        return loss_of(log_probs(model, batch.rows, weights=now), batch.weights)

    return jax.grad(loss)(weights)


def gradients_by_rows(model: Llama, weights, batch: Batch, at_once: int = 8):
    """The same without a tree: all tokens of some rows at a time, and the gradients added up."""

    def loss(weights, tokens, of_tokens):
        each = jax.nn.log_softmax(with_learned(model, weights).logits(tokens)[:, :-1])
        found = jnp.take_along_axis(each, tokens[:, 1:, None], axis=2)[..., 0]
        return loss_of(found, of_tokens)

    longest = batch.weights.shape[1] + 1
    tokens = np.stack([np.pad(row, (0, longest - len(row))) for row in batch.rows])
    total = None
    for first in range(0, len(tokens), at_once):
        some = slice(first, first + at_once)
        part = jax.grad(loss)(weights, tokens[some], batch.weights[some])
        total = part if total is None else add(total, part)
    return total


@functools.partial(jax.jit, donate_argnums=0)
def add(a, b):
    return jax.tree.map(jnp.add, a, b)


class Learner:
    """Weights, an optimizer, and how long its updates took."""

    def __init__(self, model: Llama, gradients, optimizer):
        self.model = model
        self.gradients = gradients
        self.weights = learned(model)
        self.moments = optimizer.init(self.weights)
        self.seconds = []

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(weights, moments, change):
            updates, moments = optimizer.update(change, moments, weights)
            return optax.apply_updates(weights, updates), moments

        self.update = update

    def learn(self, batch: Batch) -> None:
        began = time.perf_counter()
        change = self.gradients(self.model, self.weights, batch)
        self.weights, self.moments = self.update(self.weights, self.moments, change)
        jax.block_until_ready(self.weights)
        self.seconds.append(time.perf_counter() - began)


def train(model: Llama, task, options):
    """(a Learner by trees, one by rows or None, what happened in each step)."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(options.rate))
    by_tree = Learner(model, gradients_by_tree, optimizer)
    by_rows = Learner(model, gradients_by_rows, optimizer) if options.rows else None
    steps = []
    with tqdm(range(options.steps), unit="step", disable=options.quiet) as bar:
        for step in bar:
            began = time.perf_counter()
            batch = sample(with_learned(model, by_tree.weights), task, step, options)
            sampling = time.perf_counter() - began
            by_tree.learn(batch)
            if by_rows:
                by_rows.learn(batch)
            (tree,) = pack_rows(batch.rows)
            happened = {
                "reward": float(batch.rewards.mean()),
                "right": float((batch.rewards == 1).mean()),
                "nodes": len(tree.tokens),
                "row_tokens": tree.row_tokens,
                "sampling_seconds": round(sampling, 2),
                "update_seconds": round(by_tree.seconds[-1], 2),
            }
            if by_rows:
                happened["update_seconds_by_rows"] = round(by_rows.seconds[-1], 2)
            steps.append(happened)
            store(options.out, {"steps": steps})
            bar.set_postfix(reward=f"{happened['reward']:.2f}", right=f"{happened['right']:.0%}")
    return by_tree, by_rows, steps


def store(path: Path, found: dict) -> None:
    """The curve so far: a run that is broken off has one, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compared(by_tree: Learner, by_rows: Learner) -> dict[str, float]:
    """The largest difference of a weight between the two, the largest that one has moved, and all
    differences' norm over that of all changes."""

    @jax.jit
    def largest_and_norm(a, b):
        off = jax.tree.map(jnp.subtract, a, b)
        each = [jnp.abs(x).max() for x in jax.tree.leaves(off)]
        squares = [jnp.vdot(x, x) for x in jax.tree.leaves(off)]
        return jnp.stack(each).max(), jnp.sqrt(sum(squares))

    difference, norm = map(float, largest_and_norm(by_tree.weights, by_rows.weights))
    change, whole = map(float, largest_and_norm(by_tree.weights, learned(by_tree.model)))
    return {
        "largest_difference": difference,
        "largest_change": change,
        "relative_difference": norm / whole,
    }


def arguments(words=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=40)
    add("--asked", type=int, default=4, help="questions of a step")
    add("--group", type=int, default=8, help="answers to each")
    add("--new-tokens", type=int, default=4, help="of an answer, at most")
    add("--rate", type=float, default=2e-5, help="of AdamW")
    add("--seed", type=int, default=0)
    add("--rows", action="store_true", help="learn by separate rows, too, and compare the weights")
    add("--quiet", action="store_true", help="without a progress bar")
    add("--out", type=Path, default=Path("build/train_on_a_tree.json"))
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    a_step = SECONDS_A_STEP + (SECONDS_BY_ROWS if options.rows else 0)
    minutes = (options.steps * a_step + SECONDS_TO_COMPILE) / 60
    print(f"{options.steps} steps: about {minutes:.0f} minutes on two quiet cores", flush=True)
    model = Llama.load()
    by_tree, by_rows, steps = train(model, Sums(model.tokenizer), options)
    found = {"steps": steps}
    quarter = max(len(steps) // 4, 1)
    for when, some in (("first", steps[:quarter]), ("last", steps[-quarter:])):
        right = np.mean([step["right"] for step in some])
        print(f"right in the {when} {quarter} steps: {right:.0%}")
    saved = sum(step["row_tokens"] for step in steps) / sum(step["nodes"] for step in steps)
    print(f"the rows have {saved:.1f} times as many tokens as their trees have nodes")
    if by_rows:
        found |= compared(by_tree, by_rows)
        times = np.median(by_rows.seconds) / np.median(by_tree.seconds)
        print(f"an update by separate rows takes {times:.1f} times as long")
        print(
            f"the weights differ by at most {found['largest_difference']:.1e}; "
            f"training moved them by up to {found['largest_change']:.1e}; "
            f"all differences together are {found['relative_difference']:.1e} of all changes"
        )
    store(options.out, found)
    print(f"the curve: {options.out}")


if __name__ == "__main__":
    main()
