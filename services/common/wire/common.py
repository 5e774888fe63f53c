"""Protobuf <-> the values of all columns: the contract, the report of a step; and limits of the wire."""

from __future__ import annotations

import blake3

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import (
    NO_LORA,
    Contract,
    Digest,
    LogprobMode,
    LoraSettings,
    SamplingSemantics,
    SourceReport,
    StepReport,
)
from heterorl.v1 import common_pb2

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
    )


def contract_from_pb(message: common_pb2.Contract) -> Contract:
    """Convert a contract.

    Raises:
        InvalidRequest: the log-prob mode is not stated.
    """
    sampling = message.sampling
    mode = _MODE_OF.get(sampling.logprob_mode)
    if mode is None:
        raise InvalidRequest("contract.sampling.logprob_mode: not stated")
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


_PLAIN = tuple(name for name in StepReport.__slots__ if name not in ("evaluation_accuracy", "sources"))


def report_to_pb(value: StepReport) -> common_pb2.StepReport:
    """Convert a step report; the fields have the same names on both sides."""
    message = common_pb2.StepReport(**{name: getattr(value, name) for name in _PLAIN})
    for source in value.sources:
        message.sources.add(label=source.label, num_groups=source.num_groups, reward_mean=source.reward_mean)
    if value.evaluation_accuracy is not None:
        message.evaluation_accuracy = value.evaluation_accuracy
    return message


def report_from_pb(message: common_pb2.StepReport) -> StepReport:
    values = {name: getattr(message, name) for name in _PLAIN}
    accuracy = message.evaluation_accuracy if message.HasField("evaluation_accuracy") else None
    sources = tuple(
        SourceReport(label=source.label, num_groups=source.num_groups, reward_mean=source.reward_mean)
        for source in message.sources
    )
    return StepReport(**values, evaluation_accuracy=accuracy, sources=sources)
