"""Rows of an Arrow table, converted in batches."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from heterorl.common.errors import ConfigError

_AT_ONCE = 256


class ArrowRows:
    """Rows of mapped files, and a digest of these; implements Rows."""

    is_strict = False

    def __init__(self, table: Any, digest: str) -> None:
        """Take a pyarrow.Table; raise ConfigError for two columns of one name."""
        self.table, self.digest = table, digest
        for name, count in Counter(table.column_names).items():
            if count > 1:
                problem = f"there are {count} columns {name}"
                raise ConfigError("task.name", problem, action="rename or drop all but one of them")

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        first = 0
        for batch in self.table.to_batches(max_chunksize=_AT_ONCE):
            columns = _Columns(batch)
            for number in range(batch.num_rows):
                yield first + number, _ArrowRow(columns, number)
            first += batch.num_rows

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return _ArrowRow(_Columns(self.table.slice(number, 1)), 0)

    def place(self, number: int) -> str:
        return f"row {number}"


class _Columns(dict[str, list[Any]]):
    """Cells of a batch by column, converted at first use."""

    def __init__(self, batch: Any) -> None:
        self._batch, self.names = batch, batch.schema.names

    def __missing__(self, name: str) -> list[Any]:
        column = self._batch.column(name)
        try:
            cells: list[Any] = column.to_pylist()
        except (ValueError, OverflowError):
            cells = [_value(cell) for cell in column]
        if (shorten := _shortening(column.type)) is not None:
            cells = [None if cell is None else shorten(cell) for cell in cells]
        self[name] = cells
        return cells


def _value(cell: Any) -> Any:
    """A cell's value; None for what Python cannot hold.
    Examples are a text that is not UTF-8 and a time after the year 9999."""
    with suppress(ValueError, OverflowError):
        return cell.as_py()
    return None


def _shortening(kind: Any) -> Callable[[Any], Any] | None:
    """Conversion of cells with short floats to the digits of these.
    None for types without them; cells that are null are left out."""
    import pyarrow

    if pyarrow.types.is_float16(kind) or pyarrow.types.is_float32(kind):
        short = np.float16 if pyarrow.types.is_float16(kind) else np.float32
        return lambda cell: float(str(short(cell)))
    if pyarrow.types.is_dictionary(kind):
        return _shortening(kind.value_type)
    if isinstance(kind, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        item = _shortening(kind.value_type)
        return None if item is None else lambda cell: [None if one is None else item(one) for one in cell]
    inner = kind if pyarrow.types.is_struct(kind) else ()
    if fields := {field.name: each for field in inner if (each := _shortening(field.type)) is not None}:
        return lambda cell: {
            name: fields[name](one) if name in fields and one is not None else one for name, one in cell.items()
        }
    return None


class _ArrowRow(Mapping[str, Any]):
    __slots__ = ("_columns", "_number")

    def __init__(self, columns: _Columns, number: int) -> None:
        self._columns, self._number = columns, number

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._number]

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)
