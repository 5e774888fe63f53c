"""Every directory of examples has a page, configurations that load and agree, and says what a run of it must reach."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest

from heterorl.common.process.config_file import load
from heterorl.common.types.common import StepReport
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.report.past_run import InUse, PastRun
from heterorl.sampler.sampler_config import SamplerConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")
SCHEMA = json.loads((EXAMPLES / "expected.schema.json").read_text(encoding="utf-8"))
MAX_PICTURE_BYTES = 200_000
LEARNERS_OF = {"own-loss": "own-reward"}
"""Directories whose learner runs with the coordinator and the sampler of another one."""


def text_of(name):
    return (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


def expected_of(name):
    return json.loads((EXAMPLES / name / "expected.json").read_text(encoding="utf-8"))


def configs_of(name):
    """By role; what is neither a coordinator's nor a learner's file is a site's."""
    found = {"coordinator": [], "learner": [], "sampler": []}
    schemas = {"coordinator": CoordinatorConfig, "learner": LearnerConfig, "sampler": SamplerConfig}
    for path in sorted((EXAMPLES / name).glob("*.toml")):
        role = next((role for role in ("coordinator", "learner") if path.stem.startswith(role)), "sampler")
        found[role].append(load(schemas[role], path))
    return found


def script():
    spec = importlib.util.spec_from_file_location("check_run", EXAMPLES / "check_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_page_configurations_and_what_to_expect(name):
    expected = expected_of(name)
    jsonschema.validate(expected, SCHEMA)

    assert expected["recipe"] == name
    assert configs_of(name)["learner"]
    assert f"[{name}]({name}/README.md)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECIPES)
def test_the_nodes_of_a_recipe_agree(name):
    found = configs_of(name)
    (learner,) = found["learner"]
    others = configs_of(LEARNERS_OF[name]) if name in LEARNERS_OF else found

    (coordinator,) = others["coordinator"]
    assert others["sampler"]
    for sampler in others["sampler"]:
        for key in ("sampling", "group_size", "model_dir", "coordinator", "use_chat_template", "lora"):
            assert getattr(learner, key) == getattr(sampler, key), key
        # How many workers compute rewards is a node's own; directories are written from the file's place on.
        own = {"reward_workers": 1, "reward_path": ""}
        assert learner.task.model_copy(update=own) == sampler.task.model_copy(update=own)
        assert {one.name for one in sampler.evaluation} <= {one.name for one in coordinator.evaluation}
    assert coordinator.run_id == learner.run_id
    assert coordinator.groups_per_version == learner.groups_per_step * learner.steps_per_version


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_page_calls_exists(name):
    text = text_of(name)
    scripts = re.findall(r"^(?:python )?(examples/[\w/.-]+\.(?:py|sh))(.*)$", text, re.MULTILINE)
    wrong = [path for path in re.findall(r"--config (examples/\S+\.toml)", text) if not (ROOT / path).is_file()]

    for path, rest in scripts:
        wrong += [] if (ROOT / path).is_file() else [path]
        source = (ROOT / path).read_text(encoding="utf-8")
        wrong += [option for option in re.findall(r"--[a-z-]+", rest.partition("#")[0]) if f'"{option}"' not in source]
    assert wrong == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_was_run_shows_what_it_measured_within_its_own_bounds(name):
    expected = expected_of(name)
    pictures = [EXAMPLES / name / picture for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text_of(name))]

    for picture in pictures:
        assert picture.stat().st_size < MAX_PICTURE_BYTES
    if not expected["was_run"]:
        return
    measured = expected["run"]["measured"]
    assert measured["steps"] == expected["run"]["steps"]
    assert [problem for bound in expected["bounds"] if (problem := script().problem(bound, measured))] == []


def test_a_run_that_goes_on_is_compared_later(monkeypatch, tmp_path, capsys):
    def in_use(directory):
        raise InUse(directory, None)

    module = script()
    monkeypatch.setattr(module, "read_run", in_use)
    monkeypatch.setattr(sys, "argv", ["check_run.py", str(EXAMPLES / "own-reward"), str(tmp_path)])

    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert f"a coordinator is running on {tmp_path}: compare when the run is over" in capsys.readouterr().err


def test_every_metric_that_can_be_bounded_is_measured():
    step = {name: 1.0 for name, kind in StepReport.__annotations__.items() if kind == "float"}
    whole = {name: 1 for name, kind in StepReport.__annotations__.items() if kind == "int"}
    reports = tuple(StepReport(**step, **{**whole, "step": number}, is_applied=True) for number in (1, 2))
    run = PastRun(
        run_id="run", sources=(), reports=reports, versions=({"version": 1, "bytes": 5, "full_bytes": 9},),
        evaluations=({"version": 0, "accuracy": 0.25}, {"version": 2, "accuracy": 0.5}),
    )  # fmt: skip

    found = script().measured(run)

    # Sets of samplers and the ledger are in a coordinator's store alone.
    assert found.keys() == set(SCHEMA["$defs"]["metric"]["enum"]) - {"sets_last", "unaccounted_groups"}
    assert found["held_out_gain"] == 0.25
    assert found["bytes_per_version"] == 5


@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ({"at_least": 0.5}, ""),
        ({"at_least": 0.6}, "below 0.6"),
        ({"at_most": 0.4}, "above 0.4"),
        ({"published": 0.9}, ""),
        ({"metric": "sets_last", "at_least": 0.1}, "not measured"),
    ],
)
def test_a_bound_that_is_not_kept_is_said(bound, problem):
    assert script().problem({"metric": "reward_last", **bound}, {"reward_last": 0.5}) == problem
