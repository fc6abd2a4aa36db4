"""Speculative decoding loses nothing: the text is the one that plain decoding gives."""

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import Llama, TokenTree, beam_from_tree, kv_mesh, pack, pack_tree, unpack
from treeattn_llama.sampling import Sampling, _draw_at, nucleus
from treeattn_llama.speculation import (
    DRAFTS,
    Budget,
    Drawn,
    DrawnDraft,
    LlamaDraft,
    UnitedDraft,
    accept_candidate_tokens,
    candidate_lengths,
    draft_candidate_tokens,
    first_layers,
    likeliest,
    loop,
    verify,
)
from treeattn_llama.text import chat, generate, stream

pytestmark = pytest.mark.slow

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
BATCH, NEW = 20, 24


@pytest.fixture(scope="module")
def model():
    """In float64, so that a step of 16 tokens and one of 1 never differ in a near tie."""
    return Llama.load(SMALL, dtype=jnp.float64)


def prompts_of(seed):
    """Prompts of several lengths, half of them with repetitions."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 96, n).tolist() for n in rng.integers(1, 30, BATCH)]
    return [p * 3 if i % 2 else p for i, p in enumerate(prompts)]


CAPACITY = 90 + NEW


def plain(model, prompts, **options):
    options = {"max_new_tokens": NEW, "capacity": CAPACITY} | options
    texts = [[] for _ in prompts]
    for new in stream(model, prompts, **options):
        for text, ids in zip(texts, new, strict=True):
            text += ids
    return texts


def spoken(model, prompts, **options):
    """`generate`, and that what it reports fits together."""
    options = {"max_new_tokens": NEW, "capacity": CAPACITY} | options
    made = generate(model, prompts, **options)
    assert made.steps == len(made.trace)
    for b, text in enumerate(made.tokens):
        assert len(text) == 1 + sum(step.new[b] for step in made.trace)
    for step in made.trace:
        assert max(step.nodes) <= step.size
        for b, new in enumerate(step.new):
            assert step.accepted[b] <= step.depth[b] <= step.nodes[b] <= step.unpacked[b]
            assert new <= step.accepted[b] + 1
    return made


class Oracle:
    """Knows the texts, and proposes them with mistakes: trees whose true path is `depth` long,
    wrong from some token on with probability `wrong`, among siblings and deeper nodes that are."""

    def __init__(self, prompts, texts, *, wrong=0.2, depth=4, seed=0):
        self.whole = [[*p, *t] for p, t in zip(prompts, texts, strict=True)]
        self.wrong, self.depth, self.random = wrong, depth, np.random.default_rng(seed)

    def observe(self, texts, seen=None):
        for text, whole in zip(texts, self.whole, strict=True):
            assert list(text) == whole[: len(text)]
        self.lengths = [len(text) for text in texts]

    def propose(self, budget):
        tokens = self.random.integers(0, 96, (len(self.whole), 3 * self.depth))
        parents = np.zeros(tokens.shape, np.int32)
        scores = np.full(tokens.shape, -1.0)
        for b, (whole, n) in enumerate(zip(self.whole, self.lengths, strict=True)):
            ahead, true = whole[n : n + self.depth], -1
            for d in range(self.depth):
                order = self.random.permutation(3)  # of the true token among its siblings
                parents[b, 3 * d : 3 * d + 3] = true
                true = 3 * d + order[0]
                if d < len(ahead) and self.random.random() > self.wrong:
                    tokens[b, true] = ahead[d]
        sizes = np.full(len(tokens), tokens.shape[1], np.int32)
        return TokenTree(tokens.astype(np.int32), parents, sizes), scores


# Greedy: token for token


DRAFT_OBJECTS = {
    "a model": lambda model: LlamaDraft(first_layers(model, 1), depth=3, width=3),
    "itself": lambda model: LlamaDraft(model, depth=3, width=2),
    "drawn": lambda model: DrawnDraft(first_layers(model, 1), widths=(2, 2, 1)),
}


@pytest.fixture(scope="module")
def want(model):
    return {seed: plain(model, prompts_of(seed)) for seed in range(10)}


# Those that were not trained on one model, which the small one is not.
FOR_ANY_MODEL = [name for name in DRAFTS if name not in ("recurrent", "surer")]


@pytest.mark.parametrize("seed, draft", [*enumerate([*FOR_ANY_MODEL, *DRAFT_OBJECTS])])
def test_greedy_text_is_the_plain_one(model, want, seed, draft):
    """20 prompts for each draft, of which most accept something."""
    made_of = DRAFT_OBJECTS.get(draft)
    draft = made_of(model) if made_of else draft
    made = spoken(model, prompts_of(seed), draft=draft, budget=8)
    assert made.tokens == want[seed]
    assert sum(sum(step.accepted) for step in made.trace) > 20
    assert made.tokens_a_step > 1


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 13, None])
def test_every_size_of_tree(model, want, budget):
    seed = 7
    draft = Oracle(prompts_of(seed), want[seed])
    made = spoken(model, prompts_of(seed), draft=draft, budget=budget)
    assert made.tokens == want[seed]
    if budget:
        assert max(max(step.nodes) for step in made.trace) == min(budget, 13)
        assert {step.size for step in made.trace} <= {1, 2, 4, 8, 16}
        assert (sum(sum(step.accepted) for step in made.trace) > 0) == (budget > 1)


def test_a_single_text(model, want):
    for b in range(6):
        prompts = prompts_of(8)[b : b + 1]
        draft = Oracle(prompts, want[8][b : b + 1], seed=b)
        made = spoken(model, prompts, draft=draft, budget=8)
        assert made.tokens == want[8][b : b + 1] and made.steps < NEW - 5


@pytest.mark.parametrize(
    "devices, attention, prefill",
    [(8, "tree", None), (3, "butterfly", None), (2, "ring", "chunks"), (3, "pass_q", None)],
)
def test_a_sharded_cache(model, want, devices, attention, prefill):
    """Accepted keys move to whatever shard their place is on; rejected ones leave no trace."""
    model = model.on(kv_mesh(jax.devices()[:devices]), attention=attention, prefill_with=prefill)
    prompts = prompts_of(9)[:3]
    draft = Oracle(prompts, want[9][:3])
    made = spoken(model, prompts, draft=draft, budget=8)
    assert made.tokens == want[9][:3] and made.steps < NEW - 5


def test_the_cache_is_that_of_plain_decoding(model, want, monkeypatch):
    """After the last step every key is the one of the text alone."""
    kept = []
    init = loop.Loop.__init__
    monkeypatch.setattr(
        loop.Loop, "__init__", lambda self, *a, **o: (kept.append(self), init(self, *a, **o))[1]
    )
    prompts = prompts_of(7)[:3]
    draft = Oracle(prompts, want[7][:3])
    spoken(model, prompts, draft=draft, budget=8)
    cache, texts = kept[0].cache, kept[0].texts
    for b, text in enumerate(texts):
        n = int(cache.lengths[b])
        assert len(text) - 1 - 4 <= n <= len(text)
        k = [k for _, k, _ in model.layers_qkv(np.array([text[:n]]))]
        for layer, want_k in enumerate(k):
            np.testing.assert_allclose(cache.k[layer][b, :n], want_k[0], atol=1e-9)


def test_a_draft_that_is_always_wrong_changes_only_the_time(model, want):
    prompts = prompts_of(7)
    draft = Oracle(prompts, want[7], wrong=2.0)
    made = spoken(model, prompts, draft=draft, budget=8)
    assert made.tokens == want[7]
    assert made.steps >= NEW - 3  # a random token is right now and then


def test_texts_that_end(model, want):
    """An end token in the middle of an accepted path ends the text there."""
    prompts, texts = prompts_of(7), want[7]
    stop = [texts[0][5], texts[3][2]]
    options = {"stop": stop, "max_new_tokens": NEW}
    ended = plain(model, prompts, **options)
    assert len({len(text) for text in ended}) > 2
    made = spoken(model, prompts, draft=Oracle(prompts, texts, wrong=0), budget=8, **options)
    assert made.tokens == ended


@pytest.mark.parametrize("new", [1, 2, 4])
def test_few_new_tokens(model, want, new):
    """Candidates that go beyond the last new token, and the cache's last place, are cut off."""
    prompts = [p[:5] for p in prompts_of(7)]
    texts = plain(model, prompts)
    draft = Oracle(prompts, texts, wrong=0)
    exact = max(map(len, prompts)) + new - 1
    made = spoken(model, prompts, draft=draft, budget=8, max_new_tokens=new, capacity=exact)
    assert made.tokens == [text[:new] for text in texts]
    assert made.steps == min(new - 1, 1)


# The packaged model, in float32


@pytest.fixture(scope="module")
def packaged():
    return Llama.load()


def same_up_to_ties(model, prompt, text, other):
    """Equal, or parted where the model's two likeliest tokens are within rounding of each other."""
    for i, (a, b) in enumerate(zip(text, other, strict=True)):
        if a != b:
            logits = np.asarray(model.logits(np.array([[*prompt, *text[:i]]])))[0, -1]
            return abs(float(logits[a] - logits[b])) < 1e-3
    return True


@pytest.mark.parametrize("devices", [None, 2])
def test_the_packaged_model(packaged, devices):
    """A text that repeats itself takes a fraction of the steps."""
    model = packaged.on(kv_mesh(jax.devices()[:devices])) if devices else packaged
    prompt = model.tokenizer.encode("one two three four five six, " * 3)
    (text,) = plain(model, [prompt], stop=[])
    made = spoken(model, [prompt], draft="suffix", budget=8, stop=[])
    assert same_up_to_ties(model, prompt, text, made.tokens[0])
    assert made.steps < NEW - 5
    question = model.tokenizer.chat("Hi")
    options = {"max_new_tokens": 8, "capacity": CAPACITY, "draft": "suffix", "budget": 8}
    answer = generate(model, question, **options).tokens
    assert "".join(chat(model, "Hi", **options)) == model.tokenizer.decode(answer)


# Sampling


SAMPLING = [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.6}]


@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("draft", ["suffix", "recycling", "oracle"])
def test_sampled_text_is_the_plain_one_draw_for_draw(model, draft, options):
    prompts = prompts_of(10)[:3]
    options = options | {"key": jax.random.key(5)}
    texts = plain(model, prompts, **options)
    draft = Oracle(prompts, texts) if draft == "oracle" else draft
    made = spoken(model, prompts, draft=draft, budget=8, **options)
    assert made.tokens == texts
    if isinstance(draft, Oracle):
        assert made.steps < NEW - 5


def pairs(model, prompt, draft, n, **options):
    """How often each pair of second and third tokens came in n texts."""
    made = generate(model, [prompt] * n, draft=draft, max_new_tokens=3, **options)
    counts = {}
    for text in made.tokens:
        counts[tuple(text[1:])] = counts.get(tuple(text[1:]), 0) + 1
    return counts


def chi_square(model, prompt, counts, temperature, top_p):
    """(statistic, degrees of freedom) of the second and third tokens against the model's own."""
    n = sum(counts.values())

    def after(paths):
        logits = jnp.stack([model.logits(np.array([prompt + p]))[0, -1] for p in paths])
        return np.asarray(jax.nn.softmax(nucleus(logits / temperature, top_p), axis=-1))

    p0 = after([[]])[0]
    chances = {}
    for a in np.flatnonzero(p0 > 0).tolist():
        p1 = after([[a]])[0]
        for b in np.flatnonzero(p1 > 0).tolist():
            p2 = after([[a, b]])[0]
            for c in np.flatnonzero(p2 > 0).tolist():
                chances[b, c] = chances.get((b, c), 0) + p0[a] * p1[b] * p2[c]
    assert set(counts) <= set(chances)
    large = {k: v for k, v in chances.items() if v * n >= 5}
    rest = 1 - sum(large.values())
    cells = [(counts.get(k, 0), v * n) for k, v in large.items()]
    cells.append((n - sum(c for c, _ in cells), rest * n))
    return sum((c - e) ** 2 / e for c, e in cells if e > 1e-9), len(cells) - 1


DRAWN = [{"widths": (3, 1)}, {"widths": (2, 2)}, {"widths": (2, 1), "replacement": True}]


@pytest.mark.parametrize("options", DRAWN)
def test_drawn_candidates_give_the_models_distribution(model, options, unchecked):
    prompt, sampling = [3, 14, 15, 92, 6], {"temperature": 0.35, "top_p": 0.5}
    draft = DrawnDraft(first_layers(model, 1), temperature=0.6, **options)
    counts = pairs(model, prompt, draft, 300, budget=8, key=jax.random.key(1), **sampling)
    statistic, freedom = chi_square(model, prompt, counts, **sampling)
    assert freedom > 3 and statistic < freedom + 4 * np.sqrt(2 * freedom)


# Mistakes that these tests must see


def changed_pack(change):
    def changed(beam, lengths):
        tokens, mask, offsets, unpack_map = pack(beam, lengths)
        return type(pack(beam, lengths))(*change(tokens, mask.copy(), offsets, unpack_map))

    return changed


def one_bit_wrong(tokens, mask, offsets, unpack_map):
    """The last node does not see the first."""
    for row in mask:
        nodes = int(np.diagonal(row).sum())
        if nodes > 1:
            row[nodes - 1, 0] = False
    return tokens, mask, offsets, unpack_map


def one_bit_more(tokens, mask, offsets, unpack_map):
    """Every node sees one that is no ancestor of it."""
    for row in mask:
        for i in range(int(np.diagonal(row).sum())):
            row[i, np.flatnonzero(~row[i, :i])[:1]] = True
    return tokens, mask, offsets, unpack_map


def no_offsets(tokens, mask, offsets, unpack_map):
    return tokens, mask, np.zeros_like(offsets), unpack_map


@pytest.mark.parametrize("change", [one_bit_wrong, one_bit_more, no_offsets])
def test_a_wrong_mask_or_position_is_seen(model, want, monkeypatch, change):
    prompts = prompts_of(7)
    options = {"budget": 8, "max_new_tokens": NEW, "capacity": CAPACITY}

    class Knowing(Oracle):  # does not mind that the text is another
        def observe(self, texts, seen=None):
            self.lengths = [len(text) for text in texts]

    monkeypatch.setattr(verify, "pack", changed_pack(change))
    made = generate(model, prompts, draft=Knowing(prompts, want[7], wrong=0), **options)
    assert made.tokens != want[7]


def test_argmax_instead_of_sampling_is_seen(model, monkeypatch):
    prompts, options = prompts_of(10)[:3], {"temperature": 0.7, "key": jax.random.key(5)}
    texts = plain(model, prompts, **options)
    monkeypatch.setattr(Sampling, "draw_at", lambda self, rows, *_: rows.argmax(axis=-1))
    made = generate(
        model, prompts, draft="suffix", max_new_tokens=NEW, capacity=CAPACITY, **options
    )
    assert made.tokens != texts


def test_trees_of_all_sizes_are_drawn_from_by_one_program(model):
    """And for any number of texts: a row of logits is all that it is given."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "key": jax.random.key(5)}
    options = {"max_new_tokens": NEW, "capacity": CAPACITY, **sampling}
    _draw_at.clear_cache()
    sizes = set()
    for texts, budget in ((3, 4), (1, 8)):
        made = generate(model, prompts_of(8)[:texts], draft="suffix", budget=budget, **options)
        sizes |= {step.size for step in made.trace}
    assert len(sizes) > 2
    assert _draw_at._cache_size() == 2  # the other one draws for all three texts, at plain steps


def test_claims_that_are_not_what_was_drawn_from_are_seen(model, unchecked):
    class Claiming(DrawnDraft):
        def propose(self, budget):
            drawn = super().propose(budget)
            return drawn._replace(distributions=np.ones_like(drawn.distributions) / 96)

    prompt, sampling = [3, 14, 15, 92, 6], {"temperature": 0.35, "top_p": 0.5}
    draft = Claiming(first_layers(model, 1), temperature=0.2, widths=(3, 1))
    counts = pairs(model, prompt, draft, 300, budget=8, key=jax.random.key(1), **sampling)
    statistic, freedom = chi_square(model, prompt, counts, **sampling)
    assert statistic > freedom + 8 * np.sqrt(2 * freedom)


# The document's five lines, by hand


@pytest.mark.parametrize("tree", [False, True])
def test_the_five_lines(model, want, tree):
    prompts, texts = prompts_of(8)[:3], want[8][:3]
    cache = model.new_cache(3, CAPACITY)
    _, cache = model.prefill(prompts, cache)
    text = [[*p, t[0]] for p, t in zip(prompts, texts, strict=True)]
    draft = Oracle(prompts, texts, wrong=0)
    draft.observe(text)
    certain = np.array([t[-1] for t in text])

    beam, scores = draft_candidate_tokens(draft, budget=12, certain=certain)
    packed, mask, offsets, unpack_map = pack(beam, candidate_lengths(scores))
    if tree:  # the draft's tree as it came, below the certain token
        (tokens, parents, sizes), _ = draft.propose(12)
        parents = np.pad(np.where(parents < 0, 0, parents + 1), [(0, 0), (1, 0)])
        parents[:, 0] = -1
        tokens = np.concatenate([certain[:, None], tokens], axis=1).astype(np.int32)
        whole = TokenTree(tokens, parents.astype(np.int32), sizes + 1)
        packed, mask, offsets, unpack_map = pack_tree(whole)
        beam = unpack(packed, unpack_map)
        _, lengths = beam_from_tree(whole)
        scores = np.where(np.arange(beam.shape[2]) < lengths[..., None], -1.0, -np.inf)
    positions = np.array([len(p) for p in prompts])[:, None] + offsets
    logits, keys = model.extend(packed, cache, positions=positions, mask=mask)
    verified_beam, verified_scores = (unpack(x, unpack_map) for x in likeliest(logits))
    tokens = accept_candidate_tokens(beam, scores, verified_beam, verified_scores)
    assert tokens == [t[1:6] for t in texts]
    # What was accepted goes into the cache, which is then that of the text alone.
    cache = model.commit(cache, keys, select=tokens.nodes(unpack_map), counts=tokens.counts)
    told = [[*t, *new] for t, new in zip(text, tokens, strict=True)]
    logits, _ = model.step(np.array([t[-1:] for t in told]), cache, last=True)
    for t, row in zip(told, logits, strict=True):
        np.testing.assert_allclose(row, model.logits(np.array([t]))[0, -1], atol=1e-9)


# What generate takes and gives


def test_prompts_come_back_as_they_came(model, want):
    prompts = prompts_of(7)[:3]
    options = {"max_new_tokens": 5, "capacity": CAPACITY, "budget": 8}
    for draft in (None, "suffix"):
        one = generate(model, prompts[0], draft=draft, **options)
        assert one.tokens == want[7][0][:5]
        three = generate(model, prompts, draft=draft, **options)
        assert three.tokens == [text[:5] for text in want[7][:3]]
        assert generate(model, np.array(prompts[0]), draft=draft, **options).tokens == one.tokens
    plain_one = generate(model, prompts, **options)
    assert plain_one.steps == 4 and plain_one.tokens_a_step == 1.0


def test_a_draft_makes_the_same_stream_in_fewer_calls(model, want):
    prompts = prompts_of(7)
    options = {"budget": 8, "max_new_tokens": NEW, "capacity": CAPACITY}
    for draft in (None, Oracle(prompts, want[7])):
        texts, calls = [[] for _ in prompts], 0
        for new in stream(model, prompts, draft=draft, **options):
            calls += 1
            for text, ids in zip(texts, new, strict=True):
                text += ids
        assert texts == want[7] and (calls < NEW) == isinstance(draft, Oracle)


def test_a_draft_object_can_be_used_again(model, want):
    draft = LlamaDraft(model, depth=2, width=2)
    for seed in (7, 8, 7):
        prompts = prompts_of(seed)[:3]
        made = generate(
            model, prompts, draft=draft, budget=8, max_new_tokens=NEW, capacity=CAPACITY
        )
        assert made.tokens == want[seed][:3] and made.tokens_a_step > 2


def test_nothing_compiles_while_generating(model, want):
    prompts = prompts_of(7)[:3]
    options = {"max_new_tokens": NEW, "capacity": CAPACITY, "budget": 8}
    generate(model, prompts, draft=Oracle(prompts, want[7][:3]), **options)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled = []
        import logging

        class Listen(logging.Handler):
            def emit(self, record):
                if "Finished XLA compilation" in record.getMessage():
                    compiled.append(record.getMessage())

        listen = Listen()
        logging.getLogger("jax").addHandler(listen)
        patch.setattr(logging.getLogger("jax"), "propagate", False)
        generate(model, prompts, draft=Oracle(prompts, want[7][:3], seed=1), **options)
        logging.getLogger("jax").removeHandler(listen)
    assert not compiled


# Bad input


class Proposing:
    """Proposes the same every time."""

    def __init__(self, *found):
        self.found = found

    def observe(self, texts, seen=None):
        pass

    def propose(self, budget):
        return self.found


EMPTY = [
    (np.zeros((1, 0, 0), np.int32), np.zeros((1, 0, 0))),
    (np.zeros((1, 2, 3), np.int32), np.full((1, 2, 3), -np.inf)),
    (
        TokenTree(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.int32), np.zeros(1, np.int32)),
        np.zeros((1, 0)),
    ),
]


@pytest.mark.parametrize("found", EMPTY)
def test_an_empty_draft_is_plain_decoding(model, want, found):
    prompt = prompts_of(7)[0]
    made = spoken(model, [prompt], draft=Proposing(*found))
    assert made.tokens == want[7][:1] and made.steps == NEW - 1


BEAM, SCORES = np.array([[[5, 6], [5, 7]]]), np.full((1, 2, 2), -1.0)


@pytest.mark.parametrize(
    "found, message",
    [
        ((BEAM + 90, SCORES), "beam: expected tokens from 0 to 95, got 96"),
        ((BEAM - 6, SCORES), "beam: expected tokens from 0 to 95, got -1"),
        ((BEAM, SCORES[:, :1]), r"scores: expected a score for each token, \(1, 2, 2\)"),
        ((BEAM, SCORES * np.nan), "scores: expected logarithms of probabilities, got NaN"),
        ((BEAM, -SCORES), "scores: expected logarithms of probabilities, got NaN or one above 0"),
        ((BEAM[0, :1], SCORES[0, :1]), r"beam: expected axes \(batch, M, C\)"),
        (
            (BEAM[[0, 0]], SCORES[[0, 0]]),
            "draft: Proposing proposed: expected candidates for 1 texts, got 2",
        ),
    ],
)
def test_bad_proposals(model, unchecked, found, message):
    with pytest.raises(ValueError, match=message):
        generate(model, [1, 2, 3], max_new_tokens=5, draft=Proposing(*found))


DRAWN_ONE = Drawn(BEAM, SCORES, np.full((1, 2, 2, 96), 1 / 96))


@pytest.mark.parametrize(
    "found, error, message",
    [
        (None, TypeError, r"expected \(TokenTree, scores\), .*, got NoneType None"),
        (BEAM, TypeError, r"expected \(TokenTree, scores\), .*, got ndarray"),
        ((BEAM,), TypeError, r"expected \(TokenTree, scores\), .*, got tuple"),
        (pack(BEAM), TypeError, r"expected \(TokenTree, scores\), .*, got PackedBeam"),
        ((BEAM.tolist(), SCORES), TypeError, "beam: expected an array, got list"),
        ((BEAM, None), TypeError, "scores: expected an array"),
        (DRAWN_ONE, ValueError, "expected at most 2 nodes, got 3, and what was drawn at random"),
        (
            DRAWN_ONE._replace(distributions=np.ones((1, 2, 2, 95))),
            ValueError,
            r"distributions: expected shape \(1, 2, 2, 96\), got \(1, 2, 2, 95\)",
        ),
        (
            DRAWN_ONE._replace(distributions=np.zeros((1, 2, 2, 96))),
            ValueError,
            "distributions: expected probabilities, got none",
        ),
        (
            DRAWN_ONE._replace(tokens=np.array([5, 6, 6])),
            ValueError,
            "tokens: expected 3 different ones of 96",
        ),
        (
            DRAWN_ONE._replace(tokens=np.array([5, 6, 7])),
            ValueError,
            r"distributions: expected shape \(1, 2, 2, 3\), got \(1, 2, 2, 96\)",
        ),
    ],
)
def test_what_is_no_proposal_names_the_draft(model, unchecked, found, error, message):
    draft = Proposing(*BEAM[:0])
    draft.found = found
    budget = 3 if "at most" in message else 8
    with pytest.raises(error, match="draft: Proposing proposed: " + message):
        generate(model, [1, 2, 3], max_new_tokens=5, draft=draft, budget=budget)
    with pytest.raises(error, match="draft: Proposing proposed: " + message):
        draft_candidate_tokens(draft, budget=budget - 1, vocabulary=96)


def test_what_draws_takes_its_chance_from_the_key(model, unchecked):
    draft, options = Proposing(), {"max_new_tokens": 5, "budget": 8}
    draft.found = DRAWN_ONE
    assert generate(model, [1, 2, 3], draft=draft, **options).steps > 0  # greedy: no chance
    options |= {"temperature": 1.0, "key": jax.random.key(0)}
    with pytest.raises(TypeError, match=r"draft: Proposing draws at random, but has no method"):
        generate(model, [1, 2, 3], draft=draft, **options)
    with pytest.raises(ValueError, match=r"draft: call begin\(key\) before propose"):
        DrawnDraft(model).propose(3)
    with pytest.raises(ValueError, match="drafts: expected at least one"):
        UnitedDraft()


def test_bad_drafts(model, unchecked):
    def run(draft, **options):
        return generate(model, [1, 2, 3], **({"max_new_tokens": 5} | options), draft=draft)

    with pytest.raises(
        ValueError, match=r"draft: expected None or one of .*'suffix'.* got 'sufix'"
    ):
        run("sufix")
    with pytest.raises(TypeError, match="draft: expected a name, or an object with the methods"):
        run(object())
    other = Llama.load(SMALL.parent / "llama2")
    if other.config.vocabulary == model.config.vocabulary:
        other.config.__dict__["vocabulary"] = 97
    with pytest.raises(ValueError, match=r"draft: it has a vocabulary of .*, the model one"):
        run(LlamaDraft(other))
    with pytest.raises(ValueError, match="budget: expected an integer of at least 1, got 0"):
        run("suffix", budget=0)
    with pytest.raises(ValueError, match="max_new_tokens: expected an integer of at least 1"):
        run("suffix", max_new_tokens=0)
    with pytest.raises(ValueError, match="capacity: the longest prompt"):
        run("suffix", capacity=6)
    with pytest.raises(ValueError, match="key: sampling"):
        run("suffix", temperature=1.0)
    with pytest.raises(ValueError, match="layers: expected 1 to 2, got 3"):
        first_layers(model, 3)
    with pytest.raises(ValueError, match="widths: expected positive numbers"):
        DrawnDraft(model, widths=(2, 2), replacement=True)


# The adaptive budget


def measured(most, costs, *drafts):
    """A budget that has seen steps of these sizes, and drafts, take so many seconds."""
    budget = Budget(most)
    budget.begin([str(i) for i in range(max(len(drafts), 1))])
    for _ in range(3):
        for size, seconds in costs.items():
            budget.took(size, seconds)
        for i, seconds in enumerate(drafts):
            budget.drafted(seconds, i)
    return budget


def chosen(budget, *chances):
    """How many nodes of the tree to which the drafts give these chances."""
    return budget.choose(np.stack([np.asarray(x) for x in chances]), range(len(chances)))


def test_the_budget_weighs_chances_against_costs():
    sure, unsure = np.full((1, 15), 0.9), np.full((1, 15), 0.02)
    flat = measured(16, {1: 1.0, 4: 1.0, 8: 1.0, 16: 1.0})
    assert chosen(flat, sure) == chosen(flat, unsure) == 15
    steep = measured(16, {1: 1.0, 4: 2.0, 8: 9.0, 16: 20.0})
    assert chosen(steep, sure) == 3 and chosen(steep, unsure) == 0
    record = steep.records[0]
    for _ in range(40):
        record.came_out(2.7, 0)  # what is sure never comes true
    assert chosen(steep, record.trusted(sure)) == 0
    assert measured(16, {1: 1.0, 16: 4.0}).seconds(8) == pytest.approx(1 + 3 * 7 / 15)
    assert [Budget(10).size_for(n) for n in (1, 2, 4, 5, 7, 10)] == [1, 4, 4, 6, 8, 12]
    assert Budget(16).sizes == (1, 4, 6, 8, 12, 16)
    fixed = Budget(5, adaptive=False)
    assert fixed.sizes == (1, 4, 8) and Budget(2, adaptive=False).sizes == (1, 2)
    assert chosen(fixed, sure) == 4
    assert Budget(1).sizes == (1,) and not Budget(1).asks()


STEPS = {1: 1.0, 4: 1.27, 6: 1.36, 8: 1.44, 12: 1.74, 16: 2.03}  # a step's time on two cores


def test_texts_that_are_over_gain_nothing(model, want, monkeypatch):
    """One text of eight goes on: it gets as many nodes as if it were alone."""
    prompts, texts = prompts_of(7)[:8], want[7][:8]
    stop = [text[0] for text in texts[1:]]
    assert texts[0][0] not in stop
    monkeypatch.setattr(Budget, "seconds", lambda self, size: STEPS[size])
    model = dataclasses.replace(model)  # of which no other test has made steps of other sizes ready
    nodes = []
    for n in (1, 8):
        draft = Oracle(prompts[:n], texts[:n], wrong=0)
        made = spoken(model, prompts[:n], draft=draft, budget=Budget(16), stop=stop)
        nodes.append([step.nodes[0] for step in made.trace])
    assert nodes[0] == nodes[1] and max(nodes[0]) > 1


def test_a_busy_machine_makes_no_draft_look_better():
    """Plain steps that something else delayed, all of them or most, say nothing about drafts."""
    for plain in ([0.2] * 9, [0.2, 0.2, 0.2, 0.04, 0.2]):
        budget = measured(4, {4: 0.06}, 0.001)
        for seconds in plain:
            budget.took(1, seconds)
        assert budget.seconds(1) <= budget.seconds(4)
        assert chosen(budget, np.full((1, 3), 0.6)) == 3
    assert chosen(budget, np.full((1, 3), 0.02)) == 0


def test_a_slow_draft_that_fails_pauses():
    budget, drafted = measured(4, {1: 1.0, 4: 2.0}, 0.5), 0
    for _ in range(100):
        if budget.asks():
            drafted += 1
            assert chosen(budget, np.full((1, 3), 0.01)) == 0
    assert drafted <= 9
    assert not all(budget.asks() for _ in range(9))
    budget.begin([str(0)])  # of another text nobody knows that it will fail
    assert budget.asks() and budget.records[0].trust == 1 and budget.records[0].cost == 0.5


def test_the_less_a_draft_costs_the_shorter_it_pauses():
    longest = []
    for cost in (0.01, 0.05, 0.5, 5.0):
        budget, asked = measured(4, {1: 1.0, 4: 2.0}, cost), []
        for i in range(200):
            if budget.asks():
                asked.append(i)
                chosen(budget, np.zeros((1, 3)))
        longest.append(int(np.diff(asked).max()) - 1)
    assert longest == [0, 2, 25, 32]


def test_a_slow_draft_that_fails_does_not_silence_a_free_one():
    """And the other way round: each pauses for itself."""
    budget, drafted = measured(16, STEPS, 0.001, 0.5), [0, 0]
    for i in range(100):
        asked = [i for i in (0, 1) if budget.asks(i)]
        found = 0.9 if i % 3 == 0 else 0.0  # the free one has something to say now and then
        chances = {0: np.full((1, 15), found), 1: np.full((1, 15), 0.01)}
        nodes = budget.choose(np.stack([chances[i] for i in asked]), asked)
        assert nodes == (15 if found else 0)
        for i in asked:
            drafted[i] += 1
    assert drafted[0] == 100 and drafted[1] <= 9
    # One that is worth its time goes on, beside a free one that knows less.
    budget = measured(16, STEPS, 0.001, 0.1)
    for _ in range(10):
        assert budget.asks(0) and budget.asks(1)
        assert chosen(budget, np.full((1, 15), 0.2), np.full((1, 15), 0.8)) == 15
    # Each is trusted as much as it deserves.
    for _ in range(10):
        budget.records[1].came_out(8.0, 1)
    few, many = (r.trusted(np.array([x])) for r, x in zip(budget.records, (0.2, 0.8), strict=True))
    assert few > many


class Slow:
    """Takes its time, hopes for little, and is always wrong."""

    def observe(self, texts, seen=None):
        self.texts = texts

    def propose(self, budget):
        time.sleep(0.05)  # a twentieth of a step
        return np.full((len(self.texts), 1, 3), 1), np.full((len(self.texts), 1, 3), -4.0)


class Late(Oracle):
    """Has nothing to say before the text's last ten tokens."""

    def propose(self, budget):
        tree, scores = super().propose(budget)
        left = np.array([len(whole) for whole in self.whole]) - self.lengths
        return tree._replace(sizes=np.where(left > 10, 0, tree.sizes).astype(np.int32)), scores


def test_two_drafts_take_no_more_steps_than_the_free_one_alone(model, want, monkeypatch):
    monkeypatch.setattr(Budget, "seconds", lambda self, size: STEPS[size])
    prompts, texts = prompts_of(7)[:1], want[7][:1]
    steps = []
    for others in ((), (Slow(),)):
        draft = UnitedDraft(Late(prompts, texts, wrong=0), *others)
        made = spoken(model, prompts, draft=draft, budget=Budget(16))
        assert made.tokens == texts
        steps.append(made.steps)
    assert steps[0] == steps[1] < NEW - 1


def test_a_draft_that_fails_is_plain_decoding(model, want):
    """The first steps try; then they are of size 1."""
    prompts = prompts_of(7)[:1]
    budget = Budget(8)
    for size, seconds in {1: 1e-9, 4: 1.0, 8: 1.0}.items():
        for _ in range(3):
            budget.took(size, seconds)
    made = spoken(model, prompts, draft=Oracle(prompts, want[7][:1], wrong=2.0), budget=budget)
    assert made.tokens == want[7][:1]
    assert {step.size for step in made.trace} == {1}
