"""Conversations of a policy with an environment, and start-up checks of tasks.

The tokens between turns depend only on drawn ids, the environment and the template. So a learner that replays a
deterministic environment gets the ids of its sampler.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heterorl.common.errors import (
    ConfigError,
    EnvironmentFailed,
    EpisodeError,
    PromptRefused,
    RewardError,
    ServiceUnreachable,
)
from heterorl.common.model.contract import ContractConfig
from heterorl.common.model.model_loading import TokenLimits, token_limits_at
from heterorl.common.tasks.environments.environment import Action, Observation, ToolCall
from heterorl.common.tasks.environments.environment_task import EnvironmentSpec, environment_problem
from heterorl.common.tasks.environments.episodes import Episode, Episodes
from heterorl.common.tasks.rewards.function_reward import START_IT
from heterorl.common.tasks.rewards.worker_pool import is_outage
from heterorl.common.tasks.source_config import ToolParser
from heterorl.common.tasks.task import Message, Prompt, Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.text.tool_calls import Parser, parse_action, parser_for
from heterorl.common.types.common import Int32Array
from heterorl.common.types.rollout import total_reward

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The environment of a prompt with the run's template. Blocking.

    `parser` reads tool calls; None without tools. A turn without one of `end_token_ids` was cut.
    """

    prompter: Prompter
    spec: EnvironmentSpec
    parser: Parser | None
    end_token_ids: Collection[int]

    def encode(self, prompt: Prompt) -> Int32Array:
        """Ids of the prompt; raises PromptRefused."""
        ids = self.prompter.encode_prompt(prompt, tools=self.spec.tools)
        self.prompter.check_turns(prompt, tools=self.spec.tools)
        return ids

    def step(self, episode: Episode, turn: Int32Array) -> Int32Array | None:
        """Step the environment; ids up to the next turn, None if done.

        The policy, not the environment, reads what is wrong with unreadable calls.

        Raises:
            EpisodeError: the episode ended without a reward.
            PromptRefused: the template does not write the observation.
        """
        said = self.answer(episode, turn)
        return None if said.done else self.given(said, turn)

    def answer(self, episode: Episode, turn: Int32Array) -> Observation:
        """Observation of a turn; see `step`."""
        is_cut = self._is_cut(turn)
        return answer_to(self.prompter.completion(turn), episode=episode, parser=self.parser, is_cut=is_cut)

    def given(self, said: Observation, turn: Int32Array) -> Int32Array:
        return self.prompter.given(said.messages, is_cut=self._is_cut(turn))

    def _is_cut(self, turn: Int32Array) -> bool:
        return int(turn[-1]) not in self.end_token_ids


def answer_to(text: str, *, episode: Episode, parser: Parser | None, is_cut: bool) -> Observation:
    """Observation of a turn's text; without a parser there are no tools."""
    if parser is None:
        return episode.step(Action(text, (), is_cut))
    read = parse_action(text, parser=parser)
    if read.problem:
        return Observation((Message(role="user", content=read.problem),))
    return episode.step(Action(read.text, tuple(ToolCall(*call) for call in read.calls), is_cut))


class Conversations:
    """The environments of a task with the run's template."""

    def __init__(self, task: Task, prompter: Prompter) -> None:
        """Check that the template writes turns and tools."""
        self._task, self._prompter, self._end_token_ids = task, prompter, frozenset(prompter.end_token_ids)
        environments = task.environments
        # By object: sources of a mixture may have one name in two directories.
        self._parsers = {
            each: try_turns(prompter, tools=each.tools, tool_parser=each.tool_parser) for each in environments
        }
        self.max_live = sum(each.max_live for each in environments)
        """Most episodes at once; 0 without environments."""

    def of(self, prompt: Prompt) -> Conversation | None:
        """The environment of a prompt; None without one."""
        spec = self._task.environment_of(prompt)
        if spec is None:
            return None
        return Conversation(
            prompter=self._prompter, spec=spec, parser=self._parsers[spec.episodes], end_token_ids=self._end_token_ids
        )

    def at(self, index: int) -> Episodes | None:
        """The environment of a training prompt, without the prompt."""
        found: Episodes | None = self._task.environment_at(index)
        return found

    def try_episodes(self) -> None:
        """Play an episode of each environment; raise ConfigError for failures.
        A deterministic one plays two, which must be equal."""
        turn = np.append(self._prompter.tokens(TRIED_TURN), np.int32(min(self._end_token_ids)))
        untried = dict(self._parsers)
        for prompt in tried_prompts(self._task):
            found = None if prompt.refusal else self.of(prompt)
            if found is None or found.spec.episodes not in untried:
                continue
            del untried[found.spec.episodes]
            where = f"an episode of prompt {prompt.index} in which the policy says {TRIED_TURN}"
            try:
                played = [_played(found, turn) for _ in range(1 + found.spec.is_deterministic)]
            except (EpisodeError, RewardError) as error:
                raise environment_problem(where, error) from error
            if played[0] != played[-1]:
                raise environment_problem(
                    where,
                    EnvironmentFailed(
                        f"{found.spec.episodes.name} differs from itself with equal row, seed and turn: keep no state"
                        " between episodes and draw from random or numpy.random, or set is_deterministic = False"
                    ),
                )
            # Each further prompt may begin an episode.
            if not untried:
                return

    def encode(self, prompt: Prompt) -> Int32Array:
        found = self.of(prompt)
        return self._prompter.encode_prompt(prompt) if found is None else found.encode(prompt)


def _played(found: Conversation, turn: Int32Array) -> Any:
    """First messages, given ids and score of an episode with one turn."""
    with found.spec.open() as episode:
        ids = found.step(episode, turn)
        parts = episode.score()
        total_reward(parts)
        return episode.first, None if ids is None else ids.tolist(), parts


def open_conversations(task: Task, prompter: Prompter) -> Conversations | None:
    """A task's environments, each tried by an episode; None without any."""
    if not task.environments:
        return None
    found = Conversations(task, prompter)
    found.try_episodes()
    return found


NUM_ANSWERS = 1000
"""Checked answers, spread over the task, within ANSWERS_S: 0.2 to 6 ms each."""
ANSWERS_S = 10.0
SAME = 1e-6
"""Largest difference of equal rewards."""
MAX_UNREADABLE = 0.5
"""Share of unreadable answers beyond which the verifier does not fit the dataset."""
MAX_REFUSED = 0.5
"""Share of refused prompts of a source beyond which no run starts."""
NUM_TRIED = 32
"""Checked prompts of each source, spread over it, within TRIED_S after the first: a reset may take long."""
TRIED_S = 10.0
TRIED_TURN = "Yes"
"""The policy's turn in a tried episode."""


def tried_prompts(task: Task) -> Iterator[Prompt]:
    """Prompts of each source to check."""
    return (task.prompt(index) for _, span in task.spans for index in _spread(span, NUM_TRIED))


def _spread(span: range, count: int) -> list[int]:
    return sorted({span[number * len(span) // count] for number in range(count)})


def try_prompts(task: Task, prompter: Prompter, *, room: TokenLimits, max_new_tokens: int) -> None:
    """Encode prompts of each source with their tools, and log refused ones.

    Raises ConfigError where more than half of a source's are refused.
    """
    room.check_length(max_new_tokens)
    for label, span in task.spans:
        refused: list[PromptRefused] = []
        num_tried, until = 0, math.inf
        for index in _spread(span, NUM_TRIED):
            prompt = task.prompt(index)
            spec = task.environment_of(prompt)
            try:
                room.check(prompter.encode_prompt(prompt, tools=spec.tools if spec else ()), max_new_tokens)
            except PromptRefused as error:
                refused.append(error)
            num_tried += 1
            # The first one starts the processes of an environment.
            until = min(until, time.monotonic() + TRIED_S)
            if time.monotonic() >= until:
                break
        if refused:
            _judge_refused(refused, num_tried, label)


def _judge_refused(refused: Sequence[PromptRefused], num_tried: int, label: str) -> None:
    name, _ = Counter(each.key for each in refused).most_common(1)[0]
    last = [each for each in refused if each.key == name][-1]
    key = f"task.sources, {label}: {name}" if label else name
    num = "all" if len(refused) == num_tried else len(refused)
    problem = last.args[0].removeprefix(f"{name}: ")
    words = f"{num} of {num_tried} prompts that were tried are refused: {problem}"
    if len(refused) > MAX_REFUSED * num_tried:
        raise ConfigError(key, words, action=last.action)
    _LOG.warning("%s: %s; such rows make no group, correct or remove them", key, words)


def try_task(
    config: ContractConfig, task: Task, prompter: Prompter, *, say: Callable[[str], object] = _LOG.info
) -> Conversations | None:
    """Try a node's task before its start; returns the environments.

    Raises:
        ConfigError: the prompts, the answers, an environment or the reward fail.
        DependencyMissing: what verifies answers is not installed.
    """
    room = token_limits_at(config.model_dir)
    try_prompts(task, prompter, room=room, max_new_tokens=config.sampling.max_new_tokens)
    try_answers(task)
    conversations = open_conversations(task, prompter)
    try_reward(task, prompter, say=say)
    return conversations


def try_turns(
    prompter: Prompter, *, tools: Sequence[Mapping[str, Any]] = (), tool_parser: ToolParser = "auto"
) -> Parser | None:
    """Check that the template writes consecutive turns, tools and their results.

    Returns the parser of tool calls; None without tools. Raises ConfigError if it does not, or no parser reads its
    calls.
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
    """Read answers, of a small task all, and log unreadable ones.

    Raises:
        ConfigError: more than half of them cannot be read.
        DependencyMissing: the verifier is not installed.
    """
    if not task.knows_answers:
        return
    spans = task.spans
    for _, span in spans:
        if not _try_answers_of(task, span, ANSWERS_S / len(spans)):
            return


def _try_answers_of(task: Task, span: range, seconds: float) -> bool:
    """Whether the verifier reads answers at all."""
    until, bad, num_tried = time.monotonic() + seconds, [], 0
    for index in _spread(span, NUM_ANSWERS):
        prompt = task.prompt(index)
        try:
            problem = task.answer_problem(prompt)
        except RewardError as error:
            # `try_reward` reports the error.
            _LOG.warning("the check of answers is skipped, the trial of the reward follows: %s", error)
            return False
        num_tried += 1
        if problem:
            bad.append((prompt, problem))
        if time.monotonic() >= until:
            break
    if not bad:
        return True
    # Sources of a mixture have keys of their own.
    key, _ = Counter(problem.key for _, problem in bad).most_common(1)[0]
    of_key = [(prompt, problem) for prompt, problem in bad if problem.key == key]
    shown = ", ".join(f"prompt {prompt.index} ({prompt.answer[:40]!r}: {each.text})" for prompt, each in of_key[:3])
    words = f"{len(bad)} of {num_tried} rows that were tried cannot be scored: {shown}"
    if len(bad) > MAX_UNREADABLE * num_tried:
        raise ConfigError(key, words, action=of_key[0][1].action)
    _LOG.warning("%s: %s; such rows make no group, correct or remove them", key, words)
    return True


def try_reward(task: Task, prompter: Prompter | None, *, say: Callable[[str], object] = _LOG.info) -> float:
    """Score one readable answer of each source; returns the least reward.

    An environment gets the answer, or TRIED_TURN without one, as the only turn of an episode. With a prompter the text
    goes through its tokens. `say` gets a line about each reward.

    Raises:
        ConfigError: the reward failed.
        ServiceUnreachable: it reached no server, which may answer later.
        DependencyMissing: its package is not installed.
    """
    return min(_try_reward_of(task, prompter, label, span, say) for label, span in task.spans)


def _try_reward_of(
    task: Task, prompter: Prompter | None, label: str, span: range, say: Callable[[str], object]
) -> float:
    prompt = _readable(task, span)
    key, which = (f"task.sources, {label}", f" of {label}") if label else ("task", "")
    is_played = task.environment_of(prompt) is not None
    text = prompt.answer or (TRIED_TURN if is_played else "")
    if prompter is not None:
        text = prompter.decode(prompter.tokens(text))
    # Remote rewards are NaN in it.
    local = task.without_remote()
    try:
        parts = task.score(prompt, text)
        reward = total_reward(parts)
        again = parts if is_played else local.score(prompt, text)
    except RewardError as error:
        if is_played:
            to = f" to prompt {prompt.index}{which}" if label else ""
            raise environment_problem(f"the policy says {text[:40]!r}{to}", error) from error
        problem = f"the reference answer of prompt {prompt.index}{which} gets no reward here: {error}"
        longer = "raise task.reward_timeout_s if it only needs longer"
        if is_outage(error):
            raise ServiceUnreachable(key, problem, action=f"{START_IT}; {longer}") from error
        raise ConfigError(key, problem, action=f"correct task.reward or the data; {longer}") from error
    words = "an episode with one turn" if is_played else "the reference answer"
    say(f"{words} of prompt {prompt.index}{which} gets a reward of {reward:g}")
    if not is_played:
        _try_others(local, prompt, reward, key)
    for one, other in zip(parts, again, strict=True):
        if abs(one.value - other.value) > SAME:
            _LOG.warning(
                "%s: one answer gets %s = %g, then %g; where the learner computes rewards again, sites go into"
                " quarantine: let it depend on its arguments only",
                key, one.name, one.value, other.value,
            )  # fmt: skip
    return reward


def _try_others(local: Task, prompt: Prompt, reward: float, key: str) -> None:
    """Log a right answer with 0, and a wrong answer that fails."""
    if prompt.answer and not reward:
        words = "correct task.reward or the data if right answers should get more"
        _LOG.warning("%s: the reference answer of prompt %d gets a reward of 0; %s", key, prompt.index, words)
    try:
        local.score(prompt, TRIED_TURN)
    except RewardError as error:
        _LOG.warning(
            "%s: the answer %r to prompt %d gets no reward: %s; such completions are lost, return 0 if they are wrong",
            key, TRIED_TURN, prompt.index, error,
        )  # fmt: skip


def _readable(task: Task, span: range) -> Prompt:
    """The first prompt with a readable answer; else the first prompt."""
    for index in span[:NUM_TRIED] if task.knows_answers else ():
        prompt = task.prompt(index)
        try:
            if not task.answer_problem(prompt):
                return prompt
        except RewardError:
            break
    return task.prompt(span[0])
