"""Statements of tests: the configuration behind a contract, with changes."""

from __future__ import annotations

from typing import Any

from heterorl.common.model.contract import LoraConfig, SamplingConfig
from heterorl.common.types.common import Contract
from heterorl.common.wire.statement import Statement, contract_digest, statement_to_bytes


def settings(**changes: Any) -> dict[str, Any]:
    """Those of a small run of arithmetic; `task`, `sampling` and `lora` are merged."""
    own: dict[str, Any] = {
        "task": {"name": "arithmetic", "digits": 1},
        "sampling": SamplingConfig(max_new_tokens=4).model_dump(mode="json"),
        "lora": LoraConfig().model_dump(mode="json"),
        "group_size": 2,
        "use_chat_template": False,
        "chat_template_arguments": {},
    }
    for key, value in changes.items():
        own[key] = {**own[key], **value} if isinstance(own.get(key), dict) and isinstance(value, dict) else value
    return own


def statement(contract: Contract, **changes: Any) -> Statement:
    """What a learner with that contract states."""
    return Statement(contract=contract_digest(contract), settings=settings(**changes))


def stated(contract: Contract, **changes: Any) -> bytes:
    """The same as bytes."""
    return statement_to_bytes(statement(contract, **changes))
