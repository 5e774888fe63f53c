"""Logs in UTC as console lines or JSON lines, with bound fields.

In JSON style, log records, Python warnings and uncaught errors are objects. Text that libraries, C++ code and child
processes write to standard error stays as it is, between these lines.
"""

import datetime
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Literal

FIELDS_VARIABLE = "HETERORL_LOG_FIELDS"
"""Environment variable for child processes in JSON style: the bound fields as JSON."""
RARELY_S = 60.0
"""Seconds between two lines of Rarely about one kind."""
_LIBRARIES = ("httpx", "httpx2", "huggingface_hub", "transformers")
"""Libraries whose INFO lines do not help an operator; two of them add handlers of their own."""
_fields: dict[str, str] = {}


def one_line(text: str) -> str:
    """A text with escapes in place of control characters and line ends."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: UTC time, level, logger, message, fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class ConsoleFormatter(logging.Formatter):
    """A line for people, with UTC times that sites can compare."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 - logging's
        return utc(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        """The line, with control characters of a peer's text escaped."""
        record.message = one_line(record.message)
        return super().formatMessage(record)


class Rarely:
    """Warnings of a kind, one a minute, with the number left out."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        self._logger, self._now = logger, now
        self._said: dict[str, tuple[float, int]] = {}

    def warn(self, kind: str, message: str, *args: object, count: int = 1) -> None:
        """Log events of a kind, or count them for its next line."""
        now = self._now()
        said_at, num_left = self._said.get(kind, (-math.inf, 0))
        if now - said_at < RARELY_S:
            self._said[kind] = (said_at, num_left + count)
            return
        self._said[kind] = (now, 0)
        more = f" ({num_left} more since the last such line)" if num_left else ""
        line = message + "%s"
        self._logger.warning(line, *args, more)


def utc(seconds: float) -> str:
    """ISO 8601 of seconds since the epoch, to the millisecond, with Z."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(
    *, level: str = "INFO", style: Literal["console", "json"] = "console", fields: Mapping[str, str] | None = None
) -> None:
    """Send all logs of a process to standard error; call it once."""
    if style == "json":
        os.environ[FIELDS_VARIABLE] = "{}"
        logging.captureWarnings(True)
        sys.excepthook = lambda kind, error, trace: logging.getLogger("python").critical(
            "%s", error or kind.__name__, exc_info=(kind, error, trace)
        )
        threading.excepthook = lambda args: logging.getLogger("python").critical(
            "thread %s ended by an exception", args.thread.name if args.thread else "?",
            exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
        )  # fmt: skip
    _start(level, style)
    bind(**dict(fields or {}))


def configure_as_parent(*, level: str = "INFO") -> None:
    """Take style and fields from the service that started this process."""
    given = os.environ.get(FIELDS_VARIABLE)
    _start(level, "console" if given is None else "json")
    if given is not None:
        _fields.update(json.loads(given))


def is_for_machines() -> bool:
    """Whether this process logs JSON."""
    return FIELDS_VARIABLE in os.environ


def bind(**fields: str) -> None:
    """Add fields, such as the site, to later lines; omits empty values."""
    _fields.update({name: value for name, value in fields.items() if value})
    if is_for_machines():
        os.environ[FIELDS_VARIABLE] = json.dumps(_fields)


def _start(level: str, style: Literal["console", "json"]) -> None:
    handler = logging.StreamHandler()
    form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter(form))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        # Their own handlers would print each line twice, or hide it.
        logger.__class__ = _Plain
    if style == "json" or not sys.stderr.isatty():
        # transformers reads it at import: progress bars are for terminals.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _Plain(logging.Logger):
    """A library's logger without a handler of its own."""

    propagate = property(lambda _: True, lambda _, __: None)

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's
        """Ignored: the process has one handler."""
