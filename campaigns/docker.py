"""A separate Docker daemon, and a package index for its builds."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.debian import until
from tests.support.tools import PROGRAMS

ROOT = Path(__file__).parents[1]


class Docker:
    """A Docker daemon in its own directory, with the environment that its clients need."""

    def __init__(self, directory: Path) -> None:
        socket = f"unix://{directory}/docker.sock"
        plugins = directory / "client" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(PROGRAMS.resolve() / "docker-compose")
        self._directory = directory
        self.environment = {**os.environ, "DOCKER_HOST": socket, "DOCKER_CONFIG": str(plugins.parent)}
        self._log = (directory / "dockerd.log").open("wb")
        words = [f"--data-root={directory}/data", f"--exec-root={directory}/exec", f"--pidfile={directory}/pid"]
        self._process = subprocess.Popen(["dockerd", *words, "-H", socket], stdout=self._log, stderr=subprocess.STDOUT)
        until(lambda: self.ask("info").returncode == 0)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the Docker client."""
        return subprocess.run(
            ["docker", *words], env=self.environment, capture_output=True, text=True, check=False, timeout=900
        )

    def tell(self, *words: str, text: str | None = None) -> str:
        """Run the Docker client, which must succeed; `text` is its standard input."""
        return run(["docker", *words], environment=self.environment, text=text)

    def stop(self) -> None:
        """End all containers and the daemon."""
        self.ask("rm", "--force", *self.ask("ps", "--all", "--quiet").stdout.split())
        self._process.terminate()
        self._process.wait(60)
        self._log.close()
        for space in (self._directory / "exec" / "netns").glob("*"):  # the daemon leaves them mounted
            subprocess.run(["umount", "--lazy", str(space)], check=False)


def run(command: list[str], *, environment: dict[str, str], where: Path = ROOT, text: str | None = None) -> str:
    """Output of a command; raises RuntimeError for an exit code other than 0."""
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False, input=text, timeout=1800
    )
    if done.returncode:
        raise RuntimeError(f"{command}\nended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")
    return done.stdout


@contextmanager
def index_of(wheels: Path | None, directory: Path, other: str) -> Iterator[str]:
    """A package index with the torch wheel of a directory; without a directory, the other index."""
    if wheels is None:
        yield other
        return
    pages = directory / "simple" / "torch"
    pages.mkdir(parents=True)
    for wheel in wheels.glob("torch-*.whl"):
        (pages / wheel.name).symlink_to(wheel)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
