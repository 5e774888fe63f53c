"""Manifests and their signatures as they were published, as store operations: exact bytes in, the same bytes out.

The coordinator holds no key and checks no signature: whoever trusts a key does.
"""

from __future__ import annotations

import sqlite3

from services.common.errors import UnknownVersion
from services.common.types import SignedManifest


def read_manifest(connection: sqlite3.Connection, version: int) -> bytes:
    """Exact bytes of a manifest.

    Raises:
        UnknownVersion: no such version.
    """
    row = connection.execute("SELECT manifest FROM versions WHERE version = ?", (version,)).fetchone()
    if row is None:
        raise UnknownVersion(f"version {version} does not exist")
    return bytes(row[0])


def read_signed_manifest(connection: sqlite3.Connection, version: int) -> SignedManifest:
    """Exact bytes of a manifest and the signature stored with it.

    Raises:
        UnknownVersion: no such version.
    """
    return SignedManifest(data=read_manifest(connection, version), signature=read_signature(connection, version))


def read_signature(connection: sqlite3.Connection, version: int) -> bytes:
    """The signature that the publisher sent; empty when there is none."""
    row = connection.execute("SELECT signature FROM signatures WHERE version = ?", (version,)).fetchone()
    return b"" if row is None else bytes(row[0])


def write_signature(connection: sqlite3.Connection, version: int, signature: bytes) -> None:
    """Record what the publisher sent."""
    if signature:
        connection.execute("INSERT INTO signatures VALUES (?, ?)", (version, signature))
