"""What llama.cpp and transformers answer about the files of `strangers.py`.

    make llama-answers

writes tests/data/answers.json, with the versions that were asked, and the date.
"""

import datetime
import importlib.metadata
import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch
import transformers
import xllamacpp

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from strangers import STRANGERS, write_directory, write_gguf  # noqa: E402

MOST = 8  # new tokens


class LlamaCpp:
    """llama.cpp's server in this process, with a cache in float32."""

    def __init__(self, path: Path):
        options = xllamacpp.CommonParams()
        options.model.path = str(path)
        options.n_ctx = 128
        options.n_parallel = 1
        options.warmup = False
        options.verbosity = -1
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.flash_attn_type = off
        self.server = xllamacpp.Server(options)

    def post(self, path: str, **body) -> dict:
        headers = {"Content-Type": "application/json"}
        url = self.server.listening_address + path
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers)
        ) as answer:
            return json.load(answer)

    def ids(self, text):
        body = {"content": text, "add_special": True, "parse_special": True}
        return self.post("/tokenize", **body)["tokens"]

    def chat(self, messages):
        return self.ids(self.post("/apply-template", messages=messages)["prompt"])

    def writes(self, prompt, stop=None):
        how = {"n_predict": MOST, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        return self.post("/completion", prompt=prompt, stop=[stop] if stop else [], **how)

    def ends(self, prompt):
        return self.writes(prompt)["tokens"]

    def text(self, prompt):
        return self.writes(prompt)["content"]

    def stop(self, prompt, stop):
        return self.writes(prompt, stop)["content"]


class Transformers:
    def __init__(self, path: Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.LlamaForCausalLM.from_pretrained(path)

    def ids(self, text):
        return self.tokenizer(text)["input_ids"]

    def chat(self, messages):
        options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        return self.tokenizer.apply_chat_template(messages, **options)

    def ends(self, prompt, stop=None):
        ids = torch.tensor([self.ids(prompt)])
        options = {"stop_strings": [stop], "tokenizer": self.tokenizer} if stop else {}
        how = {"max_new_tokens": MOST, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return self.model.generate(ids, **how, **options)[0, ids.shape[1] :].tolist()

    def text(self, prompt):
        return self.tokenizer.decode(self.ends(prompt), skip_special_tokens=True)

    def stop(self, prompt, stop):
        new = self.ends(prompt, stop)
        return len(new), self.tokenizer.decode(new)


def key(question) -> str:
    return json.dumps(question, ensure_ascii=False)


def ask(reader, questions) -> dict:
    found = {}
    for kind, asked, stop in questions:
        found[key([kind, asked, stop])] = getattr(reader, kind)(asked, *([stop] if stop else []))
    return found


def lines(x, depth: int = 0) -> str:
    """JSON with an answer a line."""
    if not isinstance(x, dict) or depth == 4:
        return json.dumps(x, ensure_ascii=False)
    pad = "\n" + " " * (depth + 1)
    rows = (
        f"{pad}{json.dumps(k, ensure_ascii=False)}: {lines(y, depth + 1)}" for k, y in x.items()
    )
    return "{" + ",".join(rows) + pad[:-1] + "}"


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, stranger) in enumerate(STRANGERS.items()):
            answers[name] = {}
            path = Path(folder) / str(number)
            if "gguf" in stranger.formats:
                reader = LlamaCpp(write_gguf(stranger, path.with_suffix(".gguf")))
                answers[name]["llama.cpp"] = ask(reader, stranger.questions)
            if "directory" in stranger.formats:
                reader = Transformers(write_directory(stranger, path))
                answers[name]["transformers"] = ask(reader, stranger.questions)
    versions = {name: importlib.metadata.version(name) for name in ASKED}
    found = {"date": datetime.date.today().isoformat(), "versions": versions, "answers": answers}
    (HERE / "answers.json").write_text(lines(found) + "\n", encoding="utf-8")


ASKED = ("xllamacpp", "transformers", "tokenizers", "torch", "jinja2")

if __name__ == "__main__":
    main()
