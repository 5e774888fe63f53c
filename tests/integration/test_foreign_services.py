"""A project with a package `services` of its own runs ours undisturbed: every program and every process of ours."""

import sys
from pathlib import Path

import pytest

from heterorl import __version__
from heterorl.common.process.threads import own_command
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.demo import processes
from tests.support.foreign import MARK, foreign_project, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    with foreign_project(tmp_path, monkeypatch) as project:
        yield project


def test_the_foreign_package_is_there_and_is_noticed(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="-c"), foreign_project(tmp_path, monkeypatch):
        assert MARK in run(sys.executable, "-c", "try:\n    import services.x\nexcept RuntimeError as e:\n    print(e)")


def test_the_module_is_a_program(project):
    assert "heterorl keys" in run(sys.executable, "-m", "heterorl", "keys", "--help")
    assert run(sys.executable, "-m", "heterorl", "--version") == f"heterorl {__version__}\n"


def test_the_package_says_its_version_and_brings_its_services(project):
    code = "import heterorl.coordinator.coordinator_app; print(heterorl.__version__, heterorl.__file__)"

    version, place = run(sys.executable, "-c", code).split()
    assert (version, Path(place).resolve()) == (__version__, ROOT / "services" / "__init__.py")


def test_services_themselves_start(project):
    """The demo's way to start one, with a configuration that each refuses once all of it is loaded."""
    children = [
        processes.start(service, name=service, tables={"colour": 1}, directory=project / service)
        for service in ("coordinator", "learner", "sampler")
    ]
    try:
        for child in children:
            child.process.wait()
            assert "colour: unknown key" in child.log.read_text()
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()
            child.file.close()


def test_a_rank_of_a_learner_waits_for_its_orders_and_ends_with_them(project):
    command = own_command("heterorl.learner.rank_process", "--rank", "1", "--world-size", "2", "--rendezvous", "file")

    run(*command, stdin="\n")


def test_verifiers_and_own_rewards_run(project):
    (project / "train.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    task = build_task(TaskConfig(name="jsonl:train.jsonl", match="math_verify", reward_timeout_s=30))
    prompt = task.prompt(0)
    assert task.score(prompt, f"it is ${prompt.answer}$")[0].value == 1.0

    (project / "mine.py").write_text("def score(prompt, completion, answer):\n    return 0.5\n")
    task = build_task(TaskConfig(name="jsonl:train.jsonl", reward="mine:score"))
    assert task.score(prompt, "x")[0].value == 0.5
