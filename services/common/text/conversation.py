"""An environment and a policy as they speak to each other: drawn ids in, given ids out; the same on every node.

Guarantees: what is given depends on the drawn ids, the environment and the run's template alone. So a learner that
steps a deterministic environment again gets the ids that its sampler was given.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from heterorl.common.errors import EpisodeError, RewardError
from heterorl.common.tasks.environments.environment import Action, Observation, ToolCall
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.tasks.environments.task import (
    EnvironmentSpec,
    environment_of,
    environment_problem,
    environments_of,
)
from heterorl.common.tasks.task import Message, Prompt, Task
from heterorl.common.text.actions import Parser, parse_action
from heterorl.common.text.prompts import Prompter
from heterorl.common.text.trial import TRIED_TURN, tried_prompts, try_turns
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import total_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The environment of a prompt, with the run's template. Blocking.

    `parser` reads calls of tools; None where the environment has none. A turn without one of `end_token_ids` was cut.
    """

    prompter: Prompter
    spec: EnvironmentSpec
    parser: Parser | None
    end_token_ids: Collection[int]

    def encode(self, prompt: Prompt) -> Int32Array:
        """Token ids of the prompt, which shows the tools."""
        return self.prompter.encode_prompt(prompt, tools=self.spec.tools)

    def step(self, episode: Episode, turn: Int32Array) -> Int32Array | None:
        """The ids that are given behind drawn ones, up to the next turn; None where the episode is done.

        Calls that cannot be read are not shown to the environment: the policy reads what is wrong with them.

        Args:
            episode: of the environment.
            turn: drawn ids.

        Raises:
            EpisodeError: the episode has ended without a reward.
            PromptRefused: the template does not write what the environment says.
        """
        said = self.answer(episode, turn)
        return None if said.done else self.given(said, turn)

    def answer(self, episode: Episode, turn: Int32Array) -> Observation:
        """What is said to drawn ids; see `step`.

        Raises:
            EpisodeError: the episode has ended without a reward.
        """
        is_cut = self._is_cut(turn)
        return answer_to(self.prompter.decode(turn), episode=episode, parser=self.parser, is_cut=is_cut)

    def given(self, said: Observation, turn: Int32Array) -> Int32Array:
        """The ids of what is said to drawn ids.

        Raises:
            PromptRefused: the template does not write it.
        """
        return self.prompter.given(said.messages, is_cut=self._is_cut(turn))

    def _is_cut(self, turn: Int32Array) -> bool:
        return int(turn[-1]) not in self.end_token_ids


def answer_to(text: str, *, episode: Episode, parser: Parser | None, is_cut: bool) -> Observation:
    """What is said to the text of a turn.

    Args:
        text: of the turn.
        episode: of the environment.
        parser: reads calls of tools; None where the environment has none.
        is_cut: whether the turn ended at its longest length.

    Raises:
        EpisodeError: the episode has ended without a reward.
    """
    if parser is None:
        return episode.step(Action(text, (), is_cut))
    read = parse_action(text, parser=parser)
    if read.problem:
        return Observation((Message(role="user", content=read.problem),))
    return episode.step(Action(read.text, tuple(ToolCall(*call) for call in read.calls), is_cut))


class Conversations:
    """The environments of a task, with the run's template."""

    def __init__(
        self,
        task: Task,
        prompter: Prompter,
        *,
        end_token_ids: Collection[int],
        tool_parser: Parser | Literal["auto"] = "auto",
    ) -> None:
        """Prove that the template writes turns and tools.

        Args:
            task: has the environments.
            prompter: of the run.
            end_token_ids: of the run.
            tool_parser: `task.tool_parser`.

        Raises:
            ConfigError: it does not.
        """
        self._task, self._prompter, self._end_token_ids = task, prompter, frozenset(end_token_ids)
        environments = environments_of(task)
        self._parsers = {
            each.name: try_turns(prompter, tools=each.tools, tool_parser=tool_parser) for each in environments
        }
        self.max_live = sum(each.max_live for each in environments)
        """Episodes that live at once; 0 where no prompt has an environment."""

    def of(self, prompt: Prompt) -> Conversation | None:
        """The environment of a prompt of the task; None where it is answered by one completion."""
        spec = environment_of(self._task, prompt)
        if spec is None:
            return None
        return Conversation(
            prompter=self._prompter,
            spec=spec,
            parser=self._parsers[spec.episodes.name],
            end_token_ids=self._end_token_ids,
        )

    def try_episodes(self) -> None:
        """Step an episode of each environment by one short turn, and score it.

        Raises:
            ConfigError: the environment or its score fails, or the template does not write what it says.
        """
        turn = np.append(self._prompter.tokens(TRIED_TURN), np.int32(min(self._end_token_ids)))
        untried = dict(self._parsers)
        for prompt in tried_prompts(self._task):
            found = None if prompt.refusal else self.of(prompt)
            if found is None or found.spec.episodes.name not in untried:
                continue
            del untried[found.spec.episodes.name]
            try:
                with found.spec.open() as episode:
                    found.step(episode, turn)
                    total_reward(episode.score())
            except (EpisodeError, RewardError) as error:
                where = f"an episode of prompt {prompt.index} in which the policy says {TRIED_TURN}"
                raise environment_problem(where, error) from error

    def encode(self, prompt: Prompt) -> Int32Array:
        """Token ids of a prompt of the task, as policies read it."""
        found = self.of(prompt)
        return self._prompter.encode_prompt(prompt) if found is None else found.encode(prompt)


def open_conversations(
    task: Task, prompter: Prompter, *, end_token_ids: Collection[int], tool_parser: Parser | Literal["auto"]
) -> Conversations | None:
    """The environments of a task, each tried by a short episode; None where no prompt has one.

    Raises:
        ConfigError: an environment or its score fails, or the template does not write what it says.
    """
    if not environments_of(task):
        return None
    found = Conversations(task, prompter, end_token_ids=end_token_ids, tool_parser=tool_parser)
    found.try_episodes()
    return found
