"""Write the three steppers, pages that need nothing but a browser: python site/make_steppers.py

What is in steppers/ becomes one file a page, with the numbers that it shows inside: scores and
values of heads of the packaged model, and beams that the model drafts; and what the conformance
suite says of each merge that is broken on purpose.
"""

import argparse
import functools
import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
from broken_merges import faults

from figures.sentence import convex_hull
from treeattn_llama import Llama

HERE = Path(__file__).parent
PAGES = {f"{name}_stepper.html": f"{name}.html" for name in ("energy", "merge", "prefix_tree")}
DIGITS = 3  # the model's numbers are rounded: the page computes with what it shows

TEXT = (
    "Anna lives in Rome and Otto lives in Paris. Every summer the two meet by the sea. "
    "Where does Otto live? Otto lives in"
)
HEADS = {  # (layer, head) -> what it does on this text
    (21, 8): "It finds the city: most of the last query's weight is on “Paris”.",
    (18, 6): "It hesitates between the two cities.",
    (20, 3): "It rests on the first token, as many heads do when they find nothing.",
    (0, 0): "It looks at nearly everything alike.",
}
# The small example of the notebooks: a key is its score, the weights are 1, 2, 4, 1, 8 sixteenths.
WORDS = ["the", " cat", " drank", " warm", " milk"]
SCORES = np.log([1.0, 2.0, 4.0, 1.0, 8.0])
VALUES = [[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 4.0], [1.0, 3.0]]

MARS = ["Mars is a red", "Mars is reddish when", "Mars is dark red"]
SEGMENTS = ["one two three", "one four five", "one four six"]
RAGGED = ["tree attention", "tree", "tree attention packs", "ring"]
PROMPT = "The capital of France is"


@functools.cache
def packaged_model() -> Llama:
    return Llama.load()


def heads() -> list[dict]:
    """For each of `HEADS`: the tokens, scores of every query over the keys up to it, and values."""
    model = packaged_model()
    ids = model.tokenizer.encode(TEXT)
    words = [model.tokenizer.decode([i]) for i in ids]
    deepest = 1 + max(layer for layer, _ in HEADS)
    layers = list(itertools.islice(model.layers_qkv(np.array([ids])), deepest))
    found = []
    for (layer, head), about in HEADS.items():
        q, k, v = (np.asarray(x[0], np.float64) for x in layers[layer])
        group = head // (q.shape[1] // k.shape[1])
        scores = q[:, head] @ k[:, group].T * q.shape[-1] ** -0.5
        found.append(
            {
                "name": f"layer {layer}, head {head}",
                "about": about,
                "layer": layer,
                "head": head,
                "words": words,
                "scores": [row[: i + 1] for i, row in enumerate(scores.round(DIGITS).tolist())],
                "values": v[:, group].round(DIGITS).tolist(),
            }
        )
    return found


def small_example() -> dict:
    return {
        "name": "five words, small numbers",
        "about": "The notebooks' example: softmax weights of 1, 2, 4, 1 and 8 sixteenths.",
        "words": WORDS,
        "scores": [SCORES[: i + 1].tolist() for i in range(len(WORDS))],
        "values": VALUES,
    }


def sentence() -> dict:
    """The same five words for the page on the energy: `hull` has the words at its corners."""
    corners = convex_hull(np.array(VALUES)).tolist()
    return {
        "words": [word.strip() for word in WORDS],
        "scores": SCORES.tolist(),
        "values": VALUES,
        "hull": [VALUES.index(corner) for corner in corners],
    }


def beam(model: Llama, prompt: list[int], width: int, length: int) -> np.ndarray:
    """The likeliest continuations that a beam search finds, (width, length): without a cache."""
    paths, scores = np.zeros((1, 0), int), np.zeros(1)
    for depth in range(length):
        texts = np.zeros((width, len(prompt) + length), int)  # of one shape, to compile once
        texts[:, : len(prompt)] = prompt
        texts[: len(paths), len(prompt) : len(prompt) + depth] = paths
        logits = model.logits(texts)[: len(paths), len(prompt) + depth - 1]
        total = scores[:, None] + np.asarray(jax.nn.log_softmax(logits))
        best = np.argsort(-total, axis=None, kind="stable")[:width]
        rows, tokens = np.unravel_index(best, total.shape)
        paths, scores = np.column_stack([paths[rows], tokens]), total[rows, tokens]
    return paths


def drafted() -> list[str]:
    """Candidates after `PROMPT`, as lines of words; a space within a token becomes “␣”."""
    model = packaged_model()
    found = beam(model, model.tokenizer.encode(PROMPT), width=6, length=5)
    words = [[model.tokenizer.decode([t]) for t in row] for row in found.tolist()]
    # A line break is written as \n; tokens that end a text have no letters.
    shown = [[repr(word.replace(" ", "␣"))[1:-1] or "(end)" for word in row] for row in words]
    return [" ".join(row) for row in shown]


def examples() -> list[dict]:
    lines = {
        "Mars, of the packing document": MARS,
        "a row of three segments": SEGMENTS,
        "candidates of different lengths": RAGGED,
        f"SmolLM2’s beam after “{PROMPT}”": drafted(),
    }
    return [{"name": name, "lines": candidates} for name, candidates in lines.items()]


def page(template: str, data: dict) -> str:
    """The template with the files and the data that it names in /*{braces}*/ put in."""

    def put_in(found: re.Match) -> str:
        if found[1] == "data":  # no "</script>" may end it early
            text = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
            return text.replace("], [", "],\n[")
        return (HERE / "steppers" / found[1]).read_text(encoding="utf-8")

    text = (HERE / "steppers" / template).read_text(encoding="utf-8")
    return re.sub(r"/\*\{([\w.]+)\}\*/", put_in, text)


def make() -> dict[str, str]:
    """File name -> the whole page."""
    data = {
        "energy.html": sentence(),
        "merge.html": {"heads": [*heads(), small_example()], "faults": faults()},
        "prefix_tree.html": {"examples": examples()},
    }
    return {name: page(template, data[template]) for name, template in PAGES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    folder = parser.parse_args().folder
    jax.config.update("jax_platforms", "cpu")  # the same numbers everywhere, nearly
    for name, text in make().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"{folder / name}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
