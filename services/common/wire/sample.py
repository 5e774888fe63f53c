"""Protobuf <-> kept samples: lines of a list, and whole samples.

What is kept is bytes: of a group its canonical ones (heterorl.common.wire.seal), of a note and of an evaluation those
of their messages. `outline` reads of a group what a list needs.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import FinishReason, Group
from heterorl.common.types.sample import (
    EvaluationSample,
    RolloutNote,
    Sample,
    SampleKind,
    SampleNote,
    SampleRollout,
    SampleSummary,
)
from heterorl.common.wire.columns import FIRST_LOST, columns_of
from heterorl.common.wire.rollout import group_id_from_pb, group_id_to_pb
from heterorl.common.wire.sample_notes import evaluation_from_pb, floats, ids, note_from_pb
from heterorl.common.wire.seal import group_message, open_group, read_sealed
from heterorl.v1 import rollout_pb2, sample_pb2

_KIND = {
    SampleKind.CONSUMED: sample_pb2.SAMPLE_KIND_CONSUMED,
    SampleKind.REJECTED: sample_pb2.SAMPLE_KIND_REJECTED,
    SampleKind.DROPPED: sample_pb2.SAMPLE_KIND_DROPPED,
    SampleKind.EVALUATION: sample_pb2.SAMPLE_KIND_EVALUATION,
}
_KIND_OF = {pb: value for value, pb in _KIND.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a list says of completions; rewards are those of no lost member, and None where one is not finite."""

    num_rollouts: int
    num_truncated: int
    num_lost: int
    num_tokens: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample as it lies in the store: `content` of a group or of an evaluation, `note` empty before the learner's."""

    summary: SampleSummary
    content: bytes
    note: bytes = b""


def outline(data: bytes) -> Outline:
    """The outline of a group's canonical bytes."""
    columns = columns_of(group_message(data))
    is_lost = columns.endings >= FIRST_LOST
    return _outline(
        columns.rewards[~is_lost].tolist(),
        num_truncated=int((columns.endings == rollout_pb2.FINISH_REASON_LENGTH).sum()),
        num_lost=int(is_lost.sum()),
        num_tokens=columns.logprobs.size,
    )


def outline_of_evaluation(sample: EvaluationSample) -> Outline:
    """The same of an evaluation."""
    return _outline(
        [rollout.reward for rollout in sample.rollouts if not rollout.is_lost],
        num_truncated=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in sample.rollouts),
        num_lost=sum(rollout.is_lost for rollout in sample.rollouts),
        num_tokens=sum(rollout.num_drawn for rollout in sample.rollouts),
    )


def _outline(rewards: list[float], *, num_truncated: int, num_lost: int, num_tokens: int) -> Outline:
    is_finite = bool(rewards) and all(math.isfinite(reward) for reward in rewards)
    return Outline(
        num_rollouts=len(rewards) + num_lost,
        num_truncated=num_truncated,
        num_lost=num_lost,
        num_tokens=num_tokens,
        reward_min=min(rewards) if is_finite else None,
        # By fractions: a sum of huge rewards is not finite although each is.
        reward_mean=statistics.mean(rewards) if is_finite else None,
        reward_max=max(rewards) if is_finite else None,
    )


def kind_to_pb(value: SampleKind | None) -> sample_pb2.SampleKind.ValueType:
    """Convert a kind; None is any."""
    return sample_pb2.SAMPLE_KIND_UNSPECIFIED if value is None else _KIND[value]


def kind_from_pb(message: sample_pb2.SampleKind.ValueType) -> SampleKind | None:
    """Convert a kind; None where it is not stated or newer than this program."""
    return _KIND_OF.get(message)


def summary_to_pb(value: SampleSummary) -> sample_pb2.SampleSummary:
    """Convert a line of a list; the fields have the same names on both sides."""
    names = set(SampleSummary.__slots__) - {"kind", "group"}
    message = sample_pb2.SampleSummary(
        kind=_KIND[value.kind], **{name: got for name in names if (got := getattr(value, name)) is not None}
    )
    if value.group is not None:
        message.group.CopyFrom(group_id_to_pb(value.group))
    return message


def summary_from_pb(message: sample_pb2.SampleSummary) -> SampleSummary:
    """Convert a line of a list.

    Raises:
        InvalidRequest: its kind is newer than this program.
    """
    kind = _KIND_OF.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"summary.kind: {message.kind} is not a kind")
    rewards = ("reward_min", "reward_mean", "reward_max")
    plain = set(SampleSummary.__slots__) - {"kind", "group", "site", *rewards}
    return SampleSummary(
        kind=kind,
        group=group_id_from_pb(message.group) if message.HasField("group") else None,
        site=SiteId(message.site),
        **{name: getattr(message, name) if message.HasField(name) else None for name in rewards},  # type: ignore[arg-type]
        **{name: getattr(message, name) for name in plain},
    )


def stored_to_pb(value: StoredSample) -> sample_pb2.GetSampleResponse:
    """A stored sample -> message."""
    message = sample_pb2.GetSampleResponse(summary=summary_to_pb(value.summary))
    if value.summary.kind is SampleKind.EVALUATION:
        message.evaluation.MergeFromString(value.content)
        return message
    message.group = value.content
    if value.note:
        message.note.MergeFromString(value.note)
    return message


def sample_from_pb(message: sample_pb2.GetSampleResponse) -> Sample:
    """A message -> sample.

    Raises:
        InvalidRequest: an enum value is newer than this program.
    """
    summary = summary_from_pb(message.summary)
    if message.HasField("evaluation"):
        evaluation = evaluation_from_pb(message.evaluation)
        return Sample(summary=summary, prompt=evaluation.prompt, answer=evaluation.answer, rollouts=evaluation.rollouts)
    group = open_group(read_sealed(message.group))
    return _of_group(summary, group, note_from_pb(message.note) if message.HasField("note") else None)


def sample_of(value: StoredSample) -> Sample:
    """What a reader would have of it, without a wire between.

    Raises:
        MalformedPayload: the store's bytes are not what they were.
    """
    try:
        return sample_from_pb(stored_to_pb(value))
    except DecodeError as error:
        raise MalformedPayload(f"not a sample: {error}") from error


def _of_group(summary: SampleSummary, group: Group, note: SampleNote | None) -> Sample:
    notes: list[RolloutNote | None] = [None] * len(group.rollouts)
    if note is not None and len(note.rollouts) == len(group.rollouts):
        notes = list(note.rollouts)
    rollouts = []
    for rollout, said in zip(group.rollouts, notes, strict=True):
        has_ratios = said is not None and len(said.log_ratios) == rollout.num_drawn
        has_ends = said is not None and len(said.token_ends) == rollout.token_ids.size
        rollouts.append(
            SampleRollout(
                completion="" if said is None else said.completion,
                token_ids=rollout.token_ids,
                sampler_logprobs=rollout.sampler_logprobs,
                # One entry a token or none: whatever else was said is no use to anybody.
                log_ratios=said.log_ratios if said is not None and has_ratios else floats(()),
                token_ends=said.token_ends if said is not None and has_ends else ids(()),
                spans=rollout.spans,
                reward=rollout.reward,
                reward_parts=said.reward_parts if said is not None and said.reward_parts else rollout.reward_parts,
                finish_reason=rollout.finish_reason,
            )
        )
    return Sample(
        summary=summary,
        prompt="" if note is None else note.prompt,
        answer="" if note is None else note.answer,
        prompt_token_ids=group.prompt_token_ids,
        rollouts=tuple(rollouts),
    )
