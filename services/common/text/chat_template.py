"""Chat templates: rendered messages, equal on every node, and tokens between turns.

transformers' renderer tells a template the machine's time, and its releases differ. Here jinja2 renders it, and
`strftime_now` tells the run's date.

Drawn ids are never decoded and encoded again: the next context is old ids, drawn ids and given ids. Given ids are the
template's text of (user, assistant, new messages) from the assistant's end token on. They depend only on the new
messages, so a learner computes equal ones from a trajectory.

Messages of a role are given only after a proof for the template: behind histories with a system prompt, tools, thoughts
and two turns it must write the same text and tokens. A template may rewrite earlier turns, as Qwen3's drops their
thoughts; drawn tokens stay, so the policy reads its own thoughts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.model.model_directory import first_line
from heterorl.common.tasks.task import Message

CLOCK = "strftime_now"
"""Function that tells a template the time, and the argument that sets it."""
DATE = "2025-01-01"
"""Time of CLOCK without an argument; constant, so that every site writes equal prompts."""

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a template, its computations included."""

_ANSWER = "Yes"


def source_of(tokenizer: Any, *, with_tools: bool = False) -> str:
    """The tokenizer's template, or empty without one.

    If it has several: `default`, or `tool_use` where tools are shown.
    """
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = (found.get("tool_use") if with_tools else None) or found.get("default")
    return found or ""


def sources_of(tokenizer: Any) -> list[str]:
    """Different templates of a tokenizer: the plain one, then that for tools."""
    return list(dict.fromkeys(source_of(tokenizer, with_tools=with_tools) for with_tools in (False, True)))


def as_variables(message: Message) -> dict[str, Any]:
    """A message as templates read it."""
    variables = {"role": message.role, "content": message.content}
    return {**variables, "name": message.name} if message.name else variables


def tool_name(schema: Mapping[str, Any]) -> str:
    """Name in a tool's JSON schema, in OpenAI's form or bare."""
    return str(schema.get("function", schema)["name"])


def has_clock(source: str) -> bool:
    """Whether a template may ask for the time."""
    return CLOCK in source


class ChatTemplate:
    """A template with a run's variables."""

    def __init__(self, tokenizer: Any, *, arguments: Mapping[str, Any]) -> None:
        """Compile the template; raises ConfigError unless it is valid and deterministic.

        Its variables are the special tokens and `arguments`, where CLOCK is a date or time in ISO 8601.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals[CLOCK] = _time_of(arguments).strftime
        del environment.filters["random"], environment.globals["lipsum"]
        sources = sources_of(tokenizer)
        self.has_tool_form = len(sources) > 1
        """Whether another template writes messages where tools are shown."""
        try:
            self._forms: list[tuple[Template, bool]] = [
                (environment.from_string(source), "developer" in source) for source in sources
            ]
        except TemplateError as error:
            raise ConfigError(
                "model_dir",
                f"the chat template cannot be used: {first_line(error)}",
                action="name a model directory with a valid chat template, or set use_chat_template = false",
            ) from error
        given = {name: value for name, value in arguments.items() if name != CLOCK}
        self._variables = {**tokenizer.special_tokens_map, **given, "documents": None}

    def write(
        self, messages: Sequence[Mapping[str, Any]], *, begins_answer: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Text of messages; with `begins_answer` it ends where an assistant begins.

        `tools` are JSON schemas; an empty list becomes None, which templates expect. Raises TemplateError if the
        template refuses them; its computations may raise Python's errors.
        """
        template, knows_developer = self._forms[-1 if tools else 0]
        if not knows_developer:
            # It would leave such a message out.
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        variables = {"messages": messages, "add_generation_prompt": begins_answer, "tools": list(tools) or None}
        return template.render({**self._variables, **variables})

    def answer_end(self) -> str:
        turns = [{"role": "user", "content": _ANSWER}, {"role": "assistant", "content": _ANSWER}]
        return self.write(turns, begins_answer=False).rpartition(_ANSWER)[2]

    def call(self, name: str, arguments: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]]) -> str:
        """Text of an assistant's tool call; a template without calls drops it."""
        asked = {"role": "user", "content": _ANSWER}
        made = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        calling = {"role": "assistant", "content": "", "tool_calls": [made]}
        before = self.write([asked], begins_answer=True, tools=tools)
        whole = self.write([asked, calling], begins_answer=False, tools=tools)
        return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071 - texts, no paths


class _Generation(ext.Extension):
    """Tag `generation`, which other trainers use; its content is plain text."""

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
        problem = f"{told!r} is not a date of ISO 8601, such as {DATE!r}"
        raise ConfigError(f"chat_template_arguments.{CLOCK}", problem) from error


GIVEN_ROLES = ("user", "tool", "system")
"""Roles of messages between turns; assistant turns are the policy's."""

_DRAWN = "answer0of0heterorl"
"""Stands for drawn text; no template contains or trims it."""
_ASKED = Message(role="user", content="asked")
_PROBES = ("probe0one", "probe0two")
_THOUGHT = "<think>\nthought\n</think>\n\n"
_STAND_IN = (
    {"type": "function", "function": {
        "name": "probe0tool", "description": "", "parameters": {"type": "object", "properties": {}},
    }},
)  # fmt: skip


class GivenTokens:
    """Tokens between turns, of a template and its tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Any, *, end_token_id: int) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._end_id = end_token_id
        self._end = str(tokenizer.added_tokens_decoder[end_token_id].content)
        self._problems: dict[str, str] = {}

    def ids(self, messages: Sequence[Message], *, is_cut: bool) -> list[int]:
        """Token ids between a turn and the start of the next.

        A text that spells a special token becomes that token, as in prompts. With `is_cut` the end token of the turn
        comes first. Raises PromptRefused if the template cannot write such messages behind an answer.
        """
        if not messages:
            raise ValueError("no messages")
        for role in sorted({message.role for message in messages}):
            if role not in self._problems:
                self._problems[role] = self.problem(role)
            if self._problems[role]:
                raise PromptRefused("use_chat_template", self._problems[role])
        try:
            ids = self._encoded(self._behind(messages))
        except TEMPLATE_ERRORS as error:
            raise PromptRefused("use_chat_template", _refusal(messages, error)) from error
        return ids if is_cut else ids[1:]

    def check_behind(self, asked: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raise PromptRefused if a prompt changes the text between turns."""
        probe = [Message(role="user", content=_PROBES[0])]
        try:
            is_same = self._write([*asked, _answer(), *probe], tools=tools).endswith(_DRAWN + self._behind(probe))
        except TEMPLATE_ERRORS as error:
            raise PromptRefused("use_chat_template", _refusal(probe, error)) from error
        if not is_same:
            problem = "the model's template writes a user's message otherwise behind this prompt than behind others"
            raise PromptRefused("use_chat_template", problem, action="remove switches such as /no_think from it")

    def problem(self, role: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Why messages of a role cannot be given; empty where they can."""
        if role not in GIVEN_ROLES:
            return f"no message of the role {role} is given between turns, only of {', '.join(GIVEN_ROLES)}"
        for messages in _tried(role):
            try:
                behind = self._behind(messages)
                problem = self._problem_behind(messages, behind, tools)
            except TEMPLATE_ERRORS as error:
                problem = _refusal(messages, error)
            if problem:
                return problem
        return ""

    def _problem_behind(self, messages: Sequence[Message], behind: str, tools: Sequence[Mapping[str, Any]]) -> str:
        place = -1
        for message in messages:
            place = behind.find(message.content, place + 1)
            if place < 0:
                return f"the model's template leaves out messages of the role {message.role} behind an answer"
        expected = self._encoded(behind)
        for number, (words, history) in enumerate(_histories(messages)):
            for given in ((), tools) if tools else ((),):
                try:
                    text = self._write([*history, *messages], tools=given)
                except TEMPLATE_ERRORS:
                    # The first history must work; others may not exist for this template.
                    if number:
                        continue
                    raise
                whole = f"{words}{' and tools' if given else ''}"
                if not text.endswith(_DRAWN + behind):
                    roles = ", ".join(message.role for message in messages)
                    return (
                        f"the model's template writes messages of {roles} otherwise behind {whole} than behind one turn"
                    )
                # A tokenizer splits a text at special tokens first, so the text from an end token on has equal ids
                # by itself and in the whole. Refuse a tokenizer that joins across them.
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids[-len(expected) :] != expected:
                    return f"the tokenizer joins tokens across {self._end!r}, behind {whole}"
        return ""

    def _behind(self, messages: Sequence[Message]) -> str:
        """Text from an answer's end on, with the messages behind it."""
        text = self._write([_ASKED, _answer(), *messages])
        return text.partition(_DRAWN)[2]

    def _write(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if not tools and self._template.has_tool_form and any(each.role == "tool" for each in messages):
            # Results exist only where tools are shown.
            tools = _STAND_IN
        return self._template.write([as_variables(each) for each in messages], begins_answer=True, tools=tools)

    def _encoded(self, behind: str) -> list[int]:
        """Ids from the end token on, which may take white space behind."""
        before, end, rest = behind.partition(self._end)
        if not end or before.strip():
            raise ValueError(f"an earlier answer ends by {behind[:20]!r}, the last one by {self._end!r}")
        ids: list[int] = self._tokenizer.encode(end + rest, add_special_tokens=False)
        if ids[:1] != [self._end_id]:
            raise ValueError(f"{self._end!r} is encoded as other tokens")
        return ids


def _tried(role: str) -> list[list[Message]]:
    """Messages to try for a role; tool results also before others."""
    first, second = (Message(role=role, content=text, name="tool" if role == "tool" else "") for text in _PROBES)
    if role != "tool":
        return [[first]]
    return [[first], [first, second], [first, Message(role="user", content=_PROBES[1])]]


def _histories(messages: Sequence[Message]) -> list[tuple[str, list[Message]]]:
    """Named conversations that end with the answer; the first has one turn."""
    system = Message(role="system", content="told")
    turn, thinking = [_ASKED, _answer()], [_ASKED, _answer(_THOUGHT)]
    return [
        ("one turn", turn),
        ("a system prompt", [system, *turn]),
        ("thoughts", thinking),
        ("two turns", [*turn, *messages, _answer()]),
        ("two turns of the user", [*turn, *turn]),
        ("two turns with thoughts", [*thinking, *messages, _answer(_THOUGHT)]),
    ]


def _answer(thought: str = "") -> Message:
    return Message(role="assistant", content=f"{thought}{_DRAWN}")


def _refusal(messages: Sequence[Message], error: Exception) -> str:
    roles = ", ".join(message.role for message in messages)
    return f"the model's template refuses messages of {roles} behind an answer: {first_line(error)}"
