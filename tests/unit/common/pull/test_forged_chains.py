"""Who trusts keys uses what they signed and nothing else, whatever a plan shows beside the signed manifest."""

import dataclasses
import functools
import random

import pytest

from heterorl.common.errors import CorruptData, StateMismatch, WrongSignature
from heterorl.common.identity.signing import Trust, new_key
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import ManifestChain, Puller, TrustedPuller
from heterorl.common.types.policy import PlanKind, PullPlan, SignedManifest
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
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


def trusting(api, run, path, *, variant=""):
    return TrustedPuller(
        api=api,
        spool=path / "spool",
        layout=LAYOUT,
        backoff=Backoff(clock=SystemClock(), rng=random.Random(0)),
        trust=Trust([run.signer.public_key]),
        variant=variant,
    )


async def _forger(world, *, is_held):
    core, run, path = world
    held = await trusting(core, run, path / "honest").build(HEAD - 2) if is_held else None
    return Forger(core, path / "forged", target=HEAD, held=held), held


@pytest.mark.parametrize("variant", ["", "int8"])
@pytest.mark.parametrize("is_held", [False, True], ids=["fresh", "running"])
async def test_manifest_that_was_judged_is_the_one_that_is_applied(world, is_held, variant):
    _, run, path = world
    api, held = await _forger(world, is_held=is_held)

    with pytest.raises(StateMismatch, match=r"another version's manifest"):
        await trusting(api, run, path, variant=variant).build(HEAD, held=held)


async def test_way_is_answered_by_place_and_never_by_what_a_manifest_claims(world):
    """The target's manifest is the plan's last, also where the coordinator lists another one for its number."""
    core, _, _ = world
    api, _ = await _forger(world, is_held=False)
    signed = await core.get_signed_manifest(version=HEAD)
    way = ManifestChain(api=api, variant="")
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

    monkeypatch.setattr(ManifestChain, "begin", lambda self, plan: None)
    monkeypatch.setattr(ManifestChain, "manifests", forged)
    with pytest.raises(StateMismatch) as refused:
        await trusting(api, run, path).build(HEAD, held=held)
    assert "not have the manifest that was judged" in caplog.text + str(refused.value)


class SameForger(Forger):
    """Says of the caller's base model that it is version HEAD; shows a manifest that nobody signed for it."""

    async def get_signed_manifest(self, *, version, variant=""):
        signed = await self._inner.get_signed_manifest(version=version)
        forged = dataclasses.replace(manifest_from_bytes(signed.data), state_root=self.base.state_root())
        return SignedManifest(data=manifest_to_bytes(forged), signature=signed.signature)

    def same(self, signed, *, payloads, manifests):
        empty = {"kind": PlanKind.SAME, "target_version": HEAD, "reason": "", "signature": signed.signature}
        return PullPlan(payloads=payloads, manifests=manifests, **empty)


@pytest.fixture
def same(world):
    core, run, path = world
    api = SameForger(core, path / "forged", target=HEAD)
    api.base = run.arena.copy()
    api.base.chunk(0)[:] += 77
    trust = Trust([run.signer.public_key])

    async def admit(plan):
        trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)

    puller = Puller(api=api, spool=path / "spool", layout=LAYOUT, clock=SystemClock(), base=lambda: api.base)
    return api, functools.partial(puller.pull, held=None, want_version=HEAD, admit=admit)


async def test_base_model_is_no_version_by_a_plan_that_has_payloads(same, caplog):
    api, pull = same
    way = [dataclasses.replace(api.payloads[1], from_version=HEAD)]
    api.plan = lambda signed: api.same(signed, payloads=tuple(way), manifests=(signed.data,))

    with pytest.raises(StateMismatch, match="is held"):
        await pull()
    assert "is held, and has payloads" in caplog.text


async def test_base_model_is_judged_by_the_manifest_that_it_was_compared_with(same):
    """Whatever manifest such a plan carries itself: the base model's own needs the signature."""
    api, pull = same
    api.plan = lambda signed: api.same(signed, payloads=(), manifests=(signed.data,))

    with pytest.raises(WrongSignature):
        await pull()


async def test_base_model_is_compared_with_what_was_judged(same, monkeypatch, caplog):
    """The last line, where nothing is built: the plan's check is out of the way."""
    api, pull = same
    way = [dataclasses.replace(api.payloads[1], from_version=HEAD)]
    api.plan = lambda signed: api.same(signed, payloads=tuple(way), manifests=(signed.data,))
    monkeypatch.setattr("heterorl.common.pull.puller._check_plan", lambda plan, **_: None)
    monkeypatch.setattr(ManifestChain, "begin", lambda self, plan: None)

    with pytest.raises(CorruptData):
        await pull()
    assert "not have the manifest that was judged" in caplog.text
