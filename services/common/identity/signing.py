"""Ed25519 signatures of versions, and the keys that a node trusts.

Manifests are signed as exact bytes. A private key is a PKCS 8 PEM file that only its owner may read; a public key is
`ed25519:` and 64 hex digits. The content of a private key file is never in a message, an error or a log line.
"""

import logging
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import Field

from heterorl.common.errors import ConfigError, UnsignedManifest, WrongSignature

PREFIX = "ed25519:"
PUBLIC_KEY = r"^ed25519:[0-9a-f]{64}$"
PublicKey = Annotated[str, Field(pattern=PUBLIC_KEY)]
"""A public key in the form of configurations."""
MAX_KEY_FILE_BYTES = 4096
KEY = "signing_key"


class Signer:
    """A private key in memory, without a way to show it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_key(self) -> str:
        raw = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return PREFIX + raw.hex()

    def sign(self, data: bytes) -> bytes:
        """Sign bytes; 64 bytes, the same for the same bytes (RFC 8032)."""
        return self._key.sign(data)


def new_key(path: Path) -> Signer:
    """Write a private key durably, mode 0600; raises ConfigError if it exists."""
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise ConfigError(
            KEY, f"{path} exists", action="choose another file: a lost key cannot be made again"
        ) from error
    except OSError as error:
        raise ConfigError(
            KEY, f"cannot write {path}: {error.strerror}", action="name a directory that this user can write"
        ) from error
    return Signer(key)


def load_signer(path: Path) -> Signer:
    """Read an owner-only Ed25519 PEM file; raises ConfigError for any other."""
    try:
        with path.open("rb") as file:
            # Mode of the open file: the name may lead elsewhere a moment later.
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_KEY_FILE_BYTES)
    except PermissionError as error:
        # Not `keys new`: no site trusts a second key.
        action = f"as root: chown {os.geteuid()} {path}, and let that user enter its directory"
        raise ConfigError(KEY, f"cannot read {path}: {error.strerror}", action=action) from error
    except OSError as error:
        raise ConfigError(KEY, f"cannot read {path}: {error.strerror}", action="heterorl keys new PATH") from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ConfigError(KEY, f"{path} has mode {mode & 0o777:04o}, others could read it", action=f"chmod 600 {path}")
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        # Without the cause: a parser's message could quote the key.
        raise ConfigError(KEY, f"{path} is not a private key in PEM", action="heterorl keys new PATH") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(KEY, f"{path} is not an Ed25519 key", action="heterorl keys new PATH")
    return Signer(key)


def signed_by(data: bytes, signature: bytes, keys: Iterable[str]) -> str | None:
    """First of `keys` that signed, or None; raises ConfigError for malformed ones."""
    for text in keys:
        try:
            if not text.startswith(PREFIX):
                raise ValueError
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(text.removeprefix(PREFIX)))
        except ValueError as error:
            action = "copy the line that `heterorl keys show` prints"
            raise ConfigError("trusted_keys", f"{text!r} is not {PREFIX} and 64 hex digits", action=action) from error
        try:
            key.verify(signature, data)
        except InvalidSignature:
            continue
        return text
    return None


_LOG = logging.getLogger(__name__)
UNSIGNED = "unsigned"
"""Recorded in place of a key, if no key is trusted."""


class Trust:
    """Keys whose versions a node accepts; without keys it accepts every manifest.

    A signed manifest names its parent by digest, so one signature vouches for the whole history. Several keys may be
    trusted at once, to exchange a learner's key.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(dict.fromkeys(keys))
        self._has_warned = False

    def check(self, data: bytes, signature: bytes, *, version: int) -> str:
        """Accept a manifest's bytes; returns their signing key, UNSIGNED without trusted keys.

        Raises:
            UnsignedManifest: keys are trusted and there is no signature.
            WrongSignature: none of them made the signature of these bytes.
        """
        if not self._keys:
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "trusted_keys is empty: the coordinator's operator can replace the weights, see docs/signatures.md"
                )
            return UNSIGNED
        if not signature:
            raise UnsignedManifest(f"the manifest of version {version} is not signed")
        key = signed_by(data, signature, self._keys)
        if key is None:
            raise WrongSignature(f"the signature of version {version} is of none of the {len(self._keys)} trusted keys")
        return key
