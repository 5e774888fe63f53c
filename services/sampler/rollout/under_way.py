"""A note on the disk of the assignments that the engine computes, for the process that starts after a kill.

A row may end the process that computes it, as by the system's killer for memory: no line of that process can say so.
The next process in the same state_dir returns what the note names and it does not continue, as if its engine had
failed under it, so that a row that kills three processes is closed (heterorl.coordinator.groups.work). What was
answered meanwhile is not held any more, and its return means nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from heterorl.common.process.files import replacing

NAME = "under_way.json"
MAX_NOTED = 1024
"""Assignments in a note; the newest ones."""


class UnderWay:
    """The note of one state_dir; `left` is what an earlier process had under way when it was killed."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / NAME
        self.left: tuple[int, ...] = _read(self._path)

    def note(self, assignments: Sequence[int]) -> None:
        """Write what the engine has or is about to get, oldest first; blocking.

        The note outlives the process, not the machine: nothing waits for the disk.
        """
        # On a full disk nothing begins soon, and a kill meanwhile counts for nobody.
        with contextlib.suppress(OSError), replacing(self._path, is_durable=False) as file:
            file.write(json.dumps([*reversed(assignments)][:MAX_NOTED]).encode("ascii"))

    def clear(self) -> None:
        """Nothing is under way any more: the process ends in order."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return ()
    if not isinstance(found, list):
        return ()
    return tuple(number for number in found[:MAX_NOTED] if type(number) is int and 0 <= number < 1 << 63)
