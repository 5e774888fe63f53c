"""Task whose completions are episodes; rows of seeds and of numbers."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heterorl.common.errors import (
    ConfigError,
    EnvironmentFailed,
    EpisodeError,
    RewardError,
    ServiceUnreachable,
    ToolLost,
)
from heterorl.common.tasks.environments.environment import Action
from heterorl.common.tasks.environments.episodes import Episode, Episodes
from heterorl.common.tasks.rewards.function_reward import START_IT
from heterorl.common.tasks.rewards.worker_pool import is_outage
from heterorl.common.tasks.task import SYSTEM_ROLES, Message, Prompt, Task, TaskWrapper, messages_json
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import FinishReason, RewardPart
from heterorl.common.wire.common_messages import bytes_digest

_LOG = logging.getLogger(__name__)
_KEY = "task.environment"
_REMEMBERED = 4096
"""Prompts whose first messages are cached."""
_STRIDE = 0x85EBCA6B
"""Odd distance between the seeds of tasks whose own seeds are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode: turns and seconds."""

    max_turns: int
    trajectory_s: float

    def reached(self, *, num_turns: int, seconds: float, room: int) -> FinishReason | None:
        """The limit that ends the episode; None where another turn may follow.

        `room` is the tokens that the longest next turn would leave.
        """
        if num_turns >= self.max_turns:
            return FinishReason.TURNS
        if seconds >= self.trajectory_s:
            return FinishReason.SECONDS
        return FinishReason.CONTEXT if room < 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPrompt(Prompt):
    """A prompt with the row and the seed of its episodes."""

    row: Mapping[str, Any] = field(compare=False, repr=False)
    seed: int
    first: tuple[Message, ...] | None = field(compare=False, repr=False, default=None)
    """First messages of the episode that made the prompt; None where the row's prompt stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """The environment of one prompt; each member opens an episode of it."""

    episodes: Episodes
    limits: EpisodeLimits
    row: Mapping[str, Any]
    seed: int
    first: tuple[Message, ...] | None = None
    """First messages that every episode must give; None: unknown."""
    forget: Callable[[], object] = lambda: None
    """Called where an episode gives others, so that later prompts have them."""

    @property
    def is_deterministic(self) -> bool:
        return self.episodes.is_deterministic

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return self.episodes.tools

    def open(self) -> Episode:
        """Episodes.open; also raises EnvironmentFailed where the first messages differ from the prompt."""
        episode = self.episodes.open(self.row, self.seed)
        if self.first is not None and episode.first != self.first:
            episode.close()
            self.forget()
            name = self.episodes.name
            raise EnvironmentFailed(
                f"{name}, reset: it returned other first messages than before, for one row and seed"
            )
        return episode


def environment_problem(where: str, error: Exception) -> ConfigError:
    """The error that ended an episode, for the environment's author."""
    if is_outage(error):
        return ServiceUnreachable(_KEY, f"{where}: {error}", action=START_IT)
    return ConfigError(_KEY, f"{where}: {error}", action=cure_of(error))


def cure_of(error: Exception) -> str:
    """Remedy for an error that ended an episode."""
    if "MemoryError" in str(error):
        return "correct task.environment; raise task.environment_memory_bytes if it only needs more"
    if isinstance(error, ToolLost) and "no answer in" in str(error):
        return "correct task.environment; raise task.step_timeout_s if it only needs longer"
    return "correct task.environment"


def seed_of(index: int, *, is_held_out: bool, seed: int) -> int:
    """32-bit seed of a prompt's episodes; held-out prompts share none with training."""
    return (2 * index + is_held_out + seed * _STRIDE) & 0xFFFFFFFF


class EnvironmentTask(TaskWrapper):
    """A dataset with an environment."""

    def __init__(
        self, task: Task, episodes: Episodes, limits: EpisodeLimits, *, seed: int, system_prompt: str = ""
    ) -> None:
        """Check the first row.

        The system prompt goes before first messages of the environment that have none. Raises ConfigError if rows lack
        a column that the score needs, or no episode of the first row begins.
        """
        super().__init__(task, digest=task.digest, num_workers=episodes.num_processes)
        self._episodes, self._limits, self._seed = episodes, limits, seed
        self._system = Message(role="system", content=system_prompt) if system_prompt else None
        self.environments = (episodes,)
        self._first = functools.lru_cache(_REMEMBERED)(self._reset)
        if episodes.learns_tools:
            try:
                self._first(0, False)
            except EpisodeError as error:
                raise environment_problem("an episode of prompt 0", error) from error
        # Rows of the environment's own data set have no system prompt in their digest.
        stated = [
            episodes.name, episodes.files_digest, episodes.release, episodes.tools, episodes.tool_parser,
            episodes.max_observation_chars, dataclasses.asdict(limits), seed, system_prompt,
        ]  # fmt: skip
        words = f"{task.digest}\nenvironment 5\n{json.dumps(stated, sort_keys=True)}"
        self.digest = bytes_digest(words.encode())
        _LOG.info(
            "task.environment: max_turns %d, trajectory_s %g, max_observation_chars %d, seed %d, tool_parser %s",
            limits.max_turns, limits.trajectory_s, episodes.max_observation_chars, seed, episodes.tool_parser,
        )  # fmt: skip
        if problem := self._lacks(_row(task.prompt(0))):
            raise ConfigError(_KEY, problem[:500], action="name a parameter as a column, or give it a default")

    def prompt(self, index: int) -> EnvironmentPrompt:
        """The training prompt; it has a refusal where no episode begins."""
        return self._asked(self.inner.prompt(index), is_held_out=False)

    def evaluation_prompt(self, index: int) -> EnvironmentPrompt:
        return self._asked(self.inner.evaluation_prompt(index), is_held_out=True)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Score of an episode whose only turn is the completion."""
        spec = self.environment_of(prompt)
        try:
            with spec.open() as episode:
                episode.step(Action(completion))
                return episode.score()
        except EpisodeError as error:
            raise RewardError(f"the episode of prompt {prompt.index} failed: {error}") from error

    def environment_of(self, prompt: Prompt) -> EnvironmentSpec:
        assert isinstance(prompt, EnvironmentPrompt), "a prompt of this task"
        return EnvironmentSpec(
            episodes=self._episodes, limits=self._limits, row=prompt.row, seed=prompt.seed, first=prompt.first,
            forget=self._first.cache_clear,
        )  # fmt: skip

    def close(self) -> None:
        self._episodes.close()
        self.inner.close()

    def _lacks(self, row: Mapping[str, Any]) -> str:
        missing = [name for name in self._episodes.needs if name not in row]
        words = f"the score of {self._episodes.name} asks for {', '.join(missing)}; the row has {', '.join(row)}"
        return words if missing else ""

    def _asked(self, prompt: Prompt, *, is_held_out: bool) -> EnvironmentPrompt:
        row, first = _row(prompt), None
        failure: EpisodeError | None = None
        refusal = self._lacks(row)
        if not (refusal or self._episodes.keeps_prompts):
            try:
                first = self._first(prompt.index, is_held_out)
            except EpisodeError as error:
                failure = error
                refusal = f"no episode of prompt {prompt.index} begins: {error} ({cure_of(error)})"
        text, messages, said = prompt.text, prompt.messages, first
        if first is not None:
            text = first[-1].content
            if self._system is not None and first[0].role not in SYSTEM_ROLES:
                first = (self._system, *first)
            messages = first if len(first) > 1 or first[0].role != "user" else ()
        if not (text.strip() or refusal):
            refusal = f"prompt {prompt.index} has no text, and reset of {self._episodes.name} returned no message"
        return EnvironmentPrompt(
            index=prompt.index, text=text, answer=prompt.answer, messages=messages, columns=prompt.columns,
            refusal=refusal, row=row, seed=seed_of(prompt.index, is_held_out=is_held_out, seed=self._seed),
            first=said, failure=failure,
        )  # fmt: skip

    def _reset(self, index: int, is_held_out: bool) -> tuple[Message, ...] | None:
        prompt = self.inner.evaluation_prompt(index) if is_held_out else self.inner.prompt(index)
        seed = seed_of(index, is_held_out=is_held_out, seed=self._seed)
        with self._episodes.open(_row(prompt), seed) as episode:
            return episode.first


def _row(prompt: Prompt) -> dict[str, Any]:
    """Row for an environment: columns, prompt and answer as texts.
    `messages` are the prompt's, never a column's."""
    row = {name: value for name, value in prompt.columns.items() if name != "messages"}
    if prompt.text:
        row["messages"] = messages_json(prompt)
    return {**row, **{name: text for name, text in (("prompt", prompt.text), ("answer", prompt.answer)) if text}}


@dataclass(kw_only=True)
class NumbersTask(Task):
    """Rows of one number each, without text."""

    num_prompts: int
    num_evaluation_prompts: int
    digest: Digest
    columns: Callable[[int, bool], dict[str, int]]
    """The row at a position; true for held-out ones."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="", answer="", columns=self.columns(index, False))

    def evaluation_prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="", answer="", columns=self.columns(index, True))

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:  # noqa: ARG002 - of the base class
        raise RewardError("rows of numbers have no score of their own")


def seeds_task(*, size: int, evaluation_size: int, seed: int) -> NumbersTask:
    """Rows of one seed each, for environments without data."""
    return NumbersTask(
        num_prompts=size, num_evaluation_prompts=evaluation_size,
        digest=bytes_digest(f"seeds 1 {size} {evaluation_size} {seed}".encode()),
        columns=lambda index, is_held_out: {"seed": seed_of(index, is_held_out=is_held_out, seed=seed)},
    )  # fmt: skip


def numbers_task(*, num_rows: int | None, size: int, evaluation_size: int) -> NumbersTask:
    """Numbers of an environment's tasks; the last are held out.

    `num_rows` is None for endless ones. Raises ConfigError if none is left for training.
    """
    total = size + evaluation_size if num_rows is None else num_rows
    num_left = total - evaluation_size
    if num_left <= 0:
        problem = f"the data set of the environment has {total} tasks, and {evaluation_size} are held out"
        raise ConfigError("task.evaluation_size", problem, action=f"set it below {total}, or take a larger data set")
    return NumbersTask(
        num_prompts=min(size, num_left), num_evaluation_prompts=evaluation_size,
        digest=bytes_digest(f"numbers 1 {total} {size} {evaluation_size}".encode()),
        columns=lambda index, is_held_out: {"task": index + num_left * is_held_out},
    )  # fmt: skip
