"""The JAX underneath: releases that are known to compute wrongly or to crash are not allowed, and
the one that is installed does neither."""

import os
import socket
import subprocess
import sys
import tomllib

import jax
import jaxlib
import pytest
from packaging.requirements import Requirement
from pages import REPOSITORY, run_code, text

# https://github.com/jax-ml/jax/issues/39103: on a CPU, 0.10.2 compiles such a sum to wrong numbers,
# in silence. Up to 32,768 rows of float32 all is well; of 40,001 a fifth are wrong.
SQUARED_LENGTHS = """
import jax
import jax.numpy as jnp
import numpy as np

def squared_lengths(rows, matrix):
    return jax.vmap(lambda row: ((matrix @ row) ** 2).sum())(rows)

rows = np.random.default_rng(0).normal(size=(40_001, 3)).astype(np.float32)
matrix = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
found = np.asarray(jax.jit(squared_lengths)(rows, matrix))
expected = ((rows.astype(np.float64) @ matrix.T.astype(np.float64)) ** 2).sum(axis=1)
wrong = ~np.isclose(found, expected, rtol=1e-4)
assert not wrong.any(), f"{wrong.sum()} of {wrong.size} sums are wrong"
"""

# https://github.com/jax-ml/jax/issues/39257: on Linux and x86-64, 0.10.2 and 0.11.0 crash in such
# a sum, or never end.
MANY_AXES = """
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
one = rng.uniform(size=(10, 4, 6, 1, 1, 1, 1, 1)).astype(np.float32)
many = rng.uniform(size=(10, 4, 6, 9, 9, 9, 9, 9)).astype(np.float32)
found = jax.jit(lambda one, many: (one * many).sum(axis=2))(one, many)
np.testing.assert_allclose(found, (one * many).sum(axis=2), rtol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [SQUARED_LENGTHS, MANY_AXES], ids=["sums", "axes"])
def test_the_installed_jax_computes_what_is_written(program):
    """In a process of its own, which may crash, with all that XLA does by default."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    about = f"jax {jax.__version__}, jaxlib {jaxlib.__version__} ended with {done.returncode}"
    assert done.returncode == 0, f"{about}\n{done.stderr[-1000:]}"


def test_the_package_allows_every_release_but_broken_ones():
    project = tomllib.loads(text(REPOSITORY / "pyproject.toml"))["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    (allowed,) = (line.specifier for line in requirements if line.name == "jax")
    for broken in ("0.10.2", "0.11.0"):
        assert broken not in allowed, broken
    for release in ("0.8.3", "0.9.0", "0.10.1", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"):
        assert release in allowed, release
    assert jax.__version__ in allowed


def test_importing_the_core_loads_little_and_starts_nothing():
    code = """
import sys
import jax, numpy, jaxtyping
def tops():
    return {name.split(".")[0] for name in sys.modules}
before = tops()
import treeattn
print(*sorted(tops() - before - set(sys.stdlib_module_names)))
print("jax.experimental.pallas" in sys.modules)  # a fifth of JAX's own time
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run_code(code).split() == ["treeattn", "False", "False"]


ALONE = """
import sys
import treeattn

try:
    treeattn.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=2)
except BaseException as error:
    print("caught", error)
"""


# Without process 1, process 0 waits for it; without process 0, nobody coordinates.
@pytest.mark.slow
@pytest.mark.parametrize("present", ["0", "1"])
def test_xla_ends_a_process_that_stays_alone_and_raises_nothing(present):
    """As the docstring of `initialize` says."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", ALONE, address, present]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "Terminating process" in output
    assert "DEADLINE_EXCEEDED" in output and "caught" not in output
