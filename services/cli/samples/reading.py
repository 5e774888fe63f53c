"""The pages of a list, one after another, and whole samples for its lines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from heterorl.common.api import SamplesApi
from heterorl.common.errors import UnknownSample
from heterorl.common.types.sample import MAX_PAGE, Sample, SampleFilter, SamplePage, SampleSummary

AT_ONCE = 8
"""Samples that are asked for at the same time: a round trip over the Internet is as long as many of them."""


async def read_summaries(
    api: SamplesApi, wanted: SampleFilter, page: SamplePage, *, most: int = 0
) -> AsyncIterator[Sequence[SampleSummary]]:
    """Yield lines page by page, `most` at most; 0 is all of them."""
    left = most
    rest: SamplePage | None = page
    while rest is not None:
        limit = min(MAX_PAGE, left) if most else MAX_PAGE
        found = await api.list_samples(wanted=wanted, page=dataclasses.replace(rest, limit=limit))
        if found.samples:
            yield found.samples
        left -= len(found.samples)
        if most and left <= 0:
            return
        rest = found.next_page


async def read_samples(
    api: SamplesApi, wanted: SampleFilter, page: SamplePage, *, most: int = 0
) -> AsyncIterator[Sample]:
    """Yield whole samples in the order of the list; those that made room meanwhile are left out."""

    async def get(summary: SampleSummary) -> Sample | None:
        try:
            return await api.get_sample(sample_id=summary.id)
        except UnknownSample:
            return None

    async for summaries in read_summaries(api, wanted, page, most=most):
        for first in range(0, len(summaries), AT_ONCE):
            for sample in await asyncio.gather(*map(get, summaries[first : first + AT_ONCE])):
                if sample is not None:
                    yield sample
