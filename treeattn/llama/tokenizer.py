"""Text to token ids and back, as a checkpoint says: from tokenizer.json, or rebuilt from GGUF."""

import dataclasses
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

# How a text is cut before byte pairs are merged, by the name that GGUF files give it.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(split=None):
    """Byte-level pre-tokenizer, after `split`, or with GPT-2's own pattern when there is none."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is not LLAMA_3)
    if split is None:
        return byte_level
    if split is LLAMA_3:
        split = pre_tokenizers.Split(Regex(split), "isolated")
    return pre_tokenizers.Sequence([split, byte_level])


PRE_TOKENIZERS = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: _byte_level(LLAMA_3),
}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes, and knows what a checkpoint says about ends and chats.

    stop:          ids after which a text is over
    start:         the id that begins every text, or None
    chat_template: a Jinja template, or None
    """

    backend: tokenizers.Tokenizer
    stop: frozenset[int] = frozenset()
    start: int | None = None
    chat_template: str | None = None

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, after the starting id if there is one. Special tokens in it count."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return ids if self.start is None or ids[:1] == [self.start] else [self.start, *ids]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """The ids that ask the model to answer.

        messages: what the user says, or a list of {"role": …, "content": …}, as the checkpoint's
        template wants them. Raises ValueError when the checkpoint has no template.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode(self._render(messages))

    def _render(self, messages: list[dict[str, str]]) -> str:
        import jinja2.sandbox  # a checkpoint's template is a stranger's program

        def refuse(message):
            raise ValueError(f"messages: the checkpoint's chat template says: {message}")

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        environment.globals["raise_exception"] = refuse
        return environment.from_string(self.chat_template).render(
            messages=messages,
            add_generation_prompt=True,
            bos_token="" if self.start is None else self.backend.id_to_token(self.start),
            eos_token="".join(self.backend.id_to_token(i) for i in sorted(self.stop)[:1]),
        )


def from_gguf(fields: dict, path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file's metadata; None when the file has none.

    fields: metadata names -> functions that return the value.
    """

    def get(name, default=None):
        return fields[f"tokenizer.{name}"]() if f"tokenizer.{name}" in fields else default

    kind = get("ggml.model")
    if kind is None:
        return None
    if kind == "gpt2":
        backend = _byte_pairs(get, path)
    elif kind == "llama":
        backend = _sentence_pieces(get)
    else:
        raise ValueError(f"{path}: tokenizer: expected model 'gpt2' or 'llama', got {kind!r}")
    tokens = get("ggml.tokens")
    kinds = get("ggml.token_type", [1] * len(tokens))
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens(control)
    ends = (get("ggml.eos_token_id"), get("ggml.eot_token_id"))
    return Tokenizer(
        backend,
        stop=frozenset(i for i in ends if i is not None),
        start=get("ggml.bos_token_id") if get("ggml.add_bos_token", kind == "llama") else None,
        chat_template=get("chat_template"),
    )


def _byte_pairs(get, path: Path) -> tokenizers.Tokenizer:
    """Byte-level pairs, merged in the order of the file's list: GPT-2's, Llama 3's."""
    pre = get("ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: pre-tokenizer: expected one of {tuple(PRE_TOKENIZERS)}, got {pre!r}"
        )
    ids = {token: i for i, token in enumerate(get("ggml.tokens"))}
    merges = [tuple(pair.split(" ")) for pair in get("ggml.merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(get) -> tokenizers.Tokenizer:
    """Pieces of text in which ▁ is a space, the best-scored merge first: Llama 2's."""
    tokens, scores = get("ggml.tokens"), get("ggml.scores")
    ids = {token: i for i, token in enumerate(tokens)}
    # Any two pieces that join to a piece are a merge, as good as what they join to.
    joins = [
        (-score, ids[token[:i]], ids[token[i:]])
        for token, score in zip(tokens, scores, strict=True)
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    merges = [(tokens[a], tokens[b]) for _, a, b in sorted(joins)]
    unknown = get("ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    strip = []
    if get("ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def from_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory; None when it has no tokenizer.json."""
    if not (path / "tokenizer.json").exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path}/tokenizer.json: not readable ({error})") from None

    def fields(name):
        file = path / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    about = fields("tokenizer_config.json")
    ends = fields("generation_config.json").get(
        "eos_token_id", fields("config.json").get("eos_token_id")
    )
    template = path / "chat_template.jinja"
    # Whether a text starts with a special token is in tokenizer.json's post-processor.
    first = backend.encode("", add_special_tokens=True).ids
    return Tokenizer(
        backend,
        stop=frozenset([ends] if isinstance(ends, int) else ends or []),
        start=first[0] if first else None,
        chat_template=template.read_text(encoding="utf-8")
        if template.exists()
        else about.get("chat_template"),
    )
