"""The reader's turns. Of many wrong answers to each check none passes or hangs, and most are named;
right ones pass however they are written; the solutions that notebooks print are the package's."""

import ast
import html
import itertools
import random
import re
import textwrap
from collections import Counter
from fractions import Fraction as F
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import pmax, pmean, psum
from pages import MAIN_ROAD, cells, text
from test_reruns import solutions as printed_solutions

import course
import course.verdict
import treeattn
from course import solutions
from course.prefix_tree import paths_of

# What a check says of a mistake that it sees, and has no name for.
UNNAMED = (
    "another mistake",
    "d is not brought to the larger m by",
    "n is not brought to the larger m by",
    "wrong by up to",
    "another mask",
    "the chance is not min(1, p / q)",
    "what replaces it is not max(p − q, 0)",
    "right for one order",
)


# ----------------------------------------------------------------- 00: a merge of states (m, d, n)


def merging(
    m=jnp.maximum,
    weight=lambda own, larger: jnp.exp(own - jnp.where(larger == -jnp.inf, 0, larger)),
    d=lambda x, y, wx, wy: x * wx + y * wy,
    n=lambda x, y, wx, wy: x * wx + y * wy,
    finish=lambda m, d, n: (m, d, n),
):
    """A merge with one of its parts replaced."""

    def merge(a, b):
        larger = m(a[0], b[0])
        wa, wb = weight(a[0], larger), weight(b[0], larger)
        return finish(larger, d(a[1], b[1], wa, wb), n(a[2], b[2], wa[..., None], wb[..., None]))

    return merge


def plainly(x, y, wx, wy):
    return x + y


def out(state):
    return state[2] / state[1][:, None]


def unguarded(a, b):
    return merging(weight=lambda own, larger: jnp.exp(own - larger))(a, b)


def guarded_m(a, b):
    m = jnp.maximum(a[0], b[0])
    return merging(m=lambda *_: jnp.where(m == -jnp.inf, 0, m))(a, b)


def without_an_axis(a, b):
    m = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa + b[2] * wb


def without_pivot(a, b):
    wa, wb = jnp.exp(a[0]), jnp.exp(b[0])
    m = jnp.log(wa + wb)
    return m, a[1] * wa / jnp.exp(m), (a[2] * wa[:, None] + b[2] * wb[:, None])


def first_is_larger(a, b):
    w = jnp.exp(a[0] - b[0])
    return b[0], a[1] * w + b[1], a[2] * w[:, None] + b[2]


def early_exponentials(own, larger):
    return jnp.exp(jnp.float32(own)) / jnp.exp(jnp.float32(larger))


def by_lse(a, b):
    """Right: masses relative to the logarithm of their sum."""
    (ma, da, na), (mb, db, nb) = a, b
    m = jnp.logaddexp(ma, mb)
    safe = jnp.where(m == -jnp.inf, 0, m)
    wa, wb = jnp.exp(ma - safe), jnp.exp(mb - safe)
    return m, da * wa + db * wb, na * wa[:, None] + nb * wb[:, None]


def in_numpy(a, b):
    (ma, da, na), (mb, db, nb) = (map(np.array, x) for x in (a, b))
    m = np.maximum(ma, mb)
    wa, wb = (np.where(x == -np.inf, 0, np.exp(x - m)) for x in (ma, mb))
    return [m, da * wa + db * wb, (na.T * wa + nb.T * wb).T]


def by_if(a, b):
    if (a[0] == -jnp.inf).all() and (b[0] == -jnp.inf).all():
        return a
    return merging()(a, b)


def by_cases(a, b):
    bigger = a[0] > b[0]
    w = jnp.exp(-jnp.abs(jnp.where(a[0] == b[0], 0, a[0] - b[0])))
    wa, wb = jnp.where(bigger, 1, w), jnp.where(bigger, w, 1)
    return jnp.maximum(a[0], b[0]), a[1] * wa + b[1] * wb, a[2] * wa[:, None] + b[2] * wb[:, None]


def stacked(a, b):
    m = jnp.stack([a[0], b[0]])
    top = m.max(0)
    w = jnp.where(m == -jnp.inf, 0, jnp.exp(m - top))
    d, n = jnp.stack([a[1], b[1]]), jnp.stack([a[2], b[2]])
    return top, (d * w).sum(0), (n * w[..., None]).sum(0)


def by_energies(a, b):
    """Right: the theorem of 00's section 2."""
    energies = [m + jnp.log(d) for m, d, _ in (a, b)]
    both = jnp.logaddexp(*energies)
    safe, full = jnp.where(both == -jnp.inf, 0, both), both > -jnp.inf
    outs = (x[2] / jnp.where(x[1] == 0, 1, x[1])[:, None] for x in (a, b))
    n = sum(jnp.exp(x - safe)[:, None] * y for x, y in zip(energies, outs, strict=True))
    return both, jnp.where(full, 1.0, 0.0), n


def never_returns(a, b):
    return never_returns(b, a)


MERGES = [
    ("d is not brought to the larger m", merging(d=plainly, n=plainly)),
    ("n is not brought to the larger m", merging(n=plainly)),
    ("d is not brought to the larger m", merging(d=plainly)),
    ("m was added: take the larger", merging(m=jnp.add)),
    ("m is the smaller of these two", merging(m=jnp.minimum)),
    ("m was averaged", merging(m=lambda x, y: (x + y) / 2)),
    ("n mixes the queries: give its weights an axis", without_an_axis),
    (
        "m is one number for all queries",
        merging(m=lambda x, y: jnp.full(x.shape, jnp.maximum(x, y).max())),
    ),
    ("m is not the larger of the two", without_pivot),
    ("m depends on the order", first_is_larger),
    ("n was divided by d: divide last", merging(finish=lambda m, d, n: (m, d, n / d[:, None]))),
    (
        "the attentions were averaged",
        lambda a, b: (jnp.maximum(a[0], b[0]), (a[1] + b[1]) / 2, (out(a) + out(b)) / 2),
    ),
    (
        "the attentions were averaged",
        lambda a, b: (*merging()(a, b)[:2], (out(a) + out(b)) / 2 * merging()(a, b)[1][:, None]),
    ),
    ("n has shape (2, 1), expected (1, 2)", merging(finish=lambda m, d, n: (m, d, n.T))),
    ("return m, d, n", merging(finish=lambda m, d, n: (m, d))),
    ("it returned None", merging(finish=lambda m, d, n: None)),
    ("d of two shards without keys: subtract finite(m)", unguarded),
    ("m of two shards without keys must stay −∞", guarded_m),
    ("d overflows: subtract the larger m before exp", merging(weight=early_exponentials)),
    ("d is weighted upside down", merging(weight=lambda own, larger: jnp.exp(larger - own))),
    (
        "d has the weights of the two states swapped",
        merging(d=lambda x, y, wx, wy: x * wy + y * wx),
    ),
    ("n lacks the first state", merging(n=lambda x, y, wx, wy: y * wy)),
    ("max, min and if take single numbers", merging(m=max)),
    ("d is the larger of two", merging(d=lambda x, y, wx, wy: jnp.maximum(x, y))),
    ("it takes another number of arguments", lambda a: a),
    ("the recursion never ends", never_returns),
    ("d is not brought to the larger m by", merging(d=lambda x, y, wx, wy: x * wx + y * wy + 0.1)),
    ("this is the first state", lambda a, b: a),
    (
        "d has weights that add up to 1",
        merging(d=lambda x, y, wx, wy: (x * wx + y * wy) / (wx + wy)),
    ),
    (
        "right to a few digits",
        merging(finish=lambda *state: [x.astype("bfloat16") for x in state]),
    ),
    (
        "d of two shards without keys is not 0",
        merging(finish=lambda m, d, n: (m, jnp.where(m == -jnp.inf, 1, d), n)),
    ),
    ("right, but not inside jax.jit", in_numpy),
    ("right, but not inside jax.jit", by_if),
]
RIGHT_MERGES = [solutions.merge, merging(), by_lse, by_energies, by_cases, stacked]


# ------------------------------------------------------------- 03: a loop over keys, for (m, d, n)


def flash(rescale="dn", finish=lambda n, d: n / d, start=-np.inf, new=1, old=1, first=0, d_0=0.0):
    def loop(q, k, v):
        m, d, n = start, d_0, np.zeros(2)
        for key, value in list(zip(k, v, strict=True))[first:]:
            larger = max(m, key @ q)
            scale = np.exp(old * (m - larger)) if np.isfinite(m) else 0.0
            weight, m = np.exp(new * (key @ q - larger)), larger
            d = d * (scale if "d" in rescale else 1) + weight
            n = n * (scale if "n" in rescale else 1) + weight * value
        return finish(n, d)

    return loop


def as_written(q, k, v, upside_down=True, handed_on=True):
    """A loop that starts at −∞ without a guard."""
    m, d, n = -np.inf, 0.0, np.zeros(2)
    for key, value in zip(k, v, strict=True):
        larger = max(m, key @ q)
        old, new = np.exp(larger - m if upside_down else m - larger), np.exp(key @ q - larger)
        d, n = d * old + new, n * old + new * value
        m = larger if handed_on else m
    return n / d


def never_ends(q, k, v):
    i = 0
    while i < len(k):
        pass


def compiled_and_slow(q, k, v):
    # Cosines of cosines: a loop that only counts is vectorized, and ends within a second.
    return jax.lax.fori_loop(0, 500_000_000, lambda i, x: jnp.cos(x), 1.0) * v[0]


def one_by_one(step):
    """A loop that starts from the first key; `step` has its state, a score and a value."""

    def loop(q, k, v):
        m, d, n = k[0] @ q, 1.0, v[0]
        for key, value in zip(k[1:], v[1:], strict=True):
            m, d, n = step(m, d, n, key @ q, value)
        return n / d

    return loop


def rescaled_all(m, d, n, s, value):
    larger = max(m, s)
    w, old = np.exp(s - larger), np.exp(m - larger)
    return larger, (d + w) * old, (n + w * value) * old


def old_pivot(m, d, n, s, value):
    larger = max(m, s)
    w, old = np.exp(s - m), np.exp(m - larger)
    return larger, d * old + w, n * old + w * value


def divided_in_every_step(q, k, v):
    m, d, n = -np.inf, 0.0, np.zeros(2)
    for key, value in zip(k, v, strict=True):
        larger = max(m, key @ q)
        w, old = np.exp(key @ q - larger), np.exp(m - larger)
        m, d = larger, d * old + w
        n = (n * old + w * value) / d
    return n


def in_place_on_values(q, k, v):
    w = np.exp(k @ q - (k @ q).max())
    v *= w[:, None]
    return v.sum(0) / w.sum()


def in_two_passes(q, k, v):
    s = k @ q
    w = np.exp(s - s.max())
    return w @ v / w.sum()


def by_scan(q, k, v):
    def step(carry, pair):
        m, d, n = carry
        larger = jnp.maximum(m, pair[0] @ q)
        old, new = jnp.exp(m - larger), jnp.exp(pair[0] @ q - larger)
        return (larger, d * old + new, n * old + new * pair[1]), None

    begin = jnp.array(-jnp.inf), jnp.array(0.0), jnp.zeros(2)
    (_, d, n), _ = jax.lax.scan(step, begin, (jnp.asarray(k, "float32"), jnp.asarray(v, "float32")))
    return n / d


def by_means(q, k, v):
    lse, mean = -np.inf, np.zeros(2)
    for key, value in zip(k, v, strict=True):
        total = np.logaddexp(lse, key @ q)
        mean = mean + np.exp(key @ q - total) * (value - mean)
        lse = total
    return mean


LOOPS = [
    ("return n / d alone", lambda q, k, v: (1.0, v[0])),
    ("it returned None", lambda q, k, v: None),
    ("n was not divided by d", flash(finish=lambda n, d: n)),
    ("n was not rescaled", flash(rescale="d")),
    ("d was not rescaled", flash(rescale="n")),
    ("neither d nor n was rescaled", flash(rescale="")),
    ("d was divided by n", flash(finish=lambda n, d: d / n)),
    ("large scores overflow", lambda q, k, v: np.exp(k @ q) @ v / np.exp(k @ q).sum()),
    ("the old sums were rescaled upside down", flash(old=-1)),
    ("NaN: m begins at −∞", as_written),
    ("only one key counts", partial(as_written, upside_down=False, handed_on=False)),
    ("only one key counts", lambda q, k, v: v[np.argmax(k @ q)]),
    ("the new key has weight 1", flash(new=0)),
    ("the new key's weight is upside down", flash(new=-1)),
    ("the first key is left out", flash(first=1)),
    ("scores far below 0 underflow", flash(start=0.0)),
    ("all keys weigh the same", lambda q, k, v: v.mean(0)),
    ("no answer within", never_ends),
    ("no answer within", compiled_and_slow),
    ("it changes what it was given", in_place_on_values),
    ("the last key is left out", lambda q, k, v: in_two_passes(q, k[:-1], v[:-1])),
    ("d starts at 1", flash(start=0.0, d_0=1.0)),
    (
        "the first key counts twice",
        lambda q, k, v: flash()(q, k[[0, *range(len(k))]], v[[0, *range(len(v))]]),
    ),
    ("the new key was rescaled, too", one_by_one(rescaled_all)),
    ("the new key's weight is exp(score − old m)", one_by_one(old_pivot)),
    ("n was divided by d in every step", divided_in_every_step),
    ("this is the five words' answer", lambda q, k, v: np.array([1.25, 2.25])),
    (
        "right to a few digits",
        lambda *qkv: in_two_passes(*map(partial(jnp.asarray, dtype="bfloat16"), qkv)),
    ),
    ("It stops with TypeError", lambda q, k, v: v["words"] if False else None + v),
    ("another mistake", flash(finish=lambda n, d: n / d + 1)),
]
RIGHT_LOOPS = [
    solutions.flash,
    flash(),
    in_two_passes,
    by_scan,
    by_means,
    lambda q, k, v: [float(x) for x in flash()(q, k, v)],
    lambda *qkv: in_two_passes(*map(np.float32, qkv)),
]


# ----------------------------------------------------------------- 04: a reduction of many states


def pairs(states, op):
    return [op(a, b) for a, b in zip(states[::2], states[1::2], strict=False)]


def rounds(one):
    """Repeat a round."""

    def reduction(states, op):
        while len(states) > 1:
            states = one(states, op)
        return states[0]

    return reduction


def not_replaced(states, op):
    while len(states) > 1:
        new = pairs(states, op)
        states = states or new
    return states[0]


def idle(states, op):
    while len(states) > 1:
        states = list(states)
    return states[0]


def halves(states, op):
    if len(states) == 1:
        return states[0]
    middle = len(states) // 2
    return op(halves(states[:middle], op), halves(states[middle:], op))


def left_heavy(states, op):
    if len(states) == 1:
        return states[0]
    largest = 1 << ((len(states) - 1).bit_length() - 1)
    return op(left_heavy(states[:largest], op), left_heavy(states[largest:], op))


def in_place(states, op):
    states, step = list(states), 1
    while step < len(states):
        for i in range(0, len(states) - step, 2 * step):
            states[i] = op(states[i], states[i + step])
        step *= 2
    return states[0]


def emptied(states, op):
    while len(states) > 1:
        states[:] = [reduce(op, states[i : i + 2]) for i in range(0, len(states), 2)]
    return states[0]


def all_prefixes(states, op):
    step = 1
    while step < len(states):
        ends = enumerate(states[step:])
        states = states[:step] + [op(states[i], x) for i, x in ends]
        step *= 2
    return states[-1]


def popped(states, op):
    states = list(states)
    while len(states) > 1:
        states = [
            op(states[i], states[i + 1]) if i + 1 < len(states) else states[i]
            for i in range(0, len(states), 2)
        ]
    return states.pop()


REDUCTIONS = [
    ("a state is left out", rounds(pairs)),
    ("a state counts twice", rounds(lambda s, op: [op(a, b) for a, b in itertools.pairwise(s)])),
    ("another order, and op need not commute", lambda s, op: reduce(op, s[::-1])),
    ("another order", lambda s, op: reduce(lambda a, b: op(b, a), s)),
    (
        "4 rounds, 3 are enough, for abcdef",
        rounds(lambda s, op: [reduce(op, s[i : i + 3]) for i in range(0, len(s), 3)]),
    ),
    ("a chain: 4 rounds, 3 are enough, for abcde", lambda s, op: reduce(op, s)),
    ("not one state: repeat the rounds", pairs),
    ("it returned list, not one state", lambda s, op: [halves(s, op)]),
    ("it returned tuple, not one state", lambda s, op: (halves(s, op), 3)),
    ("op was never called", lambda s, op: sum(s[1:], s[0])),
    ("it changes what it was given", emptied),
    ("3 merges, 2 are enough, for abc", all_prefixes),
    ("another order", lambda s, op: halves(sorted(s, reverse=True), op)),
    ("it returned None", lambda s, op: None),
    ("it never ends: the list of states never shrinks", not_replaced),
    ("no answer within", idle),
    ("a state is left out", lambda s, op: s[0]),
    ("It stops with IndexError", lambda s, op: op(s[0], s[len(s)])),
    ("a state counts twice", lambda s, op: op(s[0], s[0])),
]
RIGHT_REDUCTIONS = [solutions.reduce_tree, halves, left_heavy, in_place, popped]


# --------------------------------------------------------------- 05: Algorithm 3, on eight devices


def algorithm_3(
    weigh="dn",
    add="dn",
    weight=lambda m, largest: jnp.exp(m - largest),
    largest=lambda m: pmax(m, "kv"),
    total=psum,
    finish=lambda n, d: n / d[..., None],
):
    def mine(q, k, v):
        m, d, n = treeattn.attend(q, k, v)
        of_mine = weight(m, largest(m))
        d = d * of_mine if "d" in weigh else d
        n = n * of_mine[..., None] if "n" in weigh else n
        d, n = (total(x, "kv") if name in add else x for name, x in (("d", d), ("n", n)))
        return finish(n, d)

    return mine


def of_answers(reduce_them):
    return lambda q, k, v: reduce_them(treeattn.finalize(treeattn.attend(q, k, v))[0])


def weighted_by_m(q, k, v):
    m, d, n = treeattn.attend(q, k, v)
    weight = jnp.exp(m)[..., None]
    return psum(n / d[..., None] * weight, "kv") / psum(weight, "kv")


def weighted_answers(divided):
    def mine(q, k, v):
        m, d, n = treeattn.attend(q, k, v)
        weight = jnp.exp(m - pmax(m, "kv"))
        outs = psum((n / d[..., None]) * weight[..., None], "kv")
        return outs / psum(d * weight, "kv")[..., None] if divided else outs

    return mine


def no_axis(q, k, v):
    m, d, n = treeattn.attend(q, k, v)
    weight = jnp.exp(m - pmax(m, "kv"))
    return psum(n * weight, "kv") / psum(d * weight, "kv")[..., None]


def unknown_axis(q, k, v):
    m, d, n = treeattn.attend(q, k, v)
    weight = jnp.exp(m - pmax(m, "devices"))
    return psum(n * weight[..., None], "kv") / psum(d * weight, "kv")[..., None]


def by_gather(q, k, v):
    m, d, n = jax.lax.all_gather(tuple(treeattn.attend(q, k, v)), "kv")
    w = jnp.exp(m - m.max(0))
    return (n * w[..., None]).sum(0) / (d * w).sum(0)[..., None]


def by_lses(q, k, v):
    outs, lse = treeattn.finalize(treeattn.attend(q, k, v))
    w = jnp.exp(lse - pmax(lse, "kv"))
    return psum(outs * w[..., None], "kv") / psum(w, "kv")[..., None]


def by_butterfly(q, k, v):
    state = treeattn.attend(q, k, v)
    for bit in (1, 2, 4):
        state = treeattn.merge(
            state, jax.lax.ppermute(state, "kv", [(i, i ^ bit) for i in range(8)])
        )
    return treeattn.finalize(state)[0]


def keys_gathered(q, k, v):
    k, v = (jax.lax.all_gather(x, "kv", axis=1, tiled=True) for x in (k, v))
    return treeattn.attention(q, k, v)


def tiled(q, k, v):
    return solutions.algorithm_3(
        q, *(jnp.tile(x, (1, 1, q.shape[2] // k.shape[2], 1)) for x in (k, v))
    )


def up_only(q, k, v):
    state = treeattn.attend(q, k, v)
    for bit in (1, 2, 4):
        pairs = [(i, i - bit) for i in range(bit, 8, 2 * bit)]
        state = treeattn.merge(state, jax.lax.ppermute(state, "kv", pairs))
    return treeattn.finalize(state)[0]


def heads_max(m):
    return m.max(-1, keepdims=True)


ALGORITHMS_3 = [
    ("nothing was reduced", of_answers(lambda x: x)),
    ("the devices' answers were added", of_answers(lambda x: psum(x, "kv"))),
    ("the devices' answers were averaged", of_answers(lambda x: pmean(x, "kv"))),
    ("the devices' answers were weighted by m alone", weighted_by_m),
    ("n and d were added without weights", algorithm_3(weigh="")),
    ("n was weighted and added, but d was added without weights", algorithm_3(weigh="n")),
    ("n was added without weights, but d was weighted and added", algorithm_3(weigh="d")),
    ("n was weighted and added, but d was weighted and not added", algorithm_3(add="n")),
    ("n was weighted and added, but d was neither", algorithm_3(weigh="n", add="n")),
    (
        "n and d were weighted upside down by exp(max - m)",
        algorithm_3(weight=lambda m, largest: jnp.exp(largest - m)),
    ),
    ("large scores overflow", algorithm_3(weight=lambda m, _: jnp.exp(m))),
    ("large scores overflow", algorithm_3(largest=lambda m: jax.lax.pmin(m, "kv"))),
    ("it returned AttentionState, not n / d", treeattn.attend),
    ("it returned None", lambda q, k, v: None),
    ("n was not divided by d", algorithm_3(finish=lambda n, d: n)),
    ("the shape is (2, 1, 8), expected (2, 1, 8, 64)", algorithm_3(finish=lambda n, d: d)),
    ("wrong by up to", algorithm_3(finish=lambda n, d: n / d[..., None] + 1)),
    ("one maximum for all heads", algorithm_3(largest=lambda m: pmax(m.max(), "kv"))),
    (
        "one maximum for all texts",
        algorithm_3(largest=lambda m: pmax(m.max(0, keepdims=True), "kv")),
    ),
    ("the largest m was taken over the device's own heads", algorithm_3(largest=heads_max)),
    ("n was divided by the local d before", weighted_answers(divided=False)),
    ("n was divided twice", weighted_answers(divided=True)),
    ("the shapes do not fit", no_axis),
    ("the devices' axis is called 'kv'", unknown_axis),
    ("the scores were divided by √dim twice", lambda q, k, v: solutions.algorithm_3(q / 8, k, v)),
    ("the scores were not divided by √dim", lambda q, k, v: solutions.algorithm_3(q * 8, k, v)),
    ("query heads met other heads' keys", tiled),
    ("keys and values are swapped", lambda q, k, v: solutions.algorithm_3(q, v, k)),
    ("right to a few digits", algorithm_3(finish=lambda n, d: n.astype("bfloat16") / d[..., None])),
    ("right on device 0, wrong on device 1", up_only),
    ("right, but keys or values travel", keys_gathered),
]
RIGHT_ALGORITHMS_3 = [
    solutions.algorithm_3,
    by_gather,
    by_lses,
    by_butterfly,
    algorithm_3(total=pmean),
]


# ------------------------------------------------- 07: a tree's positions and mask, from parents


def tree(positions=lambda x: x, mask=lambda x: x):
    """The solution, with its results put through functions."""

    def attempt(parents):
        found = solutions.from_parents(parents)
        return positions(found[0]), mask(found[1])

    return attempt


def mask_by(sees):
    """The solution, whose mask a function of two paths gives."""

    def attempt(parents):
        paths = paths_of(parents)
        mask = np.array([[sees(a, b) for b in paths] for a in paths])
        return solutions.from_parents(parents)[0], mask

    return attempt


def row_by_row(step):
    """The solution, whose mask grows by `step(mask, node, parent)`."""

    def attempt(parents):
        mask = np.eye(len(parents), dtype=bool)
        for node, parent in enumerate(parents):
            step(mask, node, parent)
        return solutions.from_parents(parents)[0], mask

    return attempt


def with_the_parents_row(mask, node, parent):
    mask[node] |= mask[parent]


def with_the_parent(mask, node, parent):
    mask[node, parent] = True


def from_the_parent_on(mask, node, parent):
    if parent > 0:
        mask[node] |= mask[parent]


def climbing(goes_on):
    """From each node up, as long as `goes_on(node)`."""

    def attempt(parents):
        n = len(parents)
        positions, mask = np.full(n, -1), np.zeros((n, n), bool)
        for i in range(n):
            node = i
            while goes_on(node):
                mask[i, node] = True
                positions[i] += 1
                node = parents[node]
        return positions, mask

    return attempt


def parents_changed(parents):
    parents[parents < 0] = 0
    return parents, np.eye(len(parents), dtype=bool)


def by_recursion(parents):
    def depth(i):
        return 0 if parents[i] < 0 else 1 + depth(parents[i])

    def over(i, j):
        return i == j or (parents[i] >= 0 and over(parents[i], j))

    nodes = range(len(parents))
    return [depth(i) for i in nodes], [[over(i, j) for j in nodes] for i in nodes]


def by_powers(parents):
    step = np.eye(len(parents), dtype=int)
    step[np.flatnonzero(parents >= 0), parents[parents >= 0]] = 1
    mask = np.linalg.matrix_power(step, len(parents)) > 0
    return mask.sum(1) - 1, mask


def doubled(parents):
    return treeattn.depths(parents), treeattn.ancestor_mask(parents)


TREES = [
    ("causal mask", tree(mask=lambda x: np.tri(len(x)) == 1)),
    ("positions count from 0", tree(lambda x: x + 1)),
    ("a position is a place in the candidate", tree(lambda x: np.arange(len(x)))),
    ("a position is a depth, not the parent", lambda x: (x, tree()(x)[1])),
    ("descendants were counted", lambda x: (tree()(x)[1].sum(0) - 1, tree()(x)[1])),
    ("a node's position is the number of its ancestors", tree(lambda x: -x)),
    ("there are 1 positions for 8 nodes", tree(lambda x: x[:1])),
    ("return positions, mask", lambda parents: ({}, [], [])),
    ("return positions, mask, in this order", lambda parents: tree()(parents)[::-1]),
    ("it returned None", lambda parents: None),
    ("the mask is (8,), expected (8, 8)", tree(mask=np.diag)),
    ("a mask holds True and False", tree(mask=lambda x: np.where(x, 0, -np.inf))),
    ("transposed mask", tree(mask=np.transpose)),
    ("a node sees itself, too", tree(mask=lambda x: x & ~np.eye(len(x), dtype=bool))),
    ("inverted mask", tree(mask=np.logical_not)),
    ("a node sees its parent only", mask_by(lambda a, b: b in (a, a[:-1]))),
    ("a node sees its parent and grandparent only", mask_by(lambda a, b: b in (a, a[:-1], a[:-2]))),
    ("a node sees its descendants, too", tree(mask=lambda x: x | x.T)),
    ("a node sees itself only", tree(mask=lambda x: np.eye(len(x), dtype=bool))),
    ("everything is seen", tree(mask=np.ones_like)),
    ("a node sees all nodes that are less deep", mask_by(lambda a, b: len(b) <= len(a))),
    ("a node sees all nodes above", mask_by(lambda a, b: len(b) < len(a) or a == b)),
    ("a node sees its siblings, too", mask_by(lambda a, b: a[:-1] == b[:-1] or a[: len(b)] == b)),
    (
        "a node sees the siblings of its ancestors",
        mask_by(lambda a, b: len(b) <= len(a) and a[: len(b) - 1] == b[:-1]),
    ),
    ("another mask", tree(mask=lambda x: x & (np.arange(len(x)) != 1))),
    ("a root sees another node", row_by_row(with_the_parents_row)),
    ("a root sees another node", row_by_row(with_the_parent)),
    ("node 0 is left out", row_by_row(from_the_parent_on)),
    ("node 0 is left out", climbing(lambda node: node > 0)),
    ("no answer within", climbing(lambda node: node is not None)),
    ("it changes what it was given", parents_changed),
    ("It stops with IndexError", lambda parents: parents[len(parents)]),
]
RIGHT_TREES = [
    solutions.from_parents,
    by_recursion,
    by_powers,
    doubled,
    climbing(lambda node: node >= 0),
    tree(list, lambda x: x.astype(int)),
    tree(jnp.asarray, jnp.asarray),
]


# ------------------------------------------------------------- 09: a rule (chance, what replaces)


def ratio(p, q):
    return [min(F(1), a / b) if b else F(1) for a, b in zip(p, q, strict=True)]


def lacks(p, q):
    return [max(a - b, F(0)) for a, b in zip(p, q, strict=True)]


def normalized(x):
    return [a / (sum(x) or 1) for a in x]


def rest(p, q):
    return normalized(lacks(p, q))


def argmax(p):
    return [F(int(i == p.index(max(p)))) for i in range(len(p))]


def each(f):
    return lambda p, q: [f(a, b) for a, b in zip(p, q, strict=True)]


coin = random.Random(0)


def ruled(chance=ratio, replaced_by=rest):
    return lambda p, q: (chance(p, q), replaced_by(p, q))


def in_floats(xp, guard=1):
    def rule(p, q):
        p, q = xp.array(p, float), xp.array(q, float)
        lacks = xp.maximum(p - q, 0)
        total = xp.where(lacks.sum() == 0, guard, lacks.sum())
        return xp.minimum(1, p / q), lacks / total

    return rule


def by_dicts(p, q):
    chance = {x: 1.0 if q[x] <= p[x] else float(p[x] / q[x]) for x in range(len(p))}
    gap = sum(max(0.0, float(p[x] - q[x])) for x in chance)
    left = {x: max(0.0, float(p[x] - q[x])) / gap if gap else 0.0 for x in chance}
    return tuple(chance.values()), tuple(left.values())


def by_minimum(p, q):
    both = [min(a, b) for a, b in zip(p, q, strict=True)]
    left = [a - b for a, b in zip(p, both, strict=True)]
    chance = [a / b if b else 0 for a, b in zip(both, q, strict=True)]
    return chance, [x / sum(left) for x in left] if any(left) else list(p)


RULES = [
    ("the model's argmax is always taken", lambda p, q: (argmax(p), argmax(p))),
    ("a rejected token is drawn from p again", ruled(replaced_by=lambda p, q: p)),
    ("a rejected token is drawn from q again", ruled(replaced_by=lambda p, q: q)),
    ("accepted by p alone", ruled(lambda p, q: p)),
    ("all guesses are accepted", ruled(lambda p, q: [1] * len(p))),
    ("the ratio is upside down, q / p", ruled(lambda p, q: ratio(q, p))),
    ("what replaces it is max(q − p, 0)", ruled(replaced_by=lambda p, q: rest(q, p))),
    (
        "a rejected token is replaced by the model's argmax",
        ruled(replaced_by=lambda p, q: argmax(p)),
    ),
    ("what replaces a rejected token adds up to", ruled(replaced_by=lacks)),
    ("a chance is above 1", ruled(each(lambda a, b: a / b if b else F(1)))),
    ("the distribution is right, but 0 is accepted", lambda p, q: ([0] * len(p), p)),
    ("accepted where p ≥ q", ruled(each(lambda a, b: F(a >= b)))),
    ("accepted where p is above a threshold", ruled(each(lambda a, b: F(a > F(1, 4))))),
    ("no guess is accepted", ruled(lambda p, q: [0] * len(p))),
    ("accepted by |p − q|", ruled(each(lambda a, b: abs(a - b)))),
    (
        "what replaces it is |p − q|",
        ruled(replaced_by=lambda p, q: normalized(each(lambda a, b: abs(a - b))(p, q))),
    ),
    (
        "a rejected token is replaced uniformly",
        ruled(replaced_by=lambda p, q: [F(1, len(p))] * len(p)),
    ),
    ("a chance is below 0", ruled(each(lambda a, b: a - b))),
    (
        "what replaces a rejected token has a negative",
        ruled(replaced_by=each(lambda a, b: 3 * (a - b))),
    ),
    ("it divides by zero where q(x) = 0", ruled(each(lambda a, b: min(F(1), a / b)))),
    (
        "it divides by zero where p = q",
        ruled(replaced_by=lambda p, q: [x / sum(lacks(p, q)) for x in lacks(p, q)]),
    ),
    ("return two lists", lambda p, q: 1),
    ("return two lists", lambda p, q: ratio(p, q)),
    ("it returned None", lambda p, q: None),
    ("accepted by q alone", ruled(lambda p, q: q)),
    (
        "the chance is not min(1, p / q)",
        ruled(each(lambda a, b: min(F(1), a / b / 2) if b else F(1))),
    ),
    (
        "the chance is not min(1, p / q), and",
        ruled(lambda p, q: [F(1, 3)] * len(p), lambda p, q: [F(1), *[F(0)] * (len(p) - 1)]),
    ),
    (
        "each call gives another answer",
        ruled(lambda p, q: [F(coin.random() < x) for x in ratio(p, q)]),
    ),
    ("return the chances first", lambda p, q: ruled()(p, q)[::-1]),
    (
        "each token is accepted by the chance of all",
        ruled(lambda p, q: [sum(map(min, p, q))] * len(p)),
    ),
    (
        "right for p = (2/5, 7/20, 3/20, 1/10), wrong for p = (1/2, 1/2), q = (1, 0)",
        ruled(replaced_by=lambda p, q: p if 0 in q else rest(p, q)),
    ),
    ("what replaces a rejected token is NaN: where p = q", in_floats(np, guard=0)),
    ("what replaces a rejected token is NaN: where p = q", in_floats(jnp, guard=0)),
]
RIGHT_RULES = [solutions.rule, in_floats(np), in_floats(jnp), by_dicts, by_minimum]


# -------------------------------------------------------------------------------------- all of them

ASKED = {
    "00": (course.check_merge, MERGES, RIGHT_MERGES),
    "03": (course.check_loop, LOOPS, RIGHT_LOOPS),
    "04": (course.check_reduction, REDUCTIONS, RIGHT_REDUCTIONS),
    "05": (course.check_algorithm_3, ALGORITHMS_3, RIGHT_ALGORITHMS_3),
    "07": (course.check_prefix_tree, TREES, RIGHT_TREES),
    "09": (course.check_rule, RULES, RIGHT_RULES),
}
WRONG = [(number, *answer) for number, (_, wrong, _) in ASKED.items() for answer in wrong]
RIGHT = [(number, answer) for number, (_, _, right) in ASKED.items() for answer in right]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(course.verdict, "SECONDS", 20)


@pytest.mark.parametrize(("number", "name", "wrong"), WRONG)
def test_a_wrong_answer_is_named(number, name, wrong, monkeypatch):
    if name == "no answer within":
        monkeypatch.setattr(course.verdict, "SECONDS", 1)
    verdict = ASKED[number][0](wrong)
    assert not verdict.right and str(verdict).startswith(name)


@pytest.mark.parametrize("number", ASKED)
def test_a_result_of_any_form_has_a_verdict(number):
    ragged = [[1], [2, 3]]
    four = {("Mars",): 0}, 3, [0], ragged
    for result in (
        1,
        "x",
        [],
        {},
        ragged,
        four,
        ("abcd", "abcd"),
        ([None] * 4, [1j] * 4),
        (np.nan,) * 3,
    ):
        verdict = ASKED[number][0](lambda *_, result=result: result)
        assert not verdict.right and len(str(verdict)) > 5
        verdict._repr_mimebundle_()


@pytest.mark.parametrize(("number", "right"), RIGHT)
def test_an_unusual_answer_that_is_right_passes(number, right):
    verdict = ASKED[number][0](right)
    assert verdict.right and str(verdict) == "right"


def test_of_the_wrong_answers_most_have_a_name():
    unnamed = Counter(number for number, name, _ in WRONG if name.startswith(UNNAMED))
    assert len(WRONG) >= 110 and len(WRONG) - unnamed.total() >= 90
    assert max(unnamed.values()) <= 2


@pytest.mark.parametrize(
    ("number", "wrong", "shown"),
    [
        ("00", MERGES[0][1], "yours: mass 25, at (1.76, 1.44)"),
        ("03", LOOPS[4][1], "right: at (1.25, 2.25)"),
        ("04", REDUCTIONS[0][1], "yours: mass 8, at (1.5, 1.5)"),
        ("05", ALGORITHMS_3[1][1], "at (12, 18), outside the picture"),
        ("07", TREES[0][1], "12 cells too many, 0 missing"),
        ("09", RULES[1][1], "model, p (2/5, 7/20, 3/20, 1/10)"),
    ],
)
def test_a_mistake_is_drawn(number, wrong, shown):
    data = ASKED[number][0](wrong)._repr_mimebundle_()
    assert set(data) == {"text/html", "text/plain"}
    picture = r'<img src="data:image/png;base64,[^"]+" alt="([^"]+)">'
    alt = re.fullmatch(picture, data["text/html"])[1]
    assert shown in html.unescape(alt)


def test_a_mask_is_drawn_in_letters_too():
    wrong = tree(mask=lambda x: (np.tri(len(x)) == 1) & (np.arange(len(x)) > 0))
    _, *lines = str(course.check_prefix_tree(wrong)).splitlines()
    assert lines[4] == "reddish  o#xx#..." and len(lines) == 8


def functions(code: str) -> dict[str, str]:
    """Each function in a text, without its comments and docstring."""
    found = {}
    for statement in ast.parse(code).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(statement):
                statement.body = statement.body[1:]
            found[statement.name] = ast.unparse(statement)
    return found


@pytest.mark.parametrize("number", ASKED)
def test_the_solution_that_a_notebook_prints_is_the_packages(number):
    (path,) = (path for path in MAIN_ROAD if path.name.startswith(number))
    printed = functions("\n\n".join(textwrap.dedent(c.source) for c in printed_solutions(path)))
    ours = functions(open(solutions.__file__, encoding="utf-8").read())
    names = set(printed) & set(ours)
    assert names and {name: printed[name] for name in names} == {name: ours[name] for name in names}


def test_the_merge_of_00_is_what_08_asks_for():
    """Pasted as `mine`, it finds there all that it calls."""
    (path,) = (path for path in MAIN_ROAD if path.name.startswith("08"))
    names = {"jax": jax, "jnp": jnp}
    for cell in cells(path):
        for statement in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            if getattr(statement, "name", "") in ("finite", "mine"):
                exec(compile(ast.Module([statement], []), path.name, "exec"), names)
    assert course.check_merge(names["mine"]).right
    assert "finite" in names and text(path)
