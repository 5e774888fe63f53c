"""Findings of checks, and the share of groups that are checked. Pure.

Guarantees: a site's first groups are all checked. Later the share halves with each `full_groups` that passed, down to a
floor; one failure resets it to 1. A site that always cheats passes k groups unseen with probability (1 - floor)^k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from heterorl.common.process.config_file import Config
from heterorl.common.types.common import Float32Array
from heterorl.common.types.rollout import DropReason


class VerificationConfig(Config):
    """Checks of what sites send; needs no trust in any sampler."""

    recompute_rewards: bool = True
    """Whether prompts and rewards are computed again where possible; a group that differs is not trained on."""
    reward_tolerance: float = Field(default=1e-6, ge=0)
    """Largest accepted difference of a reward."""
    trust_rewards_of: tuple[str, ...] = ()
    """Sites that are believed where the learner cannot compute itself: unsigned rewards of kinds http and judge within
    their bounds, and environments that it cannot replay; `*`: every site."""
    logprob_floor: float = Field(default=0.0, ge=0, le=1)
    """Smallest share of a site's groups whose log-probs are computed again; 0: none. Needs memory for one more model
    and kept_versions states."""
    full_groups: int = Field(default=64, ge=1)
    """First groups of a site, all checked if logprob_floor is above 0. The share halves with each further so many, down
    to it."""
    logprob_tolerance: float = Field(default=0.08, gt=0)
    """Largest mean |difference| of a rollout's log-probs, nats; a group beyond it is judged in bf16. 1e-4 also shows
    other versions' weights, if sites have float32 and swap `drain`."""
    group_logprob_tolerance: float = Field(default=0.035, gt=0)
    """The same over a group, where rounding averages out and a wrong temperature does not, nats."""
    margin_tolerance: float = Field(default=0.15, gt=0)
    """Largest margin by which a repeated draw may prefer another token, nats; for sites with seeded_sampling."""
    margin_share: float = Field(default=0.99, gt=0, le=1)
    """Share of a rollout's tokens that must be within margin_tolerance."""
    margin_limit: float = Field(default=4.0, gt=0)
    """Largest margin of any token, nats; rounding gives small ones."""
    require_seeded: bool = False
    """Whether groups of sites without seeded_sampling fail, vLLM's too."""
    max_versions: int = Field(default=65, ge=1)
    """Versions of one group, each pulled and computed to check it; groups with more are abandoned. One above
    max_staleness_versions suffices."""
    kept_versions: int = Field(default=2, ge=1)
    """Versions kept in memory for checks; others are pulled again."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    """Device of the model for logprob_floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check.
    `reason` and `detail` are of a failure, which rejects the group and counts against its site. Only `detail` is of
    a group that is abandoned, because it cannot be trained on or checked. A sound group has neither.

    Example: Finding(reason=DropReason.REWARD_MISMATCH, detail="rollouts[3].reward: 1, computed 0")
    """

    reason: DropReason | None = None
    detail: str = ""

    @property
    def is_sound(self) -> bool:
        return self.reason is None and not self.detail


SOUND = Finding()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """A rollout computed again: log-probs [T], and margins [T] of draws.
    Margins are of the repeated draw, where its site used seeded sampling."""

    logprobs: Float32Array
    margins: Float32Array | None


def checked_share(num_passed: int, config: VerificationConfig) -> float:
    """Share of a site's groups to check after `num_passed`.
    These passed since its start or last failure."""
    if config.logprob_floor == 0:
        return 0.0
    return max(config.logprob_floor, 0.5 ** max(0, num_passed // config.full_groups))


def logprob_difference(stated: Float32Array, replayed: Float32Array) -> float:
    """Mean over tokens of |log q stated - log q computed|, nats.
    Infinite when one is not a number."""
    difference = float(np.abs(stated.astype(np.float64) - replayed.astype(np.float64)).mean())
    return difference if np.isfinite(difference) else float("inf")


def judge_logprobs(stated: Sequence[Float32Array], replays: Sequence[Replay], config: VerificationConfig) -> Finding:
    """The finding about a group's stated log-probs; a lost member has none."""
    for number, (mine, replay) in enumerate(zip(stated, replays, strict=True)):
        if not mine.size:
            continue
        difference = logprob_difference(mine, replay.logprobs)
        if difference > config.logprob_tolerance:
            detail = (
                f"rollouts[{number}]: log-probs are {difference:.3g} nats off, allowed {config.logprob_tolerance:g}"
            )
            return Finding(reason=DropReason.LOGPROB_MISMATCH, detail=detail)
    difference = logprob_difference(np.concatenate(stated), np.concatenate([replay.logprobs for replay in replays]))
    if difference > config.group_logprob_tolerance:
        detail = f"rollouts: log-probs are {difference:.3g} nats off, allowed {config.group_logprob_tolerance:g}"
        return Finding(reason=DropReason.LOGPROB_MISMATCH, detail=detail)
    return SOUND


def judge_margins(replays: Sequence[Replay], config: VerificationConfig) -> Finding:
    """The finding about a group's draws; sound where none can be repeated."""
    for number, replay in enumerate(replays):
        if replay.margins is None:
            continue
        share, worst = float((replay.margins <= config.margin_tolerance).mean()), float(replay.margins.max())
        if not (share >= config.margin_share and worst <= config.margin_limit):
            detail = (
                f"rollouts[{number}]: {1 - share:.1%} of the tokens are not what the seed draws, margin {worst:.3g}"
            )
            return Finding(reason=DropReason.SAMPLING_MISMATCH, detail=detail)
    return SOUND


def judge_replays(stated: Sequence[Float32Array], replays: Sequence[Replay], config: VerificationConfig) -> Finding:
    """The finding about a group's log-probs and draws in one precision."""
    finding = judge_logprobs(stated, replays, config)
    return judge_margins(replays, config) if finding.is_sound else finding
