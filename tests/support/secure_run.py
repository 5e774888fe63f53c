"""A coordinator behind certificates on a port of loopback, and raw calls that no client of ours would make."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc.aio

from heterorl.certs.authority import Pair
from heterorl.common.errors import HeterorlError, Unreachable
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.metrics import IDENTITY_REFUSALS
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.channel import stubs_of
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.rpc.error_status import from_rpc_error
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.policy_servicer import PolicyServicer
from heterorl.coordinator.servicers.rollout_servicer import EvaluationServicer, RolloutServicer
from heterorl.coordinator.servicers.run_servicer import (
    BackupServicer,
    DiagnosisServicer,
    MetricsServicer,
    RunServicer,
    SampleServicer,
)
from heterorl.coordinator.sites.node_metrics import NodeMetrics
from heterorl.v1 import (
    backup_pb2_grpc,
    diagnosis_pb2_grpc,
    evaluation_pb2_grpc,
    metrics_pb2_grpc,
    policy_pb2_grpc,
    rollout_pb2_grpc,
    run_pb2_grpc,
    sample_pb2_grpc,
)
from tests.support.certificates import Certificates
from tests.support.limits import WAIT_S
from tests.support.run import Run

PATIENT = RetryPolicy(budget_s=20.0, base_s=0.01, cap_s=0.2)
_OF_SAMPLER = {"watch_head", "plan_pull", "read_payload", "lease_work", "abandon_work", "push_groups", "register", "heartbeat"}  # fmt: skip


class SecureRun:
    """One run with a learner, a sampler and an operator, each with its own certificate; `wall_time` may be moved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificates = Certificates(directory / "certs")
        self.ahead_s = 0.0
        self.run_class = Run
        self.changes: dict[str, Any] = {}

    async def __aenter__(self) -> SecureRun:
        values = {"groups_per_version": 2, "max_message_bytes": 2 << 20, **self.changes}
        config = CoordinatorConfig(data_dir=self.directory / "data", **values)
        self.core = await Coordinator.open(config, SystemClock())
        served = config.model_copy(
            update={"max_concurrent_rpcs": 64, "run_id": "run", "tls": self.certificates.server_tls()}
        )
        self.server = Server(served, wall_time=lambda: time.time() + self.ahead_s)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyServicer(self.core.policy, self.core.lease), self.server.grpc
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(self.core.rollout), self.server.grpc)
        run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(self.core.run), self.server.grpc)
        diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server(
            DiagnosisServicer(self.core.context), self.server.grpc
        )
        backup_pb2_grpc.add_BackupServiceServicer_to_server(BackupServicer(self.core.backups), self.server.grpc)
        evaluation_pb2_grpc.add_EvaluationServiceServicer_to_server(
            EvaluationServicer(self.core.evaluation), self.server.grpc
        )
        sample_pb2_grpc.add_SampleServiceServicer_to_server(SampleServicer(self.core.sample), self.server.grpc)
        reported = NodeMetrics(run_id=self.core.config.run_id, most_nodes=8, clock=self.core.clock)
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(reported), self.server.grpc)
        self.port = await self.server.start("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self.learner, self.sampler, self.operator = (
            CoordinatorClient(self.address, tls=self.certificates.tls(role), policy=PATIENT)
            for role in ("learner", "sampler", "operator")
        )
        self.run = self.run_class(self, self.directory)  # type: ignore[arg-type]
        await self.run.begin()
        await self.run.publish()
        await self.run.register()
        return self

    def __getattr__(self, name: str) -> Any:
        """Each call by the node whose it is, so that a `Run` can drive all."""
        return getattr(self.sampler if name in _OF_SAMPLER else self.learner, name)

    async def __aexit__(self, *exception: object) -> None:
        for client in (self.learner, self.sampler, self.operator):
            await client.close()
        await self.core.end_streams()
        await self.server.stop(0.2)
        await self.core.close()

    async def attempt(
        self, pair: Pair | None, method: str, request: Any, *, answers: list[Any] | None = None
    ) -> HeterorlError:
        """Call an rpc with any certificate (None: plaintext); returns the refusal as a client of ours would see it.

        The answers of a stream before its refusal go to `answers`.
        """
        if pair is None:
            channel = grpc.aio.insecure_channel(self.address)
        else:
            credentials = grpc.ssl_channel_credentials(self.certificates.ca, pair.key or None, pair.cert or None)
            channel = grpc.aio.secure_channel(self.address, credentials)
        async with channel:
            try:
                if answers is not None:
                    async for answer in stubs_of(channel)[method](request, timeout=WAIT_S):
                        answers.append(answer)
                else:
                    await stubs_of(channel)[method](request, timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error) or Unreachable(f"{error.code().name}: {error.details()}")
        raise AssertionError(f"{method} was not refused")


def refusals() -> dict[str, float]:
    """Refusals so far by reason."""
    samples = [sample for metric in IDENTITY_REFUSALS.collect() for sample in metric.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}
