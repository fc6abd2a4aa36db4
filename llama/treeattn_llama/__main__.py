"""Text from a Llama whose cache lies on many devices."""

import argparse
import os
import sys
import time

import jax
from tqdm import tqdm

from treeattn import kv_mesh, simulate_devices
from treeattn_llama import __version__
from treeattn_llama.attention import ATTENTIONS
from treeattn_llama.model import Llama
from treeattn_llama.text import DRAFTS, pieces, stream, tokenizer_of

EXAMPLES = """examples:
  python -m treeattn_llama "What is the capital of France?"
  python -m treeattn_llama "What is the capital of France?" --devices 8 --attention butterfly
  python -m treeattn_llama "Repeat this text: ..." --draft lookup
  python -m treeattn_llama "Once upon a time" --plain --temperature 0.8 --seed 1
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn_llama",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"treeattn_llama {__version__}")
    add("prompt", help="what is asked, or with --plain what is to be continued")
    add(
        "--model",
        metavar="PATH",
        help="a GGUF file or a Hugging Face directory (default: the packaged SmolLM2-135M)",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help="deal the cache out over N simulated CPU devices (default: over the machine's own)",
    )
    add(
        "--attention",
        default="tree",
        choices=list(ATTENTIONS),
        help="how the devices' parts of the attention come together (default: tree)",
    )
    add(
        "--draft",
        choices=list(DRAFTS),
        help="guess tokens, and verify several in one call of the model (default: no guesses)",
    )
    add(
        "--tokens",
        type=int,
        default=128,
        metavar="N",
        help="write at most N tokens (default: 128)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="draw tokens at this temperature; 0 takes the likeliest (default: 0)",
    )
    add(
        "--top-k",
        type=int,
        metavar="K",
        help="draw from the K likeliest tokens only (default: from all)",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the fewest tokens whose probabilities reach P (default: from all)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of what is drawn: the same seed gives the same text (default: 0)",
    )
    add(
        "--plain",
        action="store_true",
        help="continue the prompt, rather than answer it (default: answer)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights and what is computed with them (default: the checkpoint's)",
    )
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    if args.devices is not None:
        simulate_devices(args.devices)
    mesh = kv_mesh() if len(jax.devices()) > 1 else None
    model = Llama.load(args.model, mesh=mesh, attention=args.attention, dtype=args.dtype)
    tokenizer = tokenizer_of(model)
    plain = args.plain or tokenizer.chat_template is None
    ids = (tokenizer.encode if plain else tokenizer.chat)(args.prompt)
    calls = stream(
        model,
        [ids],
        draft=args.draft,
        max_new_tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        progress=lambda tokens: bar.update(tokens),
    )
    bar = tqdm(total=len(ids), desc="prompt", unit=" tokens", file=sys.stderr)
    began = time.perf_counter()
    times = []  # when each call was done, that of the prompt first
    for piece in pieces(tokenizer, calls):
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


# What the errors of `stream` call otherwise than the command's flags.
FLAGS = {
    "n:": "--devices:",
    "path:": "--model:",
    "max_new_tokens:": "--tokens:",
    "top_k:": "--top-k:",
    "top_p:": "--top-p:",
    "prompts:": "prompt:",
    **{f"{name}:": f"--{name}:" for name in ("temperature", "seed", "attention", "draft", "dtype")},
}


def with_flags(message: str) -> str:
    """An error's message, with a flag's name where it begins with that of an argument."""
    name, *rest = message.split(" ", 1)
    return " ".join([FLAGS.get(name, name), *rest])


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
        print(f"python -m treeattn_llama: {with_flags(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
