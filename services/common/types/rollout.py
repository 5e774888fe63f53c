"""Values about rollouts: assignments, groups, turns, token sequences, outcomes of pushes."""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heterorl.common.errors import RewardError
from heterorl.common.types.common import Digest, Float32Array, Int32Array, SiteId
from heterorl.common.types.evaluation import EvaluationSpec


class FinishReason(enum.Enum):
    """Why a rollout ended; an engine's completion by EOS or LENGTH only."""

    EOS = "eos"
    """It ended by itself; its last token is an end token."""
    LENGTH = "length"
    """It ended by itself; its last turn was cut at `max_new_tokens`."""
    TURNS = "turns"
    """After `max_turns` turns."""
    CONTEXT = "context"
    """No room was left for another turn."""
    SECONDS = "seconds"
    """After `trajectory_s` seconds."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The environment's code raised an error."""
    TOOL_LOST = "tool_lost"
    """A step took too long, or its process was killed."""
    REWARD_FAILED = "reward_failed"
    """Its reward could not be computed."""
    ENGINE_FAILED = "engine_failed"
    """The engine lost it, or ended no turn of it in time."""

    @property
    def is_trainable(self) -> bool:
        """Whether such a rollout is trained on; others are lost members."""
        return self not in _LOST


_LOST = frozenset(
    {FinishReason.ENVIRONMENT_FAILED, FinishReason.TOOL_LOST, FinishReason.REWARD_FAILED, FinishReason.ENGINE_FAILED}
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GroupId:
    """Identity of a group; sequences of an incarnation are dense from 1.

    Example: GroupId(site=SiteId("eu-1"), incarnation="b1946ac9", sequence=17)
    """

    site: SiteId
    incarnation: str
    sequence: int


GIVEN = -1
"""Version of tokens that no policy drew, such as an environment's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, end) of a rollout, drawn by policy `version` or GIVEN.

    Example: Span(version=7, start=0, end=12)
    """

    version: int
    start: int
    end: int
    keeps: int | None = None
    """Begins another sequence behind the first `keeps` tokens of the one before, prompt included; None continues."""
    is_stale: bool = False
    """Whether a policy drew them, too long ago to be trained."""

    @property
    def is_drawn(self) -> bool:
        """Whether a policy drew the tokens; only drawn tokens are trained."""
        return self.version != GIVEN


MAX_REWARD_PARTS = 64
"""Reward parts of one completion."""
MAX_PART_NAME = 128
"""Characters of a part's name, all printable."""
MAX_PART_VALUE = 1e15
"""Largest |value| of a part before its weight: whole numbers stay exact, and no sum overflows."""
MAX_REWARD = 1e6
"""Largest |reward| of a completion: beyond it an average overflows or has no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One named component of a reward, which adds `weight` times its value.

    `signature` is a reward service's over its value (tasks.rewards.remote_reward); empty for most parts.
    """

    name: str
    value: float
    weight: float = 1.0
    signature: bytes = b""


def total_reward(parts: Iterable[RewardPart]) -> float:
    """The reward of named parts; raises RewardError beyond MAX_REWARD.

    It is NaN if a part is NaN: a learner does not ask the services that it trusts.
    """
    total = weighted_sum(parts)
    if abs(total) > MAX_REWARD:
        raise RewardError(
            f"a reward of {total:g}; at most {MAX_REWARD:g} either way is trained on",
            action="lower the reward, or its weight in task.rewards",
        )
    return total


def weighted_sum(parts: Iterable[RewardPart]) -> float:
    """The sum of weight x value, rounded once.

    So 0.7 + 0.2 + 0.1 is 1.0 in any order of the parts, and counts as right where 1.0 is wanted.
    """
    values = [part.weight * part.value for part in parts]
    total = sum(values)
    return math.fsum(values) if math.isfinite(total) else total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Tokens behind a prompt: one completion, or turns and given tokens.

    `token_ids` int32 [T] ends with the end-of-sequence token if `finish_reason` is EOS; `spans` cover [0, T) in order
    without gaps, and are all drawn with one turn. `sampler_logprobs` float32 [D], each finite and <= 0, belong to
    the D drawn tokens. A lost member may have no tokens. `routed_experts` are the experts of the P + T - 1 tokens of
    prompt and completion that the engine read (heterorl.common.model.router_replay); may be empty.
    """

    token_ids: Int32Array
    sampler_logprobs: Float32Array
    spans: tuple[Span, ...]
    reward: float
    reward_parts: tuple[RewardPart, ...]
    finish_reason: FinishReason
    routed_experts: bytes = b""

    @property
    def num_drawn(self) -> int:
        return self.sampler_logprobs.size

    @property
    def is_trainable(self) -> bool:
        """Whether it is trained on: it has a reward and drawn tokens."""
        return self.finish_reason.is_trainable and self.num_drawn > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The G rollouts of one prompt: pushed, queued, leased, trained as one.

    `oldest_version` is the smallest version in any span; `state_root` is that version's state root; `assignment` asked
    for the group; `prompt_index` is the prompt's position in the task.
    """

    id: GroupId
    assignment: int
    prompt_index: int
    prompt_token_ids: Int32Array
    rollouts: tuple[Rollout, ...]
    oldest_version: int
    state_root: Digest
    generation_s: float
    is_seeded: bool = False
    """Whether the tokens were drawn with the noise of heterorl.common.model.logprobs."""
    trace: str = ""
    """W3C trace context of the generation; empty if the group is not traced."""

    @property
    def trainable(self) -> tuple[Rollout, ...]:
        """The rollouts that are trained on and count in advantages and reports."""
        return tuple(rollout for rollout in self.rollouts if rollout.is_trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedGroup:
    """A group as canonical bytes, with fields that stores and queues need.

    Made by `common/wire/sealed_groups`. `versions` are its spans' versions, each once, ascending.
    """

    id: GroupId
    data: bytes
    assignment: int
    prompt_index: int
    oldest_version: int
    state_root: Digest
    versions: tuple[int, ...]
    trace: str = ""


MAX_ASSIGNMENTS = 4096
"""Assignments in one call: each is a statement on the coordinator's store thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAssignment:
    """One prompt group to generate, or a held-out prompt to evaluate.

    Ids from HELD_OUT on are of held-out prompts. `seed` is of its draws; the lease holds for `lease_s` seconds from
    now.
    """

    id: int
    prompt_index: int
    seed: int
    lease_s: float


class PushStatus(enum.Enum):
    """Outcome of pushing one group; all but RETRY are final and durable."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    RETRY = "retry"


class ReturnReason(enum.Enum):
    """Why a row gives no usable group, at any site."""

    REWARD_FAILED = "reward_failed"
    PROMPT_REFUSED = "prompt_refused"
    PROMPT_TOO_LONG = "prompt_too_long"
    ENGINE_FAILED = "engine_failed"
    ENVIRONMENT_FAILED = "environment_failed"
    TOOL_LOST = "tool_lost"
    GROUP_INVALID = "group_invalid"
    """The coordinator refused its group as invalid."""
    GROUP_STALE = "group_stale"
    """Its group was too old when it arrived."""


class DropReason(enum.Enum):
    """Why an acknowledged group is not trained on."""

    STALE_AT_INGEST = "stale_at_ingest"
    STALE_AT_LEASE = "stale_at_lease"
    STALE_AT_COMMIT = "stale_at_commit"
    CONFLICT = "conflict"
    INVALID = "invalid"
    UNKNOWN_VERSION = "unknown_version"
    WRONG_DIGEST = "wrong_digest"
    SURPLUS = "surplus"
    """Another group already answered its assignment, as after a second lease."""
    LINEAGE_ABANDONED = "lineage_abandoned"
    LEARNER_ABANDONED = "learner_abandoned"
    REWARD_MISMATCH = "reward_mismatch"
    LOGPROB_MISMATCH = "logprob_mismatch"
    SAMPLING_MISMATCH = "sampling_mismatch"
    QUARANTINED = "quarantined"
    CODE_MISMATCH = "code_mismatch"
    """Only the result of a completion's code differs, which may be random."""
    LOST_MEMBERS = "lost_members"
    """It has lost members, and its site loses more than `max_lost_share`."""
    UNIFORM = "uniform"
    """All its rewards were equal; the learner trained on another group instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """The coordinator's outcome for one group, with the reason."""

    id: GroupId
    status: PushStatus
    reason: DropReason | None = None
    message: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leased:
    """The coordinator's facts about a group that it leases to the learner."""

    policy_age_s: float
    """Seconds since the publication of the group's oldest version, by the coordinator's clock."""
    queue_age_s: float
    seed: int | None = None
    """Sampling seed of the group's assignment; None: not stated."""
    variant: str = ""
    """Variant of the weights that generated it; empty for the trained ones."""
    wants_note: bool = False
    """Whether the coordinator keeps it as a sample and wants the learner's note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGroup(_Leased):
    """A group on its way to the learner, in the store's form."""

    sealed: SealedGroup
    superseded_s: float = 0.0
    """Seconds since a newer version was published, which max_superseded_s bounds; not for the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup(_Leased):
    """A group in the learner's form."""

    group: Group
    source: str = ""
    """Label of its prompt's source in a task mixture; set by the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkGrant:
    """Assignments, or none with a reason and the next request's delay.

    A delay of 0 for held-out prompts means: never again.
    """

    assignments: tuple[WorkAssignment, ...]
    reason: str
    retry_after_s: float
    evaluation: EvaluationSpec | None = None
    """Spec of held-out prompts; None for groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A leased group that failed a learner's check; `detail` has the numbers."""

    id: GroupId
    reason: DropReason
    detail: str


BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """Tokens that the model reads at once, and which are trained.

    Int32 [L] and bool [L]; the last token is trained.
    """

    token_ids: Int32Array
    is_drawn: BoolArray

    @property
    def num_inputs(self) -> int:
        return self.token_ids.size - 1


def is_drawn(spans: Sequence[Span], count: int) -> BoolArray:
    """Which of `count` tokens a policy drew."""
    drawn = np.zeros(count, np.bool_)
    for span in spans:
        drawn[span.start : span.end] = span.is_drawn
    return drawn


def strips_of(prompt: Int32Array, rollout: Rollout) -> tuple[Strip, ...]:
    """The sequences of a rollout, each up to its last drawn token.

    Each drawn token is trained in one of them. A sequence that keeps tokens of the one before has them as context. One
    without a drawn token is left out.
    """
    drawn = is_drawn(rollout.spans, rollout.token_ids.size)
    starts = [span.start for span in rollout.spans if span.keeps is not None]
    kept = [span.keeps for span in rollout.spans if span.keeps is not None]
    ids, marks = prompt, np.zeros(prompt.size, np.bool_)
    strips = []
    for start, end, keeps in zip([0, *starts], [*starts, rollout.token_ids.size], [None, *kept], strict=True):
        ids = np.concatenate([ids[:keeps], rollout.token_ids[start:end]])
        marks = np.concatenate([np.zeros_like(marks[:keeps]), drawn[start:end]])
        if marks.any():
            length = int(np.flatnonzero(marks)[-1]) + 1
            strips.append(Strip(token_ids=ids[:length], is_drawn=marks[:length]))
    return tuple(strips)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens [start, end) of a rollout: a policy's turn, or given tokens.

    `versions` drew the turn, each once, in order; given tokens have none. `keeps` is the Span's.
    """

    start: int
    end: int
    versions: tuple[int, ...]
    keeps: int | None = None

    @property
    def is_drawn(self) -> bool:
        return bool(self.versions)

    @property
    def writer(self) -> str:
        """Its writer, for people.

        Example: "version 7", "versions 7, 8", "environment"
        """
        name = f"version{'s'[: len(self.versions) > 1]} {', '.join(map(str, self.versions))}"
        if not self.is_drawn:
            name = "environment"
        return name if self.keeps is None else f"{name}, in a new sequence that keeps {self.keeps} tokens"


def parts_of(spans: Sequence[Span]) -> tuple[Part, ...]:
    """A rollout's turns and the given tokens between them, in order.

    A single completion is one drawn part. A turn may have several versions; given tokens or another sequence end it.
    """
    parts: list[Part] = []
    for span in spans:
        versions = (span.version,) if span.is_drawn else ()
        if parts and span.keeps is None and parts[-1].is_drawn == span.is_drawn:
            known = tuple(dict.fromkeys((*parts[-1].versions, *versions)))
            parts[-1] = replace(parts[-1], end=span.end, versions=known)
        else:
            parts.append(Part(start=span.start, end=span.end, versions=versions, keeps=span.keeps))
    return tuple(parts)


def turns_of(rollout: Rollout) -> tuple[tuple[int, int], ...]:
    """Begin and end of each policy turn among the rollout's tokens."""
    return tuple((part.start, part.end) for part in parts_of(rollout.spans) if part.is_drawn)


def turn_numbers(spans: Sequence[Span]) -> list[int]:
    """Turn of each span, from 0; given tokens have the one before.

    Stale turns count.
    """
    numbers, number, was_said = [], -1, False
    for span in spans:
        is_said = span.is_drawn or span.is_stale
        number += is_said and (span.keeps is not None or not was_said)
        numbers.append(number)
        was_said = is_said
    return numbers


def drawn_turns(rollout: Rollout) -> Int32Array:
    """The turn, from 0, that drew each token."""
    drawn = [
        (number, span.end - span.start)
        for number, span in zip(turn_numbers(rollout.spans), rollout.spans, strict=True)
        if span.is_drawn
    ]
    return np.repeat(np.array([number for number, _ in drawn], np.int32), [length for _, length in drawn])


def without_stale(group: Group, *, oldest: int) -> Group:
    """The group with tokens drawn before version `oldest` as given tokens.

    The group itself where there is none. A rollout without other drawn tokens is trained on no longer.
    """
    if group.oldest_version >= oldest:
        return group
    rollouts = tuple(_without_stale(rollout, oldest) for rollout in group.rollouts)
    left = [span.version for one in rollouts if one.is_trainable for span in one.spans if span.is_drawn]
    return replace(group, rollouts=rollouts, oldest_version=min(left, default=group.oldest_version))


def _without_stale(rollout: Rollout, oldest: int) -> Rollout:
    drawn = [span for span in rollout.spans if span.is_drawn]
    is_kept = np.repeat([span.version >= oldest for span in drawn], [span.end - span.start for span in drawn])
    if is_kept.all():
        return rollout
    spans = tuple(
        replace(span, version=GIVEN, is_stale=True) if span.is_drawn and span.version < oldest else span
        for span in rollout.spans
    )
    return replace(rollout, spans=spans, sampler_logprobs=rollout.sampler_logprobs[is_kept])


def spread(values: Float32Array, drawn: BoolArray) -> Float32Array:
    """Numbers of drawn tokens at all tokens' places; NaN at given ones.

    NaN at all of them where there is not one number for each drawn token.
    """
    found = np.full(drawn.size, np.nan, np.float32)
    if values.size == np.count_nonzero(drawn):
        found[drawn] = values
    return found
