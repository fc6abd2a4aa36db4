"""Write the tables of benchmarks/README.md from what was measured: python benchmarks/page.py

Between a line `<!-- name -->` and the next `<!-- end -->` stands the table of that name.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
RESULTS = HERE / "results"


def measured(name: str):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def decode() -> str:
    """Eight devices and 512k keys, by method."""
    rows = {r["name"]: r for r in measured("decode") if (r["p"], r["keys"]) == (8, 512 * 1024)}
    tree = rows["tree, allreduce"]["ms"]
    lines = []
    for name, row in rows.items():
        told = re.sub(r"tree, (\w+)", r"tree, `\1`", name)
        known = row["ms"] is not None
        times = [f"{row['ms']:,.0f}", f"{row['ms'] / tree:.1f}"] if known else ["not run", "–"]
        lines.append([told, *times, f"{row['sent']:,} B", f"{row['held'] / 2**20:,.0f} MiB"])
    return table(["", "ms", "× tree", "sent by a device", "held by a device"], lines)


def llama() -> str:
    """Tokens a second of one device, beside other programs."""
    found = measured("llama")
    names = list(next(iter(found["single"].values())))
    lines = [
        [what, *(f"{row[x]['clock']:,.1f} ({row[x]['processor']:,.1f})" for x in names)]
        for what, row in found["single"].items()
    ]
    about = f"{found['machine']['single']}; tokens in a second, in brackets of processor time."
    return about + "\n\n" + table(["", *names], lines)


def shares() -> str:
    """Where the time of a prompt of 1,024 tokens goes."""
    found = measured("llama")
    lines = [
        [part, f"{row['ms']:,.0f}", f"{row['GFLOP/s']:,.0f}"]
        for part, row in found["shares"].items()
    ]
    head = ["", "ms of processor time", "GFLOP in a second of it"]
    return f"{found['machine']['shares']}.\n\n" + table(head, lines)


TABLES = {"decode": decode, "llama": llama, "shares": shares}


def filled(text: str) -> str:
    """The page with its tables made anew."""

    def anew(found: re.Match) -> str:
        return f"<!-- {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- (?!end)(\w+) -->.*?<!-- end -->", anew, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
