"""The coordinator runs on requirements/coordinator.txt alone: whatever else is installed, it does not ask for it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BLOCKED_IMPORT = """
import importlib.abc, re, sys
from importlib.metadata import packages_distributions

canonical = lambda name: re.sub(r"[-_.]+", "-", name).lower()
lines = open("requirements/coordinator.txt").read().splitlines()
allowed = {canonical(line.split("==")[0]) for line in lines if not line.startswith("#")} - set(sys.argv[1:])
owners = packages_distributions()

class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        # What no package owns is the interpreter's own, or is not there at all.
        if top == "heterorl" or top not in owners or {canonical(o) for o in owners[top]} & allowed:
            return None
        raise ImportError(f"{name} is not in requirements/coordinator.txt", name=name)

sys.meta_path.insert(0, Gate())
import heterorl.cli.main, heterorl.coordinator.coordinator_app, heterorl.coordinator.coordinator_config, heterorl.cli.live.run_tables
import heterorl.certs.enrolment_server, heterorl.certs.enrolment_client, heterorl.report.past_run, heterorl.cli.live.watch_commands
import heterorl.doctor.examine, heterorl.cli.doctor; heterorl.cli.doctor.guess_role(None, ["run_id=r"])
import heterorl.common.process.logs, heterorl.common.rpc.client, heterorl.common.rpc.channel, heterorl.common.rpc.calls
"""


def coordinator_without(*names):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, *names],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.timeout(200)
def test_coordinator_and_its_commands_import_with_everything_else_blocked():
    result = coordinator_without()

    assert result.returncode == 0, result.stderr


@pytest.mark.process
@pytest.mark.timeout(200)
def test_the_gate_stops_what_is_not_in_the_file():
    # Its module has another name.
    result = coordinator_without("grpcio-health-checking")

    assert result.returncode != 0
    assert "is not in requirements/coordinator.txt" in result.stderr


def test_file_names_no_package_of_models():
    text = (ROOT / "requirements" / "coordinator.txt").read_text()

    assert not [name for name in ("torch", "transformers", "safetensors", "pytest", "matplotlib") if name in text]
