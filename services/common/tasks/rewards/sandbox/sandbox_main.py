"""What runs inside the sandbox: `python -s -B sandbox_main.py ORDERS REPORT USER MEMORY WORK PROCESSES CPU_S CALLS`.

Sets limits on itself and gives up what CALLS refuses (seccomp, in hexadecimal digits), then reads one JSON document a
line from ORDERS. Foreign code is run in this process, which is why its passing is not taken from its word or its
status: after the code was loaded REPORT says so, only then comes the test with a token, and the token is written to
REPORT when the test has passed.
"""

import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
import time
import types

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


def main() -> None:
    """Obey the orders."""
    # The directory of this file, which is no place for modules.
    del sys.path[0]
    orders_number, report_number, user, memory, work, processes = map(int, sys.argv[1:-2])
    cpu_s = float(sys.argv[-2])
    if user >= 0:
        # A container may have no such number; then its root is another user outside, whose processes are counted.
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    for kind, most in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, work), (resource.RLIMIT_NPROC, processes + 1),
        # Behind the timer below, which foreign code may stop.
        (resource.RLIMIT_CPU, math.ceil(time.process_time() + cpu_s) + 1), (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))
    _give_up(bytes.fromhex(sys.argv[-1]))
    orders, report = os.fdopen(orders_number, "rb"), report_number
    order = json.loads(orders.readline())
    if order["kind"] == "check":
        os.write(report, f"checked {sys.version_info[0]}.{sys.version_info[1]}\n".encode())
        return
    if order["kind"] == "serve":
        # Ours, shown beside this file; foreign code is run in children of it.
        sys.path.append("/serving")
        importlib.import_module("gym_server").serve(order, orders, report)
        return
    # What is not said was no foreign code's fault, and the time until then is not its own.
    os.write(report, f"began {time.process_time():f}\n".encode())
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if order["kind"] == "program":
        # Its output is judged outside; nothing of ours is left open.
        orders.close()
        os.close(report)
        _run(order["code"], _module("__main__"))
        return
    module = _module("solution")
    _run(order["before"], module)
    _run(order["code"], module)
    os.write(report, b"loaded\n")
    test = json.loads(orders.readline())
    _run(test["code"], module, "test.py")
    os.write(report, test["token"].encode())


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def _give_up(program: bytes) -> None:
    """Refuse calls of the kernel to this process and all that it starts.

    Raises:
        OSError: the kernel has no filters.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    lines = ctypes.create_string_buffer(program, len(program))
    filtered = _Program(len(program) // 8, ctypes.addressof(lines))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(filtered), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel filters no calls (CONFIG_SECCOMP_FILTER)")


def _module(name: str) -> types.ModuleType:
    """A module that the code is to be of, found by its name as classes and pickle look for it."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = "solution.py"
    sys.argv = [module.__file__]
    return module


def _run(code: str, module: types.ModuleType, file: str = "solution.py") -> None:
    exec(compile(code, file, "exec"), module.__dict__)  # noqa: S102 - inside the sandbox, which runs what a model wrote


if __name__ == "__main__":
    main()
