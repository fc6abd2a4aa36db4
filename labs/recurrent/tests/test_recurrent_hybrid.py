"""The hybrid model against itself in NumPy. Its text is the same for all drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention

from labs.recurrent.hybrid import RECURRENT, Memory, draw, prefill, step
from treeattn import collectives, kv_mesh

ROWS, WIDTH, SLOTS = 3, 4, 64
begin = jax.jit(prefill, static_argnames=("slots", "mesh"))
run = jax.jit(step, static_argnames="sharding")


def normed(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(model, text):
    """(the next token after each, the recurrent layers' states after the last), from the start."""
    embedding, inward, outward = (np.asarray(x, np.float64) for x in model)
    x, states = embedding[text], []
    d = outward.shape[2]
    for i in range(RECURRENT + 1):
        q, k, v, gates = np.split(
            np.einsum("lw,whd->lhd", normed(x), inward[i]), [d, 2 * d, 3 * d], axis=-1
        )
        if i == RECURRENT:
            sees = np.tri(len(text), dtype=bool)[None, None]
            out = dense_attention(q[None], k[None], v[None], mask=sees)[0]
        else:
            k = k / np.linalg.norm(k, axis=-1, keepdims=True)
            state, out = np.zeros((2, d, d)), np.zeros_like(v)
            for t, h in np.ndindex(v.shape[:2]):
                gate, beta = sigmoid(gates[t, h, 0]) ** 0.25, sigmoid(gates[t, h, 1])
                kept = state[h] - beta * np.outer(k[t, h], k[t, h] @ state[h])
                state[h] = gate * kept + beta * np.outer(k[t, h], v[t, h])
                out[t, h] = q[t, h] @ state[h]
            states.append(state)
        x = x + np.einsum("lhd,hdw->lw", out, outward[i])
    return np.argmax(normed(x) @ embedding.T, axis=-1), np.stack(states)


def plain_text(model, prompt, tokens):
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(by_hand(model, text)[0][-1]))
    return text


MODEL = draw(6)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8]  # no multiple of the devices
TEXT = plain_text(MODEL, PROMPT, 30)


def test_the_text_says_something():
    """The text is not a single repeated token, which a wrong model might give, too."""
    assert len(set(TEXT[len(PROMPT) :])) > 5


@pytest.mark.parametrize("p", [1, 5, 8])
def test_the_prompt_over_devices(p):
    mesh = kv_mesh(jax.devices()[:p])
    first, memory = begin(MODEL, jnp.array(PROMPT), slots=16 * p, mesh=mesh)
    said, states = by_hand(MODEL, PROMPT)
    assert first == said[-1] and memory.length == len(PROMPT)
    np.testing.assert_allclose(memory.states, states, atol=1e-12)


def guesses(rng, position):
    """A beam whose rows follow the text for some tokens, and then leave it or not."""
    beam = np.repeat(np.array(TEXT[position : position + WIDTH])[None], ROWS, axis=0)
    for row, right in zip(beam, rng.integers(1, WIDTH + 1, ROWS), strict=True):
        row[right:] = rng.integers(0, 40, WIDTH - right)
    return beam


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_drafted_text_is_the_plain_one(seed):
    """The states after each pass are those of the accepted text alone."""
    mesh = kv_mesh(jax.devices()[:8])
    sharding = NamedSharding(mesh, P(None, "kv"))
    first, memory = begin(MODEL, jnp.array(PROMPT), slots=SLOTS, mesh=mesh)
    rng = np.random.default_rng(seed)
    text, passes = [*PROMPT, int(first)], 0
    while len(text) < len(TEXT) - WIDTH:
        beam = guesses(rng, len(text) - 1)
        right = (beam == TEXT[len(text) - 1 : len(text) - 1 + WIDTH]).cumprod(1).sum(1).max()
        new, count, memory = run(MODEL, memory, beam, sharding=sharding)
        text += new[:count].tolist()
        passes += 1
        assert count == right and memory.length == len(text) - 1
        assert text == TEXT[: len(text)]
    np.testing.assert_allclose(memory.states, by_hand(MODEL, text[:-1])[1], atol=1e-12)
    assert passes < len(text) - len(PROMPT) - 1


def test_a_pass_sends_what_the_layer_of_attention_sends():
    """Two Allreduces: none for the recurrent layers, and no bytes that grow with the text."""
    found = []
    for slots in (SLOTS, 2 * SLOTS):
        mesh = kv_mesh(jax.devices()[:8])
        sharding = NamedSharding(mesh, P(None, "kv"))
        cache = jax.ShapeDtypeStruct((2, slots, 2, 8), np.float32, sharding=sharding)
        states = jax.ShapeDtypeStruct((RECURRENT, 2, 8, 8), np.float32)
        memory = Memory(states, cache, np.array([5]))
        beam = np.zeros((ROWS, WIDTH), int)
        model = jax.tree.map(lambda x: x.astype(np.float32), MODEL)
        compiled = run.lower(model, memory, beam, sharding=sharding).compile()
        assert compiled.output_shardings[2].cache.spec == P(None, "kv")
        found.append([(c.kind, c.operand_bytes) for c in collectives(compiled)])
    numbers = 4 * ROWS * WIDTH * 2  # nodes of 2 heads
    assert found == [[("all-reduce", numbers), ("all-reduce", numbers * (8 + 1))]] * 2
