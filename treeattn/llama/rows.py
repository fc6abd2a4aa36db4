"""Log-probabilities of rows of tokens, each shared prefix computed once: a training step's forward.

The rows become prefix trees (`treeattn.trees.rows`), and a tree takes one pass: attention by
intervals, positions by depth. Every node but a root has one log-probability, that of its token
after its parent, and a row reads those of its nodes. So a loss of the rows' log-probabilities is
the loss that separate rows would have, and so are its gradients: that of reading is adding up, and
a node that eight rows share gets the sum of what eight rows want of it.

A tree that is too large for memory is computed in parts, of consecutive nodes. Whatever a part's
nodes see outside of it is on the path from the root to the part's first node: for a node before the
part is seen by one of its nodes only if its interval reaches into the part, and then it holds the
part's first node, too. So of each part its keys and values are kept, for the paths of later ones,
and all else is computed again when the gradient comes back through it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from treeattn.devices.prefill import ring_attention
from treeattn.idea.arrays import Array, integer
from treeattn.idea.state import finalize
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.choice import platform_of, resolve
from treeattn.kernel.inputs import Inputs, Intervals
from treeattn.llama import layers
from treeattn.llama.model import Llama
from treeattn.llama.products import linear, take_rows
from treeattn.llama.reading.config import Config
from treeattn.llama.weights import Weights
from treeattn.trees.rows import RowTree, pack_rows

LOGITS = 256  # nodes whose logits are held at a time; longer parts are padded to a multiple


def log_probs(
    model: Llama,
    rows: Sequence,
    *,
    weights: Weights | None = None,
    max_tokens: int | None = None,
    chunk: int | None = None,
) -> Float[Array, "rows next"]:
    """log P(token t + 1 | tokens 0 … t) of every row, at [row, t]; 0 where a row has no such token.

    rows, max_tokens: as in `pack_rows`
    weights: in place of the model's, for `jax.grad` to ask for their gradient. Where the output
             matrix is the embedding, `weights.head` is not read: the embedding's gradient is of
             both uses. The rotary frequencies have none
    chunk:   nodes that are computed at a time; None: a whole tree at once. Of the others memory
             holds the keys and values, and the last layer's output

    In float32, or float64 for a model of float64. With a mesh, a tree's nodes are dealt over it,
    and their keys go around a ring. What a layer computes inside is computed again for the
    gradient: memory holds each layer's input.

    Raises ValueError for ids outside the vocabulary, for dealt weights, an exact model,
    and a chunk on a mesh, and what `pack_rows` raises.
    """
    if model.place.weight_axes:
        dealt = "shard_weights=True" if model.shard_weights else "heads over a mesh"
        raise ValueError(f"model: expected whole weights on every device, got {dealt}")
    if model.exact:
        raise ValueError("model: log-probabilities of rows have no exact form, got exact=True")
    if chunk is not None:
        chunk = integer("chunk", chunk, 1)
        if model.mesh is not None:
            raise ValueError(f"chunk: on a mesh a tree is computed at once, got {chunk}")
    weights = model.weights if weights is None else weights
    trees = pack_rows(rows, max_tokens=max_tokens)
    longest = max((tree.row_map.shape[1] for tree in trees), default=1)
    dtype = jnp.promote_types(weights.embedding.dtype, jnp.float32)
    found = jnp.zeros((len(rows), longest - 1), dtype)
    for tree in trees:
        of_rows = tree.unpack(_of_nodes(model, tree, weights, chunk))[:, 1:]
        found = found.at[tree.rows, : of_rows.shape[1]].set(of_rows)
    return found


def _of_nodes(model: Llama, tree: RowTree, weights: Weights, chunk) -> Float[Array, " nodes"]:
    """(n,) the log-probability of each node's token after its parent's; 0 at roots."""
    vocabulary = model.config.vocabulary
    outside = tree.tokens[tree.tokens >= vocabulary]
    if outside.size:
        raise ValueError(f"rows: expected token ids below {vocabulary}, got {outside[0]}")
    nodes = len(tree.tokens)
    how = {"config": model.config, "mesh": model.mesh, "implementation": model.implementation}
    run = jax.checkpoint(functools.partial(_run_part, **how))
    outputs = []
    sums = []
    kept = None
    for first in range(0, nodes, chunk or nodes):
        part = _cut(tree, first, min(first + (chunk or nodes), nodes))
        before = _keys_of_path(tree, first, kept, model.config, weights.embedding.dtype)
        x, lse, entries = run(weights, part, before)
        size = min(first + (chunk or nodes), nodes) - first
        outputs.append(x[:size])
        sums.append(lse[:size])
        new = jax.tree.map(lambda x, size=size: x[:, :size], entries)
        kept = new if kept is None else jax.tree.map(_joined, kept, new)
    x = jnp.concatenate(outputs)
    lse = jnp.concatenate(sums)
    return _read(weights, x, lse, tree.tokens, tree.parents, tied=model.config.tied)


class Part(NamedTuple):
    """Consecutive nodes of a tree, and after them nodes that only fill it up, which no other sees.

    tokens, positions, numbers, ends: (size,) int32, `numbers` being those in the whole tree
    """

    tokens: Int[Array, " size"]
    positions: Int[Array, " size"]
    numbers: Int[Array, " size"]
    ends: Int[Array, " size"]


class Before(NamedTuple):
    """The nodes of a path that leads to a part, and after them some that nobody sees.

    numbers, ends: (m,) int32
    k, v:          (layers, m, h_kv, d)
    """

    numbers: Int[Array, " m"]
    ends: Int[Array, " m"]
    k: Float[Array, "layers m h_kv d"]
    v: Float[Array, "layers m h_kv d"]


def _cut(tree: RowTree, first: int, last: int) -> Part:
    """The nodes first … last − 1, filled up so that parts of many sizes share a program."""
    size = _rounded_up(last - first)
    numbers = np.arange(first, first + size)
    ends = np.arange(first, first + size) + 1
    ends[: last - first] = tree.ends[first:last]

    def pad(x):
        return np.pad(x[first:last], (0, size - (last - first)))

    return Part(
        pad(tree.tokens), pad(tree.positions), numbers.astype(np.int32), ends.astype(np.int32)
    )


def _rounded_up(size: int) -> int:
    """A power of two up to LOGITS, and a multiple of that from there on; 0 for 0."""
    if size > LOGITS:
        return size + -size % LOGITS
    return 1 << (size - 1).bit_length() if size else 0


def _keys_of_path(tree: RowTree, first: int, kept, config: Config, dtype) -> Before:
    """The path to node `first`, without it, and what is kept of its nodes: (layers, nodes, …)."""
    parents = tree.parents
    path = []
    node = parents[first]
    while node >= 0:
        path.append(node)
        node = parents[node]
    path = np.array(path[::-1], np.int32)
    missing = _rounded_up(len(path)) - len(path)
    numbers = np.pad(path, (0, missing))
    ends = np.pad(tree.ends[path], (0, missing))
    if kept is None or not len(path):
        nothing = jnp.zeros((config.layers, 0, config.kv_heads, config.head_dim), dtype)
        return Before(numbers, ends, nothing, nothing)
    return Before(numbers, ends, *(x[:, numbers] for x in kept))


def _joined(a, b):
    """(layers, n, …) and (layers, m, …) as (layers, n + m, …)."""
    return jnp.concatenate([a, b], axis=1)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "implementation"))
def _run_part(
    weights: Weights,
    part: Part,
    before: Before,
    *,
    config: Config,
    mesh: Mesh | None,
    implementation: str | None,
):
    """(the normalized output (size, width), the log-sum-exp of the logits (size,), (k, v))."""
    frequencies = jax.lax.stop_gradient(weights.frequencies)
    out = None if mesh is None else NamedSharding(mesh, P(None, mesh.axis_names))
    positions = part.positions[None]
    x, rotation = layers.embed(part.tokens[None], weights.embedding, frequencies, None, positions)
    x = x if out is None else jax.lax.with_sharding_constraint(x, out)
    numbers = jnp.concatenate([before.numbers, part.numbers])
    ends = jnp.concatenate([before.ends, part.ends])[None]

    def attend(q, k, v):
        if mesh is not None:
            how = {"mesh": mesh, "axis": mesh.axis_names, "implementation": implementation}
            return ring_attention(q, k, v, ends=ends, **how)
        intervals = Intervals(part.numbers, numbers, ends)
        inputs = Inputs(q, k, v, intervals=intervals, scale=q.shape[-1] ** -0.5, stale=False)
        return finalize(attend_inputs(resolve(implementation, inputs, platform_of(q))))[0]

    @jax.checkpoint
    def layer(x, given):
        w, k_before, v_before = given
        q, k, v = layers.queries_keys_values(x, w, rotation, config)
        keys = jnp.concatenate([k_before[None], k], axis=1)
        values = jnp.concatenate([v_before[None], v], axis=1)
        found = attend(q, keys, values).astype(x.dtype)
        return layers.after_attention(x, w, found, config), (k[0], v[0])

    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *weights.layers)
    x, entries = jax.lax.scan(layer, x, (stacked, before.k, before.v))  # one layer to compile
    x = layers.rms_norm(x[0], weights.norm, config.norm_epsilon)
    return x, _log_sum_exp(x, _head(weights, config.tied), config.vocabulary), entries


def _log_sum_exp(x, head, vocabulary: int):
    """(n,) of the logits of each output (n, width)."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)

    @jax.checkpoint  # of a chunk's logits the gradient keeps nothing
    def of_chunk(x):
        return jax.nn.logsumexp(linear(x, head, dtype=dtype)[..., :vocabulary], axis=-1)

    chunks = x.reshape(-1, min(LOGITS, len(x)), x.shape[1])
    return jax.lax.map(of_chunk, chunks).reshape(-1)


def _head(weights: Weights, tied: bool):
    return weights.embedding if tied else weights.head


@functools.partial(jax.jit, static_argnames="tied")
def _read(weights: Weights, x, lse, tokens, parents, *, tied: bool):
    """(n,): the logit of each node's token after its parent, less that parent's log-sum-exp."""
    rows = take_rows(_head(weights, tied), tokens).astype(lse.dtype)
    logit = jnp.sum(x[parents].astype(lse.dtype) * rows, axis=-1)
    return jnp.where(parents >= 0, logit - lse[parents], 0)
