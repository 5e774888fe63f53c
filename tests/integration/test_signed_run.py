"""Signed versions through real sockets: a real coordinator that is honest, rewound, forked or forged."""

import asyncio
import base64
import contextlib
import dataclasses
import logging
import shutil
import sqlite3

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from heterorl.common.errors import InvalidRequest, StateMismatch, UnsignedManifest, WrongSignature
from heterorl.common.identity.signing import Trust, load_signer, new_key, signed_by
from heterorl.common.types.policy import PayloadKind, SignedManifest
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes, manifest_to_bytes
from heterorl.sampler.delay import FixedDelay
from heterorl.sampler.trust_record import RunReplaced
from tests.support.forging import Forger
from tests.support.learner_world import fill, learn, learner_config, rows
from tests.support.merging import LARGER, RandomRun, merging
from tests.support.policy_site import Counting, sampling, serving
from tests.support.run import Run


@pytest.fixture
def key(tmp_path):
    return new_key(tmp_path / "learner.key")


async def begin(client, tmp_path, signer, versions):
    run = Run(client, tmp_path)
    run.signer = signer
    await run.begin()
    for _ in range(versions):
        await run.publish()
    return run


def disk(data_dir, statement, *values):
    connection = sqlite3.connect(data_dir / "coordinator.sqlite")
    with connection:
        connection.execute(statement, values)
    connection.close()


async def test_signature_travels_beside_the_exact_bytes_and_every_version_is_used(tmp_path, key):
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 3)
        signed = await client.get_signed_manifest(version=2)
        assert (await client.get_status()).is_head_signed
        plan = await client.plan_pull(have_version=-1, have_root="", want_version=2)
        async with sampling(client, tmp_path / "site", [key.public_key]) as site:
            assert (await site.reach(2)).manifest.state_root == run.roots[2]
            await run.publish()
            assert (await site.reach(3)).manifest.state_root == run.roots[3]

    assert signed_by(signed.data, signed.signature, [key.public_key]) == key.public_key
    assert (plan.manifests[-1], plan.signature) == (signed.data, signed.signature)
    remembered = rows(tmp_path / "site" / "versions.jsonl")[-1]
    assert (remembered["version"], remembered["state_root"]) == (3, run.roots[3])
    assert remembered["signed_by"] == key.public_key


async def test_same_version_published_again_keeps_its_signature(tmp_path, key):
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 1)
        request = await run.prepare()
        assert [await client.publish_version(request) for _ in range(2)] == [1, 1]

        signed = await client.get_signed_manifest(version=1)
        run.head = 1
        with pytest.raises(InvalidRequest, match="signature: 63 bytes"):
            await run.publish(signature=b"x" * 63)

    assert signed == SignedManifest(data=request.manifest, signature=request.signature)


@pytest.mark.parametrize("is_signed", [False, True], ids=["unsigned", "by a stranger"])
async def test_version_of_nobody_trusted_is_refused_before_a_byte_is_fetched(tmp_path, key, is_signed):
    signer = new_key(tmp_path / "stranger.key") if is_signed else None
    async with serving(tmp_path / "data") as client:
        await begin(client, tmp_path, signer, 2)
        async with sampling(client, tmp_path / "site", [key.public_key]) as site:
            line = await site.refusal()

            assert site.take(-1) is None
            assert site.api.read == []
    expected = WrongSignature if is_signed else UnsignedManifest
    assert expected.action in line
    assert (tmp_path / "site" / "versions.jsonl").read_bytes() == b""


async def test_run_without_keys_is_used_with_one_warning(tmp_path, caplog):
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, None, 1)
        async with sampling(client, tmp_path / "site", []) as site:
            for _ in range(2):
                await run.publish()
                await site.reach(run.head)
        assert not (await client.get_status()).is_head_signed

    assert {row["signed_by"] for row in rows(tmp_path / "site" / "versions.jsonl")} == {"unsigned"}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in warnings if "trusted_keys is empty" in line]) == 1


async def test_forged_manifest_is_refused_and_the_old_weights_stay(tmp_path, key):
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 2)
        async with sampling(client, tmp_path / "site", [key.public_key]) as site:
            await site.reach(1)
    # The attacker owns the coordinator's disk, so also the digest that it states.
    async with serving(tmp_path / "data") as client:
        run.api = client
        await run.publish()
    forged = manifest_to_bytes(
        dataclasses.replace(manifest_from_bytes(await _stored(tmp_path / "data", 2)), num_changed=7)
    )
    disk(
        tmp_path / "data",
        "UPDATE versions SET manifest = ?, manifest_digest = ? WHERE version = 2",
        forged,
        manifest_digest(forged),
    )
    async with serving(tmp_path / "data") as client, sampling(client, tmp_path / "site", [key.public_key]) as site:
        assert "the signature of version 2 is of none of the 1 trusted keys" in await site.refusal()
        assert site.api.read == []


async def _stored(data_dir, version):
    connection = sqlite3.connect(data_dir / "coordinator.sqlite")
    (row,) = connection.execute("SELECT manifest FROM versions WHERE version = ?", (version,))
    connection.close()
    return row[0]


async def test_coordinator_that_was_rewound_is_refused_until_it_is_itself_again(tmp_path, key):
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 2)
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    async with serving(tmp_path / "data") as client:
        run.api = client
        await run.publish()
        await run.publish()
        async with sampling(client, tmp_path / "site", [key.public_key]) as site:
            await site.reach(3)

    async with serving(tmp_path / "backup") as client, sampling(client, tmp_path / "site", [key.public_key]) as site:
        error = await site.end()
        assert isinstance(error, RunReplaced)
        assert "the head is version 1, but version 3 was seen before" in str(error)
        assert site.take(-1) is None
        assert site.api.read == []
    async with serving(tmp_path / "data") as client, sampling(client, tmp_path / "site", [key.public_key]) as site:
        assert (await site.reach(3)).version == 3


@pytest.mark.parametrize("keys", ["trusted", "none"])
async def test_second_history_of_the_same_learner_is_refused(tmp_path, key, keys):
    """Every signature is right: only what the site remembers tells that this is another history."""
    trusted = [key.public_key] if keys == "trusted" else []
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 2)
    shutil.copytree(tmp_path / "data", tmp_path / "fork")
    async with serving(tmp_path / "data") as client:
        run.api = client
        await run.publish()
        async with sampling(client, tmp_path / "site", trusted) as site:
            await site.reach(2)

    async with serving(tmp_path / "fork") as client:
        other = Run(client, tmp_path / "fork")
        other.signer, other.epoch, other.head, other.arena = key, run.epoch, 1, run.arena
        # Three versions on: another version 2 is an ancestor of the head.
        await other.publish(snapshot=True)
        await other.publish()
        await other.publish(snapshot=True)
        async with sampling(client, tmp_path / "site", trusted) as site:
            error = await site.end()
            assert isinstance(error, RunReplaced)
            assert "does not descend from the version 2 that was used before" in str(error)
            assert site.take(-1) is None
            assert site.api.read == []
        async with sampling(client, tmp_path / "new-site", trusted) as site:
            assert (await site.reach(4)).version == 4, "a site that used nothing has nothing to hold against it"


async def test_signed_record_of_a_rollback_is_followed(tmp_path, key, caplog):
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 4)
        async with (
            sampling(client, tmp_path / "running", [key.public_key]) as running,
            sampling(client, tmp_path / "stopped", [key.public_key]) as stopped,
        ):
            await running.reach(3)
            await stopped.reach(3)
            # The learner goes back to version 1: versions 2 and 3 are abandoned.
        async with sampling(client, tmp_path / "running", [key.public_key]) as running:
            await running.reach(3)
            await run.publish(lineage_version=1, snapshot=True)
            assert (await running.reach(4)).manifest.abandoned == range(2, 4)
        await run.publish()
        await run.publish()
        async with sampling(client, tmp_path / "stopped", [key.public_key]) as stopped:
            assert (await stopped.reach(6)).manifest.state_root == run.roots[6]

    lines = [record.getMessage() for record in caplog.records]
    assert "the learner abandoned versions 2 to 3, the sampler goes on with version 4" in lines
    assert "the learner abandoned versions 2 to 3, the sampler goes on with version 6" in lines


async def test_delay_model_does_not_lead_a_restarted_site_back(tmp_path, key):
    late = FixedDelay(value=3, unit="versions")
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 5)
        async with sampling(client, tmp_path / "site", [key.public_key]) as site:
            await site.reach(4)
        # The head is 4, so a delay of 3 versions would take version 1.
        async with sampling(client, tmp_path / "site", [key.public_key], delay=late) as site:
            assert (await site.reach(0)).version == 4
        # Nor is it stuck when what it used is abandoned meanwhile: version 5 follows version 2, and the delay says 2.
        await run.publish(lineage_version=2, snapshot=True)
        async with sampling(client, tmp_path / "site", [key.public_key], delay=late) as site:
            assert (await site.reach(0)).version == 5


async def test_key_is_exchanged_while_the_run_goes_on(tmp_path, key):
    new = new_key(tmp_path / "new.key")
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 2)
        both = [key.public_key, new.public_key]
        async with sampling(client, tmp_path / "site", both) as site:
            await site.reach(1)
            run.signer = new
            await run.publish()
            await site.reach(2)
        # The old key is gone: what it signed earlier is vouched for by the new one's digests.
        await run.publish()
        async with sampling(client, tmp_path / "site", [new.public_key]) as site:
            assert (await site.reach(3)).version == 3
        async with sampling(client, tmp_path / "late", [key.public_key]) as late:
            assert WrongSignature.action in await late.refusal()


async def test_learner_signs_resumes_and_refuses_a_head_of_somebody_else(tmp_path, key):
    async with serving(tmp_path / "data") as client:
        filling = asyncio.create_task(fill(client, 6))
        await learn(learner_config(tmp_path, max_steps=1), client, signer=key)
        stranger = new_key(tmp_path / "stranger.key")
        with pytest.raises(WrongSignature, match="version 1"):
            await learn(learner_config(tmp_path), client, signer=stranger)
        # A learner that lost its disk would take these weights as its own.
        with pytest.raises(WrongSignature, match="version 1"):
            await learn(learner_config(tmp_path / "elsewhere"), client, signer=stranger)

        # A key is exchanged at the learner by trusting the one before.
        config = learner_config(tmp_path, max_steps=2, trusted_keys=(key.public_key,), signing_key=tmp_path / "x")
        result = await learn(config, client, signer=stranger)
        assert result.version == 2
        by = [await client.get_signed_manifest(version=version) for version in range(3)]
        keys = [key.public_key, stranger.public_key]
        assert [signed_by(one.data, one.signature, keys) for one in by] == [keys[0], keys[0], keys[1]]

        unsigned = await learn(learner_config(tmp_path), client)
        assert unsigned.version == 3
        with pytest.raises(UnsignedManifest, match="version 3"):
            await learn(learner_config(tmp_path, max_steps=4), client, signer=key)
        await filling


class Lying(Counting):
    """An api that shows the signed manifest of version 0 for every version, or takes signatures out of plans."""

    def __init__(self, inner, *, about):
        super().__init__(inner)
        self._about = about

    async def get_signed_manifest(self, *, version, variant):
        shown = 0 if self._about == "manifests" else version
        return await self._inner.get_signed_manifest(version=shown, variant=variant)

    async def plan_pull(self, **wanted):
        plan = await super().plan_pull(**wanted)
        return dataclasses.replace(plan, signature=b"") if self._about == "plans" else plan


@pytest.mark.parametrize(
    ("about", "error"),
    [("manifests", (StateMismatch, "version 1 names version 0")), ("plans", (UnsignedManifest, "version 1"))],
)
async def test_learner_without_its_disk_refuses_weights_that_are_not_proven(tmp_path, key, about, error):
    async with serving(tmp_path / "data") as client:
        filling = asyncio.create_task(fill(client, 2))
        await learn(learner_config(tmp_path, max_steps=1), client, signer=key)
        await filling
        api = Lying(client, about=about)
        with pytest.raises(error[0], match=error[1]):
            await learn(
                learner_config(tmp_path / "elsewhere", max_steps=2, adopt_without_optimizer=True), api, signer=key
            )

    assert api.read == []


@pytest.mark.parametrize("has_history", [False, True], ids=["fresh", "restarted"])
async def test_weights_of_the_coordinators_own_beside_a_signed_manifest_are_not_used(tmp_path, key, has_history):
    record = tmp_path / "site" / "versions.jsonl"
    async with serving(tmp_path / "data") as client:
        run = await begin(client, tmp_path, key, 2)
        if has_history:
            async with sampling(client, tmp_path / "site", [key.public_key]) as site:
                await site.reach(1)
        await run.publish()
        before = record.read_bytes() if has_history else b""
        forger = Forger(client, tmp_path / "forged", target=2)
        async with sampling(forger, tmp_path / "site", [key.public_key]) as site:
            await _said(site, "version 2 is not usable")
            assert site.take(-1) is None
        assert record.read_bytes() == before
        async with sampling(client, tmp_path / "site", [key.public_key]) as site:
            assert (await site.reach(2)).manifest.state_root == run.roots[2]


async def _said(site, words):
    while words not in await site.refusal():
        pass


@contextlib.asynccontextmanager
async def left_behind(tmp_path, key):
    """A signed run at version 9 with merged deltas, and a site that stopped at version 0."""
    async with merging(tmp_path) as core:
        run = RandomRun(core, tmp_path)
        run.signer = key
        await run.begin()
        await run.publish()
        async with sampling(core, tmp_path / "site", [key.public_key], layout=LARGER) as site:
            await site.reach(0)
        while run.head < 9:
            await run.publish()
        await core.merger.settle()
        yield core, run


async def test_merged_deltas_are_used_on_the_signature_of_the_version_they_lead_to(tmp_path, key):
    async with left_behind(tmp_path, key) as (core, run):
        async with sampling(core, tmp_path / "site", [key.public_key], layout=LARGER) as site:
            staged = await site.reach(9)

    assert PayloadKind.MERGED in site.api.planned
    assert staged.arena.state_root() == run.roots[9]
    remembered = rows(tmp_path / "site" / "versions.jsonl")[-1]
    assert (remembered["version"], remembered["signed_by"]) == (9, key.public_key)


@pytest.mark.parametrize("by", ["nobody", "a stranger", "another version"])
async def test_merged_delta_to_a_version_that_nobody_trusted_signed_is_not_fetched(tmp_path, key, by):
    async with left_behind(tmp_path, key) as (core, _):
        signed = await core.get_signed_manifest(version=9)
        others = {
            "nobody": b"",
            "a stranger": new_key(tmp_path / "stranger.key").sign(signed.data),
            "another version": (await core.get_signed_manifest(version=8)).signature,
        }

        def replace(store):
            store.execute("UPDATE signatures SET signature = ? WHERE version = 9", (others[by],))

        await core.database.run(replace)
        async with sampling(core, tmp_path / "site", [key.public_key], layout=LARGER) as site:
            assert "trusted_keys" in await site.refusal()

            assert PayloadKind.MERGED in site.api.planned
            assert site.api.read == []
            assert site.take(-1) is None


async def test_no_line_and_no_file_holds_the_private_key(tmp_path, key, caplog):
    pem = (tmp_path / "learner.key").read_bytes()
    private = load_pem_private_key(pem, password=None)
    raw = private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    der = private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    secrets = [raw, raw.hex().encode(), base64.b64encode(raw).rstrip(b"="), base64.b64encode(der), repr(raw).encode()]
    assert base64.b64encode(der) in pem, "the forms looked for are those that a leak would have"
    with caplog.at_level(logging.DEBUG):
        async with serving(tmp_path / "data") as client:
            filling = asyncio.create_task(fill(client, 2))
            signer = load_signer(tmp_path / "learner.key")
            await learn(learner_config(tmp_path, max_steps=1), client, signer=signer)
            await filling
            with pytest.raises(WrongSignature) as refused:
                Trust([new_key(tmp_path / "other").public_key]).check(b"x", signer.sign(b"x"), version=0)

    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("learner.key", "other")]
    texts = [record.getMessage().encode() + repr(record.__dict__).encode() for record in caplog.records]
    texts += [str(refused.value).encode(), repr(signer).encode(), *(path.read_bytes() for path in written)]
    assert len(texts) > 10
    assert [text for text in texts if any(secret in text for secret in secrets)] == []
    public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    assert signer.public_key == f"ed25519:{public}"
