"""Faults of losses and of speculative steps, planted by the third reader.

A fault has a name that is its own or none, where the report says what is off.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeattn_conformance import check_packed_loss, check_verifier

pytestmark = pytest.mark.slow


# Losses: the packing of a right one, a weight of each node, and gradients by JAX


def packed_loss(fault=None):
    def f(parameters, rows, weights):
        nodes, tokens, parents, depth = {}, [], [], []
        total = {}
        for row, w in zip(rows, weights, strict=True):
            for i in range(len(row)):
                path = tuple(row[: i + 1])
                if path not in nodes:
                    nodes[path] = len(tokens)
                    tokens.append(row[i])
                    parents.append(nodes[path[:-1]] if i else -1)
                    depth.append(i)
                node = nodes[path]
                before = 0 if fault == "the last row's weight" else total.get(node, 0)
                rises = max(before, w[i]) if fault == "the largest weight" else before + w[i]
                total[node] = rises if i else 0
        n = len(tokens)
        branch = np.array([p >= 0 and parents.count(p) > 1 for p in parents])
        visible = np.eye(n, dtype=bool)
        positions = np.array(depth)
        for i, p in enumerate(parents):
            if p >= 0:
                visible[i] |= visible[p]
                if fault == "positions begin anew at a branch":
                    positions[i] = 0 if branch[i] else positions[p] + 1
        if fault == "a branch does not see its branch point":
            visible[branch, np.array(parents)[branch]] = False
        weight = np.array([total[i] for i in range(n)])
        tokens, parents = np.array(tokens), np.array(parents)

        def loss(p):
            x = p["embedding"][tokens] + p["position"][positions]
            s = (x @ p["query"]) @ (x @ p["key"]).T / (1 if fault == "no scale" else 6**0.5)
            a = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1)
            y = x + a @ (x @ p["value"]) @ p["output"]
            log_p = jax.nn.log_softmax(y @ p["head"].T, axis=-1)
            found = -(weight * jnp.where(parents >= 0, log_p[parents, tokens], 0)).sum()
            if fault == "divided by the weights":
                return found / sum(w[1:].sum() for w in weights)
            if fault == "an entropy as well":
                return found + 0.01 * (log_p * jnp.exp(log_p)).sum()
            return found

        value, slopes = jax.value_and_grad(loss)(parameters)
        slopes = {name: np.asarray(x) for name, x in slopes.items()}
        if fault == "a frozen embedding":
            slopes["embedding"] = None
        if fault == "gradients cut off":
            norm = np.sqrt(sum((x**2).sum() for x in slopes.values()))
            slopes = {name: x / max(norm, 1) for name, x in slopes.items()}
        return float(value), slopes

    return f


LOSSES = {
    "the last row's weight": {"a node counted once"},
    "the largest weight": set(),
    "positions begin anew at a branch": set(),
    "a branch does not see its branch point": set(),
    "no scale": set(),
    "divided by the weights": set(),
    "an entropy as well": set(),
    "a frozen embedding": set(),
    "gradients cut off": set(),
}


# Steps: a chain of two


def softmax(logits, temperature):
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / temperature)
    return p / p.sum()


def chain(fault=None):
    def step(target, draft, rng, *, temperature=1.0):
        drafted, q = (), []
        for _ in range(2):
            q.append(softmax(draft(drafted), temperature))
            drafted = (*drafted, int(rng.choice(len(q[-1]), p=q[-1])))
        kept = ()
        for x, of_draft in zip(drafted, q, strict=True):
            p = softmax(target(kept), temperature)
            chance = p[x] / of_draft[x]
            chance = chance * 0.9 if fault == "nine of ten" else chance
            chance = chance**0.5 if fault == "the root of the ratio" else chance
            if fault == "likely enough":
                accepted = p[x] > 0.3
            else:
                accepted = rng.random() < chance
            if accepted:
                kept = (*kept, x)
                continue
            rest = np.maximum(p - of_draft, 0)
            if fault == "either difference":
                rest = np.abs(p - of_draft)
            if fault == "a token later":
                rest = softmax(target((*kept, x)), temperature)
            if fault == "again from the draft":
                rest = of_draft
            if fault == "rejected and kept":
                kept = (*kept, x)
                rest = softmax(target(kept), temperature)
            if fault == "the likeliest of the rest":
                return [*kept, int(np.argmax(rest))]
            rest = rest if rest.any() else p
            return [*kept, int(rng.choice(len(rest), p=rest / rest.sum()))]
        last = softmax((draft if fault == "a bonus of the draft" else target)(kept), temperature)
        return [*kept, int(rng.choice(len(last), p=last))]

    return step


STEPS = {
    "nine of ten": set(),
    "the root of the ratio": set(),
    "likely enough": set(),
    "either difference": set(),
    "a token later": set(),
    "again from the draft": set(),
    "rejected and kept": set(),
    "the likeliest of the rest": {"argmax at a temperature"},
    "a bonus of the draft": set(),
}
PLANTED = [
    *((check_packed_loss, f"loss: {x}", packed_loss(x), names) for x, names in LOSSES.items()),
    *((check_verifier, f"step: {x}", chain(x), names) for x, names in STEPS.items()),
]


@pytest.mark.parametrize(
    ("ask", "f", "names"),
    [(ask, f, names) for ask, _, f, names in PLANTED],
    ids=[x for _, x, _, _ in PLANTED],
)
def test_a_third_readers_fault(ask, f, names):
    report = ask(f)
    assert report.names("failed"), str(report)
    assert report.fingerprints == names, str(report)


@pytest.mark.parametrize(
    ("ask", "f"),
    [
        (check_verifier, chain()),
        (functools.partial(check_packed_loss, dtype="float64"), packed_loss()),
    ],
)
def test_without_a_fault_it_passes(ask, f):
    assert not ask(f).names("failed"), str(ask(f))
