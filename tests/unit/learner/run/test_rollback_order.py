"""Going back by order: the next version holds what an earlier one held, once, whoever dies, and training goes on."""

import asyncio
import dataclasses
import logging

import numpy as np
import pytest

from heterorl.common.errors import Busy, InvalidRequest, NotReversible, StaleEpoch, UnknownVersion
from heterorl.common.identity.signing import new_key
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.fetcher import MAX_COPIES
from heterorl.common.pull.puller import Puller
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.compose import compose, negate
from heterorl.common.weights.payload import file_digest, max_file_bytes
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.coordinator.sites import audit
from heterorl.coordinator.versions.rollback_order import needed
from tests.support.learner_world import (
    LAYOUT,
    FragileApi,
    Killed,
    NumpyBackend,
    fill,
    learn,
    learner_config,
    open_coordinator,
)


class GentleBackend(NumpyBackend):
    """Moves a few weights by one unit in the last place: deltas of steps."""

    def train_step(self, groups, *, head_version, step):
        before = self.weights
        report = super().train_step(groups, head_version=head_version, step=step)
        bits = before.view(np.int32).copy()
        bits[step::16] += 1 << 16
        self.weights = bits.view(np.float32)
        return report


@pytest.fixture
async def core(tmp_path):
    coordinator = await open_coordinator(tmp_path, learner_lease_s=0.3)
    yield coordinator
    await coordinator.close()


async def manifest(core, version):
    return manifest_from_bytes((await core.get_signed_manifest(version=version)).data)


async def until_head(core, version):
    async for _ in core.watch_head(after_version=version - 1):
        break


async def trained(core, tmp_path, backend, **changes):
    """Train three versions."""
    config = learner_config(tmp_path, **changes)
    await asyncio.gather(learn(config, core, backend), fill(core, 6))
    return config


async def ordered(core):
    return (await core.database.run(_ordered), (await core.get_status()).head_version)


def _ordered(connection):
    from heterorl.coordinator.versions.rollback_order import ordered as read

    version = read(connection)
    return -1 if version is None else version


async def test_next_version_has_the_ordered_content_by_the_negated_delta(core, tmp_path):
    config = await trained(core, tmp_path, GentleBackend())
    before = [await manifest(core, version) for version in range(4)]

    assert await core.rollback(to_version=1, request_id="one") == 3
    status = await core.get_status()
    assert (status.rollback_to, status.is_rollback_refused) == (1, False)
    backend = GentleBackend()
    result = await learn(config, core, backend)

    after = await manifest(core, 4)
    assert (result.version, result.step) == (4, 3)
    assert await ordered(core) == (-1, 4)
    assert after.state_root == before[1].state_root != before[3].state_root
    assert after.chunk_digests == before[1].chunk_digests
    assert (after.parent_version, after.step) == (3, 3)
    deltas = {version: _delta(await manifest(core, version)) for version in (2, 3, 4)}
    files = [core.blobs.path(deltas[version]) for version in (2, 3)]
    shape = {"layout_id": LAYOUT.layout_id, "chunks": LAYOUT.chunks}
    compose(files, tmp_path / "merged", **shape)
    assert negate(tmp_path / "merged", tmp_path / "back", **shape).digest == deltas[4]
    assert file_digest(tmp_path / "back") == deltas[4]
    assert not backend.momentum.any()
    # Whoever used version 3 follows by that one delta.
    puller = Puller(api=core, spool=tmp_path / "in", layout=LAYOUT, clock=SystemClock())
    held = await puller.pull(held=None, want_version=3)
    pulled = await puller.pull(held=held, want_version=4)
    assert pulled.arena.state_root() == before[1].state_root


def _delta(manifest):
    (digest,) = [payload.digest for payload in manifest.payloads if payload.kind is PayloadKind.DELTA]
    return digest


async def test_order_reaches_a_learner_that_waits_for_groups_and_training_goes_on(core, tmp_path):
    backend = GentleBackend()
    config = learner_config(tmp_path, max_steps=3)
    learning = asyncio.create_task(learn(config, core, backend))
    await fill(core, 4)
    await until_head(core, 2)

    await core.rollback(to_version=0, request_id="one")
    await until_head(core, 3)
    back = await manifest(core, 3)
    await fill(core, 2, incarnation="c1946ac9")
    result = await learning

    assert back.state_root == (await manifest(core, 0)).state_root
    assert (result.step, result.version) == (3, 4)
    assert (await manifest(core, 4)).parent_version == 3
    status = await core.get_status()
    assert (status.ledger.consumed, status.ledger.pending, status.ledger.leased) == (6, 0, 0)


async def test_steps_without_a_version_are_undone_and_their_groups_trained_again(core, tmp_path):
    backend = GentleBackend()
    config = learner_config(tmp_path, steps_per_version=2, max_steps=4)
    learning = asyncio.create_task(learn(config, core, backend))
    stepped = asyncio.Event()
    loop = asyncio.get_running_loop()
    backend.on_step = lambda: loop.call_soon_threadsafe(stepped.set)
    # One step of the two of version 1.
    await fill(core, 2)
    await stepped.wait()

    await core.rollback(to_version=0, request_id="one")
    await until_head(core, 1)
    await fill(core, 6, incarnation="c1946ac9")
    await learning

    assert (await manifest(core, 1)).state_root == (await manifest(core, 0)).state_root
    status = await core.get_status()
    assert (status.ledger.consumed, status.head_version) == (8, 3)
    assert len(backend.trained) == 1 + 4
    assert backend.trained[0] in backend.trained[1:]


async def test_order_that_comes_during_the_last_step_is_carried_out_before_the_end(core, tmp_path):
    backend, loop = GentleBackend(), asyncio.get_running_loop()

    def order():
        if len(backend.reports) == 2:
            order = core.rollback(to_version=1, request_id="one")
            asyncio.run_coroutine_threadsafe(order, loop).result(30)

    backend.on_step = order
    result, _ = await asyncio.gather(learn(learner_config(tmp_path), core, backend), fill(core, 6))

    assert (result.step, result.version, result.is_finished) == (3, 4, True)
    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root
    assert await ordered(core) == (-1, 4)
    assert (await core.get_status()).is_draining


@pytest.mark.parametrize(
    "kill",
    [
        {"die_before": ("query_upload", 1)},
        {"die_after": ("upload_payload", 1)},
        {"die_before": ("publish_version", 1)},
        {"die_after": ("publish_version", 1)},
    ],
    ids=lambda kill: next(iter(kill)) + ":" + next(iter(kill.values()))[0],
)
async def test_order_is_carried_out_once_when_the_learner_dies(core, tmp_path, kill):
    config = await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=1, request_id="one")

    with pytest.raises(Killed):
        await learn(config, FragileApi(core, **kill), GentleBackend())
    await learn(config, core, GentleBackend())
    await learn(config, core, GentleBackend())

    assert await ordered(core) == (-1, 4)
    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root


@pytest.mark.parametrize("later", [-1, 2, 1], ids=["taken back", "replaced", "given again"])
async def test_order_that_was_taken_back_after_its_checkpoint_has_no_effect(core, tmp_path, later):
    config = await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=1, request_id="one")
    with pytest.raises(Killed):
        await learn(config, FragileApi(core, die_before=("publish_version", 1)), GentleBackend())
    await core.rollback(to_version=later, request_id="two")

    backend = GentleBackend()
    result = await learn(config, core, backend)

    roots = [(await manifest(core, version)).state_root for version in range(result.version + 1)]
    assert result.step == 3
    assert roots[4:] == ([] if later < 0 else [roots[later]])
    assert backend.momentum.any() == (later < 0), "only a rollback costs the optimizer"
    assert await ordered(core) == (-1, result.version)


async def test_order_of_a_version_whose_key_is_no_longer_trusted_ends_no_run(core, tmp_path, caplog):
    old, new = (new_key(tmp_path / name) for name in ("old", "new"))
    config = learner_config(tmp_path, max_steps=1)
    await asyncio.gather(learn(config, core, GentleBackend(), signer=old), fill(core, 2))
    later = config.model_copy(update={"max_steps": 2, "trusted_keys": (old.public_key,)})
    filling = fill(core, 2, incarnation="c1946ac9")
    await asyncio.gather(learn(later, core, GentleBackend(), signer=new), filling)
    await core.rollback(to_version=1, request_id="one")

    config = config.model_copy(update={"max_steps": 3})
    filling = fill(core, 2, incarnation="d1946ac9")
    result, _ = await asyncio.gather(learn(config, core, GentleBackend(), signer=new), filling)

    assert (result.step, result.version) == (3, 3)
    assert caplog.text.count("cannot go back to version 1 and trains on") == 1


@pytest.mark.parametrize("most", [1, 2])
async def test_more_steps_than_one_composition_takes_are_undone(core, tmp_path, monkeypatch, most):
    config = await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=0, request_id="one")
    # So it cannot be rebuilt.
    await core.database.run(lambda c: c.execute("DELETE FROM payloads WHERE kind = 'snapshot'"))
    monkeypatch.setattr("heterorl.learner.run.rollback.MAX_PAYLOADS", most)

    await learn(config, core, GentleBackend())

    assert (await manifest(core, 4)).state_root == (await manifest(core, 0)).state_root


async def test_version_is_rebuilt_where_steps_cannot_be_undone(core, tmp_path, monkeypatch):
    config = await trained(core, tmp_path, GentleBackend())
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise NotReversible("a RAW chunk")

    monkeypatch.setattr("heterorl.learner.run.rollback.negate", refuse)
    await core.rollback(to_version=1, request_id="one")

    await learn(config, core, GentleBackend())

    assert tried
    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root


async def test_steps_that_lead_elsewhere_are_noticed(core, tmp_path, monkeypatch):
    """What comes of undoing is compared with the manifest: a wrong sum is never published."""
    config = await trained(core, tmp_path, GentleBackend())
    rebuilt = []

    def forwards(path, target, **shape):
        result = negate(path, target.with_suffix(".twice"), **shape)
        data = target.with_suffix(".twice").read_bytes()
        target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        rebuilt.append(result)

    monkeypatch.setattr("heterorl.learner.run.rollback.negate", forwards)
    await core.rollback(to_version=1, request_id="one")

    await learn(config, core, GentleBackend())

    assert rebuilt
    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root


async def test_order_that_cannot_be_carried_out_is_said_and_training_goes_on(core, tmp_path, caplog):
    await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=1, request_id="one")

    class Forgetful:
        """Knows no way to or from version 1."""

        def __getattr__(self, name):
            return getattr(core, name)

        async def plan_pull(self, *, have_version, want_version, **options):
            if 1 in (have_version, want_version):
                raise UnknownVersion("deleted")
            return await core.plan_pull(have_version=have_version, want_version=want_version, **options)

    config = learner_config(tmp_path, max_steps=4)
    filling = asyncio.create_task(fill(core, 2, incarnation="c1946ac9"))
    with caplog.at_level(logging.ERROR):
        result = await learn(config, Forgetful(), GentleBackend())

    await filling
    assert (result.step, result.version) == (4, 4)
    assert caplog.text.count("cannot go back to version 1 and trains on") == 1
    # Operators see it, and it keeps no payloads.
    assert await ordered(core) == (1, 4)
    assert (await core.get_status()).is_rollback_refused
    assert not await core.database.run(needed)
    log = await core.database.run(audit.read)
    # The start has begun once its order is decided.
    assert [row.kind for row in log[-2:]] == ["rollback_order", "configuration"]
    assert log[-2].detail == "the learner cannot go back to version 1: its log says why"


async def test_order_that_cannot_be_carried_out_leaves_masters_without_open_steps(core, tmp_path):
    asked, backend = asyncio.Event(), GentleBackend()

    class Forgetful:
        """Knows no way to or from version 0."""

        def __getattr__(self, name):
            return getattr(core, name)

        async def plan_pull(self, *, have_version, want_version, **options):
            if 0 in (have_version, want_version):
                asked.set()
                raise UnknownVersion("deleted")
            return await core.plan_pull(have_version=have_version, want_version=want_version, **options)

    config = learner_config(tmp_path, max_steps=3, checkpoint_every_versions=100)
    learning = asyncio.create_task(learn(config, Forgetful(), backend))
    await fill(core, 4)
    await until_head(core, 2)
    before = backend.weights.copy()
    await core.rollback(to_version=0, request_id="one")
    await asked.wait()
    kept = []
    backend.on_step = lambda: kept.append(backend.weights.copy())
    await fill(core, 2, incarnation="c1946ac9")
    await learning

    # Rounded to bf16, as published, they would lack what the steps moved below its last place.
    assert np.array_equal(kept[0], before)
    assert (before.view(np.int32) & 0xFFFF).any()


class Broken:
    """A coordinator that has no way to version 1 until an operator repairs it."""

    def __init__(self, core):
        self.core, self.is_lost, self.loses_answer = core, True, False
        self.asked, self.refused = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name):
        return getattr(self.core, name)

    async def renew_lease(self, **values):
        grant = await self.core.renew_lease(**values)
        if self.loses_answer:
            self.loses_answer = False
            raise Busy("the answer is lost")
        return grant

    async def plan_pull(self, *, have_version, want_version, **options):
        if self.is_lost and 1 in (have_version, want_version):
            self.asked.set()
            if want_version == 1:
                # The last way that the learner tries.
                self.refused.set()
            raise UnknownVersion("deleted")
        return await self.core.plan_pull(have_version=have_version, want_version=want_version, **options)


async def test_order_is_tried_again_when_another_one_came_between(core, tmp_path, caplog):
    await trained(core, tmp_path, GentleBackend())
    config = learner_config(tmp_path, max_steps=4)

    api = Broken(core)
    learning = asyncio.create_task(learn(config, api, GentleBackend()))
    await core.rollback(to_version=1, request_id="one")
    await api.asked.wait()
    await core.rollback(to_version=2, request_id="two")
    await until_head(core, 4)
    assert caplog.text.count("cannot go back to version 1 and trains on") == 1
    api.is_lost = False
    # Before a renewal could see that no order is open.
    await core.rollback(to_version=1, request_id="three")
    await until_head(core, 5)
    await fill(core, 2, incarnation="c1946ac9")
    await learning

    roots = [(await manifest(core, version)).state_root for version in range(6)]
    assert roots[4:] == [roots[2], roots[1]]


@pytest.mark.parametrize("between", ["nothing", "taken back", "an answer is lost"])
async def test_refused_order_that_is_given_again_is_tried_again(core, tmp_path, caplog, between):
    await trained(core, tmp_path, GentleBackend())
    config = learner_config(tmp_path, max_steps=4)

    api = Broken(core)
    learning = asyncio.create_task(learn(config, api, GentleBackend()))
    await core.rollback(to_version=1, request_id="one")
    await api.refused.wait()
    api.is_lost = False
    api.loses_answer = between == "an answer is lost"
    if between == "taken back":
        # Before a renewal could see it.
        await core.rollback(to_version=-1, request_id="none")
    await core.rollback(to_version=1, request_id="two")
    await asyncio.wait_for(until_head(core, 4), 60)
    await fill(core, 2, incarnation="c1946ac9")
    await learning

    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root
    assert caplog.text.count("cannot go back to version 1 and trains on") == 1


async def test_orders_are_checked_replaced_taken_back_and_given_once(core, tmp_path):
    await trained(core, tmp_path, GentleBackend())
    for version in (4, 99):
        with pytest.raises(UnknownVersion):
            await core.rollback(to_version=version, request_id=f"v{version}")
    for version, request_id in ((1, ""), (-2, "x")):
        with pytest.raises(InvalidRequest):
            await core.rollback(to_version=version, request_id=request_id)
    assert await ordered(core) == (-1, 3)

    await core.rollback(to_version=1, request_id="one")
    await core.rollback(to_version=2, request_id="two")
    assert await ordered(core) == (2, 3)
    await core.rollback(to_version=-1, request_id="three")
    assert await ordered(core) == (-1, 3)
    # The second request's answer was lost and it comes again, after all of that.
    await core.rollback(to_version=-1, request_id="three")
    await core.rollback(to_version=1, request_id="four")
    await learn(learner_config(tmp_path), core, GentleBackend())
    await core.rollback(to_version=1, request_id="four")
    assert await ordered(core) == (-1, 4)


async def test_superseded_learner_carries_out_nothing(core, tmp_path):
    config = await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=1, request_id="one")

    class Late(FragileApi):
        """Another learner takes over just before this one publishes."""

        def __getattr__(self, name):
            if name == "publish_version":
                return self.superseded
            return super().__getattr__(name)

        async def superseded(self, request):
            from heterorl.learner.run.state_directory import read_incarnation
            from tests.support.learner_world import make_contract

            await core.acquire_lease(
                holder=config.holder,
                contract=make_contract(),
                request_id="other",
                incarnation=read_incarnation(config.state_dir),
            )
            return await core.publish_version(request)

    with pytest.raises(StaleEpoch):
        await learn(config, Late(core), GentleBackend())

    assert await ordered(core) == (1, 3)


class Crooked:
    """Answers the way back from version 1 with `payloads`, if any, or damages what lies on it; notes what is read."""

    def __init__(self, core, *, payloads=(), is_damaging=False):
        self._core, self._payloads, self.is_damaging = core, payloads, is_damaging
        self.read, self._damaged = [], set()

    def __getattr__(self, name):
        return getattr(self._core, name)

    async def plan_pull(self, *, have_version, **wanted):
        plan = await self._core.plan_pull(have_version=have_version, **wanted)
        if have_version == 1:
            self._damaged = {payload.digest for payload in plan.payloads} if self.is_damaging else set()
        return dataclasses.replace(plan, payloads=self._payloads) if self._payloads and have_version == 1 else plan

    async def read_payload(self, *, digest, **wanted):
        self.read.append(digest)
        async for frame in self._core.read_payload(digest=digest, **wanted):
            yield bytes(len(frame)) if digest in self._damaged else frame


async def test_way_back_fills_no_disk(core, tmp_path):
    """What is larger than a puller would fetch is not fetched for a way back either."""
    config = await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=1, request_id="one")
    names = [f"{number:064x}" for number in range(MAX_COPIES + 1)]
    size = max_file_bytes(LAYOUT.chunks)
    refs = [
        PayloadRef(kind=PayloadKind.DELTA, from_version=1, to_version=3, digest=name, num_bytes=size) for name in names
    ]
    api = Crooked(core, payloads=tuple(refs))

    await learn(config, api, GentleBackend())

    assert not set(api.read) & set(names)
    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root


async def test_payload_of_a_way_back_that_arrived_damaged_is_not_kept(core, tmp_path):
    config = await trained(core, tmp_path, GentleBackend())
    await core.rollback(to_version=1, request_id="one")

    await learn(config, Crooked(core, is_damaging=True), GentleBackend())

    assert (await manifest(core, 4)).state_root == (await manifest(core, 1)).state_root, "rebuilt"
    assert list((tmp_path / "learner" / "payloads" / "undo").iterdir()) == []


async def test_leftovers_of_an_order_go_with_it(core, tmp_path):
    """A process that died on the way left whole copies of the weights; the order was taken back meanwhile."""
    config = await trained(core, tmp_path, GentleBackend())
    payloads = tmp_path / "learner" / "payloads"
    (payloads / "undo").mkdir(exist_ok=True)
    left = [payloads / "undo" / ("f" * 64), payloads / "undo.merged", payloads / "undo.back"]
    for path in left:
        path.write_bytes(b"of an order")

    await learn(config, core, GentleBackend())

    assert [path for path in left if path.exists()] == []
