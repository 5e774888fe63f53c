"""Dataset over rows of Arrow files: prompts by position, some held out.

Answers are compared as in `jsonl:`.

Memory holds one number a prompt; rows stay mapped. No held-out prompt is trained on. Equal digests mean equal files,
columns, filters and chosen rows.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.answer_match import MatchedTask
from heterorl.common.tasks.source_config import ANSWER, MESSAGES, PROMPT, DataConfig, SourceConfig
from heterorl.common.tasks.sources.cells import answer_text, json_value, log_held_out, refuse_other_kinds, short_prompts
from heterorl.common.tasks.sources.dataset_files import Loaded
from heterorl.common.tasks.task import BETWEEN, ROLES, SYSTEM_ROLES, Measure, Message, Prompt
from heterorl.common.types.common import Digest
from heterorl.common.wire.common_messages import bytes_digest

Rows = npt.NDArray[np.int64]
_AT_ONCE = 4096
_LOG = logging.getLogger(__name__)


class ArrowTask(MatchedTask):
    """Rows of Arrow files with a verifier; implements Task."""

    def __init__(
        self,
        loaded: Loaded,
        held_out: Loaded | None,
        config: SourceConfig,
        *,
        evaluation_size: int | None,
        measure: Measure | None,
    ) -> None:
        """Choose the rows; raises ConfigError if too few, or columns are wrong.

        Without `held_out`, `evaluation_size` different prompts of `loaded` are held out, or for None every row, which
        is then a training prompt too. If the configuration needs answers, rows without one are dropped.
        """
        super().__init__(config)
        data, needs_answers = config.data, config.needs_answers
        self._columns = columns = Columns(loaded.table, data, needs_answers)
        self._held_columns = columns
        rows = _chosen("task.name", columns, data, measure)
        if held_out is None:
            self._rows, self._held_rows = _split(columns, rows, evaluation_size)
        else:
            self._held_columns = Columns(held_out.table, data, needs_answers)
            self._held_rows = _chosen("task.data.evaluation_split", self._held_columns, data, measure)
            self._rows = _without(columns, rows, self._held_columns, self._held_rows)
        _release()
        self._words = [
            "table 3", loaded.digest, held_out.digest if held_out else "", self.match_name,
            columns.asked_in, columns.answered_in,
        ]  # fmt: skip
        self._count()

    def _count(self) -> None:
        self.num_prompts = len(self._rows)
        self.num_evaluation_prompts = len(self._held_rows)
        chosen = (hashlib.blake2b(rows.tobytes()).hexdigest() for rows in (self._rows, self._held_rows))
        self.digest: Digest = bytes_digest(repr([*self._words, *chosen]).encode())

    def held_out_questions(self) -> Iterable[str]:
        found: list[str] = self._held_columns.questions().take(pa.array(self._held_rows)).to_pylist()
        return found

    def without(self, questions: Collection[str]) -> ArrowTask:
        every = self._columns.questions()
        is_out = _is_in(every, pa.array(sorted(questions)).cast(every.type))
        left = copy.copy(self)
        left._rows = self._rows[~is_out[self._rows]]
        left._count()
        del every
        _release()
        return left

    def prompt(self, index: int) -> Prompt:
        return self._columns.prompt(int(self._rows[index]), index=index)

    def evaluation_prompt(self, index: int) -> Prompt:
        return self._held_columns.prompt(int(self._held_rows[index]), index=index)


def _chosen(key: str, columns: Columns, config: DataConfig, measure: Measure | None) -> Rows:
    flaws, kept = columns.flaws(), columns.kept(config)
    flawed = np.logical_or.reduce(list(flaws.values())) & kept
    most = ""
    if bad := int(flawed.sum()):
        counts = {flaw: int((mask & kept).sum()) for flaw, mask in flaws.items()}
        flaw = max(counts, key=lambda flaw: counts[flaw])
        most = f"{counts[flaw]} {flaw}"
        _LOG.warning(
            "%s: %d rows without a prompt or an answer are left out, the first is row %d: %s",
            key, bad, int(flawed.argmax()), most,
        )  # fmt: skip
    rows: Rows = np.flatnonzero(kept & ~flawed)
    if config.max_prompt_tokens:

        def prompt_at(position: int) -> Prompt:
            return columns.prompt(int(rows[position]), index=0)

        rows = rows[short_prompts(rows.size, prompt_at, most=config.max_prompt_tokens, measure=measure)]
    if not rows.size:
        problem = f"no prompt is left of {columns.num_rows} rows" + (f": {most}" if most else "")
        raise ConfigError(key, problem, action="look at [task.data]")
    return rows


def _split(columns: Columns, rows: Rows, size: int | None) -> tuple[Rows, Rows]:
    """Hold out `size` different prompts, at most half, with all their rows."""
    if size is None:
        return rows, rows
    texts = _texts_of(columns, rows)
    different = texts.unique()
    count = min(size, len(different) // 2)
    log_held_out(count, wanted=size, different=len(different))
    if not count:
        problem = f"{len(different)} different prompts; at least 2 are needed"
        raise ConfigError("task.name", problem, action="add prompts, or name task.data.evaluation_split")
    pieces = (different[first : first + _AT_ONCE].to_pylist() for first in range(0, len(different), _AT_ONCE))
    every = itertools.chain.from_iterable(pieces)
    smallest = heapq.nsmallest(count, every, key=lambda text: hashlib.blake2b(text.encode()).digest())
    is_held = _is_in(texts, pa.array(smallest).cast(texts.type))
    return rows[~is_held], rows[is_held]


def _without(columns: Columns, rows: Rows, held_columns: Columns, held_rows: Rows) -> Rows:
    """Rows whose prompt is not held out; public datasets repeat some tests."""
    shared = _is_in(_texts_of(columns, rows), _texts_of(held_columns, held_rows).unique())
    if shared.all():
        raise ConfigError("task.data.evaluation_split", "every prompt of task.name is held out: name another split")
    if shared.any():
        _LOG.warning("task.name: %d prompts are also held out, and not trained on", int(shared.sum()))
    return rows[~shared]


def _texts_of(columns: Columns, rows: Rows) -> Any:
    texts = columns.texts()
    return texts if rows.size == columns.num_rows else texts.take(pa.array(rows))


def _release() -> None:
    """Release memory of column passes, which the allocator would keep."""
    pa.default_memory_pool().release_unused()


def _is_in(texts: Any, wanted: Any) -> npt.NDArray[np.bool_]:
    found = pc.is_in(texts, value_set=wanted)
    return np.asarray(found.to_numpy(), np.bool_)


Mask = npt.NDArray[np.bool_]


class Columns:
    """Prompts and answers of a table."""

    def __init__(self, table: Any, config: DataConfig, needs_answers: bool) -> None:
        """Check a pyarrow.Table's types; with `needs_answers` the answer column must exist."""
        self.num_rows: int = table.num_rows
        self._table = table
        if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
            problem = f"there are {table.column_names.count(twice[0])} columns {twice[0]}"
            raise ConfigError("task.name", problem, action="rename or drop all but one of them")
        self.asked_in = config.messages or config.prompt
        needs_messages = bool(config.messages)
        if self.asked_in == PROMPT not in table.column_names and MESSAGES in table.column_names:
            self.asked_in, needs_messages = MESSAGES, True
        key = "task.data.messages" if needs_messages else "task.data.prompt"
        self._prompts = _column(table, key, self.asked_in)
        kind = self._prompts.type
        self._has_messages = _is_messages(kind)
        if not self._has_messages and needs_messages:
            raise ConfigError(
                key,
                f"column {self.asked_in} is {kind}, not a list of tables with role and content",
                action="name a column of messages, or set task.data.prompt to a column of text",
            )
        if not self._has_messages and not _is_text(kind):
            raise ConfigError(key, f"column {self.asked_in} is {kind}, neither text nor messages", action=_OTHER)
        self.answered_in = config.answer
        if not needs_answers and config.answer == ANSWER not in table.column_names:
            self.answered_in = ""
        if needs_answers and not config.answer:
            raise ConfigError("task.data.answer", "is empty, but the reward compares with an answer; name a column")
        self._answers = _column(table, "task.data.answer", self.answered_in) if self.answered_in else None
        kind = None if self._answers is None else self._answers.type
        if kind is not None and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            problem = f"column {config.answer} is {kind}, no answer"
            raise ConfigError("task.data.answer", problem, action="make it a column of text, or of numbers")

    def flaws(self) -> dict[str, Mask]:
        """Rows that are no prompts, by flaw; messages end with the user's."""
        if self._has_messages:
            flaws = self._flaws_of_messages()
        else:
            flaws = {f"have no text in {self.asked_in}": ~_written(self._prompts)}
        if self._answers is not None:
            flaws[f"have no answer in {self.answered_in}"] = ~_written(self._answers)
        return flaws

    def texts(self) -> Any:
        """Text that identifies a prompt: own text, or messages' roles and contents."""
        if not self._has_messages:
            return self._prompts.cast(pa.large_string())
        return self._joined(frozenset())

    def questions(self) -> Any:
        """task.question_of of each row."""
        if self._has_messages:
            return self._joined(frozenset(SYSTEM_ROLES))
        text = pa.large_string()
        return pc.binary_join_element_wise(pa.scalar("user", text), self.texts(), pa.scalar("\x1f", text))

    def _joined(self, without: frozenset[str]) -> Any:
        """Roles and contents of the messages of each row, without some roles."""
        text = pa.large_string()
        joined = []
        for chunk in self._lists():
            roles, contents = (chunk.values.field(name).cast(text) for name in ("role", "content"))
            lines = pc.binary_join_element_wise(roles, contents, pa.scalar("\x1f", text))
            offsets = chunk.offsets
            if without:
                stays = ~_mask(pc.is_in(roles, value_set=pa.array(sorted(without), text)))
                lines = lines.filter(pa.array(stays))
                before = np.concatenate(([0], np.cumsum(stays)))
                offsets = pa.array(before[offsets.to_numpy()], pa.int64())
            lists = pa.LargeListArray.from_arrays(offsets, lines)
            joined.append(pc.if_else(pc.is_valid(chunk), pc.binary_join(lists, pa.scalar(BETWEEN, text)), None))
        return pa.chunked_array(joined, text)

    def prompt(self, row: int, *, index: int) -> Prompt:
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
        if value is not None and (short := _SHORT_FLOATS.get(self._answers.type)):
            # With the digits of its own type.
            value = float(str(short(value)))
        return answer_text(value)

    def kept(self, config: DataConfig) -> Mask:
        """Rows that `where`, `at_least`, `at_most` keep; raises ConfigError for wrong columns."""
        mask = np.ones(self.num_rows, np.bool_)
        for name, wanted in config.where.items():
            column = _column(self._table, f"task.data.where.{name}", name)
            values = list(wanted) if isinstance(wanted, tuple) else [wanted]
            if kind := _kind_of(column.type):
                refuse_other_kinds(name, values, [kind], f"column {name} is {column.type}")
            try:
                allowed = _allowed(values, column.type)
            except pa.ArrowException as error:
                problem = f"{values} are not values of a column of {column.type}"
                raise ConfigError(
                    f"task.data.where.{name}", problem, action="give values of the column's type"
                ) from error
            mask &= _mask(pc.is_in(column, value_set=allowed, skip_nulls=True))
        for kind, bounds, compare in (
            ("at_least", config.at_least, pc.greater_equal),
            ("at_most", config.at_most, pc.less_equal),
        ):
            for name, bound in bounds.items():
                key = f"task.data.{kind}.{name}"
                column = _column(self._table, key, name)
                if _kind_of(column.type) != "a number":
                    raise ConfigError(
                        key,
                        f"column {name} is {column.type}, not numbers",
                        action="name a column of numbers, or use task.data.where",
                    )
                # Safe casts refuse integers beyond 2^53.
                mask &= _mask(pc.fill_null(compare(column.cast(pa.float64(), safe=False), bound), False))
        return mask

    def _lists(self) -> list[Any]:
        """Chunks of messages as lists with 64-bit offsets from 0."""
        kind = self._prompts.type
        wide = self._prompts.cast(pa.large_list(kind.value_type))
        # Offsets of a slice start elsewhere; offsets of a copy start at 0.
        return [chunk.take(pa.array(np.arange(len(chunk)))) for chunk in wide.chunks or [pa.array([], wide.type)]]

    def _flaws_of_messages(self) -> dict[str, Mask]:
        chunks = [_flaws_of(chunk) for chunk in self._lists()]
        return {flaw: np.concatenate([each[flaw] for each in chunks]) for flaw in chunks[0]}


def _flaws_of(chunk: Any) -> dict[str, Mask]:
    """Lists of messages that are no prompts, by flaw."""
    offsets = chunk.offsets.to_numpy().astype(np.int64)
    values = chunk.values
    roles, contents = values.field("role").cast(pa.string()), values.field("content")

    def any_of(messages: Mask) -> Mask:
        # Cumulative counts; a difference is the count of a row.
        counts = np.concatenate(([0], np.cumsum(messages)))
        has: Mask = counts[offsets[1:]] != counts[offsets[:-1]]
        return has

    calls = np.zeros(len(values), np.bool_)
    if values.type.get_field_index("tool_calls") >= 0:
        # A prompt does not show them.
        calls = _filled(values.field("tool_calls"))
    is_user = _mask(pc.fill_null(pc.equal(roles, "user"), False)) & _written(contents)
    is_empty = offsets[1:] == offsets[:-1]
    ends = is_user[np.maximum(offsets[1:] - 1, 0)] if is_user.size else is_empty
    return {
        "have no messages": is_empty,
        "do not end with a message of the user": ~ends & ~is_empty,
        f"have another role than {', '.join(ROLES)}": any_of(~_mask(pc.is_in(roles, value_set=pa.array(ROLES)))),
        "have a message without content": any_of(~_mask(pc.is_valid(contents))),
        "have tool calls": any_of(calls),
    }


class _Row(Mapping[str, Any]):
    """Columns of a row except the prompt, read on access."""

    def __init__(self, table: Any, row: int, *, without: str) -> None:
        self._table, self._row, self._without = table, row, without

    def __getitem__(self, name: str) -> Any:
        if name == self._without:
            raise KeyError(name)
        return json_value(self._table.column(name)[self._row].as_py())

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table.column_names if name != self._without)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_OTHER = "name the column of the prompt's text, or task.data.messages"


def _column(table: Any, key: str, name: str) -> Any:
    """A column by name, or by a path (`reward_model.ground_truth`) into structs."""
    first, *rest = [name] if name in table.column_names else name.split(".")
    if first not in table.column_names:
        raise ConfigError(
            key,
            f"there is no column {name}; there are {', '.join(table.column_names)}"[:500],
            action="name one of these columns",
        )
    column = table.column(first)
    for part in rest:
        fields = [field.name for field in column.type] if str(column.type).startswith("struct") else []
        if part not in fields:
            raise ConfigError(
                key,
                f"there is no {part} of {name}; there are {', '.join(fields) or 'no fields'}"[:500],
                action="name one of these fields",
            )
        column = pc.struct_field(column, part)
    return column if (plain := _plain(column.type)) == column.type else column.cast(plain)


_LISTS = pa.ListType | pa.LargeListType | pa.FixedSizeListType | pa.ListViewType | pa.LargeListViewType
_SHORT_FLOATS = {pa.float16(): np.float16, pa.float32(): np.float32}


def _plain(kind: Any) -> Any:
    """Type for the same values without views, codes and fixed lists."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if isinstance(kind, pa.ListType | pa.LargeListType) and _plain(kind.value_type) == kind.value_type:
        return kind
    if isinstance(kind, _LISTS):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return kind


def _kind_of(kind: Any) -> str:
    """`cells.kind_of` of a column's cells; empty for other types."""
    if pa.types.is_boolean(kind):
        return "a bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "a number"
    return "text" if _is_text(kind) else ""


def _allowed(values: list[Any], kind: Any) -> Any:
    """Values as cells of a type, without numbers that it cannot hold."""
    if _kind_of(kind) != "a number":
        return pa.array(values).cast(kind)
    cells = []
    for value in values:
        with suppress(pa.ArrowInvalid):
            cells.append(pa.scalar(value).cast(kind).as_py())
    return pa.array(cells, kind)


def _written(column: Any) -> Mask:
    """Cells that are not null, NaN, blank, nor hold only such."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        return np.concatenate([np.zeros(0, np.bool_), *map(_written, column.chunks)])
    if _is_text(kind):
        length = pc.binary_length(pc.utf8_trim_whitespace(column.cast(pa.large_string())))
        return _mask(pc.fill_null(pc.greater(length, 0), False))
    if pa.types.is_floating(kind):
        return _mask(pc.fill_null(pc.is_finite(column.cast(pa.float64())), False))
    mask = np.zeros(len(column), np.bool_)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        parents = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        mask[parents[_written(pc.list_flatten(column))]] = True
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            mask |= _written(pc.struct_field(column, [number]))
    else:
        mask = _mask(pc.is_valid(column))
    return mask


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_messages(kind: Any) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return all(name in fields and _is_text(fields[name]) for name in ("role", "content"))


def _filled(values: Any) -> Mask:
    """Cells that are neither null nor empty."""
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _mask(pc.fill_null(pc.greater(pc.list_value_length(values), 0), False))
    if _is_text(kind):
        return _mask(pc.fill_null(pc.greater(pc.binary_length(values), 0), False))
    return _mask(pc.is_valid(values))


def _mask(values: Any) -> Mask:
    if hasattr(values, "combine_chunks"):
        values = values.combine_chunks()
    mask: Mask = np.asarray(values.to_numpy(zero_copy_only=False), np.bool_)
    return mask
