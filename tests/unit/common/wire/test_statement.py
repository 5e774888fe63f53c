"""The configuration behind a contract as bytes: one form, known keys, bounded before it is parsed."""

import dataclasses
import json

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.wire import statement as wire
from heterorl.common.wire.statement import MAX_STATEMENT_BYTES, Statement, check_statement, statement_from_bytes
from tests.support.run import CONTRACT
from tests.support.statements import settings, stated


def changed(**changes):
    table = {"contract": "c", **settings()}
    table |= changes
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def test_what_is_written_is_read():
    read = check_statement(stated(CONTRACT, task={"system_prompt": "né\n"}), CONTRACT)

    assert read.settings == settings(task={"system_prompt": "né\n"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 20_000,
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":1,"a":2}',
        b'{"a": 1}',
        b"1" * 6_000,
        changed(task={"name": "\ud800"}),
        changed(more=1),
        changed(task=[]),
        changed(group_size=True),
        changed(group_size=2.0),
        changed(use_chat_template=1),
        changed(contract=5),
        changed(task={"a": [[[[[[[[[[[[[[]]]]]]]]]]]]]]}),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(InvalidRequest, match="statement"):
        statement_from_bytes(data)


def test_length_is_refused_before_anything_is_parsed(monkeypatch):
    monkeypatch.setattr(wire.json, "loads", lambda data: pytest.fail("parsed"))
    with pytest.raises(InvalidRequest, match=f"at most {MAX_STATEMENT_BYTES}"):
        statement_from_bytes(b"{" + b" " * MAX_STATEMENT_BYTES)


def test_learner_whose_settings_are_too_long_gets_an_error_of_its_own():
    with pytest.raises(InvalidRequest, match="at most"):
        wire.statement_to_bytes(
            Statement(contract="c", settings=settings(task={"system_prompt": "x" * MAX_STATEMENT_BYTES}))
        )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"group_size": 3}, "group_size"),
        ({"sampling": {"max_new_tokens": 5}}, "sampling.max_new_tokens"),
        ({"sampling": {"logprob_mode": "raw"}}, "sampling.logprob_mode"),
        ({"lora": {"rank": 4}}, "lora.rank"),
    ],
)
def test_statement_that_does_not_fit_its_contract_is_refused(change, key):
    with pytest.raises(InvalidRequest, match=f"statement.{key}"):
        check_statement(stated(CONTRACT, **change), CONTRACT)


def test_statement_of_another_contract_is_refused():
    other = dataclasses.replace(CONTRACT, num_prompts=51)
    with pytest.raises(InvalidRequest, match="not the digest of the contract"):
        check_statement(stated(other), CONTRACT)
