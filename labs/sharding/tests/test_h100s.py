"""By the stored page, eight H100s would send the same bytes as eight CPU devices."""

import re
from pathlib import Path

import jax
import pytest

import treeattn
from labs.sharding.__main__ import LLAMA_8B, axes_crossed, program
from labs.sharding.h100s import KEYS, MESHES, ROWS, mesh_of

PAGE = Path(__file__).parents[1] / "results" / "h100s.md"
LINE = re.compile(r"^(\S+) +(\S.*?) +([\d,]+)  ", re.MULTILINE)


@pytest.mark.slow
def test_eight_h100s_send_what_eight_cpu_devices_send():
    stored = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    for shape, section in zip(MESHES, stored, strict=True):
        mesh = mesh_of(jax.devices()[:8], shape)
        found = treeattn.collectives(program(LLAMA_8B, ROWS, KEYS, mesh))
        several = [c for c in found if c.devices > 1]  # on CPUs XLA keeps collectives of one device
        on_cpus = [
            (c.kind, ", ".join(axes_crossed(c, mesh)), f"{c.total_bytes:,}") for c in several
        ]
        assert LINE.findall(section) == on_cpus
