"""Execute notebooks, two at a time, each in a clean kernel, and write HTML under build/.

python notebooks/execute.py                 the main road; tracked files stay as they are
python notebooks/execute.py --all           those of notebooks/deeper and the labs, too
python notebooks/execute.py 05 the_same     of all, those whose names start so (or a path)
python notebooks/execute.py --store 05      also store the outputs in the notebook; one at a time
"""

import argparse
import asyncio
import base64
import copy
import importlib.util
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors import CellExecutionError, ExecutePreprocessor
from tqdm import tqdm

REPOSITORY = Path(__file__).parent.parent.resolve()
BUILD = REPOSITORY / "build"
MAIN_ROAD = ("notebooks/*.ipynb",)
BESIDE_IT = ("notebooks/deeper/*.ipynb", "labs/*/*.ipynb")
# What JupyterLab writes: a notebook that it opens is not changed by that.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
FONTS = """MathJax.Hub.Config({"HTML-CSS": {
  availableFonts: [], preferredFont: null, imageFont: null, webFont: "STIX-Web"  // the one there is
}});
MathJax.Ajax.loadComplete("[MathJax]/config/fonts.js");
"""


def execute(path: Path, progress: tqdm) -> nbformat.NotebookNode:
    """The notebook at `path`, its code cells run anew; `progress` advances with the cells."""
    notebook = nbformat.read(path, as_version=4)
    runner = ExecutePreprocessor(
        timeout=600,
        kernel_name="python3",
        record_timing=False,  # times would change the file at every run
        coalesce_streams=True,  # what a cell prints is one text, however its pieces arrive
        extra_arguments=["--log-level=ERROR"],
        on_cell_executed=lambda **_: progress.update(),
        resources={},
    )
    runner.preprocess(notebook, {"metadata": {"path": str(path.parent)}})
    language = notebook.metadata.language_info
    notebook.metadata = {"kernelspec": KERNEL, "language_info": language}
    return notebook


def attach(notebook: nbformat.NotebookNode) -> None:
    """Figures that the text shows as attachment:name.png come along in the notebook's own file."""
    for cell in notebook.cells:
        if names := re.findall(r"\]\(attachment:([\w.]+)\)", cell.source):
            figures = {name: (REPOSITORY / "figures" / name).read_bytes() for name in names}
            cell.attachments = {
                name: {"image/png": base64.b64encode(picture).decode()}
                for name, picture in figures.items()
            }


def exporter() -> HTMLExporter:
    """To HTML whose formulas need no network: MathJax lies beside the pages, where it is installed.

    Without jupyter-server-mathjax, which carries it, a reader's browser fetches it.
    """
    package = importlib.util.find_spec("jupyter_server_mathjax")
    if package is None:
        return HTMLExporter()
    (folder,) = package.submodule_search_locations
    shutil.copytree(Path(folder) / "static", BUILD / "mathjax", dirs_exist_ok=True)
    (BUILD / "mathjax" / "config" / "fonts.js").write_text(FONTS, encoding="utf-8")
    url = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,fonts"
    return HTMLExporter(mathjax_url=url, require_js_url="")


def seen_from_build(text: str, folder: Path) -> str:
    """Markdown whose links to files lead, from build/, where they lead from `folder`.

    A link to a notebook of the main road leads to its HTML, which lies in build/, too.
    """
    main_road = chosen([], everything=False)

    def moved(link: re.Match) -> str:
        file, anchor, place = link[2].partition("#")
        if (folder / file).resolve() in main_road:
            file = Path(file).with_suffix(".html").name
        elif file:
            file = Path(os.path.relpath(folder / file, BUILD)).as_posix()
        return f"{link[1]}({file}{anchor}{place})"

    return re.sub(r"(?<!\w)(!?\[[^\]]*\])\((?!\w+:)([^)\s]+)\)", moved, text)


def as_html(notebook: nbformat.NotebookNode, folder: Path, to_html: HTMLExporter) -> str:
    copied = copy.deepcopy(notebook)
    for cell in copied.cells:
        if cell.cell_type == "markdown":
            cell.source = seen_from_build(cell.source, folder)
    return to_html.from_notebook_node(copied)[0]


def chosen(names: list[str], everything: bool) -> list[Path]:
    """The notebooks of these paths, or whose names start so; without names the main road or all."""
    patterns = MAIN_ROAD + (BESIDE_IT if names or everything else ())
    paths = [path for pattern in patterns for path in sorted(REPOSITORY.glob(pattern))]
    if not names:
        return paths
    given = [Path(name).resolve() for name in names]
    return [path for path in paths if path in given or path.name.startswith(tuple(names))]


def count_code_cells(path: Path) -> int:
    return sum(cell.cell_type == "code" for cell in nbformat.read(path, as_version=4).cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="paths, or the beginnings of the notebooks' names")
    parser.add_argument("--all", action="store_true", help="not only those of the main road")
    parser.add_argument("--store", action="store_true", help="store the outputs as well")
    args = parser.parse_args()
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())

    paths = chosen(args.only, args.all)
    if not paths:
        parser.error(f"no notebook's path or name starts with {' or '.join(args.only)}")
    BUILD.mkdir(exist_ok=True)
    to_html = exporter()
    print(f"{len(paths)} notebooks, about half a minute each", flush=True)
    cells = {path: count_code_cells(path) for path in paths}
    largest_first = sorted(paths, key=cells.get, reverse=True)

    began = time.perf_counter()
    at_once = 1 if args.store else 2  # times that are stored are taken with nothing beside them
    with (
        tqdm(total=sum(cells.values()), unit="cell", leave=False) as progress,
        ThreadPoolExecutor(at_once) as pool,
    ):
        running = {pool.submit(execute, path, progress): path for path in largest_first}
        for number, done in enumerate(as_completed(running), 1):
            path = running[done]
            try:
                notebook = done.result()
            except CellExecutionError as error:
                pool.shutdown(wait=False, cancel_futures=True)
                print(f"{path.name} failed:\n{error}", file=sys.stderr)
                return 1
            html = as_html(notebook, path.parent, to_html)
            (BUILD / path.with_suffix(".html").name).write_text(html, encoding="utf-8")
            if args.store:
                attach(notebook)
                nbformat.write(notebook, path)
            seconds = time.perf_counter() - began
            progress.write(f"[{number}/{len(paths)}] {path.name}, after {seconds:.0f} s")
    print(f"done in {time.perf_counter() - began:.0f} s; open {BUILD}/*.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
