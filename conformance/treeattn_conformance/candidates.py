"""The k best keys of a sharded cache: candidates merge, and the text's order decides ties."""

from collections.abc import Callable, Iterator

import numpy as np

from .answers import Arrays, Question, ask
from .report import Report

TOP_K_FINGERPRINTS = {
    "local indices": "return positions in the text: a device's index says nothing to the others",
    "ties by shard": "equal scores: the earlier position first, whichever device it lies on",
    "ties to the last": "equal scores: the earlier position first",
    "a key counted twice": "a position is one key, however often it is offered: drop its copies",
    "too few from each shard": "all k may lie on one device: each offers its k best",
    "one shard's best": "merge the candidates of all devices",
    "hidden keys chosen": "a score of −∞ is no key: its position is −1",
    "best last": "the largest score comes first",
    "scores alone sorted": "a score and its position move together",
}


def top_k(shards, k: int) -> Arrays:
    """The k best (scores, positions) of all shards', each (b, k); of equal scores the earliest.

    shards: pairs of scores (b, n) and positions (b, n) in the text, in any order. A score of −∞, or
    a position of −1, is no key. Where there are fewer than k, −∞ and −1 follow.

    top_k(A ∪ B) = top_k(top_k(A) ∪ top_k(B)): pairs of (score, position) have one order, so
    candidates merge in any tree, and twice the same ones are the same ones.
    """
    return _chosen(shards, k, lambda score, position: (-score, position))


def _chosen(shards, k: int, key: Callable, once: bool = True) -> Arrays:
    """The first k candidates by `key`, each position once."""
    b = len(shards[0][0])
    scores = np.full((b, k), -np.inf)
    positions = np.full((b, k), -1)
    for r in range(b):
        offered = [
            (float(score), int(position))
            for s, p in shards
            for score, position in zip(s[r], p[r], strict=True)
            if score > -np.inf and position >= 0
        ]
        if once:
            offered = list(dict.fromkeys(offered))
        best = sorted(offered, key=lambda candidate: key(*candidate))[:k]
        for i, (score, position) in enumerate(best):
            scores[r, i] = score
            positions[r, i] = position
    return scores, positions


def top_k_questions() -> list[Question]:
    """The questions to `check_top_k`: (shards, k) each; scores are exact in every dtype."""
    rng = np.random.default_rng(5)

    def scores(levels, n=24, b=3):
        """One of `levels` numbers each; with few of them, ties."""
        return (rng.integers(0, levels, (b, n)) / 8).astype(np.float32)

    def dealt(s, p, stripe=None):
        """Contiguous parts, or stripes of so many keys."""
        at = np.arange(s.shape[1])
        owner = at * p // len(at) if stripe is None else at // stripe % p
        positions = np.broadcast_to(at, s.shape)
        return [(s[:, owner == r], positions[:, owner == r]) for r in range(p)]

    def cut(shards, k):
        return [top_k([shard], k) for shard in shards]

    different = rng.permuted(np.tile(np.arange(24), (3, 1)), axis=1).astype(np.float32)
    relu = np.where(rng.random((3, 24)) < 0.7, 0, scores(9)).astype(np.float32)
    hidden = np.where(rng.random((3, 24)) < 0.6, -np.inf, scores(5)).astype(np.float32)
    on_one = np.sort(different, axis=1)
    shards = dealt(scores(3), 4)
    asked = {
        "one shard": (dealt(different, 1), 5),
        "contiguous shards": (dealt(different, 4), 6),
        "stripes": (dealt(different, 4, stripe=1), 6),
        "all on one shard": (dealt(on_one, 4), 6),
        "ties": (dealt(scores(3), 3), 7),
        "ties in stripes": (dealt(scores(3), 4, stripe=1), 7),
        "ties in stripes of three": (dealt(scores(2), 2, stripe=3), 5),
        "zeros": (dealt(relu, 4, stripe=2), 12),
        "shards in another order": (dealt(scores(2), 4)[::-1], 9),
        "shards of fewer than k": (dealt(scores(4), 8), 5),
        "hidden keys": (dealt(hidden, 3), 12),
        "below zero": (dealt(scores(6) - 4, 4), 5),
        "a shard twice": ([*shards, shards[1]], 9),
        "candidates of candidates": (cut(dealt(scores(3), 4, stripe=1), 7), 7),
    }
    return [Question(name, arguments, top_k(*arguments)) for name, arguments in asked.items()]


def wrong_top_k(shards, k: int) -> Iterator[tuple[str, Arrays]]:
    """What known mistakes give: (fingerprint, (scores, positions)) of each."""

    def by_score(score, _):
        return -score

    def indexed(begin):
        """Each shard's candidates under their index in it, or in memory behind `begin` others."""
        numbers = [begin(r) + np.arange(s.shape[1]) for r, (s, _) in enumerate(shards)]
        return [(s, np.broadcast_to(x, s.shape)) for (s, _), x in zip(shards, numbers, strict=True)]

    scores, positions = top_k(shards, k)
    most = max(s.shape[1] for s, _ in shards)
    local = _chosen(indexed(lambda r: 0), k, by_score, once=False)
    yield "local indices", local
    yield "local indices", _chosen(indexed(lambda r: r * most), k, by_score, once=False)
    for order in (shards, shards[::-1]):
        yield "ties by shard", _chosen(order, k, by_score)
    yield "ties to the last", _chosen(shards, k, lambda score, position: (-score, -position))
    yield (
        "a key counted twice",
        _chosen(shards, k, lambda score, position: (-score, position), once=False),
    )
    few = [top_k([shard], -(-k // len(shards))) for shard in shards]
    yield "too few from each shard", top_k(few, k)
    for shard in shards:
        yield "one shard's best", top_k([shard], k)
    yield "best last", (scores[:, ::-1], positions[:, ::-1])
    yield "scores alone sorted", (scores, np.sort(positions, axis=1))
    yield from _hidden_keys_chosen(shards, k)


def _hidden_keys_chosen(shards, k: int) -> Iterator[tuple[str, Arrays]]:
    """−∞ is a score like another, or the lowest of its dtype's, and its key has a position."""
    lowest = np.finfo(np.float32).min
    shown = [(np.maximum(s, lowest), p) for s, p in shards]
    scores, positions = top_k(shown, k)
    yield "hidden keys chosen", (np.where(scores == lowest, -np.inf, scores), positions)
    yield "hidden keys chosen", (scores, positions)


def check_top_k(f: Callable) -> Report:
    """Ask f(shards, k) -> (scores, positions), each (b, k), for the k best keys of all shards.

    shards: pairs of scores (b, n) float32 and positions (b, n) int in the text; positions differ,
            but where a shard is handed over twice. A score of −∞, or a position of −1, is no key

    The largest score first, of equal ones the earliest position; −∞ and −1 where there are fewer
    than k. `top_k` says what is expected. A line for each question; a mistake is named where it
    explains all answers, and if none does, those that explain one are.
    """
    return ask(f, top_k_questions(), wrong_top_k, TOP_K_FINGERPRINTS)
