"""The command line and its configurations, as people meet them."""

import ast
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli import app, main
from services.common.config import load, parse_override
from services.common.errors import ConfigError
from services.common.types import DropReason, FlavourStatus, LedgerCounts, RunStatus, SiteStatus
from services.coordinator.config import CoordinatorConfig
from services.status import status_json, status_tables
from tests.support.run import REPORT

COMMANDS = [
    "coordinator",
    "learner",
    "sampler",
    "demo",
    "export",
    "rollback",
    "backup",
    "status",
    "health",
    "join",
    "doctor",
    "top",
    "report",
    "check-config",
    "print-config",
    "verify-lineage",
]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command_and_nothing_else():
    output = invoke("--help").output

    assert [command.name or command.callback.__name__ for command in app.registered_commands] == COMMANDS
    assert all(command in output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")

    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 5


@pytest.mark.parametrize("service", ["coordinator", "learner", "sampler"])
def test_default_configuration_is_valid_and_shows_where_values_come_from(service, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("metrics_port = 0\n[tls]\ninsecure = true\n")

    assert invoke("check-config", service, "--config", str(path)).exit_code == 0
    result = invoke("print-config", service, "--config", str(path), "--set", "metrics_port=7")
    assert "--set" in result.output
    assert "default" in result.output


@pytest.mark.parametrize("service", ["coordinator", "learner", "sampler"])
def test_plaintext_to_another_machine_is_refused_before_anything_starts(service):
    key = "listen" if service == "coordinator" else "coordinator"
    public = ["--set", f"{key}=10.0.0.1:5", "--set", "tls.insecure=true"]

    for command in (["check-config", service], [service]):
        assert "tls.ca: is not set" in str(invoke(*command).exception)
        assert f"{key} is 10.0.0.1:5" in str(invoke(*command, *public).exception)


def test_rollback_asks_for_certificates_and_a_version():
    assert "tls.ca: is not set" in str(invoke("rollback", "127.0.0.1:1", "--to", "3").exception)
    assert invoke("rollback", "127.0.0.1:1").exit_code == 2
    assert invoke("rollback", "127.0.0.1:1", "--to", "-2").exit_code == 2


def test_status_asks_for_certificates_unless_told_otherwise():
    assert "tls.ca: is not set" in str(invoke("status", "127.0.0.1:1").exception)
    assert "coordinator is 10.0.0.1:1" in str(invoke("status", "10.0.0.1:1", "--insecure").exception)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("colour = 1", [], "colour: unknown key"),
        ("seed = -1", [], "seed"),
        ("", ["seed=x"], "seed"),
        ("", ["nothing"], "key.path=value"),
        ("", ["seed.deep=1", "seed=1"], ""),
        ("seed = 1", ["seed.deep=1"], "not a section"),
        ("not toml", [], "not TOML"),
    ],
)
def test_wrong_configuration_names_the_key(tmp_path, text, overrides, message):
    path = tmp_path / "c.toml"
    path.write_text(text)

    if message:
        with pytest.raises(ConfigError, match=message):
            load(CoordinatorConfig, path, overrides)
    else:
        assert load(CoordinatorConfig, path, overrides).seed == 1
    with pytest.raises(ConfigError, match="cannot read"):
        load(CoordinatorConfig, tmp_path / "missing.toml")


def test_overrides_are_toml_values_or_plain_text():
    assert parse_override("a.b=3") == (["a", "b"], 3)
    assert parse_override("a=true") == (["a"], True)
    assert parse_override("a=plain text") == (["a"], "plain text")


def test_typed_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["heterorl", "check-config", "coordinator", "--set", "colour=1"])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    assert "colour: unknown key" in capsys.readouterr().err


def test_brackets_in_foreign_text_are_shown_as_they_are(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["heterorl", "check-config", "coordinator", "--set", "[/x]:smile:=1"])
    with pytest.raises(SystemExit):
        main()
    assert "[/x]:smile:: unknown key" in capsys.readouterr().err

    path = tmp_path / "[x].toml"
    path.write_text('model_dir = "[/y]"')
    result = invoke("print-config", "learner", "--config", str(path), "--set", 'state_dir="[/z]"')
    assert result.exit_code == 0, result.exception
    assert "[/y]" in result.output
    assert "[/z]" in result.output

    monkeypatch.setattr("services.learner.export.export_model", lambda **_: None)
    result = invoke("export", "--checkpoint", "c", "--model-dir", "m", "--out", "[/x]")
    assert result.exit_code == 0, result.exception
    assert "model written to [/x]" in result.output


def test_every_screen_takes_text_literally():
    sources = {path: path.read_text() for path in (Path(__file__).parents[2] / "services").rglob("*.py")}
    calls = {
        (path.name, ast.unparse(node))
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"Console", "rich.console.Console", "Progress"}
    }

    # These bars show no text but their own.
    assert {name for name, _ in calls} >= {"cli.py", "run.py", "warm_start.py"}
    assert [
        call
        for name, call in calls
        if "markup=False" not in call and name not in ("warm_start.py", "verify_command.py")
    ] == []


def test_module_runs_as_a_program():
    result = subprocess.run([sys.executable, "-m", "services", "--help"], capture_output=True, timeout=50, check=True)

    assert b"heterorl" in result.stdout.lower() or b"Train language models" in result.stdout


def test_status_is_shown_to_people_and_programs():
    site = SiteStatus(
        site="eu", incarnation="i", policy_version=3, state_root="", last_seen_s=1.0, groups_accepted=5,
        groups_dropped=1, tokens_per_s=10.0, work_leased=2, apply_s=0.125,
    )  # fmt: skip
    ledger = LedgerCounts(acked=6, pending=1, leased=1, consumed=3, dropped={DropReason.SURPLUS: 1})
    status = RunStatus(
        run_id="r", head_version=4, epoch=1, learner="l", is_draining=True, uptime_s=9.0, ledger=ledger, bytes_full=100,
        bytes_last=10, changed_fraction=0.1, sites=(site,), last_report=REPORT, delta_bytes=10, snapshot_bytes=80,
        encode_s=0.5,
    )  # fmt: skip

    shown = status_json(status)
    assert shown["ledger"]["dropped"] == {"surplus": 1}
    assert shown["ledger"]["is_balanced"] is True
    assert json.loads(json.dumps(shown))["sites"][0]["site"] == "eu"
    foreign = dataclasses.replace(
        status, run_id="[/r]", learner="[/l]", sites=(dataclasses.replace(site, site="[/s]"),)
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*status_tables(foreign, width=200))
    text = console.export_text()
    assert [table.row_count for table in status_tables(status, width=200)] == [13, 1]
    assert all(name in text for name in ("[/r]", "[/l]", "[/s]", "4, unsigned"))
    assert all(part in text for part in ("delta 10 bytes (10.0x), full 80 bytes (1.2x)", "10.00%", "0.5 s", "0.125 s"))
    ordered = dataclasses.replace(status, rollback_to=2)
    console.print(*status_tables(ordered, width=200))
    assert "back to version 2; not carried out yet" in console.export_text()
    assert "carried out" not in text
    form = FlavourStatus(
        flavour="int8", version=4, full_bytes=50, delta_bytes=5, snapshot_bytes=0, changed_fraction=0.015
    )
    small = dataclasses.replace(site, flavour="int8")
    forms = dataclasses.replace(status, is_head_signed=True, flavours=(form,), sites=(site, small))
    assert [table.row_count for table in status_tables(forms, width=200)] == [14, 2]
    console.print(*status_tables(forms, width=200))
    text = console.export_text(clear=False)
    assert "50 bytes; delta 5 bytes (10.0x), 1.50% changed" in text
    assert text.count("int8") == 2
    assert status_json(forms)["sites"][1]["flavour"] == status_json(forms)["flavours"][0]["flavour"] == "int8"
    assert "4, signed" in console.export_text()


def test_sites_are_readable_at_eighty_columns():
    site = SiteStatus(
        site="frankfurt-12", incarnation="i", policy_version=1234, state_root="", last_seen_s=-0.2,
        groups_accepted=123456, groups_dropped=17, tokens_per_s=7276.0, work_leased=5, apply_s=0.00757,
        flavour="fp8_e4m3", canary_difference=0.0123, groups_failed=3, quota_used=0.5, groups_refused=9,
    )  # fmt: skip
    silent = dataclasses.replace(site, site="never-seen", last_seen_s=-1.0, quarantine="its groups fail")
    status = RunStatus(
        run_id="r", head_version=1240, epoch=1, learner="l", is_draining=False, uptime_s=9.0,
        ledger=LedgerCounts(acked=0, pending=0, leased=0, consumed=0),
        bytes_full=100, bytes_last=10, changed_fraction=0.1, sites=(site, silent), last_report=None,
        store_bytes=744_559, store_limit_bytes=1 << 40,
    )  # fmt: skip
    pages = {}
    for width in (80, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(*status_tables(status, width=width))
        pages[width] = console.export_text().splitlines()

    # Whatever the width, no word is cut and no cell wrapped.
    for words in (
        ("frankfurt-12", "fp8_e4m3"),
        ("site", "flavour"),
        ("7276", "5"),
        ("0.00757 s", "50%"),
        ("never", "9"),
    ):
        for width, lines in pages.items():
            for word in words:
                assert any(word in line for line in lines), (width, word)
    assert not any("\u2026" in line for lines in pages.values() for line in lines)
    # Wide: one line a site. Narrow: the second half of the columns under the first.
    assert any("frankfurt-12" in line and "fp8_e4m3" in line for line in pages[200])
    above = next(at for at, line in enumerate(pages[80]) if "frankfurt-12" in line)
    assert pages[80][above].split() == [
        "frankfurt-12", "1234", "123456", "7276", "0.012", "nats", "0.00757", "s", "0", "s", "ago"
    ]  # fmt: skip
    assert pages[80][above + 1].split() == ["fp8_e4m3", "6", "17", "5", "3", "50%", "9"]
    assert any("745 KB of 1.1 TB" in line for line in pages[80])


@pytest.mark.parametrize(
    "command", [("status",), ("top", "--once"), ("health",), ("rollback", "--to", "3"), ("backup",)]
)
def test_links_of_operators_are_told_what_to_change(command, tmp_path):
    def problem(*arguments):
        return str(invoke(*command, *arguments).exception)

    assert "'coord.example' is not host:port" in problem("coord.example", "--credentials", str(tmp_path))
    assert "tls.ca: is not set" in problem("127.0.0.1:1")
    assert "by --credentials" in problem("127.0.0.1:1", "--ca", "x", "--cert", "y")
    assert f"cannot read {tmp_path}/ca.crt" in problem("127.0.0.1:1", "--credentials", str(tmp_path))
    assert "given together with --key" in problem("127.0.0.1:1", "--credentials", str(tmp_path), "--key", "k")


def test_commands_that_give_up_do_not_claim_to_go_on(monkeypatch):
    monkeypatch.setattr("services.operator_link.BUDGET_S", 0.0)

    problem = str(invoke("status", "127.0.0.1:1", "--insecure").exception)

    assert "check host and port" in problem
    assert "use --credentials" in problem
    assert "goes on trying" not in problem
