"""Chat templates: a checkpoint's Jinja program that writes a conversation as one text.

A template is a stranger's program, so it runs in Jinja's sandbox. It gets the functions and filters
that transformers gives it. The sandbox keeps the process's secrets, not its time and its memory: a
template may run without an end, or fill the memory. `Llama.load` says what to do about it.
"""

import datetime
import json
import re

import jinja2
import jinja2.sandbox


def render_chat(template: str, values: dict) -> str:
    """The text that asks the model to answer.

    values: messages, and bos_token, eos_token and others
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    values = {"tools": None, "documents": None, "add_generation_prompt": True} | values
    # {% generation %} … {% endgeneration %} marks the assistant's words, for training. Jinja knows
    # {% with %} … {% endwith %}, which writes the words as they are, in a scope of their own.
    template = re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", template)
    return environment.from_string(template).render(values)


def _refuse(message):
    raise jinja2.TemplateError(message)


def _to_json(x, **options) -> str:
    return json.dumps(x, **{"ensure_ascii": False} | options)
