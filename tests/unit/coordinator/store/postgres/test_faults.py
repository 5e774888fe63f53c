"""Which of PostgreSQL's errors pass, which a person must end, and which are an operation's."""

import pytest

from heterorl.common.errors import CorruptStore, DiskFull, OperatorError, StoreLost
from heterorl.coordinator.store.database_engine import Fault

psycopg = pytest.importorskip("psycopg")

from psycopg import errors  # noqa: E402 - needs psycopg

from heterorl.coordinator.store.postgres import postgres_engine  # noqa: E402

AT = 'connection to server at "db.example", port 5432 failed: '


@pytest.mark.parametrize(
    "words",
    [
        f"{AT}Connection refused",
        f"{AT}timeout expired",
        f"{AT}FATAL:  the database system is starting up",
        f"{AT}FATAL:  the database system is shutting down",
        f"{AT}FATAL:  sorry, too many clients already",
        f"{AT}session is read-only",
        f"{AT}server closed the connection unexpectedly",
        "failed to resolve host 'db.example': [Errno -2] Name or service not known",
        # In whatever language a server speaks: not understood, so asked again.
        f"{AT}FATAL:  das Datenbanksystem startet",
    ],
)
def test_server_that_is_away_or_busy_is_asked_again(words):
    error = postgres_engine.error_of_connecting(psycopg.OperationalError(words))

    assert type(error) is StoreLost
    assert error.exit_code == 1
    assert " ".join(words.split()) in str(error)


@pytest.mark.parametrize(
    "words",
    [
        f'{AT}FATAL:  password authentication failed for user "me"',
        f"{AT}fe_sendauth: no password supplied",
        f'{AT}FATAL:  no pg_hba.conf entry for host "192.0.2.1", user "me", database "run", SSL encryption',
        f'{AT}FATAL:  database "run" does not exist',
        f'{AT}FATAL:  role "me" is not permitted to log in',
        f"{AT}SSL error: certificate verify failed",
        f"{AT}server does not support SSL, but SSL was required",
        'invalid sslmode value: "sure"',
    ],
)
def test_what_a_server_refuses_is_for_a_person(words):
    error = postgres_engine.error_of_connecting(psycopg.OperationalError(words))

    assert type(error) is OperatorError
    assert error.exit_code == 2


def test_url_that_cannot_be_read_is_not_repeated():
    error = postgres_engine.error_of_connecting(psycopg.ProgrammingError('invalid URI: "postgresql://me:hunter2@"'))

    assert type(error) is OperatorError
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("error", "is_broken", "of_opening", "of_statement"),
    [
        (errors.AdminShutdown(), False, StoreLost, Fault.LOST),
        (errors.LockNotAvailable(), False, StoreLost, Fault.LOST),
        (errors.QueryCanceled(), False, StoreLost, Fault.LOST),
        # A standby server, or one that its disk made read-only: it writes again later, and lost nothing.
        (errors.ReadOnlySqlTransaction(), False, StoreLost, Fault.LOST),
        (errors.InFailedSqlTransaction(), False, StoreLost, Fault.LOST),
        (errors.SystemError(), False, StoreLost, Fault.LOST),
        (psycopg.OperationalError("the connection is lost"), True, StoreLost, Fault.LOST),
        # Whatever a session says last: it is the session that ended.
        (errors.UniqueViolation(), True, StoreLost, Fault.LOST),
        (errors.DiskFull(), False, DiskFull, Fault.FULL),
        (errors.InsufficientPrivilege(), False, OperatorError, Fault.OPERATION),
        (errors.UniqueViolation(), False, OperatorError, Fault.OPERATION),
        (errors.InternalError_(), False, CorruptStore, Fault.FATAL),
        (errors.DataCorrupted(), False, CorruptStore, Fault.FATAL),
        (errors.IndexCorrupted(), False, CorruptStore, Fault.FATAL),
        (errors.IoError(), False, CorruptStore, Fault.FATAL),
        (errors.UndefinedFile(), False, CorruptStore, Fault.FATAL),
        (errors.DuplicateFile(), False, CorruptStore, Fault.FATAL),
    ],
)
def test_only_damage_is_called_so(error, is_broken, of_opening, of_statement):
    assert type(postgres_engine.error_of_opening(error, is_broken=is_broken)) is of_opening
    assert postgres_engine.fault_of_statement(error, is_broken=is_broken) is of_statement
