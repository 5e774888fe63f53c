"""Versions for checks: pulled and verified like at a sampler, the newest few kept."""

import functools
import random

import pytest

from heterorl.common.errors import UnknownVersion, UnsignedManifest
from heterorl.common.identity.signing import Trust
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import TrustedPuller
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.learner.checks.verifier import RecentVersions
from tests.support.clock import ManualClock
from tests.support.run import LAYOUT, Run


@pytest.fixture
async def run(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    (tmp_path / "run").mkdir()
    run = Run(core, tmp_path / "run")
    await run.begin()
    for _ in range(4):
        await run.publish()
    yield run
    await core.close()


class Counting:
    """A coordinator whose plans are counted."""

    def __init__(self, inner):
        self._inner = inner
        self.plans = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def plan_pull(self, **kwargs):
        self.plans.append((kwargs["have_version"], kwargs["want_version"]))
        return await self._inner.plan_pull(**kwargs)


def versions_of(api, tmp_path, *, keys=(), num_kept=2):
    backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-3, cap_s=1e-2)
    make_puller = functools.partial(TrustedPuller, api=api, backoff=backoff, trust=Trust(keys))
    return RecentVersions(make_puller=make_puller, spool=tmp_path / "checks", layout=LAYOUT, num_kept=num_kept)


async def test_every_version_is_the_published_one_and_what_is_kept_is_not_pulled_again(run, tmp_path):
    api = Counting(run.api)
    versions = versions_of(api, tmp_path)

    for version in (0, 1, 1, 3, 0):
        assert (await versions.get(version)).state_root() == run.roots[version]

    # From nothing; from 0; held; from 1, the newest that is older; and 0 went when 3 came.
    assert api.plans == [(-1, 0), (0, 1), (1, 3), (-1, 0)]


async def test_version_that_does_not_exist_or_is_not_signed_is_refused(run, tmp_path):
    with pytest.raises(UnknownVersion):
        await versions_of(run.api, tmp_path).get(9)
    with pytest.raises(UnsignedManifest):
        await versions_of(run.api, tmp_path, keys=["0" * 64]).get(0)
