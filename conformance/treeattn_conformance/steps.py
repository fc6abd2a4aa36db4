"""A right step of speculative decoding, and known faults, each with some parts changed.

`Step` is recursive rejection sampling on a drawn tree (https://arxiv.org/abs/2402.14160).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Path = tuple[int, ...]


def probabilities(logits: np.ndarray, temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """softmax(logits / temperature), without the tokens whose likelier ones have top_p together."""
    p = normalized(np.exp((logits - logits.max()) / temperature))
    if top_p == 1:
        return p
    likelier = (p > p[:, None]) @ p
    return normalized(np.where(likelier < top_p, p, 0))


def normalized(p: np.ndarray) -> np.ndarray:
    total = p.sum()
    return p / total if total > 0 else p


def lacking(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """max(p − q, 0), not normalized."""
    return np.maximum(p - q, 0)


@dataclass
class Step:
    """One right step. `run` gives its tokens.

    widths, replacement, temperature, top_p: as in `check_verifier`
    drawn: the drafted tokens, {path: its children, in the order in which they were drawn}
    """

    target: Callable
    draft: Callable
    rng: Any
    widths: Path = (1, 1)
    replacement: bool = False
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self):
        self.drawn = self.tree()

    def tree(self) -> dict[Path, Path]:
        found: dict[Path, Path] = {}
        level: list[Path] = [()]
        for width in self.widths:
            found |= {path: self.children(path, width) for path in level}
            level = [(*path, x) for path in level for x in dict.fromkeys(found[path])]
        return found

    def softmax(self, logits: np.ndarray) -> np.ndarray:
        return probabilities(logits, self.temperature, self.top_p)

    def p(self, path: Path) -> np.ndarray:
        return self.softmax(self.target(path))

    def q(self, path: Path) -> np.ndarray:
        """The distribution from which the first token after the path is drawn."""
        return self.softmax(self.draft(path))

    def claimed(self, path: Path) -> np.ndarray:
        """The distribution of this token that the acceptance test uses."""
        return self.q(path)

    def draw(self, p: np.ndarray, rng=None) -> int:
        return int((rng or self.rng).choice(len(p), p=normalized(p)))

    def children(self, path: Path, width: int) -> Path:
        q = self.q(path)
        found: list[int] = []
        while len(found) < width and q.any():
            found.append(self.draw(q))
            q = Step.left(self, q, found[-1])
        return tuple(found)

    def left(self, q: np.ndarray, x: int) -> np.ndarray:
        """The distribution from which x's next sibling was drawn."""
        return q if self.replacement else removed(q, x)

    def chance(self, p: np.ndarray, q: np.ndarray, x: int) -> float:
        return min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0

    def accepts(self, path: Path, p: np.ndarray, q: np.ndarray, x: int) -> bool:
        return self.rng.random() < self.chance(p, q, x)

    def residual(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        rest = lacking(p, q)
        return normalized(rest) if rest.any() else p

    def bonus(self, path: Path, p: np.ndarray) -> int:
        """The token after a path whose drafted tokens were all accepted."""
        return self.draw(p)

    def instead(self, path: Path, p: np.ndarray) -> int:
        """The token in place of the rejected ones. p: the residual distribution."""
        return self.draw(p)

    def run(self) -> Path:
        path: Path = ()
        while True:
            p = self.p(path)
            q = self.claimed(path)
            for x in self.drawn.get(path, ()):
                if self.accepts(path, p, q, x):
                    path = (*path, x)
                    break
                p = self.residual(p, q)
                q = self.left(q, x)
            else:
                end = self.instead if self.drawn.get(path) else self.bonus
                return (*path, end(path, p))


def removed(q: np.ndarray, x: int) -> np.ndarray:
    return normalized(np.where(np.arange(len(q)) == x, 0, q))


def run_step(target: Callable, draft: Callable, rng, **options) -> Path:
    """A lossless step, with every option that `check_verifier` asks for."""
    return Step(target, draft, rng, **options).run()


# Faults: steps with some parts changed


def wrong(**parts: Callable) -> type[Step]:
    return type("Wrong", (Step,), parts)


def likeliest(step: Step, path: Path, width: int) -> Path:
    q = step.q(path)
    return tuple(np.argsort(-q, kind="stable")[: min(width, (q > 0).sum())].tolist())


def not_divided(step: Step, path: Path, p: np.ndarray) -> int:
    """p is not divided by its sum, so a draw beyond its cumulative sum gives the last token."""
    return step.draw(np.append(p[:-1], 1 - p[:-1].sum()))


def argmax(step: Step, path: Path, p: np.ndarray) -> int:
    return int(np.argmax(p))


def greedy(step: Step, path: Path, *_) -> int:
    return int(np.argmax(step.p(path)))


# {name: (cure, *forms)}. The last has no form: `OwnChance` recognizes it.
STEP_FAULTS: dict[str, tuple] = {
    "noise shared by draft and residual": (
        "draw what replaces a rejected token with fresh noise",
        wrong(  # random numbers that belong to a position
            children=lambda s, path, _: (s.draw(s.q(path), s.rng.at(len(path))),),
            instead=lambda s, path, p: s.draw(p, s.rng.at(len(path))),
        ),
    ),
    "residual not renormalized": (
        "max(p − q, 0) has to add up to 1 before it is used again",
        wrong(residual=lambda s, p, q: lacking(p, q), instead=not_divided),
        wrong(residual=lambda s, p, q: lacking(p, q) if (p > q).any() else p),
    ),
    "residual is the target": (
        "after a rejection draw from max(p − q, 0), normalized, not from p",
        wrong(instead=lambda s, path, p: s.draw(s.p(path))),
    ),
    "q before temperature or top-p": (
        "q is what the draft was drawn from, after temperature, top-k and top-p",
        wrong(claimed=lambda s, path: probabilities(s.draft(path))),
        wrong(claimed=lambda s, path: probabilities(s.draft(path), s.temperature)),
        wrong(claimed=lambda s, path: probabilities(s.draft(path), top_p=s.top_p)),
    ),
    "q said one-hot, but sampled": (
        "min(1, p / 1) goes with p without x, min(1, p / q) with max(p − q, 0)",
        wrong(chance=lambda s, p, q, x: p[x]),
    ),
    "likeliest tokens judged as drawn": (
        "nothing was drawn: accept x with p(x), else p without x",
        wrong(children=likeliest),
    ),
    "argmax at a temperature": (
        "draw the last token from its distribution",
        wrong(bonus=argmax, instead=argmax),
        wrong(instead=argmax),
        wrong(accepts=lambda s, path, p, q, x: x == greedy(s, path), bonus=argmax, instead=greedy),
    ),
    "first token unchecked": (
        "check the first drafted token against the target after the text",
        wrong(accepts=lambda s, path, *x: not path or Step.accepts(s, path, *x)),
    ),
    "bonus of other logits": (
        "the last token comes from the target's logits after the last accepted, divided by the "
        "temperature and cut by top-p",
        wrong(bonus=lambda s, path, p: s.draw(s.p(path[:-1]))),
        wrong(bonus=lambda s, path, p: s.draw(s.q(path))),
        wrong(bonus=lambda s, path, p: s.draw(probabilities(s.target(path)))),
    ),
    "accepts all drafts": (
        "accept x with min(1, p(x) / q(x))",
        wrong(chance=lambda s, p, q, x: 1.0),
    ),
    "chance of its own": ("take all random numbers from rng, the draft's included",),
}
VERIFIER_CURES = {name: cure for name, (cure, *_) in STEP_FAULTS.items()}
