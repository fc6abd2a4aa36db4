"""What JAX's users compose first: transformations and layouts, of every function, each against
dense attention in float64."""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients

import treeattn
from treeattn.across import METHODS

ROWS, BATCH, QUERIES, HEADS, KV_HEADS, DIM, VALUE_DIM = 3, 2, 2, 2, 2, 4, 3
KEYS = 5  # an odd number: shards are ragged


def second(f, x, direction):
    """The Hessian of Σ f(q, k, v)², times a direction: forward over reverse."""

    def loss(x):
        return jnp.sum(f(*x).astype(jnp.float32 if x[0].dtype == jnp.bfloat16 else x[0].dtype) ** 2)

    return jax.jit(lambda x, t: jax.jvp(jax.grad(loss), (x,), (t,))[1])(x, direction)


def plain_attention(q, k, v, causal=False):
    s = jnp.einsum("blhd,bnhd->bhln", q, k) / np.sqrt(q.shape[-1])
    s = jnp.where(np.tri(*s.shape[2:], dtype=bool), s, -jnp.inf) if causal else s
    return jnp.einsum("bhln,bnhd->blhd", jax.nn.softmax(s), v)


def draw_pair(seed, queries, keys, dtype="float64"):
    rng = np.random.default_rng(seed)
    shapes = ((1, queries, 2, 16), (1, keys, 2, 16), (1, keys, 2, 3))
    return (tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes) for _ in range(2))


@pytest.mark.parametrize(
    ("keys", "causal", "dtype"),
    [(5, False, "float64"), (5, True, "float64"), (700, False, "float64"), (5, False, "bfloat16")],
)
def test_second_derivatives_inside_a_scan(keys, causal, dtype):
    """There JAX forgets rules for derivatives, and differentiates what they stand for."""
    x, direction = draw_pair(0, 5 if causal else 2, keys, dtype)

    def scanned(q, k, v):
        return jax.lax.map(lambda q: treeattn.attention(q, k, v, causal=causal), q[None])[0]

    plain = functools.partial(plain_attention, causal=causal)
    wide = [jax.tree.map(lambda x: x.astype("float64"), tree) for tree in (x, direction)]
    expected = second(plain, *wide)
    for got, want in zip(second(scanned, x, direction), expected, strict=True):
        tolerance = 0.05 * abs(want).max() if dtype == "bfloat16" else 1e-12
        np.testing.assert_allclose(got.astype("float64"), want, atol=tolerance)


@pytest.mark.parametrize("f", [treeattn.ring_decode, treeattn.ring_attention])
def test_second_derivatives_of_a_ring(f):
    x, direction = draw_pair(1, 4, 4)
    sharding = NamedSharding(treeattn.kv_mesh(jax.devices()[:2]), P(None, "kv"))
    options = {"causal": False} if f is treeattn.ring_attention else {}
    found = second(functools.partial(f, sharding=sharding, **options), x, direction)
    for got, want in zip(found, second(plain_attention, x, direction), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


def merged(q, k, v, *, kv_lengths):
    """Attention to the first two keys, merged with that to the others."""
    first = treeattn.attend(q, k[:, :2], v[:, :2], kv_lengths=jnp.minimum(kv_lengths, 2))
    rest = treeattn.attend(q, k[:, 2:], v[:, 2:], kv_lengths=jnp.maximum(kv_lengths - 2, 0))
    return treeattn.finalize(treeattn.merge(rest, first))[0]


LOCAL = {
    "attention": treeattn.attention,
    "attend": lambda *x, **options: treeattn.finalize(treeattn.attend(*x, **options))[0],
    "merge": merged,
}
PREFILL = {
    "ring_attention": treeattn.ring_attention,
    "ulysses_attention": treeattn.ulysses_attention,
}
OVER_MESH = {method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS}
OVER_MESH |= {"ring_decode": treeattn.ring_decode}
OVER_MESH |= PREFILL
# Of the methods that differ only in how states cross the mesh, one stands for all in `make test`.
QUICK = [*LOCAL, METHODS[0], "ring_decode", *PREFILL]
ALL = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[1:])]
# One of each kind, for a second way to ask the same.
ONE_OF_EACH = "attend", METHODS[0], "ring_attention"

KINDS = AxisType.Auto, AxisType.Explicit


def combined(*axes, quick):
    """All combinations, of which `make test` takes these."""
    rows = itertools.product(*axes)
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in rows]


def make_mesh(kind=AxisType.Auto, **sizes):
    devices = jax.devices()[: np.prod([*sizes.values()])]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds, devices=devices)


def function(name, mesh):
    """(q, k, v, lengths) -> out."""
    if name in LOCAL:
        return lambda q, k, v, lengths: LOCAL[name](q, k, v, kv_lengths=lengths)
    call = functools.partial(OVER_MESH[name], sharding=NamedSharding(mesh, P(None, "kv")))
    if name in PREFILL:
        return lambda q, k, v, lengths: call(q, k, v)
    return lambda q, k, v, lengths: call(q, k, v, kv_lengths=lengths)


def draw(name, *rows, keys=KEYS):
    """(q, k, v, lengths), each with `rows` before its own axes, and weights for the output."""
    rng = np.random.default_rng(0)
    queries = keys if name in PREFILL else QUERIES
    q = rng.normal(size=(*rows, BATCH, queries, HEADS, DIM))
    k = rng.normal(size=(*rows, BATCH, keys, KV_HEADS, DIM))
    v = rng.normal(size=(*rows, BATCH, keys, KV_HEADS, VALUE_DIM))
    lengths = rng.integers(0, keys + 1, (*rows, BATCH)).astype(np.int32)
    return (q, k, v, lengths), rng.normal(size=(*q.shape[:-1], VALUE_DIM))


def options(name, arguments):
    """What the dense oracle is told: prefill is causal, everything else has lengths."""
    n = arguments[1].shape[1]
    if name in PREFILL:
        return {"mask": np.tri(n, dtype=bool)[None, None]}
    return {"kv_lengths": arguments[3]}


def check_values(name, out, arguments):
    expected = dense_attention(*arguments[:3], **options(name, arguments))
    np.testing.assert_allclose(out, expected, atol=1e-12)


def check_gradients(name, gradients, arguments, w):
    expected = dense_gradients(*arguments[:3], w, **options(name, arguments))
    for got, dense in zip(gradients, expected, strict=False):
        np.testing.assert_allclose(got, dense, atol=1e-11)


def loss_of(f):
    """(Σ w·out, out), to be differentiated in q, k and v."""

    def loss(q, k, v, lengths, w):
        out = f(q, k, v, lengths)
        return jnp.sum(w * out), out

    return loss


def grad_of_vmap(f):
    return jax.value_and_grad(loss_of(jax.vmap(f)), (0, 1, 2), has_aux=True)


def vmap_of_grad(f):
    return jax.vmap(jax.value_and_grad(loss_of(f), (0, 1, 2), has_aux=True))


BATCHED = combined(
    [*LOCAL, *OVER_MESH],
    [grad_of_vmap, vmap_of_grad],
    quick=[*((name, grad_of_vmap) for name in QUICK), *((x, vmap_of_grad) for x in ONE_OF_EACH)],
)


@pytest.mark.parametrize(("name", "transform"), BATCHED)
def test_batched_and_differentiated(name, transform):
    arguments, w = draw(name, ROWS)
    run = jax.jit(transform(function(name, make_mesh(kv=2))))
    (_, out), gradients = run(*arguments, w)
    for i in range(ROWS):
        row = [x[i] for x in arguments]
        check_values(name, out[i], row)
        check_gradients(name, [g[i] for g in gradients], row, w[i])


@pytest.mark.parametrize("name", ALL)
def test_forward_mode(name):
    """The whole Jacobian in the queries, and its product with weights."""
    arguments, w = draw(name)
    jacobian = jax.jit(jax.jacfwd(function(name, make_mesh(kv=2))))(*arguments)
    gradient = np.tensordot(w, jacobian, axes=w.ndim)
    check_gradients(name, [gradient], arguments, w)


@pytest.mark.parametrize("name", ALL)
def test_within_another_shard_map(name):
    """The rows lie along "data", which is manual already where the keys are dealt along "kv"."""
    mesh = make_mesh(data=2, kv=2)
    arguments, _ = draw(name)
    rows = P("data")
    run = jax.shard_map(
        function(name, mesh),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names={"data"},
        check_vma=False,
    )
    check_values(name, jax.jit(run)(*arguments), arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_an_enclosing_shard_map_has_dealt(kind):
    """The sharding names them, too; keys that are placed along Explicit axes say the rest."""
    mesh = make_mesh(kind, data=2, kv=2)
    (q, k, v, _), _ = draw("allreduce", keys=6)
    sharding = NamedSharding(mesh, P("data", "kv"))
    decode = functools.partial(treeattn.tree_decode, sharding=sharding)
    rows = P("data")
    specs = {"in_specs": rows, "out_specs": rows, "axis_names": {"data"}, "check_vma": False}
    run = jax.shard_map(lambda q, k, v: decode(q, k, v), mesh=mesh, **specs)
    placed = jax.device_put((k, v), sharding)
    q = jax.device_put(q, NamedSharding(mesh, rows))
    np.testing.assert_allclose(jax.jit(run)(q, *placed), dense_attention(q, k, v), atol=1e-12)


PLACED = combined(
    [*LOCAL, *OVER_MESH],
    KINDS,
    quick=[*((name, KINDS[1]) for name in QUICK), *((name, KINDS[0]) for name in ONE_OF_EACH)],
)


@pytest.mark.parametrize(("name", "kind"), PLACED)
def test_within_set_mesh(name, kind):
    arguments, _ = draw(name, keys=6)
    mesh = make_mesh(kind, kv=2)
    with jax.set_mesh(mesh):
        f = function(name, mesh)
        check_values(name, f(*arguments), arguments)
        along = P(None, "kv")
        if name in LOCAL and kind == AxisType.Explicit:
            along = P()  # of keys along a named axis, products and sums have to be asked for
        k, v = jax.device_put(arguments[1:3], NamedSharding(mesh, along))
        check_values(name, jax.jit(f)(arguments[0], k, v, arguments[3]), arguments)


# A gradient through a cache on a mesh, as training over a long context takes it.


def jit_of_grad(f, k, v, w):
    return jax.jit(jax.grad(lambda k, v: jnp.sum(w * f(k, v)), (0, 1)))(k, v)


def vjp(f, k, v, w):
    out, pull = jax.vjp(f, k, v)
    return pull(w.astype(out.dtype))


def eager_grad(f, k, v, w):
    return jax.grad(lambda k, v: jnp.sum(w * f(k, v)), (0, 1))(k, v)


CACHES = combined(
    ["allreduce", "ring_attention"],
    [jit_of_grad, vjp, eager_grad],
    KINDS,
    [False, True],
    quick=[
        *itertools.product(["allreduce"], [jit_of_grad, eager_grad], KINDS, [True]),
        ("allreduce", jit_of_grad, AxisType.Auto, False),
        ("allreduce", vjp, AxisType.Explicit, False),
        ("ring_attention", jit_of_grad, AxisType.Explicit, True),
        ("ring_attention", vjp, AxisType.Auto, True),
    ],
)


@pytest.mark.parametrize(("name", "take", "kind", "placed"), CACHES)
def test_a_gradient_through_a_cache_on_a_mesh(name, take, kind, placed):
    """Eager `jax.grad` over Explicit axes works in `jax.set_mesh` only, of JAX's own functions,
    too; all else in and outside of it."""
    (q, k, v, lengths), w = draw(name, keys=6)
    mesh = make_mesh(kind, data=1, kv=2)
    f = function(name, mesh)
    q, w = jnp.asarray(q), jnp.asarray(w)
    k, v = jnp.asarray(k), jnp.asarray(v)
    arguments = q, k, v, lengths
    if placed:
        k, v = jax.device_put((k, v), NamedSharding(mesh, P(None, "kv")))

    def of_cache(k, v):
        return f(q, k, v, lengths)

    expected = dense_gradients(*arguments[:3], w, **options(name, arguments))[1:]
    contexts = [jax.set_mesh(mesh)]
    if take is not eager_grad or kind == AxisType.Auto:
        contexts.append(contextlib.nullcontext())
    for context in contexts:
        with context:
            gradients = take(of_cache, k, v, w)
        for got, dense in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(got, dense, atol=1e-11)


@pytest.mark.parametrize("queries", [1, 3], ids=["streams", "products"])
@pytest.mark.parametrize("spec", [P(None, "kv"), P(None, None, None, "kv")], ids=str)
def test_a_cache_that_is_sharded(spec, queries):
    """Of a length and width for which one query's sums are written out."""
    mesh = make_mesh(kv=2)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, queries, 2, 64))
    k, v = rng.normal(size=(2, 1, 512, 2, 64))
    cache = jax.device_put((k, v), NamedSharding(mesh, spec))
    expected = dense_attention(q, k, v)
    np.testing.assert_allclose(treeattn.attention(q, *cache), expected, atol=1e-12)
    np.testing.assert_allclose(jax.jit(treeattn.attention)(q, *cache), expected, atol=1e-12)
    if spec == P(None, "kv"):
        np.testing.assert_allclose(treeattn.tree_decode(q, *cache), expected, atol=1e-12)


OF_ONES_OWN = """
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from oracles import dense_gradients
import treeattn
treeattn.simulate_devices(2)
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
q, w = rng.normal(size=(2, 1, 1, 2, 8))
k, v = rng.normal(size=(2, 1, 6144, 2, 8))
lengths = np.array([3072, 5])  # of each device's 3,072 keys: the second skips two blocks of three
mask = np.tile(np.arange(3072), 2) < np.repeat(lengths, 3072)

def own(q, k, v, lengths):
    state = treeattn.attend(q, k, v, kv_lengths=lengths)
    return treeattn.finalize(treeattn.merge_across(state, "kv"))[0]

mesh = jax.make_mesh((2,), ("kv",), axis_types=(AxisType.Auto,))
specs = {"in_specs": (P(), P(None, "kv"), P(None, "kv"), P("kv")), "out_specs": P()}
f = jax.shard_map(own, mesh=mesh, **specs)
gradients = jax.jit(jax.grad(lambda *x: (f(*x, lengths) * w).sum(), (0, 1, 2)))(q, k, v)
for got, dense in zip(gradients, dense_gradients(q, k, v, w, mask=mask[None, None, None])):
    np.testing.assert_allclose(got, dense, atol=1e-12)
print("done")
"""


def test_a_gradient_in_a_shard_map_of_ones_own_where_devices_skip_blocks():
    """Which checks how results vary: a query that all devices have is made to differ before the
    loop. In a branch, that has an Allreduce for a transpose, and the devices waited for ever."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", OF_ONES_OWN],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


BEAMS = np.random.default_rng(0).integers(0, 3, (2, 2, 4, 3))


def check_packed(packed):
    """For each beam the trees that NumPy's arrays give, padded to the width of a program's."""
    for i, beam in enumerate(BEAMS):
        expected = treeattn.pack(beam)
        width = expected.packed_beam.shape[1]
        np.testing.assert_array_equal(packed.packed_beam[i][:, :width], expected.packed_beam)
        mask = packed.attention_mask[i]
        np.testing.assert_array_equal(mask[:, :width, :width], expected.attention_mask)
        assert mask.sum() == expected.attention_mask.sum()
        offsets = packed.position_offsets[i][:, :width]
        np.testing.assert_array_equal(offsets, expected.position_offsets)
        np.testing.assert_array_equal(packed.unpack_map[i], expected.unpack_map)


def test_pack_batched():
    check_packed(jax.jit(jax.vmap(treeattn.pack))(BEAMS))


def test_pack_on_many_devices():
    mesh = make_mesh(data=2)
    run = jax.shard_map(jax.vmap(treeattn.pack), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    check_packed(jax.jit(run)(BEAMS))
    with jax.set_mesh(mesh):
        check_packed(jax.jit(jax.vmap(treeattn.pack))(BEAMS))
    sharded = jax.device_put(BEAMS, NamedSharding(mesh, P("data")))
    check_packed(jax.jit(jax.vmap(treeattn.pack))(sharded))
    rows = jax.device_put(BEAMS[0], NamedSharding(mesh, P("data")))
    for got, expected in zip(treeattn.pack(rows), treeattn.pack(BEAMS[0]), strict=True):
        np.testing.assert_array_equal(got, expected)
