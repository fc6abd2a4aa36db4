"""Is a step of speculative decoding lossless? Every outcome is counted, none is sampled.

A step drafts some tokens, accepts a few of them, and adds one of its own. It is lossless if the
tokens that it gives, and what the target would write after them, have the target's distribution.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .calling import takes
from .judge import Asked, Mistake, Question, Subject, judge
from .outcomes import law
from .report import Report
from .steps import Settings
from .wrong_steps import VERIFIER_CURES, WRONG_STEPS, fixed_drafts

Tokens = tuple[int, ...]
TOLERANCE = 1e-6  # of probabilities: what is computed in float32 passes
OPTIONS = ("widths", "replacement", "temperature", "top_k", "top_p")


class Model(NamedTuple):
    """A made-up model: `kind` of log-probabilities after any tokens, the same ones every time."""

    seed: int
    kind: str
    vocabulary: int

    def __call__(self, path) -> np.ndarray:
        """(vocabulary,) float64; −∞ where a token never follows."""
        return _logits(self, tuple(int(token) for token in path)).copy()


@functools.cache
def _logits(model: Model, path: Tokens) -> np.ndarray:
    random = np.random.default_rng([model.seed, *(token + 1 for token in path)])
    p = random.dirichlet(np.full(model.vocabulary, 1.5)) + 0.02
    if model.kind == "without the first":
        p[0] = 0
    if model.kind == "without the last":
        p[-1] = 0
    if model.kind == "sure":
        p = np.eye(model.vocabulary)[random.integers(model.vocabulary)]
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


def verifier_questions() -> list[Question]:
    """The questions, the same ones at every call; the right answer is a law of texts."""
    n = 3
    target, draft = Model(1, "any", n), Model(2, "any", n)
    wide = Model(5, "any", 4), Model(6, "any", 4)
    lacking = Model(3, "without the first", n), Model(4, "without the last", n)
    asked = {
        "one token": (target, draft, {"widths": (1,)}),
        "chain": (target, draft, {}),
        "draft is the target": (target, target, {}),
        "other tokens": (*lacking, {}),
        "a sure draft": (target, Model(2, "sure", n), {}),
        "a sure target": (Model(1, "sure", n), draft, {}),
        "siblings": (target, draft, {"widths": (2,)}),
        "all tokens": (target, draft, {"widths": (3,)}),
        "a tree": (target, draft, {"widths": (2, 1)}),
        "a tree, later": (target, draft, {"widths": (1, 2)}),
        "drawn with replacement": (target, draft, {"widths": (2, 1), "replacement": True}),
        "temperature": (target, draft, {"temperature": 0.5}),
        "temperature 0": (target, draft, {"temperature": 0.0}),
        "top-k": (*wide, {"top_k": 2}),
        "top-p": (*wide, {"top_p": 0.7}),
        "top-p at a temperature": (*wide, {"temperature": 0.5, "top_p": 0.75}),
        "top-k, siblings": (*wide, {"top_k": 3, "widths": (2,)}),
    }
    return [
        Question(name, {"target": target, "draft": draft}, options, None)
        for name, (target, draft, options) in asked.items()
    ]


def check_verifier(
    step: Callable, *, widths: tuple[int, ...] | None = None, only=None, expect=()
) -> Report:
    """Is this step of speculative decoding lossless? If not, which known fault is it?

    step:   step(target, draft, rng, **options) -> the tokens of one step: those that it drafted and
            accepted, and one more. target(path) and draft(path) are logits (V,) after a path of
            tokens, (); V is 3 or 4. rng is to be used like a `numpy.random.Generator`: all chance
            comes from it, for drafting as well as for accepting (`Source` says what it offers). A
            step that draws with PyTorch or JAX has to be transcribed
    widths: what it drafts, if it has no such option, to recognize faults: (1, 1) are two tokens in
            a row. None: where it asks the draft says whether it is a chain or a small tree
    only, expect: as in `check_merge`

    Options are asked of a step that takes them, and it always gets all that it takes: widths, how
    many tokens are drafted after each path, depth by depth ((2, 1): two, and one after each);
    replacement, False: siblings are drawn without; temperature (0: the likeliest), top_k, top_p, in
    this order, of the target's logits. What raises NotImplementedError is not asked.

    The step is run once for each way that chance can fall, 10 to 2,000 times a question.
    Probabilities are compared to 1e-6: a step may compute in float32. TypeError where step is no
    function.
    """
    if not callable(step):
        raise TypeError(f"step: expected a function, got {step!r:.40}")

    shapes = [None] if takes(step, "widths") else [widths] if widths else _likely_shapes(step)
    for shape in shapes:
        subject = Subject(
            lambda question, came: came,
            _same,
            _describe,
            _mistakes(shape),
            VERIFIER_CURES,
            narrower={"likeliest tokens judged as drawn": "drafts ignore the key"},
            fewest=1,
        )
        whole = functools.wraps(step)(functools.partial(_law_of, step))
        report = judge(whole, verifier_questions(), subject, only=only, expect=expect)
        if report.fingerprints or not report.names("failed"):
            break
    return report


def _law_of(step: Callable, target: Model, draft: Callable, **options) -> dict[Tokens, float]:
    """How likely each answer of the step is, which gets all options that it takes."""
    settings = Settings(target.vocabulary, **options)
    given = {name: getattr(settings, name) for name in OPTIONS if takes(step, name)}
    return law(lambda rng: _checked(step(target, draft, rng, **given), settings.vocabulary))


class Fault(Mistake):
    """A fault's function gives laws, of which each may be what came; none where it cannot show."""

    def explains(self, asked: Asked, same: Callable) -> np.ndarray:
        question, answer, right = asked
        shows = False
        for found in self.wrong(*question.arguments.values(), _settings(question)):
            shows = True
            if _alike(answer, found, _probabilities(question)):
                return np.array([True])
        return np.array([False]) if shows else right


@functools.cache
def _mistakes(widths: Tokens | None) -> list[Fault]:
    """Of a step that drafts these widths, or what it is asked for."""

    def laws(target, draft, settings, wrong) -> Iterator[dict]:
        settings = settings._replace(widths=widths or settings.widths)
        if wrong is None:
            yield from fixed_drafts(target, draft, settings)
        elif wrong.applies(settings):
            yield law(lambda rng: wrong(target, draft, rng, settings).run())

    known = (*WRONG_STEPS, ("drafts ignore the key", None))
    return [Fault(name, functools.partial(laws, wrong=wrong)) for name, wrong in known]


def _settings(question: Question) -> Settings:
    return Settings(question.arguments["target"].vocabulary, **question.options)


def _probabilities(question: Question) -> Callable:
    settings, target = _settings(question), question.arguments["target"]
    return lambda path: settings.of(target(path))


def _same(question: Question, answer: dict, right) -> np.ndarray:
    return np.array([difference(answer, _probabilities(question))[0] <= TOLERANCE])


def _describe(question: Question, answer: dict, right: np.ndarray) -> str:
    return difference(answer, _probabilities(question))[1]


def _likely_shapes(step: Callable) -> list[Tokens]:
    """What a step without `widths` may draft, by where it asks the draft: chains, and chains that
    begin with two siblings."""
    target, draft = Model(1, "any", 3), Model(2, "any", 3)
    drafts: list[set[Tokens]] = []  # of each run, the paths after which the draft was asked

    def run(rng):
        drafts.append(set())

        def asked(path):
            drafts[-1].add(tuple(int(token) for token in path))
            return draft(path)

        given = {name: getattr(Settings(3), name) for name in OPTIONS if takes(step, name)}
        return _checked(step(target, asked, rng, **given), 3)

    try:
        accepted = max(map(len, law(run))) - 1  # one more may never be
    except Exception:  # which the first question will say
        return [(1, 1)]
    deepest = max((len(path) for paths in drafts for path in paths), default=0)
    depths = [n for n in (accepted, accepted + 1) if 0 < n <= deepest + 1]
    branches = any(len(paths) > len({len(path) for path in paths}) for paths in drafts)
    # The draft is not asked after the last tokens: siblings among them cannot be seen.
    firsts = (1, 2) if branches or deepest == 0 else (1,)
    return [(first, *[1] * (depth - 1)) for depth in depths for first in firsts] or [(1, 1)]


def _checked(tokens, vocabulary: int) -> Tokens:
    found = tuple(int(token) for token in np.asarray(tokens).ravel())
    if not found or min(found) < 0 or max(found) >= vocabulary:
        raise ValueError(f"the step gave {list(found)}, expected tokens from 0 to {vocabulary - 1}")
    return found


def prefixes(vocabulary: int, length: int) -> Iterator[Tokens]:
    """All texts of 1 to `length` tokens."""
    for n in range(1, length + 1):
        yield from itertools.product(range(vocabulary), repeat=n)


def continued(found: dict, p: Callable, length: int) -> dict:
    """How likely each text of up to `length` tokens is, if the target writes on after the step.

    found: {tokens: probability} of a step; p(path): (V,) the target's probabilities after it
    """
    ended = found
    begun: dict = {(): 1}
    for tokens, chance in found.items():
        for n in range(1, len(tokens) + 1):
            begun[tokens[:n]] = begun.get(tokens[:n], 0) + chance
    total: dict = {(): 1}
    for text in prefixes(len(p(())), length):
        before = text[:-1]
        written = total[before] - begun.get(before, 0) + ended.get(before, 0)
        total[text] = begun.get(text, 0) + written * p(before)[text[-1]]
    return total


def difference(found: dict, p: Callable) -> tuple[float, str]:
    """(the largest difference of a text's probability, where it shows first)."""
    total = continued(found, p, max(map(len, found)))
    largest = 0.0
    detail = ""
    exact: dict = {(): 1}
    for text in list(total)[1:]:
        exact[text] = exact[text[:-1]] * p(text[:-1])[text[-1]]
        off = abs(total[text] - exact[text])
        if off > TOLERANCE and not detail:
            found, right = float(total[text]), float(exact[text])
            place = f"token {len(text)}: {text[-1]} after {list(text[:-1])}"
            detail = f"{place} has {found:.4f} instead of {right:.4f}"
            detail += f", {found / right:.3g} times" if right else ""
        largest = max(largest, float(off))
    return largest, detail


def _alike(one: dict, other: dict, p: Callable) -> bool:
    """Whether two steps give texts of the same distribution."""
    length = max(map(len, [*one, *other]))
    a = continued(one, p, length)
    b = continued(other, p, length)
    return all(abs(a[text] - b[text]) <= TOLERANCE for text in a)
