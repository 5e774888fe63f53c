"""What sites are told when they say that they live: those who wait for the store together share one operation.

A thousand sites ask hundreds of times a second, and each operation's statements are round trips where the store is a
server. So the more sites wait, the less each of them costs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from heterorl.common.types.run import Command
from heterorl.coordinator.config import CoordinatorConfig
from heterorl.coordinator.evaluations import plan as evaluations
from heterorl.coordinator.sites import watermark
from heterorl.coordinator.sites.sites import Holder
from heterorl.coordinator.store.connection import Connection
from heterorl.coordinator.store.database import Database, get_meta
from heterorl.coordinator.versions import lineage

Commands = dict[Holder, tuple[Command, ...]]


@dataclass(slots=True)
class _Round:
    holders: set[Holder] = field(default_factory=set)
    answers: asyncio.Future[Commands] | None = None


class Beats:
    """Asks the store on behalf of all who wait."""

    def __init__(self, database: Database, config: CoordinatorConfig) -> None:
        self._database = database
        self._config = config
        self._lock = threading.Lock()
        self._open: _Round | None = None
        """Whoever comes joins it, until the store's thread takes it up."""

    async def commands(self, holder: Holder) -> tuple[Command, ...] | None:
        """What a holder is told; None where it is not registered.

        Raises:
            StoreFull, CorruptStore, Draining: as `Database.run`.
        """
        with self._lock:
            mine = self._open = self._open or _Round()
            mine.holders.add(holder)
        if mine.answers is None:
            mine.answers = self._database.submit(lambda connection: self._answer(connection, mine))
        # A call that ends leaves the others' answer alone.
        return (await asyncio.shield(mine.answers)).get(holder)

    def _answer(self, connection: Connection, asked: _Round) -> Commands:
        with self._lock:
            if self._open is asked:
                self._open = None
        return commands_of(connection, asked.holders, self._config)


def commands_of(connection: Connection, holders: Iterable[Holder], config: CoordinatorConfig) -> Commands:
    """What holders are told; those that are not registered are left out."""
    wide = watermark.wide_gaps(connection, holders)
    if config.is_finished(lineage.head_version(connection)):
        # The last version is to be evaluated: who drains does that first.
        last = (Command.DRAIN if evaluations.is_pending(connection) else Command.STOP,)
        return dict.fromkeys(wide, last)
    draining = (Command.DRAIN,) if get_meta(connection, "draining") else ()
    # Registering again, it says what it can still push, and the watermark passes over the rest.
    return {holder: (*draining, Command.REGISTER) if is_wide else draining for holder, is_wide in wide.items()}
