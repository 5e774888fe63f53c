"""The versions of one variant in the store: states, manifests, signatures, payloads.

Head and abandonment belong to the version, not to the variant. Manifests are exact bytes. The coordinator holds no key
and checks no signature; samplers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from heterorl.common.errors import InvalidRequest, UnknownVersion
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef, SignedManifest
from heterorl.coordinator.store.database import Connection

TRAINED = ""
MAX_MANIFESTS = 256
MAX_MANIFEST_BYTES = 4 << 20
"""Bytes of the manifests in one answer; a larger one travels by itself."""
PAYLOAD_ROW = "kind, from_version, to_version, digest, num_bytes"
"""The columns that `payload_of` reads."""
Into = Callable[[int], Sequence[PayloadRef]]
"""The payloads that lead to a version."""


def payload_of(row: tuple[str, int, int, str, int]) -> PayloadRef:
    """The payload of a row of PAYLOAD_ROW."""
    kind, start, stop, digest, num_bytes = row
    return PayloadRef(
        kind=PayloadKind(kind), from_version=start, to_version=stop, digest=Digest(digest), num_bytes=num_bytes
    )


@dataclass(frozen=True, slots=True)
class Chain:
    """The versions of one variant."""

    connection: Connection
    variant: str = TRAINED

    def is_in_lineage(self, version: int) -> bool:
        """Whether a version exists in this variant and was not abandoned."""
        row = self._one("SELECT is_abandoned FROM stated WHERE variant = ? AND version = ?", version)
        return row is not None and not row[0]

    def state_root(self, version: int) -> str | None:
        """State of a version, abandoned or not; None if it is missing."""
        row = self._one("SELECT state_root FROM stated WHERE variant = ? AND version = ?", version)
        return None if row is None else str(row[0])

    def manifest(self, version: int) -> bytes:
        """Exact bytes of a manifest. Raises UnknownVersion: no such version."""
        row = self._one("SELECT manifest FROM stated WHERE variant = ? AND version = ?", version)
        if row is None:
            where = f" in variant {self.variant}" if self.variant else ""
            raise UnknownVersion(f"version {version} does not exist{where}")
        return bytes(row[0])

    def manifest_bytes(self, version: int) -> int:
        """Size of a manifest, without reading it; 0 if it is missing."""
        row = self._one("SELECT length(manifest) FROM stated WHERE variant = ? AND version = ?", version)
        return 0 if row is None else int(row[0])

    def manifests(self, *, first: int, last: int, max_bytes: int = MAX_MANIFEST_BYTES) -> tuple[bytes, ...]:
        """Exact manifests, `last` to `first`, as many as fit, at least one.
        Raises InvalidRequest: the range is empty; UnknownVersion: the newest does not exist."""
        if first > last:
            raise InvalidRequest(f"versions {first} to {last} are not a range")
        found = [self.manifest(last)]
        num_bytes = len(found[0])
        for version in range(last - 1, max(first, last - MAX_MANIFESTS + 1) - 1, -1):
            # Sizes first: the caller chooses the range, and a store operation must stay short.
            more = self.manifest_bytes(version)
            if more == 0 or num_bytes + more > max_bytes:
                break
            num_bytes += more
            found.append(self.manifest(version))
        return tuple(found)

    def signed_manifest(self, version: int) -> SignedManifest:
        """Exact bytes of a manifest and the signature stored with it.
        Raises UnknownVersion: no such version."""
        return SignedManifest(data=self.manifest(version), signature=self.signature(version))

    def signature(self, version: int) -> bytes:
        row = self._one("SELECT signature FROM signatures WHERE variant = ? AND version = ?", version)
        return b"" if row is None else bytes(row[0])

    def write_signature(self, version: int, signature: bytes) -> None:
        if signature:
            self.connection.execute("INSERT INTO signatures VALUES (?, ?, ?)", (version, signature, self.variant))

    def into(self, version: int) -> list[PayloadRef]:
        rows = self.connection.execute(
            f"SELECT {PAYLOAD_ROW} FROM payloads WHERE variant = ? AND to_version = ?", (self.variant, version)
        )
        return [payload_of(row) for row in rows]

    def payloads(self) -> list[PayloadRef]:
        rows = self.connection.execute(f"SELECT {PAYLOAD_ROW} FROM payloads WHERE variant = ?", (self.variant,))
        return [payload_of(row) for row in rows]

    def offer(self, payloads: Iterable[PayloadRef]) -> None:
        self.connection.executemany(
            "INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?)",
            [(p.to_version, p.kind.value, p.from_version, p.digest, p.num_bytes, self.variant) for p in payloads],
        )

    def verified(self) -> frozenset[int]:
        rows = self.connection.execute("SELECT version FROM verified WHERE variant = ?", (self.variant,))
        return frozenset(int(row[0]) for row in rows)

    def note_verified(self, snapshot: PayloadRef) -> None:
        """Remember that a snapshot was decoded and is its version's state."""
        self.connection.execute(
            "INSERT INTO verified VALUES (?, ?, ?) ON CONFLICT (variant, version)"
            " DO UPDATE SET digest = excluded.digest",
            (snapshot.to_version, snapshot.digest, self.variant),
        )

    def _one(self, query: str, version: int) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.connection.execute(query, (self.variant, version)).fetchone()
        return row
