"""Logging for people (console) or machines (one JSON object a line), in UTC, with who says it.

In the style for machines our records, Python's warnings and uncaught errors are objects. What libraries, C++ code and
child processes write to standard error themselves stays as it is, between these lines.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Literal

FIELDS_VARIABLE = "HETERORL_LOG_FIELDS"
"""Set for child processes where the style is for machines: the bound fields as JSON."""
_LIBRARIES = ("httpx", "huggingface_hub", "transformers")
"""Chatty at INFO about things that a person who runs a node cannot act on; two of them add handlers of their own."""
_fields: dict[str, str] = {}


def one_line(text: str) -> str:
    """A text with escapes in place of what a terminal or a reader of lines would obey."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the bound fields, the traceback when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
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
    """A line for people, its time in UTC: logs of several sites can be laid beside each other."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 - logging's
        """The time of a record."""
        return utc(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        """The line: one, whatever a peer put into its texts; a traceback follows on lines of its own."""
        record.message = one_line(record.message)
        return super().formatMessage(record)


def utc(seconds: float) -> str:
    """ISO 8601 of an instant in seconds since the epoch, to the millisecond, ending in Z."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(
    *, level: str = "INFO", style: Literal["console", "json"] = "console", fields: Mapping[str, str] | None = None
) -> None:
    """Send all logs of this process to standard error in one style; once a process."""
    if style == "json":
        os.environ[FIELDS_VARIABLE] = "{}"
        logging.captureWarnings(True)
        sys.excepthook = lambda kind, error, trace: logging.getLogger("python").critical(
            "%s", error or kind.__name__, exc_info=(kind, error, trace)
        )
        threading.excepthook = lambda args: logging.getLogger("python").critical(
            "in thread %s", args.thread.name if args.thread else "?",
            exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
        )  # fmt: skip
    _start(level, style)
    bind(**dict(fields or {}))


def configure_as_parent(*, level: str = "INFO") -> None:
    """The style and fields of the service that started this process."""
    given = os.environ.get(FIELDS_VARIABLE)
    _start(level, "console" if given is None else "json")
    if given is not None:
        _fields.update(json.loads(given))


def is_for_machines() -> bool:
    """Whether this process logs JSON."""
    return FIELDS_VARIABLE in os.environ


def bind(**fields: str) -> None:
    """Say with every line from now on, for example, which site this is; empty values are left out."""
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
        # They would print each line a second time, or keep it from us.
        logger.__class__ = _Plain
    if style == "json" or not sys.stderr.isatty():
        # Read when transformers is imported: bars are for screens.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _Plain(logging.Logger):
    """A library's logger that has no handler of its own."""

    propagate = property(lambda _: True, lambda _, __: None)

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's
        """Not here: the process has one."""
