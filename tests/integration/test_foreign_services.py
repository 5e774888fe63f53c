"""A project with a package `services` of its own runs ours undisturbed: command line, module, ranks, workers."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from heterorl import __version__
from heterorl.common.process.children import own_command
from heterorl.common.tasks.registry import TaskConfig, build_task
from heterorl.demo import processes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a package `services`, on PYTHONPATH too, as its owner has it."""
    for name in ("services", "services/common"):
        (tmp_path / name).mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise RuntimeError('a foreign package was imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}{tmp_path}")
    return tmp_path


def run(*words, expected=0):
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == expected, result.stderr
    assert "foreign" not in result.stderr
    return result.stdout


@pytest.mark.timeout(120)
def test_the_console_script_runs(project):
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["heterorl"]
    module, _, function = entry.partition(":")
    # As an installer writes it.
    script = project / "bin" / "heterorl"
    script.parent.mkdir()
    script.write_text(
        f"import sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    sys.exit({function}())\n"
    )

    assert "heterorl keys" in run(sys.executable, str(script), "keys", "--help")
    assert "heterorl keys" in run(sys.executable, "-m", "heterorl", "keys", "--help")


@pytest.mark.timeout(120)
def test_the_package_says_its_version_and_brings_its_services(project):
    code = "import heterorl.coordinator.app; print(heterorl.__version__, heterorl.__file__)"

    version, place = run(sys.executable, "-c", code).split()
    assert (version, Path(place).resolve()) == (__version__, ROOT / "services" / "__init__.py")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", ["heterorl.learner.rank", "heterorl.lab.worker", "heterorl"])
def test_processes_of_our_own_are_ours(project, module):
    # The lab's worker takes paths and answers nothing to --help.
    out = subprocess.run(
        [*own_command(module, "--help")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )

    assert "foreign" not in out.stderr
    assert "No module named" not in out.stderr
    if module != "heterorl.lab.worker":
        assert out.returncode == 0, out.stderr


@pytest.mark.timeout(120)
def test_the_demos_processes_are_ours(project):
    child = processes.start("coordinator", name="c", tables={"colour": 1}, directory=project / "run")
    child.process.wait(100)
    child.file.close()

    assert "colour: unknown key" in child.log.read_text()


@pytest.mark.timeout(120)
def test_verifiers_and_own_rewards_run(project):
    (project / "train.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    task = build_task(TaskConfig(name="jsonl:train.jsonl", match="math_verify", reward_timeout_s=30))
    prompt = task.prompt(0)
    assert task.score(prompt, f"it is ${prompt.answer}$")[0].value == 1.0

    (project / "mine.py").write_text("def score(prompt, completion, answer):\n    return 0.5\n")
    task = build_task(TaskConfig(name="jsonl:train.jsonl", reward="mine:score"))
    assert task.score(prompt, "x")[0].value == 0.5


@pytest.mark.timeout(120)
def test_a_wheel_holds_everything_under_one_name(project, monkeypatch):
    wheels = project / "wheels"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)],
        cwd=ROOT, check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (wheel,) = wheels.glob("*.whl")
    site = project / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)

    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"heterorl"}
    kept = {path.relative_to(ROOT / "services") for path in (ROOT / "services").rglob("*.py")}
    assert {path.relative_to(site / "heterorl") for path in (site / "heterorl").rglob("*.py")} == kept
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{project}")
    code = "import heterorl; print(heterorl.__file__)"
    assert run(sys.executable, "-c", code).strip() == str(site / "heterorl" / "__init__.py")
    assert "heterorl keys" in run(sys.executable, "-m", "heterorl", "keys", "--help")
