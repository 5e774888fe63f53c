"""The demo's processes: their start and stop."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import tomli_w

from heterorl.common.errors import HeterorlError
from heterorl.common.process.threads import how_it_ended, own_command

GRACE_S = 15.0
TAIL_LINES = 15


class ChildFailed(HeterorlError):
    """A process ended early; `tail`, its log's end, is safe to print."""

    def __init__(self, name: str, *, code: int, log: Path, tail: str) -> None:
        super().__init__(f"{name} {how_it_ended(code)}; log: {log}; it ends:\n{tail}")


@dataclass(slots=True, kw_only=True)
class Child:
    """One process with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    file: BinaryIO

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def check(self) -> None:
        """Raise ChildFailed, with the end of the log, if the process failed."""
        code = self.exit_code
        if code not in (None, 0):
            raise ChildFailed(self.name, code=code, log=self.log, tail=tail(self.log))


def tail(log: Path) -> str:
    """The last lines of a log without control characters."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join("".join(c if c.isprintable() or c == "\t" else "?" for c in text) for text in lines)


def start(
    service: str,
    *,
    name: str,
    tables: dict[str, Any],
    directory: Path,
    options: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Child:
    """Write a configuration and start `heterorl SERVICE`, or `command`, with it."""
    config, log = directory / "config" / f"{name}.toml", directory / "logs" / f"{name}.log"
    for path in (config, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(tomli_w.dumps(tables), encoding="utf-8")
    file = log.open("ab")
    words = [*([sys.executable, *command] if command else own_command("heterorl", service)), "--config", str(config)]
    words += options
    # In its own session: Ctrl-C reaches only the demo, which then stops the others in order.
    process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    return Child(name=name, process=process, log=log, file=file)


def stop(children: Sequence[Child]) -> None:
    """Ask processes to end, one after another; kill those that exceed GRACE_S."""
    for child in children:
        stop_together([child])


def stop_together(children: Sequence[Child]) -> list[Child]:
    """Ask processes to end, kill after GRACE_S; returns ones that ran."""
    running = [child for child in children if child.exit_code is None]
    for child in running:
        child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.file.close()
    return running


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A body that Ctrl-C, or a signal like it, does not end."""
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
