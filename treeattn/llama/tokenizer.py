"""Text to token ids and back, as a checkpoint says: from tokenizer.json, or rebuilt from GGUF."""

import dataclasses
import datetime
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

# How a text is cut before byte pairs are merged, by the name that GGUF files give it: patterns,
# each of which cuts what the ones before it have left.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3")
CUTS = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (GPT_2,),
    "smollm": (r"\p{N}", GPT_2),
    **dict.fromkeys(LLAMA_3_NAMES, (LLAMA_3,)),
}

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of a GGUF file's tokens


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

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, after the starting id if there is one. Special tokens in it count.

        Raises ValueError for half a character: a surrogate, as Python has for bytes that are no
        UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: no Unicode at {error.start}: {text[error.start]!a}") from None
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
            raise ValueError("this checkpoint has no chat template (or none named default)")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                expected = 'dicts with "role" and "content"'
                raise ValueError(f"messages: expected {expected}, got {message!r}")
        return self.encode(self._render(messages))

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The template's text, in an environment like the one that transformers gives it."""
        import jinja2.sandbox  # a checkpoint's template is a stranger's program

        def refuse(message):
            raise jinja2.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = lambda x, **options: json.dumps(
            x, **{"ensure_ascii": False} | options
        )
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True,
                bos_token=self.bos, eos_token=self.eos,
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise ValueError(f"messages: the checkpoint's chat template says: {error}") from None


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
    types = get("ggml.token_type", [1] * len(tokens))

    def of_type(*wanted):
        found = (token for token, type_ in zip(tokens, types, strict=True) if type_ in wanted)
        return [tokenizers.AddedToken(token, normalized=False) for token in found]

    backend.add_special_tokens(of_type(UNKNOWN, CONTROL))  # left out by `decode`
    backend.add_tokens(of_type(USER_DEFINED))
    bos, eos, eot = (get(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot"))
    # What llama.cpp does where the file does not say it.
    adds_bos = kind == "llama" or get("ggml.pre") in LLAMA_3_NAMES
    return Tokenizer(
        backend,
        stop=frozenset(i for i in (eos, eot) if i is not None),
        start=bos if get("ggml.add_bos_token", adds_bos) else None,
        chat_template=get("chat_template"),
        bos="" if bos is None else tokens[bos],
        eos="" if eos is None else tokens[eos],
    )


def _byte_pairs(get, path: Path) -> tokenizers.Tokenizer:
    """Byte-level pairs, merged in the order of the file's list: GPT-2's, Llama 3's."""
    pre = get("ggml.pre", "default")
    if pre not in CUTS:
        raise ValueError(f"{path}: pre-tokenizer: expected one of {tuple(CUTS)}, got {pre!r}")
    ids = {token: i for i, token in enumerate(get("ggml.tokens"))}
    merges = [tuple(pair.split(" ")) for pair in get("ggml.merges")]
    whole_words = pre in LLAMA_3_NAMES  # a piece that is a token is it, whatever the merges say
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in CUTS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
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
    unknown = None if unknown is None else tokens[unknown]
    pairs = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(pairs)
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


def read_json(path: Path) -> dict:
    """What a JSON file holds, or a ValueError where there is none to read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no {path.name} in the directory") from None
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None


def from_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory; None when it has no tokenizer.json."""
    if not (path / "tokenizer.json").exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path}/tokenizer.json: not readable ({error})") from None

    def fields(name):
        return read_json(path / name) if (path / name).exists() else {}

    about, config = fields("tokenizer_config.json"), fields("config.json")
    ends = fields("generation_config.json").get("eos_token_id") or config.get("eos_token_id")

    def token(name):  # a string, a dict that describes it, or an id in config.json
        found = about.get(f"{name}_token")
        if found is None and isinstance(config.get(f"{name}_token_id"), int):
            found = backend.id_to_token(config[f"{name}_token_id"])
        return (found["content"] if isinstance(found, dict) else found) or ""

    template, file = about.get("chat_template"), path / "chat_template.jinja"
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    # Whether a text starts with a special token is in tokenizer.json's post-processor.
    first = backend.encode("", add_special_tokens=True).ids
    return Tokenizer(
        backend,
        stop=frozenset([ends] if isinstance(ends, int) else ends or []),
        start=first[0] if first else None,
        chat_template=file.read_text(encoding="utf-8") if file.exists() else template,
        bos=token("bos"),
        eos=token("eos"),
    )
