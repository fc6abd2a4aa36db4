"""A rule that is in use and is not lossless: a beam's candidates, accepted as if they were drawn.

It is that of the packing document's own project, https://github.com/apple/ml-recurrent-drafter
(`_choose_from_candidates` in recurrent_drafting.py).
"""

from labs.acceptance.rules import Path, pick, residual


def beam_candidates(draft, width: int, length: int) -> list[Path]:
    """The draft's `width` likeliest continuations, as beam search finds them, the likeliest first.

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
    """Each candidate tossed for, and the one taken that gets furthest: the distribution is not p.

    Each token x of each candidate is tossed for by itself, with min(1, p(x) / q(x)), where another
    candidate has the same token, too; of the candidates the first is taken that is accepted
    furthest; then the token comes from max(p − q, 0), or from p where the candidate ends.
    """
    lengths = [_accepted(candidate, target, draft, rng) for candidate in candidates]
    best = lengths.index(max(lengths))
    path = candidates[best][: lengths[best]]
    p = target(path)
    if path != candidates[best]:
        p, _ = residual(p, draft(path))
    return (*path, pick(p, rng))


def _accepted(candidate: Path, target, draft, rng) -> int:
    """How many of the candidate's tokens are accepted one after the other."""
    for n, x in enumerate(candidate):
        path = candidate[:n]
        if not rng.random() < target(path)[x] / draft(path)[x]:
            return n
    return len(candidate)
