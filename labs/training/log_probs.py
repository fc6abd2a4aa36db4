"""Log-probabilities of rows of tokens, each shared prefix computed once: a training step's forward.

The rows become a prefix tree (`labs.training.rows`), which takes one pass: attention by intervals,
positions by depth. Every node but a root has one log-probability, that of its token
after its parent, and a row reads those of its nodes. So a loss of the rows' log-probabilities is
the loss of separate rows. Its gradients are theirs, too, because the gradient of reading is adding
up: a node that eight rows share gets the sum of the eight rows' gradients.
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
) -> Float[Array, "rows next"]:
    """log P(token t + 1 | tokens 0 … t) of every row, at [row, t]; 0 where a row has no such token.

    rows:    as in `pack_rows`
    weights: in place of the model's, so that `jax.grad` can take their gradient. If the output
             matrix is the embedding, `weights.head` is not read, and the embedding's gradient
             includes both uses. The rotary frequencies have no gradient

    In float32, or float64 for a model of float64. With a mesh, a tree's nodes are sharded over it,
    and their keys go around a ring. The gradient recomputes the inside of each layer, so memory
    holds each layer's input, and the logits of 256 nodes.

    Raises ValueError for ids outside the vocabulary, and the errors of `pack_rows`.
    """
    weights = model.weights if weights is None else weights
    tree = pack_rows(rows)
    return tree.unpack(_of_nodes(model, tree, weights))[:, 1:]


def _of_nodes(model: Llama, tree: RowTree, weights: Weights) -> Float[Array, " nodes"]:
    """The log-probability of each node's token after its parent's; 0 at roots.

    Trees are padded to a few sizes, so that few programs are compiled.
    """
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
    return _forward(weights, *arrays, config=config, mesh=model.mesh)[:n]


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def _forward(weights: Weights, tokens, positions, ends, parents, *, config, mesh):
    """The model over a padded tree: the log-probabilities of `_of_nodes`, padding included."""
    frequencies = jax.lax.stop_gradient(weights.frequencies)  # a buffer is no weight
    x, rotation = layers.embed(tokens[None], positions[None], weights.embedding, frequencies)
    attention = tree_attention
    if mesh is not None:
        attention = functools.partial(tree_ring_attention, mesh=mesh)

    @jax.checkpoint
    def layer(x, w):
        q, k, v = layers.queries_keys_values(x, w, rotation, config)
        return layers.after_attention(x, w, attention(q, k, v, ends[None]), config), None

    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *weights.layers)
    x, _ = jax.lax.scan(layer, x, stacked)  # one layer to compile
    head = weights.embedding if config.tied else weights.head

    @jax.checkpoint  # the gradient keeps nothing of a chunk's logits
    def over_vocabulary(chunk):
        x, next_tokens = chunk
        logits = layers.read_out(x[None], weights.norm, head, epsilon=config.norm_epsilon)[0]
        each = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(each, next_tokens[:, None], axis=1)[:, 0]

    # The output at each node's parent, and the node's token, which is read from it.
    chunks = len(tokens) // min(LOGITS, len(tokens))
    at_parents = x[0][jnp.maximum(parents, 0)].reshape(chunks, -1, x.shape[-1])
    found = jax.lax.map(over_vocabulary, (at_parents, tokens.reshape(chunks, -1)))
    return jnp.where(parents >= 0, found.ravel(), 0)
