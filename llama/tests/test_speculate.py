"""Speculative decoding: the text is the plain one, with any draft and after any interrupt."""

import concurrent.futures
import dataclasses
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from llamas import SMALL

from treeattn import kv_mesh, pack, unpack
from treeattn_llama import (
    Llama,
    LookupDraft,
    accept_candidate_tokens,
    candidate_lengths,
    draft_candidate_tokens,
    generate,
    likeliest,
    pad_packed,
    stream,
)
from treeattn_llama.speculate import call_size

PROMPT = [3, 14, 15, 92, 6, 5, 35, 89]
CAPACITY = 24  # of every cache, so that few programs are compiled
HOW = {"max_new_tokens": 16, "capacity": CAPACITY}


@pytest.fixture(scope="module")
def plain(model):
    return generate(model, PROMPT, **HOW).tokens


class Scribbler:
    """Proposes paths that begin with some of the tokens to come, among others and nonsense, and
    changes the lists that it gets."""

    def __init__(self, prompts, texts, seed):
        self.whole = [[*a, *b] for a, b in zip(prompts, texts, strict=True)]
        self.random = np.random.default_rng(seed)

    def observe(self, texts):
        self.ahead = [whole[len(text) :] for text, whole in zip(texts, self.whole, strict=True)]
        for text in texts:
            text.clear()
        texts.clear()

    def propose(self, budget):
        shape = len(self.ahead), 4, 6
        beam = self.random.integers(0, 96, shape)
        for rows, ahead in zip(beam, self.ahead, strict=True):
            for row in rows:
                right = min(self.random.integers(0, 7), len(ahead))
                row[:right] = ahead[:right]
        lengths = self.random.integers(0, 7, shape[:2])
        scores = self.random.normal(size=beam.shape)  # which decide nothing
        return beam, np.where(np.arange(6) < lengths[..., None], scores, -np.inf)


@st.composite
def calls(draw):
    """(prompts, options of stream, where to stop, the draft's seed or None to look up, budget)."""
    lengths = [16, *draw(st.lists(st.integers(1, 16), min_size=2, max_size=2))]
    tokens = st.integers(0, draw(st.sampled_from([3, 95])))
    prompts = [draw(st.lists(tokens, min_size=n, max_size=n)) for n in lengths]
    new = draw(st.integers(1, CAPACITY + 1 - 16))
    options = {"capacity": CAPACITY, "max_new_tokens": new}
    if draw(st.booleans()):
        options |= {"temperature": draw(st.sampled_from([0.3, 1.5])), "top_p": 0.6}
        options["seed"] = draw(st.integers(0, 99))
    stops = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, new - 1)), max_size=2))
    seed = draw(st.none() | st.integers(0, 99))
    return prompts, options, stops, seed, draw(st.sampled_from([1, 4, 9]))


def check_call(model, one, call):
    prompts, options, stops, seed, budget = call
    texts = generate(one, prompts, stop=[], **options).tokens
    stop = [texts[b][i] for b, i in stops]
    draft = LookupDraft(matched=1) if seed is None else Scribbler(prompts, texts, seed)
    made = generate(model, prompts, draft=draft, budget=budget, stop=stop, **options)
    for text, found in zip(texts, made.tokens, strict=True):
        ends = [i for i, token in enumerate(text) if token in stop]
        assert found == (text[: ends[0] + 1] if ends else text)


@hypothesis.settings(max_examples=40)
@hypothesis.given(call=calls())
def test_any_call_writes_the_plain_text(model, call):
    check_call(model, model, call)


@pytest.fixture(scope="module")
def sharded(model):
    devices = np.array(jax.devices()[:6]).reshape(3, 2)
    return model.on(jax.sharding.Mesh(devices, ("batch", "keys")))


@hypothesis.settings(max_examples=5)
@hypothesis.given(call=calls())
def test_any_call_on_a_mesh_writes_the_plain_text(model, sharded, call):
    check_call(sharded, model, call)


HALF = [pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float16")]


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_drafts_that_are_accepted_often(dtype):
    """Alone and in batches, greedy and drawn: the plain texts, in less than half of the calls.

    The model goes around in circles of six tokens, because the head of a token is the embedding of
    the one before it; so one token is much likelier than all others, however a call rounds.
    """
    model = Llama.load(SMALL, dtype=dtype)
    embedding = model.weights.embedding
    embedding = 32 * embedding / jnp.linalg.norm(embedding, axis=1, keepdims=True)
    tokens = np.arange(96).reshape(16, 6)
    head = embedding[np.roll(tokens, 1, axis=1).ravel()]
    model = dataclasses.replace(
        model, weights=model.weights._replace(embedding=embedding, head=head)
    )
    prompts = [[3, 4, 5, 0, 1, 2, 3], [90, 91, 7], [12], [70, 70, 50, 60, 61, 62, 63, 64, 65]]
    how = {"max_new_tokens": 30, "capacity": 40}
    drawn = {"temperature": 0.3, "top_p": 0.9, "seed": 2}
    for options in ({}, drawn):
        for texts in (*([prompt] for prompt in prompts), prompts):
            plain = generate(model, texts, **how, **options)
            made = generate(model, texts, draft="lookup", **how, **options)
            assert made.tokens == plain.tokens and plain.steps == 29 > 2 * made.steps


def test_the_five_lines(model, plain):
    """Drafting, packing, verifying, accepting and committing, call by call."""
    draft = Scribbler([PROMPT], [plain], 0)
    logits, cache = model.prefill([PROMPT], model.new_cache(1, CAPACITY))
    text = [*PROMPT, int(logits[0].argmax())]
    while len(text) < len(PROMPT) + 12:
        draft.observe([list(text)])
        beam, scores = draft_candidate_tokens(draft, certain=np.array(text[-1:]), budget=8)
        packed = pad_packed(pack(beam, candidate_lengths(scores)), 9)
        tokens, mask, offsets, unpack_map = packed
        positions = len(text) - 1 + offsets
        logits, new = model.extend(tokens, cache, positions=positions, mask=mask)
        verified = (unpack(np.asarray(x), unpack_map) for x in likeliest(logits))
        accepted = accept_candidate_tokens(beam, scores, *verified)
        select = accepted.nodes(unpack_map)
        cache = model.commit(cache, new, select=select, counts=accepted.counts)
        text += accepted[0]
        assert cache.lengths == len(text) - 1
    assert text[len(PROMPT) :][:12] == plain[:12]


# The cost of a call


class Growing:
    """Proposes 0, 1, 2, … tokens, in turn."""

    n = -1

    def observe(self, texts):
        self.n += 1

    def propose(self, budget):
        return np.zeros((1, 1, self.n), int), np.zeros((1, 1, self.n))


@pytest.mark.parametrize("budget", [1, 8, 16])
def test_a_call_costs_what_was_drafted(model, budget, monkeypatch):
    """And a text has one cache: no second one is made in the middle of it."""
    sizes, caches = [], []  # (tokens, real ones) of each call after the prompt
    extend, new_cache = Llama.extend, Llama.new_cache

    def counted_extend(self, tokens, cache, *, positions, mask):
        sizes.append((tokens.shape[1], int(np.diagonal(mask[0]).sum())))
        return extend(self, tokens, cache, positions=positions, mask=mask)

    def counted_cache(self, *args):
        caches.append(args)
        return new_cache(self, *args)

    fewer = HOW | {"max_new_tokens": 8}  # the last draft has room in the cache
    monkeypatch.setattr(Llama, "extend", counted_extend)
    monkeypatch.setattr(Llama, "new_cache", counted_cache)
    made = generate(model, PROMPT, draft=Growing(), budget=budget, **fewer)
    assert len(sizes) == made.steps and caches == [(1, CAPACITY)]
    for drafted, (size, nodes) in enumerate(sizes):
        assert nodes == 1 + min(drafted, budget - 1) or drafted == made.steps - 1
        assert nodes <= size <= max(4 * (nodes - 1), 1) and size <= budget
    assert {call_size(n, 16) for n in range(1, 17)} == {1, 4, 16}


def test_nothing_compiles_and_nothing_is_learned_while_generating(model, plain, caplog):
    """Any trees, any accepted paths, in calls of a few sizes, on devices that share a text."""
    model = model.on(kv_mesh(jax.devices()[:2]))

    def run(seed, budget=8):
        draft = Scribbler([PROMPT], [plain], seed)
        return list(stream(model, PROMPT, draft=draft, budget=budget, **HOW))

    with jax.log_compiles():
        for seed in range(8):
            if seed == 4:
                assert "Finished XLA compilation" in caplog.text
                caplog.clear()
            found = run(seed)
        assert "Finished XLA compilation" not in caplog.text
    run(9, budget=3)
    assert run(7) == found


def test_streams_in_threads(model, plain):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        drafts = ["lookup", None] * 2
        found = pool.map(lambda draft: generate(model, PROMPT, draft=draft, **HOW).tokens, drafts)
        assert list(found) == [plain] * 4


# Interrupts


def interrupts(monkeypatch, kind, method, calls, after=False):
    """Have a method raise KeyboardInterrupt once, in one of its calls, or after it has worked."""
    right = getattr(kind, method)
    left = [calls]

    def wrong(self, *args, **options):
        left[0] -= 1
        if left[0] == 0 and not after:
            raise KeyboardInterrupt
        found = right(self, *args, **options)
        if left[0] == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(kind, method, wrong)


def all_of(calls, texts: int):
    """(each text's tokens, interrupts) of a stream that is asked again after each of them."""
    found = [[] for _ in range(texts)]
    count = 0
    while True:
        try:
            for new in calls:
                for text, ids in zip(found, new, strict=True):
                    text += ids
            return found, count
        except KeyboardInterrupt:
            count += 1


METHODS = [(Scribbler, name) for name in ("observe", "propose")]
METHODS += [(Llama, name) for name in ("prefill", "extend", "commit", "run_layers", "read_out")]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind, method", METHODS)
def test_an_interrupt_loses_nothing(model, plain, kind, method, after, monkeypatch):
    """Before and after the method has done its work: its cache may be given up by then."""
    interrupts(monkeypatch, kind, method, 1 if method == "prefill" else 3, after)
    calls = stream(model, PROMPT, draft=Scribbler([PROMPT], [plain], 0), **HOW)
    assert all_of(calls, 1) == ([plain], 1)


def test_an_interrupt_where_a_text_fills_the_cache(model, monkeypatch):
    """It is read again with the others, although nothing more is to be written to it."""
    prompts = [[*PROMPT, 1], PROMPT[:1], PROMPT[:1]]
    texts = generate(model, prompts, **HOW).tokens

    class First(Scribbler):
        def propose(self, budget):
            beam = np.array([[self.ahead[0][:budget]]] * 3, int)
            return beam, np.where(np.arange(3)[:, None, None] == 0, np.zeros(beam.shape), -np.inf)

    calls = stream(model, prompts, draft=First(prompts, texts, 0), budget=9, stop=[], **HOW)
    begun = [[], [], []]
    while len(begun[0]) < 16:
        for text, ids in zip(begun, next(calls), strict=True):
            text += ids
    assert len(begun[1]) < 15
    interrupts(monkeypatch, Llama, "commit", 1)
    rest, count = all_of(calls, 3)
    assert [a + b for a, b in zip(begun, rest, strict=True)] == texts and count == 1


# Proposals of a draft


class Fixed:
    def __init__(self, found):
        self.found = found

    def observe(self, texts):
        pass

    def propose(self, budget):
        return self.found


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "cannot unpack non-iterable NoneType"),
        (([[[96]]], [[[0.0]]]), "beam: expected tokens from 0 to 95, got 96"),
        (([[[-1]]], [[[0.0]]]), "beam: expected tokens from 0 to 95, got -1"),
        (([[[1, 2]]], [[[0.0]]]), "scores: expected a score for each token"),
        (([[[1, 2]]], [[[-np.inf, 0.0]]]), "scores: −∞ ends a candidate"),
        (([[[1]], [[2]]], np.zeros((2, 1, 1))), "expected candidates for 1 texts"),
        (([[1]], [[0.0]]), r"beam: expected integers \(any, any, any\)"),
        (([[[1, 2], [1]]], [[[0.0]]]), "beam: expected an array"),
    ],
)
def test_what_is_no_proposal_names_the_draft(unchecked, found, message):
    with pytest.raises(ValueError, match=f"draft: Fixed proposed: {message}"):
        draft_candidate_tokens(Fixed(found), certain=[1], vocabulary=96)


def test_bad_arguments(unchecked):
    with pytest.raises(ValueError, match=r"certain: expected integers \(any,\)"):
        draft_candidate_tokens(Fixed(None), certain=[3.7])
    with pytest.raises(ValueError, match="size: expected an integer of at least 3, got 2"):
        pad_packed(pack(np.array([[[1, 2, 3]]])), 2)


def test_the_budget_keeps_whole_beginnings():
    two = Fixed((np.array([[[1, 2, 3], [1, 2, 4]]]), np.full((1, 2, 3), -1.0)))
    for budget, want in ((0, [1, 0]), (2, [3, 3]), (3, [4, 3]), (4, [4, 4]), (9, [4, 4])):
        beam, scores = draft_candidate_tokens(two, certain=np.array([7]), budget=budget)
        assert beam.shape == scores.shape == (1, 2, budget + 1)
        assert candidate_lengths(scores).tolist() == [want] and beam[0, 0, 0] == 7


# Looking up


@pytest.mark.parametrize("seed", range(20))
def test_looking_up_copies_what_followed_the_longest_match(seed):
    """Nothing is guessed where fewer tokens match than asked for."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 3, rng.integers(1, 40)).tolist() for _ in range(3)]
    least = int(rng.integers(1, 5))
    draft = LookupDraft(matched=least)
    draft.observe(texts)
    beam, scores = draft.propose(4)
    for text, guess, count in zip(texts, beam[:, 0], candidate_lengths(scores)[:, 0], strict=True):
        matches = [
            (n, end)
            for end in range(1, len(text))
            for n in range(least, end + 1)
            if text[end - n : end] == text[len(text) - n :]
        ]
        assert guess[:count].tolist() == (text[max(matches)[1] :][:4] if matches else [])


# As a script runs it: without the shape checks of the tests, whose frames a warning would name.

SCRIPT = """
import sys, warnings
from treeattn_llama import Llama, generate, stream
model = Llama.load(sys.argv[1])
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    model.new_cache(1, 300)
    list(stream(model, [[1]], max_new_tokens=2, capacity=300))
    generate(model, [[1]], max_new_tokens=2, capacity=300)
print([(w.filename, w.lineno) for w in found])
"""


def test_a_warning_is_at_the_callers_line():
    """Each once."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(SMALL)], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.strip() == str([("<string>", n) for n in (7, 8, 9)]), done.stderr
