"""Sampling, streaming, text, and the command line."""

import datetime
import io
import os
import re
import subprocess
import sys
import types
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llamas import SMALL, byte_tokenizer

from treeattn_llama import LookupDraft, __main__, calls, chat, generate, stream
from treeattn_llama.sampling import Sampling, nucleus, settled
from treeattn_llama.text_shards import TextShards

# Sampling

P = np.array([0.1, 0.5, 0.15, 0.25])


def test_nucleus_keeps_the_fewest_likeliest_tokens():
    logits = jnp.log(P)
    for top_p, kept in (
        (0.4, [1]),
        (0.5, [1]),
        (0.6, [1, 3]),
        (0.8, [1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ):
        assert np.flatnonzero(np.isfinite(nucleus(logits, top_p))).tolist() == kept, top_p
    # Of a large vocabulary the likeliest 1,024 are tried first: the answer is that of a full sort.
    for spread in (0.01, 3.0):
        logits = spread * jax.random.normal(jax.random.key(0), (5000,))
        p = np.sort(np.asarray(jax.nn.softmax(logits)))[::-1]
        for top_p in (0.1, 0.9, 0.999):
            count = int((np.cumsum(p) - p < top_p).sum())
            assert abs(int(jnp.isfinite(nucleus(logits, top_p)).sum()) - count) <= 1


def test_sampling_has_the_distribution_it_says():
    """Each token is drawn with the key of its number, so that all are independent draws."""
    for options, want in (
        ({"temperature": 1.0}, P),
        ({"temperature": 0.5}, P**2 / (P**2).sum()),
        ({"temperature": 1.0, "top_p": 0.7}, np.array([0, 2, 0, 1]) / 3),
        ({"temperature": 1.0, "top_k": 3}, P * (P > 0.1) / 0.9),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.6}, [0, 1, 0, 0]),  # squares
        ({"temperature": 1e-37, "top_k": 100}, [0, 1, 0, 0]),
    ):
        given = options.get("temperature"), options.get("top_k"), options.get("top_p")
        left = jax.nn.softmax(settled(jnp.log(P), *given))
        np.testing.assert_allclose(left, want, atol=1e-6)
    sampling = Sampling(1.0, 3, 0.9, key=jax.random.key(0))
    logits = np.broadcast_to(np.log(P.astype(np.float32)), (2, 750, 4))
    drawn = sampling.next_tokens(logits, np.arange(1500).reshape(2, 750) % 750)
    counts = np.bincount(drawn.ravel(), minlength=4) / 1500
    np.testing.assert_allclose(counts, P * (P > 0.1) / 0.9, atol=0.05)
    assert (drawn[0] != drawn[1]).any()


def test_options_are_any_numbers(model, unchecked):
    """Of Python's, NumPy's or JAX's; a top_p that float32 does not hold leaves the likeliest."""

    def tokens(**options):
        return generate(model, [3, 1, 4], **{"max_new_tokens": 8} | options).tokens

    drawn = tokens(temperature=0.5, top_k=5, top_p=0.5, seed=5)
    half = {"temperature": Fraction(1, 2), "top_k": jnp.int32(5), "top_p": np.array(0.5)}
    for key in (jax.random.key(5), jax.random.PRNGKey(5)):
        assert tokens(**half, key=key) == drawn
    assert tokens(temperature=1.0, top_p=1e-40, seed=5) == tokens() != tokens(stop=tokens()[2])
    assert tokens(temperature=1e-45, seed=5) == tokens()
    assert len(tokens(temperature=10**12, seed=np.int8(5))) == 8
    assert tokens(temperature=1.0, seed=5) != tokens(temperature=1.0, seed=6)


BAD = [
    ({"temperature": -1.0}, "temperature: expected at least 0, got -1"),
    ({"top_p": 0.0}, "top_p: expected a finite number above 0 and at most 1, got 0.0"),
    ({"top_p": 1.5}, "top_p: expected a finite number above 0 and at most 1, got 1.5"),
    ({"top_k": 0}, "top_k: expected an integer of at least 1, got 0"),
    ({"temperature": 1.0}, "temperature: 1.0 draws at random: pass seed=0"),
    ({"key": 0, "temperature": 1.0}, "key: expected a jax.random.key, or seed=0"),
    ({"seed": -1}, "seed: expected an integer from 0 to 4294967295, got -1"),
    ({"seed": 1, "key": jax.random.key(0)}, "seed: expected one of seed and key, got both"),
    ({"max_new_tokens": 0}, "max_new_tokens: expected an integer from 1 to 2147483647, got 0"),
    ({"budget": 0}, "budget: expected an integer of at least 1, got 0"),
    ({"capacity": 6}, "capacity: the longest prompt and max_new_tokens need 7, got 6"),
    ({"prompts": "Hi"}, "model: this checkpoint has no tokenizer .*: convert tokenizer.model"),
    ({"prompts": [[1, 96]]}, "prompts: expected ids from 0 to 95, got 96"),
    ({"stop": "."}, "model: this checkpoint has no tokenizer"),
    ({"stop": [1, ""]}, "stop: expected strings that are not empty"),
    ({"stop": 96}, "stop: expected an integer from 0 to 95, got 96"),
    ({"stop": [[1], [2, 3]]}, r"stop: expected an integer from 0 to 95, got \[1\]"),
    ({"draft": "suffix"}, "draft: expected None, 'lookup', or an object with methods"),
    ({"draft": LookupDraft}, "draft: expected None, 'lookup', or an object .* got <class"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_options_are_found_before_any_work(model, unchecked, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        stream(model, **{"prompts": [[1, 2, 3]], "max_new_tokens": 5} | options)


# Streaming

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_stream_is_decoding_of_each_prompt(model, temperature):
    """As full passes without a cache do it; each token is drawn with the key of its number."""
    how = {"temperature": temperature, "top_p": 0.7, "key": jax.random.key(0)}
    texts = [list(p) for p in PROMPTS]
    for i in range(6):
        padded = np.array([text + [0] * (16 - len(text)) for text in texts])
        last = model.logits(padded)[np.arange(2), [len(text) - 1 for text in texts]]
        drawn = Sampling(**how).next_tokens(last[:, None], np.full((2, 1), i))
        texts = [[*text, *row] for text, row in zip(texts, drawn.tolist(), strict=True)]
    want = [text[len(p) :] for p, text in zip(PROMPTS, texts, strict=True)]
    calls = list(stream(model, PROMPTS, max_new_tokens=6, **how))
    assert calls == [[[a], [b]] for a, b in zip(*want, strict=True)]
    # Each text stops after its end token, and the stream when nothing is left to do.
    end = next(t for t in want[0] if t not in want[1])
    cut = want[0].index(end) + 1
    rows = list(zip(*stream(model, PROMPTS, max_new_tokens=6, stop=[end], **how), strict=True))
    assert list(rows[0]) == [[token] for token in want[0][:cut]] + [[]] * (6 - cut)
    assert list(rows[1]) == [[token] for token in want[1]]
    (alone,) = zip(*stream(model, PROMPTS[:1], max_new_tokens=6, stop=[end], **how), strict=True)
    assert alone == rows[0][:cut]


# Text


class Parrot:
    """Says the tokens it was given, as a model does: `stream` asks for nothing else."""

    shards = TextShards()

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.ids = tokenizer, ids
        self.config = types.SimpleNamespace(vocabulary=256, context=256)

    def new_cache(self, batch, capacity):
        return 0

    def prefill(self, prompts, cache):
        return jnp.eye(256)[jnp.array([self.ids[0]])], 1

    def extend(self, tokens, cache, positions, mask):
        return jnp.eye(256)[jnp.array([[self.ids[cache]]])], None

    def commit(self, cache, new, select, counts):
        return cache + 1


def test_text_waits_for_whole_characters(unchecked):
    tokenizer = byte_tokenizer(chat_template="{{ messages[0].content }}")
    ids = tokenizer.encode("né €")
    told = list(chat(Parrot(tokenizer, ids), "Hi", max_new_tokens=len(ids)))
    assert "".join(told) == "né €" and "\ufffd" not in "".join(told)
    assert len(ids) == 7 and told[:2] == ["n", "é"]
    half = list(chat(Parrot(tokenizer, ids[:-1]), "Hi", max_new_tokens=len(ids) - 1))
    assert "".join(half) == tokenizer.decode(ids[:-1]) and half[-1].endswith("\ufffd")


def test_text_in_and_text_out(unchecked):
    tokenizer = byte_tokenizer(stop=frozenset({0}))
    parrot = Parrot(tokenizer, tokenizer.encode("one two three! four five"))
    assert generate(parrot, "Hi").text == "one two three!"  # "!" is number 0
    assert generate(parrot, tokenizer.encode("Hi")).text == "one two three!"
    assert generate(parrot, ["Hi"]).text == ["one two three!"]
    with pytest.raises(ValueError, match=r"prompts: expected texts .*, got lengths"):
        generate(parrot, "")
    for stop, text in (
        ([], "one two three! four five"),
        (" th", "one two"),
        (["w", "four"], "one t"),
        (["four"], "one two three!"),
        (["four", ord("x")], "one two three! "),
    ):
        assert generate(parrot, "Hi", stop=stop, max_new_tokens=24).text == text
    assert tokenizer.decode(generate(parrot, "Hi", stop=" th").tokens) == "one two th"


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
LOOP = "{% for m in messages %}"
TEMPLATES = [
    (LOOP + "<{{ m.role }}>{{ m.content }}{% endfor %}!", "<system>a<user>b!"),
    ("{% for i in [1, 2, 3] %}{{ i }}{% break %}{% endfor %}", "1"),
    ("{{ add_generation_prompt }}", "True"),
    ("{{ strftime_now('%Y') }}", datetime.datetime.now().strftime("%Y")),
    ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
    ("{% if tools is none %}{{ ['é<'] | tojson }}{% endif %}", '["é<"]'),
    ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
    (LOOP + "-{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}", "-a.-b."),
]


@pytest.mark.parametrize("template, want", TEMPLATES)
def test_templates_have_what_transformers_gives_them(template, want):
    tokenizer = byte_tokenizer(chat_template=template, names=NAMES)
    assert tokenizer.decode(tokenizer.chat(MESSAGES)) == want


def test_a_template_may_refuse_and_may_be_missing(model):
    refusing = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        refusing.chat("Hi")
    as_user = byte_tokenizer(chat_template=TEMPLATES[0][0])
    assert as_user.decode(as_user.chat("Hi")) == "<user>Hi!"
    with pytest.raises(ValueError, match="no tokenizer"):
        chat(model, "Hi")


# The command line


@pytest.mark.slow
def test_the_command_line_answers():
    command = [sys.executable, "-m", "treeattn_llama", "What is the capital of France?"]
    command += ["--devices", "2", "--attention", "butterfly", "--draft", "lookup", "--tokens", "9"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."
    assert "2 devices; prompt: 37 tokens" in done.stderr
    assert re.search(r"\d tokens/s, \d\.\d\d tokens a step", done.stderr), done.stderr


@pytest.fixture
def command(monkeypatch, capsys):
    """A function: the command's status, and what it prints to both outputs."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["treeattn_llama", *arguments])
        try:
            status = __main__.main()
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return run


def test_the_command_line_explains_itself_on_any_terminal(command):
    status, said, _ = command("-h")
    assert status == 0 and said.isascii()
    assert "--attention" in said and '"Repeat this text: ..."' in said


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (("--seed", "1.5"), 2, "argument --seed: invalid int value: '1.5'"),
        (("--model", "nothing.gguf"), 1, "--model: no file or directory nothing.gguf"),
        (("--model", "org/name"), 1, "are not downloaded"),
        (("--model", str(SMALL)), 1, "no tokenizer"),
    ],
)
def test_the_command_line_says_what_is_wrong(command, arguments, status, message):
    found, _, said = command("Hi", *arguments)
    assert found == status and message in said


def test_the_command_line_prints_what_the_terminal_can(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.argv", ["treeattn_llama", "Hi"])
    monkeypatch.setattr(__main__, "run", lambda args: print("caf\u00e9 \u65e5"))
    assert __main__.main() == 0
    assert terminal.buffer.getvalue().decode("latin-1").strip() == "café ?"


@pytest.mark.parametrize("fails", [False, True])
def test_control_characters_do_not_reach_the_terminal(command, monkeypatch, fails):
    """Neither those of a model's text, nor those of an error; newline and tab do."""
    text = "".join(map(chr, range(160))) + "é日\u200d"

    def run(args):
        if fails:
            raise ValueError(text)
        print(text[:80], text[80:], sep="", end="")

    monkeypatch.setattr(__main__, "run", run)
    _, *outputs = command("Hi")
    said = outputs[fails]
    shown = {c for c in said if ord(c) < 32 or 126 < ord(c) < 160}
    assert shown == {"\t", "\n"} and said.rstrip("\n").endswith(text[160:])
    assert said.count("\ufffd") == 32 - 2 + 33


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


def test_errors_have_the_names_of_flags(capsys):
    for message, said in (
        ("max_new_tokens: expected 1", "--tokens: expected 1"),
        ("top_p: expected 1", "--top-p: expected 1"),
        ("n: expected 1", "--devices: expected 1"),
        ("no such thing: top_p: 3", "no such thing: top_p: 3"),
    ):
        __main__.tell(ValueError(message))
        assert capsys.readouterr().err == f"python -m treeattn_llama: {said}\n"


def test_a_warning_is_a_sentence(command, monkeypatch, unchecked):
    """It names the flag, and not the place in Python's own code that runs the command."""
    tokenizer = byte_tokenizer(stop=frozenset({0}))
    parrot = Parrot(tokenizer, tokenizer.encode("one!"))
    parrot.new_cache = lambda batch, capacity: calls.check_capacity(capacity, 256) and 0
    monkeypatch.setattr(__main__.Llama, "load", lambda *_, **options: parrot)
    status, said, told = command("Hi", "--plain", "--tokens", "300")
    assert status == 0 and said == "one!\n"
    assert told.splitlines()[0] == (
        "python -m treeattn_llama: --tokens: the model was trained on texts of up to 256 tokens, "
        "and the cache has room for 301"
    )
