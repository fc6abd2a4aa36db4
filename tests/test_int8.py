"""Weights of 8 bits: their products against float64, and a Llama of them on every path."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_llama import plain_logits

from treeattn import Llama, ancestor_mask, depths, kv_mesh
from treeattn.llama import int8, open_checkpoint, rotary_frequencies
from treeattn.llama.int8 import Int8Matrix
from treeattn.llama.text import generate

LLAMAS = Path(__file__).parent / "data" / "llamas"
SMALL = LLAMAS / "llama3"
TEXT = np.random.default_rng(0).integers(0, 96, 41)


def some(*shape, seed=0):
    """Numbers of which some are thirty times the others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.where(rng.random(shape) < 0.02, 30, 1)
    return x.astype(np.float32)


def matrix_of(x):
    return Int8Matrix(*map(jnp.asarray, int8.quantize(x)))


def floats(matrix):
    """The matrix that an `Int8Matrix` stands for, in float64."""
    return np.asarray(matrix.rows, np.float64) * np.asarray(matrix.scale, np.float64)[:, None]


# The matrices


def test_each_row_is_rounded_to_the_nearest_step():
    x = some(50, 64)
    x[7] = 0
    x[8] = 1e-44
    rows, scale = int8.quantize(x)
    assert (rows.dtype, scale.dtype) == (np.int8, np.float32)
    np.testing.assert_allclose(scale, np.abs(x).max(axis=1) / 127, rtol=1e-6)
    error = np.abs(rows * scale[:, None].astype(np.float64) - x)
    assert (error <= 0.5001 * scale[:, None] + 1e-44).all()
    assert np.abs(rows[np.arange(50) != 8].astype(int)).max() == 127 and not rows[7].any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_error(wrong):
    x = some(3, 4)
    x[1, 2] = wrong
    with pytest.raises(ValueError, match="weights: int8 needs finite numbers"):
        int8.quantize(x)


def test_sums_cannot_overflow():
    """At the bound all products have their largest magnitude; a longer row is refused."""
    d = int8.LONGEST_ROW
    assert d * 127 * 128 < 2**31 <= (d + 1) * 127 * 128
    rows = np.full((1, d), 127, np.int8)
    digits = np.full((2, d), -128, np.int8)
    assert int(int8.sums_of_products(digits, rows)[0, 0]) == -d * 127 * 128
    with pytest.raises(ValueError, match=f"rows of at most {d} numbers in 32 bits, got {d + 1}"):
        int8.quantize(np.ones((1, d + 1), np.float32))


def test_two_digits_are_the_activation():
    x = some(20, 64)
    x[3] = 0
    x[4] = 1e-42
    digits, step = int8.to_digits(x, int8.largest_magnitude(x))
    high, low = np.split(np.asarray(digits, np.int64), 2)
    whole = 256 * high + low
    assert np.abs(high).max() <= 127
    np.testing.assert_allclose(step, np.abs(x).max(axis=1) / 32512, rtol=1e-6)
    error = np.abs(whole * np.asarray(step, np.float64)[:, None] - x)
    assert (error <= 0.51 * np.asarray(step)[:, None] + 1e-41).all()


# The products


@pytest.mark.parametrize("d", [64, 576])
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (8,), (9,), (5, 13)])
def test_products_are_those_of_the_quantized_matrix(tokens, d, monkeypatch):
    monkeypatch.setattr(int8, "INTEGER_TOKENS", 8)
    monkeypatch.setattr(int8, "FLOAT_BYTES", 4 * d * 30)  # 26 rows at a time, and 23 or none left
    matrix = matrix_of(some(101 if d == 64 else 104, d))
    x = some(*tokens, d, seed=1)
    y = jax.jit(int8.product)(x, matrix)
    largest = np.abs(x).max(axis=-1, keepdims=True) * np.abs(floats(matrix)).sum(axis=1)
    assert y.dtype == np.float32
    assert (np.abs(y - x.astype(np.float64) @ floats(matrix).T) <= 2e-5 * largest).all()
    few = np.prod(tokens) <= int8.INTEGER_TOKENS
    if few:  # exact, but for the digits and a last rounding
        digits, step = int8.to_digits(x.reshape(-1, d), int8.largest_magnitude(x.reshape(-1, d)))
        high, low = np.split(np.asarray(digits, np.float64), 2)
        exact = (256 * high + low) * np.asarray(step, np.float64)[:, None] @ floats(matrix).T
        np.testing.assert_allclose(y.reshape(exact.shape), exact, rtol=1e-6, atol=1e-6)


def test_a_token_has_the_same_bits_beside_any_others():
    matrix = matrix_of(some(96, 64))
    x = some(8, 64, seed=2)
    product = jax.jit(int8.product)
    alone = product(x[:1], matrix)[0]
    for others in ([0, 1], [3, 0, 2], [7, 6, 5, 4, 3, 2, 1, 0]):
        y = product(x[np.array(others)], matrix)[others.index(0)]
        np.testing.assert_array_equal(y, alone)


def test_parts_on_several_devices_have_the_bits_of_the_whole():
    matrix = matrix_of(some(20, 64))
    x = some(2, 3, 64, seed=3)
    whole = jax.jit(int8.product)(x, matrix)
    along = jax.sharding.PartitionSpec(None, "kv")
    parts = Int8Matrix(along, jax.sharding.PartitionSpec())
    specs = jax.sharding.PartitionSpec(None, None, "kv"), parts
    for p in (2, 4, 8):
        mesh = kv_mesh(jax.devices()[:p])
        summed = jax.shard_map(
            lambda x, w: int8.summed_product(x, w, ("kv",)),
            mesh=mesh,
            in_specs=specs,
            out_specs=jax.sharding.PartitionSpec(),
        )
        np.testing.assert_array_equal(jax.jit(summed)(x, matrix), whole)


@pytest.mark.parametrize("tokens", [1, 8, 9, 70])
@pytest.mark.parametrize("limit", [8, 1024])  # of tokens, for products of whole numbers
def test_derivatives_are_those_of_floats(tokens, limit, monkeypatch):
    """For any number of tokens, forward and reverse, on one device and on two."""
    monkeypatch.setattr(int8, "INTEGER_TOKENS", limit)
    matrix = matrix_of(some(20, 64))
    x, dx = some(tokens, 64, seed=3), some(tokens, 64, seed=4)
    dy = some(tokens, 20, seed=5)
    dscale = some(20, seed=6)
    replicated, along = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "kv")
    on_two = jax.shard_map(
        lambda x, rows, scale: int8.summed_product(x, Int8Matrix(rows, scale), ("kv",)),
        mesh=kv_mesh(jax.devices()[:2]),
        in_specs=(along, along, replicated),
        out_specs=replicated,
    )
    on_one = lambda x, rows, scale: int8.product(x, Int8Matrix(rows, scale))  # noqa: E731
    rows = np.asarray(matrix.rows, np.float64)
    forward = dx @ floats(matrix).T + x @ rows.T * dscale
    backward = dy @ floats(matrix), (x @ rows.T * dy).sum(axis=0)
    for product in (jax.jit(on_one), jax.jit(on_two)):
        of_floats = lambda x, scale, product=product: product(x, matrix.rows, scale)  # noqa: E731
        _, tangent = jax.jvp(of_floats, (x, matrix.scale), (dx, dscale))
        _, pull = jax.vjp(of_floats, x, matrix.scale)
        for found, expected in zip((tangent, *pull(dy)), (forward, *backward), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-4 * abs(expected).max())


def test_vmap_is_a_loop():
    matrix = matrix_of(some(20, 64))
    x = some(3, 2, 64, seed=4)
    mapped = jax.vmap(int8.product, in_axes=(0, None))(x, matrix)
    for row, y in zip(x, mapped, strict=True):
        np.testing.assert_allclose(y, int8.product(row, matrix), rtol=1e-6)


# The model


@pytest.fixture(scope="module")
def one():
    return Llama.load(SMALL, weights="int8")


@pytest.fixture(scope="module")
def wanted():
    """The logits after each token of TEXT, (41, vocabulary), of the quantized weights."""
    return logits_of_quantized(SMALL)


def logits_of_quantized(path):
    checkpoint = open_checkpoint(path)

    def read(name):
        x = checkpoint.read(name).astype(np.float32)
        return x if x.ndim == 1 else floats(matrix_of(x))

    quantized = dataclasses.replace(checkpoint, read=read)
    return plain_logits(quantized, TEXT, rotary_frequencies(checkpoint.config).astype(float))


def check(logits, wanted):
    """Two digits keep an activation to 1.5e-5 of the largest one of its token."""
    np.testing.assert_allclose(logits, wanted, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "llama31", "llama32", "biased"])
def test_every_kind_of_checkpoint(name):
    """Of 16 bits, tied, with biases: computed in float32."""
    model = Llama.load(LLAMAS / name, weights="int8")
    assert model.weights.embedding.dtype == model.weights.norm.dtype == np.float32
    wanted = logits_of_quantized(LLAMAS / name)
    check(model.logits(TEXT[None])[0], wanted)
    check(model.logits(TEXT[None, :7])[0], wanted[:7])
    if model.config.tied:
        assert model.weights.head is model.weights.embedding


def test_matrices_take_a_byte_a_weight(one):
    whole = Llama.load(SMALL)
    for field in ("qkv", "output", "gate_up", "down"):
        matrix = getattr(one.weights.layers[1], field)
        weights = getattr(whole.weights.layers[1], field)
        assert matrix.rows.dtype == np.int8 and matrix.rows.nbytes == weights.size
        assert matrix.scale.nbytes == 4 * len(weights)
        np.testing.assert_allclose(floats(matrix), weights, atol=0.02)
    assert "weights='int8'" in repr(one) and "int8" not in repr(whole)
    assert {x.dtype for x in jax.tree.leaves(one.weights)} == {np.dtype("int8"), np.dtype("f4")}


def every_path(model, wanted):
    """A prompt, a token, several, and a tree of candidates of which some are kept."""
    logits, cache = model.prefill([TEXT[:25].tolist()], model.new_cache(1, 64), chunk=16)
    check(logits[0], wanted[24])
    logits, cache = model.step(TEXT[None, 25:26], cache, last=True)
    check(logits[0], wanted[25])
    logits, cache = model.step(TEXT[None, 26:30], cache)
    check(logits[0], wanted[26:30])
    parents = np.array([-1, 0, 0, 2])
    tree = {"positions": 30 + depths(parents)[None], "mask": ancestor_mask(parents)[None]}
    logits, new = model.extend(np.array([[TEXT[30], 3, TEXT[31], TEXT[32]]]), cache, **tree)
    check(logits[0, [0, 2, 3]], wanted[30:33])
    cache = model.commit(cache, new, select=np.array([[0, 2, 3]]), counts=np.array([3]))
    check(model.step(TEXT[None, 33:34], cache, last=True)[0][0], wanted[33])


def test_every_path_on_one_device(one, wanted):
    check(one.logits(TEXT[None])[0], wanted)
    every_path(one, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "options"),
    [
        (2, {}),
        (3, {"shard_weights": True, "attention": "reduce_scatter"}),
    ],
    ids=lambda x: "-".join(map(str, x.values())) or "whole" if isinstance(x, dict) else str(x),
)
def test_every_path_on_several_devices(wanted, p, options):
    model = Llama.load(SMALL, weights="int8", mesh=kv_mesh(jax.devices()[:p]), **options)
    every_path(model, wanted)


@pytest.mark.slow
def test_elsewhere_and_back(one):
    """From whole weights to three devices, to two, to one: not a bit is lost."""
    three = one.on(kv_mesh(jax.devices()[:3]), shard_weights=True, attention="all_to_all")
    part = three.weights.layers[0].gate_up
    assert part.rows.addressable_shards[0].data.nbytes == part.rows.nbytes // 3
    assert part.scale.addressable_shards[0].data.nbytes == part.scale.nbytes // 3
    back = three.on(kv_mesh(jax.devices()[:2])).on(None, attention="tree")
    leaves = zip(jax.tree.leaves(one.weights), jax.tree.leaves(back.weights), strict=True)
    assert all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.slow
def test_speculation_writes_the_same_text(one):
    """The second time the draft knows the text: its trees are accepted."""
    prompt = TEXT[:9].tolist()
    again = prompt + generate(one, prompt, max_new_tokens=12).tokens + prompt
    plain, drafted = (
        generate(one, [prompt, again], max_new_tokens=12, draft=draft, budget=4)
        for draft in (None, "suffix")
    )
    assert drafted.tokens == plain.tokens
    assert any(step.size > 1 for step in drafted.trace)


def test_the_weights_are_a_pytree_to_compile_with(one):
    @jax.jit
    def logits(weights, tokens):
        return dataclasses.replace(one, weights=weights).logits(tokens)

    np.testing.assert_allclose(
        logits(one.weights, TEXT[None, :6]), one.logits(TEXT[None, :6]), atol=1e-3
    )


def test_gradients_of_what_is_float(one):
    """Those of a model of the matrices' values; whole numbers have none, and JAX says so."""

    def loss(norm, model, few):
        tokens = TEXT[None, : 4 if few else None]
        weights = model.weights._replace(norm=norm)
        return (dataclasses.replace(model, weights=weights).logits(tokens) ** 2).sum()

    is_matrix = lambda leaf: isinstance(leaf, Int8Matrix)  # noqa: E731
    as_floats = jax.tree.map(
        lambda leaf: jnp.asarray(floats(leaf), jnp.float32) if is_matrix(leaf) else leaf,
        one.weights,
        is_leaf=is_matrix,
    )
    of_floats = dataclasses.replace(one, weights=as_floats)
    for few in (True, False):
        found, expected = (jax.grad(loss)(one.weights.norm, m, few) for m in (one, of_floats))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * abs(expected).max())
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda w: dataclasses.replace(one, weights=w).logits(TEXT[None]).sum())(
            one.weights
        )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "weights: expected one of .*'int8'.*, got 'int4'"),
        ({"weights": 8}, "weights: expected one of .*, got 8"),
        ({"weights": None}, "weights: expected one of .*, got None"),
        ({"weights": "int8", "dtype": "bfloat16"}, "dtype: weights in int8 .* got bfloat16"),
        ({"weights": "int8", "dtype": np.float64}, "dtype: weights in int8 .* got float64"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Llama.load(SMALL, **options)


def test_a_weight_that_is_not_finite_names_its_tensor(monkeypatch):
    checkpoint = open_checkpoint(SMALL)

    def read(name):
        x = checkpoint.read(name)
        return np.full_like(x, np.nan) if name.endswith("layers.1.mlp.down_proj.weight") else x

    broken = dataclasses.replace(checkpoint, read=read)
    monkeypatch.setattr("treeattn.llama.model.open_checkpoint", lambda path: broken)
    with pytest.raises(ValueError, match=r"down_proj.weight: weights: int8 needs finite"):
        Llama.load(SMALL, weights="int8")
