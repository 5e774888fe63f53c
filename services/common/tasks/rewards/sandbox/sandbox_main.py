"""Program in the sandbox: runs a completion's code under limits.

`python -s -B sandbox_main.py ORDERS REPORT USER MEMORY WORK PROCESSES CPU_S`.

Sets its limits, then reads one JSON document a line from ORDERS.
Foreign code runs in this process, so neither its output nor its status proves that a test passed. REPORT says that the
code was loaded; only then the test comes, with a token, which goes to REPORT after the test passed.
"""

import builtins
import contextlib
import importlib
import io
import json
import math
import os
import resource
import signal
import sys
import time
import types
from typing import Any


def main() -> None:
    """Execute the orders."""
    # Modules must not come from the directory of this file.
    del sys.path[0]
    orders_number, report_number, user, memory, work, processes = map(int, sys.argv[1:-1])
    cpu_s = float(sys.argv[-1])
    if user >= 0:
        # A container may lack the number; its root is another user outside, whose processes are counted.
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    for kind, most in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, work), (resource.RLIMIT_NPROC, processes + 1),
        # A second limit: foreign code may stop the timer below.
        (resource.RLIMIT_CPU, math.ceil(time.process_time() + cpu_s) + 1), (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))
    orders, report = os.fdopen(orders_number, "rb"), report_number
    order = json.loads(orders.readline())
    if order["kind"] == "check":
        os.write(report, f"checked {sys.version_info[0]}.{sys.version_info[1]}\n".encode())
        return
    if order["kind"] == "serve":
        # Our server; it runs foreign code in children.
        orders.close()
        sys.path.append("/serving")
        importlib.import_module("worker_main").serve(order["job"])
        return
    # The time of the foreign code starts with this line.
    os.write(report, f"began {time.process_time():f}\n".encode())
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if order["kind"] == "program":
        # Its output is judged outside; no descriptor of ours stays open.
        orders.close()
        os.close(report)
        _open_standard_input()
        _run(order["code"], _module("__main__"))
        return
    module = _module("solution")
    _run(order["before"], module)
    _run(order["code"], module)
    os.write(report, b"loaded\n")
    test = json.loads(orders.readline())
    _run(test["code"], module, "test.py")
    os.write(report, test["token"].encode())


def _open_standard_input() -> None:
    """Let programs open /dev/stdin, which links to /proc; none is mounted."""
    plain = io.open

    def opened(file: Any, *arguments: Any, **options: Any) -> Any:
        return plain(os.dup(0) if str(file) == "/dev/stdin" else file, *arguments, **options)

    builtins.open = io.open = opened


def _module(name: str) -> types.ModuleType:
    """Module of the code, registered so that classes and pickle find it."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = "solution.py"
    sys.argv = [module.__file__]
    return module


def _run(code: str, module: types.ModuleType, file: str = "solution.py") -> None:
    exec(compile(code, file, "exec"), module.__dict__)  # noqa: S102 - inside the sandbox, which runs what a model wrote


if __name__ == "__main__":
    main()
