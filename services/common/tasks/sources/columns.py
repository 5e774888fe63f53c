"""Columns of an Arrow table as prompts: which rows are sound, what each asks for, in passes over whole columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.messages import BETWEEN, ROLES, SYSTEM_ROLES
from heterorl.common.tasks.sources.config import ANSWER, MESSAGES, PROMPT, DataConfig
from heterorl.common.tasks.sources.rows import plain, written
from heterorl.common.tasks.task import Message, Prompt

Mask = npt.NDArray[np.bool_]


class Columns:
    """The prompt and the answer of each row of a table."""

    def __init__(self, table: Any, config: DataConfig, needs_answers: bool) -> None:
        """Check the types.

        Of a pyarrow.Table; a row without an answer gets no reward where `needs_answers`.
        """
        import pyarrow as pa

        self._pa: Any = pa
        self.num_rows: int = table.num_rows
        self._table = table
        key = "task.data.messages" if config.messages else "task.data.prompt"
        self.asked_in = config.messages or config.prompt
        if self.asked_in == PROMPT not in table.column_names and MESSAGES in table.column_names:
            self.asked_in = MESSAGES
        self._prompts = _column(table, key, self.asked_in)
        kind = self._prompts.type
        self._has_messages = _is_messages(pa, kind)
        if not self._has_messages and config.messages:
            raise ConfigError(key, f"column {config.messages} is {kind}, not a list of tables with role and content")
        if not self._has_messages and not _is_text(pa, kind):
            raise ConfigError(key, f"column {self.asked_in} is {kind}, neither text nor messages", action=_OTHER)
        self.answered_in = config.answer
        if not needs_answers and config.answer == ANSWER not in table.column_names:
            self.answered_in = ""
        if needs_answers and not config.answer:
            raise ConfigError("task.data.answer", "is empty, and the reward compares with an answer")
        self._answers = _column(table, "task.data.answer", self.answered_in) if self.answered_in else None
        kind = None if self._answers is None else self._answers.type
        if kind is not None and (pa.types.is_boolean(kind) or pa.types.is_binary(kind)):
            problem = f"column {config.answer} is {kind}, no answer"
            raise ConfigError("task.data.answer", problem, action="make it a column of text, or of numbers")

    def sound(self) -> Mask:
        """Rows with a prompt and an answer that are not blank; of messages, known roles and the user's last."""
        mask = self._sound_messages() if self._has_messages else self._written(self._prompts)
        return mask if self._answers is None else mask & self._written(self._answers)

    def _written(self, column: Any) -> Mask:
        """Cells that hold something: no null, no NaN and no blanks."""
        import pyarrow.compute as pc

        if _is_text(self._pa, column.type):
            length = pc.binary_length(pc.utf8_trim_whitespace(column.cast(self._pa.large_string())))
            return _mask(pc.fill_null(pc.greater(length, 0), False))
        if self._pa.types.is_floating(column.type):
            return _mask(pc.fill_null(pc.is_finite(column.cast(self._pa.float64())), False))
        return _mask(pc.is_valid(column))

    def texts(self) -> Any:
        """What tells prompts apart: the text, or roles and contents of all messages."""
        if not self._has_messages:
            return self._prompts.cast(self._pa.large_string())
        return self._joined(frozenset())

    def questions(self) -> Any:
        """What heterorl.common.tasks.messages.question_of gives of each row."""
        import pyarrow.compute as pc

        if self._has_messages:
            return self._joined(frozenset(SYSTEM_ROLES))
        text = self._pa.large_string()
        return pc.binary_join_element_wise(self._pa.scalar("user", text), self.texts(), self._pa.scalar("\x1f", text))

    def _joined(self, without: frozenset[str]) -> Any:
        """Roles and contents of each row's messages, but for those of some roles."""
        import pyarrow.compute as pc

        text = self._pa.large_string()
        joined = []
        for chunk in self._lists():
            roles, contents = (chunk.values.field(name).cast(text) for name in ("role", "content"))
            lines = pc.binary_join_element_wise(roles, contents, self._pa.scalar("\x1f", text))
            offsets = chunk.offsets
            if without:
                stays = ~_mask(pc.is_in(roles, value_set=self._pa.array(sorted(without), text)))
                lines = lines.filter(self._pa.array(stays))
                before = np.concatenate(([0], np.cumsum(stays)))
                offsets = self._pa.array(before[offsets.to_numpy()], self._pa.int64())
            lists = self._pa.LargeListArray.from_arrays(offsets, lines)
            joined.append(pc.if_else(pc.is_valid(chunk), pc.binary_join(lists, self._pa.scalar(BETWEEN, text)), None))
        return self._pa.chunked_array(joined, text)

    def prompt(self, row: int, *, index: int) -> Prompt:
        """The prompt of a row, under the position that a run knows it by."""
        value = self._prompts[row].as_py()
        columns = _Row(self._table, row, without=self.asked_in)
        if not self._has_messages:
            return Prompt(index=index, text=value, answer=self._answer(row), columns=columns)
        messages = tuple(Message(role=entry["role"], content=entry["content"]) for entry in value)
        text = messages[-1].content
        return Prompt(index=index, text=text, answer=self._answer(row), messages=messages, columns=columns)

    def _answer(self, row: int) -> str:
        if self._answers is None:
            return ""
        value = self._answers[row].as_py()
        if self._pa.types.is_float32(self._answers.type):
            # Of so many digits as its own type has.
            value = float(str(np.float32(value)))
        return written(value)

    def kept(self, config: DataConfig) -> Mask:
        """Rows that `where`, `at_least` and `at_most` keep.

        Raises:
            ConfigError: a column is not there, or cannot be compared with such a value.
        """
        import pyarrow.compute as pc

        mask = np.ones(self.num_rows, np.bool_)
        for name, wanted in config.where.items():
            column = _column(self._table, f"task.data.where.{name}", name)
            values = list(wanted) if isinstance(wanted, tuple) else [wanted]
            try:
                allowed = self._pa.array(values).cast(column.type)
            except self._pa.ArrowException as error:
                problem = f"{values} are no values of a column of {column.type}"
                raise ConfigError(f"task.data.where.{name}", problem) from error
            mask &= _mask(pc.is_in(column, value_set=allowed))
        for kind, bounds, compare in (
            ("at_least", config.at_least, pc.greater_equal),
            ("at_most", config.at_most, pc.less_equal),
        ):
            for name, bound in bounds.items():
                key = f"task.data.{kind}.{name}"
                column = _column(self._table, key, name)
                if not (self._pa.types.is_integer(column.type) or self._pa.types.is_floating(column.type)):
                    raise ConfigError(key, f"column {name} is {column.type}, not numbers")
                mask &= _mask(pc.fill_null(compare(column.cast(self._pa.float64()), bound), False))
        return mask

    def _lists(self) -> list[Any]:
        """The chunks of the messages as lists with 64-bit offsets that begin at 0."""
        kind = self._prompts.type
        wide = self._prompts.cast(self._pa.large_list(kind.value_type))
        # Of a piece of a column the offsets count from elsewhere; a copy of its rows begins anew.
        return [chunk.take(self._pa.array(np.arange(len(chunk)))) for chunk in wide.chunks]

    def _sound_messages(self) -> Mask:
        import pyarrow.compute as pc

        masks = [np.zeros(0, np.bool_)]
        for chunk in self._lists():
            offsets = chunk.offsets.to_numpy().astype(np.int64)
            values = chunk.values
            roles = values.field("role").cast(self._pa.string())
            known = _mask(pc.is_in(roles, value_set=self._pa.array(ROLES)))
            known &= _mask(pc.is_valid(values.field("content")))
            is_user = _mask(pc.fill_null(pc.equal(roles, "user"), False)) & self._written(values.field("content"))
            # Counts of bad messages before each one: a difference says how many a row has.
            bad = np.concatenate(([0], np.cumsum(~known)))
            lengths = np.diff(offsets)
            last = np.maximum(offsets[1:] - 1, 0)
            ends = is_user[last] if is_user.size else np.zeros(len(chunk), np.bool_)
            masks.append((lengths > 0) & (bad[offsets[1:]] == bad[offsets[:-1]]) & ends)
        return np.concatenate(masks)


class _Row(Mapping[str, Any]):
    """The columns of a row but for the prompt, each read when it is asked for."""

    def __init__(self, table: Any, row: int, *, without: str) -> None:
        self._table, self._row, self._without = table, row, without

    def __getitem__(self, name: str) -> Any:
        if name == self._without:
            raise KeyError(name)
        return plain(self._table.column(name)[self._row].as_py())

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table.column_names if name != self._without)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_OTHER = "name the column of the prompt's text, or task.data.messages"


def _column(table: Any, key: str, name: str) -> Any:
    """A column by its name, or by a path such as `reward_model.ground_truth` into a column of tables."""
    import pyarrow.compute as pc

    first, *rest = [name] if name in table.column_names else name.split(".")
    if first not in table.column_names:
        raise ConfigError(key, f"there is no column {name}; there are {', '.join(table.column_names)}"[:500])
    column = table.column(first)
    for part in rest:
        fields = [field.name for field in column.type] if str(column.type).startswith("struct") else []
        if part not in fields:
            raise ConfigError(key, f"there is no {part} of {name}; there are {', '.join(fields) or 'no fields'}"[:500])
        column = pc.struct_field(column, part)
    return column.cast(column.type.value_type) if str(column.type).startswith("dictionary") else column


def _is_text(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_messages(pa: Any, kind: Any) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return all(name in fields and _is_text(pa, fields[name]) for name in ("role", "content"))


def _mask(values: Any) -> Mask:
    if hasattr(values, "combine_chunks"):
        values = values.combine_chunks()
    mask: Mask = np.asarray(values.to_numpy(zero_copy_only=False), np.bool_)
    return mask
