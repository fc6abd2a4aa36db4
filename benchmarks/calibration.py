"""Is a draft as sure as it should be? What it gave a path, and how often the model wrote that path.

    python benchmarks/calibration.py          about 3 minutes on two quiet cores

Sixteen prompts that neither the recurrent drafter nor any constant of the package was fitted on,
nor chosen by. The model writes up to 96 tokens after each, greedily; at each of them the drafts say
what comes next, the recurrent one by its beam of 8 x 5 and what fell out of it, the suffix draft
by the 15 paths that it is surest of. A path's probability is the product of its tokens' scores; it
came true where the text goes on with all of its tokens. Every path counts, shorter ones that others
begin with, too. Writes results/calibration.json.
"""

import datetime
import itertools
import json
import os
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
from recurrent import grid_beams, states_of
from tqdm import tqdm

from training.recurrent import RecurrentDraft
from treeattn import Llama
from treeattn.llama import generate
from treeattn.llama.speculation import SuffixDraft, draft_candidate_tokens

RESULTS = Path(__file__).parent / "results" / "calibration.json"
TOKENS = 96
WIDTH, LENGTH = 8, 5
EDGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CHAT = (
    "My bicycle squeaks when I brake. What should I check first?",
    "Why do onions make people cry?",
    "Suggest three names for a small bakery, and say why they fit.",
    "How does a lighthouse work?",
    "What is the difference between a lake and a pond?",
    "Tell me a story about a tailor who could not count.",
    "Is it better to read on paper or on a screen?",
    "How do I remove candle wax from a tablecloth?",
)
PLAIN = (
    "def celsius_to_fahrenheit(degrees):\n    return degrees * 9 / 5 + 32\n\n\ndef ",
    "for (let i = 0; i < rows.length; i++) {\n  console.log(rows[i].name);\n}\n\nfor (let ",
    "CREATE TABLE books (\n  id INTEGER PRIMARY KEY,\n  title TEXT NOT NULL\n);\n\nCREATE TABLE ",
    "import math\n\n\nclass Circle:\n    def __init__(self, radius):\n        self.r = radius\n",
    "Monday: soup, bread\nTuesday: rice, beans\nWednesday:",
    "- [x] buy screws\n- [x] measure the door\n- [ ] ",
    "name,town,year\nAda,London,1815\nEmmy,Erlangen,1882\n",
    "Ingredients:\n\n* 200 g flour\n* 2 eggs\n* ",
)


def paths(beam: np.ndarray, scores: np.ndarray) -> dict[tuple[int, ...], float]:
    """Path -> its probability, of all paths from the root of candidates (M, C), each once."""
    found = {}
    for row, score in zip(beam.tolist(), np.cumsum(scores, axis=1).tolist(), strict=True):
        for n in range(1, len(row) + 1):
            if np.isfinite(score[n - 1]):
                found[tuple(row[:n])] = float(np.exp(score[n - 1]))
    return found


def outcomes(beams, text: list[int]) -> list[tuple[float, bool]]:
    """(probability, whether it came true) of every path at every token of a text.

    beams(at): candidates after the token `at`, as (beam, scores); paths past the text's end, of
    which nobody can tell, are left out.
    """
    found = []
    for at in range(1, len(text) - 1):
        beam, scores = beams(at)
        for path, chance in paths(np.asarray(beam)[0], np.asarray(scores)[0]).items():
            after = tuple(text[at + 1 : at + 1 + len(path)])
            if len(after) == len(path):
                found.append((chance, after == path))
    return found


def binned(pairs: list[tuple[float, bool]], edges=EDGES) -> list[dict]:
    """Of each bin of probabilities: its paths, their mean probability, the share that came true."""
    chance, true = (np.array(x, float) for x in zip(*pairs, strict=True))
    rows = []
    for low, high in itertools.pairwise(edges):
        here = (chance >= low) & ((chance < high) | (high == edges[-1]))
        if here.any():
            rows.append(
                {
                    "paths": int(here.sum()),
                    "probability": round(float(chance[here].mean()), 4),
                    "accepted": round(float(true[here].mean()), 4),
                }
            )
    return rows


def suffix_beams(prompt: list[int], text: list[int]):
    """beams(at) of the suffix draft."""
    draft = SuffixDraft()

    def beams(at):
        draft.observe([prompt + text[: at + 1]])
        return draft_candidate_tokens(draft, budget=15)

    return beams


def main() -> None:
    model = Llama.load(None)
    encode = model.tokenizer
    prompts = [("chat", encode.chat(x)) for x in CHAT]
    prompts += [("code and lists", encode.encode(x)) for x in PLAIN]
    recurrent = RecurrentDraft(model)
    pairs = defaultdict(list)
    tokens = 0
    for kind, prompt in tqdm(prompts, unit="text"):
        text = generate(model, prompt, max_new_tokens=TOKENS, capacity=256).tokens
        if len(text) < 3:
            continue
        tokens += len(text)
        beams = grid_beams(recurrent, text, states_of(model, prompt, text), WIDTH, LENGTH)
        pairs[f"recurrent, {kind}"] += outcomes(beams["tree"], text)
        pairs[f"suffix, {kind}"] += outcomes(suffix_beams(prompt, text), text)
    results = {
        "machine": f"{datetime.date.today()}, {os.cpu_count()} {os.uname().machine} cores, "
        f"jax {version('jax')}",
        "texts": len(prompts),
        "tokens": tokens,
        "drafts": {name: binned(rows) for name, rows in pairs.items()},
    }
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    for name, rows in results["drafts"].items():
        print(name, *rows, sep="\n    ")


if __name__ == "__main__":
    main()
