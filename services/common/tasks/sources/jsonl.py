"""Dataset of JSON lines with `prompt` or `messages`, and perhaps `answer`.

Held out are the lines of a second file, or else the prompts with the smallest digests. By digest, repeats of a prompt
stay on one side of the split, and new lines move few others.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.answer_match import MatchedTask
from heterorl.common.tasks.source_config import ANSWER, MESSAGES, PROMPT, DataConfig, SourceConfig
from heterorl.common.tasks.sources.cells import (
    ABSENT,
    answer_text,
    cell_of,
    kind_of,
    log_held_out,
    refuse_other_kinds,
    short_prompts,
)
from heterorl.common.tasks.task import Measure, Message, Prompt, question_of, read_messages
from heterorl.common.types.common import Digest
from heterorl.common.wire.common_messages import bytes_digest

MAX_LINE_BYTES = 1 << 20


def _asked(row: Prompt) -> str:
    """Text that identifies a prompt."""
    if not row.messages:
        return row.text
    return "\n".join(f"{message.role}\x1f{message.content}" for message in row.messages)


def _words(row: Prompt) -> list[object]:
    """Content for the digest."""
    turns = [[message.role, message.content] for message in row.messages]
    return [row.text, row.answer, turns, row.columns]


class JsonlTask(MatchedTask):
    """Lines of a JSON file with a verifier; implements Task."""

    def __init__(
        self, path: Path, config: SourceConfig, *, evaluation_size: int | None, measure: Measure | None
    ) -> None:
        """Read the files.

        Without a file of held-out prompts, `evaluation_size` different prompts are held out, or for None every row,
        which is then a training prompt too. If the configuration needs answers, each row must have one.
        """
        super().__init__(config)
        data = config.data
        if data.evaluation_split:
            action = "name task.evaluation_path, or give the source its own [task.data]"
            raise ConfigError("task.data.evaluation_split", "files have no splits", action=action)

        def read(key: str, path: Path) -> list[Prompt]:
            return _short(key, path, _read(key, path, data, config.needs_answers), data.max_prompt_tokens, measure)

        if not config.evaluation_path:
            self._training, self._held_out = _split(path, read("task.name", path), evaluation_size)
        else:
            evaluation_path = Path(config.evaluation_path)
            self._training = read("task.name", path)
            self._held_out = read("task.evaluation_path", evaluation_path)
            _refuse_overlap(path, self._training, evaluation_path, self._held_out)
        self._count()

    def _count(self) -> None:
        self.num_prompts = len(self._training)
        self.num_evaluation_prompts = len(self._held_out)
        rows = [[_words(row) for row in rows] for rows in (self._training, self._held_out)]
        self.digest: Digest = bytes_digest(json.dumps([self.match_name, *rows]).encode())

    def held_out_questions(self) -> Iterable[str]:
        return (question_of(row) for row in self._held_out)

    def without(self, questions: Collection[str]) -> JsonlTask:
        left = copy.copy(self)
        left._training = [row for row in self._training if question_of(row) not in questions]
        left._count()
        return left

    def prompt(self, index: int) -> Prompt:
        return replace(self._training[index], index=index)

    def evaluation_prompt(self, index: int) -> Prompt:
        return replace(self._held_out[index], index=index)


def _split(path: Path, rows: list[Prompt], evaluation_size: int | None) -> tuple[list[Prompt], list[Prompt]]:
    """Hold out `evaluation_size` different prompts, at most half, with all their lines."""
    if evaluation_size is None:
        if not rows:
            raise ConfigError("task.name", f"{path} has no prompts", action="add lines with a prompt")
        return rows, rows
    ranked = sorted({_asked(row) for row in rows}, key=lambda text: hashlib.blake2b(text.encode()).digest())
    held_out = set(ranked[: min(evaluation_size, len(ranked) // 2)])
    log_held_out(len(held_out), wanted=evaluation_size, different=len(ranked))
    if not held_out:
        problem = f"{path} has {len(ranked)} different prompts; at least 2 are needed"
        raise ConfigError("task.name", problem, action="add prompts, or name a file in task.evaluation_path")
    return [row for row in rows if _asked(row) not in held_out], [row for row in rows if _asked(row) in held_out]


def _refuse_overlap(path: Path, training: list[Prompt], evaluation_path: Path, held_out: list[Prompt]) -> None:
    for key, file, rows in (("task.name", path, training), ("task.evaluation_path", evaluation_path, held_out)):
        if not rows:
            raise ConfigError(key, f"{file} has no prompts", action="name a file with one JSON object a line")
    trained = {_asked(row) for row in training}
    shared = [_asked(row) for row in held_out if _asked(row) in trained]
    if shared:
        problem = f"{len(shared)} prompts of {evaluation_path} are also in {path}, the first is {shared[0][:80]!r}"
        raise ConfigError("task.evaluation_path", problem, action="remove them from one of the files")


def _short(key: str, path: Path, rows: list[Prompt], most: int, measure: Measure | None) -> list[Prompt]:
    """Rows whose prompts have at most `most` tokens; 0 is no bound."""
    if not (most and rows):
        return rows
    keep = short_prompts(len(rows), rows.__getitem__, most=most, measure=measure)
    if not keep.any():
        raise ConfigError(key, f"no prompt of {path} is left", action="raise task.data.max_prompt_tokens")
    return [row for row, stays in zip(rows, keep, strict=True) if stays]


def _read(key: str, path: Path, data: DataConfig, needs_answers: bool) -> list[Prompt]:
    if needs_answers and not data.answer:
        raise ConfigError("task.data.answer", "is empty, but the reward compares with an answer; name a column")
    # Rewards without answers allow rows without any; some rows without one, or a configured column, are an error.
    has_answers = needs_answers or data.answer != ANSWER
    rows: list[Prompt] = []
    num_read, lacking = 0, ""
    kinds: dict[str, set[str]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        key,
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes",
                        action="shorten the line or remove it",
                    )
                if line.strip():
                    place = f"{path}, line {number}"
                    entry = _entry(key, place, line, data)
                    num_read += 1
                    if not _is_kept(place, entry, data, kinds):
                        continue
                    row = _row(key, place, entry, data)
                    lacking = lacking or ("" if row.answer else place)
                    has_answers = has_answers or bool(row.answer)
                    if lacking and has_answers and data.answer:
                        problem = f"{lacking}: there is no {data.answer}"
                        action = f"write {_example(data)}, or name the columns in [task.data]"
                        raise ConfigError(key, problem, action=action)
                    rows.append(row)
    except OSError as error:
        raise ConfigError(
            key, f"cannot read {path}: {error.strerror}", action="check the path, and that this user can read the file"
        ) from error
    for name, found in kinds.items():
        cells = f"{name} of {path} is {' or '.join(sorted(found))}"
        refuse_other_kinds(name, _listed(data.where[name]), found, cells)
    if num_read and not rows:
        problem = f"no row of {path} is left of {num_read}"
        raise ConfigError(key, problem, action="check task.data.where, at_least and at_most")
    return rows


def _is_kept(place: str, entry: Mapping[str, Any], data: DataConfig, kinds: dict[str, set[str]]) -> bool:
    """Whether `where`, `at_least` and `at_most` keep a row.

    Adds the kinds of its cells to `kinds`. Raises ConfigError for wrong columns."""

    def cell(kind: str, name: str) -> Any:
        value = cell_of(entry, name)
        if value is ABSENT:
            problem = f"{place}: there is no {name}; there are {', '.join(map(str, entry)) or 'no fields'}"
            action = "name another column, or give the source its own [task.data]"
            raise ConfigError(f"task.data.{kind}.{name}", problem[:500], action=action)
        return value

    asked = {name: cell("where", name) for name in data.where}
    for name, value in asked.items():
        if value is not None:
            kinds.setdefault(name, set()).add(kind_of(value))
    for name, wanted in data.where.items():
        value = asked[name]
        # True is no 1.
        if not any(each == value and kind_of(each) == kind_of(value) for each in _listed(wanted)):
            return False
    for kind, bounds in (("at_least", data.at_least), ("at_most", data.at_most)):
        for name, bound in bounds.items():
            value = cell(kind, name)
            if value is None:
                return False
            if isinstance(value, bool) or not isinstance(value, int | float):
                problem = f"{place}: {name} is {value!r}"[:300]
                raise ConfigError(f"task.data.{kind}.{name}", problem, action="name a column of numbers, or use where")
            if not (value >= bound if kind == "at_least" else value <= bound):
                return False
    return True


def _listed(wanted: Any) -> tuple[Any, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _entry(key: str, place: str, line: bytes, data: DataConfig) -> dict[str, Any]:
    action = f"write {_example(data)}, or name the columns in [task.data]"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, f"{place} is not JSON: {error}"[:300], action=action) from error
    if not isinstance(entry, dict):
        raise ConfigError(key, f"{place} is JSON, but no object", action=action)
    return entry


def _row(key: str, place: str, entry: dict[str, Any], data: DataConfig) -> Prompt:
    action = f"write {_example(data)}, or name the columns in [task.data]"
    name, needs_messages = data.messages or data.prompt, bool(data.messages)
    if name == PROMPT not in entry and MESSAGES in entry:
        name, needs_messages = MESSAGES, True
    prompt = cell_of(entry, name)
    if prompt is ABSENT:
        problem = f"{place}: there is no {name}; there are {', '.join(map(str, entry)) or 'no fields'}"
        raise ConfigError(key, problem[:500], action=action)
    entry.pop(name, None)
    messages: tuple[Message, ...] = ()
    if needs_messages or isinstance(prompt, list):
        messages = read_messages(key, place, prompt)
        prompt = messages[-1].content
    elif not isinstance(prompt, str):
        raise ConfigError(
            key,
            f"{place}: {name} is neither text nor a list of messages",
            action="change the field, or name another one in task.data",
        )
    if not prompt.strip():
        raise ConfigError(key, f"{place}: {name} is empty", action="fill the field or remove the line")
    answer = _answer(key, place, entry, data)
    # `JsonlTask.prompt` numbers it.
    row = Prompt(index=0, text=prompt, answer=answer, messages=messages, columns=entry)
    try:
        json.dumps([_asked(row), row.answer, row.columns], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            key,
            f"{place}: half a surrogate pair is not text",
            action="write the file as UTF-8 again, or remove the line",
        ) from error
    return row


def _answer(key: str, place: str, entry: Mapping[str, Any], data: DataConfig) -> str:
    """Answer of a line; empty where it has none."""
    value = cell_of(entry, data.answer) if data.answer else ABSENT
    if value is ABSENT:
        return ""
    if not (text := answer_text(value)):
        problem = f"{place}: {data.answer} is {json.dumps(value)[:40]}, and no answer"
        raise ConfigError(key, problem, action='take the line out; task.data.answer = "" reads no answers at all')
    return text


def _example(data: DataConfig) -> str:
    answer = f', "{data.answer}": ...' if data.answer else ""
    return f'{{"{data.messages or data.prompt}": ...{answer}}}'
