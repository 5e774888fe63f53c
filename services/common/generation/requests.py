"""What an engine is asked for and what comes back: a prompt with its completions, each of which ends when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterorl.common.types.common import Float32Array, Int32Array, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One completion: token_ids int32 [T] (end-of-sequence included), logprobs float32 [T], spans over [0, T).

    `routed_experts` as in a Rollout.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    routed_experts: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt (int32 [T]) and how many completions to draw of it; `key` is one that no request under way has.

    `sampling` is another way to draw than the run's, for evaluation; the log-probs of such completions mean nothing.
    """

    key: int
    prompt: Int32Array
    seed: int
    num_completions: int
    sampling: SamplingSemantics | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """A completion that ended: number `member` of the request `key`."""

    key: int
    member: int
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A request that was given up while others go on: nothing more of it comes."""

    key: int


def in_order(finished: Sequence[Finished], requests: Sequence[Request]) -> list[list[Completion]]:
    """The completions of each request, in the order of the requests and of their members.

    Raises:
        KeyError: one of them has not ended.
    """
    by_name = {(one.key, one.member): one.completion for one in finished}
    return [[by_name[request.key, member] for member in range(request.num_completions)] for request in requests]
