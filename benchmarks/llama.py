"""How fast the packaged Llama runs, beside Hugging Face transformers and llama.cpp.

    python benchmarks/llama.py            all parts; a few minutes
    python benchmarks/llama.py single     one device, in turn with the others, where they (torch and
                                          transformers; xllamacpp) are installed
    python benchmarks/llama.py steps      what verifying several candidates at once costs
    python benchmarks/llama.py shares     where the time of a prompt goes

Everything is measured in one process, in turn, after a first run that compiles, and the fastest of
the rounds counts. `single` gives the time of the clock and the processor's, of all cores together;
the other parts give the processor's, which other programs disturb less. Set
OMP_WAIT_POLICY=PASSIVE, because PyTorch's waiting threads count otherwise. `single` has prefill and
decoding with the same float32 weights as transformers; llama.cpp computes with the file's 4-bit
weights and keeps its cache in float16. Caches of a given context are filled with random numbers,
because a step's time does not depend on them. `steps` has the time of a step of 1 … 64 packed
candidates, with positions and a tree mask, all of their logits computed, and its ratio to a step of
one. `shares` has the time of a prompt's matrix products and of its attention, each alone, and the
rate of the products beside NumPy's. Writes results/llama.json.
"""

import argparse
import functools
import importlib.util
import json
import os
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from machine import machine

from treeattn import ancestor_mask, attention, depths
from treeattn_llama import Cache, Llama, open_checkpoint, packaged_model

RESULTS = Path(__file__).parent / "results" / "llama.json"
ROOM = 32  # tokens that a cache has room for besides its context
MATRICES = ("qkv", "output", "gate_up", "down")  # of a layer


class Seconds(NamedTuple):
    clock: float
    processor: float


def in_turn(candidates: dict, rounds: int) -> dict[str, Seconds]:
    """What each candidate takes, its result included: the fastest of rounds in which they take
    turns, after one that compiles."""
    fastest = dict.fromkeys(candidates, Seconds(np.inf, np.inf))
    for i in range(rounds + 1):
        for name, f in candidates.items():
            began = time.perf_counter(), time.process_time()
            jax.block_until_ready(f())
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            if i:
                fastest[name] = Seconds(*map(min, fastest[name], took))
    return fastest


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
            logits, c = model.step(token, c)
            token = np.asarray(logits).argmax(-1)
        cache[0] = c._replace(lengths=lengths)  # forget them again
        return logits

    return run


# transformers, with the same weights


def transformers_model():
    """The packaged checkpoint as transformers' LlamaForCausalLM, in float32, with the faster of its
    attentions for a CPU, which is PyTorch's."""
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
            attn_implementation="sdpa",
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


class LlamaCpp:
    """llama.cpp's server in this process, with its kernels for the weights of that file."""

    def __init__(self, path: Path, longest: int):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(path)
        options.n_ctx = longest + ROOM
        options.n_parallel = 1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = os.cpu_count()
        options.verbosity = -1
        self.server = xllamacpp.Server(options)

    def complete(self, prompt: list[int], n: int, cached: bool) -> dict:
        """n tokens after the prompt, greedily; `cached`, after what the call before has computed,
        so that n steps are left: one of the prompt's last token and n - 1."""
        how = {"temperature": 0, "ignore_eos": True, "cache_prompt": cached}
        body = {"prompt": prompt, "n_predict": n} | how
        request = urllib.request.Request(
            self.server.listening_address + "/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        steps = found["timings"]["predicted_n"]
        if steps != n:
            raise RuntimeError(f"llama.cpp wrote {steps} tokens of {n}")
        return found["timings"]


def single(model: Llama, rounds: int = 5, n: int = 8) -> dict:
    """Tokens in a second of one device, of transformers and of llama.cpp."""
    contexts = (64, 2048, 8000)  # llama.cpp ends at 8192
    find = importlib.util.find_spec

    def prompt(n):
        return (np.arange(n) % 1000 + 100).tolist()

    first = {"treeattn": lambda: model.prefill([prompt(1024)], model.new_cache(1, 1024))[0]}
    runs = {context: {"treeattn": decoder(model, context, n)} for context in contexts}
    if find("transformers") and find("torch"):
        other = transformers_model()
        first["transformers"] = transformers_runs(other, 1024, n)[0]
        for context in contexts:
            runs[context]["transformers"] = transformers_runs(other, context, n)[1]
    if find("xllamacpp"):
        cpp = LlamaCpp(packaged_model(), max(contexts))
        for context in contexts:
            run = functools.partial(cpp.complete, prompt(context), n, cached=True)
            runs[context]["llama.cpp, 4 bit"] = run
    result = {}

    def report(what, tokens, times):
        result[what] = {
            name: {kind: tokens / t for kind, t in seconds._asdict().items()}
            for name, seconds in times.items()
        }
        print(what, result[what], "tokens/s", flush=True)

    for context in contexts:
        report(f"decode at {context}", n, in_turn(runs[context], rounds))
    ours = np.asarray(first["treeattn"]()).ravel()
    for name in first.keys() - {"treeattn"}:
        print(f"{name}: logits differ by at most {np.abs(ours - first[name]()).max():.1e}")
    if find("xllamacpp"):
        run = functools.partial(cpp.complete, prompt(1024), 1, cached=False)
        first["llama.cpp, 4 bit"] = run
    report("prefill 1024", 1024, in_turn(first, rounds))
    return result


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


def steps(model: Llama, context: int = 512, rounds: int = 10) -> dict[str, dict]:
    """Milliseconds of a step that verifies a random tree of so many tokens, and its ratio to that
    of one."""
    runs = verifiers(model, full_cache(model, context), (1, 2, 4, 8, 16, 32, 64))
    times = in_turn(runs, rounds)
    times = {n: seconds.processor for n, seconds in times.items()}
    result = {str(n): {"ms": 1000 * t, "ratio": t / times[1]} for n, t in times.items()}
    for n, row in result.items():
        print(n, {k: round(x, 2) for k, x in row.items()}, flush=True)
    return result


def shares(model: Llama, rounds: int = 5, n: int = 1024) -> dict[str, dict]:
    """The time of a prompt of n tokens, and of its parts in all layers: milliseconds, and GFLOP a
    second, where causality hides half of the attention's."""
    c = model.config
    rng = np.random.default_rng(0)
    matrices = [np.asarray(getattr(model.weights.layers[0], name)) for name in MATRICES]
    pairs = [(rng.normal(size=(n, w.shape[1])).astype(np.float32), w) for w in matrices]
    q, k, v = (
        rng.normal(size=(1, n, heads, c.head_dim)).astype(np.float32)
        for heads in (c.heads, c.kv_heads, c.kv_heads)
    )
    multiply = jax.jit(lambda pairs: [jnp.einsum("nd,od->no", x, w) for x, w in pairs])
    attend = jax.jit(functools.partial(attention, causal=True))
    on_device = jax.device_put((pairs, (q, k, v)))
    prompt = list(range(100, 100 + n))
    whole = {"prompt": lambda: model.prefill([prompt], model.new_cache(1, n))[0]}
    parts = {
        "products": lambda: multiply(on_device[0]),
        "products, NumPy": lambda: [x @ w.T for x, w in pairs],
        "attention": lambda: attend(*on_device[1]),
    }
    products = 2 * n * sum(w.size for w in matrices)
    scores = n * n // 2 * c.heads * c.head_dim * 4
    work = {"prompt": products + scores, "attention": scores}
    result = {}
    # The parts are short: of more rounds, some are not disturbed.
    times = in_turn(whole, rounds) | in_turn(parts, 8 * rounds)
    for name, (_, seconds) in times.items():
        seconds *= 1 if name == "prompt" else c.layers
        rate = c.layers * work.get(name, products) / seconds
        result[name] = {"ms": 1e3 * seconds, "GFLOP/s": rate / 1e9}
        print(name, {k: round(x, 1) for k, x in result[name].items()}, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"single": single, "steps": steps, "shares": shares}
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all when left out")
    wanted = parser.parse_args().parts or parts
    model = Llama.load()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in wanted:
        results[part] = parts[part](model)
        results.setdefault("machine", {})[part] = machine("jax")
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
