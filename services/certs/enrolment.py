"""Join tokens, and the certificates that nodes get for them.

A token gives exactly one certificate, also under concurrent requests and crashes. Key and serial number are written to
its row (tokens/NUMBER.json, the fields of `Kept`) before anything is signed. The same key gets the same certificate
again. Only the secret's digest is on disk.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import secrets
from collections.abc import Callable
from pathlib import Path

import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from heterorl.certs.authority import check_name, sign_node
from heterorl.certs.authority_directory import PUBLIC, SECRET, Authority, locked, write_file
from heterorl.certs.join_tokens import (
    ID_BYTES,
    SECRET_BYTES,
    JoinRefused,
    Kept,
    Refused,
    Token,
    check_token,
    pin_of,
    secret_digest,
)
from heterorl.common.errors import ConfigError
from heterorl.common.identity.spiffe import Role, spiffe_uri, split_uri


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A verified signing request."""

    public_key: ec.EllipticCurvePublicKey
    uri: str

    @property
    def key(self) -> str:
        der = self.public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return str(blake3.blake3(der).hexdigest())


class Enrolment:
    """The tokens of one authority."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = Authority(directory)

    def create(self, *, role: Role, site: str, address: str, days: int, expires: float) -> Token:
        """Make a token for a certificate of `days` days.
        `expires` is in seconds since the epoch. Raises ConfigError: there is no authority, or a name is not allowed."""
        if role is Role.COORDINATOR:
            raise ConfigError("--role", "a coordinator cannot join", action="heterorl certs issue coordinator")
        check_name("--site", site)
        run = self._authority.run()
        certificate = x509.load_pem_x509_certificate(self._authority.pair().cert)
        token = Token(
            id=secrets.token_bytes(ID_BYTES),
            secret=secrets.token_bytes(SECRET_BYTES),
            pin=pin_of(certificate.public_bytes(Encoding.DER)),
            uri=spiffe_uri(run=run, site=site, role=role),
            address=address,
        )
        row = Kept(secret_digest=secret_digest(token.secret), uri=token.uri, expires=expires, days=days)
        with locked(self._directory):
            (self._directory / "tokens").mkdir(mode=0o700, exist_ok=True)
            self._write(token.id, row)
        return token

    def list(self) -> list[tuple[str, Kept]]:
        self._authority.run()
        paths = (self._directory / "tokens").glob("*.json")
        rows = [(path.stem, self._read(path)) for path in paths]
        return sorted(((name, row) for name, row in rows if row is not None), key=lambda pair: pair[1].expires)

    def delete(self, number: str) -> None:
        """Delete a token; its certificate stays.
        Raises ConfigError: there is no such token."""
        with locked(self._directory):
            if not number.isalnum() or not (path := self._directory / "tokens" / f"{number}.json").exists():
                raise ConfigError("TOKEN", f"there is no token {number}", action="heterorl certs token list")
            path.unlink()

    def redeem(
        self, *, number: bytes, secret: bytes, request: Request, wall_time: Callable[[], float]
    ) -> x509.Certificate:
        """Redeem a token for a certificate of the caller's key.
        Raises JoinRefused: the token is not valid for this request; ConfigError: the authority cannot sign."""
        with locked(self._directory):
            now = wall_time()
            kept = self._read(self._path(number))
            kept = check_token(kept, secret=secret, uri=request.uri, key=request.key, now=now)
            if not kept.key:
                # Before signing: after a crash no other key may use the token.
                kept = dataclasses.replace(kept, key=request.key, serial=x509.random_serial_number())
                self._write(number, kept)
            elif self._authority.is_revoked(kept.serial):
                raise JoinRefused(Refused.REVOKED, f"certificate {kept.serial:x} of this token is revoked")
            path = self._authority.path_of(kept.serial)
            if path.exists():
                return x509.load_pem_x509_certificate(path.read_bytes())
            node = split_uri(kept.uri)
            assert node is not None, "written by create"
            certificate = sign_node(
                self._authority.pair(),
                public_key=request.public_key,
                node=node,
                hosts=(),
                now=datetime.datetime.fromtimestamp(now, datetime.UTC),
                lifetime=datetime.timedelta(days=kept.days),
                serial=kept.serial,
            )
            # Before the node gets it, so that it can always be found and revoked.
            write_file(path, certificate.public_bytes(Encoding.PEM), mode=PUBLIC)
        return certificate

    def _path(self, number: bytes) -> Path:
        return self._directory / "tokens" / f"{number.hex()}.json"

    def _read(self, path: Path) -> Kept | None:
        try:
            return Kept(**json.loads(path.read_text(encoding="ascii")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError("--dir", f"{path} is damaged: {error}", action="delete it") from error

    def _write(self, number: bytes, row: Kept) -> None:
        write_file(self._path(number), json.dumps(dataclasses.asdict(row)).encode("ascii"), mode=SECRET)


_UNREADABLE = (
    ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension,
    x509.InvalidVersion, x509.UnsupportedGeneralNameType,
)  # fmt: skip


def read_request(der: bytes) -> Request:
    """Read a signing request (PKCS #10, DER) that its key signed.
    Raises JoinRefused: it is damaged, not signed by its key, of another kind of key, or has not one URI."""
    try:
        csr = x509.load_der_x509_csr(der)
        is_signed = csr.is_signature_valid
        public_key = csr.public_key()
        names = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except _UNREADABLE as error:
        raise JoinRefused(Refused.REQUEST, f"the signing request cannot be read: {error}") from error
    if not is_signed:
        raise JoinRefused(Refused.REQUEST, "the signing request is not signed by its key")
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
        raise JoinRefused(Refused.REQUEST, "the key is not ECDSA P-256")
    if len(uris) != 1:
        raise JoinRefused(Refused.REQUEST, f"the signing request has {len(uris)} URIs, not one")
    return Request(public_key=public_key, uri=uris[0])
