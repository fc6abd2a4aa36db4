"""How fast the packaged Llama runs, beside Hugging Face transformers and llama.cpp.

    python benchmarks/llama.py            all parts; a few minutes
    python benchmarks/llama.py single     one device, in turn with the others, where they (torch and
                                          transformers; llama-cpp-python) are installed
    python benchmarks/llama.py steps      what verifying several candidates at once costs
    python benchmarks/llama.py shares     where the time of a prompt goes

Everything is measured in one process, in turn, after a first run that compiles, and the fastest of
the rounds counts. The time is the processor's, of all cores together, which other programs
disturb less than the time of day. Set OMP_WAIT_POLICY=PASSIVE, because PyTorch's waiting threads
count otherwise. `single` has prefill and decoding with the same float32 weights as transformers;
llama.cpp computes with the file's 4-bit weights and keeps its cache in float16. Caches of a given
context are filled with random numbers, because a step's time does not depend on them. `steps` has
the time of a step of 1 … 64 packed candidates, with positions and a tree mask, all of their logits
computed, and its ratio to a step of one. `shares` has the time of a prompt's matrix
products and of its attention, each alone, and the rate of the products beside NumPy's. Writes
results/llama.json.
"""

import argparse
import datetime
import functools
import importlib.util
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from treeattn import ancestor_mask, attention, depths
from treeattn_llama import Cache, Llama, open_checkpoint, packaged_model

RESULTS = Path(__file__).parent / "results" / "llama.json"
ROOM = 32  # tokens that a cache has room for besides its context
MATRICES = ("qkv", "output", "gate_up", "down")  # of a layer


def in_turn(candidates: dict, rounds: int) -> dict[str, float]:
    """Seconds that each candidate takes, its result included: the fastest of rounds in which they
    take turns, after one that compiles."""
    fastest = dict.fromkeys(candidates, np.inf)
    for i in range(rounds + 1):
        for name, f in candidates.items():
            began = time.process_time()
            jax.block_until_ready(f())
            if i:
                fastest[name] = min(fastest[name], time.process_time() - began)
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


def single(model: Llama, rounds: int = 3, n: int = 4) -> dict:
    """Tokens in a second of one device, of transformers and of llama.cpp."""
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
    report("prefill 1024", {k: 1024 / t for k, t in in_turn(first, rounds).items()})
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
    for name, seconds in times.items():
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
    here = (
        f"{datetime.date.today()}, {os.cpu_count()} {platform.machine()} cores, "
        f"{jax.default_backend()}, jax {version('jax')}"
    )
    for part in wanted:
        results[part] = parts[part](model)
        results.setdefault("machine", {})[part] = here
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
