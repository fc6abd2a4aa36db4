"""A Llama on a mesh whose axes share out rows, heads and text: one device's logits, bits and text,
and nothing that crosses an axis which it should not."""

import collections
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from treeattn import Llama, ancestor_mask, depths, kv_mesh
from treeattn.program import collectives, total_bytes
from treeattn_llama import Config, Layer, Weights, generate, in_order, rotary_frequencies
from treeattn_llama.attentions import CACHE_ATTENTIONS

pytestmark = pytest.mark.slow

# Two query heads for each key head, an MLP that 2 and 4 devices do not divide, every bias.
CONFIG = Config(
    vocabulary=42,
    width=16,
    layers=1,
    heads=8,
    kv_heads=4,
    head_dim=4,
    mlp_width=22,
    context=256,
    norm_epsilon=1e-6,
    rotary_base=1e4,
    attention_bias=True,
    mlp_bias=True,
)
TEXT = np.random.default_rng(0).integers(0, 42, (2, 40))
PROMPTS = [TEXT[0, :11].tolist(), TEXT[1, :6].tolist()]
PARENTS = np.array([-1, 0, 0, 1])
STEP = np.array([[3], [4]])


def random_weights(config: Config) -> Weights:
    rng = np.random.default_rng(1)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    d, f, n = config.width, config.mlp_width, config.vocabulary

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32)

    layer = Layer(
        attention_norm=draw(d),
        qkv=3 * draw(q + 2 * kv, d),
        output=draw(d, q),
        mlp_norm=draw(d),
        gate_up=draw(2 * f, d),
        down=draw(d, f),
        qkv_bias=draw(q + 2 * kv),
        output_bias=draw(d),
        gate_up_bias=draw(2 * f),
        down_bias=draw(d),
    )
    ends = {"embedding": 4 * draw(n, d), "norm": 4 * draw(d), "head": draw(n, d)}
    return Weights(layers=(layer,), frequencies=jnp.asarray(rotary_frequencies(config)), **ends)


@pytest.fixture(scope="module")
def one() -> Llama:
    return Llama(CONFIG, random_weights(CONFIG))


@pytest.fixture(scope="module")
def dense(one):
    """The logits after each token of TEXT, (2, 40, vocabulary)."""
    return np.asarray(one.logits(TEXT))


def check(found, expected, atol=2e-5):
    np.testing.assert_allclose(found, expected, atol=atol)


def decode(model):
    """The logits after prompts of two lengths, after a tree of candidates, after what is kept of
    it and, of the first text alone, a token."""
    logits, cache = model.prefill(PROMPTS, model.new_cache(2, 32))
    positions = np.asarray(cache.lengths)[:, None] + depths(PARENTS)
    tree = {"mask": ancestor_mask(PARENTS)[None], "positions": positions}
    candidates, new = model.extend(TEXT[:, 20:24], cache, **tree)
    cache = model.commit(
        cache, new, select=np.array([[0, 1, 3], [0, 2, 0]]), counts=np.array([3, 2])
    )
    last, cache = model.step(STEP, model.grow(cache, 40), counts=np.array([1, 0]))
    assert cache.lengths.tolist() == [15, 8]
    return np.asarray(logits), np.asarray(candidates), np.asarray(last)[0], cache


@pytest.fixture(scope="module")
def expected(one):
    return decode(one)


MESHES = {
    "2x2x2": {"batch": 2, "heads": 2},
    "2x1x4": {"batch": 2, "heads": 1},
    "1x4x2": {"batch": 1, "heads": 4},
    "2x1x2x2": {"batch": 2, "nodes": 2},
    "2x4x1": {"batch": 2, "heads": 4},
}


def mesh_of(name: str) -> Mesh:
    return kv_mesh(jax.devices()[:8], **MESHES[name])


@pytest.mark.parametrize("shard_weights", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_the_logits_are_those_of_one_device(one, expected, name, shard_weights):
    model = one.on(mesh_of(name), shard_weights=shard_weights)
    *logits, cache = decode(model)
    for found, want in zip(logits, expected, strict=False):
        check(found, want)
    shards = MESHES[name].get("nodes", 1) * model.mesh.shape[model.mesh.axis_names[-1]]
    for row, n in enumerate((15, 8)):
        check(in_order(cache.k[0], shards)[row, :n], expected[-1].k[0][row, :n])


def test_each_device_holds_its_own_keys(one):
    model = one.on(mesh_of("2x2x2"))
    keys = model.new_cache(4, 32).k[0]
    assert {s.data.shape for s in keys.addressable_shards} == {(2, 16, 2, 4)}
    for text in (model.layer_qkv(TEXT, 0), model.layer_qkv(TEXT[[1, 0]], 0)):
        assert [x.shape for x in text] == [(2, 40, 8, 4), (2, 40, 4, 4), (2, 40, 4, 4)]


# With the nodes of two devices, so that there is a hierarchy.
@pytest.fixture(scope="module", params=[False, True], ids=["weights by heads", "sharded"])
def prefilled(one, request):
    model = one.on(kv_mesh(jax.devices()[:8], heads=2, nodes=2), shard_weights=request.param)
    _, cache = model.prefill(PROMPTS, model.new_cache(2, 32))
    return model, cache


@pytest.mark.parametrize("attention", CACHE_ATTENTIONS)
def test_every_attention_by_name(prefilled, expected, one, attention):
    model, cache = prefilled
    check(model.using(attention).extend(STEP, cache)[0], step_on_one(one))


_found = {}


def step_on_one(one):
    if not _found:
        _, cache = one.prefill(PROMPTS, one.new_cache(2, 32))
        _found["step"] = np.asarray(one.extend(STEP, cache)[0])
    return _found["step"]


@pytest.mark.parametrize("prefill_with", ["chunks", "ulysses"])
def test_other_ways_of_prefill(one, dense, prefill_with):
    model = one.on(mesh_of("2x2x2"), prefill_with=prefill_with)
    logits, cache = model.prefill(PROMPTS, model.new_cache(2, 32), chunk=8)
    check(logits, [dense[0, 10], dense[1, 5]])
    check(model.step(TEXT[[0, 1], [11, 6]][:, None], cache)[0][:, 0], [dense[0, 11], dense[1, 6]])


@pytest.mark.parametrize("draft", [None, "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_one_device(one, draft, temperature):
    """Ragged prompts that repeat, and a key whose texts do: there is something to guess."""
    prompts = [[5, 6, 7, 8] * 3, [9, 3] * 4]
    options = {"max_new_tokens": 6, "capacity": 32, "budget": 4, "temperature": temperature}
    options |= {"key": jax.random.key(5)} if temperature else {}
    model = one.on(mesh_of("2x2x2"))
    found, want = (generate(m, prompts, draft=draft, **options) for m in (model, one))
    assert found.tokens == want.tokens
    assert (max(max(step.nodes) for step in found.trace) > 1) == (draft is not None)


# What crosses which axis


def step_program(model, batch: int = 2):
    """The compiled program of a step of one token, and its collectives."""
    model = dataclasses.replace(model, weights=model.weights)

    def step(weights, token, cache):
        return dataclasses.replace(model, weights=weights).extend(token, cache)[0]

    given = model.weights, np.zeros((batch, 1), np.int32), model.new_cache(batch, 32)
    return collectives(jax.jit(step).lower(*given).compile(), model.mesh)


def crossing(found, *axes: str) -> dict[str, int]:
    """How many of each kind cross exactly these axes."""
    kinds = collections.Counter()
    for c in found:
        if c.axes == axes:
            kinds[c.kind] += c.count
    return dict(kinds)


# Of the text's two devices, with four of the eight heads.
ON_TEXT = {
    "tree": {"all-reduce": 2},
    "ring": {"collective-permute": 2},
    "gather": {"all-gather": 1},
    "all_to_all": {"all-to-all": 1, "all-gather": 1},
    "reduce_scatter": {"all-reduce": 1, "reduce-scatter": 1, "all-gather": 1},
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("attention", ON_TEXT)
def test_what_crosses_which_axis(one, attention):
    """The rows' nothing; the heads' two sums and the ends; the text's what its attention needs."""
    found = step_program(one.on(mesh_of("2x2x2"), attention=attention))
    assert crossing(found, "kv") == ON_TEXT[attention]
    ends = {"all-gather": 1}  # the logits; the other sum is the embedding's
    assert crossing(found, "heads") == {"all-reduce": 2 + 1} | ends
    assert {c.axes for c in found} == {("heads",), ("kv",)}
    own = [c for c in found if c.axes == ("heads",)]
    assert total_bytes(own) == 4 * (3 * CONFIG.width + CONFIG.vocabulary // 2)  # of a row
    state = 4 * (CONFIG.heads // 2) * (CONFIG.head_dim + 2)
    if attention == "tree":
        assert total_bytes(found) - total_bytes(own) == state


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("shard_weights", [False, True])
def test_a_wire_of_16_bits(prefilled, one, shard_weights):
    """Output and lse in one message of 16-bit numbers, and logits that are moved a little."""
    options = {"attention": "all_to_all", "wire": jnp.bfloat16, "shard_weights": shard_weights}
    found = step_program(one.on(mesh_of("2x2x2"), **options))
    heads = CONFIG.heads // 2
    sent = [2 * heads * (CONFIG.head_dim + 2)]  # bytes of a row
    if not shard_weights:  # the merged states come together again
        sent.append(sent[0] // 2)
    ints = [c for c in found if c.axes == ("kv",) and c.shapes[0].startswith("u16")]
    assert [c.kind for c in ints] == ["all-to-all", "all-gather"][: len(sent)]
    assert [c.total_bytes for c in ints] == sent

    model, cache = prefilled
    for attention in ("all_to_all", "tree", "hierarchical", "pass_q"):
        logits = np.asarray(model.using(attention, wire="bfloat16").extend(STEP, cache)[0])
        error = np.abs(logits - step_on_one(one)).max()
        assert 1e-5 < error < 2**-6 * np.abs(logits).max()


def test_what_sends_no_states_has_no_wire(one):
    for attention in ("ring", lambda *_: None):
        with pytest.raises(ValueError, match=r"^wire: expected an attention that sends states"):
            one.using(attention, wire="bfloat16")
    with pytest.raises(ValueError, match=r"^wire: method 'exact'"):
        one.using("exact", wire="bfloat16")
    with pytest.raises(ValueError, match=r"^wire: expected a floating"):
        one.using("tree", wire="int8")


@pytest.mark.usefixtures("optimized")
def test_what_crosses_where_weights_are_sharded_too(one):
    """The sums are over the group and the heads at once; the rows' axis is still nobody's."""
    model = one.on(mesh_of("2x2x2"), shard_weights=True, attention="reduce_scatter")
    found = step_program(model)
    assert crossing(found, "heads", "kv") == {"all-reduce": 2 + 1, "all-gather": 1}
    assert crossing(found, "kv") == {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}
    assert {c.axes for c in found} == {("heads", "kv"), ("kv",)}


@pytest.mark.usefixtures("optimized")
def test_an_axis_that_is_not_there_costs_nothing(one):
    """Rows alone send what the text's devices send; heads alone merge nothing."""
    rows = step_program(one.on(mesh_of("2x1x4")))
    text = step_program(one.on(kv_mesh(jax.devices()[:4])), batch=1)
    assert [c._replace(axes=None) for c in rows] == [c._replace(axes=None) for c in text]
    assert crossing(rows, "kv") == {"all-reduce": 2}
    heads = step_program(one.on(mesh_of("2x4x1")))
    assert {c.axes for c in heads} == {("heads",)} and len(heads) == 4


# Meshes of other making


@pytest.mark.parametrize("kind", ["auto", "explicit", "no axis for the text"])
def test_axes_by_other_names_in_another_order(one, expected, kind):
    names, sizes = ("seq", "model", "data"), (2, 2, 2)
    if kind == "no axis for the text":
        names, sizes = ("model", "data"), (4, 2)
    types = (jax.sharding.AxisType.Explicit,) * len(names) if kind == "explicit" else None
    devices = np.array(jax.devices()[:8]).reshape(sizes)
    roles = {"batch_axis": "data", "head_axis": "model"}
    model = one.on(Mesh(devices, names, axis_types=types), shard_weights=True, **roles)
    for found, want in zip(decode(model), expected[:-1], strict=False):
        check(found, want)


def test_several_axes_for_one_role(one, dense):
    mesh = kv_mesh(jax.devices()[:8], nodes=2, heads=2)
    check(one.on(mesh, head_axis=("heads", "node")).logits(TEXT), dense)
    check(one.on(mesh, batch_axis="device", shard_weights=True).logits(TEXT), dense)
    text_alone = one.on(mesh, batch_axis=(), head_axis=())
    assert text_alone.place.text_alone and text_alone.new_cache(1, 1).capacity == 8


def test_elsewhere_and_back(one):
    """Zeros that filled what devices do not divide are gone again."""
    model = one.on(mesh_of("1x4x2"), shard_weights=True).on(mesh_of("2x2x2"))
    assert model.shard_weights
    for x, y in zip(*(jax.tree.leaves(m.on(None).weights) for m in (one, model)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_device_holds_its_part(one):
    """A fourth of what is dealt over 2x2 devices; of 22 columns in two parts of 12 each."""
    down = {False: (16, 11), True: (16, 6)}
    for shard_weights, shape in down.items():
        layer = one.on(mesh_of("2x2x2"), shard_weights=shard_weights).weights.layers[0]
        assert layer.down.addressable_shards[0].data.shape == shape
        parts = 4 if shard_weights else 2
        assert layer.qkv.addressable_shards[0].data.shape == (64 // parts, 16)
        assert layer.mlp_norm.addressable_shards[0].data.shape == (16,)


# Weights of 8 bits

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


@pytest.mark.parametrize("exact", [False, True])
def test_eight_bits(exact):
    """Sums of whole numbers over the heads' devices: exact, the bits are one device's. Otherwise
    a prompt's products are rounded to whole numbers or not by how many tokens a device has."""
    model = Llama.load(SMALL, weights="int8", exact=exact)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 9))
    logits, cache = model.prefill(tokens.tolist(), model.new_cache(2, 32))
    there = Llama.load(SMALL, weights="int8", exact=exact, mesh=mesh_of("2x2x2"))
    on_eight, dealt = there.prefill(tokens.tolist(), there.new_cache(2, 32))
    check(on_eight, logits, atol=1e-3)
    found, want = there.step(STEP, dealt)[0], model.step(STEP, cache)[0]
    check(found, want, atol=1e-3)
    if exact:
        np.testing.assert_array_equal(on_eight, logits)
        np.testing.assert_array_equal(found, want)


# What is refused

BAD = [
    ({"batch_axis": "rows"}, r"batch_axis: the mesh has axes \('batch', .*, not 'rows'"),
    ({"head_axis": ("kv", "kv")}, "head_axis: expected one or more different axes"),
    ({"head_axis": "batch"}, r"batch_axis, head_axis: expected different axes, got .*'batch'"),
    ({"head_axis": ("heads", "kv"), "batch_axis": ()}, None),
    ({"head_axis": ("batch", "heads", "kv"), "batch_axis": ()}, "1 or 2 or 4 could"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("roles", "message"), BAD)
def test_bad_axes(one, roles, message):
    if message is None:
        assert one.on(mesh_of("2x2x2"), **roles).place.groups == 4
        return
    with pytest.raises(ValueError, match=message):
        one.on(mesh_of("2x2x2"), **roles)


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_divide(one):
    with pytest.raises(ValueError, match=r"head_axis: the 8 devices .* share 4 key heads evenly"):
        one.on(kv_mesh(jax.devices()[:8], heads=8))
    with pytest.raises(ValueError, match=r"head_axis: the 4 .* share 2 key heads evenly; 1 or 2"):
        Llama.load(SMALL, mesh=mesh_of("1x4x2"))
    model = one.on(mesh_of("2x2x2"))
    multiple = "expected a multiple of 2 texts, .* share, got 3"
    with pytest.raises(ValueError, match=f"batch: {multiple}"):
        model.new_cache(3, 8)
    with pytest.raises(ValueError, match=f"tokens: {multiple}"):
        model.logits(TEXT[[0, 1, 0]])
    with pytest.raises(ValueError, match=f"prompts: {multiple}"):
        generate(model, [[1], [2], [3]], max_new_tokens=1)


@pytest.mark.usefixtures("unchecked")
def test_what_needs_a_mesh(one):
    with pytest.raises(ValueError, match="head_axis: expected a mesh with such an axis"):
        dataclasses.replace(one, head_axis="heads")
    model = one.on(mesh_of("2x2x2"))
    for moving in ({"shard_weights": True}, {"head_axis": ()}, {"mesh": None}):
        with pytest.raises(ValueError, match=r"using: call on\(mesh, …\)"):
            model.using("tree", **moving)
