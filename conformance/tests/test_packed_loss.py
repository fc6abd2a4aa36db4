"""The check of packed losses: ours passes, and each mistake planted in it is recognized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn_conformance import check_packed_loss, separate_rows
from treeattn_conformance.packed_loss import row_questions
from treeattn_conformance.packing_mistakes import PACKING_FINGERPRINTS

NODES = 64  # all are filled up to so many, and to as many log-probabilities: one program
REDUCTIONS = ("sum", "tokens", "rows")


def log_probabilities(parameters, tokens, positions, attend):
    """(n, 11) after each node; attend(q, k, v) -> out of (n, 6) each."""
    p = parameters
    x = p["embedding"][tokens] + p["position"][positions]
    y = x + attend(x @ p["query"], x @ p["key"], x @ p["value"]) @ p["output"]
    return jax.nn.log_softmax(y @ p["head"].T)


def value_and_gradients(loss):
    """Jitted, of a function of (parameters, …)."""
    return jax.jit(jax.value_and_grad(loss))


def mean_weights(weights, reduction):
    """One array after the other, each divided as the loss asks for; written anew here."""
    counts = [sum(x != 0 for x in w[1:]) for w in weights]
    divisors = {
        "sum": [1] * len(weights),
        "tokens": [sum(counts)] * len(weights),
        "rows": [len(weights) * n for n in counts],
    }
    return [w / n for w, n in zip(weights, divisors[reduction], strict=True)]


def filled(x, value=0):
    return np.pad(x, (0, NODES - len(x)), constant_values=value)


# What is right


@value_and_gradients
def loss_of_row(parameters, tokens, weights):
    """Of one row, padded with tokens that come after all others and have no weight."""
    visible = np.tril(np.ones((NODES, NODES), bool))

    def attend(q, k, v):
        return jax.nn.softmax(jnp.where(visible, q @ k.T / 6**0.5, -jnp.inf)) @ v

    log_p = log_probabilities(parameters, tokens, np.arange(NODES), attend)
    return -(weights[1:] * log_p[np.arange(NODES - 1), tokens[1:]]).sum()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_expected_answers_are_those_of_autodiff(reduction):
    """The gradients by hand, against JAX's of each row alone."""
    for question in row_questions("float64"):
        parameters, rows, weights = question.arguments.values()
        loss, gradients = separate_rows(*question.arguments.values(), reduction=reduction)
        weights = mean_weights(weights, reduction)
        each = [
            loss_of_row(parameters, filled(row), filled(w))
            for row, w in zip(rows, weights, strict=True)
        ]
        expected = jax.tree.map(lambda *x: sum(x), *each)
        np.testing.assert_allclose(loss, expected[0], atol=1e-12)
        for name, x in expected[1].items():
            np.testing.assert_allclose(gradients[name], x, atol=1e-12)


def pack_rows(rows):
    """(tokens, parents, the nodes of each row): rows sorted, each distinct prefix a node."""
    node_of = {}
    paths = {}
    for row in sorted(map(tuple, rows)):
        for length in range(1, len(row) + 1):
            node_of.setdefault(row[:length], len(node_of))
        paths[row] = np.array([node_of[row[:length]] for length in range(1, len(row) + 1)])
    tokens = np.array([prefix[-1] for prefix in node_of])
    parents = np.array([node_of.get(prefix[:-1], -1) for prefix in node_of])
    return tokens, parents, [paths[tuple(row)] for row in rows]


def ancestors(parents):
    """(n, n) bool: node i sees node j, above it or itself."""
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible


# What is wrong: each of these once, in a packed loss that is right without it


@value_and_gradients
def loss_of_nodes(parameters, at, older):
    """A packed pass that does as it is told; `at` are arrays of one size."""

    def attend(q, k, v):
        x = older["embedding"][at["tokens"]] + older["position"][at["positions"]]
        kept = at["cached"][..., None]
        k = jnp.where(kept, x @ older["key"], k)
        v = jnp.where(kept, x @ older["value"], v)
        off = at["detached"][..., None]
        k = jnp.where(off, jax.lax.stop_gradient(k), k)
        v = jnp.where(off, jax.lax.stop_gradient(v), v)
        scores = jnp.einsum("id,ijd->ij", q, k) / 6**0.5
        p = jax.nn.softmax(jnp.where(at["visible"], scores, -jnp.inf))
        return jnp.einsum("ij,ijd->id", p, v)

    log_p = log_probabilities(parameters, at["tokens"], at["positions"], attend)
    return -(at["weights"] * log_p[at["sources"], at["targets"]]).sum()


def planted(mistake, reduction="sum"):
    """The packed loss with `mistake`, which changes the rows, the weights, or the pass."""
    before = {}

    def f(parameters, rows, weights):
        weights = mean_weights(weights, reduction)
        of_rows = getattr(mistake, "of_rows", lambda *x: x)
        at = a_pass(*of_rows(rows, weights))
        if not hasattr(mistake, "of_rows"):
            at = at | mistake(at)
        older = before.get(str(rows), parameters)
        before[str(rows)] = parameters
        count = at.pop("count")
        square = {
            name: np.pad(at.pop(name), [(0, NODES - count)] * 2)
            for name in ("visible", "detached", "cached")
        }
        square["visible"] |= np.eye(NODES, dtype=bool)  # what only fills up sees itself
        arrays = {name: filled(x) for name, x in at.items() if name in USED}
        return loss_of_nodes(parameters, arrays | square, older)

    return f


USED = ("tokens", "positions", "sources", "targets", "weights")


def a_pass(rows, weights):
    """All that `loss_of_nodes` wants, and more for the mistakes: paths, parents, nodes."""
    tokens, parents, paths = pack_rows(rows)
    visible = ancestors(parents)
    nodes = np.concatenate([path[1:] for path in paths])
    return {
        "count": len(tokens),
        "tokens": tokens,
        "parents": parents,
        "positions": visible.sum(1) - 1,
        "visible": visible,
        "detached": np.zeros_like(visible),
        "cached": np.zeros_like(visible),
        "nodes": nodes,
        "sources": parents[nodes],
        "targets": tokens[nodes],
        "weights": np.concatenate([w[1:] for w in weights]),
        "shared": sum(np.isin(np.arange(len(tokens)), path).astype(int) for path in paths) > 1,
    }


def of_rows(change):
    """A mistake in the rows and weights, before anything is packed."""

    def mistake(at):
        raise AssertionError

    mistake.of_rows = change
    return mistake


def first_child(at):
    """A label for each node: that of its first child."""
    label = at["tokens"].copy()
    label[at["parents"][::-1]] = at["tokens"][::-1]  # a root's parent is nobody: the last node
    return {"weights": np.where(label[at["sources"]] == at["targets"], at["weights"], 0)}


def within_segments(at):
    """Labels are made of each run of tokens by itself: the first one after a branch has none."""
    children = np.bincount(at["parents"][at["parents"] >= 0], minlength=at["count"])
    return {"weights": np.where(children[at["sources"]] == 1, at["weights"], 0)}


def last_childs_label(at):
    label = at["tokens"].copy()
    label[at["parents"]] = at["tokens"]
    return {"targets": label[at["sources"]]}


def one_write_a_node(at):
    """Weights are written to nodes, where they should be added up."""
    written = np.zeros(at["count"])
    written[at["nodes"]] = at["weights"]
    nodes = np.unique(at["nodes"])
    return {
        "sources": at["parents"][nodes],
        "targets": at["tokens"][nodes],
        "weights": written[nodes],
    }


def over_nodes(at):
    trained = at["weights"] != 0
    share = trained.sum() / len(np.unique(at["nodes"][trained]))
    return {"weights": at["weights"] * share}  # they came divided by the rows' tokens


def without_ends(rows, weights):
    """Only leaves are rows."""
    leaves = [
        i
        for i, row in enumerate(rows)
        if not any(len(o) > len(row) and o[: len(row)] == row for o in rows)
    ]
    return [rows[i] for i in leaves], [weights[i] for i in leaves]


def as_a_set(rows, weights):
    kept = {tuple(row): w for row, w in zip(rows, weights, strict=True)}
    return [list(row) for row in kept], list(kept.values())


def weight_of_the_token_before(rows, weights):
    return rows, [np.append([0, 0], w[1:-1]) for w in weights]


def from_outside(at):
    """Whoever is no shared node sees shared ones through a cache."""
    return ~at["shared"][:, None] & at["shared"]


def same_token_at_the_same_depth(at, last=1):
    """One node for so many last tokens, whatever stands before: the first one that was made."""
    first = {}
    merged = np.zeros(at["count"], int)
    for node, seen in enumerate(at["visible"]):
        path = at["tokens"][seen].tolist()  # ancestors have lower indices
        merged[node] = first.setdefault((len(path), *path[-last:]), node)
    visible = np.zeros_like(at["visible"])
    for node in range(at["count"]):
        above = node
        while above >= 0:
            visible[node, above] = True
            parent = at["parents"][above]
            above = merged[parent] if parent >= 0 else -1
    nodes = merged[at["nodes"]]
    return {
        "visible": visible,
        "sources": merged[at["parents"][nodes]],
        "targets": at["tokens"][nodes],
    }


MISTAKES = {
    "one node for two prefixes": [
        functools.partial(same_token_at_the_same_depth, last=last) for last in (1, 2, 3)
    ],
    "one child's target": [first_child, last_childs_label],
    "first tokens of branches left out": [within_segments],
    "targets by order": [lambda at: {"sources": at["nodes"] - 1}],
    "a node counted once": [one_write_a_node],
    "positions not by depth": [lambda at: {"positions": np.arange(at["count"])}],
    "prefix detached": [lambda at: {"detached": from_outside(at)}],
    "prefix of older weights": [lambda at: {"cached": from_outside(at)}],
    "equal rows counted once": [of_rows(as_a_set)],
    "row that ends within another": [of_rows(without_ends)],
    "mask by order": [lambda at: {"visible": np.tril(np.ones_like(at["visible"]))}],
    "weights off by one": [of_rows(weight_of_the_token_before)],
    "sign": [lambda at: {"weights": -at["weights"]}],
}


def test_without_a_mistake_the_same_passes():
    assert not check_packed_loss(planted(lambda at: {}), dtype="float64").names("failed")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_has_its_own_fingerprint(name):
    for mistake in MISTAKES[name]:
        report = check_packed_loss(planted(mistake))
        assert report.fingerprints == {name}, str(report)
        assert PACKING_FINGERPRINTS[name] in str(report)


def test_means():
    report = check_packed_loss(planted(over_nodes, "tokens"), reduction="tokens", dtype="float64")
    assert report.fingerprints == {"mean over nodes"}, str(report)
    for asked, given in (("sum", "rows"), ("tokens", "rows"), ("rows", "tokens")):
        report = check_packed_loss(planted(lambda at: {}, given), reduction=asked)
        assert report.fingerprints == {"another mean"}, str(report)
    assert set(PACKING_FINGERPRINTS) == {*MISTAKES, "mean over nodes", "another mean"}


def test_a_mistake_that_nobody_knows():
    """Two at once: neither explains an answer, and the sizes are said."""

    def both(at):
        return {"weights": -at["weights"], "positions": np.arange(at["count"])}

    report = check_packed_loss(planted(both))
    assert report.fingerprints == set() and "off by" in report.results[2].detail


def test_answers_that_cannot_be_compared():
    def asked(answer):
        return check_packed_loss(lambda *_: answer()).results[0]

    def refuse():
        raise NotImplementedError("no trees")

    zeros = {
        name: np.zeros(x.shape) for name, x in row_questions()[0].arguments["parameters"].items()
    }
    assert asked(refuse) == ("one row", "skipped", (), "no trees")
    assert "no gradients of ['head']" in asked(lambda: (0, dict(list(zeros.items())[:-1]))).detail
    assert "of head of shape ()" in asked(lambda: (0, zeros | {"head": 1.0})).detail
    none = asked(lambda: (0.0, dict.fromkeys(zeros)))  # as PyTorch says of what nothing depends on
    assert none.status == "failed" and "all counts 0 times" in none.detail
    with pytest.raises(ValueError, match="reduction is 'mean', expected one of"):
        check_packed_loss(refuse, reduction="mean")
    with pytest.raises(ValueError, match="dtype is 'bfloat16', expected one of"):
        check_packed_loss(refuse, dtype="bfloat16")


def test_the_questions_have_what_they_are_for():
    asked = {x.name: x.arguments for x in row_questions()}
    again = asked["the same a step later"]
    assert again["rows"] == asked["a group of answers"]["rows"]
    assert not np.array_equal(
        again["parameters"]["head"], asked["a group of answers"]["parameters"]["head"]
    )
    rows = [tuple(row) for row in asked["equal rows"]["rows"]]
    assert sorted(rows.count(row) for row in set(rows)) == [1, 1, 3]
    within = asked["rows that begin others"]["rows"]
    assert sum(len(a) > len(b) and a[: len(b)] == b for a in within for b in within) == 2
    for name, arguments in asked.items():
        shares = len(pack_rows(arguments["rows"])[0]) < sum(map(len, arguments["rows"]))
        assert shares == (name not in ("one row", "nothing shared")), name
        assert {w.dtype.name for w in arguments["weights"]} == {"float32"}


def test_which_row_counts_how_often_is_said():
    def half(parameters, rows, weights):
        weights = [w / 2 if r == 1 else w for r, w in enumerate(weights)]
        return separate_rows(parameters, rows, weights)

    report = check_packed_loss(half, dtype="float64")
    assert report.names("passed") == ["one row"] and not report.fingerprints, str(report)
    assert "nothing shared           failed   row 1 counts 0.5 times" in str(report)
    twice = check_packed_loss(
        lambda p, r, w: separate_rows(p, r, [2 * x for x in w]), dtype="float64"
    )
    assert str(twice).count("all counts 2 times") == 9, str(twice)


def test_in_pytorch():
    """The same in ten lines of another framework, right and with a prefix without gradients."""
    torch = pytest.importorskip("torch")

    def f(parameters, rows, weights, *, detach=False):
        p = {n: torch.tensor(x, requires_grad=True) for n, x in parameters.items()}
        at = a_pass(rows, weights)
        x = p["embedding"][at["tokens"]] + p["position"][at["positions"]]
        q, k, v = (x @ p[name] for name in ("query", "key", "value"))
        if detach:
            off = torch.tensor(at["shared"])[:, None]
            k, v = (torch.where(off, y.detach(), y) for y in (k, v))
        scores = (q @ k.T / 6**0.5).masked_fill(torch.tensor(~at["visible"]), -torch.inf)
        y = x + scores.softmax(-1) @ v @ p["output"]
        log_p = (y @ p["head"].T).log_softmax(-1)
        loss = -(torch.tensor(at["weights"]) * log_p[at["sources"], at["targets"]]).sum()
        loss.backward()
        return loss.item(), {n: x.grad for n, x in p.items()}

    assert not check_packed_loss(f, dtype="float64").names("failed")
    report = check_packed_loss(functools.partial(f, detach=True))
    assert report.fingerprints == {"prefix detached"}, str(report)
