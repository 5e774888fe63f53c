"""Rollouts of one run and step with their rewards: what waits between generation and the step that trains on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from heterorl.common.tasks.task import Task
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import FinishReason, Group, GroupId, Rollout, Span, total_reward
from heterorl_research.lab.cell import Cell
from heterorl_research.lab.fast.generate import Drawn
from heterorl_research.lab.fast.work import Texts, Work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Groups of a step, [G, M] and [G, M, T] (see `generate.Drawn`); `version` is the policy that drew them."""

    work: Work
    drawn: Drawn
    rewards_GM: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    version: int

    def as_groups(self) -> list[Group]:
        """The same rollouts as the services hold them."""
        groups = []
        for number, prompt in enumerate(self.work.prompts):
            rollouts = tuple(self._rollout(number, member) for member in range(self.rewards_GM.shape[1]))
            groups.append(
                Group(
                    id=GroupId(site=SiteId("lab"), incarnation="fast", sequence=number + 1),
                    assignment=number,
                    prompt_index=prompt.index,
                    prompt_token_ids=self.work.tokens_GP[number].astype(np.int32),
                    rollouts=rollouts,
                    oldest_version=self.version,
                    state_root=Digest(""),
                    generation_s=0.0,
                )
            )
        return groups

    def _rollout(self, number: int, member: int) -> Rollout:
        length = int(self.drawn.lengths_RGM[number, member])
        return Rollout(
            token_ids=self.drawn.tokens_RGMT[number, member, :length].astype(np.int32),
            sampler_logprobs=self.drawn.logprobs_RGMT[number, member, :length],
            spans=(Span(version=self.version, start=0, end=length),),
            reward=float(self.rewards_GM[number, member]),
            reward_parts=(),
            # No loss reads it.
            finish_reason=FinishReason.EOS,
        )


def of_run(drawn: Drawn, number: int) -> Drawn:
    """The completions of one run: the same fields without their first dimension."""
    return Drawn(
        tokens_RGMT=drawn.tokens_RGMT[number],
        logprobs_RGMT=drawn.logprobs_RGMT[number],
        lengths_RGM=drawn.lengths_RGM[number],
        first_RGMT=drawn.first_RGMT[number],
    )


def as_reported(rollouts: Rollouts, cell: Cell, *, step: int) -> Rollouts:
    """Rollouts with the noise of `regime.sampler_noise`, d, on their log-probs; all runs of a seed have the same.

    The noise of a token is d + sqrt(2 d) x with a standard normal x: log p - log q is -d in the mean, and the mean of
    p / q stays 1.
    """
    nats, drawn = cell.regime.sampler_noise, rollouts.drawn
    if not nats:
        return rollouts
    rng = np.random.default_rng((cell.seed, step))
    noise = nats + math.sqrt(2.0 * nats) * rng.standard_normal(drawn.logprobs_RGMT.shape)
    is_token = np.arange(drawn.tokens_RGMT.shape[-1]) < drawn.lengths_RGM[..., None]
    noisy = np.where(is_token, drawn.logprobs_RGMT + noise, 0.0).astype(np.float32)
    return replace(rollouts, drawn=replace(drawn, logprobs_RGMT=noisy))


def score(task: Task, texts: Texts, work: Work, drawn: Drawn) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Rewards [G, M] of one run's completions; equal completions of a prompt are scored once.

    Raises:
        RewardError: the verifier failed.
    """
    rewards = np.zeros(drawn.lengths_RGM.shape)
    tokens, lengths = drawn.tokens_RGMT.tolist(), drawn.lengths_RGM.tolist()
    for number, prompt in enumerate(work.prompts):
        known: dict[str, float] = {}
        for member, (row, length) in enumerate(zip(tokens[number], lengths[number], strict=True)):
            text = texts.decode(row[:length])
            if text not in known:
                known[text] = float(total_reward(task.score(prompt, text)))
            rewards[number, member] = known[text]
    return rewards
