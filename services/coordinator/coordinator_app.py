"""Start and stop of the coordinator process: core, gRPC server, metrics, signals.

SIGTERM, SIGINT or a fatal error of the store ends it. Stop order: health says NOT_SERVING, streams end, running calls
get `stop_grace_s`, the store closes last. SIGKILL loses no acknowledged data either.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

from heterorl.common.process import metrics, notify, tracing
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import announce
from heterorl.common.rpc import server_limits
from heterorl.coordinator import run_metrics
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
from heterorl.coordinator.sites.node_metrics import MetricsPage, NodeMetrics
from heterorl.coordinator.store.background import RetryingLoop
from heterorl.coordinator.store.database import DatabaseEngine
from heterorl.coordinator.store.engine_choice import claimed, standby_at
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

_LOG = logging.getLogger(__name__)
GAUGE_INTERVAL_S = 1.0
SITES_PER_S = 1000
"""Incarnations that the gauges may read a second: 10,000 take a quarter of a second of one core."""
SWITCH_INTERVAL_S = 0.0005
"""Longest wait of the store's thread for the interpreter lock after a statement; a tenth of Python's default."""


async def main(config: CoordinatorConfig, *, is_standby: bool = False) -> int:
    """Serve until a signal; returns the exit code.

    It is 0 after a signal, 1 after a fatal store error. Waits for a database that is down. A standby shows only its
    metrics until it gets the store.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with notify.running() as process:
        nodes = NodeMetrics(run_id=config.run_id, most_nodes=config.metrics_nodes, clock=process.clock)
        page = MetricsPage(config, nodes)
        engine = None
        if is_standby or config.store.url:
            engine = await _take_store(config, process, page if is_standby else None)
            if engine is None:
                return 0
        return await _serve(config, process, engine, page)


async def _take_store(
    config: CoordinatorConfig, process: notify.Process, page: MetricsPage | None
) -> DatabaseEngine | None:
    """Wait for the store in a database; None after a signal.
    A standby serves a page while it waits."""
    is_elsewhere = bool(config.payloads.bucket)
    standby = standby_at(config.data_dir, config.store.url, is_elsewhere=is_elsewhere, is_patient=page is not None)
    if page is not None:
        _LOG.info("the coordinator of run %s stands by, metrics on port %d", config.run_id, page.stand_by())
        process.notifier.ready(f"run {config.run_id}, standing by")
    waiting = asyncio.create_task(asyncio.to_thread(standby.wait))
    stopping = asyncio.create_task(process.stop.wait())
    try:
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        standby.give_up()
        stopping.cancel()
        engine = await waiting
    if engine is None or process.stop.is_set():
        if engine is not None:
            engine.close()
        return None
    if page is not None:
        _LOG.warning("the coordinator of run %s takes over with epoch %d of the store", config.run_id, engine.epoch)
    return await asyncio.to_thread(claimed, config.data_dir, engine, is_elsewhere=is_elsewhere)


async def _serve(
    config: CoordinatorConfig, process: notify.Process, engine: DatabaseEngine | None, page: MetricsPage
) -> int:
    calls = _take_descriptors(config.max_concurrent_rpcs)
    core = await Coordinator.open(config, process.clock, engine=engine)
    # A session or disk that hangs keeps the store from a standby.
    process.watch.silent_s = core.context.database.silent_s
    server = Server(config.model_copy(update={"max_concurrent_rpcs": calls}))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(core.policy, core.lease), server.grpc)
    rollouts = RolloutServicer(core.rollout, max_prompt_tokens=config.max_prompt_tokens)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollouts, server.grpc)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server(DiagnosisServicer(core.context), server.grpc)
    sample_pb2_grpc.add_SampleServiceServicer_to_server(SampleServicer(core.sample), server.grpc)
    backup_pb2_grpc.add_BackupServiceServicer_to_server(BackupServicer(core.context.backups), server.grpc)
    evaluation_pb2_grpc.add_EvaluationServiceServicer_to_server(EvaluationServicer(core.evaluation), server.grpc)
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(page.reported), server.grpc)
    try:
        port = await server.start(config.listen)
        metrics.watch_disk(config.data_dir)
        # Before the first scrape: an unset gauge reads 0, and an alert would take it for a broken ledger.
        await run_metrics.observe_run(core)
        tracing.start(config.tracing, service="coordinator", name=config.run_id)
        metrics_port = page.serve()
        await asyncio.to_thread(announce, config.data_dir, config.listen, port, service="coordinator")
        _LOG.info("the coordinator of run %s listens on port %d, metrics on port %d", config.run_id, port, metrics_port)
        process.notifier.ready(f"run {config.run_id}, port {port}")
        # Collections look at later objects only: with all modules' they took 80 ms every 2 s at 1,000 sites.
        gc.freeze()
        async with asyncio.TaskGroup() as tasks:
            gauges = tasks.create_task(_gauges(core, server, process.clock))
            merger = tasks.create_task(core.context.merger.run())
            collector = tasks.create_task(core.context.collector.run())
            core.on_fatal.add_done_callback(lambda _: process.stop.set())
            await process.stop.wait()
            for loop in (gauges, merger, collector):
                loop.cancel()
    finally:
        _LOG.info("the coordinator of run %s stops", config.run_id)
        process.notifier.stopping()
        await core.end_streams()
        await server.stop(config.stop_grace_s)
        await core.close()
    return 1 if core.on_fatal.done() else 0


def _take_descriptors(wanted: int) -> int:
    """Raise the limit of file descriptors; returns the calls that it allows.
    Raises ConfigError: too few."""
    limit = server_limits.raise_limit(calls=wanted)
    calls = server_limits.calls_within(limit, wanted=wanted)
    if calls < wanted:
        _LOG.warning(
            "%d file descriptors are enough for %d concurrent calls, not for max_concurrent_rpcs = %d:"
            " allow %d (ulimit -n, LimitNOFILE=) or lower the key",
            limit, calls, wanted, server_limits.needed_for(wanted),
        )  # fmt: skip
    return calls


async def _gauges(core: Coordinator, server: Server, clock: Clock) -> None:
    revoked: tuple[frozenset[int], dict[str, int]] = (frozenset(), {})
    due = 0.0

    async def look() -> None:
        nonlocal revoked, due
        if await asyncio.to_thread(core.context.disk.look):
            core.context.collector.poke()
        if clock.monotonic() >= due:
            due = clock.monotonic() + await run_metrics.observe_run(core) / SITES_PER_S
        if revoked != (now := (server.revoked_serials(), dict(server.authorizer.serials))):
            await core.run.note_revoked(*now)
            revoked = now

    # `main` notices the end of the store.
    await RetryingLoop("gauges", clock).repeat(look, every_s=GAUGE_INTERVAL_S)
