"""What the author of an environment writes: a class over text, of which each episode gets a new object.

A whole environment, for prompts of a file with an answer in each row:

    class Guess:
        def reset(self, row, *, seed):
            self.number, self.tries = int(row["answer"]), 0
            return "Guess my number between 1 and 100. Write the number alone."

        def step(self, action):
            self.tries += 1
            guess = int(action.answer) if action.answer.strip().isdigit() else 0
            return None if guess == self.number else "higher" if guess < self.number else "lower"

        def score(self):
            return 1 / self.tries if self.tries else 0.0

`task.environment = "package.module:Guess"` names it. `random` and `numpy.random` are seeded with the episode's seed
before `reset`, so that a class which draws from them alone is deterministic: the same row, seed and actions give the
same observations and the same score on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.task import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the policy's turn states it.

    Example: ToolCall("add", {"a": 12, "b": 34})
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy.

    Example: Action("The number is 7.")
    """

    text: str
    """All that it wrote, thoughts included."""
    tool_calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False
    """Whether the turn ended at its longest length, and not by an end token."""

    @property
    def answer(self) -> str:
        """The text without its thoughts."""
        return answer_of(self.text)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment says to a turn.

    Example: Observation((Message(role="user", content="higher"),))
    """

    messages: tuple[Message, ...]
    """Of the roles user, tool and system; none only where the episode is done."""
    done: bool = False


Reset = str | Sequence[Message | Mapping[str, str]] | None
"""The first messages in place of the row's prompt; a text is one message of the user; None keeps the prompt."""
Step = Observation | str | None
"""A text is one message of the user, None the end of the episode."""


class Environment(Protocol):
    """One episode. A class needs `reset`, `step` and `score`; all else has a default."""

    is_deterministic: ClassVar[bool] = True
    """Whether row, seed and actions alone decide all observations and the score. A learner replays such episodes."""
    shares_process: ClassVar[bool] = False
    """Whether several episodes may live in one process. Then none may draw from `random` or `numpy.random`, and one
    that hangs takes the others of its process with it."""
    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions that the policy is shown as tools (see tools.py); `step` is given the calls, and answers them."""

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Reset:
        """Begin.

        Args:
            row: the columns of the prompt's row, with the texts `prompt` and `answer` where it has them.
            seed: of the episode; the members of a group have the same.
        """
        ...

    def step(self, action: Action) -> Step:
        """Answer a turn."""
        ...

    def score(self) -> float | Mapping[str, float]:
        """The reward, or its named parts; asked once, also where a limit ended the episode."""
        ...

    def close(self) -> None:
        """Give back what the episode holds; may be left out."""
        ...
