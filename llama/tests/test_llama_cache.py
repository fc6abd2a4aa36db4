"""The cache and the steps, on a small random Llama: any partition, any order, any lengths."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import ancestor_mask, attend, depths, kv_mesh, memory, merge_across
from treeattn_llama import (
    ATTENTIONS,
    Llama,
    in_order,
    layers,
    prefill,
    shard_lengths,
)
from treeattn_llama import cache as caches
from treeattn_llama.layers import extend_layer

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
TEXT = np.random.default_rng(0).integers(0, 96, 41)


@pytest.fixture(scope="module")
def one():
    return Llama.load(SMALL)


@pytest.fixture(scope="module")
def eight(one):
    return one.on(kv_mesh(jax.devices()[:8]))


@pytest.fixture(scope="module")
def dense(one):
    """The logits after each token of TEXT, (41, vocabulary)."""
    return np.asarray(one.logits(TEXT[None])[0])


def check(logits, want):
    np.testing.assert_allclose(logits, want, atol=1e-4)


def test_one_device(one, dense):
    logits, cache = one.prefill([TEXT[:30].tolist()], one.new_cache(1, 48))
    check(logits[0], dense[29])
    check(one.step(TEXT[None, 30:], cache)[0][0], dense[30:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_agrees_with_the_full_pass(eight, dense, attention):
    model = eight.using(attention)
    logits, cache = model.prefill([TEXT[:30].tolist()], model.new_cache(1, 48))
    check(logits[0], dense[29])
    for i in range(30, 33):
        logits, cache = model.step(TEXT[None, i : i + 1], cache)
        check(logits[0, 0], dense[i])


def batch_mesh(batch: int, keys: int, **options):
    """A mesh whose axis "batch" comes last."""
    devices = np.array(jax.devices()[: batch * keys]).reshape(keys, batch)
    return jax.sharding.Mesh(devices, ("anything", "batch"), **options)


EXPLICIT = {"axis_types": (jax.sharding.AxisType.Explicit,) * 2}
MESHES = {
    "nodes": (lambda: kv_mesh(jax.devices()[:6], nodes=2), "tree"),
    "nodes, ring": (lambda: kv_mesh(jax.devices()[:4], nodes=2), "ring"),
    "batch": (lambda: batch_mesh(2, 3), "butterfly"),
    "explicit": (lambda: batch_mesh(2, 2, **EXPLICIT), "tree"),
}


SLOW = pytest.param("nodes, ring", marks=pytest.mark.slow)  # both of which others ask about


@pytest.mark.parametrize("mesh", ["nodes", "batch", "explicit", SLOW])
def test_other_meshes(one, dense, mesh):
    make, attention = MESHES[mesh]
    model = one.on(make()).using(attention)
    prompts = [TEXT[:30].tolist(), TEXT[:17].tolist()]
    logits, cache = model.prefill(prompts, model.new_cache(2, 48))
    check(logits, dense[[29, 16]])
    tokens = np.stack([TEXT[30:33], TEXT[17:20]])
    logits, cache = model.step(tokens, cache)  # several at once
    check(logits[0], dense[30:33])
    check(logits[1], dense[17:20])
    if mesh == "batch":
        check(model.logits(np.stack([TEXT, TEXT]))[1], dense)


def test_texts_that_the_devices_cannot_share(one):
    model = one.on(batch_mesh(2, 1))
    with pytest.raises(ValueError, match="batch: expected a number of texts that 2 parts"):
        model.new_cache(3, 48)
    with pytest.raises(ValueError, match="tokens: expected a number of texts that 2 parts"):
        model.logits(TEXT[None])


@pytest.mark.parametrize("devices", [1, 3])
def test_prompts_of_several_lengths(one, dense, devices, monkeypatch):
    """By ring where there are several devices; in chunks of 16 tokens on one."""
    monkeypatch.setattr(prefill, "CHUNK", 16)
    model = one if devices == 1 else one.on(kv_mesh(jax.devices()[:devices]))
    prompts = [TEXT[:n].tolist() for n in (5, 40, 1)]
    logits, cache = model.prefill(prompts, model.new_cache(3, 48))
    assert cache.lengths.tolist() == [5, 40, 1]
    check(logits, dense[[4, 39, 0]])
    # … and each goes on by itself, one of them not at all.
    step, new = model.extend(TEXT[[5, 0, 1]][:, None], cache)
    cache = model.commit(cache, new, counts=np.array([1, 0, 1]))
    assert cache.lengths.tolist() == [6, 40, 2]
    check(step[[0, 2], 0], dense[[5, 1]])


@pytest.mark.filterwarnings("ignore:capacity")
def test_long_prompts_of_several_texts_go_in_chunks(one, monkeypatch):
    """Of which some of the texts have no tokens."""
    monkeypatch.setattr(prefill, "CHUNK", 160)
    text = np.random.default_rng(1).integers(0, 96, 320)
    want = one.logits(text[None])[0]
    lengths = [320, 160, 150]
    prompts = [text[:n].tolist() for n in lengths]
    logits, cache = one.prefill(prompts, one.new_cache(3, 330))
    check(logits, want[np.array(lengths) - 1])
    step, _ = one.step(text[None, 150:151].repeat(3, 0), cache)
    check(step[2, 0], want[150])


@pytest.mark.parametrize("length", [1, 10])
def test_a_prompt_is_never_filled_up_to_more_than_twice_its_length(eight, dense, length):
    """Of few tokens for p² cards to deal they go in a chunk, of 16 tokens at least."""
    logits, cache = eight.prefill([TEXT[:length].tolist()], eight.new_cache(1, 48))
    check(logits[0], dense[length - 1])
    assert cache.lengths == length


def test_a_second_prompt_goes_after_the_first(eight, dense):
    _, cache = eight.prefill([TEXT[:30].tolist()], eight.new_cache(1, 48))
    logits, cache = eight.prefill([TEXT[30:].tolist()], cache)
    check(logits[0], dense[-1])


def test_shards_stay_balanced_and_hold_the_same_keys(one, eight):
    _, alone = one.prefill([TEXT.tolist()], one.new_cache(1, 48))
    cache = eight.new_cache(1, 48)
    for start, stop in ((0, 3), (3, 11), (11, 26), (26, 41)):
        _, cache = eight.prefill([TEXT[start:stop].tolist()], cache)
        counts = [int(shard_lengths(cache.lengths, r, 8)[0]) for r in range(8)]
        assert sum(counts) == stop and max(counts) - min(counts) <= 1
        # What the device really holds: the rows in use, and zeros after them.
        for shard in cache.k[1].addressable_shards:
            used = np.abs(np.asarray(shard.data)[0]).sum((1, 2)) > 0
            rank = shard.index[1].start // 6
            assert used[: counts[rank]].all()
    for x, y in zip(alone.k + alone.v, cache.k + cache.v, strict=True):
        check(in_order(y, 8)[:, :41], x[:, :41])


def test_a_growing_text_does_not_compile_anew(eight):
    _, cache = eight.prefill([TEXT[:8].tolist()], eight.new_cache(1, 48))
    _, cache = eight.step(TEXT[None, 8:9], cache)
    compiled = extend_layer._cache_size()
    for i in range(9, 20):
        _, cache = eight.step(TEXT[None, i : i + 1], cache)
    assert extend_layer._cache_size() == compiled


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_trees_of_the_same_sizes_compile_once(one, devices, caplog):
    """Drafts of a few sizes, any trees, any accepted paths, between plain steps."""
    model = one if devices == 1 else one.on(kv_mesh(jax.devices()[:devices]))
    _, cache = model.prefill([TEXT.tolist()], model.new_cache(1, 128))
    rng, sizes, compiled = np.random.default_rng(0), (1, 4, 16), []

    def verify(cache, n):
        parents = np.array([-1, *(rng.integers(i) for i in range(1, n))])
        positions = np.asarray(cache.lengths)[:, None] + depths(parents)
        tree = {"positions": positions, "mask": ancestor_mask(parents)[None]}
        logits, new = model.extend(rng.integers(96, size=(1, n)), cache, **tree)
        accepted = int(rng.integers(1, min(n, 3) + 1))
        path = np.zeros((1, n), np.int32)  # of any length, in as many places as there are tokens
        path[0, :accepted] = np.sort(rng.choice(n, accepted, replace=False))
        return logits, model.commit(cache, new, select=path, counts=np.array([accepted]))

    with jax.log_compiles():
        for _ in range(3):
            caplog.clear()
            for n in sizes:
                logits, cache = verify(cache, n)
                assert logits.shape == (1, n, 96)
                _, cache = model.step(rng.integers(96, size=(1, 1)), cache)
            compiled.append(sum("Finished XLA compilation" in m for m in caplog.messages))
    assert compiled[0] > len(sizes) and compiled[1:] == [0, 0]


def test_many_steps_over_devices(one):  # nobody looks at the logits, and all run at once
    model = one.on(kv_mesh(jax.devices()[:2]))
    cache = model.new_cache(1, 64)
    for i in range(60):
        _, cache = model.step(TEXT[None, i % 41 : i % 41 + 1], cache)
    assert cache.lengths == 60


def test_a_step_gives_up_its_cache(one):
    cache = one.new_cache(1, 48)
    one.step(TEXT[None, :1], cache)
    assert cache.k[0].is_deleted()  # written in place


def test_a_tree_of_candidates(eight, one):
    """Packed tokens with a tree mask: each sees the text and its ancestors; one path is kept."""

    def after(text):  # the logits after `text`, in full passes of one length
        return one.logits(np.array([text + [0] * (41 - len(text))]))[0, len(text) - 1]

    parents = np.array([-1, 0, 0, 1, 2, 2])
    tokens = np.array([7, 11, 12, 13, 14, 15])
    text = TEXT[:20]
    _, cache = eight.prefill([text.tolist()], eight.new_cache(1, 48))
    positions = 20 + depths(parents)[None]
    mask = ancestor_mask(parents)[None]
    logits, new = eight.extend(tokens[None], cache, positions=positions, mask=mask)
    for i in range(len(tokens)):
        path = [i]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        check(logits[0, i], after([*text, *tokens[path]]))

    # Accept 7, 12, 15, and go on from there.
    select = np.array([[0, 2, 5, 0]])
    cache = eight.commit(cache, new, select=select, counts=np.array([3]))
    assert cache.lengths.tolist() == [23]
    check(eight.step(np.array([[3]]), cache)[0][0, 0], after([*text, 7, 12, 15, 3]))


def test_commit_without_a_selection(eight, dense):
    _, cache = eight.prefill([TEXT[:20].tolist()], eight.new_cache(1, 48))
    logits, new = eight.extend(TEXT[None, 20:30], cache)
    check(logits[0], dense[20:30])
    cache = eight.commit(cache, new)
    check(eight.step(TEXT[None, 30:31], cache)[0][0, 0], dense[30])


def test_an_attention_of_ones_own(eight, dense):
    def blind(q, k, v, lengths, axes):
        state = merge_across(attend(q, k, v, kv_lengths=lengths), axes, method="gather")
        return state._replace(denominator=state.denominator * 0, numerator=state.numerator * 0)

    cache = eight.prefill([TEXT[:20].tolist()], eight.new_cache(1, 48))[1]
    seen = eight.using(blind).extend(TEXT[None, 20:21], cache)[0][0, 0]
    assert np.isfinite(seen).all() and np.abs(seen - dense[20]).max() > 0.1


def test_the_model_in_float64_agrees(one, dense):
    wide = Llama.load(SMALL, dtype=jnp.float64).logits(TEXT[None])[0]
    assert wide.dtype == jnp.float64
    check(dense, wide)


def test_float64_is_not_narrowed_in_silence(unchecked):
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match=r"dtype: float64 needs .*jax_enable_x64"):
            Llama.load(SMALL, dtype="float64")
    finally:
        jax.config.update("jax_enable_x64", True)


def test_token_rows_are_a_permutation():
    for p in (1, 3, 8):
        rows = caches.token_rows(np.arange(24), 24, p)
        assert sorted(rows) == list(range(24))
        assert (rows[:p] % (24 // p) == 0).all()  # the first p tokens begin the p shards


# What a step refuses


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokens": [[96]]}, "tokens: expected ids from 0 to 95, got 96"),
        ({"tokens": [[-1]]}, "tokens: expected ids from 0 to 95, got -1"),
        ({"tokens": [1, 2]}, r"tokens: expected integers \(any, any\)"),
        ({"tokens": [[0.5]]}, r"tokens: expected integers \(any, any\)"),
        ({"tokens": [[1], [2]]}, "tokens: the cache has 1 texts, got 2 rows"),
        ({"tokens": [[1] * 49]}, "tokens: 49 tokens do not fit into a cache of 48"),
        ({"positions": np.zeros((1, 2), np.int32)}, r"positions: expected integers \(1, 1\)"),
        ({"mask": np.ones((1, 1, 1))}, "mask: expected booleans"),
        ({"mask": np.ones((1, 2, 2), bool)}, "mask: expected booleans"),
    ],
)
def test_bad_steps(one, unchecked, arguments, message):
    cache = one.new_cache(1, 48)
    call = one.extend if arguments.keys() & {"positions", "mask"} else one.step
    with pytest.raises(ValueError, match=message):
        call(**{"tokens": [[1]], "cache": cache} | arguments)
    assert not cache.k[0].is_deleted()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"select": [[0, 7]]}, "select: expected indices from 0 to 1, got 7"),
        ({"select": [[-1]]}, "select: expected indices from 0 to 1, got -1"),
        ({"select": [0]}, r"select: expected integers \(1, any\)"),
        ({"counts": np.array([1, 1])}, r"counts: expected integers \(1,\)"),
        ({"counts": [6]}, "counts: expected numbers of tokens from 0 to 2, got 6"),
        ({"counts": np.array([-3])}, "counts: expected numbers of tokens from 0 to 2, got -3"),
        ({"counts": [0.5]}, r"counts: expected integers \(1,\)"),
        ({"select": [[0]], "counts": [2]}, "counts: expected numbers of tokens from 0 to 1, got 2"),
        ({"select": [[0, 1, 1]], "counts": None}, "tokens: 9 tokens do not fit into a cache of 8"),
    ],
)
def test_bad_commits(one, unchecked, arguments, message):
    cache = one.prefill([TEXT[:6].tolist()], one.new_cache(1, 8))[1]
    _, new = one.extend([[1, 2]], cache)
    with pytest.raises(ValueError, match=message):
        one.commit(cache, new, **arguments)
    assert one.commit(cache, new, select=[[1, 0]], counts=[1]).lengths == 7


OTHER_HEADS = np.zeros((1, 2, 2, 4), np.float32)


@pytest.mark.parametrize("new", [(1, 2), ((1, 2), (3, 4)), [], ((OTHER_HEADS, OTHER_HEADS),) * 2])
def test_what_extend_did_not_return_is_not_committed(one, unchecked, new):
    with pytest.raises(TypeError, match=r"new: expected what extend returns, 2 layers"):
        one.commit(one.new_cache(1, 8), new)


def test_a_cache_of_another_mesh_or_dtype_is_refused(one, eight, unchecked):
    """It would be read as if it lay as the model's own."""
    _, cache = one.prefill([TEXT[:6].tolist()], one.new_cache(1, 16))
    for model, other in ((eight, one), (one, eight), (one.on(batch_mesh(2, 2)), eight)):
        with pytest.raises(ValueError, match=r"cache: the model's lie .*, got one that lies"):
            model.step(np.zeros((2, 1), np.int32), other.new_cache(2, 16))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (cache.k, cache.v))
    with pytest.raises(ValueError, match=r"cache: expected layers, .* 'float32'.* 'bfloat16'"):
        one.step([[1]], type(cache)(*half, cache.lengths))
    # The same stripes under other names are the same.
    renamed = one.on(jax.sharding.Mesh(eight.mesh.devices.reshape(4, 2), ("a", "b")))
    assert renamed.step([[1]], eight.new_cache(1, 16))[0].shape == (1, 1, 96)


def test_one_mask_for_all_texts(one):
    """Known or traced, also where devices share the texts out."""
    model = one.on(batch_mesh(2, 1))
    cache = model.new_cache(2, 16)
    tokens = np.array([[1, 2, 3]] * 2)
    mask = np.tri(3, dtype=bool)[None]
    want, _ = model.extend(tokens, cache)
    check(model.extend(tokens, cache, mask=mask)[0], want)
    traced = jax.jit(lambda mask, cache: model.extend(tokens, cache, mask=mask)[0])
    check(traced(mask, cache), want)


def test_extend_checks_the_room(one, unchecked):
    cache = one.prefill([TEXT[:6].tolist()], one.new_cache(1, 8))[1]
    with pytest.raises(ValueError, match="tokens: 9 tokens do not fit into a cache of 8"):
        one.extend([[1, 2, 3]], cache)
    candidates = {"positions": [[6, 6, 6]], "mask": np.eye(3, dtype=bool)[None]}
    assert one.extend([[1, 2, 3]], cache, **candidates)[0].shape == (1, 3, 96)
    _, cache = one.step([[1, 2]], cache)
    with pytest.raises(ValueError, match="tokens: 9 tokens do not fit into a cache of 8"):
        one.extend([[1, 2, 3]], cache, **candidates)


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[1] * 49], "prompts: 49 tokens do not fit into a cache of 48"),
        ([[1, 96]], "prompts: expected ids from 0 to 95, got 96"),
        ([[]], r"prompts: expected lists .*, none of them empty, got lengths \[0\]"),
        ([[1], [2]], r"prompts: expected 1, got those of \[1, 1\]"),
        ([], r"prompts: expected lists .*, none of them empty, got lengths \[\]"),
    ],
)
def test_bad_prompts(one, prompts, message):
    cache = one.new_cache(1, 48)
    with pytest.raises(ValueError, match=message):
        one.prefill(prompts, cache)
    assert not cache.k[0].is_deleted()


@pytest.mark.filterwarnings("ignore:capacity")
def test_a_step_copies_no_cache(one, optimized):
    cache = one.new_cache(1, 2**16)
    positions = np.zeros((1, 1), np.int32)
    w = one.weights
    x, rotation = layers.embed(TEXT[None, :1], positions, w.embedding, w.frequencies)
    layer, cached, counts = w.layers[0], cache.layers[0], np.ones(1, np.int32)
    options = {"cached": cached, "lengths": cache.lengths}
    read = extend_layer.lower(x, layer, rotation, static=one.static, **options).compile()
    _, new = read(x, layer, rotation, **options)
    layout = one.layout
    write = caches.append.lower(cached, new, cache.lengths, counts, layout=layout).compile()
    for program in read, write:
        assert memory(program).temporary_bytes < cached[0].nbytes / 4


def test_layers_qkv_is_what_the_cache_holds(one):
    _, cache = one.prefill([TEXT.tolist()], one.new_cache(1, 48))
    for layer, (q, k, v) in enumerate(one.layers_qkv(TEXT[None])):
        assert q.shape == (1, 41, 4, 8) and k.shape == v.shape == (1, 41, 2, 8)
        check(cache.k[layer][:, :41], k)
        check(cache.v[layer][:, :41], v)


def test_bad_options(one, unchecked):
    with pytest.raises(ValueError, match=r"attention: expected one of .*'tree'.* got 'trees'"):
        one.using("trees")
    with pytest.raises(TypeError, match="attention: expected a name or a function, got list"):
        one.using(["tree"])
    with pytest.raises(TypeError, match="attention: expected a hashable function, got F"):
        one.using(type("F", (), {"__call__": lambda: 0, "__hash__": None})())
    with pytest.raises(TypeError, match=r"mesh: expected a jax.sharding.Mesh or None, got 8"):
        one.on(8)
    with pytest.raises(ValueError, match="capacity: expected an integer of at least 1"):
        one.new_cache(1, 0)
