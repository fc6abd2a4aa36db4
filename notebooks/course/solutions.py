"""One solution of each task that has a check. The notebooks print them folded."""

from fractions import Fraction as F

import jax
import jax.numpy as jnp
import numpy as np

import treeattn


def finite(m):
    return jnp.where(m == -jnp.inf, 0, m)


def merge(a, b):  # 00
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - finite(m)), jnp.exp(b[0] - finite(m))
    return m, a[1] * wa + b[1] * wb, a[2] * wa[:, None] + b[2] * wb[:, None]


def line_22(zeta, z, scores, values):  # 02
    weights = np.exp(scores + values @ zeta)
    return z - weights @ values / weights.sum()


def flash(q, k, v):  # 03
    top, d, n = -np.inf, 0.0, np.zeros(2)
    for key, value in zip(k, v, strict=True):
        larger = max(top, key @ q)
        old, new = np.exp(top - larger), np.exp(key @ q - larger)
        top, d, n = larger, d * old + new, n * old + new * value
    return n / d


def reduce_tree(states, op):  # 04
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=False)
        alone = states[len(states) - len(states) % 2 :]  # goes on as it is
        states = [op(a, b) for a, b in pairs] + alone
    return states[0]


def algorithm_3(q, k, v):  # 05
    m, d, n = treeattn.attend(q, k, v)
    weight = jnp.exp(m - jax.lax.pmax(m, "kv"))  # how much this shard's sums count
    d = jax.lax.psum(d * weight, "kv")
    n = jax.lax.psum(n * weight[..., None], "kv")
    return n / d[..., None]


def from_parents(parents):  # 07
    mask = np.eye(len(parents), dtype=bool)  # each node sees itself
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]  # which is complete, because parents come first
    return mask.sum(axis=1) - 1, mask


def rule(p, q):  # 09
    chance = [min(F(1), a / b) if b else F(1) for a, b in zip(p, q, strict=True)]
    lacks = [max(a - b, F(0)) for a, b in zip(p, q, strict=True)]
    total = sum(lacks) or F(1)  # 0 if p = q, and then nothing is ever rejected
    return chance, [x / total for x in lacks]


class Oracle:  # 09, exercise 1
    def __init__(self, prompt, tokens):
        self.prompt, self.tokens = prompt, tokens

    def observe(self, texts):
        self.done = len(texts[0]) - len(self.prompt)

    def propose(self, budget):
        ahead = np.array(self.tokens[self.done :][:budget])[None, None]
        return ahead, np.zeros(ahead.shape)
