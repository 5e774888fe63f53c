"""Certificates that are no longer accepted: a file of serial numbers, looked at on each call.

Guarantees: a serial that was read stays refused until a readable file without it replaces it; a file that is gone or
damaged takes nothing back. Format: ASCII, one hexadecimal serial a line, `#` begins a comment.
"""

from __future__ import annotations

import logging
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.identity.credentials import stamp_of

_LOG = logging.getLogger(__name__)


def parse_serials(text: str) -> frozenset[int]:
    """Read the file's text.

    Raises:
        ValueError: a line is not a hexadecimal number.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(int(line, 16) for line in lines if line)


class Revocations:
    """The serials of one file."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read.
        """
        self._path = path
        self._stamp = stamp_of(path)
        try:
            self._serials = parse_serials(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError("tls.revoked", f"cannot read {path}: {error}", action="an empty file is none") from error

    def __contains__(self, serial: object) -> bool:
        """Whether a serial is revoked now."""
        return serial in self.current()

    def current(self) -> frozenset[int]:
        """The serials that are revoked now."""
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._serials = parse_serials(self._path.read_text(encoding="ascii"))
            except (OSError, ValueError) as error:
                _LOG.error("the changed list of revoked certificates is not taken, the old one stays: %s", error)
            else:
                _LOG.info("%d certificates are revoked", len(self._serials))
        return self._serials
