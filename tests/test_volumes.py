"""The papers' volumes and memory: their formulas, as printed, beside what compiled programs do.

All formulas count elements; 2024 eq. 29-35 are 2025 eq. 8-14. In the papers' symbols: b texts, t
keys on each of p devices, n_h heads of d_h, d = n_h d_h. Notebook 06 has the same formulas, and a
model of a network.
"""

import ast
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import (
    attend,
    collectives,
    finalize,
    kv_mesh,
    memory,
    ring_decode,
    tree_decode,
)

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "06_topology_and_cost.ipynb"
HEADS, HEAD_DIM = 16, 128  # of the papers' attention block
D = HEADS * HEAD_DIM
KEYS = 32 * 1024


def mem_ring(b, t, d):
    return 4 * b * t * d + 2 * b * d


def mem_tree(b, t, d, n_h):
    return 2 * b * t * d + 2 * b * d + 2 * b * n_h


def numel_kv(b, t, d):
    return 2 * b * t * d


def v_ring(b, t, d, p):
    return numel_kv(b, t, d) * p


def numel_state(b, d, n_h):
    return b * d + 2 * b * n_h


def v_tree(b, d, n_h, p):
    return 2 * (p - 1) / p * numel_state(b, d, n_h)


# ------------------------------------------------------------------------- compiled programs


def gather_keys(q, k, v, *, sharding):
    """Every device gets the whole cache."""

    def body(q, k, v):
        k, v = (jax.lax.all_gather(x, "kv", axis=1, tiled=True) for x in (k, v))
        return finalize(attend(q, k, v))[0]

    specs = {"in_specs": (P(), sharding.spec, sharding.spec), "out_specs": P()}
    return jax.jit(jax.shard_map(body, mesh=sharding.mesh, **specs, check_vma=False))(q, k, v)


DECODE = {
    "ring": ring_decode,
    "gather keys": gather_keys,
    **{name: functools.partial(tree_decode, method=name) for name in ("butterfly", "gather")},
    "tree": tree_decode,
}


@functools.cache
def compiled(name, p=8, keys=KEYS):
    sharding = NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))
    q, kv = (jax.ShapeDtypeStruct((1, n, HEADS, HEAD_DIM), jnp.float32) for n in (1, keys))
    program = functools.partial(DECODE[name], sharding=sharding)
    return jax.jit(program).lower(q, kv, kv).compile()


def put_in(name, **options):
    return sum(c.total_bytes for c in collectives(compiled(name, **options)))


def sent(name, **options):
    return sum(c.sent_bytes for c in collectives(compiled(name, **options)))


@pytest.mark.parametrize("p, keys", [(2, 2048), (8, KEYS)])
def test_the_papers_formulas_as_printed(p, keys):
    """Of 32-bit numbers, to the byte, for two numbers of devices and two lengths.

    eq. 31 sums over devices for one step, the explainer's "total" over both; eq. 35 is one
    device's share. One device of a ring sends at most its part of everything, once.
    """
    options = {"p": p, "keys": keys}
    assert put_in("tree", **options) == 4 * numel_state(1, D, HEADS)
    assert sent("tree", **options) == 4 * v_tree(1, D, HEADS, p)
    of_a_ring = put_in("ring", **options) / 4
    assert of_a_ring == (p - 1) * numel_kv(1, keys // p, D)
    assert p * of_a_ring == (p - 1) * v_ring(1, keys // p, D, p)
    assert of_a_ring < v_ring(1, keys // p, D, p)


def test_reference_counts():
    """8 devices, 32k keys, float32, 16 heads of 128: the numbers of the papers' own workload."""
    found = {
        name: [(c.kind, c.count, c.operand_bytes) for c in collectives(compiled(name))]
        for name in ("tree", "butterfly", "ring")
    }
    assert found == {  # of three Allreduces XLA joins the two sums
        "tree": [("all-reduce", 1, 64), ("all-reduce", 1, 8256)],
        "butterfly": [("collective-permute", 1, 8320)] * 3,
        "ring": [("collective-permute", 7, 4096 * 4 * D)] * 2,
    }
    # Of both what a device sends; of an Allreduce that is more than it puts in.
    assert sent("tree") == 14_560 and sent("ring") == put_in("ring") == 469_762_048
    assert round(sent("ring") / sent("tree")) == 32_264


def test_partially_reduced_objects_are_less_to_send_and_to_hold():
    """2024 and 2025 §7: an Allreduce of states, beside a gather of all states and one of keys."""
    assert (sent("tree"), sent("gather")) == (14_560, 58_240)
    assert sent("gather keys") == 4 * 7 * numel_kv(1, 4096, D)
    held = [memory(compiled(name)).held_bytes for name in ("tree", "gather", "gather keys")]
    assert held[0] < 1.01 * held[1] and 7 * held[0] < held[2]


@pytest.mark.usefixtures("optimized")
def test_compiled_memory():
    """A tree holds what eq. 30 says, within a tenth; a ring what eq. 29 says, and a chunk more.

    XLA keeps the caller's chunk besides the two that the ring moves; from JAX 0.12 on half of it.
    """
    tree = 4 * mem_tree(1, 4096, D, HEADS)
    ring = 4 * (mem_ring(1, 4096, D) + numel_kv(1, 4096, D))
    for name, wanted, least in (
        ("tree", tree, 0.95),
        ("butterfly", tree, 0.95),
        ("ring", ring, 0.8),
    ):
        assert least * wanted <= memory(compiled(name)).held_bytes <= 1.1 * wanted


def test_the_output_is_allocated_too():
    """2024 §6.2 says that a tree allocates none."""
    assert memory(compiled("tree")).output_bytes == 4 * D


# ---------------------------------------------------------------------------- what they mean


def test_v_ring_does_not_depend_on_the_devices():
    """2024 eq. 31 is 2·b·N·d, whatever p; what one step moves, by all devices."""
    steps = {v_ring(3, 640_000 // p, 2048, p) for p in (2, 8, 64, 128)}
    assert steps == {2 * 3 * 640_000 * 2048}


def test_memory_by_the_formulas():
    """A ring's memory over a tree's, by the keys on a device, and beside many layers' caches.

    2024 §6.2's condition 2·b·n_h ≤ 2·b·t·d is 1 ≤ t·d_h, so a tree holds less always. Figure 4's
    gap is 524,288,000 bytes at 64,000 keys a device, in 2 bytes, at hidden size 2048, on two
    devices; doubling the hidden size doubles it, to what the papers print as 1040 MB.
    """
    for t, ratio in ((1, 1.49), (16, 1.94), (1000, 2.0)):
        assert mem_ring(1, t, D) / mem_tree(1, t, D, HEADS) == pytest.approx(ratio, abs=0.005)
        assert mem_tree(1, t, HEADS, HEADS) <= mem_ring(1, t, HEADS)  # heads of one number
        assert numel_kv(1, t, D) > v_tree(1, D, HEADS, 2)  # of one device, all of its steps
    for hidden, gap in ((2048, 524_288_000), (4096, 1_048_576_000)):
        n_h = hidden // 128
        difference = 2 * (mem_ring(1, 64_000, hidden) - mem_tree(1, 64_000, hidden, n_h))
        assert difference == gap - 2 * 2 * n_h  # less the state's d and m
    for layers in (1, 32):
        others = (layers - 1) * numel_kv(1, 64_000, D)
        ratio = (mem_ring(1, 64_000, D) + others) / (mem_tree(1, 64_000, D, HEADS) + others)
        assert ratio == pytest.approx((layers + 1) / layers, rel=1e-3)


def test_a_rings_step_against_a_state():
    """The explainer's "about 4000 times" for Llama 3.1 8B at 32k on 8 devices, per step.

    It is for 32 key heads; the model has 8 (t d_kv against d + 2 n_h, as the explainer divides).
    At Table 1's lengths its "two to three" orders of magnitude are 2 to 3.9.
    """
    state = numel_state(1, 32 * 128, 32)
    for context, kv_heads, times in (
        (32_768, 32, 4033),
        (32_768, 8, 1008),
        (3_200, 8, 98),
        (262_144, 8, 8066),
    ):
        assert round(context // 8 * kv_heads * 128 / state) == times


def test_times_on_a_napkin():
    """One query reads 2·b·t·d elements and waits for memory; many wait for arithmetic.

    2024 §6.3 says O(10⁻⁵) s for 655 MB, which an H100 reads at 3.35 TB/s, and O(10⁻³) s to move
    them. §7: the states of 132 multiprocessors, written to memory and read, are little.
    """
    chunk, states = 2 * numel_kv(1, 80_000, D), 2 * 132 * 4 * numel_state(1, D, HEADS)
    for size, rate, seconds in (
        (chunk, 3.35e12, 195.6e-6),
        (chunk, 450e9, 1.46e-3),  # NVLink
        (chunk, 50e9, 13.1e-3),  # InfiniBand
        (states, 3.35e12, 0.66e-6),
    ):
        assert size / rate == pytest.approx(seconds, rel=0.01)
    for queries, waits_for_memory in ((1, True), (10_000, False)):
        multiplying = 4 * queries * 80_000 * D / 989e12
        assert (multiplying < chunk / 3.35e12) == waits_for_memory


# ------------------------------------------------------------------------------ the notebook


def definitions() -> dict:
    """What the notebook's cells of functions and constants alone define."""
    found = {"np": np}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        tree = ast.parse("".join(cell["source"])) if cell["cell_type"] == "code" else ast.parse("")
        kinds = {type(x) for x in tree.body}
        if ast.FunctionDef in kinds and kinds <= {ast.FunctionDef, ast.Assign, ast.ImportFrom}:
            exec(compile(tree, NOTEBOOK.name, "exec"), found)
    return found


SAID = definitions()


@pytest.mark.parametrize("formula", [mem_ring, mem_tree, numel_kv, numel_state, v_ring, v_tree])
def test_the_notebook_has_these_formulas(formula):
    arguments = (3, 4096, 2048, 8)[: formula.__code__.co_argcount]
    assert SAID[formula.__name__](*arguments) == formula(*arguments)


@pytest.mark.parametrize(
    "name, rounds, sent",
    [
        ("ring", 30, 30 * 100),
        ("tree", 16, 2 * 1600),
        ("by_nodes", 7, 2 * 1400 + 200),
        ("butterfly", 4, 4 * 1600),
    ],
)
def test_the_notebooks_collectives(name, rounds, sent):
    """Rounds and bytes of the busiest of 16 devices, and every contribution reaches all."""
    messages = SAID[name](16, 1600)
    sends, heard = np.zeros(16), np.eye(16, dtype=bool)
    for of_round in messages:
        before = heard.copy()
        for a, b, size in of_round:
            sends[a] += size
            heard[b] |= before[a]
    assert (len(messages), sends.max()) == (rounds, sent)
    assert heard.all()
