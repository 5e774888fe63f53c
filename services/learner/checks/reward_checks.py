"""Reward verification: prompts scored again, episodes replayed, trust rules.

Trajectories of several turns are stepped again: given ids and rewards must be the environment's. With a deterministic
environment a site can invent neither. A failure of a machine is not held against its site; the group is not trained on.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heterorl.common.errors import ConfigError, EnvironmentFailed, EpisodeError, PromptRefused, RewardError
from heterorl.common.tasks.environments.episodes import Episode
from heterorl.common.tasks.rewards.remote_reward import Terms
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.text.conversation import Conversation, Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.rollout import (
    DropReason,
    FinishReason,
    Group,
    RewardPart,
    Rollout,
    total_reward,
    turns_of,
    weighted_sum,
)
from heterorl.learner.checks.findings import SOUND, Finding

RUN_AGAIN = 2
"""Repeats of code whose result is not the stated one; more find rarer coins and cost more."""
_OF_ITSELF = (FinishReason.EOS, FinishReason.LENGTH)
_BY_ENVIRONMENT = (FinishReason.ENVIRONMENT_FAILED, FinishReason.TOOL_LOST, FinishReason.REWARD_FAILED)


def judge_rewards(
    group: Group,
    *,
    task: Task,
    prompter: Prompter,
    tolerance: float,
    trusted: Collection[str] = (),
    conversations: Conversations | None = None,
) -> Finding:
    """The finding about a group's prompt and rewards.

    A reward that only its site can compute is accepted where a key signed it or the site is in `trusted` (`*`: every
    site). Code with another result is run again: see RUN_AGAIN and CODE_MISMATCH.

    Raises:
        PromptRefused: the template does not write the prompt.
        RewardError: the verifier failed, code may come to either result, or a reward is neither computed here nor
            signed and its site is not trusted; the site is not blamed.
    """
    is_trusted = group.id.site in trusted or "*" in trusted
    if not 0 <= group.prompt_index < task.num_prompts:
        return _mismatch(f"prompt_index: {group.prompt_index}, the task has {task.num_prompts} prompts")
    environment = conversations.at(group.prompt_index) if conversations else None
    if environment is not None and not environment.is_deterministic:
        # Chance may decide the first messages too, so the prompt is not compared, and not made: that begins an episode.
        if not is_trusted:
            raise RewardError(
                f"{environment.name} leaves things to chance, so no learner can step it again, and the site is not"
                " named in verification.trust_rewards_of"
            )
        return SOUND
    prompt = task.prompt(group.prompt_index)
    conversation = conversations.of(prompt) if conversations else None
    asked = conversation.encode(prompt) if conversation else prompter.encode_prompt(prompt)
    if not np.array_equal(asked, group.prompt_token_ids):
        if conversation is not None:
            _begin_again(conversation)
        return _mismatch(f"prompt_token_ids: prompt {group.prompt_index} has others")
    if conversation is not None:
        return judge_episodes(group, conversation, tolerance=tolerance)
    for number, rollout in enumerate(group.rollouts):
        if problem := _turns_problem(rollout):
            return _mismatch(f"rollouts[{number}]: {problem}")
    remote = task.remote
    computes = task.without_remote() if remote else task
    members = [(number, rollout) for number, rollout in enumerate(group.rollouts) if rollout.is_trainable]
    texts = [prompter.completion(rollout.token_ids, prompt) for _, rollout in members]
    for number, rollout in enumerate(group.rollouts):
        is_lost = rollout.finish_reason is FinishReason.REWARD_FAILED and not remote
        if is_lost and _has_reward(computes, prompt, prompter.completion(rollout.token_ids, prompt)):
            # Not held against the site, whose machine may be broken; and not trained, since it may hide low rewards.
            return Finding(detail=f"rollouts[{number}]: its site has no reward for it, and one can be computed")
    for (number, rollout), text, parts in zip(members, texts, computes.score_all(prompt, texts), strict=True):
        if remote:
            problem, parts = _believed(
                rollout.reward_parts, parts, remote, prompt=prompt, completion=text, is_trusted=is_trusted
            )
            if problem:
                return _mismatch(f"rollouts[{number}].reward_parts: {problem}")
        problem = _problem(rollout, parts, tolerance=tolerance)
        if not problem:
            continue
        detail = f"rollouts[{number}].{problem}"
        doubts = task.doubts(prompt, text)
        if _is_by({*doubts.by_code, *doubts.near}, rollout, parts, tolerance=tolerance):
            _refuse_doubtful(task, prompt, text, stated=rollout.reward_parts, computed=parts)
            return Finding(reason=DropReason.CODE_MISMATCH, detail=detail)
        return _mismatch(detail)
    return SOUND


def _begin_again(conversation: Conversation) -> None:
    """Raise RewardError where its first messages are no longer the prompt's."""
    try:
        conversation.spec.open().close()
    except EpisodeError as error:
        raise RewardError(f"an episode of the prompt failed: {error}") from error


def _turns_problem(rollout: Rollout) -> str:
    """Why a plain prompt's rollout is not one drawn turn."""
    if not all(span.is_drawn and span.keeps is None for span in rollout.spans):
        return "it has given tokens, and its prompt no environment"
    if rollout.is_trainable and rollout.finish_reason not in _OF_ITSELF:
        return f"finish_reason is {rollout.finish_reason.value}, and its prompt has no environment"
    return ""


def _has_reward(task: Task, prompt: Prompt, completion: str) -> bool:
    try:
        total_reward(task.score(prompt, completion))
    except RewardError:
        return False
    return True


def _believed(
    stated: Sequence[RewardPart],
    computed: Sequence[RewardPart],
    remote: Mapping[str, Terms],
    *,
    prompt: Prompt,
    completion: str,
    is_trusted: bool,
) -> tuple[str, tuple[RewardPart, ...]]:
    """The problem of remote rewards as stated, and all parts with them."""
    values = {part.name: part for part in stated}
    parts = []
    for part in computed:
        terms = remote.get(part.name)
        if terms is None:
            parts.append(part)
            continue
        said = values.get(part.name)
        if said is None:
            return f"{part.name} is missing", ()
        if not terms.low <= said.value <= terms.high:
            return f"{part.name} is {said.value:g}, outside {terms.low:g} to {terms.high:g}", ()
        is_proven = bool(said.signature and terms.signed_by) and terms.proves(
            said, prompt=prompt, completion=completion
        )
        if not is_proven and said.signature and terms.signed_by:
            return f"the signature of {part.name} is of none of its signed_by", ()
        if not is_proven and not is_trusted:
            raise RewardError(
                f"{part.name} cannot be computed again, no key of its signed_by signed it, and its site is not named in"
                " verification.trust_rewards_of"
            )
        parts.append(replace(part, value=said.value))
    return "", tuple(parts)


def _is_by(names: Collection[str], rollout: Rollout, computed: Sequence[RewardPart], *, tolerance: float) -> bool:
    """Whether only these rewards, with values from 0 to 1, differ.
    With their stated values all is right."""
    said = {part.name: part.value for part in rollout.reward_parts}
    if not names or not all(0.0 <= said.get(name, -1.0) <= 1.0 for name in names):
        return False
    parts = [replace(part, value=said[part.name]) if part.name in names else part for part in computed]
    return not _problem(rollout, parts, tolerance=tolerance)


def _refuse_doubtful(
    task: Task, prompt: Prompt, completion: str, *, stated: Sequence[RewardPart], computed: Sequence[RewardPart]
) -> None:
    """Run code again whose result is not the stated one.
    Raises RewardError: the site may still be right."""
    said, first = ({part.name: part.value for part in parts} for parts in (stated, computed))
    for is_last in [False] * RUN_AGAIN + [True]:
        for name in task.doubts(prompt, completion).near:
            if said[name] != first[name]:
                raise RewardError(
                    f"{name} is {said[name]:g}, computed {first[name]:g}, in a time so near its limit that either may"
                    " be right"
                )
        for part in () if is_last else task.run_again(prompt, completion):
            if part.value != first[part.name]:
                raise RewardError(
                    f"{part.name} is {said[part.name]:g}, computed {first[part.name]:g} and then {part.value:g}: the"
                    " code of the completion leaves it to chance"
                )


def check_trust(task: Task, trusted: Collection[str]) -> None:
    """Raise ConfigError for a task of which every group would be abandoned.
    No site is trusted, and an environment is not deterministic or a reward can neither be computed nor is signed."""
    by_chance = [each.name for each in task.environments if not each.is_deterministic]
    if by_chance and not trusted:
        raise ConfigError(
            "verification.trust_rewards_of",
            f"{by_chance[0]} is not deterministic, so a learner cannot step it again, and no site is trusted",
            action='name the sites, such as ["site-a"], or "*" for all',
        )
    believed = [name for name, terms in task.remote.items() if not terms.signed_by]
    if believed and not trusted:
        raise ConfigError(
            "verification.trust_rewards_of",
            f"a learner cannot compute {', '.join(believed)} again, and trusts no site that states it",
            action='name the sites, such as ["site-a"], or "*" for all; or have an http reward signed (signed_by)',
        )


def tried_here(task: Task, *, asks_others: bool) -> Task:
    """The task of which a learner tries one reward at its start.
    It has no remote rewards unless the learner asks for them."""
    return task if asks_others else task.without_remote()


def _problem(rollout: Rollout, computed: Sequence[RewardPart], *, tolerance: float) -> str:
    """The difference of a rollout's reward or its parts from those computed."""
    total = weighted_sum(computed)
    if not abs(rollout.reward - total) <= tolerance:
        return f"reward: {rollout.reward:g}, computed {total:g}"
    problem = _parts_problem(rollout.reward_parts, computed, tolerance=tolerance)
    return f"reward_parts: {problem}" if problem else ""


def _parts_problem(stated: Sequence[RewardPart], computed: Sequence[RewardPart], *, tolerance: float) -> str:
    """The difference of parts, for people only; a rollout may state none."""
    if not stated:
        return ""
    if [(part.name, part.weight) for part in stated] != [(part.name, part.weight) for part in computed]:
        names = ", ".join(f"{part.weight:g} x {part.name}" for part in computed)
        return f"not {names} in this order"
    for one, other in zip(stated, computed, strict=True):
        if not abs(one.value - other.value) <= tolerance:
            return f"{one.name} is {one.value:g}, computed {other.value:g}"
    return ""


def _mismatch(detail: str) -> Finding:
    return Finding(reason=DropReason.REWARD_MISMATCH, detail=detail)


def judge_episodes(group: Group, conversation: Conversation, *, tolerance: float) -> Finding:
    """The finding about a group's trajectories in a deterministic environment.
    The prompt was compared before. Raises RewardError if the environment failed here, or differs from itself in the
    same turns; the site is not blamed."""
    for number, rollout in enumerate(group.rollouts):
        is_lost = rollout.finish_reason in _BY_ENVIRONMENT
        if not (rollout.is_trainable or is_lost):
            continue
        try:
            problem, said = _replayed(rollout, conversation, tolerance=tolerance)
            if problem and not is_lost and said != _replayed(rollout, conversation, tolerance=tolerance)[1]:
                name = conversation.spec.episodes.name
                raise EnvironmentFailed(f"{name} differs from itself with equal turns: set is_deterministic = False")
        except (EpisodeError, PromptRefused, RewardError) as error:
            # All that loses a member at its site.
            if is_lost:
                continue
            raise RewardError(f"the environment of rollouts[{number}] failed: {error}") from error
        if is_lost:
            # Not held against the site, whose machine may be slow; and not trained, since it may hide low rewards.
            return Finding(detail=f"rollouts[{number}]: its site has lost it, and its environment goes on here")
        if problem:
            return Finding(reason=DropReason.REWARD_MISMATCH, detail=f"rollouts[{number}]: {problem}")
    return SOUND


def _replayed(rollout: Rollout, conversation: Conversation, *, tolerance: float) -> tuple[str, list[Any]]:
    """The difference of a rollout from its environment, and what that answered."""
    said: list[Any] = []
    with conversation.spec.open() as episode:
        return _episode_problem(rollout, conversation, episode, said, tolerance=tolerance), said


def _episode_problem(
    rollout: Rollout, conversation: Conversation, episode: Episode, said: list[Any], *, tolerance: float
) -> str:
    """The difference; `said` gets the environment's answers and score."""
    if any(span.keeps is not None for span in rollout.spans):
        return "its history was rewritten, which its environment does not do"
    turns, max_turns = turns_of(rollout), conversation.spec.limits.max_turns
    if len(turns) > max_turns:
        return f"it has {len(turns)} turns; task.max_turns is {max_turns}"
    given = None
    for number, (start, end) in enumerate(turns):
        drawn = rollout.token_ids[start:end]
        given = conversation.step(episode, drawn)
        said.append(None if given is None else given.tolist())
        if number + 1 < len(turns):
            stated = rollout.token_ids[end : turns[number + 1][0]]
            if given is None:
                return f"turn {number + 1} ended the episode, and another one follows"
            if not np.array_equal(stated, given):
                return f"what is given behind turn {number + 1} is not the environment's"
    if turns and rollout.is_trainable and (given is None) != (rollout.finish_reason in _OF_ITSELF):
        return f"finish_reason is {rollout.finish_reason.value}, the episode {'ended' if given is None else 'goes on'}"
    if rollout.finish_reason is FinishReason.TURNS and len(turns) != max_turns:
        return f"finish_reason is turns after {len(turns)} of {max_turns} turns"
    parts = episode.score()
    said.append(parts)
    if not rollout.is_trainable:
        total_reward(parts)
    return _problem(rollout, parts, tolerance=tolerance)
