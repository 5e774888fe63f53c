"""Ways to cheat that a sampler has, as functions over groups that the real engine made.

Each returns the groups that the site would send and, for each, which of its rollouts the cheat changed: where a cheat
happens to give what an honest site gives, there is nothing to detect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.generated import assignments, generated, seeded_engine
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.process.clock import SystemClock
from heterorl.common.tasks.task import Task
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import Digest, SamplingSemantics, SiteId
from heterorl.common.types.rollout import FinishReason, Group, RewardPart, Rollout, total_reward
from heterorl.learner.checks.replay import Replayer
from heterorl.sampler.rollout.group_builder import GroupBuilder

SEED = 7
Cheated = tuple[list[Group], list[list[bool]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a sampler has; `replayer` stands for the weights that it was given."""

    model_dir: str
    task: Task
    prompter: Prompter
    sampling: SamplingSemantics
    replayer: Replayer
    state_root: Digest
    group_size: int

    def engine(self, *, compute_dtype: str = "fp32", temperature: float | None = None) -> HfEngine:
        """An engine with the model's own weights loaded as version 0."""
        sampling = self.sampling if temperature is None else dataclasses.replace(self.sampling, temperature=temperature)
        return seeded_engine(
            model_dir=self.model_dir, prompter=self.prompter, sampling=sampling, compute_dtype=compute_dtype
        )

    def generate(self, engine: HfEngine, numbers: Sequence[int], *, seed: int = SEED) -> list[Group]:
        """Groups of the assignments with these numbers, by the sampler's own code."""
        maker = GroupBuilder(
            task=self.task,
            prompter=self.prompter,
            site=SiteId("bench"),
            incarnation="bench",
            group_size=self.group_size,
            clock=SystemClock(),
            is_seeded=True,
        )
        work = assignments(numbers, num_prompts=self.task.num_prompts, seed=SEED, draws=seed)
        groups: list[Group] = []
        for start in range(0, len(work), 32):
            part = work[start : start + 32]
            groups += generated(maker, engine, part, state_root=self.state_root, first=1 + start)
        return groups

    def with_logprobs(self, group: Group) -> Group:
        """The group with the log-probs that the given weights have for its tokens, whoever drew them."""
        replays = self.replayer.replay(group, key=None)
        rollouts = tuple(
            dataclasses.replace(rollout, sampler_logprobs=np.minimum(replay.logprobs, 0.0))
            for rollout, replay in zip(group.rollouts, replays, strict=True)
        )
        return dataclasses.replace(group, rollouts=rollouts)

    def with_reward(self, group: Group, rollout: Rollout) -> Rollout:
        """The rollout with the reward that its tokens deserve."""
        prompt = self.task.prompt(group.prompt_index)
        parts = self.task.score(prompt, self.prompter.completion(rollout.token_ids, prompt))
        return dataclasses.replace(rollout, reward_parts=parts, reward=total_reward(parts))


def all_changed(groups: list[Group]) -> Cheated:
    """Every rollout is another."""
    return groups, [[True] * len(group.rollouts) for group in groups]


def where_tokens_differ(groups: list[Group], honest: Sequence[Group]) -> Cheated:
    """Those rollouts are others whose tokens an honest site would not have sent."""
    return groups, [
        [
            not np.array_equal(mine.token_ids, theirs.token_ids)
            for mine, theirs in zip(group.rollouts, reference.rollouts, strict=True)
        ]
        for group, reference in zip(groups, honest, strict=True)
    ]


def per_rollout(groups: Sequence[Group], change: Callable[[Group, Rollout], Rollout]) -> list[Group]:
    """The groups with every rollout changed."""
    return [
        dataclasses.replace(group, rollouts=tuple(change(group, rollout) for rollout in group.rollouts))
        for group in groups
    ]


def forged_logprobs(honest: Sequence[Group], *, shift: float) -> Cheated:
    """Log-probs that make the rollouts look unlikely, so that they weigh more."""

    def change(_: Group, rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, sampler_logprobs=rollout.sampler_logprobs - np.float32(shift))

    return all_changed(per_rollout(honest, change))


def forged_rewards(honest: Sequence[Group]) -> Cheated:
    """A reward of 1 for whatever was wrong."""

    def change(_: Group, rollout: Rollout) -> Rollout:
        part = RewardPart(name="correct", value=1.0)
        return dataclasses.replace(rollout, reward=1.0, reward_parts=(part,))

    changed = [[rollout.reward != 1.0 for rollout in group.rollouts] for group in honest]
    return per_rollout(honest, change), changed


def doctored(site: Site, honest: Sequence[Group]) -> Cheated:
    """The right answer in place of what was drawn, with true log-probs and the reward that it deserves."""

    def change(group: Group, rollout: Rollout) -> Rollout:
        answer = site.task.prompt(group.prompt_index).answer
        tokens = [*site.prompter.tokenizer.encode(answer, add_special_tokens=False), site.prompter.eos_token_id]
        ids = np.array(tokens, np.int32)
        span = dataclasses.replace(rollout.spans[0], end=ids.size)
        blank = np.zeros(ids.size, np.float32)
        changed = dataclasses.replace(
            rollout, token_ids=ids, sampler_logprobs=blank, spans=(span,), finish_reason=FinishReason.EOS
        )
        return site.with_reward(group, changed)

    groups = [site.with_logprobs(group) for group in per_rollout(honest, change)]
    return where_tokens_differ(groups, honest)


def cherry_picked(site: Site, engine: HfEngine, honest: Sequence[Group], *, tries: int) -> Cheated:
    """The best of several draws with seeds of its own, the shortest of equals; each as true as an honest one."""
    numbers = [group.assignment for group in honest]
    draws = [honest, *(site.generate(engine, numbers, seed=SEED + number) for number in range(1, tries))]
    groups = [
        dataclasses.replace(
            options[0],
            rollouts=tuple(max(rollouts, key=lambda rollout: (rollout.reward, -rollout.token_ids.size))
                           for rollouts in zip(*(option.rollouts for option in options), strict=True)),
        )
        for options in zip(*draws, strict=True)
    ]  # fmt: skip
    return where_tokens_differ(groups, honest)


def cut_short(honest: Sequence[Group]) -> Cheated:
    """Completions without their last two tokens, said to have ended for length."""

    def change(_: Group, rollout: Rollout) -> Rollout:
        end = max(1, rollout.token_ids.size - 2)
        span = dataclasses.replace(rollout.spans[0], end=end)
        return dataclasses.replace(
            rollout,
            token_ids=rollout.token_ids[:end],
            sampler_logprobs=rollout.sampler_logprobs[:end],
            spans=(span,),
            finish_reason=FinishReason.LENGTH,
        )

    return where_tokens_differ(per_rollout(honest, change), honest)


@torch.no_grad()
def round_weights(engine: HfEngine, *, bits: int) -> None:
    """Round every matrix to so many bits, with one scale for each row."""
    for parameter in engine.model.parameters():
        if parameter.dim() == 2:
            scale = parameter.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            parameter.copy_((parameter / scale.clamp(min=1e-12)).round() * scale)
