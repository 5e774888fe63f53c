"""The learner's main: lease, resumption, inbox, training, publication.

    coordinator --stream, by credit--> feed --> Inbox --> TrainingLoop --groups--> backend (thread)
         ^                                                   |
         +------- checkpoint, payloads, compare-and-set --- Publisher

ARCHITECTURE.md lists what each loop waits for.

When the lease is lost, `renew` fails its TaskGroup, which ends every wait. A step runs in a thread that cannot be
cancelled: it is waited for, and its result has no effect.

A stop cancels the training loop, waits for its thread, closes the stream, releases the lease. No data depends on that
order: after SIGKILL the next start repeats the work from the last checkpoint. At max_steps the last version is
published, then the run drains.
"""

import contextlib
import functools
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable

from heterorl.common.api import LearnerApi
from heterorl.common.identity.signing import Trust
from heterorl.common.identity.spiffe import names_of
from heterorl.common.process import metrics, notify, tracing
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import Clock
from heterorl.common.process.threads import in_thread, num_threads
from heterorl.common.pull.puller import TrustedPuller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.policy import LeaseGrant
from heterorl.learner.backends.ranks.rank_env import RankEnv
from heterorl.learner.checks.verifier import RecentVersions, Verifier
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.learner_parts import Parts, assemble
from heterorl.learner.publish.checkpoint_store import CheckpointStore, cadence
from heterorl.learner.publish.publisher import Publisher
from heterorl.learner.publish.quantised_variants import Variants
from heterorl.learner.publish.version_payloads import PublishedVersions
from heterorl.learner.run.resume import Resumption
from heterorl.learner.run.rollback import Rollback
from heterorl.learner.run.state_directory import hold_directory, read_epochs
from heterorl.learner.run.training_run import TrainingRun
from heterorl.learner.sample_notes import NoteReader
from heterorl.learner.step_metrics import BusyTime, StepTimer, TrainingLog, observe_start

_LOG = logging.getLogger(__name__)


async def main(config: LearnerConfig, *, num_ranks: int = 1, rank_env: RankEnv | None = None) -> int:
    """Train until max_steps or a signal; returns the exit code 0.

    `rank_env` is rank 0's, where a launcher has started the processes.
    """
    async with notify.running() as process, contextlib.AsyncExitStack() as stack:
        # Held meanwhile: what is wrong with it is told before the model is loaded.
        with hold_directory(config.state_dir):
            client = await stack.enter_async_context(_calling(config))
            parts = await in_thread(assemble, config, num_ranks=num_ranks, rank_env=rank_env)
        await _train(config, parts, process, client)
    return 0


@contextlib.asynccontextmanager
async def _calling(config: LearnerConfig) -> AsyncIterator[CoordinatorClient]:
    """A client that also pushes metrics.

    Loading takes minutes: a learner that started again must not look like one that is gone.
    """
    metrics.watch_disk(config.state_dir)
    observe_start()
    tracing.start(config.tracing, service="learner", name=config.holder)
    metrics_port = metrics.serve_by(config, service="learner")
    _LOG.info(
        "the learner of run %s calls coordinator %s, metrics on port %d",
        config.run_id,
        config.coordinator,
        metrics_port,
    )
    site = names_of(config.tls.cert)[1] or config.holder
    async with (
        CoordinatorClient.of(config, max_message_bytes=config.max_message_bytes) as client,
        client.pushing("learner", site=site, interval_s=config.metrics_push_s),
    ):
        yield client


async def _train(config: LearnerConfig, parts: Parts, process: notify.Process, client: CoordinatorClient) -> None:
    # Again: the first step is due from now on.
    observe_start()
    if parts.signer is not None:
        _LOG.info("the learner signs versions with key %s", parts.signer.public_key)
    learner = join(config, parts, api=client, clock=process.clock, rng=random.Random())
    status = f"run {config.run_id}, holder {config.holder}"
    result = await learner.run(process.stop, on_ready=lambda: process.notifier.ready(status))
    process.notifier.stopping()
    await in_thread(parts.close)
    _LOG.info("the learner %s", result)


def join(config: LearnerConfig, parts: Parts, *, api: LearnerApi, clock: Clock, rng: random.Random) -> TrainingRun:
    """Join loaded parts to a coordinator; does not send or write yet.

    A signer signs every version and must have signed the head; a canary is stated with each. Without `verification`
    groups are not checked.
    """
    cap_s = config.retry_cap_s
    backoff = functools.partial(
        Backoff, clock=clock, rng=rng, base_s=config.retry_base_s, cap_s=cap_s, asked_cap_s=cap_s
    )
    trust = Trust(() if parts.signer is None else (parts.signer.public_key, *config.trusted_keys))
    progress = StepTimer(clock=clock, passes=parts.passes)
    known = parts.verification
    return TrainingRun(
        config=config,
        api=api,
        contract=parts.contract,
        clock=clock,
        backoff=backoff,
        backend=parts.backend,
        evaluator=parts.evaluator,
        verifier=_verifier(config, parts, api=api, backoff=backoff(), trust=trust, busy=progress.checks),
        begin=functools.partial(_begin_term, config, parts, api=api, backoff=backoff, trust=trust),
        reader=None if known is None else NoteReader(known.prompter, known.task, known.conversations),
        progress=progress,
        statement=parts.statement,
    )


def _verifier(
    config: LearnerConfig, parts: Parts, *, api: LearnerApi, backoff: Backoff, trust: Trust, busy: BusyTime
) -> Verifier | None:
    if parts.verification is None:
        return None
    versions = None
    if parts.verification.replayer is not None:
        threads = num_threads(config.backend.threads)
        versions = RecentVersions(
            make_puller=functools.partial(TrustedPuller, api=api, backoff=backoff, trust=trust, threads=threads),
            spool=config.state_dir / "checks",
            layout=parts.backend.layout,
            num_kept=config.verification.kept_versions,
        )
    # Randomness of the operating system: no site may foresee which groups are checked.
    return Verifier(verification=parts.verification, versions=versions, rng=secrets.SystemRandom(), busy=busy)


def _begin_term(
    config: LearnerConfig,
    parts: Parts,
    grant: LeaseGrant,
    *,
    api: LearnerApi,
    backoff: Callable[[], Backoff],
    trust: Trust,
) -> Rollback:
    """Make the parts of a term; the state directory is held."""
    directory = config.state_dir
    payloads = directory / "payloads"
    backend = parts.backend
    threads = num_threads(config.backend.threads)
    published = PublishedVersions(
        api=api, layout=backend.layout, spool=payloads / "incoming", backoff=backoff(), trust=trust, threads=threads
    )
    variants = Variants(published, names=config.variants, run_id=config.run_id, epoch=grant.epoch, directory=payloads)
    publisher = Publisher(
        api,
        run_id=config.run_id,
        epoch=grant.epoch,
        layout=backend.layout,
        directory=payloads,
        store=CheckpointStore(directory / "checkpoints"),
        training_log=TrainingLog(directory),
        backoff=backoff(),
        snapshot_every_versions=config.snapshot_every_versions,
        checkpoint_every_versions=cadence(config.checkpoint_every_versions, num_elements=backend.layout.num_elements),
        signer=parts.signer,
        canary=parts.canary,
        threads=threads,
        variants=variants if config.variants else None,
    )
    resumption = Resumption(
        backend=backend,
        publisher=publisher,
        published=published,
        state_dir=directory,
        adopt_without_optimizer=config.adopt_without_optimizer,
        own_epochs=read_epochs(directory),
    )
    return Rollback(resumption=resumption)
