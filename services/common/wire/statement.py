"""Canonical JSON of the configuration behind a contract.

The learner states it and a joining sampler adopts it, if the sampler's own file agrees (heterorl.sampler.adoption). The
length is checked before parsing. A statement has only known keys, finite numbers, and one form.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import Contract
from heterorl.common.wire.common_messages import bytes_digest, contract_to_bytes

MAX_STATEMENT_BYTES = 48 << 10
"""Below an earlier coordinator's limit of unknown fields."""
MAX_DEPTH = 12
TABLES = ("task", "sampling", "lora", "chat_template_arguments")
KEYS = (*TABLES, "group_size", "use_chat_template")
"""Keys of a configuration that are equal on all nodes of a run."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """`settings` with each key of KEYS; `contract` is their contract's digest."""

    contract: str
    settings: Mapping[str, Any]


def contract_digest(contract: Contract) -> str:
    return str(bytes_digest(contract_to_bytes(contract)))


def statement_to_bytes(value: Statement) -> bytes:
    """A statement's canonical form; raises InvalidRequest if too long or not JSON."""
    try:
        data = _canonical({"contract": value.contract, **value.settings})
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"statement: {error}") from error
    _check_length(data)
    return data


def statement_from_bytes(data: bytes) -> Statement:
    """Read foreign bytes of a statement; raises InvalidRequest unless canonical."""
    _check_length(data)
    try:
        table = json.loads(data)
        is_canonical = isinstance(table, dict) and _canonical(table) == data
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"statement: {type(error).__name__}, it is not JSON of numbers and texts") from error
    if not is_canonical:
        raise InvalidRequest("statement: not in canonical form")
    _check_depth(table, MAX_DEPTH)
    if set(table) != {"contract", *KEYS}:
        raise InvalidRequest(f"statement: its keys are not contract, {', '.join(KEYS)}")
    for key, kind in (*((key, dict) for key in TABLES), ("group_size", int), ("use_chat_template", bool)):
        if type(table[key]) is not kind:
            raise InvalidRequest(f"statement.{key}: not of the type {kind.__name__}")
    contract = table.pop("contract")
    if not isinstance(contract, str):
        raise InvalidRequest("statement.contract: not a text")
    return Statement(contract=contract, settings=table)


def check_statement(data: bytes, contract: Contract) -> Statement:
    """Read a statement and compare it with its contract.

    Needs neither data nor model. Raises InvalidRequest: names the key.
    """
    statement = statement_from_bytes(data)
    settings, sampling = statement.settings, contract.sampling
    if statement.contract != contract_digest(contract):
        raise InvalidRequest(f"statement.contract: {statement.contract!r} is not the digest of the contract")
    pairs: list[tuple[str, Any, Any]] = [("group_size", settings["group_size"], contract.group_size)]
    pairs += [(f"sampling.{key}", settings["sampling"].get(key), getattr(sampling, key)) for key in _SAMPLING]
    pairs += [("sampling.logprob_mode", settings["sampling"].get("logprob_mode"), sampling.logprob_mode.value)]
    pairs += [("lora.rank", settings["lora"].get("rank"), contract.lora.rank)]
    for key, stated, agreed in pairs:
        if stated != agreed:
            raise InvalidRequest(f"statement.{key}: {stated!r}, and its contract has {agreed!r}")
    return statement


def leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by dotted key, sections opened one level."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and key != "chat_template_arguments"
        flat |= {f"{key}.{inner}": entry for inner, entry in value.items()} if is_section else {key: value}
    return flat


def statement_difference(stated: Statement, offered: Statement) -> str:
    """First key in which two statements differ, with both values, or empty."""
    mine, theirs = leaves(stated.settings), leaves(offered.settings)
    for key in sorted({*mine, *theirs}):
        if mine.get(key) != theirs.get(key):
            return f"{key}: the run has {mine.get(key)!r}, this node {theirs.get(key)!r}"
    return ""


def _canonical(table: Mapping[str, Any]) -> bytes:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode()


def _check_length(data: bytes) -> None:
    if len(data) > MAX_STATEMENT_BYTES:
        raise InvalidRequest(f"statement: {len(data)} bytes, at most {MAX_STATEMENT_BYTES} are taken")


def _check_depth(value: object, left: int) -> None:
    if left < 0:
        raise InvalidRequest(f"statement: tables in tables, more than {MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            _check_depth(entry, left - 1)
