"""The reader's turns: a planted mistake is named. That the solutions are right, and what the stubs'
mistakes are called, the notebooks' stored outputs say."""

import ast
import functools
import math
from fractions import Fraction
from functools import reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import MAIN_ROAD, cells

import treeattn
from course import check_algorithm_3, check_loop

# Number of a notebook -> the names that its check needs, and 07's solution.
NEEDED = {
    "00": "words scores values attend finite check merge",
    "04": "check",
    "07": "rows mask_mistake check prefix_tree",
    "09": "outcome exact MISTAKES check",
}


IN_COURSE = {"03": check_loop, "05": check_algorithm_3}


def source(number: str) -> list[ast.stmt]:
    (path,) = (path for path in MAIN_ROAD if path.name.startswith(number))
    code = [cell.source for cell in cells(path) if cell.cell_type == "code"]
    return [statement for cell in code for statement in ast.parse(cell).body]


def binds(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return names | {getattr(statement, "name", "")}


def run_first(number: str, wanted: set[str], names: dict) -> dict:
    """`names`, and what the first statements of a notebook that bind those wanted give them."""
    for statement in source(number):
        if found := binds(statement) & wanted:
            wanted = wanted - found
            exec(compile(ast.Module([statement], []), number, "exec"), names)
    assert not wanted
    return names


@functools.cache
def notebook(number: str) -> dict:
    """What a notebook's check needs."""
    if number in IN_COURSE:
        return {"check": lambda mine: str(IN_COURSE[number](mine))}
    mesh = treeattn.kv_mesh(jax.devices()[:8])  # 05's; the tests have nine devices
    names = {"jax": jax, "jnp": jnp, "np": np, "reduce": reduce, "F": Fraction, "P": P}
    names |= {"treeattn": treeattn, "partial": functools.partial, "math": math}
    names |= {"mesh": mesh, "cache": NamedSharding(mesh, P(None, "kv"))}
    return run_first(number, {*NEEDED[number].split()}, names)


# ----------------------------------------------------------------- 00: a merge of states (m, d, n)


def without_pivot(a, b):
    wa, wb = jnp.exp(a[0]), jnp.exp(b[0])
    m = jnp.log(wa + wb)
    return m, a[1] * wa / jnp.exp(m), (a[2] * wa[:, None] + b[2] * wb[:, None])


def unguarded(a, b):
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa[:, None] + b[2] * wb[:, None]


def without_an_axis(a, b):
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa + b[2] * wb


def transposed(a, b):
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2].T * wa + b[2].T * wb


def early_exponentials(a, b):
    """Right where exponentials are in range of the notebook's float32."""
    a, b = (jax.tree.map(jnp.float32, x) for x in (a, b))
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0]) / jnp.exp(m), jnp.exp(b[0]) / jnp.exp(m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa[:, None] + b[2] * wb[:, None]


def divided(a, b):
    m, d, n = notebook("00")["merge"](a, b)
    return m, d, n / d[:, None]


# ------------------------------------------------------------- 03: a loop over keys, for (m, d, n)


def flash(rescale="dn", finish=lambda n, d: n / d):
    def loop(q, k, v):
        m, d, n = -np.inf, 0.0, np.zeros(2)
        for key, value in zip(k, v, strict=True):
            larger = max(m, key @ q)
            old, new, m = np.exp(m - larger), np.exp(key @ q - larger), larger
            d = d * (old if "d" in rescale else 1) + new
            n = n * (old if "n" in rescale else 1) + new * value
        return finish(n, d)

    return loop


# ----------------------------------------------------------------- 04: a reduction of many states


def one_round(states, op):
    return [op(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]


def odd_one_lost(states, op):
    while len(states) > 1:
        states = one_round(states, op)
    return states[0]


def sliding(states, op):
    while len(states) > 1:
        states = [op(a, b) for a, b in pairwise(states)]
    return states[0]


def by_threes(states, op):
    while len(states) > 1:
        states = [reduce(op, states[i : i + 3]) for i in range(0, len(states), 3)]
    return states[0]


# --------------------------------------------------------------- 05: Algorithm 3, on eight devices


def algorithm_3(
    weigh="dn",
    add="dn",
    weight=lambda m, largest: jnp.exp(m - largest),
    finish=lambda n, d: n / d[..., None],
):
    def mine(q, k, v):
        m, d, n = treeattn.attend(q, k, v)
        of_mine = weight(m, jax.lax.pmax(m, "kv"))
        d = d * of_mine if "d" in weigh else d
        n = n * of_mine[..., None] if "n" in weigh else n
        d, n = (jax.lax.psum(x, "kv") if name in add else x for name, x in (("d", d), ("n", n)))
        return finish(n, d)

    return mine


def weighted_by_m(q, k, v):
    m, d, n = treeattn.attend(q, k, v)
    weight = jnp.exp(m)[..., None]
    return jax.lax.psum(n / d[..., None] * weight, "kv") / jax.lax.psum(weight, "kv")


def of_answers(reduce_them):
    return lambda q, k, v: reduce_them(treeattn.finalize(treeattn.attend(q, k, v))[0])


# ------------------------------------------------------------------------------ 07: a prefix tree


def changed(**changes):
    """The solution, with one of its results put through a function."""

    def attempt(rows):
        results = dict(
            zip(
                ("nodes", "tokens", "offsets", "mask"),
                notebook("07")["prefix_tree"](rows),
                strict=True,
            )
        )
        return tuple(changes.get(name, lambda x: x)(x) for name, x in results.items())

    return attempt


def by_sets(rows):
    """Right for Mars, where no two nodes hold the same tokens in another order or number."""
    nodes, *others, _ = notebook("07")["prefix_tree"](rows)
    return nodes, *others, np.array([[set(b) <= set(a) for b in nodes] for a in nodes])


# ------------------------------------------------------------- 09: a rule (chance, what replaces)


def ratio(p, q):
    return [min(Fraction(1), a / b) for a, b in zip(p, q, strict=True)]


def lacks(p, q):
    return [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def rest(p, q):
    return [x / sum(lacks(p, q)) for x in lacks(p, q)]


def argmax(p):
    return [Fraction(int(x == max(p))) for x in p]


def ratio_upside_down(p, q):
    return ratio(q, p), rest(p, q)


def in_floats(xp):
    def rule(p, q):
        p, q = xp.array(p, float), xp.array(q, float)
        lacks = xp.maximum(p - q, 0)
        return xp.minimum(1, p / q), lacks / lacks.sum()

    return rule


EVEN = (Fraction(1, 2), Fraction(1, 2))

PLANTED = [
    ("00", "n is not brought to the larger m", lambda a, b: (*unguarded(a, b)[:2], a[2] + b[2])),
    ("00", "n mixes the queries: give its weights an axis", without_an_axis),
    ("00", "m is not brought to the larger m", without_pivot),
    ("00", "n was divided by d: divide last", divided),
    ("00", "n has shape (2, 1), expected (1, 2)", transposed),
    ("00", "return m, d, n", lambda a, b: notebook("00")["merge"](a, b)[:2]),
    ("00", "d of two shards without keys: subtract finite(m)", unguarded),
    ("00", "d overflows: subtract the larger m before exp", early_exponentials),
    ("03", "return n / d alone", lambda q, k, v: (1.0, v[0])),
    ("03", "n was not divided by d", flash(finish=lambda n, d: n)),
    ("03", "n was not rescaled", flash(rescale="d")),
    ("03", "d was not rescaled", flash(rescale="n")),
    ("03", "neither d nor n was rescaled", flash(rescale="")),
    ("03", "d was divided by n", flash(finish=lambda n, d: d / n)),
    ("03", "large scores overflow", lambda q, k, v: jnp.exp(k @ q) @ v / jnp.exp(k @ q).sum()),
    ("04", "a state is left out", odd_one_lost),
    ("04", "a state counts twice", sliding),
    ("04", "another order, and op need not commute", lambda s, op: reduce(op, s[::-1])),
    ("04", "4 rounds, 3 are enough, for abcdef", by_threes),
    ("04", "not one state: repeat the rounds", one_round),
    ("05", "nothing was reduced", of_answers(lambda out: out)),
    ("05", "the devices' answers were added", of_answers(lambda out: jax.lax.psum(out, "kv"))),
    ("05", "the devices' answers were weighted by m alone", weighted_by_m),
    (
        "05",
        "the devices' answers were weighted by d alone",
        algorithm_3(weigh=""),
    ),
    ("05", "n was weighted and added, d was added without weights", algorithm_3(weigh="n")),
    ("05", "n was added without weights, d was weighted and added", algorithm_3(weigh="d")),
    ("05", "n was weighted and added, d was weighted, but not added", algorithm_3(add="n")),
    (
        "05",
        "n was weighted and added, d was neither weighted nor added",
        algorithm_3(weigh="n", add="n"),
    ),
    (
        "05",
        "n was weighted upside down by exp(max - m), d",
        algorithm_3(weight=lambda m, largest: jnp.exp(largest - m)),
    ),
    ("05", "large scores overflow", algorithm_3(weight=lambda m, _: jnp.exp(m))),
    ("05", "it returned AttentionState, not n / d", treeattn.attend),
    ("05", "n was not divided by d", algorithm_3(finish=lambda n, d: n)),
    ("05", "the shape is (2, 1, 8), expected (2, 1, 8, 64)", algorithm_3(finish=lambda n, d: d)),
    ("05", "wrong by up to", algorithm_3(finish=lambda n, d: n / d[..., None] + 1)),
    ("07", "nodes numbers each prefix once", changed(nodes=lambda x: x | {("Venus",): 8})),
    ("07", "a node's token is the last one", changed(tokens=lambda x: x[::-1])),
    ("07", "a position is a place in the candidate", changed(offsets=lambda x: np.arange(len(x)))),
    ("07", "positions count from 0", changed(offsets=lambda x: x + 1)),
    ("07", "causal mask", changed(mask=lambda x: np.tri(len(x)) == 1)),
    ("07", "return nodes, tokens, offsets, mask", lambda rows: ({}, [])),
    ("07", "the mask is (8,), expected (8, 8)", changed(mask=np.diag)),
    ("07", "a mask holds True and False", changed(mask=lambda x: np.where(x, 0, -np.inf))),
    ("07", "transposed mask", changed(mask=np.transpose)),
    ("07", "a node sees itself, too", changed(mask=lambda x: x & ~np.eye(len(x), dtype=bool))),
    ("07", "another mask", by_sets),
    ("09", "the model's argmax is always taken", lambda p, q: (argmax(p), argmax(p))),
    ("09", "accepted by p alone", lambda p, q: (p, rest(p, q))),
    ("09", "the rule's q is another", lambda p, q: (ratio(p, EVEN), rest(p, EVEN))),
    ("09", "as from the draft: all are accepted", lambda p, q: ([1] * len(p), q)),
    ("09", "as from the draft: all are accepted, the ratio is q / p", ratio_upside_down),
    ("09", "as from the draft", lambda p, q: (ratio(p, q), rest(q, p))),
    ("09", "a rejected token is replaced by the model's", lambda p, q: (ratio(p, q), argmax(p))),
    ("09", "a rejected token is drawn from q again", lambda p, q: (ratio(p, q), q)),
    (
        "09",
        "what replaces a rejected token adds up to 3/10",
        lambda p, q: (ratio(p, q), lacks(p, q)),
    ),
    ("09", "a chance is above 1", lambda p, q: ([a / b for a, b in zip(p, q, strict=True)], p)),
    ("09", "the distribution is right, but 0 is accepted", lambda p, q: ((0, 0), p)),
    ("09", "not the model's distribution", lambda p, q: (ratio(p, q), EVEN)),
]


@pytest.mark.parametrize("number", ["00", "03", "04", "05", "07", "09"])
def test_a_function_without_a_return_is_named(number):
    assert notebook(number)["check"](lambda *_: None) == "it returned None"


@pytest.mark.parametrize("xp", [np, jnp])  # float64 and float32
def test_a_rule_in_floats_is_right(xp):
    assert notebook("09")["check"](in_floats(xp)) == "right"


def test_the_merge_of_00_is_what_08_asks_for():
    """Pasted as `mine`, it finds there all that it calls."""
    there = run_first("00", {"merge"}, run_first("08", {"finite"}, {"jax": jax, "jnp": jnp}))
    assert notebook("00")["check"](there["merge"]) == "right"
    assert notebook("00")["check"](run_first("08", {"mine"}, there)["mine"]) == "right"


@pytest.mark.parametrize(("number", "name", "wrong"), PLANTED)
def test_a_planted_mistake_is_named(number, name, wrong):
    assert notebook(number)["check"](wrong).startswith(name)


def test_the_mistakes_are_drawn():
    """Of a mask, what a token sees too much and what it misses."""
    wrong = changed(mask=lambda x: (np.tri(len(x)) == 1) & (np.arange(len(x)) > 0))
    _, *lines = notebook("07")["check"](wrong).splitlines()
    assert lines[4] == "reddish  o#xx#..." and len(lines) == 8


def test_every_mistake_that_09_knows_is_planted():
    """The notebook's own stub is the one that draws from p again."""
    named = {name for number, name, _ in PLANTED if number == "09"}
    for mistake in notebook("09")["MISTAKES"].values():
        known = any(mistake.startswith(name) or name.startswith(mistake) for name in named)
        assert known or mistake.startswith("a rejected token is drawn from p again"), mistake
