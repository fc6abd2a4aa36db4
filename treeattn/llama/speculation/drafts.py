"""The drafts by name."""

from typing import Any

from treeattn.llama.model import Llama
from treeattn.llama.speculation.lookup import NGramDraft, RecyclingDraft, SuffixDraft
from treeattn.llama.speculation.models import LlamaDraft, first_layers

DRAFTS = {
    "suffix": lambda model: SuffixDraft(),
    "ngram": lambda model: NGramDraft(),
    "recycling": lambda model: RecyclingDraft(),
    "layers": lambda model: LlamaDraft(first_layers(model)),
}
"""Drafts that need nothing but the model that they draft for."""


def make_draft(draft: Any, model: Llama) -> Any:
    """A new draft of that name; None and objects that propose and observe are returned as they are.

    Raises ValueError for an unknown name and for a draft with another vocabulary than the model's,
    TypeError for an object that does not propose and observe.
    """
    if draft is None:
        return None
    if isinstance(draft, str):
        if draft not in DRAFTS:
            raise ValueError(f"draft: expected None or one of {tuple(DRAFTS)}, got {draft!r}")
        return DRAFTS[draft](model)
    if not all(callable(getattr(draft, name, None)) for name in ("propose", "observe")):
        raise TypeError(
            f"draft: expected a name, or an object with the methods propose and observe, got "
            f"{type(draft).__name__}"
        )
    vocabulary = getattr(draft, "vocabulary", model.config.vocabulary)
    if vocabulary != model.config.vocabulary:
        raise ValueError(
            f"draft: it has a vocabulary of {vocabulary} tokens, the model one of "
            f"{model.config.vocabulary}"
        )
    return draft
