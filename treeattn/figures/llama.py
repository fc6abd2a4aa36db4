"""Figures of notebook 08: a real Llama over a sharded cache."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from treeattn.figures.measured import measured
from treeattn.figures.papers import TABLE_1_H100, TABLE_1_MI300X, TABLE_2_RTX4090
from treeattn.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    new_figure,
)
from treeattn.idea.state import finalize
from treeattn.kernel.attend import attend
from treeattn.llama.model import Llama

TEXT = (
    "As every child knows, Paris is the capital of France, and the river Seine runs through it. "
    "Rome is the capital of Italy, on the Tiber. When the train had left, the old man said: the "
    "capital of France is"
)
SHARDS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, INK)


@functools.cache
def packaged_model() -> Llama:
    return Llama.load(None)


def striped_cache(lengths=(5, 13, 27), capacity: int = 32, p: int = 8) -> Figure:
    """Which rows of which shard hold tokens, as a text grows: contiguous shards, and stripes."""
    figure, axes = new_figure(7.2, 3.6, nrows=2, ncols=len(lengths), sharex=True, sharey=True)
    rows = capacity // p
    token = np.arange(capacity)
    layouts = {"contiguous": token.reshape(p, rows), "striped": token.reshape(rows, p).T}
    for (name, tokens), line in zip(layouts.items(), axes, strict=True):
        for n, ax in zip(lengths, line, strict=True):
            used = tokens < n
            ax.imshow(np.where(used, 0.55, 0.06), cmap="Blues", vmin=0, vmax=1, aspect="auto")
            for (shard, row), t in np.ndenumerate(tokens):
                if t < n:
                    ax.text(row, shard, str(t), ha="center", va="center", fontsize=7, color=INK)
            ax.set_xticks(np.arange(rows + 1) - 0.5, minor=True)
            ax.set_yticks(np.arange(p + 1) - 0.5, minor=True)
            ax.grid(which="minor", color="white", linewidth=1.5)
            ax.tick_params(which="both", length=0)
            ax.set_xticks(range(rows))
            ax.set_yticks(range(p))
            for side in ax.spines.values():
                side.set_visible(False)
            fullest, emptiest = used.sum(1).max(), used.sum(1).min()
            ax.set_title(f"{n} tokens: {emptiest} to {fullest} a shard", fontsize=9)
        line[0].set_ylabel(f"{name}\ndevice")
    for ax in axes[-1]:
        ax.set_xlabel("row of the shard")
    figure.suptitle("Dealt out like cards, a growing text keeps its shards equally full",
                    x=0.01, ha="left", fontsize=11)  # fmt: skip
    return figure


def shard_lses(q, k, v, p: int = 8, striped: bool = True):
    """The last query's lse after each of p shards (p, heads), and after all (heads,)."""
    lse = _shard_lses(q, k, v, p=p, striped=striped)
    return np.asarray(lse), np.logaddexp.reduce(lse, axis=0)


@functools.partial(jax.jit, static_argnames=("p", "striped"))
def _shard_lses(q, k, v, *, p, striped):
    n = k.shape[1]
    owner = jnp.arange(n) % p if striped else jnp.arange(n) // -(-n // p)

    def shard_lse(rank):
        return finalize(attend(q[:, -1:], k, v, mask=(owner == rank)[None, None, None]))[1][0, 0]

    return jax.lax.map(shard_lse, jnp.arange(p))


def head_over_shards(
    model: Llama | None = None, text: str = TEXT, layer: int = 22, head: int = 4, p: int = 8
) -> Figure:
    """One real head's attention from the last token, and what each of p shards contributes."""
    model = model or packaged_model()
    ids = model.tokenizer.encode(text)
    words = [model.tokenizer.decode([i]).strip() or "·" for i in ids]
    q, k, v = model.layer_qkv(np.array([ids]), layer)
    group = q.shape[2] // k.shape[2]
    scores = np.asarray(k[0, :, head // group] @ q[0, -1, head]) * q.shape[-1] ** -0.5
    weights = np.exp(scores - np.logaddexp.reduce(scores))
    lse, total = shard_lses(q, k, v, p)
    shares = np.exp(lse - total)[:, head]

    figure, (left, right) = new_figure(10.0, 3.4, ncols=2, width_ratios=[3.6, 1])
    colors = [SHARDS[i % p] for i in range(len(ids))]
    left.bar(range(len(ids)), weights, color=colors, width=0.8)
    left.set_xticks(range(len(ids)), words, rotation=90, fontsize=7)
    left.set_xlim(-0.8, len(ids) - 0.2)
    left.set_ylabel("attention weight")
    top = int(weights.argmax())
    left.set_title(
        f"“… {' '.join(words[-4:])}”: head {head} of layer {layer} looks back at “{words[top]}”",
        loc="left",
    )
    right.barh(range(p), shares, color=SHARDS[:p])
    right.invert_yaxis()
    right.set_yticks(range(p), [f"device {r}" for r in range(p)], fontsize=8)
    right.set_xlabel("weight in the merge")
    right.set_title(f"device {top % p} weighs most", loc="left")
    return figure


def shard_shares(model: Llama | None = None, text: str = TEXT, p: int = 8) -> Figure:
    """Device 0's merge weight for each head of each layer: contiguous shards, and stripes."""
    model = model or packaged_model()
    tokens = np.array([model.tokenizer.encode(text)])
    first = {"contiguous": [], "striped": []}
    for q, k, v in model.layers_qkv(tokens):
        for name, shares in first.items():
            lse, total = shard_lses(q, k, v, p, striped=name == "striped")
            shares.append(np.exp(lse - total)[0])
    figure, axes = new_figure(7.2, 3.2, nrows=2, sharex=True)
    for ax, (name, shares) in zip(axes, first.items(), strict=True):
        image = ax.imshow(np.array(shares).T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        ax.set_ylabel(f"{name}\nhead")
        ax.set_yticks(range(0, model.config.heads, 2))
    axes[-1].set_xlabel("layer")
    figure.colorbar(image, ax=axes, label="merge weight of device 0")
    axes[0].set_title(
        "Whichever shard holds the first token carries most later heads: a sink", loc="left"
    )
    return figure


def score_ranges(model: Llama | None = None, text: str = TEXT) -> Figure:
    """Each layer's largest score, scaled and not, against what exp can take."""
    model = model or packaged_model()
    tokens = np.array([model.tokenizer.encode(text)])
    largest = [float(largest_score(q, k)) for q, k, _ in model.layers_qkv(tokens)]
    raw = np.array(largest) * model.config.head_dim**0.5
    figure, ax = new_figure(7.2, 3.2)
    layers = range(model.config.layers)
    ax.plot(layers, raw, "o-", color=BLUE, markersize=4)
    ax.plot(layers, largest, "o-", color=ORANGE, markersize=4)
    ax.text(len(raw) - 0.6, raw[-1], "q·k", color=BLUE, va="center")
    ax.text(len(raw) - 0.6, largest[-1], "q·k / √d", color=ORANGE, va="center")
    for limit, name in ((np.log(3.4028e38), "float32, bfloat16"), (np.log(65504), "float16")):
        ax.axhline(limit, color=RED, linewidth=1, linestyle="--")
        ax.text(16, limit * 1.04, f"exp overflows in {name}", color=RED, fontsize=8, va="bottom")
    ax.set_yscale("log")
    ax.set_yticks([5, 10, 20, 50, 100, 200], [5, 10, 20, 50, 100, 200])
    ax.minorticks_off()
    ax.set_xlim(-0.7, len(raw) + 3)
    ax.set_xlabel("layer")
    ax.set_ylabel("largest score in the text")
    ax.set_title("Real scores overflow an unguarded exp", loc="left")
    return figure


@jax.jit
def largest_score(q, k):
    """The largest scaled score of any query of the text with a key that it may see."""
    b, l, _, d = q.shape
    q = q.reshape(b, l, k.shape[2], -1, d)
    scores = jnp.einsum("blkgd,bnkd->bkgln", q, k) * d**-0.5
    return jnp.max(jnp.where(jnp.tri(l, dtype=bool), scores, -jnp.inf))


# v2, Tables 1 and 2.
PAPER = {
    "8 × H100, Llama 3.1 8B": TABLE_1_H100,
    "4 × MI300X, Llama 3.1 8B": TABLE_1_MI300X,
    "2 × RTX 4090, Llama 3.2 1B": TABLE_2_RTX4090,
}


def _bars(ax, labels, tree, ring) -> None:
    """Tree and ring side by side, with their ratio above."""
    x, tree, ring = np.arange(len(labels)), np.array(tree), np.array(ring)
    ax.bar(x - 0.2, tree, 0.38, color=BLUE, label="tree")
    ax.bar(x + 0.2, ring, 0.38, color=ORANGE, label="ring")
    for i, ratio in enumerate(ring / tree):
        ax.text(i, max(ring[i], tree[i]) * 1.02, f"×{ratio:.1f}", ha="center", fontsize=8)
    ax.set_xticks(x, labels)
    ax.set_xlabel("context")


def decode_times(results: Mapping | None = None) -> Figure:
    """Milliseconds of a decoding step by context and number of simulated devices.

    results: what benchmarks/llama.py wrote; a checkout's when None, ValueError where there is none.
    """
    rows = (results or measured("llama"))["devices"]
    counts = sorted({r["devices"] for r in rows})
    figure, axes = new_figure(8.0, 3.2, ncols=len(counts), sharey=True)
    for ax, p in zip(axes, counts, strict=True):
        mine = [r for r in rows if r["devices"] == p]
        labels = [f"{r['context'] // 1024}k" for r in mine]
        _bars(ax, labels, [r["tree"] for r in mine], [r["ring"] for r in mine])
        ax.set_title(f"{p} devices", fontsize=9, loc="left")
    axes[0].set_ylabel("milliseconds a token")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.suptitle("Decoding a token: the ring's extra work grows with context and devices",
                    x=0.01, ha="left", fontsize=11)  # fmt: skip
    return figure


def tree_against_ring(results: Mapping | None = None) -> Figure:
    """Seconds for a prompt and ten tokens: measured here, and as the paper printed them.

    results: as for `decode_times`.
    """
    rows = (results or measured("llama"))["table"]
    here = {r["context"] / 1024: (r["tree"], r["ring"]) for r in rows}
    panels = {"here: 8 simulated, SmolLM2 135M": here}
    for name, table in PAPER.items():
        panels[name] = {r.context / 1000: (r.tree.mean, r.ring.mean) for r in table}
    figure, axes = new_figure(10.0, 3.2, ncols=len(panels))
    for ax, (name, times) in zip(axes, panels.items(), strict=True):
        _bars(ax, [f"{c:g}k" for c in times], *zip(*times.values(), strict=True))
        ax.set_title(name, fontsize=9, loc="left")
    axes[0].set_ylabel("seconds")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.suptitle(
        "A prompt and ten more tokens: measured here, and in the paper's Tables 1 and 2",
        x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    return figure


FIGURES = {
    "llama_striped_cache": striped_cache,
    "llama_head_over_shards": head_over_shards,
    "llama_shard_shares": shard_shares,
    "llama_score_ranges": score_ranges,
    "llama_decode_times": decode_times,
    "llama_tree_against_ring": tree_against_ring,
}
