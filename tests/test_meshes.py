"""Meshes as users have them: axes in any order, of both kinds, of a context; rows and heads along
other axes than the keys: right, and nothing crosses those. What does not fit is refused."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    DECODERS,
    HEADS_SHARDED,
    OPTIONS,
    PREFILLS,
    check,
    check_gradients,
    draw,
    over,
    own_heads,
    put,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from totals import count_collectives, total_bytes

import treeattn
from treeattn.program import collectives

# What each device puts into its collectives, of its own b rows and h heads, for the devices along
# the keys' axes alone: (how many, bytes).


def sends(name, sizes, *, b, l, h, d, item, shard):
    """sizes: devices along each of the keys' axes; shard: bytes of each array that a ring moves."""
    p = math.prod(sizes)
    *nodes, g = sizes
    nodes, sizes = ([n for n in axes if n > 1] for axes in (nodes, sizes))
    state = item * b * l * h * (d + 2)
    if p == 1:
        return 0, 0
    if name == "ring":
        return (p - 1) * len(shard), (p - 1) * sum(shard)
    if name == "all_to_all":
        return 1, state // h * -(-h // p) * p
    if name == "hierarchical":
        whole = state // h * -(-h // g) * g
        within = (2, whole + whole // g) if g > 1 else (0, 0)
        return within[0] + len(nodes), within[1] + len(nodes) * whole // g
    rounds = {
        "allreduce": len(sizes),
        "gather": len(sizes),
        "butterfly": sum(n.bit_length() - 1 + (2 if n & (n - 1) else 0) for n in sizes),
    }
    assert name in rounds, f"what does {name!r} send? Write its formula here"
    return rounds[name] * (2 if name == "allreduce" else 1), state * rounds[name]


SIZES = [(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (3, 3)]
SIZES += [(2, 2, 2), (2, 1, 3), (2, 2, 1)]


@st.composite
def meshes(draw):
    """(the mesh, axes of the rows, the keys and the heads, how a cache lies), axes of any number,
    size and order."""
    sizes = draw(st.sampled_from(SIZES))
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, tuple("xyz"[: len(sizes)]))
    order = draw(st.permutations(mesh.axis_names))
    keys = tuple(order[: draw(st.integers(1, len(order)))])
    others = [(name, draw(st.sampled_from(["rows", "heads", "nothing"]))) for name in order]
    rows, heads = (
        tuple(name for name, role in others[len(keys) :] if role == which)
        for which in ("rows", "heads")
    )
    axes = rows, keys, heads
    return mesh, *axes, NamedSharding(mesh, P(*(x or None for x in axes)))


def along(mesh, axes):
    return math.prod(mesh.shape[name] for name in axes)


def among_several(program, mesh, keys):
    """(how many, bytes) of the collectives of several devices; all cross the keys' axes alone."""
    found = collectives(program)
    for c in found:
        for group in c.groups or [range(mesh.size)]:
            places = np.unravel_index(list(group), tuple(mesh.shape.values()))
            crossed = {x for x, at in zip(mesh.axis_names, places, strict=True) if np.ptp(at)}
            assert crossed <= set(keys)
    assert along(mesh, keys) > 1 or not any("permute" in c.kind for c in found)
    found = [c for c in found if c.devices > 1 or "permute" in c.kind]
    return count_collectives(found), total_bytes(found)


ONCE = Phase.explicit, Phase.reuse, Phase.generate  # a smaller example would compile for minutes


@settings(max_examples=12, phases=ONCE)
@given(
    meshes(),
    st.sampled_from([*DECODERS]),
    st.sampled_from(["even", "ragged", "few"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_decoding_on_any_mesh(where, name, kind, with_options, seed):
    """The numbers, and what the compiled program sends: along the keys' axes only."""
    mesh, *axes, sharding = where
    batch, keys, heads = sharding.spec
    (rows, p, groups), rng = (along(mesh, x) for x in axes), np.random.default_rng(seed)
    b, l, d = 2, 2, 4  # on each device, of one key head and two heads
    n = {"even": 3 * p, "ragged": 3 * p + 1, "few": 2}[kind]
    h, t = 2 * groups, -(-n // p)
    keys = keys if n % p == 0 else None  # the devices cannot share them evenly
    specs = {
        "mask": P(batch, None, None, keys),
        "bias": P(None, heads, None, keys),
        "kv_lengths": P(batch),
    }
    arrays = draw(seed, b=b * rows, l=l, n=n, h=h, h_kv=groups, d=d)
    drawn = {option: f(rng, b * rows, l, n, h) for option, f in OPTIONS.items() if with_options}
    options = {x: put(sharding, value, spec=specs.get(x, P()))[0] for x, value in drawn.items()}
    q, k, v = (
        *put(sharding, arrays[0], spec=P(batch, None, heads)),
        *put(sharding, *arrays[1:], spec=P(batch, keys, heads)),
    )
    f = functools.partial(DECODERS[name], sharding=sharding, return_lse=True)
    program = jax.jit(f).lower(q, k, v, **options).compile()
    found = program(q, k, v, **options)
    if name in HEADS_SHARDED:
        found, added = zip(*(own_heads(x, h, groups) for x in found), strict=True)
        assert not np.any(added[0]) and np.all(np.isneginf(added[1]))
    check(tuple(found), *arrays, **drawn)
    shard = [8 * b * t * d] * 2 + [b * l * t, 8 * 2 * t] * with_options
    expected = sends(
        name, [mesh.shape[x] for x in axes[1]], b=b, l=l, h=2, d=d, item=8, shard=shard
    )
    assert among_several(program, mesh, axes[1]) == expected


@settings(max_examples=4, phases=ONCE)
@given(meshes(), st.sampled_from([*PREFILLS]), st.booleans(), st.integers(0, 2**32 - 1))
def test_prefill_on_any_mesh(where, name, causal, seed):
    mesh, *axes, sharding = where
    rows, p, groups = (along(mesh, x) for x in axes)
    h_kv, t, d = 2, 3, 4  # on each device, of one row
    wide = h_kv * groups
    arrays = draw(seed, b=rows, l=p * t, n=p * t, h=wide * p, h_kv=wide, d=d)
    f = functools.partial(PREFILLS[name], causal=causal, sharding=sharding)
    placed = put(sharding, *arrays)
    program = jax.jit(f).lower(*placed).compile()
    check(program(*placed), *arrays, causal=causal)
    expected = 2 * (p - 1), 2 * (p - 1) * 8 * t * h_kv * d
    if name == "ulysses" and p > 1:
        repeated = h_kv * (p // math.gcd(p, h_kv))
        expected = 4, 8 * t * d * (2 * h_kv * p + 2 * repeated)
    assert among_several(program, mesh, axes[1]) == expected


# How a cache lies: as it shows itself, or as the call says, never both.

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = [
    ("allreduce", (AUTO, AUTO)),
    ("allreduce", (EXPLICIT, EXPLICIT)),
    ("ring", (AUTO, EXPLICIT)),
    ("ring_attention", (EXPLICIT, EXPLICIT)),
    ("ulysses", (EXPLICIT, AUTO)),
]


@pytest.mark.parametrize(("name", "kinds"), KINDS, ids=str)
def test_a_placed_cache_says_how_it_lies(name, kinds):
    """In and outside of `jax.set_mesh`, under jit and not, and where training differentiates it."""
    f, sharding = (DECODERS | PREFILLS)[name], over(kinds, rows=2, keys=2)
    arrays = draw(l=4, n=4)
    q, k, v = put(sharding, *arrays)
    (q,) = [q] if name in PREFILLS else put(sharding, arrays[0], spec=P("rows"))
    named = functools.partial(f, sharding=sharding)
    causal = {"causal": name in PREFILLS}
    out = f(jnp.asarray(arrays[0]), k, v)
    check(out, *arrays, **causal)
    assert out.sharding.spec[0] == "rows"
    if kinds == (EXPLICIT, EXPLICIT):  # the axes are in the type, which a trace sees
        check(jax.jit(f)(q, k, v), *arrays, **causal)
    else:
        with pytest.raises(ValueError, match="k's sharding is unknown here"):
            jax.jit(f)(q, k, v)

    def pulled(*x):  # `jax.grad` itself wants to be in `set_mesh` where axes are Explicit
        out, pull = jax.vjp(named, *x)
        return pull(jnp.ones_like(out))

    def ask():
        for way in pulled, jax.jit(jax.grad(lambda *x: named(*x).sum(), (0, 1, 2))):
            check_gradients(way(q, k, v), *arrays, np.ones(q.shape), **causal)

    ask()
    with jax.set_mesh(sharding.mesh):
        ask()
        check(jax.jit(named)(q, k, v), *arrays, **causal)
        check(named(*arrays), *arrays, **causal)


TWO = over(keys=2)
OTHER_AXES = NamedSharding(over(x=2, keys=1).mesh, P(None, ("keys", "x")))
LIES = [  # how k lies, how the call says that it lies, the error; under jit its type says it
    *[
        (NamedSharding(TWO.mesh, spec), TWO, f"expected k sharded as {TWO.spec}, got {spec}")
        for spec in (P(None, None, "keys"), P("keys"), P(None, None, None, "keys"))
    ],
    (TWO, over(first=2, keys=2), "on devices [2, 3], got "),
    (over(EXPLICIT, keys=2), OTHER_AXES, "sharding: expected k sharded as"),
]


@pytest.mark.parametrize(("lies", "sharding", "message"), LIES, ids=str)
def test_a_cache_that_lies_otherwise_is_not_moved_in_silence(lies, sharding, message, unchecked):
    """16.8 MB a step were, where a state is 33 kB: an error that names both."""
    q, k, v = draw(l=4, n=4, h_kv=4)
    cache = put(lies, k, v)
    for f in (treeattn.tree_decode, treeattn.ring_decode, treeattn.ring_attention):
        call = functools.partial(f, sharding=sharding)
        call = jax.jit(call) if sharding is OTHER_AXES else call
        with pytest.raises(ValueError, match=re.escape(message)):
            call(jnp.asarray(q), *cache)
    if sharding is TWO:
        with pytest.raises(ValueError, match="expected v sharded as"):
            treeattn.tree_decode(q, k, cache[1], sharding=sharding)
        copies = put(TWO, k, v, spec=P())  # of which nothing has to be sent
        check(treeattn.tree_decode(q, *copies, sharding=TWO), q, k, v)


def test_another_mesh_than_the_contexts_is_refused():
    x = jnp.ones((1, 2, 2, 4))
    turned = NamedSharding(over(a=2, b=2).mesh, P(None, ("b", "a")))
    devices = turned.mesh.devices.T
    others = [over(keys=3).mesh, Mesh(devices, ("b", "a"))]
    for sharding, other in zip((over(keys=2), turned), others, strict=True):
        with jax.set_mesh(other), pytest.raises(ValueError, match="expected the context's mesh"):
            treeattn.tree_decode(x, x, x, sharding=sharding)

    def inside(x):
        return treeattn.tree_decode(x, x, x, sharding=over(keys=2))

    specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    with pytest.raises(ValueError, match=r"shard_map has split \['keys'\]"):
        jax.shard_map(inside, mesh=over(keys=2).mesh, **specs)(x)


@pytest.mark.parametrize(("n", "holder"), [(8, 1), (7, 3)])
def test_arrays_that_one_device_holds_are_dealt_out(n, holder):
    """Committed to a device, of the mesh or not; 7 keys, which two devices cannot share evenly."""
    sharding, lengths = over(keys=2), {"kv_lengths": np.int32([5, 3])}
    arrays = _, k, v = draw(n=n)
    *here, there = jax.device_put((*arrays, lengths["kv_lengths"]), jax.devices()[holder])
    for f in treeattn.tree_decode, treeattn.ring_decode:
        check(f(*here, kv_lengths=there, sharding=sharding), *arrays, **lengths)
    if n == 8:  # the queries come from weights on one device, the cache is sharded
        out = treeattn.tree_decode(here[0], *put(sharding, k, v), kv_lengths=there)
        check(out, *arrays, **lengths)
    x = jax.device_put(np.repeat(k, 2, axis=2), jax.devices()[holder])
    for f in PREFILLS.values():
        check(f(x, x, x, sharding=sharding), x, x, x, causal=True)


IN_HALF_PRECISION = """
import jax, jax.numpy as jnp
import treeattn
treeattn.simulate_devices(4)
from attentions import DECODERS, over
sharding = over(keys=2, nobodys=2)
for dtype in (jnp.bfloat16, jnp.float16):
    q, kv = jnp.ones((2, 1, 2, 8), dtype), jnp.ones((2, 8, 2, 8), dtype)
    for name, decode in DECODERS.items():
        def loss(*x):
            return decode(*x, sharding=sharding).astype(jnp.float32).sum()
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, kv, kv)
        assert value == 32 and all(jnp.isfinite(x).all() for x in gradients), name
"""


@pytest.mark.slow
def test_half_precision_on_a_mesh_with_an_axis_that_nobody_names():
    """It ended the process: XLA:CPU cannot add in 16 bits along axes that are left to it."""
    program = [sys.executable, "-c", IN_HALF_PRECISION]
    subprocess.run(program, cwd=Path(__file__).parent, check=True, timeout=300)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", ["allreduce", *PREFILLS])
def test_a_spec_is_enough_where_a_mesh_is_set(name, kind):
    """As in JAX; arrays of NumPy and on one device go to the mesh, and without one it is named.
    Four devices cannot share the five keys evenly."""
    arrays, sharding, told = draw(l=5, h_kv=4), over(kind, keys=4), {"causal": name in PREFILLS}
    named, f = (
        functools.partial((DECODERS | PREFILLS)[name], sharding=x)
        for x in (sharding, sharding.spec)
    )
    check(named(*arrays), *arrays, **told)
    with jax.set_mesh(sharding.mesh):
        check(f(*jax.device_put(arrays, jax.devices()[0])), *arrays, **told)
        for call in f, jax.jit(f), jax.jit(named):
            check(call(*arrays), *arrays, **told)
        check(jax.jit(lambda q: f(q, *arrays[1:]))(arrays[0]), *arrays, **told)  # k is not traced
        jax.grad(lambda q: f(q, *arrays[1:]).sum())(jnp.asarray(arrays[0]))
    with pytest.raises(ValueError, match=r"sharding: expected a mesh set by jax.set_mesh"):
        f(*arrays)


@pytest.mark.parametrize("kind", ["cpu", "TPU v5e", "NVIDIA H100 80GB HBM3"])
def test_a_program_is_written_for_the_devices_of_its_mesh(kind):
    """Not for those of this process: the sums over lanes are for a CPU alone."""
    platform = {"c": "cpu", "T": "tpu", "N": "cuda"}[kind[0]]
    described = jax.sharding.Mesh(jax.devices()[:4], "k").abstract_mesh.abstract_device
    about = {"device_kind": kind, "platform": platform}
    known = {name: x for name, x in about.items() if hasattr(described, name)}
    device = dataclasses.replace(described, **known)
    mesh = jax.sharding.AbstractMesh((4,), ("keys",), (AUTO,), abstract_device=device)
    f = functools.partial(treeattn.tree_decode, sharding=NamedSharding(mesh, P(None, "keys")))
    q, kv = (jax.ShapeDtypeStruct((1, n, 4, 128), jnp.float32) for n in (1, 8192))
    text = str(jax.make_jaxpr(f)(q, kv, kv))
    assert ("reduce_precision" in text, "dot_general" in text) == (kind == "cpu", kind != "cpu")
