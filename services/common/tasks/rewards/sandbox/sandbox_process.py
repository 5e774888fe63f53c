"""One run of bubblewrap, from its start until no process of its namespace is left.

Its time counts from the start of the foreign code. At the end the kernel has counted the processor time of all
processes.
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
"""For the sandbox and its Python; no foreign code pays for it."""
MAX_REPORT_BYTES = 256
BEGAN = b"began "
_LOADED = b"loaded\n"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a process inside; `num_processes` and `work_bytes` are for all together.

    `cpu_s` is processor time, `timeout_s` time by the clock, both from the start of the foreign code.
    """

    cpu_s: float
    timeout_s: float
    memory_bytes: int
    work_bytes: int
    output_bytes: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOutcome:
    """End of a run: bounded output and report; a killed run has no `status`, and `why` names the limit.

    `used_s` is the processor time of all processes since the start of the foreign code, `took_s` time by the clock.
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
    """Run bubblewrap to its end; one at a time in a process.

    `command` gets the descriptors of orders, reports and bubblewrap's info. `second` is sent after `first` was reported
    as loaded; empty: never. `errors` is as in subprocess.
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
    """Descriptors of orders, reports and info, both ends."""

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
    """Make this process the parent of orphaned grandchildren, which bubblewrap does not wait for."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_namespace(info: int) -> None:
    """Kill and wait for the first process of a namespace, and with it all others; bubblewrap wrote its number to
    `info`."""
    os.set_blocking(info, False)
    try:
        number = json.loads(os.read(info, 4096))["child-pid"]
    except (OSError, ValueError, KeyError):
        # No namespace was made.
        return
    with suppress(ChildProcessError):
        if os.waitpid(number, os.WNOHANG)[0] == 0:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def _used_s() -> float:
    """Processor time of all waited children and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _converse(
    process: subprocess.Popen[bytes], pipes: _Pipes, limits: SandboxLimits, *, first: bytes, second: bytes,
    standard_input: bytes,
) -> SandboxOutcome:  # fmt: skip
    """Write inputs and read outputs until the end or a limit."""
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
        # A report before the last output may still be unread.
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
                    # Only now, so that the foreign code could not read it.
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
