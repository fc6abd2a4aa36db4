"""A page's Python, as programs that a fresh process runs, and what each is said to print."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parent.parent / "README.md"
BETWEEN = "-- the next block --"


class Block(NamedTuple):
    section: str  # the heading above it
    code: str
    prints: str  # the block of plain text that follows it; empty if there is none


def blocks(page: Path = README) -> list[Block]:
    found = []
    for part in re.split(r"(?m)^#+ ", page.read_text(encoding="utf-8"))[1:]:
        section = part.partition("\n")[0]
        for code, prints in re.findall(r"(?s)```python\n(.*?)```(?:\n\n```\n(.*?)```)?", part):
            found.append(Block(section, code, prints))
    return found


def run(code: str, *python: object, cwd: Path | None = None) -> str:
    """What a process of its own prints that runs this code, by this Python or another command."""
    command = [str(word) for word in python or (sys.executable,)]
    done = subprocess.run(
        [*command, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
