"""A tokenizer, rebuilt from the metadata of a GGUF file."""

from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from treeattn_llama.arguments import boolean, integer
from treeattn_llama.guard import named
from treeattn_llama.tokenizer import Tokenizer

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

# Types of a GGUF file's tokens.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
LLAMA_2_IDS = {"unknown": 0, "bos": 1, "eos": 2}


def from_gguf(fields: dict, path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file's metadata; None when the file has none.

    fields: metadata names -> functions that return the value.

    Raises a ValueError that names the file for whatever is no tokenizer.
    """
    with named(path, "tokenizer"):
        return _from_metadata(Metadata(fields))


class Metadata:
    """A GGUF file's fields on its tokenizer, each of the type that it must have."""

    def __init__(self, fields: dict):
        self.fields = fields

    def get(self, name: str, default=None):
        """The field `tokenizer.name`, or the default where there is none."""
        name = f"tokenizer.{name}"
        return self.fields[name]() if name in self.fields else default

    def all(self, name: str, kind) -> list:
        """The list `tokenizer.ggml.name` of values of that kind."""
        found = self.get(f"ggml.{name}")
        if not isinstance(found, list) or not all(isinstance(x, kind) for x in found):
            raise TypeError(f"tokenizer.ggml.{name}: expected a list, got {found!r:.40}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        return boolean(f"tokenizer.ggml.{name}", self.get(f"ggml.{name}", default))

    def id(self, name: str, tokens: list[str]) -> int | None:
        """The number of the token that begins or ends a text, or is unknown; None without one.
        Llama 2's numbers are llama.cpp's defaults for a vocabulary like Llama 2's."""
        field = f"ggml.{name}_token_id"
        default = LLAMA_2_IDS.get(name) if self.get("ggml.model") == "llama" else None
        found = self.get(field, default)
        return None if found is None else integer(f"tokenizer.{field}", found, 0, len(tokens) - 1)


def _from_metadata(about: Metadata) -> Tokenizer | None:
    kind = about.get("ggml.model")
    if kind is None:
        return None
    makers = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    if not isinstance(kind, str) or kind not in makers:
        raise ValueError(f"expected model 'gpt2' or 'llama', got {kind!r:.40}")
    backend = makers[kind](about)
    tokens = about.all("tokens", str)
    has_types = "tokenizer.ggml.token_type" in about.fields
    types = about.all("token_type", int) if has_types else [1] * len(tokens)
    _check_as_many("token_type", types, tokens)

    def of_type(*wanted):
        found = (token for token, type_ in zip(tokens, types, strict=True) if type_ in wanted)
        return [tokenizers.AddedToken(token, normalized=False) for token in found]

    backend.add_special_tokens(of_type(UNKNOWN, CONTROL))  # left out by `decode`
    backend.add_tokens(of_type(USER_DEFINED))
    bos, eos, eot = (about.id(name, tokens) for name in ("bos", "eos", "eot"))
    # What llama.cpp does where the file does not say it.
    adds_bos = kind == "llama" or about.get("ggml.pre") in LLAMA_3_NAMES
    return Tokenizer(
        backend,
        stop=frozenset(i for i in (eos, eot) if i is not None),
        start=bos if about.flag("add_bos_token", adds_bos) else None,
        chat_template=about.get("chat_template"),
        bos="" if bos is None else tokens[bos],
        eos="" if eos is None else tokens[eos],
    )


def _check_as_many(name: str, found: list, tokens: list[str]) -> None:
    if len(found) != len(tokens):
        lengths = f"{len(tokens)} tokens, got {len(found)}"
        raise ValueError(f"tokenizer.ggml.{name}: expected one for each of {lengths}")


def _byte_pairs(about: Metadata) -> tokenizers.Tokenizer:
    """Byte-level pairs, merged in the order of the file's list: GPT-2's, Llama 3's."""
    pre = about.get("ggml.pre", "default")
    if not isinstance(pre, str) or pre not in CUTS:
        raise ValueError(f"pre-tokenizer: expected one of {tuple(CUTS)}, got {pre!r:.40}")
    ids = {token: i for i, token in enumerate(about.all("tokens", str))}
    merges = [tuple(pair.split(" ")) for pair in about.all("merges", str)]
    whole_words = pre in LLAMA_3_NAMES  # a piece that is a token is it, whatever the merges say
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in CUTS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(about: Metadata) -> tokenizers.Tokenizer:
    """Pieces of text in which ▁ is a space, the best-scored merge first: Llama 2's."""
    tokens = about.all("tokens", str)
    scores = about.all("scores", float | int)
    _check_as_many("scores", scores, tokens)
    ids = {token: i for i, token in enumerate(tokens)}
    # Any two pieces that join to a piece are a merge, as good as what they join to.
    joins = [
        (-score, ids[token[:i]], ids[token[i:]])
        for token, score in zip(tokens, scores, strict=True)
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    merges = [(tokens[a], tokens[b]) for _, a, b in sorted(joins)]
    unknown = about.id("unknown", tokens)
    unknown = None if unknown is None else tokens[unknown]
    pairs = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(pairs)
    spaces = [normalizers.Replace(" ", "▁")]
    strip = []
    if about.flag("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
