"""The command line and its configurations, as people meet them."""

import ast
import dataclasses
import errno
import fcntl
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import heterorl
from heterorl.certs import enrolment_client
from heterorl.certs.enrolment import Token
from heterorl.cli import main as cli
from heterorl.cli.certs import first_lines
from heterorl.cli.connection import Link
from heterorl.cli.live.run_tables import evaluation_tables, site_tables, status_json, status_tables
from heterorl.cli.main import EXTRAS, app, main
from heterorl.cli.models import _in_place_of_the_files
from heterorl.common.errors import ConfigError, StoreLost
from heterorl.common.process.config_file import load, parse_override
from heterorl.common.rpc import channel
from heterorl.common.types.evaluation import Estimate
from heterorl.common.types.rollout import DropReason
from heterorl.common.types.run import LedgerCounts, RunStatus, SiteStatus, VariantStatus, fold_incarnations
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from tests.support.clock import ManualClock
from tests.support.evaluations import evaluation
from tests.support.run import REPORT

COMMANDS = [
    "coordinator",
    "learner",
    "sampler",
    "relay",
    "demo",
    "export",
    "evaluate",
    "rollback",
    "backup",
    "restore",
    "accept-rewind",
    "status",
    "health",
    "join",
    "doctor",
    "top",
    "report",
    "view",
    "track",
    "check-config",
    "plan",
    "launch",
    "print-config",
    "verify-lineage",
]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("torch.nn", "torch is not installed (in a clone of heterorl: pip install '.[learner,sampler]')"),
        ("tomli_w", "tomli-w is not installed (in a clone of heterorl: pip install '.[launch]')"),
        ("mine", ""),
    ],
)
def test_a_package_that_a_command_lacks_is_named_with_its_extras(monkeypatch, capsys, module, said):
    def lacks(**_):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("heterorl.cli.main.app", lacks)
    with pytest.raises(SystemExit if said else ModuleNotFoundError):
        main()
    assert said in capsys.readouterr().err


def test_extras_that_install_what_commands_import_are_there():
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for package, names in EXTRAS.items():
        assert any(line.startswith(package.replace("_", "-")) for name in names.split(",") for line in extras[name]), (
            package
        )


def test_help_names_every_command_and_nothing_else():
    output = invoke("--help").output

    assert [command.name or command.callback.__name__ for command in app.registered_commands] == COMMANDS
    assert all(command in output for command in COMMANDS)
    # By what one wants to do, not in one list.
    assert all(panel in output for panel in ("Try it", "Run the services", "Watch a run", "Steer a run", "Who is who"))
    alone = invoke()
    assert alone.exit_code == 0
    assert "Run the services" in alone.output


def test_lab_is_there_where_its_package_is_and_else_says_what_to_install(monkeypatch):
    assert "lab" in [group.name for group in app.registered_groups]

    monkeypatch.setattr(cli, "RESEARCH", "a_package_that_is_not_there")
    without = typer.Typer()
    without.command("other")(lambda: None)
    cli.add_lab(without)

    assert "lab" not in CliRunner().invoke(without, ["--help"]).output
    said = str(CliRunner().invoke(without, ["lab", "run", "quick", "--jobs", "1"]).exception)
    assert said == "heterorl-research is not installed (in a clone of heterorl: pip install ./research)"


@pytest.mark.process
def test_version_and_completion():
    assert invoke("--version").output == f"heterorl {heterorl.__version__}\n"
    asked = {"_HETERORL_COMPLETE": "complete_bash", "COMP_WORDS": "heterorl sta", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "heterorl"]

    result = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)

    assert result.stdout.split() == ["status"]


@pytest.mark.process
def test_interrupt_while_the_program_is_loaded_shows_no_traceback():
    # A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-X", "importtime", "-m", "heterorl", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # Each module is named when it is loaded; this one is in the middle, and a small pipe lets the program get no
        # further ahead of its reader than some modules.
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        for line in process.stderr:
            if "typer" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()

    assert process.returncode == 130
    assert "Traceback" not in rest


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")

    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 5
    assert invoke(command, "-h").output == result.output


@pytest.mark.parametrize("service", ["coordinator", "learner", "sampler"])
def test_default_configuration_is_valid_and_shows_where_values_come_from(service, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("metrics_port = 0\n[tls]\ninsecure = true\n")

    assert invoke("check-config", service, "--config", str(path), "--keys-only").exit_code == 0
    result = invoke("print-config", service, "--config", str(path), "--set", "metrics_port=7")
    assert "--set" in result.output
    assert "default" in result.output
    # A coordinator has no rewards.
    workers = {"learner": "task.reward_workers = 1  # default", "sampler": "task.reward_workers = 4  # default"}
    assert workers.get(service, "") in result.output


@pytest.mark.parametrize("service", ["coordinator", "learner", "sampler"])
def test_plaintext_to_another_machine_is_refused_before_anything_starts(service):
    key = "listen" if service == "coordinator" else "coordinator"
    public = ["--set", f"{key}=10.0.0.1:5", "--set", "tls.insecure=true"]

    for command in (["check-config", service], [service]):
        assert "tls.ca: is not set" in str(invoke(*command).exception)
        assert f"{key} is 10.0.0.1:5" in str(invoke(*command, *public).exception)


@pytest.mark.parametrize("service", ["coordinator", "learner", "sampler", "relay"])
def test_each_service_has_the_module_that_its_command_starts(service):
    assert importlib.util.find_spec(f"heterorl.{service}.{service}_app") is not None


def test_rollback_asks_for_certificates_and_a_version():
    assert "--credentials: is not set" in str(invoke("rollback", "127.0.0.1:1", "--to", "3").exception)
    assert "give one of --to and --list" in str(invoke("rollback", "127.0.0.1:1").exception)
    for number in (-2, 1 << 63):
        assert invoke("rollback", "127.0.0.1:1", "--to", str(number), "--insecure").exit_code == 2


def test_status_asks_for_certificates_unless_told_otherwise():
    assert "--credentials: is not set" in str(invoke("status", "127.0.0.1:1").exception)
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
    assert parse_override("a=[1,\n2]") == (["a"], [1, 2])
    assert parse_override("a=2\nb = 3") == (["a"], "2\nb = 3")


@pytest.mark.parametrize("name", ['a "b"', "back\\slash", "\U0001f600", "del\x7f", "two\nlines"])
def test_odd_characters_of_a_path_are_read_back_from_overrides_and_printed_tables(tmp_path, monkeypatch, name):
    overrides = _in_place_of_the_files(f"jsonl:/data/{name}.jsonl")
    assert parse_override(overrides[0]) == (["task", "name"], f"jsonl:/data/{name}.jsonl")
    lines = first_lines(run="r", site="s", role="learner", coordinator="c:1", paths={"ca": f"/x/{name}/ca.crt"})
    assert tomllib.loads("\n".join(lines))["tls"] == {"ca": f"/x/{name}/ca.crt"}

    given = []
    monkeypatch.setattr("heterorl.cli.doctor.load_service", lambda _, config, overrides: given.extend(overrides))
    invoke("doctor", "--role", "sampler", "--credentials", name)
    assert parse_override(given[0]) == (["tls", "ca"], f"{name}/ca.crt")

    base = ["--dir", str(tmp_path / name)]
    assert invoke("certs", "init", "r", *base).exit_code == 0
    printed = invoke("certs", "issue", "relay", "eu", *base).output.rpartition("  tls.ca")
    assert tomllib.loads("".join(printed[1:]))["tls"]["revoked"] == str(tmp_path / name / "relay-eu" / "revoked")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config: is not set"),
        (["--config", "/dev/null"], "--config: has no keys"),
        (["--set", "colour=1"], "--config: no service has its keys"),
    ],
)
def test_doctor_examines_no_node_that_nobody_named(arguments, words):
    assert f"{words} (pass the node's file, or --role for the defaults)" in str(invoke("doctor", *arguments).exception)


def test_typed_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["heterorl", "check-config", "coordinator", "--set", "colour=1"])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    assert "colour: unknown key" in capsys.readouterr().err


def test_what_another_try_may_not_meet_ends_with_code_1(monkeypatch, capsys):
    def away(*_arguments, **_options):
        raise StoreLost("PostgreSQL cannot be reached")

    monkeypatch.setattr("heterorl.cli.main.app", away)
    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_a_file_that_a_command_cannot_use_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["heterorl", "certs", "init", "run", "--dir", str(tmp_path / "file" / "certs")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: cannot use {tmp_path}/file")


@pytest.mark.parametrize(
    ("service", "error", "words"),
    [
        ("certs", PermissionError(errno.EACCES, "Permission denied", "ca.key"), "ca.key: Permission denied"),
        ("certs", OSError(errno.ENOSPC, "No space left on device"), "free space"),
        ("certs", ConnectionResetError(errno.ECONNRESET, "reset"), ""),
        ("sampler", PermissionError(errno.EACCES, "Permission denied", "state"), ""),
    ],
)
def test_other_faults_and_a_services_keep_their_place_in_the_code(monkeypatch, capsys, service, error, words):
    def fail(**_):
        raise error

    monkeypatch.setattr("heterorl.cli.main.app", fail)
    monkeypatch.setattr(sys, "argv", ["heterorl", service])
    with pytest.raises(SystemExit if words else type(error)):
        main()
    assert words in capsys.readouterr().err


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

    monkeypatch.setattr("heterorl.learner.export.export_model", lambda **_: None)
    result = invoke("export", "--checkpoint", "c", "--model-dir", "m", "--out", "[/x]")
    assert result.exit_code == 0, result.exception
    assert "model written to [/x]" in result.output


@pytest.mark.slow
def test_every_screen_takes_text_literally():
    services = Path(__file__).parents[3] / "services"
    sources = {str(path.relative_to(services)): path.read_text() for path in services.rglob("*.py")}
    calls = {
        (name, ast.unparse(node))
        for name, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"Console", "rich.console.Console", "Progress"}
    }

    # These bars show no text but their own.
    assert {name for name, _ in calls} >= {"cli/connection.py", "demo/demo_run.py", "common/generation/tiny_model.py"}
    assert [
        call
        for name, call in calls
        if "markup=False" not in call and name not in ("common/generation/tiny_model.py", "cli/verify_data_dir.py")
    ] == []


@pytest.mark.process
def test_module_runs_as_a_program():
    result = subprocess.run([sys.executable, "-m", "heterorl", "--help"], capture_output=True, check=True)

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
    console.print(*status_tables(foreign))
    text = console.export_text()
    assert [table.row_count for table in status_tables(status)] == [6, 1, 7, 1]
    assert all(name in text for name in ("[/r]", "[/l]", "[/s]", "4, unsigned"))
    assert all(part in text for part in ("delta 10 bytes (10.0x), full 80 bytes (1.2x)", "10.00%", "0.5 s", "0.125 s"))
    ordered = dataclasses.replace(status, rollback_to=2)
    console.print(*status_tables(ordered))
    assert "rollback to version 2; not done yet" in console.export_text()
    assert "not done yet" not in text
    console.print(*status_tables(dataclasses.replace(ordered, is_rollback_refused=True)))
    assert "rollback to version 2; the learner refused it, its log says why" in console.export_text()
    form = VariantStatus(
        variant="int8", version=4, full_bytes=50, delta_bytes=5, snapshot_bytes=0, changed_fraction=0.015
    )
    small = dataclasses.replace(site, variant="int8", last_seen_s=0.5)
    forms = dataclasses.replace(status, is_head_signed=True, variants=(form,), sites=(site, small))
    assert [table.row_count for table in status_tables(forms)] == [6, 1, 8, 1]
    console.print(*status_tables(forms))
    text = console.export_text(clear=False)
    assert "50 bytes; delta 5 bytes (10.0x), 1.50% changed" in text
    assert text.count("int8") == 2
    assert status_json(forms)["sites"][1]["variant"] == status_json(forms)["variants"][0]["variant"] == "int8"
    assert "4, signed" in console.export_text()


def test_long_names_and_numbers_are_broken_and_not_cut_on_a_narrow_screen():
    names = [f"eu-central-1.frankfurt-gpu-{number}" for number in (11, 12)]
    sites = [
        SiteStatus(
            site=name, incarnation="i", policy_version=1234, state_root="", last_seen_s=1.0, groups_accepted=123456,
            groups_dropped=17, tokens_per_s=7276.0, work_leased=5,
        )
        for name in names
    ]  # fmt: skip
    console = Console(width=60, record=True, file=io.StringIO())
    average = Estimate(mean=0.421, low=0.381, high=0.461, num_prompts=500)
    console.print(*site_tables(sites, head_version=1240))
    console.print(*evaluation_tables([evaluation(1, task_set="competition-math-2026", average=average)]))

    assert "\u2026" not in console.export_text()


def test_sites_are_readable_at_eighty_columns():
    site = SiteStatus(
        site="frankfurt-12", incarnation="i", policy_version=1234, state_root="", last_seen_s=-0.2,
        groups_accepted=123456, groups_dropped=17, tokens_per_s=7276.0, work_leased=5, apply_s=0.00757,
        variant="fp8_e4m3", canary_difference=0.0123, groups_failed=3, quota_used=0.5, groups_refused=9,
    )  # fmt: skip
    silent = dataclasses.replace(site, site="never-seen", last_seen_s=-1.0, quarantine="its groups fail")
    status = RunStatus(
        run_id="r", head_version=1240, epoch=1, learner="l", is_draining=False, uptime_s=9.0,
        ledger=LedgerCounts(acked=0, pending=0, leased=0, consumed=0),
        bytes_full=100, bytes_last=10, changed_fraction=0.1, sites=(site, silent), last_report=None,
        store_bytes=744_559, store_limit_bytes=1 << 40,
    )  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*status_tables(status))
    lines = console.export_text().splitlines()

    # No word is cut and no cell wrapped.
    for words in (
        ("frankfurt-12", "fp8_e4m3"),
        ("site", "variant"),
        ("7276", "5"),
        ("0.00757 s", "50%"),
        ("never", "9"),
    ):
        for word in words:
            assert any(word in line for line in lines), word
    assert not any("\u2026" in line for line in lines)
    # A sampler that is started again with its state_dir is no new one.
    assert "dirs" in " ".join(lines)
    assert "starts" not in " ".join(lines)
    # Each value stands under its heading.
    work, state = (line.split() for line in lines if "frankfurt-12" in line)
    assert work == ["frankfurt-12", "1234", "6", "123456", "17", "7276", "5", "0", "s", "ago"]
    assert state == ["frankfurt-12", "fp8_e4m3", "1", "0.012", "nats", "3", "9", "0.00757", "s", "50%"]
    for name, value in (("version", "1234"), ("tokens/s", "7276"), ("leased", "5 ")):
        head = next(line for line in lines if "tokens/s" in line)
        row = next(line for line in lines if "frankfurt-12" in line)
        assert head.index(name) == row.index(value)
    assert any("744.6 kB of 1.1 TB" in line for line in lines)


def test_one_row_a_site_whatever_it_was_started_how_often():
    site = SiteStatus(
        site="us-1", incarnation="old", policy_version=-1, state_root="", last_seen_s=-1.0, groups_accepted=3,
        groups_dropped=1, tokens_per_s=0.0, work_leased=2,
    )  # fmt: skip
    newest = dataclasses.replace(
        site, incarnation="new", policy_version=7, last_seen_s=2.0, tokens_per_s=9.0, is_stopped=True
    )
    older = dataclasses.replace(newest, incarnation="mid", policy_version=5, last_seen_s=300.0, is_stopped=False)
    never = dataclasses.replace(site, site="eu-1")

    us, eu = fold_incarnations([site, newest, older, never])

    assert (us.newest.incarnation, us.newest.policy_version, us.state_dirs) == ("new", 7, 3)
    assert (us.newest.groups_accepted, us.newest.groups_dropped, us.newest.work_leased) == (9, 3, 6)
    assert (eu.newest.site, eu.state_dirs) == ("eu-1", 1)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*site_tables([site, newest, older, never], head_version=8))
    text = console.export_text()
    assert text.count("us-1") == 2
    assert " dirs " in text, "an incarnation is a state directory"
    assert "-1 " not in text.replace("us-1", "").replace("eu-1", "")
    assert "none yet" in text
    assert "stopped 2 s ago" in text
    # After a restart nobody has seen a site whose calls are refused.
    console.print(*site_tables([dataclasses.replace(never, is_revoked=True)], head_version=8))
    assert "revoked" in (text := console.export_text())
    assert "never" not in text
    # After a restore a site may be ahead of the head.
    console.print(*site_tables([newest], head_version=6))
    assert "-1" not in console.export_text().replace("us-1", "")


def test_run_without_a_version_says_what_is_waited_for():
    status = RunStatus(
        run_id="r", head_version=-1, epoch=0, learner="", is_draining=False, uptime_s=9.0,
        ledger=LedgerCounts(acked=0, pending=0, leased=0, consumed=0),
        bytes_full=0, bytes_last=0, changed_fraction=0.0, sites=(), last_report=None,
    )  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(*status_tables(status))
    assert "none yet: the learner publishes version 0" in console.export_text()
    known = dataclasses.replace(status, head_version=3, last_report=REPORT)
    evaluated = dataclasses.replace(REPORT, version=2, evaluation_accuracy=0.25)
    console.print(*status_tables(known, reports=[evaluated]))
    assert "held-out reward 0.250 at version 2" in console.export_text()
    console.print(*status_tables(dataclasses.replace(known, facts={"steps wanted": "77"})))
    assert f"{REPORT.step} of 77: reward" in console.export_text()
    past = dataclasses.replace(known, last_report=dataclasses.replace(REPORT, step=857), facts={"steps wanted": "800"})
    console.print(*status_tables(past))
    assert "857 (max_steps is 800): reward" in console.export_text()


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("rollback", "--to", "3"),
        *(pytest.param(words, marks=pytest.mark.slow) for words in (("top", "--once"), ("health",), ("backup",))),
    ],
)
def test_links_of_operators_are_told_what_to_change(command, tmp_path):
    def problem(*arguments):
        return str(invoke(*command, *arguments).exception)

    assert "'coord.example' is not host:port" in problem("coord.example", "--credentials", str(tmp_path))
    assert "--credentials: is not set" in problem("127.0.0.1:1")
    assert f"cannot read {tmp_path}/ca.crt" in problem("127.0.0.1:1", "--credentials", str(tmp_path))


@pytest.mark.parametrize("command", [("samples", "list"), ("view",)])
def test_directory_of_a_stopped_run_is_no_address(command, tmp_path):
    problem = str(invoke(*command, str(tmp_path), "--insecure").exception)

    assert f"{tmp_path} is a directory" in problem
    assert "`heterorl report DIR` reads a stopped run" in problem
    assert "`heterorl samples export` before you stop it" in problem


@pytest.mark.parametrize("command", ["status", "backup"])
def test_commands_that_give_up_do_not_claim_to_go_on(monkeypatch, command):
    monkeypatch.setattr("heterorl.cli.connection.BUDGET_S", 0.0)

    problem = str(invoke(command, "127.0.0.1:1", "--insecure").exception)

    assert "127.0.0.1:1 refuses (start the coordinator, or set the port" in problem
    assert "goes on trying" not in problem
    monkeypatch.setattr("heterorl.cli.connection.explain_link", _nothing)
    problem = str(invoke(command, "127.0.0.1:1", "--insecure").exception)
    assert "check host and port" in problem
    assert "use --credentials" in problem
    assert "goes on trying" not in problem


def test_a_command_that_reaches_neither_coordinator_says_what_is_wrong_with_each(monkeypatch):
    monkeypatch.setattr("heterorl.cli.connection.BUDGET_S", 0.0)

    problem = str(invoke("status", "127.0.0.1:1,127.0.0.1:2", "--insecure").exception)

    assert "127.0.0.1:1 refuses; 127.0.0.1:2 refuses (start the coordinator" in problem


async def _nothing(address, *, tls):
    return None


def test_node_that_joins_a_run_with_a_standby_asks_each_coordinator_by_its_own_address(monkeypatch, tmp_path):
    token = Token(id=bytes(8), secret=bytes(32), pin=bytes(32), uri="spiffe://run/site/eu-1/role/sampler").text()
    asked = []

    async def get(_, *, address, out):
        out.mkdir()
        asked.append(address)

    async def check_health(address, *, tls, timeout_s):
        asked.append(address)
        return channel.Answer(is_serving=address == "b.example:50051", reason=f"{address}: stands by")

    monkeypatch.setattr(enrolment_client, "join", get)
    monkeypatch.setattr(channel, "check_health", check_health)
    both = "a.example:50051,b.example:50051"
    result = CliRunner().invoke(app, ["join", "--token", token, "--coordinator", both, "--out", str(tmp_path / "node")])

    assert asked == ["a.example:50052", "a.example:50051", "b.example:50051"]
    assert "does not answer" not in result.output
    assert (tmp_path / "node" / "coordinator").read_text() == f"{both}\n"


def test_help_says_whose_certificate_a_command_needs():
    commands = typer.main.get_command(app).commands
    words = {
        name: [each.help for each in commands[name].params if each.name == "credentials"] for name in ("health", "top")
    }

    assert "a node's ca.crt" in words["health"][0]
    assert "an operator's ca.crt" in words["top"][0]
    assert commands["samples"].help == "Read completions of a run: list, show, export."


def test_every_command_that_takes_a_coordinators_address_takes_it_from_the_environment():
    def parameters(command, name):
        for key, inner in getattr(command, "commands", {}).items():
            yield from parameters(inner, f"{name} {key}")
        for each in command.params:
            words = f"{each.metavar} {getattr(each, 'help', '')}"
            if "HOST:PORT" in words or "host:port of the coordinator" in words:
                yield name, "HETERORL_ADDRESS" in f"{each.envvar} {words}"

    found = dict(parameters(typer.main.get_command(app), "heterorl"))
    assert {"heterorl status", "heterorl report", "heterorl view", "heterorl evaluate", "heterorl join"} <= {*found}
    assert all(found.values()), found


def test_link_is_found_in_the_environment_and_in_what_join_noted(monkeypatch, tmp_path):
    (tmp_path / "coordinator").write_text("coord.example:50051\n")
    with pytest.raises(ConfigError, match="ADDRESS: is not set"):
        Link().find()
    monkeypatch.setenv("HETERORL_CREDENTIALS", str(tmp_path))
    address, tls = Link().find()
    assert (address, tls.ca) == ("coord.example:50051", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("HETERORL_ADDRESS", "other.example:1")
    assert Link().find()[0] == "other.example:1"
    # What is said beats what is set.
    assert Link(address="127.0.0.1:2", insecure=True).find()[1].insecure
    mine = Link(address="said.example:3", credentials=tmp_path / "mine").find()
    assert (mine[0], mine[1].ca) == ("said.example:3", str(tmp_path / "mine" / "ca.crt"))
    monkeypatch.delenv("HETERORL_ADDRESS")
    # certs.sh notes the standbys too, and a host's name has up to 253 characters.
    several = ",".join(f"{name * 60}.example:50051" for name in "abcdef")
    (tmp_path / "coordinator").write_text(f"{several}\n")
    assert Link().find()[0] == several
    (tmp_path / "coordinator").write_text("no address")
    with pytest.raises(ConfigError, match="is not host:port"):
        Link().find()


def test_root_restores_nothing_into_the_directory_of_the_coordinators_user(tmp_path, monkeypatch):
    place = tmp_path / "service"
    place.mkdir()
    if os.geteuid() == 0:
        os.chown(place, 2_000_000_001, 2_000_000_001)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    refused = invoke("restore", str(tmp_path), "--set", f"data_dir={place}")

    assert f"{place} belongs to user" in str(refused.exception)
    assert list(place.iterdir()) == []


async def test_a_restored_run_without_a_version_names_no_version_to_agree_to(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "old"), ManualClock())
    await core.close()

    said = invoke("restore", str(tmp_path / "old"), "--set", f"data_dir={tmp_path / 'new'}").output

    assert "no version yet" in said
    assert "give it a new state_dir" in said
    assert "accept-rewind" not in said
