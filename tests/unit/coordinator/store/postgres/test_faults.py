"""Which of PostgreSQL's errors pass, which a person must end, and which are an operation's."""

from types import SimpleNamespace

import pytest

from heterorl.common.errors import CorruptStore, DiskFull, OperatorError, StoreLost
from heterorl.coordinator.store.database import Fault

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


class Session:
    """A session of a server that answers what it is asked about itself."""

    broken = False

    def __init__(self, *, version=150000, pid=7, encoding="UTF8", fsync="on", synchronous="on", schema="public"):
        # psycopg knows these two by itself.
        self.info = SimpleNamespace(server_version=version, backend_pid=7)
        self.answer = (pid, encoding, fsync, synchronous, schema)
        self.said, self.is_closed = [], False

    def execute(self, statement):
        self.said.append(statement)
        return SimpleNamespace(fetchone=lambda: self.answer)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(
    ("session", "words"),
    [
        (Session(version=140099), "PostgreSQL 14 is too old"),
        # PgBouncer, and any other pooler: the session that answers is not the one that was begun.
        (Session(pid=8), "store.url leads to a pooler of sessions"),
        (Session(encoding="SQL_ASCII"), "the database has encoding SQL_ASCII, fsync on and schema public"),
        (Session(encoding="LATIN1"), "the database has encoding LATIN1, fsync on and schema public"),
        (Session(fsync="off"), "the database has encoding UTF8, fsync off and schema public"),
        (Session(schema=None), "the database has encoding UTF8, fsync on and schema None"),
    ],
)
def test_server_that_keeps_no_store_is_refused_and_its_session_closed(monkeypatch, session, words):
    monkeypatch.setattr(psycopg, "connect", lambda url, **options: session)

    with pytest.raises(OperatorError, match=f"^{words}") as caught:
        postgres_engine.connect("postgresql:///run")

    assert caught.value.exit_code == 2
    assert session.is_closed


@pytest.mark.parametrize("synchronous", ["off", "local", "on", "remote_apply"])
def test_server_that_keeps_a_store_answers_for_every_commit(monkeypatch, synchronous):
    session = Session(synchronous=synchronous)
    monkeypatch.setattr(psycopg, "connect", lambda url, **options: session)

    assert postgres_engine.connect("postgresql:///run") is session
    assert not session.is_closed
    # A value that waits for more than this server's disk stays.
    assert ("SET synchronous_commit = on" in session.said) is (synchronous in ("off", "local"))
