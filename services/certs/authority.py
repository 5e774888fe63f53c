"""Certificates of an authority: its own, and one for each node.

A node's certificate has exactly one URI. Only a coordinator's or relay's is for servers, so no sampler can pose as one.
None outlives the authority. Keys are ECDSA P-256.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from heterorl.common.errors import ConfigError
from heterorl.common.identity.spiffe import Role, is_name, spiffe_uri

SKEW = timedelta(minutes=5)
"""How far the authority's clock may be ahead of the nodes' clocks."""
SERVING = frozenset({Role.COORDINATOR, Role.RELAY})
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
ENROLMENT_NAME = "enrolment.heterorl.invalid"
"""Server name for joining nodes; it is not a coordinator's and cannot exist in DNS."""

Node = tuple[str, str, Role]
"""Run, site and role of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its private key, PEM."""

    cert: bytes
    key: bytes


def make_authority(*, run: str, now: datetime, lifetime: timedelta) -> Pair:
    """Make a self-signed authority that may only sign nodes.
    Raises ConfigError: the run's name is not allowed."""
    check_name("RUN", run)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"heterorl {run}"[:64])])
    certificate = (
        _builder(name, name, key.public_key(), now=now, until=now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue_node(authority: Pair, *, node: Node, hosts: Sequence[str], now: datetime, lifetime: timedelta) -> Pair:
    """Make a key and sign its certificate; arguments and errors of `sign_node`."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = sign_node(authority, public_key=key.public_key(), node=node, hosts=hosts, now=now, lifetime=lifetime)
    return _pair(certificate, key)


def sign_node(
    authority: Pair,
    *,
    public_key: ec.EllipticCurvePublicKey,
    node: Node,
    hosts: Sequence[str],
    now: datetime,
    lifetime: timedelta,
    serial: int = 0,
) -> x509.Certificate:
    """Sign a certificate for a node's own key.

    It is valid until the authority's end at most; `serial` 0 draws a number. `hosts` are the names and addresses that
    the node is dialled by.
    Raises ConfigError: the authority has expired or cannot be read, a name is not allowed, or the role has no hosts.
    """
    run, site, role = node
    check_name("RUN", run)
    check_name("SITE", site)
    if hosts and role not in SERVING:
        raise ConfigError("--host", f"a {role} does not serve", action="only the coordinator and relays have hosts")
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(spiffe_uri(run=run, site=site, role=role))]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role in SERVING:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names += [_host(host) for host in dict.fromkeys((*hosts, *LOCAL_HOSTS))]
    return _signed(
        authority, subject=f"{role} {site}"[:64], public_key=public_key, names=names, usages=usages, now=now,
        until=now + lifetime, serial=serial,
    )  # fmt: skip


def issue_enrolment_server(authority: Pair, *, now: datetime) -> Pair:
    """Issue the enrolment server's certificate, for ENROLMENT_NAME only.
    Raises ConfigError: as of `sign_node`."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _signed(
        authority, subject=ENROLMENT_NAME, public_key=key.public_key(), names=[x509.DNSName(ENROLMENT_NAME)],
        usages=[ExtendedKeyUsageOID.SERVER_AUTH], now=now,
    )  # fmt: skip
    return _pair(certificate, key)


def _signed(
    authority: Pair,
    *,
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    names: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    now: datetime,
    until: datetime | None = None,
    serial: int = 0,
) -> x509.Certificate:
    """A certificate under the authority, until the authority's end at most."""
    try:
        issuer = x509.load_pem_x509_certificate(authority.cert)
        issuer_key = load_pem_private_key(authority.key, password=None)
    except (ValueError, TypeError) as error:
        action = "give the directory that `heterorl certs init` made"
        raise ConfigError("--dir", f"the authority cannot be read: {error}", action=action) from error
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            "--dir", "the authority's key is not ECDSA", action="make an authority with `heterorl certs init`"
        )
    if now >= issuer.not_valid_after_utc:
        raise ConfigError("--dir", "the authority has expired", action="heterorl certs init in a new directory")
    end = issuer.not_valid_after_utc
    issuer_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    return (
        _builder(name, issuer.subject, public_key, now=now, until=min(until or end, end), serial=serial)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def hosts_of(pem: bytes) -> tuple[str, ...]:
    """DNS names and IP addresses of a certificate."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    *,
    now: datetime,
    until: datetime,
    serial: int = 0,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_*](?:[A-Za-z0-9_.*-]*[A-Za-z0-9_])?")


def _host(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if _HOST.fullmatch(host) is None:
        action = "give a name such as coordinator.example.org, or an address, without a port"
        raise ConfigError("--host", f"{host!r} is neither a DNS name nor an IP address", action=action)
    return x509.DNSName(host)


def check_name(key: str, text: str) -> None:
    """Check a name of a run or site. Raises ConfigError: of `key`."""
    if not is_name(text):
        action = "choose a shorter name of these characters"
        raise ConfigError(key, f"{text!r} is not 1 to 64 letters, digits, dots, dashes or underscores", action=action)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        cert=certificate.public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
