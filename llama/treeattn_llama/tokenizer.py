"""Text to token ids and back, by a checkpoint's tokenizer; the one in a directory's files."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from treeattn.checks import integer
from treeattn_llama.arguments import list_names, named, text
from treeattn_llama.chat_template import render_chat


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer, with its rules for the ends of texts and for chats.

    stop:          the ids after which a text is over
    start:         the id that begins every text, or None
    chat_start:    the id that begins every chat, or None: a directory's template writes it
    chat_template: a Jinja template, or None
    names:         the tokens that a template knows by name: bos_token, …
    """

    backend: tokenizers.Tokenizer
    stop: frozenset[int] = frozenset()
    start: int | None = None
    chat_start: int | None = None
    chat_template: str | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.chat_template is not None:
            text("chat_template", self.chat_template)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, prompt: str, chat: bool = False) -> list[int]:
        """The ids of a text, after the starting id if there is one. Special tokens in the text
        become their ids.

        chat: whether a chat template wrote the text

        Raises TypeError if `prompt` is not a text, and ValueError if it is not Unicode.
        """
        text("prompt", prompt)
        with named("prompt", "the checkpoint's tokenizer says"):
            ids = self.backend.encode(prompt, add_special_tokens=False).ids
        start = self.chat_start if chat else self.start
        return ids if start in (None, *ids[:1]) else [start, *ids]

    def decode(self, ids: list[int], after: Sequence[int] = ()) -> str:
        """The text of `ids`, without special tokens.

        after: the ids before them. Some tokenizers take a space from the beginning of a text; with
               a token before it, the space stays.
        """
        decode = self.backend.decode
        with named("ids", "the checkpoint's tokenizer says"):
            ids = [int(i) for i in ids]
            for i in reversed(after):
                before = decode([i])
                if before and "\ufffd" not in before:  # neither special nor a part of a character
                    return decode([i, *ids])[len(before) :]
            return decode(ids)

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """The ids that ask the model to answer.

        messages: the user's text, or a list of {"role": …, "content": …}

        Raises ValueError if the checkpoint has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template (or none named default)")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        roles = {"role", "content"}
        fits = isinstance(messages, list | tuple) and all(
            isinstance(message, dict) and roles <= message.keys() for message in messages
        )
        if not fits:
            raise ValueError(
                'messages: expected a text or a list of dicts with "role" and "content", '
                f"got {messages!r:.80}"
            )
        with named("messages", "the checkpoint's chat template says"):
            prompt = render_chat(self.chat_template, {"messages": messages} | self.names)
        return self.encode(prompt, chat=True)


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if the file is missing or holds none."""
    if not path.exists():
        raise ValueError(f"{path.parent}: no {path.name} in the directory")
    with named(path, "not readable as JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, got {found!r:.40}")
    return found


def from_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory, or None if there is no tokenizer.json.

    Raises ValueError, with the names of directory and file, if they do not describe a tokenizer.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    with named(file, "not readable"):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()  # these two are settings of training batches
        backend.no_padding()
        start = _starting_id(backend)

    def fields(name):
        return read_json(path / name) if (path / name).exists() else {}

    about = fields("special_tokens_map.json") | fields("tokenizer_config.json")
    older = fields("added_tokens.json")

    def content(x):  # a text, or an object
        return x["content"] if isinstance(x, dict) else x

    with named(path, "tokenizer_config.json"):
        names = {
            name: content(x)
            for name, x in about.items()
            if name.endswith("_token") and isinstance(x, str | dict)
        }
        more = about.get("extra_special_tokens") or about.get("additional_special_tokens") or []
        if isinstance(more, dict):  # tokens by the names that a template knows
            names |= {name: content(x) for name, x in more.items()}
            more = []
        listed = about.get("added_tokens_decoder", {}).values()
        beside = {*names.values(), *older, *map(content, [*listed, *more])}
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if missing := beside - added:
            raise ValueError(
                f"not among the added tokens of tokenizer.json: {list_names(missing)}; save the "
                "tokenizer anew with transformers, which adds them"
            )
        # As in transformers, config.json does not count beside a generation_config.json.
        file = path / "generation_config.json"
        file = file if file.exists() else path / "config.json"
        ends = fields(file.name).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        with named(file):
            stop = [integer("eos_token_id", i, 0) for i in ends if i is not None]
        template = about.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        file = path / "chat_template.jinja"
        if file.exists():
            with named(file):
                template = file.read_text(encoding="utf-8")
        return Tokenizer(backend, frozenset(stop), start, None, template, names)


def _starting_id(backend: tokenizers.Tokenizer) -> int | None:
    """The token that tokenizer.json's post-processor puts before every text, or None."""
    found = backend.encode("a", add_special_tokens=True)
    added = found.special_tokens_mask
    before = added.index(0) if 0 in added else min(len(added), 1)
    if before > 1:
        raise ValueError(f"expected at most one token before a text, got {found.ids[:before]}")
    return found.ids[0] if before else None
