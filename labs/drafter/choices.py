"""Small runs behind the recipe's choices: each differs from the first in one of them.

python training/choices.py build/drafter --shards 7
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from training.drafter import parser, train

CHOICES = {
    "as chosen": [],
    "hard targets": ["--soft", "0"],
    "not towards states": ["--near", "0"],
    "one layer": ["--depth", "1"],
    "three layers": ["--depth", "3", "--inner", "256"],
    "a third of the text": ["--shards", "2"],
}


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own.add_argument("folder", type=Path)
    own.add_argument("--shards", type=int, default=7)
    own.add_argument("--updates", type=int, default=200)
    chosen = own.parse_args()
    found = {}
    for name, change in CHOICES.items():
        shared = [
            "--shards",
            str(chosen.shards),
            "--updates",
            str(chosen.updates),
            "--every",
            "100",
        ]
        shared += [
            "--batch",
            "64",
            "--judge-tokens",
            "3000",
            "--name",
            "choice-" + name.replace(" ", "-"),
        ]
        run, *_ = train(chosen.folder, parser().parse_args([*shared, *change]))
        found[name] = run.curve
        (chosen.folder / "choices.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
