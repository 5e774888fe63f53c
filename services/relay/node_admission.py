"""Admission control of a relay: its site's samplers, bounded calls and memory.

No call is answered or forwarded before its caller is admitted, and no message is read before there is room. A
certificate that expires or is revoked ends its streams at their next message.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio

from heterorl.common.errors import QuotaExceeded, RemoteError
from heterorl.common.identity.spiffe import (
    Identity,
    Refusal,
    RefusalReason,
    certificate_of,
    identify,
    refuse_node,
    refused,
)
from heterorl.common.process.metrics import IDENTITY_REFUSALS, RELAY_CALLS
from heterorl.common.rpc.server_limits import Caller, MemoryQuota, Reservation

RETRY_AFTER_S = 1.0
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The calling node.
    Without certificates `identity` is None and all callers are one."""

    name: str
    identity: Identity | None = None
    certificate: bytes = b""

    @property
    def holder(self) -> Caller:
        """The caller that a message's bytes count for."""
        return Caller(self.name, is_privileged=False, is_proven=self.identity is not None)


@dataclass(kw_only=True, eq=False, repr=False)
class NodeAdmission:
    """Admits nodes. Belongs to the event loop.

    `own` gives this relay's identity (None on loopback without certificates); `places` bounds concurrent calls,
    `places_of_node` the calls of one certificate.
    """

    own: Callable[[], Identity | None]
    revoked: Container[int]
    places: int
    places_of_node: int
    budget: MemoryQuota
    wall_time: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._num_calls = 0
        for reason in RefusalReason:
            IDENTITY_REFUSALS.labels(reason.value)

    def admit(self, auth: Mapping[str, Iterable[bytes]], *, is_probe: bool = False) -> Node:
        """Check a call by its connection.
        A health probe may have any role and site. Raises Unauthenticated: no identity; PermissionDenied: not for this
        identity."""
        own = self.own()
        if own is None:
            return Node(name="local")
        identity = identify(auth)
        if isinstance(identity, Refusal):
            raise refused(identity)
        node = Node(name=f"{identity.role} {identity.site}", identity=identity, certificate=certificate_of(auth))
        self.recheck(node)
        refusal = refuse_node(own, identity)
        is_forgiven = is_probe and identity.run == own.run
        if refusal is not None and not is_forgiven:
            raise refused(refusal)
        return node

    def recheck(self, node: Node) -> None:
        """Check what changes with time.
        Raises Unauthenticated: the certificate was revoked or has expired."""
        if node.identity is None:
            return
        refusal = node.identity.refuse_at(self.wall_time(), revoked=self.revoked)
        if refusal is not None:
            raise refused(refusal)

    @contextlib.contextmanager
    def place(self, node: Node) -> Iterator[None]:
        """Hold a place for one call. Raises QuotaExceeded: none is free; retryable."""
        if node.identity is not None and self._calls[node.name] >= self.places_of_node:
            problem = f"{node.name} has {self.places_of_node} open calls at the relay (site_concurrent_rpcs)"
            raise QuotaExceeded(problem, retry_after_s=RETRY_AFTER_S)
        if self._num_calls >= self.places:
            problem = f"{self.places} calls are open at the relay (max_concurrent_rpcs)"
            raise QuotaExceeded(problem, retry_after_s=RETRY_AFTER_S)
        self._calls[node.name] += 1
        self._num_calls += 1
        RELAY_CALLS.inc()
        try:
            yield
        finally:
            RELAY_CALLS.dec()
            self._num_calls -= 1
            self._calls[node.name] -= 1
            if not self._calls[node.name]:
                del self._calls[node.name]

    async def message(self, node: Node, method: str, context: _Context) -> tuple[Reservation, Any]:
        """A call's next message or EOF, and its room.
        The caller closes the room. Raises QuotaExceeded: none came in time, retryable; InvalidRequest: too long for the
        method; Unauthenticated: revoked or expired."""
        room, message = await self.budget.message(node.holder, method, context.read)
        try:
            self.recheck(node)
        except RemoteError:
            room.close()
            raise
        return room, message
