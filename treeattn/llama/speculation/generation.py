"""Speculative decoding: the text that the model would write alone, in fewer calls of it.

Each step drafts candidates, packs them into a tree below the last certain token, runs the model on
all nodes in one call, and accepts the longest path that the model itself goes. The keys of the
accepted path are committed, on whatever devices their places in the cache lie; those of the others
were never written.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Key

from treeattn.idea.arrays import Array
from treeattn.llama import inputs
from treeattn.llama.model import Llama
from treeattn.llama.speculation.budget import Budget
from treeattn.llama.speculation.by_name import make_draft
from treeattn.llama.speculation.loop import Loop, Step
from treeattn.llama.text import stream


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    tokens: the new ids, as the prompts came: a list, or a list of lists
    steps:  model calls after prefill; trace: what happened in each of them
    """

    tokens: list[int] | list[list[int]]
    steps: int
    trace: tuple[Step, ...]

    @property
    def tokens_a_step(self) -> float:
        """New tokens for each text and step, over all steps that it took part in; 1 without any."""
        taken = sum(n > 0 for step in self.trace for n in step.new)
        return sum(sum(step.new) for step in self.trace) / taken if taken else 1.0


def generate(
    model: Llama,
    prompt_ids: inputs.Prompt | inputs.Prompts,
    *,
    max_new_tokens: int,
    draft: str | object | None = None,
    budget: int | Budget | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: Key[Array, ""] | None = None,
    stop: Sequence[int] | None = None,
    capacity: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Generation:
    """Continue a prompt, a list of token ids, or several, a list of such lists of any lengths.
    Arrays of them will do, too, NumPy's or JAX's.

    draft:  None (plain decoding), one of `DRAFTS` by name, or an object that proposes and
            observes (`Draft`)
    budget: None: adaptive, up to 16 tokens a call (`Budget`); a number: all that is drafted, up to
            so many; or a Budget. It counts the tokens of a call, so the certain one, too: a budget
            of 16 asks the draft for 15. What is drawn at random (`Drawn`) is verified whole
    The others are as in `stream`, and so is the text, for every draft: greedy, token for token;
    sampling, with the same key, draw for draw, since each position has its own key. (Candidates
    that were drawn at random, `Drawn`, are accepted by rejection: then the text is another, the
    same one for the same key, and over keys it has the same distribution.) A call of 16 tokens may
    round otherwise than one of 1: at a near tie, within the rounding of the weights' dtype, the
    texts may part, both being the model's.

    Candidates that go on beyond max_new_tokens, and so beyond the room in the cache, are cut off.

    Raises ValueError as `stream` does, for a draft of another vocabulary before any work, and
    ValueError or TypeError for a proposal that is none (`draft_candidate_tokens`).
    """
    single = _is_one_text(prompt_ids)
    prompts = inputs.prompt_lists([prompt_ids] if single else prompt_ids)
    tokens, trace = [[] for _ in prompts], []
    for new, step in _run(
        model, prompts, draft, budget, max_new_tokens=max_new_tokens, temperature=temperature,
        top_p=top_p, key=key, stop=stop, capacity=capacity, progress=progress,
    ):  # fmt: skip
        for text, ids in zip(tokens, new, strict=True):
            text += ids
        trace += [] if step is None else [step]
    return Generation(tokens[0] if single else tokens, len(trace), tuple(trace))


def _is_one_text(prompt_ids) -> bool:
    """Whether these are token ids, and not lists of them."""
    try:
        return len(prompt_ids) > 0 and np.ndim(prompt_ids[0]) == 0
    except (TypeError, KeyError, ValueError):  # `inputs.prompt_lists` says what is wrong
        return False


def speculate(
    model: Llama, prompts: inputs.Prompts, *, draft="suffix", budget=None, **options
) -> Iterator[list[list[int]]]:
    """`stream`, several tokens at a time: for each call of the model the new ids of each prompt.

    draft, budget: as in `generate`; options: as in `stream`. A text that is over gets []. The
    first list comes from prefill. One after the other, they are the text that `stream` gives.
    """
    return (new for new, _ in _run(model, prompts, draft, budget, **options))


def speculate_text(
    model: Llama, prompt: inputs.Prompt, *, draft="suffix", budget=None, **options
) -> Iterator[tuple[str, Step | None]]:
    """The text that continues one prompt, in pieces as they come, and the steps that they came by
    (None for the first, from prefill); arguments as in `speculate`."""
    if model.tokenizer is None:
        raise ValueError("model: this checkpoint has no tokenizer")
    return _pieces(model.tokenizer.decode, _run(model, [prompt], draft, budget, **options))


def _pieces(decode: Callable[[list[int]], str], calls):
    ids, shown = [], 0
    for (new,), step in calls:
        ids += new
        whole = decode(ids)
        text = whole.rstrip("\ufffd")  # half of a character: wait for the rest
        yield text[shown:], step
        shown = max(shown, len(text))
    if shown < len(whole):
        yield whole[shown:], None


def _run(model, prompts, draft, budget, **options) -> Iterator[tuple[list[list[int]], Step | None]]:
    """For each call of the model, the new ids of each prompt, and how they came about."""
    prompts = inputs.prompt_lists(prompts)
    plain = stream(model, prompts, **options)  # has checked the options, and done nothing yet
    draft = make_draft(draft, model)
    if draft is None:
        return _plain(plain)
    if not isinstance(budget, Budget):
        budget = Budget() if budget is None else Budget(budget, adaptive=False)
    return _speculative(Loop(model, prompts, draft, budget, **options))


def _plain(tokens: Iterator[list[int | None]]):
    for i, ids in enumerate(tokens):
        new = [[] if token is None else [token] for token in ids]
        ones, none = tuple(map(len, new)), (0,) * len(new)
        yield new, Step(1, ones, ones, none, none, ones) if i else None


def _speculative(loop: Loop):
    yield loop.first(), None
    while not loop.over.all():
        yield loop.step()
