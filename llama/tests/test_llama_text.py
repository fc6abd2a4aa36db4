"""Tokenizers, sampling, streaming and the command line."""

import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import types
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from treeattn_llama import Llama, LookupDraft, Tokenizer, chat, generate, stream
from treeattn_llama.__main__ import arguments, main, with_flags
from treeattn_llama.gguf_tokenizer import from_gguf
from treeattn_llama.layout import Layout
from treeattn_llama.sampling import Sampling, nucleus, settled
from treeattn_llama.tokenizer import from_directory

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


@pytest.fixture(scope="module")
def small():
    return Llama.load(SMALL)


# Sampling


def test_nucleus_keeps_the_fewest_likeliest_tokens():
    logits = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25]))
    for top_p, kept in (
        (0.4, [1]),
        (0.5, [1]),
        (0.6, [1, 3]),
        (0.8, [1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ):
        assert np.flatnonzero(np.isfinite(nucleus(logits, top_p))).tolist() == kept, top_p


def test_a_nucleus_of_a_large_vocabulary():
    """Looked for among the likeliest 1,024 first: the answer is that of a full sort."""
    for spread in (0.01, 3.0):
        logits = spread * jax.random.normal(jax.random.key(0), (5000,))
        p = np.sort(np.asarray(jax.nn.softmax(logits)))[::-1]
        for top_p in (0.1, 0.9, 0.999):
            count = int((np.cumsum(p) - p < top_p).sum())
            assert abs(int(jnp.isfinite(nucleus(logits, top_p)).sum()) - count) <= 1


def test_top_k_and_top_p_and_temperature():
    p = np.array([0.1, 0.5, 0.15, 0.25])
    left = jax.nn.softmax(settled(jnp.log(p), 1.0, 3))
    np.testing.assert_allclose(left, p * (p > 0.1) / 0.9, atol=1e-6)
    left = jax.nn.softmax(settled(jnp.log(p), 0.5, 3, 0.6))  # squares: 0.25, 0.0225, 0.0625
    np.testing.assert_allclose(left, [0, 1, 0, 0], atol=1e-6)
    left = jax.nn.softmax(settled(jnp.log(p), 1e-45, 100))
    np.testing.assert_allclose(left, [0, 1, 0, 0], atol=1e-6)


def test_sampling_has_the_distribution_it_says():
    """Each token is drawn with the key of its number, so that all are independent draws."""
    p = np.array([0.1, 0.5, 0.15, 0.25], np.float32)
    for settings, want in (
        ({"temperature": 1.0}, p),
        ({"temperature": 0.5}, p**2 / (p**2).sum()),
        ({"temperature": 1.0, "top_p": 0.7}, np.array([0, 2, 0, 1]) / 3),
        ({"temperature": 1.0, "top_k": 3}, p * (p > 0.1) / 0.9),
    ):
        sampling = Sampling(**settings, key=jax.random.key(0))
        logits = np.broadcast_to(np.log(p), (1, 1500, 4))
        drawn = sampling.next_tokens(logits, np.arange(1500)[None])
        np.testing.assert_allclose(np.bincount(drawn[0], minlength=4) / 1500, want, atol=0.05)


def test_options_are_any_numbers(small, unchecked):
    """Of Python's, NumPy's or JAX's; a top_p that float32 does not hold leaves the likeliest."""
    how = {"max_new_tokens": 8, "seed": 5}
    drawn = generate(small, [3, 1, 4], temperature=0.5, top_k=5, top_p=0.5, **how).tokens
    half = {"temperature": Fraction(1, 2), "top_k": jnp.int32(5), "top_p": np.array(0.5)}
    assert generate(small, [3, 1, 4], **half, **how).tokens == drawn
    likeliest = generate(small, [3, 1, 4], max_new_tokens=8).tokens
    assert generate(small, [3, 1, 4], temperature=1.0, top_p=1e-40, **how).tokens == likeliest
    assert len(generate(small, [3, 1, 4], temperature=10**12, **how).tokens) == 8


def test_a_seed_is_a_key(small, unchecked):
    how = {"max_new_tokens": 8, "temperature": 1.0}
    first = generate(small, [3, 1, 4], seed=5, **how).tokens
    assert first == generate(small, [3, 1, 4], key=jax.random.key(5), **how).tokens
    assert first == generate(small, [3, 1, 4], key=jax.random.PRNGKey(5), **how).tokens
    assert first != generate(small, [3, 1, 4], seed=6, **how).tokens


BAD = [
    ({"temperature": -1.0}, "temperature: expected at least 0, got -1"),
    ({"top_p": 0.0}, "top_p: expected more than 0"),
    ({"top_p": 1.5}, "top_p: expected more than 0"),
    ({"top_k": 0}, "top_k: expected an integer of at least 1, got 0"),
    ({"temperature": 1.0}, "temperature: 1.0 draws at random: pass seed=0"),
    ({"key": 0, "temperature": 1.0}, "key: expected a jax.random.key, or seed=0, got 0"),
    ({"seed": -1}, "seed: expected an integer from 0 to 4294967295, got -1"),
    ({"seed": 1, "key": jax.random.key(0)}, "seed: expected one of seed and key, got both"),
    ({"max_new_tokens": 0}, "max_new_tokens: expected an integer from 1 to 2147483647, got 0"),
    ({"max_new_tokens": 10**20}, "max_new_tokens: expected an integer from 1 to 2147483647"),
    ({"budget": 0}, "budget: expected an integer of at least 1, got 0"),
    ({"capacity": 6}, "capacity: the longest prompt and max_new_tokens need 7, got 6"),
    ({"prompts": []}, "prompts: expected lists of token ids, none of them empty"),
    ({"prompts": "Hi"}, "model: this checkpoint has no tokenizer: texts are lists of token ids"),
    ({"prompts": [[1, 96]]}, "prompts: expected ids from 0 to 95, got 96"),
    ({"stop": "."}, "model: this checkpoint has no tokenizer"),
    ({"stop": [1, ""]}, "stop: expected strings that are not empty"),
    ({"stop": [1.5]}, "stop: expected an integer from 0 to 95, got 1.5"),
    ({"stop": 96}, "stop: expected an integer from 0 to 95, got 96"),
    ({"stop": [[1], [2, 3]]}, r"stop: expected an integer from 0 to 95, got \[1\]"),
    ({"draft": "suffix"}, "draft: expected None, 'lookup', or an object with methods"),
    ({"draft": LookupDraft}, r"draft: expected an object, got a class: pass LookupDraft\(\)"),
    ({"draft": 3}, "draft: expected None, 'lookup', or an object .* got 3"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_options_are_found_before_any_work(small, unchecked, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        stream(small, **{"prompts": [[1, 2, 3]], "max_new_tokens": 5} | options)


# Streaming


def greedy(model, prompt, n):
    """Greedy decoding by full passes of one length, without a cache."""
    ids = list(prompt)
    for _ in range(n):
        padded = np.array([ids + [0] * (16 - len(ids))])
        ids.append(int(model.logits(padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_stream_is_greedy_decoding_of_each_prompt(small):
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    calls = list(stream(small, prompts, max_new_tokens=6))
    assert calls == [
        [[a], [b]] for a, b in zip(*(greedy(small, p, 6) for p in prompts), strict=True)
    ]


def test_stream_stops_each_text_after_its_end_token(small):
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    want = [greedy(small, p, 6) for p in prompts]
    end = next(t for t in want[0] if t not in want[1])
    cut = want[0].index(end)
    rows = list(zip(*stream(small, prompts, max_new_tokens=6, stop=[end]), strict=True))
    assert list(rows[0]) == [[token] for token in want[0][: cut + 1]] + [[]] * (5 - cut)
    assert list(rows[1]) == [[token] for token in want[1]]
    (alone,) = zip(*stream(small, prompts[:1], max_new_tokens=6, stop=[end]), strict=True)
    assert alone == rows[0][: cut + 1]  # nothing left to do: the stream ends


def test_each_token_is_drawn_with_the_key_of_its_number(small):
    """What full passes without a cache give."""
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    settings = {"temperature": 1.5, "top_p": 0.7, "key": jax.random.key(0)}
    texts = [list(p) for p in prompts]
    for i in range(6):
        padded = np.array([text + [0] * (16 - len(text)) for text in texts])
        last = small.logits(padded)[np.arange(2), [len(text) - 1 for text in texts]]
        drawn = Sampling(**settings).next_tokens(last[:, None], np.full((2, 1), i))
        texts = [[*text, *row] for text, row in zip(texts, drawn.tolist(), strict=True)]
    want = [text[len(p) :] for p, text in zip(prompts, texts, strict=True)]
    assert generate(small, prompts, max_new_tokens=6, **settings).tokens == want


# Text


def word_tokenizer(**options) -> Tokenizer:
    """Bytes, a token each; every character beyond ASCII is several of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, **options)


class Parrot:
    """Says the tokens it was given, as a model does: `stream` asks for nothing else."""

    layout = Layout()

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.ids = tokenizer, ids
        self.config = types.SimpleNamespace(vocabulary=256, context=256)

    def empty_cache(self, batch, capacity):
        return 0

    def prefill(self, prompts, cache):
        return jnp.eye(256)[jnp.array([self.ids[0]])], 1

    def extend(self, tokens, cache, positions, mask):
        return jnp.eye(256)[jnp.array([[self.ids[cache]]])], None

    def commit(self, cache, new, select, counts):
        return cache + 1


def test_text_waits_for_whole_characters(unchecked):
    tokenizer = word_tokenizer(chat_template="{{ messages[0].content }}")
    ids = tokenizer.encode("né €")
    parrot = Parrot(tokenizer, ids)
    told = list(chat(parrot, "Hi", max_new_tokens=len(ids)))
    assert "".join(told) == "né €" and "\ufffd" not in "".join(told)
    assert len(ids) == 7 and told[:2] == ["n", "é"]
    half = list(chat(Parrot(tokenizer, ids[:-1]), "Hi", max_new_tokens=len(ids) - 1))
    assert "".join(half) == tokenizer.decode(ids[:-1]) and half[-1].endswith("\ufffd")


def test_text_in_and_text_out(unchecked):
    tokenizer = word_tokenizer(stop=frozenset({0}))
    parrot = Parrot(tokenizer, tokenizer.encode("one two three! four five"))
    assert generate(parrot, "Hi").text == "one two three!"  # of `word_tokenizer` "!" is number 0
    assert generate(parrot, tokenizer.encode("Hi")).text == "one two three!"
    assert generate(parrot, ["Hi"]).text == ["one two three!"]
    with pytest.raises(ValueError, match="prompt: expected a text of at least one token, got ''"):
        generate(parrot, "")
    assert generate(parrot, "Hi", stop=[], max_new_tokens=24).text == "one two three! four five"
    found = generate(parrot, "Hi", stop=" th")
    assert found.text == "one two" and tokenizer.decode(found.tokens) == "one two th"
    assert generate(parrot, "Hi", stop=["w", "four"]).text == "one t"
    assert generate(parrot, "Hi", stop=["four"]).text == "one two three!"
    assert generate(parrot, "Hi", stop=["four", ord("x")]).text == "one two three! "


def test_chat_renders_the_template(unchecked):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    tokenizer = word_tokenizer(chat_template=template)
    assert tokenizer.decode(tokenizer.chat("Hi")) == "<user>Hi<answer>"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == "<system>a<user>b<answer>"
    with pytest.raises(ValueError, match="no chat template"):
        word_tokenizer().chat("Hi")
    refusing = word_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        refusing.chat("Hi")
    for messages in ([{"content": "Hi"}], [{"role": "user"}], ["Hi"]):
        with pytest.raises(ValueError, match='messages: expected dicts with "role" and "content"'):
            tokenizer.chat(messages)
    hostile = word_tokenizer(chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match=r"chat template says: .*unsafe"):
        hostile.chat("Hi")


def test_templates_have_what_transformers_gives_them():
    def render(template, **options):
        tokenizer = word_tokenizer(chat_template=template, **options)
        return tokenizer.decode(tokenizer.chat("Hi"))

    assert render("{% for i in [1, 2, 3] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert render("{{ add_generation_prompt }}") == "True"
    assert render("{{ strftime_now('%Y') }}") == datetime.datetime.now().strftime("%Y")
    assert render("{{ bos_token }}{{ eos_token }}", bos="<s>", eos="</s>") == "<s></s>"
    assert render("{% if tools is none %}{{ ['é<'] | tojson }}{% endif %}") == '["é<"]'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    inside = "a{% generation %}{{ m.content }}{% endgeneration %}b"
    assert render("{% for m in messages %}" + inside + "{% endfor %}") == "aHib"


def test_a_model_without_a_tokenizer_cannot_chat(small):
    assert small.tokenizer is None
    with pytest.raises(ValueError, match="no tokenizer"):
        chat(small, "Hi")


def test_tokenizer_of_a_directory(tmp_path):
    backend = word_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [257, 3]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    found = from_directory(tmp_path)
    assert found.start == 256 and found.stop == {257, 3} and found.chat_template == "x"
    # What belongs to the batches of a training run changes no prompt.
    backend.enable_truncation(4)
    backend.enable_padding(pad_id=3, length=12)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert from_directory(tmp_path).encode("abcdefgh") == found.encode("abcdefgh")
    assert found.encode("ab")[0] == 256 and found.encode("<s>ab").count(256) == 1
    assert found.decode(found.encode("ab")) == "ab"
    assert (found.bos, found.eos) == ("", "")
    about = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    named = [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "z"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": named}))
    found = from_directory(tmp_path)
    assert (found.bos, found.eos, found.chat_template) == ("<s>", "</s>", "z")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    found = from_directory(tmp_path)
    assert (found.bos, found.eos, found.chat_template) == ("<s>", "</s>", None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
        from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not readable"):
        from_directory(tmp_path)


@pytest.mark.parametrize(
    "single, start", [("$A </s>", None), ("<s> $A </s>", 256), ("$A", None), ("<s> </s> $A", ...)]
)
def test_what_stands_before_a_text_begins_it(tmp_path, single, start):
    backend = word_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    if start is ...:
        with pytest.raises(ValueError, match=r"tokenizer.json: .*one token .* got \[256, 257\]"):
            from_directory(tmp_path)
    else:
        assert from_directory(tmp_path).start == start


@pytest.mark.parametrize(
    "name, text",
    [
        ("generation_config.json", b'{"eos_token_id": "2"}'),
        ("config.json", b'{"eos_token_id": -1}'),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"bos_token": 3}'),
    ],
)
def test_the_file_that_is_wrong_is_named(tmp_path, name, text):
    word_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=name):
        from_directory(tmp_path)


def gguf_fields(**values):
    return {f"tokenizer.ggml.{name}": lambda v=v: v for name, v in values.items()}


def test_sentence_pieces_of_gguf_merge_the_best_first():
    """Against the definition: join the two neighbours whose piece scores best, until none do."""
    letters = [*"▁abc"]
    pieces = ["ab", "bc", "▁a", "abc", "ca", "▁ab", "cab", "aa", "▁c"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *letters, *pieces]
    rng = np.random.default_rng(0)
    scores = [0.0] * (259 + len(letters)) + rng.permutation(len(pieces)).astype(float).tolist()
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(pieces))
    tokenizer = from_gguf(
        gguf_fields(
            model="llama",
            tokens=tokens,
            scores=scores,
            token_type=kinds,
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
        ),
        Path("x.gguf"),
    )

    def encode(text):
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = enumerate(itertools.pairwise(parts))
            scored = [(scores[tokens.index(a + b)], -i) for i, (a, b) in pairs if a + b in pieces]
            if not scored:
                return [1] + [tokens.index(p) for p in parts]
            i = -max(scored)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    for _ in range(200):
        text = "c" + "".join(rng.choice([*"abc "], rng.integers(0, 12)))
        assert tokenizer.encode(text) == encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"  # bytes, where there is no piece
    assert tokenizer.stop == {2} and tokenizer.start == 1


def test_gguf_tokenizers_that_are_not_known():
    path = Path("x.gguf")
    assert from_gguf({}, path) is None
    with pytest.raises(ValueError, match=r"x.gguf: tokenizer: expected .*'bert'"):
        from_gguf(gguf_fields(model="bert", tokens=[]), path)
    with pytest.raises(ValueError, match=r"pre-tokenizer: expected one of .*'klingon'"):
        from_gguf(gguf_fields(model="gpt2", pre="klingon", tokens=[]), path)


# The command line


def command(*arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "treeattn_llama", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


@pytest.mark.slow
def test_the_command_line_answers():
    devices = "--devices", "2", "--attention", "butterfly"
    done = command("What is the capital of France?", *devices, "--draft", "lookup", "--tokens", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."
    assert "2 devices; prompt: 37 tokens" in done.stderr
    assert re.search(r"\d tokens/s, \d\.\d\d tokens a step", done.stderr), done.stderr


def test_the_command_line_explains_itself_on_any_terminal(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command("-h")
    assert done.returncode == 0, done.stderr
    assert "--attention" in done.stdout and '"Repeat this text: ..."' in done.stdout
    assert "?" not in done.stdout.replace("of France?", "")


def test_the_command_line_prints_what_the_terminal_can():
    code = """
import sys, treeattn_llama.__main__ as program
program.run = lambda args: print("caf\u00e9 \u65e5")
sys.argv = ["treeattn_llama", "Hi"]
sys.exit(program.main())
"""
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, timeout=300
    )
    assert done.returncode == 0 and done.stdout.decode("latin-1").strip() == "café ?", done.stderr


def test_the_command_line_ends_quietly_when_nobody_reads_on():
    code = """
import sys, treeattn_llama.__main__ as program
program.run = lambda args: [print("x" * 1000, flush=True) for _ in range(1000)]
sys.argv = ["treeattn_llama", "Hi"]
sys.exit(program.main())
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as running:
        assert running.stdout.readline().strip() == b"x" * 1000
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


@pytest.mark.parametrize("seed", ["1.5", "x"])
def test_seeds_that_are_none(seed, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["treeattn_llama", "Hi", "--seed", seed])
    with pytest.raises(SystemExit):
        arguments()
    assert f"argument --seed: invalid int value: {seed!r}" in capsys.readouterr().err


def test_errors_have_the_names_of_flags():
    assert with_flags("max_new_tokens: expected 1") == "--tokens: expected 1"
    assert with_flags("top_p: expected 1") == "--top-p: expected 1"
    assert with_flags("prompts: expected 1") == "prompt: expected 1"
    assert with_flags("n: expected 1") == "--devices: expected 1"
    assert with_flags("no such thing: top_p: 3") == "no such thing: top_p: 3"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "nothing.gguf"), "--model: no file or directory nothing.gguf"),
        (("--model", "org/name"), "are not downloaded"),
        (("--model", str(SMALL)), "no tokenizer"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["treeattn_llama", "Hi", *arguments])
    assert main() == 1
    assert message in capsys.readouterr().err
