"""09's task: the rule of rejection sampling. It is computed in fractions, without samples."""

from fractions import Fraction as F
from functools import partial

import numpy as np

from course.plane import title
from course.solutions import rule
from course.verdict import Mistake, call, verdict
from figures.canvas import styled
from figures.style import GREEN, ORANGE, SKY, Figure, new_figure


def tenths(*numbers) -> tuple:
    return tuple(F(number, 20) for number in numbers)


FOUR = tenths(8, 7, 3, 2), tenths(2, 10, 2, 6)  # tells every known mistake from every other
TWO, OTHER = tenths(14, 6), tenths(8, 12)
PAIRS = (
    FOUR,
    (TWO, OTHER),
    (OTHER, TWO),
    (tenths(10, 6, 4), tenths(2, 4, 14)),
    (TWO, TWO),
    (tenths(10, 10), tenths(20, 0)),
    (tenths(20, 0), tenths(10, 10)),
)


def fraction(number) -> F:
    """A rule may return floats."""
    return F(float(number)).limit_denominator(1000)


def asked(mine, p, q) -> tuple[list, list]:
    """(chance, replaced_by) as fractions; None where a number is not finite."""
    given = f"p = {show(p)}, q = {show(q)}"
    try:
        found = call(mine, p, q, given=given)
    except Mistake as mistake:
        if "it divides by zero" not in mistake.sentence:
            raise
        where = "p = q: nothing is rejected" if p == q else "q(x) = 0: such an x is never drawn"
        raise Mistake(f"it divides by zero where {where}. Given: {given}") from None
    try:
        chance, replaced_by = found
        parts = [list(chance), list(replaced_by)]
    except (TypeError, ValueError):
        raise Mistake(
            "return two lists: each token's chance, and what replaces a rejected one"
        ) from None
    if [len(part) for part in parts] != [len(p)] * 2:
        raise Mistake(
            f"the lists have {len(parts[0])} and {len(parts[1])} numbers, expected {len(p)}"
        )
    finite = [[x if np.isfinite(float(x)) else None for x in part] for part in parts]
    return tuple([None if x is None else fraction(x) for x in part] for part in finite)


def show(distribution) -> str:
    return f"({', '.join(map(str, distribution))})"


def normalized(numbers) -> list:
    total = sum(numbers)
    return [x / total for x in numbers] if total else list(numbers)


def each(f, p, q) -> list:
    return [F(f(a, b)) for a, b in zip(p, q, strict=True)]


def known_chances(p, q) -> dict:
    accepted = sum(map(min, p, q))
    known = {
        "each token is accepted by the chance of all, Σ min(p, q)": lambda a, b: accepted,
        "all guesses are accepted": lambda a, b: 1,
        "no guess is accepted": lambda a, b: 0,
        "accepted by p alone, as if q were 1": lambda a, b: a,
        "accepted by q alone": lambda a, b: b,
        "the ratio is upside down, q / p": lambda a, b: min(1, b / a),
        "accepted where p ≥ q, without chance": lambda a, b: a >= b,
        "accepted by min(p, q)": min,
        "accepted by p / (p + q)": lambda a, b: a / (a + b),
        "accepted by |p − q|": lambda a, b: abs(a - b),
        "accepted by 1 − p / q, the chance of a rejection": lambda a, b: max(1 - a / b, 0),
        "accepted by the square of p / q": lambda a, b: min(1, (a / b) ** 2),
    }
    return {"": rule(p, q)[0]} | {name: each(f, p, q) for name, f in known.items()}


def known_rests(p, q) -> dict:
    most = max(a - b for a, b in zip(p, q, strict=True))
    known = {
        "a rejected token is drawn from p again": lambda a, b: a,
        "a rejected token is drawn from q again": lambda a, b: b,
        "what replaces it is max(q − p, 0), not max(p − q, 0)": lambda a, b: max(b - a, 0),
        "what replaces it is |p − q|, not max(p − q, 0)": lambda a, b: abs(a - b),
        "a rejected token is replaced uniformly": lambda a, b: 1,
        "a rejected token is replaced by the model's argmax": lambda a, b: a == max(p),
        "a rejected token is replaced by the token that p most lacks": lambda a, b: a - b == most,
        "what replaces it is min(p, q), what both have": min,
        "what replaces it is p where p > q": lambda a, b: a * (a > b),
    }
    return {"": rule(p, q)[1]} | {name: normalized(each(f, p, q)) for name, f in known.items()}


def explained(p, q, chance, replaced_by) -> str:
    """The mistakes of both parts."""
    if chance == replaced_by == [F(a == max(p)) for a in p]:
        return "the model's argmax is always taken"
    found = []
    for part, known in ((chance, known_chances(p, q)), (replaced_by, known_rests(p, q))):
        rounded = [fraction(x) for x in part]
        names = (name for name, x in known.items() if [fraction(y) for y in x] == rounded)
        found.append(next(names, None))
    lowest = min((a for a, x in zip(p, chance, strict=True) if x), default=2)
    if found[0] is None and chance == [F(a >= lowest) for a in p]:
        found[0] = "accepted where p is above a threshold, without chance"
    generic = "the chance is not min(1, p / q)", "what replaces it is not max(p − q, 0), normalized"
    named = [y if x is None else x for x, y in zip(found, generic, strict=True)]
    return ", and ".join(name for name in dict.fromkeys(named) if name)


def outcome(q, chance, replaced_by) -> list:
    """The distribution of the token that is drawn from q, then accepted or replaced."""
    rejected = sum(b * (1 - a) for a, b in zip(chance, q, strict=True))
    return [b * a + rejected * c for a, b, c in zip(chance, q, replaced_by, strict=True)]


@styled
def picture(sentence: str, p, q, found) -> Figure:
    """The distribution that comes out, beside the model's and the draft's."""
    figure, ax = new_figure(7.0, 3.2)
    x = np.arange(len(p))
    bars = (("draft, q", q, SKY), ("model, p", p, GREEN), ("comes out", found, ORANGE))
    for shift, (name, heights, color) in zip((-0.27, 0, 0.27), bars, strict=True):
        ax.bar(x + shift, np.array(heights, float), 0.25, color=color, label=name)
    ax.set(xticks=x, ylabel="probability")
    ax.set_xticklabels("abcd"[: len(p)])
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    title(figure, sentence)
    said = "; ".join(f"{name} {show(heights)}" for name, heights, _ in bars)
    return figure.describe(f"{sentence}. Bars for each token: {said}")


@verdict
def check_rule(mine):
    """The mistake of a rule for acceptance, by name, and the distribution that comes out."""
    if len({str(asked(mine, *FOUR)) for _ in range(9)}) > 1:
        raise Mistake("each call gives another answer: a rule gives chances, it draws nothing")
    for p, q in PAIRS:
        chance, replaced_by = asked(mine, p, q)
        chance = [F(1) if b == 0 else a for a, b in zip(chance, q, strict=True)]  # never asked
        if None in chance:
            raise Mistake("a chance is not a number")
        if None in replaced_by:
            where = ": where p = q, return any distribution" if p == q else ""
            raise Mistake(f"what replaces a rejected token is NaN{where}")
        drawn = partial(picture, p=p, q=q)
        if max(chance) > 1:
            raise Mistake("a chance is above 1")
        if min(chance) < 0:
            raise Mistake("a chance is below 0")
        if any(a < 1 for a in chance):
            if min(replaced_by) < 0:
                raise Mistake("what replaces a rejected token has a negative probability")
            if sum(replaced_by) != 1 == sum(chance):
                raise Mistake("return the chances first, then what replaces a rejected token")
            if sum(replaced_by) != 1:
                total = sum(replaced_by)
                raise Mistake(f"what replaces a rejected token adds up to {total}, not to 1")
        found = outcome(q, chance, replaced_by)
        if found != list(p):
            name = f"right for p = {show(FOUR[0])}, wrong for p = {show(p)}, q = {show(q)}"
            if p is FOUR[0]:
                name = explained(p, q, chance, replaced_by)
            a = next(i for i, (x, y) in enumerate(zip(found, p, strict=True)) if x != y)
            comes = f"token {'abcd'[a]} comes with {found[a]} instead of {p[a]}"
            raise Mistake(f"{name}: {comes}", partial(drawn, found=found))
        accepted = sum(b * a for a, b in zip(chance, q, strict=True))
        largest = sum(map(min, p, q))
        if accepted != largest:
            raise Mistake(
                f"the distribution is right, but {accepted} is accepted instead of {largest}",
                partial(drawn, found=found),
            )
        if p is FOUR[0]:
            shown = partial(drawn, found=found)
    return shown
