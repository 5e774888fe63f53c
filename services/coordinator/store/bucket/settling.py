"""What becomes of whole files that lie in the data directory at a start, beside what the bucket has.

the bucket has it                           a copy
the store names it, the bucket lacks it     owed: given to the bucket
neither, older than the newest version      a stray: deleted, as another coordinator retired it since
neither, newer than that                    an upload that waits for its version; stays
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from heterorl.common.types.common import Digest


@dataclass(frozen=True, slots=True)
class Settlement:
    """What whole files are; uploads that wait are left out."""

    copies: tuple[Digest, ...]
    owed: tuple[Digest, ...]
    strays: tuple[Digest, ...]


def settle(
    files: Iterable[tuple[Digest, float]], *, at_home: Container[Digest], named: Container[Digest], newest: float | None
) -> Settlement:
    """Say what becomes of files.

    Args:
        files: names, and wall times at which their bytes came.
        at_home: what the bucket has.
        named: what a version offers.
        newest: wall time of the newest version; None before the first one.
    """
    copies, owed, strays = [], [], []
    for digest, changed in files:
        if digest in at_home:
            copies.append(digest)
        elif digest in named:
            owed.append(digest)
        elif newest is not None and changed < newest:
            strays.append(digest)
    return Settlement(tuple(copies), tuple(owed), tuple(strays))
