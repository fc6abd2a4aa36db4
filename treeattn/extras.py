"""What a room needs beyond jax, numpy and jaxtyping, or the extra that installs it."""

import importlib.util


def need(extra: str, *packages: str) -> None:
    """Raise ImportError, naming `treeattn[extra]`, unless all `packages` are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"treeattn.{extra} needs {', '.join(missing)}, not installed here: "
            f"pip install 'treeattn[{extra}]'"
        )
