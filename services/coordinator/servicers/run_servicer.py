"""gRPC servicers of sites, orders, status, samples, metrics, backups and link diagnosis."""

from __future__ import annotations

import platform
from typing import Any

import grpc
import grpc.aio

from heterorl import __version__
from heterorl.common.errors import InvalidRequest
from heterorl.common.process.metrics import Service
from heterorl.common.process.threads import in_thread
from heterorl.common.rpc.maintenance import MAX_ANSWER_BYTES, Diagnosis
from heterorl.common.types.common import Contract, Series
from heterorl.common.types.policy import NO_VERSION
from heterorl.common.types.run import CanaryReport, parse_facts
from heterorl.common.types.sample import EvaluationSample, SampleNote
from heterorl.common.wire.common_messages import arguments, new_message, to_message, to_value
from heterorl.common.wire.run_messages import heartbeat_from_pb, registration_from_pb, status_to_pb
from heterorl.common.wire.sample_messages import list_request_from_pb, list_to_pb, stored_to_pb
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.payloads.backup import Backups
from heterorl.coordinator.run_column import RunColumn
from heterorl.coordinator.sample_column import SampleColumn
from heterorl.coordinator.sites.node_metrics import NodeMetrics
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.versions import lineage
from heterorl.coordinator.versions.lineage import read_statement
from heterorl.v1 import (
    backup_pb2,
    backup_pb2_grpc,
    common_pb2,
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    sample_pb2,
    sample_pb2_grpc,
)

Context = grpc.aio.ServicerContext[Any, Any]


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """heterorl.v1.RunService."""

    def __init__(self, run: RunColumn) -> None:
        self._run = run

    async def Register(self, request: run_pb2.RegisterRequest, context: Context) -> run_pb2.RegisterResponse:
        answer = await self._run.register(registration_from_pb(request))
        return to_message(run_pb2.RegisterResponse, answer)

    async def Heartbeat(self, request: run_pb2.HeartbeatRequest, context: Context) -> run_pb2.HeartbeatResponse:
        commands = await self._run.heartbeat(heartbeat_from_pb(request))
        return new_message(run_pb2.HeartbeatResponse, commands=commands)

    async def ReportCanary(
        self, request: run_pb2.ReportCanaryRequest, context: Context
    ) -> run_pb2.ReportCanaryResponse:
        verdict = await self._run.report_canary(to_value(CanaryReport, request))
        return to_message(run_pb2.ReportCanaryResponse, verdict)

    async def GetStatus(self, request: run_pb2.GetStatusRequest, context: Context) -> run_pb2.GetStatusResponse:
        return status_to_pb(await self._run.get_status())

    async def ListSteps(self, request: run_pb2.ListStepsRequest, context: Context) -> run_pb2.ListStepsResponse:
        reports = await self._run.list_steps(**arguments(request))
        return run_pb2.ListStepsResponse(reports=[to_message(common_pb2.StepReport, report) for report in reports])

    async def Drain(self, request: run_pb2.DrainRequest, context: Context) -> run_pb2.DrainResponse:
        await self._run.drain(**arguments(request))
        return run_pb2.DrainResponse()

    async def Rollback(self, request: run_pb2.RollbackRequest, context: Context) -> run_pb2.RollbackResponse:
        return run_pb2.RollbackResponse(head_version=await self._run.rollback(**arguments(request)))

    async def ListRestorable(
        self, request: run_pb2.ListRestorableRequest, context: Context
    ) -> run_pb2.ListRestorableResponse:
        return run_pb2.ListRestorableResponse(versions=await self._run.list_restorable())

    async def ReleaseSite(self, request: run_pb2.ReleaseSiteRequest, context: Context) -> run_pb2.ReleaseSiteResponse:
        return run_pb2.ReleaseSiteResponse(quarantine=await self._run.release_site(**arguments(request)))

    async def DescribeRun(self, request: run_pb2.DescribeRunRequest, context: Context) -> run_pb2.DescribeRunResponse:
        await self._run.describe_run(epoch=request.epoch, facts=parse_facts(request.facts))
        return run_pb2.DescribeRunResponse()


class SampleServicer(sample_pb2_grpc.SampleServiceServicer):
    """heterorl.v1.SampleService."""

    def __init__(self, samples: SampleColumn) -> None:
        self._samples = samples

    async def ListSamples(
        self, request: sample_pb2.ListSamplesRequest, context: Context
    ) -> sample_pb2.ListSamplesResponse:
        wanted, page = list_request_from_pb(request)
        return list_to_pb(await self._samples.list_samples(wanted=wanted, page=page))

    async def GetSample(self, request: sample_pb2.GetSampleRequest, context: Context) -> sample_pb2.GetSampleResponse:
        return stored_to_pb(await self._samples.get_stored(sample_id=request.id))

    async def NoteSamples(
        self, request: sample_pb2.NoteSamplesRequest, context: Context
    ) -> sample_pb2.NoteSamplesResponse:
        # There may be millions of numbers.
        notes = await in_thread(lambda: [to_value(SampleNote, note) for note in request.notes])
        evaluations = await in_thread(lambda: [to_value(EvaluationSample, sample) for sample in request.evaluations])
        await self._samples.note_samples(epoch=request.epoch, notes=notes, evaluations=evaluations)
        return sample_pb2.NoteSamplesResponse()


class MetricsServicer(metrics_pb2_grpc.MetricsServiceServicer):
    """heterorl.v1.MetricsService."""

    def __init__(self, reported: NodeMetrics) -> None:
        self._reported = reported

    async def PushSamplerMetrics(
        self, request: metrics_pb2.PushSamplerMetricsRequest, context: Context
    ) -> metrics_pb2.PushSamplerMetricsResponse:
        return metrics_pb2.PushSamplerMetricsResponse(is_kept=await self._put("sampler", request))

    async def PushLearnerMetrics(
        self, request: metrics_pb2.PushLearnerMetricsRequest, context: Context
    ) -> metrics_pb2.PushLearnerMetricsResponse:
        return metrics_pb2.PushLearnerMetricsResponse(is_kept=await self._put("learner", request))

    async def PushRelayMetrics(
        self, request: metrics_pb2.PushRelayMetricsRequest, context: Context
    ) -> metrics_pb2.PushRelayMetricsResponse:
        return metrics_pb2.PushRelayMetricsResponse(is_kept=await self._put("relay", request))

    async def _put(self, service: Service, request: Any) -> bool:
        return await self._reported.put(service, request.site, [to_value(Series, one) for one in request.series])


class BackupServicer(backup_pb2_grpc.BackupServiceServicer):
    """heterorl.v1.BackupService."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    async def Backup(self, request: backup_pb2.BackupRequest, context: Context) -> backup_pb2.BackupResponse:
        return to_message(backup_pb2.BackupResponse, await self._backups.make(request.name))


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServiceServicer):
    """heterorl.v1.DiagnosisService."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    async def Diagnose(
        self, request: diagnosis_pb2.DiagnoseRequest, context: Context
    ) -> diagnosis_pb2.DiagnoseResponse:
        if request.answer_bytes > MAX_ANSWER_BYTES:
            raise InvalidRequest(f"answer_bytes: {request.answer_bytes}, at most {MAX_ANSWER_BYTES} are sent back")

        def operation(connection: Connection) -> tuple[lineage.Head | None, Contract | None, bytes]:
            return lineage.read_head(connection), lineage.read_contract(connection), read_statement(connection)

        head, contract, statement = await self._context.database.run(operation)
        diagnosis = Diagnosis(
            server_time=self._context.clock.wall(),
            run_id=self._context.config.run_id,
            heterorl_version=__version__,
            python_version=platform.python_version(),
            grpc_version=grpc.__version__,
            max_message_bytes=self._context.config.max_message_bytes,
            head_version=NO_VERSION if head is None else head.version,
            bytes_full=0 if head is None else head.full_bytes,
            contract=contract,
            statement=statement,
            groups_per_version=self._context.config.groups_per_version,
        )
        return to_message(diagnosis_pb2.DiagnoseResponse, diagnosis, padding=bytes(request.answer_bytes))
