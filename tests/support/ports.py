"""Ports on loopback for processes that a test kills and starts again."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
from pathlib import Path

import psutil


def free_port() -> int:
    """A port for a process that may be away for a while; no other test gets it.

    The kernel gives none of these to port 0 or to a connection, and this process holds a name for each.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    choices = [*range(10_000, low), *range(high + 1, 1 << 16)]
    # A kernel that keeps all of them may give a port away.
    for port in random.SystemRandom().sample(choices if len(choices) > 100 else range(10_000, 1 << 16), 100):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0heterorl-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        # The name is this process's until it ends.
        name.detach()
        return port
    raise AssertionError("no port is free outside of ip_local_port_range")


async def serves(process: subprocess.Popen[bytes], address: str) -> None:
    """Wait until a process listens at an address; a test has a limit of its own."""
    looked, port = psutil.Process(process.pid), int(address.rpartition(":")[2])
    while port not in [each.laddr.port for each in looked.net_connections("tcp") if each.status == psutil.CONN_LISTEN]:
        await asyncio.sleep(0.05)
        assert process.poll() is None, f"the process that was to serve ended with code {process.poll()}"
