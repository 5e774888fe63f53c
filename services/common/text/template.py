"""Chat templates, which write the same text on every node: no clock, no chance, no release of transformers matters.

transformers' renderer gives a template the machine's date and time, and its releases differ. Here jinja2 renders it,
and `strftime_now` tells the run's date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from heterorl.common.errors import ConfigError
from heterorl.common.model.directory import first_line
from heterorl.common.tasks.task import Message

CLOCK = "strftime_now"
"""The function by which a template asks for the time, and the template's argument that sets it."""
DATE = "2025-01-01"
"""What CLOCK tells where no argument sets it: constant, since every start at every site writes the same prompts."""

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template raises, which computes, such as with a part that these messages lack."""

_ANSWER = "Yes"


def source_of(tokenizer: Any) -> str:
    """The tokenizer's template, of several the one named default; empty where there is none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = found.get("default")
    return found or ""


def as_variables(message: Message) -> dict[str, Any]:
    """A message as templates read it."""
    variables = {"role": message.role, "content": message.content}
    return {**variables, "name": message.name} if message.name else variables


def tool_name(schema: Mapping[str, Any]) -> str:
    """The name that a tool's JSON schema gives it, in OpenAI's form or bare."""
    return str(schema.get("function", schema)["name"])


def has_clock(source: str) -> bool:
    """Whether a template may ask for the time."""
    return CLOCK in source


class ChatTemplate:
    """A template with what the run gives it."""

    def __init__(self, tokenizer: Any, *, arguments: Mapping[str, Any]) -> None:
        """Compile it.

        Args:
            tokenizer: whose template it is; its special tokens are the template's variables.
            arguments: other variables; CLOCK among them is a date, or a date and a time, by ISO 8601.

        Raises:
            ConfigError: it is no template, or draws at random; or CLOCK is no date.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals[CLOCK] = _time_of(arguments).strftime
        del environment.filters["random"], environment.globals["lipsum"]
        try:
            self._template: Template = environment.from_string(source_of(tokenizer))
        except TemplateError as error:
            raise ConfigError("model_dir", f"the chat template cannot be used: {first_line(error)}") from error
        given = {name: value for name, value in arguments.items() if name != CLOCK}
        self._variables = {**tokenizer.special_tokens_map, **given, "documents": None}

    def write(
        self, messages: Sequence[Mapping[str, Any]], *, begins_answer: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text of messages.

        Args:
            messages: each with role and content.
            begins_answer: the text ends where an assistant's turn begins.
            tools: JSON schemas of what may be called; a template is told of none by None, not by an empty list.

        Raises:
            TemplateError: the template refuses them; what it computes with them may raise what Python raises.
        """
        variables = {"messages": messages, "add_generation_prompt": begins_answer, "tools": list(tools) or None}
        return self._template.render({**self._variables, **variables})

    def answer_end(self) -> str:
        """What is written behind an assistant's answer.

        Raises:
            TemplateError: it writes no such turn; what it computes may raise what Python raises.
        """
        turns = [{"role": "user", "content": _ANSWER}, {"role": "assistant", "content": _ANSWER}]
        return self.write(turns, begins_answer=False).rpartition(_ANSWER)[2]

    def call(self, name: str, arguments: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]]) -> str:
        """What is written for an assistant's turn that calls a tool; a template that knows no calls leaves it out.

        Raises:
            TemplateError: it writes no such turn; what it computes may raise what Python raises.
        """
        asked = {"role": "user", "content": _ANSWER}
        made = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        calling = {"role": "assistant", "content": "", "tool_calls": [made]}
        before = self.write([asked], begins_answer=True, tools=tools)
        whole = self.write([asked, calling], begins_answer=False, tools=tools)
        return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071 - texts, no paths


class _Generation(ext.Extension):
    """`generation` marks an assistant's tokens for other trainers; what it encloses is plain text here."""

    tags = {"generation"}  # noqa: RUF012 - the type is jinja2's

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _time_of(arguments: Mapping[str, Any]) -> datetime:
    told = arguments.get(CLOCK, DATE)
    try:
        return datetime.fromisoformat(told)
    except (TypeError, ValueError) as error:
        problem = f"{told!r} is no date of ISO 8601, such as {DATE!r}"
        raise ConfigError(f"chat_template_arguments.{CLOCK}", problem) from error
