"""The campaign that breaks guards: what it draws, the source it makes of it, the tests it would run."""

import ast
from pathlib import Path

import pytest

from campaigns.mutants import all_guards, broken, draw, failed, guards_of, reaching

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


def test_guards_of_the_services_can_be_broken():
    for guard in draw(all_guards(ROOT), count=40, seed=1):
        source = (ROOT / guard.file).read_text()

        assert ast.dump(ast.parse(broken(source, guard))) != ast.dump(ast.parse(source)), guard.key


def test_equal_seeds_draw_equally_and_a_new_guard_changes_one_place_at_most():
    guards = guards_of(SOURCE, "take.py") + guards_of(SOURCE, "other.py")
    drawn = draw(guards, count=3, seed=5)

    assert draw(reversed(guards), count=3, seed=5) == drawn
    assert len({tuple(draw(guards, count=6, seed=seed)) for seed in range(9)}) > 1
    more = draw([*guards, *guards_of("if a:\n    raise b\n", "new.py")], count=3, seed=5)
    assert len(set(more) & set(drawn)) >= 2


def test_tests_that_reach_a_file_come_nearest_first():
    tests = reaching(ROOT)["services/coordinator/store/database.py"]

    ordered = [
        "tests/unit/coordinator/store/test_database.py", "tests/unit/coordinator/test_core.py",
        "tests/integration/test_border.py", "tests/faults/test_kills.py",
    ]  # fmt: skip
    assert sorted(ordered, key=tests.index) == ordered
    assert "tests/unit/learner/loss/test_loss_trl.py" not in tests


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
