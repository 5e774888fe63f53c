"""A run that `heterorl launch systemd` rendered, started without systemd: the commands of its units, as processes."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w
from typer.testing import CliRunner

from heterorl.cli.main import app
from tests.support.limits import WAIT_S
from tests.support.tools import check


def rendered(run: dict[str, Any], directory: Path) -> Path:
    """The files of a run, with the certificates that its own script makes."""
    (directory / "run.toml").write_text(tomli_w.dumps(run))
    tree = directory / "tree"
    result = CliRunner().invoke(app, ["launch", "systemd", str(directory / "run.toml"), "--out", str(tree)])
    assert result.exit_code == 0, result.exception
    program = directory / "heterorl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m heterorl "$@"\n')
    program.chmod(0o755)
    check("env", f"HETERORL={program}", str(tree / "certs.sh"))
    return tree


def units(tree: Path) -> list[str]:
    """The units that README.md says to start, in its order."""
    return [line.split()[4] for line in (tree / "README.md").read_text().splitlines() if "enable --now" in line]


class Machine:
    """A host whose /etc and /var/lib/heterorl are directories, and whose systemd is this test."""

    def __init__(self, tree: Path, directory: Path, host: str = "127.0.0.1") -> None:
        self.etc = tree / host / "etc"
        self.state = directory / host / "state"
        self.credentials = self.etc / "heterorl" / "credentials"
        self.logs = directory / host / "logs"
        self.logs.mkdir(parents=True)
        for path in (self.etc / "heterorl").glob("*.toml"):
            path.write_text(self._here(path.read_text(), path.stem))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _here(self, text: str, name: str) -> str:
        # systemd copies each file of LoadCredential=tls:DIR to %d/tls_FILE.
        text = text.replace("/etc/heterorl", str(self.etc / "heterorl")).replace("/var/lib/heterorl", str(self.state))
        return text.replace("%d/tls_", f"{self.credentials / name}/")

    def start(self, unit_name: str) -> None:
        """Start what a unit of /etc/systemd/system would."""
        unit = self.etc / "systemd" / "system" / unit_name
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

    async def until_said(self, name: str, words: str) -> None:
        """Wait until a node's log has these words; a test has a limit of its own."""
        while words not in (self.logs / f"{name}.log").read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)

    def kill(self, name: str) -> None:
        """Kill a node by SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End all by SIGTERM, the last started first."""
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.logs.iterdir()))
