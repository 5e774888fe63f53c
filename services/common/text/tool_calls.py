"""Tool calls in the text of a turn.

The text is hostile: counts, bytes and depth are bounded before parsing. An unreadable call is a message to the policy,
never an exception; its words are equal on every node and release of Python. Calls are read from decoded ids and never
written back.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.source_config import ToolParser
from heterorl.common.text.prompter import Prompter
from heterorl.common.text.thoughts import THINK, THOUGHT

MAX_CALLS = 32
"""Calls of a turn."""
MAX_CALL_BYTES = 65_536
"""UTF-8 bytes of the JSON of one call, or of several in one pair of tags."""
MAX_DEPTH = 32
"""Nested lists and objects of a call."""
MAX_DIGITS = 64
"""Digits of a whole number."""

Parser = Literal["hermes", "json"]
"""`hermes`: JSON between <tool_call> and </tool_call>, as Qwen3; `json`: the whole answer, as Llama 3."""
PARSERS: tuple[Parser, ...] = ("hermes", "json")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORMS = {
    "hermes": f'{_OPEN}{{"name": "TOOL", "arguments": {{...}}}}{_CLOSE}',
    "json": '{"name": "TOOL", "parameters": {...}}',
}
_SPACE = " \t\r\n"
_PROBE = ("probe0tool", {"probe": 12})


class ParsedTurn(NamedTuple):
    """A turn, read."""

    text: str
    """The text without calls, thoughts included."""
    calls: tuple[tuple[str, dict[str, Any]], ...]
    """Name and arguments of each call, in order; none where there is a problem."""
    problem: str
    """Message to the policy why no call was made; else empty."""


class _UnreadableError(Exception):
    """A call that cannot be read; its argument is the reason."""


def parse_action(text: str, *, parser: Parser) -> ParsedTurn:
    """Read a turn's text; only calls behind its last thoughts count."""
    start = text.rfind(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
    end = text.find(THINK, start)
    end = len(text) if end < 0 else end
    answer = text[start:end]
    rest, written, problem = _from_tags(answer) if parser == "hermes" else _from_whole(answer)
    if parser == "hermes" and _is_cut(text[:start], answer):
        problem = f"a call has {THOUGHT} in it"
    calls: list[tuple[str, dict[str, Any]]] = []
    for each in written:
        if problem:
            break
        try:
            calls += _read(each)
        except _UnreadableError as error:
            problem = f"call {len(calls) + 1} {error}"
    if not problem and len(calls) > MAX_CALLS:
        problem = f"a turn has at most {MAX_CALLS} calls"
    if problem:
        calls = []
        problem = f"No tool was called: {problem}. Write {_FORMS[parser]}"
    return ParsedTurn(text[:start] + rest + text[end:], tuple(calls), problem)


def parser_for(prompter: Prompter, *, tools: Sequence[Mapping[str, Any]], setting: ToolParser) -> Parser:
    """The parser of a run, `auto` by template; raises ConfigError for none."""
    chosen = setting
    if chosen == "auto":
        written = prompter.written_call(*_PROBE, tools=tools)
        chosen = "hermes" if _OPEN in written else "json"
        # Turns are read as they are decoded, without special tokens.
        read = prompter.decode(prompter.tokens(written))
        if parse_action(read, parser=chosen).calls != (_PROBE,):
            problem = f"no parser reads the form in which the model's template writes calls: {read.strip()[:80]!r}"
            if _PROBE[0] not in written:
                problem = "the model's template writes no calls, so their form is unknown"
            raise ConfigError("task.tool_parser", problem, action=f"set it to one of {', '.join(PARSERS)}")
    decoded = prompter.decode(prompter.tokens(_FORMS[chosen]))
    if decoded != _FORMS[chosen]:
        problem = f"of the form of {chosen} the tokenizer gives back {decoded[:80]!r}"
        raise ConfigError("task.tool_parser", problem, action="set another one, or take another model")
    return chosen


def _from_tags(answer: str) -> tuple[str, list[str], str]:
    kept: list[str] = []
    written: list[str] = []
    at = 0
    while (start := answer.find(_OPEN, at)) >= 0:
        kept.append(answer[at:start])
        end = answer.find(_CLOSE, start)
        if end < 0:
            return "".join(kept), [], f"call {len(written) + 1} has no {_CLOSE}"
        if len(written) == MAX_CALLS:
            return "".join(kept), [], f"a turn has at most {MAX_CALLS} calls"
        written.append(answer[start + len(_OPEN) : end])
        at = end + len(_CLOSE)
    kept.append(answer[at:])
    return "".join(kept), written, ""


def _is_cut(before: str, answer: str) -> bool:
    """Whether the end of thoughts lies within a call."""
    return before.rfind(_OPEN) > before.rfind(_CLOSE) and _CLOSE in answer.partition(_OPEN)[0]


def _from_whole(answer: str) -> tuple[str, list[str], str]:
    """The answer itself where it is a call; other JSON is text."""
    has_arguments = '"arguments"' in answer or '"parameters"' in answer
    is_call = answer.lstrip(_SPACE).startswith(("{", "[")) and '"name"' in answer and has_arguments
    return ("", [answer], "") if is_call else (answer, [], "")


def _read(written: str) -> list[tuple[str, dict[str, Any]]]:
    _check_bounds(written)
    try:
        value = json.loads(written, parse_constant=_refuse, parse_int=_whole, parse_float=_fraction)
        # Half a surrogate pair is JSON, but not text.
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        raise _UnreadableError("is no JSON") from None
    found = value if isinstance(value, list) else [value]
    if len(found) > MAX_CALLS:
        raise _UnreadableError(f"has more than {MAX_CALLS} calls in it")
    return [_call_of(each) for each in found]


def _call_of(value: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _UnreadableError("is no object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise _UnreadableError("has no name")
    if not isinstance(arguments, dict):
        raise _UnreadableError("has arguments that are no object")
    return name, arguments


def _refuse(word: str) -> None:
    raise ValueError(word)


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("too many digits")
    return int(digits)


def _fraction(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _check_bounds(written: str) -> None:
    """Bound bytes and depth of unparsed JSON, without brackets in strings."""
    try:
        size = len(written.encode())
    except UnicodeEncodeError:
        raise _UnreadableError("is no Unicode text") from None
    if size > MAX_CALL_BYTES:
        raise _UnreadableError(f"has {size} bytes of at most {MAX_CALL_BYTES}")
    depth, is_text, is_escaped = 0, False, False
    for character in written:
        if is_text:
            is_text = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_text = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _UnreadableError(f"is deeper than {MAX_DEPTH} lists and objects")
        elif character in "]}":
            depth -= 1
