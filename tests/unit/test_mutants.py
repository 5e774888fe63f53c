"""The campaign that breaks guards: what it draws, the source it makes of it, the tests it would run."""

import ast
import contextlib
import subprocess
from pathlib import Path

import psutil
import pytest

from campaigns.mutants import TIERS, broken, draw, end, failed, guards_of, judge, reaching

ROOT = Path(__file__).parents[2]
SOURCE = """
LIMIT = 3

def take(count, floor=0):
    if (half := count // 2) > LIMIT or (
        count < 0
    ):
        raise ValueError("count")
    if floor:
        return max(half, floor)
    elif count == 5:
        raise ValueError("five")
    return min(half, 2) + half
"""


def _answer(source, count):
    names = {}
    exec(compile(source, "take.py", "exec"), names)  # noqa: S102 - made above
    try:
        return names["take"](count)
    except ValueError as error:
        return str(error)


def test_guards_are_refusals_and_clamps_by_a_constant():
    assert [(guard.line, guard.kind, guard.text) for guard in guards_of(SOURCE, "take.py")] == [
        (5, "raise", "(half := count // 2) > LIMIT or ( count < 0 )"),
        (11, "raise", "count == 5"),
        (13, "clamp", "min(half, 2)"),
    ]


# By the count: 8 is beyond the limit, 5 is refused, of 6 the half is 3 and clamped to 2.
@pytest.mark.parametrize(("number", "answers"), [(0, [6, "five", 5]), (1, ["count", 4, 5]), (2, ["count", "five", 6])])
def test_broken_source_lacks_one_guard(number, answers):
    source = broken(SOURCE, guards_of(SOURCE, "take.py")[number])

    assert [_answer(SOURCE, count) for count in (8, 5, 6)] == ["count", "five", 5]
    assert [_answer(source, count) for count in (8, 5, 6)] == answers


def test_every_guard_of_a_service_can_be_broken():
    num_guards = 0
    for path in sorted((ROOT / "services" / "relay").glob("*.py")):
        source = path.read_text()
        for guard in guards_of(source, path.name):
            num_guards += 1
            assert ast.dump(ast.parse(broken(source, guard))) != ast.dump(ast.parse(source)), guard.key
    assert num_guards > 10


def test_equal_seeds_draw_equally_and_a_new_guard_changes_one_place_at_most():
    guards = guards_of(SOURCE, "take.py") + guards_of(SOURCE, "other.py")
    drawn = draw(guards, count=3, seed=5)

    assert draw(reversed(guards), count=3, seed=5) == drawn
    assert len({tuple(draw(guards, count=6, seed=seed)) for seed in range(9)}) > 1
    more = draw([*guards, *guards_of("if a:\n    raise b\n", "new.py")], count=3, seed=5)
    assert len(set(more) & set(drawn)) >= 2


def test_tests_that_reach_a_file_come_nearest_first(tmp_path):
    sources = {
        "services/alpha/core.py": "",
        "services/alpha/alpha_app.py": "from heterorl.alpha import core",
        "tests/unit/alpha/test_of_core.py": "from heterorl.alpha.core import Core",
        "tests/unit/alpha/test_of_app.py": "import heterorl.alpha.alpha_app",
        "tests/unit/alpha/test_of_nothing.py": "import heterorl.beta",
        "tests/faults/test_process.py": "command = ['-m', 'heterorl.alpha.alpha_app']",
        "tests/faults/conftest.py": "from tests.support import world",
        "tests/faults/test_fixture.py": "",
        "tests/support/world.py": "import heterorl.alpha.alpha_app",
        "tests/gpu/test_gpu.py": "import heterorl.alpha.core",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)

    assert reaching(tmp_path)["services/alpha/core.py"] == [
        "tests/unit/alpha/test_of_core.py",
        "tests/unit/alpha/test_of_app.py",
        "tests/faults/test_process.py",
        "tests/faults/test_fixture.py",
    ]


class Tree:
    """A copy of the tree whose tests end as the lists say; None: not in time."""

    commit = "c0ffee"

    def __init__(self, *, fail_broken, fail_whole=(), late=()):
        self.failing = {True: fail_broken, False: fail_whole}
        self.late, self.is_broken = late, False

    @contextlib.contextmanager
    def without(self, guard):
        self.is_broken = True
        yield
        self.is_broken = False

    def first_failure(self, tests, *, marker, skip, limit_s):
        of_tier = [test for test in tests if ("slow" in test) is (marker == TIERS["second"]) and test not in skip]
        failing = [test for test in of_tier if test in self.failing[self.is_broken]]
        return failing[0] if failing else None if set(of_tier) & set(self.late) else ""


@pytest.mark.parametrize(
    ("tree", "noticed", "test"),
    [
        (Tree(fail_broken=["b", "slow"]), "landing", "b"),
        (Tree(fail_broken=["slow"]), "second", "slow"),
        (Tree(fail_broken=[]), "none", ""),
        (Tree(fail_broken=["a", "b"], fail_whole=["a"]), "landing", "b"),
        (Tree(fail_broken=["a"], fail_whole=["a"]), "none", ""),
        (Tree(fail_broken=[], late=["b"]), "unknown", ""),
        (Tree(fail_broken=["slow"], late=["b"]), "second", "slow"),
    ],
)
def test_guard_is_noticed_by_a_test_that_passes_on_the_whole_tree(tree, noticed, test):
    row = judge(tree, guards_of(SOURCE, "take.py")[0], ["a", "b", "slow"], known=set(), limit_s=9.0)

    assert (row["noticed"], row["test"]) == (noticed, test)


@pytest.mark.parametrize(
    ("output", "code", "test"),
    [
        ("3 passed", 0, ""),
        ("2 deselected", 5, ""),
        ("FAILED tests/a.py::test_b[1-x] - assert 1 == 2\n1 failed", 1, "tests/a.py::test_b[1-x]"),
        ("ERROR tests/a.py - NameError", 2, "tests/a.py"),
    ],
)
def test_failing_test_is_read_from_the_summary(output, code, test):
    assert failed(output, code) == test


def test_a_pytest_that_fails_by_itself_is_no_answer():
    with pytest.raises(RuntimeError, match="ended with 4"):
        failed("no such file", 4)


@pytest.mark.process
def test_end_of_a_late_pytest_is_the_end_of_its_processes():
    command = ["sh", "-c", "setsid sleep 600 & echo $!; wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        child = psutil.Process(int(process.stdout.readline()))
        end(process)
    child.wait()

    assert process.returncode == -9


@pytest.mark.process
def test_end_of_a_pytest_that_is_over_is_the_end_of_what_it_left():
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    with process.stdout:
        child = psutil.Process(int(process.stdout.readline()))
        process.wait()
        end(process)
    child.wait()
