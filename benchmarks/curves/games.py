"""Three environments of several turns, each with a way to play that a supervised warm start imitates.

Episodes share processes, so each has a random generator of its own.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from heterorl.common.tasks.environments.environment import Action, Observation
from heterorl.common.tasks.environments.tools import answer_calls
from heterorl.common.tasks.task import Message


def _said(text: str) -> Observation:
    return Observation((Message(role="user", content=text),))


def mul(a: int, b: int) -> str:
    """Multiply.

    Args:
        a: first factor.
        b: second factor.
    """
    return f"{a * b:05d}"


class Calculator:
    """A product of a three-digit and a two-digit number; a call of `mul` gives it, and the next turn states it."""

    shares_process: ClassVar[bool] = True
    tools: ClassVar[tuple[Any, ...]] = (mul,)
    max_turns: ClassVar[int] = 3
    max_new_tokens: ClassVar[int] = 12
    skill: ClassVar[float] = 0.35
    """Share of the demonstrations that call the tool; the others state the product at once."""
    words: ClassVar[tuple[str, ...]] = ('{"name": "mul", "parameters": {"a": ', ', "b": ', "}}")
    """Texts that are one token."""

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:  # noqa: ARG002 - of the Protocol
        """Choose the two numbers."""
        chooser = random.Random(seed)
        self.factors = chooser.randint(100, 999), chooser.randint(10, 99)
        self.said, self.was_called = "", False
        return f"{self.factors[0]}*{self.factors[1]}"

    def step(self, action: Action) -> Observation | None:
        """The tool's answer; None after a turn without a call."""
        if action.tool_calls:
            self.was_called = True
            return Observation(answer_calls(self.tools, action.tool_calls, most=64))
        self.said = action.answer
        return None

    def score(self) -> float:
        """1 for the product."""
        return float(self.said == mul(*self.factors))

    def demonstrate(self, chooser: random.Random) -> str:
        """The next turn of a demonstration."""
        if self.was_called or chooser.random() >= self.skill:
            return mul(*self.factors)
        call = {"name": "mul", "parameters": {"a": self.factors[0], "b": self.factors[1]}}
        return json.dumps(call)


class Guess:
    """A number from 1 to 15, found in at most four turns by halves."""

    shares_process: ClassVar[bool] = True
    max_turns: ClassVar[int] = 4
    max_new_tokens: ClassVar[int] = 3
    highest: ClassVar[int] = 15
    skill: ClassVar[float] = 0.25
    """Share of the demonstrated turns that halve the interval; the others are random numbers."""
    words: ClassVar[tuple[str, ...]] = ("higher", "lower", *map(str, range(10, 16)))

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:  # noqa: ARG002 - of the Protocol
        """Choose the number."""
        self.number = random.Random(seed).randint(1, self.highest)
        self.low, self.high, self.is_found = 1, self.highest, False
        return "?"

    def step(self, action: Action) -> Observation | None:
        """The direction in which the number lies; None once it is found."""
        text = action.answer
        guess = int(text) if text.isascii() and text.isdigit() else 0
        self.is_found = guess == self.number
        if self.is_found:
            return None
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return _said("higher")
        self.high = min(self.high, guess - 1)
        return _said("lower")

    def score(self) -> float:
        """1 for the number."""
        return float(self.is_found)

    def demonstrate(self, chooser: random.Random) -> str:
        """The next turn of a demonstration."""
        is_skilled = chooser.random() < self.skill
        return str((self.low + self.high) // 2 if is_skilled else chooser.randint(1, self.highest))


class Mastermind:
    """A code of two of four colours, found in at most four turns; the answers count matches and do not reward them."""

    shares_process: ClassVar[bool] = True
    max_turns: ClassVar[int] = 4
    max_new_tokens: ClassVar[int] = 3
    codes: ClassVar[tuple[str, ...]] = tuple(
        sorted(map("".join, itertools.product("ABCD", repeat=2)), key=lambda code: (code[0] == code[1], code))
    )
    skill: ClassVar[float] = 0.2
    """Share of the demonstrated turns that are the first code that fits all answers; the others are random codes."""
    words: ClassVar[tuple[str, ...]] = codes

    def reset(self, row: Mapping[str, Any], *, seed: int) -> str:  # noqa: ARG002 - of the Protocol
        """Choose the code."""
        self.code = random.Random(seed).choice(self.codes)
        self.left, self.is_found = list(self.codes), False
        return "?"

    def step(self, action: Action) -> Observation | None:
        """Places that are right, and colours at wrong places; None once the code is found."""
        guess = action.answer
        self.is_found = guess == self.code
        if self.is_found:
            return None
        if guess not in self.codes:
            return _said("--")
        answer = matches(self.code, guess)
        self.left = [each for each in self.left if matches(each, guess) == answer]
        return _said(answer)

    def score(self) -> float:
        """1 for the code."""
        return float(self.is_found)

    def demonstrate(self, chooser: random.Random) -> str:
        """The next turn of a demonstration."""
        return self.left[0] if chooser.random() < self.skill else chooser.choice(self.codes)


def matches(code: str, guess: str) -> str:
    """Number of right places, and of right colours at wrong places, as two digits."""
    places = sum(map(str.__eq__, code, guess))
    colours = sum(min(code.count(colour), guess.count(colour)) for colour in set(guess))
    return f"{places}{colours - places}"


GAMES: dict[str, Any] = {"calculator": Calculator, "guess": Guess, "mastermind": Mastermind}
"""Environment by its name in results."""
