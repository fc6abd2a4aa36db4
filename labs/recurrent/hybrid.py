"""A toy model of three layers with a state and one with keys, which verifies a tree in one pass.

Queries and keys have no positions, because the recurrent layers know the order of the text. There
is one text, and the weights are random, not trained.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn
from labs.recurrent.devices import over_devices
from labs.recurrent.rule import gated_delta
from labs.recurrent.tree import map_to, outputs, solve

RECURRENT = 3  # layers, before the one of attention


class Model(NamedTuple):
    """The weights. Those that differ between layers have an axis of layers."""

    embedding: jax.Array  # (vocabulary, w)
    inward: jax.Array  # (layers, w, h, 3d + 2): to queries, keys, values and two gates
    outward: jax.Array  # (layers, h, d, w)


class Memory(NamedTuple):
    """The model's memory of a text: states, and a cache of keys and values."""

    states: jax.Array  # (layers, h, d, d), of the recurrent layers
    cache: jax.Array  # (2, slots, h, d), keys and values, sharded along the slots
    length: jax.Array  # (1,), of the text


def draw(seed: int) -> Model:
    """A model with random weights: 40 tokens, width 32, 2 heads of 8 numbers."""
    rng = np.random.default_rng(seed)
    layers = RECURRENT + 1
    embedding = rng.normal(size=(40, 32))
    inward = rng.normal(size=(layers, 32, 2, 3 * 8 + 2)) / 32**0.5
    outward = rng.normal(size=(layers, 2, 8, 32))
    return Model(*map(jnp.asarray, (embedding, inward, outward)))


def forward(model: Model, tokens, recurrent, attention):
    """The model's next token after each of `tokens`.

    recurrent: a function (layer, q, updates) of arrays (l, h, …). attention: a function (q, k, v)
    of arrays (1, l, h, d). Each returns its layer's outputs, in the shape of v.
    """
    x = model.embedding[tokens]
    d = model.outward.shape[2]
    for i, (inward, outward) in enumerate(zip(model.inward, model.outward, strict=True)):
        projected = jnp.einsum("lw,whd->lhd", _normed(x), inward)
        q, k, v, gates = jnp.split(projected, [d, 2 * d, 3 * d], axis=-1)
        if i < RECURRENT:
            k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
            gate, beta = jnp.moveaxis(jax.nn.sigmoid(gates), -1, 0)
            out = recurrent(i, q, gated_delta(k, v, gate**0.25, beta))
        else:
            out = attention(q[None], k[None], v[None])[0]
        x = x + jnp.einsum("lhd,hdw->lw", out, outward)
    return jnp.argmax(_normed(x) @ model.embedding.T, axis=-1)


def _normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def prefill(model: Model, prompt, slots: int, mesh: Mesh):
    """(the first new token, the memory), from a prompt that is sharded over the mesh."""
    sharding = NamedSharding(mesh, P(None, "kv"))
    run = jax.vmap(partial(over_devices, mesh=mesh), in_axes=(1, 1, 0), out_axes=(1, 0))
    states, cache = [], []

    def recurrent(i, q, updates):
        empty = jnp.zeros((*q.shape[1:], q.shape[2]), q.dtype)
        out, state = run(q, updates, empty)
        states.append(state)
        return out

    def attention(q, k, v):
        cache.extend([k, v])
        return treeattn.ring_attention(q, k, v, sharding=sharding)

    said = forward(model, prompt, recurrent, attention)
    room = [(0, 0), (0, slots - len(prompt)), (0, 0), (0, 0)]
    cache = jax.device_put(jnp.pad(jnp.concatenate(cache), room), sharding)
    return said[-1], Memory(jnp.stack(states), cache, jnp.array([len(prompt)]))


def step(model: Model, memory: Memory, beam, sharding):
    """One pass over a beam: (tokens, the number of them that continue the text, the new memory).

    beam: (rows, width) candidates. Each begins with the text's newest token, which is not in the
          memory yet.
    """
    packed = treeattn.pack(beam[None])
    mask = packed.attention_mask
    solved, new = [], []

    def recurrent(i, q, updates):
        solved.append(jax.vmap(solve, (1, None))(updates, mask[0]))
        return jax.vmap(outputs, (0, 1, 0), 1)(solved[i], q, memory.states[i])

    def attention(q, k, v):
        new.extend([k, v])
        asked = {"sharding": sharding, "kv_lengths": memory.length, "return_lse": True}
        before = treeattn.tree_decode(q, memory.cache[:1], memory.cache[1:], **asked)
        tree = treeattn.attend(q, k, v, mask=mask[:, None])
        return treeattn.finalize(treeattn.merge(treeattn.from_output(*before), tree))[0]

    said = forward(model, packed.packed_beam[0], recurrent, attention)
    path, count = accept(beam, packed.unpack_map[0], said)
    states = [
        jax.vmap(map_to, (0, None))(layer, path[count - 1])(state)
        for layer, state in zip(solved, memory.states, strict=True)
    ]
    slots = memory.length + jnp.arange(len(path))  # later passes overwrite those from `count` on
    cache = memory.cache.at[:, slots].set(jnp.concatenate(new)[:, path])
    return said[path], count, Memory(jnp.stack(states), cache, memory.length + count)


def accept(beam, nodes, said):
    """(the best candidate's nodes, the number of them that are the model's own tokens)."""
    right = beam[:, 1:] == said[nodes[:, :-1]]
    accepted = jnp.cumprod(right, axis=1).sum(axis=1)
    best = jnp.argmax(accepted)
    return nodes[best], accepted[best] + 1
