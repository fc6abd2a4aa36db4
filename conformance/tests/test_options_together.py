"""Faults that show only where options meet, or beyond a tile: each is seen, with no wrong name."""

import numpy as np
import pytest

from treeattn_conformance import check_attention, check_gradients, check_tree
from treeattn_conformance.gradients import backward
from treeattn_conformance.reference import attend
from treeattn_conformance.token_trees import kept_path, tree_depths, tree_mask


def without(kept, dropped):
    """Where the first option is asked, the others are forgotten."""

    def kernel(q, k, v, **options):
        if options.get(kept) is not None:
            options = {name: x for name, x in options.items() if name not in dropped}
        return attend(q, k, v, **options)

    return kernel


def mask_tiles_of_128(q, k, v, mask=None):
    if mask is not None:
        mask = mask[:, :, np.arange(q.shape[1]) % 128]
    return attend(q, k, v, mask=mask)


def sink_without_keys(q, k, v, sinks=None, kv_lengths=None):
    out, lse = attend(q, k, v, sinks=sinks, kv_lengths=kv_lengths)
    if kv_lengths is not None:
        lse[kv_lengths == 0] = -np.inf  # it should be the sink
    return out, lse


KERNELS = {
    "sinks without a scale": without("sinks", ["scale"]),
    "sinks without lengths": without("sinks", ["kv_lengths"]),
    "lengths without a mask": without("kv_lengths", ["mask"]),
    "lengths without positions": without("kv_lengths", ["query_positions", "key_positions"]),
    "mask tiles of 128 queries": mask_tiles_of_128,
    "a sink without keys": sink_without_keys,
}


@pytest.mark.parametrize("fault", KERNELS)
def test_a_kernel(fault):
    report = check_attention(KERNELS[fault])
    assert report.names("failed") and not report.fingerprints


def dlse_of_128_keys(q, k, v, dout, dlse=None):
    dq, dk, dv = backward(q, k, v, dout, dlse=dlse)
    stopped = backward(q, k, v, dout)
    return dq, np.concatenate([dk[:, :128], stopped[1][:, 128:]], axis=1), dv


def causal_without_dlse(q, k, v, dout, dlse=None, causal=False):
    return backward(q, k, v, dout, dlse=None if causal else dlse, causal=causal)


def from_the_last_key(q, k, v, dout, causal=False):
    """Its causal mask ends at the last key, that of forward at the first."""
    l, n = q.shape[1], k.shape[1]
    if not causal or l == n:
        return backward(q, k, v, dout, causal=causal)
    padded = [np.concatenate([np.zeros((len(x), n - l, *x.shape[2:])), x], 1) for x in (q, dout)]
    dq, dk, dv = backward(padded[0], k, v, padded[1], causal=True)
    return dq[:, n - l :], dk, dv


@pytest.mark.parametrize("f", [dlse_of_128_keys, causal_without_dlse, from_the_last_key])
def test_a_backward(f):
    report = check_gradients(f)
    assert report.names("failed") and not report.fingerprints


def test_a_tree_mask_in_32_bits_and_a_short_commit():
    def build(parents, lengths):
        mask = tree_mask(parents)
        mask[:, :, 32:] = mask[:, :, : max(mask.shape[2] - 32, 0)]
        positions = lengths[:, None] + tree_depths(parents)
        return {"mask": mask, "positions": positions.astype(np.uint8)}

    def commit(cache, lengths, accepted):
        rows = kept_path(cache, lengths, accepted[:, :16])
        return rows, np.array([len(row) for row in rows])

    report = check_tree(build, commit)
    assert {"mask", "positions", "commit"} <= set(report.names("failed")), str(report)
    assert not report.fingerprints
