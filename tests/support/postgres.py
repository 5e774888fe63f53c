"""PostgreSQL for tests: a real server in a directory of its own, reached by a Unix socket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql

from tests.support.debian import postgres_binaries as binaries
from tests.support.limits import WAIT_S

START_S = 2 * WAIT_S


class PostgresServer:
    """A server whose commits are durable as far as its disk is; the disk is memory where there is some.

    `settings` are parameters of the server, such as "wal_level=logical"; on a disk where `in_memory` is false.
    """

    def __init__(self, *settings: str, in_memory: bool = True) -> None:
        self._settings = [word for setting in settings for word in ("-c", setting)]
        folder = binaries()
        assert folder is not None, "PostgreSQL is not installed: apt-get install postgresql"
        self._binaries = folder
        shm = Path("/dev/shm")
        is_there = in_memory and os.access(shm, os.W_OK)
        self.directory = Path(tempfile.mkdtemp(prefix="heterorl-pg-", dir=shm if is_there else None))
        # The server refuses to run as root. Changing the user by a program, and not in a child of this process, spares
        # that child gRPC's handlers of fork, which may end it.
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            self._as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            shutil.chown(self.directory, "postgres", "postgres")
        made = [
            *self._as_user, folder / "initdb", "-D", self.directory / "data", "-A", "trust", "-U", "test", "-E", "UTF8",
            "-N",
        ]  # fmt: skip
        subprocess.run(made, check=True, capture_output=True, cwd=self.directory)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Of the server that was started last."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [
            *self._as_user, self._binaries / "postgres", "-D", self.directory / "data", "-k", self.directory,
            "-c", "listen_addresses=", "-c", "shared_buffers=32MB", "-c", "max_connections=100",
            *self._settings,
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url()).close()
                return
            is_late = self._process.poll() is not None or time.monotonic() > deadline
            assert not is_late, f"code {self._process.poll()}: " + (self.directory / "log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server and its sessions, as a crash of its host does."""
        assert self._process is not None
        # Stopped first, so that no session begins between the look and the kill.
        self._process.send_signal(signal.SIGSTOP)
        sessions = psutil.Process(self._process.pid).children()
        for one in (self._process, *sessions):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        self._process.wait(START_S)
        # A session that still dies holds the memory by which a new server would refuse to start.
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in sessions):
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server, remove what it had."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, schema: str = "public") -> str:
        """A store.url of this server; the schema must be there."""
        options = quote(f"-csearch_path={schema}")
        return f"postgresql:///postgres?host={quote(str(self.directory), safe='')}&user=test&options={options}"

    def make_schema(self, name: str) -> str:
        """The store.url of a schema that is made where it is missing; any text is a name."""
        schema = "s" + hashlib.sha256(name.encode()).hexdigest()[:16]
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        return self.url(schema)

    def drop_schemas(self) -> None:
        """Drop all schemas of tests, and end the sessions that use them."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND application_name LIKE 'heterorl%'"
            )
            names = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ~ '^s[0-9a-f]{16}$'").fetchall()
            for (name,) in names:
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
