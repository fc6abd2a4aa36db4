"""`generate` as it is used: any batch, room, budget, stop and key; no text but the model's own."""

from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from treeattn import Llama, kv_mesh
from treeattn_llama.speculation import (
    Budget,
    DrawnDraft,
    LlamaDraft,
    NGramDraft,
    RecyclingDraft,
    SuffixDraft,
    UnitedDraft,
    first_layers,
)
from treeattn_llama.text import generate, stream

pytestmark = pytest.mark.slow
SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


@pytest.fixture(scope="module")
def model():
    """In float64, so that a step of 16 tokens and one of 1 never differ in a near tie."""
    return Llama.load(SMALL, dtype=jnp.float64)


def plain(model, prompts, **options):
    texts = [[] for _ in prompts]
    for new in stream(model, prompts, **options):
        for text, ids in zip(texts, new, strict=True):
            text += ids
    return texts


# The text is the plain one


class Scribbler:
    """Knows the texts, and scribbles: for each some candidates of any lengths, equal ones among
    them, that are right up to some token. Others get none."""

    def __init__(self, prompts, texts, seed):
        self.whole = [[*p, *t] for p, t in zip(prompts, texts, strict=True)]
        self.random = np.random.default_rng(seed)

    def observe(self, texts, seen=None):
        self.ahead = [whole[len(text) :] for text, whole in zip(texts, self.whole, strict=True)]

    def propose(self, budget):
        random, shape = self.random, (len(self.whole), 4, 6)
        beam = random.integers(0, 96, shape)
        for rows, ahead in zip(beam, self.ahead, strict=True):
            for row in rows:
                right = min(random.integers(0, 7), len(ahead))
                row[:right] = ahead[:right]
            rows[random.integers(4)] = rows[random.integers(4)]
        lengths = random.integers(0, 7, shape[:2])
        scores = np.log(random.uniform(0.05, 1, shape))
        return beam, np.where(np.arange(6) < lengths[..., None], scores, -np.inf)


class Moody(Budget):
    """Takes another number of nodes at each step, or does not draft at all."""

    def __init__(self, most, seed):
        super().__init__(most)
        self.random = np.random.default_rng(seed)

    def asks(self, draft):
        return bool(self.random.random() < 0.8)

    def nodes(self, chances):
        return int(self.random.integers(0, min(self.most - 1, chances.shape[1]) + 1))


DRAFTS = {
    "scribbler": Scribbler,
    "suffix": lambda *_: SuffixDraft(),
    "ngram": lambda *_: NGramDraft(length=5, rows=3),
    "recycling": lambda *_: RecyclingDraft(),
    "surer": lambda *args: UnitedDraft(NGramDraft(), Scribbler(*args)),
}
CAPACITY = 24  # of every cache, so that few programs are compiled


@st.composite
def calls(draw, few=False):
    """(prompts, new tokens, options of stream, what to stop at, name of a draft, seed, budget).

    few: shapes, since each of them is compiled
    """
    longest = 16 if few else draw(st.sampled_from([5, 16]))
    batch = 3 if few else draw(st.sampled_from([1, 3, 3, 3]))
    lengths = [longest, *draw(st.lists(st.integers(1, longest), min_size=2, max_size=2))][:batch]
    if draw(st.booleans()):
        lengths = [longest] * batch
    tokens = st.integers(0, draw(st.sampled_from([3, 95])))
    prompts = [draw(st.lists(tokens, min_size=n, max_size=n)) for n in lengths]
    new = most = CAPACITY + 1 - longest
    options = {}
    if draw(st.booleans()):  # more room than is needed; by default it is just enough
        new, options["capacity"] = draw(st.integers(1, most)), CAPACITY
    if draw(st.booleans()):
        options["temperature"] = draw(st.sampled_from([0.3, 0.8, 1.5]))
        options["top_p"] = draw(st.sampled_from([1.0, 0.6]))
        options["key"] = jax.random.key(draw(st.integers(0, 99)))
    places = st.tuples(st.integers(0, batch - 1), st.integers(0, new - 1))
    stops = draw(st.lists(places, max_size=2))
    draft, seed = draw(st.sampled_from(sorted(DRAFTS))), draw(st.integers(0, 99))
    budget = draw(st.sampled_from([4, "moody"] if few else [1, 3, 8, "moody"]))
    return prompts, new, options, stops, draft, seed, budget


def cut(text, stop):
    ends = [i for i, token in enumerate(text) if token in stop]
    return text[: ends[0] + 1] if ends else text


def check_call(model, one, call):
    prompts, new, options, stops, draft, seed, budget = call
    options = options | {"max_new_tokens": new}
    texts = plain(one, prompts, stop=[], **options)
    stop = [texts[b][i] for b, i in stops]
    draft = DRAFTS[draft](prompts, texts, seed)
    budget = Moody(4, seed) if budget == "moody" else budget
    made = generate(model, prompts, draft=draft, budget=budget, stop=stop, **options)
    assert made.tokens == [cut(text, stop) for text in texts]


@hypothesis.settings(max_examples=30)
@hypothesis.given(call=calls())
def test_any_call_writes_the_plain_text(model, call):
    check_call(model, model, call)


@pytest.fixture(scope="module")
def on_three_devices(model):
    return model.on(kv_mesh(jax.devices()[:3]), attention="butterfly")


@hypothesis.settings(max_examples=10)
@hypothesis.given(call=calls(few=True))
def test_any_call_on_a_mesh_writes_the_plain_text(model, on_three_devices, call):
    check_call(on_three_devices, model, call)


@pytest.mark.parametrize("lengths", [(20, 20, 20), (30, 8, 5)])
def test_a_text_whose_room_is_full_asks_for_none(model, lengths):
    """It ends first, while others go on; the cache has just the room that the texts need."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 96, n).tolist() for n in lengths]
    texts = plain(model, prompts, max_new_tokens=10)
    slow = [texts[0], [], []]  # of the others the draft knows nothing
    draft = Scribbler(prompts, slow, 0)
    made = generate(model, prompts, max_new_tokens=10, draft=draft, budget=8)
    assert made.tokens == texts
    first, *others = zip(*(step.new for step in made.trace), strict=True)
    assert first[-1] == 0 and max(other[-1] for other in others) > 0


# Chance comes from the key, that of drafts included


PROMPT = [3, 14, 15, 92, 6]
PARTS = (2, 3, 3)  # cells: the first three tokens' remainders, each token alone being too rare


@pytest.fixture(scope="module")
def law(model):
    """How probable each cell is: by the model's logits after every beginning of the text."""

    def after(paths):
        return np.asarray(jax.nn.softmax(model.logits(np.array(paths))[:, -1], axis=-1))

    tokens = np.arange(96)
    one = after([PROMPT])[0]
    two = one[:, None] * after([[*PROMPT, a] for a in tokens])
    ends = [[*PROMPT, a, b] for a in tokens for b in tokens]
    three = two[..., None] * after(ends).reshape(96, 96, 96)
    cells = np.zeros(PARTS)
    np.add.at(cells, np.ix_(*(tokens % n for n in PARTS)), three)
    return cells


def drawing(model):
    return DrawnDraft(first_layers(model, 1), widths=(2, 2))


def test_over_keys_the_text_has_the_models_distribution(model, law, unchecked):
    """A chi-square test; each call gets a new draft, as a call of a program does. Over the texts of
    one call, test_speculation.py does the same with draws of other kinds."""
    counts, keys = np.zeros(PARTS), 100
    for seed in range(keys):
        text = generate(
            model,
            PROMPT,
            draft=drawing(model),
            budget=8,
            max_new_tokens=3,
            temperature=1.0,
            key=jax.random.key(seed),
        ).tokens
        counts[tuple(token % n for token, n in zip(text, PARTS, strict=True))] += 1
    statistic, freedom = ((counts - keys * law) ** 2 / (keys * law)).sum(), law.size - 1
    assert law.sum() == pytest.approx(1) and keys * law.min() > 2
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_the_same_key_writes_the_same_text(model, unchecked):
    kept = drawing(model)
    texts = []
    for seed, draft in ((0, kept), (1, kept), (0, kept), (0, drawing(model))):
        options = {"temperature": 1.0, "key": jax.random.key(seed), "max_new_tokens": 8}
        texts.append(generate(model, PROMPT, draft=draft, budget=8, **options).tokens)
    assert texts[0] == texts[2] == texts[3] != texts[1]


# Prompts


def test_prompts_of_any_kind(model):
    want = generate(model, [3, 1, 4], max_new_tokens=4).tokens
    one = [jnp.array([3, 1, 4]), np.array([3, 1, 4], np.uint8), [jnp.int32(3), np.int64(1), 4]]
    for prompt in [*one, (3, 1, 4)]:
        for draft in (None, "ngram"):
            assert generate(model, prompt, max_new_tokens=4, draft=draft, budget=2).tokens == want
    for prompts in (jnp.array([[3, 1, 4]]), [one[0]], [one[2]], np.array([[3, 1, 4]])):
        assert generate(model, prompts, max_new_tokens=4).tokens == [want]
        assert [*stream(model, prompts, max_new_tokens=1)] == [[[want[0]]]]


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1.5], "one", [[1], 2], jnp.zeros((0, 3))])
def test_prompts_that_are_none(model, prompt, unchecked):
    with pytest.raises((TypeError, ValueError), match="prompts: expected"):
        generate(model, prompt, max_new_tokens=4, draft="suffix")


# A draft that reads along


def test_a_model_drafts_for_texts_of_every_length(model):
    """At 256 its cache is full, where it began with less; texts may grow by many tokens at once."""
    reader = first_layers(model, 1)
    draft = LlamaDraft(reader, depth=1, width=2)
    text = np.random.default_rng(0).integers(0, 96, 600).tolist()
    logits = np.asarray(reader.logits(np.array([text])))[0]
    for n in (120, 256, 600):
        draft.observe([text[:n]])
        tree, _ = draft.propose(2)
        assert tree.tokens[0].tolist() == np.argsort(-logits[n - 1])[:2].tolist()
