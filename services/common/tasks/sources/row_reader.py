"""Rows as prompts: columns, filters, answers, flaws; rows of JSON lines."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.source_config import ANSWER, MESSAGES, PROMPT, DataConfig
from heterorl.common.tasks.task import ROLES, Measure, Message, Prompt

Row = Mapping[str, Any]
_LOG = logging.getLogger(__name__)


class Rows(Protocol):
    """Rows of files by number; some numbers may have none."""

    @property
    def digest(self) -> str:
        """Digest of the files."""

    @property
    def is_strict(self) -> bool:
        """Whether a row without prompt or answer is an error."""

    def __iter__(self) -> Iterator[tuple[int, Row]]: ...

    def __getitem__(self, number: int) -> Row: ...

    def place(self, number: int) -> str:
        """Words for a row in errors."""


class RowProblem(Exception):
    """Why a row is no prompt; `key` names an unfit column."""

    def __init__(self, problem: str, *, key: str = "", action: str = "correct the row or remove it") -> None:
        super().__init__(problem)
        self.key, self.action = key, action


class RowReader:
    """Reads rows by `[task.data]`, and counts those left out."""

    def __init__(self, data: DataConfig, *, needs_answers: bool) -> None:
        if needs_answers and not data.answer:
            raise ConfigError("task.data.answer", "is empty, but the reward compares with an answer; name a column")
        self._data = data
        # Without either, the first row decides for all.
        self._has_answers = True if needs_answers or data.answer != ANSWER else None
        self._kinds: dict[str, set[str]] = {}
        self.num_rows = 0
        self.flaws: Counter[str] = Counter()

    def read(self, key: str, rows: Rows) -> Iterator[Prompt]:
        """Prompts of rows that filters keep; their index is the row's number.
        Raises ConfigError if a column is absent or of another kind, or a strict row has a flaw."""
        first = ""
        for number, row in rows:
            self.num_rows += 1
            try:
                if self._keeps(row):
                    yield self.prompt(row, index=number)
            except RowProblem as error:
                if error.key or rows.is_strict:
                    problem = f"{rows.place(number)}: {error}"[:500]
                    raise ConfigError(error.key or key, problem, action=error.action) from None
                first = first or rows.place(number)
                self.flaws[str(error)] += 1
        for filtered, kinds in self._kinds.items():
            which, _, name = filtered.partition(".")
            if not kinds:
                raise ConfigError(f"task.data.{filtered}", f"{name} is null in each row", action="name another column")
            wanted = _listed(self._data.where[name]) if which == "where" else ()
            if other := [value for value in wanted if kind_of(value) not in kinds]:
                problem = f"{name} is {' or '.join(sorted(kinds))}, and {other[0]!r} is {kind_of(other[0])}"[:300]
                raise ConfigError(f"task.data.where.{name}", problem, action="give values of the column's kind")
        if first:
            _LOG.warning(
                "%s: %d rows without a prompt or an answer are left out, the first is %s; %s",
                key, self.flaws.total(), first, self.commonest,
            )  # fmt: skip

    @property
    def commonest(self) -> str:
        """The commonest flaw of rows that are left out, and their number."""
        return "".join(f"{count} times: {flaw}" for flaw, count in self.flaws.most_common(1))

    def prompt(self, row: Row, *, index: int) -> Prompt:
        """A row's prompt; raises RowProblem."""
        if isinstance(row, NoText):
            raise RowProblem("half a surrogate pair is not text")
        data = self._data
        name, needs_messages = data.messages or data.prompt, bool(data.messages)
        if name == PROMPT not in row and MESSAGES in row:
            name, needs_messages = MESSAGES, True
        asked = _cell("messages" if needs_messages else "prompt", name, row)
        messages: tuple[Message, ...] = ()
        if isinstance(asked, list):
            messages = _messages_of(asked)
            asked = messages[-1].content
        elif needs_messages and asked is not None:
            action = "name a column of messages, or set task.data.prompt to a column of text"
            raise RowProblem(f"{name} is no list of messages", key="task.data.messages", action=action)
        elif not isinstance(asked, str | None):
            problem = f"{name} is neither text nor a list of messages"
            raise RowProblem(problem, key="task.data.prompt", action="name the column of the prompt")
        if asked is None or not asked.strip():
            raise RowProblem(f"{name} is empty")
        columns = _Others(row, without=name if name in (PROMPT, MESSAGES) else "")
        return Prompt(index=index, text=asked, answer=self._answer(row), messages=messages, columns=columns)

    def _answer(self, row: Row) -> str:
        name = self._data.answer
        if not name:
            return ""
        value = cell_of(row, name)
        if self._has_answers is None:
            self._has_answers = value is not ABSENT
        if value is ABSENT and not self._has_answers:
            return ""
        if not self._has_answers:
            raise RowProblem(f"there is {name}, but rows before have none", key="task.data.answer", action=_UNANSWERED)
        value = _cell("answer", name, row)
        if isinstance(value, bytes):
            raise RowProblem(f"{name} is bytes, no answer", key="task.data.answer", action="name a column of text")
        if not (text := answer_text(value)):
            raise RowProblem(f"{name} is null, blank or no finite number", action=_UNANSWERED)
        return text

    def _keeps(self, row: Row) -> bool:
        """Whether `where`, `at_least` and `at_most` keep a row."""
        data = self._data
        is_kept = True
        for name, wanted in data.where.items():
            value = _cell("where", name, row)
            if isinstance(value, bytes):
                raise RowProblem(f"{name} is bytes", key=f"task.data.where.{name}", action="name a column of text")
            value = float(value) if isinstance(value, Decimal) else value
            kind = kind_of(json_value(value))
            self._kinds.setdefault(f"where.{name}", set()).update([kind] if value is not None else [])
            # True is no 1.
            is_kept &= any(_is_value(each, value) and kind_of(each) == kind for each in _listed(wanted))
        for kind, bounds in (("at_least", data.at_least), ("at_most", data.at_most)):
            for name, bound in bounds.items() if is_kept else ():
                value = _cell(kind, name, row)
                self._kinds.setdefault(f"{kind}.{name}", set()).update([kind_of(value)] if value is not None else [])
                if isinstance(value, bool) or not isinstance(value, int | float | Decimal | None):
                    key, action = f"task.data.{kind}.{name}", "name a column of numbers, or use where"
                    raise RowProblem(f"{name} is {value!r}"[:300], key=key, action=action)
                is_kept &= value is not None and bool(value >= bound if kind == "at_least" else value <= bound)
        return is_kept


def _is_value(wanted: Any, cell: Any) -> bool:
    if not isinstance(cell, datetime):
        return bool(wanted == json_value(cell))
    try:
        return datetime.fromisoformat(str(wanted)) == cell
    except ValueError:
        return False


_UNANSWERED = 'give each row an answer; task.data.answer = "" reads no answers at all'


def _listed(wanted: Any) -> tuple[Any, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _cell(key: str, name: str, row: Row) -> Any:
    value = cell_of(row, name)
    if value is ABSENT:
        problem = f"has no {name}; its columns are: {', '.join(map(str, row)) or 'none'}"
        key = f"task.data.{key}.{name}" if key in ("where", "at_least", "at_most") else f"task.data.{key}"
        raise RowProblem(problem, key=key, action="name another column, or give the source its own [task.data]")
    return value


def _messages_of(entries: list[Any]) -> tuple[Message, ...]:
    """Messages with roles and texts, the user's last."""
    messages = []
    for entry in entries:
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if role not in ROLES:
            raise RowProblem(f"a message has another role than {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise RowProblem("a message has no text as content")
        if entry.get("tool_calls"):
            raise RowProblem(
                "a message has tool_calls, which a prompt does not show",
                action="write them into its content, or remove the row",
            )
        messages.append(Message(role=role, content=content))
    if not messages:
        raise RowProblem("there are no messages")
    if messages[-1].role != "user":
        raise RowProblem("the last message is not the user's: move the reply behind it to the answer column")
    return tuple(messages)


class _Others(Mapping[str, Any]):
    """Cells of a row, except one, as JSON holds them."""

    __slots__ = ("_row", "_without")

    def __init__(self, row: Row, *, without: str) -> None:
        self._row, self._without = row, without

    def __getitem__(self, name: str) -> Any:
        if name == self._without:
            raise KeyError(name)
        return json_value(self._row[name])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._row if name != self._without)

    def __len__(self) -> int:
        return sum(1 for _ in self)


ABSENT = object()
"""A cell that a row does not have."""
_LARGEST, _SMALLEST = 1e21, 1e-9
"""Numbers beyond are written with an exponent."""


def answer_text(value: Any) -> str:
    """Text of an answer; empty for null, NaN, blanks, lists of those.

    Of messages it is the last one's."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and {"role", "content"} <= value[-1].keys():
        # A chat, as in preference data.
        return answer_text(value[-1]["content"])
    if isinstance(value, list | dict):
        # Such as tests of code; an object keeps the row's order, which a completion is compared with.
        return json.dumps(value, ensure_ascii=False, default=str) if _is_written(value) else ""
    if isinstance(value, float | Decimal):
        return _number(value)
    return str(value)


def _is_written(value: Any) -> bool:
    """Whether a cell, or anything in it, has a text."""
    if isinstance(value, dict):
        return any(map(_is_written, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_written, value))
    return bool(answer_text(value))


def _number(value: float | Decimal) -> str:
    if not math.isfinite(value):
        return ""
    if not value:
        return "0"
    if isinstance(value, float) and not _SMALLEST <= abs(value) < _LARGEST:
        return repr(value)
    text = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell_of(row: Mapping[str, Any], name: str) -> Any:
    """A cell by name or path (`reward_model.ground_truth`); ABSENT where none is."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def kind_of(value: Any) -> str:
    """Kind of a cell or of a value in `where`."""
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "neither text, number nor bool"


def json_value(value: Any) -> Any:
    """A cell as JSON holds it, for other processes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def lengths_of(prompts: Sequence[Prompt], measure: Measure) -> npt.NDArray[np.int64]:
    """Tokens of each prompt; -1 where the template refuses it."""
    return np.array([-1 if length is None else length for length in measure(prompts)], np.int64)


MAX_LINE_BYTES = 1 << 20


class NoText(dict[str, Any]):
    """A row with half a surrogate pair, which a filter may drop."""


class JsonLines:
    """Lines of a file that are not blank; implements Rows."""

    is_strict = True

    def __init__(self, key: str, path: Path) -> None:
        """Read the file that `key` names; raises ConfigError if unreadable."""
        self._key, self._path = key, path
        self._lines: list[bytes] = []
        digest = blake3.blake3()
        try:
            with path.open("rb") as file:
                for line in iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""):
                    if len(line) > MAX_LINE_BYTES:
                        problem = f"{self.place(len(self._lines))}: longer than {MAX_LINE_BYTES} bytes"
                        raise ConfigError(key, problem, action="shorten the line or remove it")
                    self._lines.append(line)
                    digest.update(line)
        except OSError as error:
            problem = f"cannot read {path}: {error.strerror}"
            if not path.is_absolute():
                problem += f"; the path is relative to the working directory: {path.absolute()}"
            raise ConfigError(key, problem, action="check the path, and that this user can read the file") from error
        self.digest = digest.hexdigest()
        if not any(map(bytes.strip, self._lines)):
            raise ConfigError(key, f"{path} has no prompts", action="name a file with one JSON object a line")

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, self[number]) for number, line in enumerate(self._lines) if line.strip())

    def __getitem__(self, number: int) -> dict[str, Any]:
        line = self._lines[number]
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._refused(number, f" is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._refused(number, " is JSON, but no object")
        try:
            if b"\\u" in line or not line.isascii():
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return NoText(row)
        return row

    def _refused(self, number: int, problem: str) -> ConfigError:
        action = "write one JSON object a line as UTF-8, or remove the line"
        return ConfigError(self._key, f"{self.place(number)}{problem}"[:300], action=action)

    def place(self, number: int) -> str:
        return f"{self._path}, line {number + 1}"
