"""A Llama with its weights sharded beside its cache: the same logits, a p-th on each device."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from treeattn import Llama, ancestor_mask, depths, kv_mesh
from treeattn.program import collectives, memory, total_bytes
from treeattn_llama.dealing import SHARDED_AXIS
from treeattn_llama.layers import extend_layer
from treeattn_llama.static import static_of

pytestmark = pytest.mark.slow

LLAMAS = sorted(p for p in (Path(__file__).parent / "data" / "llamas").iterdir() if p.is_dir())


def decode(model, tokens, start: int):
    """The logits after a prompt, after one token at a time, and after a tree of candidates."""
    logits, cache = model.prefill([tokens[:start].tolist()], model.new_cache(1, 64))
    seen = [np.asarray(logits[0])]
    for i in range(start, start + 2):
        logits, cache = model.step(tokens[None, i : i + 1], cache, last=True)
        seen.append(np.asarray(logits[0]))
    parents = np.array([[-1, 0, 0, 1, 2]])
    logits, new = model.extend(
        tokens[None, :5], cache, mask=ancestor_mask(parents), positions=start + 2 + depths(parents)
    )
    cache = model.commit(cache, new, select=np.array([[0, 2, 4]]), counts=np.array([3]))
    seen += list(np.asarray(logits[0]))
    logits, _ = model.step(tokens[None, 5:6], cache, last=True)
    return np.stack([*seen, np.asarray(logits[0])])


CASES = [(path, 3, None, "reduce_scatter") for path in LLAMAS] + [
    (LLAMAS[0], 2, None, "tree"),
    (LLAMAS[0], 8, None, "all_to_all"),
    (LLAMAS[0], 4, 2, "reduce_scatter"),
    (LLAMAS[0], 4, 2, "hierarchical"),
]


@pytest.mark.parametrize(
    ("path", "p", "nodes", "attention"),
    CASES,
    ids=lambda x: x.name if isinstance(x, Path) else str(x),
)
def test_logits_are_those_of_one_device(path, p, nodes, attention):
    """In float32: in 16 bits a sum that rounds otherwise once is an error of its own."""
    one = Llama.load(path, dtype=np.float32)
    tokens = np.random.default_rng(0).integers(0, one.config.vocabulary, 33)
    mesh = kv_mesh(jax.devices()[:p], nodes=nodes)
    model = Llama.load(path, mesh=mesh, dtype=np.float32, shard_weights=True, attention=attention)
    if path == LLAMAS[0]:
        np.testing.assert_allclose(model.logits(tokens[None]), one.logits(tokens[None]), atol=1e-4)
    np.testing.assert_allclose(decode(model, tokens, 30), decode(one, tokens, 30), atol=1e-4)


def test_layer_qkv_is_that_of_one_device():
    """Heads that end within a device's rows of the product come together."""
    one = Llama.load(LLAMAS[0], dtype=np.float32)
    sharded = one.on(kv_mesh(jax.devices()[:3]), shard_weights=True)
    tokens = np.arange(5)[None]
    for found, expected in zip(sharded.layer_qkv(tokens, 1), one.layer_qkv(tokens, 1), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_half_precision():
    """bfloat16 weights, sums over the devices in float32: the roundings of single activations."""
    path = next(p for p in LLAMAS if p.name == "llama31")
    one = Llama.load(path)
    assert one.weights.embedding.dtype == "bfloat16"
    tokens = np.random.default_rng(0).integers(0, one.config.vocabulary, 33)
    model = one.on(kv_mesh(jax.devices()[:2]), shard_weights=True, attention="all_to_all")
    exact = Llama.load(path, dtype=np.float32).logits(tokens[None])
    error, own = (np.abs(np.asarray(m.logits(tokens[None])) - exact).max() for m in (model, one))
    assert error < 2 * own


def test_elsewhere_and_back():
    """From whole weights to three devices, to two, to one: nothing is lost where they are cut."""
    one = Llama.load(LLAMAS[0])
    three = one.on(kv_mesh(jax.devices()[:3]), shard_weights=True, attention="all_to_all")
    two = three.on(kv_mesh(jax.devices()[:2]))
    assert two.shard_weights
    back = two.on(None, attention="tree")
    before, after = jax.tree.leaves(one.weights), jax.tree.leaves(back.weights)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_device_holds_its_part_and_no_more(optimized):
    """Arguments and temporaries of a layer's program, and the weights themselves."""
    model = Llama.load(LLAMAS[0])
    p = 4
    sharded = model.on(kv_mesh(jax.devices()[:p]), shard_weights=True, attention="reduce_scatter")
    whole, part = 0, 0
    for layer, own in zip(model.weights.layers, sharded.weights.layers, strict=True):
        for field, x in layer._asdict().items():
            if x is None:
                continue
            shards = getattr(own, field).addressable_shards
            assert len({s.data.shape for s in shards}) == 1
            if field in SHARDED_AXIS:
                whole += x.nbytes
                part += shards[0].data.nbytes
    assert part < 1.35 * whole / p  # what is filled up included

    cache = sharded.new_cache(1, 64)
    x, rotation = sharded._embed(np.zeros((1, 1), np.int32), cache.lengths)
    program = extend_layer.lower(
        x,
        sharded.weights.layers[0],
        rotation,
        static=static_of(sharded, (1, 1)),
        cached=cache.layers[0],
        lengths=cache.lengths,
    ).compile()
    layer_bytes = sum(x.nbytes for x in jax.tree.leaves(model.weights.layers[0]))
    cache_bytes = sum(x.nbytes for x in cache.layers[0])
    held = memory(program)
    assert held.argument_bytes < 1.35 * (layer_bytes + cache_bytes) / p + 4096
    assert held.temporary_bytes < layer_bytes / p
    kinds = {c.kind for c in collectives(program)}
    assert kinds == {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize("attention", ["tree", "ring"])
def test_what_a_step_sends(attention):
    """With whole weights, only the attention sends: a state a layer by tree (2024 eq. 34,
    2025 eq. 13), p − 1 shards a layer by ring (eq. 32, 2025 eq. 11), each with its
    number of tokens."""
    p, capacity = 4, 64
    model = Llama.load(LLAMAS[0], dtype=np.float32, mesh=kv_mesh(jax.devices()[:p]))
    model = model.using(attention)

    def step(weights, token, cache):
        return dataclasses.replace(model, weights=weights).extend(token, cache)[0]

    inputs = model.weights, np.zeros((1, 1), np.int32), model.new_cache(1, capacity)
    found = collectives(jax.jit(step).lower(*inputs).compile())
    c = model.config
    state = 4 * c.heads * (c.head_dim + 2)
    shard = 4 * 2 * (capacity // p) * c.kv_heads * c.head_dim
    expected = {"tree": state, "ring": (p - 1) * shard}
    assert total_bytes(found) == c.layers * expected[attention]


def test_without_a_mesh_there_is_nothing_to_shard_over():
    with pytest.raises(ValueError, match="shard_weights: expected a mesh"):
        Llama.load(LLAMAS[0], shard_weights=True)
