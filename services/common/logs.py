"""Logging for people (console) or machines (one JSON object a line)."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal


class ConsoleFormatter(logging.Formatter):
    """One line a record, whatever a peer put into its texts; tracebacks follow on lines of their own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Render the line."""
        record.message = one_line(record.message)
        return super().formatMessage(record)


def one_line(text: str) -> str:
    """A text with escapes in place of what a terminal or a reader of lines would obey."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(*, level: str = "INFO", style: Literal["console", "json"] = "console") -> None:
    """Send all logs of this process to standard error in one style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if style == "json" else ConsoleFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Both are chatty at INFO about things that a person who runs a node cannot act on.
    for name in ("httpx", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
