"""What the drafter saves: tokens a call and processor time, by kind of text; one Markdown table.

python -m labs.drafter.measure
"""

import os
import platform
import time

import jax
from tqdm import tqdm

from labs.drafter.prompts import CHAT, CHAT_CODE, CHAT_EDITING, CHAT_STRUCTURED
from labs.drafter.recurrent import load_drafter
from labs.drafter.write import write
from treeattn_llama import Llama

TOPICS = "lighthouses", "the accordion", "Iceland"  # in none of the training's prompts
KINDS = {"chat": CHAT, "code": CHAT_CODE, "editing": CHAT_EDITING, "structured": CHAT_STRUCTURED}
NEW_TOKENS = 64
WAYS = {  # candidates of a beam, tokens of each; None drafts nothing
    "alone": None,
    "a chain of four": {"width": 1, "length": 4},
    "four of four": {"width": 4, "length": 4},
}


def main() -> None:
    model = Llama.load()
    drafter = load_drafter(model)
    questions = [
        (kind, templates[i].format(topic))
        for kind, templates in KINDS.items()
        for i, topic in enumerate(TOPICS)
    ]

    def written(prompt, shape, new_tokens=NEW_TOKENS):
        """(tokens, calls, processor seconds) of a text."""
        began = time.process_time()
        found = write(model, prompt, new_tokens, drafter if shape else None, **(shape or {}))
        return found.tokens, len(found.by_call), time.process_time() - began

    sums = {(kind, way): [0, 0, 0.0] for kind in KINDS for way in WAYS}
    for kind, question in tqdm(questions, leave=False):
        prompt = model.tokenizer.chat(question)
        texts = []
        for way, shape in WAYS.items():
            written(prompt, shape, 4)  # compiles
            tokens, calls, seconds = written(prompt, shape)
            texts.append(tokens)
            total = sums[kind, way]
            sums[kind, way] = [total[0] + len(tokens), total[1] + calls, total[2] + seconds]
        assert texts[0] == texts[1] == texts[2]
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}\n")
    print_table(sums)


def print_table(sums: dict) -> None:
    """A row for each kind and way: tokens a call, milliseconds of a call, and of a token."""
    print("| texts | drafted | tokens a call | a call, ms | a token, ms |")
    print("|---|---|---|---|---|")
    for kind in (*KINDS, "all"):
        for way in WAYS:
            parts = [x for (k, w), x in sums.items() if w == way and kind in (k, "all")]
            tokens, calls, seconds = map(sum, zip(*parts, strict=True))
            numbers = f"{tokens / calls:.2f} | {1e3 * seconds / calls:.0f}"
            print(f"| {kind} | {way} | {numbers} | {1e3 * seconds / tokens:.0f} |")


if __name__ == "__main__":
    main()
