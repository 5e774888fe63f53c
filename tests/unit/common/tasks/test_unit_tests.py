"""The unit tests of public data sets: run as they are meant, in the real bubblewrap, and refused where they are unknown."""

import itertools
import json

import pytest

from heterorl.common.errors import AnswerUnreadable
from heterorl.common.tasks.rewards.sandbox.code_reward import CodeReward, _is_printed
from heterorl.common.tasks.rewards.sandbox.code_reward import tests_of as unit_tests_of
from heterorl.common.tasks.source_config import CodeRewardConfig
from heterorl.common.tasks.task import Prompt, check_answer
from heterorl.common.tasks.task_config import TaskConfig, build_task


@pytest.fixture(scope="module")
def reward():
    config = CodeRewardConfig(name="t", kind="code", credit="share", test_timeout_s=20.0)
    reward = CodeReward(config, key="k", timeout_s=60.0, num_workers=1)
    yield reward
    reward.close()


def worth(reward, answer, code, columns=None):
    """What a completion with this code is worth by the tests of one row."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    prompt = Prompt(index=0, text="", answer=text, columns=columns or {})
    assert reward.answer_problem(prompt) is None
    thoughts = "<think>\n```python\nraise SystemExit\n```"
    return reward.score(prompt, f"So:\n```python\n{code}\n```\n{thoughts}")[0].value


MODULE = """from __future__ import annotations
import pickle
import sys
from dataclasses import dataclass
from typing import NamedTuple, get_type_hints

@dataclass
class Node:
    value: int
    after: 'Node' = None

class Pair(NamedTuple):
    a: int

def f(x):
    node = pickle.loads(pickle.dumps(Node(x, Node(1))))
    assert get_type_hints(Node)['after'] is Node
    assert sys.modules[Node.__module__].Node is Node and pickle.loads(pickle.dumps(Pair(x))) == Pair(x)
    return node.value * 2
"""


@pytest.mark.process
def test_code_runs_in_a_module_as_python_runs_it(reward):
    assert worth(reward, ["assert f(4) == 8", "import solution\nassert solution.f(1) == 2"], MODULE) == 1.0
    program = f"{MODULE}\nif __name__ == '__main__':\n    print(f(int(input())))\n    print(Node.__module__)"
    assert worth(reward, [{"stdin": "4", "stdout": "8\n__main__"}], program) == 1.0
    assert worth(reward, ["assert f(4) == 8"], "def f(x): return 8\nif __name__ == '__main__': raise SystemExit") == 1.0


TWO_SUM = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
RIGHT_SUM = (
    TWO_SUM + "        return next([i, j] for i, a in enumerate(nums) for j in range(i) if a + nums[j] == target)[::-1]"
)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("answer", "columns", "right", "wrong"),
    [
        (
            {"fn_name": "add", "inputs": [[3, 4], [1, 1]], "outputs": [7, 2]},
            {},
            "def add(a, b): return a + b",
            "def add(a, b): return 7",
        ),
        (
            {"fn_name": "add", "inputs": [[3, 4]], "outputs": [[7]]},
            {},
            "def add(a, b): return a + b",
            "def add(a, b): return a",
        ),
        ({"fn_name": "add", "inputs": ["3\n4"], "outputs": ["7"]}, {}, "def add(a, b): return a + b", "print(7)"),
        (
            {"fn_name": "pair", "inputs": [["a"]], "outputs": [["a", 1]]},
            {},
            "def pair(s): return (s, 1)",
            "def pair(s): return s",
        ),
        (
            {"fn_name": "is_odd", "inputs": ["3"], "outputs": ["true"]},
            {},
            "def is_odd(n): return n % 2 == 1",
            "def is_odd(n): return 'true'",
        ),
        (
            {"fn_name": "twoSum", "inputs": [[[2, 7, 9], 9]], "outputs": [[0, 1]]},
            {},
            RIGHT_SUM,
            TWO_SUM + "        return [1, 0]",
        ),
        (
            [{"input": "[2, 7, 9]\n9", "output": "[0, 1]", "testtype": "functional"}],
            {"metadata": '{"func_name": "twoSum"}'},
            RIGHT_SUM,
            TWO_SUM + "        return []",
        ),
        (
            [{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}],
            {},
            "print(sum(map(int, input().split())))",
            "print(8)",
        ),
        ({"inputs": [["3", "4"]], "outputs": [["7"]]}, {}, "print(int(input()) + int(input()))", "print(3)"),
        (
            "def check(candidate):\n    assert candidate([1, 3]) == 2\n",
            {"entry_point": "mean"},
            "def mean(xs: List[int]) -> float: return sum(xs) / len(xs)",
            "def mean(xs): return 0",
        ),
        (
            ["assert spell_check('cat') == 1", "assert [check(n) for n in [0]] == [1]"],
            {"entry_point": "spell_check"},
            "def spell_check(word): return 1\ndef check(n): return n + 1",
            "def spell_check(word): return 0",
        ),
        (
            ["assert area(1) == 3"],
            {"test_setup_code": "PI = 3", "test_imports": ["import math"]},
            "def area(r): return PI * r * r",
            "def area(r): return r",
        ),
        (
            "def check(candidate):\n    assert candidate(nums=[2, 7, 9], target=9) == [0, 1]\n",
            {"entry_point": "Solution().twoSum"},
            RIGHT_SUM,
            TWO_SUM + "        return [1, 0]",
        ),
        (
            {"fn_name": "Solution().twoSum", "inputs": [[[2, 7, 9], 9]], "outputs": [[0, 1]]},
            {},
            RIGHT_SUM,
            TWO_SUM + "        return [1, 0]",
        ),
        (
            [{"input": [3], "output": [5], "testtype": "functional", "fn_name": "f"}],
            {},
            "def f(x): return [5]",
            "def f(x): return 5",
        ),
        ({"tests": ["f", "assert f(2) == 4"]}, {}, "def f(x): return 2 * x", "def g(x): return 2 * x"),
        (
            [{"type": "function_call", "fn_name": "add", "input": [3, 4], "output": [7]}],
            {},
            "def add(a, b): return a + b",
            "def add(a, b): return a",
        ),
        (
            [{"input": "3\n4", "output": "7", "testtype": "functional", "metadata": {"func_name": "add"}}],
            {},
            "def add(a, b): return a + b",
            "def add(a, b): return a",
        ),
        (
            {
                "language": "python",
                "test_cases": [{"fn_name": None, "input": "2", "output": "4", "type": "stdin_stdout"}],
            },
            {},
            "print(2 * int(input()))",
            "print(input())",
        ),
        ({"input": ["1", "3"], "output": ["2", "6"]}, {}, "print(2 * int(input()))", "print(2)"),
        ("['assert f(1) == 1', \"assert f('a') == 'a'\"]", {}, "def f(x): return x", "def f(x): return 1"),
        ("{'fn_name': 'f', 'inputs': [(1,)], 'outputs': [True]}", {}, "def f(x): return x == 1", "def f(x): return 2"),
        (
            {"inputs": ["1 3", "1 1"], "outputs": ["0.333333", "1.0"]},
            {},
            "a, b = map(int, input().split())\nprint(' ', a / b)",
            "a, b = map(int, input().split())\nprint(round(a / b, 3))",
        ),
    ],
)
def test_tests_of_public_data_sets_are_run_as_they_are_meant(reward, answer, columns, right, wrong):
    assert worth(reward, answer, right, columns) == 1.0
    assert worth(reward, answer, wrong, columns) < 1.0


APART = {"testtype": "functional", "fn_name": "f"}
CALL = {"type": "function_call", "fn_name": "f"}


@pytest.mark.parametrize(
    ("answer", "results"),
    [
        ([{**APART, "input": [3], "output": [5]}], [[5]]),
        ([{**APART, "input": [3], "output": [5]}, {**APART, "input": [4], "output": [6]}], [[5], 5]),
        ([{**APART, "input": [3], "output": [5]}, {**APART, "input": [4], "output": 6}], [[5]]),
        ([{**APART, "input": "3", "output": "[5]"}], [[5]]),
        ([{**CALL, "input": [3], "output": [5]}], [[5], 5]),
        ({"fn_name": "f", "inputs": [[3]], "outputs": [[5]]}, [[5], 5]),
        ({"fn_name": "f", "inputs": [[3], [4]], "outputs": [[5], 6]}, [[5]]),
    ],
)
def test_a_list_around_each_result_is_taken_off_where_a_set_writes_one(answer, results):
    code = unit_tests_of(json.dumps(answer), {})[0].code

    assert f"{json.dumps(results)!r})" in code


def test_a_method_is_named_with_its_class_or_without():
    alone, named = (
        unit_tests_of(json.dumps({"fn_name": name, "inputs": [[3]], "outputs": [5]}), {})
        for name in ("f", "Solution().f")
    )

    assert alone == named
    with pytest.raises(ValueError, match="a test of a function names none"):
        unit_tests_of(json.dumps({"fn_name": "Solution().f()", "inputs": [[3]], "outputs": [5]}), {})


SAME = {
    "counted": ({"1": 2, "2": 1}, "collections.Counter([1, 1, 2])", "collections.Counter([1, 2, 2])"),
    "by default": ({"a": []}, "collections.defaultdict(list, a=[])", "[('a', [])]"),
    "ordered": ({"a": 1}, "collections.OrderedDict(a=1)", "{'a': '1'}"),
    "deque": ([1, [2, 3]], "collections.deque([1, range(2, 4)])", "collections.deque([1, 2, 3])"),
    "near zero": (0.0, "1e-17", "1e-6"),
    "near": (0.1, "3 * 0.1 - 0.2", "0.1001"),
    "integer": (10**15, "10**15", "10**15 + 1"),
    "float for integer": (1, "1.0", "'1'"),
    "truth": (True, "1", "'True'"),
    "truths": ([True, False], "[1, 0]", "[1.0000000001, 0]"),
    "one": (1, "True", "None"),
    "fraction": (0.5, "__import__('fractions').Fraction(1, 2)", "__import__('fractions').Fraction(1, 3)"),
    "text": ("a", "type('Text', (str,), {})('a')", "b'a'"),
    "null": (None, "None", "0"),
}


@pytest.mark.process
def test_results_are_equal_as_in_python(reward):
    def right(column):
        cases = ", ".join(f"{name!r}: lambda: {case[column]}" for name, case in SAME.items())
        code = f"def f(name):\n    return {{{cases}}}[name]()"
        return [
            name
            for name, case in SAME.items()
            if worth(reward, {"fn_name": "f", "inputs": [[name]], "outputs": [case[0]]}, code)
        ]

    assert right(1) == list(SAME)
    assert right(2) == []


@pytest.mark.parametrize(
    ("printed", "wanted", "is_same"),
    [
        ("0.5000000000\n", "0.5", True),
        ("0.3333333333333333", "0.333333", True),
        ("3", "3.0", True),
        ("1e3", "1000", True),
        ("1000000.5", "1000000", False),
        ("1000000006.0", "1000000007", False),
        ("5.0", "5", True),
        ("1" * 60_000 + "x", "1", False),
        (" 1  2\t3 \n\n", "1 2 3", True),
        ("a\nb", "a b", False),
        ("0.334", "0.333333", False),
        ("1000001", "1000000", False),
        ("007", "7", False),
        ("0.5 x", "0.5", False),
        ("1_0.0", "10.0", False),
        ("1e999", "2e999", False),
        ("nan", "nan", True),
        ("nan", "0.5", False),
        ("0.5.0", "0.50", False),
    ],
)
def test_printed_words_are_compared_and_numbers_with_a_point_nearly(printed, wanted, is_same):
    assert _is_printed(printed, wanted) is is_same


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"fn_nam": "f", "inputs": ["1"], "outputs": ["1"]},
            "the key 'fn_nam' of a test is not known; known are fn_name",
        ),
        ([{"stdin": "1", "stdout": "1", "timeout": 3}], "the key 'timeout'"),
        ([{"input": "1", "output": "1", "testtype": "interactive"}], "type 'interactive'"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "names none.*write fn_name"),
        ({"inputs": [[1, 2]], "outputs": [3]}, "name a function in fn_name"),
        ({"inputs": ["1", "2"], "outputs": ["3"]}, "not two lists of one length"),
        ({"fn_name": "f", "inputs": ["what?"], "outputs": ["1"]}, "'what.' is not an argument"),
        ("{'inputs': [1], 'outputs': [2]}", "name a function in fn_name"),
        ("{'inputs': {1}, 'outputs': {2}}", "checks nothing"),
        ({"language": "cpp", "test_cases": [{"input": "1", "output": "1"}]}, "tests of 'cpp' are not known"),
        ({"public_tests": {"input": ["1"], "output": ["1"]}}, "the key 'public_tests'"),
        ("def check(candidate):\n    assert candidate(1)", "checks nothing"),
        ("async def check(candidate):\n    assert candidate(1)", "checks nothing"),
        ("METADATA: dict = {}\nfrom solution import f\ndef test():\n    assert f()\nTESTS = [test]", "checks nothing"),
        ("def test():\n    assert f()\nif __name__ == '__main__':\n    test()", "checks nothing"),
        ("if False:\n    assert f()\nelif 0:\n    assert f()\nelse:\n    pass", "checks nothing"),
        ('{"inputs": ["1"', "is not Python"),
        ([], "holds no list of tests"),
        ({"inputs": [], "outputs": []}, "holds no list of tests"),
        ({"tests": []}, "holds no list of tests"),
    ],
)
def test_tests_that_cannot_be_read_are_refused_with_their_key(answer, message):
    text = answer if isinstance(answer, str) else json.dumps(answer)
    with pytest.raises(ValueError, match=message):
        unit_tests_of(text, {"entry_point": "f"} if text.startswith("async") else {})


def test_of_many_tests_an_even_sample_runs():
    numbers = [str(number) for number in range(1000)]
    tables = ([f"assert f({number})" for number in numbers], {"inputs": numbers, "outputs": numbers})
    for table in tables:
        text = json.dumps(table)
        drawn = [int((test.standard_input or test.code).strip("aserft( )")) for test in unit_tests_of(text, {})]

        assert (len(drawn), drawn[0], drawn[-1]) == (128, 0, 999)
        assert {after - before for before, after in itertools.pairwise(drawn)} == {7, 8}
        assert unit_tests_of(text, {}) == unit_tests_of(text, {})
    assert len(unit_tests_of(json.dumps(tables[0][:128]), {})) == 128


@pytest.mark.process
def test_rows_whose_tests_cannot_be_read_are_known_before_they_are_drawn(tmp_path):
    path = tmp_path / "rows.jsonl"
    answers = [{"inputs": [[1]], "outputs": [2]}, ["assert f()"], ["assert f()"]]
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": each}) + "\n" for n, each in enumerate(answers)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "held out", "answer": ["assert f()"]}\n')
    task = build_task(
        TaskConfig(name=f"jsonl:{path}", evaluation_path=str(held_out), rewards=[{"kind": "code", "name": "tests"}])
    )
    try:
        assert [bool(task.answer_problem(task.prompt(index))) for index in range(3)] == [True, False, False]
        assert "fn_name" in task.answer_problem(task.prompt(0)).text
        with pytest.raises(AnswerUnreadable, match=r"^task.rewards\[0\]: .*fn_name"):
            check_answer(task, task.prompt(0))
    finally:
        task.close()
