"""What verifying a tree reads, computes and sends, counted one by one, and where it stops being
free."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from labs.cost import MODELS, Device, Model, flops, preset
from labs.cost.network import collective_seconds
from labs.cost.ridge import cache_fits, free_tokens, verify_seconds, verify_work
from labs.cost.sharding import kernel_allreduce

TINY = Model("tiny", layers=2, width=6, heads=4, kv_heads=2, hidden=5, vocabulary=7, head_dim=3)
EIGHT = MODELS["llama-3.1-8b"]
DGX = preset("dgx-h100")


def counted(model, tokens, batch, context, p, size):
    """Bytes and operations of the device with the longest chunk, each number and product by
    itself."""
    projections = [
        (model.width, model.heads * model.head_dim),
        (model.width, model.kv_heads * model.head_dim),
        (model.width, model.kv_heads * model.head_dim),
        (model.heads * model.head_dim, model.width),
        (model.width, model.hidden),
        (model.width, model.hidden),
        (model.hidden, model.width),
    ]
    weights = sum(rows * columns for rows, columns in projections) * model.layers
    weights += model.width * model.vocabulary
    mine = [key for key in range(context) if key % p == 0]  # in stripes: the first has the most
    cached = 0
    attended = 0
    tree_read = 0
    tree_attended = 0
    for _ in range(model.layers):
        for _ in range(batch):
            cached += 2 * sum(model.kv_heads * model.head_dim for _ in mine)
            tree_read += 2 * sum(model.kv_heads * model.head_dim for _ in range(tokens))
            for _ in range(tokens):
                for _ in range(model.heads):
                    attended += sum(2 * model.head_dim + 2 * model.head_dim for _ in mine)
                    tree_attended += sum(4 * model.head_dim for _ in range(tokens))
    return (
        weights / p * size,
        weights / p * 2 * batch * tokens,
        cached * size,
        attended,
        tree_read * size,
        tree_attended,
    )


@pytest.mark.parametrize("tokens, batch, context, p", [(1, 1, 1, 1), (3, 2, 7, 1), (5, 3, 10, 4)])
@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_bytes_and_operations_are_those_counted_one_by_one(tokens, batch, context, p, dtype, size):
    work = verify_work(TINY, tokens, batch, context, p=p, dtype=dtype)
    assert tuple(work) == counted(TINY, tokens, batch, context, p, size)


def test_operations_are_those_of_compiled_products():
    """XLA's own count of a layer's two products of attention, and of one of weights."""
    tokens, batch, keys = 3, 2, 10
    group = TINY.heads // TINY.kv_heads
    queries = batch, tokens, TINY.kv_heads, group, TINY.head_dim
    cache = batch, keys, TINY.kv_heads, TINY.head_dim
    scores = batch, TINY.kv_heads, group, tokens, keys

    def products(q, k, v, s):
        first = jnp.einsum("bqhgd,bkhd->bhgqk", q, k)
        return first, jnp.einsum("bhgqk,bkhd->bqhgd", s, v)

    found = flops(products, queries, cache, cache, scores)
    work = verify_work(TINY, tokens, batch, keys)
    assert TINY.layers * found == work.context_flops
    wider = dataclasses.replace(TINY, vocabulary=TINY.vocabulary + 9)
    more = verify_work(wider, tokens, batch, keys).weight_flops - work.weight_flops
    assert flops(lambda x, w: x @ w, (batch * tokens, 6), (6, 9)) == more


def test_the_roofline_adds_or_overlaps():
    work = verify_work(EIGHT, 16, 128, 8192)
    device = Device("round", memory_bytes=1e12, memory_bandwidth=1e12, flops=1e15)
    reading = (work.weight_bytes / 1e12, (work.context_bytes + work.tree_bytes) / 1e12)
    computing = (work.weight_flops / 1e15, (work.context_flops + work.tree_flops) / 1e15)
    apart = sum(max(pair) for pair in zip(reading, computing, strict=True))
    assert work.seconds(device) == pytest.approx(apart)
    assert work.seconds(device, overlap=True) == pytest.approx(max(sum(reading), sum(computing)))
    assert max(sum(reading), sum(computing)) < apart


def test_what_is_sent_is_counted_by_the_size_of_each_message():
    """Over eight devices, for two texts: queries, keys and values; a state; two sums of split
    weights."""
    p, tokens, batch = 8, 5, 2
    rows = tokens * batch
    lse = rows * 32 * 4
    numerators = rows * 4096 * 4
    sent = [
        ("all-gather", rows * (4096 + 2 * 1024) * 2 / p),
        ("allreduce", lse),
        ("reduce-scatter", numerators + lse),
    ]
    layer = sum(collective_seconds(kind, p, size, DGX) for kind, size in sent)
    layer += 2 * kernel_allreduce(p, rows * 4096 * 2, DGX)
    alone = verify_work(EIGHT, tokens, batch, 4096, p=p).seconds(DGX.device)
    found = verify_seconds(EIGHT, tokens, batch, 4096, DGX, p=p)
    assert found == pytest.approx(alone + 32 * layer, rel=1e-6)
    assert verify_seconds(EIGHT, 5, 2, 4096, DGX) == verify_work(EIGHT, 5, 2, 4096).seconds(
        DGX.device
    )


@pytest.mark.parametrize(
    "batch, context, p, most", [(1, 2048, 1, 400), (8, 8192, 1, 400), (32, 65536, 8, 12)]
)
def test_the_ridge_is_the_last_step_within_the_limit(batch, context, p, most):
    """Against looking at every number of tokens."""
    seconds = [verify_seconds(EIGHT, n, batch, context, DGX, p=p) for n in range(1, most)]
    within = [n for n, s in enumerate(seconds, start=1) if s <= 1.1 * seconds[0]]
    assert free_tokens(EIGHT, batch, context, DGX, p=p) == within[-1] == len(within) < most - 1


def test_at_long_contexts_the_ridge_is_that_of_attention_whatever_the_batch():
    """b/2 · R/B · n_kv/n_h = 295 / 4 = 73.8, beside which the weights count for nothing; and at
    short ones 295 / batch."""
    long = [free_tokens(EIGHT, batch, 2**30, DGX, more=0.001) for batch in (1, 8, 128)]
    assert long == [73, 73, 73]
    short = [batch * free_tokens(EIGHT, batch, 1, DGX, more=0.01) for batch in (1, 8, 64)]
    np.testing.assert_allclose(short, 295, rtol=0.15)  # whole tokens, of 64 texts 4
    sixteen = [
        verify_seconds(EIGHT, 16, 128, n, DGX) / verify_seconds(EIGHT, 1, 128, n, DGX)
        for n in (2048, 8192, 32768, 131072)
    ]
    np.testing.assert_allclose(sixteen, [2.81, 1.59, 1.16, 1.04], atol=0.005)


def test_bad_input():
    with pytest.raises(ValueError, match="tokens: expected an integer of at least 1, got 0"):
        verify_work(TINY, 0, 1, 8)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        verify_seconds(TINY, 1, 1, 8, DGX, dtype="int4")
    with pytest.raises(ValueError, match="merge: expected one of"):
        free_tokens(TINY, 1, 8, DGX, merge="post")
    with pytest.raises(ValueError, match="at most 4096 devices"):
        free_tokens(TINY, 1, 8, DGX, p=4097)


def test_what_fits():
    """16 GB of weights leave room for 488,000 tokens of 131,072 bytes beside them."""
    assert cache_fits(EIGHT, 1, 490_000, DGX.device)
    assert not cache_fits(EIGHT, 1, 520_000, DGX.device)
    assert cache_fits(EIGHT, 8, 490_000, DGX.device, p=8)
