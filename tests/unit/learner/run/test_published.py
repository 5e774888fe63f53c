"""What the learner believes of its own past: weights and manifest of a version are of one history, or are not used."""

import dataclasses
import random

import pytest

from heterorl.common.errors import StateMismatch
from heterorl.common.identity.signing import Trust, new_key
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.learner.publish.version_payloads import PublishedVersions
from tests.support.clock import ManualClock
from tests.support.forging import Forger
from tests.support.run import LAYOUT, Run


@pytest.fixture
async def world(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    run.signer = new_key(tmp_path / "learner.key")
    await run.begin()
    for _ in range(3):
        await run.publish()
    yield core, run, tmp_path
    await core.close()


def published(api, run, path):
    return PublishedVersions(
        api=api,
        layout=LAYOUT,
        spool=path / "spool",
        backoff=Backoff(clock=SystemClock(), rng=random.Random(0)),
        trust=Trust([run.signer.public_key]),
    )


async def test_weights_are_rebuilt_for_the_manifest_that_the_next_version_names(world):
    core, run, path = world
    own = published(core, run, path)
    data = await own.manifest(2)
    assert (await own.rebuild(data)).state_root() == run.roots[2]

    # As after a coordinator was rewound and the learner went on: two versions 2, both signed by the one key.
    other = manifest_to_bytes(dataclasses.replace(manifest_from_bytes(data), num_changed=7))
    with pytest.raises(StateMismatch, match="another manifest"):
        await own.rebuild(other)


async def test_weights_that_nobody_signed_are_not_rebuilt_beside_a_signed_manifest(world):
    core, run, path = world
    api = Forger(core, path / "forged", target=2)
    own = published(api, run, path)
    with pytest.raises(StateMismatch):
        await own.rebuild(await own.manifest(2))
