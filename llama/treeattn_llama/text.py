"""Text from a model: streaming, generating, chatting; plainly, or with the help of a draft.

All three run one loop (`treeattn_llama.speculation.loop`): plain decoding is the loop without a
draft, whose calls of the model have one token for each text.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Key

from treeattn.idea.arrays import Array
from treeattn_llama.inputs import Prompt, Prompts, prompt_lists
from treeattn_llama.model import Llama
from treeattn_llama.reading.tokenizer import Tokenizer
from treeattn_llama.sampling import Sampling
from treeattn_llama.speculation.budget import Budget
from treeattn_llama.speculation.by_name import make_draft
from treeattn_llama.speculation.certificate import Certificate
from treeattn_llama.speculation.loop import Loop, Task
from treeattn_llama.speculation.verify import Step


def stream(
    model: Llama,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    draft: str | object | None = None,
    budget: int | Budget | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    key: Key[Array, ""] | None = None,
    stop: Sequence[int] | None = None,
    capacity: int | None = None,
    certify: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[list[list[int]]]:
    """Continue the prompts (lists of token ids, of any lengths), a call of the model at a time.

    Yields for each call the new ids of each prompt, a list of lists: the first call is prefill,
    which gives each text one token; without a draft, so does every call after it, [[5], [17]] for
    two prompts; with one, a call may confirm several, [[5, 8, 2], [17]]. A text that is over gets
    []. It is over after `max_new_tokens`, or after an id in `stop`, which is yielded as well. What
    is returned has a `trace`, too: a list with a `Step` for each call after prefill, so far.

    draft:       None (plain decoding), one of `speculation.DRAFTS` by name ("suffix", "ngram",
                 "recycling", "layers", …), or an object that proposes and observes (`Draft`)
    budget:      tokens of one call, the certain one included: a budget of 16 asks the draft for 15.
                 None: adaptive, up to 16 (`Budget`), by the times that the model's steps took in
                 earlier calls, too; a number: all that is drafted, up to so many; or a Budget. What
                 is drawn at random (`Drawn`) is verified whole
    temperature: 0 is greedy; above it tokens are drawn with `key` (`Sampling`), each new token with
                 a key of its own
    top_p:       draws come from the fewest tokens whose probabilities reach this
    stop:        ids after which a text is over; by default the checkpoint's
    capacity:    of the cache, in tokens; by default what all of this needs, rounded up so that
                 texts of other lengths run the same compiled programs
    certify:     keep a `Certificate` for each `Step`: the tokens a second that its tree promised,
                 and those that came, as a list `certificates` beside the trace
    progress:    called during prefill with the number of tokens done. On one device, prompts that
                 are equal are read once

    The text is the same for every draft: greedy, token for token; sampling, with the same key,
    draw for draw. (Candidates that were drawn at random, `Drawn`, are accepted by rejection: then
    the text is another, the same one for the same key, and over keys it has the same distribution.)
    "recurrent" guesses with the noise that the model will draw with: that changes no token, and at
    a temperature more of them are guessed.
    A call of 16 tokens may round otherwise than one of 1: at a near tie, within the rounding of the
    weights' dtype, the texts may part, both being the model's.

    Raises, before any work, ValueError or TypeError for a wrong argument, such as a capacity that
    is less than the longest prompt and max_new_tokens need, or a draft of another vocabulary; later
    for a proposal that is none (`draft_candidate_tokens`).
    """
    task = Task.checked(
        model,
        prompts,
        sampling=Sampling(temperature, top_p, key),
        max_new_tokens=max_new_tokens,
        stop=stop,
        capacity=capacity,
        progress=progress,
    )
    if budget is not None and not isinstance(budget, Budget):
        budget = Budget(budget, adaptive=False)
    return Loop(model, task, make_draft(draft, model), budget, certify)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    tokens: the new ids, as the prompts came: a list, or a list of lists
    steps:  model calls after prefill; trace: what happened in each of them
    certificates: what each of them promised, if that was asked for
    """

    tokens: list[int] | list[list[int]]
    steps: int
    trace: tuple[Step, ...]
    certificates: tuple[Certificate, ...] = ()

    @property
    def tokens_a_step(self) -> float:
        """New tokens for each text and step, over all steps that it took part in; 1 without any."""
        taken = sum(n > 0 for step in self.trace for n in step.new)
        return sum(sum(step.new) for step in self.trace) / taken if taken else 1.0


def generate(
    model: Llama, prompt_ids: Prompt | Prompts, *, max_new_tokens: int, draft=None, **options
) -> Generation:
    """Continue a prompt, a list of token ids, or several, a list of such lists of any lengths.
    Arrays of them will do, too, NumPy's or JAX's.

    draft, options and errors: as in `stream`, all of which is collected
    """
    single = _is_one_text(prompt_ids)
    prompts = prompt_lists([prompt_ids] if single else prompt_ids)
    calls = stream(model, prompts, max_new_tokens=max_new_tokens, draft=draft, **options)
    tokens = [[] for _ in prompts]
    for new in calls:
        for text, ids in zip(tokens, new, strict=True):
            text += ids
    told = tuple(calls.trace), tuple(calls.certificates)
    return Generation(tokens[0] if single else tokens, len(calls.trace), *told)


def _is_one_text(prompt_ids) -> bool:
    """Whether these are token ids, and not lists of them."""
    try:
        return len(prompt_ids) > 0 and np.ndim(prompt_ids[0]) == 0
    except (TypeError, KeyError, ValueError):  # `prompt_lists` says what is wrong
        return False


def chat(model: Llama, messages: str | list[dict[str, str]], **options) -> Iterator[str]:
    """The model's answer, in pieces as they come.

    messages: what the user says, or a list of {"role": …, "content": …} for the checkpoint's
    template; `options`, of which max_new_tokens is needed, as in `stream`.
    """
    tokenizer = tokenizer_of(model)
    calls = stream(model, [tokenizer.chat(messages)], **options)
    return filter(None, pieces(tokenizer, calls))


def pieces(tokenizer: Tokenizer, calls: Iterable[list[list[int]]]) -> Iterator[str]:
    """The text of one prompt's new ids, as `stream` yields them: a piece for each call, perhaps "";
    at the end what was half of a character."""
    ids = []
    shown = 0
    for (new,) in calls:
        ids += new
        whole = tokenizer.decode(ids)
        text = whole.rstrip("\ufffd")  # half of a character: wait for the rest
        yield text[shown:]
        shown = max(shown, len(text))
    yield whole[shown:]


def tokenizer_of(model: Llama) -> Tokenizer:
    """The checkpoint's tokenizer, or a ValueError where it has none."""
    if model.tokenizer is None:
        raise ValueError("model: this checkpoint has no tokenizer")
    return model.tokenizer
