"""A real Prometheus with the deployed configuration, scraping a cluster of processes on loopback every second."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.limits import WAIT_S
from tests.support.ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS, PROMTOOL, AMTOOL = (shutil.which(name) for name in ("prometheus", "promtool", "amtool"))


@dataclass
class Prometheus:
    """A server process; `close` ends it."""

    directory: Path
    address: str
    process: subprocess.Popen[bytes]

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of the HTTP API; an error of the API is an AssertionError with its text."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[Any]:
        """Samples of an instant query that are numbers."""
        return [row for row in self.get("query", query=expression)["result"] if row["value"][1] != "NaN"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)


def metrics_port(log: Path) -> int | None:
    """The port that a process says it serves its metrics on."""
    found = re.search(r"metrics on port (\d+)", log.read_text()) if log.exists() else None
    return int(found.group(1)) if found else None


def start_prometheus(directory: Path, targets: list[dict[str, Any]], *, interval: str = "1s") -> Prometheus:
    """Start with the deployed configuration and rules; only interval and targets are the test's.

    Args:
        directory: for configuration, data and log.
        targets: as in a file of targets.
        interval: of scrapes and of the evaluation of rules.
    """
    assert PROMETHEUS is not None, "asked only where it is installed"
    directory.mkdir(parents=True)
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    (directory / "prometheus.yml").write_text(text.replace("15s", interval))
    (directory / "rules.yml").write_text((DEPLOY / "prometheus" / "rules.yml").read_text().replace("15s", interval))
    (directory / "targets").mkdir()
    # JSON is YAML.
    (directory / "targets" / "run.yml").write_text(json.dumps(targets))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={address}", "--log.level=warn",
            ],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    server = Prometheus(directory=directory, address=address, process=process)
    deadline = time.monotonic() + 2 * WAIT_S
    while True:
        try:
            server.get("status/buildinfo")
            return server
        except (urllib.error.URLError, AssertionError, ConnectionError):
            if process.poll() is not None or time.monotonic() > deadline:
                server.close()
                raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
