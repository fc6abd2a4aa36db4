"""How fast the packaged Llama runs, against Hugging Face transformers and against itself.

    python benchmarks/llama.py                 all of it; a few minutes
    python benchmarks/llama.py single          one device, in turn with transformers and llama.cpp,
                                               where they (torch; llama-cpp-python) are installed
    python benchmarks/llama.py devices table
    python benchmarks/llama.py steps           what verifying several candidates at once costs
    python benchmarks/llama.py int8            weights of 8 bits, in turn with those of float32
    python benchmarks/llama.py cache           what a cache in 8 bits changes of what is said

Everything is measured in one process, in turn, after a first run that compiles. `single` compares
prefill and decoding with transformers on the same float32 weights, and with llama.cpp, which
computes with the file's 4-bit weights and keeps its cache in float16. `devices` has the time of a
decoding step by context and number of simulated devices: tree against ring, and the weights sharded
beside the cache; `table` is the experiment of the paper's Table 1, a prompt and ten more tokens.
Caches of a given context are filled with random numbers: a step's time does not depend on them.
`steps` has the time of a step of 1 … 64 packed candidates, with positions and a tree mask, all of
their logits computed, and its ratio to a step of one: of the fastest of each, and the median over
the rounds. `int8` has the decoding, prefill and steps of both models, decoding also of the exact
model, decoding and prefill of llama.cpp with weights of 4 and of 8 bits (made of those of 4): the
fastest of each, the ratio of processor times (which other programs disturb less), and how far the
two agree on 2,560 tokens of English with code, Python's own documentation; kept for each version
of JAX that it was run with. `cache` has that agreement for caches in int8 and in float8_e4m3fn, and
the bytes of a token's keys and values. Writes benchmarks/results/llama.json.
"""

import argparse
import ctypes
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import platform
import pydoc_data.topics
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from treeattn import Llama, ancestor_mask, depths, kv_mesh, simulate_devices
from treeattn_llama import Cache, generate, open_checkpoint, packaged_model

RESULTS = Path(__file__).parent / "results" / "llama.json"
REPEAT = (
    "Repeat this text exactly: The old lighthouse stands on a rock a mile from the harbour. It was "
    "built by two brothers, who carried every stone across at low tide."
)
ROOM = 32  # tokens that a cache has room for besides its context


def timed(f) -> float:
    """Seconds that f takes, its result included."""
    began = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - began


def in_turn(candidates: dict, rounds: int) -> dict[str, float]:
    """The median time of each candidate, measured in turn, after a round that compiles."""
    return {name: statistics.median(t) for name, t in all_in_turn(candidates, rounds).items()}


def all_in_turn(candidates: dict, rounds: int) -> dict[str, list[float]]:
    """All times of each candidate."""
    for f in candidates.values():
        timed(f)
    times = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, f in candidates.items():
            times[name].append(timed(f))
    return times


def full_cache(model: Llama, context: int) -> Cache:
    """A cache that holds `context` random tokens, with ROOM for more."""
    empty = model.new_cache(1, context + ROOM)
    rng = np.random.default_rng(0)
    content = rng.normal(size=empty.k[0].shape).astype(np.float32)
    fill = jax.jit(lambda x: x + content, donate_argnums=0)
    k, v = (tuple(fill(x) for x in layers) for layers in (empty.k, empty.v))
    return Cache(k, v, empty.lengths + np.int32(context))


def decoder(model: Llama, context: int, n: int):
    """A function that decodes n tokens greedily, always after the same context."""
    cache = [full_cache(model, context)]

    def run():
        c = cache[0]
        lengths = c.lengths
        token = np.array([[1]])
        for _ in range(n):
            logits, c = model.step(token, c, last=True)
            token = np.asarray(logits).argmax(-1)[:, None]
        cache[0] = c._replace(lengths=lengths)  # forget them again
        return logits

    return run


# transformers, with the same weights


def transformers_model():
    """The packaged checkpoint as transformers' LlamaForCausalLM, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint()
    c = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocabulary,
            hidden_size=c.width,
            intermediate_size=c.mlp_width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            max_position_embeddings=c.context,
            rms_norm_eps=c.norm_epsilon,
            tie_word_embeddings=c.tied,
            rope_parameters={"rope_type": "default", "rope_theta": c.rotary_base},
        )
    ).eval()
    state = {name: torch.from_numpy(checkpoint.read(name).copy()) for name in checkpoint.shapes}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def transformers_runs(model, context: int, n: int):
    """(prefill of `context` tokens, decoding of n tokens after a random context)."""
    import torch
    from transformers import DynamicCache

    c = model.config
    tokens = torch.arange(context)[None] % 1000 + 100
    shape = (1, c.num_key_value_heads, context, c.hidden_size // c.num_attention_heads)
    content = torch.randn(shape)

    @torch.inference_mode()
    def prefill():
        return model(tokens, use_cache=True, logits_to_keep=1).logits[0, -1].numpy()

    cache = DynamicCache()
    for layer in range(c.num_hidden_layers):
        cache.update(content.clone(), content.clone(), layer)

    @torch.inference_mode()
    def decode():
        token = torch.tensor([[1]])
        for _ in range(n):
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1)[:, None]
        cache.crop(-n)  # forget them again
        return out.logits.numpy()

    return prefill, decode


def in_8_bits(path: Path, folder: str) -> Path:
    """The checkpoint with llama.cpp's weights of 8 bits, a scale for each 32, in that folder."""
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    how.allow_requantize = True
    out = Path(folder) / "8_bits.gguf"
    files = (str(x).encode() for x in (path, out))
    if llama_cpp.llama_model_quantize(*files, ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp could not write {path} in 8 bits")
    return out


def llama_cpp_runs(path: Path, prompt: list[int], contexts, n: int):
    """(prefill of the prompt, {context: decoding of n tokens after it}), by llama.cpp's kernels
    for the weights of that file. Prefill returns the last token's logits."""
    import llama_cpp

    longest = max(contexts)
    threads = os.cpu_count()
    model = llama_cpp.Llama(
        str(path),
        n_ctx=longest + ROOM,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def forget(after: int):  # what comes after so many tokens
        model.n_tokens = after
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(model.ctx), 0, after, -1)

    def prefill():
        forget(0)
        model.eval(prompt)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return np.ctypeslib.as_array(logits, (model.n_vocab(),)).copy()

    model.eval([i % 1000 + 100 for i in range(longest)])

    def decode(context):
        forget(context)
        for _ in range(n):
            model.eval([1])

    return prefill, {context: functools.partial(decode, context) for context in contexts}


def single(model: Llama, rounds: int = 5, n: int = 4) -> dict:
    """Tokens per second of one device, of transformers and of llama.cpp."""
    contexts = (8192, 2048, 64)
    find = importlib.util.find_spec
    prompt = (np.arange(1024) % 1000 + 100).tolist()
    first = {"treeattn": lambda: model.prefill([prompt], model.new_cache(1, 1024))[0]}
    runs = {context: {"treeattn": decoder(model, context, n)} for context in contexts}
    if find("transformers") and find("torch"):
        other = transformers_model()
        first["transformers"] = transformers_runs(other, 1024, n)[0]
        for context in contexts:
            runs[context]["transformers"] = transformers_runs(other, context, n)[1]
    if find("llama_cpp"):
        cpp, after = llama_cpp_runs(packaged_model(), prompt, contexts, n)
        for context in contexts:
            runs[context]["llama.cpp, 4 bit"] = after[context]
    result = {}

    def report(name, speeds):
        result[name] = speeds
        print(name, {k: round(v, 1) for k, v in speeds.items()}, "tokens/s", flush=True)

    for context in contexts:  # falling: llama.cpp forgets what comes after
        times = in_turn(runs[context], rounds)
        report(f"decode at {context}", {k: n / t for k, t in times.items()})
    if find("llama_cpp"):  # last: it overwrites the cache
        first["llama.cpp, 4 bit"] = cpp
    ours = np.asarray(first["treeattn"]()).ravel()
    for name in first.keys() - {"treeattn"}:
        print(f"{name}: logits differ by at most {np.abs(ours - first[name]()).max():.1e}")
    # Some are close: more rounds, so that the median tells them apart.
    report("prefill 1024", {k: 1024 / t for k, t in in_turn(first, 3 * rounds).items()})
    return result


def devices(model: Llama, rounds: int = 7, n: int = 2) -> list[dict]:
    """Milliseconds of a decoding step, by context and number of devices.

    Tree and ring over a sharded cache, each device with all weights; the weights sharded as well,
    by two merges; and one device of the same process, in turn with them.
    """
    rows = []
    for p, context in tqdm([(p, c) for p in (2, 4, 8) for c in (1024, 4096)]):
        mesh = kv_mesh(jax.devices()[:p])
        placed = model.on(mesh)
        sharded = model.on(mesh, shard_weights=True, attention="tree")
        models = {"one device": model, "tree": placed, "ring": placed.using("ring")} | {
            f"sharded weights, {a}": sharded.using(a) for a in ("reduce_scatter", "all_to_all")
        }
        runs = {name: decoder(one, context, n) for name, one in models.items()}
        times = {name: 1000 * t / n for name, t in in_turn(runs, rounds).items()}
        rows.append({"devices": p, "context": context} | times)
        tqdm.write(f"p={p} context={context}: { ({a: round(t) for a, t in times.items()}) } ms")
    return rows


def table(model: Llama, rounds: int = 2, n: int = 10) -> list[dict]:
    """Seconds of a ring prefill and ten more tokens on 8 devices, tree and ring."""
    rows = []
    placed = model.on(kv_mesh(jax.devices()[:8]))
    for context in tqdm((512, 1024, 2048)):
        prompt = (np.arange(context) % 1000 + 100).tolist()

        def run(attention, prompt=prompt):
            model = placed.using(attention)
            logits, cache = model.prefill([prompt], model.new_cache(1, len(prompt) + ROOM))
            for _ in range(n):
                token = np.asarray(logits).argmax(-1)[:, None]
                logits, cache = model.step(token, cache, last=True)
            return logits

        times = in_turn({a: lambda a=a: run(a) for a in ("tree", "ring")}, rounds)
        rows.append({"context": context} | times)
        tqdm.write(f"context {context}: { ({a: round(t, 2) for a, t in times.items()}) } s")
    return rows


def verifiers(model: Llama, cache: Cache, sizes) -> dict[int, functools.partial]:
    """For each size, a step that verifies a random tree of so many tokens."""
    rng = np.random.default_rng(0)
    context = int(cache.lengths[0])
    runs = {}
    for n in sizes:
        parents = np.array([-1, *(rng.integers(i) for i in range(1, n))])
        tokens = rng.integers(model.config.vocabulary, size=(1, n))
        tree = {"positions": context + depths(parents)[None], "mask": ancestor_mask(parents)[None]}
        runs[n] = functools.partial(model.extend, tokens, cache, **tree)
    return runs


def steps(model: Llama, context: int = 512, rounds: int = 40) -> dict[str, dict]:
    """Milliseconds of a step that verifies a random tree of so many tokens, and its ratios."""
    runs = verifiers(model, full_cache(model, context), (1, 2, 4, 8, 16, 32, 64))
    for run in runs.values():
        timed(run)
    times = {n: np.empty(rounds) for n in runs}
    for i in tqdm(range(rounds)):
        for n, run in runs.items():
            times[n][i] = timed(run)
    result = {}
    for n, t in times.items():
        ratios = {"of fastest": t.min() / times[1].min(), "median": np.median(t / times[1])}
        result[str(n)] = {"ms": float(1000 * t.min())} | {
            f"ratio {k}": float(x) for k, x in ratios.items()
        }
        print(n, {k: round(x, 2) for k, x in result[str(n)].items()}, flush=True)
    return result


def agreement(model: Llama, small: Llama, texts: int = 5, tokens: int = 512) -> dict[str, float]:
    """How far two models say the same after each token of some pages of Python's documentation."""
    pages = pydoc_data.topics.topics
    text = "\n\n".join(pages[name] for name in sorted(pages))
    ids = model.tokenizer.encode(text)
    starts = np.linspace(0, len(ids) - tokens, texts).astype(int)
    same, divergence, perplexity = [], [], {"float32": [], "int8": []}
    for start in starts:
        row = np.array(ids[start : start + tokens])
        log = {
            name: np.asarray(jax.nn.log_softmax(one.logits(row[None])[0]))
            for name, one in (("float32", model), ("int8", small))
        }
        a, b = log.values()
        same.append(a.argmax(-1) == b.argmax(-1))
        divergence.append((np.exp(a) * (a - b)).sum(-1))
        for name, x in log.items():
            perplexity[name].append(-np.take_along_axis(x[:-1], row[1:, None], -1))
    found = {"tokens": texts * tokens, "same token": np.mean(same), "KL": np.mean(divergence)}
    found |= {f"perplexity {k}": np.exp(np.mean(x)) for k, x in perplexity.items()}
    return {name: float(x) for name, x in found.items()}


def int8(model: Llama, rounds: int = 10, n: int = 4) -> dict:
    """Milliseconds of both models' tokens, prefill and steps, and their agreement."""
    models = {"float32": model, "int8": Llama.load(None, weights="int8")}
    exact = dataclasses.replace(models["int8"], exact=True)
    result = {"agreement": agreement(*models.values())}
    print(result["agreement"], flush=True)

    def report(name, candidates, scale, rounds=rounds):
        result[name] = compared(candidates, scale, rounds)
        print(name, {k: round(x, 2) for k, x in result[name].items()}, flush=True)

    contexts = (2048, 64)  # falling: llama.cpp forgets what comes after
    prompt = (np.arange(1024) % 1000 + 100).tolist()
    others = llama_cpp_in_bits(prompt, contexts, n)
    for context in contexts:
        runs = {k: decoder(one, context, n) for k, one in {**models, "exact": exact}.items()}
        runs |= {k: after[context] for k, (_, after) in others.items()}
        report(f"a token after {context}", runs, n)
    cache = full_cache(model, 512)
    sizes = (2, 4, 8, 16, 32, 64, 128)
    steps = {k: verifiers(one, cache, sizes) for k, one in models.items()}
    for size in sizes:
        report(f"a step of {size}", {k: runs[size] for k, runs in steps.items()}, 1)
    prefills = {
        k: lambda one=one: one.prefill([prompt], one.new_cache(1, 1024))[0]
        for k, one in models.items()
    }
    prefills |= {k: first for k, (first, _) in others.items()}
    report("prefill of 1024", prefills, 1, 3)
    prompt = model.tokenizer.chat(REPEAT)
    for draft in (None, "suffix"):
        texts = {k: functools.partial(written, one, prompt, draft) for k, one in models.items()}
        report(f"a text by {draft or 'plain decoding'}", texts, 1, 5)
    return result


def cache(model: Llama) -> dict[str, dict[str, float]]:
    """How far models with caches in 8 bits say what float32's does, and a token's bytes there."""
    result = {}
    for dtype in (None, "int8", "float8_e4m3fn"):
        small = model.using("tree", cache_dtype=dtype)
        empty = small.new_cache(1, 64)
        held = sum(x.nbytes for x in jax.tree.leaves((empty.k, empty.v)))
        found = {"bytes a token": held / empty.capacity}
        if dtype is not None:
            found |= agreement(model, small)
            found["perplexity"] = found.pop("perplexity int8")
        result[dtype or "float32"] = found
        print(dtype, found, flush=True)
    return result


def compared(candidates: dict, scale: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the fastest run of each, and float32's over int8's, by both clocks."""
    busy = {k: [] for k in candidates}

    def counted(k):
        began = time.process_time()
        jax.block_until_ready(candidates[k]())
        busy[k].append(time.process_time() - began)

    runs = {k: functools.partial(counted, k) for k in candidates}
    fastest = {k: 1000 * min(t) / scale for k, t in all_in_turn(runs, rounds).items()}
    typical = {k: statistics.median(t[1:]) for k, t in busy.items()}
    return fastest | {
        "ratio": fastest["float32"] / fastest["int8"],
        "ratio of processor time": typical["float32"] / typical["int8"],
    }


def llama_cpp_in_bits(prompt: list[int], contexts, n: int) -> dict[str, tuple]:
    """`llama_cpp_runs` of the packaged weights in 4 bits and in 8; none where it is missing."""
    if not importlib.util.find_spec("llama_cpp"):
        return {}
    four = packaged_model()
    with tempfile.TemporaryDirectory() as folder:
        files = {"llama.cpp, 4 bit": four, "llama.cpp, 8 bit": in_8_bits(four, folder)}
        return {k: llama_cpp_runs(path, prompt, contexts, n) for k, path in files.items()}


def written(model: Llama, prompt: list[int], draft: str | None) -> None:
    """Write 40 tokens, of at most eight a call."""
    generate(model, prompt, max_new_tokens=40, draft=draft, budget=8, capacity=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"single": single, "devices": devices, "table": table, "steps": steps}
    parts |= {"int8": int8, "cache": cache}
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all when left out")
    wanted = parser.parse_args().parts or parts
    # Eight simulated devices would slow one down: it gets a process with one.
    simulate_devices(8 if {"devices", "table"} & set(wanted) else 1)
    model = Llama.load(None)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    here = (
        f"{datetime.date.today()}, {os.cpu_count()} {platform.machine()} cores, "
        f"{jax.default_backend()}, jax {version('jax')}"
    )
    for part in wanted:
        found = parts[part](model)
        if part == "int8":
            found = results.get(part, {}) | {f"jax {version('jax')}": found}
        results[part] = found
        results.setdefault("machine", {})[part] = here
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
