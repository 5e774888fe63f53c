"""The installer: prints before it does, does nothing twice, and never overwrites what an operator wrote."""

import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.tools import check, tool

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "services" / "launch" / "units"
SCRIPT = ROOT / "deploy" / "install.sh"


def install(*arguments):
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def tree(directory):
    paths = sorted(path for path in directory.rglob("*"))
    return {str(path.relative_to(directory)): (path.stat().st_mode, path.stat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("name", ["install.sh", "wan.sh", "compose.sh", "secrets.sh"])
def test_shell_scripts_are_clean(name):
    assert check(tool("shellcheck"), str(ROOT / "deploy" / name)) == ""


def test_staged_install_holds_units_configurations_and_closed_credentials(tmp_path):
    roles = ("coordinator", "learner:learner", "sampler:site-1", "sampler:site-2", "sampler-vllm:site-3", "relay:eu")
    result = install("--destdir", str(tmp_path), *roles)

    assert result.returncode == 0, result.stderr
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        *(f"etc/heterorl/{name}.toml" for name in ("coordinator", "learner", "site-1", "site-2", "site-3", "eu")),
        "etc/heterorl/revoked",
        "etc/systemd/system/heterorl-sampler-vllm@.service",
        *(f"etc/systemd/system/{path.name}" for path in UNITS.iterdir() if "learner-node" not in path.name),
    }
    credentials = tmp_path / "etc/heterorl/credentials"
    assert {path.name for path in credentials.iterdir()} == {
        "coordinator",
        "learner",
        "site-1",
        "site-2",
        "site-3",
        "eu",
    }
    assert {path.stat().st_mode & 0o777 for path in (credentials, *credentials.iterdir())} == {0o700}


def test_second_run_changes_nothing(tmp_path):
    roles = ["coordinator", "sampler:site-1"]
    install("--destdir", str(tmp_path), *roles)
    before = tree(tmp_path)
    assert before

    result = install("--destdir", str(tmp_path), *roles)

    assert result.returncode == 0
    assert tree(tmp_path) == before
    assert "+" not in install("--dry-run", "--destdir", str(tmp_path), *roles).stdout


def test_upgrade_replaces_units_and_keeps_configurations(tmp_path):
    install("--destdir", str(tmp_path), "coordinator")
    config, unit = (
        tmp_path / "etc/heterorl/coordinator.toml",
        tmp_path / "etc/systemd/system/heterorl-coordinator.service",
    )
    config.write_text('run_id = "mine"\n')
    (config.parent / "revoked").write_text("12ab\n")
    unit.write_text("[Service]\n")

    install("--destdir", str(tmp_path), "coordinator")

    assert config.read_text() == 'run_id = "mine"\n'
    assert (config.parent / "revoked").read_text() == "12ab\n"
    assert unit.read_bytes() == (UNITS / "heterorl-coordinator.service").read_bytes()


def test_dry_run_prints_every_step_and_takes_none(tmp_path):
    result = install("--dry-run", "--destdir", str(tmp_path / "staged"), "coordinator")
    assert result.returncode == 0
    assert "heterorl-coordinator.service" in result.stdout
    assert not (tmp_path / "staged").exists()

    real = install("--dry-run", "learner:learner").stdout.splitlines()
    position = {word: next(i for i, line in enumerate(real) if word in line) for word in
                ("learner.txt", "complete", "current", "systemctl")}  # fmt: skip
    # The environment is whole before its name is switched, and systemd reads units whose program is there.
    assert sorted(position, key=position.get) == ["learner.txt", "complete", "current", "systemctl"]
    assert not any("torch" in line or "sampler" in line for line in real)


def test_own_packages_are_part_of_the_environment_and_of_its_name(tmp_path):
    own = tmp_path / "myrewards"
    own.mkdir()
    (own / "pyproject.toml").write_text("[project]\n")

    def plan(*words):
        return install("--dry-run", *words, "sampler:site-1").stdout.splitlines()

    def place(lines):
        return next(line for line in lines if "-m venv" in line)

    lines = plan("--with", str(own), "--with", "-rrequirements/coordinator.txt")
    (line,) = [line for line in lines if str(own) in line]
    assert line.endswith(f"{own} -r{Path('requirements/coordinator.txt').resolve()}")
    before, after = place(plan()), place(lines)
    relative = os.path.relpath(own)
    assert place(plan("--with", relative)) == place(plan("--with", str(own)))
    (own / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    # Another content is another directory: running services keep theirs.
    assert len({before, after, place(plan("--with", str(own), "--with", "-rrequirements/coordinator.txt"))}) == 3
    assert "needs a requirement" in install("--dry-run", "sampler:a", "--with").stderr


def test_role_with_an_engine_gets_its_configuration_its_unit_and_its_processes(tmp_path):
    roles = ["learner-deepspeed:learner", "sampler-vllm:site-1"]
    result = install("--destdir", str(tmp_path), "--nproc", "4", *roles)

    assert result.returncode == 0, result.stderr
    etc = tmp_path / "etc/heterorl"
    for name, file in (("learner", "learner-deepspeed"), ("site-1", "sampler-vllm")):
        assert (etc / f"{name}.toml").read_bytes() == (ROOT / f"deploy/config/{file}.toml").read_bytes()
    assert (etc / "learner.env").read_text() == "HETERORL_NPROC=4\n"
    assert stat.S_IMODE((etc / "learner.env").stat().st_mode) == 0o600
    units = {path.name for path in (tmp_path / "etc/systemd/system").iterdir()}
    assert units == {"heterorl-learner@.service", "heterorl-sampler-vllm@.service"}
    unit = (tmp_path / "etc/systemd/system/heterorl-sampler-vllm@.service").read_text()
    shipped = (ROOT / "services/launch/units/heterorl-sampler@.service").read_text()
    assert "ExecStart=/opt/heterorl/current-vllm/bin/heterorl sampler" in unit
    assert unit == shipped.replace("/opt/heterorl/current/", "/opt/heterorl/current-vllm/")
    assert "enable --now heterorl-learner@learner " in result.stdout
    assert "enable --now heterorl-sampler-vllm@site-1 " in result.stdout
    # What an operator has said stays.
    install("--destdir", str(tmp_path), "--nproc", "8", *roles)
    assert (etc / "learner.env").read_text() == "HETERORL_NPROC=4\n"
    assert "+" not in install("--dry-run", "--destdir", str(tmp_path), *roles).stdout


def test_every_name_of_a_run_file_is_a_name_here():
    # run.toml and certificates have sites such as a--b.
    assert install("--dry-run", "sampler:sampler-a--b").returncode == 0


def test_vllm_has_an_environment_of_its_own_under_the_name_that_its_unit_knows():
    lines = install("--dry-run", "coordinator", "learner-deepspeed:learner", "sampler:a", "sampler-vllm:b").stdout
    environments = [part.splitlines() for part in lines.split("rm -rf ")[1:]]

    assert len(environments) == 2
    for environment, files, link in zip(
        environments,
        (("coordinator", "learner-deepspeed", "sampler"), ("sampler-vllm",)),
        ("/opt/heterorl/current", "/opt/heterorl/current-vllm"),
        strict=True,
    ):
        (line,) = [line for line in environment if " -r " in line]
        assert [word for word in line.split() if word.endswith(".txt")] == [
            f"{ROOT}/requirements/{file}.txt" for file in files
        ]
        assert "DS_BUILD_OPS=0" in line
        assert any(line.endswith(f"/opt/heterorl/.next {link}") for line in environment)


def test_a_later_call_for_one_role_keeps_the_packages_of_the_others(tmp_path):
    opt = tmp_path / "opt"
    text = SCRIPT.read_text().replace("/opt/heterorl", str(opt))
    script = tmp_path / "install.sh"
    script.write_text(text.replace('"$(dirname "${BASH_SOURCE[0]}")/.."', shlex.quote(str(ROOT))))

    def installed(role):
        """Files of requirements of the environment that a call for one role makes."""
        found = subprocess.run(["bash", str(script), "--dry-run", role], capture_output=True, text=True, check=True)
        steps = [shlex.split(line[2:]) for line in found.stdout.splitlines() if str(opt) in line]
        for step in steps:
            if step[0] in ("install", "touch", "ln", "mv"):
                subprocess.run(step, check=True)
        return {Path(word).stem for step in steps if "-r" in step for word in step if word.endswith(".txt")}

    assert installed("coordinator") == {"coordinator"}
    assert installed("sampler-vllm:b") == {"sampler-vllm"}
    assert installed("sampler:a") == {"coordinator", "sampler"}
    assert installed("relay:eu") == set()
    assert installed("learner:l") == {"coordinator", "sampler", "learner"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "at least one role"),
        (["everything"], "unknown argument"),
        (["--destdir"], "needs a directory"),
        (["sampler:a", "--nproc"], "number of processes"),
        (["sampler:a", "--nproc", "0"], "number of processes"),
        (["sampler:"], "not a name"),
        (["sampler:../x"], "not a name"),
        (["sampler:-x"], "not a name"),
        (["sampler:coordinator"], "the coordinator's"),
        (["learner:a", "sampler:a"], "two roles"),
    ],
)
def test_wrong_argument_is_named_and_nothing_is_done(arguments, complaint):
    result = install("--dry-run", *arguments)

    assert result.returncode == 2
    assert complaint in result.stderr
    assert result.stdout == ""
