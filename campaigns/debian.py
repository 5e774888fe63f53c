"""What the timed installations share: a Debian from debootstrap, the words of a document, and named seconds."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = "ca-certificates,dbus,git,init,libpam-systemd,postgresql,python3,python3-venv,sudo,systemd"
PATIENCE_S = 300.0


def make_base(directory: Path, mirror: str) -> None:
    """A Debian 12 in a directory, where there is none yet; as root, with debootstrap."""
    if directory.exists():
        return
    partial = directory.resolve().with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(partial), mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    partial.rename(directory)


def block(document: str, title: str) -> str:
    """The first block of commands under a title of a document.

    Raises:
        ValueError: there is none.
    """
    found = re.search(rf"^## {title}.*?^```\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no commands under {title}")
    return found[1]


def until(holds: Callable[[], bool]) -> None:
    """Wait.

    Raises:
        TimeoutError: it never held.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s")
        time.sleep(0.2)


class Steps:
    """Names and seconds of what was done."""

    def __init__(self, console: Console) -> None:
        self.rows: list[dict[str, Any]] = []
        self._console = console

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step."""
        begin = time.monotonic()
        yield
        self.rows.append({"step": name, "seconds": round(time.monotonic() - begin, 1)})
        self._console.print(f"{self.rows[-1]['seconds']:8.1f} s  {name}", markup=False)

    def show(self) -> None:
        """All of them, and their sum."""
        table = Table("step", "seconds")
        for row in self.rows:
            table.add_row(row["step"], str(row["seconds"]))
        table.add_row("all", f"{sum(row['seconds'] for row in self.rows):.1f}")
        self._console.print(table)
