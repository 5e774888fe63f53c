"""Who is at the other end of a link, by what gRPC knows of its handshake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from heterorl.common.identity.identity import Identity, Refusal, RefusalReason, read_identity

TLS_VERSION = b"TLSv1.3"


def identify(auth: Mapping[str, Iterable[bytes]]) -> Identity | Refusal:
    """The identity that a link's certificate names; `auth` is gRPC's auth_context."""
    # gRPC also offers peer_spiffe_id, but leaves it out both for no URI and for two; the certificate tells them apart.
    versions = list(auth.get("ssl_tls_version", ()))
    if versions != [TLS_VERSION]:
        stated = versions[0].decode("ascii", "replace") if versions else "unknown"
        return Refusal(reason=RefusalReason.TLS_VERSION, message=f"TLS 1.3 is needed, the link has {stated}")
    certificate = certificate_of(auth)
    if not certificate:
        return Refusal(reason=RefusalReason.NO_CERTIFICATE, message="the link has no client certificate")
    return read_identity(certificate)


def certificate_of(auth: Mapping[str, Iterable[bytes]]) -> bytes:
    """The other end's certificate, PEM; empty where it has none."""
    certificates = list(auth.get("x509_pem_cert", ()))
    return certificates[0] if len(certificates) == 1 else b""
