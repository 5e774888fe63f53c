"""OpenAI's chat format for agent programs: requests read, turns written. Pure.

A request is another turn only where it begins with all known messages and adds some. Messages are compared by their
parsed content; drawn tokens are never taken from a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.tasks.environments.environment import Action
from heterorl.common.tasks.task import Message

FIRST_ROLES = ("system", "user", "assistant")
ADDED_ROLES = ("user", "tool", "system")
"""Roles of messages behind an answer."""
OVER = "budget_exhausted"
"""Error code after the end of an episode."""
_OF_SERVERS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag", "regex",
    "ebnf", "json_schema", "chat_template", "thinking_token_budget", "custom_logit_processor", "logits_processors",
    "stop_regex", "lora_path",
)  # fmt: skip
"""Fields of vLLM and SGLang."""
_TAKEN: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "parallel_tool_calls": (None, True),
    "functions": (None, []),
    "function_call": (None,),
    "modalities": (None, ["text"]),
    **dict.fromkeys(_OF_SERVERS, (None, "", {}, [])),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "chat_template_kwargs"), (None, [], {})),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "continue_final_message", "echo"), (None, False)),
    **dict.fromkeys(("min_tokens", "min_p", "prompt_logprobs"), (None, 0)),
    "top_k": (None, -1, 0),
    "best_of": (None, 1),
    "skip_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
}
"""Fields that would change sampling or output, with their values that do not."""


class RequestRefused(Exception):
    """An error that answers a request; SDKs retry only its status 500."""

    def __init__(self, words: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": words, "type": kind, "param": param, "code": code}}
        super().__init__(words)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One parsed message; equal messages are equal however they are written."""

    role: str
    content: str
    calls: tuple[tuple[str, str, str], ...] = ()
    """Id, name and arguments of each tool call; arguments as JSON with sorted keys."""
    call_id: str = ""
    """Call that a tool's result belongs to."""
    name: str = ""
    """Speaker, of the user or the system; frameworks name the assistant as they like."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a turn."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    model: str
    is_streamed: bool
    has_usage: bool

    def asks_as(self, other: Request) -> bool:
        """Whether both ask for one turn; ignored fields may differ."""
        return self.messages == other.messages and self.tools == other.tools


def read_request(body: Any) -> Request:
    """A request from parsed JSON; raises RequestRefused for unsupported settings or form."""
    if not isinstance(body, dict):
        raise RequestRefused("the body is not an object")
    # The policy would call no tool anyway.
    has_no_choice = body.get("tool_choice") == "none" and not body.get("tools")
    for name, values in _TAKEN.items():
        if body.get(name) not in values and not (name == "tool_choice" and has_no_choice):
            raise RequestRefused(f"{name} is not supported: the run's own settings decide what is drawn", param=name)
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages is not a list, or an empty one", param="messages")
    if not isinstance(tools, list):
        raise RequestRefused("tools is not a list", param="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"tools[{number}] is not a function with a name", param="tools")
    options = body.get("stream_options")
    return Request(
        messages=tuple(_said(entry, f"messages[{number}]") for number, entry in enumerate(messages)),
        tools=tuple(tools),
        model=str(body.get("model", "")),
        is_streamed=body.get("stream") is True,
        has_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


@dataclass(slots=True)
class History:
    """Conversation of a program and the policy."""

    known: list[ChatMessage] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tools of the first request; later requests must show the same."""

    def extend(self, request: Request) -> tuple[Message, ...]:
        """Messages that a request adds; raises RequestRefused for rewritten or invalid ones."""
        if self.tools is not None and request.tools != self.tools:
            raise RequestRefused("tools differ from the first request's: an episode has one set", param="tools")
        for number, (known, stated) in enumerate(zip(self.known, request.messages, strict=False)):
            if known != stated:
                words = f"messages[{number}] differs from what was said before: an episode is one growing conversation"
                raise RequestRefused(f"{words}, and its history cannot be rewritten", param="messages")
        added = request.messages[len(self.known) :]
        if not added or added[-1].role == "assistant":
            raise RequestRefused("messages end with the assistant's, or add none to those before", param="messages")
        roles = ADDED_ROLES if self.known else FIRST_ROLES
        for number, each in enumerate(added, len(self.known)):
            if each.role not in roles:
                words = f"messages[{number}] has the role {each.role!r}; only {', '.join(roles)} may stand there"
                raise RequestRefused(f"{words}, since the policy's turns are its own", param="messages")
            if each.calls:
                raise RequestRefused(f"messages[{number}] has tool_calls that the policy never made", param="messages")
        names = {call: name for call, name, _ in self.known[-1].calls} if self.known else {}
        messages = tuple(_message(each, names, number) for number, each in enumerate(added, len(self.known)))
        self.known += added
        self.tools = request.tools
        return messages

    def answer(self, action: Action) -> dict[str, Any]:
        """The policy's turn as an assistant message, which becomes known."""
        calls = [
            {
                "id": f"call_{len(self.known)}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for number, call in enumerate(action.tool_calls)
        ]
        content = action.answer
        message: dict[str, Any] = {"role": "assistant", "content": content if content.strip() or not calls else None}
        if calls:
            message["tool_calls"] = calls
        self.known.append(_said(message, "the answer"))
        return message


def _message(said: ChatMessage, names: Mapping[str, str], number: int) -> Message:
    if said.role == "tool" and said.call_id not in names:
        words = f"messages[{number}].tool_call_id is none of the calls of the answer before"
        raise RequestRefused(words, param="messages")
    return Message(role=said.role, content=said.content, name=names.get(said.call_id, said.name))


def _said(entry: Any, place: str) -> ChatMessage:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise RequestRefused(f"{place} is not an object with a role", param="messages")
    role = "system" if entry["role"] == "developer" else entry["role"]
    content = _text(entry.get("content"), f"{place}.content")
    stated = entry.get("tool_calls") or []
    if not isinstance(stated, list):
        raise RequestRefused(f"{place}.tool_calls is not a list", param="messages")
    calls = tuple(_call(each, place) for each in stated)
    # Many programs strip answers; the drawn tokens keep the white space.
    content = content.strip() if role == "assistant" else content
    name = entry.get("name") if role in ("user", "system") else ""
    name = _text(name if isinstance(name, str) else "", f"{place}.name")
    return ChatMessage(role, content, calls, str(entry.get("tool_call_id") or ""), name)


def _text(content: Any, place: str) -> str:
    parts = [content] if isinstance(content, str) else content or []
    texts = []
    for part in parts if isinstance(parts, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise RequestRefused(f"{place} is neither a text nor a list of parts of the type text", param="messages")
        texts.append(text)
    whole = "".join(texts)
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise RequestRefused(f"{place} is not Unicode text", param="messages") from None
    return whole


def _call(entry: Any, place: str) -> tuple[str, str, str]:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict):
        raise RequestRefused(f"{place}.tool_calls has an entry without a function", param="messages")
    arguments = function.get("arguments")
    # Text that is not JSON equals no call of the policy, and is refused as such. Numbers are JavaScript's.
    with suppress(ValueError, RecursionError):
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        arguments = json.loads(written or "{}", parse_int=float)
    return str(entry.get("id")), str(function.get("name")), json.dumps(arguments, sort_keys=True)


def completion(message: Mapping[str, Any], request: Request, *, number: int, is_cut: bool, created: int) -> Any:
    """Answer as a `chat.completion`, tokens not counted; `created` in seconds since 1970."""
    choice = {"index": 0, "message": dict(message), "logprobs": None, "finish_reason": _reason(message, is_cut)}
    return {**_head("chat.completion", request, number, created), "choices": [choice], "usage": _USAGE}


def chunks(message: Mapping[str, Any], request: Request, *, number: int, is_cut: bool, created: int) -> Sequence[Any]:
    """Answer in the pieces of a stream; see `completion`."""
    head = _head("chat.completion.chunk", request, number, created)
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    choices = [(delta, None), ({}, _reason(message, is_cut))]
    pieces = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        for delta, reason in choices
    ]
    return [*pieces, {**head, "choices": [], "usage": _USAGE}] if request.has_usage else pieces


_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _head(kind: str, request: Request, number: int, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": created, "model": request.model}


def _reason(message: Mapping[str, Any], is_cut: bool) -> str:
    return "tool_calls" if "tool_calls" in message else "length" if is_cut else "stop"
