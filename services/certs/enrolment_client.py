"""The node's side of enrolment: makes its key and fetches its certificate.

Until the server has proved the token's authority, the node sends only a TLS handshake. The key is on disk before it is
used, so the node can ask again after a lost answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hmac
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from heterorl.certs.authority import ENROLMENT_NAME
from heterorl.certs.authority_directory import PUBLIC, SECRET, write_file
from heterorl.certs.enrolment import BrokenFrame, JoinRefused, Refused, Token, frame, pin_of, read_frame
from heterorl.common.errors import ConfigError, OperatorError
from heterorl.common.identity.spiffe import is_issued

JOIN_S = 15.0
_ACTIONS = {
    Refused.REQUEST: "delete node.key in --out, then join again",
    Refused.IDENTITY: "ask for a token of this site and role",
    Refused.TOKEN: "ask for a new token",
    Refused.EXPIRED: "ask for a new token",
    Refused.USED: "ask for a new token, and who used this one",
    Refused.REVOKED: "ask for a new token",
    Refused.FAULT: "ask the authority's operator to look at its log",
}


class WrongAuthority(OperatorError):
    """The server is not of the token's authority; no token is sent."""

    action = "compare the address with the operator's; if it is right, the connection is intercepted"


async def join(
    token: Token, *, address: str, out: Path, timeout_s: float = JOIN_S, wall_time: Callable[[], float] = time.time
) -> None:
    """Get a certificate; write ca.crt, node.crt and node.key into `out`.
    An existing node.key is used again. Raises ConfigError: `out` has a certificate or an unreadable key;
    WrongAuthority; JoinRefused: the server refused; OperatorError: it cannot be reached."""
    if (out / "node.crt").exists():
        raise ConfigError("--out", f"{out} holds a certificate", action="name another directory, or delete it")
    key = _own_key(out)
    try:
        async with asyncio.timeout(timeout_s):
            authority, certificate = await ask(token, address=address, key=key, now=wall_time())
    except TimeoutError as error:
        raise _unreachable(address, f"no answer in {timeout_s:g} s") from error
    except (OSError, BrokenFrame) as error:
        raise _unreachable(address, str(error)) from error
    write_file(out / "ca.crt", authority.public_bytes(Encoding.PEM), mode=PUBLIC)
    # Last: with the certificate the node has joined.
    write_file(out / "node.crt", certificate.public_bytes(Encoding.PEM), mode=PUBLIC)


async def ask(
    token: Token, *, address: str, key: ec.EllipticCurvePrivateKey, now: float
) -> tuple[x509.Certificate, x509.Certificate]:
    """The authority's certificate and the node's; arguments and errors of `join`.
    The caller bounds the time."""
    host, _, port = address.rpartition(":")
    # The pin of the token proves the server, not this machine's trusted authorities.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    reader, writer = await asyncio.open_connection(
        host.strip("[]"), int(port), ssl=context, server_hostname=ENROLMENT_NAME
    )
    try:
        authority = _check_server(
            token, greeting=await read_frame(reader), now=now,
            server=writer.get_extra_info("ssl_object").getpeercert(binary_form=True),
        )  # fmt: skip
        writer.write(frame(token.id + token.secret) + frame(signing_request(key, uri=token.uri)))
        await writer.drain()
        reply = await read_frame(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if not reply or reply[0] != 0:
        raise _refused(reply)
    certificate = x509.load_der_x509_certificate(reply[1:])
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if not is_issued(certificate, authority) or certificate.public_key().public_bytes(*form) != (
        key.public_key().public_bytes(*form)
    ):
        raise WrongAuthority("the server's answer is not a certificate of this key by the authority")
    return authority, certificate


def signing_request(key: ec.EllipticCurvePrivateKey, *, uri: str) -> bytes:
    """A signing request (PKCS #10, DER) for an identity."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uri[:64])])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def _check_server(token: Token, *, greeting: bytes, server: bytes, now: float) -> x509.Certificate:
    if not hmac.compare_digest(pin_of(greeting), token.pin):
        raise WrongAuthority("the server shows another authority than the token's")
    try:
        authority, certificate = x509.load_der_x509_certificate(greeting), x509.load_der_x509_certificate(server)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = names.get_values_for_type(x509.DNSName)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise WrongAuthority(f"the server's certificate cannot be read: {error}") from error
    if not is_issued(certificate, authority) or hosts != [ENROLMENT_NAME]:
        raise WrongAuthority("the server has no enrolment certificate of the authority")
    instant = datetime.datetime.fromtimestamp(now, datetime.UTC)
    if not certificate.not_valid_before_utc <= instant <= certificate.not_valid_after_utc:
        raise WrongAuthority("the server's certificate is not valid now", action="set this machine's clock")
    return authority


def _own_key(out: Path) -> ec.EllipticCurvePrivateKey:
    path = out / "node.key"
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            key = load_pem_private_key(path.read_bytes(), password=None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ConfigError("--out", f"{path} is not an ECDSA key", action="delete it")
            return key
        key = ec.generate_private_key(ec.SECP256R1())
        write_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=SECRET)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("--out", f"{path}: {error}", action="name a directory that this user can write") from error
    return key


def _refused(reply: bytes) -> JoinRefused:
    try:
        reason = Refused(reply[0])
    except (IndexError, ValueError):
        reason = Refused.FAULT
    # Text of another machine: printable and short.
    words = "".join(c for c in reply[1:].decode("utf-8", "replace") if c.isprintable())[:300]
    return JoinRefused(reason, words or "the server refused", action=_ACTIONS.get(reason))


def _unreachable(address: str, why: str) -> OperatorError:
    action = "start `heterorl certs serve` there, then repeat with the same --out: the token still counts"
    return OperatorError(f"the enrolment server at {address} cannot be reached: {why}", action=action)
