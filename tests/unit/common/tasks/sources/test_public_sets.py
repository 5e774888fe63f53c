"""Rows as twenty public data sets have them, read by their own route and scored as a person would.

Columns and shapes are those that the sets document; the values are made up here.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterorl.common.tasks.task_config import TaskConfig, build_task

pytestmark = [pytest.mark.process, pytest.mark.slow]

OWN = """
import json

def countdown(completion, target, nums):
    _, tag, text = completion.rpartition("<answer>")
    text = (text if tag else "").partition("</answer>")[0].partition("=")[0].strip()
    if not text or set(text) - set("0123456789+-*/() "):
        return 0.0
    used = sorted(int(part) for part in "".join(c if c.isdigit() else " " for c in text).split())
    try:
        return float(used == sorted(nums) and abs(eval(text) - target) < 1e-9)
    except (SyntaxError, ZeroDivisionError):
        return 0.0

def alias(prompts, completions, answer, **columns):
    return [float(text[-1]["content"].strip(" .").lower() in each["normalized_aliases"]) if isinstance(text, list)
            else float(text.strip(" .").lower() in each["normalized_aliases"])
            for text, each in zip(completions, answer)]
"""
CODE = [{"kind": "code", "name": "tests", "test_timeout_s": 20}]
MATHS = {"match": "math_verify"}


@dataclass(kw_only=True)
class Set:
    """One data set: a row, how it is read, and completions that a person calls right or wrong."""

    route: str
    row: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any]
    right: list[str]
    wrong: list[str]


def box(text):
    return f"Let me see.\nSo the answer is $\\boxed{{{text}}}$."


def code(*texts):
    return [f"Here it is:\n\n```python\n{text}\n```\nIt is right." for text in texts]


def boxes(*texts):
    return [box(text) for text in texts]


SETS = {
    "gsm8k": Set(
        route="hf",
        row={"question": "Mia sells 12 cups at $4 and pays $8. What is left?", "answer": "12*4=<<12*4=48>>48\nShe keeps $48-$8=$<<48-8=40>>40.\n#### 1,040"},
        data={"prompt": "question"}, task=MATHS,
        right=["#### 1040", "She keeps $1,040.", box("1040"), "The answer is 1,040 dollars.", "<think>#### 7</think>So it is **1040**."],
        wrong=["#### 40", "The answer is 1.", box("1,004"), "<think>1040</think>It is 48.", ""],
    ),
    "math": Set(
        route="parquet",
        row={"problem": "Find x.", "level": "Level 3", "type": "Algebra", "solution": "We have $x^2 = 8$, so $x = 2\\sqrt{2}$ or 2.83. Thus $\\boxed{2\\sqrt{2}}$ is the root."},
        data={"prompt": "problem", "answer": "solution"}, task=MATHS,
        right=boxes("2\\sqrt{2}", "\\sqrt{8}", "2\\sqrt2", "2\u221a2", "\\frac{4}{\\sqrt{2}}"),
        wrong=boxes("2", "\\sqrt{2}", "8", "2.83", "-2\\sqrt{2}"),
    ),
    "math_500": Set(
        route="jsonl",
        row={"problem": "Polar form?", "solution": "It is $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/1.json"},
        data={"prompt": "problem"}, task=MATHS,
        right=boxes("(3, \\frac{\\pi}{2})", "\\left(3,\\dfrac{\\pi}{2}\\right)", "(3, \\pi/2)", "(3, \u03c0/2)", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        wrong=boxes("3", "\\frac{\\pi}{2}", "(3, \\pi)", "(\\frac{\\pi}{2}, 3)", "(2, \\frac{\\pi}{2})"),
    ),
    "dapo_math_17k": Set(
        route="parquet",
        row={"data_source": "math_dapo", "prompt": [{"content": "Solve it. The last line should be of the form Answer: $Answer.\n\n2+32?", "role": "user"}], "ability": "MATH", "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"}},
        data={"answer": "reward_model.ground_truth"}, task=MATHS,
        right=["First 2, then 32.\nAnswer: 34", "Answer: $34$", "**Answer:** 34", "Answer: \\boxed{34}", "Answer: \\(34\\)"],
        wrong=["Answer: 32", "Answer: $-34$", "34 is too much.\nAnswer: 30", "Answer: 3.4", "Answer: \\boxed{2}, not 34"],
    ),
    "deepscaler": Set(
        route="hf",
        row={"problem": "Solve for all x.", "answer": "1 - \\sqrt{2}", "solution": "It is $1-\\sqrt{2}$."},
        data={"prompt": "problem"}, task=MATHS,
        right=["<think>maybe \\boxed{1}</think>" + box("1-\\sqrt{2}"), *boxes("-\\sqrt{2}+1", "1 - \\sqrt 2", "1-\u221a2", "\\frac{2-2\\sqrt{2}}{2}")],
        wrong=["<think>\\boxed{1-\\sqrt{2}}</think>" + box("1"), *boxes("\\sqrt{2}", "1+\\sqrt{2}", "2", "\\sqrt{2}-1")],
    ),
    "openr1_math": Set(
        route="parquet",
        row={"problem": "How fast?", "solution": "v = 18 km/h", "answer": "18\\%", "problem_type": "Algebra", "question_type": "math-word-problem", "source": "olympiads", "uuid": "4f", "is_reasoning_complete": [True, False], "generations": ["<think>a</think>b", "c"], "correctness_math_verify": [True, False], "finish_reasons": ["stop", None], "messages": [{"role": "user", "content": "How fast?"}, {"role": "assistant", "content": "18"}]},
        data={"prompt": "problem"}, task=MATHS,
        right=boxes("18\\%", "18%", "0.18", "\\frac{9}{50}", "18 \\%"),
        wrong=boxes("1.8", "0.018", "19\\%", "81\\%", "\\frac{18}{10}"),
    ),
    "open_reasoner_zero": Set(
        route="jsonl",
        row={"0": {"from": "human", "value": "Name all roots."}, "1": {"from": "assistant", "ground_truth": {"value": "1, -5"}}},
        data={"prompt": "0.value", "answer": "1.ground_truth.value"}, task=MATHS,
        right=[*boxes("1, -5", "-5, 1", "1 \\text{ and } -5", "\\{1, -5\\}"), "<think>1</think> <answer> \\boxed{-5,1} </answer>"],
        wrong=[*boxes("1", "-5", "1, 5", "-1, 5"), "<think>\\boxed{1,-5}</think> <answer> 5 </answer>"],
    ),
    "numina_math_cot": Set(
        route="hf",
        row={"source": "cn_k12", "problem": "The domain?", "solution": "Since $x \\ge 2$ and $x < 7$, it is $\\boxed{[2, 7)}$.", "messages": [{"content": "The domain?", "role": "user"}, {"content": "[2,7)", "role": "assistant"}]},
        data={"prompt": "problem", "answer": "solution"}, task=MATHS,
        right=["So it is $[2, 7)$.", *boxes("[2,7)", "[2, 7)", "\\left[2, 7\\right)", "[\\frac{4}{2}, 7)")],
        wrong=boxes("7", "[2, 7]", "(2, 7)", "2", "[2, 8)"),
    ),
    "aime_2024": Set(
        route="parquet",
        row={"ID": "2024-I-1", "Problem": "Find m+n.", "Solution": "It is 73.", "Answer": 73},
        data={"prompt": "Problem", "answer": "Answer"}, task=MATHS,
        right=["The answer is 73.", "\\boxed{073}", *boxes("73", "70+3"), "Hence m+n = 73."],
        wrong=["The answer is 37.", "\\boxed{7}", *boxes("74", "730"), "73 is not it; \\boxed{72}"],
    ),
    "countdown": Set(
        route="parquet",
        row={"target": 24, "nums": [2, 3, 4], "prompt": "Make 24 of 2, 3 and 4."},
        task={"reward": "own:countdown"},
        right=["<answer>2*3*4</answer>", "<think>2+3</think><answer>4*3*2</answer>", "<answer> (2 * 3) * 4 = 24 </answer>", "So: <answer>4 * (2 * 3)</answer>.", "<answer>3*(4*2)</answer>"],
        wrong=["<answer>4*3*2*1</answer>", "<answer>24</answer>", "<think><answer>2*3*4</answer></think>", "<answer>2+3+4</answer>", "2*3*4"],
    ),
    "mbpp": Set(
        route="hf",
        row={"task_id": 11, "text": "Write a function that squares.", "code": "def sq(x): return x*x", "test_list": ["assert sq(2) == 4", "assert sq(-3) == 9", "assert sq(0) == 0"], "test_setup_code": "", "challenge_test_list": []},
        data={"prompt": "text", "answer": "test_list"}, task={"rewards": CODE},
        right=[*code("def sq(x):\n    return x * x", "sq = lambda x: x ** 2", "import math\ndef sq(x: int) -> int:\n    return int(math.pow(x, 2))"), "~~~python\ndef sq(x): return x*x\n~~~", "1. So:\n   ```py\n   def sq(x):\n       return x * x\n   ```"],
        wrong=[*code("def sq(x):\n    return 2 * x", "def square(x): return x * x", "def sq(x): print(x * x)"), "def sq(x): return x * x", "<think>```python\ndef sq(x): return x*x\n```</think>It is x*x."],
    ),
    "apps": Set(
        route="jsonl",
        row={"problem_id": 7, "question": "Rotate a word.", "solutions": "[\"...\"]", "input_output": json.dumps({"fn_name": "rotate", "inputs": [["abc"], ["xy"]], "outputs": [["bca"], ["yx"]]}), "difficulty": "interview", "url": "https://www.codewars.com/kata/1", "starter_code": "\ndef rotate(s):\n\t"},
        data={"prompt": "question", "answer": "input_output"}, task={"rewards": CODE},
        right=code("def rotate(s):\n    return s[1:] + s[:1]", "def rotate(s: str) -> str:\n    return ''.join([*s[1:], s[0]])", "class Solution:\n    def rotate(self, s):\n        return s[1:] + s[0]", "from collections import deque\ndef rotate(s):\n    d = deque(s)\n    d.rotate(-1)\n    return ''.join(d)", "rotate = lambda s: s[1:] + s[0]"),
        wrong=code("def rotate(s):\n    return s", "def rotate(s):\n    return s[-1] + s[:-1]", "print('bca')", "def turn(s):\n    return s[1:] + s[0]", "def rotate(s):\n    print(s[1:] + s[0])"),
    ),
    "taco": Set(
        route="parquet",
        row={"question": "Sum two numbers a line.", "solutions": "[]", "starter_code": "", "input_output": json.dumps({"inputs": ["2\n1 2\n3 4\n", "1\n5 5\n"], "outputs": ["3\n7\n", "10\n"]}), "difficulty": "EASY", "raw_tags": "[]", "name": None, "source": "codeforces", "tags": "[]", "skill_types": "[]", "url": "u", "Expected Auxiliary Space": None, "time_limit": "1.0 seconds", "date": None, "picture_num": None, "memory_limit": "256 MB", "Expected Time Complexity": None},
        data={"prompt": "question", "answer": "input_output"}, task={"rewards": CODE},
        right=code("for _ in range(int(input())):\n    print(sum(map(int, input().split())))", "import sys\nrows = sys.stdin.read().split('\\n')[1:]\nprint('\\n'.join(str(sum(map(int, row.split()))) for row in rows if row))", "def main():\n    n = int(input())\n    for i in range(n):\n        a, b = map(int, input().split())\n        print(a + b)\n\nif __name__ == '__main__':\n    main()", "n = int(input())\nout = [eval(input().replace(' ', '+')) for _ in range(n)]\nprint(*out, sep='\\n')", "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Pair:\n    a: int\n    b: int\n\nfor _ in range(int(input())):\n    pair = Pair(*map(int, input().split()))\n    print(pair.a + pair.b, '')"),
        wrong=code("print(3)\nprint(7)", "for _ in range(int(input())):\n    print(input())", "def main():\n    print(sum(map(int, input().split())))", "a, b = map(int, input().split())\nprint(a + b)", "for _ in range(int(input())):\n    print(sum(map(int, input().split())), end=' ')"),
    ),
    "live_code_bench": Set(
        route="jsonl",
        row={"question_title": "two-sum", "question_content": "Find two.", "platform": "leetcode", "question_id": "1", "contest_id": "weekly", "contest_date": "2024-01-06T00:00:00", "starter_code": "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        ", "difficulty": "easy", "public_test_cases": json.dumps([{"input": "[2, 7, 11]\n9", "output": "[0, 1]", "testtype": "functional"}, {"input": "[3, 3]\n6", "output": "[0, 1]", "testtype": "functional"}]), "private_test_cases": "eJxr", "metadata": json.dumps({"func_name": "twoSum"})},
        data={"prompt": "question_content", "answer": "public_test_cases"}, task={"rewards": CODE},
        right=code("class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        seen = {}\n        for i, a in enumerate(nums):\n            if target - a in seen:\n                return [seen[target - a], i]\n            seen[a] = i", "from typing import List\nclass Solution:\n    def twoSum(self, nums: List[int], target: int):\n        return next((i, j) for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == target)", "def twoSum(nums, target):\n    for p in combinations(range(len(nums)), 2):\n        if nums[p[0]] + nums[p[1]] == target:\n            return list(p)", "class Solution:\n    def helper(self): return 0\n    def twoSum(self, nums, target):\n        return [self.helper(), 1]", "from __future__ import annotations\nclass Solution:\n    def twoSum(self, nums: list[int], target: int) -> list[int]:\n        d = defaultdict(list)\n        for i, a in enumerate(nums):\n            if d[target - a]:\n                return [d[target - a][0], i]\n            d[a].append(i)"),
        wrong=code("class Solution:\n    def twoSum(self, nums, target):\n        return [1, 0]", "class Solution:\n    def twoSum(self, nums, target):\n        return nums[:2]", "class Solution:\n    def two_sum(self, nums, target):\n        return [0, 1]", "print([0, 1])", "class Solution:\n    def twoSum(self, nums, target):\n        return '[0, 1]'"),
    ),
    "human_eval": Set(
        route="hf",
        row={"task_id": "HumanEval/0", "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    \"\"\" Sum of xs. \"\"\"\n", "canonical_solution": "    return sum(xs)\n", "test": "\n\nMETADATA = {\n    'author': 'x'\n}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n", "entry_point": "total"},
        data={"answer": "test"}, task={"rewards": CODE},
        right=code("from typing import List\n\ndef total(xs: List[int]) -> int:\n    return sum(xs)", "def total(xs: List[int]) -> int:\n    n = 0\n    for x in xs:\n        n += x\n    return n", "total = sum", "def total(xs):\n    return xs[0] + total(xs[1:]) if xs else 0", "import functools\ndef total(xs):\n    return functools.reduce(lambda a, b: a + b, xs, 0)"),
        wrong=code("def total(xs):\n    return 3", "def total(xs):\n    return xs[0] + sum(xs[1:])", "def summed(xs):\n    return sum(xs)", "def total(xs):\n    pass", "def total(xs) return sum(xs)"),
    ),
    "trivia_qa": Set(
        route="jsonl",
        row={"question": "Who wrote Babbitt?", "question_id": "tc_1", "question_source": "http://www.triviacountry.com/", "answer": {"aliases": ["Sinclair Lewis", "Harry Sinclair Lewis"], "normalized_aliases": ["sinclair lewis", "harry sinclair lewis", "lewis, sinclair"], "matched_wiki_entity_name": "", "normalized_value": "sinclair lewis", "type": "WikipediaEntity", "value": "Sinclair Lewis"}},
        data={"prompt": "question"}, task={"reward": "own:alias"},
        right=["Sinclair Lewis", "Harry Sinclair Lewis.", "sinclair lewis", "SINCLAIR LEWIS", " Lewis, Sinclair "],
        wrong=["Upton Sinclair", "Lewis Carroll", "", "Sinclair", "I do not know."],
    ),
    "arc_challenge": Set(
        route="parquet",
        row={"id": "Mercury_1", "question": "Which is a planet? A. Sun B. Moon C. Mars D. Io", "choices": {"text": ["Sun", "Moon", "Mars", "Io"], "label": ["A", "B", "C", "D"]}, "answerKey": "C"},
        data={"prompt": "question", "answer": "answerKey"}, task=MATHS,
        right=["C", "The answer is C.", "Answer: (C)", box("C"), box("\\text{(C)}")],
        wrong=["A", "The answer is B.", "Answer: (D)", box("A"), "<think>C</think>The answer is D."],
    ),
    "svamp": Set(
        route="parquet",
        row={"ID": "chal-1", "Body": "A pack costs 7.5 dollars.", "Question": "What cost 10?", "Equation": "( 7.5 * 10.0 )", "Answer": 75.0, "Type": "Multiplication", "question_concat": "A pack costs 7.5 dollars. What cost 10?"},
        data={"prompt": "question_concat", "answer": "Answer"}, task={},
        right=["75", " 75\n", "<think>7.5 * 10</think>75", "7.5*10 is</think>\n75", "<think>a</think><think>b</think>75 "],
        wrong=["75.5", "7.5", "<think>75", "", "It is 57"],
    ),
    "big_math": Set(
        route="hf",
        row={"problem": "How many?", "answer": "10\\,080", "source": "orca_math", "domain": ["Mathematics -> Counting"], "llama8b_solve_rate": 0.21875},
        data={"prompt": "problem", "at_least": {"llama8b_solve_rate": 0.1}}, task=MATHS,
        right=["The answer is 10,080.", *boxes("10080", "10{,}080", "10\\,080", "1.008 \\times 10^{4}")],
        wrong=["The answer is 10.", *boxes("80", "1080", "10.08", "10, 80")],
    ),
    "open_math_instruct_2": Set(
        route="jsonl",
        row={"problem": "Simplify.", "generated_solution": "So $\\boxed{x^2 + 3x - 4}$.", "expected_answer": "x^2 + 3x - 4", "problem_source": "augmented_math"},
        data={"prompt": "problem", "answer": "expected_answer"}, task=MATHS,
        right=boxes("x^2+3x-4", "(x+4)(x-1)", "-4 + 3x + x^2", "x\u00b2 + 3x \u2212 4", "x^{2}+3 x-4"),
        wrong=boxes("-4", "x^2 + 3x + 4", "4", "x^2", "x^2-3x-4"),
    ),
}  # fmt: skip


def opened(place, one):
    """The task of a set, of its row and of another one that asks something else."""
    asked = one.data.get("prompt", "prompt").partition(".")[0]
    other = json.loads(json.dumps(one.row))
    first = other[asked]
    other[asked] = (
        [{**first[0], "content": "else"}]
        if isinstance(first, list)
        else {**first, "value": "else"}
        if isinstance(first, dict)
        else f"{first} else"
    )
    rows = [one.row, other]
    if one.route == "jsonl":
        path = place / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = place / "set" / "data" / "train-00000-of-00001.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    name = {"jsonl": f"jsonl:{path}", "parquet": f"parquet:{path}", "hf": f"hf:{place / 'set'}[train]"}[one.route]
    (place / "own.py").write_text(OWN)
    data = {**one.data, "cache_dir": str(place / "cache")}
    return build_task(
        TaskConfig(name=name, data=data, evaluation_size=1, reward_path=str(place), reward_timeout_s=120, **one.task)
    )


def test_there_are_twenty_sets_with_ten_completions_each():
    assert len(SETS) == 20
    assert all(len(one.right) == len(one.wrong) == 5 for one in SETS.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SETS)
def test_a_public_set_is_scored_as_a_person_would(tmp_path, name):
    one = SETS[name]
    task = opened(tmp_path, one)
    try:
        prompt = task.prompt(0)
        assert task.answer_problem(prompt) is None
        worth = {text: sum(part.value for part in task.score(prompt, text)) for text in [*one.right, *one.wrong]}
    finally:
        task.close()

    assert [text for text in one.right if worth[text] != 1.0] == []
    assert [text for text in one.wrong if worth[text] != 0.0] == []
