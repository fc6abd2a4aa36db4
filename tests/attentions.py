"""One table of what computes attention, and on which meshes; inputs for all of it, and what is
right: dense attention and its gradients in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_gradients, dense_weights

import treeattn
from treeattn.across import METHODS

DECODERS = {method: functools.partial(treeattn.tree_decode, method=method) for method in METHODS}
DECODERS |= {"ring": treeattn.ring_decode}
HEADS_SHARDED = [name for name, way in METHODS.items() if way.shards_heads]
PREFILLS = {"ring_attention": treeattn.ring_attention, "ulysses": treeattn.ulysses_attention}


def kernel(q, k, v, *, scale, **options):
    """A user's kernel: (out, lse), with whatever options there are."""
    return treeattn.finalize(treeattn.attend(q, k, v, scale=scale, **options, **PLAIN))


PLAIN = {"implementation": "plain"}
# flash-attn-jax returns (out, lse) as a user's kernel does; tests/test_flash.py has the rest of it.
IMPLEMENTATIONS = {"plain": "plain", "blockwise": "blockwise", "a kernel": kernel}


def _mask(rng, b, l, n, h):
    return rng.random((b, 1, l, n)) < rng.choice([0.0, 0.05, 0.5, 1.0])


def _bias(rng, b, l, n, h):
    hidden = rng.random((1, h, 1, n)) > rng.choice([0.5, 1.0])
    return np.where(hidden, -np.inf, rng.normal(size=hidden.shape))


def _lengths(rng, b, l, n, h):
    """Below 0 counts as 0, and beyond the keys as all of them."""
    return rng.integers(-2, n + 3, b).astype(np.int32)


# Every option of an attention that is an array or a number, drawn for b rows of l queries and n
# keys with h heads: what attends and what decodes is asked with all of them, traced. A new
# parameter of `attend` needs its row here, or in STATIC.
OPTIONS = {
    "mask": _mask,
    "bias": _bias,
    "kv_lengths": _lengths,
    "scale": lambda rng, b, l, n, h: rng.choice([0.1, 0.5, 2.0]),
}
# Two values of each option that is another program: they give different results everywhere.
STATIC = {"causal": (False, True)}
FOR_PROMPTS = {"causal"}  # which what decodes does not have
# One value of each of the others, for tests that ask with all options at once; none today.
OTHERS = {name: values[1] for name, values in STATIC.items() if name not in FOR_PROMPTS}


def over(kind=AxisType.Auto, first=0, **sizes) -> NamedSharding:
    """How a cache lies on a mesh whose axes have these names and sizes, in this order.

    Rows lie along the axes named "rows…", keys along "keys…", heads along "heads…", in the order of
    their names. `kind`: that of all axes, or one for each; first: the first of its devices.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(sizes)
    devices = jax.devices()[first : first + np.prod([*sizes.values()])]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds, devices=devices)
    entries = (
        tuple(sorted(name for name in sizes if name.startswith(role))) or None
        for role in ("rows", "keys", "heads")
    )
    return NamedSharding(mesh, P(*entries))


def draw(seed=0, b=2, l=2, n=5, h=4, h_kv=2, d=4, dv=None, dtype=np.float64):
    """[q, k, v] of normal numbers."""
    rng = np.random.default_rng(seed)
    sizes = (b, l, h, d), (b, n, h_kv, d), (b, n, h_kv, dv or d)
    return [rng.normal(size=size).astype(dtype) for size in sizes]


def own_heads(x, h, groups=1):
    """(x without the heads that "all_to_all" adds at the end of each group of heads, those)."""
    split = x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])
    own, added = split[:, :, :, : h // groups], split[:, :, :, h // groups :]
    return own.reshape(*x.shape[:2], h, *x.shape[3:]), added


def put(sharding, *arrays, spec=None):
    """Arrays placed as a cache lies, or as `spec` says, on the mesh of `sharding`."""
    own = sharding if spec is None else NamedSharding(sharding.mesh, spec)
    return jax.device_put(arrays, own)


def oracle(q, causal=False, **options):
    """What the oracles are told, who know no causality."""
    if causal:
        options["mask"] = options.get("mask", True) & np.tri(q.shape[1], dtype=bool)[None, None]
    return options


def check(got, q, k, v, *, atol=1e-12, **options):
    """`got`, out or (out, lse), is that of dense attention."""
    options = oracle(q, **options)
    out, *lse = got if isinstance(got, tuple) else (got,)
    np.testing.assert_allclose(out, dense_attention(q, k, v, **options), atol=atol)
    for x in lse:
        np.testing.assert_allclose(x, dense_weights(q, k, **options)[1], atol=atol)


def check_gradients(gradients, q, k, v, w, u=0.0, *, atol=1e-11, **options):
    """Those of Σ w·out + Σ u·lse with respect to q, k, v and the bias are dense attention's."""
    expected = dense_gradients(q, k, v, w, u, **oracle(q, **options))
    for ours, dense in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, dense, atol=atol)


@functools.partial(jax.jit, static_argnums=0)
def results(f, q, k, v, w, u, options):
    """(out, lse) or out of f(q, k, v, **options), and the gradients of Σ w·out + Σ u·lse over the
    rows with keys, with respect to q, k, v and the bias, if there is one."""

    def loss(arrays):
        found = f(**arrays, **{name: x for name, x in options.items() if name != "bias"})
        out, lse = found if isinstance(found, tuple) else (found, jnp.zeros(()))
        total = jnp.sum(w * out) + jnp.sum(u * jnp.where(jnp.isneginf(lse), 0, lse))
        return total, found

    arrays = {"q": q, "k": k, "v": v}
    arrays |= {"bias": options["bias"]} if "bias" in options else {}
    gradients, found = jax.grad(loss, has_aux=True)(arrays)
    return found, [gradients[name] for name in arrays]
