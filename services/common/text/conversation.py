"""Conversations of an environment and a policy, and what is tried of a task before its first group.

Guarantees: what is given depends on the drawn ids, the environment and the run's template alone. So a learner that
steps a deterministic environment again gets the ids that its sampler was given.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from heterorl.common.errors import ConfigError, EpisodeError, PromptRefused, RewardError
from heterorl.common.model.model_loading import TokenLimits
from heterorl.common.tasks.environments.environment import Action, Observation, ToolCall
from heterorl.common.tasks.environments.environment_task import (
    EnvironmentSpec,
    environment_of,
    environment_problem,
    environments_of,
)
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.tasks.task import Message, Prompt, Task, answer_problem_of, knows_answers
from heterorl.common.text.prompter import Prompter
from heterorl.common.text.tool_calls import Parser, parse_action, parser_for
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

        Raises:
            EpisodeError: the episode has ended without a reward.
            PromptRefused: the template does not write what the environment says.
        """
        said = self.answer(episode, turn)
        return None if said.done else self.given(said, turn)

    def answer(self, episode: Episode, turn: Int32Array) -> Observation:
        """What is said to drawn ids; see `step`."""
        is_cut = self._is_cut(turn)
        return answer_to(self.prompter.decode(turn), episode=episode, parser=self.parser, is_cut=is_cut)

    def given(self, said: Observation, turn: Int32Array) -> Int32Array:
        """The ids of what is said to drawn ids."""
        return self.prompter.given(said.messages, is_cut=self._is_cut(turn))

    def _is_cut(self, turn: Int32Array) -> bool:
        return int(turn[-1]) not in self.end_token_ids


def answer_to(text: str, *, episode: Episode, parser: Parser | None, is_cut: bool) -> Observation:
    """What is said to the text of a turn; without a parser the environment has no tools."""
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
        """Prove that the template writes turns and tools."""
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
    """The environments of a task, each tried by a short episode; None where no prompt has one."""
    if not environments_of(task):
        return None
    found = Conversations(task, prompter, end_token_ids=end_token_ids, tool_parser=tool_parser)
    found.try_episodes()
    return found


_LOG = logging.getLogger(__name__)
NUM_ANSWERS = 1000
"""Answers that are tried, evenly spread over the task, as far as ANSWERS_S reaches: 0.2 to 6 ms each."""
ANSWERS_S = 10.0
MAX_UNREADABLE = 0.5
"""Share of answers that cannot be read beyond which the reward is not the one for this data."""
NUM_TRIED = 32
"""Prompts that are tried, evenly spread over the task."""
TRIED_TURN = "Yes"
"""What the policy says in an episode that is tried."""


def tried_prompts(task: Task) -> Iterator[Prompt]:
    """The prompts that are tried."""
    return map(task.prompt, sorted({number * task.num_prompts // NUM_TRIED for number in range(NUM_TRIED)}))


def try_prompts(task: Task, prompter: Prompter, *, room: TokenLimits, max_new_tokens: int) -> None:
    """Write some prompts; a task of which the model can be asked none is not begun, single ones are left out later.

    Raises:
        ConfigError: all of them were refused.
    """
    room.check_length(max_new_tokens)
    num_tried = 0
    for prompt in tried_prompts(task):
        num_tried += 1
        try:
            room.check(prompter.encode_prompt(prompt), max_new_tokens)
        except PromptRefused as error:
            refused = error
        else:
            return
    problem = refused.args[0].removeprefix(f"{refused.key}: ")
    words = f"all of {num_tried} prompts that were tried are refused: {problem}"
    raise ConfigError(refused.key, words, action=refused.action)


def try_turns(
    prompter: Prompter, *, tools: Sequence[Mapping[str, Any]] = (), tool_parser: Parser | Literal["auto"] = "auto"
) -> Parser | None:
    """Prove for an environment that the template writes turns one behind another, whatever stands before them.

    With tools, the template must write them and their results too.

    Returns:
        How calls are read; None without tools.

    Raises:
        ConfigError: it does not, or no parser reads the calls that it writes.
    """
    problem = prompter.given_problem("user", tools=tools)
    if problem:
        raise ConfigError("use_chat_template", problem, action="take another model for task.environment")
    if not tools:
        return None
    prompter.check_tools(tools)
    problem = prompter.given_problem("tool", tools=tools)
    if problem:
        raise ConfigError("task.environment", problem, action="take an environment without tools, or another model")
    return parser_for(prompter, tools=tools, setting=tool_parser)


def try_answers(task: Task) -> None:
    """Read the answers, all of a small task: a row whose answer cannot be read gives no group, and rows keep numbers.

    Raises:
        ConfigError: more than half of them cannot be read.
        DependencyMissing: the package that reads them is not installed.
    """
    if not knows_answers(task):
        return
    until, bad, num_tried = time.monotonic() + ANSWERS_S, [], 0
    for index in sorted({number * task.num_prompts // NUM_ANSWERS for number in range(NUM_ANSWERS)}):
        prompt = task.prompt(index)
        try:
            problem = answer_problem_of(task, prompt)
        except RewardError as error:
            # Whoever tries a reward says so.
            _LOG.warning("the answers are not tried: %s", error)
            return
        num_tried += 1
        if problem:
            bad.append((prompt, problem))
        if time.monotonic() >= until:
            break
    if not bad:
        return
    shown = ", ".join(f"prompt {prompt.index} ({prompt.answer[:40]!r}: {problem})" for prompt, problem in bad[:3])
    words = f"{len(bad)} of {num_tried} answers that were tried cannot be read: {shown}"
    if len(bad) > MAX_UNREADABLE * num_tried:
        raise ConfigError("task.match", words, action='correct the data, or take match = "exact" or another reward')
    _LOG.warning("%s; no group is made of such rows", words)


def try_reward(task: Task, prompter: Prompter | None) -> float:
    """Score a prompt's own answer, the first one that can be read; a task without rewards here is not begun.

    An environment is told the answer as the only turn of an episode, or TRIED_TURN where the row has none.

    The answer goes through the tokens of a prompter; without one its text is taken as it is.

    Raises:
        ConfigError: the reward failed.
        DependencyMissing: the package that computes it is not installed.
    """
    prompt = _readable(task)
    is_played = environment_of(task, prompt) is not None
    text = prompt.answer or (TRIED_TURN if is_played else "")
    if prompter is not None:
        text = prompter.decode(prompter.tokens(text))
    try:
        reward = total_reward(task.score(prompt, text))
    except RewardError as error:
        if is_played:
            raise environment_problem(f"the policy says {text[:40]!r}", error) from error
        problem = f"the reference answer of prompt {prompt.index} gets no reward here: {error}"
        action = "correct task.reward or the data; raise task.reward_timeout_s if it only needs longer"
        raise ConfigError("task", problem, action=action) from error
    words = "an episode with one turn" if is_played else "the reference answer"
    _LOG.info("%s of prompt %d gets a reward of %g", words, prompt.index, reward)
    return reward


def _readable(task: Task) -> Prompt:
    """The first prompt whose answer can be read; the first one where none of some can."""
    for index in range(min(NUM_TRIED, task.num_prompts) if knows_answers(task) else 0):
        prompt = task.prompt(index)
        try:
            if not answer_problem_of(task, prompt):
                return prompt
        except RewardError:
            break
    return task.prompt(0)
