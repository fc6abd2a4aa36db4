"""A tokenizer, rebuilt from the metadata of a GGUF file."""

import dataclasses
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from treeattn.checks import integer
from treeattn_llama.arguments import boolean, named
from treeattn_llama.tokenizer import Tokenizer

# How a text is cut before byte pairs are merged, by the name that GGUF files give it: a list of
# patterns, each applied to the pieces that the ones before it have left.
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

# Tokens by whose names llama.cpp ends a text (llama-vocab.cpp), and others that are control tokens,
# whatever their type says.
ENDS = set(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> </s> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> "
    "[PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
CONTROLS = ENDS | set(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
    "<|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> "
    "<|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> "
    "▁<MID> <|code_middle|> <|middle|>".split()
)
ENDING_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

BYTES = {f"<0x{b:02X}>": bytes([b]) for b in range(256)}

# Types of a GGUF file's tokens.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
LLAMA_2_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def from_gguf(fields: dict, path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file's metadata, or None if the file has none.

    fields: functions that return the metadata, by name

    Raises ValueError, with the file's name, if the metadata do not describe a known tokenizer.
    """
    with named(path, "tokenizer"):
        return _from_metadata(Metadata(fields))


class Metadata:
    """A GGUF file's fields `tokenizer.ggml.…`. Methods raise an error for a field of another type
    than theirs."""

    def __init__(self, fields: dict):
        self.fields = fields

    def get(self, name: str, default=None):
        """The field, or the default if the file does not have it."""
        name = f"tokenizer.ggml.{name}"
        return self.fields[name]() if name in self.fields else default

    def all(self, name: str, kind, tokens: list[str] | None = None, default=None) -> list:
        """The field as a list of values of that kind; one for each of the tokens, if given."""
        found = self.get(name, default)
        if not isinstance(found, list) or not all(isinstance(x, kind) for x in found):
            raise TypeError(f"tokenizer.ggml.{name}: expected a list, got {found!r:.40}")
        if tokens is not None and len(found) != len(tokens):
            lengths = f"{len(tokens)} tokens, got {len(found)}"
            raise ValueError(f"tokenizer.ggml.{name}: expected one for each of {lengths}")
        return found

    def id(self, name: str, tokens: list[str]) -> int | None:
        """The number of the token that begins or ends a text, or is unknown; None if there is none.

        A vocabulary like Llama 2's has Llama 2's numbers by default, as in llama.cpp.
        """
        name = f"{name}_token_id"
        default = LLAMA_2_IDS.get(name) if self.get("model") == "llama" else None
        found = self.get(name, default)
        if found is None:
            return None
        return integer(f"tokenizer.ggml.{name}", found, 0, len(tokens) - 1)


def _from_metadata(about: Metadata) -> Tokenizer | None:
    kind = about.get("model")
    if kind is None:
        return None
    makers = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    if kind not in tuple(makers):
        raise ValueError(f"expected model 'gpt2' or 'llama', got {kind!r:.40}")
    backend = makers[kind](about)
    tokens = about.all("tokens", str)
    types = about.all("token_type", int, tokens, default=[1] * len(tokens))
    types = [CONTROL if t in CONTROLS else x for t, x in zip(tokens, types, strict=True)]
    added = [  # `decode` leaves special tokens out
        tokenizers.AddedToken(token, normalized=False, special=type_ != USER_DEFINED)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos = about.id("bos", tokens)
    ends = {name: about.id(name, tokens) for name in ENDING_IDS}
    stop = {i for i, token in enumerate(tokens) if token in ENDS} | {*ends.values()} - {None}
    # llama.cpp's defaults
    adds_bos = kind == "llama" or about.get("pre") in LLAMA_3_NAMES
    start = bos if boolean("add_bos_token", about.get("add_bos_token", adds_bos)) else None
    known = {"bos_token": bos, "eos_token": ends["eos"]}
    names = {name: tokens[i] for name, i in known.items() if i is not None}
    template = about.fields.get("tokenizer.chat_template")
    return Tokenizer(backend, frozenset(stop), start, start, template and template(), names)


def _byte_pairs(about: Metadata) -> tokenizers.Tokenizer:
    """Byte-level pairs, merged in the order of the file's list: GPT-2's, Llama 3's."""
    pre = about.get("pre", "default")
    if pre not in tuple(CUTS):
        raise ValueError(f"pre-tokenizer: expected one of {tuple(CUTS)}, got {pre!r:.40}")
    ids = {token: i for i, token in enumerate(about.all("tokens", str))}
    merges = [tuple(pair.split(" ")) for pair in about.all("merges", str)]
    whole_words = pre in LLAMA_3_NAMES  # a piece that is a token is not merged from bytes
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=whole_words))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in CUTS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_pieces(about: Metadata) -> tokenizers.Tokenizer:
    """Pieces of text in which ▁ is a space, merged by their scores, the best first: Llama 2's."""
    tokens = about.all("tokens", str)
    scores = about.all("scores", float | int, tokens)
    ids = {token: i for i, token in enumerate(tokens)}
    # Any two pieces that join to a piece are a merge, with the score of the joined piece.
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
    prefix = "▁" if boolean("add_space_prefix", about.get("add_space_prefix", True)) else ""
    spaces = [normalizers.Prepend(prefix), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Decoder.custom(Pieces(" " if prefix else ""))
    return backend


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The decoder of pieces and of bytes, such as <0xE2>.

    As in llama.cpp, U+FFFD stands for bytes that are no character, and the bytes around them stay.
    The decoder ByteFallback of `tokenizers` would lose the whole run of bytes.
    """

    prefix: str  # is not part of a text that begins with it

    def decode_chain(self, pieces: list[str]) -> list[str]:
        found = (BYTES.get(piece, piece.replace("▁", " ").encode()) for piece in pieces)
        return [b"".join(found).decode(errors="replace").removeprefix(self.prefix)]
