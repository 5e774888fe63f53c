"""Join tokens, and the frames of enrolment.

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

The authority keeps only the secret's digest. A token is valid once, for one key and one identity.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

import blake3

from heterorl.common.errors import ConfigError, OperatorError
from heterorl.common.identity.spiffe import Role, split_uri

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


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
