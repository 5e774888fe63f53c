"""An S3-compatible bucket as payload storage: its objects, and requests to them.

    PREFIX/run               the mark: the store whose rows name these payloads
    PREFIX/blobs/ab/DIGEST   payloads; a name appears with all its bytes or not at all
    PREFIX/damaged/DIGEST    payloads whose bytes changed; for inspection, never served

A payload is complete when the bucket has it. The start lists the bucket; after that only this coordinator writes. A
payload that the bucket refused stays as a file and is put again.

Errors show no address and no credentials, so no text of the library obstore leaves this module. A request ends within
two minutes. A read lasts while bytes arrive and resumes at the missing byte. A conditional put makes the mark. It is
read again before a deletion or move; a coordinator that finds another store's name ends.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import logging
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import Busy, ConfigError, CorruptStore, DependencyMissing, StoreFull
from heterorl.common.process.threads import opened_in_thread
from heterorl.common.types.common import Digest, file_name, is_digest
from heterorl.coordinator.coordinator_config import BucketConfig
from heterorl.coordinator.store.payload_files import BUSY_S, PayloadStorage, open_file, write_all

if TYPE_CHECKING:
    from obstore.store import S3Store


PART_BYTES = 16 << 20
"""Bytes of a part of an upload; smaller files are put by one request."""
PARTS_AT_ONCE = 4
RANGE_BYTES = 16 << 20
MOVED_BYTES = 5_000_000_000
"""S3 copies no larger object by one request."""
BLOCK_BYTES = 1 << 20
REQUEST_S = 120.0
"""Limit of a request with a short answer; a part of an upload needs 140 kB/s."""
SILENCE_S = 20.0
RANGE_S = 600.0
"""Limit of one range of a read; the next request resumes."""
_RETRIES: dict[str, Any] = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=40),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
}


def _obstore() -> tuple[Any, Any]:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise DependencyMissing("obstore", "s3") from None
    return obstore, obstore.exceptions


_LOG = logging.getLogger(__name__)
MAX_CREDENTIALS_BYTES = 1 << 16
CREDENTIALS_KEPT = timedelta(minutes=10)
"""The library asks again five minutes before the end."""


def read_credentials(path: Path) -> dict[str, str]:
    """Read a file in the form of ~/.aws/credentials.
    Raises ConfigError: unreadable, or readable by others."""
    key = "payloads.credentials_file"
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(key, f"{path} is readable by others", action=f"chmod 600 {path}")
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CREDENTIALS_BYTES)
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        section = parser["default"]
        found = {"access_key_id": section["aws_access_key_id"], "secret_access_key": section["aws_secret_access_key"]}
        if token := section.get("aws_session_token"):
            found["token"] = token
    except OSError as error:
        action = "check the path, and that the coordinator's user can read the file"
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}", action=action) from None
    except (configparser.Error, KeyError, UnicodeDecodeError):
        problem = f"{path} has no section default with aws_access_key_id and aws_secret_access_key"
        raise ConfigError(key, problem, action="write it as the AWS command line does") from None
    return found


class _Credentials:
    """Credentials of a file, read again: session tokens expire during the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = read_credentials(path)

    def __call__(self) -> dict[str, Any]:
        """The library's form of them; called from its threads."""
        try:
            self._found = read_credentials(self._path)
        except ConfigError as error:
            _LOG.warning("the old credentials of the bucket stay in use: %s", error)
        return {"token": None, **self._found, "expires_at": datetime.now(UTC) + CREDENTIALS_KEPT}


_TAKES = "take a payload"
MARK = "run"


class Objects:
    """Payloads by digest, below one prefix of one bucket."""

    def __init__(self, config: BucketConfig, *, run_id: str, on_lost: Callable[[str], None]) -> None:
        """Prepare without a request; call `claim` first.
        `on_lost` gets the reason when another store takes the prefix. Raises DependencyMissing: obstore; ConfigError:
        unreadable credentials."""
        self._library, self._errors = _obstore()
        self._lifetime = timedelta(seconds=config.url_lifetime_s)
        where: dict[str, Any] = {
            "prefix": config.prefix or run_id,
            "region": config.region,
            "retry_config": _RETRIES,
            **({"endpoint": config.endpoint} if config.endpoint else {}),
            **({"credential_provider": _Credentials(file)} if (file := config.credentials_file) else {}),
        }
        allow: dict[str, Any] = {"allow_http": config.endpoint.startswith("http://")}
        store = self._library.store.S3Store
        # `timeout` is for a whole answer. `read_timeout` is for silence, also while a put sends its bytes.
        asking = {"timeout": timedelta(seconds=REQUEST_S)}
        self._store: S3Store = store(config.bucket, client_options={**allow, **asking}, **where)
        reading = {"timeout": timedelta(seconds=RANGE_S), "read_timeout": timedelta(seconds=SILENCE_S)}
        self._reads: S3Store = store(config.bucket, client_options={**allow, **reading}, **where)
        self._on_lost = on_lost
        self._owner = ""

    async def owner(self) -> str:
        """The name of the store that has the prefix, or empty."""
        try:
            async with self._asked("be read"):
                data = await (await self._library.get_async(self._store, MARK)).bytes_async()
        except FileNotFoundError:
            return ""
        return bytes(data).decode("utf-8", "replace")

    async def claim(self, owner: str) -> None:
        """Put the mark if there is none.
        Raises ConfigError: another store has the prefix; Busy: no answer."""
        is_new = await self._create(MARK, owner.encode(), action="be written to")
        if not is_new and (found := await self.owner()) != owner:
            raise self.of_another(found)
        self._owner = owner

    @staticmethod
    def of_another(owner: str) -> ConfigError:
        """The error for a prefix of another store."""
        action = f"name another prefix; if that store never runs again, delete the object {MARK} below it"
        return ConfigError("payloads.prefix", f"has the payloads of another store, {owner[:64]!r}", action=action)

    async def sizes(self) -> dict[Digest, int]:
        async with self._asked("be listed"):
            found = await self._library.list(self._store, prefix="blobs").collect_async()
        names = ((entry["path"].rpartition("/")[2], int(entry["size"])) for entry in found)
        return {Digest(name): num_bytes for name, num_bytes in names if is_digest(name)}

    async def check(self) -> None:
        """Check that the prefix is still this store's.
        Raises CorruptStore: it is not; the process must end."""
        if await self.owner() != self._owner:
            problem = "another store has taken the prefix of the payloads in the bucket, or its mark is gone"
            self._on_lost(problem)
            raise CorruptStore(problem, action="see which coordinators name this prefix: only one store may")

    async def put(self, digest: Digest, path: Path) -> None:
        key = _key(digest)
        if (await asyncio.to_thread(path.stat)).st_size <= PART_BYTES:
            await self._create(key, await asyncio.to_thread(path.read_bytes), action=_TAKES)
            return
        # An upload in parts cannot be conditional. Only one coordinator puts below a prefix, so no other write comes
        # between this check and the end.
        try:
            await self._size(key)
        except FileNotFoundError:
            parts: dict[str, Any] = {"chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
            async with self._asked(_TAKES):
                await self._library.put_async(self._store, key, path, **parts)

    async def fetch(self, digest: Digest, path: Path) -> None:
        """Append a payload's missing bytes to a file, without verification.
        Raises FileNotFoundError; StoreFull, CorruptStore: the disk refuses."""
        key = _key(digest)
        stop = await self._size(key)
        file = await opened_in_thread(lambda: open_file(path, "ab"))
        with file:
            # Closed at once: after a cancellation the bucket would go on sending.
            async with contextlib.aclosing(self._read(key, offset=file.tell(), stop=stop)) as blocks:
                async for block in blocks:
                    writing = asyncio.ensure_future(asyncio.to_thread(write_all, file, block))
                    try:
                        await asyncio.shield(writing)
                    finally:
                        # Before the file is closed, also after a cancellation.
                        await asyncio.wait([writing])

    async def delete(self, digest: Digest) -> None:
        await self.check()
        async with self._asked("delete a payload"):
            await self._library.delete_async(self._store, _key(digest))

    async def set_aside(self, digest: Digest) -> None:
        await self.check()
        with contextlib.suppress(FileNotFoundError):
            async with self._asked("move a payload"):
                await self._library.rename_async(self._store, _key(digest), f"damaged/{file_name(digest)}")

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """Presigned URLs to read payloads; signed locally."""
        keys = [_key(digest) for digest in digests]
        async with self._asked("be signed for"):
            return list(await self._library.sign_async(self._store, "GET", keys, self._lifetime)) if keys else []

    async def _create(self, key: str, data: bytes, *, action: str) -> bool:
        """Put an object unless it exists; returns whether it did."""
        async with self._asked(action):
            try:
                await self._library.put_async(self._store, key, data, mode="create")
            except self._errors.AlreadyExistsError:
                return False
        return True

    async def _size(self, key: str) -> int:
        """Bytes of an object. Raises FileNotFoundError."""
        async with self._asked("be read"):
            return int((await self._library.head_async(self._store, key))["size"])

    async def _read(self, key: str, *, offset: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Yield [offset, stop) of an object. Raises FileNotFoundError."""
        while offset < stop:
            before, bounds = offset, (offset, min(stop, offset + RANGE_BYTES))
            try:
                async with self._asked("be read"):
                    answer = await self._library.get_async(self._reads, key, options={"range": bounds})
                    async for block in answer.stream(min_chunk_size=BLOCK_BYTES):
                        offset += len(block)
                        yield bytes(block)
            except Busy:
                if offset == before:
                    raise
            else:
                if offset == before:
                    raise Busy("the bucket of the payloads sends nothing", retry_after_s=BUSY_S)

    @asynccontextmanager
    async def _asked(self, action: str) -> AsyncIterator[None]:
        try:
            yield
        except FileNotFoundError:
            # The library's error names the address.
            raise FileNotFoundError("the payload is not in the bucket") from None
        except (PermissionError, self._errors.PermissionDeniedError, self._errors.UnauthenticatedError):
            problem = f"the bucket of the payloads cannot {action}: it refuses the credentials"
            raise Busy(problem, retry_after_s=BUSY_S) from None
        except self._errors.BaseError as error:
            problem = f"the bucket of the payloads cannot {action} now ({type(error).__name__})"
            raise Busy(problem, retry_after_s=BUSY_S) from None


def _key(digest: Digest) -> str:
    # `file_name` refuses anything but a digest.
    name = file_name(digest)
    return f"blobs/{name[:2]}/{name}"


@dataclass(eq=False, repr=False)
class BucketStorage(PayloadStorage):
    """Payloads of one run in a bucket, under a claimed prefix.

    It belongs to the event loop. `sizes` lists the prefix. `make_room` gets the missing bytes before a payload is
    refused; `on_kept` and `on_gone` get each payload that enters or leaves the bucket.
    """

    objects: Objects
    sizes: dict[Digest, int]
    _: KW_ONLY
    payload_space_bytes: int
    make_room: Callable[[int], Awaitable[None]]
    on_kept: Callable[[Digest], None]
    on_gone: Callable[[Digest], None]

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes.values())

    def size(self, digest: Digest) -> int | None:
        return self.sizes.get(digest)

    def digests(self) -> frozenset[Digest]:
        return frozenset(self.sizes)

    async def reserve(self, num_bytes: int) -> None:
        """Make room for a payload; concurrent ones may exceed the bound."""
        missing = self.used_bytes + num_bytes - self.payload_space_bytes
        if missing > 0:
            await self.make_room(missing)
        if self.used_bytes + num_bytes > self.payload_space_bytes:
            raise StoreFull(
                f"{num_bytes} more bytes of payloads would exceed payload_space_bytes = {self.payload_space_bytes};"
                f" {self.used_bytes} are in the bucket and nothing more can be deleted now",
                action="raise payload_space_bytes at the coordinator, or repeat after the stated delay",
                retry_after_s=30.0,
            )

    async def keep(self, digest: Digest, path: Path) -> None:
        if digest in self.sizes:
            return
        size = (await asyncio.to_thread(path.stat)).st_size
        await self.objects.put(digest, path)
        self.sizes[digest] = size
        self.on_kept(digest)

    async def erase(self, digest: Digest) -> int:
        if digest not in self.sizes:
            return 0
        await self.objects.delete(digest)
        return self._forget(digest)

    async def set_aside(self, digest: Digest) -> None:
        if digest in self.sizes:
            can_move = self.sizes[digest] <= MOVED_BYTES
            await (self.objects.set_aside if can_move else self.objects.delete)(digest)
            self._forget(digest)

    def _forget(self, digest: Digest) -> int:
        self.on_gone(digest)
        return self.sizes.pop(digest)

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        there = [digest for digest in digests if digest in self.sizes]
        signed = dict(zip(there, await self.objects.urls(there), strict=True))
        return [signed.get(digest, "") for digest in digests]
