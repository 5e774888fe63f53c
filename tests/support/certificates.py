"""Certificates of tests: those that the authority issues, and those that it never would."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from heterorl.certs.authority import Pair
from heterorl.certs.authority_directory import Authority
from heterorl.common.identity.spiffe import Identity, Role, read_identity
from heterorl.common.identity.tls import ServerTlsConfig, TlsConfig

DAY = datetime.timedelta(days=1)


@dataclass
class Certificates:
    """An authority in a directory, and the nodes that it issued for."""

    directory: Path
    run: str = "run"
    lifetime: datetime.timedelta = DAY

    def __post_init__(self) -> None:
        self.authority = Authority(self.directory)
        if not self.directory.exists():
            self.authority.init(run=self.run, now=now(), lifetime=10 * DAY)

    def tls(self, role: str, site: str = "eu-1") -> TlsConfig:
        return TlsConfig(**paths(self.node(role, site)))

    def server_tls(self) -> ServerTlsConfig:
        node = self.node("coordinator", "main")
        return ServerTlsConfig(**paths(node), revoked=str(self.authority.revoked_path))

    def node(self, role: str, site: str) -> Path:
        path = self.directory / f"{role}-{site}"
        if not path.exists():
            self.authority.issue(role=Role(role), site=site, hosts=(), out=None, now=now(), lifetime=self.lifetime)
        return path

    def renew(self, role: str, site: str) -> None:
        self.authority.renew(self.node(role, site), now=now(), lifetime=DAY)

    def identity(self, role: str, site: str) -> Identity:
        identity = read_identity((self.node(role, site) / "node.crt").read_bytes())
        assert isinstance(identity, Identity)
        return identity

    def pair(self, role: str, site: str) -> Pair:
        node = self.node(role, site)
        return Pair(cert=(node / "node.crt").read_bytes(), key=(node / "node.key").read_bytes())

    @property
    def ca(self) -> bytes:
        return (self.directory / "ca.crt").read_bytes()

    def odd(
        self,
        *,
        uris: Sequence[str] = (),
        dns: Sequence[str] = (),
        begin: datetime.timedelta = -DAY,
        end: datetime.timedelta = DAY,
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
        serial: int = 0,
    ) -> Pair:
        """Sign whatever is asked for."""
        issuer = x509.load_pem_x509_certificate(self.ca)
        issuer_key = load_pem_private_key((self.directory / "ca.key").read_bytes(), password=None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spiffe://run/site/eu-1/role/sampler")]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(serial or x509.random_serial_number())
            .not_valid_before(now() + begin)
            .not_valid_after(now() + end)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        names = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, dns)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(issuer_key, hashes.SHA256())
        return Pair(
            cert=certificate.public_bytes(Encoding.PEM),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def paths(node: Path) -> dict[str, str]:
    return {"ca": str(node / "ca.crt"), "cert": str(node / "node.crt"), "key": str(node / "node.key")}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
