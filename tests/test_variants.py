"""Each row of site/variants.md: the page's own code against dense attention, in float64."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import blocks

PAGE = Path(__file__).parent.parent / "site" / "variants.md"
P, B, N, H, G, D = 4, 2, 32, 4, 2, 8  # devices, rows, keys, heads, key heads, head_dim
LENGTH, SIZE, L = 27, 9, 3  # keys that count, of a window; queries


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the page's code defines, on some of this process's devices."""
    names: dict = {}
    for block in blocks(PAGE):
        code = block.code
        if "simulate_devices(8)" in code:
            code = code.replace("simulate_devices(8)", "")
            code = code.replace("kv_mesh()", f"kv_mesh(jax.devices()[:{P}])")
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["p"] == P
    return names


def normal(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def dense(q, k, v, *, mask=True, bias=0.0, scale=None, cap=None, sink=None):
    """Attention by its formula; mask and bias broadcast to (b, h, l, n)."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bnhd->bhln", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    e = jnp.exp(jnp.where(mask, s + bias, -jnp.inf))
    z = e.sum(-1, keepdims=True)
    if sink is not None:
        z = z + jnp.exp(sink)[:, None, None]
    return jnp.einsum("bhln,bnhd->blhd", e / z, v)


def join(*pairs):
    return [jnp.concatenate(pair, axis=1) for pair in pairs]


Q1, QL = normal(0, B, 1, H, D), normal(1, B, L, H, D)
K, V = normal(2, B, N, G, D), normal(3, B, N, G, D)
NEW = normal(4, B, L, G, D), normal(5, B, L, G, D)
SINK, SLOPES = normal(6, H), 2.0 ** -jnp.arange(1, H + 1)
AT = jnp.arange(N)
STRIPED = np.arange(N).reshape(-1, P).T.ravel()  # the position of the key in each slot
IN_WINDOW = (AT < LENGTH) & (AT >= LENGTH - SIZE)


def of_two(q, k, v, new_k, new_v, own):
    """Dense attention to the first LENGTH keys and to new ones, as `own` (…, l, l) lets them."""
    old = jnp.broadcast_to(AT < LENGTH, (B, L, N))
    mask = jnp.concatenate([old, jnp.broadcast_to(own, (B, L, L))], axis=-1)[:, None]
    return dense(q, *join((k, new_k), (v, new_v)), mask=mask)


def latents():
    """(page's arguments, how the dense oracle makes keys and values of them)."""
    rank, rope = 6, 4
    arguments = (
        normal(7, B, 1, H, D),
        normal(8, B, 1, H, rope),
        normal(9, B, N, 1, rank + rope),
        normal(10, rank, H, D),
        normal(11, rank, H, D + 1),
    )

    def wanted(q, q_rope, latents, w_k, w_v):
        c, key = latents[:, :, 0, :rank], latents[..., rank:]
        k = jnp.einsum("bnc,chd->bnhd", c, w_k)
        k = jnp.concatenate([k, jnp.broadcast_to(key, (B, N, H, rope))], axis=-1)
        v = jnp.einsum("bnc,chd->bnhd", c, w_v)
        return dense(jnp.concatenate([q, q_rope], axis=-1), k, v)

    return arguments, wanted


PREFIX = K[:1], V[:1]
SUFFIXES = normal(12, B, 5, G, D), normal(13, B, 5, G, D)
OWN = jnp.array([0, 4])  # lengths of the suffixes
PARENT = jnp.array([1, 1])


def of_prefix(q, pre_k, pre_v, k, v):
    shared = [jnp.repeat(x, B, axis=0) for x in (pre_k, pre_v)]
    mask = jnp.concatenate([jnp.ones((B, N), bool), jnp.arange(5) < OWN[:, None]], axis=1)
    return dense(q, *join((shared[0], k), (shared[1], v)), mask=mask[:, None, None])


TREE = jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)[None].repeat(B, 0)
CAUSAL = jnp.tri(L, dtype=bool)

PAGES, PAGE_SIZE, TABLE = 5, 4, 2  # of a device; entries of its table for each row
RNG = np.random.default_rng(14)
TABLES = jnp.array([RNG.permutation(PAGES)[: B * TABLE].reshape(B, TABLE) for _ in range(P)])
HELD = jnp.array(RNG.integers(0, TABLE * PAGE_SIZE + 1, (P, B))).at[2].set(0)
POOLS = normal(15, P * PAGES, PAGE_SIZE, G, D), normal(16, P * PAGES, PAGE_SIZE, G, D)


def of_pages(q, *pools):
    def rows(pool):
        taken = [pool[TABLES[r] + r * PAGES].reshape(B, -1, G, D) for r in range(P)]
        return jnp.concatenate(taken, axis=1)

    counts = [jnp.arange(TABLE * PAGE_SIZE) < HELD[r][:, None] for r in range(P)]
    return dense(q, *map(rows, pools), mask=jnp.concatenate(counts, axis=1)[:, None, None])


TEXT = normal(17, B, N, H, D), K, V, SINK
SEGMENT = jnp.stack([AT // 16, AT // 5])


def of_ring(q, k, v, sink):
    distance = AT[:, None] - AT
    mask = (distance >= 0) & (distance < SIZE) & (SEGMENT[:, :, None] == SEGMENT[:, None])
    return dense(q, k, v, mask=mask[:, None], sink=sink)


def by_ring(page, order):
    def f(q, k, v, sink):
        q, k, v = (x[:, order] for x in (q, k, v))
        out = page["ring"](q, k, v, AT[order], SEGMENT[:, order], SIZE, sink)
        return out[:, jnp.argsort(order)]

    return f


def rolled(page):
    """All steps of a rolling window of 8 keys; the last output is the window's."""

    def f(q, k, v):
        buffers = jnp.zeros((B, 8, G, D)), jnp.zeros((B, 8, G, D))
        for i in range(11):
            *buffers, out = page["rolling_window"](q, *buffers, k[:, i], v[:, i], jnp.int32(i))
        return out

    return f


TIES = jnp.array(np.random.default_rng(18).integers(0, 4, N) * 1.0)  # eight keys of each score
HIGHEST = jnp.zeros(N, bool).at[np.lexsort((AT, -TIES))[:SIZE]].set(True)


def in_stripes(f, *options):
    return lambda q, k, v: f(q, k[:, STRIPED], v[:, STRIPED], *options)


# name: (the page's function as one of these arguments, the oracle, the arguments)
LATENTS, OF_LATENTS = latents()
ROWS = {
    "with_sink": (
        lambda page: page["with_sink"],
        lambda q, k, v, s: dense(q, k, v, sink=s),
        (Q1, K, V, SINK),
    ),
    "window": (
        lambda page: lambda *x: page["window"](*x, LENGTH, SIZE),
        lambda *x: dense(*x, mask=IN_WINDOW),
        (Q1, K, V),
    ),
    "striped_window": (
        lambda page: in_stripes(page["striped_window"], LENGTH, SIZE),
        lambda *x: dense(*x, mask=IN_WINDOW),
        (Q1, K, V),
    ),
    "rolling_window": (
        rolled,
        lambda *x: dense(*x, mask=(AT < 11) & (AT >= 3)),
        (Q1, K, V),
    ),
    "soft_cap": (
        lambda page: lambda *x: page["soft_cap"](*x, 1.5),
        lambda *x: dense(*x, cap=1.5),
        (QL, K, V),
    ),
    "alibi": (
        lambda page: lambda q, k, v, s: page["alibi"](q, k, v, LENGTH, s),
        lambda q, k, v, s: dense(
            q, k, v, mask=AT < LENGTH, bias=s[:, None, None] * (AT - LENGTH + 1)
        ),
        (Q1, K, V, SLOPES),
    ),
    "mla": (lambda page: page["mla"], OF_LATENTS, LATENTS),
    "last_queries": (
        lambda page: page["last_queries"],
        lambda *x: dense(*x, mask=AT <= N - L + jnp.arange(L)[:, None]),
        (QL, K, V),
    ),
    "chunk": (
        lambda page: lambda q, k, v, *new: page["chunk"](q, k, v, LENGTH, *new),
        lambda *x: of_two(*x, CAUSAL),
        (QL, K, V, *NEW),
    ),
    "cascade": (
        lambda page: lambda *x: page["cascade"](*x, OWN),
        of_prefix,
        (Q1, *PREFIX, *SUFFIXES),
    ),
    "beams": (
        lambda page: lambda *x: page["beams"](*x, PARENT, OWN),
        lambda q, pre_k, pre_v, k, v: of_prefix(q, pre_k, pre_v, k[PARENT], v[PARENT]),
        (Q1, *PREFIX, *SUFFIXES),
    ),
    "drafts": (
        lambda page: lambda q, k, v, *new: page["drafts"](q, k, v, LENGTH, *new, TREE),
        lambda *x: of_two(*x, TREE),
        (QL, K, V, *NEW),
    ),
    "drafts_in_the_cache": (
        lambda page: in_stripes(page["drafts_in_the_cache"], LENGTH),
        lambda *x: dense(*x, mask=AT <= LENGTH + jnp.arange(L)[:, None]),
        (QL, K, V),
    ),
    "tree_of_paths": (
        lambda page: (
            lambda q, k, v, *new: page["drafts"](
                q, k, v, LENGTH, *new, page["tree_of_paths"]([[1], [0]])[0][None].repeat(B, 0)
            )
        ),
        lambda *x: of_two(*x, TREE),
        (QL, K, V, *NEW),
    ),
    "top_k": (
        lambda page: lambda *x: page["top_k"](*x, TIES, SIZE),
        lambda *x: dense(*x, mask=HIGHEST),
        (QL, K, V),
    ),
    "paged": (
        lambda page: lambda *x: page["paged"](*x, TABLES, HELD),
        of_pages,
        (Q1, *POOLS),
    ),
    "ring": (lambda page: by_ring(page, AT), of_ring, TEXT),
    "zigzag": (lambda page: by_ring(page, page["zigzag"](N)), of_ring, TEXT),
}


def test_every_function_of_the_page_is_a_row_here():
    """And every row of its table leads to a heading of the page."""
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"(?m)^def (\w+)", text)) == set(ROWS)
    table = re.findall(r"(?m)^\| .*?\]\(#([^)]+)\)", text)
    headings = re.findall(r"(?m)^## (.+)$", text)
    places = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings]
    assert set(table) == set(places)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_pages_code_is_dense_attention(name, page):
    made, wanted, arguments = ROWS[name]

    def value_and_gradients(f):
        def loss(*x):
            out = f(*x)
            return jnp.sum(jnp.sin(3 * out)), out

        every = tuple(range(len(arguments)))
        return jax.jit(jax.value_and_grad(loss, every, has_aux=True))(*arguments)

    with jax.numpy_rank_promotion("allow"):
        (_, out), gradients = value_and_gradients(made(page))
        (_, wanted_out), wanted_gradients = value_and_gradients(wanted)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, wanted_out, atol=1e-12)
    for came, right in zip(gradients, wanted_gradients, strict=True):
        assert np.abs(right).max() > 1e-3
        np.testing.assert_allclose(came, right, atol=1e-11)


def test_zigzag_balances_what_devices_compute(page):
    def visible_scores(order):
        return (np.asarray(order).reshape(P, -1) + 1).sum(axis=1).tolist()

    assert visible_scores(page["zigzag"](64)) == [520] * 4
    text = PAGE.read_text(encoding="utf-8")
    for order in np.arange(64), np.arange(64).reshape(-1, P).T.ravel():
        scores = visible_scores(order)
        assert f"{min(scores)} to {max(scores)}" in text


def test_medusas_paths(page):
    """Depths are the paths' lengths, and a node sees the beginnings of its path."""
    choices = [[0, 0, 1], [0], [1], [0, 0], [1, 2]]  # lists, as Medusa writes them
    mask, offsets = page["tree_of_paths"](choices)
    nodes = [(), (0,), (1,), (0, 0), (1, 2), (0, 0, 1)]
    assert offsets.tolist() == [len(path) for path in nodes]
    assert page["tree_of_paths"]([[0, 0, 0, 0]])[1].tolist() == [0, 1, 2, 3, 4]  # prefixes left out
    assert mask.tolist() == [[path[: len(other)] == other for other in nodes] for path in nodes]
