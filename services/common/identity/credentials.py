"""TLS credentials of a node, reloaded on change, and its revocation list.

Files are checked when read, and read again when changed.

Guarantees: an unusable set (unreadable, key of another certificate, expired, foreign authority) is never taken. At the
start it is a ConfigError; after a change the old set stays and one warning is logged.
"""

import errno
import logging
import math
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from heterorl.common.errors import ClockBehind, ConfigError
from heterorl.common.identity.spiffe import Identity, Refusal, is_issued, read_identity
from heterorl.common.identity.tls import TlsConfig, check_tls
from heterorl.common.process.address import listen_error
from heterorl.common.process.metrics import CERTIFICATE_EXPIRY

_LOG = logging.getLogger(__name__)
SETTLE_S = 0.05
"""Long enough for gRPC's threads, which need microseconds to take hold of the credentials."""
_CERTIFICATE = "name a .crt file of `heterorl certs issue`"
AGAIN_S = 10.0
"""Between two attempts to read changed files that cannot be used."""


class _Changes:
    """Changes of files, which are read again while they cannot be used.

    Ownership, mode, a full table of descriptors and the clock get right without a change of the files.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = [*map(stamp_of, paths)]
        self._again_at = math.inf
        self._problem = ""

    def are_due(self) -> bool:
        before, self._seen = self._seen, [*map(stamp_of, self._paths)]
        return self._seen != before or time.monotonic() >= self._again_at

    def used(self) -> None:
        self._again_at, self._problem = math.inf, ""

    def refused(self, problem: str) -> bool:
        """Note that they cannot be used; returns whether that is news."""
        before, self._problem = self._problem, problem
        self._again_at = time.monotonic() + AGAIN_S
        return problem != before


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A working set of PEM bytes with identity; `number` grows each set."""

    ca: bytes
    cert: bytes
    key: bytes
    identity: Identity
    number: int


class MaterialFiles:
    """A node's three files; `current` reads them only after a change."""

    def __init__(self, tls: TlsConfig) -> None:
        """Read the files; raises ConfigError with the key of an unusable one."""
        self._tls = tls
        self._changes = _Changes(*map(Path, (tls.ca, tls.cert, tls.key)))
        self._material = read_material(tls, number=0, now=time.time())

    def current(self) -> Material:
        if self._changes.are_due():
            try:
                self._material = read_material(self._tls, number=self._material.number + 1, now=time.time())
            except ConfigError as error:
                if self._changes.refused(str(error)):
                    _LOG.warning("the old certificates stay in use, the changed ones are unusable: %s", error)
            else:
                self._changes.used()
                _LOG.info("changed certificates are in use: %s", self._material.identity.uri)
        return self._material


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Values that change when a file does; zeros without a file."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def read_material(tls: TlsConfig, *, number: int, now: float) -> Material:
    """Read and check files at `now`, epoch seconds; ConfigError names the key."""
    ca, cert, key = (_read(f"tls.{name}", getattr(tls, name)) for name in ("ca", "cert", "key"))
    authorities = _certificates("tls.ca", ca)
    chain = _certificates("tls.cert", cert)
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        action = "name node.key of `heterorl certs issue`, without a password"
        raise ConfigError("tls.key", f"is not an unencrypted PEM private key: {error}", action=action) from error
    public = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        certified = chain[0].public_key().public_bytes(*public)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("tls.cert", f"has a public key that cannot be read: {error}", action=_CERTIFICATE) from error
    if private.public_key().public_bytes(*public) != certified:
        action = "take key and certificate from the same `heterorl certs issue` or `heterorl join`"
        raise ConfigError("tls.key", "is not the key of tls.cert", action=action)
    if len(chain) == 1 and not any(is_issued(chain[0], authority) for authority in authorities):
        action = "copy ca.crt of the authority that issued it, or issue another certificate: `heterorl certs issue`"
        raise ConfigError("tls.cert", "was issued by no authority in tls.ca", action=action)
    identity = read_identity(cert)
    refusal = identity if isinstance(identity, Refusal) else identity.refuse_at(now)
    if isinstance(identity, Refusal) or refusal is not None:
        problem = refusal.message if refusal is not None else ""
        if isinstance(identity, Identity) and now < identity.not_before:
            raise ClockBehind("tls.cert", problem, action="set this machine's clock; a service starts again by itself")
        raise ConfigError("tls.cert", problem, action="heterorl certs renew, or issue for a new one")
    CERTIFICATE_EXPIRY.set(identity.not_after)
    return Material(ca=ca, cert=cert, key=key, identity=identity, number=number)


def server_credentials(files: MaterialFiles) -> grpc.ServerCredentials:
    """Credentials that demand each client's certificate; every handshake looks at the files."""
    taken = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # gRPC asks under a lock, but earlier handshakes use the credentials without one, and an answer frees them: many
        # handshakes at once aborted the process (grpc issue 36693). So return None, which keeps them, for unchanged
        # files; else wait for those handshakes.
        nonlocal taken
        material = files.current()
        if material.number == taken.number:
            return None
        taken = material
        time.sleep(SETTLE_S)  # noqa: TID251 - gRPC's own lock must be held so long
        return _configuration(material)

    # gRPC documents None, its stubs do not.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(taken),
        changed,  # type: ignore[arg-type]
        require_client_authentication=True,
    )


def add_port(server: grpc.aio.Server, address: str, *, tls: TlsConfig, files: MaterialFiles | None) -> int:
    """Let a server listen, in plaintext without files; returns the port.

    Raises ConfigError for plaintext on a public address, else as `listen_error`.
    """
    check_tls(tls, key="listen", address=address)
    try:
        if files is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(files))
    except RuntimeError as error:
        raise listen_error("listen", address, obstacle_at(address)) from error


def obstacle_at(address: str) -> OSError:
    """The operating system's error at host:port, which gRPC does not show."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            return OSError(errno.EADDRINUSE, "was in use")
    except OSError as error:
        return error


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Credentials of one channel; a channel keeps them for life."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        action = "check the path, and that the service's user can read the file"
        raise ConfigError(key, f"cannot read {path}: {error.strerror}", action=action) from error


def _certificates(key: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(key, f"holds no PEM certificate: {error}", action=_CERTIFICATE) from error


def parse_serials(text: str) -> frozenset[int]:
    """Parse revoked serials; raises ValueError if a line is not hexadecimal."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(int(line, 16) for line in lines if line)


class Revocations:
    """Revoked certificates: a file of serial numbers, read again when it changes.

    A serial stays refused until a readable file without it replaces the file; while the file is missing or damaged, the
    last list holds. Format: ASCII, one hexadecimal serial a line, `#` begins a comment.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; raises ConfigError if it cannot be read."""
        self._path = path
        self._changes = _Changes(path)
        try:
            self._serials = parse_serials(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError("tls.revoked", f"cannot read {path}: {error}", action="an empty file is none") from error

    def __contains__(self, serial: object) -> bool:
        return serial in self.current()

    def current(self) -> frozenset[int]:
        if self._changes.are_due():
            try:
                self._serials = parse_serials(self._path.read_text(encoding="ascii"))
            except (OSError, ValueError) as error:
                if self._changes.refused(str(error)):
                    _LOG.error("the old list of revoked certificates stays in use, correct the changed one: %s", error)
            else:
                self._changes.used()
                _LOG.info("%d certificates are revoked", len(self._serials))
        return self._serials
