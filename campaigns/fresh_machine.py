"""Bring a fresh Debian with systemd to a running run as the documentation says, and time each step.

    python -m campaigns.fresh_machine --base DIR [--bind DIR ...] [--pip-conf FILE] --json benchmarks/results/machine.json

The machine is a systemd-nspawn container with its own processes, files, users and systemd; it shares network and cores
with its host. Its Debian, made once by debootstrap in --base, has Python, git and PostgreSQL, and no compiler. It runs
PostgreSQL, two coordinators, a relay, a learner and two samplers; an S3 server runs on the host. The commands come from
docs/launch.md and from the README.md of `heterorl launch`. Then it kills the active coordinator for good. It needs
root, debootstrap and systemd-container.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from campaigns.debian import Steps, block, make_base, until
from heterorl.common.generation.tiny_model import write_tiny_model
from tests.support.bucket import BUCKET, KEY, SECRET, BucketServer

ROOT = Path(__file__).parents[1]
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
KEYS = "/etc/heterorl/bucket"
PASSWORD = "of-the-tests"
DATABASE = f"create role heterorl login password '{PASSWORD}'; create database heterorl owner heterorl"
VERSION = 2


class Machine:
    """A running copy of the base."""

    def __init__(self, base: Path, directory: Path, binds: list[Path]) -> None:
        self.root = directory / "machine"
        subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(self.root)], check=True)
        (self.root / "etc" / "hostname").write_text("localhost\n")
        if not Path("/run/systemd").is_dir():  # a host without systemd; nspawn asks for its directory
            Path("/run/systemd").mkdir()
        words = [f"--bind-ro={path}" for path in (ROOT, *binds)]
        command = [
            "systemd-nspawn",
            "-D",
            str(self.root),
            "--boot",
            "--register=no",
            "--keep-unit",
            "--machine=fresh",
            "--hostname=localhost",
        ]
        self._log = (directory / "machine.log").open("wb")
        self._process = subprocess.Popen(
            [*command, "--resolv-conf=copy-host", "--console=pipe", *words],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._init = ""
        until(self._started)

    def _started(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text(errors="replace")[-2000:]
        found = subprocess.run(["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=False)
        self._init = found.stdout.strip()
        return bool(self._init) and self.try_run("systemctl is-system-running --wait").stdout.strip() in (
            "running",
            "degraded",
        )

    def try_run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a bash script as root in the machine."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.run(
            ["nsenter", "-t", self._init, "-a", "env", "-i", path, "HOME=/root", "LANG=C.UTF-8", "TERM=dumb",
             "bash", "-euo", "pipefail", "-c", script],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, script: str) -> str:
        """Run a bash script; returns its standard output, raises RuntimeError for an exit code other than 0."""
        done = self.try_run(script)
        if done.returncode:
            raise RuntimeError(f"{script}\nended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def said(self) -> str:
        """Last log lines of every unit."""
        words = "systemctl --failed --no-legend; journalctl --no-pager -n 80 -u 'heterorl-*'"
        return self.try_run(words).stdout

    def stop(self) -> None:
        if self._init:
            self.try_run("systemctl poweroff --force --force")
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()
        self._log.close()


def run_table(endpoint: str) -> dict[str, Any]:
    """run.toml with every kind of node."""
    payloads = {"bucket": BUCKET, "endpoint": endpoint, "credentials_file": KEYS}
    return {
        "run": {
            "id": "fresh", "model_dir": "/srv/model", "group_size": 4, "groups_per_step": 4, "max_steps": 100_000,
            "task": {"name": "arithmetic", "digits": 1}, "sampling": {"max_new_tokens": 3}, "loss": {"kind": "gepo"},
        },
        "coordinator": {
            "host": FIRST,
            "postgres": {"url": f"postgresql://heterorl@{FIRST}/heterorl", "standby": [SECOND]},
            "config": {"payloads": payloads},
        },
        "learner": {"backend": {"lr": 1e-4, "threads": 1}, "config": {"payload_urls": "any"}},
        "relays": [{"site": "eu", "host": FIRST, "config": {"payload_urls": "any"}}],
        "samplers": [
            {"site": "eu", "count": 2, "relay": "eu", "engine": {"threads": 1}, "config": {"payload_urls": "any"}}
        ],
        "tls": {"directory": "authority"},
    }  # fmt: skip


def install(machine: Machine, steps: Steps, endpoint: str) -> None:
    """Install everything, from bare Debian to units that are ready to start."""
    with steps.step("clone the sources"):
        machine.run(f"git clone -q file://{ROOT} /srv/heterorl")
    with steps.step("the operator's environment: pip install '.[launch]'"):
        machine.run("python3 -m venv /srv/operator && /srv/operator/bin/pip install -q '/srv/heterorl[launch]'")
    with steps.step("PostgreSQL: a role and a database"):
        machine.run(f'cd / && sudo -u postgres psql -q -c "{DATABASE.split(";")[0]}" -c "{DATABASE.split(";")[1]}"')
    (machine.root / "srv" / "run.toml").write_text(tomli_w.dumps(run_table(endpoint)))
    with steps.step("heterorl launch systemd run.toml"):
        machine.run("cd /srv && operator/bin/heterorl launch systemd run.toml --out launched")
    readme = (machine.root / "srv" / "launched" / "README.md").read_text()
    with steps.step("certs.sh"):
        machine.run("cd /srv/launched && HETERORL=/srv/operator/bin/heterorl ./certs.sh")
    with steps.step("deploy/install.sh: users, units, environments of all roles"):
        # Both hosts are this machine: the second one's installation must not undo what the first one's has put there.
        commands = reversed(block(readme, "Install").splitlines())
        script = "\n".join(commands).replace("deploy/install.sh", "/srv/heterorl/deploy/install.sh")
        machine.run(f"cd /srv/launched\n{script}")
    machine.run("chmod -R a+rX /srv/model")
    with steps.step("the secrets to their places"):
        keys = f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        (machine.root / "srv" / "keys").write_text(keys)
        (machine.root / "srv" / "pgpass").write_text(f"{FIRST}:5432:*:heterorl:{PASSWORD}\n")
        secrets = "\n".join(re.findall(r"^sudo install .* (?:PGPASS|KEYS) .*$", readme, re.MULTILINE))
        machine.run(secrets.replace("PGPASS", "/srv/pgpass").replace("KEYS", "/srv/keys"))


def status(machine: Machine) -> dict[str, Any] | None:
    """Output of `heterorl status --json`; None without an answer."""
    command = "timeout 20 /srv/operator/bin/heterorl status --json --credentials /srv/launched/operator"
    done = machine.try_run(f"{command} {FIRST}:50051,{SECOND}:50051")
    return json.loads(done.stdout) if done.returncode == 0 else None


def head(machine: Machine) -> int:
    """The newest version, or -1."""
    found = status(machine)
    return -1 if found is None or found["head_version"] is None else int(found["head_version"])


def run(machine: Machine, steps: Steps) -> dict[str, Any]:
    """Start everything, wait for versions, kill the active coordinator for good, wait for versions."""
    readme = (machine.root / "srv" / "launched" / "README.md").read_text()
    with steps.step("systemctl enable --now of every unit, in the README's order"):
        machine.run(block(readme, "Start"))
    with steps.step(f"until version {VERSION}"):
        until(lambda: head(machine) >= VERSION)
    machine.run(
        "systemctl mask --quiet --runtime --force heterorl-coordinator.service;"
        " systemctl kill --signal=KILL heterorl-coordinator.service"
    )
    before = head(machine)
    with steps.step("SIGKILL of the coordinator for good, until the standby answers"):
        until(lambda: status(machine) is not None)
    with steps.step(f"until {VERSION} versions more"):
        until(lambda: head(machine) >= max(before, VERSION) + VERSION)
    found = status(machine)
    assert found is not None
    assert machine.try_run("systemctl is-active heterorl-coordinator.service").returncode, "it is not gone"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a Debian by debootstrap; made when it is not there")
    parser.add_argument("--bind", type=Path, nargs="*", default=[], help="directories of packages that pip.conf names")
    parser.add_argument("--pip-conf", type=Path, help="how this network's pip finds packages")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(markup=False)
    make_base(options.base, options.mirror)
    steps, bucket = Steps(console), BucketServer()
    with tempfile.TemporaryDirectory(prefix="heterorl-machine-") as name:
        machine = Machine(options.base, Path(name), options.bind)
        try:
            shutil.copy("/etc/ssl/certs/ca-certificates.crt", machine.root / "etc" / "ssl" / "certs")
            if options.pip_conf:
                shutil.copy(options.pip_conf, machine.root / "etc" / "pip.conf")
            write_tiny_model(machine.root / "srv" / "model", seed=0)
            install(machine, steps, bucket.endpoint)
            found = run(machine, steps)
        except (RuntimeError, TimeoutError):
            console.print(machine.said())
            raise
        finally:
            machine.stop()
            bucket.stop()
    steps.show()
    results = {"rows": steps.rows, "versions": found["head_version"], "ledger": found["ledger"]}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
