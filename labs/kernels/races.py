"""The butterfly with planted mistakes, run by Pallas's interpreter, which looks for races.

A race: two accesses to the same memory, at least one of them a write, and no chain of signals and
waits from one to the other.

    python -m labs.kernels.races         a butterfly's code from stdin; a line of JSON as the answer
"""

import contextlib
import dataclasses
import inspect
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labs.kernels import remote_merge
from labs.kernels.cases import draw, right
from labs.kernels.tpu_decode import BUTTERFLY, SIMULATED, missing, one_kernel
from treeattn import kv_mesh, simulate_devices, tree_decode

ROOT = Path(__file__).parents[2]
PLANS = Path(__file__).parent / "results" / "plans.json"
DEVICES, KEYS, HEADS, KV_HEADS, DIM = 8, 1000, 4, 2, 64
LATE = 300
LIMIT = 60  # seconds, of which a run that ends takes some five
CODE = inspect.getsource(remote_merge.butterfly)
# name -> what stands in the code, and what a mistaken author wrote instead
MISTAKES = {
    "no barrier": ("pl.semaphore_wait(pltpu.get_barrier_semaphore(), len(partners))", "pass"),
    "does not wait for a message": ("copy.wait_recv()", "pass"),
    "overwrites what it sends": ("copy.wait_send()", "pass"),
    "no credit": ("pl.semaphore_wait(free.at[r], 1)", "pass"),
    "one counter of credits": (r"free.at\[[^]]*\]", "free.at[0]"),
}
# Two schedules: copies as late as possible and equal shards; copies at once and one slow device
SCHEDULES = ("on_wait", False), ("eager", True)


def planted(name: str) -> str:
    """The butterfly's code with a mistake; without one for "right"."""
    if name == "right":
        return CODE
    old, new = MISTAKES[name]
    return re.sub(old, new, CODE) if "\\" in old else CODE.replace(old, new)


def run(code: str, copies: str, slow: bool) -> dict:
    """Tree decoding on simulated TPUs, with one slot in each inbox, by a butterfly of this code.

    copies: when the interpreter runs a copy: "on_wait" as late, or "eager" as early as possible
    slow:   whether the first device reads its own state LATE times before it merges

    Returns {"error": from float64, "race": whether the interpreter reported one, "counters":
    whether each device's semaphores are 0 when it leaves, "lines": pairs of lines of the code that
    race, "stopped": None, or why the interpreter stopped}. A copy into an inbox that its owner has
    not made yet stops it, for example. Then the error is ∞.
    """
    names = dict(vars(remote_merge))
    exec(compile(code, "protocol.py", "exec"), names)

    def merge_late(mine, *memory):
        if slow:

            @pl.when(lax.axis_index(memory[4]) == 0)
            def _():
                mine[...] = lax.fori_loop(
                    0, LATE, lambda _, state: jnp.maximum(state, mine[...]), mine[...]
                )

        names["butterfly"](mine, *memory)

    options = one_kernel(protocol=BUTTERFLY._replace(run=merge_late), slots=1)
    simulated = dataclasses.replace(SIMULATED, on_race="warn", dma_execution_mode=copies)
    q, k, v = draw((1, 1, HEADS, KV_HEADS, KEYS, DIM, DIM), "float32")
    sharding = NamedSharding(kv_mesh(jax.devices()[:DEVICES]), P(None, "kv"))
    messages, printed, logger = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers, logger.handlers = logger.handlers, [logging.StreamHandler(messages)]
    error, stopped = np.inf, None
    try:
        # The interpreter prints counters that are not 0.
        with contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(simulated):
            out = tree_decode(q, k, v, sharding=sharding, **options)
            jax.effects_barrier()  # or the next run would raise this run's error, too
            error = np.abs(np.subtract(out, right(q, k, v)[0])).max()
    except* jax.errors.JaxRuntimeError as group:
        pltpu.reset_tpu_interpret_mode_state()
        stopped = str(group.exceptions[0]).strip().splitlines()[-1]
    finally:
        logger.handlers = handlers
    race = r"of .* from .*, \S*?(\w+\.py):(\d+).*\n.*\n.* of .* from .*, \S*?(\w+\.py):(\d+)"
    log = messages.getvalue()
    return {
        "error": error,
        "race": "RACE DETECTED" in log,
        "counters": not stopped and "non-zero" not in printed.getvalue(),
        "lines": sorted({tuple(sorted(x)) for x in _pairs(re.findall(race, log), code)}),
        "stopped": stopped,
    }


def _pairs(found, code: str):
    lines = code.splitlines()
    for *first, second, number in found:
        places = tuple(first), (second, number)
        yield tuple(
            lines[int(n) - 1].strip() if file == "protocol.py" else "the inbox is cleared"
            for file, n in places
        )


# From a Python whose JAX is older, as the notebook's may be.


def newest_python() -> str | None:
    """A Python with JAX 0.12 or newer: this one, or that of `make tpu`; None if there is none."""
    if missing() is None:
        return sys.executable
    python = ROOT / ".venv-tpu" / "bin" / "python"
    return str(python) if python.exists() else None


def ask(code: str, copies: str = "on_wait", slow: bool = False) -> dict:
    """`run` in a process of its own, or its stored answer if no Python here can run the kernel.

    Raises ValueError if the code does not run, TimeoutError if it does not end, and RuntimeError
    for code that no stored answer is about, if there is no newer Python.
    """
    python = newest_python()
    if python is None:
        for name, rows in json.loads(PLANS.read_text())["plans"].items():
            for schedule, answer in zip(SCHEDULES, rows, strict=True):
                if schedule == (copies, slow) and _bare(code) == _bare(planted(name)):
                    return answer
        raise RuntimeError("this code's answer is not stored; after `make tpu` it is run")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "conformance")))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [python, "-m", "labs.kernels.races", copies, str(int(slow))]
    try:
        done = subprocess.run(
            command, input=code, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer in {LIMIT} seconds: probably a device waits forever, a deadlock"
        raise TimeoutError(reason) from None
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _bare(code: str) -> list[str]:
    """The lines of code without comments, docstring and empty lines."""
    code = re.sub(r'""".*?"""', "", code, flags=re.DOTALL)
    lines = (line.partition("#")[0].rstrip() for line in code.splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    simulate_devices(DEVICES)
    print(json.dumps(run(sys.stdin.read(), sys.argv[1], sys.argv[2] == "1")))
