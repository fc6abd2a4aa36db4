"""Figures of notebook 08: a real Llama over a sharded cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from figures.canvas import styled
from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, new_figure
from treeattn import attend, finalize
from treeattn_llama import Llama

TEXT = (
    "As every child knows, Paris is the capital of France, and the river Seine runs through it. "
    "Rome is the capital of Italy, on the Tiber. When the train had left, the old man said: the "
    "capital of France is"
)
# On its side a comma would hardly be seen, with quotes or without.
SIGNS = {",": "(comma)", ".": "(full stop)", ":": "(colon)"}


@functools.cache
def packaged_model() -> Llama:
    return Llama.load(None)


@styled
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
            fullest = used.sum(1).max()
            emptiest = used.sum(1).min()
            ax.set_title(f"{n} tokens: {emptiest} to {fullest} per shard", fontsize=9)
        line[0].set_ylabel(f"{name}\ndevice")
    for ax in axes[-1]:
        ax.set_xlabel("row of the shard")
    figure.suptitle(
        "Dealt out like cards, a growing text keeps its shards equally full",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure.describe(
        f"Two rows of {len(lengths)} grids, one row of cells for each of {p} devices, for texts of "
        f"{', '.join(map(str, lengths))} tokens. Above, contiguous shards: the first devices are "
        "full and the last ones empty. Below, stripes: every device holds equally many tokens, up "
        "to one."
    )


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


@styled
def head_over_shards(
    model: Llama | None = None, text: str = TEXT, layer: int = 22, head: int = 4, p: int = 8
) -> Figure:
    """One real head's attention from the last token, and what each of p shards contributes."""
    model = model or packaged_model()
    ids = model.tokenizer.encode(text)
    words = [model.tokenizer.decode([i]).strip() or "·" for i in ids]
    q, k, v = list(model.layers_qkv(np.array([ids])))[layer]
    weights = weights_of_last(q, k)[head]
    lse, total = shard_lses(q, k, v, p)
    shares = np.exp(lse - total)[:, head]
    top = int(weights.argmax())
    most = int(shares.argmax())

    figure, (upper, lower) = new_figure(7.2, 5.2, nrows=2, height_ratios=[1.5, 1])
    _emphasized(upper, weights, np.arange(len(ids)) % p == most)
    for i, weight in enumerate(weights):
        upper.text(i, weight + 0.006, str(i % p), ha="center", fontsize=7, color=INK)
    ticks = [SIGNS.get(word, word) for word in words]
    upper.set_xticks(range(len(ids)), ticks, rotation=90, fontsize=8)
    upper.set(xlim=(-0.8, len(ids) - 0.2), ylabel="attention weight")
    upper.set_title(
        f"Layer {layer}, head {head}, after “… {' '.join(words[-4:])}”: "
        f"the largest weight, {weights[top]:.2f}, is on “{words[top]}”"
    )
    _emphasized(lower, shares, np.arange(p) == most)
    for r, share in enumerate(shares):
        lower.text(r, share + 0.006, f"{share:.2f}", ha="center", fontsize=8, color=INK)
    lower.set_xticks(range(p))
    lower.set(xlabel="device", ylabel="weight in the merge", ylim=(0, 1.15 * shares.max()))
    lower.set_title(f"The {p} states merge with these weights; device {most} has “{words[top]}”")
    return figure.describe(
        f"Above, the attention weights of one head over the {len(ids)} tokens of a text, each bar "
        f"labelled with the device, 0 to {p - 1}, on which its token lies; the highest is “"
        f"{words[top]}”, {weights[top]:.2f}, on device {most}. Below, the merge weights of the "
        f"{p} devices: device {most} has {shares[most]:.2f}."
    )


def _emphasized(ax, heights, chosen) -> None:
    """Bars, of which the chosen ones are dark and hatched."""
    bars = ax.bar(range(len(heights)), heights, width=0.8, color=PALE, edgecolor=GREY, lw=0.6)
    for bar, is_chosen in zip(bars, chosen, strict=True):
        if is_chosen:
            bar.set(facecolor=BLUE, hatch="///", edgecolor="white")


@jax.jit
def weights_of_last(q, k):
    """The last query's attention weights, (heads, keys), of layers_qkv's q and k of one text."""
    d = q.shape[-1]
    q = q[0, -1].reshape(k.shape[2], -1, d)
    scores = jnp.einsum("kgd,nkd->kgn", q, k[0]).reshape(-1, k.shape[1]) * d**-0.5
    return jax.nn.softmax(scores)


def sink_weights(model: Llama, text: str = TEXT, p: int = 8) -> dict[str, np.ndarray]:
    """After `text`, the last query's weight on token 0, and the merge weight of the shard that
    holds it, of p stripes and of p contiguous shards; each (layers, heads)."""
    found = {"token 0": [], "stripes": [], "contiguous": []}
    for q, k, v in model.layers_qkv(np.array([model.tokenizer.encode(text)])):
        found["token 0"].append(weights_of_last(q, k)[:, 0])
        for name in ("stripes", "contiguous"):
            lse, total = shard_lses(q, k, v, p, striped=name == "stripes")
            found[name].append(np.exp(lse - total)[0])
    return {name: np.array(rows) for name, rows in found.items()}


@styled
def shard_shares(model: Llama | None = None, text: str = TEXT, p: int = 8) -> Figure:
    """The first token's weight in each head of each layer, and the merge weight of its shard."""
    found = sink_weights(model or packaged_model(), text, p)
    layers = range(len(found["token 0"]))
    median = {name: np.median(rows, axis=1) for name, rows in found.items()}
    figure, (upper, lower) = new_figure(7.2, 5.0, nrows=2, sharex=True, sharey=True)
    for head in found["token 0"].T:
        upper.plot(layers, head, "o", color=GREY, ms=3, alpha=0.7)
    upper.plot(layers, median["token 0"], "o-", color=BLUE, ms=5)
    upper.set(ylabel="weight of token 0", ylim=(-0.03, 1.03))
    upper.set_title("The first token is a sink: dots are heads, the line is their median")
    for name, color, style in (("contiguous", ORANGE, "s--"), ("stripes", GREEN, "^-")):
        lower.plot(layers, median[name], style, color=color, ms=5, label=f"device 0, {name}")
    lower.plot(layers, median["token 0"], "o-", color=BLUE, ms=3, lw=1, label="token 0 alone")
    lower.legend(fontsize=9, loc="upper left")
    lower.set(xlabel="layer", ylabel="weight in the merge")
    lower.set_title(f"The shard that holds it weighs at least as much ({p} shards, medians)")
    late = found["token 0"][18:]
    return figure.describe(
        "Two panels over the layers. Above, the last query's attention weight on the first token, "
        f"a dot for each head, and the median: small in the first layers, {np.median(late):.2f} "
        "over layers 18 to 29. Below, the median merge weight of the device that holds that "
        "token, for contiguous shards and for stripes; both run above the token's own weight."
    )


@styled
def score_ranges(model: Llama | None = None, text: str = TEXT) -> Figure:
    """Each layer's largest score, scaled and not, against what exp can take."""
    model = model or packaged_model()
    tokens = np.array([model.tokenizer.encode(text)])
    largest = [float(largest_score(q, k)) for q, k, _ in model.layers_qkv(tokens)]
    raw = np.array(largest) * model.config.head_dim**0.5
    figure, ax = new_figure(7.2, 3.2)
    layers = range(model.config.layers)
    ax.plot(layers, raw, "o-", color=BLUE, markersize=4)
    ax.plot(layers, largest, "s--", color=ORANGE, markersize=4)
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
    ax.set_title(
        "exp of real scores overflows in float16; without the scale, in float32", loc="left"
    )
    return figure.describe(
        "Each layer's largest score on a logarithmic axis, without and with the division by √d. "
        f"Unscaled, the largest is {raw.max():.0f}, above the line at 88.7 where exp overflows in "
        f"float32; scaled, {max(largest):.1f}, above the line at 11.1 for float16."
    )


@jax.jit
def largest_score(q, k):
    """The largest scaled score of any query of the text with a key that it may see."""
    b, l, _, d = q.shape
    q = q.reshape(b, l, k.shape[2], -1, d)
    scores = jnp.einsum("blkgd,bnkd->bkgln", q, k) * d**-0.5
    return jnp.max(jnp.where(jnp.tri(l, dtype=bool), scores, -jnp.inf))


FIGURES = {
    "llama_striped_cache": striped_cache,
    "llama_head_over_shards": head_over_shards,
    "llama_shard_shares": shard_shares,
    "llama_score_ranges": score_ranges,
}
