"""Attention in trees by intervals: against the dense mask, which walks up from every node."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn import attend, attention, finalize, interval_mask, pack_rows, which_implementation
from treeattn.kernel import blockwise, gradient, intervals

NODES = 149
BLOCK = 32  # five blocks of 30, the last of them not full


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(intervals, "INTERVAL_BLOCK", BLOCK)


def random_ends(rng, n=NODES):
    """Ends of a random forest of n nodes in depth-first order."""
    branching = rng.choice([0.02, 0.2, 0.8])
    path = []
    ends = np.full(n, n)
    for node in range(n):
        if rng.random() < branching:
            keep = rng.integers(0, len(path) + 1)
            ends[path[keep:]] = node
            path = path[:keep]
        path.append(node)
    return ends


def random_arrays(rng, b=2, n=NODES, h=4, h_kv=2, d=8, dv=6):
    shapes = (b, n, h, d), (b, n, h_kv, d), (b, n, h_kv, dv)
    return tuple(jnp.array(rng.normal(size=shape)) for shape in shapes)


@jax.jit
def by_intervals(arrays, ends, lengths, tangents, weights):
    """out, lse, the derivative along the tangents, and the gradients of a weighted sum."""

    def run(q, k, v):
        out, lse = finalize(attend(q, k, v, ends=ends, kv_lengths=lengths))
        return out, jnp.where(lse == -jnp.inf, 0, lse)

    found, along = jax.jvp(run, arrays, tangents)
    return found, along, jax.vjp(run, *arrays)[1](weights)


def dense(q, k, v, mask):
    """out, lse (0 for a query without keys) by the softmax of all scores; mask (b, l, n)."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bnhd->bhln", q, k) / np.sqrt(q.shape[-1])
    s = jnp.where(mask[:, None], s, -1e300)
    p = jnp.where(mask[:, None], jnp.exp(s - s.max(axis=-1, keepdims=True)), 0)
    total = p.sum(axis=-1)
    some = total > 0
    p = p / jnp.where(some, total, 1)[..., None]
    lse = jnp.where(some, s.max(axis=-1) + jnp.log(jnp.where(some, total, 1)), 0)
    return jnp.einsum("bhln,bnhd->blhd", p, v), lse.swapaxes(1, 2)


@jax.jit
def by_a_mask(arrays, mask, tangents, weights):
    """The same, from the softmax of all scores."""
    run = functools.partial(dense, mask=mask)
    found, along = jax.jvp(run, arrays, tangents)
    return found, along, jax.vjp(run, *arrays)[1](weights)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=40)
def test_values_and_derivatives(seed, whole):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        arrays = random_arrays(rng)
        tangents = random_arrays(rng)
        ends = np.stack([random_ends(rng) for _ in range(2)])
        lengths = np.full(2, NODES) if whole else rng.integers(0, NODES + 1, 2)
        out, lse = (jax.ShapeDtypeStruct((2, NODES, 4, 6), float), (2, NODES, 4))
        weights = jnp.array(rng.normal(size=out.shape)), jnp.array(rng.normal(size=lse))
        mask = np.stack([interval_mask(line) for line in ends])
        mask = mask & (np.arange(NODES) < lengths[:, None])[:, None]
        found = by_intervals(arrays, ends, lengths, tangents, weights)
        # A query beyond the length is a pad: it sees what it would.
        expected = by_a_mask(arrays, mask, tangents, weights)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_one_path_is_causal():
    arrays = random_arrays(np.random.default_rng(0))
    ends = np.full((2, NODES), NODES)
    expected = attention(*arrays, causal=True)
    np.testing.assert_allclose(attention(*arrays, ends=ends), expected, atol=1e-5)
    np.testing.assert_allclose(attention(*arrays, ends=ends, causal=True), expected, atol=1e-5)


def test_rows_of_a_tree_are_rows_alone():
    """Every row's tokens, read off the tree, have the attention that the row has by itself."""
    rng = np.random.default_rng(1)
    stem = rng.integers(0, 9, 40)
    rows = [np.concatenate([stem[: 10 * i], rng.integers(0, 9, 5 + 7 * i)]) for i in range(5)]
    (tree,) = pack_rows(rows)
    n = len(tree.tokens)
    arrays = random_arrays(rng, b=1, n=n)
    packed = attention(*arrays, ends=tree.ends[None])
    for line in tree.row_map:
        nodes = line[line >= 0]
        alone = attention(*(x[:, nodes] for x in arrays), causal=True)
        np.testing.assert_allclose(packed[:, nodes], alone, atol=1e-5)


def test_batches_by_vmap():
    rng = np.random.default_rng(2)
    arrays = random_arrays(rng, b=6)
    ends = np.stack([random_ends(rng) for _ in range(6)])
    expected = attention(*arrays, ends=ends)
    split = [x.reshape(3, 2, *x.shape[1:]) for x in (*arrays, ends)]

    def total(q, k, v, ends):
        out = attention(q, k, v, ends=ends)
        return (out**2).sum(), out

    run = jax.grad(total, (0, 1, 2), has_aux=True)
    found, out = jax.jit(jax.vmap(run))(*split)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=1e-6)
    for a, b in zip(found, run(*arrays, ends)[0], strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, atol=1e-5)


def test_derivatives_of_derivatives():
    """The second derivative along a direction, by each way to take two of them in turn."""
    rng = np.random.default_rng(7)
    n = 40
    with jax.enable_x64(True):
        ends = random_ends(rng, n)[None]
        arrays = random_arrays(rng, b=1, n=n, h=2, h_kv=1, d=3, dv=2)
        along = random_arrays(rng, b=1, n=n, h=2, h_kv=1, d=3, dv=2)

        def total(q, k, v):
            return (attention(q, k, v, ends=ends) ** 3).sum()

        def dense_total(q, k, v):
            return (dense(q, k, v, interval_mask(ends[0])[None])[0] ** 3).sum()

        def slope(*x):
            return jax.jvp(total, x, along)[1]

        def slope_by_gradient(*x):
            slopes = jax.grad(total, (0, 1, 2))(*x)
            return sum((g * t).sum() for g, t in zip(slopes, along, strict=True))

        def by_each_way(*x):
            yield jax.jvp(jax.grad(total, (0, 1, 2)), x, along)[1]
            yield jax.grad(slope, (0, 1, 2))(*x)
            yield jax.grad(slope_by_gradient, (0, 1, 2))(*x)

        expected = jax.jit(lambda *x: jax.jvp(jax.grad(dense_total, (0, 1, 2)), x, along)[1])
        for found in jax.jit(lambda *x: list(by_each_way(*x)))(*arrays):
            for a, b in zip(found, expected(*arrays), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["random", "one path", "eight texts", "a prompt and answers"])
def test_blocks_that_nobody_sees_are_skipped(kind, monkeypatch):
    """The blocks whose scores are computed are counted while the program runs."""
    node = np.arange(NODES)
    ends = {
        "random": random_ends(np.random.default_rng(3)),
        "one path": np.full(NODES, NODES),
        "eight texts": np.minimum((node // 19 + 1) * 19, NODES),
        "a prompt and answers": np.where(node < 49, NODES, 49 + ((node - 49) // 20 + 1) * 20),
    }[kind]
    counted = {"forward": 0, "backward": 0}
    jax.clear_caches()

    def counting(compute, name):
        def count(s):
            counted[name] += 1
            return np.zeros_like(s)

        def computed(q, k):
            s = compute(q, k)
            return s + jax.pure_callback(count, s[..., :1], jax.lax.stop_gradient(s[..., :1]))

        return computed

    matrix_scores = counting(blockwise.products.matrix_scores, "forward")
    monkeypatch.setattr(blockwise.products, "matrix_scores", matrix_scores)
    monkeypatch.setattr(gradient, "scores", counting(gradient.scores, "backward"))
    arrays = random_arrays(np.random.default_rng(4), b=2)
    both = np.stack([ends, np.arange(1, NODES + 1)])  # beside it a row in which all are alone
    run = jax.value_and_grad(lambda *x: attention(*x, ends=both).sum(), (0, 1, 2))
    jax.block_until_ready(jax.jit(run)(*arrays))
    mask = np.pad(interval_mask(ends), ((0, 1), (0, 1)))
    pairs = mask.reshape(5, 30, 5, 30).any(axis=(1, 3))
    visited = intervals.blocks_visited(ends)
    assert counted == {"forward": visited + 5, "backward": visited + 5}
    assert pairs.sum() <= visited <= 15
    assert visited == {"one path": 15, "eight texts": 9}.get(kind, visited)


def test_memory_is_linear(monkeypatch):
    """In the number of tokens, forward and backward; a mask's would be quadratic."""
    monkeypatch.setattr(intervals, "INTERVAL_BLOCK", 256)
    jax.clear_caches()

    def temporary(n, f):
        q, k, v = (jax.ShapeDtypeStruct((1, n, h, 16), jnp.float32) for h in (4, 2, 2))
        ends = jax.ShapeDtypeStruct((1, n), jnp.int32)
        return jax.jit(f).lower(q, k, v, ends).compile().memory_analysis().temp_size_in_bytes

    def forward(q, k, v, ends):
        return attention(q, k, v, ends=ends)

    def backward(q, k, v, ends):
        return jax.grad(lambda *x: forward(*x, ends).sum(), argnums=(0, 1, 2))(q, k, v)

    for f in forward, backward:
        small, large = temporary(2048, f), temporary(8192, f)
        assert large < 4.2 * small


def test_nan_beyond_the_length():
    q, k, v = random_arrays(np.random.default_rng(5), b=1)
    ends = np.full((1, NODES), NODES)
    lengths = np.array([100])
    stale = (k.at[:, 100:].set(jnp.nan), v.at[:, 100:].set(jnp.nan))
    run = jax.grad(lambda q, k, v: attention(q, k, v, ends=ends, kv_lengths=lengths).sum())
    assert np.isfinite(attention(q, *stale, ends=ends, kv_lengths=lengths)).all()
    assert np.isfinite(run(q, *stale)).all()


def test_kernels_leave_trees_to_the_plain_form():
    q, k, v = (x.astype(jnp.bfloat16) for x in random_arrays(np.random.default_rng(6)))
    ends = np.full((2, NODES), NODES)
    assert which_implementation(q, k, v, ends=ends, platform="cuda") == "blockwise"
    for name in "pallas", "flash":
        with pytest.raises(ValueError, match=f"ends: the {name} kernel takes none|flash"):
            attend(q, k, v, ends=ends, implementation=name)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "options,error",
    [
        ({"ends": np.ones((1, NODES))}, TypeError),
        ({"ends": np.full(NODES, NODES)}, ValueError),
        ({"ends": np.full((1, NODES - 1), NODES - 1)}, ValueError),
        ({"ends": np.zeros((1, NODES), int)}, ValueError),
        ({"ends": np.full((1, NODES), NODES + 1)}, ValueError),
        ({"ends": np.minimum(np.arange(NODES) + 2, NODES)[None]}, ValueError),  # they cross
    ],
)
def test_wrong_ends(options, error):
    arrays = random_arrays(np.random.default_rng(0), b=1)
    with pytest.raises(error, match="ends: "):
        attend(*arrays, **options)


def test_ends_with_what_they_replace():
    q, k, v = random_arrays(np.random.default_rng(0), b=1)
    ends = np.full((1, NODES), NODES)
    for options in {"mask": np.ones((1, 1, 1, NODES), bool)}, {"bias": np.zeros((1, 1, 1, 1))}:
        with pytest.raises(ValueError, match="ends: "):
            attend(q, k, v, ends=ends, **options)
    with pytest.raises(ValueError, match="q: with ends"):
        attend(q[:, :1], k, v, ends=ends)
