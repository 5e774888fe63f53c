"""A puller that insists: links are waited for, what no trusted key signed is refused before a byte of it comes."""

import random

import pytest

from heterorl.common.errors import Unreachable, UnsignedManifest
from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import TrustedPuller
from heterorl.common.types.policy import NO_VERSION
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.run import LAYOUT, Run


class Cut:
    """A coordinator whose streams break so many times, each after a few bytes."""

    def __init__(self, core, times):
        self._core, self.times, self.offsets = core, times, []

    def __getattr__(self, name):
        return getattr(self._core, name)

    async def read_payload(self, *, digest, offset):
        self.offsets.append(offset)
        async for frame in self._core.read_payload(digest=digest, offset=offset):
            if self.times:
                self.times -= 1
                yield frame[:10]
                raise Unreachable("cut")
            yield frame


@pytest.fixture
async def world(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    await run.begin()
    await run.publish()
    yield Cut(core, 5), run, tmp_path
    await core.close()


def trusting(api, path, backoff, *keys):
    return TrustedPuller(api=api, spool=path / "spool", layout=LAYOUT, backoff=backoff, trust=Trust(keys))


async def test_broken_links_are_waited_for_and_each_that_brought_bytes_is_the_first_of_a_row(world):
    api, run, path = world
    seen = []

    class Noting(Backoff):
        def delay_s(self, *, asked_s=0.0):
            seen.append(self.num_failures)
            return super().delay_s(asked_s=asked_s)

    backoff = Noting(clock=SystemClock(), rng=random.Random(0), base_s=1e-3, cap_s=60.0)
    pulled = await trusting(api, path, backoff).build(0)

    assert pulled.arena.state_root() == run.roots[0]
    assert api.offsets == [0, 10, 20, 30, 40, 50]
    assert seen == [0] * 5


async def test_head_of_a_download_that_breaks_stays_the_same(world):
    api, run, path = world
    plan_pull = api.plan_pull

    async def plan_and_publish(**wanted):
        plan = await plan_pull(**wanted)
        await run.publish(snapshot=True)
        return plan

    api.plan_pull = plan_and_publish
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-3)
    pulled = await trusting(api, path, backoff).build(NO_VERSION)

    assert (pulled.version, run.head) == (0, 6)
    assert api.offsets == [0, 10, 20, 30, 40, 50]


async def test_head_takes_the_place_of_a_begun_version_that_left_the_lineage(world):
    api, run, path = world
    puller = trusting(api, path, Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-3))
    (path / "spool" / "begun").write_text("7")

    pulled = await puller.build(NO_VERSION)

    assert (puller.begun(), pulled.version) == (NO_VERSION, run.head)


async def test_version_that_no_trusted_key_signed_is_refused_before_a_byte_is_fetched(world):
    api, _, path = world
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0))

    with pytest.raises(UnsignedManifest):
        await trusting(api, path, backoff, "00" * 32).build(0)
    assert api.offsets == []
