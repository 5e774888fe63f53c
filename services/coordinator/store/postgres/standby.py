"""Waiting for the store of a coordinator that may die: the lock is asked for until it is given, or the wait is over.

A session of PostgreSQL keeps the lock as long as its process lives: it ends with the process at once, and within
seconds after its host is gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import psycopg

from heterorl.common.errors import OperatorError
from heterorl.coordinator.store.postgres.engine import PostgresEngine, connect, try_lock

_LOG = logging.getLogger(__name__)
ASK_EVERY_S = 0.5


class Standby:
    """A wait for the store at a url. `wait` belongs to a thread of its own.

    `check` is asked about a store with payloads before the wait: a standby that could not serve it ends at once.
    """

    def __init__(self, url: str, check: Callable[[str], None]) -> None:
        self._url = url
        self._check = check
        self._is_over = threading.Event()

    def give_up(self) -> None:
        """End the wait; callable from any thread."""
        self._is_over.set()

    def wait(self) -> PostgresEngine | None:
        """Take the store as soon as nobody has it; None when the wait was given up.

        Raises:
            ConfigError: the payloads at hand are not the store's.
            CorruptStore: the store was written by another schema.
        """
        problem = ""
        while not self._is_over.is_set():
            try:
                raw = connect(self._url)
            except OperatorError as error:
                # A server that restarts is waited for, as the coordinator that holds it is.
                if str(error) != problem:
                    problem = str(error)
                    _LOG.warning("standing by: %s", problem)
                self._is_over.wait(ASK_EVERY_S)
                continue
            problem = ""
            try:
                self._check_store(raw)
            except BaseException:
                raw.close()
                raise
            if self._holds(raw):
                return PostgresEngine(raw)
            with contextlib.suppress(psycopg.Error):
                raw.close()
        return None

    def _check_store(self, raw: psycopg.Connection[tuple[object, ...]]) -> None:
        with contextlib.suppress(psycopg.Error):
            # None of the tables is there before the first coordinator has begun.
            row = raw.execute("SELECT id FROM store WHERE EXISTS (SELECT 1 FROM payloads)").fetchone()
            if row is not None:
                self._check(str(row[0]))

    def _holds(self, raw: psycopg.Connection[tuple[object, ...]]) -> bool:
        """Whether the session got the lock; False when it ended, or the wait did."""
        try:
            while not self._is_over.is_set():
                if try_lock(raw):
                    return True
                self._is_over.wait(ASK_EVERY_S)
        except psycopg.Error as error:
            _LOG.warning("standing by: the session ended: %s", type(error).__name__)
        return False
