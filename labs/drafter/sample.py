"""Texts of the packaged model itself, and what it thought at each token: a drafter's school.

    python -m labs.drafter.sample build/drafter --tokens 70000

Each row of a batch writes one answer after another, at its own temperature, in its own part of the
cache: one that is over makes room for the next prompt, whose tokens are fed one by one beside the
others' steps. The state at each token and the likeliest tokens after it are kept as they come, so
that no text is read a second time. Shards of some 10,000 tokens go to `shard-*.npz`; a later call
goes on after them.
"""

import argparse
import collections
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from labs.drafter.prompts import prompts
from treeattn import AttentionState
from treeattn_llama import Llama

TEMPERATURES = (0.0, 0.0, 0.3, 0.7, 1.0)  # a prompt's is drawn from these: greedy texts twice
TOP = 32  # of the model's likeliest tokens, kept with their log-probabilities
DRAWN_FROM = 64  # likeliest tokens
SHARD = 10_000  # tokens
LONGEST = 160  # new tokens of a text
CAPACITY = 192  # of prompt and answer together


class Text:
    """A text being written: its prompt, then what came after it, and what the model thought."""

    def __init__(self, prompt: list[int], seen: int, temperature: float, kind: str, held_out: bool):
        self.feed = collections.deque(prompt[seen:])  # what is still to be read
        self.tokens = [prompt[-1]]
        self.states = []
        self.top = []
        self.log = []
        self.temperature = temperature
        self.kind = kind
        self.held_out = held_out

    def arrays(self) -> dict[str, np.ndarray]:
        """tokens (n + 1,), and of the first n: states (n, d), top and log (n, TOP)."""
        return {
            "tokens": np.array(self.tokens, np.int32),
            "states": np.array(self.states, np.float16),
            "top": np.array(self.top, np.uint16),
            "log": np.array(self.log, np.float16),
        }


def attention(q, k, v, lengths, axes) -> AttentionState:
    """Of one query a text, all texts at once: two matrix products, each head's query lying where
    its keys lie. For many short texts that is faster than a kernel for few long ones."""
    b, _, h, d = q.shape
    _, n, groups, _ = k.shape
    q = q.reshape(b, groups, h // groups, 1, d) * jnp.eye(groups)[:, None, :, None] / d**0.5
    scores = jnp.einsum("bhx,bnx->bhn", q.reshape(b, h, -1), k.reshape(b, n, -1))
    scores = jnp.where(jnp.arange(n) < lengths[:, None, None], scores, -jnp.inf)
    top = scores.max(axis=-1)
    p = jnp.exp(scores - jnp.maximum(top, -1e30)[..., None])  # of a text without keys: 0
    out = jnp.einsum("bhn,bnx->bhx", p, v.reshape(b, n, -1)).reshape(b, groups, -1, groups, d)
    out = jnp.moveaxis(jnp.diagonal(out, axis1=1, axis2=3), -1, 1).reshape(b, 1, h, d)
    return AttentionState(top[:, None], p.sum(axis=-1)[:, None], out)


@jax.jit
def likely(logits):
    """((b, 64) likeliest tokens, and their log-probabilities)."""
    log, top = jax.lax.top_k(logits, DRAWN_FROM)
    return top, log - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def last_norm(weight, epsilon: float, x):
    """The model's RMS norm before its head, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def sampled(model: Llama, begin: int, batch: int, seed: int):
    """Finished texts, one after the other, from prompt number `begin` on."""
    tokenizer = model.tokenizer
    rng = np.random.default_rng([seed, begin])
    queue = prompts(seed)
    norm = jax.jit(functools.partial(last_norm, model.weights.norm, model.config.norm_epsilon))
    template = common_beginning(tokenizer.chat("one"), tokenizer.chat("another"))
    number = begin
    cache = model.new_cache(batch, CAPACITY)
    rows = [None] * batch
    chat_rows = [False] * batch
    while True:
        lengths = np.array(cache.lengths)
        for row, text in enumerate(rows):
            if text is not None:
                continue
            prompt = queue[number % len(queue)]
            ids = (tokenizer.chat if prompt.chat else tokenizer.encode)(prompt.text)
            # The template's beginning is in a row's cache after its first chat.
            lengths[row] = len(template) if chat_rows[row] and prompt.chat else 0
            chat_rows[row] = prompt.chat
            temperature = TEMPERATURES[rng.integers(len(TEMPERATURES))]
            rows[row] = Text(ids, lengths[row], temperature, prompt.kind, prompt.held_out)
            number += 1
        cache = cache._replace(lengths=jnp.asarray(lengths))
        now = [text.feed.popleft() if text.feed else text.tokens[-1] for text in rows]
        states, new = model.hidden_states(np.array(now, np.int32)[:, None], cache)
        cache = model.commit(cache, new)
        top, log = (np.asarray(x) for x in likely(model.read_out(states)[:, 0]))
        states = np.asarray(norm(states)[:, 0])
        for row, text in enumerate(rows):
            if text.feed:
                continue
            text.states.append(states[row])
            text.top.append(top[row, :TOP])
            text.log.append(log[row, :TOP])
            noise = rng.gumbel(size=DRAWN_FROM) * text.temperature
            token = int(top[row, np.argmax(log[row] + noise)])
            text.tokens.append(token)
            over = len(text.tokens) > LONGEST or lengths[row] + 1 >= CAPACITY
            if token in tokenizer.stop or over:
                yield text, number
                rows[row] = None


def common_beginning(a: list[int], b: list[int]) -> list[int]:
    return a[: next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)]


def write(path: Path, texts: list[Text], number: int) -> None:
    """A shard: the texts one after the other, `ends` says where; complete or not there at all."""
    parts = [text.arrays() for text in texts]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    joined["sizes"] = np.array([len(text.states) for text in texts])
    joined["held_out"] = np.array([text.held_out for text in texts])
    joined["kind"] = np.array([text.kind for text in texts])
    joined["temperature"] = np.array([text.temperature for text in texts], np.float32)
    new = path.with_suffix(".part.npz")
    np.savez(new, next=number, **joined)
    os.replace(new, path)


def sample(folder: Path, tokens: int, batch: int = 64, seed: int = 0) -> None:
    """Go on until the folder's shards hold so many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = shards_of(folder)
    done = 0
    begin = 0
    for shard in shards:
        with np.load(shard) as file:
            done = done + int(file["sizes"].sum())
            begin = int(file["next"])
    if done >= tokens:
        return
    texts = []
    count = 0
    with tqdm(total=tokens, initial=done, unit="token", mininterval=5, desc="sampling") as bar:
        for text, number in sampled(Llama.load().using(attention), begin, batch, seed):
            texts.append(text)
            count += len(text.states)
            bar.update(len(text.states))
            if count >= SHARD:
                write(folder / f"shard-{len(shards):03d}.npz", texts, number)
                shards.append(None)
                done = done + count
                texts = []
                count = 0
                if done >= tokens:
                    return


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-[0-9]*[0-9].npz"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=70_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    sample(**vars(parser.parse_args()))
