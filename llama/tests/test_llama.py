"""Two processes that decode together, and outputs that are closed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from treeattn_llama import Llama, generate

pytestmark = pytest.mark.slow

SMALL = Path(__file__).parent / "data" / "llamas" / "llama3"


def test_two_processes_write_the_same_text(tmp_path):
    """A small model, with as many processes as nodes of the mesh, of two devices each."""
    want = generate(Llama.load(SMALL), list(range(1, 38)), max_new_tokens=3).tokens
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = Path(__file__).parent / "llama_rank.py"
    files = [tmp_path / f"{rank}.npz" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), address, str(rank), str(file)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    for file in files:
        found = np.load(file)
        assert found["plain"].tolist() == found["drafted"].tolist() == want


@pytest.mark.parametrize("closed", [">&-", "2>&-", "> /dev/full"])
def test_a_closed_or_full_output_is_no_traceback(closed):
    """`--version` is all that is printed: no model is read."""
    command = f"{sys.executable} -m treeattn_llama --version {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Traceback" not in done.stderr
