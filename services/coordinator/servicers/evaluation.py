"""Messages <-> domain calls about evaluations. Decides nothing."""

from __future__ import annotations

from typing import Any

import grpc.aio

from heterorl.common.types.common import Digest, SiteId
from heterorl.common.wire.evaluation import evaluation_to_pb, results_from_pb
from heterorl.coordinator.evaluation import EvaluationColumn
from heterorl.v1 import evaluation_pb2, evaluation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class EvaluationServicer(evaluation_pb2_grpc.EvaluationServiceServicer):
    """heterorl.v1.EvaluationService."""

    def __init__(self, evaluations: EvaluationColumn) -> None:
        self._evaluations = evaluations

    async def PushEvaluation(
        self, request: evaluation_pb2.PushEvaluationRequest, context: Context
    ) -> evaluation_pb2.PushEvaluationResponse:
        num_counted = await self._evaluations.push_evaluation(
            site=SiteId(request.site),
            incarnation=request.incarnation,
            state_root=Digest(request.state_root),
            results=results_from_pb(request.results),
        )
        return evaluation_pb2.PushEvaluationResponse(num_counted=num_counted)

    async def ListEvaluations(
        self, request: evaluation_pb2.ListEvaluationsRequest, context: Context
    ) -> evaluation_pb2.ListEvaluationsResponse:
        found = await self._evaluations.list_evaluations(
            task_set=request.task_set, after_version=request.after_version, limit=request.limit
        )
        return evaluation_pb2.ListEvaluationsResponse(evaluations=[evaluation_to_pb(each) for each in found])
