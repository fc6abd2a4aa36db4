"""A language model small enough for any framework in ten lines, with its gradients by hand.

One attention head, no norm: x = embedding[token] + position[where it stands], y = x + attention of
x in x, logits = y · headᵀ. In float64, with everything a packed pass can do wrong as an argument.
"""

from typing import NamedTuple

import numpy as np

VOCABULARY = 11
WIDTH = 6
POSITIONS = 96  # more than any row needs: a wrong position is a wrong number, not an error


class Pass(NamedTuple):
    """One forward pass over n nodes, and m log-probabilities to be read from it.

    tokens, positions: (n,) int
    visible:  (n, n) bool: whether node i sees node j
    sources:  (m,) int: the nodes from whose logits they are read
    targets:  (m,) int: the tokens whose log-probabilities they are
    weights:  (m,): what each counts in the loss, −Σ weights · log-probability
    detached: (n, n) bool: whether node i sees node j without a gradient of j's key and value
    stopped:  (n,) bool: nodes that have no gradient at all
    cached:   (n, n) bool: whether node i sees node j's key and value as older parameters had them
    """

    tokens: np.ndarray
    positions: np.ndarray
    visible: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    detached: np.ndarray
    stopped: np.ndarray
    cached: np.ndarray


def random_parameters(seed: int) -> dict[str, np.ndarray]:
    """Float64 arrays by name: `embedding` and `head` (11, 6), `position` (96, 6), and `query`,
    `key`, `value`, `output` (6, 6), which multiply from the right: q = x · query."""
    rng = np.random.default_rng(seed)
    shapes = {"embedding": (VOCABULARY, WIDTH), "position": (POSITIONS, WIDTH)}
    shapes |= dict.fromkeys(("query", "key", "value", "output"), (WIDTH, WIDTH))
    shapes |= {"head": (VOCABULARY, WIDTH)}
    return {name: 0.6 * rng.normal(size=shape) for name, shape in shapes.items()}


def loss_and_gradients(parameters, nodes: Pass, older=None) -> tuple[float, dict]:
    """(−Σ weights · log-probability, its gradient by parameter), of one pass.

    older: the parameters of what is `cached`; None where nothing is
    """
    p = parameters
    scale = WIDTH**-0.5
    x = _inputs(p, nodes)
    q = x @ p["query"]
    keys, values = _seen(p, nodes, older)
    scores = np.einsum("id,ijd->ij", q, keys) * scale
    attention = _softmax(np.where(nodes.visible, scores, -np.inf))
    out = np.einsum("ij,ijd->id", attention, values)
    y = x + out @ p["output"]
    probabilities = _softmax(y @ p["head"].T)
    loss = -(nodes.weights * np.log(probabilities[nodes.sources, nodes.targets])).sum()

    # Backwards, line by line. d_y is the derivative of the loss by y.
    d_logits = np.zeros_like(probabilities)
    np.add.at(d_logits, (nodes.sources, nodes.targets), -nodes.weights)
    d_logits -= probabilities * d_logits.sum(axis=1, keepdims=True)
    d_logits[nodes.stopped] = 0
    d_y = d_logits @ p["head"]
    d_out = d_y @ p["output"].T
    d_attention = np.einsum("id,ijd->ij", d_out, values)
    mean = (attention * d_attention).sum(axis=1, keepdims=True)
    d_scores = attention * (d_attention - mean) * scale
    d_q = np.einsum("ij,ijd->id", d_scores, keys)
    reaches = ~(nodes.detached | nodes.cached | nodes.stopped)  # the key's node
    d_k = np.where(reaches, d_scores, 0).T @ q
    d_v = np.where(reaches, attention, 0).T @ d_out
    d_x = d_y + d_q @ p["query"].T + d_k @ p["key"].T + d_v @ p["value"].T
    gradients = {name: np.zeros_like(array) for name, array in p.items()}
    np.add.at(gradients["embedding"], nodes.tokens, d_x)
    np.add.at(gradients["position"], nodes.positions, d_x)
    gradients["query"] = x.T @ d_q
    gradients["key"] = x.T @ d_k
    gradients["value"] = x.T @ d_v
    gradients["output"] = out.T @ d_y
    gradients["head"] = d_logits.T @ y
    return float(loss), gradients


def _inputs(parameters, nodes: Pass) -> np.ndarray:
    """(n, width)"""
    return parameters["embedding"][nodes.tokens] + parameters["position"][nodes.positions]


def _seen(parameters, nodes: Pass, older) -> tuple[np.ndarray, np.ndarray]:
    """(n, n, width) twice: the key and the value of node j as node i sees them."""
    x = _inputs(parameters, nodes)
    now = [np.broadcast_to(x @ parameters[name], (len(x), *x.shape)) for name in ("key", "value")]
    if older is None:
        return tuple(now)
    x = _inputs(older, nodes)
    before = [x @ older[name] for name in ("key", "value")]
    return tuple(np.where(nodes.cached[..., None], b, a) for a, b in zip(now, before, strict=True))


def _softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)
