"""Text from a Llama whose cache is sharded over devices."""

import argparse
import os
import sys
import time
import warnings

import jax

from treeattn import kv_mesh, simulate_devices
from treeattn_llama import __version__
from treeattn_llama.attention import ATTENTIONS
from treeattn_llama.model import Llama
from treeattn_llama.text import pieces, prompt_ids, stream, tokenizer_of

EXAMPLES = """examples:
  python -m treeattn_llama "What is the capital of France?"
  python -m treeattn_llama "What is the capital of France?" --devices 8 --attention butterfly
  python -m treeattn_llama "Repeat this text: ..." --draft lookup
  python -m treeattn_llama "Once upon a time" --plain --temperature 0.8 --seed 1

A model's chat template and tokenizer may take any time and memory: for a stranger's model, limit
the process (ulimit -t, ulimit -v).
"""

# Each flag: its type, default, and value, and its help.
FLAGS = {
    "model": (str, None, "PATH", "a GGUF file or a Hugging Face directory (default: SmolLM2-135M)"),
    "devices": (int, None, "N", "shard the cache over N simulated devices (default: all devices)"),
    "attention": (str, "tree", tuple(ATTENTIONS), "how the devices' parts merge (default: tree)"),
    "draft": (str, None, ("lookup",), "verify several guesses in a call (default: no guesses)"),
    "tokens": (int, 128, "N", "write at most N tokens (default: 128)"),
    "temperature": (float, 0.0, "T", "draw tokens at temperature T; 0: the likeliest (default: 0)"),
    "top-k": (int, None, "K", "draw from the K likeliest tokens only (default: from all)"),
    "top-p": (float, None, "P", "draw from the likeliest tokens that reach probability P in sum"),
    "seed": (int, 0, "N", "the same seed draws the same text (default: 0)"),
}
SAMPLING = ("temperature", "top_k", "top_p", "seed")
# The flags that have another name than the argument in the package's errors and warnings.
ARGUMENTS = {
    "n": "devices",
    "path": "model",
    "capacity": "tokens",
    "max_new_tokens": "tokens",
    "top_k": "top-k",
    "top_p": "top-p",
}
# Control characters change a terminal's settings, so they are not printed, but newline and tab are.
CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\ufffd")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn_llama",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treeattn_llama {__version__}")
    parser.add_argument("prompt", help="a question, or with --plain the beginning of a text")
    for name, (kind, default, value, help_) in FLAGS.items():
        values = {"metavar": value} if isinstance(value, str) else {"choices": value}
        parser.add_argument(f"--{name}", type=kind, default=default, help=help_, **values)
    help_ = "continue the prompt, rather than answer it (default: answer)"
    parser.add_argument("--plain", action="store_true", help=help_)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    if args.devices is not None:
        simulate_devices(args.devices)
    mesh = kv_mesh() if len(jax.devices()) > 1 else None
    model = Llama.load(args.model, mesh=mesh, attention=args.attention)
    tokenizer = tokenizer_of(model)
    plain = args.plain or tokenizer.chat_template is None
    ids = prompt_ids(model, args.prompt)[0] if plain else tokenizer.chat(args.prompt)
    options = {name: getattr(args, name) for name in SAMPLING}
    calls = stream(model, [ids], draft=args.draft, max_new_tokens=args.tokens, **options)
    began = time.perf_counter()
    done = []  # (time, length of the text) after each call, that of the prompt first
    for piece in pieces(tokenizer, ids, calls):
        done.append((time.perf_counter() - began, len(calls.state.texts[0])))
        print(piece, end="", flush=True)
    print()
    devices = f"{jax.device_count()} device{'s' if mesh else ''}"
    report = f"{devices}; prompt: {len(ids)} tokens, {done[0][0]:.1f} s"
    if calls.steps > 1:  # the first step compiles, so it is not counted
        (first, before), (last, after) = done[1], done[-1]
        new = after - before
        report += f"; then {new / (last - first):.1f} tokens/s"
        report += f", {new / (calls.steps - 1):.2f} tokens a step"
    print(report, file=sys.stderr)


def tell(message, *_) -> None:
    """Print an error or a warning in a line, with a flag's name instead of an argument's name."""
    name, _, rest = str(message).partition(":")
    flag = ARGUMENTS.get(name, name)
    said = f"--{flag}:{rest}" if flag in FLAGS else message
    print(f"python -m treeattn_llama: {said}", file=sys.stderr)


def main() -> int:
    for name in ("stdout", "stderr"):
        file = getattr(sys, name) or open(os.devnull, "w")  # None if it is closed
        # What is printed may be a stranger's.
        file.write = lambda text, write=file.write: write(text.translate(CONTROLS))
        setattr(sys, name, file)
    sys.stdout.reconfigure(errors="replace")  # the terminal may lack letters of the answer
    warnings.showwarning = tell  # without the place in Python's own code
    try:
        try:
            run(arguments())
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
        return 1
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        tell(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
