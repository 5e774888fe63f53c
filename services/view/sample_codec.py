"""Samples as bytes of the index: what nobody else reads, made and read by one program.

A zstd frame: 4 bytes, the length of a JSON object, little-endian; the object; int32 and float32 numbers in its order.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import zstandard

from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import FinishReason, GroupId, RewardPart, Span
from heterorl.common.types.sample import Sample, SampleKind, SampleRollout, SampleSummary

_ARRAYS = (
    ("token_ids", np.int32),
    ("sampler_logprobs", np.float32),
    ("log_ratios", np.float32),
    ("token_ends", np.int32),
)
_LEVEL = 1


def clean(text: str) -> str:
    """The text with halves of surrogate pairs as question marks, which no encoding takes; no shorter, no longer."""
    return text.encode("utf-8", "replace").decode("utf-8")


def pack_summary(summary: SampleSummary) -> str:
    """One line of a list as JSON."""
    fields = dataclasses.asdict(summary)
    fields["kind"] = summary.kind.value
    return json.dumps(fields)


def read_summary(text: str) -> SampleSummary:
    """What `pack_summary` made."""
    fields = json.loads(text)
    group = fields["group"]
    fields["group"] = group and GroupId(**(group | {"site": SiteId(group["site"])}))
    return SampleSummary(**(fields | {"kind": SampleKind(fields["kind"]), "site": SiteId(fields["site"])}))


def pack_texts(sample: Sample) -> bytes:
    """All of a sample but its line."""
    head = {
        "prompt": sample.prompt,
        "answer": sample.answer,
        "prompt_token_ids": len(sample.prompt_token_ids),
        "rollouts": [
            {
                "completion": rollout.completion,
                "reward": rollout.reward,
                "parts": [(part.name, part.value) for part in rollout.reward_parts],
                "finish": rollout.finish_reason.value,
                "spans": [dataclasses.asdict(span) for span in rollout.spans],
                "arrays": [len(getattr(rollout, name)) for name, _ in _ARRAYS],
            }
            for rollout in sample.rollouts
        ],
    }
    text = json.dumps(head).encode("ascii")
    numbers = [np.ascontiguousarray(sample.prompt_token_ids, np.int32).tobytes()]
    for rollout in sample.rollouts:
        numbers += [np.ascontiguousarray(getattr(rollout, name), kind).tobytes() for name, kind in _ARRAYS]
    return zstandard.compress(b"".join([len(text).to_bytes(4, "little"), text, *numbers]), _LEVEL)


def read_texts(summary: SampleSummary, data: bytes) -> Sample:
    """What `pack_texts` made, with its line."""
    data = zstandard.decompress(data)
    end = 4 + int.from_bytes(data[:4], "little")
    head = json.loads(data[4:end])

    def take(count: int, kind: Any) -> Any:
        nonlocal end
        values = np.frombuffer(data, kind, count, end)
        end += values.nbytes
        return values

    prompt_token_ids = take(head["prompt_token_ids"], np.int32)
    rollouts = [
        SampleRollout(
            completion=row["completion"],
            reward=row["reward"],
            reward_parts=tuple(RewardPart(name=name, value=value) for name, value in row["parts"]),
            finish_reason=FinishReason(row["finish"]),
            spans=tuple(Span(**span) for span in row["spans"]),
            **{name: take(count, kind) for (name, kind), count in zip(_ARRAYS, row["arrays"], strict=True)},
        )
        for row in head["rollouts"]
    ]
    return Sample(
        summary=summary,
        prompt=head["prompt"],
        answer=head["answer"],
        prompt_token_ids=prompt_token_ids,
        rollouts=tuple(rollouts),
    )
