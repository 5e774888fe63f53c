"""Samples as files: one JSON object a line, or Parquet with the same names; whole or not at all.

heterorl samples export run.parquet HOST
pandas.read_parquet("run.parquet").groupby("site").reward.mean()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.process.files import replacing
from heterorl.common.types.sample import Sample, rollout_json

ROWS_AT_ONCE = 512
"""Completions in one row group, which is what is held in memory."""
SUFFIXES = (".jsonl", ".parquet")


class RowWriter(Protocol):
    """Takes the objects of completions, some at a time."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows."""
        ...

    def close(self) -> None:
        """End the file."""
        ...


def check_target(out: Path) -> None:
    """Refuse a file before anything is read.

    Raises:
        ConfigError: its name says no format.
        DependencyMissing: pyarrow is not installed.
    """
    if out.suffix not in SUFFIXES:
        raise ConfigError("OUT", f"{out.name} is neither .jsonl nor .parquet")
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401 - whether it is there
        except ModuleNotFoundError as error:
            raise DependencyMissing("pyarrow", "parquet") from error


class Export:
    """A file being written; use as a context, whose failure leaves nothing behind."""

    def __init__(self, out: Path, *, with_tokens: bool) -> None:
        self._out = out
        self._with_tokens = with_tokens
        self._rows: list[Mapping[str, Any]] = []
        self.num_rows = 0
        self._file = replacing(out, is_durable=False, mode=0o600)
        self._writer: RowWriter | None = None

    def __enter__(self) -> Export:
        """Begin the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            file = self._file.__enter__()
        except OSError as error:
            raise ConfigError("OUT", f"cannot write: {error}") from error
        make: Callable[[BinaryIO], RowWriter] = _JsonLines
        if self._out.suffix == ".parquet":
            make = _Parquet if not self._with_tokens else _ParquetWithTokens
        self._writer = make(file)
        return self

    def add(self, sample: Sample) -> None:
        """Append a sample: one row a completion."""
        self._rows += [
            rollout_json(sample, number, with_tokens=self._with_tokens) for number in range(len(sample.rollouts))
        ]
        if len(self._rows) >= ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        assert self._writer is not None, "used as a context"
        self._writer.write(self._rows)
        self.num_rows += len(self._rows)
        self._rows = []

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the file, or remove it."""
        assert self._writer is not None, "it was entered"
        if kind is None:
            try:
                self._flush()
                self._writer.close()
            except BaseException as failure:
                self._file.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._file.__exit__(kind, error, trace)


class _JsonLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._file.write(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")

    def close(self) -> None:
        pass


class _Parquet:
    with_tokens = False

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow
        import pyarrow.parquet

        self._table = pyarrow.Table
        self._schema = _schema(pyarrow, with_tokens=self.with_tokens)
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        # A map is written as its entries.
        flat = [{**row, "reward_parts": list(row["reward_parts"].items())} for row in rows]
        if flat:
            self._writer.write_table(self._table.from_pylist(flat, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class _ParquetWithTokens(_Parquet):
    with_tokens = True


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
