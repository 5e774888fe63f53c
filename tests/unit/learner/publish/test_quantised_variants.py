"""Variants of a run: what is published of a version is its published weights with frozen scales, whoever dies when."""

import asyncio
import dataclasses
import io
import random
import sqlite3

import numpy as np
import pytest
from rich.console import Console

from heterorl.cli.verify_data_dir import verify_directory
from heterorl.common.errors import (
    ContractMismatch,
    InvalidRequest,
    PayloadMissing,
    StepConflict,
    UnknownVersion,
    UnsignedManifest,
    WrongSignature,
)
from heterorl.common.identity.signing import Trust, new_key
from heterorl.common.model.quantise import SCALE, quantise, variant_layout
from heterorl.common.process.backoff import Backoff
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.puller import Puller
from heterorl.common.types.policy import PayloadKind, PlanKind, VariantVersion
from heterorl.common.types.run import Registration
from heterorl.common.weights.arena import Arena, Layout, TensorSpec
from heterorl.common.wire.policy_messages import manifest_from_bytes, manifest_to_bytes
from heterorl.learner.publish.checkpoint_store import CheckpointStore
from heterorl.learner.publish.publisher import Publisher
from heterorl.learner.publish.quantised_variants import Variants
from heterorl.learner.publish.version_payloads import PublishedVersions
from heterorl.learner.run.resume import Resumption
from heterorl.learner.run.rollback import Rollback
from heterorl.learner.step_metrics import TrainingLog
from tests.support.learner_world import (
    FragileApi,
    Killed,
    NumpyBackend,
    fill,
    learn,
    learner_config,
    make_contract,
    open_coordinator,
    queued,
)
from tests.support.run import REPORT

NAMES = ("int8", "fp8_e4m3")


LAYOUT = Layout.build(
    [
        TensorSpec(name="a", dtype="bf16", shape=(64, 64)),
        TensorSpec(name="b", dtype="bf16", shape=(32,)),
        TensorSpec(name="tied", dtype="bf16", shape=(64, 64), alias_of="a"),
    ],
    chunk_elements=1500,
)


class SparseBackend(NumpyBackend):
    """Each step moves a few weights a little, and one so far that its row outgrows its scale."""

    layout = LAYOUT

    def __init__(self):
        super().__init__()
        self.weights = np.random.default_rng(7).standard_normal(64 * 64 + 32).astype(np.float32)

    def train_step(self, groups, *, head_version, step):
        rng = np.random.default_rng(groups[0].group.id.sequence)
        self.weights = self.weights.copy()
        self.weights[rng.integers(0, self.weights.size, 40)] *= np.float32(1.02)
        self.weights[rng.integers(0, 64 * 64)] += np.float32(5.0)
        return self._report(groups, head_version, step)

    def _report(self, groups, head_version, step):
        kept, self.weights = self.weights, np.zeros(96, np.float32)
        report = super().train_step(groups, head_version=head_version, step=step)
        self.weights, self.momentum = kept, np.zeros(96, np.float32)
        return report

    def store(self, arena):
        bits = (self.weights.view(np.int32) >> 16).astype(np.int16)
        arena.view("a")[...] = bits[:-32].reshape(64, 64)
        arena.view("b")[...] = bits[-32:]


class World:
    """A learner that publishes variants, from a fresh epoch on."""

    def __init__(self, core, directory, *, epoch, api=None, names=NAMES, signer=None, **options):
        self.core, api = core, api or core
        self.backend = SparseBackend()
        backoff = Backoff(clock=SystemClock(), rng=random.Random(0), base_s=1e-4, cap_s=1e-3)
        trust = Trust(() if signer is None else (signer.public_key,))
        store, training_log = CheckpointStore(directory / "checkpoints"), TrainingLog(directory)
        published = PublishedVersions(
            api=api, layout=LAYOUT, spool=directory / "payloads" / "incoming", backoff=backoff, trust=trust
        )
        shared = {"run_id": "run", "epoch": epoch, "directory": directory / "payloads"}
        variants = Variants(published, names=names, **shared)
        self.publisher = Publisher(
            api, layout=LAYOUT, store=store, training_log=training_log, signer=signer, variants=variants, backoff=backoff,
            snapshot_every_versions=options.get("snapshot_every_versions", 100),
            checkpoint_every_versions=options.get("checkpoint_every_versions", 1), **shared,
        )  # fmt: skip
        self.resumption = Resumption(
            backend=self.backend, publisher=self.publisher, published=published, state_dir=directory,
            adopt_without_optimizer=options.get("adopt_without_optimizer", False),
        )  # fmt: skip
        self.rollback = Rollback(resumption=self.resumption)
        self.step = 0

    @classmethod
    async def open(cls, core, directory, *, names=NAMES, **options):
        grant = await core.acquire_lease(
            holder="learner", contract=make_contract(LAYOUT), request_id=str(random.random()), variants=names
        )
        world = cls(core, directory, epoch=grant.epoch, names=names, **options)
        world.step = await world.rollback.resume(is_start=True)
        return world

    async def advance(self, count=1):
        for _ in range(count):
            self.step += 1
            self.backend.train_step([queued(self.step)], head_version=0, step=self.step)
            arena = await self.publisher.stage(self.backend)
            reports = [dataclasses.replace(REPORT, step=self.step)]
            await self.publisher.publish(arena, step=self.step, reports=reports, saved_by=self.backend)

    @property
    def head(self):
        return self.publisher.position.head_version


@pytest.fixture
async def core(tmp_path):
    opened = await open_coordinator(tmp_path)
    yield opened
    await opened.close()


async def pull(core, directory, variant, version, *, held=None):
    layout = variant_layout(LAYOUT, variant) if variant else LAYOUT
    puller = Puller(
        api=core, spool=directory / f"incoming-{variant}", layout=layout, clock=SystemClock(), variant=variant
    )
    return await puller.pull(held=held, want_version=version)


async def manifest_of(core, version, variant=""):
    return manifest_from_bytes((await core.get_signed_manifest(version=version, variant=variant)).data)


async def check_all(core, directory, versions, *, names=NAMES):
    """Each variant of each version is the version's own weights, quantised with the scales of the one before."""
    for name in names:
        scales = None
        for version in versions:
            base = (await pull(core, directory, "", version)).arena
            expected = Arena(variant_layout(LAYOUT, name))
            quantise(base, expected, name, frozen=scales)
            found = (await pull(core, directory, name, version)).arena
            assert found.state_root() == expected.state_root(), (name, version)
            assert (await manifest_of(core, version, name)).state_root == expected.state_root()
            scales = expected
    return scales


async def test_each_variant_of_a_version_is_its_published_weights_with_frozen_scales(core, tmp_path):
    world = await World.open(core, tmp_path)
    await world.advance(8)

    await check_all(core, tmp_path, range(9))

    for name in NAMES:
        first, last = [await manifest_of(core, version, name) for version in (0, 8)]
        assert [payload.kind for payload in first.payloads] == [PayloadKind.SNAPSHOT]
        assert (last.parent_version, last.step) == (7, 8)
        # 64 x 64 bytes, 64 scales of four and 32 kept values of two.
        assert last.full_bytes == 64 * 64 + 64 * 4 + 32 * 2
    # Each step made one row outgrow its scale; all others are as they were.
    scales = [(await pull(core, tmp_path, "int8", version)).arena.view("a" + SCALE).copy() for version in (0, 8)]
    assert 0 < np.count_nonzero(scales[0] != scales[1]) < 10
    # Damage in one variant gives a snapshot of the next version in each.
    plan = await core.plan_pull(have_version=-1, have_root="", want_version=8, variant="int8")
    await core.damage.put_aside(plan.payloads[0].digest, "its bytes on disk changed")
    await world.advance()
    assert (await pull(core, tmp_path, "int8", 9)).manifest.version == 9


async def test_any_lag_of_a_variant_is_pulled_to_the_same_root_by_chain_and_by_merged_deltas(tmp_path):
    core = await open_coordinator(tmp_path)
    world = await World.open(core, tmp_path)
    await world.advance(17)
    held = {(name, v): await pull(core, tmp_path, name, v) for name in NAMES for v in (0, 3, 4, 11)}
    chains = {key: await pull(core, tmp_path, key[0], 17, held=state) for key, state in held.items()}

    composing = asyncio.create_task(core.merger.run())
    core.merger.poke()
    await core.merger.settle()
    kinds = set()
    for (name, version), state in held.items():
        plan = await core.plan_pull(
            have_version=version, have_root=state.manifest.state_root, want_version=16, accept_merged=True, variant=name
        )
        kinds |= {payload.kind for payload in plan.payloads}
        merged = await pull(core, tmp_path, name, 17, held=state)
        assert merged.manifest.state_root == chains[name, version].manifest.state_root
        assert merged.arena.state_root() == merged.manifest.state_root
    composing.cancel()
    await core.close()

    assert PayloadKind.MERGED in kinds
    assert {span.variant for span in core.merges.spans} == {"", *NAMES}


async def test_restart_goes_on_with_the_scales_of_the_checkpoint_and_fetches_nothing(core, tmp_path):
    first = await World.open(core, tmp_path)
    await first.advance(3)
    api = FragileApi(core)

    second = await World.open(core, tmp_path, api=api)
    await second.advance(3)

    assert not [name for name in api.calls if name.startswith("read_payload")]
    assert second.head == 6
    for name in NAMES:
        kinds = [payload.kind for payload in (await manifest_of(core, 4, name)).payloads]
        assert kinds == [PayloadKind.DELTA]
    await check_all(core, tmp_path, range(7))


async def test_learner_without_its_disk_takes_the_scales_from_the_coordinator(core, tmp_path):
    first = await World.open(core, tmp_path / "a")
    await first.advance(3)
    second = await World.open(core, tmp_path / "b", adopt_without_optimizer=True)
    await second.advance(2)

    assert (await manifest_of(core, 4, "int8")).parent_version == 3
    await check_all(core, tmp_path, range(6))


def _points():
    """Every call of a publication that carries two variants: before it took effect and after."""
    for name, number in (("upload_payload", 1), ("upload_payload", 3), ("publish_version", 1)):
        for where in ("die_before", "die_after"):
            is_quick = (name, where) in (("upload_payload", "die_after"), ("publish_version", "die_before"))
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(where, name, number, id=f"{where}-{name}-{number}", marks=marks)


@pytest.mark.parametrize(("where", "name", "number"), list(_points()))
async def test_version_and_its_variants_appear_together_whenever_the_learner_dies(core, tmp_path, where, name, number):
    world = await World.open(core, tmp_path)
    await world.advance(2)
    fragile = FragileApi(core, **{where: (name, number)})
    # A new process that dies in its first publication.
    dying = await World.open(core, tmp_path, api=fragile)
    with pytest.raises(Killed):
        await dying.advance()

    status = await core.get_status()
    assert {entry.variant: entry.version for entry in status.variants} == dict.fromkeys(NAMES, status.head_version)
    again = await World.open(core, tmp_path)
    await again.advance(2)

    # Whatever it died of, the third step is in version 3 once, in every form.
    assert again.head == 5
    assert [(await manifest_of(core, version)).step for version in range(6)] == [0, 1, 2, 3, 4, 5]
    await check_all(core, tmp_path, range(6))


async def test_abandoned_versions_are_abandoned_in_every_variant(core, tmp_path):
    first = await World.open(core, tmp_path, checkpoint_every_versions=4)
    await first.advance(7)

    # The newest checkpoint is of version 4: 5 to 7 are abandoned.
    second = await World.open(core, tmp_path, checkpoint_every_versions=4)

    assert second.head == 8
    for name in NAMES:
        manifest = await manifest_of(core, 8, name)
        assert (manifest.parent_version, manifest.abandoned) == (4, range(5, 8))
        assert [payload.kind for payload in manifest.payloads] == [PayloadKind.SNAPSHOT]
        # Equal weights and equal scales are an equal state.
        assert manifest.state_root == (await manifest_of(core, 4, name)).state_root
        with pytest.raises(UnknownVersion):
            await pull(core, tmp_path, name, 6)
    await second.advance(2)
    await check_all(core, tmp_path, [0, 1, 2, 3, 4, 8, 9, 10])


async def test_an_order_to_go_back_holds_for_every_variant(core, tmp_path):
    world = await World.open(core, tmp_path)
    await world.advance(5)
    await core.rollback(to_version=2, request_id="r")

    await world.rollback.run()

    assert (await manifest_of(core, 6)).state_root == (await manifest_of(core, 2)).state_root
    assert [(await manifest_of(core, 6, name)).parent_version for name in NAMES] == [5, 5]
    await check_all(core, tmp_path, range(7))


async def test_variant_that_is_added_later_begins_at_once_and_may_pause(core, tmp_path):
    first = await World.open(core, tmp_path, names=())
    await first.advance(2)
    assert await core.get_signed_manifest(version=2)

    second = await World.open(core, tmp_path, names=("int8",))

    # The head again, so that samplers of the variant have something to generate with.
    assert second.head == 3
    assert (await manifest_of(core, 3)).state_root == (await manifest_of(core, 2)).state_root
    begun = await manifest_of(core, 3, "int8")
    assert (begun.parent_version, begun.parent_digest) == (-1, "")
    await second.advance(2)
    await check_all(core, tmp_path, range(3, 6), names=("int8",))
    third = await World.open(core, tmp_path, names=())
    await third.advance(2)
    fourth = await World.open(core, tmp_path, names=("int8",))
    await fourth.advance()
    assert (fourth.head, (await manifest_of(core, 8, "int8")).parent_version) == (9, -1)
    with pytest.raises(UnknownVersion, match="version 7 does not exist in variant int8"):
        await pull(core, tmp_path, "int8", 7)
    assert (await pull(core, tmp_path, "int8", 9)).manifest.parent_version == 8


async def test_variants_are_signed_and_another_key_is_refused(core, tmp_path):
    signer = new_key(tmp_path / "key")
    world = await World.open(core, tmp_path, signer=signer)
    await world.advance()

    signed = await core.get_signed_manifest(version=1, variant="int8")
    assert Trust([signer.public_key]).check(signed.data, signed.signature, version=1) == signer.public_key
    plan = await core.plan_pull(have_version=-1, have_root="", want_version=1, variant="int8")
    assert plan.signature == signed.signature
    other = new_key(tmp_path / "other")
    with pytest.raises(WrongSignature):
        Trust([other.public_key]).check(signed.data, signed.signature, version=1)


async def test_a_caller_of_one_variant_is_never_led_to_another(core, tmp_path):
    world = await World.open(core, tmp_path)
    await world.advance(2)
    base = await manifest_of(core, 1)

    plan = await core.plan_pull(have_version=1, have_root=base.state_root, want_version=2, variant="int8")

    # The root is that of version 1, but of another form of it: nothing starts there.
    assert plan.kind is PlanKind.SNAPSHOT
    assert manifest_from_bytes(plan.manifests[-1]).layout_id == variant_layout(LAYOUT, "int8").layout_id


async def test_same_step_with_another_variant_is_a_conflict(core, tmp_path):
    world = await World.open(core, tmp_path)
    requests = []
    publish = core.publish_version

    class Keeping(FragileApi):
        async def publish_version(self, request):
            requests.append(request)
            return await publish(request)

    second = await World.open(core, tmp_path, api=Keeping(core))
    await second.advance()
    assert world.head == 0

    assert await publish(requests[0]) == 1
    less = requests[0].__class__(
        **{name: getattr(requests[0], name) for name in requests[0].__slots__ if name != "variants"}
    )
    with pytest.raises(StepConflict):
        await publish(less)
    assert [entry.variant for entry in requests[0].variants] == list(NAMES)
    assert all(isinstance(entry, VariantVersion) for entry in requests[0].variants)


def _with(entry, **changes):
    """The same variant with other fields of its manifest."""
    manifest = dataclasses.replace(manifest_from_bytes(entry.manifest), **changes)
    return dataclasses.replace(entry, manifest=manifest_to_bytes(manifest))


def _moved(entry):
    payload = manifest_from_bytes(entry.manifest).payloads[0]
    return _with(entry, payloads=(dataclasses.replace(payload, from_version=0),))


WRONG = {
    "name": (lambda entry: dataclasses.replace(entry, variant="Int8"), "'Int8' is not 1 to 32"),
    "path": (lambda entry: dataclasses.replace(entry, variant="../x"), "is not 1 to 32"),
    "trained": (lambda entry: dataclasses.replace(entry, variant=""), "is not 1 to 32"),
    "repeated": (lambda entry: dataclasses.replace(entry, variant="fp8_e4m3"), "2 names"),
    "signature": (lambda entry: dataclasses.replace(entry, signature=b"123"), "signature: 3 bytes"),
    "step": (lambda entry: _with(entry, step=7), r"variants\[int8\].manifest.step: 7, expected 2"),
    "run": (lambda entry: _with(entry, run_id="other"), "run_id: 'other'"),
    "epoch": (lambda entry: _with(entry, epoch=9), "epoch: 9"),
    "version": (lambda entry: _with(entry, version=3), "version: 3, expected 2"),
    "parent": (lambda entry: _with(entry, parent_version=0), "parent_version: 0, expected 1"),
    "digest": (lambda entry: _with(entry, parent_digest="0" * 64), "parent_digest"),
    "layout": (lambda entry: _with(entry, layout_id="0" * 64), "layout_id"),
    "no payload": (lambda entry: _with(entry, payloads=()), "payloads: one of each kind"),
    "payload": (_moved, "does not lead to version 2"),
}


async def _held_request(core, directory, count):
    """The publication that would be the next after `count`."""
    requests = []

    class Holding(FragileApi):
        async def publish_version(self, request):
            requests.append(request)
            raise Killed

    world = await World.open(core, directory)
    await world.advance(count)
    with pytest.raises(Killed):
        await (await World.open(core, directory, api=Holding(core))).advance()
    return requests[0]


async def test_variant_that_does_not_fit_its_version_is_refused_with_the_version(core, tmp_path):
    request = await _held_request(core, tmp_path, 1)
    first, second = request.variants
    assert (first.variant, second.variant) == NAMES
    for name, (change, problem) in WRONG.items():
        with pytest.raises(InvalidRequest, match=problem):
            await core.publish_version(dataclasses.replace(request, variants=(change(first), second)))
        assert (await core.get_status()).head_version == 1, name
    payload = dataclasses.replace(manifest_from_bytes(first.manifest).payloads[0], digest="0" * 64)
    with pytest.raises(PayloadMissing):
        await core.publish_version(dataclasses.replace(request, variants=(_with(first, payloads=(payload,)), second)))
    with pytest.raises(InvalidRequest, match="9 names"):
        await core.acquire_lease(
            holder="learner", contract=make_contract(LAYOUT), request_id="many", variants=tuple("abcdefghi")
        )
    # A variant may be left out, and begins again with a snapshot only.
    assert await core.publish_version(dataclasses.replace(request, variants=(second,))) == 2
    with pytest.raises(UnknownVersion):
        await core.get_signed_manifest(version=2, variant="int8")


async def test_learner_goes_on_only_from_variants_that_its_key_signed(core, tmp_path):
    signer = new_key(tmp_path / "key")
    await (await World.open(core, tmp_path, signer=signer)).advance()
    await core.database.run(
        lambda connection: connection.execute("DELETE FROM signatures WHERE variant = 'int8' AND version = 1")
    )

    with pytest.raises(UnsignedManifest):
        await World.open(core, tmp_path, signer=signer)


async def test_variant_is_rebuilt_for_the_manifest_that_the_next_version_names(core, tmp_path, caplog, monkeypatch):
    """Of two versions that one key signed, the state of one is never continued under the other's name."""
    await (await World.open(core, tmp_path)).advance()
    # Without the checkpoint's scales the state must come from the coordinator.
    monkeypatch.setattr(Variants, "offer_scales", lambda self, scales: None)
    genuine = core.get_signed_manifest

    async def other(*, version, variant=""):
        signed = await genuine(version=version, variant=variant)
        if variant != "int8":
            return signed
        other = dataclasses.replace(manifest_from_bytes(signed.data), num_changed=7)
        return dataclasses.replace(signed, data=manifest_to_bytes(other))

    core.get_signed_manifest = other
    await World.open(core, tmp_path)

    assert "variant int8: version 1 is gone, the next one is a snapshot" in caplog.text
    assert "was rebuilt with another manifest than was shown" in caplog.text
    assert "variant fp8_e4m3: version 1 is gone" not in caplog.text


async def test_sampler_of_a_variant_that_nobody_publishes_is_told_what_there_is(core, tmp_path):
    await World.open(core, tmp_path, names=("int8",))
    await fill(core, 1, contract=make_contract(LAYOUT))
    registration = {
        "site": "eu-2", "incarnation": "i", "contract": make_contract(LAYOUT), "engine": "e", "dtype": "fp32",
        "max_delay_versions": 0,
    }  # fmt: skip
    await core.register(Registration(**registration, variant="int8"))
    with pytest.raises(
        ContractMismatch, match=r'variant: this node wants "fp8_e4m3", the learner publishes "", "int8"'
    ):
        await core.register(Registration(**registration, variant="fp8_e4m3"))
    sites = {site.site: site.variant for site in (await core.get_status()).sites}
    assert sites == {"eu-1": "", "eu-2": "int8"}


async def test_whole_learner_publishes_variants_by_its_configuration(core, tmp_path):

    config = learner_config(tmp_path, variants=("int8",), max_steps=2)
    result, _ = await asyncio.gather(
        learn(config, core, SparseBackend(), contract=make_contract(LAYOUT)),
        fill(core, 4, contract=make_contract(LAYOUT)),
    )

    assert result.is_finished
    await check_all(core, tmp_path, range(3), names=("int8",))
    status = (await core.get_status()).variants
    assert [(entry.variant, entry.version) for entry in status] == [("int8", 2)]
    assert status[0].snapshot_bytes or status[0].delta_bytes


def _audit(directory, **options):
    text = io.StringIO()
    options = {"keys": [], "is_replaying": True, **options}
    return verify_directory(
        directory / "coordinator", console=Console(file=text, width=200), **options
    ), text.getvalue()


def _change(directory, statement, *values):
    with sqlite3.connect(directory / "coordinator" / "coordinator.sqlite") as connection:
        assert connection.execute(statement, values).rowcount
    connection.close()


async def test_audit_covers_every_variant_and_finds_what_was_changed(tmp_path):
    core = await open_coordinator(tmp_path)
    signer = new_key(tmp_path / "key")
    for names, count in (((), 1), (NAMES, 5), (("int8",), 2), (NAMES, 2)):
        # Checkpoints are rare: versions are abandoned on the way, variants begin, pause and begin again.
        world = await World.open(core, tmp_path, names=names, signer=signer, checkpoint_every_versions=4)
        await world.advance(count)
    await core.close()
    code, text = _audit(tmp_path, keys=[signer.public_key])
    assert code == 0, text
    assert text.count("SOUND") == 3
    assert "versions in variant fp8_e4m3" in text

    row = "FROM variant_versions WHERE variant = 'int8' AND version = 5"
    _change(tmp_path, f"UPDATE variant_versions SET manifest = (SELECT CAST(manifest || x'0800' AS BLOB) {row})"
            " WHERE variant = 'int8' AND version = 5")  # fmt: skip
    code, text = _audit(tmp_path, is_replaying=False)
    assert code == 2
    assert "the manifest's bytes have another digest" in text
    _change(tmp_path, "DELETE FROM variant_versions WHERE variant = 'fp8_e4m3' AND version = 4")
    code, text = _audit(tmp_path, is_replaying=False)
    assert "follows version 4 at step 3, expected version -1" in text, text
