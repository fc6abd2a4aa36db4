"""The README's Python, run block after block as a reader would, in a process of its own.

python tests/test_readme.py                  all of it
python tests/test_readme.py "In a script"    one section, which must stand on its own
"""

import doctest
import re
import subprocess
import sys
from pathlib import Path

from treeattn import simulate_devices

if __name__ != "__main__":  # run by the wheel's own environment, which has no pytest
    import pytest

    pytestmark = pytest.mark.slow

README = Path(__file__).parent.parent / "README.md"


def section(title: str) -> str:
    """The text under the heading `title`; all of it for an empty title."""
    text = README.read_text(encoding="utf-8")
    if not title:
        return text
    return re.search(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text)[1]


def run_blocks(title: str = "") -> None:
    """Run every ```python block in one namespace; what follows a >>> must be what it prints."""
    simulate_devices(8)  # as one of the blocks will, but before the first uses JAX
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)
    runner = doctest.DocTestRunner()
    for number, block in enumerate(blocks):
        if "initialize()" in block:  # needs a cluster; tests/test_cluster.py has one
            continue
        if ">>>" in block:
            test = doctest.DocTestParser().get_doctest(block, names, f"block {number}", None, 0)
            runner.run(test, clear_globs=False)
            names = test.globs
        else:
            exec(block, names)
    results = runner.summarize()
    print(f"{len(blocks)} blocks, {results.attempted} examples, {results.failed} failed")
    sys.exit(results.failed > 0)


def test_the_readme_runs():
    process = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Paris" in process.stdout and " 0 failed" in process.stdout


if __name__ == "__main__":
    run_blocks(*sys.argv[1:])
