"""The verifier: rewards of all leased groups, log-probs and draws of some.

    score      computes rewards, as many groups at once as the task has workers
    conclude   counts, and replays some groups: one at a time, in the order of arrival

Guarantees: the checked groups are drawn after their acknowledgement, from randomness that no site sees. A group that
cannot be checked is neither trained on nor held against its site. Heavy work runs in a thread. Never changes a group.

The newest few versions for replays stay in memory; any other is pulled again and verified as at a sampler. So a site
cannot choose a version that escapes the checks.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from heterorl.common.errors import (
    CorruptData,
    PromptRefused,
    RewardError,
    UnknownPayload,
    UnknownVersion,
    UntrustedVersion,
)
from heterorl.common.model.logprobs import group_key
from heterorl.common.model.quantise import LIMIT, Variant, dequantise, variant_layout
from heterorl.common.model.router_replay import RoutingShape
from heterorl.common.process import metrics
from heterorl.common.process.threads import in_thread, in_thread_of
from heterorl.common.pull.puller import PulledVersion, TrustedPuller
from heterorl.common.tasks.task import FailureStreak, Task
from heterorl.common.text.conversation import Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import SiteId, peer_words
from heterorl.common.types.rollout import (
    MAX_PART_VALUE,
    MAX_REWARD,
    DropReason,
    Group,
    QueuedGroup,
    drawn_turns,
    strips_of,
)
from heterorl.common.weights.arena import Arena, Layout
from heterorl.learner.checks.findings import SOUND, Finding, Replay, VerificationConfig, checked_share, judge_replays
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.checks.reward_checks import judge_rewards

_LOG = logging.getLogger(__name__)
_NONE = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False, kw_only=True)
class RecentVersions:
    """A few pulled states, by variant and version."""

    make_puller: Callable[..., TrustedPuller]
    """Makes a puller of `spool`, `layout` and `variant`."""
    spool: Path
    layout: Layout
    num_kept: int
    _pullers: dict[str, TrustedPuller] = field(default_factory=dict)
    _kept: OrderedDict[tuple[str, int], PulledVersion] = field(default_factory=OrderedDict)
    _whole: tuple[tuple[str, int], Arena] | None = None
    """Dequantised weights of the last variant's version."""

    async def get(self, version: int, variant: str = "") -> Arena:
        """The weights that samplers of a variant compute with at a version.
        Variant "" is the trained weights.

        Raises:
            UnknownVersion: it is not in the lineage, its payloads were deleted, or the variant is unknown.
            UnknownPayload: payloads go as fast as plans are made.
            CorruptData: even the snapshot fails its checks.
            UntrustedVersion: no trusted key signed it.
        """
        key = (variant, version)
        pulled = self._kept.get(key)
        if pulled is None:
            earlier = [number for form, number in self._kept if form == variant and number < version]
            held = self._kept[variant, max(earlier)] if earlier else None
            pulled = await self._puller(variant).build(version, held=held)
            self._kept[key] = pulled
            _LOG.debug("the verifier pulled version %d%s", version, f" in variant {variant}" if variant else "")
        self._kept.move_to_end(key)
        while len(self._kept) > self.num_kept:
            self._kept.popitem(last=False)
        if not variant:
            return pulled.arena
        if self._whole is None or self._whole[0] != key:
            whole = Arena(self.layout)
            await in_thread(dequantise, pulled.arena, whole, _known(variant))
            self._whole = (key, whole)
        return self._whole[1]

    def _puller(self, variant: str) -> TrustedPuller:
        if variant not in self._pullers:
            layout = variant_layout(self.layout, _known(variant)) if variant else self.layout
            spool = self.spool / (variant or "trained")
            self._pullers[variant] = self.make_puller(spool=spool, layout=layout, variant=variant)
        return self._pullers[variant]


def _known(variant: str) -> Variant:
    for name in LIMIT:
        if name == variant:
            return name
    raise UnknownVersion(f"this program knows no variant {variant!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationContext:
    """References of the checks; `replayer` is None where log-probs are not checked."""

    config: VerificationConfig
    task: Task
    prompter: Prompter
    replayer: Replayer | None = None
    conversations: Conversations | None = None
    """The environments of the task; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The result of computing rewards: a finding, or an error.
    The error does not blame the site. Neither is set where no rewards are computed."""

    finding: Finding | None = None
    error: RewardError | PromptRefused | None = None
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Verifier:
    """Checks groups; counts a site's passes since its last other check."""

    verification: VerificationContext
    versions: RecentVersions | None
    rng: random.Random
    busy: AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)
    """Open while a group is being checked."""
    passed: Counter[SiteId] = field(default_factory=Counter)
    unseeded: set[SiteId] = field(default_factory=set)
    failures: FailureStreak = field(default_factory=FailureStreak)
    _scorers: ThreadPoolExecutor = field(init=False)
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        num_workers = max(1, self.verification.task.num_workers)
        # A pool of its own: rewards that hang must not keep a step from its thread.
        self._scorers = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="examine")
        # The pool's own queue could not be left by a cancelled caller.
        self._room = asyncio.Semaphore(num_workers)

    def labelled(self, queued: QueuedGroup) -> QueuedGroup:
        task, index = self.verification.task, queued.group.prompt_index
        source = task.source_of(index) if index < task.num_prompts else ""
        return dataclasses.replace(queued, source=source) if source else queued

    async def score(self, queued: QueuedGroup) -> Scored:
        """Compute a group's rewards, in parallel with other groups."""
        if not self.verification.config.recompute_rewards:
            return Scored()
        async with self._room:
            with self.busy:
                return await in_thread_of(self._scorers, self._score, queued.group)

    def _score(self, group: Group) -> Scored:
        started = time.perf_counter()
        try:
            finding = judge_rewards(
                group,
                task=self.verification.task,
                prompter=self.verification.prompter,
                tolerance=self.verification.config.reward_tolerance,
                trusted=self.verification.config.trust_rewards_of,
                conversations=self.verification.conversations,
            )
        except (RewardError, PromptRefused) as error:
            return Scored(error=error, seconds=time.perf_counter() - started)
        return Scored(finding=finding, seconds=time.perf_counter() - started)

    async def conclude(self, queued: QueuedGroup, scored: Scored) -> Finding:
        """Finish the checks of a scored group.
        One at a time, in the order of arrival."""
        started = time.perf_counter()
        with self.busy:
            finding = await self._check(queued, scored)
        metrics.CHECK_SECONDS.observe(scored.seconds + time.perf_counter() - started)
        if finding.reason is not None:
            self.passed[queued.group.id.site] = 0
        return finding

    async def _check(self, queued: QueuedGroup, scored: Scored) -> Finding:
        group, config = queued.group, self.verification.config
        if scored.error is not None:
            _count(group, "reward", "skipped")
            self.failures.failed(scored.error)
            return Finding(detail=f"its rewards could not be computed: {scored.error}")
        if scored.finding is not None:
            self.failures.passed()
            _count(group, "reward", "passed" if scored.finding.is_sound else "failed")
            if not scored.finding.is_sound:
                return scored.finding
        if config.require_seeded and not group.is_seeded:
            _count(group, "sampling", "failed")
            return Finding(reason=DropReason.SAMPLING_MISMATCH, detail="its site does not use seeded_sampling")
        share = checked_share(self.passed[group.id.site], config)
        if share == 0:
            return SOUND
        versions = sorted({span.version for rollout in group.trainable for span in rollout.spans if span.is_drawn})
        if len(versions) > config.max_versions:
            # Before the draw: a site could train by the groups that are not drawn, and is never blamed for the others.
            _count(group, "logprob", "skipped")
            return Finding(
                detail=f"it names {len(versions)} versions; verification.max_versions is {config.max_versions}"
            )
        if self.rng.random() >= share:
            return SOUND
        finding = await self._replay(queued, versions)
        # A version that is gone too: a site that names one to escape meets a check of each next group.
        self.passed[group.id.site] = self.passed[group.id.site] + 1 if finding.is_sound else 0
        return finding

    async def _replay(self, queued: QueuedGroup, versions: list[int]) -> Finding:
        group, replayer = queued.group, self.verification.replayer
        assert replayer is not None, "a share above 0 comes with a model to check with"
        assert self.versions is not None, "and with versions to check under"
        key = None
        if group.is_seeded and queued.seed is not None and replayer.can_repeat_draws:
            key = group_key(seed=queued.seed, prompt_index=group.prompt_index)
        elif group.id.site not in self.unseeded:
            self.unseeded.add(group.id.site)
            _LOG.warning("draws of site %s cannot be repeated, the learner checks only log-probs", group.id.site)
        # Only of trainable rollouts: untrained tokens would lower the mean over the group.
        stated = [rollout.sampler_logprobs if rollout.is_trainable else _NONE for rollout in group.rollouts]
        finding = SOUND
        # In some models one in twenty groups of an honest engine in bf16 is beyond a tolerance of fp32.
        for is_rounded in (False, True):
            replays: list[Replay] = []
            for version in versions:
                try:
                    arena = await self.versions.get(version, queued.variant)
                except (UnknownVersion, UnknownPayload, CorruptData, UntrustedVersion) as error:
                    _count(group, "logprob", "skipped")
                    return Finding(detail=f"version {version} cannot be had to check it: {error}")
                await in_thread(replayer.load, arena, version, queued.variant)
                found = await in_thread(replayer.replay, group, key=key, is_rounded=is_rounded)
                replays = found if not replays else _spliced(group, version, into=replays, other=found)
            finding = judge_replays(stated, replays, self.verification.config)
            if finding.is_sound:
                break
        is_off = finding.reason is DropReason.LOGPROB_MISMATCH
        _count(group, "logprob", "failed" if is_off else "passed")
        if not is_off:
            _count(group, "sampling", "failed" if not finding.is_sound else "skipped" if key is None else "passed")
        return finding


def _spliced(group: Group, version: int, *, into: list[Replay], other: list[Replay]) -> list[Replay]:
    """Tokens of the given version take their numbers from `other`."""
    result = []
    for rollout, mine, theirs in zip(group.rollouts, into, other, strict=True):
        if not rollout.is_trainable:
            result.append(mine)
            continue
        drawn = [span for span in rollout.spans if span.is_drawn]
        is_theirs = np.repeat([span.version == version for span in drawn], [span.end - span.start for span in drawn])
        margins = None
        if mine.margins is not None and theirs.margins is not None:
            margins = np.where(is_theirs, theirs.margins, mine.margins)
        result.append(Replay(logprobs=np.where(is_theirs, theirs.logprobs, mine.logprobs), margins=margins))
    return result


def _count(group: Group, check: str, verdict: str) -> None:
    metrics.CHECKED_GROUPS.labels(metrics.SITES.of(group.id.site), check, verdict).inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the groups that this learner can hold.

    `max_sequence_tokens` bounds prompt plus completion; 0 is no bound. `has_unit_rewards`: the advantage needs rewards
    in [0, 1].
    """

    group_size: int
    min_members: int = 0
    """Rollouts that must be trainable; 0: all."""
    vocab_size: int
    max_sequence_tokens: int
    has_unit_rewards: bool = False
    routing: RoutingShape | None = None
    """Shape of the model's routing, where routing is replayed."""


def judge(group: Group, limits: Limits) -> Finding:
    """Why the group can never be trained on, if so.

    A group without any advantage is sound: it takes part in a step.
    """
    if len(group.rollouts) != limits.group_size:
        return Finding(detail=f"{len(group.rollouts)} rollouts, the group size is {limits.group_size}")
    if group.prompt_token_ids.size == 0:
        return Finding(detail="the prompt has no token")
    absurd = [rollout.reward for rollout in group.rollouts if not abs(rollout.reward) <= MAX_REWARD]
    if absurd:
        return Finding(detail=f"a reward of {absurd[0]:g}; at most {MAX_REWARD:g} either way is trained on")
    parts = [part for rollout in group.rollouts for part in rollout.reward_parts]
    absurd_parts = [part for part in parts if not abs(part.value) <= MAX_PART_VALUE]
    if absurd_parts:
        # Also of weight 0: its mean is reported with the step.
        name, value = peer_words(absurd_parts[0].name), absurd_parts[0].value
        return Finding(detail=f"a value of {value:g} of the reward's part {name}; at most {MAX_PART_VALUE:g} is taken")
    if limits.has_unit_rewards and not all(0 <= rollout.reward <= 1 for rollout in group.rollouts):
        return Finding(detail="a reward outside [0, 1], which loss.advantage = beta is not defined for")
    if any(each.num_drawn != drawn_turns(each).size for each in group.rollouts):
        return Finding(detail="a rollout has not one log-prob per token")
    if any(rollout.finish_reason.is_trainable and not rollout.is_trainable for rollout in group.rollouts):
        return Finding(detail="a rollout has no token")
    if len(group.trainable) < (limits.min_members or limits.group_size):
        return Finding(detail=f"{len(group.trainable)} rollouts can be trained; min_members is {limits.min_members}")
    strips = [strip for rollout in group.rollouts for strip in strips_of(group.prompt_token_ids, rollout)]
    total = max(strip.token_ids.size for strip in strips)
    if limits.max_sequence_tokens and total > limits.max_sequence_tokens:
        return Finding(detail=f"a sequence of {total} tokens; max_sequence_tokens is {limits.max_sequence_tokens}")
    ids = [group.prompt_token_ids, *(rollout.token_ids for rollout in group.rollouts if rollout.token_ids.size)]
    if any(part.min() < 0 or part.max() >= limits.vocab_size for part in ids):
        return Finding(detail=f"a token is outside the vocabulary of {limits.vocab_size}")
    problem = _record_problem(group, limits.routing)
    return Finding(detail=problem) if problem else SOUND


def _record_problem(group: Group, routing: RoutingShape | None) -> str:
    for rollout in group.rollouts:
        if routing is None and rollout.routed_experts:
            return "routed_experts: a record of experts, and no routing is replayed"
        num_read = group.prompt_token_ids.size + rollout.token_ids.size - 1
        if routing is not None and (problem := routing.problem(rollout.routed_experts, num_read)):
            return problem
    return ""
