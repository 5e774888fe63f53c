"""A file of one JSON object a line with the fields `prompt` and `answer`, or `messages` and `answer`.

Held out are the lines of a second file, or else the prompts whose text has the smallest digests: a prompt that occurs
twice is on one side of the split, and adding lines moves few of the others.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.matching import Matcher
from heterorl.common.tasks.messages import question_of, read_messages
from heterorl.common.tasks.sources.config import DataConfig
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line."""

    text: str
    answer: str
    messages: tuple[Message, ...] = ()

    @property
    def asked(self) -> str:
        """What tells prompts apart."""
        if not self.messages:
            return self.text
        return "\n".join(f"{message.role}\x1f{message.content}" for message in self.messages)

    def words(self) -> list[object]:
        """What the digest counts."""
        turns = [[message.role, message.content] for message in self.messages]
        return [self.text, self.answer, *([turns] if turns else [])]

    def prompt(self, index: int) -> Prompt:
        """The prompt under a position."""
        return Prompt(index=index, text=self.text, answer=self.answer, messages=self.messages)


class JsonlTask:
    """Implements heterorl.common.tasks.task.Task; see the module docstring for what is held out."""

    def __init__(
        self,
        *,
        path: Path,
        evaluation_path: Path | None,
        evaluation_size: int,
        matcher: Matcher,
        data: DataConfig,
    ) -> None:
        if evaluation_path is None:
            self._training, self._held_out = _split(path, _read("task.name", path, data), evaluation_size)
        else:
            self._training = _read("task.name", path, data)
            self._held_out = _read("task.evaluation_path", evaluation_path, data)
            _refuse_overlap(path, self._training, evaluation_path, self._held_out)
        self._matcher = matcher
        self.num_workers = matcher.num_workers
        self._count()

    def _count(self) -> None:
        self.num_prompts = len(self._training)
        self.num_evaluation_prompts = len(self._held_out)
        rows = [[row.words() for row in rows] for rows in (self._training, self._held_out)]
        self.digest: Digest = bytes_digest(json.dumps([self._matcher.name, *rows]).encode())

    def held_out_questions(self) -> Iterable[str]:
        """The questions of all held-out prompts."""
        return (question_of(row.prompt(0)) for row in self._held_out)

    def without(self, questions: Collection[str]) -> JsonlTask:
        """The same task with fewer training prompts; there may be none left."""
        left = copy.copy(self)
        left._training = [row for row in self._training if question_of(row.prompt(0)) not in questions]
        left._count()
        return left

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._training[index].prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._held_out[index].prompt(index)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 for a matching answer, else 0; mathematics that take too long to compare match nothing.

        Raises:
            RewardError: the verifier crashed or timed out.
        """
        return self._matcher.score(prompt, completion)

    def uncertain(self, prompt: Prompt, completion: str) -> tuple[str, ...]:
        """Parts, by name, of which another machine may give this completion another value without fault."""
        return self._matcher.uncertain(prompt, completion)

    def answer_problem(self, prompt: Prompt) -> str:
        """Why no completion of a prompt can be scored; empty where they can.

        Raises:
            RewardError: nothing is known.
        """
        return self._matcher.answer_problem(prompt)

    def close(self) -> None:
        """Kill the verifier's processes."""
        self._matcher.close()


def _split(path: Path, rows: list[Row], evaluation_size: int) -> tuple[list[Row], list[Row]]:
    """Hold out `evaluation_size` different prompts, at most half of them, with every line that repeats one."""
    ranked = sorted({row.asked for row in rows}, key=lambda text: hashlib.blake2b(text.encode()).digest())
    held_out = set(ranked[: min(evaluation_size, len(ranked) // 2)])
    if not held_out:
        problem = f"{path} has {len(ranked)} different prompts; at least 2 are needed"
        raise ConfigError("task.name", problem, action="add prompts, or name a file in task.evaluation_path")
    return [row for row in rows if row.asked not in held_out], [row for row in rows if row.asked in held_out]


def _refuse_overlap(path: Path, training: list[Row], evaluation_path: Path, held_out: list[Row]) -> None:
    for key, file, rows in (("task.name", path, training), ("task.evaluation_path", evaluation_path, held_out)):
        if not rows:
            raise ConfigError(key, f"{file} has no prompts")
    trained = {row.asked for row in training}
    shared = [row.asked for row in held_out if row.asked in trained]
    if shared:
        problem = f"{len(shared)} prompts of {evaluation_path} are also in {path}, the first is {shared[0][:80]!r}"
        raise ConfigError("task.evaluation_path", problem, action="remove them from one of the files")


def _read(key: str, path: Path, data: DataConfig) -> list[Row]:
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(key, f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    rows.append(_row(key, f"{path}, line {number}", line, data))
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror}") from error
    return rows


def _row(key: str, place: str, line: bytes, data: DataConfig) -> Row:
    name = data.messages or data.prompt
    try:
        entry = json.loads(line)
        prompt, answer = entry[name], entry[data.answer]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        example = f'{{"{name}": ..., "{data.answer}": ...}}'
        raise ConfigError(
            key, f"{place}: {error!r}", action=f"write {example}, or name the columns in [task.data]"
        ) from error
    if isinstance(answer, list | dict):
        # Tests of code, or rows of a table: written as columns of data sets are.
        answer = json.dumps(answer, ensure_ascii=False, sort_keys=True)
    # A bool is an int to Python, and no answer in a file.
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise ConfigError(key, f"{place}: {data.answer} must be text, a number, a list or an object")
    messages: tuple[Message, ...] = ()
    if data.messages:
        messages = read_messages(key, place, prompt)
        prompt = messages[-1].content
    elif not isinstance(prompt, str):
        raise ConfigError(key, f"{place}: {name} must be text", action="name a list of messages in task.data.messages")
    if not prompt:
        raise ConfigError(key, f"{place}: {name} is empty")
    row = Row(prompt, str(answer), messages)
    try:
        f"{row.asked}{row.answer}".encode()
    except UnicodeEncodeError as error:
        raise ConfigError(key, f"{place}: half a surrogate pair is no text") from error
    return row
