"""Faults that show only at some size: in a full last block, behind a tile, past a counter."""

import numpy as np
import pytest
from right_ones import build, commit

from treeattn_conformance import (
    attend,
    check_attention,
    check_gradients,
    check_merge,
    check_tree,
    merge,
)
from treeattn_conformance.gradients import backward
from treeattn_conformance.reference import clean

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def last_block_lost_where_full(n, block):
    """The number of keys that are seen of n."""
    return n - block if n > block and n % block == 0 else n


# Merges that change a right answer


def maximum_of_the_first(number):
    def wrong(parts):
        _, lse = clean(*map(np.stack, zip(*parts, strict=True)))
        m = lse[:number].max(axis=0).astype("float32")
        w = np.exp(lse.astype("float32") - np.where(np.isneginf(m), 0, m))
        right, total = merge(parts)
        return np.where(np.isinf(w).any(axis=0)[..., None], np.nan, right), total

    return wrong


def of_rows(number, axes):
    """Answers of the first `number` rows, of those along these axes together; zeros behind them."""

    def wrong(parts):
        out, lse = merge(parts)
        shape = [size if i in axes else 1 for i, size in enumerate(lse.shape)]
        done = np.arange(np.prod(shape)).reshape(shape) < number
        return np.where(done[..., None], out, 0), np.where(done, lse, 0)

    return wrong


# Kernels: some keys are not seen, or some answers are of others


def lengths_as(rule):
    def wrong(q, k, v, *, kv_lengths=None, **options):
        n = k.shape[1]
        lengths = rule(np.full(len(q), n) if kv_lengths is None else np.asarray(kv_lengths))
        return attend(q, k, v, kv_lengths=lengths, **options)

    return wrong


def of_queries_before(number, axis):
    def wrong(q, k, v, **options):
        done = np.arange(q.shape[axis]) < number
        out, lse = attend(q, k, v, **options)
        done = np.expand_dims(done, [i for i in range(3) if i != axis])
        return np.where(done[..., None], out, 0), np.where(done, lse, 0)

    return wrong


def positions_without_gaps(q, k, v, *, query_positions=None, **options):
    if query_positions is not None:
        options["query_positions"] = query_positions[0] + np.arange(len(query_positions))
    return attend(q, k, v, **options)


def positions_in(dtype):
    def wrong(q, k, v, **options):
        for name in ("query_positions", "key_positions"):
            if name in options:
                options[name] = options[name].astype(dtype)
        return attend(q, k, v, **options)

    return wrong


def sinks_of_eight_heads(q, k, v, *, sinks=None, **options):
    if sinks is not None:
        options["sinks"] = sinks[np.arange(len(sinks)) % 8]
    return attend(q, k, v, **options)


def maximum_kept_for_the_next_tile(q, k, v, **options):
    """In float32, in tiles of 64 queries."""
    out, lse = attend(q, k, v, **options)
    if q.shape[1] > 64:
        kept = lse[:, :1] - lse[:, 64:]
        gone = np.exp(-kept.astype("float32")) == 0
        out[:, 64:] = np.where(gone[..., None], 0, out[:, 64:])
    return out, lse


def heads_of_a_group_beyond(number, right):
    """The query heads of a key head beyond the first `number` are those before them."""

    def wrong(q, k, *arrays, **options):
        group = q.shape[2] // k.shape[2]
        at = np.arange(q.shape[2])
        return right(q[:, :, at - at % group % max(group, number) // number], k, *arrays, **options)

    return wrong


# Backward passes


def some_keys(rule):
    """rule(n): how many of n keys backward reads."""

    def wrong(q, k, v, dout, **options):
        n = rule(k.shape[1])
        dq, dk, dv = backward(q, k[:, :n], v[:, :n], dout, **options)
        rest = [(0, 0), (0, k.shape[1] - n), (0, 0), (0, 0)]
        return dq, np.pad(dk, rest), np.pad(dv, rest)

    return wrong


def last_tile_of_queries_lost_where_full(q, k, v, dout, **options):
    dq, dk, dv = backward(q, k, v, dout, **options)
    dq[:, last_block_lost_where_full(q.shape[1], 64) :] = 0
    return dq, dk, dv


def columns_behind_whole_blocks_lost(q, k, v, dout, **options):
    dq, dk, dv = backward(q, k, v, dout, **options)
    d = q.shape[3]
    dq[..., max(d // 64 * 64, min(d, 64)) :] = 0
    return dq, dk, dv


def lengths_of_whole_blocks_off(q, k, v, dout, *, kv_lengths=None, **options):
    if kv_lengths is not None:
        x = np.asarray(kv_lengths)
        kv_lengths = np.where((x > 16) & (x % 64 == 0), x - 1, x)
    return backward(q, k, v, dout, kv_lengths=kv_lengths, **options)


def of_eight_rows(q, k, v, dout, **options):
    found = backward(q, k, v, dout, **options)
    for x in found:
        x[8:] = 0
    return found


def of_128_values(q, k, v, dout, **options):
    dq, dk, _ = backward(q, k, v[..., :128], dout[..., :128], **options)
    return dq, dk, backward(q, k, v, dout, **options)[2]


# Trees


def mask_of_ten_children(parents, lengths):
    """The mask of a child beyond the tenth is that of the node before it."""
    answer = build(parents, lengths)
    for row, parent in zip(answer["mask"], parents, strict=True):
        for node in np.flatnonzero(parent >= 0):
            if (parent[:node] == parent[node]).sum() >= 10:
                row[node] = row[node - 1]
    return answer


def no_mask_of_one_node(parents, lengths):
    answer = build(parents, lengths)
    return {**answer, "mask": answer["mask"] & (parents.shape[1] > 1)}


def mask_of_eight_rows(parents, lengths):
    answer = build(parents, lengths)
    answer["mask"][8:] = False
    return answer


def positions_in_16_bits(parents, lengths):
    answer = build(parents, lengths)
    return {**answer, "positions": answer["positions"].astype("int16")}


def commit_of_eight(cache, lengths, accepted):
    """Entries behind the eighth stay where they are."""
    kept, new = commit(cache.copy(), lengths, accepted)
    for row, before, length in zip(kept, cache, lengths, strict=True):
        row[length + 8 :] = before[length + 8 :]
    return kept, new


SEEN = [
    ("301 shards, lse rising", check_merge, maximum_of_the_first(8)),
    ("301 shards, lse rising", check_merge, maximum_of_the_first(32)),
    ("1,025 queries, 64 heads", check_merge, of_rows(65_535, (0, 1, 2))),
    ("1,025 queries, 64 heads", check_merge, of_rows(1024, (1,))),
    (
        "512 keys, 128 queries",
        check_attention,
        lengths_as(lambda x: np.where((x > 128) & (x % 128 == 0), x - 128, x)),
    ),
    (
        "16 to 4,096 keys",
        check_attention,
        lengths_as(lambda x: np.where((x % 16 == 0) & (x < x.max()), x // 17 * 16, x)),
    ),
    (
        "16 to 4,096 keys",
        check_attention,
        lengths_as(lambda x: np.minimum(x, -(-x // 16) % 256 * 16)),
    ),
    ("16 to 4,096 keys", check_attention, of_queries_before(16, 0)),
    ("34 heads, 133 queries", check_attention, heads_of_a_group_beyond(8, attend)),
    ("34 heads, 133 queries", check_attention, heads_of_a_group_beyond(16, attend)),
    ("stripes of four keys", check_attention, positions_without_gaps),
    ("a causal prompt of 513", check_attention, positions_in("int16")),
    ("a causal prompt of 513", check_attention, positions_in("float16")),
    ("all options at once", check_attention, positions_in("uint16")),
    ("all options at once", check_attention, sinks_of_eight_heads),
    ("scores that rise", check_attention, maximum_kept_for_the_next_tile),
    (
        "640 keys, 128 queries",
        check_gradients,
        some_keys(lambda n: last_block_lost_where_full(n, 64)),
    ),
    ("640 keys, 128 queries", check_gradients, some_keys(lambda n: min(n, 600))),
    ("640 keys, 128 queries", check_gradients, last_tile_of_queries_lost_where_full),
    ("640 keys, 128 queries", check_gradients, columns_behind_whole_blocks_lost),
    ("grouped heads", check_gradients, heads_of_a_group_beyond(16, backward)),
    ("0 to 512 keys", check_gradients, lengths_of_whole_blocks_off),
    ("0 to 512 keys", check_gradients, of_eight_rows),
    ("other width of values", check_gradients, of_128_values),
    ("positions", check_tree, positions_in_16_bits),
    ("mask", check_tree, mask_of_ten_children),
    ("mask", check_tree, mask_of_eight_rows),
    ("mask", check_tree, no_mask_of_one_node),
    ("commit", lambda f: check_tree(commit=f), commit_of_eight),
]


@pytest.mark.parametrize(("question", "check", "wrong"), SEEN)
def test_few_questions_see_it(question, check, wrong):
    report = check(wrong)
    assert question in report.names("failed"), str(report)
    assert len(report.names("failed")) <= 2
    assert report.fingerprints == set()
