"""Access control: a table of rpc and role, for calls and messages.

An rpc without a row is refused for every caller. A sampler speaks for its own site only. A revoked or expired
certificate is refused at its next message. Refusals are counted by reason.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from heterorl.common.identity.spiffe import (
    NODE_KEY,
    Identity,
    LocalPeer,
    Peer,
    Refusal,
    RefusalReason,
    Role,
    carried,
    identify,
    refused,
    refused_relay,
)
from heterorl.common.process.metrics import IDENTITY_REFUSALS


@dataclass(frozen=True, slots=True)
class Rule:
    """Roles that may call an rpc.
    The field at `site` must be the caller's own site; a learner must set `of_learner`. `at_once` bounds one
    certificate's concurrent calls (0: only the bound on all its calls)."""

    roles: frozenset[Role]
    site: tuple[str, ...] = ()
    at_once: int = 0
    of_learner: str = ""


def _pushes_metrics(role: Role) -> Rule:
    # Two: the broken link of the first may not have timed out yet.
    return Rule(frozenset({role}), site=("site",), at_once=2)


_LEARNER = Rule(frozenset({Role.LEARNER}))
_OPERATOR = Rule(frozenset({Role.OPERATOR}))
# A relay reads for all samplers of its site; its other calls are forwarded with a sampler's rights.
_READERS = frozenset({Role.LEARNER, Role.SAMPLER, Role.RELAY})
# Twice what one node needs: streams of a broken link live until their pings fail.
_READS = Rule(_READERS, at_once=4)
_OWN_SITE = Rule(frozenset({Role.SAMPLER}), site=("site",))

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "/heterorl.v1.PolicyService/AcquireLease": _LEARNER,
        "/heterorl.v1.PolicyService/RenewLease": _LEARNER,
        "/heterorl.v1.PolicyService/ReleaseLease": _LEARNER,
        "/heterorl.v1.PolicyService/QueryUpload": _LEARNER,
        "/heterorl.v1.PolicyService/UploadPayload": _LEARNER,
        "/heterorl.v1.PolicyService/PublishVersion": _LEARNER,
        "/heterorl.v1.PolicyService/GetStep": _LEARNER,
        "/heterorl.v1.PolicyService/WatchHead": _READS,
        "/heterorl.v1.PolicyService/GetManifest": _READS,
        "/heterorl.v1.PolicyService/ListManifests": _READS,
        "/heterorl.v1.PolicyService/PlanPull": _READS,
        "/heterorl.v1.PolicyService/ReadPayload": Rule(_READERS, at_once=24),
        "/heterorl.v1.RolloutService/LeaseWork": _OWN_SITE,
        "/heterorl.v1.RolloutService/AbandonWork": _OWN_SITE,
        "/heterorl.v1.RolloutService/PushGroups": Rule(frozenset({Role.SAMPLER}), site=("id", "site"), at_once=4),
        # The learner names groups of all sites.
        "/heterorl.v1.RolloutService/StreamGroups": _LEARNER,
        "/heterorl.v1.RolloutService/AbandonGroups": _LEARNER,
        "/heterorl.v1.RolloutService/RejectGroups": _LEARNER,
        "/heterorl.v1.RunService/Register": _OWN_SITE,
        "/heterorl.v1.RunService/Heartbeat": _OWN_SITE,
        "/heterorl.v1.RunService/ReportCanary": _OWN_SITE,
        "/heterorl.v1.RunService/GetStatus": _OPERATOR,
        "/heterorl.v1.RunService/ListSteps": _OPERATOR,
        # A learner that reached its last step drains the run.
        "/heterorl.v1.RunService/Drain": Rule(frozenset({Role.OPERATOR, Role.LEARNER}), of_learner="epoch"),
        "/heterorl.v1.RunService/Rollback": _OPERATOR,
        "/heterorl.v1.RunService/ListRestorable": _OPERATOR,
        "/heterorl.v1.RunService/ReleaseSite": _OPERATOR,
        "/heterorl.v1.RunService/DescribeRun": _LEARNER,
        "/heterorl.v1.SampleService/ListSamples": _OPERATOR,
        "/heterorl.v1.SampleService/GetSample": _OPERATOR,
        "/heterorl.v1.SampleService/NoteSamples": _LEARNER,
        "/heterorl.v1.BackupService/Backup": _OPERATOR,
        "/heterorl.v1.EvaluationService/PushEvaluation": _OWN_SITE,
        "/heterorl.v1.EvaluationService/ListEvaluations": _OPERATOR,
        "/heterorl.v1.MetricsService/PushSamplerMetrics": _pushes_metrics(Role.SAMPLER),
        "/heterorl.v1.MetricsService/PushLearnerMetrics": _pushes_metrics(Role.LEARNER),
        "/heterorl.v1.MetricsService/PushRelayMetrics": _pushes_metrics(Role.RELAY),
        "/heterorl.v1.DiagnosisService/Diagnose": Rule(frozenset(Role), at_once=1),
        "/grpc.health.v1.Health/Check": Rule(frozenset(Role), at_once=4),
    }
)


def refuse_call(method: str, peer: Peer, *, run: str) -> Refusal | None:
    """Decide whether a peer may call a run's rpc; None: yes.
    `method` is the full name, with the leading slash."""
    rule = RULES.get(method)
    if rule is None:
        return Refusal(reason=RefusalReason.UNKNOWN_RPC, message=f"{method} is not open to any role")
    if isinstance(peer, LocalPeer):
        return None
    if peer.run != run:
        return Refusal(reason=RefusalReason.RUN, message=f"the certificate is of run {peer.run}, this is {run}")
    if peer.role not in rule.roles:
        return Refusal(reason=RefusalReason.ROLE, message=f"a {peer.role} may not call {method}")
    return None


def refuse_request(method: str, peer: Peer, request: object) -> Refusal | None:
    """Decide whether a request is for the caller's own site; None: yes.
    `refuse_call` comes first."""
    rule = RULES[method]
    is_learner = isinstance(peer, Identity) and peer.role is Role.LEARNER
    # Without it an earlier learner could speak for the one that has the lease now.
    if rule.of_learner and is_learner and not request.HasField(rule.of_learner):  # type: ignore[attr-defined]
        return Refusal(reason=RefusalReason.ROLE, message=f"a learner states {rule.of_learner} with {method}")
    if not rule.site or not isinstance(peer, Identity):
        return None
    for entry in request if isinstance(request, list) else [request]:
        value = functools.reduce(getattr, rule.site, entry)
        if value != peer.site:
            return Refusal(reason=RefusalReason.SITE, message=f"{peer.site} may not speak for site {str(value)[:64]!r}")
    return None


@dataclass(kw_only=True, eq=False, repr=False)
class CallAuthorizer:
    """Authorizes calls of one run.

    `is_plaintext`: loopback without certificates, every caller is local. `authorities` gives the PEM of those whose
    certificates a relay may forward.
    """

    run_id: str
    is_plaintext: bool
    revoked: Container[int] = frozenset()
    wall_time: Callable[[], float] = time.time
    authorities: Callable[[], bytes] = bytes

    def __post_init__(self) -> None:
        self.serials: dict[str, int] = {}
        """Newest certificate of each sampler site that called, by serial."""
        # A counter must exist before its first increase, or rate() misses it.
        for reason in RefusalReason:
            IDENTITY_REFUSALS.labels(reason.value)

    def admit(
        self, method: str, auth: Mapping[str, Iterable[bytes]], metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> Peer:
        """Authorize a call by its connection or the node behind a relay.
        Raises Unauthenticated, PermissionDenied."""
        peer = LocalPeer() if self.is_plaintext else identify(auth)
        if isinstance(peer, Identity):
            shown = [value for key, value in metadata if key == NODE_KEY and isinstance(value, bytes)]
            if shown:
                peer = carried(peer, shown, self.authorities())
        if isinstance(peer, Refusal):
            raise refused(peer)
        self._note(peer, is_admitted=False)
        self.recheck(peer)
        self._note(peer, is_admitted=True)
        _raise(refuse_call(method, peer, run=self.run_id))
        return peer

    def recheck(self, peer: Peer) -> None:
        """Check what changes with time.
        Raises Unauthenticated: the certificate was revoked or has expired."""
        if isinstance(peer, LocalPeer):
            return
        relay, now = peer.through, self.wall_time()
        _raise(peer.refuse_at(now, revoked=self.revoked))
        if relay is not None and (refusal := relay.refuse_at(now, revoked=self.revoked)) is not None:
            raise refused_relay(relay, refusal)

    def _note(self, peer: Peer, *, is_admitted: bool) -> None:
        if isinstance(peer, Identity) and peer.role is Role.SAMPLER and (is_admitted or peer.site not in self.serials):
            self.serials[peer.site] = peer.serial

    def check_request(self, method: str, peer: Peer, request: object) -> None:
        """Check one message. Raises PermissionDenied: it speaks for another site."""
        _raise(refuse_request(method, peer, request))


def _raise(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise refused(refusal)
