"""The known faults of a step of speculative decoding, each in the part of `Step` where it sits."""

from collections.abc import Iterator

import numpy as np

from .outcomes import law
from .steps import Path, Settings, Step, lacking, normalized

# What known faults are, and their cures.
VERIFIER_CURES = {
    "noise shared by draft and residual": "draw what replaces a rejected token with fresh noise",
    "noise shared by draft and test": "accept with a random number that drew nothing before",
    "noise shared by test and residual": "draw the replacement with a random number of its own",
    "residual not renormalized": "max(p − q, 0) has to add up to 1 before it is used again",
    "residual is the target": "after a rejection draw from max(p − q, 0), normalized, not from p",
    "q before temperature, top-k, top-p": "q is what the draft was drawn from, after all cuts",
    "q after temperature, top-k, top-p": "q is what the draft was drawn from: it was drawn uncut",
    "target uncut": "apply temperature, top-k and top-p to the target's logits, too",
    "siblings by the first q": "a sibling is drawn from what those before have left: q without "
    "them where drawn without replacement, q itself where drawn with",
    "siblings tossed independently": "after a rejection, p is what p still lacks",
    "q said one-hot, but sampled": "min(1, p / 1) goes with p without x, min(1, p / q) with "
    "max(p − q, 0)",
    "likeliest tokens judged as drawn": "nothing was drawn: accept x with p(x), else p without x",
    "argmax at a temperature": "draw the last token from its distribution",
    "first token unchecked": "check the first drafted token against the target after the text",
    "bonus from the wrong position": "the last token comes from the logits after the last accepted",
    "drafts ignore the key": "the draft's random numbers must differ from call to call",
    "accepts all drafts": "accept x with min(1, p(x) / q(x))",
    "ratio upside down": "accept x with min(1, p(x) / q(x)), the target's over the draft's",
    "chance of its own": "take all random numbers from rng, the draft's included",
}


class Wrong(Step):
    @staticmethod
    def applies(settings: Settings) -> bool:
        """Whether the fault can show: shared noise, say, is asked of chains only."""
        return True


class Chain(Wrong):
    @staticmethod
    def applies(settings: Settings) -> bool:
        return max(settings.widths) == 1 and settings.temperature > 0


class Siblings(Wrong):
    @staticmethod
    def applies(settings: Settings) -> bool:
        return max(settings.widths) > 1


class Cut(Wrong):
    @staticmethod
    def applies(settings: Settings) -> bool:
        least = settings.temperature == 1 and settings.top_p == 1
        return settings.temperature > 0 and not (least and settings.top_k >= settings.vocabulary)


class NoiseOfDraftAndResidual(Chain):
    """Random numbers that belong to a position."""

    def children(self, path, width):
        q = self.q(path)
        return (int(self.rng.at(len(path)).choice(len(q), p=q)),)

    def last(self, path, p):
        return int(self.rng.at(len(path)).choice(len(p), p=normalized(p)))


class NoiseOfDraftAndTest(Chain):
    def _numbers(self, path: Path):
        return self.rng.at(len(path))

    def children(self, path, width):
        q = self.q(path)
        return (int(self._numbers(path).choice(len(q), p=q)),)

    def accepts(self, path, p, q, x):
        return self._numbers(path).random() < self.chance(p, q, x)


class NoiseOfTestAndResidual(Chain):
    def accepts(self, path, p, q, x):
        return self.rng.at(len(path)).random() < self.chance(p, q, x)

    def last(self, path, p):
        if not self.drawn.get(path):
            return self.draw(p)
        return int(self.rng.at(len(path)).choice(len(p), p=normalized(p)))


class NotNormalizedAtTheEnd(Wrong):
    """The cumulative sum ends below 1, and what lies beyond is the last token."""

    def residual(self, p, q, x):
        return lacking(p, q)

    def last(self, path, p):
        p = np.concatenate([p[:-1], [1 - p[:-1].sum()]])
        return self.draw(p)


class NotNormalizedBetweenSiblings(Siblings):
    def residual(self, p, q, x):
        rest = lacking(p, q)
        return rest if rest.any() else p


class ResidualIsTheTarget(Wrong):
    def last(self, path, p):
        return self.draw(self.p(path))


class ClaimedUncut(Cut):
    def claimed(self, path):
        return Settings(self.settings.vocabulary).of(self.draft(path))


class ClaimedBeforeTheCuts(Cut):
    """At the temperature, but before top-k and top-p."""

    def claimed(self, path):
        settings = Settings(self.settings.vocabulary, temperature=self.settings.temperature)
        return settings.of(self.draft(path))


class DrawnUncut(Cut):
    def q(self, path):
        return Settings(self.settings.vocabulary).of(self.draft(path))

    def claimed(self, path):
        return self.settings.of(self.draft(path))

    def chance(self, p, q, x):
        return min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0


class TargetUncut(Cut):
    def p(self, path):
        return Settings(self.settings.vocabulary).of(self.target(path))


class SiblingsByTheFirstQ(Siblings):
    """q stays, though they were drawn without replacement, or changes though they were with."""

    def run(self):
        drawn_with = self.settings.replacement
        self.settings = self.settings._replace(replacement=not drawn_with)
        return super().run()

    def chance(self, p, q, x):
        return min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0


class SiblingsTossedIndependently(Siblings):
    def residual(self, p, q, x):
        return p

    def without(self, q, x):
        tossing = hasattr(self, "drawn")
        return q if tossing else super().without(q, x)

    def last(self, path, p):
        rest = lacking(p, self.claimed(path)) if self.drawn.get(path) else p
        return self.draw(rest if rest.any() else p)


class SaidOneHot(Wrong):
    def chance(self, p, q, x):
        return p[x]


class LikeliestJudgedAsDrawn(Wrong):
    def children(self, path, width):
        q = self.q(path)
        return tuple(np.argsort(-q, kind="stable")[: min(width, int((q > 0).sum()))].tolist())


class ArgmaxAtTheEnd(Wrong):
    def last(self, path, p):
        return int(np.argmax(p))


class ArgmaxAsBonus(Wrong):
    def last(self, path, p):
        return self.draw(p) if self.drawn.get(path) else int(np.argmax(p))


class ArgmaxAfterRejection(Wrong):
    def last(self, path, p):
        return int(np.argmax(p)) if self.drawn.get(path) else self.draw(p)


class ArgmaxOfTheTarget(Wrong):
    """Greedy all along."""

    def accepts(self, path, p, q, x):
        return x == int(np.argmax(self.p(path)))

    def last(self, path, p):
        return int(np.argmax(self.p(path)))


class FirstUnchecked(Wrong):
    def accepts(self, path, p, q, x):
        return not path or super().accepts(path, p, q, x)


class BonusOneEarlier(Wrong):
    def last(self, path, p):
        return self.draw(p if self.drawn.get(path) or not path else self.p(path[:-1]))


class BonusAlways(Chain):
    """The token after all drafted ones, whichever of them were accepted."""

    def last(self, path, p):
        end: Path = ()
        while self.drawn.get(end):
            end = (*end, self.drawn[end][0])
        return self.draw(self.p(end))


class AcceptsAll(Wrong):
    def chance(self, p, q, x):
        return 1.0


class RatioUpsideDown(Wrong):
    never = 1.0  # what is done with a token that the target never gives

    def chance(self, p, q, x):
        return min(1.0, q[x] / p[x]) if p[x] > 0 else self.never


class RatioUpsideDownOrNone(RatioUpsideDown):
    never = 0.0


WRONG_STEPS = (
    ("noise shared by draft and residual", NoiseOfDraftAndResidual),
    ("noise shared by draft and test", NoiseOfDraftAndTest),
    ("noise shared by test and residual", NoiseOfTestAndResidual),
    ("residual not renormalized", NotNormalizedAtTheEnd),
    ("residual not renormalized", NotNormalizedBetweenSiblings),
    ("residual is the target", ResidualIsTheTarget),
    ("q before temperature, top-k, top-p", ClaimedUncut),
    ("q before temperature, top-k, top-p", ClaimedBeforeTheCuts),
    ("q after temperature, top-k, top-p", DrawnUncut),
    ("target uncut", TargetUncut),
    ("siblings by the first q", SiblingsByTheFirstQ),
    ("siblings tossed independently", SiblingsTossedIndependently),
    ("q said one-hot, but sampled", SaidOneHot),
    ("likeliest tokens judged as drawn", LikeliestJudgedAsDrawn),
    ("argmax at a temperature", ArgmaxAtTheEnd),
    ("argmax at a temperature", ArgmaxAsBonus),
    ("argmax at a temperature", ArgmaxAfterRejection),
    ("argmax at a temperature", ArgmaxOfTheTarget),
    ("first token unchecked", FirstUnchecked),
    ("bonus from the wrong position", BonusOneEarlier),
    ("bonus from the wrong position", BonusAlways),
    ("accepts all drafts", AcceptsAll),
    ("ratio upside down", RatioUpsideDown),
    ("ratio upside down", RatioUpsideDownOrNone),
)


class Fixed(Step):
    """Its draft is the same in all calls."""

    def __init__(self, tree, *arguments):
        self._fixed = tree
        super().__init__(*arguments)

    def tree(self):
        return self._fixed


def fixed_drafts(target, draft, settings: Settings) -> Iterator[dict]:
    """The laws of steps whose draft is the same in all calls, one of those that are possible."""
    for items in law(lambda rng: tuple(Step(target, draft, rng, settings).drawn.items())):
        tree = dict(items)
        yield law(lambda rng, tree=tree: Fixed(tree, target, draft, rng, settings).run())
