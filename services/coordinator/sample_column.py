"""Samples: the learner's notes on kept groups, and pages for operators."""

from __future__ import annotations

from collections.abc import Sequence

from heterorl.common.errors import InvalidRequest, UnknownSample
from heterorl.common.process.threads import in_thread
from heterorl.common.types.sample import (
    EvaluationSample,
    Sample,
    SampleFilter,
    SampleKind,
    SampleList,
    SampleNote,
    SamplePage,
    SampleSummary,
)
from heterorl.common.wire.sample_messages import (
    StoredSample,
    check_limit,
    evaluation_to_bytes,
    next_page,
    note_to_bytes,
    sample_of,
)
from heterorl.coordinator import sample_ring
from heterorl.coordinator.context import CoordinatorContext
from heterorl.coordinator.store.database import Connection
from heterorl.coordinator.versions import lineage

END_OF_IDS = 1 << 63


class SampleColumn:
    """The ring of kept samples."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    async def note_samples(
        self, *, epoch: int, notes: Sequence[SampleNote], evaluations: Sequence[EvaluationSample] = ()
    ) -> None:
        kept = self._context.queue.ring
        # Not on the store's thread, which others wait for.
        packed = await in_thread(lambda: [(note, note_to_bytes(note)) for note in notes])
        held_out = await in_thread(lambda: [(sample, evaluation_to_bytes(sample)) for sample in evaluations])

        def operation(connection: Connection) -> None:
            lineage.check_epoch(connection, epoch)
            for note, data in packed:
                kept.note(connection, note, data)
            for sample, data in held_out:
                kept.keep_evaluation(connection, sample, data)

        await self._context.database.run(operation)

    async def list_samples(self, *, wanted: SampleFilter, page: SamplePage) -> SampleList:
        check_limit(page.limit)
        for name, number in (("after", page.after), ("before", page.before)):
            if not 0 <= number < END_OF_IDS:
                raise InvalidRequest(f"{name}: {number} is not an id of a sample")

        def operation(connection: Connection) -> tuple[list[SampleSummary], dict[SampleKind, tuple[int, int]]]:
            return sample_ring.read_page(connection, wanted, page), sample_ring.totals(connection)

        found, totals = await self._context.database.run(operation)
        return SampleList(
            samples=tuple(found),
            next_page=next_page(page, found[-1].id) if len(found) == page.limit else None,
            num_kept=sum(number for number, _ in totals.values()),
            kept_bytes=sum(num_bytes for _, num_bytes in totals.values()),
            limit_bytes=self._context.queue.ring.limit_bytes,
        )

    async def get_sample(self, *, sample_id: int) -> Sample:
        return sample_of(await self.get_stored(sample_id=sample_id))

    async def get_stored(self, *, sample_id: int) -> StoredSample:
        if not 0 <= sample_id < END_OF_IDS:
            raise UnknownSample(f"sample {sample_id} is not kept")
        return await self._context.database.run(lambda connection: sample_ring.read_sample(connection, sample_id))
