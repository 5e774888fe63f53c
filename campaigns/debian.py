"""Helpers of the timed installations: a Debian by debootstrap, command blocks of a document, timed steps."""

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
    """Make a Debian 12 in a directory if there is none; needs root and debootstrap."""
    if directory.exists():
        return
    partial = directory.resolve().with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(partial), mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    partial.rename(directory)


def block(document: str, title: str) -> str:
    """The first command block under a title of a document; raises ValueError without one."""
    found = re.search(rf"^## {title}.*?^```\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no commands under {title}")
    return found[1]


def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` is true; raises TimeoutError after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s")
        time.sleep(0.2)


class Steps:
    """Names and seconds of the steps."""

    def __init__(self, console: Console) -> None:
        self.rows: list[dict[str, Any]] = []
        self._console = console

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.rows.append({"step": name, "seconds": round(time.monotonic() - begin, 1)})
        self._console.print(f"{self.rows[-1]['seconds']:8.1f} s  {name}", markup=False)

    def show(self) -> None:
        table = Table("step", "seconds")
        for row in self.rows:
            table.add_row(row["step"], str(row["seconds"]))
        table.add_row("all", f"{sum(row['seconds'] for row in self.rows):.1f}")
        self._console.print(table)
