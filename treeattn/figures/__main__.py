"""Write every figure into a folder: python -m treeattn.figures figures (some minutes)"""

import argparse
import importlib
import pkgutil
from pathlib import Path

from tqdm import tqdm

import treeattn.figures
from treeattn.figures.merge import ANIMATIONS


def all_figures() -> dict[str, object]:
    """Name -> a function without arguments that draws it: each module's `FIGURES`."""
    figures = {}
    for module in pkgutil.iter_modules(treeattn.figures.__path__, "treeattn.figures."):
        if not module.name.endswith("__main__"):
            figures |= getattr(importlib.import_module(module.name), "FIGURES", {})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Write every figure into a folder, as PNG.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*", help="names of figures; all when left out")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    figures = all_figures()
    wanted = args.only or list(figures)
    if unknown := set(wanted) - set(figures):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(figures))}")
    for name in tqdm(wanted, unit="figure"):
        figures[name]().savefig(args.folder / f"{name}.png", metadata={"Software": None})
        if name in ANIMATIONS:
            ANIMATIONS[name](args.folder / f"{name}.gif")


if __name__ == "__main__":
    main()
