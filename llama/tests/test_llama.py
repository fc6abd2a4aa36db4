"""The packaged model: real text, decoded from a cache on one device and on eight."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn import Llama, kv_mesh

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def smollm():
    """SmolLM2-135M-Instruct on one device."""
    return Llama.load(None)


@pytest.fixture(scope="session")
def question(smollm):
    return smollm.tokenizer.chat("What is the capital of France?")


def decode(model, prompt, n):
    """Greedy decoding of `n` tokens: (their ids, the logits that chose each of them)."""
    cache = model.new_cache(1, 64)
    logits, cache = model.prefill([prompt], cache)
    ids, seen = [], []
    for _ in range(n):
        seen.append(np.asarray(logits[0]))
        ids.append(int(seen[-1].argmax()))
        logits, cache = model.step(np.array([ids[-1:]]), cache, last=True)
    return ids, np.array(seen)


@pytest.fixture(scope="session")
def answer(smollm, question):
    return decode(smollm, question, 8)


def test_first_tokens_answer_the_question(smollm, answer):
    assert "Paris" in smollm.tokenizer.decode(answer[0])


@pytest.mark.parametrize("attention", ["tree", "butterfly", "ring"])
def test_eight_devices_decode_the_same_text(smollm, question, answer, attention):
    model = smollm.on(kv_mesh(jax.devices()[:8]), attention=attention)
    ids, logits = decode(model, question, 3)
    assert ids == answer[0][:3]
    np.testing.assert_allclose(logits, answer[1][:3], atol=1e-4, rtol=1e-5)


def test_two_processes_decode_the_same_text(tmp_path):
    """A small model, with as many processes as nodes of the mesh, of two devices each."""
    small = Path(__file__).parent / "data" / "llamas" / "llama3"
    want_ids, want = decode(Llama.load(small), list(range(1, 38)), 3)
    _, exact = decode(Llama.load(small, dtype=np.float32), list(range(1, 38)), 3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = Path(__file__).parent / "llama_rank.py"
    files = [tmp_path / f"{rank}.npz" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), address, str(rank), str(file)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    for file in files:
        found = np.load(file)
        assert found["ids"].tolist() == found["streamed"].tolist() == want_ids
        assert found["drafted"].tolist() == want_ids
        np.testing.assert_allclose(found["sharded"], exact, atol=1e-4)
        np.testing.assert_allclose(found["logits"], want, atol=1e-4)


def test_full_pass_agrees_with_the_cache(smollm, question, answer):
    text = np.array([question + answer[0]])
    logits = smollm.logits(text)[0, len(question) - 1 : -1]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, answer[1], atol=1e-4, rtol=1e-5)
