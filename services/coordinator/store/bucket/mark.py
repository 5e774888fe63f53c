"""The mark of a prefix: the store whose rows name the payloads there, and who alone may delete them.

    PREFIX/run    the name of that store

Guarantees: a prefix has one mark at any time, as it is made and changed by conditional puts; whoever finds another
store's name in it puts and deletes nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable

from heterorl.common.errors import ConfigError, CorruptStore
from heterorl.coordinator.store.bucket.client import BucketClient

KEY = "run"
TRIES = 3


class Mark:
    """The mark of one prefix, for one store."""

    def __init__(self, client: BucketClient, owner: str, *, on_lost: Callable[[str], None]) -> None:
        """Prepare; `claim` comes first.

        Args:
            client: of the prefix.
            owner: the name of the store.
            on_lost: told why, when another store has the prefix.
        """
        self._client = client
        self._owner = owner
        self._on_lost = on_lost

    async def claim(self, *, take_over: str) -> None:
        """Put the mark where none is, or in place of the one of the store `take_over`.

        Raises:
            ConfigError: the prefix is another store's.
            Busy: the bucket does not answer, or refuses.
        """
        for _ in range(TRIES):
            if await self._client.create(KEY, self._owner.encode()):
                return
            data, tag = await self._client.small(KEY)
            found = data.decode("utf-8", "replace")
            if found == self._owner:
                return
            if not take_over or found != take_over:
                raise ConfigError(
                    "payloads.prefix",
                    f"has the payloads of another store, {found[:64]!r}",
                    action="name another prefix; or, where that store never runs again, set payloads.take_over to"
                    " its name",
                )
            await self._client.replace(KEY, self._owner.encode(), tag=tag)
        raise ConfigError("payloads.prefix", "is taken by several stores at once", action="let one of them run")

    async def check(self) -> None:
        """Look whether the prefix is still this store's.

        Raises:
            CorruptStore: it is not; the process must end.
            Busy: the bucket does not answer, or refuses.
        """
        try:
            data, _ = await self._client.small(KEY)
        except FileNotFoundError:
            data = b""
        if data != self._owner.encode():
            problem = "another store has taken the prefix of the payloads in the bucket, or its mark is gone"
            self._on_lost(problem)
            raise CorruptStore(problem, action="see which coordinators name this prefix: one store alone may")
