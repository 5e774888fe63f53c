"""One process of bubblewrap from its start to its end: what it is told, what it says, what it took.

Its time is counted from when the foreign code begins. When this returns nothing of the namespace is left, and the
kernel has counted the processor time of all of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

START_TIMEOUT_S = 30.0
"""For a sandbox and its Python; it counts against no foreign code."""
MAX_REPORT_BYTES = 256
BEGAN = b"began "
_LOADED = b"loaded\n"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one process inside; `num_processes` and `work_bytes` hold for all of them together.

    `cpu_s` is processor time, `timeout_s` that of the clock for what sleeps; both from when the foreign code begins.
    """

    cpu_s: float
    timeout_s: float
    memory_bytes: int
    work_bytes: int
    output_bytes: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOutcome:
    """How it ended: what it wrote, as far as its limit; `status` is None where it was killed, `why` says for what.

    `used_s` is the processor time of all its processes since the foreign code began, `took_s` that of the clock.
    """

    status: int | None
    output: bytes
    report: bytes
    why: str = ""
    used_s: float = 0.0
    took_s: float = 0.0


def outcome_of(
    command: Callable[[int, int, int], list[str]], limits: SandboxLimits, first: bytes, second: bytes, *,
    standard_input: bytes, errors: int,
) -> SandboxOutcome:  # fmt: skip
    """Start bubblewrap, and wait until it and all processes of its namespace have ended; one at a time in a process.

    `command` takes three descriptors: what is read as orders, what reports are written to, what bubblewrap writes to.
    `second` is sent when `first` is reported as loaded; empty: never. `errors` is as subprocess takes it.
    """
    before_s = _used_s()
    with _Pipes() as pipes, _adopting():
        process = subprocess.Popen(
            command(pipes.orders_out, pipes.report_in, pipes.info_in),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            pass_fds=(pipes.orders_out, pipes.report_in, pipes.info_in), env={}, bufsize=0,
        )  # fmt: skip
        pipes.close_other_side()
        try:
            outcome = _converse(process, pipes, limits, first=first, second=second, standard_input=standard_input)
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()
            process.wait()
            _end_namespace(pipes.info_out)
    return replace(outcome, used_s=_used_s() - before_s)


class _Pipes:
    """Orders to `inside`, reports from it, and what bubblewrap says; numbers of descriptors, kept by both sides."""

    def __enter__(self) -> _Pipes:
        self.orders_out, self.orders_in = os.pipe()
        self.report_out, self.report_in = os.pipe()
        self.info_out, self.info_in = os.pipe()
        self._open = {
            self.orders_out, self.orders_in, self.report_out, self.report_in, self.info_out, self.info_in,
        }  # fmt: skip
        return self

    def close_other_side(self) -> None:
        for number in (self.orders_out, self.report_in, self.info_in):
            self.close(number)

    def close(self, number: int) -> None:
        if number in self._open:
            self._open.discard(number)
            os.close(number)

    def __exit__(self, *_: object) -> None:
        for number in list(self._open):
            self.close(number)


@contextmanager
def _adopting() -> Iterator[None]:
    """Children of a child that ends become children of this process, which can wait for them: bubblewrap does not."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_namespace(info: int) -> None:
    """Kill the first process of a namespace, with which all others there die, and wait for it; bubblewrap, which has
    ended, said its number to `info`."""
    os.set_blocking(info, False)
    try:
        number = json.loads(os.read(info, 4096))["child-pid"]
    except (OSError, ValueError, KeyError):
        # There is none.
        return
    with suppress(ChildProcessError):
        if os.waitpid(number, os.WNOHANG)[0] == 0:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def _used_s() -> float:
    """Processor time of all children that were waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _converse(
    process: subprocess.Popen[bytes], pipes: _Pipes, limits: SandboxLimits, *, first: bytes, second: bytes,
    standard_input: bytes,
) -> SandboxOutcome:  # fmt: skip
    """Write what it is to read, and read what it writes, until it ends or a limit is reached."""
    assert process.stdin is not None
    assert process.stdout is not None
    output, report, most = b"", b"", limits.output_bytes
    began, deadline = 0.0, time.monotonic() + START_TIMEOUT_S
    unsent = {pipes.orders_in: memoryview(first), process.stdin.fileno(): memoryview(standard_input)}
    poll = select.poll()
    reading = {process.stdout.fileno(), pipes.report_out}
    for number in unsent:
        os.set_blocking(number, False)
        poll.register(number, select.POLLOUT)
    for number in reading:
        poll.register(number, select.POLLIN)
    os.set_blocking(pipes.report_out, False)

    def stopped(why: str) -> SandboxOutcome:
        # What was reported before the output that ended it may not be read yet.
        last = b""
        if pipes.report_out in reading:
            with suppress(BlockingIOError):
                last = os.read(pipes.report_out, MAX_REPORT_BYTES)
        return SandboxOutcome(status=None, output=output[:most], report=report + last, why=why, took_s=took_s())

    def took_s() -> float:
        return time.monotonic() - began if began else 0.0

    def finish(number: int) -> None:
        poll.unregister(number)
        unsent.pop(number)
        if number == pipes.orders_in:
            pipes.close(number)
        else:
            assert process.stdin is not None
            process.stdin.close()

    while reading:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return stopped("time")
        for number, _ in poll.poll(left_s * 1000):
            if number in unsent:
                try:
                    unsent[number] = unsent[number][os.write(number, unsent[number][:65536]) :]
                except BrokenPipeError:
                    finish(number)
                    continue
                is_waiting = number == pipes.orders_in and second
                if not unsent[number]:
                    poll.unregister(number) if is_waiting else finish(number)
                continue
            piece = os.read(number, 65536)
            if not piece:
                poll.unregister(number)
                reading.discard(number)
            elif number == pipes.report_out:
                report += piece
                if not began and report.startswith(BEGAN):
                    began = time.monotonic()
                    deadline = began + limits.timeout_s
                if second and _LOADED in report:
                    # Only now: what the foreign code ran before could not read it.
                    unsent[pipes.orders_in], second = memoryview(second), b""
                    poll.register(pipes.orders_in, select.POLLOUT)
                if len(report) > MAX_REPORT_BYTES:
                    return stopped("report")
            else:
                output += piece
                if len(output) > most:
                    return stopped("output")
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return stopped("time")
    return SandboxOutcome(status=status, output=output, report=report, took_s=took_s())
