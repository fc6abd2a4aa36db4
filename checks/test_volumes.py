"""What compiled programs send and hold, beside the papers' formulas.

All formulas count elements; 2024 eq. 29-35 are 2025 eq. 8-14. In the papers' symbols: b texts, t
keys on each of p devices, n_h heads of d_h, d = n_h d_h. Of eight devices and 32k keys notebook 05
prints the same.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import DECODERS, over
from jax.sharding import PartitionSpec as P
from pages import REPOSITORY, run
from totals import count_collectives, total_bytes

from treeattn import attend, collectives, finalize, memory

HEADS, HEAD_DIM = 16, 128  # of the papers' attention block
D = HEADS * HEAD_DIM


def sent_bytes(found):
    """The least bytes that each device sends."""
    return sum(c.sent_bytes for c in found)


def numel_kv(b, t, d):
    return 2 * b * t * d


def numel_state(b, d, n_h):
    return b * d + 2 * b * n_h


def v_ring(b, t, d, p):
    return numel_kv(b, t, d) * p


def v_tree(b, d, n_h, p):
    return 2 * (p - 1) / p * numel_state(b, d, n_h)


STATE = 4 * numel_state(1, D, HEADS)  # bytes


def gather_keys(q, k, v, *, sharding):
    """Every device gets the whole cache."""

    def body(q, k, v):
        k, v = (jax.lax.all_gather(x, "keys", axis=1, tiled=True) for x in (k, v))
        return finalize(attend(q, k, v))[0]

    specs = {"in_specs": (P(), sharding.spec, sharding.spec), "out_specs": P()}
    return jax.jit(jax.shard_map(body, mesh=sharding.mesh, **specs, check_vma=False))(q, k, v)


def compiled(decode, context=2048, batch=1, **sizes):
    """A step of decoding from a cache over eight devices, or over axes of these sizes."""
    q, kv = (jax.ShapeDtypeStruct((batch, n, HEADS, HEAD_DIM), jnp.float32) for n in (1, context))
    program = functools.partial(decode, sharding=over(**sizes or {"keys": 8}))
    return jax.jit(program).lower(q, kv, kv).compile()


def test_allreduce_sends_equation_34():
    """b·d + 2·b·n_h elements, in at most two collectives, whatever the context."""
    for keys in (2048, 8192):
        found = collectives(compiled(DECODERS["allreduce"], keys, batch=3))
        assert {c.kind for c in found} == {"all-reduce"} and count_collectives(found) <= 2
        assert total_bytes(found) == 4 * numel_state(3, D, HEADS)


FORMULAS = {  # of eight devices: collectives, bytes put in, bytes sent
    "allreduce": (2, STATE, 4 * v_tree(1, D, HEADS, 8)),
    "butterfly": (3, 3 * STATE, 3 * STATE),
    "gather": (1, STATE, 7 * STATE),
    "all_to_all": (1, STATE, 7 * STATE // 8),
}


@pytest.mark.parametrize("method", FORMULAS)
def test_every_method_sends_what_its_formula_says(method):
    found = collectives(compiled(DECODERS[method]))
    sums = count_collectives(found), total_bytes(found), sent_bytes(found)
    assert sums == FORMULAS[method]


@pytest.mark.slow
def test_rounds_of_any_number_of_devices():
    """A butterfly's bits are equal everywhere, in ⌈log₂ p⌉ rounds or one more; windows need no more
    than ⌈log₂ p⌉, send more states, and devices differ in their last bits."""
    printed = run(sys.executable, REPOSITORY / "checks" / "rounds.py")
    rows = [map(int, line.split()) for line in printed.splitlines()]
    sent = {3: (4, 6), 5: (10, 15), 6: (12, 18), 7: (14, 21), 8: (24, 24), 12: (32, 48)}
    for p, rounds, states, outputs, rounds_of_windows, states_of_windows, differ in rows:
        fewest = (p - 1).bit_length()
        assert (rounds, outputs) == (fewest + (p & (p - 1) > 0), 1)
        assert rounds_of_windows == fewest and differ > 1
        assert (states, states_of_windows) == sent.pop(p)
    assert not sent


def test_by_nodes_a_share_of_the_state_leaves_each_device():
    """In three collectives: in the node, across, in the node."""
    nodes, g = 2, 4
    found = collectives(compiled(DECODERS["hierarchical"], keys_a=nodes, keys_b=g))
    in_order = np.arange(nodes * g).reshape(nodes, g)
    within, across = (tuple(map(tuple, x.tolist())) for x in (in_order, in_order.T))
    among = [(c.groups, c.operand_bytes) for c in found]
    assert among == [(within, STATE), (across, STATE // g), (within, STATE // g)]


def test_the_papers_formulas_as_printed():
    """Of 32-bit numbers, to the byte, on two devices.

    eq. 31 sums over devices for one step, the explainer's "total" over both; eq. 35 is one
    device's share. One device of a ring sends at most its part of everything, once.
    """
    p, keys = 2, 2048
    tree, ring = (collectives(compiled(DECODERS[x], keys, keys=p)) for x in ("allreduce", "ring"))
    assert total_bytes(tree) == STATE
    assert sent_bytes(tree) == 4 * v_tree(1, D, HEADS, p)
    of_a_ring = total_bytes(ring) / 4
    assert of_a_ring == (p - 1) * numel_kv(1, keys // p, D)
    assert p * of_a_ring == (p - 1) * v_ring(1, keys // p, D, p)
    assert of_a_ring < v_ring(1, keys // p, D, p)


def sums_by_a_tree(p: int) -> list[int]:
    """How often each device sends its whole operand: up a binomial tree, and down again."""
    sent, far = [0] * p, 1
    while far < p:
        for device in range(far, p, 2 * far):
            sent[device] += 1
            sent[device - far] += 1
        far *= 2
    return sent


def test_the_least_that_an_allreduce_sends():
    """2024 eq. 33, 2025 eq. 12: a bound for the mean over the devices, not for each of them. A
    search of all ways finds none by which all know all after fewer than 2 (p - 1) messages."""
    for p in (2, 3, 4):
        everything = (1 << p) - 1
        known, messages = {tuple(1 << device for device in range(p))}, 0
        while (everything,) * p not in known:
            pairs = [(a, b) for a in range(p) for b in range(p) if a != b]
            known = {(*k[:b], k[a] | k[b], *k[b + 1 :]) for k in known for a, b in pairs}
            messages += 1
        assert messages == 2 * (p - 1)
    by_tree = sums_by_a_tree(8)
    assert sum(by_tree) == 8 * 2 * 7 / 8  # a ring sends as much: 1.75 from each device
    assert min(by_tree) == 1 and max(by_tree) == 3


def test_partially_reduced_objects_are_less_to_send_and_to_hold():
    """2024 and 2025 §7: an Allreduce of states, beside a gather of all keys; and §6.2's output,
    which it says that a tree does not allocate."""
    tree, keys = (compiled(f, 32 * 1024) for f in (DECODERS["allreduce"], gather_keys))
    assert sent_bytes(collectives(keys)) == 4 * 7 * numel_kv(1, 4096, D)
    assert 7 * memory(tree).held_bytes < memory(keys).held_bytes
    assert memory(tree).output_bytes == 4 * D


def test_a_rings_step_against_a_state():
    """The explainer's "about 4000 times" for Llama 3.1 8B at 32k on 8 devices, per step.

    It is for 32 key heads; the model has 8 (t d_kv against d + 2 n_h, as the explainer divides).
    At Table 1's lengths its "two to three" orders of magnitude are 2 to 3.9.
    """
    state = numel_state(1, 32 * 128, 32)
    cases = (32_768, 32, 4033), (32_768, 8, 1008), (3_200, 8, 98), (262_144, 8, 8066)
    for context, kv_heads, times in cases:
        assert round(context // 8 * kv_heads * 128 / state) == times


def test_times_on_a_napkin():
    """One query waits for memory, many wait for arithmetic (2024 §6.3); the states of 132
    multiprocessors, written to memory and read, are little (§7)."""
    chunk = 2 * numel_kv(1, 80_000, D)
    for queries, waits_for_memory in ((1, True), (10_000, False)):
        multiplying = 4 * queries * 80_000 * D / 989e12
        assert (multiplying < chunk / 3.35e12) == waits_for_memory
    assert 2 * 132 * STATE / 3.35e12 == pytest.approx(0.66e-6, rel=0.01)
