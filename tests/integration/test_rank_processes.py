"""What a rank asks of its machine: to end it with its agent or when it stands still, and to take back freed blocks."""

import ast
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="options of Linux and of glibc")

# Its child asks as a rank does, says so, and waits for ever.
AGENT = """
import os, subprocess, sys
rank = '''
import os, sys, threading
from heterorl.learner.backends.ranks.rank_env import end_with_agent
print(os.getpid(), end_with_agent(os.environ), flush=True)
threading.Event().wait()
'''
subprocess.Popen([sys.executable, "-c", rank]).wait()
"""

# Stopped as by SIGSTOP.
STOPPED = """
import os, signal
from heterorl.learner.backends.ranks.heartbeats import Watchdog
watchdog = Watchdog(0.8)
os.kill(os.getpid(), signal.SIGSTOP)
"""

# Seconds left by the kernel's timer: nearly over, then postponed, then watched no more, although a late thread postpones.
RUNNING = """
import ctypes
from heterorl.learner.backends.ranks.heartbeats import Watchdog
def left():
    times = (ctypes.c_long * 4)()
    library.timer_gettime(watchdog._timer, ctypes.byref(times))
    return times[2] + times[3] / 1e9
watchdog = Watchdog(1000.0)
library = watchdog._library
watchdog._set(100.0)
seen = [left()]
for act in (watchdog.postpone, watchdog.close, watchdog.postpone):
    act()
    seen.append(left())
print(seen)
"""

# glibc takes blocks from its heap once a larger one has been freed; the last block then holds the end of the heap.
BLOCKS = """
import sys
from heterorl.learner import rank_process
from heterorl.learner.backends.ranks import rank_group
from heterorl.learner.backends.ranks.rank_env import RankEnv

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

class Used:
    def __init__(self, rank_env):
        self.rendezvous = self
        bytearray(20 << 20)
        before = resident_bytes()
        blocks = [b"x" * (12 << 20) for _ in range(8)]
        last = b"x" * (1 << 20)
        del blocks
        print(resident_bytes() - before - len(last))

    def hear(self, within_s):
        return ""

    def leave(self):
        pass

rank_group.RankGroup = Used
if sys.argv[1] == "as it is":
    rank_process.keep_freed_frames = lambda: False
env = RankEnv(rank=1, local_rank=0, world_size=2, local_world_size=1, host="127.0.0.1", port=1)
sys.exit(rank_process.follow(env))
"""


@pytest.fixture
def start_agent():
    agents = []

    def start(environment):
        environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"} | environment
        agents.append(
            subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, env=environment)
        )
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
        agent.wait()
        agent.stdout.close()


def test_rank_ends_with_its_agent_even_while_it_is_stopped(start_agent):
    agent = start_agent({"TORCHELASTIC_RUN_ID": "none"})
    pid, answer = agent.stdout.readline().split()
    assert answer == "True"
    os.kill(int(pid), signal.SIGSTOP)

    agent.kill()

    # The end of the pipe is that of the last process which holds it: a rank that lives on runs into the time limit.
    assert agent.stdout.read() == ""


def test_rank_that_torchrun_did_not_start_outlives_its_parent(start_agent):
    agent = start_agent({})
    pid, answer = agent.stdout.readline().split()
    assert answer == "False"

    agent.kill()
    agent.wait()

    os.kill(int(pid), signal.SIGKILL)  # fails for a process that has ended
    assert agent.stdout.read() == ""


def test_watchdog_ends_what_stands_still():
    assert subprocess.run([sys.executable, "-c", STOPPED], check=False).returncode == -signal.SIGKILL


def test_watchdog_that_is_postponed_begins_its_time_anew_and_a_closed_one_has_none():
    done = subprocess.run([sys.executable, "-c", RUNNING], capture_output=True, text=True, check=True)

    soon, postponed, closed, late = ast.literal_eval(done.stdout)
    assert 0 < soon <= 100 < postponed <= 1000
    assert closed == late == 0


@pytest.mark.slow
def test_rank_gives_freed_blocks_back():
    kept = {
        mode: int(subprocess.run([sys.executable, "-c", BLOCKS, mode], capture_output=True, check=True).stdout)
        for mode in ("as a rank", "as it is")
    }

    # 96 MiB were freed. The C library on its own keeps what lies below the last block.
    assert kept["as it is"] > 48 << 20, kept
    assert kept["as a rank"] < 8 << 20, kept
