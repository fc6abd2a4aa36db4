"""Each row of site/variants.md: the page's own code against dense attention, in float64."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pages import SITE, blocks, text

import treeattn

PAGE = SITE / "variants.md"
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


def dense(q, k, v, *, mask=True, bias=0.0, cap=None, sink=None):
    """Attention by its formula; mask and bias broadcast to (b, h, l, n)."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bnhd->bhln", q, k) * q.shape[-1] ** -0.5
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


def of_two(q, k, v, length, new_k, new_v, own):
    """Dense attention to the first keys and to new ones, as `own` (…, l, l) lets them."""
    old = jnp.broadcast_to(AT < length, (B, L, N))
    mask = jnp.concatenate([old, jnp.broadcast_to(own, (B, L, L))], axis=-1)[:, None]
    return dense(q, *join((k, new_k), (v, new_v)), mask=mask)


RANK, ROPE = 6, 4
LATENTS = (
    normal(7, B, 1, H, D),
    normal(8, B, 1, H, ROPE),
    normal(9, B, N, 1, RANK + ROPE),
    normal(10, RANK, H, D),
    normal(11, RANK, H, D + 1),
)


def of_latents(q, q_rope, latents, w_k, w_v):
    c, key = latents[:, :, 0, :RANK], latents[..., RANK:]
    k, v = (jnp.einsum("bnc,chd->bnhd", c, w) for w in (w_k, w_v))
    k = jnp.concatenate([k, jnp.broadcast_to(key, (B, N, H, ROPE))], axis=-1)
    return dense(jnp.concatenate([q, q_rope], axis=-1), k, v)


PREFIX = K[:1], V[:1]
SUFFIXES = normal(12, B, 5, G, D), normal(13, B, 5, G, D)
OWN = jnp.array([0, 4])  # lengths of the suffixes
PARENT = jnp.array([1, 1])


def of_prefix(q, pre_k, pre_v, k, v, *_):
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


def of_pages(q, k, v, *_):
    def rows(pool):
        taken = [pool[TABLES[r] + r * PAGES].reshape(B, -1, G, D) for r in range(P)]
        return jnp.concatenate(taken, axis=1)

    counts = [jnp.arange(TABLE * PAGE_SIZE) < HELD[r][:, None] for r in range(P)]
    return dense(q, rows(k), rows(v), mask=jnp.concatenate(counts, axis=1)[:, None, None])


BYTES = [jnp.asarray(np.round(np.clip(40 * x, -127, 127)), jnp.int8) for x in (K, V)]
SCALES = [0.01 + normal(seed, B, N, G, 1) ** 2 / 9 for seed in (19, 20)]
USED = jnp.array([LENGTH, 3])  # a shard is full, in part or without keys


def of_bytes(q, k, k_scale, v, v_scale, lengths):
    return dense(q, k * k_scale, v * v_scale, mask=(AT < lengths[:, None])[:, None, None])


TEXT = normal(17, B, N, H, D), K, V, SINK
SEGMENT = jnp.stack([AT // 16, AT // 5])


def of_ring(q, k, v, sink):
    distance = AT[:, None] - AT
    mask = (distance >= 0) & (distance < SIZE) & (SEGMENT[:, :, None] == SEGMENT[:, None])
    return dense(q, k, v, mask=mask[:, None], sink=sink)


def by_ring(order):
    def f(page, q, k, v, sink):
        q, k, v = (x[:, order] for x in (q, k, v))
        out = page["ring"](q, k, v, AT[order], SEGMENT[:, order], SIZE, sink)
        return out[:, jnp.argsort(order)]

    return f


def zigzag(page, *arrays):
    return by_ring(page["zigzag"](N))(page, *arrays)


def rolled(page, q, k, v):
    """All steps of a rolling window of 8 keys; the last output is the window's."""
    buffers = jnp.zeros((B, 8, G, D)), jnp.zeros((B, 8, G, D))
    for i in range(11):
        *buffers, out = page["rolling_window"](q, *buffers, k[:, i], v[:, i], jnp.int32(i))
    return out


def in_stripes(name):
    return lambda page, q, k, v, *rest: page[name](q, k[:, STRIPED], v[:, STRIPED], *rest)


TIES = jnp.array(np.random.default_rng(18).integers(0, 4, N))  # eight keys of each score
HIGHEST = jnp.zeros(N, bool).at[np.lexsort((AT, -TIES))[:SIZE]].set(True)


def masked(mask):
    """The oracle of a function whose options are all in its mask."""
    return lambda q, k, v, *_: dense(q, k, v, mask=mask)


def alibi(q, k, v, length, slopes):
    bias = slopes[:, None, None] * (AT - length + 1)
    return dense(q, k, v, mask=AT < length, bias=bias)


LAST = jnp.arange(L)[:, None]  # a query's place among the queries
WINDOW = (Q1, K, V, LENGTH, SIZE)
CHUNK = (QL, K, V, LENGTH, *NEW)
SUFFIX = (Q1, *PREFIX, *SUFFIXES)
# name: (the oracle, the arguments); called with both, the page's function, unless BY has another.
ROWS = {
    "with_sink": (lambda q, k, v, s: dense(q, k, v, sink=s), (Q1, K, V, SINK)),
    "window": (masked(IN_WINDOW), WINDOW),
    "striped_window": (masked(IN_WINDOW), WINDOW),
    "rolling_window": (masked((AT < 11) & (AT >= 3)), (Q1, K, V)),
    "soft_cap": (lambda q, k, v, cap: dense(q, k, v, cap=cap), (QL, K, V, 1.5)),
    "alibi": (alibi, (Q1, K, V, LENGTH, SLOPES)),
    "mla": (of_latents, LATENTS),
    "last_queries": (masked(AT <= N - L + LAST), (QL, K, V)),
    "chunk": (lambda *x: of_two(*x, CAUSAL), CHUNK),
    "cascade": (of_prefix, (*SUFFIX, OWN)),
    "beams": (
        lambda q, pre_k, pre_v, k, v, *_: of_prefix(q, pre_k, pre_v, k[PARENT], v[PARENT]),
        (*SUFFIX, PARENT, OWN),
    ),
    "drafts": (of_two, (*CHUNK, TREE)),
    "drafts_in_the_cache": (masked(AT <= LENGTH + LAST), (QL, K, V, LENGTH)),
    "top_k": (masked(HIGHEST), (Q1, K, V, TIES, SIZE)),
    "quantised": (of_bytes, (Q1, BYTES[0], SCALES[0], BYTES[1], SCALES[1], USED)),
    "paged": (of_pages, (Q1, *POOLS, TABLES, HELD)),
    "ring": (of_ring, TEXT),
    "zigzag": (of_ring, TEXT),
}
BY = {name: in_stripes(name) for name in ("striped_window", "drafts_in_the_cache")}
BY |= {"quantised": lambda page, *arrays: page["quantised"](*arrays, size=4)}
BY |= {"rolling_window": rolled, "ring": by_ring(AT), "zigzag": zigzag}


def test_every_function_of_the_page_is_a_row_here():
    """And every row of its table leads to a heading of the page."""
    assert set(re.findall(r"(?m)^def (\w+)", text(PAGE))) == {*ROWS, "tree_of_paths"}
    table = re.findall(r"(?m)^\| .*?\]\(#([^)]+)\)", text(PAGE))
    headings = re.findall(r"(?m)^## (.+)$", text(PAGE))
    places = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings]
    assert set(table) == set(places)


def test_every_argument_of_jaxs_own_attention_has_a_row():
    table = text(PAGE).partition("\n## Arguments of other libraries\n")[2]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (.*?) \|", table)))
    assert set(inspect.signature(jax.nn.dot_product_attention).parameters) <= set(named)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_pages_code_is_dense_attention(name, page):
    wanted, arguments = ROWS[name]
    arrays = [i for i, x in enumerate(arguments) if isinstance(x, jax.Array)]
    arrays = [i for i in arrays if jnp.issubdtype(arguments[i].dtype, jnp.floating)]

    def value_and_gradients(f):
        def loss(*x):
            given = dict(enumerate(arguments)) | dict(zip(arrays, x, strict=True))
            out = f(*given.values())
            return jnp.sum(jnp.sin(3 * out)), out

        every = tuple(range(len(arrays)))
        given = [arguments[i] for i in arrays]
        return jax.jit(jax.value_and_grad(loss, every, has_aux=True))(*given)

    by = functools.partial(BY[name], page) if name in BY else page[name]
    with jax.numpy_rank_promotion("allow"):
        (_, out), gradients = value_and_gradients(by)
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
    for order in np.arange(64), np.arange(64).reshape(-1, P).T.ravel():
        scores = visible_scores(order)
        assert f"{min(scores)} to {max(scores)}" in text(PAGE)


def test_medusas_paths(page):
    """Depths are the paths' lengths, and a node sees the beginnings of its path."""
    choices = [[0, 0, 1], [0], [1], [0, 0], [1, 2]]  # lists, as Medusa writes them
    mask, offsets = page["tree_of_paths"](choices)
    nodes = [(), (0,), (1,), (0, 0), (1, 2), (0, 0, 1)]
    assert offsets.tolist() == [len(path) for path in nodes]
    assert page["tree_of_paths"]([[0, 0, 0, 0]])[1].tolist() == [0, 1, 2, 3, 4]  # prefixes left out
    assert mask.tolist() == [[path[: len(other)] == other for other in nodes] for path in nodes]


@pytest.mark.slow
def test_a_float8_cache_over_two_axes_donated_and_scanned():
    mesh = treeattn.kv_mesh(jax.devices()[:8], nodes=2)
    cache = NamedSharding(mesh, PartitionSpec(None, ("node", "device")))
    queries, keys, values = (
        normal(21, 6, B, 1, H, D),
        normal(22, 6, B, G, D),
        normal(23, 6, B, G, D),
    )
    keys = 300 * keys  # some beyond 448
    float8 = jnp.float8_e4m3fn

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def decode(k, v):
        def step(kv, token):
            i, q, *new = token
            slot = treeattn.striped_slot(i, N, 8)
            new = [jnp.clip(x, -448, 448).astype(float8) for x in new]
            k, v = (x.at[:, slot].set(y) for x, y in zip(kv, new, strict=True))
            options = {"striped": True, "kv_lengths": i + 1, "method": "hierarchical"}
            return (k, v), treeattn.tree_decode(q, k, v, sharding=cache, scale=0.01, **options)

        return jax.lax.scan(step, (k, v), (jnp.arange(6), queries, keys, values))

    empty = [jax.device_put(jnp.zeros((B, N, G, D), float8), cache) for _ in "kv"]
    (k, _), out = decode(*empty)
    assert empty[0].is_deleted() and k.sharding == cache and k.dtype == float8
    held = [jnp.clip(x, -448, 448).astype(float8).astype(jnp.float64) for x in (keys, values)]
    for i in range(6):
        k, v = (jnp.moveaxis(x[: i + 1], 0, 1) for x in held)
        wanted = dense(queries[i] * 0.01 * D**0.5, k, v)
        np.testing.assert_allclose(out[i], wanted, atol=1e-5)
