"""Write the site's first page, one file that needs nothing but a browser: python site/make_page.py

The files of page/ become one file, with the page's numbers inside: scores and values of heads of
the packaged model, beams that the model finds, its choices after each token of a tree, and the
conformance suite's report on each merge that is broken on purpose.
"""

import argparse
import functools
import itertools
import json
import re
from pathlib import Path
from urllib.parse import quote

import jax
import numpy as np
from broken_merges import faults
from still import still

from figures.sentence import convex_hull
from treeattn_llama import Llama

HERE = Path(__file__).parent
PAGE = HERE / "one_page.html"
DIGITS = 3  # the model's numbers are rounded: the page computes with what it shows

TEXT = (
    "Anna lives in Rome and Otto lives in Paris. Every summer the two meet by the sea. "
    "Where does Otto live? Otto lives in"
)
HEADS = {  # (layer, head) -> what it does on this text
    (21, 8): "a head that finds the city",
    (18, 6): "a head that hesitates",
    (20, 3): "a head that rests on the first word",
    (0, 0): "a head that looks everywhere",
}
# The small example of the notebooks: a key is its score, the weights are 1, 2, 4, 1, 8 sixteenths.
WORDS = ["the", " cat", " drank", " warm", " milk"]
SCORES = np.log([1.0, 2.0, 4.0, 1.0, 8.0])
VALUES = [[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 4.0], [1.0, 3.0]]

MARS = ["Mars is a red", "Mars is reddish when", "Mars is dark red"]
SEGMENTS = ["one two three", "one four five", "one four six"]
RAGGED = ["tree attention", "tree", "tree attention packs", "ring"]
PROMPT = "The capital of France is"
PROMPTS = [PROMPT, "Once upon a time, there was a", "Two plus two is four, and three plus three"]
BRANCHES = (3, 3, 2, 2)  # of the trees of the model's choices, from the root on
ROWS = 18  # texts that the model reads at once


@functools.cache
def packaged_model() -> Llama:
    return Llama.load()


def heads() -> list[dict]:
    """For each of `HEADS`: the tokens, the last query's scores over them, and their values."""
    model = packaged_model()
    ids = model.tokenizer.encode(TEXT)
    words = [model.tokenizer.decode([i]) for i in ids]
    deepest = 1 + max(layer for layer, _ in HEADS)
    layers = list(itertools.islice(model.layers_qkv(np.array([ids])), deepest))
    found = []
    for (layer, head), name in HEADS.items():
        q, k, v = (np.asarray(x[0], np.float64) for x in layers[layer])
        group = head // (q.shape[1] // k.shape[1])
        scores = k[:, group] @ q[-1, head] * q.shape[-1] ** -0.5
        numbers = {"scores": scores, "values": v[:, group]}
        rounded = {key: x.round(DIGITS).tolist() for key, x in numbers.items()}
        found.append({"name": name, "layer": layer, "head": head, "words": words, **rounded})
    return found


def sentence() -> dict:
    """The notebooks' five words; `hull` has those at the corners."""
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


def tree_of_choices(prompt: str) -> dict:
    """A tree of the model's likeliest continuations, and the model's own choice after each node.

    A node has its token, its parent, and the logarithm of its probability after the parent. `said`
    is the token that the model would write next, `best` the child with it, or -1 at the leaves.
    """
    model = packaged_model()
    start = model.tokenizer.encode(prompt)
    paths = [[]]  # the root is the prompt's last token
    nodes = [{"word": model.tokenizer.decode(start[-1:]), "parent": -1, "depth": 0, "log": 0}]
    first = 0
    for depth, branches in enumerate((*BRANCHES, 0)):
        level = range(first, len(nodes))
        first = level.stop
        for i, row in zip(level, after(start, paths[level.start :]), strict=True):
            likeliest = np.argsort(-row, kind="stable")[: max(1, branches)].tolist()
            said = model.tokenizer.decode(likeliest[:1])
            nodes[i] |= {"said": said, "best": len(nodes) if branches else -1}
            for token in likeliest[:branches]:
                word, log = model.tokenizer.decode([token]), round(float(row[token]), DIGITS)
                nodes.append({"word": word, "parent": i, "depth": depth + 1, "log": log})
                paths.append([*paths[i], token])
    return {"prompt": prompt, "nodes": nodes}


def after(start: list[int], paths: list[list[int]]) -> list[np.ndarray]:
    """The log-probabilities of the token after each path, all of which are equally long."""
    found = []
    for begin in range(0, len(paths), ROWS):
        some = [start + path for path in paths[begin : begin + ROWS]]
        texts = np.zeros((ROWS, len(start) + len(BRANCHES)), int)  # one shape, to compile once
        texts[: len(some), : len(some[0])] = some
        logits = packaged_model().logits(texts)[: len(some), len(some[0]) - 1]
        found.extend(np.asarray(jax.nn.log_softmax(logits), np.float64))
    return found


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


def favicon() -> str:
    """The icon as a data URL has it."""
    return quote((HERE / "static" / "favicon.svg").read_text(encoding="utf-8").strip())


def numbers() -> dict:
    """The numbers that the page computes with. The model takes minutes for them."""
    return {
        "heads": heads(),
        "sentence": sentence(),
        "faults": faults(),
        "examples": examples(),
        "trees": [tree_of_choices(prompt) for prompt in PROMPTS],
    }


def written(data: dict) -> str:
    """The whole page: the template, with the files and the data that the template names."""
    # No "</script>" may end the data early; a line for each list of lists.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {"data": text.replace("],[", "],\n["), "favicon": favicon(), "still": still()}

    def put_in(found: re.Match) -> str:
        return parts.get(found[1]) or (HERE / "page" / found[1]).read_text(encoding="utf-8")

    template = (HERE / "page" / "page.html").read_text(encoding="utf-8")
    return re.sub(r"/\*\{([\w.]+)\}\*/", put_in, template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about = "take the numbers of the page that is there: the model needs minutes for them"
    parser.add_argument("--keep-numbers", action="store_true", help=about)
    keep = parser.parse_args().keep_numbers
    jax.config.update("jax_platforms", "cpu")  # the same numbers everywhere, nearly
    stored = re.search(r'(?s)id="data">(.*?)</script>', PAGE.read_text("utf-8")) if keep else None
    PAGE.write_text(written(json.loads(stored[1]) if stored else numbers()), encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
