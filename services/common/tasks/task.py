"""What a task is: prompts by index, held-out prompts, a verifiable score, and the scores of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from heterorl.common.errors import AnswerUnreadable, RewardError
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a prompt that is a conversation.

    Example: Message(role="user", content="12+34=")
    """

    role: str
    content: str
    name: str = ""
    """Of a message with the role `tool`: which tool it is the result of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and what its answer should be; `text` is what rewards are given of it.

    Example: Prompt(index=7, text="12+34=", answer="640")
    """

    index: int
    text: str
    answer: str
    messages: tuple[Message, ...] = ()
    """What the model is asked, where it is more than one user's message; the last one is `text`."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The columns of its row but for the prompt itself, which a reward of one's own may ask for."""
    refusal: str = ""
    """Why nothing can be generated of it, where its task knows."""

    @property
    def shown(self) -> str:
        """What people read of it: the text, or each message under its role."""
        return "\n\n".join(f"{each.role}:\n{each.content}" for each in self.messages) or self.text


WHOLE = "reward"
"""Name of the only part of a reward that is one number."""

Measure = Callable[[Sequence[Prompt]], list[int | None]]
"""Tokens of prompts as a node writes them, template included."""


class Task(Protocol):
    """Prompts and scores; equal digests mean equal prompts and equal scores on every site."""

    @property
    def digest(self) -> Digest:
        """Digest of data, options and reward."""
        ...

    @property
    def num_prompts(self) -> int:
        """Number of training prompts."""
        ...

    @property
    def num_evaluation_prompts(self) -> int:
        """Number of held-out prompts; none of them is a training prompt."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        ...

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        ...

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Named parts of the reward, whose sum is the reward.

        Raises:
            RewardError: the verifier failed; that is not a score.
        """
        ...


class TaskWrapper:
    """The prompts of another task; implements Task but for `score`."""

    def __init__(self, task: Task, *, digest: Digest, num_workers: int) -> None:
        self.inner = task
        self.digest = digest
        self.num_workers = num_workers
        self.num_prompts = task.num_prompts
        self.num_evaluation_prompts = task.num_evaluation_prompts

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self.inner.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self.inner.evaluation_prompt(index)


@dataclass(frozen=True, slots=True)
class Doubts:
    """Rewards of a completion, by name, of which another machine may come to another value without fault."""

    near: tuple[str, ...] = ()
    """Those that took so long that a time limit may decide."""
    by_code: tuple[str, ...] = ()
    """Those that are what the completion's code comes to: it may leave that to chance, and can be run again."""


def doubts_of(task: object, prompt: Prompt, completion: str) -> Doubts:
    """What is in doubt of a completion's rewards; nothing where its task knows of no doubts."""
    find = getattr(task, "doubts", None)
    found: Doubts = Doubts() if find is None else find(prompt, completion)
    return found


def close_task(task: object) -> None:
    """End the processes that a task or a reward runs, if any."""
    close = getattr(task, "close", None)
    if close is not None:
        close()


def source_of(task: Task, index: int) -> str:
    """The label of the source of a training prompt; empty where a task has one source."""
    find = getattr(task, "source_of", None)
    return str(find(index)) if find is not None else ""


def knows_answers(task: object) -> bool:
    """Whether a task may know of an answer that no completion can be compared with it."""
    return hasattr(task, "answer_problem")


def answer_problem_of(task: object, prompt: Prompt) -> str:
    """Why no completion of a prompt can be scored, as far as its answer alone shows; empty where nothing is known.

    Raises:
        DependencyMissing: what would know is not installed.
        RewardError: what would know failed.
    """
    find = getattr(task, "answer_problem", None)
    return str(find(prompt)) if find is not None else ""


def check_answer(task: object, prompt: Prompt) -> None:
    """Refuse a prompt of which no completion can be scored; where nothing is known, its completions will show it.

    Raises:
        AnswerUnreadable: its answer cannot be read.
    """
    try:
        problem = answer_problem_of(task, prompt)
    except RewardError:
        return
    if problem:
        raise AnswerUnreadable("task.match", f"{prompt.answer[:40]!r}: {problem}", action="correct the data")


_LOG = logging.getLogger(__name__)
LOUD_AFTER = 8


class Scorer(Protocol):
    """What gives the parts of a completion's reward."""

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Named parts, whose weighted sum is the reward."""
        ...


def score_group(task: Scorer, prompt: Prompt, texts: Sequence[str]) -> Iterator[tuple[RewardPart, ...]]:
    """The parts of each completion's reward, in order; the first failure gives up the rest.

    Raises:
        RewardError: one could not be computed.
    """
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
    """Counts groups in a row that were lost for want of one thing, and says so before all are lost in silence."""

    missing: str = "REWARD"
    cure: str = "correct task.reward or what it needs, or raise task.reward_timeout_s"
    length: int = 0
    problem: str = ""
    """What a person is told while the row is long; empty else."""

    def passed(self) -> None:
        """A group had it."""
        self.length, self.problem = 0, ""

    def failed(self, error: Exception) -> None:
        """A group had none: an error in the log at the eighth in a row, the sixteenth, the thirty-second ..."""
        self.length += 1
        if self.length >= LOUD_AFTER:
            words = f"NO {self.missing} for {self.length} groups in a row, nothing can be trained on"
            self.problem = f"{words}: {error} ({self.cure})"
            if self.length & (self.length - 1) == 0:
                _LOG.error("%s", self.problem)
