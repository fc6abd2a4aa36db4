"""What the programs for eight H100s send, where JAX's compiler for them is installed: no GPU."""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_pallas import on_cuda

import treeattn
from treeattn.program import collectives, count_collectives, sent_bytes, total_bytes

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(SCRIPTS))
spec = importlib.util.spec_from_file_location("gpu_programs", SCRIPTS / "gpu_programs.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
import described_gpus  # noqa: E402

sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def devices():
    try:
        return script.h100s(8)
    except NotImplementedError as missing:
        pytest.skip(str(missing))


P, L, H, H_KV, D = 4, 1, script.HEADS, script.KV_HEADS, script.HEAD_DIM
# A device's own rows and heads, halved along one of the two: rows times heads are the same.
STATE, PIVOT = (4 * script.ROWS * L * H // 2 * n for n in (D + 2, 1))
SHARD = 2 * 2 * script.ROWS * H_KV // 2 * D  # bytes of one key and its value
QUERY = 2 * script.ROWS * L * H // 2 * D  # bytes of a share of one query
RING = (P - 1) * SHARD * script.KEYS // P
PREFILL = (P - 1) * SHARD * script.TEXT // P

SENDS = {  # collectives, bytes put in, of them while attending
    "allreduce": (2, STATE, 0),  # XLA joins the two sums
    "butterfly": (2, 2 * STATE, 0),
    "gather": (1, STATE, 0),
    "reduce_scatter, scattered": (2, STATE, 0),
    "all_to_all, scattered": (1, STATE, 0),
    "allreduce, 16 bits": (2, STATE // 2, 0),
    "all_to_all, scattered, 16 bits": (1, STATE // 2, 0),
    "ring": (P - 1, RING, RING),
    "pass-Q": (P + 1, (P - 1) * QUERY + (P + 1) * STATE, (P - 1) * QUERY),
    "ring prefill": (P - 1, PREFILL, PREFILL),
}


@pytest.mark.parametrize("layout", script.LAYOUTS)
@pytest.mark.parametrize("name", SENDS)
def test_what_crosses_the_axis_of_keys_and_when(name, layout, devices):
    """Nothing crosses that of rows or heads; what a ring sends hides behind what it computes."""
    program = script.compiled(name, script.LAYOUTS[layout], devices)
    found = collectives(program)
    hidden = script.hidden_bytes(program.as_text())
    assert (count_collectives(found), total_bytes(found), hidden) == SENDS[name]
    assert all(c.devices == P for c in found if "permute" not in c.kind)
    if name == "allreduce":
        assert sent_bytes(found) == 24_960  # not 134,276,096: K and V of the other rows


def test_a_rings_loop_copies_no_message(devices):
    """A shard is packed once, and taken apart where it arrived; nothing is copied for a loop."""
    (axes,) = script.LONG.values()
    program = script.compiled("ring", axes, devices)
    shard = 2 * SHARD * script.KEYS // 8  # of all rows
    _, copied = script.kernels_and_copies(program.as_text())
    assert 8 * shard <= copied < 8 * shard + 2**28
    found = collectives(program)
    assert (count_collectives(found), total_bytes(found)) == (7, 7 * shard)
    assert script.hidden_bytes(program.as_text()) == 7 * shard


NODE_STATE = 2 * STATE  # of all rows and heads
BY_NODES = {  # of two nodes of four: collectives, bytes put in
    "hierarchical": (3, NODE_STATE + 2 * NODE_STATE // 4),
    "hierarchical, scattered": (2, NODE_STATE + NODE_STATE // 4),
    "hierarchical, 16 bits": (3, (NODE_STATE + 2 * NODE_STATE // 4) // 2),
}


@pytest.mark.parametrize("name", BY_NODES)
def test_three_collectives_by_nodes(name, devices):
    (axes,) = script.NODES.values()
    found = collectives(script.compiled(name, axes, devices))
    assert (count_collectives(found), total_bytes(found)) == BY_NODES[name]


ROWS, SIZES = script.LLAMA_ROWS // 2, script.LLAMA  # of a device's
ENDS = ROWS * (2 * SIZES.width + 4 * SIZES.vocabulary // 2)  # an embedding, half of the logits
SUMS = ROWS * 2 * 4 * SIZES.width  # a layer's two, in float32
KEY = 2 * 2 * ROWS * SIZES.kv_heads // 2 * SIZES.head_dim  # bytes of one key and its value
STEPS = {
    "tree": (2, 4 * ROWS * SIZES.heads // 2 * (SIZES.head_dim + 2)),
    "ring": (1, KEY * script.CAPACITY // 2),
}


@pytest.mark.parametrize("attention", STEPS)
def test_a_llamas_step_on_rows_heads_and_text(attention, devices):
    """Nothing crosses the rows' axis; the heads', two sums a layer and the model's two ends."""
    mesh, program = script.llama_step(
        {"batch": 2, "heads": 2}, script.LLAMA_STEPS[attention], devices
    )
    found = collectives(program, mesh)
    by_axes = {axes: [c for c in found if c.axes == axes] for axes in {c.axes for c in found}}
    assert set(by_axes) == {("heads",), ("kv",)}
    heads, text = by_axes["heads",], by_axes["kv",]
    assert (count_collectives(heads), total_bytes(heads)) == (4, ENDS + SUMS)
    assert (count_collectives(text), total_bytes(text)) == STEPS[attention]


def test_what_nobody_can_see_is_gathered(devices):
    """Without batch_axis, inside jit: the warning says so."""
    layout = script.LAYOUTS["rows over 2, keys over 4"]
    with pytest.warns(UserWarning, match="gathered"):
        program = script.compiled("allreduce", layout, devices, named=False)
    assert sent_bytes(collectives(program)) > 134_217_728


@pytest.mark.parametrize("capability", described_gpus.SHARED, ids=str)
def test_the_widest_kernel_fits_in_the_shared_memory_of_every_gpu(capability, devices):
    """Of float32 and heads of 256, with a mask, a bias and lengths; some have 99 KiB a block."""
    where = jax.sharding.SingleDeviceSharding(described_gpus.like_an_h100(*capability))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    cache = array((1, 8192, 1, 256), jnp.float32)
    options = {
        "mask": array((1, 1, 1, 8192), jnp.bool_),
        "bias": array((1, 4, 1, 8192), jnp.float32),
        "kv_lengths": array((1,), jnp.int32),
    }
    f = functools.partial(treeattn.attention, implementation="pallas")
    with on_cuda()[1]:
        traced = jax.jit(f).trace(array((1, 1, 4, 256), jnp.float32), cache, cache, **options)
        text = traced.lower().compile().as_text()
    assert text.count("__gpu$xla.gpu.triton") == 2
