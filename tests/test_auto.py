"""What "auto" takes, by invented times: `tree_decode`, `merge_across` and a Llama."""

import dataclasses
import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from measured_times import FAST, times_of
from oracles import dense_attention
from test_roles import CONFIG, random_weights, step_program

import treeattn
from treeattn import Llama, kv_mesh, merge_across, tree_decode
from treeattn.cost import collectives
from treeattn.devices.auto import StateSize, collectives_of, fastest_method
from treeattn.devices.layout import Layout
from treeattn.devices.merge import METHODS
from treeattn.kernel.inputs import check_inputs
from treeattn.llama.static import attention_of
from treeattn.measured import VARIABLE, Fit, Group, write_measured

EIGHT = jax.devices()[:8]
FLAT = kv_mesh(EIGHT)
NODES = kv_mesh(EIGHT, nodes=2)
ROLES = kv_mesh(EIGHT, batch=2, heads=2)
FLAT_METHODS = ("allreduce", "butterfly", "gather", "reduce_scatter", "all_to_all")
BY_NODES_METHODS = ("allreduce", "reduce_scatter", "hierarchical")
B, L, H, KV, D = 2, 1, 8, 2, 16


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(7)
    shapes = ((B, L, H, D), (B, 64, KV, D), (B, 64, KV, D))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "methods"),
    [
        (FLAT, FLAT_METHODS),
        (NODES, BY_NODES_METHODS),
    ],
    ids=["flat", "nodes"],
)
@pytest.mark.parametrize("wire", [None, "float32", "bfloat16"])
def test_what_auto_counts_is_what_is_compiled(mesh, methods, wire):
    """Kinds and bytes of every method's collectives, 16-bit inputs, whole and scattered."""
    assert {*METHODS} == {*FLAT_METHODS, *BY_NODES_METHODS}
    q, k, v = arrays(jnp.bfloat16)
    groups = [Group(8)] if mesh is FLAT else [Group(2, 4), Group(4)]
    item = None if wire is None else jnp.dtype(wire).itemsize
    size = StateSize(B * L, H, D, item=4, out_item=2, wire=item)
    for method in methods:
        if wire == "bfloat16" and method not in ("butterfly", "gather", "all_to_all"):
            continue  # a CPU adds up 16 bits as 32
        for scatter in (False, True):
            if scatter and method in ("allreduce", "butterfly", "gather"):
                continue
            decode = jax.jit(
                lambda q, k, v, m=method, s=scatter: tree_decode(
                    q, k, v, mesh=mesh, axis=mesh.axis_names, method=m, scatter=s, wire=wire
                )
            )
            found = collectives(decode.lower(q, k, v).compile())
            seen = [(x.kind, x.operand_bytes) for x in found for _ in range(x.count)]
            counted = collectives_of(method, size, groups, Group(8), scatter=scatter)
            assert sorted(seen) == sorted((x.kind, x.size) for x in counted), (method, scatter)


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        ({"all-reduce": FAST}, {}, "allreduce"),
        ({"collective-permute": FAST}, {}, "butterfly"),
        ({"all-gather": FAST}, {}, "gather"),
        ({"all-gather": FAST, "all-to-all": (1e-9, 0.0)}, {}, "all_to_all"),
        ({"all-to-all": FAST}, {"scatter": True}, "all_to_all"),
        ({"all-reduce": FAST, "reduce-scatter": FAST}, {"scatter": True}, "reduce_scatter"),
        ({"all-gather": FAST, "all-reduce": (1e-9, 0.0)}, {"block": 8}, "gather"),
    ],
)
def test_auto_takes_what_is_fastest(lines, options, expected, monkeypatch):
    """By invented times, and the result is dense attention's; from an argument or the variable."""
    taken = []

    def spy(*args, **kwargs):
        taken.append(fastest_method(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr("treeattn.devices.decode.fastest_method", spy)
    q, k, v = arrays()
    out = tree_decode(
        q, k, v, mesh=FLAT, axis="kv", method="auto", measured=times_of(lines), **options
    )
    assert taken == [expected]
    np.testing.assert_allclose(out, dense_attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_auto_over_nodes_and_with_other_axes():
    """Groups as the mesh has them: neighbours are near, nodes four apart; rows and heads divide."""
    inputs = check_inputs(*arrays(), None, None, None, None)
    near_only = times_of({"all-reduce": FAST, "all-gather": FAST})
    far = {"all-reduce": (1.0, 0.0), "all-gather": (1e-3, 0.0)}
    between = {(kind, Group(2, 4)): [Fit(math.inf, *line)] for kind, line in far.items()}
    times = replace(near_only, fits={**near_only.fits, **between})
    fastest = functools.partial(fastest_method, inputs=inputs)
    assert fastest(times, METHODS, layout=Layout(NODES, NODES.axis_names)) == "gather"
    layout = Layout(kv_mesh(EIGHT, batch=2), ("kv",), batch=("batch",))
    flat = [m for m in METHODS if m != "hierarchical"]
    assert fastest(near_only, flat, layout=layout) == "gather"
    with pytest.raises(ValueError, match=r"devices: .* was measured among \[8\] devices, got 4"):
        fastest(times_of({}, groups=((8, 1),)), flat, layout=layout)


# Small states are gathered, large ones summed: 8 states of 1 kB cost what two sums of 1 ms do.
BY_SIZE = times_of({"all-reduce": (1e-3, 1e-9), "all-gather": (1e-4, 1e-6)})


def test_auto_without_times_and_by_the_variable(tmp_path, monkeypatch):
    q, k, v = arrays()
    decode = jax.jit(lambda q, k, v: tree_decode(q, k, v, mesh=FLAT, axis="kv", method="auto"))
    found = [x.kind for x in collectives(decode.lower(q, k, v).compile())]
    assert found == ["all-reduce"] * 2
    path = tmp_path / "times.json"
    write_measured(times_of({"all-gather": FAST}), path)
    monkeypatch.setenv(VARIABLE, str(path))
    decode = jax.jit(lambda q, k, v: tree_decode(q, k, v, mesh=FLAT, axis="kv", method="auto"))
    assert [x.kind for x in collectives(decode.lower(q, k, v).compile())] == ["all-gather"]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no.json"))
    with pytest.raises(ValueError, match=r"measured: cannot read .*no\.json"):
        tree_decode(q, k, v, mesh=FLAT, axis="kv", method="auto")
    with pytest.raises(ValueError, match="method: expected one of"):
        tree_decode(q, k, v, mesh=FLAT, axis="kv", method="best")


def test_times_of_other_devices_are_refused():
    """Of another kind, and of fewer than the mesh has; of more, some of which the mesh has."""
    q, k, v = arrays()
    decode = functools.partial(tree_decode, q, k, v, mesh=FLAT, axis="kv", method="auto")
    with pytest.raises(ValueError, match=r"measured: expected times of 'cpu', .* of 'NVIDIA H100'"):
        decode(measured=replace(BY_SIZE, device="NVIDIA H100"))
    with pytest.raises(ValueError, match=r"measured: expected times of 8 devices at least.* of 4 "):
        decode(measured=replace(BY_SIZE, count=4))
    inputs = check_inputs(q, k, v, None, None, None, None)
    four = Layout(kv_mesh(EIGHT[:4]), ("kv",))
    assert fastest_method(BY_SIZE, ("allreduce", "gather"), inputs, four) == "gather"
    described = Layout(jax.sharding.AbstractMesh((8,), ("kv",)), ("kv",))  # of unknown devices
    assert fastest_method(BY_SIZE, ("allreduce", "gather"), inputs, described) == "gather"


# --------------------------------------------------------------------------- merge_across


def merged(mesh, method: str, rows: int, heads: int = 8, **options):
    """A compiled merge of random states over all of a mesh's axes, and its result."""
    names = mesh.axis_names

    def merge(lse, out):
        state = treeattn.from_output(out[0], lse[0])
        return treeattn.finalize(merge_across(state, names, method=method, **options))

    specs = {"in_specs": P(names), "out_specs": P(), "check_vma": False}
    rng = np.random.default_rng(3)
    lse = rng.normal(size=(8, rows, heads)).astype(np.float32)
    out = rng.normal(size=(8, rows, heads, 4)).astype(np.float32)
    program = jax.jit(jax.shard_map(merge, mesh=mesh, **specs)).lower(lse, out).compile()
    return collectives(program), program(lse, out)


BY_NODES = times_of({"all-to-all": FAST, "all-gather": (1e-6, 1e-6)})


@pytest.mark.parametrize(
    ("mesh", "times", "rows", "expected"),
    [
        (FLAT, None, 1, "allreduce"),
        (FLAT, BY_SIZE, 1, "gather"),
        (FLAT, BY_SIZE, 16, "allreduce"),
        (FLAT, times_of({"collective-permute": FAST}), 1, "butterfly"),
        (NODES, BY_NODES, 1, "hierarchical"),
    ],
)
def test_merge_across_takes_what_is_fastest(mesh, times, rows, expected):
    """Of what leaves everybody all heads, by the bytes of the states; results are equal."""
    found, (out, lse) = merged(mesh, "auto", rows, measured=times)
    named, (same, same_lse) = merged(mesh, expected, rows)
    assert [x.kind for x in found] == [x.kind for x in named]
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(lse, same_lse)


def test_merge_across_keeps_all_heads_on_every_device():
    """Were all-to-alls alone fast, tree_decode would share out the heads; a merge does not."""
    found, (out, _) = merged(FLAT, "auto", 1, measured=times_of({"all-to-all": FAST}))
    assert out.shape == (1, 8, 4) and "all-to-all" not in [x.kind for x in found]


def test_what_merge_across_refuses(tmp_path):
    state = treeattn.AttentionState.identity((1,), 2)
    with pytest.raises(ValueError, match=r"axis_name: method 'auto' expects axes of the mesh of a"):
        jax.vmap(lambda s: merge_across(s, "i", method="auto"), axis_name="i")(
            jax.tree.map(lambda x: x[None], state)
        )
    with pytest.raises(ValueError, match=r"measured: cannot read .*no\.json"):
        merged(FLAT, "auto", 1, measured=tmp_path / "no.json")
    with pytest.raises(ValueError, match=r"measured: expected times of 'cpu'"):
        merged(FLAT, "auto", 1, measured=replace(BY_SIZE, device="TPU v5"))
    with pytest.raises(ValueError, match=r"was measured among \[2\] devices, got 8"):
        merged(FLAT, "auto", 1, measured=times_of({}, groups=((2, 1),)))


# --------------------------------------------------------------------------- a Llama


@pytest.fixture(scope="module")
def one() -> Llama:
    return Llama(CONFIG, random_weights(CONFIG))


def test_a_llama_takes_what_is_fastest_for_a_step(one):
    """By how many tokens are new, and how the mesh shares them out; on one device, the tree."""
    flat = one.on(FLAT, attention="auto", measured=BY_SIZE)
    assert [attention_of(flat, 1, n) for n in (1, 128)] == ["gather", "tree"]
    assert [attention_of(flat, b, 8) for b in (1, 4)] == ["gather", "tree"]
    roles = flat.on(ROLES)  # half of the texts and half of the heads: a fourth of the bytes
    assert [attention_of(roles, b, 8) for b in (4, 16)] == ["gather", "tree"]
    among_all = {("all-to-all", Group(8)): [Fit(math.inf, 1.0, 0.0)]}
    by_nodes = replace(BY_NODES, fits={**BY_NODES.fits, **among_all})
    nodes = one.on(NODES, attention="auto", measured=by_nodes)
    assert attention_of(nodes, 1, 1) == "hierarchical"
    scattering = times_of({"all-to-all": FAST, "all-gather": (2e-6, 0.0)})
    weights_whole = one.on(FLAT, attention="auto", measured=scattering)
    assert attention_of(weights_whole, 1, 1) == "gather"  # as shares would be gathered, too
    assert attention_of(weights_whole.on(FLAT, shard_weights=True), 1, 1) == "all_to_all"
    for mesh in (None, kv_mesh(EIGHT[:1])):
        assert attention_of(flat.on(mesh), 1, 1) == "tree"
    assert attention_of(flat.using("ring"), 1, 1) == "ring"


@pytest.mark.slow
@pytest.mark.parametrize("wire", [None, "float32"])
@pytest.mark.parametrize("shard_weights", [False, True])
def test_what_a_llama_counts_is_what_is_compiled(one, shard_weights, wire):
    """Kinds and bytes along the text's axes, of methods that share out the heads."""
    mesh = kv_mesh(EIGHT, heads=2, nodes=2)
    model = one.on(mesh, shard_weights=shard_weights)
    size = StateSize(2, 4, 4, item=4, out_item=4, wire=None if wire is None else 4)
    groups = [Group(2, 2), Group(2)]
    for method in ("all_to_all", "hierarchical"):
        text = [c for c in step_program(model.using(method, wire=wire)) if "heads" not in c.axes]
        seen = [(c.kind, c.operand_bytes) for c in text for _ in range(c.count)]
        scatter = shard_weights and method == "all_to_all"
        sent = collectives_of(method, size, groups, Group(4), scatter=scatter, finished=False)
        counted = [(x.kind, x.size) for x in sent]
        if shard_weights:  # the projections' parts
            config = CONFIG
            qkv = (config.heads + 2 * config.kv_heads) * config.head_dim // 8
            counted.append(("all-gather", 4 * 2 * qkv))
        assert sorted(seen) == sorted(counted), method


@pytest.mark.slow
def test_a_llama_decodes_by_what_is_fastest(one):
    """2 x 2 x 2 devices, weights sharded: one device's logits, and the method's collectives."""
    text = np.random.default_rng(0).integers(0, 42, (2, 12))
    model = one.on(
        ROLES, shard_weights=True, attention="auto", measured=times_of({"all-gather": FAST})
    )
    logits = []
    for m in (one, model):
        _, cache = m.prefill(text[:, :11].tolist(), m.new_cache(2, 16))
        logits.append(np.asarray(m.step(text[:, 11:], cache)[0]))
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5)
    named = step_program(model.using("gather"))
    assert step_program(model) == named


def test_a_llama_reads_its_file_once(one, tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    write_measured(BY_SIZE, path)
    model = one.on(FLAT, attention="auto", measured=path)
    assert model.measured == BY_SIZE and "measured=CollectiveTimes(of 8 × 'cpu'" in repr(model)
    path.unlink()
    assert attention_of(model.on(ROLES), 2, 1) == "gather"
    assert one.on(FLAT, attention="auto").measured is None
    write_measured(BY_SIZE, path)
    monkeypatch.setenv(VARIABLE, str(path))
    assert one.on(FLAT).using("auto").measured == BY_SIZE


def test_what_a_llama_refuses(one, tmp_path):
    """Before any step: what cannot be read, and what was measured elsewhere."""
    auto = functools.partial(one.on, FLAT, attention="auto")
    with pytest.raises(ValueError, match=r"measured: cannot read .*no\.json"):
        auto(measured=tmp_path / "no.json")
    with pytest.raises(ValueError, match=r"measured: expected times of 'cpu'"):
        auto(measured=replace(BY_SIZE, device="TPU v5"))
    with pytest.raises(ValueError, match=r"was measured among \[2\] devices, got 8"):
        auto(measured=times_of({}, groups=((2, 1),)))
    with pytest.raises(ValueError, match=r"attention: expected one of .*'auto'\), got 'best'"):
        auto(attention="best")
    with pytest.raises(ValueError, match="wire: expected a floating-point dtype"):
        auto(wire="int8")
    assert dataclasses.replace(one, attention="auto", measured=BY_SIZE).attention == "auto"
