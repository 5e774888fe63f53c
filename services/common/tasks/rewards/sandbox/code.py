"""Unit tests of the code in a completion. Runs in a worker process, the foreign code in a sandbox of it.

Guarantees: code that fails, hangs, takes too much or says too much fails its test, which is a value; a sandbox that
cannot be built is an error and no value.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heterorl.common.tasks.completions import python_of
from heterorl.common.tasks.rewards.process import PATIENCE
from heterorl.common.tasks.rewards.sandbox.bubblewrap import NoSandbox, Sandbox, find_sandbox
from heterorl.common.tasks.rewards.sandbox.outcome import Limits, Outcome
from heterorl.common.tasks.rewards.sandbox.unit_tests import Test, tests_of

MAX_CODE_CHARS = 1 << 18
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """What answers requests, and the version of its Python."""
    limits = Limits(
        cpu_s=job["test_timeout_s"], timeout_s=PATIENCE * job["test_timeout_s"], memory_bytes=job["memory_bytes"],
        work_bytes=job["work_bytes"], output_bytes=job["output_bytes"], num_processes=job["num_processes"],
    )  # fmt: skip
    try:
        sandbox = find_sandbox(python=job["python"], shown=job["shown"], limits=limits)
    except NoSandbox as error:
        raise ValueError(str(error)) from error

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        tests = tests_of(request["answer"], request["columns"])
        code = code_of(request["completion"], needs_block=job["needs_block"])
        if code is None:
            return {"value": 0.0, "share": 0.0}
        return judged(code, tests, sandbox, cpu_s=job["timeout_s"], gives_share=job["credit"] == "share")

    return answer, {"python": sandbox.version}


def judged(code: str, tests: list[Test], sandbox: Sandbox, *, cpu_s: float, gives_share: bool) -> dict[str, Any]:
    """The value of code: 1 where all tests pass, or the share of those that do; and how near a limit of time came.

    A test that the time of all of them does not reach has failed: slow code is wrong code. The `share` of a limit that
    was used is 1 then, since a faster machine may have passed it.

    `cpu_s` is processor time for all tests; the limits of the sandbox hold for one.
    """
    most = sandbox.limits
    num_passed, share, used_s, took_s = 0, 0.0, 0.0, 0.0
    for test in tests:
        left_s, left_by_clock_s = cpu_s - used_s, PATIENCE * cpu_s - took_s
        limits = replace(most, cpu_s=min(most.cpu_s, left_s), timeout_s=min(most.timeout_s, left_by_clock_s))
        if min(limits.cpu_s, limits.timeout_s) <= 0:
            share = max(share, 1.0)
            break
        is_passed, outcome = tried(code, test, replace(sandbox, limits=limits))
        used_s, took_s = used_s + outcome.used_s, took_s + outcome.took_s
        share = max(
            share, outcome.used_s / most.cpu_s, outcome.took_s / most.timeout_s, used_s / cpu_s,
            took_s / (PATIENCE * cpu_s), float(outcome.why == "time"),
        )  # fmt: skip
        num_passed += is_passed
        if not is_passed and not gives_share:
            break
    return {"value": num_passed / len(tests) if gives_share else float(num_passed == len(tests)), "share": share}


def tried(code: str, test: Test, sandbox: Sandbox) -> tuple[bool, Outcome]:
    """Whether code passes one test, in a process of its own, and how that ended."""
    if test.standard_output is not None:
        outcome = sandbox.run(_order("program", code), b"", standard_input=test.standard_input.encode(errors="replace"))
        is_right = _lines(outcome.output.decode(errors="replace")) == _lines(test.standard_output)
    else:
        token = secrets.token_hex(16)
        second = json.dumps({"code": test.code, "token": token}).encode() + b"\n"
        outcome = sandbox.run(_order("function", code, before=test.before), second, standard_input=b"")
        is_right = outcome.report.endswith(f"loaded\n{token}".encode())
    # Processor time of all its processes: a process alone is ended by its own limit.
    return outcome.status == 0 and is_right and outcome.used_s <= sandbox.limits.cpu_s, outcome


def _order(kind: str, code: str, *, before: str = "") -> bytes:
    return json.dumps({"kind": kind, "code": code, "before": before}).encode() + b"\n"


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends and without empty lines at the end, as judges of contests compare."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def code_of(completion: str, *, needs_block: bool) -> str | None:
    """The last block of Python in a completion; all of it where none is needed; None where there is no code."""
    block = python_of(completion)
    code = block if block is not None else "" if needs_block else completion
    return code if code.strip() and len(code) <= MAX_CODE_CHARS else None
