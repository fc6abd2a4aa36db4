"""What rounding does to merges, by order, dtype and the distribution of the keys (notebook 04).

The states of the shards are rounded to the dtype first, and the exact result is that of the
rounded states: what is measured is the merging alone, every operation of which rounds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from figures.canvas import styled
from figures.style import BLUE, GREY, ORANGE, RED, Figure, new_figure
from treeattn import AttentionState, finalize, merge, scan_states, tree_round

DTYPES = "float32", "float16", "bfloat16"
COUNTS = 2 ** np.arange(11)  # of merged states: 1, 2, 4, … 1,024
MEANS = (0.0, 1.0, 3.0)
SPREADS = (1.0, 4.0)
SEEDS = 5
QUERIES = 8
KEYS = 8
DV = 4

# Every operation rounds to its own dtype; and compiling 1,024 leaves stays quick.
AS_WRITTEN = {"xla_allow_excess_precision": False}
QUICKLY = AS_WRITTEN | {"xla_backend_optimization_level": 0}


class Rounding(NamedTuple):
    """Relative errors ‖out − exact‖ / ‖exact‖, and what they can be at worst (None: not known).

    Both (counts, means, spreads, seeds, queries), in units of the dtype's machine epsilon. A bound
    is infinite where none is proved.
    """

    error: np.ndarray
    bound: np.ndarray | None


@functools.cache
def shards() -> AttentionState:
    """States (p, means, spreads, seeds, queries) of p shards of 8 keys, in numpy's float64.

    Scores are N(0, spread²), values N(mean, 1); means and spreads share what was drawn.
    """
    shape = (int(COUNTS[-1]), KEYS, QUERIES)
    drawn = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        drawn.append((rng.standard_normal(shape), rng.standard_normal((*shape, DV))))
    s, v = (np.stack(x, 2) for x in zip(*drawn, strict=True))  # (p, keys, seeds, queries, …)
    s = s[:, :, None] * np.reshape(SPREADS, (-1, 1, 1))
    v = v[:, :, None] + np.reshape(MEANS, (-1, 1, 1, 1))
    m = s.max(1)
    w = np.exp(s - m[:, None])
    n = np.einsum("pkbrq,pkarqd->pabrqd", w, v)
    m, d = (np.broadcast_to(x[:, None], n.shape[:-1]) for x in (m, w.sum(1)))
    return AttentionState(m, d, n)


def _chain(states: AttentionState):
    """out of the first 1, 2, 4, … states, each prefix from the one before by one merge."""
    first = jax.tree.map(lambda x: x[0], states)
    rest = jax.tree.map(lambda x: x[1:], states)
    later = _prefixes(merge, first, rest)
    return finalize(jax.tree.map(lambda x, y: _at_counts(x, y), first, later))[0]


def _tree(states: AttentionState):
    """out of the binary trees over the first 1, 2, 4, … states."""
    levels = [states]
    while len(levels[-1].max) > 1:
        levels.append(tree_round(levels[-1], 2))
    return finalize(jax.tree.map(lambda *x: jnp.stack([level[0] for level in x]), *levels))[0]


def _output_chain(pairs):
    """The same as `_chain` in the gate's form: pairs (out, lse), merged and carried as such."""

    def add(a, b):
        gate = jax.nn.sigmoid(b[1] - a[1])[..., None]
        return a[0] + gate * (b[0] - a[0]), jnp.logaddexp(a[1], b[1])

    first, rest = (tuple(x[i] for x in pairs) for i in (0, slice(1, None)))
    return _at_counts(first[0], _prefixes(add, first, rest)[0])


def _prefixes(add, first, rest):
    """first + rest[0], first + rest[0] + rest[1], …, along the leading axis of each array."""

    def bits(tree):  # XLA:CPU slices no bfloat16: it would widen all of it at every step
        return jax.tree.map(lambda x: x.view(f"uint{8 * x.dtype.itemsize}"), tree)

    def numbers(tree):
        return jax.tree.map(lambda x, like: x.view(like.dtype), tree, first)

    def step(total, one):
        total = add(total, numbers(one))
        return total, bits(total)

    return numbers(jax.lax.scan(step, first, bits(rest))[1])


def _at_counts(first, later):
    return jnp.concatenate([first[None], later])[COUNTS - 1]


def _cumulative(weights, x):
    return np.cumsum(np.reshape(weights, weights.shape + (1,) * (x.ndim - weights.ndim)) * x, 0)


def _compare(run, states: AttentionState, dtype: str, given, merges=None) -> Rounding:
    """The error of `run(given)` against what `states`, in float64, stand for.

    merges: those that a state goes through at most, for each of COUNTS. Numerator and denominator
    then carry 4·merges + R roundings each, R the largest distance of a leaf's pivot from the last,
    and their quotient is off by Ku / (1 − Ku), K = 8·merges + 2R + 1, where Ku < 1: see the
    notebook.
    """
    eps = float(jnp.finfo(dtype).eps)
    options = QUICKLY if run is _tree else AS_WRITTEN
    out = np.asarray(jax.jit(run, compiler_options=options)(given), np.float64)
    m, d, n = states
    w = np.exp(m - m.max(0))
    total = _cumulative(w, d)[COUNTS - 1][..., None]
    exact, absolute = (_cumulative(w, x)[COUNTS - 1] / total for x in (n, abs(n)))
    error, size, scale = (np.linalg.norm(x, axis=-1) for x in (out - exact, exact, absolute))
    if merges is None:
        return Rounding(error / size / eps, None)
    reach = (np.maximum.accumulate(m) - np.minimum.accumulate(m))[COUNTS - 1]
    roundings = 8 * np.reshape(merges, (-1, 1, 1, 1, 1)) + 2 * reach + 1
    left = 1 - roundings * eps / 2  # u is half of epsilon
    gamma = np.where(left > 0, roundings / np.where(left > 0, left, 1), np.inf) / 2
    return Rounding(error / size / eps, gamma * scale / size)


@functools.cache
def rounding_errors() -> dict[tuple[str, str], Rounding]:
    """(dtype, order) -> errors, for the orders "chain", "tree" and "chain of (out, lse)"."""
    errors = {}
    for dtype in DTYPES:
        half = jax.tree.map(lambda x: jnp.asarray(x, jnp.dtype(dtype)), shards())  # noqa: B023
        exact = AttentionState(*(np.asarray(x, np.float64) for x in half))
        errors[dtype, "chain"] = _compare(_chain, exact, dtype, half, COUNTS - 1)
        errors[dtype, "tree"] = _compare(_tree, exact, dtype, half, np.log2(COUNTS))
        m, d, n = shards()
        half = [jnp.asarray(x, jnp.dtype(dtype)) for x in (n / d[..., None], m + np.log(d))]
        out, lse = (np.asarray(x, np.float64) for x in half)
        exact = AttentionState(lse, np.ones_like(lse), out)
        errors[dtype, "chain of (out, lse)"] = _compare(_output_chain, exact, dtype, half)
    return errors


def scan_is_a_tree(dtype: str) -> float:
    """The largest error of any of a scan's 128 prefixes, in ε: mean 0, spread 1, every seed."""
    half = AttentionState(*(jnp.asarray(x[:128, 0, 0], jnp.dtype(dtype)) for x in shards()))
    run = jax.jit(lambda x: finalize(scan_states(x))[0], compiler_options=QUICKLY)
    out = np.asarray(run(half), np.float64)
    m, d, n = (np.asarray(x, np.float64) for x in half)
    w = np.exp(m - m.max(0))
    exact = _cumulative(w, n) / _cumulative(w, d)[..., None]
    error = np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return np.median(error, -1).max() / float(jnp.finfo(dtype).eps)


STYLES = {
    "chain of (out, lse)": {"color": RED, "ls": (0, (4, 1.5)), "marker": "x", "ms": 4},
    "chain": {"color": ORANGE, "marker": "s", "ms": 3},
    "tree": {"color": BLUE, "marker": "o", "ms": 3},
}


@styled
def merge_rounding() -> Figure:
    """Rounding error against the number of states merged, by order, dtype and mean of values."""
    errors = rounding_errors()
    figure, axes = new_figure(9.0, 5.8, nrows=2, ncols=3, sharex=True, sharey=True)
    for row, mean in zip(axes, (0, 2), strict=True):
        for ax, dtype in zip(row, DTYPES, strict=True):
            for order, style in STYLES.items():
                error, bound = errors[dtype, order]
                over_seeds = np.median(error[:, mean, 0], -1)  # (counts, seeds)
                middle = np.median(over_seeds, 1)
                middle = np.where(middle > 0, middle, np.nan)  # nothing merged, nothing rounded
                ax.plot(COUNTS, middle, label=order, lw=1.3, **style)
                band = over_seeds.min(1), over_seeds.max(1)
                ax.fill_between(
                    COUNTS, *band, where=band[0] > 0, color=style["color"], alpha=0.25, lw=0
                )
                if bound is not None:
                    proved = np.isfinite(bound[:, mean, 0]).all((1, 2))
                    line = np.where(proved, np.median(bound[:, mean, 0], (1, 2)), np.nan)
                    ax.plot(COUNTS, line, ls=":", lw=1, color=style["color"])
                    if dtype != DTYPES[0]:
                        continue
                    at, shift = (5, (-6, 4)) if order == "chain" else (10, (0, -24))
                    ax.annotate(
                        f"{order}, at worst",
                        (COUNTS[at], line[at]),
                        shift,
                        ha="right",
                        textcoords="offset points",
                        fontsize=7.5,
                        color=style["color"],
                    )
            ax.axhline(1, color=GREY, lw=0.6)
            ax.set(xscale="log", yscale="log", ylim=(0.15, 3e4))
            ax.set_xticks([1, 4, 16, 64, 256, 1024], [1, 4, 16, 64, 256, 1024])
            ax.minorticks_off()
            ax.set_title(f"{dtype}, values of mean {MEANS[mean]:.0f}", fontsize=10)
        row[0].set_ylabel("relative error, in ε")
    for ax in axes[1]:
        ax.set_xlabel("states merged")
    axes[1, 0].legend(loc="upper left", fontsize=8, frameon=False)
    return figure.describe(
        """Six panels, float32, float16 and bfloat16 by values of mean 0 and mean 3: the relative
        error in machine epsilons against 1 to 1,024 merged states. Trees stay near one epsilon
        in all. Chains rise slowly to about five, but to ninety in bfloat16 with mean 0. Chains
        of (out, lse) lie above the chain with mean 0 and below it with mean 3. Dotted worst-case
        bounds lie far above. The chain's rises like p; it ends at 128 states in float16 and at 32
        in bfloat16, and nothing is proved beyond. The tree's rises like log p with mean 3,
        and faster with mean 0, where values cancel."""
    )


FIGURES = {"merge_rounding": merge_rounding}
