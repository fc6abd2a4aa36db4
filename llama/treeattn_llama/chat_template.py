"""Chat templates: a checkpoint's Jinja program that writes a conversation as one text.

A template is a stranger's program, so it runs in Jinja's sandbox. It gets the functions and filters
that transformers gives it.
"""

import datetime
import json
from typing import ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words, for training.

    The text inside is written as it is.
    """

    tags: ClassVar = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render_chat(template: str, values: dict) -> str:
    """The text that asks the model to answer.

    values: messages, bos_token and eos_token
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    values = {"tools": None, "documents": None, "add_generation_prompt": True} | values
    return environment.from_string(template).render(values)


def _refuse(message):
    raise jinja2.TemplateError(message)


def _to_json(x, **options) -> str:
    return json.dumps(x, **{"ensure_ascii": False} | options)
