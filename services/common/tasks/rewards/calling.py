"""How a reward function wants to be called: by the names of its parameters, in order, or with lists as TRL calls one.

    f(prompt, completion, answer)            also f(completion, difficulty): parameters by name, columns among them
    f(p, c, a)                               three parameters of other names: in this order
    f(prompts, completions, **columns)       TRL's: lists of one entry each, and a list of one number back

Imports nothing of heterorl: it is loaded by the process that runs foreign code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_NAMES = ("prompt", "completion", "answer", "messages", "whole")
_IN_ORDER = 3
"""So many of them may be parameters of other names."""
_OF_TRL = ("prompts", "completions")
_UNKNOWN_HERE = frozenset({"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL's trainer gives besides, and no reward is given here."""


class Unanswerable(Exception):
    """The function asks for what it cannot be given."""


class Calling:
    """One function, and what it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Look at its signature.

        Raises:
            Unanswerable: it needs what is given to no reward here.
        """
        self._function = function
        named, self.takes_all, num_in_order = _parameters(function)
        self._is_batch = "completions" in named
        self._num_in_order = 0 if self._is_batch or "completion" in named else num_in_order
        own: tuple[str, ...] = _OF_TRL if self._is_batch else _NAMES
        if self._num_in_order:
            named = dict(list(named.items())[self._num_in_order :])
            own = _NAMES[_IN_ORDER:]
        self.asks = sorted(name for name in named if name not in own)
        self.needs = [name for name in self.asks if named[name]]
        self._own = list(own) if self.takes_all else [name for name in named if name in own]
        if unknown := sorted(_UNKNOWN_HERE & set(self.needs)):
            raise Unanswerable(f"it asks for {', '.join(unknown)}, which no reward is given here")
        if self._is_batch:
            # An answer is a column to TRL, whatever the set calls it.
            self.needs = [name for name in self.needs if name != "answer"]

    @property
    def facts(self) -> dict[str, Any]:
        """What whoever calls it should know."""
        return {"asks": self.asks, "needs": self.needs, "takes_all": self.takes_all}

    def parts(self, request: Mapping[str, Any]) -> dict[str, float]:
        """The values of one completion, by name.

        Args:
            request: prompt, completion, answer, messages, whole (the completion with its thoughts), and columns if any.

        Raises:
            ValueError: it returned text, or no list of one number where it is called with lists.
        """
        if self._is_batch:
            return {"reward": _number(self._of_batch(request))}
        columns = {name: value for name, value in request.get("columns", {}).items() if name not in _NAMES}
        named = {name: request[name] for name in self._own} | columns
        value = self._function(*[request[name] for name in _NAMES[: self._num_in_order]], **named)
        parts = value if isinstance(value, dict) else {"reward": value}
        return {str(part): _number(number) for part, number in parts.items()}

    def _of_batch(self, request: Mapping[str, Any]) -> Any:
        prompt, completion = request["prompt"], request["whole"]
        if request["is_conversation"]:
            prompt, completion = request["messages"], [{"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in request.get("columns", {}).items() if name not in _OF_TRL}
        if "answer" in self.asks:
            columns.setdefault("answer", [request["answer"]])
        own = {"prompts": [prompt], "completions": [completion]}
        values = self._function(**{name: own[name] for name in self._own}, **columns)
        try:
            (value,) = values
        except (TypeError, ValueError):
            raise ValueError(f"it was asked for a list of one number, and returned {values!r:.80}") from None
        if value is None:
            raise ValueError("it returned None for a completion, and no number")
        return value


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError(f"it returned the text {value!r:.80}, and no number")
    return float(value)


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool, int]:
    """Parameters by name, each with whether it is needed; whether others are taken; how many may be given in order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Of a function in C nothing is known.
        return {}, False, _IN_ORDER
    in_order = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = [one for one in parameters if one.kind == one.KEYWORD_ONLY]
    named = {one.name: one.default is one.empty for one in [*in_order, *by_name]}
    kinds = {one.kind for one in parameters}
    count = _IN_ORDER if inspect.Parameter.VAR_POSITIONAL in kinds else min(_IN_ORDER, len(in_order))
    return named, inspect.Parameter.VAR_KEYWORD in kinds, count
