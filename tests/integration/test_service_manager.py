"""Every service as a service manager sees it: READY when it serves, WATCHDOG from its loop, STOPPING at SIGTERM."""

import asyncio
import contextlib
import os
import signal
import socket

import psycopg
import pytest

from heterorl.demo.processes import Child
from tests.support.cluster import Cluster
from tests.support.postgres import PostgresServer, binaries

WATCHDOG_S = 2.0


class Manager:
    """Listens where NOTIFY_SOCKET points."""

    def __init__(self, path, monkeypatch):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
        monkeypatch.delenv("WATCHDOG_PID", raising=False)

    async def hear(self, text, child):
        """Wait for a message; returns all that came up to it."""
        messages = []
        read = None
        while not messages or text not in messages[-1]:
            read = read or asyncio.create_task(asyncio.get_running_loop().sock_recv(self.socket, 4096))
            if (await asyncio.wait([read], timeout=1.0))[0]:
                messages.append(read.result().decode())
                read = None
            else:
                assert child.exit_code is None, child.log.read_text()
        return messages

    async def falls_silent(self, child):
        """Wait until the child says that it feeds no watchdog, and nothing comes for as long as the manager waits."""
        while "the watched thread owes an answer" not in child.log.read_text():
            assert child.exit_code is None, child.log.read_text()
            await asyncio.sleep(0.1)
        while True:
            try:
                async with asyncio.timeout(2 * WATCHDOG_S):
                    await asyncio.get_running_loop().sock_recv(self.socket, 4096)
            except TimeoutError:
                assert child.exit_code is None, child.log.read_text()
                return

    def pending(self):
        """What came and was not read, as one text."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self.socket.recv(4096).decode())
        return "\n".join(messages)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    listening = Manager(tmp_path / "notify", monkeypatch)
    yield listening
    listening.socket.close()


def end(child: Child) -> None:
    child.process.kill()
    child.process.wait()
    child.file.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["coordinator", "learner", "site-a"])
async def test_manager_hears_ready_watchdog_and_stopping(tmp_path, manager, name):
    # Learner and sampler find no coordinator: waiting for it is work that they are ready for.
    child = Cluster(tmp_path).start(name)
    try:
        await manager.hear("READY=1", child)
        for _ in range(3):
            await manager.hear("WATCHDOG=1", child)
        child.process.send_signal(signal.SIGTERM)
        await manager.hear("STOPPING=1", child)
        code = await asyncio.to_thread(child.process.wait)
    finally:
        end(child)

    assert code == 0, child.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_coordinator_is_ready_only_when_it_listens(tmp_path, manager):
    cluster = Cluster(tmp_path)
    with socket.socket() as taken:
        host, port = cluster.address.split(":")
        taken.bind((host, int(port)))
        taken.listen()
        child = cluster.start("coordinator")
        try:
            code = await asyncio.to_thread(child.process.wait)
        finally:
            end(child)

    assert code == 2, child.log.read_text()
    assert "READY=1" not in manager.pending()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: make programs")
async def test_watchdog_is_not_fed_while_the_database_hangs(tmp_path, manager):
    server = PostgresServer()
    url = server.make_schema("watched")
    child = Cluster(tmp_path, coordinator={"store": {"url": url}}).start("coordinator")
    frozen = 0
    try:
        await manager.hear("READY=1", child)
        await manager.hear("WATCHDOG=1", child)
        with psycopg.connect(url) as raw:
            query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'heterorl coordinator'"
            ((frozen,),) = raw.execute(query).fetchall()
        # Its host answers keepalives, and nothing else does: the lock stays where it is.
        os.kill(frozen, signal.SIGSTOP)
        await manager.falls_silent(child)
        os.kill(frozen, signal.SIGCONT)
        await manager.hear("WATCHDOG=1", child)
    finally:
        if frozen:
            os.kill(frozen, signal.SIGCONT)
        end(child)
        server.stop()
