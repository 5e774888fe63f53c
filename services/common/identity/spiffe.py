"""SPIFFE identity of a peer: exactly one URI in its certificate, `spiffe://<run>/site/<id>/role/<role>`.

Guarantees: an identity comes from the certificate's own bytes, never from a name that only looks like a URI; a
certificate with no URI or with two has none. The TLS handshake has checked the issuer; this module does not.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from heterorl.common.errors import PermissionDenied, Unauthenticated
from heterorl.common.process.metrics import IDENTITY_REFUSALS

_NAME = r"[A-Za-z0-9._-]{1,64}"
"""A run or a site."""
_URI = re.compile(rf"spiffe://(?P<run>{_NAME})/site/(?P<site>{_NAME})/role/(?P<role>[a-z]+)")


class Role(enum.StrEnum):
    """The role of a node."""

    COORDINATOR = "coordinator"
    LEARNER = "learner"
    SAMPLER = "sampler"
    OPERATOR = "operator"
    RELAY = "relay"


class RefusalReason(enum.StrEnum):
    """Why a call was refused; a label of metrics."""

    TLS_VERSION = "tls_version"
    NO_CERTIFICATE = "no_certificate"
    NO_IDENTITY = "no_identity"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RUN = "run"
    ROLE = "role"
    SITE = "site"
    UNKNOWN_RPC = "unknown_rpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A decision against a call."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A certificate's names and lifetime; instants in seconds since the epoch."""

    run: str
    site: str
    role: Role
    serial: int
    not_before: float
    not_after: float
    through: Identity | None = None
    """The relay that carries this node's calls; None if the node is the peer itself."""

    @property
    def uri(self) -> str:
        return spiffe_uri(run=self.run, site=self.site, role=self.role)

    def refuse_at(self, now: float, *, revoked: Container[int] = ()) -> Refusal | None:
        """Refuse outside the certificate's lifetime, and a revoked one.

        `now` is in seconds since the epoch.
        """
        if self.not_before <= now <= self.not_after:
            if self.serial in revoked:
                return Refusal(reason=RefusalReason.REVOKED, message=f"certificate {self.serial:x} is revoked")
            return None
        when = "is not valid yet" if now < self.not_before else "has expired"
        return Refusal(reason=RefusalReason.EXPIRED, message=f"the certificate of {self.uri} {when}")


EXPIRED_RETRY_S = 5.0
_FORBIDDEN = frozenset({RefusalReason.RUN, RefusalReason.ROLE, RefusalReason.SITE, RefusalReason.UNKNOWN_RPC})


def refused(refusal: Refusal) -> Unauthenticated | PermissionDenied:
    """The error of a refusal, which is counted."""
    IDENTITY_REFUSALS.labels(refusal.reason.value).inc()
    if refusal.reason in _FORBIDDEN:
        return PermissionDenied(refusal.message)
    # An expired certificate is replaced while the node runs, so it is worth asking again.
    retry_after_s = EXPIRED_RETRY_S if refusal.reason is RefusalReason.EXPIRED else 0.0
    return Unauthenticated(refusal.message, retry_after_s=retry_after_s)


def refused_relay(relay: Identity, refusal: Refusal) -> Unauthenticated:
    """The error for a node whose relay is refused.

    It is worth asking again: the node's own certificate is right.
    """
    IDENTITY_REFUSALS.labels(refusal.reason.value).inc()
    action = "give the relay a new certificate; its samplers keep their work and ask again"
    return Unauthenticated(
        f"the relay of {relay.site}: {refusal.message}", action=action, retry_after_s=EXPIRED_RETRY_S
    )


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A plaintext loopback peer: any process of this machine, any role."""


Peer = Identity | LocalPeer


def spiffe_uri(*, run: str, site: str, role: Role) -> str:
    """Write an identity as the URI of a certificate."""
    return f"spiffe://{run}/site/{site}/role/{role.value}"


def split_uri(uri: str) -> tuple[str, str, Role] | None:
    """Run, site and role of a URI; None for another form."""
    match = _URI.fullmatch(uri)
    if match is None or match["role"] not in {role.value for role in Role}:
        return None
    return match["run"], match["site"], Role(match["role"])


def is_name(text: str) -> bool:
    """Whether a text can name a run or a site."""
    return re.fullmatch(_NAME, text) is not None


def names_of(path: str) -> tuple[str, str]:
    """Run and site that a certificate's file names, or empty without one."""
    try:
        identity = read_identity(Path(path).read_bytes()) if path else None
    except OSError:
        identity = None
    return (identity.run, identity.site) if isinstance(identity, Identity) else ("", "")


@functools.lru_cache(maxsize=4096)
def read_identity(pem: bytes) -> Identity | Refusal:
    """Read the identity of a PEM certificate, the first of several.

    Names of other kinds (DNS, IP) are ignored here; a DNS name that is spelled like a URI is no URI.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        return Refusal(reason=RefusalReason.NO_IDENTITY, message=f"the certificate cannot be read: {error}")
    if len(uris) != 1:
        return Refusal(
            reason=RefusalReason.NO_IDENTITY,
            message=f"the certificate has {len(uris)} URIs; exactly one names its run, site and role",
        )
    parts = split_uri(uris[0])
    if parts is None:
        return Refusal(
            reason=RefusalReason.NO_IDENTITY,
            message=f"{uris[0][:200]!r} is not of the form spiffe://RUN/site/SITE/role/ROLE",
        )
    return Identity(
        run=parts[0],
        site=parts[1],
        role=parts[2],
        serial=certificate.serial_number,
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
    )


TLS_VERSION = b"TLSv1.3"


def identify(auth: Mapping[str, Iterable[bytes]]) -> Identity | Refusal:
    """The identity in a link's certificate; `auth` is gRPC's auth_context."""
    # gRPC's peer_spiffe_id is missing both for no URI and for two; the certificate tells them apart.
    versions = list(auth.get("ssl_tls_version", ()))
    if versions != [TLS_VERSION]:
        stated = versions[0].decode("ascii", "replace") if versions else "unknown"
        return Refusal(reason=RefusalReason.TLS_VERSION, message=f"TLS 1.3 is needed, the link has {stated}")
    certificate = certificate_of(auth)
    if not certificate:
        return Refusal(reason=RefusalReason.NO_CERTIFICATE, message="the link has no client certificate")
    return read_identity(certificate)


def certificate_of(auth: Mapping[str, Iterable[bytes]]) -> bytes:
    """The peer's certificate, PEM; empty without one."""
    certificates = list(auth.get("x509_pem_cert", ()))
    return certificates[0] if len(certificates) == 1 else b""


NODE_KEY = "heterorl-node-bin"
"""Metadata key of a call through a relay: the calling node's certificate, PEM."""
MAX_CERTIFICATE_BYTES = 4096


def is_within(site: str, *, relay_site: str) -> bool:
    """Whether a node's site is the relay's, `eu`, or below: `eu.gpu1`."""
    return site == relay_site or site.startswith(f"{relay_site}.")


def refuse_node(relay: Identity, node: Identity) -> Refusal | None:
    """Decide whether a relay may carry a node's calls; None is yes."""
    if node.run != relay.run:
        return Refusal(reason=RefusalReason.RUN, message=f"the node is of run {node.run}, the relay of {relay.run}")
    if node.role is not Role.SAMPLER:
        message = f"a relay carries samplers, this is a {node.role}: let it dial the coordinator itself"
        return Refusal(reason=RefusalReason.ROLE, message=message)
    if not is_within(node.site, relay_site=relay.site):
        message = f"the relay of {relay.site} carries {relay.site} and {relay.site}.*, not {node.site}"
        return Refusal(reason=RefusalReason.SITE, message=message)
    return None


def carried(relay: Identity, shown: Sequence[bytes], authorities: bytes) -> Identity | Refusal:
    """The node behind a relay that states to carry its call.

    The handshake proves the relay, which shows the certificate of the calling node (`shown`: the values of NODE_KEY).
    Role, site, lifetime and revocation are judged by that certificate. So a relay can act only as a node of its own
    site whose certificate it has seen. `authorities` is PEM.
    """
    if relay.role is not Role.RELAY:
        message = f"a {relay.role} carries no other node's calls"
        return Refusal(reason=RefusalReason.ROLE, message=message)
    if len(shown) != 1 or len(shown[0]) > MAX_CERTIFICATE_BYTES:
        return Refusal(reason=RefusalReason.NO_IDENTITY, message="the relay must show exactly one certificate")
    node = _vouched(shown[0], authorities)
    refusal = node if isinstance(node, Refusal) else refuse_node(relay, node)
    if isinstance(node, Refusal) or refusal is not None:
        return refusal or node
    return dataclasses.replace(node, through=relay)


@functools.lru_cache(maxsize=4096)
def _vouched(pem: bytes, authorities: bytes) -> Identity | Refusal:
    node = read_identity(pem)
    if isinstance(node, Refusal):
        return node
    certificate = x509.load_pem_x509_certificate(pem)
    if any(is_issued(certificate, authority) for authority in x509.load_pem_x509_certificates(authorities)):
        return node
    message = f"the certificate of {node.uri} was issued by no authority in tls.ca"
    return Refusal(reason=RefusalReason.NO_IDENTITY, message=message)


def is_issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
