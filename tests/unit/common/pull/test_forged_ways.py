"""Who trusts keys uses what they signed and nothing else, whatever a plan shows beside the signed manifest."""

import dataclasses
import random

import pytest

from heterorl.common.errors import StateMismatch
from heterorl.common.identity.signing import new_key
from heterorl.common.identity.trust import Trust
from heterorl.common.process.clock import SystemClock
from heterorl.common.process.patience import Patience
from heterorl.common.pull.trusted import TrustedPuller
from heterorl.common.pull.way import Way
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.forging import Forger
from tests.support.run import LAYOUT, Run

HEAD = 3


@pytest.fixture
async def world(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    run.signer = new_key(tmp_path / "learner.key")
    await run.begin()
    for _ in range(HEAD + 1):
        await run.publish()
    yield core, run, tmp_path
    await core.close()


def trusting(api, run, path, *, flavour=""):
    return TrustedPuller(
        api=api,
        spool=path / "spool",
        layout=LAYOUT,
        patience=Patience(clock=SystemClock(), rng=random.Random(0)),
        trust=Trust([run.signer.public_key]),
        flavour=flavour,
    )


async def _forger(world, *, is_held):
    core, run, path = world
    held = await trusting(core, run, path / "honest").pull(HEAD - 2) if is_held else None
    return Forger(core, path / "forged", target=HEAD, held=held), held


@pytest.mark.parametrize("flavour", ["", "int8"])
@pytest.mark.parametrize("is_held", [False, True], ids=["fresh", "running"])
async def test_manifest_that_was_judged_is_the_one_that_is_applied(world, is_held, flavour):
    _, run, path = world
    api, held = await _forger(world, is_held=is_held)

    with pytest.raises(StateMismatch, match=r"another version's manifest"):
        await trusting(api, run, path, flavour=flavour).pull(HEAD, held=held)


async def test_way_is_answered_by_place_and_never_by_what_a_manifest_claims(world):
    """The target's manifest is the plan's last, also where the coordinator lists another one for its number."""
    core, _, _ = world
    api, _ = await _forger(world, is_held=False)
    signed = await core.get_signed_manifest(version=HEAD)
    way = Way(api=api, flavour="")
    plan = dataclasses.replace(api.way(signed), manifests=(signed.data,))
    way.begin(plan)
    await way.list(HEAD - 1, HEAD)

    assert await way.manifests(plan) == (api.manifests[0], signed.data)


@pytest.mark.parametrize("is_held", [False, True], ids=["fresh", "running"])
async def test_what_was_built_is_compared_with_what_was_judged(world, monkeypatch, caplog, is_held):
    """The last line: whatever lets another manifest in on the way, it does not come out as the judged version."""
    _, run, path = world
    api, held = await _forger(world, is_held=is_held)

    async def forged(self, plan):
        return api.manifests

    monkeypatch.setattr(Way, "begin", lambda self, plan: None)
    monkeypatch.setattr(Way, "manifests", forged)
    with pytest.raises(StateMismatch) as refused:
        await trusting(api, run, path).pull(HEAD, held=held)
    assert "not the manifest that was judged" in caplog.text + str(refused.value)
