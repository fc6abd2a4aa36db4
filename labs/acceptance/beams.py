"""A rule in public code that is not lossless: it accepts a beam's candidates as if they were drawn.

The rule is from the packing document's own project, https://github.com/apple/ml-recurrent-drafter
(`_choose_from_candidates` in recurrent_drafting.py).
"""

from labs.acceptance.rules import Path, pick, residual


def beam_candidates(draft, width: int, length: int) -> list[Path]:
    """The draft's `width` likeliest continuations by beam search, the likeliest first.

    draft: path -> (V,) probabilities
    """
    beam: dict[Path, object] = {(): 1}
    for _ in range(length):
        longer = {
            (*path, x): chance * q
            for path, chance in beam.items()
            for x, q in enumerate(draft(path))
            if q > 0
        }
        beam = dict(sorted(longer.items(), key=lambda item: -item[1])[:width])
    return list(beam)


def longest_of_tosses(candidates: list[Path], target, draft, rng) -> Path:
    """The candidate that is accepted furthest, and one more token: the distribution is not p.

    Each token x of each candidate is accepted with min(1, p(x) / q(x)), independently, even if
    another candidate has the same token. The first of the candidates with the most accepted tokens
    wins. The last token is drawn from max(p − q, 0), or from p if the whole candidate was accepted.
    """
    lengths = [_accepted(candidate, target, draft, rng) for candidate in candidates]
    best = lengths.index(max(lengths))
    path = candidates[best][: lengths[best]]
    p = target(path)
    if path != candidates[best]:
        p, _ = residual(p, draft(path))
    return (*path, pick(p, rng))


def _accepted(candidate: Path, target, draft, rng) -> int:
    """The number of the candidate's tokens before the first rejected one."""
    for n, x in enumerate(candidate):
        path = candidate[:n]
        if not rng.random() < target(path)[x] / draft(path)[x]:
            return n
    return len(candidate)
