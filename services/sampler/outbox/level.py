"""How full an outbox is: counted once when it opens, kept along from then on, so that asking waits for no disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Groups that are spooled, and their bytes."""

    num_groups: int
    num_bytes: int


class Gauge:
    """The level of one outbox, changed by several threads."""

    def __init__(self) -> None:
        self.level = Level(num_groups=0, num_bytes=0)
        self._lock = threading.Lock()

    def change(self, num_groups: int, num_bytes: int) -> None:
        """Count groups that came, or went where the numbers are negative."""
        with self._lock:
            before = self.level
            self.level = Level(num_groups=before.num_groups + num_groups, num_bytes=before.num_bytes + num_bytes)
