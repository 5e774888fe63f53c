"""Reader of a coordinator's samples: decodes tokens and writes files.

heterorl samples export run.parquet HOST
pandas.read_parquet("run.parquet").groupby("site").reward.mean()
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from heterorl.common.api import SamplesApi
from heterorl.common.errors import ConfigError, UnknownSample
from heterorl.common.process.files import replacing
from heterorl.common.text.token_text import TokenTexts
from heterorl.common.types.common import Int32Array
from heterorl.common.types.sample import (
    MAX_PAGE,
    Sample,
    SampleFilter,
    SamplePage,
    SampleRollout,
    SampleSummary,
    rollout_json,
)

AT_ONCE = 8
"""Concurrent requests for samples, because a round trip over the Internet is slow."""


async def read_summaries(
    api: SamplesApi, wanted: SampleFilter, page: SamplePage, *, most: int = 0
) -> AsyncIterator[Sequence[SampleSummary]]:
    """Yield summaries page by page, `most` at most; 0 is all."""
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
    """Yield whole samples in the list's order; skips ones dropped meanwhile."""

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


Decode = Callable[[Sample], Sample]


def decoder(tokenizer: str) -> Decode:
    """A function that adds texts to a sample without them.

    `tokenizer` is a Hugging Face directory or hub id; empty keeps samples as they are. Raises ConfigError if it cannot
    be loaded.
    """
    if not tokenizer:
        return lambda sample: sample
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        action = "name a directory with tokenizer.json, such as model_dir"
        raise ConfigError("--tokenizer", f"cannot load one from {tokenizer}: {first}", action=action) from error

    def text(token_ids: Int32Array, *, with_special: bool) -> str:
        found: str = loaded.decode(
            token_ids.tolist(), skip_special_tokens=not with_special, clean_up_tokenization_spaces=False
        )
        return found

    decode_given = partial(text, with_special=True)
    texts = TokenTexts(decode=partial(text, with_special=False), decode_given=decode_given)
    return lambda sample: _decoded(sample, texts, decode_given)


def _decoded(sample: Sample, texts: TokenTexts, decode_raw: Callable[[Int32Array], str]) -> Sample:
    if sample.summary.has_texts or not sample.prompt_token_ids.size:
        return sample
    return dataclasses.replace(
        sample,
        summary=dataclasses.replace(sample.summary, has_texts=True),
        prompt=decode_raw(sample.prompt_token_ids),
        rollouts=tuple(_read(rollout, texts) for rollout in sample.rollouts),
    )


def _read(rollout: SampleRollout, texts: TokenTexts) -> SampleRollout:
    completion, token_ends = texts.read(rollout.token_ids, rollout.spans)
    return dataclasses.replace(rollout, completion=completion, token_ends=token_ends)


ROWS_AT_ONCE = 512
"""Completions in one row group, which is held in memory."""
SUFFIXES = (".jsonl", ".parquet")

Write = Callable[[Sequence[Mapping[str, Any]]], None]
"""Appends the objects of some completions to a file."""


def check_target(out: Path) -> None:
    """Refuse a bad target before anything is read."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(
            "OUT", f"{out.name} must end in .jsonl or .parquet", action="name the file samples.jsonl or samples.parquet"
        )
    if out.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401 - whether it is there


class Export:
    """Buffers samples for a file, one row for each completion."""

    def __init__(self, write: Write, *, with_tokens: bool) -> None:
        self._write, self._with_tokens = write, with_tokens
        self._rows: list[Mapping[str, Any]] = []
        self.num_rows = 0

    def add(self, sample: Sample) -> None:
        numbers = range(len(sample.rollouts))
        self._rows += [rollout_json(sample, number, with_tokens=self._with_tokens) for number in numbers]
        self.num_rows += len(numbers)
        if len(self._rows) >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        self._write(self._rows)
        self._rows = []


@contextlib.contextmanager
def exporting(out: Path, *, with_tokens: bool) -> Iterator[Export]:
    """A file that appears when the context ends, unless it fails.
    Raises ConfigError if it is not writable."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(replacing(out, is_durable=False, mode=0o600))
        except OSError as error:
            raise ConfigError("OUT", f"cannot write: {error}", action="name a file that this user can write") from error
        format_of = _parquet if out.suffix == ".parquet" else _json_lines
        export = Export(stack.enter_context(format_of(file, with_tokens=with_tokens)), with_tokens=with_tokens)
        yield export
        export.flush()


@contextlib.contextmanager
def _json_lines(file: BinaryIO, *, with_tokens: bool) -> Iterator[Write]:  # noqa: ARG001 - a row says what it has
    yield lambda rows: file.writelines(json.dumps(row, allow_nan=False).encode("ascii") + b"\n" for row in rows)


@contextlib.contextmanager
def _parquet(file: BinaryIO, *, with_tokens: bool) -> Iterator[Write]:
    import pyarrow
    import pyarrow.parquet

    schema = _schema(pyarrow, with_tokens=with_tokens)
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:

        def write(rows: Sequence[Mapping[str, Any]]) -> None:
            # Arrow takes a map as its entries.
            flat = [{**row, "reward_parts": list(row["reward_parts"].items())} for row in rows]
            if flat:
                writer.write_table(pyarrow.Table.from_pylist(flat, schema=schema))

        yield write


def _schema(pa: Any, *, with_tokens: bool) -> Any:
    span = [("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64()), ("keeps", pa.int32())]
    fields = [
        ("id", pa.int64()), ("index", pa.int32()), ("group", pa.string()), ("version", pa.int64()),
        ("oldest_version", pa.int64()), ("versions", pa.list_(pa.int64())), ("site", pa.string()),
        ("prompt_index", pa.int64()), ("prompt", pa.string()), ("answer", pa.string()), ("completion", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())), ("finish_reason", pa.string()),
        ("num_tokens", pa.int32()), ("spans", pa.list_(pa.struct(span))), ("log_ratio_mean", pa.float64()),
        ("kept_because", pa.string()), ("detail", pa.string()), ("kept_time", pa.float64()),
    ]  # fmt: skip
    if with_tokens:
        fields += [
            ("prompt_token_ids", pa.list_(pa.int32())), ("token_ids", pa.list_(pa.int32())),
            ("sampler_logprobs", pa.list_(pa.float32())), ("log_ratios", pa.list_(pa.float32())),
            ("token_ends", pa.list_(pa.int32())),
        ]  # fmt: skip
    return pa.schema(fields)
