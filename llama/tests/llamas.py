"""The made checkpoints (`data/make_llamas.py`), and others that are made from them."""

import dataclasses
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy
import tokenizers

from treeattn_llama import Tokenizer, open_checkpoint, rotary_frequencies

LLAMAS = Path(__file__).parent / "data" / "llamas"
SMALL = LLAMAS / "llama3"


def expected(name: str) -> dict:
    return dict(np.load(LLAMAS / name / "expected.npz"))


class Folder:
    """A copy of a made checkpoint, to be changed."""

    def __init__(self, path: Path, name: str = "llama3"):
        self.path = Path(shutil.copytree(LLAMAS / name, path / name))
        self.fields = json.loads((self.path / "config.json").read_text())

    def write(self, fields, file: str = "config.json") -> Path:
        (self.path / file).write_text(json.dumps(fields))
        return self.path

    def changed(self, name: str, value) -> Path:
        """With a field replaced: one of `rope_parameters` if there is one of that name."""
        rotary = self.fields["rope_parameters"]
        if name in rotary:
            return self.write(self.fields | {"rope_parameters": rotary | {name: value}})
        return self.write(self.fields | {name: value})

    def tensors(self, change) -> Path:
        """With the tensors changed, of a checkpoint that has one file."""
        file = self.path / "model.safetensors"
        tensors = safetensors.numpy.load_file(file)
        change(tensors)
        safetensors.numpy.save_file(tensors, file)
        return self.path


def write_gguf(name, path: Path, kind="F32", *, kept=(), factors=None, **changes) -> Path:
    """The checkpoint `name` as a GGUF file; matrices that `kind` can hold are stored in it.

    kept:    kinds that hold rows of any length
    factors: rotary factors other than those of the checkpoint
    changes: of "architecture", of "norms" (their dtype), of the "endianess", or of a field: a
             function of the writer
    """
    fields = json.loads((LLAMAS / name / "config.json").read_text())
    endianess = changes.get("endianess", gguf.GGUFEndian.LITTLE)
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"), endianess=endianess)
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    changes.get("head_dim", lambda w: w.add_key_length(fields["head_dim"]))(writer)
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, fields["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(LLAMAS / name)
    for key in checkpoint.shapes:
        x = checkpoint.read(key).astype(np.float32)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in key:  # halves (0 … d/2, d/2 … d) to pairs
                halves = np.split(x.reshape(fields[heads], -1, *x.shape[1:]), 2, axis=1)
                x = np.stack(halves, axis=2).reshape(x.shape)
        fits = x.ndim == 2 and (x.shape[1] % 32 == 0 or kind.name in kept)
        stored = kind if fits else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(x, stored)
        if x.ndim == 1 and "norms" in changes:
            data, stored = x.astype(changes["norms"]), None
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, data, raw_dtype=stored)
    if checkpoint.config.rotary_scaling is not None:
        plain = rotary_frequencies(dataclasses.replace(checkpoint.config, rotary_scaling=None))
        own = plain / rotary_frequencies(checkpoint.config)
        writer.add_tensor("rope_freqs.weight", own if factors is None else factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_fallback() -> tokenizers.decoders.Decoder:
    """The decoder of pieces and bytes in a directory of Llama 2's kind."""
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    steps += [tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    return tokenizers.decoders.Sequence(steps)


def byte_tokenizer(**options) -> Tokenizer:
    """Bytes, a token each; every character beyond ASCII is several of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    backend = tokenizers.Tokenizer(pairs)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, **options)
