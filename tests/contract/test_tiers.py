"""The tiers of tests: which stages they have, what becomes of failures."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import run
from tests.support import near

ROOT = Path(__file__).parents[2]
MAX_COMMITS = 200
FLAKY = """
from pathlib import Path
def test_passes_the_second_time():
    mark = Path(__file__).with_name("mark")
    known = mark.exists()
    mark.touch()
    assert known
"""


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """A file of tests in a folder of its own, as a stage."""

    def make(text):
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.results"]')
        environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return run.Stage(name="it", arguments=["test_it.py"], workers=0, python=sys.executable, environment=environment)

    monkeypatch.setattr(run, "ROOT", tmp_path)
    return make


@pytest.mark.process
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="sources without their history")
@pytest.mark.parametrize("stage", [stage.name for stage in run.everything()])
def test_every_stage_ran_not_long_ago(stage, record_property):
    known = json.loads(run.RECORD.read_text())["stages"]
    assert stage in known, f"make test-all STAGES='\"{stage}\"'"
    command = ["git", "rev-list", "--count", f"{known[stage]['commit']}..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"tests/all.json names a commit that is not here: {done.stderr}"
    record_property("commits", done.stdout.strip())
    assert int(done.stdout) <= MAX_COMMITS, (
        f"it ran {done.stdout.strip()} commits ago, and must run again after {MAX_COMMITS}:"
        f" make test-all STAGES='\"{stage}\"'"
    )


@pytest.mark.process
def test_a_record_keeps_other_stages_and_their_commits():
    known = {
        "stages": {"fuzz": {"commit": "a" * 40}, "kills": {"commit": "b" * 40}},
        "seconds_by_file": {"tests/run.py": 3.0, "tests/gone.py": 9.0, "tests/contract/test_tiers.py": 5.0},
    }
    stage = replace(run.QUICK, name="kills")
    seconds = {"tests/contract/test_tiers.py": 2.04, "tests/contract/test_shape.py": 0.01}

    found = run.record(known, run.Outcome(stage=stage, seconds=9.6, failed=["x"], seconds_by_file=seconds))

    assert found["stages"]["fuzz"] == {"commit": "a" * 40}
    assert found["stages"]["kills"]["commit"] not in ("a" * 40, "b" * 40)
    assert found["stages"]["kills"]["seconds"] == 10
    assert found["stages"]["kills"]["failed"] == ["x"]
    assert found["seconds_by_file"] == {"tests/contract/test_tiers.py": 2.0, "tests/run.py": 3.0}


def test_stages_of_everything_are_chosen_by_name():
    assert [stage.name for stage in run.chosen_stages(["fuzz", "engines"])] == ["engines", "fuzz"]
    assert run.chosen_stages([]) == run.everything()
    with pytest.raises(SystemExit, match="no stage kill; there are: tests without processes"):
        run.chosen_stages(["kill"])


@pytest.mark.parametrize(
    ("stage", "ran_as", "paths"),
    [("conformance of vLLM", "engines", run.NEEDS_VLLM), ("research", "research", run.NEEDS_RESEARCH)],
)
def test_a_landing_runs_vllm_and_research_only_where_their_part_changed(monkeypatch, stage, ran_as, paths):
    for has_changed in (True, False):
        monkeypatch.setattr(run, "changed_since", lambda commit, asked, answer=has_changed: asked is paths and answer)

        names = [one.name for one in run.landing({"stages": {ran_as: {"commit": "0" * 40}}})]

        assert names[0] == "tests without processes"
        assert (stage in names) is has_changed


def test_what_a_stage_depends_on_is_there(monkeypatch):
    monkeypatch.setattr(run, "changed_since", lambda commit, paths: True)
    stages = [*run.landing({}), *run.everything()]
    named = [word for stage in stages for word in stage.arguments if not word.startswith("-")]

    assert [path for path in (*run.NEEDS_VLLM, *run.NEEDS_RESEARCH, *named) if not (ROOT / path).exists()] == []
    assert "research" in [stage.name for stage in run.everything()]


@pytest.mark.process
def test_a_commit_that_is_not_here_counts_as_changed():
    assert run.changed_since("0" * 40, ["protos"])
    assert run.changed_since("", ["protos"])
    assert not run.changed_since("HEAD", ["a-path-without-files"])


def test_stages_of_the_second_tier_are_skipped_by_name_behind_the_deadline(monkeypatch, capsys):
    monkeypatch.setenv("HETERORL_TEST_DEADLINE", "1")
    ran = []
    monkeypatch.setattr(run, "run_stage", lambda stage, stops: ran.append(stage.name) or run.Outcome(stage=stage))

    outcomes = run.run_stages([run.QUICK, run.CONFORMANCE], stops=True)

    assert ran == ["tests without processes"]
    assert "conformance of vLLM: skipped" in capsys.readouterr().out
    assert "conformance of vLLM              skipped" in run.summary(outcomes)


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "healed", "failed"),
    [
        (FLAKY, 1, 0),
        (FLAKY.replace("known =", "known = 0 and"), 0, 1),
        (FLAKY.replace("assert known", "assert known and __import__('pytest').skip('not here')"), 0, 1),
    ],
    ids=["passes", "fails", "is skipped"],
)
def test_what_failed_runs_once_more_alone_and_is_named(stage, text, healed, failed):
    outcome = run.run_stage(stage(text), stops=True)

    assert (len(outcome.healed), len(outcome.failed)) == (healed, failed)
    assert all(name.endswith("::test_passes_the_second_time") for name in (*outcome.healed, *outcome.failed))
    assert ("RERUN passed alone: " in run.summary([outcome])) is bool(healed)


@pytest.mark.process
def test_six_failures_are_no_flakes(stage, capfd):
    outcome = run.run_stage(stage("\n".join(f"def test_{number}(): assert False" for number in range(8))), stops=True)

    assert len(outcome.failed) == run.MAX_FLAKES + 1
    assert "once more" not in capfd.readouterr().out


@pytest.mark.process
def test_processes_of_tests_keep_byte_code_where_an_image_forbids_it(stage, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    outcome = run.run_stage(stage("import sys\ndef test_it(): assert not sys.dont_write_bytecode"), stops=True)

    assert outcome.counts == {"passed": 1}


def test_a_stage_without_one_of_its_files_fails(stage):
    outcome = run.run_stage(replace(stage("def test_a(): pass"), arguments=["tests/test_that_moved.py"]), stops=True)

    assert outcome.failed == ["no such path: tests/test_that_moved.py"]


@pytest.mark.process
def test_what_cannot_be_collected_fails(stage):
    outcome = run.run_stage(stage("import a_package_that_is_not_there"), stops=True)

    assert outcome.failed
    assert run.summary([outcome]).endswith("0 passed, 1 failed, 0 skipped")


def test_near_a_change_are_files_that_import_or_name_it(tmp_path):
    tests = tmp_path / "tests" / "unit"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text("from heterorl.learner.loss import loss_spec")
    (tests / "test_b.py").write_text("import heterorl.learner.learner_app")
    (tests / "test_c.py").write_text('TEXTS = list(ROOT.glob("*.rst")) + [ROOT / "Makefile"]')

    def named(*changed):
        return [Path(name).stem for name in near.files_near(changed, root=tmp_path)]

    assert named("services/learner/loss/loss_spec.py") == ["test_a"]
    assert named("services/learner/learner_app.py", "docs/losses.rst") == ["test_b", "test_c"]
    assert named("services/learner/b.py") == ["test_b"]
    assert named("Makefile") == ["test_c"]
    assert named("tests/unit/test_a.py") == ["test_a"]
    assert named("LICENSE") == []

    own = tmp_path / "research" / "tests"
    own.mkdir(parents=True)
    (own / "test_d.py").write_text("from heterorl_research.lab import cell\nfrom research.tests.support import cells")
    assert named("research/lab/cell.py") == named("research/tests/support/cells.py") == ["test_d"]


def test_a_mark_of_a_tier_stands_in_the_file_of_its_test():
    """A tier leaves unread each file without the words `mark.process`."""
    shared = (ROOT / "tests" / "support").rglob("*.py")

    assert [path.name for path in shared if "mark.process" in path.read_text()] == []
