"""Write every figure into a folder: python -m figures figures (some minutes)"""

import argparse
import importlib
import pkgutil
from pathlib import Path

from tqdm import tqdm

import figures


def collect(table: str) -> dict[str, object]:
    """Name -> function, of every module's `table`.

    FIGURES: without arguments, draws the figure. ANIMATIONS: of a path, writes the GIF beside it.
    """
    found = {}
    for module in pkgutil.iter_modules(figures.__path__, "figures."):
        if module.name != "figures.__main__":
            found |= getattr(importlib.import_module(module.name), table, {})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m figures", description="Write every figure into a folder, as PNG."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*", help="names of figures; all when left out")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    figures = collect("FIGURES")
    animations = collect("ANIMATIONS")
    wanted = args.only or list(figures)
    if unknown := set(wanted) - set(figures):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(figures))}")
    for name in tqdm(wanted, unit="figure"):
        try:
            figure = figures[name]()
        except (ValueError, FileNotFoundError) as error:  # of what was measured, or the model
            parser.error(f"{name}: {error}")
        figure.savefig(args.folder / f"{name}.png", metadata={"Software": None})
        if name in animations:
            animations[name](args.folder / f"{name}.gif")


if __name__ == "__main__":
    main()
