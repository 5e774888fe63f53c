"""A port of a process that a test kills and starts again is given to nothing else meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ports

ROOT = Path(__file__).parents[2]
FIRST = """
from tests.support import ports

class First:
    sample = staticmethod(lambda choices, count: choices[:count])

ports.random.SystemRandom = First
print(ports.free_port(), ports.free_port())
"""


@pytest.mark.process
def test_port_is_outside_of_the_kernels_range_and_no_other_process_takes_it(monkeypatch):
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    monkeypatch.setattr(ports.random, "SystemRandom", lambda: First)
    found = [ports.free_port(), ports.free_port()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    found += map(int, told.stdout.split())

    assert len(set(found)) == 4
    assert not [port for port in found if low <= port <= high]


class First:
    """Draws the ports in their order."""

    sample = staticmethod(lambda choices, count: choices[:count])
