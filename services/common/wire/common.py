"""Protobuf <-> the values of all columns: the contract, the report of a step, series; and limits of the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import blake3

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import (
    NO_LORA,
    CompletionNumbers,
    Contract,
    Digest,
    LearnerPhase,
    LearnerProgress,
    LogprobMode,
    LoraSettings,
    PartMean,
    SamplingSemantics,
    Series,
    SiteTokens,
    SourceReport,
    StepReport,
    StepTimes,
)
from heterorl.v1 import common_pb2, metrics_pb2

MAX_INT32 = 2**31 - 1


MAX_INT64 = 2**63 - 1


MAX_RUN_ID = 256


def bytes_digest(data: bytes) -> Digest:
    """Blake3 of bytes, lower-case hex."""
    return Digest(blake3.blake3(data).hexdigest())


def contract_to_bytes(value: Contract) -> bytes:
    """Serialise a contract for the store."""
    return contract_to_pb(value).SerializeToString(deterministic=True)


def contract_from_bytes(data: bytes) -> Contract:
    """Read what `contract_to_bytes` wrote."""
    return contract_from_pb(common_pb2.Contract.FromString(data))


_MODE = {
    LogprobMode.RAW: common_pb2.LOGPROB_MODE_RAW,
    LogprobMode.PROCESSED: common_pb2.LOGPROB_MODE_PROCESSED,
}


_MODE_OF = {pb: value for value, pb in _MODE.items()}


def contract_to_pb(value: Contract) -> common_pb2.Contract:
    sampling = value.sampling
    return common_pb2.Contract(
        tokenizer_digest=value.tokenizer_digest,
        chat_template_digest=value.chat_template_digest,
        task_digest=value.task_digest,
        layout_id=value.layout_id,
        vocab_size=value.vocab_size,
        num_prompts=value.num_prompts,
        group_size=value.group_size,
        sampling=common_pb2.SamplingSemantics(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            logprob_mode=_MODE[sampling.logprob_mode],
        ),
        lora=_lora_to_pb(value.lora),
        # One alone as programs that know no others state it: the bytes are theirs. Where there are several
        # those are told none, so that a coordinator among them judges no ending instead of refusing what is right.
        eos_token_id=value.end_token_ids[0] if len(value.end_token_ids) == 1 else None,
        end_token_ids=value.end_token_ids if len(value.end_token_ids) > 1 else (),
        min_members=value.min_members,
        max_turns=value.max_turns,
        max_trajectory_tokens=value.max_trajectory_tokens,
        trajectory_s=value.trajectory_s,
        routed_token_bytes=value.routed_token_bytes,
    )


def contract_from_pb(message: common_pb2.Contract) -> Contract:
    """Convert a contract.

    Raises:
        InvalidRequest: the log-prob mode is not stated, or a duration is none.
    """
    sampling = message.sampling
    mode = _MODE_OF.get(sampling.logprob_mode)
    if mode is None:
        raise InvalidRequest("contract.sampling.logprob_mode: not stated")
    if not 0 <= message.trajectory_s < math.inf:
        raise InvalidRequest(f"contract.trajectory_s: {message.trajectory_s} is no number of seconds")
    return Contract(
        tokenizer_digest=Digest(message.tokenizer_digest),
        chat_template_digest=Digest(message.chat_template_digest),
        task_digest=Digest(message.task_digest),
        layout_id=Digest(message.layout_id),
        vocab_size=message.vocab_size,
        num_prompts=message.num_prompts,
        group_size=message.group_size,
        sampling=SamplingSemantics(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            logprob_mode=mode,
        ),
        lora=_lora_from_pb(message),
        end_token_ids=tuple(
            sorted({*message.end_token_ids, *([message.eos_token_id] if message.HasField("eos_token_id") else [])})
        ),
        min_members=message.min_members,
        max_turns=max(1, message.max_turns),
        max_trajectory_tokens=message.max_trajectory_tokens,
        trajectory_s=message.trajectory_s,
        routed_token_bytes=message.routed_token_bytes,
    )


def _lora_to_pb(value: LoraSettings) -> common_pb2.LoraSettings | None:
    """Convert adapter settings; None, an absent field, where there are no adapters."""
    if not value.rank:
        return None
    return common_pb2.LoraSettings(
        rank=value.rank,
        alpha=value.alpha,
        target_modules=value.target_modules,
        base_digest=value.base_digest,
    )


def _lora_from_pb(message: common_pb2.Contract) -> LoraSettings:
    """The adapter settings of a contract; contracts of earlier programs have none."""
    lora = message.lora
    if not lora.rank:
        return NO_LORA
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=tuple(lora.target_modules),
        base_digest=lora.base_digest,
    )


_NESTED = ("evaluation_accuracy", "completions", "times", "sources")
"""Fields of a report that may be absent, which is not the same as 0, or hold messages."""
_PLAIN = tuple(name for name in StepReport.__slots__ if name not in _NESTED)


def report_to_pb(value: StepReport) -> common_pb2.StepReport:
    """Convert a step report; the fields have the same names on both sides."""
    message = common_pb2.StepReport(**{name: getattr(value, name) for name in _PLAIN})
    for source in value.sources:
        message.sources.add(**_fields(source))
    if value.evaluation_accuracy is not None:
        message.evaluation_accuracy = value.evaluation_accuracy
    if value.completions is not None:
        message.completions.CopyFrom(_completions_to_pb(value.completions))
    if value.times is not None:
        message.times.CopyFrom(common_pb2.StepTimes(**_fields(value.times)))
    return message


def report_from_pb(message: common_pb2.StepReport) -> StepReport:
    return StepReport(
        **_fields(message, _PLAIN),
        evaluation_accuracy=message.evaluation_accuracy if message.HasField("evaluation_accuracy") else None,
        completions=_completions_from_pb(message.completions) if message.HasField("completions") else None,
        times=StepTimes(**_fields(message.times, StepTimes.__slots__)) if message.HasField("times") else None,
        sources=tuple(SourceReport(**_fields(source, SourceReport.__slots__)) for source in message.sources),
    )


def _fields(value: object, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Fields by name: of a value all of them, of a message those of its value."""
    return {name: getattr(value, name) for name in names or type(value).__slots__}  # type: ignore[attr-defined]


def _completions_to_pb(value: CompletionNumbers) -> common_pb2.CompletionNumbers:
    nested = {
        "reward_parts": [common_pb2.PartMean(**_fields(part)) for part in value.reward_parts],
        "sites": [common_pb2.SiteTokens(**_fields(site)) for site in value.sites],
    }
    # What is None stays unset.
    return common_pb2.CompletionNumbers(**(_fields(value) | nested))


def _completions_from_pb(message: common_pb2.CompletionNumbers) -> CompletionNumbers:
    nested = {
        "length_high_reward": message.length_high_reward if message.HasField("length_high_reward") else None,
        "length_low_reward": message.length_low_reward if message.HasField("length_low_reward") else None,
        "reward_parts": tuple(PartMean(name=part.name, mean=part.mean) for part in message.reward_parts),
        "sites": tuple(SiteTokens(**_fields(site, SiteTokens.__slots__)) for site in message.sites),
    }
    return CompletionNumbers(**(_fields(message, CompletionNumbers.__slots__) | nested))


_PHASE = {phase: common_pb2.LearnerPhase.Value(f"LEARNER_PHASE_{phase.name}") for phase in LearnerPhase}


_PHASE_OF = {pb: phase for phase, pb in _PHASE.items()}


def progress_to_pb(value: LearnerProgress | None) -> common_pb2.LearnerProgress | None:
    """Convert a learner's progress; None, an absent field, where there is none."""
    if value is None:
        return None
    return common_pb2.LearnerProgress(**(_fields(value) | {"phase": _PHASE[value.phase]}))


def progress_from_pb(message: common_pb2.LearnerProgress) -> LearnerProgress | None:
    """Convert a learner's progress; one in a phase that this program does not know is none."""
    phase = _PHASE_OF.get(message.phase)
    if phase is None:
        return None
    return LearnerProgress(**(_fields(message, LearnerProgress.__slots__) | {"phase": phase}))


def series_to_pb(series: Sequence[Series]) -> list[metrics_pb2.MetricSeries]:
    """Convert series."""
    return [metrics_pb2.MetricSeries(name=one.name, labels=one.labels, values=one.values) for one in series]


def series_from_pb(messages: Iterable[metrics_pb2.MetricSeries]) -> list[Series]:
    """Convert series; whether they are a node's own measurements, their reader judges."""
    return [Series(name=one.name, labels=tuple(one.labels), values=tuple(one.values)) for one in messages]
