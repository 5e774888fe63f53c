"""Join tokens, their frames, and the certificates that nodes get.

A token is the text `hrl1.` and base64url without padding of:

    8 bytes     its number in the authority's directory
    32 bytes    secret
    32 bytes    SHA-256 of the authority's certificate (DER): the pin
    2 bytes     length of the next field, big-endian
    n bytes     identity URI of the node (ASCII)
    m bytes     host:port of the enrolment server (ASCII); may be empty
    4 bytes     first bytes of SHA-256 of all of the above, against typing errors

Frames travel over TLS 1.3; the server sends first, so the node has checked it before it sends the token:

    frame       4 bytes length, big-endian, at most MAX_FRAME; then that many bytes
    server      1 frame: the authority's certificate, DER
    node        2 frames: number and secret of the token (40 bytes); signing request, DER
    server      1 frame: a byte of 0 and the certificate, DER; or a byte of `Refused` and a sentence, UTF-8

A token gives exactly one certificate, for one identity, also under concurrent requests and crashes. Key and serial
number are written to its row (tokens/NUMBER.json, the fields of `Kept`) before anything is signed. The same key gets
the same certificate again. Only the secret's digest is on disk.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import datetime
import enum
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable
from pathlib import Path

import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from heterorl.certs.authority import check_name, sign_node
from heterorl.certs.authority_directory import PUBLIC, SECRET, Authority, locked, write_file
from heterorl.common.errors import ConfigError, OperatorError
from heterorl.common.identity.spiffe import Role, spiffe_uri, split_uri

PREFIX = "hrl1."
ID_BYTES, SECRET_BYTES, PIN_BYTES, SUM_BYTES = 8, 32, 32, 4
_HEAD = struct.Struct(f">{ID_BYTES}s{SECRET_BYTES}s{PIN_BYTES}sH")
MAX_FRAME = 16 << 10


class Refused(enum.IntEnum):
    """Reasons of a refusal; the numbers are on the wire."""

    REQUEST = 1
    TOKEN = 2
    EXPIRED = 3
    USED = 4
    IDENTITY = 5
    REVOKED = 7
    FAULT = 8


class JoinRefused(OperatorError):
    """The enrolment server issued no certificate; `reason` says why."""

    def __init__(self, reason: Refused, message: str, *, action: str | None = None) -> None:
        self.reason = reason
        super().__init__(message, action=action)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A parsed join token; `address` of the enrolment server may be empty."""

    id: bytes
    secret: bytes
    pin: bytes
    uri: str
    address: str = ""

    @property
    def node(self) -> tuple[str, str, Role]:
        names = split_uri(self.uri)
        assert names is not None, "checked when it was read"
        return names

    def text(self) -> str:
        uri = self.uri.encode("ascii")
        body = _HEAD.pack(self.id, self.secret, self.pin, len(uri)) + uri + self.address.encode("ascii")
        return PREFIX + base64.urlsafe_b64encode(body + _sum(body)).rstrip(b"=").decode("ascii")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The authority's row of a token; `expires` in seconds since the epoch.

    `key` is the digest of the public key that used it, `serial` its certificate; empty and 0 while unused.
    """

    secret_digest: str
    uri: str
    expires: float
    days: int
    key: str = ""
    serial: int = 0


def parse_token(text: str) -> Token:
    """Read a token. Raises ConfigError: it is damaged or not a token."""
    action = "copy the whole token, or ask for a new one"
    text = "".join(text.split())
    if not text.startswith(PREFIX) or not text.isascii():
        raise ConfigError("--token", f"does not begin with {PREFIX}", action=action)
    coded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ConfigError("--token", "is damaged", action=action) from error
    body, check = data[:-SUM_BYTES], data[-SUM_BYTES:]
    if len(body) < _HEAD.size or check != _sum(body):
        raise ConfigError("--token", "is damaged", action=action)
    number, secret, pin, length = _HEAD.unpack_from(body)
    texts = body[_HEAD.size :]
    if len(texts) < length or not texts.isascii():
        raise ConfigError("--token", "is damaged", action=action)
    uri, address = texts[:length].decode("ascii"), texts[length:].decode("ascii")
    token = Token(id=number, secret=secret, pin=pin, uri=uri, address=address)
    if split_uri(token.uri) is None:
        raise ConfigError("--token", "names no node", action=action)
    return token


def secret_digest(secret: bytes) -> str:
    """A secret's stored digest: 256 random bits need no slow hash."""
    return blake3.blake3(secret).hexdigest()


def pin_of(certificate: bytes) -> bytes:
    """The pin of an authority's certificate, DER."""
    return hashlib.sha256(certificate).digest()


def check_token(kept: Kept | None, *, secret: bytes, uri: str, key: str, now: float) -> Kept:
    """Check a token against its row (`kept`, None if unknown).

    Without the secret all tokens are refused alike. `key` is the digest of the caller's proved public key. Raises
    JoinRefused.
    """
    if kept is None or not hmac.compare_digest(kept.secret_digest, secret_digest(secret)):
        raise JoinRefused(Refused.TOKEN, "the token is not of this authority")
    if uri != kept.uri:
        raise JoinRefused(Refused.IDENTITY, f"the token is for {kept.uri}, the request for {uri[:200]}")
    # The same key may ask again after a lost answer.
    if kept.key and not hmac.compare_digest(kept.key, key):
        raise JoinRefused(Refused.USED, "the token was used by another key")
    if not kept.key and now >= kept.expires:
        raise JoinRefused(Refused.EXPIRED, "the token has expired")
    return kept


def _sum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:SUM_BYTES]


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


class BrokenFrame(Exception):
    """The peer closed early, or announced too long a frame."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read a frame; the caller bounds the time.
    Raises BrokenFrame: it is incomplete or too long."""
    try:
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        if length > MAX_FRAME:
            raise BrokenFrame(f"a frame of {length} bytes")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise BrokenFrame("the connection ended") from error


def frame(data: bytes) -> bytes:
    """The bytes of a frame."""
    assert len(data) <= MAX_FRAME
    return struct.pack(">I", len(data)) + data
