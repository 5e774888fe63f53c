"""Rows of every file as prompts: columns, filters, answers, flaws."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.source_config import ANSWER, MESSAGES, PROMPT, DataConfig
from heterorl.common.tasks.sources.cells import ABSENT, answer_text, cell_of, json_value, kind_of
from heterorl.common.tasks.sources.json_lines import NoText
from heterorl.common.tasks.task import ROLES, Message, Prompt

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
        columns = _Others(row, without=name)
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
            raise RowProblem(f"{name} is null, blank or no finite number, and no answer", action=_UNANSWERED)
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
        problem = f"there is no {name}; there are {', '.join(map(str, row)) or 'no fields'}"
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
        raise RowProblem("the last message is not the user's")
    return tuple(messages)


class _Others(Mapping[str, Any]):
    """Cells of a row except the prompt, as JSON holds them."""

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
