"""Steps that become no version: groups too old are left out before, a refusal takes back the step and no version."""

import asyncio
import logging
import threading

import numpy as np
import pytest

from heterorl.common.errors import CorruptStore, GroupNotAvailable
from heterorl.common.types.rollout import DropReason, PushStatus
from heterorl.common.wire.policy_messages import manifest_from_bytes
from tests.support.learner_world import (
    INCARNATION,
    SITE,
    FragileApi,
    NumpyBackend,
    fill,
    learn,
    learner_config,
    make_group,
    open_coordinator,
)
from tests.support.limits import WAIT_S


class Paced(NumpyBackend):
    """A backend whose steps wait for the test, one by one."""

    def __init__(self):
        super().__init__()
        self.proceed = threading.Semaphore(0)
        self.on_step = lambda: self.proceed.acquire(timeout=WAIT_S)


async def _head(core, version):
    async for update in core.watch_head(after_version=version - 1):
        assert update.version == version
        break


async def _lease(core, version, count):
    grant = await core.lease_work(site=SITE, incarnation=INCARNATION, max_groups=count, policy_version=version)
    assert len(grant.assignments) == count
    return grant.assignments


async def _push(core, version, assignments, first):
    root = manifest_from_bytes((await core.get_signed_manifest(version=version)).data).state_root
    groups = [
        make_group(number, assignment=work.id, prompt_index=work.prompt_index, version=version, state_root=root)
        for number, work in enumerate(assignments, start=first)
    ]
    outcomes = await core.push_groups(groups)
    assert [outcome.status for outcome in outcomes] == [PushStatus.ACCEPTED] * len(groups)


async def _abandoned(core):
    return await core.database.run(
        lambda connection: [row[0] for row in connection.execute("SELECT version FROM versions WHERE is_abandoned")]
    )


@pytest.mark.parametrize("groups_per_version_are_known", [True, False])
async def test_late_group_undoes_no_version(tmp_path, groups_per_version_are_known):
    """A slow site at the bound delivers while a step runs: at that step's end its groups are one version too old."""
    core = await open_coordinator(tmp_path, max_staleness_versions=3)
    backend = Paced()
    api = core if groups_per_version_are_known else Unsaying(core)
    config = learner_config(tmp_path, max_steps=9, checkpoint_every_versions=10)
    learner = asyncio.create_task(learn(config, api, backend))
    await _head(core, 0)
    await fill(core, 2)
    sequence = 3
    for version in range(1, 7):
        backend.proceed.release()
        await _head(core, version)
        if version == 6:
            late = await _lease(core, 3, 2)
        await _push(core, version, await _lease(core, version, 2), sequence)
        sequence += 2
    # The step that makes version 7 waits. Groups of version 3 are within the bound of the head, 6, and not of 7.
    await _push(core, 3, late, sequence)
    sequence += 2
    if not groups_per_version_are_known:
        await api.has_sent_late.wait()
    backend.proceed.release()
    await _head(core, 7)
    await _push(core, 7, await _lease(core, 7, 4), sequence)
    for _ in range(2):
        backend.proceed.release()
    result = await learner

    status = await core.get_status()
    assert (result.step, status.head_version) == (9, 9)
    assert await _abandoned(core) == []
    reason = DropReason.STALE_AT_LEASE if groups_per_version_are_known else DropReason.STALE_AT_COMMIT
    assert status.ledger.dropped == {reason: 2}
    assert status.ledger.is_balanced
    assert max(report.staleness_max for report in backend.reports) <= 3
    await core.close()


class Unsaying(FragileApi):
    """A learner's api that does not tell the coordinator how many groups make a version, as earlier learners do not."""

    def __init__(self, core):
        super().__init__(core)
        self.has_sent_late = asyncio.Event()

    def _leave(self, name, number):
        super()._leave(name, number)
        # 2 at first, 2 of each of versions 1 to 6, and the late ones: the learner has them in its inbox now.
        if (name, number) == ("stream_groups.item", 16):
            self.has_sent_late.set()

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name != "acquire_lease":
            return call

        async def acquire(**values):
            return await call(**{**values, "groups_per_version": 0})

        return acquire


class Refusing(FragileApi):
    """A coordinator that does not have a group of one version any more."""

    def __init__(self, core, version, on_refusal=lambda: None):
        super().__init__(core)
        self.version, self.has_refused, self.on_refusal = version, False, on_refusal

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name != "publish_version":
            return call

        async def publish(request):
            if manifest_from_bytes(request.manifest).version == self.version and not self.has_refused:
                self.has_refused = True
                self.on_refusal()
                raise GroupNotAvailable("1 groups are not available, 0 became too stale")
            return await call(request)

        return publish


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("cadence", "said"), [(10, "version 4 has no checkpoint"), (1, "back at version 4: checkpoint v00000004")]
)
async def test_refused_step_takes_back_itself_and_what_builds_on_it(tmp_path, caplog, cadence, said, overlap):
    """Versions since the newest checkpoint stand: they are sound, and samplers use them."""
    core = await open_coordinator(tmp_path)
    backend = NumpyBackend()
    config = learner_config(tmp_path, max_steps=6, checkpoint_every_versions=cadence, overlap_publication=overlap)
    if overlap:
        # The refusal comes while step 6 computes, and waits for its end.
        is_refused = threading.Event()
        backend.on_step = lambda: len(backend.reports) != 5 or is_refused.wait(WAIT_S)
    caplog.set_level(logging.INFO)

    api = Refusing(core, 5, on_refusal=is_refused.set if overlap else lambda: None)
    result, _ = await asyncio.gather(learn(config, api, backend), fill(core, 12))

    status = await core.get_status()
    assert (result.step, result.version) == (6, 6)
    assert await _abandoned(core) == []
    assert status.ledger.consumed == 12
    sequences = [[group_id.sequence for group_id in ids] for ids in backend.trained]
    straight = [[2 * step - 1, 2 * step] for step in range(1, 7)]
    undone = 2 if overlap else 1
    # The groups of a step that is undone return once, in their order.
    assert sequences == straight[: 4 + undone] + straight[4:]
    assert status.ledger.is_balanced
    assert said in caplog.text
    await core.close()


async def test_refused_step_leaves_the_optimizer_its_moments(tmp_path):
    core = await open_coordinator(tmp_path)
    backend, seen = NumpyBackend(), []
    load = backend.load_published

    def noting(arena, *, keep_optimizer=False):
        before = backend.momentum.copy()
        load(arena, keep_optimizer=keep_optimizer)
        seen.append((keep_optimizer, bool((backend.momentum == before).all()), bool(np.abs(before).any())))

    backend.load_published = noting
    config = learner_config(tmp_path, max_steps=3, checkpoint_every_versions=10)

    await asyncio.gather(learn(config, Refusing(core, 2), backend), fill(core, 6))

    assert seen == [(True, True, True)]
    await core.close()


async def test_checkpoint_that_could_not_be_restored_leaves_no_moments_of_its_own(tmp_path, caplog):
    """It may have been restored in parts: they are of other weights, or of none."""
    core = await open_coordinator(tmp_path)
    backend, seen = NumpyBackend(), []
    load = backend.load_published

    def restore(directory):
        backend.momentum[:] = np.nan
        raise CorruptStore("a checkpoint cannot be read: Input/output error")

    def noting(arena, *, keep_optimizer=False):
        load(arena, keep_optimizer=keep_optimizer)
        seen.append(bool(backend.momentum.any()))

    backend.restore, backend.load_published = restore, noting
    config = learner_config(tmp_path, max_steps=3, checkpoint_every_versions=1)

    result, _ = await asyncio.gather(learn(config, Refusing(core, 2), backend), fill(core, 6))

    assert seen == [False]
    assert (result.step, result.version) == (3, 3)
    assert "version 1 has no checkpoint that can be restored" in caplog.text
    assert "the optimizer is new" in caplog.text
    assert "keeps its moments" not in caplog.text
    await core.close()


async def test_checkpoint_that_could_not_be_restored_pushes_out_no_sound_one(tmp_path):
    core = await open_coordinator(tmp_path)
    backend = NumpyBackend()
    restore = backend.restore

    def refuse(directory):
        if "v00000004" in str(directory):
            raise CorruptStore("a checkpoint cannot be read: Input/output error")
        restore(directory)

    backend.restore = refuse
    config = learner_config(tmp_path, max_steps=6, checkpoint_every_versions=2)

    await asyncio.gather(learn(config, Refusing(core, 5), backend), fill(core, 12))

    kept = sorted(path.name for path in (config.state_dir / "checkpoints").glob("v[0-9]*"))
    assert kept == ["v00000002", "v00000004", "v00000006"]
    await core.close()
