"""The authority's directory: issued and revoked certificates, tokens.

    ca.crt ca.key        the authority; ca.key never leaves the directory
    issued/SERIAL.crt    every certificate that it issued
    tokens/NUMBER.json   tokens by which nodes join, without their secrets
    revoked              serial numbers that are no longer accepted; the coordinator's `tls.revoked`
    ROLE-SITE/           one node's files: ca.crt, node.crt, node.key; a coordinator's also a copy of revoked

A failed operation leaves every file complete. Secret files are never readable by others. A revoked certificate is not
renewed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from heterorl.certs.authority import LOCAL_HOSTS, SERVING, Pair, hosts_of, issue_node, make_authority
from heterorl.common.errors import ConfigError
from heterorl.common.identity.credentials import parse_serials
from heterorl.common.identity.spiffe import Identity, Refusal, Role, read_identity, spiffe_uri
from heterorl.common.process.files import opened_directory, replacing

REVOKED = "revoked"
"""The list's name here and in a coordinator's directory."""
SECRET = 0o600
PUBLIC = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """An issued certificate; `expires` is an aware instant."""

    identity: Identity
    hosts: tuple[str, ...]
    """Its names and addresses, without the local machine's."""
    expires: datetime
    is_revoked: bool

    def state(self, now: datetime) -> str:
        if self.is_revoked:
            return "revoked"
        return "valid" if now < self.expires else "expired"


class Authority:
    """The authority of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def revoked_path(self) -> Path:
        return self._directory / REVOKED

    def init(self, *, run: str, now: datetime, lifetime: timedelta) -> None:
        """Make the directory and its authority. Raises ConfigError: there is one already."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self._directory):
            # Its key may be kept elsewhere: a new one would forget its certificates and what is revoked.
            if (self._directory / "ca.key").exists() or any((self._directory / "issued").glob("*.crt")):
                lost = "" if (self._directory / "ca.key").exists() else ", or put its ca.key back"
                action = f"choose another directory{lost}; `heterorl certs issue` adds certificates to this one"
                raise ConfigError("--dir", f"{self._directory} holds an authority", action=action)
            pair = make_authority(run=run, now=now, lifetime=lifetime)
            (self._directory / "issued").mkdir(exist_ok=True)
            write_file(self.revoked_path, b"# Serial numbers, hexadecimal, one a line.\n", mode=PUBLIC)
            write_file(self._directory / "run", f"{run}\n".encode("ascii"), mode=PUBLIC)
            write_file(self._directory / "ca.crt", pair.cert, mode=PUBLIC)
            # Last: with the key the directory is complete.
            write_file(self._directory / "ca.key", pair.key, mode=SECRET)

    def issue(
        self, *, role: Role, site: str, hosts: Sequence[str], out: Path | None, now: datetime, lifetime: timedelta
    ) -> Path:
        """Issue a node's files; returns their directory.
        Raises ConfigError: a bad name, or it has a certificate that is not revoked."""
        target = out or self._directory / f"{role}-{site}"
        with locked(self._existing()):
            # The certificate is written last: without it an earlier call was cut short.
            held = self._read(target / "node.crt") if (target / "node.crt").exists() else None
            if held is not None and not self.is_revoked(held.serial):
                action = f"heterorl certs renew {target}, with --host for other names"
                raise ConfigError("--out", f"{target} holds a certificate", action=action)
            pair = issue_node(self.pair(), node=(self.run(), site, role), hosts=hosts, now=now, lifetime=lifetime)
            if role in SERVING:
                target.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_file(target / REVOKED, self.revoked_path.read_bytes(), mode=PUBLIC)
            self._hand_out(pair, target)
        return target

    def renew(self, target: Path, *, hosts: Sequence[str] = (), now: datetime, lifetime: timedelta) -> Identity:
        """Replace certificate and key of a directory; returns the replaced identity.
        Empty `hosts` keep theirs. Raises ConfigError: there is no certificate of this authority, or it is revoked; else
        as `sign_node`."""
        with locked(self._existing()):
            if not (target / "node.crt").exists():
                problem = f"{target} holds no certificate; a node that joined by token has its files itself"
                action = "let it join by a new token into a new directory: heterorl certs token create"
                raise ConfigError("DIRECTORY", problem, action=action)
            identity = self._read(target / "node.crt")
            if not self.path_of(identity.serial).exists():
                action = "give the directory that `heterorl certs issue` wrote"
                raise ConfigError("DIRECTORY", f"{target} holds no certificate of this authority", action=action)
            if self.is_revoked(identity.serial):
                raise ConfigError("DIRECTORY", f"certificate {identity.serial:x} is revoked", action="issue a new one")
            # Not of the directory's file, which another could have written there under an issued serial number.
            issued = self.path_of(identity.serial)
            identity, hosts = self._read(issued), hosts or hosts_of(issued.read_bytes())
            node = (identity.run, identity.site, identity.role)
            pair = issue_node(self.pair(), node=node, hosts=hosts, now=now, lifetime=lifetime)
            self._hand_out(pair, target)
            return identity

    def revoke(self, what: str) -> list[Identity]:
        """Revoke certificates; returns their identities.
        `what` is a serial number, a certificate's file, or a node's directory (all of its role and site). Raises
        ConfigError: this authority issued no such certificate."""
        with locked(self._existing()):
            path = Path(what)
            is_named = path.is_dir() or path.is_file()
            serial = self._read(path / "node.crt" if path.is_dir() else path).serial if is_named else _serial(what)
            if not self.path_of(serial).exists():
                action = "give a certificate of `heterorl certs list`"
                raise ConfigError("WHAT", f"certificate {serial:x} is not of this authority", action=action)
            node = self._read(self.path_of(serial))
            if not path.is_dir():
                return self._refuse([node])
            self._delete_tokens(node.uri)
            return self._refuse(self._all_of(role=node.role, site=node.site))

    def revoke_node(self, *, role: Role, site: str) -> list[Identity]:
        """Revoke all certificates of a role and site; returns them.
        Deletes their unused tokens. Raises ConfigError: this authority issued neither."""
        with locked(self._existing()):
            found = self._all_of(role=role, site=site)
            if not self._delete_tokens(spiffe_uri(run=self.run(), site=site, role=role)) and not found:
                action = "heterorl certs list shows every site and role"
                raise ConfigError("--site", f"no {role} {site} has a certificate of this authority", action=action)
            return self._refuse(found)

    def copies(self) -> list[Path]:
        """Copies of the list for coordinators and relays, which `revoke` updates."""
        paths = [path for role in sorted(SERVING) for path in self._directory.glob(f"{role}-*/{REVOKED}")]
        return sorted(path for path in paths if path.is_file())

    def _all_of(self, *, role: Role, site: str) -> list[Identity]:
        book = [entry.identity for entry in self.list()]
        return [entry for entry in book if (entry.role, entry.site) == (role, site)]

    def _delete_tokens(self, uri: str) -> int:
        """Delete tokens by which a node could still join; returns their number."""
        num_deleted = 0
        for path in (self._directory / "tokens").glob("*.json"):
            with contextlib.suppress(ValueError, TypeError, LookupError):
                token = json.loads(path.read_bytes())
                if token["uri"] == uri and not token["key"]:
                    path.unlink()
                    num_deleted += 1
        return num_deleted

    def _refuse(self, identities: Sequence[Identity]) -> list[Identity]:
        known = self._revoked()
        lines = [
            f"{entry.serial:x}  # {entry.role} {entry.site}\n" for entry in identities if entry.serial not in known
        ]
        before = self.revoked_path.read_text(encoding="ascii")
        # An operator may have written the last line, without its end.
        end = "\n" if before and not before.endswith("\n") else ""
        text = "".join((before, end, *lines))
        for path in (self.revoked_path, *self.copies()):
            write_file(path, text.encode("ascii"), mode=PUBLIC)
        return list(identities)

    def run(self) -> str:
        """The authority's run. Raises ConfigError: there is no authority."""
        return (self._existing() / "run").read_text(encoding="ascii").strip()

    def pair(self) -> Pair:
        """The authority's certificate and key. Raises ConfigError: there is no authority."""
        directory = self._existing()
        return Pair(cert=(directory / "ca.crt").read_bytes(), key=(directory / "ca.key").read_bytes())

    def path_of(self, serial: int) -> Path:
        return self._directory / "issued" / f"{serial:x}.crt"

    def is_revoked(self, serial: int) -> bool:
        return serial in self._revoked()

    def list(self) -> list[Issued]:
        book = self._existing() / "issued"
        revoked = self._revoked()
        identities = {path: self._read(path) for path in book.glob("*.crt")}
        return [
            Issued(
                identity=identity,
                hosts=tuple(host for host in hosts_of(path.read_bytes()) if host not in LOCAL_HOSTS),
                expires=datetime.fromtimestamp(identity.not_after, UTC),
                is_revoked=identity.serial in revoked,
            )
            for path, identity in sorted(identities.items(), key=lambda item: (item[1].not_after, item[1].serial))
        ]

    def _existing(self) -> Path:
        if not (self._directory / "ca.key").exists():
            raise ConfigError("--dir", f"{self._directory} holds no authority", action="heterorl certs init RUN first")
        return self._directory

    def _revoked(self) -> frozenset[int]:
        try:
            return parse_serials(self.revoked_path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            action = "make it readable for this user, or restore it from a copy"
            raise ConfigError("--dir", f"cannot read {self.revoked_path}: {error}", action=action) from error

    def _read(self, path: Path) -> Identity:
        try:
            identity = read_identity(path.read_bytes())
        except OSError as error:
            action = "give the directory that `heterorl certs issue` wrote, as its owner"
            raise ConfigError("DIRECTORY", f"cannot read {path}: {error.strerror}", action=action) from error
        if isinstance(identity, Refusal):
            action = "give the directory of a certificate that `heterorl certs issue` made"
            raise ConfigError("DIRECTORY", f"{path}: {identity.message}", action=action)
        return identity

    def _hand_out(self, pair: Pair, target: Path) -> None:
        identity = read_identity(pair.cert)
        assert isinstance(identity, Identity)
        # Before the node gets it, so that it can always be found and revoked.
        write_file(self.path_of(identity.serial), pair.cert, mode=PUBLIC)
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(target / "ca.crt", (self._directory / "ca.crt").read_bytes(), mode=PUBLIC)
        write_file(target / "node.key", pair.key, mode=SECRET)
        write_file(target / "node.crt", pair.cert, mode=PUBLIC)


def _serial(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError as error:
        action = "give a certificate's file, or its serial in hexadecimal from `heterorl certs list`"
        raise ConfigError("WHAT", f"{text} is neither a file nor a serial number", action=action) from error


def write_file(path: Path, data: bytes, *, mode: int) -> None:
    """Replace a file atomically and durably; `mode` holds under any umask."""
    with replacing(path, mode=mode) as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock an authority's directory against other processes."""
    with opened_directory(directory) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
