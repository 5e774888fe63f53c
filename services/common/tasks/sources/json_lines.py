"""Lines of a file, each one JSON object, held in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3

from heterorl.common.errors import ConfigError

MAX_LINE_BYTES = 1 << 20


class NoText(dict[str, Any]):
    """A row with half a surrogate pair, which a filter may drop."""


class JsonLines:
    """Lines of a file that are not blank; implements Rows."""

    is_strict = True

    def __init__(self, key: str, path: Path) -> None:
        """Read the file that `key` names; raises ConfigError if unreadable."""
        self._key, self._path = key, path
        self._lines: list[bytes] = []
        digest = blake3.blake3()
        try:
            with path.open("rb") as file:
                for line in iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""):
                    if len(line) > MAX_LINE_BYTES:
                        problem = f"{self.place(len(self._lines))}: longer than {MAX_LINE_BYTES} bytes"
                        raise ConfigError(key, problem, action="shorten the line or remove it")
                    self._lines.append(line)
                    digest.update(line)
        except OSError as error:
            problem = f"cannot read {path}: {error.strerror}"
            raise ConfigError(key, problem, action="check the path, and that this user can read the file") from error
        self.digest = digest.hexdigest()
        if not any(map(bytes.strip, self._lines)):
            raise ConfigError(key, f"{path} has no prompts", action="name a file with one JSON object a line")

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, self[number]) for number, line in enumerate(self._lines) if line.strip())

    def __getitem__(self, number: int) -> dict[str, Any]:
        line = self._lines[number]
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._refused(number, f" is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._refused(number, " is JSON, but no object")
        try:
            if b"\\u" in line or not line.isascii():
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return NoText(row)
        return row

    def _refused(self, number: int, problem: str) -> ConfigError:
        action = "write one JSON object a line as UTF-8, or remove the line"
        return ConfigError(self._key, f"{self.place(number)}{problem}"[:300], action=action)

    def place(self, number: int) -> str:
        return f"{self._path}, line {number + 1}"
