"""Reward by unit tests of a completion's code.

Tests come from the prompt's answer; each runs in a sandbox.

The answer is JSON: a list of tests, an object with the list `tests` or `test_cases`, or an object with the lists
`inputs` and `outputs`, and `fn_name` for a function. Another text is a list of Python, or one test in Python. A test is
Python that runs after the completion's code and passes by ending, {"stdin": ..., "stdout": ...}, or {"input": ...,
"output": ..., "testtype": "stdin" or "functional"}. Unknown keys, and Python without a test, are refused.

Code that fails, hangs, takes or prints too much fails its test. Without a sandbox there is an error, not a value.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import ConfigError, RewardError
from heterorl.common.tasks.answer_extraction import answer_of, python_of
from heterorl.common.tasks.rewards.sandbox.bubblewrap import (
    NoSandbox,
    Sandbox,
    SandboxLimits,
    SandboxOutcome,
    find_sandbox,
)
from heterorl.common.tasks.rewards.worker_pool import NEAR, PATIENCE, START_TIMEOUT_S, NearLimit, WorkerPool
from heterorl.common.tasks.task import WHOLE, AnswerProblem, Doubts, Prompt, RewardSource
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common_messages import bytes_digest

if TYPE_CHECKING:
    # A worker needs no pydantic.
    from heterorl.common.tasks.source_config import CodeRewardConfig

MAX_TESTS = 128
"""Tests of a row that run; of a longer list an even sample."""
COLUMNS = ("fn_name", "func_name", "metadata", "entry_point", "test_setup_code", "test_imports")
"""Columns that some datasets need to make a test."""
_CHECK = re.compile(r"^def +check *\(", re.MULTILINE)
"""Definition of the function in HumanEval's tests; an async one would run nothing."""
_TABLE_KEYS = frozenset({"tests", "test_cases", "language", "inputs", "outputs", "input", "output", "fn_name"})
_ENTRY_KEYS = frozenset({"stdin", "stdout", "input", "output", "testtype", "type", "fn_name", "metadata"})
_LANGUAGES = ("python", "python3", "py")
_OF_FUNCTIONS = frozenset({"functional", "function_call", "call_based"})
_OF_SOLUTION = "Solution()."
"""Prefix of a method's name in LeetCode's sets."""
_OF_PROGRAMS = frozenset({"stdin", "stdin_stdout", "standard_input"})

BEFORE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, permutations, product
from math import ceil, floor, gcd, inf, sqrt
from typing import *
"""
"""Imports before the code of a named function, as judges of contests have them."""
_CALL = """
def _call_and_compare(name, given, wanted):
    import collections, json, math, numbers

    def is_same(got, want):
        if isinstance(want, list):
            is_row = isinstance(got, (list, tuple, range, collections.deque))
            return is_row and len(got) == len(want) and all(map(is_same, got, want))
        if isinstance(want, dict):
            if not isinstance(got, dict) or len(got) != len(want):
                return False
            named = {{str(key): value for key, value in got.items()}}
            return all(key in named and is_same(named[key], value) for key, value in want.items())
        if isinstance(want, (int, float)) and isinstance(got, numbers.Number):
            return bool(got == want and want == got) or (not isinstance(want, bool) and is_near(got, want))
        return isinstance(got, type(want)) and got == want

    def is_near(got, want):
        if isinstance(want, int) and isinstance(got, numbers.Integral):
            return False
        return isinstance(got, numbers.Real) and math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-9)

    found = globals()
    of_class = getattr(found.get("Solution"), name, None)
    function = getattr(found["Solution"](), name) if of_class is not None else found[name]
    got = function(*json.loads(given))
    assert any(is_same(got, want) for want in json.loads(wanted)), got


_call_and_compare({name!r}, {given!r}, {wanted!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test: code behind the completion's, or a program's input and output."""

    code: str = ""
    before: str = ""
    """Python code before the completion's."""
    standard_input: str = ""
    standard_output: str | None = None


def tests_of(answer: str, columns: Mapping[str, Any]) -> list[Test]:
    """Tests of an answer, at most MAX_TESTS; raises ValueError for none."""
    entries, name = _read(answer), _function_of(columns)
    if isinstance(entries, str):
        entries = [entries]
    if isinstance(entries, dict):
        _refuse_unknown(entries, _TABLE_KEYS)
        if str(entries.get("language") or "python") not in _LANGUAGES:
            raise ValueError(f"tests of {entries['language']!r:.40} are not known; write Python")
        name = str(entries.get("fn_name") or "") or name
        for given, wanted in (("inputs", "outputs"), ("input", "output")):
            if given in entries or wanted in entries:
                return _of_lists(entries.get(given), entries.get(wanted), name)
        entries = entries.get("tests") or entries.get("test_cases")
    if not isinstance(entries, list):
        entries = []
    of_functions = [entry for entry in entries if _kind(entry) in _OF_FUNCTIONS]
    # A lone list is a value; several may be a table of APPS in this form.
    is_lone = len(of_functions) == 1 and _kind(of_functions[0]) == "functional"
    is_wrapped = not is_lone and _are_wrapped([_wanted(entry) for entry in of_functions])
    return [_test(entry, columns, name, is_wrapped=is_wrapped) for entry in _sampled(entries)]


def _read(answer: str) -> Any:
    """Content of an answer: JSON, a literal of Python, or its text."""
    with suppress(ValueError, RecursionError):
        return json.loads(answer)
    if answer.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            return _value(answer)
    return answer


def _sampled(tests: list[Any]) -> list[Any]:
    """At most MAX_TESTS tests, spread evenly, the first and last included."""
    if not tests:
        raise ValueError("the answer of the prompt holds no list of tests")
    if len(tests) <= MAX_TESTS:
        return tests
    return [tests[number * (len(tests) - 1) // (MAX_TESTS - 1)] for number in range(MAX_TESTS)]


def _are_wrapped(outputs: list[Any]) -> bool:
    """Whether all outputs are lists of one; bare values count then.

    APPS and TACO (tables with `fn_name`) and PrimeIntellect (`function_call`) wrap each result, also a single one: [5]
    is 5 there. LiveCodeBench (`functional`) writes a result as JSON text, never wrapped: "[5]" is a list.
    """
    return all(isinstance(one, list) and len(one) == 1 for one in outputs)


def _kind(entry: Any) -> str:
    return str(entry.get("testtype") or entry.get("type") or "stdin") if isinstance(entry, dict) else ""


def _wanted(entry: Mapping[str, Any]) -> Any:
    return entry.get("output", entry.get("stdout"))


def _test(entry: Any, columns: Mapping[str, Any], name: str, *, is_wrapped: bool) -> Test:
    if isinstance(entry, str) and entry.strip():
        return _of_code(entry, columns)
    if not isinstance(entry, dict):
        raise ValueError(f"no test: {entry!r:.80}; write a text of Python, or stdin and stdout")
    _refuse_unknown(entry, _ENTRY_KEYS)
    kind = _kind(entry)
    name = _function_of(entry) or name
    given, wanted = entry.get("input", entry.get("stdin", "")), _wanted(entry)
    if kind in _OF_FUNCTIONS:
        return _of_function(name, given, wanted, is_wrapped=is_wrapped)
    if kind not in _OF_PROGRAMS:
        raise ValueError(f"a test of type {kind!r:.40} is not known; write stdin or functional")
    return _of_program(given, wanted)


def _of_lists(inputs: Any, outputs: Any, name: str) -> list[Test]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs are not two lists of one length")
    pairs = _sampled(list(zip(inputs, outputs, strict=True)))
    if not name:
        return [_of_program(given, wanted) for given, wanted in pairs]
    is_wrapped = _are_wrapped(outputs)
    return [_of_function(name, given, wanted, is_wrapped=is_wrapped) for given, wanted in pairs]


def _of_program(given: Any, wanted: Any) -> Test:
    texts = []
    for one in (given, wanted):
        lines = one if isinstance(one, list) else [one]
        if not all(isinstance(line, str) for line in lines):
            raise ValueError(f"no test: a program reads and writes text, not {one!r:.80}; name a function in fn_name")
        texts.append("\n".join(lines))
    return Test(standard_input=texts[0], standard_output=texts[1])


def _of_function(name: str, given: Any, wanted: Any, *, is_wrapped: bool) -> Test:
    # A method of the class is called before a function of that name.
    name = name.removeprefix(_OF_SOLUTION)
    if not name.isidentifier():
        raise ValueError(f"a test of a function names none: {name!r:.40}; write fn_name")
    if isinstance(given, str):
        # One argument a line.
        arguments = [_value(line) for line in given.split("\n") if line.strip()]
    else:
        arguments = given if isinstance(given, list) else [given]
    values = [_value(wanted) if isinstance(wanted, str) and isinstance(given, str) else wanted]
    if is_wrapped:
        values.append(values[0][0])
    code = _CALL.format(name=name, given=json.dumps(arguments), wanted=json.dumps(values))
    return Test(code=code, before=BEFORE)


def _value(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{text!r:.80} is not an argument or result of a function in JSON") from None


def _of_code(text: str, columns: Mapping[str, Any]) -> Test:
    entry_point = columns.get("entry_point")
    before = ""
    is_name = isinstance(entry_point, str) and entry_point.removeprefix(_OF_SOLUTION).isidentifier()
    if is_name and _CHECK.search(text):
        # HumanEval's tests are a function `check` of the solution.
        text, before = f"{text}\ncheck({entry_point})\n", BEFORE
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"no test: {text[:60]!r} is not Python: {error}"[:200]) from None
    if all(map(_does_nothing, body)):
        raise ValueError(f"no test: {text[:60]!r} checks nothing when it runs")
    setup = columns.get("test_setup_code")
    imports = columns.get("test_imports")
    first = [*(imports if isinstance(imports, list) else ()), setup if isinstance(setup, str) else ""]
    lines = [line for line in first if isinstance(line, str) and line.strip()]
    return Test(code="\n".join([*lines, text]), before=before)


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        # A bare name fails where the completion does not define it.
        return not any(isinstance(part, ast.Name | ast.Call | ast.Await) for part in ast.walk(statement))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return not any(isinstance(part, ast.Call | ast.Await) for part in ast.walk(statement))
    if isinstance(statement, ast.If) and _is_never(statement.test):
        return all(map(_does_nothing, statement.orelse))
    return isinstance(
        statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Pass
    )


def _is_never(test: ast.expr) -> bool:
    """Whether a condition is constant false, or asks for the main program."""
    if isinstance(test, ast.Constant):
        return not test.value
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(test))


def _function_of(columns: Mapping[str, Any]) -> str:
    """Function that a row or test names, also in its metadata."""
    facts: dict[str, Any] = {name: columns[name] for name in ("fn_name", "func_name") if name in columns}
    metadata = columns.get("metadata")
    if isinstance(metadata, str):
        with suppress(ValueError, RecursionError):
            metadata = json.loads(metadata)
    if isinstance(metadata, dict):
        facts = metadata | facts
    named = facts.get("fn_name") or facts.get("func_name")
    return named if isinstance(named, str) else ""


def _refuse_unknown(entry: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"the key {unknown[0]!r:.40} of a test is not known; known are {', '.join(sorted(known))}")


MAX_CODE_CHARS = 1 << 18
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d{1,4})?", re.ASCII)
MAX_NUMBER_CHARS = 400
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def load(job: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Answers requests of a worker, and the version of its Python."""
    limits = SandboxLimits(
        cpu_s=job["test_timeout_s"], timeout_s=job["patience"] * job["test_timeout_s"],
        memory_bytes=job["memory_bytes"], work_bytes=job["work_bytes"], output_bytes=job["output_bytes"],
        num_processes=job["num_processes"],
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
        return judged(
            code, tests, sandbox, cpu_s=job["timeout_s"], patience=job["patience"], gives_share=job["credit"] == "share"
        )

    return answer, {"python": sandbox.version}


def judged(
    code: str, tests: list[Test], sandbox: Sandbox, *, cpu_s: float, patience: float, gives_share: bool
) -> dict[str, Any]:
    """Value of code by its tests, and its `share` of time limits.

    The value is 1 where all tests pass, or the share of passed tests. `cpu_s` is processor time for all tests,
    `patience` times as much by the clock; the sandbox limits one. A test without time left fails, and so do tests after
    one that ran out of it by the clock: code that sleeps gets no second wait. The `share` of the limit is then 1, since
    a faster machine may have passed it.
    """
    most = sandbox.limits
    num_passed, share, used_s, took_s = 0, 0.0, 0.0, 0.0
    for test in tests:
        left_s, left_by_clock_s = cpu_s - used_s, patience * cpu_s - took_s
        limits = replace(most, cpu_s=min(most.cpu_s, left_s), timeout_s=min(most.timeout_s, left_by_clock_s))
        if min(limits.cpu_s, limits.timeout_s) <= 0:
            share = max(share, 1.0)
            break
        is_passed, outcome = tried(code, test, replace(sandbox, limits=limits))
        used_s, took_s = used_s + outcome.used_s, took_s + outcome.took_s
        share = max(
            share, outcome.used_s / most.cpu_s, outcome.took_s / most.timeout_s, used_s / cpu_s,
            took_s / (patience * cpu_s), float(outcome.why == "time"),
        )  # fmt: skip
        num_passed += is_passed
        if not is_passed and (not gives_share or outcome.why == "time"):
            break
    return {"value": num_passed / len(tests) if gives_share else float(num_passed == len(tests)), "share": share}


def tried(code: str, test: Test, sandbox: Sandbox) -> tuple[bool, SandboxOutcome]:
    """Whether code passes one test, and how its process ended."""
    if test.standard_output is not None:
        # Contests have outputs beyond the limit; the right one must fit.
        most = max(sandbox.limits.output_bytes, 2 * len(test.standard_output.encode(errors="replace")))
        sandbox = replace(sandbox, limits=replace(sandbox.limits, output_bytes=most))
        outcome = sandbox.run(_order("program", code), b"", standard_input=test.standard_input.encode(errors="replace"))
        is_right = _is_printed(outcome.output.decode(errors="replace"), test.standard_output)
    else:
        token = secrets.token_hex(16)
        second = json.dumps({"code": test.code, "token": token}).encode() + b"\n"
        outcome = sandbox.run(_order("function", code, before=test.before), second, standard_input=b"")
        is_right = outcome.report.endswith(f"loaded\n{token}".encode())
    # Processor time of all processes together; the kernel limits single ones.
    return outcome.status == 0 and is_right and outcome.used_s <= sandbox.limits.cpu_s, outcome


def _order(kind: str, code: str, *, before: str = "") -> bytes:
    return json.dumps({"kind": kind, "code": code, "before": before}).encode() + b"\n"


def _is_printed(got: str, want: str) -> bool:
    """Whether two outputs are the same by lines, words and numbers."""
    lines, wanted = _lines(got), _lines(want)
    return len(lines) == len(wanted) and all(map(_is_line, lines, wanted))


def _is_line(got: str, want: str) -> bool:
    if got == want:
        return True
    words, wanted = got.split(), want.split()
    return len(words) == len(wanted) and all(map(_is_word, words, wanted))


def _is_word(got: str, want: str) -> bool:
    """Whether words are equal, or near numbers where a fraction is wanted."""
    if got == want:
        return True
    if max(len(got), len(want)) > MAX_NUMBER_CHARS or not (_NUMBER.fullmatch(want) and _NUMBER.fullmatch(got)):
        return False
    if not set(want) & set(".eE"):
        return bool(set(got) & set(".eE")) and Decimal(got) == Decimal(want)
    # An infinity is near only to itself.
    return math.isfinite(float(want)) and math.isclose(float(got), float(want), rel_tol=1e-6, abs_tol=1e-9)


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks and empty last lines, as contests compare them."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def code_of(completion: str, *, needs_block: bool) -> str | None:
    """The last block of Python, or the whole completion; None without code."""
    block = python_of(completion)
    code = block if block is not None else "" if needs_block else completion
    return code if code.strip() and len(code) <= MAX_CODE_CHARS else None


class CodeReward(RewardSource):
    """Whether a completion's code passes its prompt's tests."""

    def __init__(self, config: CodeRewardConfig, *, key: str, timeout_s: float, num_workers: int) -> None:
        """Test the sandbox or raise ConfigError; `timeout_s`: processor time of all tests."""
        job = {**config.model_dump(mode="json"), "kind": "code", "timeout_s": timeout_s, "patience": PATIENCE}
        self.num_workers = num_workers
        # The worker counts the time; this limit ends a worker that fails to.
        self.pool = WorkerPool(job, timeout_s=START_TIMEOUT_S + PATIENCE * timeout_s, num_workers=num_workers)
        self._key, self._near = key, NearLimit()
        try:
            facts = self.pool.start()
        except RewardError as error:
            raise ConfigError(key, str(error)) from error
        stated = [
            facts["python"], config.credit, config.needs_block, config.test_timeout_s, timeout_s, config.memory_bytes,
            config.num_processes, config.work_bytes, config.output_bytes,
        ]  # fmt: skip
        self.digest = bytes_digest(json.dumps(["code 12", *stated]).encode())

    def close(self) -> None:
        self.pool.close()

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """Value of the tests; raises RewardError without tests or a sandbox."""
        try:
            reply = self.pool.ask(
                {"answer": prompt.answer, "columns": _columns_of(prompt), "completion": answer_of(completion)}
            )
        except RewardError as error:
            raise RewardError(f"prompt {prompt.index}: {error}") from error
        if reply["share"] > NEAR:
            self._near.add(prompt.index, completion)
        return (RewardPart(name=WHOLE, value=float(reply["value"])),)

    def doubts(self, prompt: Prompt, completion: str) -> Doubts:
        return Doubts(near=self._near.names(WHOLE, prompt.index, completion), by_code=(WHOLE,))

    def answer_problem(self, prompt: Prompt) -> AnswerProblem | None:
        try:
            tests_of(prompt.answer, _columns_of(prompt))
        except ValueError as error:
            return AnswerProblem(key=self._key, text=str(error), action=_FORMS)
        return None


_FORMS = "correct the tests in the data: docs/rewards.md lists their forms; or take another reward"


def _columns_of(prompt: Prompt) -> dict[str, Any]:
    return {name: prompt.columns[name] for name in COLUMNS if name in prompt.columns}
