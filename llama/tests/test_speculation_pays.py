"""What speculation costs besides the model: programs compiled, tokens computed, bytes moved."""

import contextlib
import logging
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import Llama
from treeattn_llama.sampling import FEW, Sampling, nucleus
from treeattn_llama.speculation import Budget, verify
from treeattn_llama.speculation.loop import rounded_capacity
from treeattn_llama.text import generate, stream

pytestmark = pytest.mark.slow
SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"
NEW = 24


@pytest.fixture(scope="module")
def model():
    return Llama.load(SMALL)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Some tokens, again and again: there is something to look up."""
    some = np.random.default_rng(seed).integers(0, 96, 5).tolist()
    return (some * length)[:length]


# Programs


@contextlib.contextmanager
def compiled():
    """A list that every program's name is added to as it is compiled."""
    names = []

    class Listen(logging.Handler):
        def emit(self, record):
            if "Finished XLA compilation" in record.getMessage():
                names.append(record.getMessage())

    log = logging.getLogger("jax")
    listen = Listen()
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "propagate", False)
        log.addHandler(listen)
        try:
            yield names
        finally:
            log.removeHandler(listen)


SAMPLING = {"temperature": 0.7, "top_p": 0.9, "key": jax.random.key(5)}


@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_texts_of_other_lengths_compile_nothing(model, options):
    """The first text compiles what all need: prompts of 17 to 100 tokens share a capacity, and a
    step is padded to a size that is there, whatever is drafted."""
    options = {"max_new_tokens": NEW, "draft": "suffix", "budget": 8, "stop": [], **options}
    for length in (20, 40, 70):  # a prompt's own piece: of 32, 64 and 128 tokens
        generate(model, prompt_of(length), **options)
    for length, seed in ((17, 1), (31, 2), (50, 3), (100, 4)):
        with compiled() as names:
            made = generate(model, prompt_of(length, seed), **options)
        assert names == []
        assert {step.size for step in made.trace} <= {1, 8}
    with compiled() as names:
        plain = generate(model, prompt_of(100, 4), **options | {"draft": None})
    assert plain.tokens == made.tokens


def test_a_text_compiles_nothing_in_its_middle(model):
    """Not even the first of another capacity, after its prompt is read and a plain step was run:
    the largest size was ready before."""
    options = {"max_new_tokens": NEW, "stop": [], "capacity": 90}
    calls = stream(model, [prompt_of(30)], draft="suffix", budget=8, **options)
    with compiled() as names:
        next(calls)
    assert names
    next(stream(model, [prompt_of(30)], **options))  # commits a plain step's keys
    list(stream(model, [prompt_of(30)], **options))
    with compiled() as names:
        assert any(len(new) > 1 for (new,) in calls)
    assert names == []


def test_a_size_that_was_missed_is_compiled_before_a_later_text(model, monkeypatch):
    """Steps of 4 would have done; the first text has only those of 8 until they are missed often
    enough, and another budget of the same model need not wait for it again."""
    options = {"max_new_tokens": NEW, "stop": [], "capacity": 91, "draft": "ngram", "budget": 8}
    monkeypatch.setattr("treeattn_llama.speculation.sizes.PATIENCE", 3)
    monkeypatch.setattr(Budget, "asks", lambda self, draft: True)

    class Two:
        def observe(self, texts, seen=None):
            pass

        def propose(self, budget):
            return np.zeros((1, 1, 2), int), np.zeros((1, 1, 2))

    options["draft"] = Two()
    first = [step.size for step in generate(model, prompt_of(9), **options).trace]
    assert first[:3] == [8, 8, 8] and set(first[3:-1]) == {4}
    with compiled() as names:
        second = generate(model, prompt_of(9), **options)
    assert {step.size for step in second.trace[:-1]} == {4} and names == []


def test_a_capacity_holds_what_is_needed_and_little_more():
    context = 8192
    needed = np.arange(1, context + 1)
    got = np.array([rounded_capacity(int(n), context) for n in needed])
    assert (got >= needed).all() and got.max() == context
    assert len({*got.tolist()}) == 4 + 3 * 4
    assert (got[1024:] <= 1.25 * needed[1024:]).all() and (got[128:] < 2 * needed[128:]).all()
    assert rounded_capacity(9000, context) == 9000 and rounded_capacity(20, 64) == 64


# Draws


def plain_nucleus(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Token by token, from the likeliest on, until they reach top_p."""
    cut = np.full(logits.shape, -np.inf)
    p = np.exp(logits - logits.max())
    p = p / p.sum()
    reached = 0.0
    for token in np.argsort(-logits, kind="stable"):
        if reached >= top_p:
            break
        cut[token] = logits[token]
        reached += p[token]
    return cut


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_a_nucleus_is_found_among_few_tokens_or_all(top_p):
    """Of a vocabulary of 3,000, in float64: peaked rows end within FEW tokens, flat ones do not;
    one flat row in a batch makes all of it sorted. Equal logits: the first ones."""
    jitted = jax.jit(nucleus)
    rng = np.random.default_rng(0)
    peaked = rng.normal(size=(2, 3 * FEW)) * 4
    flat = rng.normal(size=(2, 3 * FEW)) / 9
    tied = np.round(peaked)
    for rows in (peaked, flat, tied, np.stack([peaked[0], flat[0]])):
        want = np.stack([plain_nucleus(row, top_p) for row in rows])
        np.testing.assert_array_equal(jitted(jnp.asarray(rows), top_p), want)
    assert np.isfinite(plain_nucleus(peaked[0], 0.9)).sum() < FEW
    assert np.isfinite(plain_nucleus(flat[0], 0.9)).sum() > FEW


def most_numbers(lowered: str) -> int:
    """That a value of this program has."""
    shapes = re.findall(r"tensor<((?:\d+x)+)", lowered)
    return max(math.prod(int(n) for n in shape.split("x")[:-1]) for shape in shapes)


def test_a_draw_takes_a_texts_own_numbers_only():
    """Text 7 of a batch: a row of the vocabulary, not eight; and the tokens are those of a plain
    step, which draws for all texts at once, each at its own place."""
    n, batch = 200, 8
    logits = np.random.default_rng(1).normal(size=(batch, 3, n)).astype(np.float32)
    index = np.random.default_rng(2).integers(0, 50, (batch, 3))
    for top_p in (1.0, 0.8):
        sampling = Sampling(0.9, top_p, jax.random.key(3))
        tree = verify.what_the_model_says(sampling, logits, index)
        for node in range(3):
            at = slice(node, node + 1)
            plain = verify.what_the_model_says(sampling, logits[:, at], index[:, at])
            drawn = sampling.draw(logits[:, node], sampling.for_token(int(index[0, node])))
            assert int(drawn[0]) == plain(0, 0)
            assert [tree(b, node) for b in range(batch)] == [plain(b, 0) for b in range(batch)]
    program = jax.jit(sampling.draw_at).lower(logits[7, :1], index[7, :1], np.array([7]))
    assert most_numbers(program.as_text()) <= 2 * n  # two indices for each number that is kept


# Bytes


class OnDevice:
    """Logits of a device that is no CPU: read whole, they would all go to the host."""

    def __init__(self, x):
        self.x = x

    def devices(self):
        return [type("Device", (), {"platform": "cuda"})()]

    def __array__(self, *args, **options):
        raise AssertionError(f"{self.x.nbytes} bytes to the host")


def test_of_a_devices_logits_only_tokens_go_to_the_host(unchecked):
    """4 bytes a node; on a CPU the logits are looked at where they are, by no program."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 200)))
    assert isinstance(verify.at_hand(OnDevice(x)), OnDevice)
    there = verify.at_hand(x)
    assert isinstance(there, np.ndarray) and np.shares_memory(there, np.asarray(x))
    with compiled() as names:
        says = verify.what_the_model_says(Sampling(), there, np.zeros((2, 3), int))
    assert names == []
    on_device = verify.what_the_model_says(Sampling(), x, np.zeros((2, 3), int))
    for b, node in np.ndindex(2, 3):
        assert says(b, node) == on_device(b, node) == int(x[b, node].argmax())
    assert verify._on_device(x).nbytes == 4 * 6


# Certificates


def subtrees(parents: list[int]):
    """All sets of nodes of a forest, each with its parents."""
    for bits in range(1 << len(parents)):
        kept = {i for i in range(len(parents)) if bits >> i & 1}
        if all(parents[i] < 0 or parents[i] in kept for i in kept):
            yield kept


@pytest.mark.parametrize("seed", range(3))
def test_the_most_probable_nodes_are_the_best_tree_of_their_size(seed):
    """Against all trees of as many nodes, and against all that the model could say: the tokens
    that a tree is expected to give are its nodes' chances, added up."""
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, 9))]
    own = rng.uniform(0.1, 1, 9)
    for up in {*parents}:  # what may follow a path are outcomes that exclude each other
        children = [i for i in range(9) if parents[i] == up]
        own[children] *= rng.uniform(0.5, 1) / own[children].sum()
    chance = []
    for i, up in enumerate(parents):
        chance.append(own[i] * (chance[up] if up >= 0 else 1))

    def expected(kept) -> float:
        """The accepted nodes of a walk that goes down where a child is what the model says."""

        def below(up):
            return sum(own[i] * (1 + below(i)) for i in kept if parents[i] == up)

        return below(-1)

    best = np.sort(chance)[::-1]
    most = {}
    for kept in subtrees(parents):
        value = expected(kept)
        assert value == pytest.approx(sum(chance[i] for i in kept))
        most[len(kept)] = max(most.get(len(kept), 0), value)
    for n, value in most.items():
        assert value == pytest.approx(best[:n].sum())


class Sure:
    """Proposes [5, 6] with chances 0.5 and 0.25, and [7] with 0.125."""

    def observe(self, texts, seen=None):
        self.texts = len(texts)

    def propose(self, budget):
        beam = np.array([[[5, 6], [7, 0]]] * self.texts)
        scores = np.log([[[0.5, 0.5], [0.125, 1e-300]]] * self.texts)
        return beam, np.where(scores < -600, -np.inf, scores)


def test_a_certificate_says_what_was_promised_and_what_came(model):
    budget = Budget(4, adaptive=False)
    options = {"max_new_tokens": 6, "stop": [], "draft": Sure(), "budget": budget}
    made = generate(model, [prompt_of(9), prompt_of(5)], certify=True, **options)
    assert len(made.certificates) == made.steps
    first = made.certificates[0]
    assert first.expected == pytest.approx(2 + 2 * (0.5 + 0.25 + 0.125))
    assert first.planned is None and first.promised is None and first.plain is None
    assert made.certificates[2].promised > 0 and made.certificates[2].kept > 0
    for step, one in zip(made.trace, made.certificates, strict=True):
        assert one.tokens == sum(step.new) and one.seconds > 0
    last = made.certificates[-1]  # of room for one more token no candidate could be accepted
    assert min(map(sum, zip(*(s.new for s in made.trace), strict=True))) == 5
    assert last.expected <= 2 + 2 * 0.875
    assert generate(model, prompt_of(9), **options).certificates == ()
