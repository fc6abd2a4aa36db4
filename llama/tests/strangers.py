"""Strangers' files: small Llamas whose tokenizers differ, and questions that others answer, too.

`data/ask_others.py` makes these files, asks llama.cpp about them as GGUF files and transformers
about them as directories, and stores the answers in `data/answers.json`. `test_strangers.py` asks
this package. Nothing here imports it.

Each model has one layer that does nothing: token i is followed by the token that the file's `next`
names for it, and by itself if `next` has none. So a file says what its model writes.
"""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's types
SIZE = 384  # of every vocabulary, so that all models run the same programs
HEAD = 32


@dataclasses.dataclass
class Stranger:
    """A file, and questions.

    kind:      "pairs" of bytes, as Llama 3's, or "pieces" with scores, as Llama 2's
    tokens:    tokens beyond the plain ones, with GGUF's types. In a directory those of other types
               than `NORMAL` and `UNUSED` are the added tokens of tokenizer.json.
    next:      the token after a token
    fields:    of a GGUF file's tokenizer; ids as tokens; None leaves a field out
    files:     JSON files of the directory beside tokenizer.json
    single:    the post-processor of tokenizer.json
    template:  of chats
    questions: (kind, text or messages, stop)
    """

    kind: str
    tokens: dict = dataclasses.field(default_factory=dict)
    next: dict = dataclasses.field(default_factory=dict)
    fields: dict = dataclasses.field(default_factory=dict)
    files: dict = dataclasses.field(default_factory=dict)
    single: str = "$A"
    template: str | None = None
    questions: list = dataclasses.field(default_factory=list)
    formats: tuple = ("gguf", "directory")
    tokenizer_class: str = "PreTrainedTokenizerFast"

    def vocabulary(self) -> dict[str, int]:
        """Each token's type, in the order of the ids."""
        plain = PAIRS if self.kind == "pairs" else PIECES
        whole = {**plain, **self.tokens}
        missing = SIZE - len(whole)
        return {**whole, **{f"[unused {i}]": UNUSED for i in range(missing)}}

    def known(self) -> dict[str, int]:
        """The ids of the tokens that a directory's tokenizer.json has."""
        names = [name for name, kind in self.vocabulary().items() if kind != UNUSED]
        return {name: i for i, name in enumerate(names)}


def byte_letters() -> list[str]:
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    letters = {b: chr(b) for b in seen} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [letters[b] for b in range(256)]


LETTERS = byte_letters()
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "i")]
MERGES += [("Ġti", "m"), ("Ġtim", "e"), ("i", "n"), ("u", "s"), ("us", "e"), ("use", "r")]
PAIRS = dict.fromkeys([*LETTERS, *(a + b for a, b in MERGES)], NORMAL)
# As Llama 3 cuts texts before it merges bytes.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁Hi", "▁INST", "time", "▁."]
PIECES = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
PIECES |= {f"<0x{b:02X}>": BYTE for b in range(256)}
PIECES |= dict.fromkeys([*"▁abcdefghijklmnoprstuxyzHIOSTN.,!?[]/:<>|_"], NORMAL)
PIECES |= {word[:n]: NORMAL for word in WORDS for n in range(2, len(word) + 1)}
JOINED = [piece for piece, kind in PIECES.items() if kind == NORMAL and len(piece) > 1]


def weights(stranger: Stranger, ids: dict[str, int]) -> dict[str, np.ndarray]:
    """The tensors by Hugging Face's names."""
    after = np.arange(SIZE)
    for token, successor in stranger.next.items():
        after[ids[token]] = ids[successor]
    head = np.zeros((SIZE, SIZE), np.float32)
    head[after, np.arange(SIZE)] = 1
    flat = {"input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,)}
    flat |= {f"self_attn.{x}_proj": (HEAD, SIZE) for x in "qkv"}
    flat |= {"self_attn.o_proj": (SIZE, HEAD), "mlp.down_proj": (SIZE, HEAD)}
    flat |= {f"mlp.{x}_proj": (HEAD, SIZE) for x in ("gate", "up")}
    tensors = {"model.embed_tokens.weight": np.eye(SIZE, dtype=np.float32), "lm_head.weight": head}
    tensors["model.norm.weight"] = np.ones(SIZE, np.float32)
    for name, shape in flat.items():
        x = np.full(shape, float(len(shape) == 1), np.float32)
        tensors[f"model.layers.0.{name}.weight"] = x
    return tensors


def write_gguf(stranger: Stranger, path: Path) -> Path:
    types = stranger.vocabulary()
    ids = {token: i for i, token in enumerate(types)}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HEAD)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    fields = {"tokens": list(types), "token_type": list(types.values())}
    if stranger.kind == "pairs":
        fields |= {"model": "gpt2", "pre": "llama-bpe", "merges": [" ".join(x) for x in MERGES]}
    else:
        scores = {piece: -float(i) for i, piece in enumerate(JOINED)}
        fields |= {"model": "llama", "scores": [scores.get(token, -1000.0) for token in types]}
    for name, value in (fields | stranger.fields).items():
        key = f"tokenizer.ggml.{name}"
        value = ids[value] if name.endswith("_token_id") and value in ids else value
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    if stranger.template is not None:
        writer.add_chat_template(stranger.template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, x in weights(stranger, ids).items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def backend_of(stranger: Stranger) -> tokenizers.Tokenizer:
    """The tokenizer of a directory."""
    types, ids = stranger.vocabulary(), stranger.known()
    if stranger.kind == "pairs":
        plain = {token: ids[token] for token in PAIRS}
        backend = tokenizers.Tokenizer(models.BPE(plain, MERGES, ignore_merges=True))
        cut = pre_tokenizers.Split(Regex(CUT), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
        backend.decoder = decoders.ByteLevel()
    else:
        plain = {token: ids[token] for token in PIECES}
        merges = []
        for piece in JOINED:
            parts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
            merges += [pair for pair in parts if pair[0] in ids and pair[1] in ids]
        how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        backend = tokenizers.Tokenizer(models.BPE(plain, merges, **how))
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([prepend, replace])
        steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    plain_types = (NORMAL, UNUSED, BYTE)
    for token in (token for token, kind in types.items() if kind not in plain_types):
        special = types[token] != USER_DEFINED
        backend.add_tokens([AddedToken(token, normalized=False, special=special)])
    named = [(token, ids[token]) for token in ids if f"{token} " in f"{stranger.single} "]
    backend.post_processor = processors.TemplateProcessing(
        single=stranger.single, special_tokens=named
    )
    return backend


def write_directory(stranger: Stranger, path: Path) -> Path:
    path.mkdir()
    ids = stranger.known()
    ids |= {token: i for i, token in enumerate(stranger.files.get("beside", []), len(ids))}
    safetensors.numpy.save_file(
        weights(stranger, ids), path / "model.safetensors", metadata={"format": "pt"}
    )
    backend_of(stranger).save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": SIZE,
        "hidden_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": HEAD,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    about = {"tokenizer_class": stranger.tokenizer_class, "clean_up_tokenization_spaces": False}
    if stranger.template is not None:
        about["chat_template"] = stranger.template
    files = {"config.json": config, "tokenizer_config.json": about}
    for name, fields in stranger.files.items():
        if name.endswith(".json"):
            fields = {key: ids.get(x, x) if key in IDS else x for key, x in fields.items()}
            files[name] = files.get(name, {}) | fields
    for name, fields in files.items():
        (path / name).write_text(json.dumps(fields), encoding="utf-8")
    return path


IDS = ("bos_token_id", "eos_token_id")

# ---------------------------------------------------------------- the table

USER = [{"role": "user", "content": "hello"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ messages[0].content }}"

# Tokens by whose names llama.cpp ends a text.
END_NAMES = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <｜end▁of▁sentence｜> [e~["
).split()
MORE_END_NAMES = "<|return|> <|call|> <|flush|> <|calls|> <|tool_response>".split()
FILLING = "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split()
FILLING += "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
OTHER_NAMES = "<|begin_of_text|> <|start_header_id|> <|stop|> <bos> <|fim_prefix|> <MID>".split()


def endings(names, kind) -> Stranger:
    """A letter leads to each name, and each name to "z", at which nothing ends."""
    entries = [chr(ord("A") + i) for i in range(len(names))]
    after = dict(zip(entries, names, strict=True)) | dict.fromkeys(names, "z")
    questions = [("ends", letter, None) for letter in entries]
    questions += [("ids", f"a{name}b", None) for name in names]
    tokens = dict.fromkeys(names, kind)
    begin = {"bos_token_id": "h", "eos_token_id": "q"}  # without them llama.cpp takes token 11
    return Stranger("pairs", tokens, after, begin, questions=questions, formats=("gguf",))


LLAMA_3 = {
    "<|begin_of_text|>": CONTROL,
    "<|end_of_text|>": CONTROL,
    "<|eot_id|>": CONTROL,
    "<|eom_id|>": CONTROL,
    "<|start_header_id|>": CONTROL,
    "<|end_header_id|>": CONTROL,
}
WRITES = {"a": "b", "b": "c", "c": "<|eot_id|>", "<|eot_id|>": "d", "d": "e"}
WRITES |= {"e": "<|eom_id|>", "<|eom_id|>": "f", "f": "<|end_of_text|>", "<|end_of_text|>": "g"}
BOS = {"bos_token_id": "<|begin_of_text|>"}
BEGIN = "<|begin_of_text|> $A"
IM = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL}
STORY = {"▁Once": "▁upon", "▁upon": "▁a", "▁a": "▁time", "▁time": "</s>"}
AFTER_INST = {"]": "▁Hi", "▁Hi": "▁.", "▁.": "</s>"}


def story(**options) -> Stranger:
    """Llama 2's kind, whose prompts ask for the space before a continuation."""
    options.setdefault("fields", {})
    questions = [("text", text, None) for text in ("Once", "Once upon", "time upon", "a Once")]
    questions += [("text", "[/INST]", None)]
    if "formats" not in options:
        questions += [("stop", "Once", " a"), ("stop", "Once", " upon")]
    questions += [("ids", text, None) for text in ("Once", " Once", "a</s> a", "<s>a", "", "é a")]
    return Stranger("pieces", {}, STORY | AFTER_INST, questions=questions, **options)


def beside(tokens: list[str], questions: list, kind="pairs", **files) -> Stranger:
    """A directory with tokens that stand beside tokenizer.json."""
    files = {f"{name}.json": fields for name, fields in files.items()} | {"beside": tokens}
    return Stranger(kind, {}, files=files, questions=questions, formats=("directory",))


def added(content: str, **options) -> dict:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"__type": "AddedToken", "content": content, "special": True} | plain | options


FIRST = len(PAIRS)  # the first id beside tokenizer.json
TOOL = [("ids", "a<tool>b", None), ("ids", "<tool>", None), ("ids", "a <tool> b", None)]
BY_ID = {str(FIRST): added("<tool>")}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

STRANGERS = {
    # Ends
    "ends by name, control": endings(END_NAMES, CONTROL),
    "ends by name, normal": endings(END_NAMES, NORMAL),
    "ends by name, user-defined": endings(END_NAMES, USER_DEFINED),
    "more ends by name, control": endings(MORE_END_NAMES, CONTROL),
    "more ends by name, normal": endings(MORE_END_NAMES, NORMAL),
    "tools for filling in, normal": endings(FILLING[:1] + FILLING[5:6] + FILLING[-1:], NORMAL),
    "others for filling in, normal": endings(["[PAD]", "<|repo_name|>"], NORMAL),
    "others for filling in, control": endings(["<PAD>", "<REPO>", "<|file_sep|>"], CONTROL),
    "names that end nothing, control": endings(OTHER_NAMES, CONTROL),
    "names that end nothing, normal": endings(OTHER_NAMES[:4], NORMAL),
    "names for filling in, normal": endings(OTHER_NAMES[4:], NORMAL),
    "a file that names the end of a text only": Stranger(
        "pairs",
        LLAMA_3,
        WRITES,
        {**BOS, "eos_token_id": "<|end_of_text|>"},
        {
            "generation_config.json": {"eos_token_id": "<|end_of_text|>"},
            "tokenizer_config.json": {"bos_token": "<|begin_of_text|>"},
        },
        BEGIN,
        questions=[("ends", x, None) for x in "acdef"],
    ),
    "a directory whose config.json names the end": Stranger(
        "pairs",
        LLAMA_3,
        WRITES,
        files={"config.json": {"eos_token_id": "<|eot_id|>"}},
        questions=[("ends", x, None) for x in "ad"],
        formats=("directory",),
    ),
    "a generation_config.json beside it without an end": Stranger(
        "pairs",
        LLAMA_3,
        WRITES,
        files={
            "config.json": {"eos_token_id": "<|eot_id|>"},
            "generation_config.json": {"bos_token_id": "<|begin_of_text|>"},
        },
        questions=[("ends", x, None) for x in "ad"],
        formats=("directory",),
    ),
    "tokens by the names that a template knows": Stranger(
        "pairs",
        LLAMA_3,
        files={
            "tokenizer_config.json": {
                "extra_special_tokens": {
                    "eot_token": "<|eot_id|>",
                    "begin": "<|start_header_id|>",
                }
            }
        },
        template="{{ begin }}{{ messages[0].content }}{{ eot_token }}",
        questions=[("chat", USER, None), ("ids", "a<|eot_id|>b", None)],
        formats=("directory",),
    ),
    "ends by fields": Stranger(
        "pairs",
        {f"<|{x}|>": CONTROL for x in "1234567"},
        {x: f"<|{x}|>" for x in "1234567"} | {f"<|{x}|>": "z" for x in "1234567"},
        {
            "bos_token_id": "h",
            "eos_token_id": "<|1|>",
            "eot_token_id": "<|2|>",
            "eom_token_id": "<|3|>",
            "fim_pad_token_id": "<|4|>",
            "fim_rep_token_id": "<|5|>",
            "fim_sep_token_id": "<|6|>",
        },
        questions=[("ends", x, None) for x in "1234567"],
        formats=("gguf",),
    ),
    "a normal token as the field's end": Stranger(
        "pairs",
        {"stop": NORMAL},
        {"a": "stop", "stop": "z"},
        {"bos_token_id": "h", "eos_token_id": "stop"},
        questions=[("ends", "a", None), ("ids", "a stop", None)],
        formats=("gguf",),
    ),
    "no types": Stranger(
        "pairs",
        LLAMA_3,
        WRITES,
        {**BOS, "eos_token_id": "<|end_of_text|>", "token_type": None},
        questions=[("ends", "a", None), ("ids", "a<|eot_id|>b<|start_header_id|>", None)],
        formats=("gguf",),
    ),
    "Llama 2's kind, ends by name": Stranger(
        "pieces",
        {"<|im_end|>": NORMAL, "<end_of_turn>": CONTROL, "<|end|>": USER_DEFINED},
        {"a": "<|im_end|>", "b": "<end_of_turn>", "c": "<|end|>", "d": "</s>"},
        questions=[("ends", x, None) for x in ("xa", "xb", "xc", "xd")]
        + [("ids", "a<|im_end|> b", None), ("ids", "a <|end|>b", None)],
        formats=("gguf",),
    ),
    # Stop strings
    "stop strings": Stranger(
        "pairs",
        LLAMA_3,
        WRITES | {"f": "g", "g": "h", "h": "<|start_header_id|>", "<|start_header_id|>": "i"},
        {**BOS, "eos_token_id": "<|end_of_text|>"},
        single=BEGIN,
        questions=[
            ("stop", "f", "<|start_header_id|>"),
            ("stop", "f", "h<|start_header_id|>"),
            ("stop", "f", "<|start_header_id|>i"),
            ("stop", "f", "|start"),
            ("stop", "f", "hi"),
            ("stop", "f", "h"),
            ("stop", "f", "gh"),
        ],
    ),
    # Beginnings
    "Llama 2's kind": story(single="<s> $A"),
    "Llama 2's kind without the space": story(
        fields={"add_space_prefix": False}, formats=("gguf",)
    ),
    "bytes that are no character": Stranger(
        "pieces",
        {},
        dict(pairwise("▁H <0x0A> <0x99> <0xE6> <0x41> <0xC3> <0xA9> O </s>".split())),
        questions=[("text", "H", None)],
        formats=("gguf",),
    ),
    "a directory of the class LlamaTokenizer": Stranger(
        "pieces",
        {},
        files={"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}},
        single="<s> $A",
        questions=[("ids", text, None) for text in ("Once", " Once", "a</s> a", "", " ", "▁a")],
        tokenizer_class="LlamaTokenizer",
    ),
    "a chat without a BOS of its own": Stranger(
        "pairs",
        {**LLAMA_3, **IM},
        {"Ċ": "h", "h": "i", "i": "<|im_end|>"},
        {**BOS, "eos_token_id": "<|im_end|>"},
        {"tokenizer_config.json": {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}},
        BEGIN,
        CHATML,
        [("chat", USER, None), ("ids", "hello", None), ("ids", "<|begin_of_text|>hello", None)],
    ),
    "a chat with a BOS of its own": Stranger(
        "pairs",
        {**LLAMA_3, **IM},
        {},
        {**BOS, "eos_token_id": "<|im_end|>"},
        {"tokenizer_config.json": {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}},
        BEGIN,
        "{{ bos_token }}" + CHATML + "{{ eos_token }}",
        [("chat", USER, None), ("chat", [{"role": "system", "content": "in"}, *USER], None)],
    ),
    "Llama 2's chat": Stranger(
        "pieces",
        {},
        AFTER_INST,
        {},
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}},
        "<s> $A",
        "{{ bos_token }}" + INST,
        [("chat", USER, None)],
    ),
    "all names in a template": Stranger(
        "pieces",
        {"<pad>": CONTROL},
        {},
        {"unknown_token_id": "<unk>", "padding_token_id": "<pad>"},
        {"tokenizer_config.json": {**NAMED, "unk_token": added("<unk>")}},
        "<s> $A",
        TOKENS,
        [("chat", USER, None)],
    ),
    "no names in a template": Stranger(
        "pieces",
        {},
        {},
        {},
        {
            "tokenizer_config.json": {"bos_token": None, "eos_token": None},
            "config.json": {"bos_token_id": "<s>", "eos_token_id": "</s>"},
        },
        "$A",
        TOKENS,
        [("chat", USER, None)],
        formats=("directory",),
    ),
    "names in special_tokens_map.json": Stranger(
        "pieces",
        {"<pad>": CONTROL},
        {},
        {},
        {"special_tokens_map.json": {**NAMED, "pad_token": {"content": "<pad>"}}},
        "<s> $A",
        TOKENS,
        [("chat", USER, None)],
        formats=("directory",),
    ),
    # Tokens beside tokenizer.json
    "added_tokens_decoder": beside(
        ["<tool>"], TOOL, tokenizer_config={"added_tokens_decoder": BY_ID}
    ),
    "added_tokens_decoder, two": beside(
        ["<tool>", "<more>"],
        [*TOOL, ("ids", "<more><tool>", None)],
        tokenizer_config={
            "added_tokens_decoder": {
                str(FIRST + 1): added("<more>", lstrip=True, special=False),
                **BY_ID,
            }
        },
    ),
    "added_tokens.json": beside(["<tool>"], TOOL, added_tokens={"<tool>": FIRST}),
    "additional_special_tokens": beside(
        ["<tool>"], TOOL, tokenizer_config={"additional_special_tokens": ["<tool>"]}
    ),
    "extra_special_tokens": beside(
        ["<tool>"], TOOL, tokenizer_config={"extra_special_tokens": ["<tool>"]}
    ),
    "special_tokens_map.json": beside(
        ["<tool>"],
        TOOL,
        special_tokens_map={"eos_token": {"content": "<tool>", "lstrip": False, "rstrip": False}},
    ),
    "special_tokens_map.json, additional": beside(
        ["<tool>"], TOOL, special_tokens_map={"additional_special_tokens": ["<tool>"]}
    ),
    "an eos_token": beside(["<tool>"], TOOL, tokenizer_config={"eos_token": "<tool>"}),
    "an eos_token that is an object": beside(
        ["<tool>"], TOOL, tokenizer_config={"eos_token": added("<tool>", rstrip=True)}
    ),
    "an eos_token that is an ordinary token": beside(
        ["hello"], [("ids", "hello hello", None)], tokenizer_config={"eos_token": "hello"}
    ),
    "a chat with tokens from beside": Stranger(
        "pairs",
        {},
        files={
            "beside": ["<|im_start|>", "<|im_end|>"],
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {
                    str(FIRST): added("<|im_start|>"),
                    str(FIRST + 1): added("<|im_end|>"),
                },
            },
        },
        template=CHATML,
        questions=[("chat", USER, None)],
        formats=("directory",),
    ),
}

# Whose answers are right, for a GGUF file and for a directory, and why. Where both are asked and
# disagree, this says whom the package follows.
OWN = ("llama.cpp", "transformers")
FOLLOWED = {
    "ids": (*OWN, "who reads a format is the one whom its authors try their files with"),
    "ends": (*OWN, "the same; a directory names its ends by id, and no others count"),
    "chat": (
        *OWN,
        "the same; llama.cpp puts a BOS before a template's text, transformers does not",
    ),
    "text": (
        *("llama.cpp", "llama.cpp"),
        "prompt + text is the text; transformers decodes the new tokens alone, without the space",
    ),
    "stop": (
        *("transformers", "transformers"),
        "who wants to stop at a special token says so; llama.cpp searches what it shows",
    ),
}
# Files whose ids are llama.cpp's in both formats.
AS_LLAMA_CPP = {
    "a directory of the class LlamaTokenizer": (
        "transformers 5 lets the class cut texts otherwise than tokenizer.json says, and drops the "
        "first of two spaces; tokenizers and llama.cpp do as the file says"
    )
}
# Single questions with another answer: (ours, why).
OURS = {
    (
        "Llama 2's kind",
        "ids",
        "<s>a",
    ): "begins once: two BOS are a mistake of which llama.cpp warns",
    ("Llama 2's kind without the space", "ids", "<s>a"): "the same",
    ("a chat without a BOS of its own", "ids", "<|begin_of_text|>hello"): "the same",
    ("stop strings", "stop", "hi"): "llama.cpp's: the text that is shown has the string",
    ("stop strings", "stop", "|start"): "llama.cpp's: no part of a special token is shown",
    ("stop strings", "stop", "h<|start_header_id|>"): "refused: the string is no special token",
    ("stop strings", "stop", "<|start_header_id|>i"): "the same",
}
