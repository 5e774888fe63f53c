"""The agent of torchrun that started this process: the kernel ends a rank with it.

An agent that is killed cannot end its processes. Those of another machine than 0 would train on, and nobody could stop
them or start them again; a new agent would find its GPUs taken.

Guarantees: a rank ends as soon as its agent has, by SIGKILL, whatever it is inside of and even while it is stopped. The
other ranks see its connections close. On Linux; elsewhere what started the agent ends the rank.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1


def end_with_agent(environment: Mapping[str, str]) -> bool:
    """Have the kernel end this process when its parent ends; returns whether it will.

    Where torchrun did not start it nothing is asked for: the parent may be a shell that is meant to end first.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    # The parent is the thread that started this process, and torchrun's is its main thread.
    options = (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return int(ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, options))) == 0
