"""A task over rows of Arrow files: prompts by position, some held out, answers compared as in `jsonl:`.

Guarantees: memory holds one number a prompt, the rows stay mapped; no held-out prompt is trained on; equal digests mean
equal files, columns, filters and rows left over.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import itertools
import logging
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.matching import MatchedTask, Matcher
from heterorl.common.tasks.sources.columns import Columns
from heterorl.common.tasks.sources.config import DataConfig
from heterorl.common.tasks.sources.files import Loaded
from heterorl.common.tasks.sources.rows import say_held_out, short_ones
from heterorl.common.tasks.task import Measure, Prompt
from heterorl.common.types.common import Digest
from heterorl.common.wire.common import bytes_digest

Rows = npt.NDArray[np.int64]
_AT_ONCE = 4096
_LOG = logging.getLogger(__name__)


class TableTask(MatchedTask):
    """Implements heterorl.common.tasks.task.Task."""

    def __init__(
        self,
        loaded: Loaded,
        held_out: Loaded | None,
        *,
        config: DataConfig,
        evaluation_size: int,
        matcher: Matcher,
        measure: Measure | None,
        needs_answers: bool = True,
    ) -> None:
        """Choose the rows.

        Without `held_out` some of the rows are held out, `evaluation_size` different prompts. A row without an answer
        gets no reward where `needs_answers`.

        Raises:
            ConfigError: too few rows are left, or a column is not what it should be.
        """
        self._columns = columns = Columns(loaded.table, config, needs_answers)
        self._held_columns = columns
        rows = _chosen("task.name", columns, config, measure)
        if held_out is None:
            self._rows, self._held_rows = _split(columns, rows, evaluation_size)
        else:
            self._held_columns = Columns(held_out.table, config, needs_answers)
            self._held_rows = _chosen("task.data.evaluation_split", self._held_columns, config, measure)
            self._rows = _without(columns, rows, self._held_columns, self._held_rows)
        _release()
        super().__init__(matcher)
        self._words = [
            "table 2", loaded.digest, held_out.digest if held_out else "", matcher.name,
            columns.asked_in, columns.answered_in,
        ]  # fmt: skip
        self._count()

    def _count(self) -> None:
        self.num_prompts = len(self._rows)
        self.num_evaluation_prompts = len(self._held_rows)
        chosen = (hashlib.blake2b(rows.tobytes()).hexdigest() for rows in (self._rows, self._held_rows))
        self.digest: Digest = bytes_digest(repr([*self._words, *chosen]).encode())

    def held_out_questions(self) -> Iterable[str]:
        """The questions of all held-out prompts."""
        found: list[str] = self._held_columns.questions().take(_arrow(self._held_rows)).to_pylist()
        return found

    def without(self, questions: Collection[str]) -> TableTask:
        """The same task with fewer training prompts; there may be none left."""
        every = self._columns.questions()
        is_out = _is_in(every, _arrow(sorted(questions)).cast(every.type))
        left = copy.copy(self)
        left._rows = self._rows[~is_out[self._rows]]
        left._count()
        del every
        _release()
        return left

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        return self._columns.prompt(int(self._rows[index]), index=index)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        return self._held_columns.prompt(int(self._held_rows[index]), index=index)


def _chosen(key: str, columns: Columns, config: DataConfig, measure: Measure | None) -> Rows:
    sound, kept = columns.sound(), columns.kept(config)
    if bad := int((~sound & kept).sum()):
        first = int((~sound & kept).argmax())
        _LOG.warning("%s: %d rows without a prompt or an answer are left out, the first is row %d", key, bad, first)
    rows: Rows = np.flatnonzero(sound & kept)
    if config.max_prompt_tokens:

        def prompt_at(position: int) -> Prompt:
            return columns.prompt(int(rows[position]), index=0)

        rows = rows[short_ones(rows.size, prompt_at, most=config.max_prompt_tokens, measure=measure)]
    if not rows.size:
        raise ConfigError(key, f"no prompt is left of {columns.num_rows} rows", action="look at [task.data]")
    return rows


def _split(columns: Columns, rows: Rows, size: int) -> tuple[Rows, Rows]:
    """Hold out `size` different prompts, at most half of them, with every row that repeats one."""
    texts = _texts_of(columns, rows)
    different = texts.unique()
    count = min(size, len(different) // 2)
    say_held_out(count, wanted=size, different=len(different))
    if not count:
        problem = f"{len(different)} different prompts; at least 2 are needed"
        raise ConfigError("task.name", problem, action="add prompts, or name task.data.evaluation_split")
    pieces = (different[first : first + _AT_ONCE].to_pylist() for first in range(0, len(different), _AT_ONCE))
    every = itertools.chain.from_iterable(pieces)
    smallest = heapq.nsmallest(count, every, key=lambda text: hashlib.blake2b(text.encode()).digest())
    is_held = _is_in(texts, _arrow(smallest).cast(texts.type))
    return rows[~is_held], rows[is_held]


def _without(columns: Columns, rows: Rows, held_columns: Columns, held_rows: Rows) -> Rows:
    """Rows whose prompt is not held out; public data sets repeat some of their tests."""
    shared = _is_in(_texts_of(columns, rows), _texts_of(held_columns, held_rows).unique())
    if shared.all():
        raise ConfigError("task.data.evaluation_split", "every prompt of task.name is held out: name another split")
    if shared.any():
        _LOG.warning("task.name: %d prompts are also held out, and not trained on", int(shared.sum()))
    return rows[~shared]


def _texts_of(columns: Columns, rows: Rows) -> Any:
    texts = columns.texts()
    return texts if rows.size == columns.num_rows else texts.take(_arrow(rows))


def _release() -> None:
    """Give back what passes over whole columns took; the allocator would keep it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _is_in(texts: Any, wanted: Any) -> npt.NDArray[np.bool_]:
    import pyarrow.compute as pc

    found = pc.is_in(texts, value_set=wanted)
    return np.asarray(found.to_numpy(), np.bool_)


def _arrow(values: Any) -> Any:
    import pyarrow as pa

    return pa.array(values)
