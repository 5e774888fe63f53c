"""The peers of benchmarks.ingest: PostgreSQL and NATS JetStream, each a real server process on one core.

Both come from packages (see benchmarks.ingest); their clients, psycopg and nats-py, are imported where they are needed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ingest_servers import CONNECT_S, Missing, on_core
from heterorl.common.types.rollout import SealedGroup
from tests.support.ports import free_port


class _Spawned:
    """A server that is a process of ours with its children."""

    def __init__(self, core: int) -> None:
        self._core = core
        self._process: subprocess.Popen[bytes] | None = None

    def _spawn(self, command: Sequence[str], directory: Path) -> None:
        with on_core(self._core), (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)

    def cpu_s(self) -> float:
        """CPU of the process and its children; those that ended are counted by their parent."""
        assert self._process is not None
        top = psutil.Process(self._process.pid)
        return sum(
            times.user + times.system
            for times in (process.cpu_times() for process in [top, *top.children(recursive=True)])
        )

    async def stop(self) -> None:
        """Ask it to end."""
        if self._process is not None:
            # PostgreSQL's runs under another user's shell: the signal is for the server below it.
            below = psutil.Process(self._process.pid).children()
            os.kill(below[0].pid if below and self._is_wrapped() else self._process.pid, signal.SIGINT)
            await asyncio.to_thread(self._process.wait, 30)

    def _is_wrapped(self) -> bool:
        return False


def _postgres_binaries() -> Path:
    found = [*Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found).parent
    which = shutil.which("postgres")
    if which is None:
        raise Missing("postgres is not installed")
    return Path(which).resolve().parent


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


class Postgres(_Spawned):
    """PostgreSQL with its own defaults: synchronous_commit and fsync are on."""

    name = "postgres"
    durability = "answer after COMMIT: fsync = on, synchronous_commit = on; one row a group, a transaction a push"

    async def start(self, directory: Path, *, num_tokens: int) -> None:  # noqa: ARG002 - bytes are bytes here
        """Make a database and start its server."""
        try:
            import psycopg  # noqa: F401
        except ImportError as error:
            raise Missing("psycopg is not installed") from error
        binaries = _postgres_binaries()
        data = directory / "data"
        data.mkdir()
        # The server refuses to run as root.
        self._user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._user:
            shutil.chown(directory, "postgres")
            shutil.chown(data, "postgres")
        initdb = [*self._user, str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", "bench"]
        done = await asyncio.to_thread(subprocess.run, initdb, capture_output=True, check=False, cwd=directory)
        if done.returncode:
            raise Missing(f"initdb failed: {done.stderr[-300:].decode(errors='replace')}")
        self._port = free_port()
        server = [str(binaries / "postgres"), "-D", str(data), "-p", str(self._port), "-k", str(directory), "-c",
                  "listen_addresses=127.0.0.1"]  # fmt: skip
        self._spawn([*self._user, *server], directory)
        connection = await self._connect()
        await connection.execute(
            "CREATE TABLE groups (site text, incarnation text, sequence bigint, payload bytea,"
            " PRIMARY KEY (site, incarnation, sequence))"
        )
        await connection.commit()
        await connection.close()

    def _is_wrapped(self) -> bool:
        return bool(self._user)

    async def _connect(self) -> Any:
        import psycopg

        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return await psycopg.AsyncConnection.connect(
                    f"host=127.0.0.1 port={self._port} user=bench dbname=postgres"
                )
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def client(self, number: int) -> PostgresClient:  # noqa: ARG002 - all are alike
        """A connection."""
        return PostgresClient(await self._connect())


class PostgresClient:
    """A connection of psycopg."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def push(self, groups: Sequence[SealedGroup]) -> None:
        """Insert and commit."""
        async with self._connection.cursor() as cursor:
            await cursor.executemany(
                "INSERT INTO groups VALUES (%s, %s, %s, %b)",
                [(group.id.site, group.id.incarnation, group.id.sequence, group.data) for group in groups],
            )
        await self._connection.commit()

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()


async def _unsaid(_: Exception) -> None:
    """A server that begins refuses connections."""


class JetStream(_Spawned):
    """NATS JetStream: one stream of files, every message synced before its acknowledgement."""

    name = "jetstream"
    durability = "publish acknowledgement: file storage, sync_interval = always; a push is published as one window"

    async def start(self, directory: Path, *, num_tokens: int) -> None:  # noqa: ARG002 - bytes are bytes here
        """Start a server with one stream."""
        try:
            import nats  # noqa: F401
        except ImportError as error:
            raise Missing("nats-py is not installed") from error
        self._port = free_port()
        config = directory / "nats.conf"
        config.write_text(
            f"host: 127.0.0.1\nport: {self._port}\nmax_payload: 8MB\n"
            f'jetstream {{ store_dir: "{directory}", sync_interval: always }}\n'
        )
        for binary in (str(Path(sys.executable).with_name("nats-server")), "nats-server"):
            command = [binary, "-c", str(config)]
            if await asyncio.to_thread(_runs, [*command, "-t"]):
                break
        else:
            raise Missing("no nats-server that knows sync_interval = always (2.10 or later)")
        self._spawn(command, directory)
        client = await self.client(0)
        await client.open_stream()
        await client.close()

    async def client(self, number: int) -> JetStreamClient:  # noqa: ARG002 - all are alike
        """A connection."""
        import nats

        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return JetStreamClient(
                    await nats.connect(f"nats://127.0.0.1:{self._port}", connect_timeout=5, error_cb=_unsaid)
                )
            except (OSError, nats.errors.Error):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)


class JetStreamClient:
    """A connection of nats-py."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._stream = connection.jetstream(publish_async_max_pending=1 << 16)

    async def open_stream(self) -> None:
        """Make the stream of all groups."""
        await self._stream.add_stream(name="groups", subjects=["groups.>"], storage="file")

    async def push(self, groups: Sequence[SealedGroup]) -> None:
        """Publish all, then wait for all acknowledgements."""
        waiting = [
            await self._stream.publish_async(f"groups.{group.id.site}", group.data, wait_stall=60) for group in groups
        ]
        for acknowledgement in waiting:
            await acknowledgement

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()
