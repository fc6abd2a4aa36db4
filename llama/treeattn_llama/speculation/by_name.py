"""Drafts by name, for those that need nothing but the model that they draft for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from treeattn_llama.model import Llama
from treeattn_llama.speculation.candidates import Draft
from treeattn_llama.speculation.lookup import NGramDraft, RecyclingDraft, SuffixDraft
from treeattn_llama.speculation.models import LlamaDraft, first_layers
from treeattn_llama.speculation.united import UnitedDraft

CHECKOUT = Path(__file__).parents[3]  # the folder that treeattn/ lies in
TRAINED = "_treeattn_training_recurrent"  # the module's name: `training` may be anybody's


def trained_module() -> ModuleType:
    """training/recurrent.py of the checkout that this package lies in.

    Raises ValueError where there is none, as where a wheel was installed.
    """
    if TRAINED in sys.modules:
        return sys.modules[TRAINED]
    path = CHECKOUT / "training" / "recurrent.py"
    if not path.exists():
        raise ValueError(
            f"draft: 'recurrent' and 'surer' need training/recurrent.py, which belongs to a "
            f"checkout of treeattn's repository, and there is no file {path}. Run from a checkout "
            f"(pip install -e), or take one of {tuple(PACKAGED_DRAFTS)}"
        )
    spec = importlib.util.spec_from_file_location(TRAINED, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[TRAINED] = module
    return module


def recurrent(model: Llama) -> Draft:
    """The trained drafter, which knows one model: the packaged one."""
    return trained_module().RecurrentDraft(model)


PACKAGED_DRAFTS = {
    "suffix": lambda model: SuffixDraft(),
    "ngram": lambda model: NGramDraft(),
    "recycling": lambda model: RecyclingDraft(),
    "layers": lambda model: LlamaDraft(first_layers(model)),
}
"""Drafts for any model: each is made with the one that it drafts for."""

DRAFTS = PACKAGED_DRAFTS | {
    "recurrent": recurrent,
    "surer": lambda model: UnitedDraft(SuffixDraft(), recurrent(model)),
}
"""Those, and two that are found in a checkout, for the model that `training/` trained one on."""


def make_draft(draft: Any, model: Llama) -> Any:
    """A new draft of that name; None and objects that propose and observe come back as they are.

    Raises ValueError for an unknown name and a draft with another vocabulary than the model's,
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
