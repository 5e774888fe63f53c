"""Protobuf <-> kept samples: notes, pages of a list, whole samples.

The store keeps bytes: a group's canonical ones (heterorl.common.wire.sealed_groups), and the messages of notes and
evaluations. `outline` reads the fields of a list from a group.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.rollout import FinishReason, Group
from heterorl.common.types.sample import (
    MAX_PAGE,
    EvaluationSample,
    RolloutNote,
    Sample,
    SampleFilter,
    SampleKind,
    SampleList,
    SampleNote,
    SamplePage,
    SampleRollout,
    SampleSummary,
)
from heterorl.common.wire.common_messages import floats, ids, to_message, to_value
from heterorl.common.wire.sealed_groups import FIRST_LOST, columns_of, group_message, open_group, read_sealed
from heterorl.v1 import rollout_pb2, sample_pb2


def note_to_bytes(value: SampleNote) -> bytes:
    return to_message(sample_pb2.SampleNote, value).SerializeToString(deterministic=True)


def evaluation_to_bytes(value: EvaluationSample) -> bytes:
    return to_message(sample_pb2.EvaluationSample, value).SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A list's numbers of a sample's completions.

    Rewards leave out lost members, and are None if one is not finite.
    """

    num_rollouts: int
    num_truncated: int
    num_lost: int
    num_tokens: int
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A stored group or evaluation; `note` is empty before the learner's."""

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


def outline_of_rollouts(rollouts: Sequence[SampleRollout]) -> Outline:
    return _outline(
        [rollout.reward for rollout in rollouts if not rollout.is_lost],
        num_truncated=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
        num_lost=sum(rollout.is_lost for rollout in rollouts),
        num_tokens=sum(rollout.num_drawn for rollout in rollouts),
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


def stored_to_pb(value: StoredSample) -> sample_pb2.GetSampleResponse:
    message = sample_pb2.GetSampleResponse(summary=to_message(sample_pb2.SampleSummary, value.summary))
    if value.summary.kind is SampleKind.EVALUATION:
        message.evaluation.MergeFromString(value.content)
        return message
    message.group = value.content
    if value.note:
        message.note.MergeFromString(value.note)
    return message


def sample_from_pb(message: sample_pb2.GetSampleResponse) -> Sample:
    """Convert a sample; raises InvalidRequest for a newer program's enum value."""
    summary = to_value(SampleSummary, message.summary)
    if message.HasField("evaluation"):
        evaluation = to_value(EvaluationSample, message.evaluation)
        return Sample(summary=summary, prompt=evaluation.prompt, answer=evaluation.answer, rollouts=evaluation.rollouts)
    # Without a note its fields are empty.
    return _of_group(summary, open_group(read_sealed(message.group)), to_value(SampleNote, message.note))


def sample_of(value: StoredSample) -> Sample:
    """A stored sample for a reader; raises MalformedPayload if its bytes changed."""
    try:
        return sample_from_pb(stored_to_pb(value))
    except DecodeError as error:
        raise MalformedPayload(f"not a sample: {error}") from error


def _of_group(summary: SampleSummary, group: Group, note: SampleNote) -> Sample:
    is_whole = len(note.rollouts) == len(group.rollouts)
    notes = note.rollouts if is_whole else [RolloutNote(completion="", reward_parts=())] * len(group.rollouts)
    rollouts = tuple(
        SampleRollout(
            completion=said.completion,
            token_ids=rollout.token_ids,
            sampler_logprobs=rollout.sampler_logprobs,
            # One entry a token or none; other lengths are dropped.
            log_ratios=said.log_ratios if len(said.log_ratios) == rollout.num_drawn else floats(()),
            token_ends=said.token_ends if len(said.token_ends) == rollout.token_ids.size else ids(()),
            spans=rollout.spans,
            reward=rollout.reward,
            reward_parts=said.reward_parts or rollout.reward_parts,
            finish_reason=rollout.finish_reason,
        )
        for rollout, said in zip(group.rollouts, notes, strict=True)
    )
    return Sample(
        summary=summary,
        prompt=note.prompt,
        answer=note.answer,
        prompt_token_ids=group.prompt_token_ids,
        rollouts=rollouts,
    )


def list_request_to_pb(wanted: SampleFilter, page: SamplePage) -> sample_pb2.ListSamplesRequest:
    request = to_message(sample_pb2.ListSamplesRequest, wanted)
    request.MergeFrom(to_message(sample_pb2.ListSamplesRequest, page))
    return request


def list_request_from_pb(message: sample_pb2.ListSamplesRequest) -> tuple[SampleFilter, SamplePage]:
    """Convert a request of a list; raises InvalidRequest for bad fields."""
    wanted = to_value(SampleFilter, message)
    if wanted.kind is None and message.kind:
        raise InvalidRequest(f"kind: {message.kind} is not a kind")
    for name in ("min_reward", "max_reward"):
        if math.isnan(getattr(wanted, name) or 0.0):
            raise InvalidRequest(f"{name}: not a number")
    check_limit(message.limit)
    return wanted, to_value(SamplePage, message)


def check_limit(limit: int) -> None:
    """Check a page's limit, 1 to MAX_PAGE; raises InvalidRequest."""
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit: {limit} is not in 1..{MAX_PAGE}")


def list_to_pb(value: SampleList) -> sample_pb2.ListSamplesResponse:
    rest = value.next_page
    looked_up_to = None if rest is None else rest.after if rest.is_oldest_first else rest.before
    return to_message(sample_pb2.ListSamplesResponse, value, without={"next_page"}, looked_up_to=looked_up_to)


def list_from_pb(message: sample_pb2.ListSamplesResponse, page: SamplePage) -> SampleList:
    following = next_page(page, message.looked_up_to) if message.HasField("looked_up_to") else None
    return to_value(SampleList, message, next_page=following)


def next_page(page: SamplePage, looked_up_to: int) -> SamplePage:
    """The page behind one that ended at an id."""
    return replace(page, after=looked_up_to) if page.is_oldest_first else replace(page, before=looked_up_to)
