"""What calls take: each wrong argument raises a ValueError or a TypeError that names it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import (
    AttentionState,
    collectives,
    cumulant,
    from_output,
    kv_mesh,
    memory,
    merge_across,
    pack,
    reduce_chain,
    reduce_tree,
    ring_attention,
    ring_decode,
    scan_states,
    simulate_devices,
    tree_decode,
    ulysses_attention,
    unpack,
)

# What each argument is not
NO_INTEGER = (2.5, 2.0, "2", None, [2], True, np.array([2]), np.float32(2), np.bool_(True), 1j)
NO_NUMBER = ("1", [[1.0], []], np.ones(2), 1j, float("nan"), float("inf"), object())
POSITIVE = (*NO_INTEGER, 0, -1)

STATES = AttentionState(np.zeros(3), np.ones(3), np.ones((3, 2)))
ONE = AttentionState(np.zeros(()), np.ones(()), np.ones(2))
BEAM = np.zeros((1, 2, 3), int)
Q, K = np.ones((1, 4, 2, 8), np.float32), np.ones((1, 4, 2, 8), np.float32)


def over(devices=2, *spec):
    return NamedSharding(kv_mesh(jax.devices()[:devices]), P(*(spec or (None, "kv"))))


def takes(function, given, **wrong):
    """(argument, call) for each wrong value of each argument, beside those that are given."""
    for argument, values in wrong.items():
        for value in values:
            call = functools.partial(function, **given() | {argument: value})
            shown = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # the same in every process
            name = f"{getattr(function, '__name__', 'call')} {argument}={shown:.30}"
            yield pytest.param(argument, call, id=name)


def across(**options):
    """`merge_across` on a device of a mesh of two."""
    mesh = over().mesh
    options = {"state": STATES, "axis_name": "kv"} | options
    body = functools.partial(merge_across, **options)
    return jax.shard_map(lambda: body(), mesh=mesh, in_specs=(), out_specs=P())()


SHARDINGS = (3, "kv", P(None, "kv"), over(2, None, None, None, "kv"))
SHARDINGS += (over(3, "kv"), over(3, None, None, "kv"))
DECODES = {"mask": [np.ones((1, 1, 4, 4))], "bias": [np.ones((2, 2))], "kv_lengths": [[5], [0.5]]}
CALLS = [
    *takes(kv_mesh, dict, devices=([], [1], "kv"), nodes=(*POSITIVE[:3], 0, -1, 7), heads=(0, 1.5)),
    *takes(simulate_devices, dict, n=POSITIVE),
    *takes(cumulant, lambda: {"q": Q[0, 0, 0], "k": K[0, :, 0], "v": K[0, :, 0]}, order=NO_INTEGER),
    *takes(reduce_tree, lambda: {"states": STATES}, arity=(*POSITIVE, 1), axis=(*NO_INTEGER, 1)),
    *takes(reduce_chain, lambda: {"states": STATES}, axis=(*NO_INTEGER, -2)),
    *takes(scan_states, lambda: {"states": STATES}, axis=NO_INTEGER, states=(None, tuple(ONE))),
    *takes(from_output, lambda: {"out": K[0], "lse": K[0, ..., 0]}, out=(None, [[1], []], "a")),
    *takes(from_output, lambda: {"out": K[0], "lse": K[0, ..., 0]}, lse=(K[0], 0.0)),
    *takes(AttentionState.identity, lambda: {"shape": (), "value_dim": 2}, dtype=(int, "int8")),
    *takes(across, dict, method=("tree", 3, None, "auto", "reduce_scatter"), state=(None, 3, ())),
    *takes(pack, lambda: {"beam": BEAM}, beam=(None, 3, "a", BEAM[0], BEAM + 0.5, [[[1], []]])),
    *takes(pack, lambda: {"beam": BEAM}, pad_token=(*NO_INTEGER, 2**70)),
    *takes(pack, lambda: {"beam": BEAM}, lengths=([[1, 9]], [[1, -1]], [1, 1], "a", [[0.5, 1]])),
    *takes(unpack, lambda: {"packed": K, "unpack_map": BEAM}, unpack_map=(None, BEAM[0], BEAM + 4)),
    *takes(unpack, lambda: {"packed": K, "unpack_map": BEAM}, packed=(K[0, 0, 0], [[1], []])),
    *takes(collectives, dict, program=(None, 3, "nothing", print)),
    *takes(memory, dict, compiled=(None, "nothing", print)),
]
for decode in tree_decode, ring_decode, ring_attention, ulysses_attention:
    given = lambda: {"q": Q, "k": K, "v": K, "sharding": over()}  # noqa: E731
    CALLS += takes(
        decode, given, sharding=SHARDINGS, scale=NO_NUMBER, q=(None, "a", Q[0], Q.astype(int))
    )
    CALLS += takes(
        decode, given, k=(K[0], K[:, :, :, :3]), v=(K[:, :3],), implementation=("fast", 3)
    )
    if decode in (tree_decode, ring_decode):
        CALLS += takes(decode, given, **DECODES)
CALLS += takes(tree_decode, given, method=("tree", 3, None, "exact", "auto"))


@pytest.mark.parametrize("argument, call", CALLS)
def test_a_wrong_argument_is_named(unchecked, argument, call):
    with pytest.raises((ValueError, TypeError), match=rf"^{argument}\b.*: |^{argument}: "):
        call()


@pytest.mark.parametrize(
    "n", [np.int8(7), np.uint64(7), jnp.int32(7), np.array(7)], ids=lambda n: type(n).__name__
)
def test_anybodys_whole_numbers_are_taken(unchecked, n):
    assert pack(BEAM, [[1, 1]], pad_token=n).packed_beam.tolist() == [[0]]
    assert reduce_tree(STATES, arity=n).max == 0
    assert kv_mesh(jax.devices()[:7], nodes=n).shape == {"node": 7, "device": 1}
    simulate_devices(n + 2)  # as many as there are
