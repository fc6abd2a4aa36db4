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
and all else is computed again when the gradient comes back through it: a part after the other, the
last one first, each adding its share to the gradients of the keys that it saw.
"""

import functools
import itertools
import operator
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
from treeattn.kernel.inputs import Implementation, Inputs, Intervals
from treeattn_llama import layers
from treeattn_llama.model import Llama
from treeattn_llama.products import linear, take_rows
from treeattn_llama.reading.config import Config
from treeattn_llama.weights import Weights
from treeattn.trees.rows import RowTree, pack_rows

LOGITS = 256  # nodes whose logits are held at a time; longer parts are filled up to a multiple
# Shorter ones are filled up to a power of two, and to so many: few programs to compile. (And of
# more than 8 tokens: products of fewer with weights of 8 bits are of whole numbers.)
FEWEST = 16


def log_probs(
    model: Llama,
    rows: Sequence,
    *,
    weights: Weights | None = None,
    max_tokens: int | None = None,
    chunk: int | None = None,
    return_entropies: bool = False,
) -> Float[Array, "rows next"] | tuple[Float[Array, "rows next"], Float[Array, "rows next"]]:
    """log P(token t + 1 | tokens 0 … t) of every row, at [row, t]; 0 where a row has no such token.

    rows, max_tokens: as in `pack_rows`
    weights: in place of the model's, for `jax.grad` to ask for their gradient. Where the output
             matrix is the embedding, `weights.head` is not read: the embedding's gradient is of
             both uses. The rotary frequencies have none
    chunk:   nodes that are computed at a time; None: a whole tree at once. Of the others memory
             holds the keys and values, and the last layer's output
    return_entropies: (log-probabilities, entropies), both (rows, longest − 1): of the distribution
             that token t + 1 was read from, −Σ P log P over the vocabulary, in nats; 0 where a row
             has no such token

    In float32, or float64 for a model of float64. With a mesh, a tree's nodes are dealt over it,
    and their keys go around a ring. What a layer computes inside is computed again for the
    gradient: memory holds each layer's input, and the logits of 256 nodes. Weights of 8 bits are
    taken, too: `jax.grad` has the gradients of what is float, and refuses integers (TypeError).

    For the gradient of a tree or part of SmolLM2-135M, XLA plans so much beside the weights and
    their gradients, of 513 MiB each (benchmarks/partition_memory.py):

        256 nodes   875 MiB     1,024 nodes  1,036 MiB     4,096 nodes  1,314 MiB

    of which 810 are all layers' weights and gradients again, stacked. A node's keys and values are
    45 KiB, and as much for their gradients. That is so where the call is not inside `jax.jit`: in
    one program, XLA may compute the parts side by side.

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
    features = 2 if return_entropies else 1
    dtype = jnp.promote_types(weights.embedding.dtype, jnp.float32)
    of_slots = [jnp.zeros((1, features), dtype)]  # slot 0 is that of the tokens that are not there
    read = np.zeros((len(rows), longest - 1), np.int32)
    slots = 1
    for tree in trees:
        of_nodes, places = _of_nodes(model, tree, weights, chunk, return_entropies)
        nodes = tree.row_map[:, 1:]
        read[tree.rows, : nodes.shape[1]] = np.where(nodes >= 0, slots + places[nodes], 0)
        of_slots.append(of_nodes)
        slots += len(of_nodes)
    found = _gathered(jnp.concatenate(of_slots), read)
    return (found[..., 0], found[..., 1]) if return_entropies else found[..., 0]


_gathered = jax.jit(operator.getitem)


def _of_nodes(
    model: Llama, tree: RowTree, weights: Weights, chunk: int | None, entropies: bool
) -> tuple[Float[Array, "slots features"], Int[np.ndarray, " nodes"]]:
    """(slots, 1) the log-probability of each node's token after its parent's, or (slots, 2), and
    the entropy there; 0 at roots. And each node's slot: the parts are filled up, all in one way, so
    that trees of many sizes share their programs."""
    vocabulary = model.config.vocabulary
    outside = tree.tokens[tree.tokens >= vocabulary]
    if outside.size:
        raise ValueError(f"rows: expected token ids below {vocabulary}, got {outside[0]}")
    nodes = len(tree.tokens)
    chunk = min(chunk or nodes, nodes)
    cuts = [*range(0, nodes, chunk), nodes]
    parts = [_cut(tree, first, last) for first, last in itertools.pairwise(cuts)]
    node = np.arange(nodes)
    places = node // chunk * len(parts[0].tokens) + node % chunk  # only the last has another size
    how = {
        "config": model.config,
        "mesh": model.mesh,
        "implementation": model.implementation,
        "entropies": entropies,
    }

    def run(weights, part, path, kept):
        return _run_part(weights, part, _keys_of_path(path, kept, weights, model.config), **how)

    if len(parts) > 1:  # of one part each layer keeps its input, and nothing else
        run = jax.checkpoint(run)

    outputs = []
    kept = []  # (k, v) of each part
    for first, part in zip(cuts, parts, strict=False):
        x, sums, entries = run(weights, part, _path_to(tree, first, places), kept)
        outputs.append((x, sums))
        kept.append(entries)
    x, sums = (jnp.concatenate(x) for x in zip(*outputs, strict=True))
    tokens = np.concatenate([part.tokens for part in parts])
    parents = np.full(len(tokens), -1, np.int32)
    parents[places] = np.where(tree.parents >= 0, places[tree.parents], -1)
    return _read(weights, x, sums, tokens, parents, tied=model.config.tied), places


class Part(NamedTuple):
    """Consecutive nodes of a tree, and after them nodes that only fill it up, which no other sees.

    tokens, positions, numbers, ends: (size,) int32, `numbers` being those in the whole tree
    """

    tokens: Int[Array, " size"]
    positions: Int[Array, " size"]
    numbers: Int[Array, " size"]
    ends: Int[Array, " size"]


class Path(NamedTuple):
    """The nodes of a path that leads to a part, and after them some that nobody sees.

    numbers, ends, places: (m,) int32, `places` being where their keys are among those kept
    """

    numbers: Int[Array, " m"]
    places: Int[Array, " m"]
    ends: Int[Array, " m"]


class Before(NamedTuple):
    """A path with the keys and values of its nodes: k, v (layers, m, h_kv, d)."""

    path: Path
    k: Float[Array, "layers m h_kv d"]
    v: Float[Array, "layers m h_kv d"]


def _cut(tree: RowTree, first: int, last: int) -> Part:
    """The nodes first … last − 1, filled up so that parts of many sizes share a program."""
    size = _filled_up(last - first)
    numbers = np.arange(first, first + size)
    ends = np.arange(first, first + size) + 1
    ends[: last - first] = tree.ends[first:last]

    def pad(x):
        return np.pad(x[first:last], (0, size - (last - first)))

    return Part(
        pad(tree.tokens), pad(tree.positions), numbers.astype(np.int32), ends.astype(np.int32)
    )


def _filled_up(size: int) -> int:
    """0, a power of two from FEWEST to LOGITS, or a multiple of LOGITS."""
    if size > LOGITS:
        return size + -size % LOGITS
    return max(FEWEST, 1 << (size - 1).bit_length()) if size else 0


def _path_to(tree: RowTree, first: int, places) -> Path:
    """The path to node `first`, without it."""
    parents = tree.parents
    path = []
    node = parents[first]
    while node >= 0:
        path.append(node)
        node = parents[node]
    path = np.array(path[::-1], np.int32)
    missing = _filled_up(len(path)) - len(path)
    return Path(*(np.pad(x, (0, missing)) for x in (path, places[path], tree.ends[path])))


def _keys_of_path(path: Path, kept, weights: Weights, config: Config) -> Before:
    """With what is kept of the parts before, a list of (k, v), each (slots, layers, …)."""
    if not len(path.numbers):
        shape = (config.layers, 0, config.kv_heads, config.head_dim)
        nothing = jnp.zeros(shape, weights.embedding.dtype)
        return Before(path, nothing, nothing)
    k, v = (jnp.concatenate(x)[path.places] for x in zip(*kept, strict=True))
    return Before(path, jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1))


@functools.partial(jax.jit, static_argnames=("config", "mesh", "implementation", "entropies"))
def _run_part(
    weights: Weights,
    part: Part,
    before: Before,
    *,
    config: Config,
    mesh: Mesh | None,
    implementation: Implementation,
    entropies: bool,
):
    """(the normalized output (size, width), of the logits what `_over_vocabulary` gives, and the
    keys and values, (k, v), each (size, layers, h_kv, d))."""
    frequencies = jax.lax.stop_gradient(weights.frequencies)
    out = None if mesh is None else NamedSharding(mesh, P(None, mesh.axis_names))
    positions = part.positions[None]
    x, rotation = layers.embed(part.tokens[None], weights.embedding, frequencies, None, positions)
    x = x if out is None else jax.lax.with_sharding_constraint(x, out)
    numbers = jnp.concatenate([before.path.numbers, part.numbers])
    ends = jnp.concatenate([before.path.ends, part.ends])[None]

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
    sums = _over_vocabulary(x, _head(weights, config.tied), config.vocabulary, entropies)
    return x, sums, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), entries)


def _over_vocabulary(x, head, vocabulary: int, entropies: bool):
    """(n, 1) the log-sum-exp of each output's logits, or (n, 2), and the entropy of their softmax.

    The logits of some LOGITS nodes at a time. Those are not neighbours: where the nodes are dealt
    over a mesh, every device has its share of them.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)

    @jax.checkpoint  # of a chunk's logits the gradient keeps nothing
    def of_chunk(x):
        logits = linear(x, head, dtype=dtype)[..., :vocabulary]
        lse = jax.nn.logsumexp(logits, axis=-1)
        if not entropies:
            return lse[:, None]
        mean = jnp.sum(jnp.exp(logits - lse[:, None]) * logits, axis=-1)
        return jnp.stack([lse, lse - mean], axis=-1)

    at_a_time = min(LOGITS, len(x))
    chunks = jnp.swapaxes(x.reshape(at_a_time, -1, x.shape[1]), 0, 1)
    found = jax.lax.map(of_chunk, chunks)
    return jnp.swapaxes(found, 0, 1).reshape(len(x), -1)


def _head(weights: Weights, tied: bool):
    return weights.embedding if tied else weights.head


@functools.partial(jax.jit, static_argnames="tied")
def _read(weights: Weights, x, sums, tokens, parents, *, tied: bool):
    """(n, 1): the logit of each token after its parent, less that parent's log-sum-exp; or (n, 2),
    and the parent's entropy."""
    rows = take_rows(_head(weights, tied), tokens).astype(sums.dtype)
    logit = jnp.sum(x[parents].astype(sums.dtype) * rows, axis=-1)
    of_parents = sums[parents]
    found = of_parents.at[:, 0].set(logit - of_parents[:, 0])
    return jnp.where(parents[:, None] >= 0, found, 0)
