"""Is a step of speculative decoding lossless? Every outcome is counted, none is sampled.

A step drafts some tokens, accepts a few of them, and adds one token. It is lossless if its tokens,
continued by tokens of the target, have the target's distribution.
"""

import functools
from collections.abc import Callable

import numpy as np

from .judge import Mistake, Question, Subject, judge, takes
from .outcomes import law
from .report import Report
from .steps import STEP_FAULTS, VERIFIER_CURES, Path, Step, probabilities

TOLERANCE = 1e-6  # of probabilities, so that steps in float32 pass
NEUTRAL = {"temperature": 1.0, "top_p": 1.0}  # they leave the distribution as it is
NOTHING = {(): 1.0}  # the law of a step without tokens, so all tokens are the target's


def model(seed: int, *, lacks: int | None = None, sure: bool = False):
    """Made-up logits of three tokens after any path, the same every time.

    lacks: a token of probability 0. sure: one token has probability 1.
    """

    @functools.cache
    def logits(path: Path) -> np.ndarray:
        random = np.random.default_rng([seed, *(token + 1 for token in path)])
        p = random.dirichlet(np.full(3, 1.5)) + 0.02
        if lacks is not None:
            p[lacks] = 0
        if sure:
            p = np.eye(3)[random.integers(3)]
        with np.errstate(divide="ignore"):
            return np.log(p / p.sum())

    return lambda path: logits(tuple(int(token) for token in path)).copy()


@functools.cache
def verifier_questions() -> list[Question]:
    """The questions, the same ones at every call. An answer is a law of texts."""
    target, draft = model(1), model(2)
    asked = {
        "chain": (target, draft, {}),
        "draft is the target": (target, target, {}),
        "other tokens": (model(3, lacks=0), model(4, lacks=-1), {}),
        "a sure draft": (target, model(2, sure=True), {}),
        "a sure target": (model(1, sure=True), draft, {}),
        "siblings": (target, draft, {"widths": (2,)}),
        "all tokens": (target, draft, {"widths": (3,)}),
        "a longer chain": (target, draft, {"widths": (1, 1, 1)}),
        "a tree": (target, draft, {"widths": (2, 1)}),
        "a tree, later": (target, draft, {"widths": (1, 2)}),
        "drawn with replacement": (target, draft, {"widths": (3,), "replacement": True}),
        "temperature": (target, draft, {"temperature": 0.5}),
        "top-p": (target, draft, {"top_p": 0.75}),
        "temperature and top-p": (target, draft, {"temperature": 0.5, "top_p": 0.75}),
    }
    return [
        Question(name, {"target": target, "draft": draft}, options, NOTHING)
        for name, (target, draft, options) in asked.items()
    ]


def check_verifier(
    step: Callable, *, widths: tuple[int, ...] | None = None, only=None, expect=()
) -> Report:
    """Is this step of speculative decoding lossless? If not, which known fault does it have?

    step:   step(target, draft, rng, **options) -> the tokens of one step: the accepted drafts, and
            one more. If that one is missing, the target is asked for it, and no fault is seen.
            target(path) and draft(path) are the logits (V,) after a path, a tuple of tokens; V is
            3. rng looks like a `numpy.random.Generator` with random, uniform, integers and choice;
            its numbers may be compared, and multiplied by a number, but have no logarithm.
            rng.at(*key) is the stream of a key, as JAX has them. All random numbers must come from
            rng, for drafting and for accepting, so a step that draws with PyTorch or JAX has to be
            transcribed
    widths: the shape of the drafts, for a step without this option, to recognize its faults; (1, 1)
            means two tokens in a row. None: a chain, one shorter than the step's longest answer
    only, expect: as in `check_merge`

    A step is asked about those of these options that it has. Each call passes all of them, most
    with a value that changes nothing:

    widths: how many tokens are drafted after each path, by depth; (2, 1): two, and one after each
    replacement: whether siblings are drawn with replacement
    temperature: by which the logits are divided
    top_p: after the temperature, the least likely tokens have probability 0: a token is cut off if
            the likelier ones have top_p or more together

    Top-k has no question of its own. In "other tokens" one of three tokens has probability 0. Give
    it a logit of −4.5, np.maximum(target(path), -4.5), and draft(path) too: then top_k=2 cuts it
    off again.

    A question is skipped if the step raises NotImplementedError. The step is run once for each
    outcome of its random numbers, 10 to 2,000 times a question. Probabilities are compared to 1e-6,
    so a step may compute in float32. Raises TypeError if step is no function.
    """
    if not callable(step):
        raise TypeError(f"step: expected a function, got {step!r:.40}")
    whole = functools.wraps(step)(functools.partial(law_of, step))
    subject = Subject(
        lambda question, came: came,
        lambda question, *laws: np.array([not difference(question, *laws)]),
        lambda question, answer, right: difference(question, answer, question.right),
        _faults(None if takes(step, "widths") else widths or _chain(step)),
        VERIFIER_CURES,
    )
    return judge(whole, verifier_questions(), subject, only=only, expect=expect)


def law_of(step: Callable, target: Callable, draft: Callable, **options) -> dict[Path, float]:
    """{tokens: probability} of the step, which gets all options that it takes."""
    options = NEUTRAL | {"widths": (1, 1), "replacement": False} | options
    given = {name: x for name, x in options.items() if takes(step, name)}
    vocabulary = len(target(()))

    def run(rng) -> Path:
        tokens = tuple(int(x) for x in np.asarray(step(target, draft, rng, **given)).ravel())
        if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
            raise ValueError(
                f"the step gave {list(tokens)}, expected tokens from 0 to {vocabulary - 1}"
            )
        return tokens

    return law(run)


class Fault(Mistake):
    """One form of a fault: {a question's name: its law}."""

    def given(self, question: Question) -> dict:
        return self.wrong(question.name)


def _faults(widths: Path | None) -> list[Fault]:
    """The known faults of a step that drafts these widths; None: the widths of each question."""
    forms = [(name, form) for name, (_, *forms) in STEP_FAULTS.items() for form in forms]
    return [Fault(name, functools.partial(_law, form, widths)) for name, form in forms]


@functools.cache
def _law(wrong: type[Step], widths: Path | None, name: str) -> dict:
    (question,) = (x for x in verifier_questions() if x.name == name)
    options = question.options | ({"widths": widths} if widths else {})
    return law(lambda rng: wrong(*question.arguments.values(), rng, **options).run())


def _chain(step: Callable) -> Path:
    """The widths of a step without this option: a chain, one shorter than its longest answer."""
    try:
        longest = max(map(len, law_of(step, **verifier_questions()[0].arguments)))
    except Exception:  # the first question will report it
        longest = 3
    return (1,) * max(longest - 1, 1)


def texts(found: dict, question: Question, length: int) -> np.ndarray:
    """(V, V, …): the probability of each text of `length` tokens, continued by the target."""
    target = question.arguments["target"]
    options = {name: question.options.get(name, x) for name, x in NEUTRAL.items()}
    total = np.zeros([len(target(()))] * length)
    rest = list(found.items())
    while rest:
        tokens, chance = rest.pop()
        if len(tokens) == length:
            total[tokens] += chance
        else:
            p = probabilities(target(tokens), **options)
            rest += [((*tokens, x), chance * p[x]) for x in np.flatnonzero(p)]
    return total


def difference(question: Question, one: dict, other: dict) -> str:
    """The first token whose distributions differ, in words; "" if the laws are the same."""
    length = max(map(len, [*one, *other]))
    both = [texts(found, question, length) for found in (one, other)]
    for n in range(1, length + 1):
        x, y = (found.sum(axis=tuple(range(n, length))) for found in both)
        off = np.argwhere(np.abs(x - y) > TOLERANCE)
        if len(off):
            place = tuple(off[0].tolist())
            said = f"token {n}: {place[-1]} after {list(place[:-1])} has {x[place]:.4f}"
            times = f", {x[place] / y[place]:.3g} times" if y[place] else ""
            return f"{said} instead of {y[place]:.4f}{times}"
    return ""
