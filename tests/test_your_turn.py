"""The reader's turns: what is planted in a notebook's stub, or in its solution, is named."""

import ast
import functools
import json
import math
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
# Number of a notebook -> the names that its check and its solution need, the solution's last.
NEEDED = {
    "00": "words scores values attend finite check merge",
    "04": "check reduce_tree",
    "05": "dense_attention rng Q K exact on_mesh check algorithm_3",
    "07": "rows check prefix_tree",
    "09": "outcome exact MISTAKES check rule",
}


def source(number: str) -> list[ast.stmt]:
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        statement
        for cell in cells
        if cell["cell_type"] == "code"
        for statement in ast.parse("".join(cell["source"])).body
    ]


def binds(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Assign):
        names = [name for target in statement.targets for name in ast.walk(target)]
        return {name.id for name in names if isinstance(name, ast.Name)}
    return {getattr(statement, "name", "")}


@functools.cache
def notebook(number: str) -> dict:
    """What the first statements of a notebook that bind these names give them, and `mine`."""
    found = {"jax": jax, "jnp": jnp, "np": np, "math": math, "reduce": reduce, "F": Fraction}
    mesh = treeattn.kv_mesh(jax.devices()[:8])  # 05's; the tests have nine devices
    cache = NamedSharding(mesh, P(None, "kv"))
    found |= {"treeattn": treeattn, "partial": functools.partial, "P": P}
    found |= {"mesh": mesh, "cache": cache}
    wanted = {*NEEDED[number].split(), "mine"}
    for statement in source(number):
        if names := binds(statement) & wanted:
            wanted -= names
            exec(compile(ast.Module([statement], []), number, "exec"), found)
    assert not wanted
    return found


def solution(number: str):
    return notebook(number)[NEEDED[number].split()[-1]]


# ----------------------------------------------------------------- 00: a merge of states (m, d, n)


def without_pivot(a, b):
    wa, wb = jnp.exp(a[0]), jnp.exp(b[0])
    m = jnp.log(wa + wb)
    return m, a[1] * wa / jnp.exp(m), (a[2] * wa[:, None] + b[2] * wb[:, None])


def of_the_first(a, b):
    wb = jnp.exp(b[0] - a[0])
    return a[0], a[1] + b[1] * wb, a[2] + b[2] * wb[:, None]


def unguarded(a, b):
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa[:, None] + b[2] * wb[:, None]


def without_an_axis(a, b):
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa + b[2] * wb


def early_exponentials(a, b):
    """Right where exponentials are in range of the notebook's float32."""
    a, b = (jax.tree.map(jnp.float32, x) for x in (a, b))
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0]) / jnp.exp(m), jnp.exp(b[0]) / jnp.exp(m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa[:, None] + b[2] * wb[:, None]


# ----------------------------------------------------------------- 04: a reduction of many states


def odd_one_lost(states, op):
    while len(states) > 1:
        states = [op(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]
    return states[0]


def sliding(states, op):
    while len(states) > 1:
        states = [op(a, b) for a, b in pairwise(states)]
    return states[0]


def from_outside(states, op):
    while len(states) > 1:
        half = len(states) // 2
        pairs = zip(states[:half], states[::-1], strict=False)
        states = [op(a, b) for a, b in pairs] + states[half : len(states) - half]
    return states[0]


def by_threes(states, op):
    while len(states) > 1:
        states = [reduce(op, states[i : i + 3]) for i in range(0, len(states), 3)]
    return states[0]


# --------------------------------------------------------------- 05: Algorithm 3, on eight devices


def algorithm_3(weigh=("d", "n"), finish=lambda n, d: n / d[..., None]):
    def mine(q, k, v):
        m, d, n = treeattn.attend(q, k, v)
        weight = jnp.exp(m - jax.lax.pmax(m, "kv"))
        d = jax.lax.psum(d * weight if "d" in weigh else d, "kv")
        n = jax.lax.psum(n * weight[..., None] if "n" in weigh else n, "kv")
        return finish(n, d)

    return mine


def of_answers(reduce_them):
    return lambda q, k, v: reduce_them(treeattn.finalize(treeattn.attend(q, k, v))[0])


# ------------------------------------------------------------------------------ 07: a prefix tree


def changed(**changes):
    """The solution, with one of its results put through a function."""

    def attempt(rows):
        results = dict(
            zip(("nodes", "tokens", "offsets", "mask"), solution("07")(rows), strict=True)
        )
        return tuple(changes.get(name, lambda x: x)(x) for name, x in results.items())

    return attempt


# ------------------------------------------------------------- 09: a rule (chance, what replaces)


def ratio(p, q):
    return [min(Fraction(1), a / b) for a, b in zip(p, q, strict=True)]


def rest(p, q):
    lacks = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [x / sum(lacks) for x in lacks]


def argmax(p):
    return [Fraction(int(x == max(p))) for x in p]


def ratio_upside_down(p, q):
    return ratio(q, p), rest(p, q)


def in_numpy(p, q):
    p, q = np.array(p, float), np.array(q, float)
    lacks = np.maximum(p - q, 0)
    return np.minimum(1, p / q), lacks / lacks.sum()


def in_float32(p, q):
    p, q = jnp.array(p, float), jnp.array(q, float)
    lacks = jnp.maximum(p - q, 0)
    return jnp.minimum(1, p / q), lacks / lacks.sum()


def in_floats(p, q):
    return [float(x) for x in ratio(p, q)], [float(x) for x in rest(p, q)]


EVEN = (Fraction(1, 2), Fraction(1, 2))

PLANTED = [
    ("00", "n is not brought to the larger m", lambda a, b: (*unguarded(a, b)[:2], a[2] + b[2])),
    ("00", "n mixes the queries: give its weights an axis", without_an_axis),
    ("00", "m is not brought to the larger m", without_pivot),
    ("00", "m is not brought to the larger m", of_the_first),
    ("00", "d of two shards without keys: subtract finite(m)", unguarded),
    ("00", "d overflows: subtract the larger m before exp", early_exponentials),
    ("04", "a state is left out", odd_one_lost),
    ("04", "a state is left out", lambda states, op: states[0]),
    ("04", "a state counts twice", sliding),
    ("04", "another order, and op need not commute", from_outside),
    ("04", "another order, and op need not commute", lambda s, op: reduce(op, s[::-1])),
    ("04", "4 rounds, 3 are enough, for abcdef", by_threes),
    ("05", "nothing was reduced", of_answers(lambda out: out)),
    ("05", "the devices' answers were added", of_answers(lambda out: jax.lax.psum(out, "kv"))),
    ("05", "the sums were added without weights", algorithm_3(weigh=())),
    ("05", "d was added without weights", algorithm_3(weigh=("n",))),
    ("05", "n was added without weights", algorithm_3(weigh=("d",))),
    ("05", "n was not divided by d", algorithm_3(finish=lambda n, d: n)),
    ("05", "the shape is (2, 1, 8), expected (2, 1, 8, 64)", algorithm_3(finish=lambda n, d: d)),
    ("05", "wrong by up to", algorithm_3(finish=lambda n, d: n / d[..., None] + 1)),
    ("07", "nodes numbers each prefix once", changed(nodes=lambda x: x | {("Venus",): 8})),
    ("07", "nodes numbers each prefix once", changed(nodes=lambda x: dict.fromkeys(x, 0))),
    ("07", "a node's token is the last one", changed(tokens=lambda x: x[::-1])),
    ("07", "a position is a place in the candidate", changed(offsets=lambda x: np.arange(len(x)))),
    ("07", "positions count from 0", changed(offsets=lambda x: x + 1)),
    ("07", "causal mask", changed(mask=lambda x: np.tri(len(x)) == 1)),
    ("07", "another mask", changed(mask=lambda x: x & ~np.eye(len(x), dtype=bool))),
    ("09", "a rejected token is replaced by the model's", lambda p, q: ((0, 0), argmax(p))),
    ("09", "accepted by p alone", lambda p, q: (p, rest(p, q))),
    ("09", "the rule's q is another", lambda p, q: (ratio(p, EVEN), rest(p, EVEN))),
    ("09", "as from the draft: each token is accepted", lambda p, q: ([1] * len(p), q)),
    ("09", "as from the draft: each token is accepted, or the ratio is q / p", ratio_upside_down),
    ("09", "a rejected token is always replaced", lambda p, q: (ratio(p, q), argmax(p))),
    ("09", "a rejected token is always replaced", lambda p, q: (ratio(p, q), argmax(rest(p, q)))),
    ("09", "a chance is above 1", lambda p, q: ([a / b for a, b in zip(p, q, strict=True)], p)),
    ("09", "the distribution is right, but 0 is accepted", lambda p, q: ((0, 0), p)),
    ("09", "not the model's distribution", lambda p, q: (ratio(p, q), q)),
]
STUBS = {
    "00": "d is not brought to the larger m",
    "04": "a chain: 4 rounds, 3 are enough",
    "05": "the devices' answers were averaged",
    "07": "one node for two prefixes",
    "09": "a rejected token is drawn from p again: token a comes with 61/100 instead of 7/10",
}


@pytest.mark.parametrize("number", NEEDED)
def test_the_solution_is_right(number):
    assert notebook(number)["check"](solution(number)) == "right"


@pytest.mark.parametrize("number", NEEDED)
def test_the_stubs_mistake_is_named(number):
    assert notebook(number)["check"](notebook(number)["mine"]).startswith(STUBS[number])


@pytest.mark.parametrize("number", ["00", "07", "09"])
def test_a_function_without_a_return_is_named(number):
    assert notebook(number)["check"](lambda *_: None) == "it returned None"


@pytest.mark.parametrize("attempt", [in_numpy, in_float32, in_floats])
def test_a_rule_in_floats_is_right(attempt):
    assert notebook("09")["check"](attempt) == "right"


def test_the_merge_of_00_is_what_08_asks_for():
    """Pasted as `mine`, it finds there all that it calls."""
    there = {"jax": jax, "jnp": jnp}
    (finite,) = [statement for statement in source("08") if "finite" in binds(statement)]
    (pasted,) = [statement for statement in source("00") if "merge" in binds(statement)]
    (theirs,) = [statement for statement in source("08") if "mine" in binds(statement)]
    for statement in (finite, pasted, theirs):
        exec(compile(ast.Module([statement], []), "08", "exec"), there)
    assert notebook("00")["check"](there["merge"]) == notebook("00")["check"](there["mine"])
    assert notebook("00")["check"](there["mine"]) == "right"


@pytest.mark.parametrize(("number", "name", "wrong"), PLANTED)
def test_a_planted_mistake_is_named(number, name, wrong):
    assert notebook(number)["check"](wrong).startswith(name)


def test_the_mistakes_are_drawn():
    """A chain's rounds; and, of a mask, what a token sees too much and what it misses."""
    _, *rounds = notebook("04")["check"](notebook("04")["mine"]).splitlines()
    assert rounds == ["round 1: ab", "round 2: abc", "round 3: abcd", "round 4: abcde"]
    wrong = changed(mask=lambda x: (np.tri(len(x)) == 1) & (np.arange(len(x)) > 0))
    _, *lines = notebook("07")["check"](wrong).splitlines()
    assert lines[4] == "reddish  o#xx#..." and len(lines) == 8


def test_every_mistake_that_09_knows_is_planted():
    named = {name for number, name, _ in PLANTED if number == "09"} | {STUBS["09"]}
    for mistake in notebook("09")["MISTAKES"].values():
        assert any(mistake.startswith(name) or name.startswith(mistake) for name in named), mistake
