"""00's task: merge two states (m, d, n), m and d (queries,), n (queries, dim)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from course.plane import PLACES, SCORES, located, plane
from course.verdict import FEW_DIGITS, Mistake, call, verdict

ALL = slice(0, 5)
CUT = slice(0, 2), slice(2, 5)  # the, cat | drank, warm, milk
NONE = slice(0, 0)


def state(some, queries=(1.0,), up=0.0) -> tuple:
    """The state of some words for these queries, whose scores are higher by `up`."""
    s = np.outer(queries, SCORES[some])
    m = s.max(-1, initial=-np.inf)
    weights = np.exp(s - np.where(m == -np.inf, 0, m)[:, None])
    sums = m + up, weights.sum(-1), weights @ PLACES[some]
    return tuple(jnp.asarray(x, "float32") for x in sums)


def asked(mine, a, b, wanted) -> tuple:
    """mine(a, b) as three arrays of the shapes wanted."""
    shapes = f"m and d of shape {a[0].shape}, n of shape {a[2].shape} in both states"
    made = call(mine, a, b, given=shapes)
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        raise Mistake("return m, d, n")
    for name, got, right in zip("mdn", made, wanted, strict=True):
        if np.shape(got) != right.shape:
            raise Mistake(f"{name} has shape {np.shape(got)}, expected {right.shape}")
    return tuple(np.asarray(x, np.float64) for x in made)


def same(got, right) -> bool:
    return np.allclose(got, right, rtol=1e-4, atol=1e-6)


def is_right(made, wanted) -> bool:
    """Whether it stands for the same mass and centre, relative to a maximum as good as ours."""
    m, d, n = made
    empty = m == wanted[0]  # −∞ − (−∞) is NaN
    above = np.where(empty, 0, m - wanted[0])
    near = (above > -0.01) & (above < np.log(np.maximum(wanted[1], 1)) + 0.01)  # up to the energy
    scale = np.exp(np.where(near, above, 0))
    if not near.all():
        return False
    return same(d * scale, wanted[1]) and same(n * scale[:, None], wanted[2])


def first_wrong(made, wanted) -> str:
    """The name of the first wrong part: "m", "d" or "n"."""
    parts = zip("mdn", made, wanted, strict=True)
    return next((name for name, got, right in parts if not same(got, right)), "n")


def explained(a, b, made, wanted) -> str:
    """The mistake in what was made of two states of one query."""
    (m, d, n), (right_m, right_d, right_n) = made, wanted
    (ma, da, na), (mb, db, nb) = ([np.asarray(x, float) for x in s] for s in (a, b))
    larger = np.maximum(ma, mb)
    wa, wb = np.exp(ma - larger), np.exp(mb - larger)
    out_a, out_b = na / da, nb / db
    if same(d, da) and same(n, na):
        return "this is the first state: the second is missing"
    if np.allclose(m, right_m, rtol=0.01) and np.allclose(
        np.r_[d, n[0]], np.r_[right_d, right_n[0]], rtol=0.01
    ):
        return FEW_DIGITS
    mean = (out_a + out_b) / 2
    by_m = (out_a * wa + out_b * wb) / (wa + wb)
    result = n / d
    for name, out in {
        "the attentions were averaged, whatever they weigh": mean,
        "the attentions were weighted by e^m alone: a state also has d": by_m,
        "the attentions were added, not the sums": 2 * mean,
    }.items():
        if same(n, out) or same(result, out):
            return name
    wrong = first_wrong(made, wanted)
    if wrong == "m":
        known = {
            "m was added: take the larger": ma + mb,
            "m was averaged: take the larger": (ma + mb) / 2,
            "m became the logarithm of a sum, but d was not divided by as much": np.logaddexp(
                ma + np.log(da), mb + np.log(db)
            ),
            "m is the smaller of these two: take the larger": np.minimum(ma, mb),
        }
        return named(known, m, "m is not the larger of the two")
    got, x, y = (d, da, db) if wrong == "d" else (n, na, nb)
    known = {
        "is not brought to the larger m": x + y,
        "has the weights of the two states swapped": x * wb + y * wa,
        "is weighted upside down: use exp(m − larger m)": x / wa + y / wb,
        "was averaged: add": (x * wa + y * wb) / 2,
        "is the larger of two: add them": np.maximum(x, y),
        "lacks the first state": y * wb,
        "is weighted with powers of 2: use exp": x * 2 ** (ma - larger) + y * 2 ** (mb - larger),
        "is weighted twice": x * wa**2 + y * wb**2,
        "has weights that add up to 1": (x * wa + y * wb) / (wa + wb),
    }
    if wrong == "n":
        if same(n * right_d[:, None], right_n) or same(n * (da + db)[:, None], right_n):
            return "n was divided by d: divide last"
        known |= {
            "was multiplied by d: n is already a sum of values": na * wa * da + nb * wb * db,
            "was divided by each state's own d": out_a * wa + out_b * wb,
        }
    return f"{wrong} {named(known, got, 'is not brought to the larger m by the right weights')}"


def named(known: dict, found, otherwise: str) -> str:
    return next((name for name, value in known.items() if same(found, value)), otherwise)


def picture(made, wanted, parts, query=1.0, masses_from=0.0):
    """What draws the merge of `parts` for one query; all masses are smaller by e^masses_from."""
    both = []
    for m, d, n in (wanted, made):
        with np.errstate(all="ignore"):
            mass = np.exp(np.float64(m[-1]) - masses_from)
            both.append(located(mass * d[-1], mass * np.asarray(n[-1], np.float64)))
    masses = np.exp(query * SCORES).round()
    rod = [located(d[-1], n[-1])[1] for _, d, n in parts]
    return partial(plane, masses=masses, merges=[rod], right=both[0], yours=both[1])


@verdict
def check_merge(mine):
    """The first mistake of a merge of two states, by name, and drawn."""
    one, two = (1.0,), (1.0, 2.0)
    a, b, whole = (state(some, one, 1.0) for some in (*CUT, ALL))  # no m is a sum of others
    made = asked(mine, a, b, whole)
    drawn = picture(made, whole, (a, b), masses_from=1.0)
    if not is_right(made, whole):
        raise Mistake(explained(a, b, made, whole), drawn)
    a2, b2, whole2 = (state(some, two) for some in (*CUT, ALL))
    made2 = asked(mine, a2, b2, whole2)
    if not is_right(made2, whole2):
        if np.all(made2[0] == made2[0][0]):
            raise Mistake("m is one number for all queries: each query has its own")
        name = first_wrong(made2, whole2)
        if name == "m":
            raise Mistake("m is not the larger of the two for each query")
        raise Mistake(
            f"{name} mixes the queries: give its weights an axis, [:, None]. Drawn is the second "
            "query, whose masses are the squares",
            picture(made2, whole2, (a2, b2), 2.0),
        )
    high, low = 100.0, -200.0
    cases = [("{} depends on the order of the two states", b2, a2, whole2, 0)]
    for up in (high, low):
        cases += [
            (
                "{} overflows: subtract the larger m before exp",
                *(state(x, two, up) for x in (*CUT, ALL)),
                up,
            )
        ]
    far = [(state(CUT[0], two, high), b2), (a2, state(CUT[1], two, high))]
    for x, y in far:
        larger = max(x, y, key=lambda s: float(s[0][0]))
        cases += [("{} is wrong where one state has far larger scores", x, y, larger, high)]
    none = state(NONE, two)
    for x, y in ((a2, none), (none, a2)):
        cases += [("{}: a shard without keys changes it", x, y, a2, 0)]
    cases += [("{} of two shards without keys: subtract finite(m)", none, none, none, 0)]
    for name, x, y, wanted, up in cases:
        made = asked(mine, x, y, wanted)
        if is_right(made, wanted):
            continue
        wrong = first_wrong(made, wanted)
        if wanted is none and wrong == "m" and np.isfinite(made[0]).all():
            raise Mistake("m of two shards without keys must stay −∞: return m, not finite(m)")
        if wanted is none and not np.isnan(made[1:][wrong == "n"]).any():
            name = "{} of two shards without keys is not 0"
        drawn = None if wanted is none else picture(made, wanted, (x, y), 2.0, up)
        raise Mistake(name.format(wrong), drawn)
    try:
        jax.eval_shape(mine, a2, none)
    except jax.errors.JAXTypeError:
        raise Mistake(
            "right, but not inside jax.jit, where the page needs it: write jnp for np, and "
            "jnp.where for if"
        ) from None
    return drawn
