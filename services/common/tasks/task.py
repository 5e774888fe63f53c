"""Task: training prompts by index, held-out prompts, and a verifiable reward."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.errors import AnswerUnreadable, EpisodeError, RewardError
from heterorl.common.process.logs import RARELY_S
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common_messages import bytes_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a prompt that is a conversation.

    Example: Message(role="user", content="12+34=")
    """

    role: str
    content: str
    name: str = ""
    """The tool whose result this is, or the speaker that an agent program names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt with its answer; rewards are given `text`.

    Example: Prompt(index=7, text="12+34=", answer="640")
    """

    index: int
    text: str
    answer: str
    messages: tuple[Message, ...] = ()
    """The conversation, whose last message is `text`; empty where it is one user's message."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Columns of the row except the prompt; a reward function may ask for them."""
    refusal: str = ""
    """Why it cannot be generated from; empty where it can."""
    failure: EpisodeError | None = field(default=None, compare=False, repr=False)
    """The error behind a refusal that another attempt may not have."""

    @property
    def shown(self) -> str:
        """Text for people: the text, or each message under its role."""
        return "\n\n".join(f"{each.role}:\n{each.content}" for each in self.messages) or self.text


WHOLE = "reward"
"""Name of the only part of a reward that is one number."""

Measure = Callable[[Sequence[Prompt]], list[int | None]]
"""Counts tokens of prompts with the template; None for a prompt that the template refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerProblem:
    """Why no completion can be scored, and the key of that reward."""

    key: str
    text: str
    action: str


@dataclass(frozen=True, slots=True)
class Doubts:
    """Rewards of a completion that another machine may honestly compute otherwise."""

    near: tuple[str, ...] = ()
    """Rewards that took so long that a time limit may decide."""
    by_code: tuple[str, ...] = ()
    """Rewards that the completion's code decides, perhaps by chance; they can be run again."""


class RewardSource(ABC):
    """Scores completions: a task, or one reward of its sum."""

    digest: Digest
    """Digest of the files, options and packages that decide values."""
    num_workers: int = 0
    """Completions that are scored at once; 0: in this process."""
    by_group: bool = False
    """Whether `score_all` scores a group better than `score` its completions one by one."""

    @abstractmethod
    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Parts whose sum is the reward; raises RewardError where the verifier fails."""

    def score_all(self, prompt: Prompt, completions: Sequence[str]) -> Iterator[tuple[RewardPart, ...]]:
        """Parts of each completion's reward, in order; a RewardError cancels the rest."""
        num_workers = min(self.num_workers, len(completions))
        if num_workers <= 1:
            yield from (self.score(prompt, text) for text in completions)
            return
        executor = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="reward")
        try:
            yield from executor.map(lambda text: self.score(prompt, text), completions)
        finally:
            executor.shutdown(cancel_futures=True)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:  # noqa: ARG002 - of those that override it
        return Doubts()

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:  # noqa: ARG002
        """Why completions cannot be scored; raises DependencyMissing or RewardError."""
        return None

    @property
    def knows_answers(self) -> bool:
        """Whether it can tell that an answer is unreadable."""
        return type(self).answer_problem is not RewardSource.answer_problem

    def close(self) -> None:  # noqa: B027 - most have none
        """Kill the processes, if any."""


class Task(RewardSource):
    """Prompts and scores; equal digests mean equal prompts and scores everywhere."""

    num_prompts: int
    num_evaluation_prompts: int
    """Held-out prompts; none of them is a training prompt."""
    environments: tuple[Any, ...] = ()
    """`Episodes` of all sources."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt: ...

    @abstractmethod
    def evaluation_prompt(self, index: int) -> Prompt: ...

    @property
    def spans(self) -> tuple[tuple[str, range], ...]:
        """Label (may be empty) and training prompts of each source."""
        return (("", range(self.num_prompts)),)

    def source_of(self, index: int) -> str:  # noqa: ARG002
        """Label of a training prompt's source; empty where there is one."""
        return ""

    def evaluation_source_of(self, index: int) -> str:  # noqa: ARG002
        return ""

    def environment_of(self, prompt: Prompt) -> Any:  # noqa: ARG002
        """A prompt's `EnvironmentSpec`; None where a rollout has one turn."""
        return None

    def environment_at(self, index: int) -> Any:  # noqa: ARG002
        """The `Episodes` of a training prompt; None without.

        The prompt is not made: that may begin an episode.
        """
        return next(iter(self.environments), None)

    @property
    def remote(self) -> Mapping[str, Any]:
        """`Terms` of rewards that a learner cannot compute again, by name."""
        return {}

    def without_remote(self) -> Task:
        """This task with ABSENT remote values; the original closes its processes."""
        return self

    def run_again(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:  # noqa: ARG002
        """Rewards by the completion's code, computed once more."""
        return ()


class TaskWrapper(Task):
    """The prompts of another task; subclasses add `score`."""

    def __init__(self, task: Task, *, digest: Digest, num_workers: int) -> None:
        self.inner = task
        self.digest = digest
        self.num_workers = num_workers
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = task.num_evaluation_prompts

    def prompt(self, index: int) -> Prompt:
        return self.inner.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        return self.inner.evaluation_prompt(index)


def check_answer(task: Task, prompt: Prompt) -> None:
    """Raise AnswerUnreadable for an unreadable answer, but not where the verifier fails."""
    try:
        problem = task.answer_problem(prompt)
    except RewardError:
        return
    if problem:
        words = f"{prompt.answer[:40]!r}: {problem.text}"
        raise AnswerUnreadable(problem.key, words, action="correct the data")


_LOG = logging.getLogger(__name__)
LOUD_AFTER = 8


@dataclass(slots=True, kw_only=True)
class FailureStreak:
    """Counts consecutive groups that lack `missing`, and logs an error."""

    missing: str = "REWARD"
    cure: str = "correct task.reward or what it needs, or raise task.reward_timeout_s"
    length: int = 0
    problem: str = ""
    """Message for the operator while the streak is long; else empty."""
    _said: tuple[int, float] = (0, -math.inf)
    """Length of the streak at the newest line, and its time."""

    def passed(self) -> None:
        self.length, self.problem = 0, ""

    def failed(self, error: Exception, *, cure: str = "") -> None:
        """Count a group; log at the 8th, 16th, 32nd ... in a row.

        Shorter streaks than the one before are logged once a minute.
        """
        self.length += 1
        if self.length >= LOUD_AFTER:
            words = f"NO {self.missing} for {self.length} groups in a row, none of them can be trained on"
            self.problem = f"{words}: {error} ({cure or self.cure})"
            length, said_at = self._said
            now = time.monotonic()
            if self.length & (self.length - 1) == 0 and (self.length > length or now - said_at >= RARELY_S):
                self._said = self.length, now
                _LOG.error("%s", self.problem)


ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
BETWEEN = "\x1e"
"""Separates messages in one text."""


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Messages that the model reads."""
    return prompt.messages or (Message(role="user", content=prompt.text),)


def messages_json(prompt: Prompt) -> list[dict[str, str]]:
    """Messages that the model reads, as JSON objects with role and content."""
    return [{"role": turn.role, "content": turn.content} for turn in messages_of(prompt)]


def question_of(prompt: Prompt) -> str:
    """Roles and contents of all messages except system messages, as one text."""
    if not prompt.messages:
        return f"user\x1f{prompt.text}"
    turns = (turn for turn in prompt.messages if turn.role not in SYSTEM_ROLES)
    return BETWEEN.join(f"{turn.role}\x1f{turn.content}" for turn in turns)


class SystemPromptTask(TaskWrapper):
    """A task that adds a system message where none is."""

    def __init__(self, task: Task, text: str) -> None:
        digest = bytes_digest(f"system prompt 1\n{task.digest}\n{text}".encode())
        super().__init__(task, digest=digest, num_workers=task.num_workers)
        self._first = Message(role="system", content=text)

    def prompt(self, index: int) -> Prompt:
        return with_system(self.inner.prompt(index), self._first)

    def evaluation_prompt(self, index: int) -> Prompt:
        return with_system(self.inner.evaluation_prompt(index), self._first)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        return self.inner.score(prompt, completion)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        return self.inner.doubts(prompt, completion)

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        return self.inner.answer_problem(prompt)

    def close(self) -> None:
        self.inner.close()


def with_system(prompt: Prompt, first: Message) -> Prompt:
    """The prompt behind a system message, unless it has one."""
    messages = messages_of(prompt)
    if messages[0].role in SYSTEM_ROLES:
        return prompt
    return dataclasses.replace(prompt, messages=(first, *messages))
