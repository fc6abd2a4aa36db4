"""Has the loss of rows packed into a prefix tree the value, and the gradients, of separate rows?"""

import functools
from collections.abc import Callable

import numpy as np

from .judge import Mistake, Question, Subject, judge
from .packing import REDUCTIONS, Packing, reduced, right_pass, weighted
from .packing_mistakes import PACKING_FINGERPRINTS, wrong_passes
from .report import Report
from .tiny_model import VOCABULARY, loss_and_gradients, random_parameters

LOSS_TOLERANCES = {"float64": 1e-10, "float32": 2e-5}


def separate_rows(parameters, rows, weights, *, reduction: str = "sum") -> tuple[float, dict]:
    """(loss, gradients by parameter) in float64, a pass over each row alone.

    The loss is −Σ weights[r][t] · log P(rows[r][t] | rows[r][:t]) over all rows r and t ≥ 1, or a
    mean of it (`reduction`, as in `check_packed_loss`). The model is the one of `tiny_model.py`:

        x = embedding[tokens] + position[0, 1, 2, …]                      (length, 6)
        a = softmax(x·query (x·key)ᵀ / √6), each token seeing itself and those before
        P = softmax((x + a (x·value) · output) · headᵀ)                   (length, 11)
    """
    each = of_each_row(parameters, rows, weights, reduction)
    total = {name: sum(row[name] for row in each) for name in each[0]}
    return float(total.pop("loss")), total


def of_each_row(parameters, rows, weights, reduction: str) -> list[dict[str, np.ndarray]]:
    """Of each row the loss, as "loss", and the gradients by parameter."""
    parameters = {name: np.asarray(x, np.float64) for name, x in parameters.items()}
    each = []
    for row, w in zip(rows, reduced(weights, reduction), strict=True):
        chain = Packing(np.array(row), np.arange(-1, len(row) - 1), [list(range(len(row)))])
        loss, slopes = loss_and_gradients(parameters, right_pass(chain, weighted(chain, [w])))
        each.append({"loss": np.asarray(loss), **slopes})
    return each


def row_questions(dtype: str = "float32", reduction: str = "sum") -> list[Question]:
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
    questions = []
    for seed, (name, (rows, weights)) in enumerate(asked.items()):
        parameters = {x: array.astype(dtype) for x, array in random_parameters(seed).items()}
        arguments = {"parameters": parameters, "rows": rows, "weights": weights}
        questions.append(Question(name, arguments, {}, of_each_row(*arguments.values(), reduction)))
    return questions


def check_packed_loss(
    f: Callable,
    *,
    reduction: str = "sum",
    dtype: str = "float32",
    tolerance: float | None = None,
    only=None,
    expect=(),
) -> Report:
    """Ask f(parameters, rows, weights) -> (loss, gradients by parameter) all `row_questions`.

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

    only, expect: as in `check_merge`

    It is called twice with the rows of "a group of answers", with other parameters. What raises
    NotImplementedError is skipped. Raises ValueError for another reduction or dtype.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {list(REDUCTIONS)}")
    if dtype not in LOSS_TOLERANCES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {list(LOSS_TOLERANCES)}")
    questions, mistakes = _questions(dtype, reduction)
    allowed = tolerance or LOSS_TOLERANCES[dtype]

    def same(question: Question, answer: dict, other) -> np.ndarray:
        other = _sum(other) if other is question.right else other
        return np.array([all(_distance(x, other[name]) <= allowed for name, x in answer.items())])

    def describe(question: Question, answer: dict, right: np.ndarray) -> str:
        """How often all counts, or a row, if that is what is wrong; else what is off."""
        each = [np.concatenate([x.ravel() for x in row.values()]) for row in question.right]
        got = np.concatenate([answer[name].ravel() for name in question.right[0]])
        for columns in (np.sum(each, axis=0)[:, None], np.stack(each, axis=1)):
            times, _, rank, _ = np.linalg.lstsq(columns, got, rcond=1e-9)
            if rank == len(times) and _distance(columns @ times, got) <= allowed:
                who = ["all"] if len(times) == 1 else [f"row {r}" for r in range(len(times))]
                off = [(w, x) for w, x in zip(who, times, strict=True) if abs(x - 1) > 1e-3]
                return ", ".join(f"{w} counts {x:.3g} times" for w, x in off)
        off = {name: _distance(answer[name], x) for name, x in _sum(question.right).items()}
        said = ", ".join(f"{x:.1e} ({name})" for name, x in off.items() if not x <= allowed)
        return f"off by {said}"

    subject = Subject(_read, same, describe, mistakes, PACKING_FINGERPRINTS)
    return judge(f, questions, subject, only=only, expect=expect)


class Form(Mistake):
    """A mistake whose function takes the question itself."""

    def gives(self, question: Question) -> dict:
        return self.wrong(question)


@functools.cache
def _questions(dtype: str, reduction: str) -> tuple:
    questions = row_questions(dtype, reduction)
    last: dict[str, dict] = {}  # the parameters of the last question with these rows
    older: dict[str, dict | None] = {}
    for x in questions:
        rows = str(x.arguments["rows"])
        older[x.name] = last.get(rows)
        last[rows] = x.arguments["parameters"]
    passes = {
        x.name: list(wrong_passes(x.arguments["rows"], x.arguments["weights"], reduction))
        for x in questions
    }

    def gives(question: Question, number: int) -> dict:
        parameters = {
            k: np.asarray(x, np.float64) for k, x in question.arguments["parameters"].items()
        }
        _, wrong = passes[question.name][number]
        loss, slopes = loss_and_gradients(parameters, wrong, older[question.name])
        return {"loss": np.asarray(loss), **slopes}

    names = [name for name, _ in passes[questions[0].name]]
    mistakes = [Form(name, functools.partial(gives, number=i)) for i, name in enumerate(names)]
    return questions, mistakes


def _sum(each: list[dict]) -> dict[str, np.ndarray]:
    return {name: sum(row[name] for row in each) for name in each[0]}


def _read(question: Question, came) -> dict[str, np.ndarray]:
    """The answer in float64, or a ValueError that says what is missing, or of which shape."""
    loss, gradients = came
    parameters = question.arguments["parameters"]
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


def _distance(x: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in parts of the largest magnitude, or of 1."""
    return float(np.abs(x - expected).max() / max(np.abs(expected).max(), 1))
