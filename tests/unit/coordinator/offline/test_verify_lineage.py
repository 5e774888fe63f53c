"""A history checked offline: what is sound passes, each kind of damage is found and named."""

import dataclasses
import errno
import io
import os
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc

import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.cli.verify_data_dir import verify_directory
from heterorl.common.errors import ConfigError, CorruptStore, OperatorError
from heterorl.common.identity.signing import new_key
from heterorl.common.process.clock import SystemClock
from heterorl.common.types.policy import PayloadKind
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes, manifest_to_bytes
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.offline import history as history_module
from heterorl.coordinator.offline.history import read_histories
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.versions.chain import Chain
from tests.support.merging import keeping, published
from tests.support.run import Run

pytestmark = [pytest.mark.sqlite, pytest.mark.files]


def read_rows(directory):
    with read_histories(directory) as histories:
        return list(histories[0].versions())


class Recorded:
    """A finished run with versions 0 to 6: 3 is abandoned by 4, which is a snapshot; 6 has a snapshot beside."""

    def __init__(self, directory, signer):
        self.data, self.signer, self.key = directory / "data", signer, signer.public_key

    async def record(self, directory):
        core = await Coordinator.open(CoordinatorConfig(data_dir=self.data), SystemClock())
        run = Run(core, directory)
        run.signer = self.signer
        await run.begin()
        for _ in range(4):
            await run.publish()
        await run.publish(lineage_version=2, snapshot=True)
        await run.publish()
        await run.publish()
        await core.close()
        return self

    async def record_false(self, directory):
        """A learner that states another state than it uploads, and signs that."""
        self.data.mkdir(parents=True)
        core = await Coordinator.open(CoordinatorConfig(data_dir=self.data), SystemClock())
        run = Run(core, directory)
        run.signer = self.signer
        await run.begin()
        await run.publish()
        request = await run.prepare()
        honest = manifest_from_bytes(request.manifest)
        # What the learner states is one more than what it uploaded.
        run.arena.chunk(0)[:] += 1
        lie = dataclasses.replace(honest, chunk_digests=run.arena.digests(), state_root=run.arena.state_root())
        data = manifest_to_bytes(lie)
        await core.publish_version(dataclasses.replace(request, manifest=data, signature=self.signer.sign(data)))
        await core.close()
        return self

    def verify(self, *, keys=None, replay=True):
        text = io.StringIO()
        code = verify_directory(
            self.data,
            keys=[self.key] if keys is None else keys,
            is_replaying=replay,
            console=Console(file=text, width=200),
        )
        return code, text.getvalue()

    def change(self, statement, *values):
        """What somebody with access to the disk can do."""
        connection = sqlite3.connect(self.data / "coordinator.sqlite")
        with connection:
            connection.execute(statement, values)
        connection.close()

    def manifest(self, version):
        return read_rows(self.data)[version].manifest

    def payload(self, version, kind):
        (found,) = (p for p in manifest_from_bytes(self.manifest(version)).payloads if p.kind is kind)
        return self.data / "blobs" / found.digest[:2] / found.digest


@pytest.fixture
async def recorded(tmp_path):
    return await Recorded(tmp_path, new_key(tmp_path / "key")).record(tmp_path)


def files(directory):
    return {
        path.relative_to(directory): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def cells(text, ending):
    """Rows of a printed table whose last cell is `ending`."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return [row for row in rows if row[-1] == ending]


def test_sound_history_passes_and_nothing_of_it_is_touched(recorded):
    before = files(recorded.data)

    code, text = recorded.verify()

    assert code == 0, text
    assert "SOUND: run run, 7 versions, head 6" in text
    assert "FAULTY" not in text
    # 7 payloads: one for each version.
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in text.splitlines() if "│" in line}
    assert (rows["signatures"], rows["states rebuilt"], rows["payloads by digest"]) == ("7", "7", "7")
    assert files(recorded.data) == before


def test_manifests_are_read_one_at_a_time(recorded):
    head = manifest_from_bytes(recorded.manifest(6))
    data = manifest_to_bytes(dataclasses.replace(head, chunk_digests=(b"d" * 16,) * 10_000))
    for version in range(7, 57):
        recorded.change(
            "INSERT INTO versions SELECT ?1, 'step-' || ?1, content, epoch, ?2, manifest_digest, state_root, published,"
            " bytes_full, bytes_last, changed_fraction, is_abandoned FROM versions WHERE version = 6",
            version,
            data,
        )

    tracemalloc.start()
    try:
        code, text = recorded.verify(keys=[], replay=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert code == 2
    assert "57 versions" in text
    # Bytes, message and digests of one such manifest take 1.5 MB.
    assert peak < 4_000_000


def test_what_was_not_asked_for_is_said_not_to_be_checked(recorded):
    code, text = recorded.verify(keys=[], replay=False)

    assert code == 0
    assert "no --key given" in text
    assert "no --replay" in text


@pytest.mark.parametrize("position", [0, 5, 40, -1])
def test_flipped_byte_in_a_manifest_is_found(recorded, position):
    data = bytearray(recorded.manifest(2))
    data[position] ^= 4
    recorded.change("UPDATE versions SET manifest = ? WHERE version = 2", bytes(data))

    code, text = recorded.verify(keys=[], replay=False)

    assert code == 2
    assert "another digest than when it was published" in text
    assert "names another version 2 as its parent" in text
    assert "FAULTY" in text


def test_manifest_forged_with_its_digest_is_found_by_its_children_and_its_signature(recorded):
    for version in (2, 6):
        forged = dataclasses.replace(manifest_from_bytes(recorded.manifest(version)), step=99)
        data = manifest_to_bytes(forged)
        statement = "UPDATE versions SET manifest = ?, manifest_digest = ? WHERE version = ?"
        recorded.change(statement, data, manifest_digest(data), version)

    _, without = recorded.verify(keys=[], replay=False)
    code, text = recorded.verify(replay=False)

    assert code == 2
    # Version 6 has no child: only its signature tells.
    assert "6" not in [line.split("│")[1].strip() for line in without.splitlines() if "│" in line]
    assert sorted(line.split("│")[1].strip() for line in text.splitlines() if "none of the given keys" in line) == [
        "2",
        "6",
    ]


@pytest.mark.parametrize(("version", "kind"), [(1, PayloadKind.DELTA), (4, PayloadKind.SNAPSHOT)])
def test_flipped_byte_in_a_payload_is_found(recorded, version, kind):
    path = recorded.payload(version, kind)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    code, text = recorded.verify(replay=False)

    assert code == 2
    assert f"{kind.value} {path.name[:12]} has other bytes" in text


def test_missing_and_short_payloads_are_found_and_what_follows_is_not_called_rebuilt(recorded):
    recorded.payload(1, PayloadKind.DELTA).unlink()
    cut = recorded.payload(5, PayloadKind.DELTA)
    cut.write_bytes(cut.read_bytes()[:-1])

    code, text = recorded.verify()

    assert code == 2
    assert "is not stored" in text
    assert "bytes, not" in text
    assert "version 1, which it starts from, could not be rebuilt" in text
    assert "version 5, which it starts from, could not be rebuilt" in text


async def test_payload_that_leads_to_another_state_is_found_by_replay_alone(recorded, tmp_path):
    """All digests agree, and still the weights are not those that the manifest states: only a replay can tell."""
    other = await Recorded(tmp_path / "other", recorded.signer).record_false(tmp_path)

    assert other.verify(replay=False)[0] == 0
    code, text = other.verify()

    assert code == 2
    assert "leads to another chunk 0 than the manifest states" in text


def test_missing_version_is_found(recorded):
    recorded.change("DELETE FROM versions WHERE version = 1")

    code, text = recorded.verify(keys=[], replay=False)

    assert code == 2
    assert cells(text, "is missing") == [["1", "numbers are dense", "is missing"]]
    assert "its parent, version 1, is missing" in text


def test_missing_head_of_history_is_found(recorded):
    recorded.change("DELETE FROM versions WHERE version = 0")
    assert recorded.verify(keys=[], replay=False)[0] == 2
    recorded.change("DELETE FROM versions")
    code, text = recorded.verify(keys=[], replay=False)
    assert code == 2
    assert "there is no version, but there are payloads, steps or trained groups" in text
    recorded.change("DELETE FROM payloads")
    assert recorded.verify(keys=[], replay=False)[0] == 2
    recorded.change("DELETE FROM steps")
    recorded.change("INSERT INTO groups VALUES (1, 's', 'i', 1, 'd', 'consumed', '', 1, 0, 9, 0, 1, NULL)")
    assert recorded.verify(keys=[], replay=False)[0] == 2
    recorded.change("DELETE FROM groups")
    assert recorded.verify(keys=[], replay=False)[0] == 0


async def test_run_whose_learner_has_published_nothing_yet_is_sound(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path, run_id="new"), SystemClock())
    await core.close()

    result = CliRunner().invoke(app, ["verify-lineage", str(tmp_path)])

    assert result.exit_code == 0, result.exception
    assert "SOUND: run new, 0 versions; none is published yet" in result.output


def test_swapped_signatures_are_found(recorded):
    for version, other in ((1, -2), (2, 1), (-2, 2)):
        recorded.change("UPDATE signatures SET version = ? WHERE version = ?", other, version)

    code, text = recorded.verify(replay=False)

    assert code == 2
    assert text.count("none of the given keys") == 2
    assert recorded.verify(keys=[], replay=False)[0] == 0, "no other check looks at signatures"


def test_removed_signature_and_another_key_are_found(recorded, tmp_path):
    recorded.change("DELETE FROM signatures WHERE version = 3")
    stranger = new_key(tmp_path / "stranger").public_key

    assert "is not signed" in recorded.verify(replay=False)[1]
    code, text = recorded.verify(keys=[stranger], replay=False)
    assert code == 2
    assert text.count("none of the given keys") == 6
    assert recorded.verify(keys=[stranger, recorded.key], replay=False)[1].count("none of the given keys") == 0


def test_fork_is_found_where_two_versions_follow_the_same_one(recorded):
    # The store serves version 3 again, which version 4 abandoned: two histories from version 2.
    recorded.change("UPDATE versions SET is_abandoned = 0 WHERE version = 3")
    code, text = recorded.verify(replay=False)
    assert code == 2
    assert "is served, although version 4 abandoned it" in text

    recorded.change("UPDATE versions SET is_abandoned = 1 WHERE version IN (3, 5)")
    assert "is marked as abandoned, and no manifest says so" in recorded.verify(replay=False)[1]


def test_fork_is_found_where_a_signed_version_follows_an_abandoned_one(recorded):
    """The learner's key itself signed two histories: every digest and signature is right."""
    six = manifest_from_bytes(recorded.manifest(6))
    forged = dataclasses.replace(six, parent_version=3, parent_digest=manifest_digest(recorded.manifest(3)))
    data = manifest_to_bytes(forged)
    statement = "UPDATE versions SET manifest = ?, manifest_digest = ? WHERE version = 6"
    recorded.change(statement, data, manifest_digest(data))
    recorded.change("UPDATE signatures SET signature = ? WHERE version = 6", recorded.signer.sign(data))

    code, text = recorded.verify(replay=False)

    assert code == 2
    assert "follows version 3, which version 4 had abandoned: two histories" in text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epoch": 7}, "the epoch is 7, expected 1"),
        ({"run_id": "other"}, "the run is other, expected run"),
        ({"state_root": "0" * 64}, "the state root is 000"),
        ({"parent_version": -1, "parent_digest": ""}, "names no parent and is not the first"),
        ({"parent_version": 9}, "names version 9 as its parent"),
        ({"num_elements": 41}, "the sizes of version 6 do not add up"),
        ({"num_elements": 36}, "has other sizes than the versions before"),
        ({"chunk_digests": ()}, "the sizes of version 6 do not add up"),
        ({"num_elements": 1 << 40, "full_bytes": 1 << 41}, "the sizes of version 6 do not add up"),
    ],
)
def test_head_that_contradicts_its_row_is_found(recorded, changes, problem):
    data = manifest_to_bytes(dataclasses.replace(manifest_from_bytes(recorded.manifest(6)), **changes))
    recorded.change(
        "UPDATE versions SET manifest = ?, manifest_digest = ? WHERE version = 6", data, manifest_digest(data)
    )

    code, text = recorded.verify()

    assert code == 2
    assert problem in text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"to_version": 5}, "leads elsewhere"),
        ({"from_version": 4}, "leads elsewhere"),
        ({"from_version": -1, "kind": PayloadKind.SNAPSHOT}, "the payload starts from"),
        ({"digest": "../" * 21 + "x"}, "not a manifest: payload.digest"),
        ({"digest": "0" * 64}, "is not stored"),
    ],
)
def test_head_that_names_a_wrong_payload_is_found(recorded, changes, problem):
    head = manifest_from_bytes(recorded.manifest(6))
    data = manifest_to_bytes(dataclasses.replace(head, payloads=(dataclasses.replace(head.payloads[0], **changes),)))
    recorded.change(
        "UPDATE versions SET manifest = ?, manifest_digest = ? WHERE version = 6", data, manifest_digest(data)
    )

    code, text = recorded.verify(keys=[])

    assert code == 2
    assert problem in text


def test_version_without_payloads_is_found(recorded):
    data = manifest_to_bytes(dataclasses.replace(manifest_from_bytes(recorded.manifest(6)), payloads=()))
    recorded.change(
        "UPDATE versions SET manifest = ?, manifest_digest = ? WHERE version = 6", data, manifest_digest(data)
    )

    code, text = recorded.verify(keys=[], replay=False)

    assert code == 2
    assert cells(text, "names no payload that leads to it") == [
        ["6", "payloads by digest", "names no payload that leads to it"]
    ]


def test_epoch_that_goes_back_is_found(recorded):
    data = manifest_to_bytes(dataclasses.replace(manifest_from_bytes(recorded.manifest(6)), epoch=0))
    statement = "UPDATE versions SET manifest = ?, manifest_digest = ?, epoch = 0 WHERE version = 6"
    recorded.change(statement, data, manifest_digest(data))

    code, text = recorded.verify(keys=[], replay=False)

    assert code == 2
    assert "its epoch 0 is before its parent's, 1" in text


@pytest.mark.process
def test_store_in_use_is_refused_and_a_missing_one_is_named(recorded, tmp_path):
    code = (
        "import sys, sqlite3\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA locking_mode=EXCLUSIVE'); c.execute('PRAGMA journal_mode=WAL')\n"
        "c.execute(\"INSERT INTO meta VALUES ('x', 'y')\")\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(recorded.data / "coordinator.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"ready\n"
        with pytest.raises(OperatorError, match="in use.*make a backup"):
            read_rows(recorded.data)
        holder.stdin.close()
    with pytest.raises(OperatorError, match="data_dir"):
        read_rows(tmp_path / "nothing")


async def test_store_of_a_killed_coordinator_is_read_with_its_log(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "live"), SystemClock())
    run = Run(core, tmp_path)
    await run.begin()
    for _ in range(3):
        await run.publish()
    # What a kill leaves: the log is not folded in. A copy, for this process goes on.
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    await core.close()
    before = files(tmp_path / "killed")
    assert any(path.name.endswith("-wal") and data for path, (data, _) in before.items())

    assert [row.version for row in read_rows(tmp_path / "killed")] == [0, 1, 2]
    assert files(tmp_path / "killed") == before


def test_no_room_for_a_copy_of_a_killed_coordinators_store_names_the_place_of_copies(tmp_path, monkeypatch):
    for name in (history_module.STORE_FILE, f"{history_module.STORE_FILE}-wal"):
        (tmp_path / name).write_bytes(b"x" * 50)

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(history_module.shutil, "copyfile", full)

    with pytest.raises(OperatorError, match=r"no room for a copy of .*, 100 bytes with its log \(set TMPDIR to"):
        read_rows(tmp_path)


def test_version_without_a_signature_is_found_where_keys_are_given(recorded):
    recorded.change("DELETE FROM signatures")

    assert recorded.verify(keys=[], replay=False)[0] == 0
    assert recorded.verify(replay=False)[1].count("is not signed") == 7


def test_store_of_another_schema_is_refused_with_what_to_do(recorded):
    recorded.change("PRAGMA user_version = 7")

    with pytest.raises(CorruptStore, match="has schema 7.*heterorl export"):
        recorded.verify(replay=False)


def test_ruined_store_is_one_typed_error(recorded):
    path = recorded.data / "coordinator.sqlite"
    data = bytearray(path.read_bytes())
    data[100:] = os.urandom(len(data) - 100)
    path.write_bytes(data)

    with pytest.raises(CorruptStore):
        read_rows(recorded.data)


def test_command_ends_with_0_or_2(recorded, monkeypatch):
    arguments = ["verify-lineage", str(recorded.data), "--key", recorded.key]
    assert CliRunner().invoke(app, arguments).exit_code == 0

    recorded.change("DELETE FROM versions WHERE version = 2")

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "FAULTY" in result.output


@pytest.mark.parametrize("key", ["foo", "ed25519:00", "/keys/learner.key"])
def test_key_that_is_none_is_refused_also_of_a_run_without_signatures(recorded, key):
    recorded.change("DELETE FROM signatures")

    with pytest.raises(ConfigError, match="--key: .* is not a public key as `heterorl keys show` prints it"):
        CliRunner().invoke(app, ["verify-lineage", str(recorded.data), "--key", key], catch_exceptions=False)


def test_faults_beyond_the_table_are_counted(recorded, monkeypatch):
    monkeypatch.setattr("heterorl.cli.verify_data_dir.MAX_SHOWN", 3)
    recorded.change("DELETE FROM signatures")

    text = recorded.verify(replay=False)[1]

    assert "4 more" in text
    assert "7 faults" in text


def test_lock_bytes_are_those_of_the_file_format():
    # https://sqlite.org/src/file/src/os.h: PENDING_BYTE 0x40000000, SHARED_FIRST two after it, 510 bytes.
    assert (history_module._SHARED_LOCK_BYTE - 0x40000000, history_module._SHARED_LOCK_BYTES) == (2, 510)


async def test_history_of_which_payloads_were_deleted_is_sound_and_the_rest_is_rebuilt(tmp_path):
    async with keeping(tmp_path) as (core, _):
        run = await published(core, tmp_path, 0)
        for _ in range(30):
            await run.publish()
            await core.merger.settle()
            await core.collector.work()
        offered = await core.database.run(lambda connection: payload_index.graph(Chain(connection)).payloads)
    (data,) = (path.parent for path in tmp_path.rglob("coordinator.sqlite"))
    first = min(p.to_version for p in offered if p.kind is PayloadKind.SNAPSHOT)
    assert first > 0

    def verify():
        text = io.StringIO()
        code = verify_directory(data, keys=[], is_replaying=True, console=Console(file=text, width=200))
        return code, text.getvalue()

    code, text = verify()
    assert code == 0, text
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in text.splitlines() if "│" in line}
    rebuilt = [p for p in offered if p.kind is PayloadKind.SNAPSHOT or p.from_version >= first]
    assert (rows["payloads by digest"], rows["states rebuilt"]) == (str(len(offered)), str(len(rebuilt)))

    # The coordinator's own snapshot is looked at too.
    snapshot = next(p for p in offered if p.to_version == first and p.kind is PayloadKind.SNAPSHOT)
    (data / "blobs" / snapshot.digest[:2] / snapshot.digest).unlink()
    code, text = verify()
    assert code == 2
    assert "is not stored" in text
