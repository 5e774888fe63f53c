"""A project with a package `services` of its own runs ours undisturbed: command line, module, ranks, workers."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from services import __version__
from services.common.children import own_command
from services.common.tasks.registry import TaskConfig, build_task
from services.demo import processes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with packages of our names, on PYTHONPATH too, as its owner has it."""
    for name in ("services", "services/common", "heterorl"):
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
    code = "import heterorl, heterorl.launch, services; print(heterorl.__version__, services.__file__)"

    assert run(sys.executable, "-c", code).split() == [__version__, str(ROOT / "services" / "__init__.py")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", ["services.learner.rank", "services.lab.worker", "services"])
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
    if module != "services.lab.worker":
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
def test_an_installed_wheel_finds_its_services_beside_it(project):
    # There both packages lie side by side; generated code has no directory of its own.
    site = project / "site-packages"
    shutil.copytree(ROOT / "protos" / "gen" / "heterorl", site / "heterorl")
    (site / "services").symlink_to(ROOT / "services")

    assert "heterorl keys" in run(
        sys.executable, "-P", str(site / "heterorl" / "launch.py"), "services", "keys", "--help"
    )
