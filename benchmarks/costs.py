"""CPU and memory of processes, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU that a process has taken, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def family_cpu_s(pid: int) -> float:
    """CPU that a process and those it began have taken, the ended ones among them."""
    root = psutil.Process(pid)
    spent = 0.0
    for process in (root, *root.children(recursive=True)):
        # One that has just ended counts with the root's children.
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            of_ended = times.children_user + times.children_system if process == root else 0.0
            spent += times.user + times.system + of_ended
    return spent


def resident_bytes(pid: int, field: str = "VmHWM") -> int:
    """A process's resident memory: at its peak since `forget_peak`, or now (`VmRSS`)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def forget_peak(pid: int) -> None:
    """Let the peak of a process count from now; 5 is the kernel's word for it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
