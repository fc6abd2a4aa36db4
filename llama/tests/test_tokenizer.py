"""Token ids over awkward texts: the packaged tokenizer's, and those of vocabularies made here.

Each vocabulary becomes the metadata of a GGUF file. `plain_tokenizer` computes the right ids,
without the tokenizers library; `python tests/test_tokenizer.py` stores the packaged vocabulary's.
"""

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from llamas import byte_fallback, byte_tokenizer
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
from treeattn_llama.text import pieces
from treeattn_llama.tokenizer import from_directory

GOLDEN = Path(__file__).parent / "data" / "packaged_tokens.json"  # (text, ids)
TEXTS = [text for text, _ in json.loads(GOLDEN.read_text(encoding="utf-8"))]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# The same ones in every vocabulary; the user-defined are ordinary text to `decode`.
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>"]
USERS = ["<think>", "</think>", "xyz"]
KINDS = dict.fromkeys(CONTROLS, CONTROL) | dict.fromkeys(USERS, USER_DEFINED)


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


def test_packaged_token_ids():
    packaged = open_checkpoint().tokenizer
    for text, ids in json.loads(GOLDEN.read_text(encoding="utf-8")):
        assert packaged.encode(text) == ids, text
        # Control tokens are left out, and there is no token for some bytes.
        if "<|" not in text and not {*"\x1d\x1c\x1b\U0010ffff"} & {*text}:
            assert packaged.decode(ids) == text
    assert packaged.decode(packaged.encode("<|im_start|>user\nHi<|im_end|>")) == "user\nHi"


# Vocabularies of GGUF files


class Vocabulary:
    """The metadata of a file, and the ids of a text by the book."""

    def __init__(self, tokens, kinds, encode, **fields):
        tokens = list(dict.fromkeys(tokens))
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.added = {token: self.ids[token] for token in ("<unk>", *KINDS) if token in kinds}
        self.plain = functools.partial(encode, ids=self.ids)
        self.fields = {
            "tokens": tokens,
            "token_type": [kinds.get(token, NORMAL) for token in tokens],
            "bos_token_id": self.ids["<s>"],
            "eos_token_id": self.ids["</s>"],
            "eot_token_id": self.ids["<|im_end|>"],
        }
        self.fields |= fields

    def encode(self, text: str) -> list[int]:
        return around(text, self.added, self.plain)

    def started(self, text: str) -> list[int]:
        """After the token that begins a text, unless the text begins with it."""
        ids = self.encode(text)
        return ids if ids[:1] == [self.ids["<s>"]] else [self.ids["<s>"], *ids]

    def read(self, **changes):
        fields = {f"tokenizer.ggml.{name}": x for name, x in (self.fields | changes).items()}
        template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        fields["tokenizer.chat_template"] = template
        return from_gguf({name: lambda x=x: x for name, x in fields.items()}, Path("x.gguf"))


@functools.cache
def pairs(pre: str) -> Vocabulary:
    """Byte-level pairs for a way to cut texts, learned from every other one of them."""
    patterns = [compiled(p) for p in PATTERNS[pre]]
    words = [as_bytes(word) for text in TEXTS[::2] for word in cut(text, patterns)]
    merges = learn_merges(words, 200)
    parts = [*BYTES.values(), *(a + b for a, b in merges)]
    # No merge leads to these.
    whole = [as_bytes(x) for x in ("unreachable", " unreachable", "日本語の文章です", "''")]
    how = {"merges": merges, "patterns": patterns, "whole_words": pre == "llama-bpe"}
    encode = functools.partial(byte_pairs, **how)
    listed = [" ".join(pair) for pair in merges]
    tokens = [*parts, *whole, *KINDS]
    return Vocabulary(tokens, KINDS, encode, model="gpt2", pre=pre, merges=listed)


@functools.cache
def sentences() -> Vocabulary:
    """Pieces with scores; characters of every other text only, and all bytes."""
    words = [w for text in TEXTS[::2] for w in text.split(" ") if w.isprintable()]
    letters = sorted({c for word in words for c in word} | {"▁"})
    merges = learn_merges(["▁" + word for word in words], 200)
    joined = dict.fromkeys([*(a + b for a, b in merges), "▁▁", "▁▁▁▁"])
    order = np.random.default_rng(0).permutation(len(joined)).tolist()
    scores = {piece: -float(i) for piece, i in zip(joined, order, strict=True)}
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    kinds = KINDS | dict.fromkeys(bytes_, BYTE) | {"<unk>": UNKNOWN}
    tokens = dict.fromkeys(["<unk>", *KINDS, *bytes_, *joined, *letters])
    encode = functools.partial(sentence_pieces, scores=scores)
    listed = [scores.get(token, -1e4) for token in tokens]
    return Vocabulary(tokens, kinds, encode, model="llama", scores=listed, unknown_token_id=0)


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_pairs(pre):
    plain = pairs(pre)
    tokenizer = plain.read()
    encode = plain.started if pre == "llama-bpe" else plain.encode
    for text in TEXTS:
        assert tokenizer.encode(text) == encode(text), text
        if not any(token in text for token in CONTROLS):
            assert tokenizer.decode(plain.encode(text)) == text
    assert tokenizer.decode(plain.encode("a<think>b</s>c</think>")) == "a<think>bc</think>"


def test_sentence_pieces():
    plain = sentences()
    tokenizer = plain.read()
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.started(text), text
        if not any(token in text for token in ["▁", "<unk>", *KINDS]):
            assert tokenizer.decode(plain.encode(text)) == text
    assert tokenizer.decode(plain.encode("a<think>b</s>")) == "a<think> b"
    # In a directory the bytes of a second character hide the first one, until it is whole.
    tokenizer.backend.decoder = byte_fallback()
    two = [[[plain.ids[f"<0x{b:02X}>"]]] for b in "🙂🙂".encode()]
    assert "".join(pieces(tokenizer, [], two)) == "🙂🙂"
    spaceless = plain.read(add_space_prefix=False)
    assert spaceless.decode(spaceless.encode(" a")) == " a"


@pytest.mark.parametrize("kind", ["pairs", "pieces"])
def test_bytes_that_are_no_utf_8(kind):
    plain = pairs("gpt-2") if kind == "pairs" else sentences()
    names = BYTES if kind == "pairs" else [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = plain.read()
    rng = np.random.default_rng(0)
    wild = [rng.integers(0, 256, n, np.uint8).tobytes() for n in range(1, 40)]
    for data in wild + ["🙂é日".encode()[:n] for n in range(10)]:
        ids = [plain.ids[names[b]] for b in data]
        text = data.decode(errors="replace")
        assert tokenizer.decode(ids) == text.removeprefix(" " if kind == "pieces" else "")
    for text in ("\ud800", "a\udcffb", "🙂\udc00"):
        with pytest.raises(ValueError, match=r"prompt: expected Unicode: .* in position [01]: "):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    "pre, changes, starts",
    [
        ("llama-bpe", {}, 1),
        ("llama-bpe", {"add_bos_token": False}, 0),
        ("gpt-2", {}, 0),
        ("gpt-2", {"add_bos_token": True}, 1),
    ],
)
def test_where_gguf_files_say_nothing(pre, changes, starts):
    """Llama 3's texts begin with a token, GPT-2's do not, and templates know it either way."""
    plain = pairs(pre)
    tokenizer = plain.read(**changes)
    ends = "</s>", "<|im_end|>", "<|endoftext|>"  # the last one by its name
    bos, x, eos, *rest = (plain.ids[token] for token in ("<s>", "x", *ends))
    assert tokenizer.encode("x") == [bos, x][1 - starts :]
    assert tokenizer.encode("<s>x") == [bos, x]
    assert tokenizer.chat("x") == [bos, x, eos]  # not </s>'s id being the smaller one
    assert tokenizer.stop == {eos, *rest}
    assert from_gguf({}, Path("x.gguf")) is None


# The files of a directory

NAMED = [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "z"}]
IDS = {"bos_token_id": 256, "eos_token_id": 257}
TEXT_TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
# The tokens around a text; tokenizer_config.json, config.json, generation_config.json; and the
# tokenizer's start, stop, chat_template and names.
FOLDERS = [
    ("<s> $A", {"chat_template": "x"}, {"eos_token_id": [257, 3]}, None, (256, {257, 3}, "x", {})),
    (
        "$A </s>",
        TEXT_TOKENS | {"chat_template": NAMED},
        {},
        {},
        (None, set(), "z", {"bos_token": "<s>", "eos_token": "</s>"}),
    ),
    ("<s> $A </s>", {"chat_template": NAMED[:1]}, IDS, None, (256, {257}, None, {})),
    ("$A", {}, IDS, {"bos_token_id": 256}, (None, set(), None, {})),
    (
        "$A",
        {"add_bos_token": True},
        {"eos_token_id": 5},
        {"eos_token_id": 0},
        (None, {0}, None, {}),
    ),
    ("<s> </s> $A", {}, {}, {}, None),
]


@pytest.mark.parametrize("single, about, config, generation, want", FOLDERS)
def test_tokenizer_of_a_directory(tmp_path, single, about, config, generation, want):
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    backend.enable_truncation(4)  # settings of a training run's batches
    backend.enable_padding(pad_id=3, length=12)
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, fields in (("tokenizer_", about), ("", config), ("generation_", generation)):
        if fields is not None:
            (tmp_path / f"{name}config.json").write_text(json.dumps(fields))
    if want is None:
        with pytest.raises(ValueError, match=r"tokenizer.json: .*one token .* got \[256, 257\]"):
            from_directory(tmp_path)
        return
    found = from_directory(tmp_path)
    assert (found.start, found.stop, found.chat_template, found.names) == want
    ids = found.encode("abcdefgh")
    assert len(ids) == 8 + (want[0] is not None) and found.decode(ids) == "abcdefgh"
    assert found.encode("<s>ab").count(256) == 1


if __name__ == "__main__":
    rows = (
        f"[{json.dumps(text, ensure_ascii=not text.isprintable())}, {ids}]"
        for text, ids in zip(TEXTS, packaged_tokens(), strict=True)
    )
    GOLDEN.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
