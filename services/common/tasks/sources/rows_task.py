"""Dataset over rows of files: prompts by position, some held out.

Held out are rows of a second file or split, or else the prompts with the smallest digests. By digest, repeats of a
prompt stay on one side of the split, and new rows move few others. No held-out prompt is trained on.

Memory holds three numbers a prompt besides the rows. Equal digests mean equal files, columns and chosen rows.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.answer_match import MatchedTask
from heterorl.common.tasks.source_config import SourceConfig
from heterorl.common.tasks.sources.row_reader import RowReader, Rows, cell_of, kind_of, lengths_of
from heterorl.common.tasks.task import BETWEEN, Measure, Prompt, Task, question_of
from heterorl.common.wire.common_messages import bytes_digest

Hashes = npt.NDArray[np.uint64]
_AT_ONCE = 256
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows that are prompts, with hashes of their texts."""

    rows: Rows
    reader: RowReader
    numbers: npt.NDArray[np.int64]
    texts: Hashes
    """Hashes of all messages of a prompt; the split of a file compares them."""
    questions: Hashes
    """Hashes of its messages but the system's; sources of a mixture compare them."""

    def only(self, mask: npt.NDArray[np.bool_]) -> Chosen:
        return replace(self, numbers=self.numbers[mask], texts=self.texts[mask], questions=self.questions[mask])

    def prompt(self, index: int) -> Prompt:
        return self.reader.prompt(self.rows[int(self.numbers[index])], index=index)

    @property
    def digest(self) -> tuple[str, str]:
        return self.rows.digest, hashlib.blake2b(self.numbers.tobytes()).hexdigest()


class RowsTask(MatchedTask, Task):
    """Rows with a verifier."""

    def __init__(
        self,
        rows: Rows,
        held_out: Rows | None,
        config: SourceConfig,
        *,
        evaluation_size: int | None,
        measure: Measure | None,
    ) -> None:
        """Choose the rows; raises ConfigError if too few, or columns are wrong.

        Without `held_out`, `evaluation_size` different prompts of `rows` are held out, or for None every row, which
        is then a training prompt too.
        """
        super().__init__(config)
        data = config.data
        self._column = data.answer
        self._words: list[Any] = ["rows 2", self.match_name, data.prompt, data.messages, data.answer]
        chosen = _chosen("task.name", rows, config, measure)
        if held_out is None:
            self.training, self.held_out = _split(chosen, evaluation_size)
        else:
            key = "task.data.evaluation_split" if data.evaluation_split else "task.evaluation_path"
            self.held_out = _chosen(key, held_out, config, measure)
            self.training = _without(key, chosen, self.held_out)
        self._count()
        _LOG.info(
            "task.name: %d prompts and %s, digest %.12s", self.num_prompts, self.held_out_words, self.digest,
        )  # fmt: skip

    @property
    def held_out_words(self) -> str:
        """Number of held-out rows, and of different prompts if some repeat."""
        different = np.unique(self.held_out.texts).size
        repeat = f" ({different} different)" if different < self.num_evaluation_prompts else ""
        return f"{self.num_evaluation_prompts} held out{repeat}"

    def _count(self) -> None:
        self.num_prompts = self.training.numbers.size
        self.num_evaluation_prompts = self.held_out.numbers.size
        words = [*self._words, self.training.digest, self.held_out.digest]
        self.digest = bytes_digest(repr(words).encode())

    def without(self, questions: Hashes) -> RowsTask:
        """This task without training prompts of these questions."""
        left = copy.copy(self)
        left.training = self.training.only(~np.isin(self.training.questions, questions))
        left._count()
        return left

    def _right(self, prompt: Prompt) -> tuple[str, ...]:
        value = cell_of(prompt.columns, self._column)
        is_pair = isinstance(value, list) and list(map(kind_of, value)) == ["a number"] * 2
        if is_pair and value[0] < value[1]:
            # To mathematics the text of the list is an interval.
            return f"({prompt.answer[1:-1]})", prompt.answer
        return super()._right(prompt)

    def prompt(self, index: int) -> Prompt:
        return self.training.prompt(index)

    def evaluation_prompt(self, index: int) -> Prompt:
        return self.held_out.prompt(index)


def _chosen(key: str, rows: Rows, config: SourceConfig, measure: Measure | None) -> Chosen:
    data = config.data
    reader = RowReader(data, needs_answers=config.needs_answers)
    prompts = reader.read(key, rows)
    if data.max_prompt_tokens:
        if measure is None:
            problem = "counts tokens, and no tokenizer is here"
            raise ConfigError("task.data.max_prompt_tokens", problem, action="remove it")
        prompts = _short(prompts, data.max_prompt_tokens, measure)
    numbers, texts, questions = array("q"), bytearray(), bytearray()
    for prompt in prompts:
        numbers.append(prompt.index)
        # A text is the same prompt as one message of the user.
        turns = () if [each.role for each in prompt.messages] == ["user"] else prompt.messages
        every = BETWEEN.join(f"{each.role}\x1f{each.content}" for each in turns) or prompt.text
        for hashes, text in ((texts, every), (questions, question_of(prompt))):
            hashes += hashlib.blake2b(text.encode()).digest()[:8]
    if not numbers:
        problem = f"no prompt is left of {reader.num_rows} rows; {reader.commonest}".strip("; ")
        raise ConfigError(key, problem, action="look at [task.data]")
    return Chosen(
        rows=rows, reader=reader, numbers=np.array(numbers, np.int64), texts=_as_numbers(texts),
        questions=_as_numbers(questions),
    )  # fmt: skip


def _as_numbers(hashes: bytearray) -> Hashes:
    # In the order of their bytes.
    return np.frombuffer(hashes, ">u8").astype(np.uint64)


def _short(prompts: Iterator[Prompt], most: int, measure: Measure) -> Iterator[Prompt]:
    """Unrefused prompts within `most` tokens; logs the number of others."""
    num_read = num_long = num_refused = 0
    while some := list(islice(prompts, _AT_ONCE)):
        lengths = lengths_of(some, measure)
        num_read += len(some)
        num_refused += int((lengths < 0).sum())
        num_long += int((lengths > most).sum())
        yield from (prompt for prompt, length in zip(some, lengths, strict=True) if 0 <= length <= most)
    if num_long:
        _LOG.warning(
            "task.data.max_prompt_tokens: %d of %d prompts have more than %d tokens and are left out",
            num_long, num_read, most,
        )  # fmt: skip
    if num_refused:
        _LOG.warning("task.data: the template refuses %d of %d prompts, which are left out", num_refused, num_read)


def _split(chosen: Chosen, size: int | None) -> tuple[Chosen, Chosen]:
    """Hold out `size` different prompts, at most half, with all their rows."""
    if size is None:
        return chosen, chosen
    different = np.unique(chosen.texts)
    count = min(size, different.size // 2)
    if count < size:
        _LOG.info(
            "task.evaluation_size is %d, but %d of %d different prompts are held out, at most half",
            size, count, different.size,
        )  # fmt: skip
    if not count:
        problem = f"{different.size} different prompts; at least 2 are needed"
        raise ConfigError("task.name", problem, action="add prompts, or name held-out ones")
    is_held_out = chosen.texts < different[count]
    return chosen.only(~is_held_out), chosen.only(is_held_out)


def _without(key: str, chosen: Chosen, held_out: Chosen) -> Chosen:
    """Rows whose prompt is not held out; public datasets repeat some tests."""
    shared = np.isin(chosen.texts, held_out.texts)
    if shared.any() and chosen.rows.is_strict:
        first = held_out.rows.place(int(held_out.numbers[np.isin(held_out.texts, chosen.texts).argmax()]))
        problem = f"{int(shared.sum())} prompts of task.name are also held out, the first in {first}"
        raise ConfigError(key, problem, action="remove them from one of the files")
    if shared.all():
        raise ConfigError(key, "every prompt of task.name is held out", action="name other ones")
    if shared.any():
        _LOG.warning("task.name: %d prompts are also held out, and not trained on", int(shared.sum()))
    return chosen.only(~shared)
