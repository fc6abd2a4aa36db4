"""Checkpoints that load: the logits of Hugging Face transformers, dtypes, memory."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from llamas import LLAMAS, SMALL, Folder, expected, write_gguf
from plain_llama import plain_logits

from treeattn import kv_mesh
from treeattn_llama import Llama, open_checkpoint, rotary_frequencies
from treeattn_llama.hugging_face import hugging_face_config

NAMES = sorted(f.name for f in LLAMAS.iterdir())
DTYPES = {"llama31": jnp.bfloat16, "llama32": jnp.float16}


def agree(logits, want, atol=2e-5):
    np.testing.assert_allclose(np.asarray(logits)[:, ::5], want, atol=atol)


# The made checkpoints: llama2 (a key head for each query head), llama3 (grouped heads), llama31
# (bfloat16, "llama3" scaling, three shards), llama32 (float16, tied, wide heads), biased
# (biases everywhere, four shards), linear (linear scaling).


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    want = expected(name)
    model = Llama.load(LLAMAS / name, dtype=jnp.float32)
    agree(model.logits(want["tokens"]), want["logits"])


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_half_precision_is_kept_and_agrees_with_transformers(name):
    want = expected(name)
    model = Llama.load(LLAMAS / name)
    assert {x.dtype for x in jax.tree.leaves(model.weights.layers)} == {jnp.dtype(DTYPES[name])}
    ulp = float(jnp.finfo(DTYPES[name]).eps) * np.abs(want["logits"]).max()
    logits = model.logits(want["tokens"])
    agree(logits, want["logits_as_stored"], atol=4 * ulp)
    # Not more wrong, against float32, than transformers in the same dtype.
    error = np.abs(logits[:, ::5] - want["logits"]).mean()
    assert error < 1.2 * np.abs(want["logits_as_stored"] - want["logits"]).mean()


def test_older_configurations_lack_fields(tmp_path):
    """Rotary fields stand in two places; each query head has a key head of its own."""
    folder = Folder(tmp_path, "llama31")
    rotary = folder.fields.pop("rope_parameters")
    theta = rotary.pop("rope_theta")
    folder.write(folder.fields | {"rope_theta": theta, "rope_scaling": rotary})
    assert open_checkpoint(folder.path).config == open_checkpoint(LLAMAS / "llama31").config
    folder = Folder(tmp_path, "llama2")
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias"):
        del folder.fields[name]
    folder.write(folder.fields)
    assert open_checkpoint(folder.path).config == open_checkpoint(LLAMAS / "llama2").config


@pytest.mark.parametrize("name", ["llama3", "llama31", "llama32"])
def test_gguf_agrees_with_transformers(name, tmp_path):
    want = expected(name)
    model = Llama.load(write_gguf(name, tmp_path / "model.gguf"))
    assert model.config.tied == (name == "llama32")
    agree(model.logits(want["tokens"]), want["logits"])


STEPS = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 254, "Q4_1": 1 / 15}  # of a matrix's largest
KEPT = {"F16": jnp.float16, "BF16": jnp.bfloat16}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A function: the checkpoint llama3 as a GGUF file of that kind, its norms in F32."""
    folder = tmp_path_factory.mktemp("gguf")
    return functools.cache(lambda kind: write_gguf("llama3", folder / kind, kind, kept=KEPT))


@pytest.mark.parametrize("kind", STEPS)
def test_gguf_quantizations_are_read(stored, kind):
    exact, read = open_checkpoint(SMALL), open_checkpoint(stored(kind))
    for name in exact.shapes:
        x, y = exact.read(name), read.read(name).astype(np.float32)
        assert x.shape == y.shape
        np.testing.assert_allclose(y, x, atol=STEPS[kind] * np.abs(x).max() * 1.1)


def decodes(path: Path, devices, dtype):
    """Prefill and steps give what the same weights give in float64 NumPy, within the dtype."""
    checkpoint, tokens = open_checkpoint(path), expected("llama3")["tokens"][0]
    want = plain_logits(checkpoint, tokens, rotary_frequencies(checkpoint.config))
    model = Llama.load(path, mesh=devices and kv_mesh(jax.devices()[:devices]))
    logits, cache = model.prefill([tokens[:20].tolist()], model.new_cache(1, 32))
    assert cache.k[0].dtype == dtype
    found = [logits[0]]
    for token in tokens[20:24]:
        logits, cache = model.step(token.reshape(1, 1), cache)
        found.append(logits[0, -1])
    assert found[-1].dtype == jnp.float32
    np.testing.assert_allclose(found, want[19:24], atol=8 * jnp.finfo(dtype).eps * abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind, devices", [("F16", 3), ("BF16", None), ("Q4_1", 3)])
def test_gguf_quantizations_decode(stored, kind, devices):
    decodes(stored(kind), devices, KEPT.get(kind, jnp.float32))


def test_mixed_dtypes_decode(tmp_path):
    """bfloat16 with norms, and one layer's keys and MLP, in float32; a float16 output."""

    def mix(tensors):
        for name, x in tensors.items():
            wide = x.ndim == 1 or "0.self_attn.k_proj" in name or "1.mlp" in name
            half = jnp.float16 if name == "lm_head.weight" else jnp.bfloat16
            tensors[name] = x if wide else x.astype(half)

    decodes(Folder(tmp_path).tensors(mix), None, jnp.bfloat16)


# Memory

MEASURE = """
import sys, threading, time
import jax
from treeattn_llama import Llama

def anonymous():  # what no file backs: pages of the checkpoint itself the system can drop
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)

jax.device_put(0.0).block_until_ready()
Llama.load(sys.argv[1])  # what is imported late, and the threads
before = anonymous()
for path in sys.argv[2:]:
    model = None  # its memory may stay with the process
    done, peak = threading.Event(), [before]
    thread = threading.Thread(target=watch)
    thread.start()
    model = Llama.load(path)
    jax.block_until_ready(model.weights)
    done.set()
    thread.join()
    weights = sum(x.nbytes for x in jax.tree.leaves(model.weights))
    print((peak[0] - before) / weights)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured with Linux's /proc")
def test_loading_takes_little_more_than_the_weights(tmp_path):
    """140 MB of float32: the peak, above what the process had before, in units of the weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    fields = json.loads((SMALL / "config.json").read_text())
    fields |= sizes | {"vocab_size": 8000, "head_dim": 128}
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = hugging_face_config(fields).tensors()
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    paths = SMALL, folder, write_gguf(folder, tmp_path / "large.gguf")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert all(0.95 < float(peak) < 1.2 for peak in done.stdout.split()), done.stdout
    assert len(done.stdout.split()) == 2
