"""A run from one run.toml: the commands of its units as processes, over certificates that its own script made."""

import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.identity.tls import TlsConfig, files_in
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster, free_port
from tests.support.tools import check

HOST = "127.0.0.1"


class Machine:
    """A host whose /etc and /var/lib/heterorl are directories, and whose systemd is this test."""

    def __init__(self, tree: Path, directory: Path) -> None:
        self.etc = tree / HOST / "etc"
        self.state = directory / "state"
        self.credentials = tree / HOST / "credentials"
        self.logs = directory / "logs"
        self.logs.mkdir()
        for path in (self.etc / "heterorl").glob("*.toml"):
            path.write_text(self._here(path.read_text(), path.stem))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _here(self, text: str, name: str) -> str:
        # systemd copies each file of LoadCredential=tls:DIR to %d/tls_FILE.
        text = text.replace("/etc/heterorl", str(self.etc / "heterorl")).replace("/var/lib/heterorl", str(self.state))
        return text.replace("%d/tls_", f"{self.credentials / name}/")

    def start(self, unit: Path) -> None:
        name = unit.stem.removeprefix("heterorl-")
        [line] = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        variables = {"HETERORL_NPROC": "1"}
        env = self.etc / "heterorl" / f"{name}.env"
        if env.exists():
            variables |= dict(pair.split("=", 1) for pair in env.read_text().split())
        command = self._here(line.removeprefix("ExecStart="), name)
        for key, value in variables.items():
            command = command.replace(f"${{{key}}}", value)
        program, *arguments = shlex.split(command)
        assert program == "/opt/heterorl/current/bin/heterorl"
        (self.state / name).mkdir(parents=True)
        with (self.logs / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "heterorl", *arguments], stdout=log, stderr=log, env=os.environ | variables
            )

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def said(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.logs.iterdir()))


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_units_of_one_run_file_train_two_versions_over_certificates(tmp_path):
    cluster = Cluster(tmp_path)
    port, relay_port = free_port(), free_port()
    run = {
        "run": {
            "id": "launched", "model_dir": str(cluster.model_dir), "group_size": 2, "groups_per_step": 4, "max_steps": 2,
            "task": {"name": "arithmetic", "digits": 1}, "sampling": {"max_new_tokens": 3},
        },
        "coordinator": {"host": HOST, "port": port, "config": {"metrics_port": 0}},
        "learner": {"backend": {"lr": 1e-3, "threads": 1}, "config": {"metrics_port": 0}},
        "relays": [{"site": "eu", "host": HOST, "port": relay_port, "config": {"metrics_port": 0}}],
        "samplers": [
            {
                "site": "eu", "count": 2, "relay": "eu", "engine": {"threads": 1, "batch_rows": 16},
                "config": {"metrics_port": 0, "heartbeat_s": 0.5},
            }
        ],
        "tls": {"directory": str(tmp_path / "authority")},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    tree = tmp_path / "tree"
    result = CliRunner().invoke(app, ["launch", "systemd", str(tmp_path / "run.toml"), "--out", str(tree)])
    assert result.exit_code == 0, result.exception
    program = tmp_path / "heterorl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m heterorl "$@"\n')
    program.chmod(0o755)
    check("env", f"HETERORL={program}", str(tree / "certs.sh"))

    machine = Machine(tree, tmp_path)
    started = [line.split()[4] for line in (tree / "README.md").read_text().splitlines() if "enable --now" in line]
    assert started == [
        f"heterorl-{name}.service" for name in ("coordinator", "relay-eu", "learner", "sampler-eu-1", "sampler-eu-2")
    ]
    try:
        for unit in started:
            machine.start(machine.etc / "systemd" / "system" / unit)
        async with CoordinatorClient(f"{HOST}:{port}", tls=TlsConfig(**files_in(tree / "operator"))) as client:
            status = await cluster.until(client, lambda status: (status.head_version or 0) >= 2, timeout_s=180)
    except TimeoutError:
        pytest.fail(machine.said())
    finally:
        machine.stop()

    assert status.head_version == 2
    assert {site.site for site in status.sites} == {"eu.1", "eu.2"}
    assert tomllib.loads((machine.etc / "heterorl" / "sampler-eu-1.toml").read_text())["coordinator"].endswith(
        str(relay_port)
    )
