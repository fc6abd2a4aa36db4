"""Train the recurrent drafter for the packaged model: half an hour on two quiet cores.

    python -m labs.drafter.train                      all of it
    python -m labs.drafter.train --tokens 300000      with more text

1. Sampling (`sample.py`): texts of the model itself, with its states and likeliest tokens.
2. Distillation (`distil.py`), judged every so many updates by the tokens a step that a chain of
   four gets on texts about topics that were held out; the best parameters are written.

Both go on where they stopped: shards of text, and a checkpoint, lie in the folder (build/drafter).
"""

import argparse
import datetime
import json
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from labs.drafter import distil
from labs.drafter.recurrent import PACKAGED, Drafter, Shared, borrow, save_drafter
from labs.drafter.sample import sample, shards_of
from treeattn_llama import Llama

CHAIN = 4
UPDATES, BATCH, RATE = 3000, 64, 2e-3
DEPTH, INNER = 2, 384  # residual layers, and their inner width
CUT = 8192  # tokens of the head
SOFT, NEAR = 0.8, 0.2  # of the loss: the model's distribution against the text, and its states
EVERY = 200  # updates between judgements,
JUDGED_TOKENS = 3000  # on so many tokens
SEED = 0
RESULTS = Path(__file__).parent / "results" / "training.json"


def held_out_chat(texts: distil.Texts, most: int) -> list[int]:
    """Where the first held-out answers begin that have together so many tokens."""
    begins = np.flatnonzero(np.diff(texts.end, prepend=-1))
    begins = [b for b in begins.tolist() if texts.kind[b] == "chat"]
    sizes = np.cumsum([texts.end[b] - b for b in begins])
    return [b for b, size in zip(begins, sizes, strict=True) if size <= most]


def judged(drafter, shared, texts: distil.Texts, begins: list[int], width=1, length=CHAIN) -> float:
    """Tokens a step on these texts."""
    counts = np.zeros(len(texts.after), int)
    at = np.concatenate([np.arange(b, texts.end[b] - 1) for b in begins])
    counts[at] = distil.accepted(drafter, shared, texts, at, width, length)
    return distil.tokens_a_step(texts, begins, counts)


class Run:
    """Parameters, the optimizer's moments, and what was measured so far; on disk, too."""

    def __init__(self, path: Path, drafter: Drafter, adam):
        self.path = path
        self.drafter = drafter
        self.moments = adam.init(drafter)
        self.best = drafter
        self.done = 0
        self.curve = []
        self.tokens = 0
        if path.exists():
            with np.load(path) as file:
                self.done = int(file["done"])
                self.curve = json.loads(str(file["curve"]))
                arrays = [jnp.asarray(file[f"leaf{i}"]) for i in range(len(self.leaves()))]
            shape = jax.tree.structure((self.drafter, self.moments, self.best))
            self.drafter, self.moments, self.best = jax.tree.unflatten(shape, arrays)

    def leaves(self) -> list:
        return jax.tree.leaves((self.drafter, self.moments, self.best))

    def judge(self, shared, texts, begins, value: float) -> None:
        """Note how good the parameters are, and keep the best of them."""
        good = judged(self.drafter, shared, texts, begins)
        if not self.curve or good > max(point["tokens_a_step"] for point in self.curve):
            self.best = jax.tree.map(jnp.copy, self.drafter)
        self.curve.append(
            {"updates": self.done, "loss": round(value, 4), "tokens_a_step": round(good, 4)}
        )
        arrays = {f"leaf{i}": np.asarray(x) for i, x in enumerate(self.leaves())}
        new = self.path.with_suffix(".part.npz")
        np.savez(new, tokens=shared.tokens, done=self.done, curve=json.dumps(self.curve), **arrays)
        new.replace(self.path)


def train(folder: Path) -> tuple[Run, Shared]:
    model = Llama.load()
    learn, held = distil.read_shards(shards_of(folder))
    path = folder / "drafter.npz"
    tokens = distil.frequent_tokens(learn, CUT)
    if path.exists():  # there may be more text now than at first
        with np.load(path) as file:
            tokens = file["tokens"]
    norm = np.asarray(model.weights.norm, np.float32)
    d = model.config.width
    row = np.full(model.config.vocabulary, -1, np.int32)
    row[tokens] = np.arange(len(tokens))
    shared = borrow(model, tokens)
    del model
    learn, held = (distil.prepared(texts, tokens, norm) for texts in (learn, held))
    inside = (row[held.after] >= 0).mean()
    begins = held_out_chat(held, JUDGED_TOKENS)
    print(
        f"{len(learn.after):,} tokens to learn from, {len(held.after):,} held out, of which the "
        f"head's {len(tokens):,} tokens are {inside:.1%}",
        flush=True,
    )
    adam = distil.optimizer(UPDATES, RATE)
    key = jax.random.key(SEED)
    run = Run(path, distil.initial(key, d, DEPTH, INNER), adam)
    run.tokens = len(learn.after)
    starts = np.flatnonzero(np.arange(len(learn.after)) + 1 < learn.end)
    began = time.time()
    value = float("nan")
    already = run.done
    with tqdm(total=UPDATES, initial=run.done, unit="update", mininterval=5) as bar:
        while run.done < UPDATES:
            rng = np.random.default_rng([SEED, run.done])
            batch = distil.examples(learn, rng.choice(starts, BATCH), row)
            run.drafter, run.moments, value = distil.update(
                run.drafter, run.moments, shared, batch, SOFT, NEAR, adam=adam
            )
            run.done += 1
            bar.update()
            if run.done == already + 5:
                left = (UPDATES - run.done) * (time.time() - began) / 5 / 60
                tqdm.write(f"about {left:.0f} minutes to go, compiling included")
            if run.done % EVERY == 0 or run.done == UPDATES:
                run.judge(shared, held, begins, float(value))
                tqdm.write(json.dumps(run.curve[-1]))
    return run, shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/drafter"))
    parser.add_argument("--tokens", type=int, default=70_000, help="to sample")
    parser.add_argument("--out", type=Path, default=PACKAGED)
    options = parser.parse_args()
    sampling = options.tokens / 100 / 60
    training = UPDATES * BATCH / 64 / 3.5 / 60
    print(f"About {sampling:.0f} minutes of sampling, {training:.0f} of training, on two cores")
    sample(options.folder, options.tokens)
    run, shared = train(options.folder)
    save_drafter(options.out, run.best, shared, "SmolLM2-135M-Instruct")
    if options.out == PACKAGED:
        about = {
            "date": datetime.date.today().isoformat(),
            "jax": version("jax"),
            "optax": version("optax"),
            "tokens": run.tokens,
        }
        told = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        told["training"] = about | {"curve": run.curve}
        RESULTS.write_text(json.dumps(told) + "\n", encoding="utf-8")
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
