"""The next step computes while a version is published: what that may change, and what nothing may."""

import asyncio
import dataclasses
import errno
import os
import random
import threading

import numpy as np
import pytest

from heterorl.common.errors import DiskFull, GroupNotAvailable, OperatorError, StaleEpoch
from heterorl.common.generation.inference_engine import ScoredText
from heterorl.common.wire.policy_messages import manifest_from_bytes
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.evaluate import Evaluation
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.publish import publisher
from heterorl.learner.run.state_directory import read_incarnation
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.model import Canary
from tests.support.learner_world import (
    FragileApi,
    Killed,
    NumpyBackend,
    fill,
    head_root,
    learn,
    learner_config,
    make_contract,
    open_coordinator,
    rows,
)
from tests.support.limits import WAIT_S
from tests.support.training import SAMPLING, tiny_model

STEPS = 3
QUEUE = 2 * STEPS


class Moment:
    """Version 1 is under way while step 2 computes: step 2 ends only when `end` is called."""

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.backend = NumpyBackend()
        self.backend.on_step = self._step

    def _step(self):
        if len(self.backend.reports) == 1:
            self.has_begun.set()
            assert self.may_end.wait(WAIT_S)

    async def begun(self):
        assert await asyncio.to_thread(self.has_begun.wait, WAIT_S)

    def end(self):
        self.may_end.set()


class Gated(FragileApi):
    """A coordinator's api with one call that waits for the test, and one that dies once step 2 has begun."""

    def __init__(self, core, moment, *, wait_at=None, **points):
        super().__init__(core, **points)
        self.moment, self.wait_at = moment, wait_at
        self.is_reached, self.proceed = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name in ("stream_groups", "watch_head", "read_payload"):
            return call

        async def gated(*args, **kwargs):
            point = (name, self.calls.count(name) + 1)
            if point == self.wait_at:
                self.is_reached.set()
                await self.proceed.wait()
            if point in (self.die_before, self.die_after):
                await self.moment.begun()
            try:
                return await call(*args, **kwargs)
            except Killed:
                self.moment.end()
                raise

        return gated


@pytest.fixture
async def core(tmp_path):
    coordinator = await open_coordinator(tmp_path, learner_lease_s=0.3)
    yield coordinator
    await coordinator.close()


async def uninterrupted(tmp_path, **changes):
    core = await open_coordinator(tmp_path / "reference")
    backend = NumpyBackend()
    await asyncio.gather(learn(learner_config(tmp_path / "reference", **changes), core, backend), fill(core, QUEUE))
    root, reports = await head_root(core), await core.list_steps(after_step=0, limit=10)
    await core.close()
    # Times are of the machine, not of the run.
    own = {"times": None, "published_time": 0.0, "policy_age_p50_s": 0.0}
    return root, [dataclasses.replace(report, **own) for report in reports]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """State root of the head after a run that nothing disturbs."""
    root, _ = asyncio.run(uninterrupted(tmp_path_factory.mktemp("reference")))
    return root


def sequences(backend):
    return [[group_id.sequence for group_id in ids] for ids in backend.trained]


async def manifest(core, version):
    return manifest_from_bytes((await core.get_signed_manifest(version=version)).data)


# ---- what is gained


async def test_step_computes_while_the_version_before_is_committed_and_one_version_is_under_way(core, tmp_path):
    moment = Moment()
    api = Gated(core, moment, wait_at=("publish_version", 2))
    learning = asyncio.create_task(learn(learner_config(tmp_path), api, moment.backend))
    await fill(core, QUEUE)
    await api.is_reached.wait()

    await moment.begun()
    assert (await core.get_status()).head_version == 0, "step 2 computes and version 1 is not committed"
    moment.end()
    # Step 2 has ended, and waits: with one more draft there would be more than two arenas.
    assert "abandon_groups" not in api.calls
    assert api.calls.count("upload_payload") == 2
    api.proceed.set()

    assert (await learning).is_finished
    assert api.calls.count("publish_version") == 1 + STEPS


async def test_steps_that_end_the_run_do_not_end_the_version_under_way(core, tmp_path):
    moment = Moment()
    moment.end()
    moment.backend.not_finite_steps = {2, 3}
    api = Gated(core, moment, wait_at=("publish_version", 2))
    learning = asyncio.create_task(learn(learner_config(tmp_path, max_rejected_steps=2), api, moment.backend))
    await fill(core, QUEUE)
    await api.is_reached.wait()
    await api.wait_for("abandon_groups", 2)
    api.proceed.set()

    with pytest.raises(OperatorError, match="2 steps in a row"):
        await learning
    assert (await core.get_status()).head_version == 1


class Noting:
    """An evaluator that notes the versions that it was given."""

    def __init__(self):
        self.versions = []

    def evaluate(self, _arena, version):
        self.versions.append(version)
        return Evaluation(version=version, accuracy=0.5, num_prompts=1, num_completions=1, num_errors=0, seconds=1.0)


async def test_version_that_is_never_published_has_no_evaluation(tmp_path):
    """Version 1 ends the run while the step of version 2 computes."""
    core = await open_coordinator(tmp_path, max_versions=1)
    moment, evaluator = Moment(), Noting()
    api = Gated(core, moment, wait_at=("publish_version", 2))
    config = learner_config(tmp_path, evaluation={"every_versions": 1})
    learning = asyncio.create_task(learn(config, api, moment.backend, evaluator=evaluator))
    await fill(core, QUEUE)
    await api.is_reached.wait()
    await moment.begun()
    api.proceed.set()
    moment.end()

    assert (await learning).version == 1
    assert evaluator.versions == [0, 1, 2]
    assert [row["version"] for row in rows(config.state_dir / "evaluations.jsonl")] == [0, 1]
    await core.close()


async def test_without_overlap_a_step_waits_for_the_commit(core, tmp_path):
    moment = Moment()
    api = Gated(core, moment, wait_at=("publish_version", 2))
    config = learner_config(tmp_path, overlap_publication=False)
    learning = asyncio.create_task(learn(config, api, moment.backend))
    await fill(core, QUEUE)
    await api.is_reached.wait()
    await api.wait_for("renew_lease", api.answers.count("renew_lease") + 1)

    assert not moment.has_begun.is_set()
    moment.end()
    api.proceed.set()

    assert (await learning).is_finished


async def test_reports_and_weights_are_those_of_a_learner_that_waits(tmp_path):
    """Staleness counts from the version that a step builds on, also while it is under way."""
    overlapped, straight = (
        await uninterrupted(tmp_path / "a"),
        await uninterrupted(tmp_path / "b", overlap_publication=False),
    )

    assert overlapped == straight
    assert [report.staleness_max for report in straight[1]] == [0, 1, 2]


# ---- crashes

LINES = [
    ("encode", "", 2),
    ("checkpoint", "", 2),
    ("half a checkpoint", "", 2),
    # Each payload is asked about before it is sent and after it.
    *[(when, "query_upload", number) for when in ("before", "after") for number in (3, 4)],
    *[(when, "upload_payload", 2) for when in ("before", "after")],
    *[(when, "publish_version", 2) for when in ("before", "after")],
]


@pytest.mark.parametrize(("when", "method", "number"), LINES)
async def test_kill_at_any_line_while_a_step_computes_changes_no_bit(
    core, tmp_path, expected, monkeypatch, when, method, number
):
    moment, points = Moment(), {}
    if method:
        points[f"die_{when}"] = (method, number)
    elif when == "encode":
        honest, encoded = publisher.encode_version, []

        def encode(*args, **kwargs):
            encoded.append(None)
            if len(encoded) == number:
                _die(moment)
            return honest(*args, **kwargs)

        monkeypatch.setattr(publisher, "encode_version", encode)
    else:
        saves = []

        def save(directory):
            saves.append(None)
            if len(saves) == number:
                if when.startswith("half"):
                    (directory / "weights.npy").write_bytes(b"half")
                _die(moment)

        moment.backend.on_save = save
    filling = asyncio.create_task(fill(core, QUEUE))
    with pytest.raises(Killed):
        await learn(learner_config(tmp_path), Gated(core, moment, **points), moment.backend)
    monkeypatch.undo()
    assert len(moment.backend.trained) == 2, "step 2 was under way"

    result = await learn(learner_config(tmp_path), core)

    await filling
    status = await core.get_status()
    assert result.is_finished
    assert await head_root(core) == expected
    assert (status.ledger.consumed, status.ledger.pending, status.ledger.leased) == (QUEUE, 0, 0)
    assert status.ledger.is_balanced
    assert [row["version"] for row in rows(tmp_path / "learner" / "versions.jsonl")] == [0, 1, 2, 3]


def _die(moment):
    assert moment.has_begun.wait(WAIT_S)
    moment.end()
    raise Killed


@pytest.mark.parametrize("seed", range(6))
async def test_any_row_of_kills_changes_no_bit(core, tmp_path, expected, seed):
    chooser = random.Random(seed)
    filling = asyncio.create_task(fill(core, QUEUE))
    methods = ("query_upload", "upload_payload", "publish_version", "stream_groups.item", "get_step", "renew_lease")
    for _ in range(6):
        point = {f"die_{chooser.choice(['before', 'after'])}": (chooser.choice(methods), chooser.randint(1, 3))}
        try:
            if (await learn(learner_config(tmp_path), FragileApi(core, **point))).is_finished:
                break
        except Killed:
            continue

    await learn(learner_config(tmp_path), core)

    await filling
    assert await head_root(core) == expected
    assert (await core.get_status()).ledger.consumed == QUEUE


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_crash_abandons_the_versions_since_the_last_checkpoint_and_no_others(tmp_path, lost):
    """A checkpoint at every third version: of versions 4, 5 and 6 the last has one again."""
    core = await open_coordinator(tmp_path)
    config = learner_config(tmp_path, max_steps=9, checkpoint_every_versions=3)
    filling = asyncio.create_task(fill(core, 18))
    with pytest.raises(Killed):
        # Version 0 is the first call; the answer for version 3 + lost is the last thing that it hears.
        await learn(config, FragileApi(core, die_after=("publish_version", 4 + lost)))
    await filling
    head = (await core.get_status()).head_version

    with pytest.raises(Killed):
        await learn(config, FragileApi(core, die_before=("stream_groups", 1)))
    abandoned = await core.database.run(
        lambda connection: [row[0] for row in connection.execute("SELECT version FROM versions WHERE is_abandoned")]
    )

    assert head == 3 + lost
    assert abandoned == ([] if lost == 3 else list(range(4, 4 + lost)))
    await core.close()


# ---- refusals, orders, other learners, full disks


async def test_refused_version_undoes_the_step_beside_it_and_its_groups_are_trained_once(core, tmp_path, expected):
    moment = Moment()

    class Refusing(FragileApi):
        def __getattr__(self, name):
            call = super().__getattr__(name)
            if name != "publish_version":
                return call

            async def publish_version(request):
                if manifest_from_bytes(request.manifest).version == 1 and not moment.may_end.is_set():
                    await moment.begun()
                    moment.end()
                    raise GroupNotAvailable("1 groups are not available")
                return await call(request)

            return publish_version

    result, _ = await asyncio.gather(learn(learner_config(tmp_path), Refusing(core), moment.backend), fill(core, QUEUE))

    status = await core.get_status()
    assert (result.step, result.version) == (STEPS, STEPS)
    assert await head_root(core) == expected
    assert sequences(moment.backend) == [[1, 2], [3, 4], [1, 2], [3, 4], [5, 6]]
    assert (status.ledger.consumed, status.ledger.leased) == (QUEUE, 0)
    assert [row["step"] for row in rows(tmp_path / "learner" / "steps.jsonl")] == [1, 2, 3]


async def test_order_waits_for_the_version_under_way_and_is_carried_out_after_it(core, tmp_path):
    moment = Moment()
    api = Gated(core, moment, wait_at=("publish_version", 2))
    learning = asyncio.create_task(learn(learner_config(tmp_path), api, moment.backend))
    await fill(core, 2)
    await api.is_reached.wait()
    await core.rollback(to_version=0, request_id="one")
    await api.wait_for("renew_lease", api.answers.count("renew_lease") + 2)
    assert (await core.get_status()).head_version == 0

    api.proceed.set()
    moment.end()
    async for _ in core.watch_head(after_version=1):
        break
    await fill(core, 4, incarnation="c1946ac9")
    result = await learning

    assert (await manifest(core, 1)).state_root != (await manifest(core, 0)).state_root
    assert (await manifest(core, 2)).state_root == (await manifest(core, 0)).state_root
    status = await core.get_status()
    assert (result.step, result.version) == (STEPS, STEPS + 1)
    assert (status.ledger.consumed, status.ledger.pending, status.ledger.leased) == (6, 0, 0)


async def test_order_that_comes_while_both_are_under_way_leaves_no_step_without_a_version(core, tmp_path):
    moment = Moment()
    api = Gated(core, moment, wait_at=("publish_version", 2))
    learning = asyncio.create_task(learn(learner_config(tmp_path, max_steps=4), api, moment.backend))
    await fill(core, 4)
    await api.is_reached.wait()
    await moment.begun()
    await core.rollback(to_version=0, request_id="one")
    await api.wait_for("renew_lease", api.answers.count("renew_lease") + 2)

    moment.end()
    api.proceed.set()
    async for _ in core.watch_head(after_version=2):
        break
    await fill(core, 4, incarnation="c1946ac9")
    result = await learning

    # Steps 1 and 2 became versions, then came the order's, which has the state of version 0.
    assert (await manifest(core, 3)).state_root == (await manifest(core, 0)).state_root
    status = await core.get_status()
    assert (result.step, result.version) == (4, 5)
    assert (status.ledger.consumed, status.ledger.pending, status.ledger.leased) == (8, 0, 0)
    assert [sorted(step) for step in sequences(moment.backend)] == [[1, 2], [3, 4]] * 2


async def test_superseded_learner_ends_though_a_step_computes_and_nothing_of_it_has_an_effect(core, tmp_path):
    moment = Moment()
    api = Gated(core, moment, wait_at=("publish_version", 2))
    learning = asyncio.create_task(learn(learner_config(tmp_path), api, moment.backend))
    await fill(core, QUEUE)
    await api.is_reached.wait()
    await moment.begun()
    grant = await core.acquire_lease(
        holder="learner",
        contract=make_contract(),
        request_id="takeover",
        incarnation=read_incarnation(tmp_path / "learner"),
    )
    api.proceed.set()
    moment.end()

    with pytest.raises(StaleEpoch):
        await learning
    status = await core.get_status()
    assert (status.head_version, status.epoch) == (0, grant.epoch)
    assert (status.ledger.consumed, status.ledger.pending) == (0, QUEUE)


async def test_full_disk_ends_the_learner_though_a_step_computes(core, tmp_path, expected):
    moment, saves = Moment(), []

    def refuse(directory):
        saves.append(directory)
        if len(saves) == 2:
            assert moment.has_begun.wait(WAIT_S)
            moment.end()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    moment.backend.on_save = refuse
    filling = asyncio.create_task(fill(core, QUEUE))

    with pytest.raises(DiskFull):
        await learn(learner_config(tmp_path), core, moment.backend)

    assert (await core.get_status()).head_version == 0, "checkpoint, then publish"
    await learn(learner_config(tmp_path), core)
    await filling
    assert await head_root(core) == expected


async def test_stopped_learner_waits_for_its_step_and_says_what_is_in_no_version(core, tmp_path):
    moment, stop = Moment(), asyncio.Event()
    api = Gated(core, moment, wait_at=("query_upload", 3))
    learning = asyncio.create_task(learn(learner_config(tmp_path), api, moment.backend, stop=stop))
    await fill(core, QUEUE)
    await api.is_reached.wait()
    await moment.begun()

    stop.set()
    await api.wait_for("renew_lease", api.answers.count("renew_lease") + 1)
    assert not learning.done(), "a thread cannot be stopped"
    moment.end()

    result = await learning
    assert (
        str(result) == "stopped at step 0, version 0; 1 step after it not yet published: the groups return to the queue"
    )
    assert (await learn(learner_config(tmp_path), core)).is_finished


# ---- the real backend


def torch_backend(tmp_path, **changes):
    path = tmp_path / "model"
    if not path.exists():
        model = tiny_model(seed=3)
        model.config.save_pretrained(path)
        model.save_pretrained(path)
    config = TorchBackendConfig(lr=1e-3, threads=1, **changes)
    return TorchBackend(model_dir=path, config=config, loss=GepoConfig(), sampling=SAMPLING)


class NotingCanaries(FragileApi):
    """A coordinator's api that keeps the canaries of versions."""

    def __init__(self, core):
        super().__init__(core)
        self.canaries = []

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name != "publish_version":
            return call

        async def publish_version(request):
            self.canaries.append(request.canary)
            return await call(request)

        return publish_version


@pytest.mark.parametrize("forward_weights", ["masters", pytest.param("published", marks=pytest.mark.slow)])
async def test_weights_and_canary_are_those_of_a_learner_that_waits(tmp_path, forward_weights):
    """Nothing that is published reads the model while a step computes, and no step reads an arena that is rewritten."""
    found = {}
    for overlap in (False, True):
        directory = tmp_path / str(overlap)
        backend = torch_backend(tmp_path, forward_weights=forward_weights)
        texts = [ScoredText(prompt=np.array([1, 2], np.int32), completion=np.array([3, 4, 5], np.int32))]
        canary = Canary(backend.torch_model, texts, temperature=1.0)
        contract = make_contract(backend.layout)
        core = await open_coordinator(directory)
        api = NotingCanaries(core)
        config = learner_config(directory, max_steps=6, overlap_publication=overlap)
        await asyncio.gather(
            learn(config, api, backend, contract=contract, canary=canary), fill(core, 12, contract=contract)
        )
        roots = [(await manifest(core, version)).state_root for version in range(7)]
        found[overlap] = (roots, api.canaries)
        await core.close()

    assert len(set(found[False][0])) == len(set(found[False][1])) == 7
    assert found[True] == found[False]
