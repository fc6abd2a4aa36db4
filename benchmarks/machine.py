"""What stands beside every table: the day, the machine and the versions."""

import datetime
import os
import platform
from importlib.metadata import version


def machine(*packages: str) -> str:
    """As in "2026-11-28, x86_64, 2 cores, Python 3.11.7, jax 0.8.3"."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}"
    )
