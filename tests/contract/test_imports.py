"""What may be imported where, and which calls are banned."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "services").rglob("*.py"))
DECISIONS = [
    "coordinator/versions/lease.py",
    "coordinator/groups/schedule.py",
    "coordinator/groups/ledger.py",
    "coordinator/versions/path.py",
    "common/weights/manifest.py",
    "learner/loss/objectives.py",
    "learner/loss/policy_loss.py",
    "learner/loss/importance.py",
    "learner/loss/masks.py",
    "learner/loss/advantages.py",
    "learner/loss/denominators.py",
    "sampler/policy/delay.py",
]
LOOPS = [
    "common/pull/pull.py",
    "sampler/outbox/delivery.py",
    "sampler/rollout/generate.py",
    "sampler/policy/sync.py",
    "sampler/policy/record.py",
    "sampler/rollout/maker.py",
    "sampler/session.py",
]
"""These wait, but by the clock they are given, so that a virtual one can drive them."""


MAY = {
    # On a thread of gRPC that holds gRPC's own lock, for as long as that lock must be held; never on the event loop.
    "common/identity/credentials.py": {"time.sleep"},
    # Of a reward's worker, which waits for its turn and between tries, and is killed at its time limit.
    "common/tasks/rewards/remote/judge.py": {"time.sleep"},
    "common/tasks/rewards/remote/post.py": {"time.sleep"},
    # Of rank 0 before it has a group: a store can wait for a key, not for one that changes.
    "learner/backends/ranks/meeting.py": {"time.sleep"},
    "learner/backends/ranks/rounds.py": {"time.sleep"},
    # Of a store that is opened on a thread, while the session before it ends: the server has nothing to wait on.
    "coordinator/store/postgres/engine.py": {"time.sleep"},
    # Inside the sandbox, which is made to run what a model wrote.
    "common/tasks/rewards/sandbox/inside.py": {"exec"},
}


def _loaded(imports, *names):
    """Which of the named modules a new process has loaded after the imports."""
    code = f"import sys, {imports}; print(sorted(set(sys.modules) & set({names})))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return ast.literal_eval(result.stdout)


def test_coordinator_never_loads_torch():
    program = "heterorl.coordinator.app, heterorl.coordinator.config, heterorl.cli.main"

    assert _loaded(program, "torch", "transformers", "safetensors") == []


def test_learner_and_sampler_load_backends_and_engines_only_where_they_are_chosen():
    """The backends of several processes and vLLM take seconds to import; transformers is imported with a model."""
    program = "heterorl.learner.app, heterorl.learner.rank, heterorl.sampler.app"
    dear = ("torch.distributed.fsdp", "torch.distributed.tensor", "sympy", "deepspeed", "transformers", "vllm")

    assert _loaded(program, *dear) == []


def _calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def _violations(source: str) -> set[str]:
    tree = ast.parse(source)
    bad = _calls(tree) & {"eval", "exec", "torch.load", "torch.save", "yaml.load", "marshal.loads", "time.sleep"}
    bad |= _imports(tree) & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing.connection"}
    return bad


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_uses_no_unsafe_deserialisation(path):
    allowed = MAY.get(str(path.relative_to(ROOT / "services")), set())

    assert _violations(path.read_text()) == allowed


@pytest.mark.parametrize("source", ["import pickle", "torch.load('x')", "eval('1')", "from pickle import loads"])
def test_the_ban_finds_what_it_bans(source):
    assert _violations(source)


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
