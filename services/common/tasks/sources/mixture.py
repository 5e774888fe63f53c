"""Several tasks as one, each with its share of the prompts.

A run takes every position once a pass, in its own order, so positions are divided by weight. The source that is
scarcest for its weight has one position for each prompt. The others repeat theirs to keep the shares.

No source trains on prompts that another holds out. Files are compared by question, without system prompts; arithmetic
tasks must hold out the same pairs. A file that repeats arithmetic prompts is not detected.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.arithmetic import NumberPairs
from heterorl.common.tasks.environments.environment_task import EnvironmentSpec
from heterorl.common.tasks.environments.episodes import Episodes
from heterorl.common.tasks.sources.rows_task import RowsTask
from heterorl.common.tasks.task import AnswerProblem, Doubts, Prompt, Task, TaskWrapper
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common_messages import bytes_digest

MAX_POSITIONS = 1 << 48
"""More positions come from a wrong weight."""
MAX_OF_ONE = 1 << 32
"""Prompts of one source that weights count, the first ones; arithmetic with 8 digits has more than any run takes."""
MAX_HELD_OUT = 1 << 23
"""Held-out prompts of one source, the first ones; arithmetic with more digits holds out billions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One task of a mixture; its share is weight over their sum."""

    label: str
    weight: float
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrompt(Prompt):
    """A prompt with its source and its inner prompt."""

    number: int
    inner: Prompt


class MixtureTask(Task):
    """A weighted mixture of tasks."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Assign the positions; raise ConfigError for remote rewards or too unlike weights."""
        for source in sources:
            # A learner knows Terms only for the rewards of the run's own task.
            if remote := source.task.remote:
                raise ConfigError(
                    "task.sources",
                    f"the source {source.label} has {', '.join(remote)}, computed by another service, which a mixture"
                    " cannot have",
                    action="take it out of the mixture, or make that source the only task of the run",
                )
        self.sources = tuple(sources)
        sizes = [min(source.task.num_prompts, MAX_OF_ONE) for source in sources]
        total = sum(source.weight for source in sources)
        shares = [source.weight / total for source in sources]
        whole = max(size / share for size, share in zip(sizes, shares, strict=True))
        if not whole <= MAX_POSITIONS:
            raise ConfigError("task.sources", f"weights so unlike need {whole:.3g} positions", action="raise the least")
        counts = [max(size, round(share * whole)) for size, share in zip(sizes, shares, strict=True)]
        self._ends = np.cumsum(np.array(counts, np.int64))
        starts = (self._ends - counts).tolist()
        # Further positions of a source repeat its prompts.
        self._spans = tuple(
            (source.label, range(start, start + size))
            for source, start, size in zip(sources, starts, sizes, strict=True)
        )
        self.num_prompts = int(self._ends[-1])
        held_out = [min(source.task.num_evaluation_prompts, MAX_HELD_OUT) for source in sources]
        self._held_out = _interleaved(held_out, shares)
        self.num_evaluation_prompts = len(self._held_out)
        self.num_workers = sum(source.task.num_workers for source in sources)
        self.environments = tuple(each for source in sources for each in source.task.environments)
        words = ["mixture 1", *((source.task.digest, count) for source, count in zip(sources, counts, strict=True))]
        self.digest = bytes_digest(repr(words).encode())

    @property
    def spans(self) -> tuple[tuple[str, range], ...]:
        return self._spans

    def prompt(self, index: int) -> Prompt:
        number = self._number(index)
        task = self.sources[number].task
        start = int(self._ends[number - 1]) if number else 0
        return self._mixed(index, number, task.prompt((index - start) % task.num_prompts))

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position; every prefix has the sources' shares."""
        number, inside = (int(part) for part in self._held_out[index])
        return self._mixed(index, number, self.sources[number].task.evaluation_prompt(inside))

    def source_of(self, index: int) -> str:
        return self.sources[self._number(index)].label

    def evaluation_source_of(self, index: int) -> str:
        return self.sources[int(self._held_out[index][0])].label

    def environment_at(self, index: int) -> Episodes | None:
        found: Episodes | None = self.sources[self._number(index)].task.environment_at(index)
        return found

    def environment_of(self, prompt: Prompt) -> EnvironmentSpec | None:
        task, inner = self._asked(prompt)
        found: EnvironmentSpec | None = task.environment_of(inner)
        return found

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        task, inner = self._asked(prompt)
        return task.score(inner, completion)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        task, inner = self._asked(prompt)
        return task.doubts(inner, completion)

    def run_again(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        task, inner = self._asked(prompt)
        return task.run_again(inner, completion)

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        task, inner = self._asked(prompt)
        label = next(source.label for source in self.sources if source.task is task)
        problem = task.answer_problem(inner)
        return problem and dataclasses.replace(problem, key=f"task.sources, {label}: {problem.key}")

    def close(self) -> None:
        for source in self.sources:
            source.task.close()

    def _asked(self, prompt: Prompt) -> tuple[Task, Prompt]:
        assert isinstance(prompt, MixedPrompt), "a prompt of this mixture"
        return self.sources[prompt.number].task, prompt.inner

    def _number(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))

    def _mixed(self, index: int, number: int, inner: Prompt) -> MixedPrompt:
        return MixedPrompt(
            index=index, text=inner.text, answer=inner.answer, messages=inner.messages, columns=inner.columns,
            refusal=inner.refusal, failure=inner.failure, number=number, inner=inner,
        )  # fmt: skip


def _interleaved(sizes: Sequence[int], shares: Sequence[float]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """(source, position there) of held-out prompts; every prefix has the shares."""
    numbers = np.concatenate([np.full(size, number, np.int64) for number, size in enumerate(sizes)])
    inside = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
    turns = np.concatenate([(np.arange(size) + 0.5) / share for size, share in zip(sizes, shares, strict=True)])
    order = np.argsort(turns, kind="stable")
    return np.stack([numbers[order], inside[order]], axis=1)


_LOG = logging.getLogger(__name__)


def without_held_out(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Tasks without prompts that another holds out; raises ConfigError where none stays."""
    _refuse_other_pairs(tasks)
    rows = {label: task for label, task in tasks.items() if isinstance(task, RowsTask)}
    kept = dict(tasks)
    for label, task in rows.items() if len(rows) > 1 else ():
        others = [other.held_out.questions for other in rows.values() if other is not task]
        left = task.without(np.concatenate(others))
        if not left.num_prompts:
            problem = "other sources hold out every prompt of it"
            raise ConfigError(f"task.sources, {label}", problem, action="name another split, or take it out")
        if gone := task.num_prompts - left.num_prompts:
            _LOG.warning("task.sources, %s: %d prompts are held out by another source, and not trained on", label, gone)
            kept[label] = left
    return kept


def num_trained_on(task: Task, evaluated: Task) -> int:
    """Held-out prompts of files of `evaluated` that `task` trains on."""
    trained, held_out = list(_rows_of(task)), list(_rows_of(evaluated))
    if not (trained and held_out):
        return 0
    known = np.concatenate([rows.training.questions for rows in trained])
    return sum(int(np.isin(rows.held_out.questions, known).sum()) for rows in held_out)


def _rows_of(task: Task) -> Iterator[RowsTask]:
    if isinstance(task, RowsTask):
        yield task
    elif isinstance(task, TaskWrapper):
        yield from _rows_of(task.inner)
    elif isinstance(task, MixtureTask):
        for source in task.sources:
            yield from _rows_of(source.task)


def _refuse_other_pairs(tasks: Mapping[str, Task]) -> None:
    first: dict[int, tuple[str, int]] = {}
    for label, task in tasks.items():
        if not isinstance(task, NumberPairs):
            continue
        # Sums and progressions ask the same questions.
        known, shift = first.setdefault(task.digits, (label, task.shift))
        if shift != task.shift:
            raise ConfigError(
                f"task.sources, {label}.seed",
                f"holds out other numbers of {task.digits} digits than {known}, which trains on them",
                action="give both the same seed",
            )
