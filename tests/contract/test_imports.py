"""What may be imported where, and which calls are banned."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_graph import imports
from tests.support.tools import tool

ROOT = Path(__file__).parents[2]
DECISIONS = [
    "coordinator/versions/lineage.py",
    "coordinator/groups/schedule.py",
    "coordinator/groups/ledger.py",
    "coordinator/versions/pull_plans.py",
    "common/weights/manifest.py",
    "learner/loss/objectives.py",
    "learner/loss/policy_loss.py",
    "learner/loss/importance.py",
    "learner/loss/group.py",
    "sampler/delay.py",
]
FOLDERS = {"heterorl": "services", "heterorl_research": "research"}
LOOPS = [
    "common/pull/puller.py",
    "sampler/outbox/delivery.py",
    "sampler/rollout/generation_loop.py",
    "sampler/weight_sync.py",
    "sampler/trust_record.py",
    "sampler/rollout/group_builder.py",
    "sampler/site_session.py",
]
"""These wait, but by the clock they are given, so that a virtual one can drive them."""

RULES = {"TID251", "S102", "S301", "S302", "S307", "S506"}
BANNED = [
    "import pickle",
    "from pickle import loads",
    "import dill, marshal, shelve, cloudpickle",
    "import multiprocessing.connection",
    "import torch; torch.load('x')",
    "torch.save('x', 'y')",
    "import yaml; yaml.load('x')",
    "eval('1')",
    "exec('1')",
    "import time; time.sleep(1)",
]
"""Each of them alone is refused; a place that must do it says why in its `noqa`."""


def _loaded(wanted, *names):
    """Which of the named modules a new process has loaded after the imports."""
    code = f"import sys, {wanted}; print(sorted(set(sys.modules) & set({names})))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return ast.literal_eval(result.stdout)


@pytest.mark.process
def test_coordinator_never_loads_torch():
    program = "heterorl.coordinator.coordinator_app, heterorl.coordinator.coordinator_config, heterorl.cli.main"

    assert _loaded(program, "torch", "transformers", "safetensors") == []


@pytest.mark.process
def test_learner_and_sampler_load_backends_and_engines_only_where_they_are_chosen():
    """The backends of several processes and vLLM take seconds to import; transformers is imported with a model."""
    program = "heterorl.learner.learner_app, heterorl.learner.rank_process, heterorl.sampler.sampler_app"
    dear = ("torch.distributed.fsdp", "torch.distributed.tensor", "sympy", "deepspeed", "transformers", "vllm")

    assert _loaded(program, *dear) == []


def _calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in imports(tree):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module or ""}
    return names


def _missing(tree: ast.AST) -> set[str]:
    """Modules of heterorl that a source imports from and that no file has; the stubs of the protos are made later."""
    modules = {name for name in _imports(tree) if name.startswith(("heterorl.", "heterorl_research."))}
    paths = {
        name: ROOT / FOLDERS[name.split(".")[0]] / Path(*name.split(".")[1:])
        for name in modules
        if "heterorl.v1" not in name
    }
    return {name for name, path in paths.items() if not path.is_dir() and not path.with_suffix(".py").is_file()}


def _test_modules(tree: ast.AST) -> set[str]:
    """What a source imports of files that hold tests."""
    names = _imports(tree)
    for node in imports(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name: name.split(".") for name in names}
    return {name for name, own in parts.items() if "tests" in own[:2] and any(part.startswith("test_") for part in own)}


def test_programs_import_modules_that_exist_and_hold_no_tests():
    """No other test imports most benchmarks; what tests share is in tests/support."""
    folders = ("benchmarks", "campaigns", "docs", "examples", "research", "tests")
    found = {}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        if wrong := _missing(tree) | _test_modules(tree):
            found[str(path.relative_to(ROOT))] = wrong

    assert found == {}


def test_an_import_of_what_is_not_there_or_of_tests_is_found():
    assert _missing(ast.parse("from heterorl.common.model.gone import a")) == {"heterorl.common.model.gone"}
    for source in (
        "from tests.unit.test_a import b",
        "import research.tests.unit.test_a",
        "from tests.e2e import test_a",
    ):
        assert _test_modules(ast.parse(f"def f():\n    {source}"))
    assert _test_modules(ast.parse("from tests.support.run import Run; from campaigns import kills")) == set()


def test_heterorl_imports_nothing_of_research():
    """Nor by a name in a text, but where the command line looks whether `lab` is there."""
    found = [path for path in (ROOT / "services").rglob("*.py") if "heterorl_research" in path.read_text()]

    assert [path.relative_to(ROOT).as_posix() for path in found] == ["services/cli/main.py"]


def _banned(source: str, name: str) -> list[int]:
    """Lines of a file that ruff refuses by the rules of this checkout."""
    command = [tool("ruff"), "check", "--output-format", "json", "--stdin-filename", name, "-"]
    result = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=False)
    return sorted({found["location"]["row"] for found in json.loads(result.stdout) if found["code"] in RULES})


@pytest.mark.process
def test_unsafe_deserialisation_is_banned():
    assert _banned("\n".join(BANNED), "services/common/wire/a.py") == list(range(1, len(BANNED) + 1))


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_read_no_clock_and_draw_no_randomness(name):
    banned = {"time", "random", "uuid", "secrets", "threading", "asyncio", "datetime", "os"}

    assert _imports(ast.parse((ROOT / "services" / name).read_text())) & banned == set()


@pytest.mark.parametrize("name", LOOPS)
def test_loops_take_time_and_randomness_from_their_caller(name):
    tree = ast.parse((ROOT / "services" / name).read_text())
    own = ("time.", "random.", "secrets.", "uuid.", "asyncio.sleep", "asyncio.timeout", "asyncio.wait_for")

    assert {call for call in _calls(tree) if call.startswith(own)} == set()
    assert "time" not in _imports(tree)
