"""Decode text from a Llama, its cache sharded over devices.

python -m treeattn "What is the capital of France?"
python -m treeattn "What is the capital of France?" --devices 8 --attention tree
python -m treeattn "What is the capital of France?" --devices 6 --heads 3 --shard-weights
python -m treeattn "Repeat this text: ..." --draft suffix
python -m treeattn "Once upon a time" --plain --model path/to/checkpoint --temperature 0.8
"""

import argparse
import os
import sys
import time

import jax

from treeattn.devices.mesh import kv_mesh, simulate_devices
from treeattn.idea.arrays import integer
from treeattn_llama.attentions import ATTENTIONS, PROMPT_ATTENTIONS
from treeattn_llama.model import Llama
from treeattn_llama.speculation import DRAFTS
from treeattn_llama.text import pieces, stream, tokenizer_of


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt")
    add("--model", help="a GGUF file or a Hugging Face directory (the packaged SmolLM2-135M)")
    add("--devices", type=int, help="simulate so many CPU devices; the machine's own if not given")
    add("--heads", type=int, help="share out the heads, and the weights, over so many of them (1)")
    add(
        "--attention",
        default="tree",
        choices=list(ATTENTIONS),
        help="towards the cache (tree); auto: by the times in the file $TREEATTN_MEASURED",
    )
    add(
        "--prefill",
        choices=["chunks", *PROMPT_ATTENTIONS],
        help="the prompt's (ring on many devices)",
    )
    add("--draft", choices=list(DRAFTS), help="guess tokens, and verify several in one step (no)")
    add("--shard-weights", action="store_true", help="a part of the weights on each device, too")
    add("--tokens", type=int, default=128, help="at most so many new ones (128)")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top-p", type=float, default=1.0)
    add("--seed", type=seed, default=0, help="of what is drawn, 0 ... 2**32 - 1 (0)")
    add("--plain", action="store_true", help="continue the prompt, rather than answer it")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="the checkpoint's if not given")
    return parser.parse_args()


def seed(text: str) -> int:
    """The number in a text, if it is the seed of a key of its own: JAX's keys have 32 bits."""
    return integer("seed", int(text), 0, 2**32 - 1)


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm  # here, so that treeattn_llama is the first to say what is missing

    if args.devices is not None:
        simulate_devices(args.devices)
    many = len(jax.devices()) > 1 or args.heads is not None
    mesh = kv_mesh(heads=args.heads) if many else None

    def start(model: Llama, progress=lambda tokens: None):
        """The prompt's ids, and the calls that continue it; nothing is computed yet."""
        tokenizer = tokenizer_of(model)
        plain = args.plain or tokenizer.chat_template is None
        ids = (tokenizer.encode if plain else tokenizer.chat)(args.prompt)
        calls = stream(
            model,
            [ids],
            draft=args.draft,
            max_new_tokens=args.tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            key=jax.random.key(args.seed),
            progress=progress,
        )
        return ids, calls

    model = Llama.load(
        args.model,
        mesh=mesh,
        attention=args.attention,
        prefill_with=args.prefill,
        dtype=args.dtype,
        shard_weights=args.shard_weights,
        meanwhile=lambda first: next(start(first)[1]),  # compiles what prefill needs
    )
    began = time.perf_counter()
    ids, calls = start(model, lambda tokens: bar.update(tokens))
    bar = tqdm(total=len(ids), desc="prefill", unit=" tokens", file=sys.stderr)
    times = []  # when each call was done, that of prefill first
    for piece in pieces(model.tokenizer, calls):
        bar.close()
        times.append(time.perf_counter())
        print(piece, end="", flush=True)
    print()
    devices = f"{jax.device_count()} device{'s' if mesh else ''}"
    report = f"{devices}; prompt: {len(ids)} tokens, {times[0] - began:.1f} s"
    new = [n for step in calls.trace for n in step.new]
    if len(new) > 1:  # the first step's time is compiling, too
        report += f"; then {sum(new[1:]) / (times[len(new)] - times[1]):.1f} tokens/s"
    if args.draft and new:
        report += f", {sum(new) / len(new):.2f} tokens a step"
    print(report, file=sys.stderr)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # the terminal may lack letters that an answer has
    try:
        try:
            run(arguments())
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the answer, as `head` does, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
        return 1
    except (TypeError, ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"python -m treeattn: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
