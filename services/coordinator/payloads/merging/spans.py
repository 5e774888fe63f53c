"""Which merged deltas are worth making and keeping; pure.

A block is a span of 4^j versions that starts at a multiple of its length. Any lag is covered by few blocks, each block
is made from 4 of the next smaller size, and all of them together cost less than composing every 4 deltas twice: a
merged delta of k versions has about k^0.65 times the bytes of one, so larger blocks cost ever less a version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from heterorl.common.types.policy import PayloadKind, PayloadRef

RADIX = 4
KEEP_VERSIONS = 8
"""How far the head may move on before a merged delta that is no block goes: time to finish a download."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The versions that a merged delta leads over, from `start` to `stop`, in one flavour."""

    start: int
    stop: int
    flavour: str = ""

    @property
    def length(self) -> int:
        """Number of versions."""
        return self.stop - self.start

    @property
    def is_block(self) -> bool:
        """Whether this is one of the spans that everybody's way is made of."""
        length = RADIX
        while length < self.length:
            length *= RADIX
        return length == self.length and self.start % length == 0


def due_blocks(*, head: int, window: int, have: Collection[Span], flavour: str = "") -> Iterator[Span]:
    """Blocks that reach into the last `window` versions and are not there: small before large, the newest first."""
    length = RADIX
    while length <= window:
        for stop in range(head // length * length, max(length - 1, head - window), -length):
            span = Span(stop - length, stop, flavour)
            if span not in have:
                yield span
        length *= RADIX


def worth_merging(payloads: Sequence[PayloadRef], *, head: int | None, flavour: str = "") -> Span | None:
    """The span of a plan's deltas when one merged delta is worth making: several, long enough, to the head."""
    deltas = [payload for payload in payloads if payload.kind is not PayloadKind.SNAPSHOT]
    if len(deltas) < 2:
        return None
    span = Span(deltas[0].from_version, deltas[-1].to_version, flavour)
    return span if span.stop == head and span.length >= RADIX else None


def to_evict(sizes: Mapping[Span, int], *, head: int, window: int, budget_bytes: int) -> list[Span]:
    """Merged deltas that are of no use any more, then the least useful until the rest fits the budget.

    Useless: a block that ends before the window, anything else that ends KEEP_VERSIONS before the head. Least useful:
    what is no block, then what ends the longest ago, then the smallest.
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
