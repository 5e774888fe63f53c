"""Messages <-> domain calls about sites, orders and status. Decides nothing."""

from __future__ import annotations

from typing import Any

import grpc.aio

from heterorl.common.types.common import SiteId
from heterorl.common.types.facts import parse_facts
from heterorl.common.wire.common import report_to_pb
from heterorl.common.wire.run import (
    canary_from_pb,
    commands_to_pb,
    heartbeat_from_pb,
    register_answer_to_pb,
    registration_from_pb,
    status_to_pb,
    verdict_to_pb,
)
from heterorl.coordinator.run import RunColumn
from heterorl.v1 import run_pb2, run_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """heterorl.v1.RunService."""

    def __init__(self, run: RunColumn) -> None:
        self._run = run

    async def Register(self, request: run_pb2.RegisterRequest, context: Context) -> run_pb2.RegisterResponse:
        return register_answer_to_pb(await self._run.register(registration_from_pb(request)))

    async def Heartbeat(self, request: run_pb2.HeartbeatRequest, context: Context) -> run_pb2.HeartbeatResponse:
        return commands_to_pb(await self._run.heartbeat(heartbeat_from_pb(request)))

    async def ReportCanary(
        self, request: run_pb2.ReportCanaryRequest, context: Context
    ) -> run_pb2.ReportCanaryResponse:
        return verdict_to_pb(await self._run.report_canary(canary_from_pb(request)))

    async def GetStatus(self, request: run_pb2.GetStatusRequest, context: Context) -> run_pb2.GetStatusResponse:
        return status_to_pb(await self._run.get_status())

    async def ListSteps(self, request: run_pb2.ListStepsRequest, context: Context) -> run_pb2.ListStepsResponse:
        reports = await self._run.list_steps(after_step=request.after_step, limit=request.limit)
        return run_pb2.ListStepsResponse(reports=[report_to_pb(report) for report in reports])

    async def Drain(self, request: run_pb2.DrainRequest, context: Context) -> run_pb2.DrainResponse:
        await self._run.drain(reason=request.reason, epoch=request.epoch if request.HasField("epoch") else None)
        return run_pb2.DrainResponse()

    async def Rollback(self, request: run_pb2.RollbackRequest, context: Context) -> run_pb2.RollbackResponse:
        head = await self._run.rollback(to_version=request.to_version, request_id=request.request_id)
        return run_pb2.RollbackResponse(head_version=head)

    async def ListRestorable(
        self, request: run_pb2.ListRestorableRequest, context: Context
    ) -> run_pb2.ListRestorableResponse:
        return run_pb2.ListRestorableResponse(versions=await self._run.list_restorable())

    async def ReleaseSite(self, request: run_pb2.ReleaseSiteRequest, context: Context) -> run_pb2.ReleaseSiteResponse:
        quarantine = await self._run.release_site(
            site=SiteId(request.site), reason=request.reason, request_id=request.request_id
        )
        return run_pb2.ReleaseSiteResponse(quarantine=quarantine)

    async def DescribeRun(self, request: run_pb2.DescribeRunRequest, context: Context) -> run_pb2.DescribeRunResponse:
        await self._run.describe_run(epoch=request.epoch, facts=parse_facts(request.facts))
        return run_pb2.DescribeRunResponse()
