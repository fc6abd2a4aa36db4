"""The files of `strangers.py`: this package's answers are those of llama.cpp and transformers.

`data/answers.json` has theirs, and says which versions were asked, and when (`make llama-answers`).
"""

import json
import re
from pathlib import Path

import pytest
from strangers import AS_LLAMA_CPP, FOLLOWED, OURS, OWN, STRANGERS, write_directory, write_gguf

from treeattn_llama import Llama, LookupDraft, generate, stream
from treeattn_llama.text import pieces

pytestmark = pytest.mark.usefixtures("unchecked")

STORED = json.loads((Path(__file__).parent / "data" / "answers.json").read_text(encoding="utf-8"))
WRITERS = {"gguf": write_gguf, "directory": write_directory}
CASES = [(name, form) for name, stranger in STRANGERS.items() for form in stranger.formats]
MOST = 8


def answer(model, kind, asked, stop):
    """This package's, in the form in which the others' are stored."""
    if kind == "ids":
        return model.tokenizer.encode(asked)
    if kind == "chat":
        return model.tokenizer.chat(asked)
    made = generate(model, asked, max_new_tokens=MOST, stop=stop)
    if kind == "stop":
        draft = LookupDraft(matched=1)
        drafted = generate(model, asked, max_new_tokens=MOST, stop=stop, draft=draft)
        assert made[:2] == drafted[:2]
    return {"ends": made.tokens, "text": made.text, "stop": [len(made.tokens), made.text]}[kind]


def shown(stranger, text: str, stop: str) -> str:
    """transformers' text with special tokens, as this package shows it: up to the stop string."""
    text = text.partition(stop)[0]
    for token, kind in stranger.tokens.items():
        text = text.replace(token, "") if kind == 3 else text
    return text


def loaded(name: str, form: str, folder: Path) -> Llama:
    return Llama.load(WRITERS[form](STRANGERS[name], folder / "model"))


@pytest.mark.parametrize("name, form", CASES, ids=[f"{name}, {form}" for name, form in CASES])
def test_answers_are_those_of_others(name, form, tmp_path):
    stranger = STRANGERS[name]
    if beside := stranger.files.get("beside"):
        with pytest.raises(ValueError, match=f"not among the added tokens.*{re.escape(beside[0])}"):
            loaded(name, form, tmp_path)
        return
    model = loaded(name, form, tmp_path)
    theirs = STORED["answers"][name]
    for kind, asked, stop in stranger.questions:
        if (name, kind, stop or asked if isinstance(asked, str) else "") in OURS:
            continue
        key = json.dumps([kind, asked, stop], ensure_ascii=False)
        whom = "llama.cpp" if name in AS_LLAMA_CPP else FOLLOWED[kind][form == "directory"]
        want = theirs[whom][key]
        if kind == "stop":  # how the text begins is the question "text"
            special = stop in stranger.tokens
            want = [
                want[0],
                shown(stranger, want[1], stop) if special else theirs["llama.cpp"][key],
            ]
        assert answer(model, kind, asked, stop) == want, (kind, asked, stop)


@pytest.mark.parametrize("form", WRITERS)
def test_where_the_package_has_an_answer_of_its_own(form, tmp_path):
    model = loaded("stop strings", form, tmp_path)
    for stop, text in (("hi", "g"), ("|start", "ghiiiii")):
        assert answer(model, "stop", "f", stop)[1] == text
    for stop in ("h<|start_header_id|>", ["x", "<|start_header_id|>i"]):
        with pytest.raises(ValueError, match="special tokens without other text beside them, got"):
            generate(model, "f", stop=stop)
    (tmp_path / "other").mkdir()
    other = loaded("a chat without a BOS of its own", form, tmp_path / "other").tokenizer
    assert other.encode("<|begin_of_text|>hello") == other.encode("hello")


@pytest.mark.parametrize("form", WRITERS)
def test_a_prompt_and_its_text_are_the_text(form, tmp_path):
    """Also piece by piece, and where the prompt is ids; after a token without text it begins."""
    model = loaded("Llama 2's kind", form, tmp_path)
    whole = "Once upon a time"
    for prompt in ("Once", "Once upon"):
        assert prompt + generate(model, prompt, max_new_tokens=MOST).text == whole
        ids = model.tokenizer.encode(prompt)
        pieces_ = pieces(model.tokenizer, ids, stream(model, [ids], max_new_tokens=MOST))
        assert prompt + "".join(pieces_) == whole
        both = generate(model, [ids, ids], max_new_tokens=MOST)
        assert both.text == [whole[len(prompt) :]] * 2
    assert model.tokenizer.decode(model.tokenizer.encode("Once"), after=[1]) == "Once"


def test_what_the_table_says():
    assert {whose for *both, _ in FOLLOWED.values() for whose in both} == {*OWN}
    assert {name for name, *_ in OURS} | AS_LLAMA_CPP.keys() <= STRANGERS.keys()
    assert STORED["answers"].keys() == STRANGERS.keys()
    assert STORED["date"] > "2026" and {"xllamacpp", "transformers"} <= STORED["versions"].keys()
