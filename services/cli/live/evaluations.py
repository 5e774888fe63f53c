"""A run's evaluations as its coordinator knows them: asked for, and shown as a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from heterorl.common.errors import RemoteError
from heterorl.common.evaluation.rows import HEADS, UNDER_WAY, evaluation_rows
from heterorl.common.types.evaluation import Evaluation

if TYPE_CHECKING:
    from heterorl.common.api import OperatorApi

PAGE = 1000
Known = MutableMapping[tuple[int, str], Evaluation]
"""Evaluations by version and set."""


async def read_evaluations(api: OperatorApi, known: Known) -> None:
    """Ask for what is new since the last time; a coordinator of an earlier release has none."""
    changing = [version for (version, _), found in known.items() if found.state in UNDER_WAY]
    after = min(changing, default=max((version for version, _ in known), default=0)) - 1
    for version, name in [key for key in known if key[0] > after]:
        # One that nobody had begun may be gone for a newer one.
        del known[version, name]
    with contextlib.suppress(RemoteError):
        while True:
            page = await api.list_evaluations(after_version=after, limit=PAGE)
            known.update({(found.version, found.task_set): found for found in page})
            if not page:
                return
            after = page[-1].version


def evaluation_tables(evaluations: Iterable[Evaluation]) -> tuple[Table, ...]:
    """A table of `evaluation_rows`; none where nothing is evaluated."""
    rows = evaluation_rows(evaluations)
    if not rows:
        return ()
    table = Table(*HEADS, title="evaluation")
    for row in rows:
        table.add_row(*map(Text, row))
    return (table,)
