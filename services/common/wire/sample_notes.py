"""Protobuf <-> what is said of samples: the learner's notes of groups, and evaluations with their texts."""

from __future__ import annotations

import numpy as np

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Float32Array, Int32Array, SiteId
from heterorl.common.types.rollout import RewardPart
from heterorl.common.types.sample import EvaluationSample, RolloutNote, SampleNote, SampleRollout
from heterorl.common.wire.columns import FINISH, FINISH_OF
from heterorl.common.wire.common import MAX_INT32
from heterorl.common.wire.rollout import group_id_from_pb, group_id_to_pb
from heterorl.v1 import rollout_pb2, sample_pb2


def note_to_pb(value: SampleNote) -> sample_pb2.SampleNote:
    """Convert a note."""
    return sample_pb2.SampleNote(
        group=group_id_to_pb(value.group),
        prompt=_text(value.prompt),
        answer=_text(value.answer),
        rollouts=[
            sample_pb2.RolloutNote(
                completion=_text(rollout.completion),
                reward_parts=_parts_to_pb(rollout.reward_parts),
                log_ratios=rollout.log_ratios.tolist(),
                token_ends=rollout.token_ends.tolist(),
            )
            for rollout in value.rollouts
        ],
    )


def note_from_pb(message: sample_pb2.SampleNote) -> SampleNote:
    """Convert a note."""
    return SampleNote(
        group=group_id_from_pb(message.group),
        prompt=message.prompt,
        answer=message.answer,
        rollouts=tuple(
            RolloutNote(
                completion=rollout.completion,
                reward_parts=_parts_from_pb(rollout.reward_parts),
                log_ratios=floats(rollout.log_ratios),
                token_ends=ids(rollout.token_ends),
            )
            for rollout in message.rollouts
        ),
    )


def note_to_bytes(value: SampleNote) -> bytes:
    """Serialise a note for the store."""
    return note_to_pb(value).SerializeToString(deterministic=True)


def evaluation_to_pb(value: EvaluationSample) -> sample_pb2.EvaluationSample:
    """Convert an evaluation."""
    return sample_pb2.EvaluationSample(
        version=value.version,
        task_set=_text(value.task_set),
        site=value.site,
        prompt_index=value.prompt_index,
        prompt=_text(value.prompt),
        answer=_text(value.answer),
        rollouts=[
            sample_pb2.EvaluatedRollout(
                completion=_text(rollout.completion),
                reward=rollout.reward,
                reward_parts=_parts_to_pb(rollout.reward_parts),
                finish_reason=FINISH[rollout.finish_reason],
                token_ids=rollout.token_ids.tolist(),
                logprobs=rollout.sampler_logprobs.tolist(),
            )
            for rollout in value.rollouts
        ],
    )


def evaluation_from_pb(message: sample_pb2.EvaluationSample) -> EvaluationSample:
    """Convert an evaluation.

    Raises:
        InvalidRequest: a reason of an ending is not stated.
    """
    return EvaluationSample(
        version=message.version,
        task_set=message.task_set,
        site=SiteId(message.site),
        prompt_index=message.prompt_index,
        prompt=message.prompt,
        answer=message.answer,
        rollouts=tuple(_evaluated(rollout) for rollout in message.rollouts),
    )


def _evaluated(message: sample_pb2.EvaluatedRollout) -> SampleRollout:
    finish = FINISH_OF.get(message.finish_reason)
    if finish is None:
        raise InvalidRequest(f"evaluations.rollouts.finish_reason: {message.finish_reason} is not a reason")
    return SampleRollout(
        completion=message.completion,
        token_ids=ids(message.token_ids),
        sampler_logprobs=floats(message.logprobs),
        reward=message.reward,
        reward_parts=_parts_from_pb(message.reward_parts),
        finish_reason=finish,
    )


def evaluation_to_bytes(value: EvaluationSample) -> bytes:
    """Serialise an evaluation for the store."""
    return evaluation_to_pb(value).SerializeToString(deterministic=True)


def _parts_to_pb(parts: tuple[RewardPart, ...]) -> list[rollout_pb2.RewardPart]:
    return [rollout_pb2.RewardPart(name=part.name, value=part.value) for part in parts]


def _parts_from_pb(parts: object) -> tuple[RewardPart, ...]:
    return tuple(RewardPart(name=part.name, value=part.value) for part in parts)  # type: ignore[attr-defined]


def floats(values: object) -> Float32Array:
    """Numbers of a message."""
    return np.array(values, np.float32)


def ids(values: object) -> Int32Array:
    """The same, of whole numbers; one beyond int32 is clamped."""
    return np.minimum(np.array(values, np.int64), MAX_INT32).astype(np.int32)


def _text(text: str) -> str:
    # A lone surrogate, which JSON can name, has no UTF-8 and would fail the whole message.
    return text.encode("utf-8", "replace").decode("utf-8")
