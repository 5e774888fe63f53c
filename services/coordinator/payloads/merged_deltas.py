"""Merged deltas: spans worth merging, and the cache of merged files.

    data_dir/merged/<start>-<stop>-<digest>        complete, never changed
    data_dir/merged/compose*                       in progress

The directory may be deleted at any time, and a start empties it.

A block is a span of 4^j versions that starts at a multiple of its length. A few blocks cover any lag, and each is made
from 4 of the next smaller size. A merged delta of k versions has about k^0.65 times the bytes of one, so larger blocks
cost less a version.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import Busy
from heterorl.common.process.files import make_directory
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.coordinator.payloads import payload_index
from heterorl.coordinator.store.payload_files import file_size

RADIX = 4
KEEP_VERSIONS = 8
"""Versions for which a merged delta that is not a block stays, so that downloads can finish."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Versions from `start` to `stop` in one variant, for a merged delta."""

    start: int
    stop: int
    variant: str = ""

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_block(self) -> bool:
        """Whether the span is aligned and has 4^j versions."""
        length = RADIX
        while length < self.length:
            length *= RADIX
        return length == self.length and self.start % length == 0


def due_blocks(*, head: int, window: int, have: Collection[Span], variant: str = "") -> Iterator[Span]:
    """Missing blocks in the last `window` versions: small before large, newest first."""
    length = RADIX
    while length <= window:
        for stop in range(head // length * length, max(length - 1, head - window), -length):
            span = Span(stop - length, stop, variant)
            if span not in have:
                yield span
        length *= RADIX


def worth_merging(payloads: Sequence[PayloadRef], *, head: int | None, variant: str = "") -> Span | None:
    """The span of a plan's deltas if worth a merged delta.
    There must be several, over at least RADIX versions, up to the head."""
    deltas = [payload for payload in payloads if payload.kind is not PayloadKind.SNAPSHOT]
    if len(deltas) < 2:
        return None
    span = Span(deltas[0].from_version, deltas[-1].to_version, variant)
    return span if span.stop == head and span.length >= RADIX else None


def to_evict(sizes: Mapping[Span, int], *, head: int, window: int, budget_bytes: int) -> list[Span]:
    """Merged deltas to evict: useless, then least useful, to fit the budget.

    Useless: a block that ends before the window, any other that ends KEEP_VERSIONS before the head. Least useful: not a
    block, then the oldest end, then the shortest.
    """

    def is_useless(span: Span) -> bool:
        return span.stop <= head - window or (not span.is_block and span.stop < head - KEEP_VERSIONS)

    evicted = [span for span in sizes if is_useless(span)]
    rest = sorted(set(sizes) - set(evicted), key=lambda span: (span.is_block, span.stop, span.length))
    used = sum(sizes[span] for span in rest)
    for span in rest:
        if used <= budget_bytes:
            break
        evicted.append(span)
        used -= sizes[span]
    return evicted


class MergedDeltas:
    """The merged deltas of one run.
    Belongs to the event loop, but `into` may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        """Removes an earlier process's files; blocks."""
        payload_index.empty(directory)
        self._directory = directory
        self._index: dict[Span, PayloadRef] = {}
        self._into: dict[tuple[str, int], tuple[PayloadRef, ...]] = {}

    @property
    def spans(self) -> frozenset[Span]:
        return frozenset(self._index)

    def into(self, version: int, variant: str = "") -> tuple[PayloadRef, ...]:
        return self._into.get((variant, version), ())

    def path(self, payload: PayloadRef) -> Path:
        return self._directory / f"{payload.from_version}-{payload.to_version}-{payload.digest}"

    def find(self, digest: Digest) -> Path | None:
        return next((self.path(payload) for payload in self._index.values() if payload.digest == digest), None)

    def scratch(self) -> Path:
        """The file to write the next one to. Callable from any thread."""
        make_directory(self._directory)
        return self._directory / "compose"

    def name(self, scratch: Path, payload: PayloadRef) -> None:
        scratch.replace(self.path(payload))

    def add(self, payload: PayloadRef, variant: str = "") -> None:
        self._index[Span(payload.from_version, payload.to_version, variant)] = payload
        self._replace_into()

    async def forget_missing(self, payloads: Iterable[PayloadRef] | None = None) -> bool:
        """Drop entries, of `payloads` or all, whose files are missing.
        Returns whether there were any."""
        looked_at = [*self._index.values()] if payloads is None else payloads
        merged = [payload for payload in looked_at if payload.kind is PayloadKind.MERGED]
        missing = [payload for payload in merged if await asyncio.to_thread(_is_gone, self.path(payload))]
        self._index = {span: payload for span, payload in self._index.items() if payload not in missing}
        self._replace_into()
        return bool(missing)

    async def drop(self, digest: Digest) -> None:
        """Delete a damaged merged delta; it is made again."""
        for span in [span for span, payload in self._index.items() if payload.digest == digest]:
            await asyncio.to_thread(self.path(self._index.pop(span)).unlink, missing_ok=True)
        self._replace_into()

    async def evict(
        self, *, head: int, window: int, budget_bytes: int, leased: Callable[[], frozenset[Digest]] = frozenset
    ) -> list[Span]:
        """Delete useless or excess, unleased merged deltas; returns their spans."""
        sizes = {span: payload.num_bytes for span, payload in self._index.items()}
        evicted = to_evict(sizes, head=head, window=window, budget_bytes=budget_bytes)
        kept = leased()
        evicted = [span for span in evicted if self._index[span].digest not in kept]
        paths = [self.path(self._index.pop(span)) for span in evicted]
        self._replace_into()
        for path in paths:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        return evicted

    def _replace_into(self) -> None:
        # Replaced, never changed: a plan on the store's thread may be reading it.
        into: defaultdict[tuple[str, int], tuple[PayloadRef, ...]] = defaultdict(tuple)
        for span, payload in self._index.items():
            into[span.variant, span.stop] += (payload,)
        self._into = dict(into)


def _is_gone(path: Path) -> bool:
    try:
        return file_size(path) is None
    except Busy:
        # Unknown now; its reader gets Busy too.
        return False
