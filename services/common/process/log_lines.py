"""Wrap foreign lines as JSON objects: a program that reads them from standard input until its last writer is gone.

Run by its path, with the standard library alone. A line that begins with NUL holds the fields to add from then on; one
that is an object of ours already is passed on.
"""

import datetime
import json
import os

LONGEST = 1 << 16
_ERRORS = ("error:", "traceback", "fatal")


def wrap(line: bytes, fields: dict[str, str]) -> bytes:
    """A line as one JSON object; empty for an empty line. Of a progress bar, its last state."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2].rstrip()
    if not text:
        return b""
    if text.startswith('{"time":'):
        return text.encode() + b"\n"
    moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = "ERROR" if text.lower().startswith(_ERRORS) else "INFO"
    return json.dumps({"time": moment, "level": level, "logger": "stderr", "message": text, **fields}).encode() + b"\n"


def main() -> None:
    """Read, wrap, write."""
    fields: dict[str, str] = {}
    held = b""
    while data := os.read(0, LONGEST):
        *lines, held = (held + data).split(b"\n")
        if len(held) > LONGEST:
            lines, held = [*lines, held], b""
        for line in lines:
            if line.startswith(b"\0"):
                fields = json.loads(line[1:])
            else:
                os.write(2, wrap(line, fields))
    os.write(2, wrap(held, fields))


if __name__ == "__main__":
    main()
