"""Task: training prompts by index, held-out prompts, and a verifiable reward."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

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


class Task(Protocol):
    """Prompts and scores; equal digests mean equal prompts and scores everywhere."""

    @property
    def digest(self) -> Digest:
        """Digest of data, options and reward."""

    @property
    def num_prompts(self) -> int:
        """Training prompts."""

    @property
    def num_evaluation_prompts(self) -> int:
        """Held-out prompts; none of them is a training prompt."""

    def prompt(self, index: int) -> Prompt: ...

    def evaluation_prompt(self, index: int) -> Prompt: ...

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Parts whose sum is the reward; raises RewardError where the verifier fails."""


class TaskWrapper:
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


@dataclass(frozen=True, slots=True)
class Doubts:
    """Rewards of a completion that another machine may honestly compute otherwise."""

    near: tuple[str, ...] = ()
    """Rewards that took so long that a time limit may decide."""
    by_code: tuple[str, ...] = ()
    """Rewards that the completion's code decides, perhaps by chance; they can be run again."""


def doubts_of(task: object, prompt: Prompt, completion: str) -> Doubts:
    """Doubts about a completion's rewards; none where the task has no `doubts`."""
    find: Callable[[Prompt, str], Doubts] = getattr(task, "doubts", lambda *_: Doubts())
    return find(prompt, completion)


def close_task(task: object) -> None:
    """Kill the processes of a task or a reward, if any."""
    getattr(task, "close", lambda: None)()


def source_of(task: Task, index: int) -> str:
    """Label of a training prompt's source; empty where a task has one."""
    return str(getattr(task, "source_of", lambda _: "")(index))


def spans_of(task: Task) -> tuple[tuple[str, range], ...]:
    """Label (may be empty) and training prompts of each source."""
    return getattr(task, "spans", None) or (("", range(getattr(task, "num_prompts", 1))),)


def evaluation_source_of(task: Task, index: int) -> str:
    """Label of a held-out prompt's source; empty where a task has one."""
    return str(getattr(task, "evaluation_source_of", lambda _: "")(index))


def knows_answers(task: object) -> bool:
    """Whether a task can tell that an answer is unreadable."""
    return hasattr(task, "answer_problem")


def answer_problem_of(task: object, prompt: Prompt) -> AnswerProblem | None:
    """Why completions cannot be scored; raises DependencyMissing or RewardError."""
    find: Callable[[Prompt], AnswerProblem | None] = getattr(task, "answer_problem", lambda _: None)
    return find(prompt)


def check_answer(task: object, prompt: Prompt) -> None:
    """Raise AnswerUnreadable for an unreadable answer, but not where the verifier fails."""
    try:
        problem = answer_problem_of(task, prompt)
    except RewardError:
        return
    if problem:
        words = f"{prompt.answer[:40]!r}: {problem.text}"
        raise AnswerUnreadable(problem.key, words, action="correct the data")


_LOG = logging.getLogger(__name__)
LOUD_AFTER = 8


class Scorer(Protocol):
    """Computes the parts of a completion's reward."""

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]: ...


def score_group(task: Scorer, prompt: Prompt, texts: Sequence[str]) -> Iterator[tuple[RewardPart, ...]]:
    """Parts of each completion's reward, in order; a RewardError cancels the rest."""
    if getattr(task, "by_group", False):
        score_all: Any = getattr(task, "score_all", None)
        yield from score_all(prompt, texts)
        return
    num_workers = min(int(getattr(task, "num_workers", 1)), len(texts))
    if num_workers <= 1:
        yield from (task.score(prompt, text) for text in texts)
        return
    executor = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="reward")
    try:
        yield from executor.map(lambda text: task.score(prompt, text), texts)
    finally:
        executor.shutdown(cancel_futures=True)


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
    """A task that adds a system message where none is; implements Task."""

    def __init__(self, task: Task, text: str) -> None:
        digest = bytes_digest(f"system prompt 1\n{task.digest}\n{text}".encode())
        # 0: the task computes rewards in this process.
        super().__init__(task, digest=digest, num_workers=int(getattr(task, "num_workers", 0)))
        self._first = Message(role="system", content=text)
        self.score = task.score
        self.doubts, self.answer_problem = partial(doubts_of, task), partial(answer_problem_of, task)
        self.close = partial(close_task, task)

    def prompt(self, index: int) -> Prompt:
        return with_system(self.inner.prompt(index), self._first)

    def evaluation_prompt(self, index: int) -> Prompt:
        return with_system(self.inner.evaluation_prompt(index), self._first)


def with_system(prompt: Prompt, first: Message) -> Prompt:
    """The prompt behind a system message, unless it has one."""
    messages = messages_of(prompt)
    if messages[0].role in SYSTEM_ROLES:
        return prompt
    return dataclasses.replace(prompt, messages=(first, *messages))
