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
from .outcomes import OwnChance, law
from .report import Report, Result, first_line
from .steps import Settings
from .wrong_steps import MORE_SPECIAL, VERIFIER_FINGERPRINTS, possible_faults

Tokens = tuple[int, ...]
TOLERANCE = 1e-6  # of probabilities: what is computed in float32 passes
OPTIONS = ("widths", "replacement", "temperature", "top_k", "top_p")


class Model:
    """A made-up model: `kind` of log-probabilities after any tokens, the same ones every time."""

    def __init__(self, seed: int, kind: str, vocabulary: int):
        self.seed = seed
        self.kind = kind
        self.vocabulary = vocabulary
        self._known: dict[Tokens, np.ndarray] = {}

    def __call__(self, path) -> np.ndarray:
        """(vocabulary,) float64; −∞ where a token never follows."""
        path = tuple(int(token) for token in path)
        if path not in self._known:
            self._known[path] = self._logits(path)
        return self._known[path].copy()

    def _logits(self, path: Tokens) -> np.ndarray:
        random = np.random.default_rng([self.seed, *(token + 1 for token in path)])
        p = random.dirichlet(np.full(self.vocabulary, 1.5)) + 0.02
        if self.kind == "without the first":
            p[0] = 0
        if self.kind == "without the last":
            p[-1] = 0
        if self.kind == "sure":
            p = np.eye(self.vocabulary)[random.integers(self.vocabulary)]
        with np.errstate(divide="ignore"):
            return np.log(p / p.sum())


class VerifierCase(NamedTuple):
    """One question: with these models and options, is the step lossless?"""

    name: str
    target: Model
    draft: Model
    options: dict
    needs: tuple[str, ...] = ()  # options that the step must have for it


def verifier_cases() -> list[VerifierCase]:
    """The questions, the same ones at every call."""
    n = 3
    target = Model(1, "any", n)
    draft = Model(2, "any", n)
    wide = (Model(5, "any", 4), Model(6, "any", 4))
    tree = ("widths",)
    both = ("widths", "replacement")
    cases = [
        VerifierCase("one token", target, draft, {"widths": (1,)}, tree),
        VerifierCase("chain", target, draft, {}),
        VerifierCase("draft is the target", target, target, {}),
        VerifierCase(
            "other tokens", Model(3, "without the first", n), Model(4, "without the last", n), {}
        ),
        VerifierCase("a sure draft", target, Model(2, "sure", n), {}),
        VerifierCase("a sure target", Model(1, "sure", n), draft, {}),
        VerifierCase("siblings", target, draft, {"widths": (2,)}, tree),
        VerifierCase("all tokens", target, draft, {"widths": (3,)}, tree),
        VerifierCase("a tree", target, draft, {"widths": (2, 1)}, tree),
        VerifierCase("a tree, later", target, draft, {"widths": (1, 2)}, tree),
        VerifierCase(
            "drawn with replacement", target, draft, {"widths": (2, 1), "replacement": True}, both
        ),
        VerifierCase("temperature", target, draft, {"temperature": 0.5}, ("temperature",)),
        VerifierCase("temperature 0", target, draft, {"temperature": 0.0}, ("temperature",)),
        VerifierCase("top-k", *wide, {"top_k": 2}, ("top_k",)),
        VerifierCase("top-p", *wide, {"top_p": 0.7}, ("top_p",)),
        VerifierCase("top-k, siblings", *wide, {"top_k": 3, "widths": (2,)}, ("widths", "top_k")),
    ]
    return cases


def check_verifier(step: Callable, *, widths: tuple[int, ...] | None = None) -> Report:
    """Is this step of speculative decoding lossless? If not, which known fault is it?

    step:   step(target, draft, rng, **options) -> the tokens of one step: those that it drafted and
            accepted, and one more. target(path) and draft(path) are logits (V,) after a path of
            tokens, (); V is 3 or 4. rng is to be used like a `numpy.random.Generator`: all chance
            comes from it, for drafting as well as for accepting (`Source` says what it offers)
    widths: what it drafts, if it has no such option, to recognize faults: (1, 1) are two tokens in
            a row. None: where it asks the draft says whether it is a chain or a small tree

    Options are asked of a step that takes them, and it always gets all that it takes: widths, how
    many tokens are drafted after each path, depth by depth ((2, 1): two, and one after each);
    replacement, False: siblings are drawn without; temperature (0: the likeliest), top_k, top_p, in
    this order, of the target's logits. What raises NotImplementedError is not asked.

    The step is run once for each way that chance can fall, 10 to 2,000 times a case. Probabilities
    are compared to 1e-6: a step may compute in float32. A fault is named if it explains every case,
    also those that passed. TypeError where step is no function.
    """
    if not callable(step):
        raise TypeError(f"step: expected a function, got {step!r:.40}")
    results = []
    suspects: set[str] | None = None  # the faults that explain all that has failed so far
    passed = []
    for case in verifier_cases():
        missing = [name for name in case.needs if not takes(step, name)]
        if missing:
            results.append(Result(case.name, "skipped", (), f"it has no option {missing[0]}"))
            continue
        result, asked = _ask(step, case, widths, suspects)
        results.append(result)
        if result.status == "failed" and asked:
            names = set(result.fingerprints)
            suspects = names if suspects is None else suspects & names
        if result.status == "passed":
            passed.append((case, asked))
    suspects = suspects or set()
    for case, asked in passed if suspects else ():
        suspects -= _refuted(case, asked, suspects)
    suspects -= {MORE_SPECIAL[name] for name in suspects if name in MORE_SPECIAL}
    return Report(tuple(_only(result, suspects) for result in results), VERIFIER_FINGERPRINTS)


def _only(result: Result, names: set[str]) -> Result:
    return result._replace(fingerprints=tuple(x for x in result.fingerprints if x in names))


def _ask(step, case: VerifierCase, widths, suspects: set[str] | None) -> tuple:
    """(what comes of one case, the settings that it may have been asked with): with the faults that
    would explain it, and that are suspected. No settings where the step raised an error."""
    settings = Settings(case.target.vocabulary, **case.options)
    options = {name: getattr(settings, name) for name in OPTIONS if takes(step, name)}
    drafts: list[set[Tokens]] = []  # of each run, the paths after which the draft was asked

    def run(rng):
        drafts.append(set())

        def draft(path):
            drafts[-1].add(tuple(int(token) for token in path))
            return case.draft(path)

        return _checked(step(case.target, draft, rng, **options), settings.vocabulary)

    try:
        found = law(run)
    except NotImplementedError as error:
        return Result(case.name, "skipped", (), first_line(error)), []
    except OwnChance as error:
        return Result(case.name, "failed", ("chance of its own",), str(error)), [settings]
    except Exception as error:
        return Result(case.name, "failed", (), f"{type(error).__name__}: {first_line(error)}"), []
    shapes = [settings.widths if takes(step, "widths") else widths]
    if shapes == [None]:
        shapes = _likely_shapes(drafts, max(map(len, found)) - 1)
    asked = [settings._replace(widths=shape) for shape in shapes]
    p = functools.partial(_probabilities, settings, case.target)
    off, detail = difference(found, p)
    if off <= TOLERANCE:
        tokens = sum(len(tokens) * chance for tokens, chance in found.items())
        return Result(case.name, "passed", (), f"{float(tokens):.3f} tokens a step"), asked
    names = _explaining(case, asked, found, p, suspects)
    return Result(case.name, "failed", tuple(sorted(names)), detail), asked


def _probabilities(settings: Settings, target: Model, path) -> np.ndarray:
    return settings.of(target(path))


def _likely_shapes(drafts: list[set[Tokens]], accepted: int) -> list[tuple[int, ...]]:
    """What a step without `widths` may draft, by where it asks the draft: chains, and chains that
    begin with two siblings.

    accepted: the most drafted tokens that were in an answer; one more may never be accepted
    """
    deepest = max((len(path) for paths in drafts for path in paths), default=0)
    depths = [n for n in (accepted, accepted + 1) if 0 < n <= deepest + 1]
    branches = any(len(paths) > len({len(path) for path in paths}) for paths in drafts)
    # The draft is not asked after the last tokens: siblings among them cannot be seen.
    firsts = (1, 2) if branches or deepest == 0 else (1,)
    return [(first, *[1] * (depth - 1)) for depth in depths for first in firsts]


def _explaining(case, asked: list[Settings], found: dict, p, suspects) -> set[str]:
    """The faults, of all or of the suspects, that give what was found."""
    names: set[str] = set()
    for settings in asked if suspects is None or suspects else ():
        if names:
            break
        for name, law_of in possible_faults(case.target, case.draft, settings):
            wanted = name not in names and (suspects is None or name in suspects)
            if wanted and same(found, law_of(), p):
                names.add(name)
    return names


def _refuted(case: VerifierCase, asked: list[Settings], suspects: set[str]) -> set[str]:
    """The suspects that would have failed this case, which passed."""
    right: dict[str, bool] = {}  # of a fault that has several forms one suffices
    for settings in asked:
        p = functools.partial(_probabilities, settings, case.target)
        for name, law_of in possible_faults(case.target, case.draft, settings):
            if name in suspects and not right.get(name):
                right[name] = difference(law_of(), p)[0] <= TOLERANCE
    return {name for name, is_right in right.items() if not is_right}


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
            place = f"token {len(text)}: {text[-1]} after {list(text[:-1])}"
            detail = f"{place} has {float(total[text]):.4f} instead of {float(exact[text]):.4f}"
        largest = max(largest, float(off))
    return largest, detail


def same(one: dict, other: dict, p: Callable) -> bool:
    """Whether two steps give texts of the same distribution."""
    length = max(map(len, [*one, *other]))
    a = continued(one, p, length)
    b = continued(other, p, length)
    return all(abs(a[text] - b[text]) <= TOLERANCE for text in a)
