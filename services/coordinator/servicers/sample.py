"""Messages <-> domain calls about kept samples. Decides nothing."""

from __future__ import annotations

from typing import Any

import grpc.aio

from heterorl.common.process.threads import in_thread
from heterorl.common.wire.sample import stored_to_pb
from heterorl.common.wire.sample_lists import list_request_from_pb, list_to_pb
from heterorl.common.wire.sample_notes import evaluation_from_pb, note_from_pb
from heterorl.coordinator.sample import SampleColumn
from heterorl.v1 import sample_pb2, sample_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class SampleServicer(sample_pb2_grpc.SampleServiceServicer):
    """heterorl.v1.SampleService."""

    def __init__(self, samples: SampleColumn) -> None:
        self._samples = samples

    async def ListSamples(
        self, request: sample_pb2.ListSamplesRequest, context: Context
    ) -> sample_pb2.ListSamplesResponse:
        wanted, page = list_request_from_pb(request)
        return list_to_pb(await self._samples.list_samples(wanted=wanted, page=page))

    async def GetSample(self, request: sample_pb2.GetSampleRequest, context: Context) -> sample_pb2.GetSampleResponse:
        return stored_to_pb(await self._samples.get_stored(sample_id=request.id))

    async def NoteSamples(
        self, request: sample_pb2.NoteSamplesRequest, context: Context
    ) -> sample_pb2.NoteSamplesResponse:
        # One number after another, of which there may be millions.
        notes = await in_thread(lambda: [note_from_pb(note) for note in request.notes])
        evaluations = await in_thread(lambda: [evaluation_from_pb(sample) for sample in request.evaluations])
        await self._samples.note_samples(epoch=request.epoch, notes=notes, evaluations=evaluations)
        return sample_pb2.NoteSamplesResponse()
