"""A step of speculative decoding as it should be, and as it should not.

`Step` is recursive rejection sampling on a drawn tree (https://arxiv.org/abs/2402.14160), in the
parts that go wrong; each fault replaces one of them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Path = tuple[int, ...]
Children = dict[Path, tuple[int, ...]]


class Settings(NamedTuple):
    vocabulary: int
    widths: tuple[int, ...] = (1, 1)
    replacement: bool = False
    temperature: float = 1.0
    top_k: int = 10**6
    top_p: float = 1.0

    def of(self, logits: np.ndarray) -> np.ndarray:
        """(V,) the probabilities of these logits: temperature, then top-k, then top-p."""
        return _probabilities(self, logits.tobytes()).copy()

    def calculated(self, logits: np.ndarray) -> np.ndarray:
        if self.temperature == 0:
            return np.eye(len(logits))[np.argmax(logits)]
        p = softmax(logits / self.temperature)
        order = np.argsort(-p, kind="stable")
        p[order[self.top_k :]] = 0
        p = p / p.sum()
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= self.top_p]] = 0
        return p / p.sum()


@functools.lru_cache(maxsize=10_000)
def _probabilities(settings: Settings, logits: bytes) -> np.ndarray:
    return settings.calculated(np.frombuffer(logits))


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max())
    return p / p.sum()


def lacking(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What p has more than q, not normalized."""
    return np.maximum(p - q, 0)


def normalized(p: np.ndarray) -> np.ndarray:
    return p / p.sum() if p.sum() > 0 else p


class Step:
    """One step, right: `run` gives its tokens."""

    def __init__(self, target, draft, rng, settings: Settings):
        self.target = target
        self.draft = draft
        self.rng = rng
        self.settings = settings
        self.drawn = self.tree()

    def p(self, path: Path) -> np.ndarray:
        return self.settings.of(self.target(path))

    def q(self, path: Path) -> np.ndarray:
        """What the first token after the path is drawn from."""
        return self.settings.of(self.draft(path))

    def claimed(self, path: Path) -> np.ndarray:
        """What it is said to be drawn from."""
        return self.q(path)

    def draw(self, p: np.ndarray) -> int:
        return int(self.rng.choice(len(p), p=normalized(p)))

    def tree(self) -> Children:
        """What is drafted: {path: its children, in the order in which they were drawn}."""
        found: Children = {}
        level: list[Path] = [()]
        for width in self.settings.widths:
            for path in level:
                found[path] = self.children(path, width)
            level = [(*path, x) for path in level for x in dict.fromkeys(found[path])]
        return found

    def children(self, path: Path, width: int) -> tuple[int, ...]:
        q = self.q(path)
        found = []
        while len(found) < width and q.any():
            found.append(self.draw(q))
            q = self.without(q, found[-1])
        return tuple(found)

    def without(self, q: np.ndarray, x: int) -> np.ndarray:
        if self.settings.replacement:
            return q
        return normalized(np.where(np.arange(len(q)) == x, 0, q))

    def chance(self, p: np.ndarray, q: np.ndarray, x: int) -> float:
        return min(1.0, p[x] / q[x])

    def accepts(self, path: Path, p: np.ndarray, q: np.ndarray, x: int) -> bool:
        return self.rng.random() < self.chance(p, q, x)

    def residual(self, p: np.ndarray, q: np.ndarray, x: int) -> np.ndarray:
        rest = lacking(p, q)
        return normalized(rest) if rest.sum() > 0 else p

    def last(self, path: Path, p: np.ndarray) -> int:
        """The token after what was accepted. p: what is left to be drawn from."""
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
                p = self.residual(p, q, x)
                q = self.without(q, x)
            else:
                return (*path, self.last(path, p))


def run_step(
    target: Callable,
    draft: Callable,
    rng,
    *,
    widths: tuple[int, ...] = (1, 1),
    replacement: bool = False,
    temperature: float = 1.0,
    top_k: int = 10**6,
    top_p: float = 1.0,
) -> Path:
    """A step that is lossless, with every option that `check_verifier` asks for."""
    vocabulary = len(target(()))
    settings = Settings(vocabulary, widths, replacement, temperature, top_k, top_p)
    return Step(target, draft, rng, settings).run()
