"""Calls about evaluations, over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.rpc.calls import Calls
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.evaluation import Evaluation, EvaluationGrant, EvaluationSet, PromptResult
from heterorl.common.wire.evaluation import (
    evaluation_from_pb,
    grant_from_pb,
    results_to_pb,
    sets_to_pb,
)
from heterorl.v1 import evaluation_pb2

PUSH_TIMEOUT_S = 120.0
"""Texts of a part over a narrow link."""


class EvaluationCalls(Calls):
    """Asks for parts, delivers them, gives them back; lists what is known."""

    async def lease_evaluation(
        self,
        *,
        site: SiteId,
        incarnation: str,
        policy_version: int,
        sets: Sequence[EvaluationSet],
        can_pull: bool,
        max_parts: int,
        held: Sequence[int] = (),
    ) -> EvaluationGrant:
        """Ask for parts; what the site holds and does not name is given again."""
        request = evaluation_pb2.LeaseEvaluationRequest(
            site=site,
            incarnation=incarnation,
            policy_version=policy_version,
            sets=sets_to_pb(sets),
            can_pull=can_pull,
            max_parts=max_parts,
            held=held,
        )
        return grant_from_pb(await self._call("LeaseEvaluation", request))

    async def push_evaluation(
        self, *, site: SiteId, incarnation: str, part: int, state_root: Digest, results: Sequence[PromptResult]
    ) -> int:
        """Deliver what came of a part; repeating the call is harmless."""
        request = evaluation_pb2.PushEvaluationRequest(
            site=site, incarnation=incarnation, part=part, state_root=state_root, results=results_to_pb(results)
        )
        await self._pace(self._up, "up", request.ByteSize())
        return int((await self._call("PushEvaluation", request, timeout_s=PUSH_TIMEOUT_S)).num_counted)

    async def abandon_evaluation(
        self, *, site: SiteId, incarnation: str, parts: Sequence[int], reason: str = ""
    ) -> None:
        """Give parts back."""
        request = evaluation_pb2.AbandonEvaluationRequest(
            site=site, incarnation=incarnation, parts=parts, reason=reason
        )
        await self._call("AbandonEvaluation", request)

    async def list_evaluations(
        self, *, task_set: str = "", after_version: int = -1, limit: int = 1000
    ) -> tuple[Evaluation, ...]:
        """Ask what is known of versions on sets."""
        request = evaluation_pb2.ListEvaluationsRequest(task_set=task_set, after_version=after_version, limit=limit)
        answer = await self._call("ListEvaluations", request)
        return tuple(evaluation_from_pb(message) for message in answer.evaluations)
