"""Environment: the class that an author writes.

Each episode gets a new object.

docs/environments.md has a whole one, `Guess`.

`task.environment = "package.module:Guess"` names it. `random` and `numpy.random` are seeded with the episode's seed
before `reset`. A class that draws from them only is deterministic: equal row, seed and actions give equal observations
and scores on every machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.task import Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of the policy's turn.

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
    """All text of the turn, thoughts included."""
    tool_calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False
    """Whether the turn ended at its token limit, without an end token."""

    @property
    def answer(self) -> str:
        """The text without its thoughts."""
        return answer_of(self.text)


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a turn.

    Example: Observation((Message(role="user", content="higher"),))
    """

    messages: tuple[Message, ...]
    """Messages of the roles user, tool and system; may be empty only where the episode is done."""
    done: bool = False


Reset = str | Sequence[Message | Mapping[str, str]] | None
"""First messages, which replace the row's prompt; a text is one user message, None keeps the prompt."""
Step = Observation | str | None
"""A text is one user message; None ends the episode."""


class Environment(Protocol):
    """One episode; a class needs `reset`, `step` and `score`; others have defaults."""

    is_deterministic: ClassVar[bool] = True
    """Whether row, seed and actions decide all observations and the score. A learner replays such episodes."""
    shares_process: ClassVar[bool] = False
    """Whether episodes may share a process (16 at most). Each has its own state of `random` and `numpy.random`; an
    episode that hangs ends the others."""
    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions that the policy is shown as tools (see tools.py); `step` gets their calls and answers them."""

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Reset:
        """Begin an episode.

        `row` has the columns, with the texts `prompt` and `answer` where it has them. `seed` is equal for all members
        of a group.
        """

    def step(self, action: Action) -> Step: ...

    def score(self) -> float | Mapping[str, float]:
        """The reward or its named parts; called once, also past a limit."""

    def close(self) -> None:
        """Release resources; optional."""
