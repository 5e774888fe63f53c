"""The objects of one run in a bucket; what goes wrong is said without addresses and credentials.

    PREFIX/run                  the store whose rows name these payloads
    PREFIX/blobs/ab/DIGEST      payloads; a name appears with all its bytes or not at all
    PREFIX/incoming/DIGEST      what a learner put there itself; no payload before the coordinator has verified it
    PREFIX/damaged/DIGEST       payloads whose bytes changed; for a person to look at, never served

Guarantees: no text of the library leaves this module, since it quotes addresses; a call that the store does not answer
ends within a minute. Needs the package obstore.
"""

from __future__ import annotations

import asyncio
import configparser
import datetime
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import Busy, ConfigError, DependencyMissing
from heterorl.common.types.common import Digest
from heterorl.common.types.digests import file_name, is_digest
from heterorl.coordinator.store.bucket.config import BucketConfig
from heterorl.coordinator.store.files import BUSY_S, typed_error, write_all

if TYPE_CHECKING:
    from obstore.store import S3Store

WHOLE_BYTES = 16 << 20
"""Largest payload that one request puts, which creates and never replaces; larger ones go in parts of this size."""
PARTS_AT_ONCE = 4
READ_BYTES = 1 << 20
MAX_CREDENTIALS_BYTES = 1 << 16
_RETRIES: dict[str, Any] = {
    "max_retries": 4,
    "retry_timeout": datetime.timedelta(seconds=40),
    "backoff": {
        "init_backoff": datetime.timedelta(seconds=0.1),
        "max_backoff": datetime.timedelta(seconds=5),
        "base": 2,
    },
}


class Objects:
    """Payloads by digest, below one prefix."""

    def __init__(self, config: BucketConfig, *, run_id: str) -> None:
        """Prepare; nothing is asked yet.

        Raises:
            DependencyMissing: obstore is not installed.
            ConfigError: the credentials cannot be read.
        """
        self._library, self._errors = _obstore()
        self._lifetime = datetime.timedelta(seconds=config.url_lifetime_s)
        self._store: S3Store = self._library.store.S3Store(
            config.bucket,
            prefix=config.prefix or run_id,
            region=config.region,
            client_options={"allow_http": config.endpoint.startswith("http://"), "timeout": "60 seconds"},
            retry_config=_RETRIES,
            **({"endpoint": config.endpoint} if config.endpoint else {}),
            **({} if config.credentials_file is None else read_credentials(config.credentials_file)),
        )

    async def claim(self, owner: str) -> None:
        """Make sure that the prefix belongs to the store of this name.

        Raises:
            ConfigError: it is another one's.
            Busy: the bucket does not answer, or refuses.
        """
        async with self._asked("be written to"):
            try:
                await self._library.put_async(self._store, "run", owner.encode(), mode="create")
            except self._errors.AlreadyExistsError:
                found = bytes(await (await self._library.get_async(self._store, "run")).bytes_async())
                if found != owner.encode():
                    raise ConfigError(
                        "payloads.prefix", "has the payloads of another store", action="choose another prefix"
                    ) from None

    async def sizes(self) -> dict[Digest, int]:
        """Every payload that is there, and its bytes."""
        async with self._asked("be listed"):
            found = await self._library.list(self._store, prefix="blobs").collect_async()
        names = ((entry["path"].rpartition("/")[2], entry["size"]) for entry in found)
        return {Digest(name): int(size) for name, size in names if is_digest(name)}

    async def put(self, digest: Digest, path: Path) -> None:
        """Store a file; what is there under this name already stays, or is replaced by the same bytes."""
        size = (await asyncio.to_thread(path.stat)).st_size
        async with self._asked("take a payload"):
            if size > WHOLE_BYTES:
                await self._library.put_async(
                    self._store, _key(digest), path, chunk_size=WHOLE_BYTES, max_concurrency=PARTS_AT_ONCE
                )
                return
            try:
                data = await asyncio.to_thread(path.read_bytes)
                await self._library.put_async(self._store, _key(digest), data, mode="create")
            except self._errors.AlreadyExistsError:
                return

    async def fetch(self, digest: Digest, path: Path) -> None:
        """Write a payload into a file, whose bytes nobody has compared with their name yet.

        Raises:
            FileNotFoundError: it is not there.
            StoreFull, CorruptStore: the disk refuses.
        """
        async with self._asked("be read"):
            answer = await self._library.get_async(self._store, _key(digest))
            try:
                file = await asyncio.to_thread(path.open, "wb", buffering=0)
            except OSError as error:
                raise typed_error(error) from error
            with file:
                async for block in answer.stream(min_chunk_size=READ_BYTES):
                    await asyncio.to_thread(write_all, file, bytes(block))

    async def delete(self, digest: Digest) -> None:
        """Delete a payload, there or not."""
        async with self._asked("delete a payload"):
            await self._library.delete_async(self._store, _key(digest))

    # what learners put

    async def put_url(self, digest: Digest) -> str:
        """An address at which whoever has it may put bytes for a while."""
        async with self._asked("be signed for"):
            return str(await self._library.sign_async(self._store, "PUT", _incoming(digest), self._lifetime))

    async def incoming_size(self, digest: Digest) -> int:
        """Bytes of what was put as a payload.

        Raises:
            FileNotFoundError: nothing was.
        """
        async with self._asked("be read"):
            return int((await self._library.head_async(self._store, _incoming(digest)))["size"])

    async def incoming(self, digest: Digest) -> AsyncIterator[bytes]:
        """Yield what was put as a payload.

        Raises:
            FileNotFoundError: nothing was.
        """
        async with self._asked("be read"):
            answer = await self._library.get_async(self._store, _incoming(digest))
            async for block in answer.stream(min_chunk_size=READ_BYTES):
                yield bytes(block)

    async def list_incoming(self) -> dict[Digest, float]:
        """All that was put, and the wall time of it."""
        async with self._asked("be listed"):
            found = await self._library.list(self._store, prefix="incoming").collect_async()
        names = ((entry["path"].rpartition("/")[2], entry["last_modified"].timestamp()) for entry in found)
        return {Digest(name): float(at) for name, at in names if is_digest(name)}

    async def delete_incoming(self, digest: Digest) -> None:
        """Delete what was put as a payload, there or not."""
        async with self._asked("delete what was put"):
            await self._library.delete_async(self._store, _incoming(digest))

    async def set_aside(self, digest: Digest) -> None:
        """Give a payload a name under which it is never served."""
        async with self._asked("move a payload"):
            try:
                await self._library.rename_async(self._store, _key(digest), f"damaged/{file_name(digest)}")
            except FileNotFoundError:
                return

    async def urls(self, digests: Sequence[Digest]) -> list[str]:
        """Addresses that whoever has them may read for a while. Signed here; the bucket is not asked."""
        keys = [_key(digest) for digest in digests]
        async with self._asked("be signed for"):
            return list(await self._library.sign_async(self._store, "GET", keys, self._lifetime)) if keys else []

    @asynccontextmanager
    async def _asked(self, action: str) -> AsyncIterator[None]:
        try:
            yield
        except FileNotFoundError:
            # The library's own names the address.
            raise FileNotFoundError("the payload is not in the bucket") from None
        except (PermissionError, self._errors.PermissionDeniedError, self._errors.UnauthenticatedError):
            problem = f"the bucket of the payloads cannot {action}: it refuses the credentials"
            raise Busy(problem, retry_after_s=BUSY_S) from None
        except self._errors.BaseError as error:
            problem = f"the bucket of the payloads cannot {action} now ({type(error).__name__})"
            raise Busy(problem, retry_after_s=BUSY_S) from None


def read_credentials(path: Path) -> dict[str, str]:
    """Keys of a file in the form of ~/.aws/credentials.

    Raises:
        ConfigError: it cannot be read, others may read it, or it has no keys. Its content is never quoted.
    """
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
            found["session_token"] = token
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}") from None
    except (configparser.Error, KeyError, UnicodeDecodeError):
        problem = f"{path} has no section default with aws_access_key_id and aws_secret_access_key"
        raise ConfigError(key, problem) from None
    return found


def _key(digest: Digest) -> str:
    # The one place where a digest becomes a key: whatever else a peer writes there names no object.
    name = file_name(digest)
    return f"blobs/{name[:2]}/{name}"


def _incoming(digest: Digest) -> str:
    return f"incoming/{file_name(digest)}"


def _obstore() -> tuple[Any, Any]:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise DependencyMissing("obstore", "s3") from None
    return obstore, obstore.exceptions
