"""Waits for the store: for its server, or the active coordinator's end.

The lock ends with the holder's process, or seconds after its host is gone. A refusal before the first session is an
operator's error; later errors are retried.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from heterorl.common.errors import DiskFull, OperatorError, StoreHeld, StoreLost
from heterorl.coordinator.store.postgres.postgres_engine import PostgresEngine, connect, take, try_lock

_LOG = logging.getLogger(__name__)
ASK_EVERY_S = 0.5


class Standby:
    """A wait for the store at a url.

    `wait` belongs to its own thread. `check` is called with the id of a store that has payloads, so that an unfit
    standby ends at once. If not patient, another active coordinator is an error.
    """

    def __init__(self, url: str, check: Callable[[str], None], *, is_patient: bool = True) -> None:
        self._url = url
        self._check = check
        self._is_patient = is_patient
        self._has_met = False
        self._is_fit = False
        """Whether a store with payloads was checked."""
        self._is_over = threading.Event()

    def give_up(self) -> None:
        """End the wait; callable from any thread."""
        self._is_over.set()

    def wait(self) -> PostgresEngine | None:
        """Take the store as soon as possible; None if given up.
        Raises ConfigError: the payloads are another store's; OperatorError: the server refuses; StoreHeld: another
        coordinator has it and the wait is not patient; CorruptStore: another schema."""
        problem = ""
        while not self._is_over.is_set():
            try:
                raw = self._session()
                engine = self._taken(raw)
            except (StoreLost, DiskFull) as error:
                if isinstance(error, DiskFull) and not self._is_patient:
                    raise
                if str(error) != problem:
                    problem = str(error)
                    _LOG.warning("the coordinator waits for the store: %s", problem)
                self._is_over.wait(ASK_EVERY_S)
                continue
            if engine is not None:
                return engine
            problem = ""
        return None

    def _session(self) -> psycopg.Connection[Any]:
        try:
            raw = connect(self._url)
        except OperatorError as error:
            if not (self._is_patient and self._has_met):
                raise
            raise StoreLost(error.args[0], action=error.action) from None
        self._has_met = True
        return raw

    def _taken(self, raw: psycopg.Connection[Any]) -> PostgresEngine | None:
        """Take the store; None if the session or the wait ended first."""
        try:
            self._check_store(raw)
            if not self._is_patient:
                return take(raw)
            if self._holds(raw):
                return PostgresEngine(raw)
        except BaseException as error:
            raw.close()
            # The wait was given up, so this is not an error.
            if isinstance(error, StoreHeld) and self._is_over.is_set():
                return None
            raise
        with contextlib.suppress(psycopg.Error):
            raw.close()
        return None

    def _check_store(self, raw: psycopg.Connection[Any]) -> None:
        with contextlib.suppress(psycopg.Error):
            # The tables are missing before the first coordinator, and payloads before its first version.
            row = None
            if not self._is_fit:
                row = raw.execute("SELECT id FROM store WHERE EXISTS (SELECT 1 FROM payloads)").fetchone()
            if row is not None:
                self._check(str(row[0]))
                self._is_fit = True

    def _holds(self, raw: psycopg.Connection[Any]) -> bool:
        """Whether the session got the lock before it or the wait ended."""
        try:
            while not self._is_over.is_set():
                if try_lock(raw):
                    return True
                self._is_over.wait(ASK_EVERY_S)
                self._check_store(raw)
        except psycopg.Error as error:
            _LOG.warning("the coordinator waits for the store: the session ended: %s", type(error).__name__)
        return False
