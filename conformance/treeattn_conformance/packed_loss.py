"""Has the loss of rows packed into a prefix tree the value, and the gradients, of separate rows?"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .packing import REDUCTIONS, Packing, reduced, right_pass, weighted
from .packing_mistakes import PACKING_FINGERPRINTS, wrong_passes
from .report import Report, Result, asked
from .tiny_model import VOCABULARY, loss_and_gradients, random_parameters

LOSS_TOLERANCES = {"float64": 1e-10, "float32": 2e-5}


class RowCase(NamedTuple):
    """One question: f(parameters, rows, weights) should be what `separate_rows` gives.

    parameters: arrays by name; rows: lists of token ids; weights: an array (length,) for each row
    older:      the parameters of the question before, where it had the same rows
    """

    name: str
    parameters: dict[str, np.ndarray]
    rows: list[list[int]]
    weights: list[np.ndarray]
    older: dict[str, np.ndarray] | None = None


def separate_rows(parameters, rows, weights, *, reduction: str = "sum") -> tuple[float, dict]:
    """(loss, gradients by parameter) in float64, a pass over each row alone.

    The loss is −Σ weights[r][t] · log P(rows[r][t] | rows[r][:t]) over all rows r and t ≥ 1, or a
    mean of it (`reduction`, as in `check_packed_loss`). The model is the one of `tiny_model.py`:

        x = embedding[tokens] + position[0, 1, 2, …]                      (length, 6)
        a = softmax(x·query (x·key)ᵀ / √6), each token seeing itself and those before
        P = softmax((x + a (x·value) · output) · headᵀ)                   (length, 11)
    """
    parameters = {name: np.asarray(x, np.float64) for name, x in parameters.items()}
    loss = 0.0
    gradients = {name: np.zeros_like(x) for name, x in parameters.items()}
    for row, w in zip(rows, reduced(weights, reduction), strict=True):
        chain = Packing(np.array(row), np.arange(-1, len(row) - 1), [list(range(len(row)))])
        of_row, slopes = loss_and_gradients(parameters, right_pass(chain, weighted(chain, [w])))
        loss += of_row
        gradients = {name: x + slopes[name] for name, x in gradients.items()}
    return loss, gradients


def row_cases(dtype: str = "float32") -> list[RowCase]:
    """The questions to a packed loss: up to eight rows of up to a dozen tokens."""
    rng = np.random.default_rng(2)

    def tokens(n):
        return rng.integers(0, VOCABULARY, n).tolist()

    def with_weights(rows, trained_from=1):
        """Of either sign, none of them 0, from that token on."""
        weights = []
        for row in rows:
            w = rng.choice([-1.0, 1.0], len(row)) * rng.uniform(0.5, 1.5, len(row))
            w[:trained_from] = 0
            weights.append(w.astype(dtype))
        return rows, weights

    prompt = tokens(5)
    group = with_weights([[*prompt, first, *tokens(n)] for first, n in ((7, 2), (2, 4), (9, 1))], 5)
    chat = tokens(3)
    turns = [[*chat, 4, *tokens(2)], [*chat, 1, *tokens(1)]]
    branching = [turns[0] + [8, 3], turns[1] + tokens(2), turns[0] + [5], turns[0] + [8, 6, 1]]
    twice = [*prompt, 3, 8]
    equal = [[*prompt, 6, 1], twice, [*prompt, 3, 9], twice, twice]
    within = [[*prompt, 2, 4], [*prompt, 2, 4, 7, 1], [*prompt, 5, 5], [*prompt, 2, 4, 7, 3, 0]]
    other_prompt = [(prompt[0] + 1) % VOCABULARY, *tokens(3)]
    alike = [prompt[4], 1, 6]  # at the same places behind both prompts
    two_prompts = [[*other_prompt, *alike, 7], [*prompt[:4], *alike, 0], [*prompt, 9, 3]]
    two_prompts.append([*other_prompt, 2])
    nothing_shared = [[first, *tokens(4)] for first in (3, 1, 8)]
    asked = {
        "one row": with_weights([tokens(6)]),
        "nothing shared": with_weights(nothing_shared),
        "a group of answers": group,
        "the same a step later": group,
        "prompts trained, too": with_weights(group[0]),
        "branches of branches": with_weights(branching),
        "equal rows": with_weights(equal, 5),
        "rows that begin others": with_weights(within, 5),
        "two prompts": with_weights(two_prompts),
    }
    cases = []
    for seed, (name, (rows, weights)) in enumerate(asked.items()):
        parameters = {x: array.astype(dtype) for x, array in random_parameters(seed).items()}
        older = cases[-1].parameters if cases and rows is cases[-1].rows else None
        cases.append(RowCase(name, parameters, rows, weights, older))
    return cases


def check_packed_loss(
    f: Callable, *, reduction: str = "sum", dtype: str = "float32", tolerance: float | None = None
) -> Report:
    """Ask f(parameters, rows, weights) -> (loss, gradients by parameter) all `row_cases`.

    parameters: NumPy arrays by name, those of `separate_rows`, which says what model it is
    rows:       lists of token ids, which share prefixes in every way
    weights:    of each row an array (length,): of each token's log-probability, 0 where it is not
                trained. A row's first token has none
    gradients:  of every parameter, by its name; None counts as 0

    reduction: "sum": the loss is −Σ weights · log-probability; "tokens": that, divided by how many
               weights are not 0; "rows": the mean over rows of each row's so divided loss
    dtype:     of parameters and weights, and what rounding is allowed for: "float64" or "float32"
    tolerance: of the loss and of each gradient, in parts of the largest magnitude that it has, or
               of 1 where that is less; 1e-10 and 2e-5 when None

    It is called twice with the rows of "a group of answers", with other parameters. A mistake is
    named if it explains every answer. What raises NotImplementedError is not asked. Raises
    ValueError for another reduction or dtype.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {list(REDUCTIONS)}")
    if dtype not in LOSS_TOLERANCES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {list(LOSS_TOLERANCES)}")
    tolerance = tolerance or LOSS_TOLERANCES[dtype]
    results = []
    answers = []  # (place in results, case, answer) of those that can be compared
    for case in row_cases(dtype):
        result, answer = _ask(f, case, reduction, tolerance)
        if answer is not None:
            answers.append((len(results), case, answer))
        results.append(result)
    if any(results[place].status == "failed" for place, _, _ in answers):
        names = _names(answers, reduction, tolerance)
        for place, _, _ in answers:
            if results[place].status == "failed":
                results[place] = results[place]._replace(fingerprints=names)
    return Report(tuple(results), PACKING_FINGERPRINTS)


def _ask(f, case: RowCase, reduction: str, tolerance: float):
    """(what came of it, the answer, or None where it cannot be compared)."""
    parameters = {name: x.copy() for name, x in case.parameters.items()}
    rows = [list(row) for row in case.rows]
    weights = [w.copy() for w in case.weights]
    result, answer = asked(
        case.name, lambda: _as_arrays(*f(parameters, rows, weights), case.parameters)
    )
    if answer is None:
        return result, None
    expected = _joined(*separate_rows(*case[1:4], reduction=reduction))
    off = {name: _distance(answer[name], x) for name, x in expected.items()}
    if all(x <= tolerance for x in off.values()):
        return result, answer
    said = ", ".join(f"{x:.1e} ({name})" for name, x in off.items() if not x <= tolerance)
    return Result(case.name, "failed", (), f"off by {said}"), answer


def _as_arrays(loss, gradients, parameters) -> dict[str, np.ndarray]:
    """The answer in float64, or a ValueError that says what is missing, or of which shape."""
    missing = sorted(set(parameters) - set(gradients))
    if missing:
        raise ValueError(f"no gradients of {missing}")
    found = {"loss": np.asarray(loss, np.float64).reshape(())}
    for name, x in parameters.items():
        slope = gradients[name]
        found[name] = np.zeros(x.shape) if slope is None else np.asarray(slope, np.float64)
        if found[name].shape != x.shape:
            raise ValueError(f"gradient of {name} of shape {found[name].shape}, not {x.shape}")
    return found


def _joined(loss, gradients) -> dict[str, np.ndarray]:
    return {"loss": np.asarray(loss), **gradients}


def _distance(x: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in parts of the largest magnitude, or of 1."""
    return float(np.abs(x - expected).max() / max(np.abs(expected).max(), 1))


def _names(answers, reduction: str, tolerance: float) -> tuple[str, ...]:
    """The mistakes that would have given every answer."""
    explained = [_explained(case, answer, reduction, tolerance) for _, case, answer in answers]
    everywhere = set.intersection(*(set(found) for found in explained))
    return tuple(dict.fromkeys(name for name, _ in sorted(everywhere)))


def _explained(case: RowCase, answer, reduction: str, tolerance: float) -> set[tuple[str, int]]:
    """(fingerprint, number) of the wrong passes that give this answer."""
    parameters = {name: np.asarray(x, np.float64) for name, x in case.parameters.items()}
    found = set()
    for number, (name, wrong) in enumerate(wrong_passes(case.rows, case.weights, reduction)):
        would_be = _joined(*loss_and_gradients(parameters, wrong, case.older))
        if all(_distance(answer[x], y) <= tolerance for x, y in would_be.items()):
            found.add((name, number))
    return found
