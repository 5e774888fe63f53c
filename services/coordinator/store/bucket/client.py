"""Requests to one prefix of a bucket, by key; what goes wrong is said without addresses and credentials.

Guarantees: no text of the library leaves this module, since it quotes addresses. A request that the store does not
answer ends within a minute or two. A read has no such end while bytes arrive: it goes range by range, and what breaks
off is asked for again from the byte that is missing, as long as each attempt brings some. Needs the package obstore.
"""

from __future__ import annotations

import configparser
import datetime
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterorl.common.errors import Busy, ConfigError, DependencyMissing
from heterorl.coordinator.store.bucket.config import BucketConfig
from heterorl.coordinator.store.files import BUSY_S

if TYPE_CHECKING:
    from obstore.store import S3Store

PART_BYTES = 16 << 20
"""Of a file that is put in parts; what is not larger is put by one request."""
PARTS_AT_ONCE = 4
RANGE_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
REQUEST_S = 120.0
"""For a request whose answer is short, with the bytes that it brings: a part needs 140 kB/s of the line."""
SILENCE_S = 20.0
"""For the next bytes of a read."""
RANGE_S = 600.0
"""For a range of a read; then it is asked for from where it is."""
_RETRIES: dict[str, Any] = {
    "max_retries": 4,
    "retry_timeout": datetime.timedelta(seconds=40),
    "backoff": {
        "init_backoff": datetime.timedelta(seconds=0.1),
        "max_backoff": datetime.timedelta(seconds=5),
        "base": 2,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object that was listed."""

    key: str
    num_bytes: int
    put_at: float
    """Wall time of its last change."""


class BucketClient:
    """One prefix of one bucket."""

    def __init__(self, config: BucketConfig, *, run_id: str) -> None:
        """Prepare; nothing is asked yet.

        Raises:
            DependencyMissing: obstore is not installed.
            ConfigError: the credentials cannot be read.
        """
        self._library, self._errors = _obstore()
        self._lifetime = datetime.timedelta(seconds=config.url_lifetime_s)
        where: dict[str, Any] = {
            "prefix": config.prefix or run_id,
            "region": config.region,
            "retry_config": _RETRIES,
            **({"endpoint": config.endpoint} if config.endpoint else {}),
            **({} if config.credentials_file is None else read_credentials(config.credentials_file)),
        }
        allow: dict[str, Any] = {"allow_http": config.endpoint.startswith("http://")}
        store = self._library.store.S3Store
        # The library's `timeout` counts a whole answer, its `read_timeout` the silence, also that of a store that waits
        # for the bytes of a put.
        self._store: S3Store = store(config.bucket, client_options={**allow, "timeout": _seconds(REQUEST_S)}, **where)
        reading = {"timeout": _seconds(RANGE_S), "read_timeout": _seconds(SILENCE_S)}
        self._reads: S3Store = store(config.bucket, client_options={**allow, **reading}, **where)

    async def create(self, key: str, data: bytes, *, action: str = "be written to") -> bool:
        """Put an object that is not there; False where one is."""
        async with self._asked(action):
            try:
                await self._library.put_async(self._store, key, data, mode="create")
            except self._errors.AlreadyExistsError:
                return False
        return True

    async def put_file(self, key: str, path: Path, *, action: str) -> None:
        """Put a file in parts, whatever is there under this key."""
        async with self._asked(action):
            await self._library.put_async(self._store, key, path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    async def small(self, key: str) -> bytes:
        """A short object.

        Raises:
            FileNotFoundError: it is not there.
        """
        async with self._asked("be read"):
            return bytes(await (await self._library.get_async(self._store, key)).bytes_async())

    async def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            FileNotFoundError: it is not there.
        """
        async with self._asked("be read"):
            return int((await self._library.head_async(self._store, key))["size"])

    async def read(self, key: str, *, offset: int, stop: int) -> AsyncIterator[bytes]:
        """Yield [offset, stop) of an object that has as many bytes.

        Raises:
            FileNotFoundError: it is not there.
        """
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

    async def entries(self, prefix: str) -> list[Entry]:
        """Every object below a prefix."""
        async with self._asked("be listed"):
            found = await self._library.list(self._store, prefix=prefix).collect_async()
        return [
            Entry(key=entry["path"], num_bytes=int(entry["size"]), put_at=float(entry["last_modified"].timestamp()))
            for entry in found
        ]

    async def delete(self, *keys: str) -> None:
        """Delete objects, there or not."""
        async with self._asked("delete a payload"):
            for key in keys:
                await self._library.delete_async(self._store, key)

    async def rename(self, key: str, target: str) -> None:
        """Give an object another key.

        Raises:
            FileNotFoundError: it is not there.
        """
        async with self._asked("move a payload"):
            await self._library.rename_async(self._store, key, target)

    async def urls(self, method: str, keys: Sequence[str]) -> list[str]:
        """Addresses at which whoever has them may do this for a while. Signed here; the bucket is not asked."""
        async with self._asked("be signed for"):
            return list(await self._library.sign_async(self._store, method, [*keys], self._lifetime)) if keys else []

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


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _obstore() -> tuple[Any, Any]:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise DependencyMissing("obstore", "s3") from None
    return obstore, obstore.exceptions


MAX_CREDENTIALS_BYTES = 1 << 16


def read_credentials(path: Path) -> dict[str, str]:
    """Keys of a file in the form of ~/.aws/credentials.

    Raises:
        ConfigError: it cannot be read, others may read it, or it has no keys.
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
