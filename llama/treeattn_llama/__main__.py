"""Text from a Llama whose cache lies on many devices."""

import argparse
import os
import sys
import time

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
"""

# Each flag with what it takes, and what `--help` says of it.
FLAGS = {
    "model": (str, None, "PATH", "a GGUF file or a Hugging Face directory (default: SmolLM2-135M)"),
    "devices": (int, None, "N", "deal the cache over N simulated devices (default: the machine's)"),
    "attention": (str, "tree", tuple(ATTENTIONS), "how the devices' parts merge (default: tree)"),
    "draft": (str, None, ("lookup",), "verify several guesses in a call (default: no guesses)"),
    "tokens": (int, 128, "N", "write at most N tokens (default: 128)"),
    "temperature": (float, 0.0, "T", "draw tokens at temperature T; 0: the likeliest (default: 0)"),
    "top-k": (int, None, "K", "draw from the K likeliest tokens only (default: from all)"),
    "top-p": (
        float,
        None,
        "P",
        "draw from the likeliest whose probabilities reach P (default: all)",
    ),
    "seed": (int, 0, "N", "the same seed draws the same text (default: 0)"),
}
# What the package's errors call otherwise than the command's flags.
ARGUMENTS = {"n": "devices", "path": "model", "max_new_tokens": "tokens"}
ARGUMENTS |= {name.replace("-", "_"): name for name in FLAGS}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m treeattn_llama",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"treeattn_llama {__version__}")
    parser.add_argument("prompt", help="what is asked, or with --plain what is to be continued")
    for name, (kind, default, takes, said) in FLAGS.items():
        choice = {"metavar": takes} if isinstance(takes, str) else {"choices": takes}
        parser.add_argument(f"--{name}", type=kind, default=default, help=said, **choice)
    said = "continue the prompt, rather than answer it (default: answer)"
    parser.add_argument("--plain", action="store_true", help=said)
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    if args.devices is not None:
        simulate_devices(args.devices)
    mesh = kv_mesh() if len(jax.devices()) > 1 else None
    model = Llama.load(args.model, mesh=mesh, attention=args.attention)
    tokenizer = tokenizer_of(model)
    plain = args.plain or tokenizer.chat_template is None
    ids = prompt_ids(model, args.prompt)[0] if plain else tokenizer.chat(args.prompt)
    calls = stream(
        model,
        [ids],
        draft=args.draft,
        max_new_tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    began = time.perf_counter()
    done = []  # when each call was done, that of the prompt first, and how long the text was then
    for piece in pieces(tokenizer, calls):
        done.append((time.perf_counter() - began, len(calls.state.texts[0])))
        print(piece, end="", flush=True)
    print()
    devices = f"{jax.device_count()} device{'s' if mesh else ''}"
    report = f"{devices}; prompt: {len(ids)} tokens, {done[0][0]:.1f} s"
    if calls.steps > 1:  # the first step's time is compiling, too
        (first, before), (last, after) = done[1], done[-1]
        report += f"; then {(after - before) / (last - first):.1f} tokens/s"
    if args.draft and calls.steps:
        report += f", {(done[-1][1] - done[0][1]) / calls.steps:.2f} tokens a step"
    print(report, file=sys.stderr)


def with_flags(message: str) -> str:
    """An error's message, with a flag's name where it begins with that of an argument."""
    name, colon, rest = message.partition(":")
    if name == "prompts":
        return f"prompt:{rest}"
    return f"--{ARGUMENTS[name]}:{rest}" if name in ARGUMENTS else name + colon + rest


def main() -> int:
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace")  # the terminal may lack letters that an answer has
    try:
        try:
            run(arguments())
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the answer, as `head` does, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
        return 1
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        print(f"python -m treeattn_llama: {with_flags(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
