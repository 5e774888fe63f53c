"""Who may come in: every call, and every message of an open stream, is checked against its certificate.

Guarantees: a certificate that is revoked or expires is refused from the next question on. Refusals are counted by
reason. The door (heterorl.coordinator.rpc.door) asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping

from heterorl.common.errors import PermissionDenied, Unauthenticated
from heterorl.common.identity.carried import NODE_KEY, carried
from heterorl.common.identity.handshake import identify
from heterorl.common.identity.identity import Identity, LocalPeer, Peer, Refusal, RefusalReason, Role
from heterorl.common.process.metrics import IDENTITY_REFUSALS
from heterorl.coordinator.rpc.access import refuse_call, refuse_request

EXPIRED_RETRY_S = 5.0
_FORBIDDEN = frozenset({RefusalReason.RUN, RefusalReason.ROLE, RefusalReason.SITE, RefusalReason.UNKNOWN_RPC})


class Gate:
    """Decides about calls of one run.

    Args:
        run_id: the run that certificates must name.
        is_plaintext: whether the server listens on loopback without certificates; then every caller is local.
        revoked: serials that are refused.
        wall_time: seconds since the epoch; only for lifetimes of certificates.
        authorities: PEM of those whose certificates a relay may show for the nodes behind it.
    """

    def __init__(
        self,
        *,
        run_id: str,
        is_plaintext: bool,
        revoked: Container[int] = frozenset(),
        wall_time: Callable[[], float] = time.time,
        authorities: Callable[[], bytes] = bytes,
    ) -> None:
        self._run_id = run_id
        self._is_plaintext = is_plaintext
        self._revoked = revoked
        self._wall_time = wall_time
        self._authorities = authorities
        self._serials: dict[str, int] = {}
        # A counter that appears with its first refusal has not increased, for whoever watches rates.
        for reason in RefusalReason:
            IDENTITY_REFUSALS.labels(reason.value)

    def admit(
        self, method: str, auth: Mapping[str, Iterable[bytes]], metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> Peer:
        """Check a call by what gRPC knows about its connection, and by the node whose call it says it is.

        Raises:
            Unauthenticated: no identity.
            PermissionDenied: not for this identity.
        """
        peer = LocalPeer() if self._is_plaintext else identify(auth)
        if isinstance(peer, Identity):
            shown = [value for key, value in metadata if key == NODE_KEY and isinstance(value, bytes)]
            if shown:
                peer = carried(peer, shown, self._authorities())
        if isinstance(peer, Refusal):
            raise _refused(peer)
        self._note(peer, is_admitted=False)
        self.recheck(peer)
        self._note(peer, is_admitted=True)
        _raise(refuse_call(method, peer, run=self._run_id))
        return peer

    def recheck(self, peer: Peer) -> None:
        """Check what changes with time.

        Raises:
            Unauthenticated: the certificate was revoked or has expired.
        """
        if isinstance(peer, LocalPeer):
            return
        for each in (peer, peer.through):
            if each is None:
                continue
            _raise(each.refuse_at(self._wall_time()))
            if each.serial in self._revoked:
                _raise(Refusal(reason=RefusalReason.REVOKED, message=f"certificate {each.serial:x} is revoked"))

    def revoked_sites(self) -> dict[str, int]:
        """Samplers' sites whose newest certificate is revoked, and its serial: of the newest call that was let in, or
        of a refused one where none was.
        """
        return {site: serial for site, serial in self._serials.items() if serial in self._revoked}

    def _note(self, peer: Peer, *, is_admitted: bool) -> None:
        if isinstance(peer, Identity) and peer.role is Role.SAMPLER and (is_admitted or peer.site not in self._serials):
            self._serials[peer.site] = peer.serial

    def check_request(self, method: str, peer: Peer, request: object) -> None:
        """Check one message of a caller.

        Raises:
            PermissionDenied: it speaks for another site.
        """
        _raise(refuse_request(method, peer, request))


def _raise(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise _refused(refusal)


def _refused(refusal: Refusal) -> Unauthenticated | PermissionDenied:
    IDENTITY_REFUSALS.labels(refusal.reason.value).inc()
    if refusal.reason in _FORBIDDEN:
        return PermissionDenied(refusal.message)
    # An expired certificate is replaced while the node runs, so it is worth asking again.
    retry_after_s = EXPIRED_RETRY_S if refusal.reason is RefusalReason.EXPIRED else 0.0
    return Unauthenticated(refusal.message, retry_after_s=retry_after_s)
