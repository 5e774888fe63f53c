"""Source of an export file: a JSON line a completion.

Samples come in the order of their ids. The file is not trusted: line size, types and bounds are checked. The reading
ends at the first fault, and its error names row and key.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heterorl.common.errors import ConfigError, HeterorlError
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GIVEN, DropReason, FinishReason, GroupId, RewardPart, Span
from heterorl.common.types.sample import (
    CONSUMED,
    EVALUATED,
    MAX_PREVIEW,
    Sample,
    SampleKind,
    SampleRollout,
    SampleSummary,
    beginning,
    kind_of,
)
from heterorl.common.wire.sample_messages import outline_of_rollouts
from heterorl.view.sample_index import SampleIndex, SourceProgress
from heterorl.view.sample_query import clean

MAX_LINE_BYTES = 64 << 20
BATCH = 64
"""Samples in one transaction of the index."""
Id = Annotated[int, Field(ge=1, le=(1 << 62))]
Count = Annotated[int, Field(ge=0, le=(1 << 62))]
Version = Annotated[int, Field(ge=-1, le=(1 << 62))]
Index = Annotated[int, Field(ge=0, lt=(1 << 31))]


def _known(kept_because: str) -> str:
    _kind(kept_because)
    return kept_because


class _Span(BaseModel):
    """Tokens [start, end); `version` is None for tokens of the environment."""

    start: Index
    end: Index
    version: Version | None
    keeps: Index | None = None


class _Row(BaseModel):
    """One completion; see heterorl.common.types.sample.rollout_json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Id
    index: Count
    group: Annotated[str, Field(pattern=r"^[\s\S]*/[^/]*/[0-9]{1,18}$")] | None = None
    version: Version = -1
    oldest_version: Version = -1
    site: str = ""
    prompt_index: Count = 0
    prompt: str | None = None
    answer: str | None = None
    completion: str | None = None
    reward: float | None = None
    reward_parts: dict[str, float | None] = {}
    finish_reason: FinishReason
    num_tokens: Count | None = None
    spans: list[_Span] = []
    log_ratio_mean: float | None = None
    kept_because: Annotated[str, AfterValidator(_known)]
    detail: str = ""
    kept_time: float = 0.0
    prompt_token_ids: list[Index] = []
    token_ids: list[Index] = []
    sampler_logprobs: list[float | None] = []
    log_ratios: list[float | None] = []
    token_ends: list[Index] = []


class ExportedSamples:
    """A Source over an export.
    Raises ConfigError: a missing or foreign file."""

    def __init__(self, path: Path, index: SampleIndex) -> None:
        self.name, self._path, self._index = str(path), path, index
        self.progress = SourceProgress()
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._is_closed = False
        for _ in islice(read_export(path), 1):
            pass

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join()

    def fetch(self, sample_id: int) -> Sample | None:  # noqa: ARG002 - of the protocol
        return None

    def _run(self) -> None:
        samples = self._until_fault()
        try:
            while not self._is_closed and (batch := list(islice(samples, BATCH))):
                self._index.add_samples(batch)
        except HeterorlError as error:
            self.progress = SourceProgress(problem=str(error))
        self.progress = dataclasses.replace(self.progress, is_done=True)

    def _until_fault(self) -> Iterator[Sample]:
        try:
            yield from read_export(self._path)
        except ConfigError as error:
            self.progress = SourceProgress(problem=str(error))


_EXPORT = "`heterorl samples export OUT.jsonl` writes files in this format"


def read_export(path: Path) -> Iterator[Sample]:
    """The samples of a file, in its order.
    Raises ConfigError: the file cannot be read, or a row is faulty."""
    newest = 0
    for sample_id, group in groupby(_rows(path), key=lambda numbered: numbered[1].id):
        found = list(group)
        place = f"{path}, row {found[0][0]}"
        if sample_id <= newest:
            action = "sort the rows by id and index; view exports of two runs one by one"
            raise ConfigError(place, f"sample {sample_id} comes after sample {newest}", action=action)
        newest = sample_id
        try:
            yield _sample([row for _, row in found])
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(place, str(error), action=_EXPORT) from error


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Rows with their numbers."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield number, _row(f"{path}, row {number}", line)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", action="give an export of samples") from error


def _row(place: str, line: bytes) -> _Row:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(place, f"is over {MAX_LINE_BYTES:,} bytes", action=_EXPORT)
    try:
        # Pydantic's JSON reader refuses lone surrogates, which models write.
        return _Row.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON: {error}"
    raise ConfigError(place, problem, action=_EXPORT)


def _sample(rows: Sequence[_Row]) -> Sample:
    rows = sorted(rows, key=lambda row: row.index)
    if len({row.index for row in rows}) < len(rows):
        raise ValueError(f"completion {rows[0].index} of sample {rows[0].id} appears twice")
    first = rows[0]
    rollouts = tuple(map(_rollout, rows))
    num_tokens = sum(row.num_tokens or rollout.num_drawn for row, rollout in zip(rows, rollouts, strict=True))
    outline = dataclasses.asdict(outline_of_rollouts(rollouts)) | {"num_tokens": num_tokens}
    prompt = clean(first.prompt or "")
    summary = SampleSummary(
        id=first.id,
        kind=_kind(first.kept_because),
        kept_because=clean(first.kept_because),
        detail=clean(first.detail),
        site=SiteId(clean(first.site)),
        group=_group(first.group),
        version=first.version,
        oldest_version=first.oldest_version,
        kept_time=first.kept_time,
        prompt_index=first.prompt_index,
        has_texts=first.prompt is not None or any(row.completion is not None for row in rows),
        prompt_preview=beginning(prompt, MAX_PREVIEW),
        completion_preview=beginning(rollouts[0].completion, MAX_PREVIEW),
        **outline,
    )
    return Sample(
        summary=summary,
        prompt=prompt,
        answer=clean(first.answer or ""),
        prompt_token_ids=np.array(first.prompt_token_ids, np.int32),
        rollouts=rollouts,
    )


def _rollout(row: _Row) -> SampleRollout:
    return SampleRollout(
        completion=clean(row.completion or ""),
        token_ids=np.array(row.token_ids, np.int32),
        sampler_logprobs=_numbers(row.sampler_logprobs),
        # Without --tokens the file has only the mean.
        log_ratios=_numbers(row.log_ratios if row.token_ids or row.log_ratio_mean is None else [row.log_ratio_mean]),
        token_ends=np.array(row.token_ends, np.int32),
        spans=_spans(row),
        reward=math.nan if row.reward is None else row.reward,
        reward_parts=tuple(
            RewardPart(name=clean(name), value=math.nan if value is None else value)
            for name, value in row.reward_parts.items()
        ),
        finish_reason=row.finish_reason,
    )


def _spans(row: _Row) -> tuple[Span, ...]:
    if not row.spans:
        return ()
    ends = [0, *(span.end for span in row.spans)]
    is_even = all(span.start == end <= span.end for span, end in zip(row.spans, ends, strict=False))
    if not is_even or (row.token_ids and ends[-1] != len(row.token_ids)):
        raise ValueError(f"spans: completion {row.index} has tokens outside of its spans")
    return tuple(
        Span(version=GIVEN if one.version is None else one.version, start=one.start, end=one.end, keeps=one.keeps)
        for one in row.spans
    )


def _numbers(values: Sequence[float | None]) -> Any:
    return np.array([math.nan if value is None else value for value in values], np.float32)


def _kind(kept_because: str) -> SampleKind:
    if kept_because in (CONSUMED, EVALUATED):
        return SampleKind.CONSUMED if kept_because == CONSUMED else SampleKind.EVALUATION
    return kind_of(DropReason(kept_because))


def _group(text: str | None) -> GroupId | None:
    if text is None:
        return None
    site, incarnation, sequence = clean(text).rsplit("/", 2)
    return GroupId(site=SiteId(site), incarnation=incarnation, sequence=int(sequence))
