"""What a room needs beyond jax, numpy and jaxtyping, or how to install it."""

import importlib.util

CHECKOUT = "pip install -e '.[llama]' --group dev"


def need(room: str, *packages: str, install: str | None = None) -> None:
    """Raise ImportError, with what to `install`, unless all `packages` are installed.

    Without `install` it is the extra of the room's name, `treeattn[room]`.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"treeattn.{room} needs {', '.join(missing)}, not installed here: "
            + (install or f"pip install 'treeattn[{room}]'")
        )
