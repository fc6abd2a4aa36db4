"""The page that compares JAX's own attention: its table is measured again, and its code runs."""

import re

import pytest
from pages import SITE, text

PAGE = SITE / "why_not_jax.md"


def stored() -> dict[str, list]:
    """The rows of the page's table: numbers where cells are numbers."""
    rows = {}
    for line in re.findall(r"(?m)^\| (.*) \|$", text(PAGE))[1:]:
        name, *cells = line.split(" | ")
        numbers = all(x[0].isdecimal() for x in cells)
        rows[name] = [int(x.replace(",", "")) if numbers else x for x in cells]
    return rows


@pytest.mark.slow
def test_the_table_is_what_is_measured(monkeypatch, optimized):
    monkeypatch.syspath_prepend(str(SITE))
    import why_not_jax

    table = stored()
    measured = {**why_not_jax.measured(), **why_not_jax.answered()}
    assert list(table) == list(measured)
    for name, cells in measured.items():
        if name.startswith("temporary"):  # which differs a little with the version of JAX
            cells = pytest.approx(cells, rel=0.1)
        assert table[name] == cells, name
    small, large = (table[name] for name in table if name.startswith("temporary"))
    assert large[0] > 7 * small[0] and large[2] < 1.1 * small[2]  # the cache is 8 times as large
