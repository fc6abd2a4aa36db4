"""Text from a model: `stream`, `generate` and `chat`, with or without a draft."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Key

from treeattn.checks import Array, integer
from treeattn_llama import calls
from treeattn_llama.calls import Ids
from treeattn_llama.lookup import LookupDraft
from treeattn_llama.model import Llama
from treeattn_llama.sampling import Sampling
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

    Returns an iterator that yields a list for each call, with a list of the new ids of each prompt.
    The first call reads the prompts, and gives each text one token: [[5], [17]] for two prompts.
    Without a draft every later call does so, too. With a draft a call may confirm several tokens:
    [[5, 8, 2], [17]]. A text that is over gets []. The iterator's `steps` counts the calls after
    the first.

    prompts:     a text, a list of token ids, or a list of texts and lists of ids
    draft:       None for plain decoding, "lookup" for `LookupDraft`, or an object of yours with
                 the methods of `Draft`
    budget:      the most tokens of one call, the certain token included: with 8 the draft is asked
                 for 7. A call with fewer tokens is cheaper, because there are programs for 1, 4,
                 16, … tokens, and for the budget itself.
    temperature: 0 is greedy. Above 0 tokens are drawn, with a `seed` or a JAX `key`.
    top_k:       draw from the `top_k` likeliest tokens
    top_p:       draw from the fewest tokens whose probabilities reach `top_p`
    stop:        strings or token ids that end a text, and stay in it. A string may be a special
                 token, but not hold one beside other text. Ids replace those of the checkpoint;
                 with [] nothing ends a text but max_new_tokens.
    capacity:    tokens of the cache. None is enough for this call, rounded up so that texts of
                 other lengths run the same compiled programs.

    The text is the same for every draft and budget, greedy or drawn with the same key. There is one
    exception: calls of 1 and of 16 tokens round differently, so where two tokens are equally likely
    up to the rounding of the weights' dtype, the texts may differ.

    Raises ValueError or TypeError for a wrong argument, before any work, for example for a capacity
    that is too small for the longest prompt and max_new_tokens; and in a later call for a wrong
    proposal of the draft.
    """
    prompts = prompt_ids(model, prompts)
    calls.check_batch("prompts", model.shards, len(prompts))
    most = integer("max_new_tokens", max_new_tokens, 1, np.iinfo(np.int32).max)
    needed = max(map(len, prompts)) + most - 1
    if capacity is None:
        capacity = _rounded(needed, model.config.context)
    capacity = integer("capacity", capacity, 1)
    if needed > capacity:
        raise ValueError(
            f"capacity: the longest prompt and max_new_tokens need {needed}, got {capacity}"
        )
    return Writer(
        model,
        prompts,
        ending_of(model, most, stop),
        Sampling(temperature, top_k, top_p, key, seed),
        capacity,
        make_draft(draft),
        integer("budget", budget, 1),
    )


class Generation(NamedTuple):
    """The result of `generate`. text and tokens are lists if there were several prompts.

    text:   the text after the prompt, without a string that stopped it; None without a tokenizer
    tokens: its ids
    steps:  the number of calls of the model after that for the prompts
    """

    text: str | list[str | None] | None
    tokens: list[int] | list[list[int]]
    steps: int


def generate(model: Llama, prompt: Prompt | Sequence[Prompt], **options) -> Generation:
    """Continue a prompt (a text, or a list or array of token ids), or a list of several.

    options: those of `stream`, whose tokens are collected
    """
    calls = stream(model, prompt, **options)
    for _ in calls:
        pass
    whole = list(zip(calls.state.texts, calls.begin.tolist(), strict=True))
    tokens = [text[n:] for text, n in whole]
    texts = [calls.ending.text(text, n) for text, n in whole]
    if _is_one(prompt):
        (texts,), (tokens,) = texts, tokens
    return Generation(texts, tokens, calls.steps)


def chat(model: Llama, messages: str | list[dict[str, str]], **options) -> Iterator[str]:
    """The model's answer, piece by piece.

    messages: the user's text, or a list of {"role": …, "content": …} for the checkpoint's template
    options:  those of `stream`. A string that stops the answer is part of it.

    The template is the checkpoint's own program. Its sandbox keeps your process's secrets, but
    bounds neither its time nor its memory (`Llama.load`).
    """
    tokenizer = tokenizer_of(model)
    prompt = tokenizer.chat(messages)
    calls = stream(model, [prompt], **options)
    return filter(None, pieces(tokenizer, prompt, calls))


def pieces(tokenizer: Tokenizer, prompt: Ids, calls: Iterable[list[list[int]]]) -> Iterator[str]:
    """The text of a prompt's new ids, a piece for each call of `stream`, which may be "".

    Bytes of an incomplete character wait for the next call; a last piece has those that remain.
    """
    ids = []
    shown = 0
    whole = ""
    for (new,) in calls:
        ids += new
        whole = tokenizer.decode(ids, prompt)
        text = whole.rstrip("\ufffd")  # an incomplete character
        yield text[shown:]
        shown = max(shown, len(text))
    yield whole[shown:]


def prompt_ids(model: Llama, prompt: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """The ids of each prompt."""
    prompts = [prompt] if _is_one(prompt) else prompt
    if isinstance(prompts, list | tuple):
        prompts = [tokenizer_of(model).encode(x) if isinstance(x, str) else x for x in prompts]
    return calls.check_prompts(prompts, model.config.vocabulary)


def _is_one(prompt) -> bool:
    """Whether `prompt` is a text or the ids of one, not a list of several prompts."""
    if isinstance(prompt, str):
        return True
    try:
        return len(prompt) > 0 and not isinstance(prompt[0], str) and np.ndim(prompt[0]) == 0
    except (TypeError, KeyError, ValueError):  # `check_prompts` raises the error
        return False


def tokenizer_of(model: Llama) -> Tokenizer:
    """The checkpoint's tokenizer. Raises ValueError if it has none."""
    if model.tokenizer is None:
        raise ValueError(
            "model: this checkpoint has no tokenizer (tokenizer.json, or a GGUF file's): convert "
            "tokenizer.model with transformers, or pass lists of token ids"
        )
    return model.tokenizer


def make_draft(draft: str | Draft | None) -> Draft | None:
    """The draft of that name, or the object itself. Raises TypeError for an unknown name, and for
    an object without a draft's methods."""
    if draft == "lookup":
        return LookupDraft()
    if draft is None or (isinstance(draft, Draft) and not isinstance(draft, type)):
        return draft
    raise TypeError(
        "draft: expected None, 'lookup', or an object with methods observe and propose, "
        f"got {draft!r:.40}"
    )


def _rounded(tokens: int, context: int) -> int:
    """The capacity of a cache for so many tokens: 130 tokens get 256, 3,000 get 3,072.

    It is a power of two from 128 to 1,024, and above that a multiple of a quarter of the next lower
    power of two; at most `context`, unless the tokens need more. Each capacity compiles programs of
    its own, so few capacities serve texts of all lengths. Unused slots of a cache are not read.
    """
    power = 1 << (tokens - 1).bit_length()
    step = power if power <= 1024 else power // 8
    return max(tokens, min(max(128, step * -(-tokens // step)), context))


class Ending(NamedTuple):
    """The end of a text: a number of tokens, one of some ids, or one of some strings."""

    most: int
    ids: frozenset[int]
    strings: list[str]
    tokenizer: Tokenizer | None

    def at(self, text: list[int], begin: int, before: int) -> int | None:
        """The number of ids up to the end of a text whose prompt has `begin` ids, looked for after
        the first `before` ids; None if the text goes on."""
        for n in range(before + 1, len(text) + 1):
            if n - begin == self.most or text[n - 1] in self.ids:
                return n
            if self.strings:
                new = self.tokenizer.decode(text[begin:n], text[:begin])
                if any(x in new for x in self.strings):
                    return n
        return None

    def text(self, ids: list[int], begin: int) -> str | None:
        """The text after a prompt of `begin` ids, up to a string that ends it; None without a
        tokenizer."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(ids[begin:], ids[:begin])
        return min((text.partition(x)[0] for x in self.strings), key=len, default=text)


def ending_of(model: Llama, most: int, stop: Stop | None) -> Ending:
    """The `Ending` for the caller's max_new_tokens and stop."""
    several = isinstance(stop, list | tuple) or np.ndim(stop) > 0
    given = [] if stop is None else list(stop) if several else [stop]
    strings = [x for x in given if isinstance(x, str)]
    if "" in strings:
        raise ValueError("stop: expected strings that are not empty")
    last = model.config.vocabulary - 1
    ids = [integer("stop", x, 0, last) for x in given if not isinstance(x, str)]
    tokenizer = tokenizer_of(model) if strings else model.tokenizer
    if tokenizer is not None and (stop is None or (strings and not ids)):
        ids = tokenizer.stop
    # A decoded text has no special tokens, so one that is to stop it is looked for by its id.
    added = tokenizer.backend.get_added_tokens_decoder() if strings else {}
    special = {token.content: i for i, token in added.items() if token.special}
    if mixed := [x for x in strings for token in special if token in x and token != x]:
        raise ValueError(
            f"stop: expected special tokens without other text beside them, got {mixed[0]!r:.40}"
        )
    ids = {*ids, *(special[x] for x in strings if x in special)}
    return Ending(most, frozenset(ids), [x for x in strings if x not in special], tokenizer)
