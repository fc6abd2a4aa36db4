"""Does a packed loss have the value and gradients of separate rows? Known mistakes do not.

The model is not the Llama: it has one attention head without norms, in float64. A pass follows its
plan, and the plan of a single row cannot share anything.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labs.training import interval_mask, pack_rows

FILLED = 32  # nodes, and log-probabilities: all plans share one compiled program


@jax.jit
def loss_and_gradients(weights, older, plan):
    def loss(p):
        def keys_and_values(p):
            x = p["embedding"][plan["tokens"]] + p["position"][plan["positions"]]
            return x, jnp.stack([x @ p["key"], x @ p["value"]])[:, None]

        x, kv = keys_and_values(p)
        kv = jnp.where(plan["kept"][..., None], keys_and_values(older)[1], kv)
        k, v = jnp.where(plan["detached"][..., None], jax.lax.stop_gradient(kv), kv)
        s = jnp.einsum("id,ijd->ij", x @ p["query"], k) / 6**0.5
        s = jnp.where(plan["visible"] | np.eye(FILLED, dtype=bool), s, -jnp.inf)
        y = x + jnp.einsum("ij,ijd->id", jax.nn.softmax(s), v) @ p["output"]
        each = jax.nn.log_softmax(y @ p["head"].T)[plan["sources"], plan["targets"]]
        return -(plan["weights"] * each).sum()

    return jax.value_and_grad(loss)(weights)


def asked(plan):
    """(loss, gradients), of seven nodes or thirty."""
    plan = {
        "kept": np.zeros_like(plan["visible"]),
        "detached": np.zeros_like(plan["visible"]),
    } | plan
    plan = {name: np.pad(x, [(0, FILLED - n) for n in x.shape]) for name, x in plan.items()}
    return loss_and_gradients(random_weights(0), random_weights(1), plan)


def random_weights(seed):
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys(("query", "key", "value", "output"), (6, 6))
    shapes |= {"embedding": (11, 6), "position": (FILLED, 6), "head": (11, 6)}
    return {name: 0.6 * rng.normal(size=shape) for name, shape in shapes.items()}


def plan_of(tokens, positions, visible, parents, nodes, weights):
    """Each of `nodes` is read as a log-probability after its parent, and weighted."""
    plan = {"tokens": tokens, "positions": positions, "visible": visible, "parents": parents}
    plan |= {"nodes": nodes, "sources": parents[nodes], "targets": tokens[nodes]}
    return plan | {"weights": weights}


def separately(rows, weights):
    found = []
    for row, w in zip(rows, weights, strict=True):
        n = np.arange(len(row))
        found.append(asked(plan_of(np.array(row), n, np.tri(len(n), dtype=bool), n - 1, n[1:], w)))
    return jax.tree.map(lambda *x: sum(x), *found)


def packed(rows, weights):
    tree = pack_rows(rows)
    nodes = [line[1 : len(row)] for line, row in zip(tree.row_map, rows, strict=True)]
    visible = interval_mask(tree.ends)
    arrays = tree.tokens, tree.positions, visible, tree.parents
    plan = plan_of(*arrays, np.concatenate(nodes), np.concatenate(weights))
    return plan | {"rows": sum(visible[of_row[-1]].astype(int) for of_row in nodes)}


def batches():
    """{name: (rows, the weight of each token but a row's first, of either sign)}."""
    rng = np.random.default_rng(2)
    a, b, c = [5, 3, 8], [5, 3, 8, 2, 4], [1, 3, 8]
    rows = {
        "answers": [[*a, 7, 1, 0], [*a, 2, 9, 4, 4], [*a, 9, 6]],
        "branches": [[*b, 8, 3], [*b, 5], [*a, 1, 6, 2], [*b, 8, 6, 1]],
        "equal": [[*a, 6, 1], [*a, 3, 8], [*a, 3, 9], [*a, 3, 8], [*a, 3, 8]],
        "within": [b, [*b, 7, 1], [*a, 5, 5], [*b, 7, 3, 0]],
        "prompts": [[*c, 1, 6, 7], [*a, 1, 6, 0], [*a, 9, 3], [*c, 2]],
    }
    return {
        name: (x, [rng.choice([-1, 1], len(r) - 1) * rng.uniform(0.5, 1.5, len(r) - 1) for r in x])
        for name, x in rows.items()
    }


# Mistakes: each changes the plan, or the rows before they are packed


def of_first_children(plan):
    """Each node has its first child as its only label: other children are left out."""
    return {"weights": plan["weights"] * (plan["sources"] == plan["nodes"] - 1)}


def within_segments(plan):
    children = np.bincount(plan["parents"] + 1)[plan["sources"] + 1]
    return {"weights": plan["weights"] * (children == 1)}


def once(plan):
    """Rows overwrite the nodes' weights instead of adding to them, so the last row's stays."""
    nodes = plan["nodes"].tolist()
    return {"weights": plan["weights"] * [x not in nodes[i + 1 :] for i, x in enumerate(nodes)]}


def mean_over_nodes(plan):
    return {"weights": plan["weights"] * len(plan["nodes"]) / len(set(plan["nodes"].tolist()))}


def from_outside(plan):
    """The mask's part in which nodes of one row see nodes of several."""
    return (plan["rows"] == 1)[:, None] & (plan["rows"] > 1)


def mean_over_tokens(rows, weights):
    """Longer rows count more than in a mean over rows."""
    return rows, [w * len(w) * len(rows) / sum(map(len, weights)) for w in weights]


def as_a_set(rows, weights):
    kept = {tuple(row): w for row, w in zip(rows, weights, strict=True)}
    return list(map(list, kept)), list(kept.values())


def only_leaves(rows, weights):
    kept = [i for i, x in enumerate(rows) if not any(x == y[: len(x)] != y for y in rows)]
    return [rows[i] for i in kept], [weights[i] for i in kept]


def one_prompt(rows, weights):
    """Equal tokens at the same depth are one node, even after different first tokens."""
    return [[rows[-2][0], *row[1:]] for row in rows], weights


ALL = list(batches())
OF_PLANS = {
    "none": (lambda plan: {}, []),
    "one child's target": (of_first_children, ALL),
    "first tokens of branches left out": (within_segments, ALL),
    "targets by order": (lambda plan: {"sources": plan["nodes"] - 1}, ALL),
    "a node counted once": (once, ALL),
    "mean over nodes": (mean_over_nodes, ALL),
    "places for positions": (lambda plan: {"positions": np.arange(len(plan["tokens"]))}, ALL),
    "siblings are seen": (lambda plan: {"visible": np.tri(len(plan["tokens"]), dtype=bool)}, ALL),
    "prefix detached": (lambda plan: {"detached": from_outside(plan)}, ALL),
    "prefix of older weights": (lambda plan: {"kept": from_outside(plan)}, ALL),
    "weights off by one": (lambda plan: {"weights": np.roll(plan["weights"], 1)}, ALL),
}
OF_ROWS = {
    "mean over tokens": (mean_over_tokens, [x for x in ALL if x != "equal"]),
    "equal rows counted once": (as_a_set, ["equal"]),
    "row that ends within another": (only_leaves, ["within"]),
    "one node for two prefixes": (one_prompt, ["prompts"]),
}


@pytest.mark.parametrize("mistake", [*OF_PLANS, *OF_ROWS])
def test_a_packed_loss_is_that_of_separate_rows(mistake):
    seen = []
    for name, batch in batches().items():
        plan = packed(*OF_ROWS[mistake][0](*batch) if mistake in OF_ROWS else batch)
        plan |= OF_PLANS[mistake][0](plan) if mistake in OF_PLANS else {}
        found, right = asked(plan), separately(*batch)
        off = jax.tree.map(lambda x, y: float(abs(x - y).max()), found, right)
        largest = max(jax.tree.leaves(off))
        assert largest < 1e-12 or largest > 1e-2, off
        seen += [name] if largest > 1e-2 else []
        if mistake == "prefix detached":  # only gradients show it
            assert off[0] < 1e-12
    assert seen == (OF_PLANS | OF_ROWS)[mistake][1]
