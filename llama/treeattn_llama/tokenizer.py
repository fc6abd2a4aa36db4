"""Text to token ids and back, as a checkpoint says; from the files of a directory."""

import dataclasses
import json
from pathlib import Path

import tokenizers

from treeattn_llama.arguments import integer, text
from treeattn_llama.chat_template import render_chat
from treeattn_llama.guard import named


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes, and knows what a checkpoint says about ends and chats.

    stop:          ids after which a text is over
    start:         the id that begins every text, or None
    chat_template: a Jinja template, or None
    bos, eos:      the tokens that begin and end a text, as templates write them
    """

    backend: tokenizers.Tokenizer
    stop: frozenset[int] = frozenset()
    start: int | None = None
    chat_template: str | None = None
    bos: str = ""
    eos: str = ""

    def __post_init__(self):
        for name in ("bos", "eos"):
            text(f"{name}_token", getattr(self, name))
        if self.chat_template is not None:
            text("chat_template", self.chat_template)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, prompt: str) -> list[int]:
        """The ids of a text, after the starting id if there is one. Special tokens in it count.

        Raises TypeError for what is no text, ValueError for half a character.
        """
        text("prompt", prompt)
        with named("prompt", "the checkpoint's tokenizer says"):
            ids = self.backend.encode(prompt, add_special_tokens=False).ids
        return ids if self.start is None or ids[:1] == [self.start] else [self.start, *ids]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        with named("ids", "the checkpoint's tokenizer says"):
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """The ids that ask the model to answer.

        messages: what the user says, or a list of {"role": …, "content": …}, as the checkpoint's
        template wants them. Raises ValueError when the checkpoint has no template.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template (or none named default)")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list | tuple):
            raise TypeError(f"messages: expected a text or a list, got {messages!r:.40}")
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                expected = 'dicts with "role" and "content"'
                raise ValueError(f"messages: expected {expected}, got {message!r}")
        values = {"messages": messages, "bos_token": self.bos, "eos_token": self.eos}
        with named("messages", "the checkpoint's chat template says"):
            prompt = render_chat(self.chat_template, values)
        return self.encode(prompt)


def read_json(path: Path) -> dict:
    """What a JSON file holds, or a ValueError where there is none to read."""
    if not path.exists():
        raise ValueError(f"{path.parent}: no {path.name} in the directory")
    with named(path, "not readable as JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, got {found!r:.40}")
    return found


def from_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory; None when it has no tokenizer.json.

    Raises a ValueError that names the directory and the file for whatever is no tokenizer.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    with named(file, "not readable"):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()  # how the texts of a training batch were cut and filled up
        backend.no_padding()
        start = _starting_id(backend)
    with named(path, "tokenizer_config.json"):
        return _from_fields(backend, start, path)


def _starting_id(backend: tokenizers.Tokenizer) -> int | None:
    """The token that tokenizer.json's post-processor puts before every text, or None."""
    found = backend.encode("a", add_special_tokens=True)
    added = found.special_tokens_mask
    before = added.index(0) if 0 in added else min(len(added), 1)
    if before > 1:
        raise ValueError(f"expected at most one token before a text, got {found.ids[:before]}")
    return found.ids[0] if before else None


def _from_fields(backend: tokenizers.Tokenizer, start: int | None, path: Path) -> Tokenizer:
    """What the files beside tokenizer.json say of the same tokens."""

    def fields(name):
        return read_json(path / name) if (path / name).exists() else {}

    about = fields("tokenizer_config.json")
    config = fields("config.json")

    def ends():
        for name in ("generation_config.json", "config.json"):
            found = fields(name).get("eos_token_id")
            if found is not None:
                found = found if isinstance(found, list) else [found]
                with named(path / name):
                    return frozenset(integer("eos_token_id", i, 0) for i in found)
        return frozenset()

    def token(name):  # a string, a dict that describes it, or an id in config.json
        found = about.get(f"{name}_token")
        if found is None and config.get(f"{name}_token_id") is not None:
            found = _token_of(backend, config[f"{name}_token_id"])
        found = found["content"] if isinstance(found, dict) else found
        return "" if found is None else found

    template = about.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    file = path / "chat_template.jinja"
    if file.exists():
        with named(file):
            template = file.read_text(encoding="utf-8")
    return Tokenizer(
        backend,
        stop=ends(),
        start=start,
        chat_template=template,
        bos=token("bos"),
        eos=token("eos"),
    )


def _token_of(backend: tokenizers.Tokenizer, i) -> str | None:
    """The token of that number, None where there is none, or several numbers."""
    return backend.id_to_token(i) if isinstance(i, int) and 0 <= i < 2**32 else None
