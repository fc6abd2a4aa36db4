"""Text from a model: streaming, generating, chatting; plainly, or with the help of a draft."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Key

from treeattn_llama import inputs
from treeattn_llama.arguments import Array, integer
from treeattn_llama.inputs import Ids
from treeattn_llama.lookup import LookupDraft
from treeattn_llama.model import Llama
from treeattn_llama.sampling import sampling_of
from treeattn_llama.speculate import Draft, Writer
from treeattn_llama.tokenizer import Tokenizer

Prompt = str | Ids
Stop = str | SupportsIndex | Sequence[str | SupportsIndex]


def stream(
    model: Llama,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    draft: str | Draft | None = None,
    budget: int = 8,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    key: Key[Array, ""] | None = None,
    stop: Stop | None = None,
    capacity: int | None = None,
) -> Writer:
    """Continue a prompt, or several of any lengths, a call of the model at a time.

    Yields for each call the new ids of each prompt, a list of lists: the first call reads the
    prompts, and gives each text one token; without a draft, so does every call after it, [[5],
    [17]] for two prompts; with one, a call may confirm several, [[5, 8, 2], [17]]. A text that is
    over gets []. What is returned counts its calls after the prompts, too: `steps`.

    prompts:     a text, a list of token ids, or a list of either
    draft:       None (plain decoding); "lookup" (`LookupDraft`); or an object of yours that
                 observes and proposes (`Draft`)
    budget:      tokens of one call, the certain one included: a budget of 8 asks the draft for 7.
                 A call costs what was drafted: programs are compiled for 1, 4, 16, … tokens, and
                 for the budget itself
    temperature: 0 is greedy; above it tokens are drawn, with a `seed` or a `key` of JAX's
    top_k:       draws come from so many likeliest tokens
    top_p:       draws come from the fewest tokens whose probabilities reach this
    stop:        what ends a text: strings, at whose last token it ends; or token ids, which take
                 the place of the checkpoint's own, and are yielded as well ([]: nothing ends it)
    capacity:    of the cache, in tokens; by default what all of this needs, rounded up so that
                 texts of other lengths run the same compiled programs

    The text is the same for every draft and budget: greedy, token for token; sampling, with the
    same key, draw for draw. A call of 16 tokens may round otherwise than one of 1: at a near tie,
    within the rounding of the weights' dtype, the texts may part, both being the model's.

    Raises, before any work, ValueError or TypeError for a wrong argument, such as a capacity that
    is less than the longest prompt and max_new_tokens need; later for a proposal that is none.
    """
    prompts = prompt_ids(model, prompts)
    inputs.check_rows("prompts", model.layout, len(prompts))
    most = integer("max_new_tokens", max_new_tokens, 1, np.iinfo(np.int32).max)
    needed = max(map(len, prompts)) + most - 1
    context = model.config.context
    capacity = _rounded(needed, context) if capacity is None else integer("capacity", capacity, 1)
    if needed > capacity:
        raise ValueError(
            f"capacity: the longest prompt and max_new_tokens need {needed}, got {capacity}"
        )
    return Writer(
        model,
        prompts,
        ending_of(model, most, stop),
        sampling_of(temperature, top_k, top_p, key, seed),
        inputs.check_capacity(capacity, context),
        make_draft(draft),
        integer("budget", budget, 1),
    )


class Generation(NamedTuple):
    """What `generate` returns; lists for several prompts.

    text:   what was written, without a string that stopped it; None without a tokenizer
    tokens: the new ids
    steps:  calls of the model after the prompts
    """

    text: str | list[str | None] | None
    tokens: list[int] | list[list[int]]
    steps: int


def generate(model: Llama, prompt: Prompt | Sequence[Prompt], **options) -> Generation:
    """Continue a prompt (a text, or a list or array of token ids), or several (a list of either).

    Collects what `stream` yields, and takes the same options.
    """
    prompts = prompt_ids(model, prompt)
    calls = stream(model, prompts, **options)
    tokens = [[] for _ in prompts]
    for new in calls:
        for text, ids in zip(tokens, new, strict=True):
            text += ids
    texts = [calls.ending.text(ids) for ids in tokens]
    if _is_one(prompt):
        (texts,), (tokens,) = texts, tokens
    return Generation(texts, tokens, calls.steps)


def chat(model: Llama, messages: str | list[dict[str, str]], **options) -> Iterator[str]:
    """The model's answer, in pieces as they come.

    messages: what the user says, or a list of {"role": …, "content": …} for the checkpoint's
    template; `options` as in `stream`. A string that stops the answer has been told by then.
    """
    tokenizer = tokenizer_of(model)
    calls = stream(model, [tokenizer.chat(messages)], **options)
    return filter(None, pieces(tokenizer, calls))


def pieces(tokenizer: Tokenizer, calls: Iterable[list[list[int]]]) -> Iterator[str]:
    """The text of one prompt's new ids, as `stream` yields them: a piece for each call, perhaps "";
    at the end what was half of a character."""
    ids = []
    shown = 0
    whole = ""
    for (new,) in calls:
        ids += new
        whole = tokenizer.decode(ids)
        text = whole.rstrip("\ufffd")  # half of a character: wait for the rest
        yield text[shown:]
        shown = max(shown, len(text))
    yield whole[shown:]


def prompt_ids(model: Llama, prompt: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """The ids of each prompt, of one or of several."""
    prompts = [prompt] if _is_one(prompt) else prompt
    if isinstance(prompts, list | tuple):
        prompts = [_encode(model, x) if isinstance(x, str) else x for x in prompts]
    return inputs.check_prompts(prompts, model.config.vocabulary)


def _encode(model: Llama, text: str) -> list[int]:
    ids = tokenizer_of(model).encode(text)
    if not ids:
        raise ValueError(f"prompt: expected a text of at least one token, got {text!r:.40}")
    return ids


def _is_one(prompt) -> bool:
    """Whether this is one prompt, a text or token ids, and not a list of prompts."""
    if isinstance(prompt, str):
        return True
    try:
        return len(prompt) > 0 and not isinstance(prompt[0], str) and np.ndim(prompt[0]) == 0
    except (TypeError, KeyError, ValueError):  # `check_prompts` says what is wrong
        return False


def tokenizer_of(model: Llama) -> Tokenizer:
    """The checkpoint's tokenizer, or a ValueError where it has none."""
    if model.tokenizer is None:
        raise ValueError("model: this checkpoint has no tokenizer: texts are lists of token ids")
    return model.tokenizer


def make_draft(draft: str | Draft | None) -> Draft | None:
    """The draft of that name, or the object itself; an error for what is neither."""
    if isinstance(draft, type):
        raise TypeError(f"draft: expected an object, got a class: pass {draft.__name__}()")
    if draft is None or isinstance(draft, Draft):
        return draft
    if draft == "lookup":
        return LookupDraft()
    expected = "None, 'lookup', or an object with methods observe and propose"
    kind = ValueError if isinstance(draft, str) else TypeError
    raise kind(f"draft: expected {expected}, got {draft!r:.40}")


def _rounded(tokens: int, context: int) -> int:
    """A cache's room for so many tokens, or more: each room compiles a step's programs anew, and a
    few rooms serve texts of all lengths. Room that is not in use is not read.

    A power of two from 128 to 1,024, and above that a multiple of a quarter of the next lower power
    of two; no more than the model's `context`, unless that is asked for: 130 tokens get 256, 3,000
    get 3,072.
    """
    power = 1 << (tokens - 1).bit_length()
    step = power if power <= 1024 else power // 8
    return max(tokens, min(max(128, step * -(-tokens // step)), context))


class Ending(NamedTuple):
    """What ends a text: its number of tokens, one of some ids, or one of some strings in it."""

    most: int
    ids: frozenset[int]
    strings: list[str]
    tokenizer: Tokenizer | None

    def at(self, new: list[int], before: int) -> int | None:
        """How many of a text's new ids belong to it, if it ends within those after the first
        `before`; None while it goes on."""
        for n in range(before + 1, len(new) + 1):
            if n == self.most or new[n - 1] in self.ids:
                return n
            if self.strings and any(x in self.tokenizer.decode(new[:n]) for x in self.strings):
                return n
        return None

    def text(self, ids: list[int]) -> str | None:
        """What the ids say, up to a string that ends it; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(ids)
        found = [text.find(string) for string in self.strings]
        return text[: min((at for at in found if at >= 0), default=len(text))]


def ending_of(model: Llama, most: int, stop: Stop | None) -> Ending:
    """The `Ending` that a caller has asked for."""
    several = isinstance(stop, list | tuple | set | frozenset) or np.ndim(stop) > 0
    given = [] if stop is None else list(stop) if several else [stop]
    strings = [x for x in given if isinstance(x, str)]
    if "" in strings:
        raise ValueError("stop: expected strings that are not empty")
    last = model.config.vocabulary - 1
    ids = [integer("stop", x, 0, last) for x in given if not isinstance(x, str)]
    tokenizer = tokenizer_of(model) if strings else model.tokenizer
    own = stop is None or (strings and not ids)
    if own and tokenizer is not None:
        ids = tokenizer.stop
    return Ending(most, frozenset(ids), strings, tokenizer)
