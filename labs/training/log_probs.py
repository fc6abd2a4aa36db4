"""Log-probabilities of rows of tokens, each shared prefix computed once: a training step's forward.

The rows become prefix trees (`labs.training.rows`), and a tree takes one pass: attention by
intervals, positions by depth. Every node but a root has one log-probability, that of its token
after its parent, and a row reads those of its nodes. So a loss of the rows' log-probabilities is
the loss that separate rows would have, and so are its gradients: that of reading is adding up, and
a node that eight rows share gets the sum of what eight rows want of it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from labs.training.attention import tree_attention, tree_ring_attention
from labs.training.rows import RowTree, pack_rows
from treeattn_llama import Llama, Weights, layers

LOGITS = 256  # nodes whose logits are held at a time


def log_probs(
    model: Llama,
    rows: Sequence,
    *,
    weights: Weights | None = None,
    max_tokens: int | None = None,
    return_entropies: bool = False,
) -> Float[Array, "rows next"] | tuple[Float[Array, "rows next"], Float[Array, "rows next"]]:
    """log P(token t + 1 | tokens 0 … t) of every row, at [row, t]; 0 where a row has no such token.

    rows, max_tokens: as in `pack_rows`
    weights: in place of the model's, for `jax.grad` to ask for their gradient. Where the output
             matrix is the embedding, `weights.head` is not read: the embedding's gradient is of
             both uses. The rotary frequencies have none
    return_entropies: (log-probabilities, entropies), both (rows, longest − 1): of the distribution
             that token t + 1 was read from, −Σ P log P over the vocabulary, in nats; 0 where a row
             has no such token

    In float32, or float64 for a model of float64. With a mesh, a tree's nodes are dealt over it,
    and their keys go around a ring. What a layer computes inside is computed again for the
    gradient: memory holds each layer's input, and the logits of 256 nodes.

    Raises ValueError for ids outside the vocabulary, and what `pack_rows` raises.
    """
    weights = model.weights if weights is None else weights
    trees = pack_rows(rows, max_tokens=max_tokens)
    longest = max((tree.row_map.shape[1] for tree in trees), default=1)
    parts = [np.zeros((0, longest - 1, 2))]
    order = [np.zeros(0, int)]
    for tree in trees:
        of_nodes = _of_nodes(model, tree, weights, return_entropies)
        read = tree.unpack(of_nodes)[:, 1:]  # (rows of this tree, its longest − 1, 1 or 2)
        missing = longest - 1 - read.shape[1]
        parts.append(jnp.pad(read, ((0, 0), (0, missing), (0, 0))))
        order.append(tree.rows)
    if not trees:
        found = jnp.zeros((0, 0, 2))
    else:
        found = jnp.concatenate(parts[1:])[np.argsort(np.concatenate(order))]
    return (found[..., 0], found[..., 1]) if return_entropies else found[..., 0]


def _of_nodes(model: Llama, tree: RowTree, weights: Weights, entropies: bool):
    """(n, 1) the log-probability of each node's token after its parent's, or (n, 2), and the
    entropy there; 0 at roots. Filled up to sizes that trees share, so that programs are few."""
    config = model.config
    outside = tree.tokens[tree.tokens >= config.vocabulary]
    if outside.size:
        raise ValueError(f"rows: expected ids below {config.vocabulary}, got {outside[0]}")
    n = len(tree.tokens)
    size = n + -n % LOGITS if n > LOGITS else max(16, 1 << (n - 1).bit_length())

    def fill(x, value=0):
        return np.pad(x, (0, size - n), constant_values=value)

    ends = np.concatenate([tree.ends, np.arange(n, size) + 1]).astype(np.int32)
    arrays = fill(tree.tokens), fill(tree.positions), ends, fill(tree.parents, -1)
    how = {"config": config, "mesh": model.mesh, "entropies": entropies}
    return _forward(weights, *arrays, **how)[:n]


@functools.partial(jax.jit, static_argnames=("config", "mesh", "entropies"))
def _forward(weights: Weights, tokens, positions, ends, parents, *, config, mesh, entropies):
    """The model over one tree: (size, 1), or (size, 2) with entropies."""
    frequencies = jax.lax.stop_gradient(weights.frequencies)  # a buffer is no weight
    x, rotation = layers.embed(tokens[None], positions[None], weights.embedding, frequencies)
    over = {} if mesh is None else {"mesh": mesh}
    attention = functools.partial(tree_ring_attention if over else tree_attention, **over)

    @jax.checkpoint
    def layer(x, w):
        q, k, v = layers.queries_keys_values(x, w, rotation, config)
        return layers.after_attention(x, w, attention(q, k, v, ends[None]), config), None

    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *weights.layers)
    x, _ = jax.lax.scan(layer, x, stacked)  # one layer to compile
    head = weights.embedding if config.tied else weights.head

    @jax.checkpoint  # of a chunk's logits the gradient keeps nothing
    def over_vocabulary(chunk):
        x, next_tokens = chunk
        logits = layers.read_out(x[None], weights.norm, head, epsilon=config.norm_epsilon)[0]
        each = jax.nn.log_softmax(logits)
        found = jnp.take_along_axis(each, next_tokens[:, None], axis=1)
        if not entropies:
            return found
        entropy = -jnp.sum(jnp.exp(each) * each, axis=1, keepdims=True)
        return jnp.concatenate([found, entropy], axis=1)

    # Of every node its parent's output, and the token that is to be read from it.
    chunks = len(tokens) // min(LOGITS, len(tokens))
    of_parents = x[0][jnp.maximum(parents, 0)].reshape(chunks, -1, x.shape[-1])
    found = jax.lax.map(over_vocabulary, (of_parents, tokens.reshape(chunks, -1)))
    return jnp.where(parents[:, None] >= 0, found.reshape(len(tokens), -1), 0)
