"""Token ids over awkward texts: the packaged tokenizer's, and those of vocabularies made here.

Each vocabulary is written to a GGUF file and to a Hugging Face directory, and read back. What the
ids must be, `plain_tokenizer` says, which knows nothing of the tokenizers library. Those of the
packaged vocabulary are stored: `python tests/test_tokenizer.py` writes them.
"""

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from plain_tokenizer import (
    BYTES,
    PATTERNS,
    around,
    as_bytes,
    byte_pairs,
    compiled,
    cut,
    learn_merges,
    sentence_pieces,
)

from treeattn_llama import open_checkpoint, packaged_model
from treeattn_llama.gguf_tokenizer import from_gguf
from treeattn_llama.tokenizer import from_directory

GOLDEN = Path(__file__).parent / "data" / "packaged_tokens.json"  # (text, ids)
TEXTS = [text for text, _ in json.loads(GOLDEN.read_text(encoding="utf-8"))]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# The same ones in every vocabulary; the user-defined are ordinary text to `decode`.
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>"]
USERS = ["<think>", "</think>", "xyz"]


def test_there_are_enough_texts():
    assert len(set(TEXTS)) == len(TEXTS) >= 200


# The packaged model's


def packaged_tokens() -> list[list[int]]:
    """By the plain tokenizer, from the file's vocabulary and merges."""
    fields = gguf.GGUFReader(packaged_model()).fields
    tokens, merges, kinds = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    ids = {token: i for i, token in enumerate(tokens)}
    added = {token: ids[token] for token, kind in zip(tokens, kinds, strict=True) if kind == 3}
    encode = functools.partial(
        byte_pairs,
        ids=ids,
        merges=[tuple(pair.split(" ")) for pair in merges],
        patterns=[compiled(p) for p in PATTERNS["smollm"]],
    )
    return [around(text, added, encode) for text in TEXTS]


@pytest.fixture(scope="module")
def packaged():
    return open_checkpoint().tokenizer


def test_packaged_token_ids(packaged):
    for text, ids in json.loads(GOLDEN.read_text(encoding="utf-8")):
        assert packaged.encode(text) == ids, text


def test_packaged_tokens_decode(packaged):
    for text in TEXTS:
        # Control tokens are left out, and there is no token for some bytes.
        if "<|" not in text and not {*"\x1d\x1c\x1b\U0010ffff"} & {*text}:
            assert packaged.decode(packaged.encode(text)) == text
    assert packaged.decode(packaged.encode("<|im_start|>user\nHi<|im_end|>")) == "user\nHi"


# Byte-level pairs


class BytePairs:
    """A vocabulary for a way to cut texts: learned from every other one of them."""

    def __init__(self, pre: str):
        self.pre, self.patterns = pre, [compiled(p) for p in PATTERNS[pre]]
        words = [as_bytes(word) for text in TEXTS[::2] for word in cut(text, self.patterns)]
        self.merges = learn_merges(words, 200)
        parts = [*BYTES.values(), *(a + b for a, b in self.merges)]
        # No merge leads to these.
        self.whole = [
            as_bytes(x) for x in ("unreachable", " unreachable", "日本語の文章です", "''")
        ]
        self.tokens = [*dict.fromkeys(parts + self.whole), *CONTROLS, *USERS]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        kinds = dict.fromkeys(CONTROLS, CONTROL) | dict.fromkeys(USERS, USER_DEFINED)
        self.kinds = [kinds.get(token, NORMAL) for token in self.tokens]
        self.llama_3 = pre == "llama-bpe"

    def encode(self, text: str) -> list[int]:
        encode = functools.partial(
            byte_pairs,
            ids=self.ids,
            merges=self.merges,
            patterns=self.patterns,
            whole_words=self.llama_3,
        )
        added = {token: self.ids[token] for token in CONTROLS + USERS}
        return around(text, added, encode)

    def write_gguf(self, path: Path, **changes) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges([" ".join(pair) for pair in self.merges])
        return finish(writer, self.ids, path, **changes)

    def write_directory(self, folder: Path) -> Path:
        """As the models' own tokenizer.json has it."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        digits = {"type": "Digits", "individual_digits": True}
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
            r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        cuts = {
            "gpt-2": [byte_level | {"use_regex": True}],
            "smollm": [digits, byte_level | {"use_regex": True}],
            "llama-bpe": [split | {"invert": False}, byte_level | {"use_regex": False}],
        }
        model = {"type": "BPE", "ignore_merges": self.llama_3, "merges": self.merges}
        return write_directory(
            folder,
            self.ids,
            model,
            normalizer=None,
            decoder=byte_level | {"use_regex": True},
            pre_tokenizer={"type": "Sequence", "pretokenizers": cuts[self.pre]},
        )


def started(ids: list[int], vocabulary) -> list[int]:
    """The ids after the token that begins a text, unless they begin with it."""
    start = vocabulary.ids["<s>"]
    return ids if ids[:1] == [start] else [start, *ids]


def finish(writer: gguf.GGUFWriter, ids, path: Path, adds_bos: bool | None = None) -> Path:
    writer.add_bos_token_id(ids["<s>"])
    writer.add_eos_token_id(ids["</s>"])
    writer.add_eot_token_id(ids["<|im_end|>"])
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_directory(folder: Path, ids: dict[str, int], model: dict, start=None, **parts) -> Path:
    folder.mkdir()
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    added = [
        {"id": ids[token], "content": token, "special": token not in USERS, **flags}
        for token in sorted([x for x in ids if x == "<unk>"] + CONTROLS + USERS, key=ids.get)
    ]
    common = {"version": "1.0", "truncation": None, "padding": None, "post_processor": start}
    model = {"dropout": None, "vocab": ids, **model}
    fields = common | {"added_tokens": added, "model": model} | parts
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [ids["<|im_end|>"]]}))
    return folder


def read_gguf(path: Path):
    fields = {name: field.contents for name, field in gguf.GGUFReader(path).fields.items()}
    return from_gguf(fields, path)


@pytest.fixture(scope="module")
def byte_pairs_of():
    return functools.cache(BytePairs)


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_pairs_of_gguf(byte_pairs_of, pre, tmp_path):
    plain = byte_pairs_of(pre)
    tokenizer = read_gguf(plain.write_gguf(tmp_path / "x.gguf"))
    for text in TEXTS:
        want = plain.encode(text)
        assert tokenizer.encode(text) == (started(want, plain) if pre == "llama-bpe" else want)
        if not any(token in text for token in CONTROLS):
            assert tokenizer.decode(want) == text
    assert tokenizer.decode(plain.encode("a<think>b</s>c</think>")) == "a<think>bc</think>"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_byte_pairs_of_a_directory(byte_pairs_of, pre, tmp_path):
    plain = byte_pairs_of(pre)
    tokenizer = from_directory(plain.write_directory(tmp_path / "model"))
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text), text


def test_bytes_that_are_no_utf_8(byte_pairs_of, tmp_path):
    plain = byte_pairs_of("gpt-2")
    tokenizer = read_gguf(plain.write_gguf(tmp_path / "x.gguf"))
    rng = np.random.default_rng(0)
    wild = [rng.integers(0, 256, n, np.uint8).tobytes() for n in range(1, 40)]
    half = ["🙂é日".encode()[:n] for n in range(10)]
    for data in wild + half:
        ids = [plain.ids[BYTES[b]] for b in data]
        assert tokenizer.decode(ids) == data.decode(errors="replace")
    for text in ("\ud800", "a\udcffb", "🙂\udc00"):
        with pytest.raises(ValueError, match=r"prompt: no Unicode at [01]: "):
            tokenizer.encode(text)


def test_where_gguf_files_say_nothing(byte_pairs_of, tmp_path):
    """Llama 3's texts begin with a token, GPT-2's do not, and templates know it either way."""
    for pre, adds_bos, starts in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ):
        plain = byte_pairs_of(pre)
        tokenizer = read_gguf(plain.write_gguf(tmp_path / "x.gguf", adds_bos=adds_bos))
        bos, eos, eot = (plain.ids[token] for token in ("<s>", "</s>", "<|im_end|>"))
        x = plain.ids["x"]
        assert tokenizer.encode("x") == [bos, x][not starts :]
        assert tokenizer.encode("<s>x") == [bos, x]
        assert tokenizer.chat("x") == [bos, x, eos]  # not </s>'s id being the smaller one
        assert tokenizer.stop == {eos, eot}


# Pieces of text


class SentencePieces:
    """A vocabulary with scores; characters of every other text only, and all bytes."""

    def __init__(self):
        words = [w for text in TEXTS[::2] for w in text.split(" ") if w.isprintable()]
        letters = sorted({c for word in words for c in word} | {"▁"})
        merges = learn_merges(["▁" + word for word in words], 200)
        pieces = dict.fromkeys([*(a + b for a, b in merges), "▁▁", "▁▁▁▁"])
        self.scores = {piece: -float(i) for i, piece in enumerate(pieces)}
        bytes_ = [f"<0x{b:02X}>" for b in range(256)]
        kinds = dict.fromkeys(CONTROLS, CONTROL) | dict.fromkeys(USERS, USER_DEFINED)
        kinds |= dict.fromkeys(bytes_, BYTE) | {"<unk>": UNKNOWN}
        self.tokens = ["<unk>", *CONTROLS, *USERS, *bytes_, *pieces, *letters]
        self.tokens = list(dict.fromkeys(self.tokens))
        self.kinds = [kinds.get(token, NORMAL) for token in self.tokens]
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        added = {token: self.ids[token] for token in ["<unk>", *CONTROLS, *USERS]}
        encode = functools.partial(sentence_pieces, ids=self.ids, scores=self.scores)
        return around(text, added, encode)

    def write_gguf(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(self.tokens)
        writer.add_token_scores([self.scores.get(token, -1e4) for token in self.tokens])
        writer.add_token_types(self.kinds)
        writer.add_unk_token_id(0)
        return finish(writer, self.ids, path)

    def write_directory(self, folder: Path) -> Path:
        """As Llama 2's tokenizer.json has it: merges in the order of what they make."""
        merges = [
            (piece[:i], piece[i:])
            for piece in self.scores
            for i in range(1, len(piece))
            if piece[:i] in self.ids and piece[i:] in self.ids
        ]
        spaces = [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]
        decoders = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]
        first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        a = {"Sequence": {"id": "A", "type_id": 0}}
        start = {
            "type": "TemplateProcessing",
            "single": [first, a],
            "pair": [first, a],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [self.ids["<s>"]], "tokens": ["<s>"]}},
        }
        model = {"type": "BPE", "merges": merges, "unk_token": "<unk>", "fuse_unk": True}
        return write_directory(
            folder,
            self.ids,
            model | {"byte_fallback": True},
            start,
            pre_tokenizer=None,
            normalizer={"type": "Sequence", "normalizers": spaces},
            decoder={"type": "Sequence", "decoders": decoders},
        )


@pytest.fixture(scope="module")
def pieces():
    return SentencePieces()


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_sentence_pieces(pieces, kind, tmp_path):
    if kind == "gguf":
        tokenizer = read_gguf(pieces.write_gguf(tmp_path / "x.gguf"))
    else:
        tokenizer = from_directory(pieces.write_directory(tmp_path / "model"))
    for text in TEXTS:
        assert tokenizer.encode(text) == started(pieces.encode(text), pieces), text
        if not any(token in text for token in ["▁", "<unk>", *CONTROLS, *USERS]):
            assert tokenizer.decode(pieces.encode(text)) == text
    assert tokenizer.decode(pieces.encode("a<think>b</s>")) == "a<think> b"
    half = [pieces.ids[f"<0x{b:02X}>"] for b in "🙂".encode()[:3]]
    assert tokenizer.decode([*pieces.encode("a"), *half]) == "a" + 3 * "\ufffd"


if __name__ == "__main__":
    rows = (
        f"[{json.dumps(text, ensure_ascii=not text.isprintable())}, {ids}]"
        for text, ids in zip(TEXTS, packaged_tokens(), strict=True)
    )
    GOLDEN.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
