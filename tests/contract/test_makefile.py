"""The Makefile: every target is shown with its sentence, and each of a family runs what its name says."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.run import NOT_HERE, SERVICES, everything
from tests.support.tools import check, tool

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Makefile").read_text()
TARGETS = sorted(set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", TEXT, re.MULTILINE)))
BENCHES = {
    "group-rows": "group_rows", "learner": "learner", "groups": "groups", "losses": "loss_step",
    "merge": "weights_merge", "weights": "weights",
    "ingest": "ingest", "load": "load_memory", "loop": "loop", "loop-tools": "loop_tools", "sites": "sites", "slices": "slices",
    "starts": "starts", "swaps": "swaps",
    "overlap": "overlap", "publish": "publish", "pull": "pull", "serve": "serve", "sampler": "sampler", "verify": "verify",
    "forward": "forward", "relay": "relay", "routing": "routing", "parity": "parity",
    "regions": "regions", "verify-turns": "verify_turns",
}  # fmt: skip
"""What is measured to the module that measures it."""
RESULTS = {
    "merge": "weights_merge", "group-rows": "group_rows", "verify-turns": "verify_turns",
    "loop-tools": "loop_tools",
}  # fmt: skip
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def make(*words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "T"}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()


def recipe(*words):
    """What a target would run once its environment is there."""
    return shlex.split(make("--dry-run", *words)[-1])


def test_make_help_shows_every_target():
    shown = make("help")

    assert sorted(line.split()[0] for line in shown) == TARGETS
    assert len(TARGETS) > 30
    # Sentences begin in one column, whatever the longest name is.
    column = shown[0].index("Show the targets")
    assert [line for line in shown if not (line[column - 1] == " " and line[column].isupper())] == []


def test_no_file_can_stand_for_a_target():
    (phony,) = [line for line in make("--dry-run", "--print-data-base", "help") if line.startswith(".PHONY:")]

    assert sorted(phony.split()[1:]) == TARGETS


def test_every_benchmark_has_a_target():
    assert {name for name in TARGETS if name.startswith("bench-")} == {f"bench-{name}" for name in (*BENCHES, "lab")}


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_benchmark_runs_its_module_and_writes_its_results(name):
    words = recipe(f"bench-{name}", "MODEL=/models/x")

    assert words[words.index("-m") + 1] == f"benchmarks.{BENCHES[name]}"
    assert words[-2:] == ["--out", f"benchmarks/results/{RESULTS.get(name, name)}.json"]
    assert ("OMP_NUM_THREADS=1" in words) is (name != "losses")
    has_engines = name in ("sampler", "loop", "load", "parity", "publish", "routing")
    assert f".venv{'-engines' if has_engines else ''}/bin/python" in words
    assert ("VLLM_CPU_OMP_THREADS_BIND=nobind" in words) is (name in ("sampler", "loop", "routing"))
    assert (words[-5:-2] == ["--model", "/models/x", "--resume"]) is (name == "forward")
    assert (words[-6:-2] == ["--minutes", "30", "--picture", "docs/regions.png"]) is (name == "regions")


def test_every_experiment_with_a_target_is_there():
    names = [name.removeprefix("lab-") for name in TARGETS if name.startswith("lab-")]

    assert names == ["quick", "recommend", "stale256", "stale64"]
    for name in names:
        assert recipe(f"lab-{name}") == [".venv/bin/heterorl", "lab", "run", name]
        assert (ROOT / "research" / "lab" / "experiments" / f"{name}.toml").is_file()


def test_each_tier_of_the_tests_has_a_target():
    assert recipe("test", "T=tests/unit/sampler")[-1] == "tests/unit/sampler"
    for target, words in {
        "test": ["landing"],
        "test-all": ["all"],
        "test-fast": ["fast"],
        "test-near": ["near"],
        "test-research": ["research"],
        "test-postgres": ["postgres"],
        "test-bucket": ["bucket"],
        "steady": ["steady", "tests/unit/test_x.py"],
    }.items():
        # STAGES may be set by the call of make that runs this test.
        assert recipe(target, "STAGES=", "T=tests/unit/test_x.py" if target == "steady" else "T=")[-len(words) - 2 :] == [
            "-m", "tests.run", *words
        ]  # fmt: skip
    assert recipe("test-bucket", "TESTS=tests/unit/x.py")[-3:] == ["tests.run", "bucket", "tests/unit/x.py"]
    assert recipe("test-near", "BASE=main")[-2:] == ["--base", "main"]


def test_learner_on_several_machines_is_tested_or_by_a_number_ended_so_often():
    for words in (recipe("test-nodes"), recipe("test-nodes", "N=0")):
        assert words[words.index("-m") - 2 :][:4] == [".venv/bin/pytest", "-q", "-m", "nodes"]
        assert words[-1] == "tests/integration/test_torchrun.py"

    words = recipe("test-nodes", "N=20")
    assert words[words.index("-m") + 1 :] == [
        "campaigns.nodes", "--kills", "20", "--out", "runs/nodes", "--json", "benchmarks/results/nodes.json"
    ]  # fmt: skip


def test_check_and_the_whole_run_leave_nothing_out():
    checks = "\n".join(make("--dry-run", "check"))
    run = (ROOT / ".ci" / "run").read_text().splitlines()
    made = [word for line in run if line.startswith("make ") for word in line.split()[1:] if word in TARGETS]

    tools = (
        "ruff check --no-cache .",
        "ruff format --check .",
        "mypy",
        "lint-imports",
        "mkdocs build --strict",
        "buf lint",
        "buf breaking",
    )
    assert [words for words in tools if f".venv/bin/{words}" not in checks] == []
    # Cheap things first.
    assert made == ["style", "types", "test"]
    promise = run.index('export HETERORL_TEST_REQUIRES="postgresql moto prometheus"')
    assert promise < run.index("make test")
    assert run.index("export HETERORL_TEST_DEADLINE") < run.index("make style")


def test_the_run_of_everything_leaves_no_test_out():
    """Each mark that a stage leaves out is another stage's, each folder too; those are the exceptions."""
    stages = everything()
    marks = [stage.marks for stage in stages]

    assert {"compiler", "nodes", f"not process and not slow and {NOT_HERE}"} <= set(marks)
    assert f"(process or slow) and {NOT_HERE}" in marks
    assert NOT_HERE.split(" and ") == ["not image", "not compiler", "not nodes"]
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    ignored = {word.removeprefix("--ignore=tests/") for word in SERVICES if word.startswith("--ignore")}
    assert ignored <= folders
    assert ignored - {Path(word).name for stage in stages for word in stage.arguments if word[0] != "-"} == {"gpu"}
    assert any("--cov" in stage.arguments for stage in stages)
    assert any("--fail-under=90" in stage.command for stage in stages)


def test_the_workflow_runs_what_must_hold():
    for name, command in (("ci.yml", ".ci/run"), ("all.yml", "make test-all")):
        check(tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(WORKFLOW.with_name(name)))
        (job,) = yaml.safe_load(WORKFLOW.with_name(name).read_text())["jobs"].values()
        assert job["steps"][-1]["run"] == command
        assert job["steps"][0]["with"]["fetch-depth"] == 0
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_workflows_schema_refuses_a_wrong_key(tmp_path):
    wrong = tmp_path / "ci.yml"
    wrong.write_text(WORKFLOW.read_text().replace("runs-on", "run-on"))

    with pytest.raises(AssertionError, match="runs-on|run-on"):
        check(tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(wrong))
