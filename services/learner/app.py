"""Wires the learner: lease, resumption, inbox, training, publication.

    coordinator --stream, by credit--> feed --> Inbox --> Session --groups--> backend (thread)
         ^                                                   |
         +------- checkpoint, payloads, compare-and-set --- Publisher

    loop      waits for                                        unblocked by
    renew     a third of the lease term                        the clock; StaleEpoch ends all, an order the session
    feed      groups of the stream; room in the inbox          the coordinator; Inbox.take; a broken link is re-opened
    session   groups_per_step groups, then its thread, then    Inbox.put; the thread's end; the coordinator's answer,
              upload and commit                                repeated and asked for until it comes
    watchdog  half the service manager's interval              the clock
    main      the session's end, or the stop event             max_steps; SIGTERM or SIGINT

Every wait ends when the lease is lost, because `renew` fails its TaskGroup and that cancels the others. A step runs in
a thread, which nothing can cancel: it is waited for, and what it computed has no effect.

Order of the stop: the session is cancelled (its thread is waited for), the stream closes, the lease is released.
Nothing depends on that order: after SIGKILL the next start does the same work again from the last checkpoint. When
max_steps is reached the last version is published first, then the run drains.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Callable

from heterorl.common.api import CoordinatorApi
from heterorl.common.identity.signing import Signer
from heterorl.common.process import metrics, notify, tracing
from heterorl.common.process.clock import Clock, SystemClock
from heterorl.common.process.files import make_directory
from heterorl.common.process.threads import in_thread
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Contract
from heterorl.learner.assembly import assemble
from heterorl.learner.backends.backend import TrainBackend
from heterorl.learner.checks.examiner import Yardstick
from heterorl.learner.config import LearnerConfig
from heterorl.learner.evaluate import Evaluator
from heterorl.learner.observe import observe_start
from heterorl.learner.publish.canary import Canary
from heterorl.learner.run.directory import hold_directory
from heterorl.learner.run.leader import Leader
from heterorl.learner.run.run_file import write_run_file
from heterorl.learner.run.run_result import RunResult

_LOG = logging.getLogger(__name__)


async def main(config: LearnerConfig, *, num_ranks: int = 1) -> int:
    """Train on so many processes of this machine until max_steps or a signal; returns the exit code 0."""
    stop = asyncio.Event()
    clock = SystemClock()
    notifier = notify.from_environment()
    notify.on_stop((signal.SIGTERM, signal.SIGINT), notifier=notifier, stop=stop.set)
    async with notify.supervised(notifier, clock):
        await _train(config, num_ranks, clock, stop, notifier)
    return 0


async def _train(
    config: LearnerConfig, num_ranks: int, clock: Clock, stop: asyncio.Event, notifier: notify.Notifier
) -> None:
    parts = await in_thread(assemble, config, num_ranks=num_ranks)
    make_directory(config.state_dir)
    write_run_file(config)
    metrics.watch_disk(config.state_dir)
    observe_start()
    tracing.start(config.tracing, service="learner", name=config.holder)
    metrics_port = metrics.serve(
        config.metrics_port,
        service="learner",
        address=config.metrics_host,
        may_move="metrics_port" not in config.model_fields_set,
    )
    _LOG.info("run %s: coordinator %s, metrics on port %d", config.run_id, config.coordinator, metrics_port)
    if parts.signer is not None:
        _LOG.info("versions are signed by %s", parts.signer.public_key)
    async with CoordinatorClient(
        config.coordinator,
        tls=config.tls,
        max_message_bytes=config.max_message_bytes,
        bandwidth=config.bandwidth,
    ) as client:
        result = await run(
            config,
            api=client,
            backend=parts.backend,
            contract=parts.contract,
            clock=clock,
            rng=random.Random(),
            evaluator=parts.evaluator,
            signer=parts.signer,
            canary=parts.canary,
            yardstick=parts.yardstick,
            stop=stop,
            on_ready=lambda: notifier.ready(f"run {config.run_id}, holder {config.holder}"),
        )
    notifier.stopping()
    await in_thread(parts.close)
    _LOG.info("%s", result)


async def run(
    config: LearnerConfig,
    *,
    api: CoordinatorApi,
    backend: TrainBackend,
    contract: Contract,
    clock: Clock,
    rng: random.Random,
    evaluator: Evaluator | None = None,
    signer: Signer | None = None,
    canary: Canary | None = None,
    yardstick: Yardstick | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train until `max_steps` or until `stop` is set.

    `signer` signs every version and must have signed the head; `canary` is stated with each; `yardstick` is what
    groups are checked with (None: they are not). `on_ready` is called when
    the lease is asked for.

    Raises:
        UntrustedVersion: the coordinator's head is not signed by this learner nor by a trusted earlier one.
        StaleEpoch: another learner took over; nothing of this one has any further effect.
        ParentNotHead, ContractMismatch: this learner and the run disagree.
        OperatorError: the configuration or the machine must be changed.
    """
    learner = Leader(
        config=config,
        api=api,
        backend=backend,
        contract=contract,
        clock=clock,
        rng=rng,
        evaluator=evaluator,
        signer=signer,
        canary=canary,
        yardstick=yardstick,
        result=RunResult(step=0, version=-1, is_finished=False, has_begun=False),
    )
    stopping = stop or asyncio.Event()
    with hold_directory(config.state_dir):
        try:
            async with asyncio.TaskGroup() as tasks:
                leading = tasks.create_task(learner.lead())
                stopped = tasks.create_task(stopping.wait())
                on_ready()
                await asyncio.wait([leading, stopped], return_when=asyncio.FIRST_COMPLETED)
                leading.cancel()
                stopped.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from group
    return learner.result


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure that ended the others."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
