"""Speculative decoding with a prefix tree, over a cache on one device or many.

    beam, scores = draft_candidate_tokens(draft, certain=last)
    packed, mask, offsets, unpack_map = pack(beam, candidate_lengths(scores))
    logits, keys = model.extend(packed, cache, positions=context + offsets, mask=mask)
    verified_beam, verified_scores = (unpack(x, unpack_map) for x in likeliest(logits))
    tokens = accept_candidate_tokens(beam, scores, verified_beam, verified_scores)

`treeattn_llama.generate` is these five lines in a loop, and one that commits what was accepted:

    cache = model.commit(cache, keys, select=tokens.nodes(unpack_map), counts=tokens.counts)

A budget of 16 tokens a call is one certain token and 15 candidates: `generate` and `Budget` count
all 16, `draft_candidate_tokens` and `Draft.propose`, which are asked for candidates, 15.
"""

from treeattn_llama.sampling import Chance, Sampling, likeliest
from treeattn_llama.speculation.accept import Accepted, accept_candidate_tokens
from treeattn_llama.speculation.budget import Budget
from treeattn_llama.speculation.by_name import DRAFTS, make_draft
from treeattn_llama.speculation.candidates import (
    Draft,
    Drawn,
    Seen,
    Shape,
    Texts,
    candidate_lengths,
    draft_candidate_tokens,
    pad_packed,
    ranked,
)
from treeattn_llama.speculation.certificate import Certificate
from treeattn_llama.speculation.draw import DrawnTree, dice_of, drawn_candidates
from treeattn_llama.speculation.lookup import NGramDraft, RecyclingDraft, SuffixDraft
from treeattn_llama.speculation.models import DrawnDraft, LlamaDraft, first_layers
from treeattn_llama.speculation.reject import rejection
from treeattn_llama.speculation.united import UnitedDraft
from treeattn_llama.speculation.verify import Step

__all__ = [
    "DRAFTS",
    "Accepted",
    "Budget",
    "Certificate",
    "Chance",
    "Draft",
    "Drawn",
    "DrawnDraft",
    "DrawnTree",
    "LlamaDraft",
    "NGramDraft",
    "RecyclingDraft",
    "Sampling",
    "Seen",
    "Shape",
    "Step",
    "SuffixDraft",
    "Texts",
    "UnitedDraft",
    "accept_candidate_tokens",
    "candidate_lengths",
    "dice_of",
    "draft_candidate_tokens",
    "drawn_candidates",
    "first_layers",
    "likeliest",
    "make_draft",
    "pad_packed",
    "ranked",
    "rejection",
]
