"""What JAX's users compose first: transformations, and gradients of what is sharded, of every
function, each against dense attention in float64."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    DECODERS,
    PLAIN,
    PREFILLS,
    check,
    check_gradients,
    draw,
    oracle,
    over,
    put,
    results,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_gradients

import treeattn

ROWS, KEYS = 3, 5  # an odd number of keys: shards are ragged


LOCAL = {"attend": treeattn.attention}
LOCAL["blockwise"] = functools.partial(treeattn.attention, implementation="blockwise")
FUNCTIONS = LOCAL | DECODERS | PREFILLS


def function(name, sharding):
    """(q, k, v, **options) -> out."""
    return functools.partial(FUNCTIONS[name], **({} if name in LOCAL else {"sharding": sharding}))


def inputs(name, n=KEYS, rows=1):
    """[q, k, v, weights for the output], each with `rows` before its own axes; lengths, which
    prefill does not take; and what the oracles are told for a row."""
    rng = np.random.default_rng(0)
    l = n if name in PREFILLS else 2
    drawn = draw(b=2 * rows, l=l, n=n, h=2, h_kv=2, dv=3)
    arrays = [x.reshape(rows, 2, *x.shape[1:]) for x in drawn]
    arrays.append(rng.normal(size=(*arrays[0].shape[:-1], 3)))
    if name in PREFILLS:
        return arrays, {}, [{"causal": True}] * rows
    lengths = rng.integers(0, n + 1, (rows, 2)).astype(np.int32)
    return arrays, {"kv_lengths": lengths}, [{"kv_lengths": x} for x in lengths]


def grad_of_vmap(f, *inputs):
    return results(jax.vmap(f), *inputs)


def vmap_of_grad(f, *inputs):
    return jax.vmap(functools.partial(results, f))(*inputs)


# Of the methods that differ only in how states cross the mesh, one stands for all in `make test`.
QUICK = ["attend", "allreduce", "ring", *PREFILLS]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in DECODERS if name not in QUICK]
BATCHED = [(grad_of_vmap, name) for name in ["blockwise", *QUICK]]
BATCHED += [(vmap_of_grad, name) for name in ("blockwise", "allreduce", "ring_attention")]


def check_rows(out, gradients, arrays, w, told):
    for i, options in enumerate(told):
        row = [x[i] for x in arrays]
        check(out[i], *row, **options)
        check_gradients([g[i] for g in gradients], *row, w[i], **options)


@pytest.mark.parametrize(("transform", "name"), BATCHED)
def test_batched_and_differentiated(name, transform):
    # Of blocks, some rows need the first alone: under vmap, too, the longest row counts.
    (*arrays, w), options, told = inputs(name, rows=ROWS, n=700 if name == "blockwise" else KEYS)
    f = function(name, over(keys=2))
    check_rows(*transform(f, *arrays, w, np.zeros(ROWS), options), arrays, w, told)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 9), reason="JAX 0.12.0.1 refuses it")
@pytest.mark.parametrize("name", ["butterfly", "ring_attention"])
def test_vmap_along_an_explicit_axis(name):
    """Values and gradients; along the axis that is mapped only the largest length is sent."""
    (*arrays, w), options, told = inputs(name, n=4, rows=2)
    mesh = over(AxisType.Explicit, rows=2, keys=2).mesh
    rows, keys = (NamedSharding(mesh, P("rows", *more)) for more in ((), (None, "keys")))
    rest = jax.device_put((w, np.zeros(2), options), rows)
    placed = *jax.device_put(arrays, [rows, keys, keys]), *rest
    f = function(name, NamedSharding(mesh, P(None, "keys")))
    program = jax.jit(vmap_of_grad, static_argnums=0).lower(f, *placed).compile()
    check_rows(*jax.tree.map(np.asarray, program(*placed)), arrays, w, told)
    sent = [c for c in treeattn.collectives(program) if c.shapes != ("s32[]",)]
    groups = [group for c in sent for group in c.groups]
    assert groups and all(len({device // 2 for device in group}) == 1 for group in groups)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_forward_mode_within_another_shard_map(name):
    """The whole Jacobian in the queries, and its product with weights; and the values where rows
    lie along "rows", which the sharding names, and which is manual already."""
    arrays, options, (told,) = inputs(name)
    *arrays, w = (x[0] for x in arrays)
    arguments = *arrays, *(x[0] for x in options.values())
    sharding, rows = over(rows=2, keys=2), P("rows")
    named = function(name, sharding)

    def f(q, k, v, *lengths):
        return named(q, k, v, **dict(zip(options, lengths, strict=True)))

    specs = {"in_specs": rows, "out_specs": rows, "axis_names": {"rows"}, "check_vma": False}
    run = jax.jit(jax.shard_map(f, mesh=sharding.mesh, **specs))
    check(run(*arguments), *arrays, **told)
    jacobian = jax.jit(jax.jacfwd(f))(*arguments)
    expected = dense_gradients(*arrays, w, **oracle(arrays[0], **told))[0]
    np.testing.assert_allclose(np.tensordot(w, jacobian, axes=w.ndim), expected, atol=1e-11)


def test_explicit_rows_that_an_enclosing_shard_map_has_dealt():
    """Keys that are placed along Explicit axes say the rest."""
    arrays, sharding, rows = draw(n=6), over(AxisType.Explicit, rows=2, keys=2), P("rows")
    decode = functools.partial(treeattn.tree_decode, sharding=sharding)
    specs = {"in_specs": rows, "out_specs": rows, "axis_names": {"rows"}, "check_vma": False}
    run = jax.shard_map(lambda *x: decode(*x), mesh=sharding.mesh, **specs)
    placed = *put(sharding, arrays[0], spec=rows), *put(sharding, *arrays[1:])
    check(jax.jit(run)(*placed), *arrays)


WHOLE = [(AxisType.Auto, P(None, "keys")), (AxisType.Auto, P(None, None, None, "keys"))]
WHOLE += [(AxisType.Explicit, P("keys")), (AxisType.Explicit, P(None, None, "keys"))]


@pytest.mark.parametrize("queries", [1, 3], ids=["lanes", "products"])
@pytest.mark.parametrize(("kind", "spec"), WHOLE, ids=str)
def test_a_cache_that_is_sharded(kind, spec, queries):
    """Of a length and width for which one query's sums are written out. Along Explicit axes only
    rows and heads are."""
    arrays, sharding = draw(l=queries, n=512, h=2, d=64), over(kind, keys=2)
    q = arrays[0] if kind == AxisType.Auto else put(sharding, arrays[0], spec=spec)[0]
    placed = q, *put(sharding, *arrays[1:], spec=spec)
    for f in treeattn.attention, jax.jit(treeattn.attention):
        check(f(*placed), *arrays)


# Derivatives of derivatives.


def second(f, x, direction):
    """The Hessian of Σ f(q, k, v)², times a direction: forward over reverse."""

    def loss(x):
        return jnp.sum(f(*x).astype(jnp.float32 if x[0].dtype == jnp.bfloat16 else x[0].dtype) ** 2)

    return jax.jit(lambda x, t: jax.jvp(jax.grad(loss), (x,), (t,))[1])(x, direction)


def scanned(q, k, v, **options):
    """The fast form: on nine devices, attention under jit would be the plain one."""
    options["implementation"] = "blockwise"
    return jax.lax.map(lambda q: treeattn.attention(q, k, v, **options), q[None])[0]


SECOND = [
    (scanned, 5, {}, "float64"),
    (scanned, 5, {"causal": True}, "float64"),
    (scanned, 700, {}, "float64"),
    (scanned, 5, {}, "bfloat16"),
    (treeattn.ring_decode, 4, {}, "float64"),
    (treeattn.ring_attention, 4, {"causal": True}, "float64"),
]


@pytest.mark.parametrize(("f", "keys", "options", "dtype"), SECOND)
def test_second_derivatives(f, keys, options, dtype):
    """Inside a scan, too, where JAX forgets rules for derivatives, and differentiates what they
    stand for."""
    l = keys if "causal" in options else 2
    x, direction = (
        tuple(jnp.asarray(x, dtype) for x in draw(seed, b=1, l=l, n=keys, h=2, h_kv=2, d=16, dv=3))
        for seed in range(2)
    )
    more = {} if f is scanned else {"sharding": over(keys=2)}
    found = second(functools.partial(f, **options, **more), x, direction)
    wide = [jax.tree.map(lambda x: x.astype("float64"), tree) for tree in (x, direction)]
    for got, want in zip(
        found, second(functools.partial(treeattn.attention, **options, **PLAIN), *wide), strict=True
    ):
        tolerance = 0.05 * abs(want).max() if dtype == "bfloat16" else 1e-12
        np.testing.assert_allclose(got.astype("float64"), want, atol=tolerance)


OF_ONES_OWN = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import treeattn
treeattn.simulate_devices(2)
jax.config.update("jax_enable_x64", True)
from attentions import check_gradients, draw, over
(q, k, v), (w, *_) = (draw(seed, b=1, l=1, n=6144, h=2, h_kv=2, d=8) for seed in range(2))
lengths = np.array([3072, 5])  # of each device's 3,072 keys: the second skips two blocks of three
mask = np.tile(np.arange(3072), 2) < np.repeat(lengths, 3072)

def own(q, k, v, lengths):
    state = treeattn.attend(q, k, v, kv_lengths=lengths)
    return treeattn.finalize(treeattn.merge_across(state, "keys"))[0]

specs = {"in_specs": (P(), P(None, "keys"), P(None, "keys"), P("keys")), "out_specs": P()}
f = jax.shard_map(own, mesh=over(keys=2).mesh, **specs)
gradients = jax.jit(jax.grad(lambda *x: (f(*x, lengths) * w).sum(), (0, 1, 2)))(q, k, v)
check_gradients(gradients, q, k, v, w, mask=mask[None, None, None], atol=1e-12)
"""


def test_a_gradient_in_a_shard_map_of_ones_own_where_devices_skip_blocks():
    """Which checks how results vary: a query that all devices have is made to differ before the
    loop. In a branch, that has an Allreduce for a transpose, and the devices waited for ever."""
    program = [sys.executable, "-c", OF_ONES_OWN]
    subprocess.run(program, cwd=Path(__file__).parent, check=True, timeout=300)


def test_pack_batched_and_on_many_devices():
    """The trees are those that a program makes of each beam, which tests/test_beam.py checks."""
    beams = np.random.default_rng(0).integers(0, 3, (2, 2, 4, 3))
    expected = jax.tree.map(lambda *x: np.stack(x), *map(jax.jit(treeattn.pack), beams))
    sharding, pack = over(rows=2), jax.vmap(treeattn.pack)
    for given in beams, *put(sharding, beams):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(pack)(given), expected)
    placed = treeattn.pack(*put(sharding, beams[0]))
    jax.tree.map(np.testing.assert_array_equal, tuple(placed), tuple(treeattn.pack(beams[0])))
