"""What a site's operator agrees to when a run went back: exactly that, once, and with what was seen kept beside."""

import os

import pytest
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import HeterorlError
from heterorl.sampler import trust_record as rewind
from heterorl.sampler.trust_record import RunReplaced, SeenVersion, TrustRecord, check_head

ROOT = "a" * 64


def write(path, versions, run="run"):
    record = TrustRecord(path)
    for version in versions:
        record.note(
            SeenVersion(
                version=version, state_root=ROOT, manifest_digest=f"{version:064x}", run_id=run, signed_by="ed25519:aa"
            )
        )
    return record


def test_record_keeps_what_is_not_above_and_all_of_it_beside(tmp_path):
    path = tmp_path / "versions.jsonl"
    record = write(path, [0, 4, 5, 7])
    before = path.read_bytes()

    assert [seen.version for seen in record.rewind(5)] == [7]
    assert TrustRecord(path).newest == record.newest
    assert (record.highest_version, sorted(record.versions)) == (5, [0, 4, 5])
    assert (tmp_path / "versions.jsonl.above-5").read_bytes() == before
    assert record.rewind(5) == []

    # Seen anew in the history that follows, and gone back once more.
    write(path, [6])
    record = TrustRecord(path)
    with pytest.raises(RunReplaced):
        check_head(5, seen_version=record.highest_version)
    record.rewind(5)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "versions.jsonl",
        "versions.jsonl.above-5",
        "versions.jsonl.above-5.2",
    ]


def test_what_is_left_is_said_before_and_holds_for_every_variant(tmp_path):
    write(tmp_path / "versions.jsonl", [3, 7])
    write(tmp_path / "versions.int8.jsonl", [6, 8])
    write(tmp_path / "versions.old.jsonl", [2])
    unsigned = (tmp_path / "versions.jsonl").read_text().replace("ed25519:aa", "unsigned")
    (tmp_path / "versions.jsonl").write_text(unsigned)

    found = rewind.differences(tmp_path, run="run", to_version=5)
    assert len(found) == 2
    assert "versions.int8.jsonl: version 8, state aaaaaaaaaaaa, signed by ed25519:aa, was seen here" in found[0]
    assert found[0].endswith("the run goes back to version 5; any first version is taken")
    assert "state aaaaaaaaaaaa, no signature checked, was seen here" in found[1]
    assert found[1].endswith("what follows must descend from version 3")

    rewind.agree(tmp_path, run="run", to_version=5)
    assert rewind.differences(tmp_path, run="run", to_version=5) == []
    assert TrustRecord(tmp_path / "versions.old.jsonl").highest_version == 2


def test_what_is_forgotten_is_one_line_however_much_it_is(tmp_path, caplog):
    write(tmp_path / "versions.jsonl", [5, *range(7, 200)])

    rewind.agree(tmp_path, run="run", to_version=5)

    (line,) = caplog.messages
    assert line.startswith("193 versions from 7, state aaaa")
    assert ", to 199, state aaaa" in line


def command(tmp_path, argument, *options, typed=None):
    config = tmp_path / "sampler.toml"
    config.write_text(f'state_dir = "{tmp_path / "site"}"\nmodel_dir = "{tmp_path}"\nsite = "eu-1"\n')
    return CliRunner().invoke(app, ["accept-rewind", argument, "--config", str(config), *options], input=typed)


def test_a_directory_without_a_record_is_refused_with_the_key_that_names_the_right_one(tmp_path):
    # Under systemd and in containers the command line names the directory, not the file.
    write(tmp_path / "unit" / "versions.jsonl", [5, 7])
    refused = command(tmp_path, "run:5", "--yes")
    agreed = command(tmp_path, "run:5", "--yes", "--set", f"state_dir={tmp_path / 'unit'}")

    assert f"{tmp_path / 'site'} has no record of versions" in str(refused.exception)
    assert "--set state_dir=DIR" in str(refused.exception)
    assert agreed.exit_code == 0, agreed.output
    assert TrustRecord(tmp_path / "unit" / "versions.jsonl").highest_version == 5


def test_root_changes_nothing_in_the_directory_of_a_services_user(tmp_path, monkeypatch):
    site = tmp_path / "site"
    write(site / "versions.jsonl", [5, 7])
    before = (site / "versions.jsonl").read_bytes()
    if os.geteuid() == 0:
        os.chown(site, 2_000_000_001, 2_000_000_001)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    refused = command(tmp_path, "run:5", "--yes")

    assert f"{site} belongs to user" in str(refused.exception)
    assert "sudo -u" in str(refused.exception)
    assert [(path.name, path.read_bytes()) for path in site.iterdir()] == [("versions.jsonl", before)]


def test_command_asks_and_changes_nothing_without_a_yes(tmp_path):
    path = tmp_path / "site" / "versions.jsonl"
    write(path, [5, 7])
    before = path.read_bytes()
    for argument, options, typed in (("run:5", (), "n\n"), ("run:5", (), ""), ("run:7", ("--yes",), None)):
        refused = command(tmp_path, argument, *options, typed=typed)
        assert refused.exit_code != 0
        assert options or "repeat it with --yes" in str(refused.exception)
        assert path.read_bytes() == before
    for argument in ("run", "5", "run:-1", "other:5", "run:five"):
        result = command(tmp_path, argument, "--yes")
        assert isinstance(result.exception, HeterorlError), argument
        assert path.read_bytes() == before

    result = command(tmp_path, "run:5", typed="y\n")
    assert result.exit_code == 0, result.output
    assert "version 7, state aaaaaaaaaaaa" in result.output
    assert TrustRecord(path).highest_version == 5
    assert isinstance(command(tmp_path, "run:5", "--yes").exception, HeterorlError), "nothing is left to agree to"
