"""Tools: typed Python functions with docstrings, whose results the policy reads.

docs/environments.md has an example of a file.

Each public function of the file except `score` is a tool. The episode ends with the first turn that calls none. The
parameters of `score` name what it gets: `messages`, `answer` and columns of the row. Functions keep no state; an
environment with state is a class.
"""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, to_json

from heterorl.common.tasks.environments.environment import Action, Observation, ToolCall
from heterorl.common.tasks.rewards.worker_main import message_of
from heterorl.common.tasks.task import Message

Tool = Callable[..., Any]
SCORE = "score"
MAX_WORDS = 500
"""Longest error that the policy reads, characters."""
MAX_NAME = 128
"""Longest tool name in an answer, characters."""
_CACHED = type(functools.cache(lambda: None))
_ARGUMENTS = re.compile(r"(Args|Arguments|Parameters):")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\(.*?\)(?=:))?:\s*(.*)")
_PLACE = re.compile(r"(?<= at 0x)[0-9a-f]+")
"""An address of memory in Python's own text of an object."""


def functions_of(module: ModuleType) -> tuple[Tool, ...]:
    """Tools of a file, in order; raises ValueError without any."""
    # An alias is the same tool.
    functions = dict.fromkeys(filter(_is_function, vars(module).values()))
    own = [each for each in functions if each.__module__ == module.__name__]
    tools = tuple(each for each in own if not each.__name__.startswith("_") and each.__name__ != SCORE)
    if not tools:
        raise ValueError(f"{module.__file__} has no public function except {SCORE}; each tool is a public function")
    return tools


def _is_function(each: Any) -> bool:
    """Whether it is a function, also one behind functools.lru_cache."""
    return inspect.isfunction(each) or (isinstance(each, _CACHED) and inspect.isfunction(each.__wrapped__))


def _as_function(tool: Tool) -> Tool:
    if not isinstance(tool, _CACHED):
        return tool

    @functools.wraps(tool)
    def call(*values: Any, **named: Any) -> Any:
        return tool(*values, **named)

    return call


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The schema of each tool; ValueError for two of one name."""
    names = [getattr(tool, "__name__", "") for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"two tools have the name {twice}; rename one")
    return [schema_of(tool) for tool in tools]


def schema_of(tool: Tool) -> dict[str, Any]:
    """A tool for chat templates; ValueError without name, docstring or type."""
    name = getattr(tool, "__name__", "")
    if not name:
        raise ValueError(f"the tool {tool!r:.80} has no name; write a function")
    parameters = [each for each in inspect.signature(tool).parameters.values() if each.name != "self"]
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ValueError(f"the tool {name}: {each} cannot be given by name")
        if each.annotation is each.empty:
            raise ValueError(f"the tool {name}: its parameter {each.name} has no type")
    description, meanings = _described(tool)
    if not description:
        raise ValueError(f"the tool {name} has no docstring; write one, since the policy reads it")
    schema = _schema(tool)
    properties = {key: value for key, value in schema.get("properties", {}).items() if key != "self"}
    for key, meaning in meanings.items():
        if key in properties:
            properties[key] = {**properties[key], "description": meaning}
    required = [key for key in schema.get("required", ()) if key != "self"]
    shown = {"type": "object", "properties": properties, "required": required}
    if "$defs" in schema:
        shown["$defs"] = schema["$defs"]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shown}}


def _schema(tool: Any) -> dict[str, Any]:
    try:
        function: Any = _as_function(tool)
        adapter: TypeAdapter[Any] = TypeAdapter(function)
        return dict(adapter.json_schema(schema_generator=_WithoutTitles))
    except Exception as error:
        # pydantic does not know the type, or it has no JSON form.
        words = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"the tool {tool.__name__}: its types cannot be shown: {words}") from error


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: CoreSchema) -> bool:  # noqa: ARG002 - pydantic's
        return False


def _described(tool: Tool) -> tuple[str, dict[str, str]]:
    """Description and arguments of a docstring in Google's style.
    Sections other than the arguments are part of the description."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    is_of_arguments, indent, last = False, -1, ""
    for line in (inspect.getdoc(tool) or "").splitlines():
        words, depth = line.strip(), len(line) - len(line.lstrip())
        if words and not depth:
            is_of_arguments, indent, last = _ARGUMENTS.fullmatch(words) is not None, -1, ""
        if not is_of_arguments:
            description.append(line.rstrip())
        elif depth:
            indent = depth if indent < 0 else indent
            if depth == indent and (named := _ARGUMENT.fullmatch(words)):
                last, arguments[named.group(1)] = named.group(1), named.group(2)
            elif last:
                arguments[last] = f"{arguments[last]} {words}".strip()
    return "\n".join(description).strip(), arguments


def answer_calls(tools: Sequence[Tool], calls: Sequence[ToolCall], *, most: int) -> tuple[Message, ...]:
    """Result or error of each call, together at most `most` characters."""
    named = {tool.__name__: tool for tool in tools}
    messages = []
    for call in calls:
        text = _result(named, call).encode(errors="replace").decode()
        if len(text) > most:
            text = f"error: the result has {len(text)} characters, which are too many"[:most]
        most -= len(text)
        messages.append(Message(role="tool", content=text, name=call.name[:MAX_NAME]))
    return tuple(messages)


def _plain(value: Any) -> Any:
    """A value that JSON lacks: an array's numbers, else its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    # Python's own text has an address of memory, which no learner's replay repeats.
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise TypeError(f"a {kind.__name__} has no text: its class needs __str__")
    return _PLACE.sub("", str(value))


@functools.cache
def _runner() -> asyncio.Runner:
    """The event loop of a process; locks and clients outlive a call."""
    return asyncio.Runner()


def _result(named: Mapping[str, Tool], call: ToolCall) -> str:
    tool = named.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name}; there are {', '.join(named)}"[:MAX_WORDS]
    try:
        value = validate_call(_as_function(tool))(**call.arguments)
        if inspect.isawaitable(value):
            value = _runner().run(_awaited(value))
        if isinstance(value, AsyncIterator):
            value = _runner().run(_collected(value))
        return value if isinstance(value, str) else to_json(value, fallback=_plain).decode()
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        return f"error: wrong arguments of {call.name}: {'; '.join(lines)}"[:MAX_WORDS]
    except MemoryError:
        # The process is full: it is replaced, and another one would answer otherwise.
        raise
    except BaseException as error:  # noqa: BLE001 - the policy reads it, and may do better; SystemExit too
        # Neither the file's place nor an address of memory: a learner repeats the text.
        words = _PLACE.sub("", message_of(error)).replace(f"{Path(inspect.getfile(inspect.unwrap(tool))).parent}/", "")
        return f"error: {type(error).__name__}: {words}"[:MAX_WORDS]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _collected(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


def column_names(score: Callable[..., Any]) -> list[str]:
    """Columns that a score function needs."""
    parameters = inspect.signature(score).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [each.name for each in named if each.default is each.empty and each.name != "messages"]


class ToolEnvironment:
    """Episode of tool calls with a score at its end; implements Environment."""

    def __init__(self, functions: Sequence[Tool], score: Callable[..., Any], *, most: int) -> None:
        self._functions, self._score, self._most = functions, score, most
        self._row: Mapping[str, Any] = {}
        self._messages: list[dict[str, Any]] = []

    def reset(self, row: Mapping[str, Any], *, seed: int) -> None:  # noqa: ARG002 - of the Protocol
        self._row = row
        self._messages = [*row.get("messages", [{"role": "user", "content": row.get("prompt", "")}])]

    def step(self, action: Action) -> Observation | None:
        """Results of the calls; None, the end, without calls."""
        turn: dict[str, Any] = {"role": "assistant", "content": action.answer}
        if action.tool_calls:
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in action.tool_calls
            ]
        self._messages.append(turn)
        if not action.tool_calls:
            return None
        answers = answer_calls(self._functions, action.tool_calls, most=self._most)
        self._messages += [{"role": "tool", "content": each.content, "name": each.name} for each in answers]
        return Observation(answers)

    def score(self) -> Any:
        given = {**self._row, "messages": json.loads(json.dumps(self._messages))}
        parameters = inspect.signature(self._score).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        return self._score(**given)
