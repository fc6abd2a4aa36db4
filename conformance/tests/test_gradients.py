"""check_gradients: its answers are autodiff's, ours pass, and public bugs are seen and named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import attend, finalize, kv_mesh, ring_attention, ring_decode, tree_decode
from treeattn_conformance import CURES, check_gradients
from treeattn_conformance.gradients import backward, gradient_questions, slips

SMALL = ["as many queries as keys", "one query, d = 256", "grouped heads", "other width of values"]
OURS = [
    "keys in odd number",
    "grouped heads",
    "a loss with lse",
    "a row without keys",
    "stale NaN",
    "640 keys, 128 queries",
]


# Of JAX, in five lines: any function of q, k and v with gradients


def of_jax(attention):
    @functools.partial(jax.jit, static_argnames="causal")
    def f(q, k, v, dout, dlse=None, **options):
        (_, lse), pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))

    return f


def hidden(l, n, causal=False, kv_lengths=None, mask=None):
    """(b or 1, 1, l, n)"""
    seen = np.tri(l, n, dtype=bool) if causal else np.ones((l, n), bool)
    seen = seen[None, None] if mask is None else seen & mask
    if kv_lengths is None:
        return ~seen
    return ~(seen & (jnp.arange(n) < kv_lengths[:, None])[:, None, None])


def dense(q, k, v, *, scale=None, **options):
    """(out, lse), without a look at the suite's reference."""
    hide = hidden(q.shape[1], k.shape[1], **options)
    nowhere = hide.all(axis=(1, 2))[..., None, None]
    k, v = (jnp.where(nowhere, 0, x) for x in (k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bnhd->bhln", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    none = hide.all(axis=-1, keepdims=True)
    s = jnp.where(hide & ~none, -jnp.inf, s)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(none, 0, jnp.exp(s - lse[..., None]))
    lse = jnp.where(none[..., 0], -jnp.inf, lse)
    return jnp.einsum("bhln,bnhd->blhd", p, v), lse.swapaxes(1, 2)


def test_expected_answers_are_those_of_autodiff():
    for question in gradient_questions("float64"):
        if not question.names:
            continue
        found = of_jax(dense)(*question.arguments.values(), **question.options)
        for x, y in zip(question.right, found, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-10, err_msg=question.name)


def test_a_window_hides_as_a_mask_does():
    (question,) = (x for x in gradient_questions("float64") if x.name == "a window of 140")
    before = np.arange(150, 300)[:, None] - np.arange(300)
    mask = ((before >= 0) & (before < 140))[None, None]
    found = of_jax(dense)(*question.arguments.values(), mask=mask)
    for x, y in zip(question.right, found, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-10)


# Ours


def decoded(decode):
    sharding = NamedSharding(kv_mesh(jax.devices()[:4]), P(None, "kv"))

    def run(q, k, v, *, scale=None, kv_lengths=None):
        options = {"scale": scale, "kv_lengths": kv_lengths}
        return decode(q, k, v, sharding=sharding, return_lse=True, **options)

    return run


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_attend_passes(implementation):
    def ours(q, k, v, *, scale=None, kv_lengths=None, causal=False):
        options = {"scale": scale, "kv_lengths": kv_lengths, "causal": causal}
        return finalize(attend(q, k, v, implementation=implementation, **options))

    report = check_gradients(of_jax(ours), only=[*OURS, "causal"])
    assert report and not report.names("skipped"), str(report)


@pytest.mark.parametrize("decode", [tree_decode, pytest.param(ring_decode, marks=pytest.mark.slow)])
def test_decoding_passes(decode):
    report = check_gradients(of_jax(decoded(decode)), only=OURS)
    assert report and not report.names("skipped"), str(report)


@pytest.mark.slow
def test_ring_attention_passes():
    sharding = NamedSharding(kv_mesh(jax.devices()[:4]), P(None, "kv"))

    def ring(q, k, v, *, scale=None, causal=False):
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("queries that are dealt out as the keys are")
        options = {"scale": scale, "causal": causal}
        return ring_attention(q, k, v, sharding=sharding, return_lse=True, **options)

    asked = ["as many queries as keys", "causal", "a causal prompt of 257"]
    report = check_gradients(of_jax(ring), only=asked)
    assert report and not report.names("skipped"), str(report)


def test_torch_in_five_lines():
    torch = pytest.importorskip("torch")

    def f(q, k, v, dout, *, causal=False):
        leaves = [torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=True
        )
        out.backward(torch.from_numpy(dout).transpose(1, 2))
        return [x.grad.transpose(1, 2) for x in leaves]

    assert check_gradients(f), str(check_gradients(f))


# Public bugs, as functions


def shards_of(q, k, v, parts=4):
    return zip(*(jnp.array_split(x, parts, axis=1) for x in (k, v)), strict=True)


def stopped_merge(q, k, v):
    """Merged by weights that have no gradient, as in several projects that return lse detached."""
    outs, lses = zip(*(dense(q, *part) for part in shards_of(q, k, v)), strict=True)
    w = jax.nn.softmax(jax.lax.stop_gradient(jnp.stack(lses)), axis=0)
    out = (jnp.stack(outs) * w[..., None]).sum(0)
    return out, jax.nn.logsumexp(jnp.stack(lses), axis=0)


def by_own_lse(q, k, v, dout):
    """Context parallelism whose backward recomputes P by each rank's own lse.

    https://github.com/NVIDIA/TransformerEngine/pull/1557
    """
    found = [
        of_jax(lambda q, k, v: dense(q, k, v))(q, *map(np.asarray, part), dout)
        for part in shards_of(q, k, v)
    ]
    dq, dk, dv = zip(*found, strict=True)
    return sum(dq), np.concatenate(dk, axis=1), np.concatenate(dv, axis=1)


def saved_keys(q, k, v, dout):
    """A ring whose backward has saved the keys of its first round.

    https://github.com/zhuzilin/ring-flash-attention/issues/42
    """
    if k.shape[1] % 4:
        raise NotImplementedError("four devices")
    out, lse = dense(q, k, v)
    g = q.shape[2] // k.shape[2]
    first = [np.repeat(x[:, : k.shape[1] // 4], g, axis=2) for x in (k, v)]
    s = np.einsum("blhd,bnhd->blhn", q, first[0]) / q.shape[-1] ** 0.5
    p = np.exp(s - np.asarray(lse)[..., None])
    normal = (np.asarray(out) * dout).sum(-1)[..., None]
    ds = p * (np.einsum("blhd,bnhd->blhn", dout, first[1]) - normal) / q.shape[-1] ** 0.5
    dk, dv = np.einsum("blhn,blhd->bnhd", ds, q), np.einsum("blhn,blhd->bnhd", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, g, x.shape[-1]).sum(3) for x in (dk, dv))
    return (
        4 * np.einsum("blhn,bnhd->blhd", ds, first[0]),
        np.tile(dk, (1, 4, 1, 1)),
        np.tile(dv, (1, 4, 1, 1)),
    )


def lse_detached(q, k, v):
    """lse comes out of the kernel without a gradient: https://github.com/SHI-Labs/NATTEN/issues/274"""
    out, lse = dense(q, k, v)
    return out, jax.lax.stop_gradient(lse)


def heads_not_added(q, k, v, dout):
    """A backward for as many key heads as query heads, whose first of each group is returned."""
    groups = q.shape[2] // k.shape[2]
    wide = (np.repeat(x, groups, axis=2) for x in (k, v))
    dq, dk, dv = of_jax(dense)(q, *wide, dout)
    return dq, dk[:, :, ::groups], dv[:, :, ::groups]


BUGS = ["as many queries as keys", "one query, d = 256", "grouped heads", "a loss with lse"]
PUBLIC = [
    ("lse without a gradient", of_jax(stopped_merge)),
    ("lse without a gradient", of_jax(lse_detached)),
    ("a shard's own lse", by_own_lse),
    ("keys of the first round", saved_keys),
    ("grouped heads not added", heads_not_added),
]


def can_only(names, f):
    """f, for the shapes and options of these questions: each other shape is compiled anew."""

    def kind(options, **arrays):
        return [*map(np.shape, arrays.values()), *options]

    known = [kind(x.options, **x.arguments) for x in gradient_questions() if x.name in names]

    @functools.wraps(f)
    def some(q, k, v, dout, **options):
        if kind(options, q=q, k=k, v=v, dout=dout) not in known:
            raise NotImplementedError
        return f(q, k, v, dout, **options)

    return some


@pytest.mark.parametrize(("name", "f"), PUBLIC, ids=lambda x: getattr(x, "__name__", x))
def test_a_public_bug_is_seen_and_named(name, f):
    report = check_gradients(can_only(BUGS, f))
    assert report.names("failed") and report.fingerprints == {name}, str(report)
    assert CURES["gradients"][name] in str(report)


def in_float32(q, k, v, dout):
    """By four shards; their lse are merged one after another, and saved in float32."""
    group = q.shape[2] // k.shape[2]
    shards = [
        [np.repeat(x[:, at], group, axis=2) for x in (k, v)]
        for at in np.array_split(np.arange(k.shape[1]), 4)
    ]
    scale = np.float32(q.shape[-1] ** -0.5)
    scores = [np.einsum("blhd,bnhd->blhn", q, k) * scale for k, _ in shards]
    lse = functools.reduce(np.logaddexp, [np.logaddexp.reduce(s, axis=-1) for s in scores])
    p = [np.exp(s - lse[..., None]) for s in scores]
    out = sum(np.einsum("blhn,bnhd->blhd", x, v) for x, (_, v) in zip(p, shards, strict=True))
    normal = (dout * out).sum(axis=-1)[..., None]
    dq, found = 0, []
    for x, (k, v) in zip(p, shards, strict=True):
        ds = x * (np.einsum("blhd,bnhd->blhn", dout, v) - normal) * scale
        dq += np.einsum("blhn,bnhd->blhd", ds, k)
        found.append([np.einsum("blhn,blhd->bnhd", *pair) for pair in ((ds, q), (x, dout))])
    grouped = (np.concatenate(x, axis=1) for x in zip(*found, strict=True))
    return dq, *(x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(axis=3) for x in grouped)


def test_rounding_in_float32_is_no_mistake():
    assert in_float32(**gradient_questions()[0].arguments)[0].dtype == np.float32
    for allowed in (None, 3e-5):  # a third of what is allowed
        report = check_gradients(in_float32, tolerance=allowed)
        assert report and len(report.names("passed")) >= 8, str(report)


def test_each_mistake_is_named_as_itself():
    seen = set()
    for name, slip in slips():
        if name not in seen or slip.shards == 4 or slip.empty:
            small = [x.name for x in gradient_questions() if x.names]
            report = check_gradients(functools.partial(backward, slip=slip), only=small)
            assert report.fingerprints == {name}, f"{slip}: {report}"
            seen.add(name)
    assert seen | {"tiles lost beside hidden ones"} == set(CURES["gradients"])


def test_what_has_no_name_is_placed():
    def wrong(q, k, v, dout):
        dq, dk, dv = backward(q, k, v, dout)
        dv[:, 3:5] = 0
        return 2 * dq, dk, dv

    report = check_gradients(wrong, only=SMALL)
    assert report.fingerprints == set()
    assert "dq is 2 times what it should be" in str(report)
    assert "in keys 3-4 of 16" in str(report)
    report = check_gradients(lambda q, k, v, dout: (q, k), only=SMALL)
    assert "expected three arrays" in str(report) and not report
