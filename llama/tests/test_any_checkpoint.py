"""Strangers' checkpoints: whatever a field or a file holds, a model loads and computes numbers, or
a ValueError says where and what is wrong.

Each checkpoint is a good one with one thing replaced.
"""

import json
import math
import shutil
import struct
import types
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import write_gguf
from test_llama_text import word_tokenizer
from test_tokenizer import BytePairs, SentencePieces

from treeattn_llama import Llama, gguf_file, open_checkpoint
from treeattn_llama.tokenizer import from_directory

LLAMAS = Path(__file__).parent / "data" / "llamas"

pytestmark = pytest.mark.usefixtures("unchecked")

NO_NUMBER = (True, False, "1", "x", "", [], [1], {}, {"a": 1}, [[1.0]])
NO_SIZE = (*NO_NUMBER, 0, -1, 1.5, 2.0, math.nan, math.inf, 10**30, 2**31, 2**63, -(2**63))
NOT_POSITIVE = (*NO_NUMBER, 0, -1, 0.0, -0.5, math.nan, math.inf, -math.inf, 10**400)
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
    assert np.isfinite(model.logits(np.array([[1, 2, 3]]))).all()
    return None


def refuses(path, *words):
    assert loads_or_says(path, *words) is not None, "loaded"


# config.json


class Folder:
    """A copy of a made checkpoint whose config.json is written anew for each case."""

    def __init__(self, name: str, path: Path):
        self.path = Path(shutil.copytree(LLAMAS / name, path / name))
        self.fields = json.loads((self.path / "config.json").read_text())

    def write(self, fields) -> Path:
        (self.path / "config.json").write_text(json.dumps(fields))
        return self.path

    def changed(self, name: str, value) -> Path:
        """With a field replaced: one of `rope_parameters` if there is one of that name."""
        rotary = self.fields["rope_parameters"]
        if name in rotary:
            return self.write(self.fields | {"rope_parameters": rotary | {name: value}})
        return self.write(self.fields | {name: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder("llama31", tmp_path_factory.mktemp("config"))


SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
SIZES += ["num_key_value_heads", "head_dim", "intermediate_size"]
NUMBERS = ["rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"]
NUMBERS += ["original_max_position_embeddings"]
FLAGS = ["tie_word_embeddings", "attention_bias", "mlp_bias"]
CONFIGS = {
    **dict.fromkeys(SIZES, NO_SIZE),
    "max_position_embeddings": (*NO_NUMBER, 0, -1, 1.5, math.nan),
    **dict.fromkeys(NUMBERS, NOT_POSITIVE),
    **dict.fromkeys(FLAGS, NO_FLAG),
    "model_type": (*NO_TEXT, None, "", "gpt2"),
    "hidden_act": (*NO_TEXT, "", "gelu"),
    "rope_type": (["llama3"], 3, {"a": 1}, "yarn", True),
    "rope_scaling": ("linear", 3, ["llama3"], True, 0.5),
    "rope_parameters": ("linear", 3, ["llama3"], True, 0.5),
}
OF_TENSORS = (
    "configuration",
    "tensors",
    "missing",
    "evenly",
)  # a size that is one, but not this model's


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_fields_of_a_configuration_are_named(folder, name):
    for value in CONFIGS[name]:
        words = OF_TENSORS if name in SIZES and value in (2**31, 2**63, 10**30) else ()
        alias = {"model_type": "type", "rope_type": "rope"}
        refuses(folder.changed(name, value), alias.get(name, name), *words)


def test_both_places_of_rotary_numbers_have_to_be_right(folder):
    """Newer files have them in `rope_parameters`; an older field beside it is looked at, too."""
    for value in NOT_POSITIVE:
        refuses(folder.write(folder.fields | {"rope_theta": value}), "rope_theta")
    assert loads_or_says(folder.write(folder.fields | {"rope_theta": 1e4})) is None
    linear = {"rope_type": "linear", "factor": 0}
    refuses(folder.write(folder.fields | {"rope_scaling": linear}), "factor")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", NUMBERS)
def test_extreme_numbers_of_a_configuration(folder, name):
    for value in (5e-324, 1e-38, 1e300):
        loads_or_says(folder.changed(name, value), name, "rotary", "low_freq_factor")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(st.data())
def test_any_value_of_any_field_of_a_configuration(folder, data):
    names = sorted({*folder.fields, *folder.fields["rope_parameters"], "rope_scaling"})
    path = folder.changed(data.draw(st.sampled_from(names)), data.draw(json_values))
    loads_or_says(path)


@pytest.mark.parametrize("value", [[], [1], 3, "x", None, True, [{}], math.nan])
def test_a_configuration_that_is_no_object(folder, value):
    refuses(folder.write(value), "config.json: expected an object")


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text", [DEEP, "", "{", "\ufffd", '{"model_type": ' + DEEP + "}", "1" * 9999]
)
def test_files_that_are_no_json(tmp_path, file, text):
    path = Folder("llama31", tmp_path).path
    (path / file).write_text(text, encoding="utf-8")
    refuses(path, f"{file}: not readable as JSON", f"{file}: expected an object")


FILES = ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]
FILES += [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("name", FILES)
def test_directories_where_files_are_expected(tmp_path, name):
    path = Folder("llama31", tmp_path).path
    if name not in FILES[:4]:
        word_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()
    refuses(path, name)


@pytest.mark.parametrize(
    "value", [[], ["x"], 3, None, {"a": 3}, {"a": None}, {"a": []}, {"a": "."}]
)
def test_indices_that_list_no_files(tmp_path, value):
    path = Folder("llama31", tmp_path).path
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    refuses(path, "weight_map", "safetensors")
    (path / "model.safetensors.index.json").write_text("{}")
    refuses(path, "weight_map")


def test_a_stale_index_beside_the_whole_model(tmp_path):
    path = Folder("llama3", tmp_path).path
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert loads_or_says(path) is None


def test_a_tensor_in_two_files(tmp_path):
    path = Folder("llama3", tmp_path).path
    (path / "model.safetensors").rename(path / "a.safetensors")
    shutil.copy(path / "a.safetensors", path / "b.safetensors")
    refuses(path, "is in a.safetensors, too")


# What would be computed otherwise


def test_fields_that_a_llama_has_not(folder):
    refuses(folder.changed("is_causal", False), "is_causal")
    rotary = folder.fields["rope_parameters"] | {"partial_rotary_factor": 0.5}
    refuses(folder.write(folder.fields | {"rope_parameters": rotary}), "partial_rotary_factor")
    rotary = {"full_attention": {"rope_type": "yarn", "factor": 4.0}}
    refuses(folder.write(folder.fields | {"rope_parameters": rotary}), "full_attention")
    linear = {"rope_type": "linear", "factor": 4.0}
    refuses(folder.write(folder.fields | {"rope_scaling": linear}), "rope_parameters differ")


def with_tensors(name: str, path: Path, change) -> Path:
    """A copy of a checkpoint in one file, its tensors changed."""
    folder = Folder(name, path).path
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_tied_head_is_the_embedding(tmp_path):
    def store(factor):
        def change(tensors):
            tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]

        return change

    same = with_tensors("llama32", tmp_path / "same", store(1))
    assert loads_or_says(same) is None
    refuses(with_tensors("llama32", tmp_path / "other", store(2)), "lm_head.weight is not")


@pytest.mark.parametrize("name", ["foo.lm_head.weight", "rope_freqs.weight"])
def test_tensors_that_nothing_reads(tmp_path, name):
    def change(tensors):
        tensors[name] = np.ones(4, np.float32)

    refuses(with_tensors("llama3", tmp_path, change), name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers(tmp_path, name, value):
    def change(tensors):
        tensors[name].flat[3] = value

    refuses(with_tensors("llama3", tmp_path, change), "expected finite numbers", name)


def test_tokens_beyond_the_vocabulary(tmp_path):
    path = Folder("llama3", tmp_path).path
    words = tokenizers.models.WordLevel({"a": 0, "b": 5000}, "a")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    refuses(path, "ids up to 5000")


# The metadata of GGUF files


def test_a_list_longer_than_its_file(tmp_path):
    """It would be read without an end."""

    def text(x):
        return struct.pack("<Q", len(x)) + x

    file = tmp_path / "x.gguf"
    kind = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    listed = text(b"x") + struct.pack("<IIQ", 9, 0, 2**40)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + kind + listed)
    refuses(file, "truncated or corrupt GGUF file")


def test_numbers_in_the_other_order(tmp_path, monkeypatch):
    right = gguf.GGUFWriter

    def big(path, arch):
        return right(path, arch, endianess=gguf.GGUFEndian.BIG)

    monkeypatch.setattr(gguf, "GGUFWriter", big)
    refuses(write_gguf("llama3", tmp_path / "x.gguf"), "little-endian")


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
    **dict.fromkeys(("embedding_length", "block_count", "feed_forward_length"), NO_SIZE),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv"), NO_SIZE),
    **dict.fromkeys(("attention.key_length", "rope.dimension_count"), NO_SIZE),
    "context_length": (*NO_NUMBER, 0, -1, 1.5, math.nan),
    "rope.freq_base": NOT_POSITIVE,
    "attention.layer_norm_rms_epsilon": NOT_POSITIVE,
    "rope.scaling.type": (3, ["linear"], {}, "yarn", True, b"none"),
    "rope.scale_linear": NOT_POSITIVE,
    "expert_count": (1, "x", [1], 8, True),
}


@pytest.mark.parametrize("name", METADATA)
def test_wrong_metadata_of_a_model_is_named(changed, name):
    words = ("experts",) if name == "expert_count" else ("rope scaling",)
    for value in METADATA[name]:
        sizes = OF_TENSORS if value in (2**31, 2**63, 10**30) else ()
        refuses(changed({f"llama.{name}": value}), f"llama.{name}", *words, *sizes)


def test_a_factor_without_a_type_is_linear(changed):
    """As in llama.cpp, by its older name, too."""
    tokens = np.array([[1, 2, 3]])
    plain = Llama.load(changed({})).logits(tokens)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaled = Llama.load(changed(linear)).logits(tokens)
    assert abs(scaled - plain).max() > 1e-3
    for name in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        found = Llama.load(changed({name: 4.0})).logits(tokens)
        np.testing.assert_array_equal(found, scaled)


def test_a_factor_without_a_number(changed):
    linear = {"llama.rope.scaling.type": "linear"}
    assert loads_or_says(changed(linear | {"llama.rope.scaling.factor": 2})) is None
    refuses(changed(linear), "lacks llama.rope.scaling.factor")
    for factor in NOT_POSITIVE:
        refuses(
            changed(linear | {"llama.rope.scaling.factor": factor}), "llama.rope.scaling.factor"
        )


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


@pytest.mark.parametrize("kind", [PAIRS, SENTENCES], ids=["pairs", "sentences"])
def test_the_vocabularies_are_good_as_they_are(changed, kind):
    assert loads_or_says(changed(vocabulary(kind))) is None


@pytest.mark.parametrize(("kind", "ids"), [(PAIRS, (None, set())), (SENTENCES, (1, {2}))])
def test_where_a_file_does_not_say_how_texts_begin_and_end(changed, kind, ids):
    """A vocabulary like Llama 2's has its numbers, as in llama.cpp."""
    fields = vocabulary(kind, add_bos_token=True)
    for name in ("bos", "eos", "eot"):
        del fields[f"tokenizer.ggml.{name}_token_id"]
    tokenizer = open_checkpoint(changed(fields)).tokenizer
    assert (tokenizer.start, tokenizer.stop) == ids


@pytest.mark.parametrize("name", VOCABULARY)
def test_wrong_metadata_of_a_tokenizer_is_named(changed, name):
    kind = SENTENCES if name in (*SENTENCES, "add_space_prefix") else PAIRS
    for value in VOCABULARY[name]:
        refuses(changed(vocabulary(kind, **{name: value})), "tokenizer")
    for template in NO_TEXT:
        refuses(changed(vocabulary(kind) | {"tokenizer.chat_template": template}), "chat_template")


def test_wrong_types_in_a_file_itself(tmp_path):
    for n, add in enumerate(
        [
            lambda w: w.add_string("llama.attention.key_length", "8"),
            lambda w: w.add_array("llama.attention.key_length", [8, 8]),
            lambda w: w.add_float32("llama.attention.key_length", 8.0),
            lambda w: w.add_bool("llama.attention.key_length", True),
        ]
    ):

        class Writer(gguf.GGUFWriter):
            def add_key_length(self, _, add=add):
                add(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf, "GGUFWriter", Writer)
            path = write_gguf("llama3", tmp_path / f"{n}.gguf")
        refuses(path, "llama.attention.key_length: expected an integer")


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_wrong_rotary_factors(tmp_path, value, monkeypatch):
    monkeypatch.setattr(
        "test_checkpoint.rotary_frequencies", lambda config: np.float32([value] * 4)
    )
    refuses(write_gguf("llama31", tmp_path / "x.gguf"), "rotary frequencies")


# tokenizer.json, and what lies beside it


@pytest.fixture(scope="module", params=["pairs", "pieces"])
def tokenizer_folder(request, tmp_path_factory):
    maker = BytePairs("smollm") if request.param == "pairs" else SentencePieces()
    return maker.write_directory(tmp_path_factory.mktemp(request.param) / "model")


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
    entries = (
        [*x.items()] if isinstance(x, dict) else [*enumerate(x)] if isinstance(x, list) else []
    )
    for key, value in entries[:2] if len(entries) > 30 else entries:
        yield from places(value, (*at, key))


WHATEVER = (None, True, 0, -1, 2**31, 1.5, "", "x", "<unk>", [], ["x"], {}, {"type": "x"}, [[1, 2]])


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
    node[last] = data.draw(st.sampled_from(WHATEVER))
    try:
        file.write_text(json.dumps(fields), encoding="utf-8")
        encodes_or_says(tokenizer_folder)
    finally:
        file.write_text(text, encoding="utf-8")


def test_a_panic_of_the_library_is_a_value_error(tmp_path):
    path = SentencePieces().write_directory(tmp_path / "model")
    fields = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    fields["post_processor"]["special_tokens"] = {}
    (path / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    assert "PanicException" in str(encodes_or_says(path))


BESIDE = {
    "tokenizer_config.json": ("bos_token", "eos_token", "chat_template"),
    "generation_config.json": ("eos_token_id",),
    "config.json": ("bos_token_id", "eos_token_id"),
}


@pytest.mark.parametrize("file", BESIDE)
def test_any_value_beside_a_tokenizer(tokenizer_folder, file):
    zoo = (*WHATEVER, math.nan, "{{", [{"name": "default"}], [{"name": "default", "template": 3}])
    for name in BESIDE[file]:
        for value in (*zoo, {"content": 3}, {"content": None}, [1, "x"], [1, -1], 10**30):
            (tokenizer_folder / file).write_text(json.dumps({name: value}))
            encodes_or_says(tokenizer_folder)
    for value in ([], 3, "x", None):
        (tokenizer_folder / file).write_text(json.dumps(value))
        assert f"{file}: expected an object" in str(encodes_or_says(tokenizer_folder))
    (tokenizer_folder / file).unlink()


def test_an_end_numbered_zero_is_one(tokenizer_folder):
    (tokenizer_folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (tokenizer_folder / "config.json").write_text('{"eos_token_id": 5}')
    assert from_directory(tokenizer_folder).stop == {0}
    (tokenizer_folder / "generation_config.json").unlink()


# Chat templates


FAILING = [
    *("{{ 1 / 0 }}", "{{ 1 % 0 }}", "{{ messages + 1 }}", "{{ 'a' + 1 }}", "{{ nothing.at.all }}"),
    *("{{ messages[7].role }}", "{{ messages[0].content.x.y }}", "{{ range(10**9) | list }}"),
    *("{{ 2.0 ** 5000 }}", "{{ none() }}", "{{ messages | nothing }}", "{% for %}", "{{", "{% if"),
    *(
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{ raise_exception(1) }}",
    ),
    *(
        "{{ strftime_now(3) }}",
        "{{ messages | tojson(indent='a', x=1) }}",
        "{{ ''.__class__.__mro__ }}",
    ),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ " + "[" * 500 + "]" * 500 + " }}",
]


@pytest.mark.parametrize("template", FAILING, ids=range(len(FAILING)))
def test_a_template_that_fails(template):
    tokenizer = word_tokenizer(chat_template=template)
    with pytest.raises(ValueError, match=r"^messages: the checkpoint's chat template says: ."):
        tokenizer.chat("Hi")


PIECES = ["{{", "}}", "{%", "%}", "{#", "messages", "[0]", ".role", " for m in ", " if ", "endfor"]
PIECES += ["|", "tojson", "(", ")", "+", "'a'", "1", "/", "0", "loop", "bos_token", "not", " ", "x"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_template(template):
    tokenizer = word_tokenizer(chat_template=template)
    try:
        assert all(isinstance(i, int) for i in tokenizer.chat("Hi"))
    except ValueError as error:
        assert str(error).startswith("messages: the checkpoint's chat template says: ")


def test_texts_ids_and_paths_that_are_none():
    tokenizer = word_tokenizer(chat_template="x")
    for text in (None, 3, b"x", ["x"]):
        with pytest.raises(TypeError, match="prompt: expected a text"):
            tokenizer.encode(text)
    for messages in (None, 3, {"role": "user", "content": "x"}):
        with pytest.raises(TypeError, match="messages: expected a text or a list"):
            tokenizer.chat(messages)
    for ids in ([-1], [2**40], ["a"], 3, [None]):
        with pytest.raises(ValueError, match=r"^ids: the checkpoint's tokenizer says: "):
            tokenizer.decode(ids)
    for path in (3, [], b"x", 1.5):
        with pytest.raises(TypeError, match="path: expected a path"):
            Llama.load(path)


def test_more_layers_than_there_can_be(folder):
    """Said before the names of their tensors are listed: there would be billions."""
    refuses(folder.changed("num_hidden_layers", 10**12), "1000000000000 layers")


def test_a_header_that_is_no_tensors(tmp_path):
    path = Folder("llama3", tmp_path).path
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = np.array(3.0, np.float32)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    refuses(path, "model.norm.weight has shape ()")


# Damaged files


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config.json"])
def test_damaged_files(kind, stored, tmp_path):
    """Bytes replaced at random, or the end missing: read in full, or a ValueError that names it."""
    path = Folder("llama31", tmp_path).path
    file = path / {"safetensors": "model-00002-of-00003.safetensors"}.get(kind, kind)
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
