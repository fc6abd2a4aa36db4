"""The questions and answers as files, for programs in other languages: an npz, and JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .attention import attention_cases
from .candidates import top_k_questions
from .merging import merge_cases
from .packed_loss import row_cases, separate_rows
from .stripes import stripe_questions
from .token_trees import accepted_paths, tree_cases, tree_depths, tree_mask

VERSION = 1  # of names, shapes and numbers in the files; a change of any of them is a new one


def vectors() -> dict[str, np.ndarray]:
    """All arrays by name: "check/question/argument", "check/question/expected/…".

    Arguments are float32, and expected answers float64.
    """
    found = {}
    for prefix, arrays in _questions():
        for name, x in arrays.items():
            found[f"{prefix}/{name}"] = np.asarray(x)
    return found


def _questions() -> Iterator[tuple[str, dict]]:
    for case in merge_cases():
        outs, lses = zip(*case.arguments[0], strict=True)
        asked = {"outs": np.stack(outs), "lses": np.stack(lses)}
        yield f"merge/{case.name}", {**asked, "expected/out": case.out, "expected/lse": case.lse}
    for case in attention_cases():
        asked = dict(zip("qkv", case.arguments, strict=True), **case.options)
        expected = {"expected/out": case.out, "expected/lse": case.lse}
        yield f"attention/{case.name}", {**asked, **expected}
    for case in tree_cases():
        expected = {
            "expected/mask": tree_mask(case.parents),
            "expected/positions": case.lengths[:, None] + tree_depths(case.parents),
        }
        asked = {"parents": case.parents, "lengths": case.lengths}
        yield f"tree/{case.name}", {**asked, "accepted": accepted_paths(case), **expected}
    for case in row_cases():
        yield f"packed_loss/{case.name}", _of_rows(case)
    names = ("lengths", "devices", "rank", "interleave")
    for number, question in enumerate(stripe_questions()):
        asked = dict(zip(names, question.arguments, strict=True))
        yield f"local_lengths/{number}", {**asked, "expected": question.expected[0]}
    for question in top_k_questions():
        shards, k = question.arguments
        asked = {"k": k}
        for r, (scores, positions) in enumerate(shards):
            asked[f"scores/{r}"] = scores
            asked[f"positions/{r}"] = positions
        scores, positions = question.expected
        expected = {"expected/scores": scores, "expected/positions": positions}
        yield f"top_k/{question.name}", {**asked, **expected}


def _of_rows(case) -> dict:
    """Rows behind one another, with their lengths."""
    loss, gradients = separate_rows(*case[1:4])
    arrays = {
        "tokens": np.concatenate(case.rows),
        "weights": np.concatenate(case.weights),
        "lengths": [len(row) for row in case.rows],
        "expected/loss": loss,
    }
    for name, x in case.parameters.items():
        arrays[f"parameters/{name}"] = x
        arrays[f"expected/gradients/{name}"] = gradients[name]
    return arrays


def export(folder: Path) -> list[Path]:
    """Write vectors-1.npz and vectors-1.json into `folder`, which is made; returns their paths.

    In JSON an array is {"dtype", "shape", "data"}, flat in C order; ∞, −∞ and NaN are the strings
    "inf", "-inf" and "nan", which JSON has no numbers for.
    """
    arrays = vectors()
    folder.mkdir(parents=True, exist_ok=True)
    npz = folder / f"vectors-{VERSION}.npz"
    np.savez_compressed(npz, version=VERSION, **arrays)
    text = {name: _as_json(x) for name, x in arrays.items()}
    as_json = folder / f"vectors-{VERSION}.json"
    as_json.write_text(json.dumps({"version": VERSION, "arrays": text}, separators=(",", ":")))
    return [npz, as_json]


def _as_json(x: np.ndarray) -> dict:
    data = x.ravel().tolist()
    if x.dtype.kind == "f":
        # The shortest decimals that give the same float32, not those of its float64 neighbour.
        data = [float(str(y)) if np.isfinite(y) else str(y) for y in x.ravel()]
    return {"dtype": x.dtype.name, "shape": x.shape, "data": data}
