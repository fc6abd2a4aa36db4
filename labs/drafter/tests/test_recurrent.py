"""The recurrent drafter: its beam search, its file, what it is trained by, and that it costs no
text."""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_speculation import chi_square, pairs

from training import distil, prompts
from training.recurrent import (
    DOUBT,
    PACKAGED,
    SHAPES,
    Drafter,
    RecurrentDraft,
    Shared,
    borrow,
    draft_beam,
    load_drafter,
    save_drafter,
)
from treeattn import Llama, kv_mesh
from treeattn_llama.layers import extend_layer
from treeattn_llama.sampling import Sampling
from treeattn_llama.speculation import (
    Budget,
    Chance,
    SuffixDraft,
    UnitedDraft,
    by_name,
    candidate_lengths,
    make_draft,
    ranked,
)
from treeattn_llama.speculation.drafting import Drafting
from treeattn_llama.speculation.sizes import sizes_of
from treeattn_llama.text import generate, stream

pytestmark = pytest.mark.slow

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
NEW, CAPACITY = 24, 64
CUT = np.arange(1, 96, 2, dtype=np.int32)  # every other token of the small model's


@pytest.fixture(scope="module")
def model():
    """In float64, so that a step of several tokens and one of 1 never differ in a near tie."""
    return Llama.load(SMALL, dtype=jnp.float64)


def random_drafter(seed: int, width: int, depth: int = 2, inner: int = 6) -> Drafter:
    rng = np.random.default_rng(seed)
    shapes = (width, 2 * width), (depth, 2 * inner, width), (depth, width, inner)
    return Drafter(*(jnp.asarray(0.5 * rng.normal(size=s), jnp.float32) for s in shapes))


def random_shared(seed: int, width: int, tokens, vocabulary: int = 20) -> Shared:
    rng = np.random.default_rng(seed)
    embedding = rng.normal(size=(vocabulary, width))
    head = rng.normal(size=(len(tokens), width))
    return Shared(*(jnp.asarray(x, jnp.float32) for x in (embedding, head)), jnp.asarray(tokens))


@pytest.fixture(scope="module")
def pair(model):
    return random_drafter(0, model.config.width), borrow(model, CUT)


# Beam search


def plain_unit(x):
    return x / np.sqrt((x**2).mean() + 1e-6)


def plain_log_probs(drafter, shared, state, tokens):
    """log p(· | tokens) over the cut head, as loops over float64 vectors say it."""
    mix, gate_up, down = (np.asarray(x, np.float64) for x in drafter)
    state = plain_unit(state)
    for token in tokens:
        e = plain_unit(np.asarray(shared.embedding[token], np.float64))
        x = state + mix @ np.concatenate([state, e])
        for both, back in zip(gate_up, down, strict=True):
            gate, up = np.split(both @ plain_unit(x), 2)
            x = x + back @ (gate / (1 + np.exp(-gate)) * up)
        state = plain_unit(x)
    logits = np.asarray(shared.head, np.float64) @ state
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def plain_beam(drafter, shared, state, certain, width, length):
    """[(tokens, scores)], most probable first."""
    paths = [((), ())]
    for _ in range(length):
        longer = []
        for tokens, scores in paths:
            log = plain_log_probs(drafter, shared, state, [certain, *tokens])
            for token, score in zip(np.asarray(shared.tokens).tolist(), log, strict=True):
                longer.append(((*tokens, token), (*scores, score)))
        paths = sorted(longer, key=lambda path: -sum(path[1]))[:width]
    return paths


@pytest.mark.parametrize("width, length", [(1, 4), (3, 3), (64, 3)])
def test_beams_are_those_of_plain_numpy(width, length):
    """With 4 tokens in the head, a width of 64 is all of 3 tokens, and no search at all."""
    tokens, certain = np.array([3, 7, 11, 19]), np.array([0, 7, 12], np.int32)
    drafter, shared = random_drafter(1, 5), random_shared(2, 5, tokens)
    state = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)
    beam, scores = draft_beam(drafter, shared, state, certain, width=width, length=length)
    assert beam.shape == scores.shape == (3, min(width, 4**length), length)
    for b in range(3):
        want = plain_beam(drafter, shared, state[b].astype(float), certain[b], width, length)
        assert [tuple(row) for row in beam[b].tolist()] == [path for path, _ in want]
        np.testing.assert_allclose(scores[b], [log for _, log in want], atol=5e-5)  # float32
    longer, more = draft_beam(
        drafter, shared, state, certain, width=width, length=length, with_pruned=True
    )
    np.testing.assert_array_equal(longer[:, : beam.shape[1]], beam)
    for depth in range(1, length):  # the shorter ones: those of shorter searches
        short = draft_beam(drafter, shared, state, certain, width=width, length=depth)
        rows = candidate_lengths(more) == depth
        assert (rows.sum(axis=1) == short[0].shape[1]).all()
        for b in range(3):
            np.testing.assert_array_equal(longer[b, rows[b], :depth], short[0][b])
            np.testing.assert_array_equal(more[b, rows[b], :depth], short[1][b])
    if width == 64:
        assert {tuple(x) for x in beam[0].tolist()} == {*itertools.product(tokens, repeat=3)}
        np.testing.assert_allclose(np.exp(scores.sum(axis=2)).sum(axis=1), 1, atol=1e-5)


def test_with_known_noise_the_likeliest_draws_are_searched_for():
    """A score is the log-probability of the sum of logits and noise, less sure of itself."""
    tokens, certain = np.array([3, 7, 11, 19]), np.array([0, 7, 12], np.int32)
    drafter, shared = random_drafter(1, 5), random_shared(2, 5, tokens)
    rng = np.random.default_rng(3)
    state = rng.normal(size=(3, 5)).astype(np.float32)
    noise = rng.gumbel(size=(3, 2, 4)).astype(np.float32)
    how = {"width": 16, "length": 2, "noise": noise, "temperature": 0.4}
    beam, scores = draft_beam(drafter, shared, state, certain, **how)
    for b in range(3):
        for row, log in zip(beam[b].tolist(), np.asarray(scores[b]), strict=True):
            for c, token in enumerate(row):
                before = [certain[b], *row[:c]]
                x = plain_log_probs(drafter, shared, state[b].astype(float), before)
                x = (x / 0.4 + noise[b, c]) / DOUBT
                want = x - np.log(np.exp(x).sum())
                assert log[c] == pytest.approx(want[tokens.tolist().index(token)], abs=1e-4)


def test_noise_is_what_tokens_are_drawn_with():
    """Of any texts, at any of their tokens, whatever the dtype."""
    sampling = Sampling(0.6, 1.0, jax.random.key(3))
    for dtype in (jnp.float32, jnp.float64):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 50)), dtype)
        chance = Chance(sampling, np.array([4, 9, 2]), jax.ShapeDtypeStruct((50,), dtype))
        noise = chance.noise(np.array([4, 12, 5]), 2)
        found = np.argmax(logits / 0.6 + noise, axis=-1)
        for c in range(2):
            index = np.array([0, 3, 3]) + c
            drawn = sampling.draw_at(logits[:, c], index, np.arange(3))
            np.testing.assert_array_equal(found[:, c], drawn)
        assert noise.dtype == dtype


def test_a_text_is_drafted_for_as_if_alone(pair):
    state = np.random.default_rng(4).normal(size=(3, 32)).astype(np.float32)
    certain = np.array([5, 6, 95], np.int32)  # one of them is not in the cut head
    together = draft_beam(*pair, state, certain, width=4, length=3)
    for b in range(3):
        alone = draft_beam(*pair, state[b : b + 1], certain[b : b + 1], width=4, length=3)
        np.testing.assert_array_equal(alone[0][0], together[0][b])
        np.testing.assert_allclose(alone[1][0], together[1][b], atol=1e-5)
    assert np.isin(together[0], CUT).all()


def test_a_beam_is_one_program(pair):
    text = jax.jit(lambda s, t: draft_beam(*pair, s, t, width=2, length=4)).lower(
        np.zeros((1, 32), np.float32), np.zeros(1, np.int32)
    )
    assert text.as_text().count("func.func public") == 1


# What a step hands over


class Watching:
    """Proposes what the model said before, and keeps the states it is shown."""

    states, likely = True, 2

    def __init__(self):
        self.seen, self.inner = [], SuffixDraft()

    def observe(self, texts, seen=None):
        self.inner.observe(texts)
        if seen is not None:
            self.seen.append(([list(text) for text in texts], seen.state))

    def propose(self, budget):
        return self.inner.propose(budget)


PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [40, 41], [7, 8, 9] * 4]


def test_the_state_is_the_one_that_the_last_token_was_read_off(model):
    draft = Watching()
    options = {"max_new_tokens": NEW, "capacity": CAPACITY, "stop": []}
    generate(model, [*PROMPTS, PROMPTS[0]], draft=draft, budget=8, **options)
    assert [len(text) for text in draft.seen[0][0]] == [8, 3, 13, 8]  # from prefill on
    for texts, state in draft.seen:
        logits = np.asarray(model.read_out(jnp.asarray(state)[:, None]))[:, 0]
        for text, row, prompt in zip(texts, logits, [*PROMPTS, PROMPTS[0]], strict=True):
            if len(text) < len(prompt) + NEW:  # of one that is over nothing is asked any more
                assert np.argmax(row) == text[-1]


def test_other_drafts_are_shown_no_state(model):
    draft = Watching()
    draft.states = False
    generate(model, PROMPTS, draft=draft, budget=8, max_new_tokens=NEW, capacity=CAPACITY)
    assert draft.seen and all(state is None for _, state in draft.seen)


# Losslessness


def plain(model, **options):
    texts = [[] for _ in PROMPTS]
    for new in stream(model, PROMPTS, capacity=CAPACITY, **options):
        for text, ids in zip(texts, new, strict=True):
            text += ids
    return texts


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("where", ["one device", "five devices", "sharded weights"])
def test_the_text_is_the_plain_one(model, pair, where, sampling):
    options = {"max_new_tokens": NEW, **sampling}
    options |= {"key": jax.random.key(1)} if sampling else {}
    want = plain(model, **options)
    if where != "one device":
        sharded = where == "sharded weights"
        model = model.on(kv_mesh(jax.devices()[: 4 if sharded else 5]), shard_weights=sharded)
        drafter, shared = pair
        for a, b in zip(borrow(model, CUT), shared, strict=True):
            np.testing.assert_array_equal(a, b)
        pair = drafter, borrow(model, CUT)
    draft = RecurrentDraft(model, pair, width=4, length=3)
    made = generate(model, PROMPTS, draft=draft, budget=8, capacity=CAPACITY, **options)
    assert made.tokens == want
    assert max(made.trace[0].nodes) > 1  # from the state that prefill has left


class Foreseeing(RecurrentDraft):
    """A drafter that knows the model's own logits at the first depth."""

    def propose(self, budget, shape=None):
        if self._chance is None or self._state is None:
            return np.zeros((len(self._certain), 0, 0), int), np.zeros((len(self._certain), 0, 0))
        rows = np.array([text + [0] * (32 - len(text)) for text in self.texts])
        logits = self.model.logits(rows)[np.arange(len(rows)), self._lengths - 1]
        temperature = self._chance.sampling.temperature
        best = np.argmax(logits / temperature + self._chance.noise(self._lengths, 1)[:, 0], -1)
        return best[:, None, None], np.full((len(best), 1, 1), -0.1)

    def observe(self, texts, seen=None):
        super().observe(texts, seen)
        self.texts = [list(text) for text in texts]


def test_who_knows_the_model_and_its_noise_is_always_right(model, pair):
    """And whoever does not know the noise is not: the tokens are drawn."""
    draft = Foreseeing(model, pair, width=1, length=1)
    draft.model = model
    options = {"max_new_tokens": 5, "capacity": CAPACITY, "stop": [], "budget": 4}
    options |= {"temperature": 0.8, "key": jax.random.key(1)}
    made = generate(model, PROMPTS[:2], draft=UnitedDraft(draft), **options)
    assert made.tokens == generate(model, PROMPTS[:2], **options).tokens
    assert [step.new for step in made.trace] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("tree", ["foreseen", "drawn"])
def test_where_nothing_is_drawn_the_likeliest_tree_is_proposed(model, pair, tree):
    options = {"max_new_tokens": 8, "capacity": CAPACITY, "budget": 8}
    made, likeliest = (
        generate(model, PROMPTS, draft=RecurrentDraft(model, pair, tree=kind), **options)
        for kind in (tree, "likeliest")
    )
    assert made.trace == likeliest.trace and made.tokens == likeliest.tokens


DRAWN = {"temperature": 0.6, "budget": 8, "max_new_tokens": 6, "capacity": CAPACITY, "stop": []}


def test_a_drawn_text_is_its_keys_and_depends_on_no_neighbour(model, pair):
    """The tree is proposed from nothing but the text, its number and the key."""
    draft = RecurrentDraft(model, pair, tree="drawn")
    keys = [jax.random.key(i) for i in (1, 1, 2)]
    made = [generate(model, PROMPTS, draft=draft, key=key, **DRAWN) for key in keys]
    assert made[0].tokens == made[1].tokens and made[0].trace == made[1].trace
    assert made[0].tokens != made[2].tokens
    assert {step.nodes[0] for step in made[0].trace[:2]} == {8}  # 7 draws, and the certain token
    others = generate(model, [PROMPTS[0], [3, 3], [8]], draft=draft, key=keys[0], **DRAWN)
    assert others.tokens[0] == made[0].tokens[0]
    last = generate(model, [[1], *PROMPTS[1:]], draft=draft, key=keys[0], **DRAWN)
    assert last.tokens[1:] == made[0].tokens[1:]


def test_drawn_trees_are_drawn_from_what_they_say(model, pair):
    """And are no larger than was asked for."""
    draft = RecurrentDraft(model, pair, tree="drawn")
    generate(model, PROMPTS, draft=draft, key=jax.random.key(1), **DRAWN)
    drafter, shared = pair
    for budget, nodes in ((15, 15), (9, 7), (3, 3), (2, 1)):
        drawn = draft.propose(budget)
        lengths = candidate_lengths(drawn.scores)
        assert len(beam_paths(drawn.beam[0], lengths[0])) == nodes
    drawn = draft.propose(7)
    for row, q, n in zip(drawn.beam[0], drawn.distributions[0], lengths[0], strict=False):
        for c in range(n):
            before = [draft._certain[0], *row[:c]]
            log = plain_log_probs(drafter, shared, np.asarray(draft._state[0], float), before) / 0.6
            want = np.exp(log - log.max())
            np.testing.assert_allclose(q[c], want / want.sum(), atol=1e-5)
    np.testing.assert_array_equal(drawn.tokens, CUT)


def test_drawn_trees_leave_the_models_distribution(model, pair, unchecked):
    """200 texts; the exact proof is check_verifier's."""
    sampling = {"temperature": 0.35, "top_p": 0.5}
    draft = RecurrentDraft(model, pair, tree="drawn")
    prompt = [3, 14, 15, 92, 6]
    counts = pairs(model, prompt, draft, 200, budget=8, key=jax.random.key(1), **sampling)
    statistic, freedom = chi_square(model, prompt, counts, **sampling)
    assert freedom > 3 and statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_trees_that_cannot_be_drawn(model, pair):
    with pytest.raises(ValueError, match=r"tree: expected one of .*'foreseen'.* got 'likely'"):
        RecurrentDraft(model, pair, tree="likely")
    draft = RecurrentDraft(model, pair, tree="drawn")
    generate(model, PROMPTS, draft=draft, key=jax.random.key(1), **DRAWN)
    draft._key = None
    with pytest.raises(ValueError, match=r"draft: call begin\(key\) before propose"):
        draft.propose(3)


def test_candidates_have_scores_and_end_with_the_room(model, pair):
    draft, options = RecurrentDraft(model, pair, width=4, length=3), {"capacity": CAPACITY}
    made = generate(model, PROMPTS, draft=draft, budget=8, max_new_tokens=3, stop=[], **options)
    assert [len(text) for text in made.tokens] == [3, 3, 3]
    assert max(max(step.depth) for step in made.trace) <= 1
    beam, scores = draft.propose(8)
    assert beam.shape == scores.shape == (3, 12, 3)
    assert candidate_lengths(scores)[0].tolist() == [3] * 4 + [2] * 4 + [1] * 4


def test_a_step_without_candidates_is_the_program_of_a_plain_one(model, pair):
    """Though the draft is shown the state that it leaves."""
    options = {"max_new_tokens": 4, "capacity": CAPACITY, "stop": []}
    want = generate(model, PROMPTS, **options).tokens
    compiled = extend_layer._cache_size()
    draft = RecurrentDraft(model, pair, width=4, length=3)
    made = generate(model, PROMPTS, draft=draft, budget=1, **options)
    assert made.tokens == want and {step.size for step in made.trace} == {1}
    assert draft._state is not None
    assert extend_layer._cache_size() == compiled


# Two drafts together


class Fixed:
    def __init__(self, beam, scores):
        self.found = np.array(beam), np.array(scores)

    def observe(self, texts, seen=None):
        pass

    def propose(self, budget):
        return self.found


def test_candidates_of_two_drafts_make_one_tree():
    """Packed, what both begin with is there once; its chance is the larger one."""
    short = Fixed([[[1, 2]], [[3, 4]]], np.log([[[0.9, 0.9]], [[0.1, 0.1]]]))
    long = Fixed([[[1, 6, 7], [5, 8, 9]]] * 2, np.log(np.full((2, 2, 3), 0.4)))
    beam, scores = UnitedDraft(short, long).propose(8)
    assert candidate_lengths(scores).tolist() == [[2, 3, 3]] * 2
    assert beam[:, 0, :2].tolist() == [[1, 2], [3, 4]] and beam[0, 1].tolist() == [1, 6, 7]
    _, chances = ranked(beam, scores)
    want = [0.9, 0.81, 0.4, 0.16, 0.16, 0.064, 0.064, 0.0], [0.4, 0.4, *[0.16] * 2]
    np.testing.assert_allclose(chances[0, :7], want[0][:7])
    np.testing.assert_allclose(chances[1, :4], want[1])


def test_a_united_step_verifies_the_best_nodes_of_both(model):
    """And each draft is told what came of its own."""
    short = Fixed([[[1, 2]]], np.log([[[0.9, 0.9]]]))
    long = Fixed([[[1, 6, 7], [5, 8, 9]]], np.log(np.full((1, 2, 3), 0.4)))
    budget = Budget(5, adaptive=False)
    sizes = sizes_of(model, 1, CAPACITY)
    drafting = Drafting(UnitedDraft(short, long), budget, 96, sizes, sampled=False)
    found = drafting.candidates([[3]], np.array([9]))
    paths = beam_paths(found.beam[0], candidate_lengths(found.scores)[0])
    assert paths == {(3,), (3, 1), (3, 1, 2), (3, 5), (3, 1, 6)}
    expected = [float(proposal.expected[0]) for proposal in found.proposals]
    np.testing.assert_allclose(expected, [0.9 + 0.81, 0.4 + 0.4 + 0.16])
    drafting.came_out(found, [[1, 6]])
    accepted = [record._accepted - 0.95 for record in budget.records]
    np.testing.assert_allclose(accepted, [1, 2])


def beam_paths(beam, lengths) -> set[tuple[int, ...]]:
    rows = zip(beam.tolist(), lengths.tolist(), strict=True)
    return {tuple(row[: i + 1]) for row, n in rows for i in range(n)}


def test_two_drafts_write_the_plain_text(model, pair):
    draft = UnitedDraft(SuffixDraft(), RecurrentDraft(model, pair, width=2, length=2))
    made = generate(model, PROMPTS, draft=draft, budget=8, max_new_tokens=NEW, capacity=CAPACITY)
    assert made.tokens == plain(model, max_new_tokens=NEW)


# Shapes


def test_the_shape_is_chosen_before_it_is_paid_for(model, pair):
    """By what a step and the shape's own work take, and by how much it gains."""
    told = [shape.told for shape in SHAPES]
    costs = {"steep": {1: 1.0, 4: 1.1, 8: 1.9, 16: 3.0}, "flat": dict.fromkeys((1, 4, 8, 16), 1.0)}
    asked = {}
    for name, seconds in costs.items():
        budget = Budget(16)
        for size, s in seconds.items():
            for _ in range(3):
                budget.took(size, s)
        for _ in range(3):
            budget.drafted(0.02, shape=1)
        asked[name] = budget.shape(0, told)
    assert asked == {"steep": 0, "flat": 2}
    for _ in range(9):  # in texts that go as it thinks, more is worth its time
        budget.records[0].came_out(1.0, 1, promised=1.0)
    level = budget.records[0].level
    for _ in range(9):
        budget.records[0].came_out(1.0, 0, promised=1.0)
    assert level == 1 > budget.records[0].level
    dear = Budget(16)
    for _ in range(3):  # a drafter that takes as long as its model
        dear.took(1, 1.0)
        dear.took(16, 1.0)
        dear.drafted(0.3, shape=0)
    assert dear.shape(0, told) == 1


def test_every_shape_is_ready_from_the_first_step_on(model, pair, monkeypatch):
    """And what is proposed is the beam of that shape, in one call of the drafter."""
    draft = RecurrentDraft(model, pair)
    options = {"max_new_tokens": 4, "capacity": CAPACITY, "stop": []}
    generate(model, PROMPTS, draft=draft, budget=8, **options)
    compiled = draft_beam._cache_size()
    for i, shape in enumerate(SHAPES):
        beam, _ = draft.propose(8, i)
        lone = RecurrentDraft(model, pair, width=shape.width, length=shape.length)
        lone._certain, lone._state = draft._certain, draft._state
        np.testing.assert_array_equal(beam, lone.propose(8)[0])
    assert draft_beam._cache_size() == compiled


# The file


def test_parameters_come_back_from_their_file(model, pair, tmp_path):
    save_drafter(tmp_path / "a.safetensors", *pair, "small")
    drafter, shared = load_drafter(model, tmp_path / "a.safetensors")
    for a, b in zip(drafter, pair[0], strict=True):
        np.testing.assert_array_equal(a, np.asarray(b).astype(np.float16))
    for a, b in zip(shared, pair[1], strict=True):
        np.testing.assert_array_equal(a, b)
    half = Llama.load(SMALL, dtype=jnp.bfloat16)  # the same model, rounded
    load_drafter(half, tmp_path / "a.safetensors")


def test_the_same_model_in_8_bits_is_drafted_for(model, pair, tmp_path):
    """Its embedding and head are the rounded ones, and its text that of plain decoding."""
    small = Llama.load(SMALL, weights="int8")
    save_drafter(tmp_path / "a.safetensors", *pair, "small")
    draft = RecurrentDraft(small, tmp_path / "a.safetensors", width=2, length=2)
    np.testing.assert_allclose(draft.shared.head, pair[1].head, atol=0.02)
    mesh = kv_mesh(jax.devices()[:2])
    for ours in (small, small.on(mesh), small.on(mesh, shard_weights=True)):
        shared = borrow(ours, CUT)
        jax.tree.map(np.testing.assert_array_equal, shared, draft.shared)
        assert all(len(x.devices()) == 1 for x in jax.tree.leaves(shared))
    options = {"max_new_tokens": NEW, "capacity": CAPACITY}
    made = generate(small, PROMPTS, draft=draft, budget=8, **options)
    assert made.tokens == generate(small, PROMPTS, **options).tokens
    assert any(step.size > len(PROMPTS) for step in made.trace)


def test_another_model_is_refused(model, pair, tmp_path, unchecked):
    path = tmp_path / "a.safetensors"
    save_drafter(path, *pair, "small")
    other = model.weights._replace(embedding=model.weights.embedding + 0.1)
    with pytest.raises(ValueError, match="does not fit this model; it was trained on small"):
        load_drafter(dataclasses.replace(model, weights=other), path)
    with pytest.raises(ValueError, match="models of width 576, it was trained on SmolLM2-135M"):
        make_draft("recurrent", model)
    with pytest.raises(ValueError, match="vocabulary of 96 tokens, the model one of"):
        config = dataclasses.replace(model.config, vocabulary=95)
        make_draft(RecurrentDraft(model, path), dataclasses.replace(model, config=config))


def test_without_a_checkout_the_names_say_where_the_drafter_is(model, monkeypatch, tmp_path):
    monkeypatch.setattr(by_name, "CHECKOUT", tmp_path)
    monkeypatch.delitem(sys.modules, by_name.TRAINED, raising=False)
    for name in ("recurrent", "surer"):
        with pytest.raises(ValueError, match=r"draft: 'recurrent' and 'surer' need training/rec.*"):
            make_draft(name, model)
    assert all(hasattr(make_draft(name, model), "propose") for name in by_name.PACKAGED_DRAFTS)


def changed(path, **arrays):
    with safetensors.safe_open(path, "np") as file:
        about, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    found |= arrays
    found = {name: x for name, x in found.items() if x is not None}
    safetensors.numpy.save_file(found, path, about)


BROKEN = {
    "no readable safetensors": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no readable safetensors file": lambda path: path.write_bytes(b"not at all"),
    "holds no recurrent drafter": lambda path: changed(path, down=None),
    "holds no recurrent drafter .treeattn": lambda path: safetensors.numpy.save_file(
        {"mix": np.zeros((2, 4), np.float16)}, path
    ),
    "has arrays of shapes": lambda path: changed(path, down=np.zeros((2, 32, 7), np.float16)),
    "no finite numbers": lambda path: changed(path, mix=np.full((32, 64), np.nan, np.float16)),
    "outside the model's vocabulary": lambda path: changed(path, tokens=np.array([1, 96])),
    "does not fit this model": lambda path: changed(path, fingerprint=np.zeros(3, np.float32)),
    "models of width 3,": lambda path: changed(
        path,
        mix=np.zeros((3, 6), np.float16),
        gate_up=np.zeros((1, 2, 3), np.float16),
        down=np.zeros((1, 3, 1), np.float16),
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_file_says_so(model, pair, tmp_path, message, unchecked):
    path = tmp_path / "a.safetensors"
    save_drafter(path, *pair, "small")
    BROKEN[message](path)
    with pytest.raises(ValueError, match=message):
        load_drafter(model, path)


def test_wrong_numbers_and_missing_files(model, pair, tmp_path):
    with pytest.raises(FileNotFoundError, match="draft: no file"):
        load_drafter(model, tmp_path / "none")
    with pytest.raises(ValueError, match="width, length: expected at least 1, got 0, 5"):
        RecurrentDraft(model, pair, width=0)


# Training


def texts_of(model, count: int, seed: int) -> distil.Texts:
    begins = np.random.default_rng(seed).integers(0, 96, (count, 2)).tolist()
    rows = np.array(generate(model, begins, max_new_tokens=30, stop=[]).tokens)
    return distil.read(model, np.concatenate([begins, rows], axis=1), 30, top=8)


def test_a_tiny_training_beats_chance(model):
    """On texts it has not seen, of 96 tokens: the small model's texts soon repeat themselves, so
    an untrained drafter, whose state is the model's last one, is right now and then."""
    learn, held = texts_of(model, 64, 0), texts_of(model, 16, 1)
    shared = borrow(model, np.arange(96))
    drafter = distil.initial(jax.random.key(0), model.config.width, 1, 16)
    adam = distil.optimizer(100, 1e-2)
    moments, row, rng = adam.init(drafter), np.arange(96), np.random.default_rng(0)
    at = np.flatnonzero(np.arange(len(held.after)) + 4 < held.end)
    before = distil.accepted(drafter, shared, held, at, 1, 3)
    starts, losses = np.flatnonzero(np.arange(len(learn.after)) + 1 < learn.end), []
    for _ in range(100):
        batch = distil.examples(learn, rng.choice(starts, 32), row, 3)
        drafter, moments, value = distil.update(
            drafter, moments, shared, batch, 0.5, 0.2, adam=adam
        )
        losses.append(float(value))
    after = distil.accepted(drafter, shared, held, at, 1, 3)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.2
    assert (after > 0).mean() > 0.25 and after.mean() > 1.5 * before.mean()


def test_tokens_a_step_are_counted_along_the_text():
    end = np.full(8, 8)
    texts = distil.Texts(*[np.zeros(8)] * 2, end, *[np.zeros(8)] * 4)
    assert distil.tokens_a_step(texts, [0], np.zeros(8, int)) == 1
    assert distil.tokens_a_step(texts, [0], np.array([2, 9, 9, 3, 9, 9, 9, 9])) == 7 / 2


def test_prompts_for_validation_are_about_other_topics():
    found = prompts.prompts()
    names = [" ".join(t.split()) for t in prompts.HELD_OUT_TOPICS.split(";")]
    learn, held = ([p.text for p in found if p.held_out is kept] for kept in (False, True))
    assert len(learn) > 3000 and len(held) > 300
    assert not any(f" {name}" in text for text in learn for name in names)
    assert {p.kind for p in found} == {"chat", "code", "editing", "structured"}


def test_the_packaged_parameters_are_small_and_described():
    card = PACKAGED.with_suffix(".md").read_text("utf-8")
    assert PACKAGED.stat().st_size <= 4_000_000
    assert "Apache-2.0" in card and "SmolLM2-135M-Instruct" in card


def test_the_packaged_drafter_fits_the_packaged_model_in_8_bits():
    load_drafter(Llama.load(weights="int8"))


def test_the_packaged_drafter_saves_steps():
    model = Llama.load()
    prompt = model.tokenizer.chat("What is the capital of Italy?")
    options = {"max_new_tokens": 24, "capacity": 64}
    want = generate(model, prompt, **options).tokens
    made = generate(model, prompt, draft="recurrent", budget=8, **options)
    assert made.tokens == want
    assert made.tokens_a_step > 1.2
