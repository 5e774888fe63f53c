"""Manifests and their signatures as they were published, as store operations: exact bytes in, the same bytes out.

The coordinator holds no key and checks no signature: whoever trusts a key does.
"""

from __future__ import annotations

import sqlite3

from heterorl.common.errors import InvalidRequest, UnknownVersion
from heterorl.common.types.policy import SignedManifest

MAX_MANIFESTS = 256
"""Manifests in one answer."""
MAX_MANIFEST_BYTES = 4 << 20
"""Bytes of the manifests in one answer, beyond which only the first may go."""


def read_manifest(connection: sqlite3.Connection, version: int, flavour: str = "") -> bytes:
    """Exact bytes of a manifest.

    Raises:
        UnknownVersion: no such version.
    """
    row = connection.execute(
        "SELECT manifest FROM stated WHERE flavour = ? AND version = ?", (flavour, version)
    ).fetchone()
    if row is None:
        raise UnknownVersion(f"version {version} does not exist{f' in flavour {flavour}' if flavour else ''}")
    return bytes(row[0])


def manifest_bytes(connection: sqlite3.Connection, version: int, flavour: str = "") -> int:
    """Size of a manifest, which is not read; 0 when there is no such version."""
    row = connection.execute(
        "SELECT length(manifest) FROM stated WHERE flavour = ? AND version = ?", (flavour, version)
    ).fetchone()
    return 0 if row is None else int(row[0])


def read_manifests(
    connection: sqlite3.Connection,
    *,
    first: int,
    last: int,
    flavour: str = "",
    max_manifests: int = MAX_MANIFESTS,
    max_bytes: int = MAX_MANIFEST_BYTES,
) -> tuple[bytes, ...]:
    """Exact bytes of the manifests of versions last, last - 1, ..., first, as many as fit; at least one.

    Raises:
        InvalidRequest: the range is empty.
        UnknownVersion: the newest does not exist.
    """
    if first > last:
        raise InvalidRequest(f"versions {first} to {last} are no range")
    found = [read_manifest(connection, last, flavour)]
    num_bytes = len(found[0])
    for version in range(last - 1, max(first, last - max_manifests + 1) - 1, -1):
        # Before the bytes are read: a range is a caller's, and one operation of the store must stay short.
        more = manifest_bytes(connection, version, flavour)
        if more == 0 or num_bytes + more > max_bytes:
            break
        num_bytes += more
        found.append(read_manifest(connection, version, flavour))
    return tuple(found)


def read_signed_manifest(connection: sqlite3.Connection, version: int, flavour: str = "") -> SignedManifest:
    """Exact bytes of a manifest and the signature stored with it.

    Raises:
        UnknownVersion: no such version.
    """
    data = read_manifest(connection, version, flavour)
    return SignedManifest(data=data, signature=read_signature(connection, version, flavour))


def read_signature(connection: sqlite3.Connection, version: int, flavour: str = "") -> bytes:
    """The signature that the publisher sent; empty when there is none."""
    row = connection.execute(
        "SELECT signature FROM signatures WHERE flavour = ? AND version = ?", (flavour, version)
    ).fetchone()
    return b"" if row is None else bytes(row[0])


def write_signature(connection: sqlite3.Connection, version: int, signature: bytes, flavour: str = "") -> None:
    """Record what the publisher sent."""
    if signature:
        connection.execute("INSERT INTO signatures VALUES (?, ?, ?)", (version, signature, flavour))
