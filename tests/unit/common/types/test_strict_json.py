"""JSON for other programs: strict readers take it whatever the numbers are."""

import json
import math

import pytest

from heterorl.common.types.common import strict_json


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_is_null(number):
    value = {"loss": number, "parts": [{"mean": number}, (1.5, number)], "name": "é"}
    for indent in (None, 2):
        text = strict_json(value, indent=indent)
        found = json.loads(text, parse_constant=refuse)
        assert found == {"loss": None, "parts": [{"mean": None}, [1.5, None]], "name": "é"}
    assert strict_json({"loss": 0.5}) == '{"loss": 0.5}'
