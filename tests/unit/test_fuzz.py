"""A short run of the fuzzing, and that it sees what it looks for."""

import random

import pytest

from campaigns.fuzz.mutate import mutated
from campaigns.fuzz.targets import TARGETS, repeat, run_cases
from heterorl.common.errors import CorruptData, MalformedPayload
from tests.support.examples import examples

CASES = dict.fromkeys(TARGETS, 400) | {"safetensors": 100, "compose": 200, "push": 200, "fetch": 100}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_decoder_gives_a_result_or_a_typed_error(name):
    outcome = run_cases(name, TARGETS[name](), 0, examples(CASES[name]))

    assert outcome.crashes == []
    # Neither refuses all nor takes all: the cases reach both ends.
    assert 0.01 < outcome.refused / outcome.cases < 0.999


class Broken:
    """Fails in each way that counts as a crash, and in the one that does not."""

    def case(self, draw):
        return draw.randrange(5)

    def run(self, case):
        if case == 0:
            raise MalformedPayload("as it should be")
        if case == 1:
            raise IndexError("out of range")
        if case == 2:
            bytearray(1 << 30)
        if case == 3:
            raise AssertionError("a refused chunk changed")


def test_crashes_and_memory_beyond_the_cap_are_found():
    target = Broken()
    expected = {1: "IndexError", 2: "MemoryError", 3: "AssertionError"}

    outcome = run_cases("broken", target, 0, 40)

    drawn = [target.case(random.Random(f"broken:{number}")) for number in range(40)]
    assert set(drawn) == set(range(5))
    assert [(number, text.split(":")[0]) for number, text in outcome.crashes] == [
        (number, expected[kind]) for number, kind in enumerate(drawn) if kind in expected
    ]
    assert outcome.refused == drawn.count(0)


def test_case_depends_on_its_number_alone(capsys):
    one, two = TARGETS["chunk2"](), TARGETS["chunk2"]()

    for number in (0, 7, 123):
        assert one.case(random.Random(f"chunk2:{number}")) == two.case(random.Random(f"chunk2:{number}"))
    assert mutated(b"abcdef", random.Random(1)) == mutated(b"abcdef", random.Random(1))
    refused = next(n for n in range(50) if run_cases("chunk2", one, n, n + 1).refused)
    with pytest.raises(CorruptData):
        repeat("chunk2", refused)
    assert f"chunk2 case {refused}" in capsys.readouterr().out
