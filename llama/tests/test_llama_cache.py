"""The cache and the steps, on a small random Llama: any partition, any order, any lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llamas import SMALL

from treeattn import kv_mesh, memory, shard_lengths
from treeattn_llama import ATTENTIONS, Llama, in_order, layers, prefill
from treeattn_llama import cache as caches
from treeattn_llama.layers import extend_layer

TEXT = np.random.default_rng(0).integers(0, 96, 41)


@pytest.fixture(scope="module")
def eight(model):
    return model.on(kv_mesh(jax.devices()[:8]))


@pytest.fixture(scope="module")
def dense(model):
    """The logits after each token of TEXT, (41, vocabulary)."""
    return np.asarray(model.logits(TEXT[None])[0])


def check(logits, want):
    np.testing.assert_allclose(logits, want, atol=1e-4)


def after(model, *lengths):
    """(logits, cache) after so many tokens of TEXT, for each text, in a cache of 48."""
    prompts = [TEXT[:n].tolist() for n in lengths]
    return model.prefill(prompts, model.new_cache(len(prompts), 48))


def batch_mesh(batch: int, keys: int, **options):
    """A mesh whose axis "batch" comes last."""
    devices = np.array(jax.devices()[: batch * keys]).reshape(keys, batch)
    return jax.sharding.Mesh(devices, ("anything", "batch"), **options)


EXPLICIT = {"axis_types": (jax.sharding.AxisType.Explicit,) * 2}
MESHES = {
    "one": (lambda: None, "tree"),
    **{name: (lambda: kv_mesh(jax.devices()[:8]), name) for name in ATTENTIONS},
    "nodes": (lambda: kv_mesh(jax.devices()[:6], nodes=2), "tree"),
    "batch": (lambda: batch_mesh(2, 3, **EXPLICIT), "butterfly"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_attention_agrees_with_the_full_pass(model, dense, mesh):
    make, attention = MESHES[mesh]
    model = model.on(make()).using(attention)
    logits, cache = after(model, 30, 17)
    check(logits, dense[[29, 16]])
    for width in (1, 3) if mesh in ("one", "batch") else (1,):  # a token, and several at once
        start = np.asarray(cache.lengths)
        tokens = np.stack([TEXT[i : i + width] for i in start])
        logits, cache = model.step(tokens, cache)
        check(logits, [dense[i : i + width] for i in start])
    if mesh == "batch":
        check(model.logits(np.stack([TEXT, TEXT]))[1], dense)


@pytest.mark.parametrize("devices", [1, 3])
def test_prompts_of_several_lengths(model, dense, devices, monkeypatch):
    """By ring where there are several devices; in chunks of 16 tokens on one, of which some of the
    texts have none."""
    monkeypatch.setattr(prefill, "CHUNK", 16)
    model = model if devices == 1 else model.on(kv_mesh(jax.devices()[:devices]))
    logits, cache = after(model, 5, 40, 1, 16)
    assert cache.lengths.tolist() == [5, 40, 1, 16]
    check(logits, dense[[4, 39, 0, 15]])
    # … and each goes on by itself, one of them not at all.
    step, new = model.extend(TEXT[[5, 0, 1, 16]][:, None], cache)
    cache = model.commit(cache, new, counts=np.array([1, 0, 1, 1]))
    assert cache.lengths.tolist() == [6, 40, 2, 17]
    check(step[[0, 2, 3], 0], dense[[5, 1, 16]])


def test_shards_stay_balanced_and_hold_the_same_keys(model, eight, dense):
    """Prompts after each other, the first of too few tokens for the ring, or of enough."""
    _, alone = after(model, 41)
    for layer, (q, k, v) in enumerate(model.layers_qkv(TEXT[None])):
        assert q.shape == (1, 41, 4, 8) and k.shape == v.shape == (1, 41, 2, 8)
        check(alone.k[layer][:, :41], k)
        check(alone.v[layer][:, :41], v)
    for first in (1, 33):
        cache = eight.new_cache(1, 48)
        for start, stop in ((0, first), (first, 36), (36, 41)):
            logits, cache = eight.prefill([TEXT[start:stop].tolist()], cache)
            check(logits[0], dense[stop - 1])
            counts = [int(shard_lengths(stop, r, 48, 8, striped=True)) for r in range(8)]
            assert sum(counts) == stop and max(counts) - min(counts) <= 1
            # The device's own slots
            for shard in cache.k[1].addressable_shards:
                used = np.abs(np.asarray(shard.data)[0]).sum((1, 2)) > 0
                assert used[: counts[shard.index[1].start // 6]].all()
        for x, y in zip(alone.k + alone.v, cache.k + cache.v, strict=True):
            check(in_order(y, 8)[:, :41], x[:, :41])


def test_float64(dense, unchecked):
    """It agrees, and is not narrowed in silence."""
    wide = Llama.load(SMALL, dtype=jnp.float64).logits(TEXT[None])[0]
    assert wide.dtype == jnp.float64
    check(dense, wide)
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match=r"dtype: float64 needs .*jax_enable_x64"):
            Llama.load(SMALL, dtype="float64")
    finally:
        jax.config.update("jax_enable_x64", True)


def test_a_mask_for_each_text(model, unchecked):
    """Known or traced, also where devices share the texts out; one for all is refused."""
    model = model.on(batch_mesh(2, 1))
    cache = model.new_cache(2, 16)

    def logits(mask):
        return model.extend(TEXT[:6].reshape(2, 3), cache, mask=mask)[0]

    with pytest.raises(ValueError, match=r"mask: expected booleans \(2, 3, 3\), got"):
        logits(np.tri(3, dtype=bool)[None])
    for run in (logits, jax.jit(logits)):
        check(run(np.broadcast_to(np.tri(3, dtype=bool), (2, 3, 3))), logits(None))


def test_many_steps_over_devices(model):  # whose logits are not waited for: all run at once
    model = model.on(kv_mesh(jax.devices()[:2]))
    cache = model.new_cache(1, 64)
    for i in range(60):
        _, cache = model.step(TEXT[None, i % 41 : i % 41 + 1], cache)
    assert cache.lengths == 60


@pytest.mark.filterwarnings("ignore:capacity")
def test_a_step_copies_no_cache(model, optimized):
    cache = model.new_cache(1, 2**16)
    positions = np.zeros((1, 1), np.int32)
    w = model.weights
    x, rotation = layers.embed(TEXT[None, :1], positions, w.embedding, w.frequencies)
    layer, cached, counts = w.layers[0], cache.layers[0], np.ones(1, np.int32)
    options = {"cached": cached, "lengths": cache.lengths}
    read = extend_layer.lower(x, layer, rotation, static=model.static, **options).compile()
    _, new = read(x, layer, rotation, **options)
    shards = model.shards
    write = caches.append.lower(cached, new, cache.lengths, counts, shards=shards).compile()
    for program in read, write:
        assert memory(program).temporary_bytes < cached[0].nbytes / 4


# Calls that are refused

BAD_STEPS = [
    ({"tokens": [[96]]}, "tokens: expected ids from 0 to 95, got 96"),
    ({"tokens": [[-1]]}, "tokens: expected ids from 0 to 95, got -1"),
    ({"tokens": [1, 2]}, r"tokens: expected integers \(any, any\)"),
    ({"tokens": [[1], [2]]}, "tokens: the cache has 1 texts, got 2"),
    ({"tokens": [[1] * 3]}, "tokens: 9 tokens do not fit into a cache of 8"),
    ({"positions": np.zeros((1, 2), np.int32)}, r"positions: expected integers \(1, 1\)"),
    ({"mask": np.ones((1, 2, 2), bool)}, "mask: expected booleans"),
    ({"cache": None}, "cache: expected a Cache"),
]
BAD_COMMITS = [
    ({"select": [[0, 7]]}, "select: expected indices from 0 to 1, got 7"),
    ({"select": [[-1]]}, "select: expected indices from 0 to 1, got -1"),
    ({"select": [0]}, r"select: expected integers \(1, any\)"),
    ({"counts": np.array([1, 1])}, r"counts: expected integers \(1,\)"),
    ({"counts": [6]}, "counts: expected numbers of tokens from 0 to 2, got 6"),
    ({"counts": np.array([-3])}, "counts: expected numbers of tokens from 0 to 2, got -3"),
    ({"select": [[0]], "counts": [2]}, "counts: expected numbers of tokens from 0 to 1, got 2"),
    ({"select": [[0, 1, 1]], "counts": None}, "tokens: 9 tokens do not fit into a cache of 8"),
]
OTHER_HEADS = ((np.zeros((1, 2, 2, 4), np.float32),) * 2,) * 2
BAD_COMMITS += [
    ({"new": new}, "new: expected what extend returns, 2 layers")
    for new in ((1, 2), ((1, 2), (3, 4)), [], OTHER_HEADS)
]
BAD_PROMPTS = [
    ([[1] * 9], "prompts: 9 tokens do not fit into a cache of 8"),
    ([[1, 96]], "prompts: expected ids from 0 to 95, got 96"),
    ([[]], r"prompts: expected .* none of them empty, got lengths \[0\]"),
    ([[1], [2]], r"prompts: expected 1, got those of \[1, 1\]"),
    ([], r"prompts: expected .* none of them empty, got lengths \[\]"),
    (3, "prompts: expected lists of token ids"),
]


def test_bad_calls(model, unchecked):
    """They leave the cache as it was; a step and a commit that are right give it up."""
    cache = model.prefill([TEXT[:6].tolist()], model.new_cache(1, 8))[1]
    _, new = model.extend([[1, 2]], cache)
    for arguments, message in BAD_STEPS:
        call = model.extend if arguments.keys() & {"positions", "mask"} else model.step
        with pytest.raises((ValueError, TypeError), match=message):
            call(**{"tokens": [[1]], "cache": cache} | arguments)
    for arguments, message in BAD_COMMITS:
        with pytest.raises((ValueError, TypeError), match=message):
            model.commit(**{"cache": cache, "new": new} | arguments)
    for prompts, message in BAD_PROMPTS:
        with pytest.raises(ValueError, match=message):
            model.prefill(prompts, model.new_cache(1, 8) if len(str(prompts)) < 30 else cache)
    candidates = {"positions": [[6, 6, 6]], "mask": np.eye(3, dtype=bool)[None]}
    assert model.extend([[1, 2, 3]], cache, **candidates)[0].shape == (1, 3, 96)
    right = model.commit(cache, new, select=[[1, 0]], counts=[1])
    assert right.lengths == 7 and cache.k[0].is_deleted()  # written in place
    assert right.k[0][:, 6].any() and not right.k[0][:, 7:].any()
    _, full = model.step([[1]], right)
    with pytest.raises(ValueError, match="tokens: 9 tokens do not fit into a cache of 8"):
        model.extend([[1, 2, 3]], full, **candidates)
    _, two = model.prefill([[1], [2]], model.new_cache(2, 8))
    with pytest.raises(ValueError, match="new: the cache has 2 texts, got those of 1"):
        model.commit(two, new)


def test_a_cache_of_another_mesh_or_dtype_is_refused(model, eight, unchecked):
    """It would be read as if it lay as the model's own."""
    cache = model.new_cache(1, 16)
    for one, other in ((eight, model), (model, eight), (model.on(batch_mesh(2, 2)), eight)):
        with pytest.raises(ValueError, match=r"cache: expected .*, as the model, got"):
            one.step(np.zeros((2, 1), np.int32), other.new_cache(2, 16))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (cache.k, cache.v))
    with pytest.raises(ValueError, match=r"cache: expected layers, .* 'float32'.* 'bfloat16'"):
        model.step([[1]], type(cache)(*half, cache.lengths))
    # The same stripes under other names are the same.
    renamed = model.on(jax.sharding.Mesh(eight.mesh.devices.reshape(4, 2), ("a", "b")))
    assert renamed.step([[1]], eight.new_cache(1, 16))[0].shape == (1, 1, 96)


class NoHash:
    __hash__ = None

    def __call__(self):
        pass


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: m.using("trees"), r"attention: expected one of .*'tree'.*, got 'trees'"),
        (lambda m: m.using(["tree"]), "attention: expected one of .* or a hashable function"),
        (lambda m: m.using(NoHash()), "attention: expected one of .* or a hashable function"),
        (lambda m: m.on(8), r"mesh: expected a jax.sharding.Mesh or None, got 8"),
        (lambda m: m.new_cache(1, 0), "capacity: expected an integer of at least 1"),
        (lambda m: m.on(batch_mesh(2, 1)).new_cache(3, 48), "batch: expected a number of texts"),
        (lambda m: m.on(batch_mesh(2, 1)).logits([[1]]), "tokens: expected a number of texts"),
        (lambda m: Llama.load(SMALL, dtype="int8"), "dtype: expected a floating-point one"),
        (lambda m: Llama.load(SMALL, dtype=jnp.float8_e4m3fn), "dtype: .* of 16 bits or more"),
    ],
)
def test_bad_options(model, unchecked, call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(model)
