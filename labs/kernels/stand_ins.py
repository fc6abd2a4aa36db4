"""Stand-ins for packages that treeattn imports and a benchmark does without.

A machine with a GPU may have a JAX for it and nothing else, and no way to get more. Annotations
(jaxtyping) and readers of checkpoints (gguf, tokenizers, …) are then replaced by modules whose
every name is one class that can be subscripted. What is replaced is said.
"""

import importlib.machinery
import importlib.util
import sys
import types

PACKAGES = ("jaxtyping", "gguf", "tokenizers", "safetensors", "jinja2", "tqdm")


class Named(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (Nothing,), {})

    def __getitem__(cls, _):
        return object


class Nothing(metaclass=Named):
    """A name of a package that is not installed, and whatever is asked of it."""

    def __init__(self, *_, **__):
        raise ImportError("this needs a package that is not installed")


class Module(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


def install() -> list[str]:
    """Put stand-ins where packages are missing; the names of those packages."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for name in missing:
        for full in (name, "safetensors.numpy") if name == "safetensors" else (name,):
            module = sys.modules[full] = Module(full)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(full, None)
    return missing
