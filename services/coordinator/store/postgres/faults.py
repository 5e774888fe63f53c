"""What PostgreSQL's errors say of the store: a person must act, or it passes, or an operation made a mistake.

A session that cannot be begun has no code of PostgreSQL's: libpq gives the server's words alone, in the server's
language. What those do not prove to be a refusal is taken for something that passes, and is asked again.
"""

from __future__ import annotations

import psycopg
from psycopg import errors

from heterorl.common.errors import CorruptStore, DiskFull, HeterorlError, OperatorError, StoreLost
from heterorl.coordinator.store.engine import Fault

_OPERATION_ERRORS = (errors.IntegrityError, errors.ProgrammingError, errors.DataError, errors.NotSupportedError)
_DAMAGE = (
    errors.InternalError_,
    errors.DataCorrupted,
    errors.IndexCorrupted,
    errors.IoError,
    errors.UndefinedFile,
    errors.DuplicateFile,
)
"""XX000 to XX002, and what class 58 says of the database's own files. Not psycopg's InternalError, which has class 25
too: a server that is read-only for a while, as managed ones are while their disk is full, has lost nothing."""
_REFUSALS = (
    " does not exist",
    "authentication failed",
    "no password supplied",
    "pg_hba.conf",
    "permission denied",
    "not permitted to log in",
    "certificate",
    "does not support ssl",
    "invalid integer value",
    " value: ",
)
"""Parts of what a server or libpq says when it will say the same again."""


def of_connecting(error: psycopg.Error) -> HeterorlError:
    """Why no session began; never with the url, which libpq repeats where it cannot read it."""
    if isinstance(error, psycopg.ProgrammingError):
        return OperatorError("store.url is none that libpq reads", action="compare it with `[store]` in operate.md")
    words = brief(error)
    if any(part in words.lower() for part in _REFUSALS):
        return OperatorError(
            f"PostgreSQL refuses the session: {words}",
            action="check store.url, the server and the password (PGPASSFILE or PGPASSWORD)",
        )
    return StoreLost(f"PostgreSQL cannot be reached: {words}")


def of_opening(error: psycopg.Error, *, is_broken: bool) -> HeterorlError:
    """Why a session could not take the store."""
    if isinstance(error, errors.DiskFull):
        return DiskFull("PostgreSQL's data directory")
    if isinstance(error, errors.LockNotAvailable):
        return StoreLost(
            "another session keeps the store's tables locked",
            action="asked again; pg_locks names the session: end it, or let it end",
        )
    if not is_broken and isinstance(error, _OPERATION_ERRORS):
        return OperatorError(
            f"PostgreSQL refuses the store's tables: {brief(error)}",
            action="the user of store.url must own the database or schema, and nobody else's tables may be in it",
        )
    if not is_broken and isinstance(error, _DAMAGE):
        return CorruptStore(f"the store in PostgreSQL cannot be opened: {brief(error)}")
    return StoreLost(f"PostgreSQL gave the store up: {brief(error)}")


def of_statement(error: Exception, *, is_broken: bool) -> Fault:
    """What an error of a coordinator that has the store says."""
    if is_broken:
        return Fault.LOST
    if isinstance(error, errors.DiskFull):
        return Fault.FULL
    if isinstance(error, _OPERATION_ERRORS):
        return Fault.OPERATION
    return Fault.FATAL if isinstance(error, _DAMAGE) else Fault.LOST


def brief(error: psycopg.Error) -> str:
    """The error's words in one line."""
    return " ".join(str(error).split())[:300]
