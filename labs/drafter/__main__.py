"""python -m labs.drafter "Why is the sky blue?": the same text with and without the drafter."""

import argparse
import time

from labs.drafter.recurrent import load_drafter
from labs.drafter.write import write
from treeattn_llama import Llama

QUESTION = "Why is the sky blue?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens at most (96)")
    parser.add_argument("--width", type=int, default=4, help="candidates of a beam (4)")
    parser.add_argument("--length", type=int, default=4, help="tokens of each (4)")
    asked = parser.parse_args()
    model = Llama.load()
    drafter = load_drafter(model)
    prompt = model.tokenizer.chat(asked.question)
    shape = {"width": asked.width, "length": asked.length}
    texts = {}
    for name, draft in {"alone": None, "with the drafter": drafter}.items():
        write(model, prompt, 8, draft, **shape)  # compiles
        began = time.perf_counter()
        texts[name] = written = write(model, prompt, asked.tokens, draft, **shape)
        seconds = time.perf_counter() - began
        each = len(written.tokens) / len(written.by_call)
        print(f"{name}: {len(written.by_call)} calls, {each:.2f} tokens a call, {seconds:.1f} s")
    assert texts["alone"].tokens == texts["with the drafter"].tokens
    print("\n" + model.tokenizer.decode(texts["alone"].tokens))


if __name__ == "__main__":
    main()
