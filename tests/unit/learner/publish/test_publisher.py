"""Publication and resumption, piece by piece, against a real coordinator in this process."""

import asyncio
import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import (
    ConfigError,
    DigestMismatch,
    GroupNotAvailable,
    MalformedPayload,
    OperatorError,
    PayloadMissing,
    StaleEpoch,
    StateMismatch,
    StoreFull,
    Unreachable,
)
from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.types.common import SiteId
from heterorl.common.types.policy import PayloadKind, PlanKind
from heterorl.common.types.rollout import GroupId
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.weights.payload import apply_payload
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.learner.publish.checkpoint_store import CheckpointStore
from heterorl.learner.publish.publisher import Publisher
from heterorl.learner.publish.version_payloads import MAX_REPAIRS, PublishedHead, PublishedVersions, encode_version
from heterorl.learner.run.resume import ResumePlan, Resumption, decide
from heterorl.learner.run.rollback import Rollback
from heterorl.learner.run.state_directory import read_incarnation
from heterorl.learner.step_metrics import TrainingLog
from tests.support.clock import ManualClock
from tests.support.cursors import make_cursor
from tests.support.learner_world import (
    LAYOUT,
    FragileApi,
    Killed,
    NumpyBackend,
    fill,
    head_root,
    learn,
    learner_config,
    make_contract,
    open_coordinator,
    queued,
    rows,
)


class World:
    """One learner's publisher and resumption under a fresh epoch."""

    def __init__(self, core, directory, *, api=None, epoch, backend=None, **options):
        self.core, self.api, self.directory, self.epoch = core, api or core, directory, epoch
        self.backend = backend or NumpyBackend()
        self.store = CheckpointStore(directory / "checkpoints")
        self.training_log = TrainingLog(directory)
        self.backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-4, cap_s=1e-3)
        self.publisher = Publisher(
            self.api,
            run_id="run",
            epoch=epoch,
            layout=LAYOUT,
            directory=directory / "payloads",
            store=self.store,
            training_log=self.training_log,
            backoff=self.backoff,
            snapshot_every_versions=options.get("snapshot_every_versions", 100),
            checkpoint_every_versions=options.get("checkpoint_every_versions", 1),
        )
        self.step = 0

    @classmethod
    async def open(cls, core, directory, **options):
        grant = await core.acquire_lease(holder="learner", contract=make_contract(), request_id=str(random.random()))
        return cls(core, directory, epoch=grant.epoch, **options)

    async def resume(self, *, adopt_without_optimizer=False):
        resumption = Resumption(
            backend=self.backend,
            publisher=self.publisher,
            published=PublishedVersions(
                api=self.api,
                layout=LAYOUT,
                spool=self.directory / "payloads" / "incoming",
                backoff=self.backoff,
                trust=Trust(),
            ),
            state_dir=self.directory,
            adopt_without_optimizer=adopt_without_optimizer,
        )
        self.step = await Rollback(resumption=resumption).resume(is_start=True)
        return self.step

    async def advance(self, **options):
        """One step and its publication."""
        self.backend.train_step([queued(self.step + 1)], head_version=0, step=self.step + 1)
        arena = await self.publisher.stage(self.backend)
        await self.publisher.publish(arena, step=self.step + 1, saved_by=self.backend, **options)
        self.step += 1
        return arena

    async def sampler_root(self):
        """State root that a sampler reaches by what the coordinator plans."""
        head = (await self.core.get_status()).head_version
        return (await pulled(self.core, self.directory, version=head)).state_root()


async def pulled(core, directory, *, version):
    puller = Puller(api=core, spool=directory / "incoming", layout=LAYOUT, clock=SystemClock())
    return (await puller.pull(held=None, want_version=version)).arena


@pytest.fixture
async def coordinator(tmp_path):
    core = await open_coordinator(tmp_path)
    yield core
    await core.close()


def _kinds(data):
    return [payload.kind for payload in manifest_from_bytes(data).payloads]


# ---- payloads and the shadow


async def test_first_version_is_a_snapshot_and_the_next_a_delta(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    await world.advance()

    assert _kinds((await coordinator.get_signed_manifest(version=0)).data) == [PayloadKind.SNAPSHOT]
    assert _kinds((await coordinator.get_signed_manifest(version=1)).data) == [PayloadKind.DELTA]


async def test_snapshot_is_published_beside_the_delta_at_its_cadence(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path, snapshot_every_versions=2)
    await world.resume()
    for _ in range(2):
        await world.advance()

    assert _kinds((await coordinator.get_signed_manifest(version=2)).data) == [PayloadKind.DELTA, PayloadKind.SNAPSHOT]
    plan = await coordinator.plan_pull(have_version=-1, have_root="", want_version=2)
    assert plan.kind is PlanKind.SNAPSHOT
    assert len(plan.payloads) == 1


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_version_after_damage_is_a_snapshot(coordinator, tmp_path, is_restarted):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    await world.advance()
    plan = await coordinator.plan_pull(have_version=-1, have_root="", want_version=1)
    await coordinator.damage.put_aside(plan.payloads[0].digest, "its bytes on disk changed")
    if is_restarted:
        # It may wait for groups of samplers that wait for weights.
        root = await head_root(coordinator)
        world = await World.open(coordinator, tmp_path)
        assert await world.resume() == 1
        assert await head_root(coordinator) == root
    else:
        await world.advance()

    assert PayloadKind.SNAPSHOT in _kinds((await coordinator.get_signed_manifest(version=2)).data)
    assert await world.sampler_root() == await head_root(coordinator)
    await world.advance()
    assert _kinds((await coordinator.get_signed_manifest(version=3)).data) == [PayloadKind.DELTA]


async def test_samplers_reach_the_learners_state_by_every_path(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    for _ in range(3):
        arena = await world.advance()

    # Snapshot of version 0 and three deltas.
    assert await world.sampler_root() == arena.state_root() == await head_root(coordinator)


async def test_shadow_stays_when_publication_fails_after_the_upload(coordinator, tmp_path):
    """T1: the next delta starts from what samplers have, not from what was never acknowledged."""
    api, backend = FragileApi(coordinator), NumpyBackend()
    # Steps are small beside such weights, so that a delta is worth its bytes.
    backend.weights *= np.float32(16.0)
    world = await World.open(coordinator, tmp_path, api=api, backend=backend)
    await world.resume()
    shadow = world.publisher.position.shadow
    before = shadow.state_root()
    api.fail[("publish_version", 2)] = GroupNotAvailable("too stale")

    with pytest.raises(GroupNotAvailable):
        await world.advance()
    assert world.publisher.position.shadow is shadow
    assert shadow.state_root() == before
    await world.advance()

    # A sampler that has version 0 applies the delta of version 1 and reaches its state.
    plan = await coordinator.plan_pull(have_version=0, have_root=before, want_version=1)
    frames = [frame async for frame in coordinator.read_payload(digest=plan.payloads[0].digest, offset=0)]
    (tmp_path / "delta").write_bytes(b"".join(frames))
    sampler = await pulled(coordinator, tmp_path, version=0)
    apply_payload(tmp_path / "delta", sampler, expected_from_root=before)
    assert plan.kind is PlanKind.DELTA
    assert sampler.state_root() == await head_root(coordinator)


async def test_no_version_is_staged_into_an_arena_that_is_still_read(coordinator, tmp_path):
    held, proceed = asyncio.Event(), asyncio.Event()

    class Waiting(FragileApi):
        def __getattr__(self, name):
            call = super().__getattr__(name)
            if name != "publish_version" or self.calls.count(name) == 0:
                return call

            async def publish_version(request):
                held.set()
                await proceed.wait()
                return await call(request)

            return publish_version

    world = await World.open(coordinator, tmp_path, api=Waiting(coordinator))
    await world.resume()
    advancing = asyncio.create_task(world.advance())
    await held.wait()

    world.backend.train_step([queued(2)], head_version=0, step=2)
    staged = await world.publisher.stage(world.backend)
    proceed.set()
    arena = await advancing

    assert await world.sampler_root() == arena.state_root() != staged.state_root()


async def test_shadow_advances_when_the_version_is_acknowledged(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()

    arena = await world.advance()

    assert world.publisher.position.shadow is arena
    assert world.publisher.position.head_version == 1


async def test_refused_publication_leaves_no_checkpoint(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    missing = GroupId(site=SiteId("nowhere"), incarnation="a", sequence=1)

    with pytest.raises(GroupNotAvailable):
        await world.advance(consumed=[missing])

    assert [path.name for path in world.store.paths()] == ["v00000000"]


async def test_payload_files_are_removed_when_they_are_not_needed(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    await world.advance()

    assert [path for path in (tmp_path / "payloads").rglob("*") if path.is_file()] == []


# ---- upload


async def test_upload_goes_on_where_the_link_broke(coordinator, tmp_path):
    api = FragileApi(coordinator, fail_after={("upload_payload", 1): Unreachable("cut")})
    world = await World.open(coordinator, tmp_path, api=api)

    await world.resume()

    # The bytes were there although the answer was not: asked once more, not sent again.
    assert api.calls.count("upload_payload") == 1
    assert api.calls.count("query_upload") == 2


@pytest.mark.parametrize("error", [StoreFull("full", retry_after_s=1e-4), DigestMismatch("flipped on the way")])
async def test_upload_is_repeated_when_it_may_succeed_later(coordinator, tmp_path, error):
    api = FragileApi(coordinator, fail={("upload_payload", 1): error})
    world = await World.open(coordinator, tmp_path, api=api)

    await world.resume()

    assert (await coordinator.get_status()).head_version == 0


class Hurrying(ManualClock):
    """Every wait is over at once; `waits` are their seconds."""

    def __init__(self):
        super().__init__()
        self.waits = []

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.advance(seconds)


def _longest_waits():
    """A clock, and a backoff that always draws the longest wait."""
    clock = Hurrying()
    return clock, Backoff(clock=clock, rng=SimpleNamespace(uniform=lambda _, longest: longest), base_s=1.0, cap_s=15.0)


@pytest.mark.parametrize("method", ["upload_payload", "publish_version"])
async def test_waits_for_a_full_coordinator_grow_and_are_said_once(coordinator, tmp_path, caplog, method):
    api = FragileApi(coordinator, fail={(method, number): StoreFull("full") for number in range(1, 21)})
    world = await World.open(coordinator, tmp_path, api=api)
    clock, world.publisher.backoff = _longest_waits()

    await world.resume()

    assert clock.waits == [1.0, 2.0, 4.0, 8.0, *[15.0] * 16]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("the coordinator is asked again: full")
    assert world.publisher.backoff.num_failures == 0


class Forgetful:
    """A coordinator that answers some uploads and keeps nothing of them."""

    def __init__(self, core, num_lost):
        self._core, self._num_lost = core, num_lost

    def __getattr__(self, name):
        return getattr(self._core, name)

    async def upload_payload(self, **values):
        if self._num_lost:
            self._num_lost -= 1
        else:
            await self._core.upload_payload(**values)


async def test_upload_that_is_answered_and_not_kept_is_repeated_after_longer_waits(coordinator, tmp_path, caplog):
    world = await World.open(coordinator, tmp_path, api=Forgetful(coordinator, 5))
    clock, world.publisher.backoff = _longest_waits()

    await world.resume()

    assert clock.waits == [1.0, 2.0, 4.0, 8.0, 15.0]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("the coordinator is asked again: it keeps only 0 of ")
    assert said.endswith("(look at the coordinator's log)")


async def test_upload_gives_up_when_the_file_itself_is_wrong(coordinator, tmp_path):
    fail = {("upload_payload", number): DigestMismatch("wrong") for number in (1, 2, 3)}
    world = await World.open(coordinator, tmp_path, api=FragileApi(coordinator, fail=fail))

    with pytest.raises(DigestMismatch):
        await world.resume()


async def test_upload_stops_when_the_epoch_is_over(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    await coordinator.acquire_lease(holder="learner", contract=make_contract(), request_id="next")

    with pytest.raises(StaleEpoch):
        await world.advance()


async def test_missing_payload_is_uploaded_again(coordinator, tmp_path):
    api = FragileApi(coordinator, fail={("publish_version", 1): PayloadMissing("gone")})
    world = await World.open(coordinator, tmp_path, api=api)

    await world.resume()

    assert (await coordinator.get_status()).head_version == 0


class PowerCut:
    """A coordinator that loses power in the first upload of each payload: all its bytes are there then, and wrong."""

    def __init__(self, core, partial):
        self._core, self._partial = core, partial
        self.lost = []

    def __getattr__(self, name):
        return getattr(self._core, name)

    async def upload_payload(self, *, digest, num_bytes, **rest):
        if digest in self.lost:
            return await self._core.upload_payload(digest=digest, num_bytes=num_bytes, **rest)
        self.lost.append(digest)
        (self._partial / digest).write_bytes(bytes(num_bytes))
        raise Unreachable("power cut")


async def test_payloads_that_are_all_there_and_wrong_are_uploaded_again(coordinator, tmp_path, monkeypatch):
    monkeypatch.setattr("heterorl.learner.publish.version_payloads.MAX_REPAIRS", 1)
    api = PowerCut(coordinator, coordinator.config.data_dir / "partial")
    world = await World.open(coordinator, tmp_path, api=api, snapshot_every_versions=1)

    await world.resume()
    await world.advance()

    assert len(api.lost) == 3, "a snapshot, then a delta and a snapshot: each is found wrong by itself"
    assert (await coordinator.get_status()).head_version == 1


@pytest.mark.parametrize("error", [PayloadMissing, DigestMismatch])
async def test_payload_that_is_never_right_ends_the_publication(coordinator, tmp_path, error):
    fail = {("publish_version", number): error("again") for number in range(1, 100)}
    api = FragileApi(coordinator, fail=fail)
    world = await World.open(coordinator, tmp_path, api=api)

    with pytest.raises(error):
        await world.resume()
    assert api.calls.count("publish_version") == 1 + MAX_REPAIRS


# ---- resumption


@pytest.mark.parametrize(
    ("parent", "head", "committed", "is_in_lineage", "action"),
    [
        (4, 4, None, False, ResumePlan.REPUBLISH),
        (4, 5, None, False, ResumePlan.SKIP),
        (5, 4, None, False, ResumePlan.SKIP),
        (4, 5, 5, True, ResumePlan.CONTINUE),
        (4, 7, 5, True, ResumePlan.ROLL_BACK),
        (4, 7, 5, False, ResumePlan.SKIP),
    ],
)
def test_checkpoint_is_judged_by_the_fate_of_its_publication(parent, head, committed, is_in_lineage, action):
    cursor = make_cursor(version=parent + 1)

    decided, reason = decide(cursor, head_version=head, committed_version=committed, is_in_lineage=is_in_lineage)

    assert decided is action
    assert reason


async def test_resumed_learner_takes_an_older_checkpoint_when_the_newest_is_damaged(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    for _ in range(3):
        await world.advance()
    root_of_2 = manifest_from_bytes((await coordinator.get_signed_manifest(version=2)).data).state_root
    newest = world.store.paths()[0]
    (newest / "backend" / "weights.npy").write_bytes(b"")

    again = await World.open(coordinator, tmp_path)
    step = await again.resume()

    # Version 3 is abandoned; version 4 holds the weights of version 2, as a snapshot, and training goes on from it.
    assert step == 2
    manifest = manifest_from_bytes((await coordinator.get_signed_manifest(version=4)).data)
    assert (manifest.version, manifest.parent_version, manifest.state_root) == (4, 2, root_of_2)
    await again.advance()
    assert (await coordinator.get_status()).head_version == 5
    assert await again.sampler_root() == await head_root(coordinator)


async def test_learner_rolls_back_to_its_last_checkpoint_when_it_writes_few(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path, checkpoint_every_versions=2)
    await world.resume()
    for _ in range(3):
        await world.advance()

    again = await World.open(coordinator, tmp_path, checkpoint_every_versions=2)

    assert await again.resume() == 2
    assert again.publisher.position.head_version == 4


async def test_learner_rolls_back_again_when_it_died_while_rolling_back(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path, checkpoint_every_versions=2)
    await world.resume()
    for _ in range(3):
        await world.advance()
    fragile = FragileApi(coordinator, die_before=("publish_version", 1))
    with pytest.raises(Killed):
        await (await World.open(coordinator, tmp_path, api=fragile, checkpoint_every_versions=2)).resume()

    again = await World.open(coordinator, tmp_path, checkpoint_every_versions=2)

    assert await again.resume() == 2
    assert (await coordinator.get_status()).head_version == 4


async def test_learner_adopts_the_published_weights_when_it_has_no_checkpoint(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    for _ in range(2):
        await world.advance()

    other = await World.open(coordinator, tmp_path / "elsewhere")

    assert await other.resume(adopt_without_optimizer=True) == 2
    arena = await other.publisher.stage(other.backend)
    assert arena.state_root() == await head_root(coordinator)
    await other.advance()
    assert await other.sampler_root() == await head_root(coordinator)


async def test_learner_refuses_to_start_anew_beside_old_checkpoints(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    for _ in range(2):
        await world.advance()
    empty = await open_coordinator(tmp_path / "empty")

    with pytest.raises(OperatorError, match="no version of it"):
        await (await World.open(empty, tmp_path)).resume()
    await empty.close()


async def test_learner_refuses_the_checkpoints_of_another_run(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    other = await World.open(coordinator, tmp_path)
    path = world.store.paths()[0]
    world.store.write(
        make_cursor(version=1, run_id="other"), begun=world.store.begin(1, world.backend),
        arena=world.publisher.position.shadow, snapshot=None,
    )  # fmt: skip
    assert path.exists()

    with pytest.raises(ConfigError, match="run other"):
        await other.resume()


async def test_refused_pending_checkpoint_gives_way_to_its_parent(coordinator, tmp_path):
    """Killed before the commit, and its group became unavailable meanwhile: the step is undone, its groups go on."""
    config = learner_config(tmp_path, max_steps=2)
    filling = asyncio.create_task(fill(coordinator, 6))
    with pytest.raises(Killed):
        await learn(config, FragileApi(coordinator, die_before=("publish_version", 2)))
    await filling
    grant = await coordinator.acquire_lease(
        holder="learner", contract=make_contract(), request_id="between", incarnation=read_incarnation(config.state_dir)
    )
    first = GroupId(site=SiteId("eu-1"), incarnation="b1946ac9", sequence=1)
    await coordinator.abandon_groups(epoch=grant.epoch, ids=[first], reason="test")
    backend = NumpyBackend()

    result = await learn(config, coordinator, backend)

    assert (result.step, result.version) == (2, 2)
    assert [[group_id.sequence for group_id in ids] for ids in backend.trained] == [[2, 3], [4, 5]]


async def test_journal_cuts_a_torn_line_and_goes_on(tmp_path):
    training_log = TrainingLog(tmp_path)
    training_log.note_evaluation({"version": 1})
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"versi')

    TrainingLog(tmp_path).note_evaluation({"version": 2})

    assert [row["version"] for row in rows(tmp_path / "evaluations.jsonl")] == [1, 2]


async def test_checkpoint_is_not_used_when_it_restores_to_another_state(coordinator, tmp_path):
    class Forgetful(NumpyBackend):
        def restore(self, directory):
            super().restore(directory)
            self.weights = self.weights + 1

    world = await World.open(coordinator, tmp_path)
    await world.resume()
    await world.advance()

    again = await World.open(coordinator, tmp_path, backend=Forgetful())

    # No checkpoint restores to what it says: the published weights are the truth.
    assert await again.resume(adopt_without_optimizer=True) == 1
    arena = await again.publisher.stage(again.backend)
    assert arena.state_root() == await head_root(coordinator)


async def test_adoption_goes_on_pulling_where_the_link_broke(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path / "a")
    await world.resume()
    # Another state directory: no checkpoint, so the head's weights are pulled.
    api = FragileApi(coordinator, fail={("read_payload", 1): Unreachable("cut")})
    again = await World.open(coordinator, tmp_path / "b", api=api)

    await again.resume()

    assert again.publisher.position.shadow.state_root() == await head_root(coordinator)
    assert api.calls.count("read_payload") == 2


async def test_adoption_refuses_bytes_of_another_digest(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path / "a")
    await world.resume()

    class Flipping(FragileApi):
        def __getattr__(self, name):
            if name != "read_payload":
                return super().__getattr__(name)

            async def read_payload(*, digest, offset):
                async for frame in coordinator.read_payload(digest=digest, offset=offset):
                    yield frame[:-1] + bytes([frame[-1] ^ 1])

            return read_payload

    again = await World.open(coordinator, tmp_path / "b", api=Flipping(coordinator))
    with pytest.raises(MalformedPayload, match="another digest"):
        await again.resume()


async def test_rollback_has_a_checkpoint_whatever_the_cadence(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path, checkpoint_every_versions=5)
    await world.resume()
    for _ in range(2):
        await world.advance()

    again = await World.open(coordinator, tmp_path, checkpoint_every_versions=5)
    await again.resume()

    # Version 3 is version 0 again; without its checkpoint every restart would roll back once more.
    assert [path.name for path in again.store.paths()] == ["v00000003", "v00000000"]


async def test_adoption_is_followed_by_a_checkpoint_whatever_the_cadence(coordinator, tmp_path):
    """A restart must not ask again to go on without an optimizer."""
    first = await World.open(coordinator, tmp_path / "lost")
    await first.resume()
    await first.advance()
    directory, cadence = tmp_path / "next", {"checkpoint_every_versions": 10}
    second = await World.open(coordinator, directory, **cadence)
    await second.resume(adopt_without_optimizer=True)
    await second.advance()
    await second.advance()

    assert [path.name for path in second.store.paths()] == ["v00000002"]
    third = await World.open(coordinator, directory, **cadence)
    assert await third.resume() == 2
    assert third.backend.momentum.any()


async def test_pending_checkpoint_is_discarded_when_it_is_refused_at_resumption(coordinator, tmp_path):
    fragile = FragileApi(coordinator, die_before=("publish_version", 2))
    world = await World.open(coordinator, tmp_path, api=fragile)
    await world.resume()
    missing = GroupId(site=SiteId("nowhere"), incarnation="a", sequence=1)
    with pytest.raises(Killed):
        await world.advance(consumed=[missing])

    again = await World.open(coordinator, tmp_path)

    assert await again.resume() == 0
    assert [path.name for path in again.store.paths()] == ["v00000000"]


async def test_checkpoint_of_an_abandoned_version_is_not_used(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    for _ in range(3):
        await world.advance()
    third = world.store.paths()[0]
    third.rename(tmp_path / "aside")
    # Rolls back to version 2 and publishes version 4; then version 3's checkpoint comes back from a backup.
    again = await World.open(coordinator, tmp_path)
    await again.resume()
    again.store.discard(again.store.paths()[0])
    (tmp_path / "aside").rename(third)

    last = await World.open(coordinator, tmp_path)

    assert await last.resume() == 2
    assert (await coordinator.get_status()).head_version == 5


async def test_pull_refuses_a_state_that_its_manifest_does_not_name(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()

    class Lying(FragileApi):
        def __getattr__(self, name):
            if name != "plan_pull":
                return super().__getattr__(name)

            async def plan_pull(**wanted):
                plan = await coordinator.plan_pull(**wanted)
                manifest = manifest_from_bytes(plan.manifests[0])
                lie = dataclasses.replace(manifest, chunk_digests=manifest.chunk_digests[::-1])
                return dataclasses.replace(plan, manifests=(manifest_to_bytes(lie),))

            return plan_pull

    with pytest.raises(StateMismatch):
        await pulled(Lying(coordinator), tmp_path, version=0)


async def test_new_layout_is_published_as_a_snapshot(tmp_path):
    old, new = Arena(LAYOUT), Arena(Layout.build([TensorSpec(name="a", dtype="bf16", shape=(4,))]))
    position = PublishedHead(head_version=3, lineage_version=3, lineage_digest="0" * 64, shadow=old)

    encoded = encode_version(position, new, directory=tmp_path, run_id="run", epoch=1, step=1, with_snapshot=False)

    assert [payload.kind for payload in encoded.manifest.payloads] == [PayloadKind.SNAPSHOT]


STEPPED = Layout.build([TensorSpec(name="a", dtype="bf16", shape=(20_000,))], chunk_elements=8_000)


@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize(
    ("change", "has_delta"),
    [("one in a hundred by one", True), ("every one by up to 20000", True), ("to any bits", False)],
)
def test_delta_gives_way_to_a_snapshot_that_is_not_larger(tmp_path, change, has_delta, with_snapshot):
    rng = np.random.default_rng(3)
    old = Arena(STEPPED)
    old.view("a")[...] = rng.integers(-(2**15), 2**15, 20_000)
    new = old.copy()
    if change == "to any bits":
        new.view("a")[...] = rng.integers(-(2**15), 2**15, 20_000)
    elif change == "every one by up to 20000":
        # In two of three chunks; the third is the same, so the delta has two thirds of the weights, more than half.
        new.view("a")[:16_000] += rng.integers(1, 20_000, 16_000).astype(np.int16)
    else:
        new.view("a")[::100] += 1
    position = PublishedHead(head_version=3, lineage_version=3, lineage_digest="0" * 64, shadow=old)

    encoded = encode_version(
        position, new, directory=tmp_path, run_id="run", epoch=1, step=1, with_snapshot=with_snapshot
    )

    kinds = [PayloadKind.DELTA] * has_delta + [PayloadKind.SNAPSHOT] * (with_snapshot or not has_delta)
    assert [payload.kind for payload in encoded.manifest.payloads] == kinds
    assert sorted(tmp_path.iterdir()) == sorted(path for _, path in encoded.files), "what is not published is gone"
    num_changed = int(np.count_nonzero(old.view("a") != new.view("a")))
    assert encoded.manifest.num_changed == num_changed, "also where the delta that counted it is not published"
    state = old.copy()
    for ref, path in encoded.files:
        start = old.state_root() if ref.kind is PayloadKind.DELTA else None
        apply_payload(path, state, expected_from_root=start)
        assert state.state_root() == encoded.manifest.state_root


async def test_version_of_other_weights_altogether_is_published_full(coordinator, tmp_path):
    world = await World.open(coordinator, tmp_path)
    await world.resume()
    bits = np.random.default_rng(5).integers(-(2**31), 2**31, world.backend.weights.size, dtype=np.int64)
    world.backend.weights = bits.astype(np.int32).view(np.float32)

    await world.publisher.publish(await world.publisher.stage(world.backend), step=1, saved_by=world.backend)
    world.backend.weights = world.backend.weights.copy()
    world.backend.weights[0] = 1.0
    await world.publisher.publish(await world.publisher.stage(world.backend), step=2, saved_by=world.backend)

    kinds = [
        [
            payload.kind
            for payload in manifest_from_bytes((await coordinator.get_signed_manifest(version=version)).data).payloads
        ]
        for version in range(3)
    ]
    assert kinds == [[PayloadKind.SNAPSHOT], [PayloadKind.SNAPSHOT], [PayloadKind.DELTA]]
    puller = Puller(api=coordinator, spool=tmp_path / "spool", layout=LAYOUT, clock=SystemClock())
    held = await puller.pull(held=None, want_version=0)
    assert (await puller.pull(held=held, want_version=2)).arena.state_root() == await head_root(coordinator)
