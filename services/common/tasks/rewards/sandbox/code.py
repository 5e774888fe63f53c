"""Unit tests of the code in a completion. Runs in a worker process, the foreign code in a sandbox of it.

An answer is its tests: JSON, a list (or an object with the list `tests`) of entries, each a text of Python that runs
after the completion's code and passes by ending, or {"stdin": ..., "stdout": ...}; an object with the lists `inputs`
and `outputs`; or, where it is no JSON, one text of Python.

Guarantees: code that fails, hangs, takes too much or says too much fails its test, which is a value; a sandbox that
cannot be built is an error and no value.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from heterorl.common.tasks.rewards.sandbox.blocks import python_of
from heterorl.common.tasks.rewards.sandbox.bubblewrap import Limits, NoSandbox, Sandbox, find_sandbox

MAX_TESTS = 128
MAX_CODE_CHARS = 1 << 18
_MARGIN_S = 0.25
"""What is left of the time limit for the way back."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test: Python code after the completion's, or what a program reads and is to write."""

    code: str = ""
    standard_input: str = ""
    standard_output: str | None = None


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """What answers requests, and the version of its Python.

    Raises:
        ValueError: foreign code can be run here by nobody.
    """
    limits = Limits(
        seconds=job["test_timeout_s"], memory_bytes=job["memory_bytes"], work_bytes=job["work_bytes"],
        output_bytes=job["output_bytes"], num_processes=job["num_processes"],
    )  # fmt: skip
    try:
        sandbox = find_sandbox(python=job["python"], shown=job["shown"], limits=limits)
    except NoSandbox as error:
        raise ValueError(str(error)) from error

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + job["timeout_s"] - min(_MARGIN_S, 0.1 * job["timeout_s"])
        tests = tests_of(request["answer"])
        code = code_of(request["completion"], needs_block=job["needs_block"])
        if code is None:
            return {"value": 0.0, "slowest_s": 0.0, "total_s": 0.0}
        return judged(code, tests, sandbox, deadline=deadline, gives_share=job["credit"] == "share")

    return answer, {"python": sandbox.version}


def judged(code: str, tests: list[Test], sandbox: Sandbox, *, deadline: float, gives_share: bool) -> dict[str, Any]:
    """The value of code: 1 where all tests pass, or the share of those that do; the longest that one and that all took.

    A test that the time of all of them does not reach has failed: slow code is wrong code. It counts with the whole
    time of a test, since a faster machine may have passed it.

    Raises:
        NoSandbox: the sandbox could not be built, in the whole time of a test.
    """
    num_passed, slowest_s, start = 0, 0.0, time.monotonic()
    for test in tests:
        began = time.monotonic()
        left_s = min(sandbox.limits.seconds, deadline - began)
        is_cut = left_s < sandbox.limits.seconds
        try:
            limits = replace(sandbox.limits, seconds=left_s)
            is_passed = left_s > 0 and passes(code, test, replace(sandbox, limits=limits))
        except NoSandbox:
            if not is_cut:
                raise
            is_passed = False
        took_s = sandbox.limits.seconds if is_cut and not is_passed else time.monotonic() - began
        slowest_s = max(slowest_s, took_s)
        num_passed += is_passed
        if not is_passed and not gives_share:
            break
    return {
        "value": num_passed / len(tests) if gives_share else float(num_passed == len(tests)),
        "slowest_s": slowest_s,
        "total_s": time.monotonic() - start,
    }


def passes(code: str, test: Test, sandbox: Sandbox) -> bool:
    """Whether code passes one test, in a process of its own.

    Raises:
        NoSandbox: the sandbox could not be built.
    """
    if test.standard_output is not None:
        outcome = sandbox.run(_order("program", code), b"", standard_input=test.standard_input.encode(errors="replace"))
        given = outcome.output.decode(errors="replace")
        return outcome.status == 0 and _lines(given) == _lines(test.standard_output)
    token = secrets.token_hex(16)
    second = json.dumps({"code": test.code, "token": token}).encode() + b"\n"
    outcome = sandbox.run(_order("function", code), second, standard_input=b"")
    return outcome.status == 0 and outcome.report.endswith(f"loaded\n{token}".encode())


def _order(kind: str, code: str) -> bytes:
    return json.dumps({"kind": kind, "code": code}).encode() + b"\n"


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


def tests_of(answer: str) -> list[Test]:
    """The tests that an answer holds.

    Raises:
        ValueError: none, too many, or what is no test.
    """
    try:
        entries: Any = json.loads(answer)
    except (ValueError, RecursionError):
        entries = [answer]
    if isinstance(entries, dict) and "inputs" in entries and "outputs" in entries:
        entries = [
            {"stdin": given, "stdout": wanted}
            for given, wanted in zip(entries["inputs"], entries["outputs"], strict=True)
        ]
    if isinstance(entries, dict):
        entries = entries.get("tests")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_TESTS:
        raise ValueError(f"the answer of the prompt holds no list of 1 to {MAX_TESTS} tests")
    return [_test(entry) for entry in entries]


def _test(entry: Any) -> Test:
    if isinstance(entry, str) and entry.strip():
        return Test(code=entry)
    if isinstance(entry, dict) and isinstance(entry.get("stdout"), str) and isinstance(entry.get("stdin", ""), str):
        return Test(standard_input=entry.get("stdin", ""), standard_output=entry["stdout"])
    raise ValueError(f"no test: {entry!r:.80}; write a text of Python, or stdin and stdout")
