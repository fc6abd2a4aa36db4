"""New tokens that ride with the kernel over a cache: one attention to the keys of both."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from oracles import dense_attention
from test_llama_steps import TEXT, some_steps
from test_pallas import CALL, ERROR, lowered, on_cuda

from treeattn import ancestor_mask, kv_mesh
from treeattn.kernel.choice import resolve
from treeattn.kernel.inputs import Inputs, NewKeys
from treeattn.kernel.riding import attention_with_new, can_ride
from treeattn.llama import Llama, layers
from treeattn.llama.attentions import attend_with_new
from treeattn.llama.static import static_of

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
# (batch, queries, heads, key heads, cached keys, new keys, head_dim)
SHAPES = {
    "trees over caches of two splits": (2, 5, 6, 2, 300, 5, 16),
    "more new keys than a block": (1, 40, 4, 1, 90, 40, 256),
    "one new key": (2, 1, 4, 2, 300, 1, 16),
    "the last of some": (2, 1, 2, 2, 20, 7, 16),
}
CASES = [(name, "float32") for name in SHAPES] + [(next(iter(SHAPES)), "bfloat16")]
run = jax.jit(attention_with_new)


def draw(seed: int, shape, dtype: str):
    """(inputs, new), and what dense attention takes for both: (arrays, mask)."""
    b, l, h, h_kv, n, m, d = shape
    rng = np.random.default_rng(seed)
    shapes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, d), (b, m, h_kv, d), (b, m, h_kv, d)
    q, k, v, new_k, new_v = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    lengths = rng.integers(0, n + 1, b).astype(np.int32)
    cached = np.broadcast_to((np.arange(n) < lengths[:, None])[:, None, None], (b, 1, l, n))
    if l == m > 1:
        mask = np.stack([tree(rng, m) for _ in range(b)])[:, None]
        new = NewKeys(new_k, new_v, mask)
    else:
        counts = rng.integers(1, m + 1, b).astype(np.int32)
        mask = np.broadcast_to((np.arange(m) < counts[:, None])[:, None, None], (b, 1, l, m))
        new = NewKeys(new_k, new_v, lengths=counts)
    inputs = Inputs(q, k, v, lengths=lengths, scale=d**-0.5, implementation="pallas", stale=False)
    both = (jnp.concatenate(x, axis=1) for x in ((k, new_k), (v, new_v)))
    return inputs, new, (q, *both), np.concatenate([cached, mask], axis=-1)


def tree(rng, m: int):
    """Which node of a random tree sees which: its ancestors and itself."""
    return ancestor_mask(np.array([-1, *(rng.integers(i) for i in range(1, m))]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_any_trees_lengths_and_values(name, dtype):
    @settings(max_examples=6)
    @given(seed=st.integers(0, 2**32))
    def test(seed):
        inputs, new, arrays, mask = draw(seed, SHAPES[name], dtype)
        out = run(inputs, new)
        assert out.dtype == dtype
        rounding = float(jnp.finfo(dtype).eps) if dtype != "float32" else 0
        expected = dense_attention(*(np.asarray(x, np.float64) for x in arrays), mask=mask)
        np.testing.assert_allclose(
            np.asarray(out, np.float64), expected, atol=5 * ERROR[dtype], rtol=rounding
        )

    test()


def test_the_gradient_is_that_of_both():
    inputs, new, *_ = draw(0, SHAPES["trees over caches of two splits"], "float32")

    def loss(q, k, new_k, new_v, implementation, elsewhere=None):
        own = inputs.replace(q=q, k=k, implementation=implementation, elsewhere=elsewhere)
        return jnp.sum(attention_with_new(own, new._replace(k=new_k, v=new_v)) ** 2)

    arrays = inputs.q, inputs.k, new.k, new.v
    slopes = jax.jit(jax.grad(loss, range(4)), static_argnums=(4, 5))
    # On a CPU "elsewhere" is taken: two attentions, merged.
    found, expected = slopes(*arrays, "pallas"), slopes(*arrays, "pallas", "blockwise")
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert np.any(theirs)


def test_a_nan_in_a_new_key_is_not_lost():
    """Of the root in all queries that see it, of a leaf in its own."""
    inputs, new, *_ = draw(1, SHAPES["trees over caches of two splits"], "float32")
    out = run(inputs, new._replace(k=new.k.at[:, 0].set(jnp.nan)))
    assert np.all(np.isnan(out))
    out = run(inputs, new._replace(v=new.v.at[:, -1].set(jnp.nan)))
    assert np.all(np.isnan(out[:, -1]))


def test_what_rides():
    inputs, new, *_ = draw(0, SHAPES["one new key"], "float32")
    assert can_ride(inputs, new)
    for name in ("blockwise", "flash", dense_attention):
        assert not can_ride(inputs.replace(implementation=name), new)
    for keys, rides in ((64, True), (65, False), (0, False)):
        many = (jnp.zeros((2, keys, 2, 16)) for _ in "kv")
        assert can_ride(inputs, NewKeys(*many)) == rides


def test_two_kernels_on_cuda_and_none_elsewhere():
    inputs, new, *_ = draw(0, SHAPES["trees over caches of two splits"], "bfloat16")
    inputs = inputs.replace(elsewhere="blockwise")
    assert lowered(attention_with_new, inputs, new, context=on_cuda()[1]).count(CALL) == 2
    assert "triton" not in jax.jit(attention_with_new).lower(inputs, new).as_text()


@pytest.fixture(scope="module")
def model():
    return Llama.load(SMALL)


@pytest.mark.slow
def test_a_llama_whose_tokens_ride_gives_the_same(model, monkeypatch):
    """Prompts in chunks, trees of candidates, single tokens, rows of different lengths."""
    expected, _ = some_steps(model)
    rode = []

    def counting(*arguments):
        rode.append(out := attend_with_new(*arguments))
        return out

    monkeypatch.setattr(layers, "attend_with_new", counting)
    found, _ = some_steps(model.using("tree", implementation="pallas"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    # The prompt has nothing cached before it; trees, texts and single tokens have.
    assert [out is not None for out in rode] == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["kv", "heads"])
def test_over_devices_it_rides_where_no_text_is_dealt(model, axis):
    _, cache = model.prefill(TEXT[:1, :12].tolist(), model.new_cache(1, 24))
    options = {
        "mask": tree(np.random.default_rng(0), 4)[None],
        "positions": 12 + np.array([[0, 1, 1, 2]]),
    }
    expected, _ = model.extend(TEXT[:1, 12:16], cache, **options)
    if axis == "kv":
        spread = model.on(kv_mesh(jax.devices()[:2]), implementation="pallas")
    else:
        mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("kv", "heads"))
        spread = model.on(mesh, head_axis="heads", implementation="pallas")
    _, cache = spread.prefill(TEXT[:1, :12].tolist(), spread.new_cache(1, 24))
    found, _ = spread.extend(TEXT[:1, 12:16], cache, **options)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layers_step_is_one_call(model, tokens):
    model = model.using("tree", implementation="pallas")
    cache, static = model.new_cache(2, 512), static_of(model, (2, tokens))
    mask = np.tri(tokens, dtype=bool)[None] if tokens > 1 else None

    def step(weights, new, cache):
        how = {"static": static, "see_cache": True}
        return layers.run_layers(weights, new, cache, None, mask, None, **how)

    text = lowered(step, model.weights, TEXT[:, :tokens], cache, context=on_cuda()[1])
    assert text.count(CALL) == 2 and "stablehlo.while" not in text  # in the function of a layer


def test_the_cache_decides_who_runs_it():
    """What `resolve` leaves open until a program is compiled stays open."""
    inputs, new, *_ = draw(0, SHAPES["one new key"], "float32")
    unknown = resolve(None, inputs, None)
    assert unknown.elsewhere == "blockwise" and can_ride(unknown, new)
    assert not can_ride(resolve(None, inputs, "cpu"), new)
