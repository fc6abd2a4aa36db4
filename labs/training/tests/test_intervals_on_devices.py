"""Trees whose keys are sharded, and dealt: ring, gather, Ulysses by intervals, against the mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from oracles import dense_attention, dense_gradients

import treeattn
from treeattn import attention, blocks_by_device, deal_tree, interval_mask
from treeattn.devices.dealing import DEALINGS
from treeattn.kernel import blockwise, gradient, intervals

NODES = 75
FORMS = {
    "ring": treeattn.ring_attention,
    "gather": treeattn.gather_attention,
    "Ulysses": treeattn.ulysses_attention,
}
NODE = np.arange(NODES)
TEXTS = (NODE // 15 + 1) * 15  # five texts side by side, of 15 nodes each
ANSWERS = np.where(NODE < 20, NODES, np.minimum(20 + ((NODE - 20) // 11 + 1) * 11, NODES))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(intervals, "INTERVAL_BLOCK", 8)


def arrays(rng, b=2, h=8, h_kv=2, d=8):
    shapes = (b, NODES, h, d), (b, NODES, h_kv, d), (b, NODES, h_kv, d)
    return tuple(jnp.array(rng.normal(size=shape)) for shape in shapes)


def make_mesh(sizes):
    names = ("kv", "device")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def value_and_gradients(form, mesh, axes):
    """(q, k, v, weights, ends, nodes) to `out` and the gradients of Σ weights · out."""

    def total(q, k, v, w, ends, nodes):
        out = FORMS[form](q, k, v, mesh=mesh, axis=axes, ends=ends, nodes=nodes)
        return (out * w).sum(), out

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))


def check(found, given, ends, at):
    """`found` at the places `at` of the nodes, against the softmax of all scores."""
    mask = np.stack([interval_mask(line) for line in ends])[:, None]
    gradients, out = found
    expected = *dense_gradients(*given, mask=mask), dense_attention(*given[:3], mask=mask)
    for a, b in zip((*gradients, out), expected, strict=True):
        np.testing.assert_allclose(a[:, at], b, rtol=0, atol=1e-12)


def devices_of(form):
    """1 to 8 of them, where they can share 8 heads; only some in the quick runs."""
    quick = {"ring": (3, 8), "gather": (2, 5), "Ulysses": (4,)}[form]
    for p in range(1, 9):
        if form != "Ulysses" or 8 % p == 0:
            yield pytest.param(form, p, marks=[] if p in quick else pytest.mark.slow)


@pytest.mark.parametrize(("form", "p"), [case for form in FORMS for case in devices_of(form)])
def test_dealt_nodes(form, p):
    """However the nodes of a tree are dealt, each has the attention and the gradients it has."""
    mesh = make_mesh((p,))
    rng = np.random.default_rng(p)
    with jax.enable_x64(True):
        ends = np.stack([ANSWERS, TEXTS])  # both rows are dealt as is best for one of them
        given = *arrays(rng), jnp.array(rng.normal(size=(2, NODES, 8, 8)))
        run = value_and_gradients(form, mesh, "kv")
        for dealing in DEALINGS:
            nodes = deal_tree(ANSWERS, p, dealing=dealing)
            # An empty place holds anything.
            dealt = (x[:, nodes] for x in given)
            check(run(*dealt, ends, nodes), given, ends, np.argsort(nodes)[-NODES:])


@pytest.mark.parametrize("form", FORMS)
def test_nodes_in_order(form):
    """On two axes, named in another order than the mesh has them; 75 do not divide by 4."""
    mesh = make_mesh((2, 2))
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        ends = np.stack([ANSWERS, TEXTS])
        given = *arrays(rng), jnp.array(rng.normal(size=(2, NODES, 8, 8)))
        run = value_and_gradients(form, mesh, ("device", "kv"))
        check(run(*given, ends, None), given, ends, NODE)


@pytest.mark.parametrize("form", ["ring", "gather"])
def test_what_each_device_computes_is_what_was_counted(form, monkeypatch):
    """Forward and backward, of each dealing; a shard that nobody sees is skipped as a whole."""
    counted = np.zeros((2, 5), int)
    jax.clear_caches()

    def counting(compute, which):
        def count(rank, s):
            counted[which, rank] += 1
            return np.zeros_like(s)

        def computed(q, k):
            s = compute(q, k)
            some = jax.lax.stop_gradient(s[..., :1])
            return s + jax.pure_callback(count, some, jax.lax.axis_index("kv"), some)

        return computed

    matrix_scores = counting(blockwise.products.matrix_scores, 0)
    monkeypatch.setattr(blockwise.products, "matrix_scores", matrix_scores)
    monkeypatch.setattr(gradient, "scores", counting(gradient.scores, 1))
    run = value_and_gradients(form, make_mesh((5,)), "kv")
    rng = np.random.default_rng(0)
    given = *arrays(rng, b=1), jnp.array(rng.normal(size=(1, NODES, 8, 8)))
    for ends in TEXTS, ANSWERS:
        for dealing in DEALINGS:
            nodes = deal_tree(ends, 5, dealing=dealing)
            counted[:] = 0
            jax.block_until_ready(run(*(x[:, nodes] for x in given), ends[None], nodes))
            work = blocks_by_device(ends, nodes, 5)
            np.testing.assert_array_equal(counted, [work.sum(axis=1)] * 2)
    five = np.repeat(np.arange(16, 96, 16), 16)  # texts on five devices, which see no other's
    work = blocks_by_device(five, deal_tree(five, 5, dealing="contiguous"), 5)
    np.testing.assert_array_equal(work > 0, np.eye(5))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", FORMS)
def test_wrong_nodes(form):
    given = arrays(np.random.default_rng(0), b=1)
    run = functools.partial(FORMS[form], *given, mesh=make_mesh((2,)), axis="kv")
    ends = ANSWERS[None]
    for error, message, options in (
        (ValueError, "nodes: expected ends", {"nodes": NODE}),
        (ValueError, "nodes: expected each of 75", {"ends": ends, "nodes": NODE // 2}),
        (ValueError, "nodes: expected q's 75", {"ends": ends, "nodes": np.append(NODE, -1)}),
        (TypeError, "nodes: ", {"ends": ends, "nodes": NODE / 2}),
        (ValueError, "ends: ", {"ends": ANSWERS, "nodes": NODE}),
        (ValueError, "ends: ", {"ends": np.stack([ANSWERS, TEXTS]), "nodes": NODE}),
        (ValueError, "ends: expected depth-first", {"ends": ends[:, ::-1], "nodes": NODE}),
        (ValueError, "ends: the pallas", {"ends": ends, "implementation": "pallas"}),
    ):
        with pytest.raises(error, match=message):
            run(**options)


def test_named_rows():
    """A batch along an axis of its own: every device has the trees of its rows."""
    rng = np.random.default_rng(1)
    mesh = jax.make_mesh((2, 3), ("batch", "kv"), axis_types=(AxisType.Auto,) * 2)
    ends = np.stack([ANSWERS, TEXTS])
    q, k, v = arrays(rng)
    run = functools.partial(treeattn.ring_attention, mesh=mesh, axis="kv", batch_axis="batch")
    found = jax.jit(functools.partial(run, ends=ends))(q, k, v)
    np.testing.assert_allclose(found, attention(q, k, v, ends=ends), atol=1e-5)
