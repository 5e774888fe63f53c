"""Orders that a person gives under an id, and the answers to them: said again, an order has no effect again.

Guarantees: durable, in the transaction of the order itself; the newest MAX_KEPT orders of a kind are known, so an order
whose answer was lost may come late, behind other orders, and still has its effect once.
"""

from __future__ import annotations

import json

from heterorl.common.errors import InvalidRequest
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import get_meta, set_meta

MAX_KEPT = 64
MAX_REQUEST_ID = 64


def answer_to(connection: Connection, kind: str, request_id: str) -> str | None:
    """The answer that this id was given; None when it is new, or states nothing."""
    return dict(_known(connection, kind)).get(request_id) if request_id else None


def remember(connection: Connection, kind: str, request_id: str, answer: str) -> None:
    """Set: note an order that has had its effect.

    Raises:
        InvalidRequest: the id is too long to be kept.
    """
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(f"request_id: {len(request_id)} characters, allowed are {MAX_REQUEST_ID}")
    if request_id:
        kept = [*_known(connection, kind), (request_id, answer)][-MAX_KEPT:]
        set_meta(connection, _key(kind), json.dumps(kept))


def _known(connection: Connection, kind: str) -> list[tuple[str, str]]:
    return [(name, answer) for name, answer in json.loads(get_meta(connection, _key(kind)) or "[]")]


def _key(kind: str) -> str:
    return f"answered/{kind}"
