"""A crash at every effect on the disk of publish, snapshot, deletion and pull: nothing acknowledged is lost.

Each scenario runs the real code once under tests.support.crashes.Disk; then every state that a crash could have left is
opened by the real recovery, and the invariants are checked there.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.common.clock import SystemClock
from services.common.pull import Puller
from services.common.wire import manifest_digest
from services.coordinator import shelf
from tests.support.crashes import Disk, Image
from tests.support.learner_world import (
    LAYOUT,
    fill,
    learn,
    learner_config,
    open_coordinator,
)

pytestmark = pytest.mark.timeout(300)


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]


async def check_each(disk: Disk, directory: Path, check: Callable[[Path, Image], Awaitable[None]]) -> None:
    """Open what each crash left, and say which one it was when something is wrong."""
    print(disk.effects, len(disk.images))
    for number, image in enumerate(disk.images):
        place = image.write(directory / f"image-{number}")
        try:
            await check(place, image)
        except BaseException as error:
            error.add_note(f"the crash: {image}")
            raise
        shutil.rmtree(place)


# publish: versions 0 and 1 from an empty state directory; the recovered learner makes version 2

STEPS = 2


class Acknowledging:
    """A coordinator's api that notes what was promised: versions to the learner, groups to a sampler."""

    def __init__(self, api, acknowledged):
        self._api, self._acknowledged = api, acknowledged

    def __getattr__(self, name):
        return getattr(self._api, name)

    async def publish_version(self, request):
        version = await self._api.publish_version(request)
        self._acknowledged.append(("version", version, manifest_digest(request.manifest)))
        return version

    async def push_groups(self, groups):
        outcomes = await self._api.push_groups(groups)
        self._acknowledged.append(("groups", len(groups)))
        return outcomes


async def roots_of(core) -> dict[int, str]:
    def operation(connection):
        return dict(connection.execute("SELECT version, state_root FROM versions").fetchall())

    return await core.database.run(operation)


async def learn_on(core, directory, api, *, max_steps):
    """The learner from where it is to `max_steps`, and the groups that it needs, unless they were pushed before."""
    learning = asyncio.create_task(learn(learner_config(directory, max_steps=max_steps), api))
    if (await core.get_status()).ledger.acked == 0:
        await fill(api, STEPS * 2)
    assert (await learning).is_finished


async def test_learner_that_publishes(tmp_path):
    disk = Disk(tmp_path / "run", machines=("coordinator", "learner"))
    with disk.installed():
        core = await open_coordinator(disk.root)
        api = Acknowledging(core, disk.acknowledged)
        with disk.watch():
            await learn_on(core, disk.root, api, max_steps=STEPS - 1)
        await learn_on(core, disk.root, api, max_steps=STEPS)
        reference = await roots_of(core)
        await core.close()
    assert set(reference) == set(range(STEPS + 1))
    await check_each(disk, tmp_path, lambda directory, image: check_learner(directory, image, reference))


async def check_learner(directory: Path, image: Image, reference: dict[int, str]) -> None:
    core = await open_coordinator(directory)
    try:
        before = await roots_of(core)
        for kind, *facts in image.acknowledged:
            if kind == "version":
                assert manifest_digest(await core.get_manifest(version=facts[0])) == facts[1]
            else:
                assert (await core.get_status()).ledger.acked == facts[0]
        offered = (await core.database.run(shelf.graph)).payloads
        assert {payload.digest for payload in offered} <= set(files(directory / "coordinator" / "blobs"))
        for version, root in before.items():
            pull = Puller(api=core, spool=directory / "spool", layout=LAYOUT, clock=SystemClock())
            pulled = await pull.pull(held=None, want_version=version)
            assert pulled.arena.state_root() == root

        await learn_on(core, directory, core, max_steps=STEPS)

        assert await roots_of(core) == reference, "each number has the weights of a run that nothing disturbed"
        assert (await core.get_status()).ledger.consumed == STEPS * 2
        assert files(directory / "learner" / "payloads") == []
        assert list((directory / "learner" / "checkpoints").glob("writing-*")) == []
        assert files(directory / "coordinator" / "partial") == []
    finally:
        await core.close()
