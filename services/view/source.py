"""Where samples come from, as the pages see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from heterorl.common.types.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How far a source was read; `total` is what it holds as far as it said, 0 where it did not."""

    total: int = 0
    is_done: bool = False
    """Whether everything that it held when it was last asked is in the index."""
    is_live: bool = False
    """Whether there may be more later."""
    problem: str = ""
    """Why nothing comes, for people; empty while all is well."""


class Source(Protocol):
    """Fills an index from a thread of its own, until it is closed."""

    @property
    def name(self) -> str:
        """What the person named: an address or a file."""
        ...

    @property
    def progress(self) -> Reading:
        """How far it is."""
        ...

    def start(self) -> None:
        """Begin to fill the index."""
        ...

    def fetch(self, sample_id: int) -> Sample | None:
        """Ask for one sample that the index has no texts of, ahead of its turn; None where it is kept no more.

        Raises:
            HeterorlError: the source cannot be asked.
        """
        ...

    def close(self) -> None:
        """Stop filling; returns when the thread has ended."""
        ...
